//! The metrics of a process without an API: `postrider worker --metrics ADDR`. Beyond loopback a token is needed, as it is
//! for the API.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Version, header};
use axum::middleware::from_fn;
use axum::response::IntoResponse;
use axum::routing::get;
use postrider::Outbox;
use postrider_memories::Memories;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::accept::{Limits, serve};
use super::auth::{bearer, not_forwarded, same_site};
use super::error::Refusal;
use super::health::livez;
use super::slots::{RESERVE, Rules};
use crate::metrics::Shared;
use crate::tokens::{Scope, Tokens};

/// Few scrape one process.
const CONNECTIONS: usize = 64;

pub struct Scrape {
    pub outbox: Outbox,
    pub memories: Option<Memories>,
    pub meters: Shared,
    /// A token with the scope `read` is needed.
    pub tokens_required: bool,
}

impl Scrape {
    /// Answers on this address until told to stop; says where it listens.
    pub async fn start(
        self,
        address: SocketAddr,
        mut stopped: watch::Receiver<bool>,
    ) -> std::io::Result<(SocketAddr, tokio::task::JoinHandle<()>)> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let router = Router::new()
            .route("/metrics", get(page))
            .with_state(Arc::new(self))
            .route("/livez", get(livez))
            .fallback(|| async { Refusal::not_found("there are only /metrics and /livez here") })
            .layer(from_fn(super::frame));
        let slots = Rules { most: CONNECTIONS, per_peer: CONNECTIONS / 2, trusted: vec![], reserve: RESERVE };
        let limits = Limits { slots, ..Limits::default() };
        let until = async move { drop(stopped.wait_for(|stop| *stop).await) };
        Ok((address, tokio::spawn(serve(listener, None, router, limits, Duration::from_secs(1), until))))
    }

    async fn may_read(&self, version: Version, headers: &HeaderMap) -> Result<(), Refusal> {
        let shown = headers.get(header::AUTHORIZATION).and_then(|shown| bearer(shown.to_str().ok()?));
        let Some(shown) = shown else {
            return match self.tokens_required {
                true => Err(unauthorized()),
                false => not_forwarded(version, headers).and_then(|()| same_site(headers)),
            };
        };
        match Tokens::new(self.outbox.clone()).verify(shown.trim()).await? {
            Some(token) if token.allows(Scope::Read) && token.lanes.is_empty() && token.spaces.is_empty() => Ok(()),
            Some(_) => Err(Refusal::new(
                StatusCode::FORBIDDEN,
                "FORBIDDEN",
                "metrics of all lanes need a token with the scope `read` for all of them",
            )),
            None => Err(unauthorized()),
        }
    }
}

fn unauthorized() -> Refusal {
    let what = "a token is needed: `Authorization: Bearer pr_…` (postrider token create --scope read)";
    Refusal::new(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", what)
}

async fn page(
    State(scrape): State<Arc<Scrape>>,
    version: Version,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Refusal> {
    scrape.may_read(version, &headers).await?;
    let page = scrape.meters.page(&scrape.outbox, scrape.memories.as_ref()).await?;
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], page))
}
