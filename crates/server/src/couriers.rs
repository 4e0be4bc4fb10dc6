//! From a lane's configuration to the courier that carries its messages.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::couriers::exchange::System;
use postrider::couriers::http::{Http, HttpSettings};
use postrider::couriers::{Log, Noop};
use postrider::decide::HttpClasses;
use postrider::{Courier, Message, Outbox, Outcome};

use crate::failure::{Failure, Result};
use crate::output::Output;
use crate::parts::Parts;
use crate::secret::{self, Fresh};

/// Where the messages of a lane go.
#[derive(Clone, PartialEq)]
pub enum Destination {
    /// The URL and the headers' values as they were written, references and all.
    Http {
        url: String,
        timeout: Duration,
        headers: Vec<(String, String)>,
        statuses: HttpClasses,
        /// Its address is guarded as those of webhooks are.
        guard: bool,
    },
    Print {
        show_payload: bool,
    },
    Nowhere,
    /// Whoever subscribed.
    Webhooks,
    /// The broker of `[orders]`.
    Orders,
    /// The OpenMemory of `[memory]`.
    Memory,
}

impl std::fmt::Debug for Destination {
    /// Headers may be secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Destination {
    pub fn name(&self) -> &'static str {
        match self {
            Destination::Http { .. } => "http",
            Destination::Print { .. } => "log",
            Destination::Nowhere => "noop",
            Destination::Webhooks => "webhook",
            Destination::Orders => "broker",
            Destination::Memory => "openmemory",
        }
    }

    /// As it may be shown: where to, but not with which headers.
    pub fn shown(&self) -> serde_json::Value {
        match self {
            Destination::Http { url, timeout, headers, statuses, guard } => {
                let headers: serde_json::Map<String, serde_json::Value> =
                    headers.iter().map(|(name, _)| (name.clone(), "***".into())).collect();
                // A path or a query may hold a secret.
                let url = secret::resolve(url).unwrap_or_default();
                let origin = url::Url::parse(&url).map(|url| url.origin().ascii_serialization()).unwrap_or_default();
                serde_json::json!({ "kind": "http", "url": format!("{origin}/***"), "timeout_ms": timeout.as_millis() as u64, "headers": headers, "statuses": statuses.words(), "guard": guard })
            }
            other => serde_json::json!({ "kind": other.name() }),
        }
    }

    pub async fn courier(&self, outbox: &Outbox, parts: Option<&Parts>, output: Output) -> Result<Arc<dyn Courier>> {
        let opened = || parts.ok_or_else(|| Failure::failed("the parts of this outbox were not opened"));
        Ok(match self {
            Destination::Nowhere => Arc::new(Noop),
            Destination::Webhooks => Arc::new(opened()?.webhooks.courier()),
            Destination::Orders => Arc::new(opened()?.orders.courier()),
            Destination::Memory => {
                let memories = opened()?.memories.as_ref();
                let missing = || Failure::failed("the memory gateway of this outbox was not opened");
                Arc::new(memories.ok_or_else(missing)?.courier())
            }
            // With --json, standard output is for the one document.
            Destination::Print { show_payload } => {
                Arc::new(Log { show_payload: *show_payload, to_stderr: output.json })
            }
            Destination::Http { url, timeout, headers, statuses, guard } => {
                let store_id = outbox.store_id().await?;
                let resolver = if *guard { opened()?.webhooks.guard() } else { Arc::new(System) };
                let settings = HttpSettings {
                    timeout: *timeout,
                    statuses: statuses.clone(),
                    resolver,
                    ..HttpSettings::new(url, store_id)
                };
                Arc::new(Rereading::new(settings, headers).map_err(Failure::usage)?)
            }
        })
    }
}

/// Delivers by HTTP, with secrets as they are now: they are read again when told, and when the destination refuses us.
struct Rereading(Fresh<Http>);

impl Rereading {
    /// The URL and the headers as they were written, references and all.
    fn new(written: HttpSettings, headers: &[(String, String)]) -> Result<Self, String> {
        let (names, values): (Vec<String>, Vec<String>) = headers.iter().cloned().unzip();
        let texts = [vec![written.url.clone()], values].concat();
        let build = move |values: &[String]| {
            let headers: Vec<_> = names.iter().cloned().zip(values[1..].iter().cloned()).collect();
            Http::new(HttpSettings { url: values[0].clone(), headers, ..written.clone() }).map_err(|e| e.message)
        };
        Fresh::new(texts, build).map(Rereading)
    }
}

#[async_trait]
impl Courier for Rereading {
    fn name(&self) -> &str {
        "http"
    }

    async fn deliver(&self, message: &Message) -> Outcome {
        let http = self.0.get().await;
        let outcome = http.deliver(message).await;
        if !is_unauthorized(&outcome) {
            return outcome;
        }
        match self.0.refused(&http).await {
            // It took nothing from us before.
            Some(renewed) => renewed.deliver(message).await,
            None => outcome,
        }
    }
}

fn is_unauthorized(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Dead(fault) | Outcome::Retry { fault, .. } if ["HTTP_401", "HTTP_403"].contains(&&*fault.code))
}

/// Refuses what nothing could be delivered to, before anything starts.
pub fn check_http(
    url: &str,
    timeout: Duration,
    headers: &[(String, String)],
    statuses: &HttpClasses,
) -> postrider::Result<()> {
    let (headers, statuses) = (headers.to_vec(), statuses.clone());
    Http::new(HttpSettings { timeout, headers, statuses, ..HttpSettings::new(url, "any") }).map(drop)
}
