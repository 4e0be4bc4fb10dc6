//! Subscriptions over HTTP.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Extension, Query, State};
use axum::http::StatusCode;
use postrider::paging::Page;
use postrider_webhooks::sign::Scheme;
use postrider_webhooks::{NewSubscription, Patch, Subscription, SubscriptionStatus};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::error::{ErrorBody, Refusal, bounded};
use super::super::request::{Body, Id, cursor, id_of, listing, no, page_of, seen_of_any_size};
use super::super::{App, Caller, DEADLINE};
use crate::config::values::parse_duration;
use crate::tokens::Scope;

listing!(SubscriptionList, SubscriptionView);

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

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
    /// What follows the host may hold a secret: without the scope `operate` it is shortened to `/…`.
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

impl SubscriptionView {
    /// As this caller may see it.
    fn seen_by(caller: &Caller, mut subscription: Subscription) -> Self {
        if caller.may(Scope::Operate).is_err() {
            subscription.url = shortened(&subscription.url);
        }
        subscription.into()
    }
}

/// A URL without what may be a secret in it: its path and query.
fn shortened(url: &str) -> String {
    match url::Url::parse(url) {
        Ok(url) if url.path() == "/" && url.query().is_none() => url.origin().ascii_serialization(),
        Ok(url) => format!("{}/…", url.origin().ascii_serialization()),
        Err(_) => "…".to_owned(),
    }
}

impl From<Subscription> for SubscriptionView {
    fn from(s: Subscription) -> Self {
        SubscriptionView {
            id: s.id,
            url: s.url,
            event_types: s.event_types,
            status: s.status.as_str(),
            description: s.description,
            headers: s.headers,
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
    Extension(caller): Extension<Caller>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<SubscriptionList>, Refusal> {
    let query = query?.0;
    let (limit, after) = page_of(query.limit, query.cursor.as_ref())?;
    let list = |after: Option<i64>, limit: u32| {
        let webhooks = app.webhooks.clone();
        async move {
            let found = webhooks.subscriptions(after.unwrap_or(0), limit + 1).await?;
            Ok(Page::of(found, limit as usize, |subscription| subscription.id))
        }
    };
    let bytes = |s: &Subscription| {
        let texts = [&s.url].into_iter().chain(&s.description).chain(&s.event_types).chain(&s.headers);
        texts.map(String::len).sum()
    };
    let page = seen_of_any_size((after, limit), AT_A_TIME, list, |_| true, bytes).await?;
    let items = page.items.into_iter().map(|one| SubscriptionView::seen_by(&caller, one)).collect();
    Ok(Json(SubscriptionList { items, next_cursor: cursor(page.next) }))
}

/// Subscriptions that are read at once: a page of them ends where there is too much of it.
const AT_A_TIME: u32 = 100;

/// One subscription
#[utoipa::path(
    get, path = "/v1/subscriptions/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "It", body = SubscriptionView))
)]
pub async fn subscription(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Id,
) -> Result<Json<SubscriptionView>, Refusal> {
    let id = id_of(path)?;
    let found = app.webhooks.subscription(id).await?.ok_or_else(|| no("subscription", id))?;
    Ok(Json(SubscriptionView::seen_by(&caller, found)))
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
    responses(
        (status = 200, description = "It is paused", body = SubscriptionView),
        (status = 409, description = "`SUBSCRIPTION_DISABLED`: there is nothing to hold", body = ErrorBody),
    )
)]
pub async fn pause(State(app): State<Arc<App>>, path: Id) -> Result<Json<SubscriptionView>, Refusal> {
    let id = id_of(path)?;
    let paused = app.webhooks.pause(id).await?.ok_or_else(|| no("subscription", id))?;
    if paused.status == SubscriptionStatus::Disabled {
        let what = "it is disabled, and stays so: nothing is sent. Resume it first";
        return Err(Refusal::new(StatusCode::CONFLICT, "SUBSCRIPTION_DISABLED", what));
    }
    Ok(Json(paused.into()))
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
/// Both sign for a while (24 hours unless said otherwise), so the receiver can change over. An overlap of 0 ends all older
/// ones at once.
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
        false => serde_json::from_slice(&body).map_err(|e| Refusal::invalid(bounded(&e.to_string())))?,
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
    /// Of TLS_FAILED: why.
    error_detail: Option<String>,
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
    let seen =
        app.webhooks.test_within(id, DEADLINE - Duration::from_secs(2)).await?.ok_or_else(|| no("subscription", id))?;
    let text = |key: &str| seen[key].as_str().map(str::to_owned);
    Ok(Json(TestResult {
        success: seen["success"] == true,
        error_code: text("error_code"),
        error_detail: text("error_detail"),
        error_class: text("error_class"),
        response_status: seen["response_status"].as_i64(),
        duration_ms: seen["duration_ms"].as_i64().unwrap_or(0),
    }))
}
