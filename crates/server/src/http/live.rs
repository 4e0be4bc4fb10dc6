//! How it goes, over HTTP: the last quarter of an hour, a stream of samples, and who works.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use postrider::clock::Tick;
use serde::Serialize;
use utoipa::ToSchema;

use super::App;
use super::auth::Caller;
use super::error::Refusal;
use super::session;
use crate::live::{Sample, Watching};
use crate::roll::{self, Load};

/// How it goes now, and went in the last quarter of an hour.
#[derive(Serialize, ToSchema)]
pub struct Overview {
    /// `sqlite`, `postgres` or `mysql`.
    database: &'static str,
    version: &'static str,
    /// The oldest first; the last one is now.
    samples: Vec<Sample>,
}

/// How it goes, with the last quarter of an hour
#[utoipa::path(
    get, path = "/v1/overview", tag = "server",
    responses((status = 200, description = "Samples of every lane", body = Overview))
)]
pub async fn overview(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Overview> {
    Json(Overview {
        database: app.outbox.store().dialect().name(),
        version: env!("CARGO_PKG_VERSION"),
        samples: app.live.past().iter().map(|sample| sample.seen_by(&caller)).collect(),
    })
}

/// So long a stream lasts; then the browser asks again, and its token is looked at again.
const STREAM: Duration = Duration::from_secs(60);
/// When it asks again after that, and after a stream that broke off: a server that is gone is asked gently.
const GO_ON: Duration = Duration::from_millis(100);
const TRY_AGAIN: Duration = Duration::from_secs(2);

/// `GET /v1/live`: each new sample as a server-sent event `sample`, until the client leaves, a minute is over or the server
/// stops.
pub async fn stream(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let watching = Watching::new(app.live.clone());
    let newest = app.live.subscribe();
    let begun = Some(Tick::now());
    let signed_in = session::by_cookie(&headers, app.tls).map(str::to_owned);
    let caller = (caller, signed_in);
    let events = futures_util::stream::unfold(
        (watching, newest, caller, begun, app),
        async |(watching, mut newest, caller, begun, app)| {
            let begun = begun?;
            newest.changed().await.ok()?;
            // Whoever is no longer let in, or has signed out, hears no more.
            let (who, session) = &caller;
            let is_over = match (who.token(), session) {
                (None, _) => false,
                (Some(_), Some(session)) => matches!(app.sessions.verify(session).await, Ok(None)),
                (Some(token), None) => matches!(app.tokens.still_good(token.id).await, Ok(None)),
            };
            if is_over {
                return None;
            }
            let sample = newest.borrow_and_update().clone();
            if sample.at_ms < 0 {
                return None;
            }
            let is_last = Tick::now().since(begun) >= STREAM;
            let retry = if is_last { GO_ON } else { TRY_AGAIN };
            let event = Event::default().event("sample").retry(retry).json_data(sample.seen_by(&caller.0));
            Some((Ok(event.unwrap_or_default()), (watching, newest, caller, (!is_last).then_some(begun), app)))
        },
    );
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

/// A worker: alive by its own call, holding by its leases.
#[derive(Serialize, ToSchema)]
pub struct WorkerView {
    worker: String,
    /// It has called within the last 20 seconds. Workers of applications that embed the library do not call.
    alive: bool,
    started_at: Option<String>,
    seen_at: Option<String>,
    /// By lane.
    lanes: BTreeMap<String, WorkerLane>,
}

#[derive(Default, Serialize, ToSchema)]
pub struct WorkerLane {
    #[serde(flatten)]
    load: Load,
    /// Since when it holds the message it holds longest, as far as the head of the lane tells.
    holds_since: Option<String>,
    lease_until: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct Workers {
    items: Vec<WorkerView>,
}

/// Who works, and what they hold
#[utoipa::path(get, path = "/v1/workers", tag = "server", responses((status = 200, description = "All of them", body = Workers)))]
pub async fn workers(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Workers>, Refusal> {
    let mut items: BTreeMap<String, WorkerView> = BTreeMap::new();
    for called in roll::roll(&app.outbox).await? {
        // What one that is gone held, the leases tell.
        let load = |load: Load| if called.alive { load } else { Load::default() };
        let lanes = called.lanes.into_iter().filter(|(lane, _)| caller.sees(lane));
        let view = WorkerView {
            worker: called.worker.clone(),
            alive: called.alive,
            started_at: Some(called.started_at.to_string()),
            seen_at: Some(called.seen_at.to_string()),
            lanes: lanes.map(|(lane, last)| (lane, WorkerLane { load: load(last), ..WorkerLane::default() })).collect(),
        };
        items.insert(called.worker, view);
    }
    for holder in app.live.holders().into_iter().filter(|holder| caller.sees(&holder.lane)) {
        let view = items.entry(holder.worker.clone()).or_insert_with(|| WorkerView {
            worker: holder.worker.clone(),
            alive: true,
            started_at: None,
            seen_at: None,
            lanes: BTreeMap::new(),
        });
        let lane = view.lanes.entry(holder.lane).or_default();
        lane.load.held = lane.load.held.max(holder.holds as usize);
        lane.holds_since = Some(holder.since.to_string());
        lane.lease_until = Some(holder.lease_until.to_string());
    }
    // A token for some lanes sees who works on them.
    items.retain(|_, view| caller.lanes().is_empty() || !view.lanes.is_empty());
    Ok(Json(Workers { items: items.into_values().collect() }))
}
