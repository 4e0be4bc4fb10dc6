//! Sagas over HTTP: how far each delivery is, with its attempts.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use postrider_webhooks::{Attempt, Saga, SagaFilter};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::super::error::Refusal;
use super::super::request::{Id, cursor, id_of, listing, no, page_of};
use super::super::{App, Caller};
use crate::tokens::Scope;

listing!(SagaList, SagaView);

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
    /// Of `TLS_FAILED`: why.
    error_detail: Option<String>,
}

impl DeliveryAttempt {
    /// As this caller may see it: what was answered may repeat what was sent.
    pub fn seen_by(caller: &Caller, mut attempt: Attempt) -> Self {
        if caller.may(Scope::Payload).is_err() {
            (attempt.response_headers, attempt.response_body) = (None, None);
        }
        attempt.into()
    }
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
            error_detail: a.error_detail,
        }
    }
}

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
///
/// A page looks at a bounded number of rows; one that is not full and has a `next_cursor` has not seen all.
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

/// One saga with its jobs and its last 200 attempts
///
/// What was answered to an attempt is told to tokens with the scope `payload`.
#[utoipa::path(
    get, path = "/v1/sagas/{id}", tag = "webhooks", params(("id" = i64, Path)),
    responses((status = 200, description = "It", body = SagaShown))
)]
pub async fn saga(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Id,
) -> Result<Json<SagaShown>, Refusal> {
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
        attempts: attempts.into_iter().map(|attempt| DeliveryAttempt::seen_by(&caller, attempt)).collect(),
    }))
}
