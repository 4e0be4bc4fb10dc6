//! Is it there, is it ready, and how is it doing?

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use serde::Serialize;
use utoipa::ToSchema;

use super::App;
use super::error::{ErrorBody, Refusal};

/// The database must answer within this time.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Serialize, ToSchema)]
pub struct Health {
    #[schema(example = "ok")]
    status: &'static str,
}

/// The process lives
#[utoipa::path(get, path = "/livez", tag = "server", security(()), responses((status = 200, description = "It lives", body = Health)))]
pub async fn livez() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// The process can work: its database answers
#[utoipa::path(
    get, path = "/readyz", tag = "server", security(()),
    responses((status = 200, description = "It can", body = Health), (status = 503, description = "It cannot", body = ErrorBody))
)]
pub async fn readyz(State(app): State<Arc<App>>) -> Result<Json<Health>, Refusal> {
    match tokio::time::timeout(PATIENCE, app.outbox.paused_lanes()).await {
        Ok(Ok(_)) => Ok(Json(Health { status: "ok" })),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "STORE_UNAVAILABLE",
            "the database does not answer in time",
        )),
    }
}

/// Metrics for Prometheus
#[utoipa::path(
    get, path = "/metrics", tag = "server",
    responses((status = 200, description = "In the text format", body = String, content_type = "application/openmetrics-text"))
)]
pub async fn metrics(State(app): State<Arc<App>>) -> Result<impl IntoResponse, Refusal> {
    let page = app.meters.page(&app.outbox, app.memories.as_ref()).await?;
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], page))
}
