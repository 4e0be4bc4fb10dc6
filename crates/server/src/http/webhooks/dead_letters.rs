//! Dead letters over HTTP: looked through, and brought back one by one or in bulk.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use postrider::Timestamp;
use postrider::clock::Tick;
use postrider_webhooks::{DeadLetter, DeadLetterFilter, Requeued};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::App;
use super::super::error::{ErrorBody, Refusal};
use super::super::request::{Body, Id, cursor, id_of, listing, no, page_of};

const BULK: u32 = 10_000;
/// For one request, within its deadline.
const BULK_TIME: Duration = Duration::from_secs(8);

listing!(DeadLetterList, DeadLetterView);

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
///
/// A page looks at a bounded number of rows; one that is not full and has a `next_cursor` has not seen all.
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
    /// How many match, or were brought back. Those of subscriptions that are disabled or gone do not count.
    count: i64,
    /// How many could not be: their subscription was disabled meanwhile.
    skipped: i64,
    saga_ids: Vec<i64>,
}

/// Bring many dead letters back
///
/// Those that match, that nobody has brought back yet and whose subscription is there and not disabled; at most 10,000 at a time and as many as a few seconds allow: ask again
/// until `count` is 0.
#[utoipa::path(
    post, path = "/v1/dead-letters/requeue", tag = "webhooks", request_body = BulkRequeue,
    responses((status = 200, description = "How many", body = BulkResult))
)]
pub async fn requeue_many(State(app): State<Arc<App>>, body: Body<BulkRequeue>) -> Result<Json<BulkResult>, Refusal> {
    let BulkRequeue { filter, dry_run } = body?.0;
    let BulkFilter { subscription_id, event_type, error_code, from, to } = filter;
    let filter = DeadLetterFilter { subscription_id, event_type, error_code, from, to, waiting: true };
    let (count, ids) = app.webhooks.requeueable(filter, BULK).await?;
    if dry_run {
        return Ok(Json(BulkResult { count, skipped: 0, saga_ids: vec![] }));
    }
    let (mut saga_ids, mut skipped) = (Vec::new(), 0);
    let begun = Tick::now();
    for id in ids {
        // Whoever asks hears of what was done; the rest is for the next request.
        if Tick::now().since(begun) > BULK_TIME {
            break;
        }
        match app.webhooks.requeue(id).await? {
            Requeued::Created(saga_id) => saga_ids.push(saga_id),
            Requeued::NoSubscription => skipped += 1,
            Requeued::Exists(_) | Requeued::NotFound => {}
        }
    }
    Ok(Json(BulkResult { count: saga_ids.len() as i64, skipped, saga_ids }))
}
