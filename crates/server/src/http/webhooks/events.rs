//! Events over HTTP: publishing them, and what became of them.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, StatusCode};
use postrider_webhooks::{Attempt, EventShown, NewEvent, Published, Publishing, Saga};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::super::error::{ErrorBody, Refusal};
use super::super::request::{Body, Id, cursor, first, header, id_of, listing, no, page_of};
use super::super::{App, Caller};
use super::sagas::{DeliveryAttempt, SagaView};

const MOST_OF_A_BATCH: usize = 1000;

listing!(EventList, EventView);

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EventBody {
    #[schema(example = "order.paid", max_length = 255)]
    event_type: String,
    /// Delivered as it is written here.
    #[schema(value_type = serde_json::Value)]
    payload: Box<RawValue>,
    /// The same again with the same type and payload is the same event.
    #[schema(min_length = 1, max_length = 255)]
    external_id: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct PublishedView {
    event_id: i64,
    saga_ids: Vec<i64>,
    duplicate: bool,
}

impl From<Published> for PublishedView {
    fn from(p: Published) -> Self {
        PublishedView { event_id: p.event_id, saga_ids: p.saga_ids, duplicate: p.outcome == Publishing::Exists }
    }
}

fn event(body: EventBody, headers: &HeaderMap) -> Result<NewEvent, Refusal> {
    let mut event = NewEvent::new(body.event_type, body.payload.get().to_owned());
    event.external_id = body.external_id;
    event.correlation_id = header(headers, "X-Correlation-ID")?.map(str::to_owned);
    for name in ["traceparent", "tracestate"] {
        event.trace.extend(first(headers, name)?.map(|value| (name.to_owned(), value.to_owned())));
    }
    Ok(event)
}

fn differs(event_id: i64) -> Refusal {
    let what = format!("the external_id belongs to another event, {event_id}; nothing was written");
    Refusal::new(StatusCode::CONFLICT, "DIFFERS", what).with("event_id", event_id)
}

/// Publish an event
///
/// Answered once the event, its sagas and their first jobs are committed.
#[utoipa::path(
    post, path = "/v1/events", tag = "webhooks", request_body = EventBody,
    responses(
        (status = 202, description = "Committed", body = PublishedView),
        (status = 200, description = "It was published before", body = PublishedView),
        (status = 409, description = "`DIFFERS`: the external_id belongs to another event", body = ErrorBody),
    )
)]
pub async fn publish(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body<EventBody>,
) -> Result<(StatusCode, Json<PublishedView>), Refusal> {
    let event = event(body?.0, &headers)?;
    // Before it joins others: one that cannot be published would undo the transaction of all.
    event.check()?;
    let published = app.events.put(event).await?;
    match published.outcome {
        Publishing::Created => Ok((StatusCode::ACCEPTED, Json(published.into()))),
        Publishing::Exists => Ok((StatusCode::OK, Json(published.into()))),
        Publishing::Differs => Err(differs(published.event_id)),
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EventBatch {
    #[schema(max_items = 1000)]
    events: Vec<EventBody>,
}

#[derive(Serialize, ToSchema)]
pub struct EventResult {
    event_id: i64,
    saga_ids: Vec<i64>,
    /// `created`, `exists`, or `differs` (nothing was written for it).
    outcome: &'static str,
}

#[derive(Serialize, ToSchema)]
pub struct EventResults {
    results: Vec<EventResult>,
}

/// Publish many events in one transaction
#[utoipa::path(
    post, path = "/v1/events/batch", tag = "webhooks", request_body = EventBatch,
    responses((status = 200, description = "Committed", body = EventResults))
)]
pub async fn publish_batch(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body<EventBatch>,
) -> Result<Json<EventResults>, Refusal> {
    let bodies = body?.0.events;
    if bodies.len() > MOST_OF_A_BATCH {
        let what = format!("{} events at once are too many; send at most {MOST_OF_A_BATCH}", bodies.len());
        return Err(Refusal::invalid(what));
    }
    let events = bodies.into_iter().map(|body| event(body, &headers)).collect::<Result<Vec<_>, _>>()?;
    let published = app.webhooks.publish(events).await?;
    let result = |p: Published| EventResult {
        event_id: p.event_id,
        saga_ids: p.saga_ids,
        outcome: match p.outcome {
            Publishing::Created => "created",
            Publishing::Exists => "exists",
            Publishing::Differs => "differs",
        },
    };
    Ok(Json(EventResults { results: published.into_iter().map(result).collect() }))
}

/// An event, without its payload.
#[derive(Serialize, ToSchema)]
pub struct EventView {
    id: i64,
    event_type: String,
    external_id: Option<String>,
    payload_bytes: i64,
    content_type: Option<String>,
    correlation_id: Option<String>,
    created_at: String,
}

impl From<EventShown> for EventView {
    fn from(e: EventShown) -> Self {
        EventView {
            id: e.id,
            event_type: e.event_type,
            external_id: e.external_id,
            payload_bytes: e.payload_bytes,
            content_type: e.content_type,
            correlation_id: e.correlation_id,
            created_at: e.created_at.to_string(),
        }
    }
}

#[derive(Serialize, ToSchema)]
pub struct SagaTimeline {
    #[serde(flatten)]
    saga: SagaView,
    attempts: Vec<DeliveryAttempt>,
}

#[derive(Serialize, ToSchema)]
pub struct EventTimeline {
    #[serde(flatten)]
    event: EventView,
    sagas: Vec<SagaTimeline>,
    /// There are more sagas or attempts than an answer bears: see `GET /v1/sagas?event_id=…` and `GET /v1/sagas/{id}`.
    more: bool,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventQuery {
    event_type: Option<String>,
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    cursor: Option<String>,
}

/// List events, the newest first
#[utoipa::path(
    get, path = "/v1/events", tag = "webhooks", params(EventQuery),
    responses((status = 200, description = "A page of them", body = EventList))
)]
pub async fn events(
    State(app): State<Arc<App>>,
    query: Result<Query<EventQuery>, QueryRejection>,
) -> Result<Json<EventList>, Refusal> {
    let query = query?.0;
    let (limit, before) = page_of(query.limit, query.cursor.as_ref())?;
    let page = app.webhooks.events(query.event_type, before, limit).await?;
    Ok(Json(EventList { items: page.items.into_iter().map(EventView::from).collect(), next_cursor: cursor(page.next) }))
}

/// One event with its timeline
///
/// The first 100 sagas and 200 attempts. What was answered to an attempt is told to tokens with the scope `payload`.
#[utoipa::path(
    get, path = "/v1/events/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "The event, its sagas and their attempts", body = EventTimeline))
)]
pub async fn event_shown(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Id,
) -> Result<Json<EventTimeline>, Refusal> {
    let id = id_of(path)?;
    let shown = app.webhooks.event(id).await?.ok_or_else(|| no("event", id))?;
    let timeline = |(saga, attempts): (Saga, Vec<Attempt>)| SagaTimeline {
        saga: saga.into(),
        attempts: attempts.into_iter().map(|attempt| DeliveryAttempt::seen_by(&caller, attempt)).collect(),
    };
    let sagas = shown.sagas.into_iter().map(timeline).collect();
    Ok(Json(EventTimeline { event: shown.event.into(), sagas, more: shown.more }))
}
