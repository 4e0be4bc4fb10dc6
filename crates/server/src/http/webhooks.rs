//! Webhooks over HTTP: subscriptions, events, sagas, dead letters, replays. Wire types live here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use postrider::Timestamp;
use postrider_webhooks::sign::Scheme;
use postrider_webhooks::{
    Attempt, DeadLetter, DeadLetterFilter, EventShown, NewEvent, NewReplay, NewSubscription, Patch, Published,
    Publishing, Replay, Requeued, Saga, SagaFilter, Subscription,
};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::error::{ErrorBody, Refusal};
use super::outbox::header;
use crate::config::values::parse_duration;

const MOST_OF_A_BATCH: usize = 1000;
const MOST_OF_A_LIST: u32 = 1000;
const BULK: u32 = 10_000;

type Body<T> = Result<Json<T>, JsonRejection>;
type Id = Result<Path<String>, PathRejection>;

fn id_of(path: Id) -> Result<i64, Refusal> {
    let text = path?.0;
    text.parse().map_err(|_| Refusal::invalid(format!("`{text}` is no id; ids are whole numbers")))
}

fn no(what: &str, id: i64) -> Refusal {
    Refusal::not_found(format!("there is no {what} {id}"))
}

// ---- lists ----

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

fn page_of(limit: Option<u32>, cursor: Option<&String>) -> Result<(u32, Option<i64>), Refusal> {
    let limit = limit.unwrap_or(50);
    if !(1..=MOST_OF_A_LIST).contains(&limit) {
        return Err(Refusal::invalid(format!("limit must be from 1 to {MOST_OF_A_LIST}, not {limit}")));
    }
    let cursor = cursor.map(|text| text.parse::<i64>()).transpose();
    Ok((limit, cursor.map_err(|_| Refusal::invalid("cursor is not one of ours; take it from next_cursor"))?))
}

macro_rules! listing {
    ($name:ident, $item:ty) => {
        #[derive(Serialize, ToSchema)]
        pub struct $name {
            items: Vec<$item>,
            /// Where the next page begins; null at the end.
            next_cursor: Option<String>,
        }
    };
}
listing!(SubscriptionList, SubscriptionView);
listing!(EventList, EventView);
listing!(SagaList, SagaView);
listing!(DeadLetterList, DeadLetterView);

fn cursor(next: Option<i64>) -> Option<String> {
    next.map(|id| id.to_string())
}

// ---- subscriptions ----

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SubscriptionBody {
    #[schema(example = "https://hooks.example.com/in")]
    url: String,
    /// `order.paid`, `order.*` or `*`.
    #[schema(min_items = 1, max_items = 100, example = json!(["order.*"]))]
    event_types: Vec<String>,
    description: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// `v1` (HMAC-SHA256) or `v1a` (ed25519).
    #[serde(default)]
    #[schema(value_type = Option<String>, example = "v1")]
    signature: Scheme,
    #[schema(minimum = 1, maximum = 1000)]
    max_retry_limit: Option<u32>,
    retry_schedule_sec: Option<Vec<f64>>,
    #[schema(minimum = 1, maximum = 120000)]
    timeout_ms: Option<u32>,
    rate_per_sec: Option<f64>,
    #[schema(minimum = 1, maximum = 10000)]
    max_in_flight: Option<u32>,
    /// `whsec_…`; without, one is made.
    secret: Option<String>,
}

/// A subscription; of its headers the names only.
#[derive(Serialize, ToSchema)]
pub struct SubscriptionView {
    id: i64,
    url: String,
    event_types: Vec<String>,
    /// `active`, `paused` or `disabled`.
    status: &'static str,
    description: Option<String>,
    headers: Vec<String>,
    signature: &'static str,
    max_retry_limit: Option<u32>,
    retry_schedule_sec: Option<Vec<f64>>,
    timeout_ms: Option<u32>,
    rate_per_sec: Option<f64>,
    max_in_flight: Option<u32>,
    failing_since: Option<String>,
    disabled_reason: Option<String>,
    created_at: String,
    updated_at: String,
}

impl From<Subscription> for SubscriptionView {
    fn from(s: Subscription) -> Self {
        SubscriptionView {
            id: s.id,
            url: s.url,
            event_types: s.event_types,
            status: s.status.as_str(),
            description: s.description,
            headers: s.headers.into_iter().map(|header| header.0).collect(),
            signature: s.signature.as_str(),
            max_retry_limit: s.max_retry_limit,
            retry_schedule_sec: s.retry_schedule_sec,
            timeout_ms: s.timeout_ms,
            rate_per_sec: s.rate_per_sec,
            max_in_flight: s.max_in_flight,
            failing_since: s.failing_since.map(|at| at.to_string()),
            disabled_reason: s.disabled_reason,
            created_at: s.created_at.to_string(),
            updated_at: s.updated_at.to_string(),
        }
    }
}

/// With what its receiver verifies with, which is shown only here.
#[derive(Serialize, ToSchema)]
pub struct SubscriptionWithSecret {
    #[serde(flatten)]
    subscription: SubscriptionView,
    #[schema(example = "whsec_…")]
    secret: String,
}

/// Make a subscription
#[utoipa::path(
    post, path = "/v1/subscriptions", tag = "webhooks", request_body = SubscriptionBody,
    responses((status = 201, description = "It gets events from now on", body = SubscriptionWithSecret))
)]
pub async fn subscribe(
    State(app): State<Arc<App>>,
    body: Body<SubscriptionBody>,
) -> Result<(StatusCode, Json<SubscriptionWithSecret>), Refusal> {
    let body = body?.0;
    let new = NewSubscription {
        url: body.url,
        event_types: body.event_types,
        description: body.description,
        headers: body.headers.into_iter().collect(),
        signature: body.signature,
        max_retry_limit: body.max_retry_limit,
        retry_schedule_sec: body.retry_schedule_sec,
        timeout_ms: body.timeout_ms,
        rate_per_sec: body.rate_per_sec,
        max_in_flight: body.max_in_flight,
        secret: body.secret,
    };
    let (subscription, secret) = app.webhooks.subscribe(new).await?;
    Ok((StatusCode::CREATED, Json(SubscriptionWithSecret { subscription: subscription.into(), secret })))
}

/// List subscriptions
#[utoipa::path(
    get, path = "/v1/subscriptions", tag = "webhooks", params(PageQuery),
    responses((status = 200, description = "A page of them, by id", body = SubscriptionList))
)]
pub async fn subscriptions(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<SubscriptionList>, Refusal> {
    let query = query?.0;
    let (limit, after) = page_of(query.limit, query.cursor.as_ref())?;
    let mut found = app.webhooks.subscriptions(after.unwrap_or(0), limit + 1).await?;
    let more = found.len() > limit as usize;
    found.truncate(limit as usize);
    let next_cursor = cursor(found.last().filter(|_| more).map(|s| s.id));
    Ok(Json(SubscriptionList { items: found.into_iter().map(SubscriptionView::from).collect(), next_cursor }))
}

/// One subscription
#[utoipa::path(
    get, path = "/v1/subscriptions/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "It", body = SubscriptionView))
)]
pub async fn subscription(State(app): State<Arc<App>>, path: Id) -> Result<Json<SubscriptionView>, Refusal> {
    let id = id_of(path)?;
    let found = app.webhooks.subscription(id).await?.ok_or_else(|| no("subscription", id))?;
    Ok(Json(found.into()))
}

/// Tells a key that was left out from one that is null.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(deserializer).map(Some)
}

/// What to change; null takes a setting away.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SubscriptionPatch {
    url: Option<String>,
    event_types: Option<Vec<String>>,
    #[serde(deserialize_with = "given")]
    #[schema(value_type = Option<String>)]
    description: Option<Option<String>>,
    headers: Option<BTreeMap<String, String>>,
    #[serde(deserialize_with = "given")]
    #[schema(value_type = Option<u32>)]
    max_retry_limit: Option<Option<u32>>,
    #[serde(deserialize_with = "given")]
    #[schema(value_type = Option<Vec<f64>>)]
    retry_schedule_sec: Option<Option<Vec<f64>>>,
    #[serde(deserialize_with = "given")]
    #[schema(value_type = Option<u32>)]
    timeout_ms: Option<Option<u32>>,
    #[serde(deserialize_with = "given")]
    #[schema(value_type = Option<f64>)]
    rate_per_sec: Option<Option<f64>>,
    #[serde(deserialize_with = "given")]
    #[schema(value_type = Option<u32>)]
    max_in_flight: Option<Option<u32>>,
}

/// Change a subscription
#[utoipa::path(
    patch, path = "/v1/subscriptions/{id}", tag = "webhooks", params(("id" = i64, Path)), request_body = SubscriptionPatch,
    responses((status = 200, description = "As it is now", body = SubscriptionView))
)]
pub async fn change(
    State(app): State<Arc<App>>,
    path: Id,
    body: Body<SubscriptionPatch>,
) -> Result<Json<SubscriptionView>, Refusal> {
    let (id, body) = (id_of(path)?, body?.0);
    let patch = Patch {
        url: body.url,
        event_types: body.event_types,
        description: body.description,
        headers: body.headers.map(|headers| headers.into_iter().collect()),
        max_retry_limit: body.max_retry_limit,
        retry_schedule_sec: body.retry_schedule_sec,
        timeout_ms: body.timeout_ms,
        rate_per_sec: body.rate_per_sec,
        max_in_flight: body.max_in_flight,
    };
    let changed = app.webhooks.change(id, patch).await?.ok_or_else(|| no("subscription", id))?;
    Ok(Json(changed.into()))
}

/// Take a subscription away
///
/// What waits for it is dead-lettered.
#[utoipa::path(
    delete, path = "/v1/subscriptions/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 204, description = "It is gone"))
)]
pub async fn unsubscribe(State(app): State<Arc<App>>, path: Id) -> Result<StatusCode, Refusal> {
    let id = id_of(path)?;
    if app.webhooks.unsubscribe(id).await? { Ok(StatusCode::NO_CONTENT) } else { Err(no("subscription", id)) }
}

/// Hold a subscription
///
/// Events go on being taken in for it; nothing is sent.
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/pause", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "It is paused", body = SubscriptionView))
)]
pub async fn pause(State(app): State<Arc<App>>, path: Id) -> Result<Json<SubscriptionView>, Refusal> {
    let id = id_of(path)?;
    Ok(Json(app.webhooks.pause(id).await?.ok_or_else(|| no("subscription", id))?.into()))
}

/// Let a subscription go on, after a pause or after it was disabled
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/resume", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "It is active", body = SubscriptionView))
)]
pub async fn resume(State(app): State<Arc<App>>, path: Id) -> Result<Json<SubscriptionView>, Refusal> {
    let id = id_of(path)?;
    Ok(Json(app.webhooks.resume(id).await?.ok_or_else(|| no("subscription", id))?.into()))
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rotation {
    /// `whsec_…`; without, one is made.
    secret: Option<String>,
    /// How long the old key goes on signing too.
    #[schema(example = "24h", pattern = "^([0-9]+(ms|s|m|h|d)|0)$")]
    overlap: Option<String>,
}

/// Give a subscription a new secret
///
/// Both sign for a while (24 hours unless said otherwise), so the receiver can change over.
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/rotate-secret", tag = "webhooks", params(("id" = i64, Path)),
    request_body = Option<Rotation>,
    responses((status = 200, description = "The new secret, shown only here", body = SubscriptionWithSecret))
)]
pub async fn rotate_secret(
    State(app): State<Arc<App>>,
    path: Id,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<SubscriptionWithSecret>, Refusal> {
    let (id, body) = (id_of(path)?, body?);
    // Nothing at all is fine.
    let rotation: Rotation = match body.is_empty() {
        true => Rotation::default(),
        false => serde_json::from_slice(&body).map_err(|e| Refusal::invalid(e.to_string()))?,
    };
    let overlap = rotation.overlap.as_deref().map(parse_duration).transpose().map_err(Refusal::invalid)?;
    let overlap = overlap.unwrap_or(Duration::from_secs(24 * 3600));
    let rotated = app.webhooks.rotate_secret(id, rotation.secret, overlap).await?;
    let (subscription, secret) = rotated.ok_or_else(|| no("subscription", id))?;
    Ok(Json(SubscriptionWithSecret { subscription: subscription.into(), secret }))
}

/// How a test went.
#[derive(Serialize, ToSchema)]
pub struct TestResult {
    success: bool,
    error_code: Option<String>,
    /// `never_sent`, `unknown` or `answered`.
    error_class: Option<String>,
    response_status: Option<i64>,
    duration_ms: i64,
}

/// Send a test event to a subscription, now and once
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/test", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "How it went", body = TestResult))
)]
pub async fn test(State(app): State<Arc<App>>, path: Id) -> Result<Json<TestResult>, Refusal> {
    let id = id_of(path)?;
    let seen = app.webhooks.test(id).await?.ok_or_else(|| no("subscription", id))?;
    let text = |key: &str| seen[key].as_str().map(str::to_owned);
    Ok(Json(TestResult {
        success: seen["success"] == true,
        error_code: text("error_code"),
        error_class: text("error_class"),
        response_status: seen["response_status"].as_i64(),
        duration_ms: seen["duration_ms"].as_i64().unwrap_or(0),
    }))
}

// ---- events ----

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
        event.trace.extend(header(headers, name)?.map(|value| (name.to_owned(), value.to_owned())));
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
    let published = app.events.put(event(body?.0, &headers)?).await?;
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
pub struct SagaView {
    id: i64,
    event_id: i64,
    subscription_id: i64,
    /// `Pending`, `InProgress`, `PendingRetry`, `Completed` or `DeadLettered`.
    status: String,
    attempt_count: i64,
    next_attempt_at: Option<String>,
    /// It waits for its subscription: paused, limited, or cooling down.
    held: bool,
    final_error_code: Option<String>,
    generation: i64,
    created_at: String,
    updated_at: String,
}

impl From<Saga> for SagaView {
    fn from(s: Saga) -> Self {
        SagaView {
            id: s.id,
            event_id: s.event_id,
            subscription_id: s.subscription_id,
            status: s.status,
            attempt_count: s.attempt_count,
            next_attempt_at: s.next_attempt_at.map(|at| at.to_string()),
            held: s.held,
            final_error_code: s.final_error_code,
            generation: s.generation,
            created_at: s.created_at.to_string(),
            updated_at: s.updated_at.to_string(),
        }
    }
}

/// One attempt, as it went.
#[derive(Serialize, ToSchema)]
pub struct DeliveryAttempt {
    job_id: i64,
    attempt: i64,
    started_at: String,
    duration_ms: i64,
    /// `never_sent`, `unknown` or `answered`; null when it succeeded.
    error_class: Option<String>,
    error_code: Option<String>,
    response_status: Option<i64>,
    #[schema(value_type = Option<Vec<Vec<String>>>)]
    response_headers: Option<Value>,
    response_body: Option<String>,
    remote_address: Option<String>,
}

impl From<Attempt> for DeliveryAttempt {
    fn from(a: Attempt) -> Self {
        DeliveryAttempt {
            job_id: a.job_id,
            attempt: a.attempt,
            started_at: a.started_at.to_string(),
            duration_ms: a.duration_ms,
            error_class: a.error_class,
            error_code: a.error_code,
            response_status: a.response_status,
            response_headers: a.response_headers,
            response_body: a.response_body,
            remote_address: a.remote_address,
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

/// One event with its whole timeline
#[utoipa::path(
    get, path = "/v1/events/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "The event, its sagas and their attempts", body = EventTimeline))
)]
pub async fn event_shown(State(app): State<Arc<App>>, path: Id) -> Result<Json<EventTimeline>, Refusal> {
    let id = id_of(path)?;
    let (event, sagas) = app.webhooks.event(id).await?.ok_or_else(|| no("event", id))?;
    let timeline = |(saga, attempts): (Saga, Vec<Attempt>)| SagaTimeline {
        saga: saga.into(),
        attempts: attempts.into_iter().map(DeliveryAttempt::from).collect(),
    };
    Ok(Json(EventTimeline { event: event.into(), sagas: sagas.into_iter().map(timeline).collect() }))
}

// ---- sagas ----

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SagaQuery {
    /// `Pending`, `InProgress`, `PendingRetry`, `Completed` or `DeadLettered`.
    status: Option<String>,
    subscription_id: Option<i64>,
    event_id: Option<i64>,
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    cursor: Option<String>,
}

/// List sagas, the newest first
#[utoipa::path(
    get, path = "/v1/sagas", tag = "webhooks", params(SagaQuery),
    responses((status = 200, description = "A page of them", body = SagaList))
)]
pub async fn sagas(
    State(app): State<Arc<App>>,
    query: Result<Query<SagaQuery>, QueryRejection>,
) -> Result<Json<SagaList>, Refusal> {
    let query = query?.0;
    let (limit, before) = page_of(query.limit, query.cursor.as_ref())?;
    if let Some(status) = query.status.as_ref().filter(|s| postrider_webhooks::decide::Status::parse(s).is_none()) {
        let what =
            format!("`{status}` is no status; there are Pending, InProgress, PendingRetry, Completed, DeadLettered");
        return Err(Refusal::invalid(what));
    }
    let SagaQuery { status, subscription_id, event_id, .. } = query;
    let page = app.webhooks.sagas(SagaFilter { status, subscription_id, event_id, before, limit }).await?;
    Ok(Json(SagaList { items: page.items.into_iter().map(SagaView::from).collect(), next_cursor: cursor(page.next) }))
}

#[derive(Serialize, ToSchema)]
pub struct JobView {
    id: i64,
    /// `Pending` or `Leased`.
    status: String,
    lease_until: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct SagaShown {
    #[serde(flatten)]
    saga: SagaView,
    /// The live job, if there is one.
    jobs: Vec<JobView>,
    attempts: Vec<DeliveryAttempt>,
}

/// One saga with its jobs and attempts
#[utoipa::path(
    get, path = "/v1/sagas/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "It", body = SagaShown))
)]
pub async fn saga(State(app): State<Arc<App>>, path: Id) -> Result<Json<SagaShown>, Refusal> {
    let id = id_of(path)?;
    let (saga, jobs, attempts) = app.webhooks.saga(id).await?.ok_or_else(|| no("saga", id))?;
    let jobs = jobs.into_iter().map(|job| JobView {
        id: job.id,
        status: job.status,
        lease_until: job.lease_until.map(|at| at.to_string()),
    });
    Ok(Json(SagaShown {
        saga: saga.into(),
        jobs: jobs.collect(),
        attempts: attempts.into_iter().map(DeliveryAttempt::from).collect(),
    }))
}

// ---- dead letters ----

#[derive(Serialize, ToSchema)]
pub struct DeadLetterView {
    id: i64,
    saga_id: i64,
    event_id: i64,
    subscription_id: i64,
    final_error_code: Option<String>,
    payload_bytes: i64,
    failed_at: String,
    requeued_saga_id: Option<i64>,
}

impl From<DeadLetter> for DeadLetterView {
    fn from(d: DeadLetter) -> Self {
        DeadLetterView {
            id: d.id,
            saga_id: d.saga_id,
            event_id: d.event_id,
            subscription_id: d.subscription_id,
            final_error_code: d.final_error_code,
            payload_bytes: d.payload_bytes,
            failed_at: d.failed_at.to_string(),
            requeued_saga_id: d.requeued_saga_id,
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeadLetterQuery {
    subscription_id: Option<i64>,
    event_type: Option<String>,
    error_code: Option<String>,
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    cursor: Option<String>,
}

/// List dead letters, the newest first
#[utoipa::path(
    get, path = "/v1/dead-letters", tag = "webhooks", params(DeadLetterQuery),
    responses((status = 200, description = "A page of them", body = DeadLetterList))
)]
pub async fn dead_letters(
    State(app): State<Arc<App>>,
    query: Result<Query<DeadLetterQuery>, QueryRejection>,
) -> Result<Json<DeadLetterList>, Refusal> {
    let query = query?.0;
    let (limit, before) = page_of(query.limit, query.cursor.as_ref())?;
    let DeadLetterQuery { subscription_id, event_type, error_code, .. } = query;
    let filter = DeadLetterFilter { subscription_id, event_type, error_code, ..DeadLetterFilter::default() };
    let page = app.webhooks.dead_letters(filter, before, limit).await?;
    let items = page.items.into_iter().map(DeadLetterView::from).collect();
    Ok(Json(DeadLetterList { items, next_cursor: cursor(page.next) }))
}

#[derive(Serialize, ToSchema)]
pub struct RequeuedView {
    saga_id: i64,
}

/// Bring a dead letter back, as a new saga
///
/// Asked again, it answers with the same saga.
#[utoipa::path(
    post, path = "/v1/dead-letters/{id}/requeue", tag = "webhooks", params(("id" = i64, Path)),
    responses(
        (status = 201, description = "It begins anew", body = RequeuedView),
        (status = 409, description = "`SUBSCRIPTION_DISABLED`: there is nobody to deliver to", body = ErrorBody),
    )
)]
pub async fn requeue(State(app): State<Arc<App>>, path: Id) -> Result<(StatusCode, Json<RequeuedView>), Refusal> {
    let id = id_of(path)?;
    match app.webhooks.requeue(id).await? {
        Requeued::Created(saga_id) | Requeued::Exists(saga_id) => {
            Ok((StatusCode::CREATED, Json(RequeuedView { saga_id })))
        }
        Requeued::NotFound => Err(no("dead letter", id)),
        Requeued::NoSubscription => Err(Refusal::new(
            StatusCode::CONFLICT,
            "SUBSCRIPTION_DISABLED",
            "its subscription is disabled or gone; resume it first",
        )),
    }
}

#[derive(Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BulkFilter {
    subscription_id: Option<i64>,
    event_type: Option<String>,
    error_code: Option<String>,
    #[schema(value_type = Option<String>, format = "date-time")]
    from: Option<Timestamp>,
    #[schema(value_type = Option<String>, format = "date-time")]
    to: Option<Timestamp>,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BulkRequeue {
    filter: BulkFilter,
    dry_run: bool,
}

#[derive(Serialize, ToSchema)]
pub struct BulkResult {
    /// How many match, or were brought back.
    count: i64,
    /// How many could not be: their subscription is disabled or gone.
    skipped: i64,
    saga_ids: Vec<i64>,
}

/// Bring many dead letters back
///
/// Those that match and nobody has brought back yet, at most 10,000 at a time.
#[utoipa::path(
    post, path = "/v1/dead-letters/requeue", tag = "webhooks", request_body = BulkRequeue,
    responses((status = 200, description = "How many", body = BulkResult))
)]
pub async fn requeue_many(State(app): State<Arc<App>>, body: Body<BulkRequeue>) -> Result<Json<BulkResult>, Refusal> {
    let BulkRequeue { filter, dry_run } = body?.0;
    let BulkFilter { subscription_id, event_type, error_code, from, to } = filter;
    let filter = DeadLetterFilter { subscription_id, event_type, error_code, from, to, waiting: true };
    let (count, ids) = app.webhooks.requeueable(filter, 0, BULK).await?;
    if dry_run {
        return Ok(Json(BulkResult { count, skipped: 0, saga_ids: vec![] }));
    }
    let (mut saga_ids, mut skipped) = (Vec::new(), 0);
    for id in ids {
        match app.webhooks.requeue(id).await? {
            Requeued::Created(saga_id) => saga_ids.push(saga_id),
            Requeued::NoSubscription => skipped += 1,
            Requeued::Exists(_) | Requeued::NotFound => {}
        }
    }
    Ok(Json(BulkResult { count: saga_ids.len() as i64, skipped, saga_ids }))
}

// ---- replays ----

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplayBody {
    subscription_id: i64,
    #[schema(value_type = String, format = "date-time")]
    from: Timestamp,
    #[schema(value_type = String, format = "date-time")]
    to: Timestamp,
    /// Patterns; without, those of the subscription.
    event_types: Option<Vec<String>>,
    /// Only events whose latest saga for the subscription has one of these states.
    statuses: Option<Vec<String>>,
    #[serde(default)]
    dry_run: bool,
}

/// Send events of a time range to a subscription again
///
/// A job of its own that survives a restart. With `dry_run` only counts.
#[utoipa::path(
    post, path = "/v1/replays", tag = "webhooks", request_body = ReplayBody,
    responses(
        (status = 200, description = "How many it would be: `{\"count\"}`", body = Object),
        (status = 202, description = "It has begun: `{\"replay_id\",\"count\"}`", body = Object),
    )
)]
pub async fn replay(State(app): State<Arc<App>>, body: Body<ReplayBody>) -> Result<(StatusCode, Json<Value>), Refusal> {
    let ReplayBody { subscription_id, from, to, event_types, statuses, dry_run } = body?.0;
    let wanted = NewReplay { subscription_id, from, to, event_types, statuses };
    let missing = || no("subscription", subscription_id);
    let count = app.webhooks.count_replay(wanted.clone()).await?.ok_or_else(missing)?;
    if dry_run {
        return Ok((StatusCode::OK, Json(json!({ "count": count }))));
    }
    let replay = app.webhooks.replay(wanted).await?.ok_or_else(missing)?;
    Ok((StatusCode::ACCEPTED, Json(json!({ "replay_id": replay.id, "count": count }))))
}

#[derive(Serialize, ToSchema)]
pub struct ReplayView {
    id: i64,
    subscription_id: i64,
    from: String,
    to: String,
    /// `running`, `done` or `cancelled`.
    status: String,
    /// Events sent so far.
    count: i64,
    created_at: String,
}

impl From<Replay> for ReplayView {
    fn from(r: Replay) -> Self {
        ReplayView {
            id: r.id,
            subscription_id: r.subscription_id,
            from: r.from.to_string(),
            to: r.to.to_string(),
            status: r.status,
            count: r.count,
            created_at: r.created_at.to_string(),
        }
    }
}

/// One replay
#[utoipa::path(
    get, path = "/v1/replays/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "It", body = ReplayView))
)]
pub async fn replay_shown(State(app): State<Arc<App>>, path: Id) -> Result<Json<ReplayView>, Refusal> {
    let id = id_of(path)?;
    Ok(Json(app.webhooks.replay_of(id).await?.ok_or_else(|| no("replay", id))?.into()))
}

/// Stop a replay where it is
#[utoipa::path(
    delete, path = "/v1/replays/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "As it is now", body = ReplayView))
)]
pub async fn replay_cancelled(State(app): State<Arc<App>>, path: Id) -> Result<Json<ReplayView>, Refusal> {
    let id = id_of(path)?;
    Ok(Json(app.webhooks.cancel_replay(id).await?.ok_or_else(|| no("replay", id))?.into()))
}
