//! What goes on beside the calls: probing a service that is away, waking what waited for it, completing audits, taking
//! new rows into the index, and saying loudly what only a person can correct.

use std::sync::PoisonError;
use std::time::Duration;

use postrider::alerts::Alert;
use postrider::clock::{self, Tick};
use serde::Serialize;

use crate::Memories;
use crate::upstream::{Blame, Fault};

/// How often audits are completed and the index catches up.
const EVERY: Duration = Duration::from_secs(30);

/// Whether the memory service can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capability {
    /// `ok` or `failed`.
    pub status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Memories {
    /// Does all of it until told to stop.
    pub async fn tend(&self, stopped: impl Future<Output = ()>) {
        let mut stopped = std::pin::pin!(stopped);
        let mut last: Option<Tick> = None;
        loop {
            if last.is_none_or(|last| Tick::now().since(last) >= EVERY) {
                self.tidy().await;
                last = Some(Tick::now());
            }
            let pause = if self.0.breaker.is_closed() { EVERY } else { self.0.settings.probe };
            tokio::select! {
                () = &mut stopped => return,
                () = self.0.breaker.changed() => self.tell_of_breaker().await,
                () = tokio::time::sleep(pause.mul_f64(0.9 + clock::chance() / 5.0)) => {}
            }
            if self.0.breaker.is_open() && self.0.upstream.health().await.is_ok() {
                self.0.breaker.probed();
                self.wake_all().await;
            }
        }
    }

    async fn tidy(&self) {
        if let Err(error) = self.reconcile(true).await {
            tracing::warn!(%error, "audits could not be completed; it will be tried again");
        }
        if let Err(error) = self.catch_up(10).await {
            tracing::warn!(%error, "the index of memories could not catch up; it will be tried again");
        }
    }

    async fn wake_all(&self) {
        if let Err(error) = self.wake().await {
            tracing::warn!(%error, "memories that waited could not be woken; they come by themselves");
        }
    }

    async fn tell_of_breaker(&self) {
        let open = !self.0.breaker.is_closed();
        if !open {
            self.wake_all().await;
        }
        self.tell(open, "it does not answer; memories are queued until it does").await;
    }

    async fn tell(&self, trouble: bool, why: &str) {
        let Some(alerts) = &self.0.alerts else { return };
        let message = match trouble {
            true => format!("the capability openmemory failed: {why}"),
            false => "the capability openmemory is back".to_owned(),
        };
        let alert = Alert {
            kind: "capability_failed",
            subject: "openmemory".to_owned(),
            message,
            count: 1,
            details: serde_json::json!({ "capability": "openmemory" }),
        };
        if let Err(error) = alerts.tell(alert, trouble).await {
            tracing::warn!(%error, "an alert could not be written");
        }
    }

    /// Keeps what only a person can correct, and says it once; a call that was answered clears it.
    pub(crate) async fn note_trouble(&self, fault: Option<&Fault>) {
        let ours = match fault {
            Some(fault) if fault.blame == Blame::Ours => Some(format!("{} {}", fault.code, fault.message)),
            // It does not answer at all: nothing is known about the rest.
            Some(fault) if fault.blame == Blame::Service => return,
            _ => None,
        };
        let changed = {
            let mut trouble = self.0.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            let changed = trouble.is_some() != ours.is_some();
            trouble.clone_from(&ours);
            changed
        };
        match (changed, ours) {
            (false, _) => {}
            (true, Some(why)) => {
                tracing::error!(
                    why,
                    "OpenMemory cannot be used as it is configured; memories are queued until [memory] url and api_key are right"
                );
                self.tell(true, &format!("{why}; correct [memory] url or api_key")).await;
            }
            (true, None) => {
                tracing::info!("OpenMemory takes our calls again");
                self.wake_all().await;
                self.tell(false, "").await;
            }
        }
    }

    /// As this process knows it from its last calls.
    pub fn capability(&self) -> Capability {
        let failed = |detail: String| Capability { status: "failed", detail: Some(detail) };
        if self.0.settings.upstream.url.is_none() {
            return failed(Fault::not_configured().message);
        }
        let trouble = self.0.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match trouble {
            Some(why) => failed(why),
            None if !self.0.breaker.is_closed() => failed("it does not answer; memories are queued".to_owned()),
            None => Capability { status: "ok", detail: None },
        }
    }

    /// Asks the service itself how it is.
    pub async fn check(&self) -> Capability {
        match self.0.upstream.health().await {
            Ok(_) => self.capability(),
            Err(fault) => Capability { status: "failed", detail: Some(format!("{} {}", fault.code, fault.message)) },
        }
    }
}
