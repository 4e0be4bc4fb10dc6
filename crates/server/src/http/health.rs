//! Is it there, is it ready, and how is it doing?

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use postrider::clock::Tick;
use postrider_memories::gate::Standing;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use utoipa::{IntoParams, ToSchema};

use super::error::{ErrorBody, Refusal};
use super::{App, Caller};
use crate::{metrics, writes};

/// The database must answer within this time.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long its answer is believed.
const FRESH: Duration = Duration::from_secs(1);

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

/// The process can work: its database answers, and takes what is written
#[utoipa::path(
    get, path = "/readyz", tag = "server", security(()),
    responses((status = 200, description = "It can", body = Health), (status = 503, description = "It cannot", body = ErrorBody))
)]
pub async fn readyz(State(app): State<Arc<App>>) -> Result<Json<Health>, Refusal> {
    let unavailable = |what: &str| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "STORE_UNAVAILABLE", what);
    app.answers
        .asked(async {
            // On its own: a client that hangs up does not break a connection to the database off.
            let outbox = app.outbox.clone();
            let asking = tokio::spawn(async move { outbox.paused_lanes().await });
            match tokio::time::timeout(PATIENCE, asking).await {
                Ok(Ok(Ok(_))) => Ok(()),
                Ok(Ok(Err(error))) => Err(error.into()),
                Ok(Err(_)) | Err(_) => Err(unavailable("the database does not answer in time")),
            }
        })
        .await?;
    match writes::trouble() {
        None => Ok(Json(Health { status: "ok" })),
        Some(trouble) => Err(unavailable(&postrider::Error::from(trouble).message)),
    }
}

/// Whether the database answers. Everybody may ask, as often as they like: it is asked once in a while.
#[derive(Default)]
pub struct Answers(Mutex<Option<(Tick, Result<(), Refusal>)>>);

impl Answers {
    async fn asked(&self, ask: impl Future<Output = Result<(), Refusal>>) -> Result<(), Refusal> {
        let mut last = self.0.lock().await;
        if let Some((at, answer)) = &*last
            && Tick::now().since(*at) < FRESH
        {
            return answer.clone();
        }
        let answer = ask.await;
        *last = Some((Tick::now(), answer.clone()));
        answer
    }
}

/// What works, and whether that is enough.
#[derive(Serialize, ToSchema)]
pub struct GateView {
    ok: bool,
    /// `ok`, `degraded` or `failed`.
    status: &'static str,
    #[schema(example = "postrider")]
    service: &'static str,
    /// `FULL` or `DEGRADED`.
    mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// `ok`, `failed` or `skipped`, by name.
    capabilities: BTreeMap<String, &'static str>,
    /// Who said that what is skipped need not be there: `config`, `environment` or `request`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    skipped_by: BTreeMap<String, &'static str>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct GateQuery {
    /// Capabilities to leave out, with commas between.
    skip: Option<String>,
}

/// What works, and whether that is enough
///
/// In the mode FULL everything must; in DEGRADED what does not is said. What was read within the last second, and tried within the last five (a write, a call to OpenMemory), is told again.
#[utoipa::path(
    get, path = "/health", tag = "server", security(()), params(GateQuery),
    responses(
        (status = 200, description = "The gate passes", body = GateView),
        (status = 400, description = "An unknown capability", body = ErrorBody),
        (status = 503, description = "It does not", body = GateView),
    )
)]
pub async fn health(
    State(app): State<Arc<App>>,
    query: Result<Query<GateQuery>, QueryRejection>,
) -> Result<(StatusCode, Json<GateView>), Refusal> {
    let skip: Vec<String> = query?.0.skip.map_or(vec![], |skip| {
        skip.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
    });
    let rules = app.gate_rules.with(&skip).map_err(Refusal::invalid)?;
    let verdict = app.gate.look(&rules).await;
    let status = match (verdict.passed, verdict.is_degraded()) {
        (false, _) => "failed",
        (true, true) => "degraded",
        (true, false) => "ok",
    };
    let skipped_by = verdict.capabilities.iter().filter_map(|(name, standing)| match standing {
        Standing::Skipped(source) => Some((name.clone(), source.as_str())),
        _ => None,
    });
    let view = GateView {
        skipped_by: skipped_by.collect(),
        ok: verdict.passed,
        status,
        service: "postrider",
        mode: verdict.mode.as_str(),
        capabilities: verdict.capabilities.iter().map(|(name, standing)| (name.clone(), standing.as_str())).collect(),
        reason: verdict.reason,
    };
    let code = if verdict.passed { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    Ok((code, Json(view)))
}

/// Metrics for Prometheus
///
/// A token for some lanes sees the numbers of those.
#[utoipa::path(
    get, path = "/metrics", tag = "server",
    responses((status = 200, description = "In the text format", body = String, content_type = "application/openmetrics-text"))
)]
pub async fn metrics(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<impl IntoResponse, Refusal> {
    if let Some((report, _)) = app.doctor.last() {
        let left = report.findings.iter().filter(|finding| !finding.repaired).map(|finding| finding.count);
        app.meters.diagnosed(left.sum());
    }
    let mut page = app.meters.page(&app.outbox, app.memories.as_ref()).await?;
    if !caller.is_unlimited() {
        let memories = caller.sees(postrider_memories::LANE) && caller.spaces().are_all();
        page = metrics::seen(&page, |lane| caller.sees(lane), memories);
    }
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], page))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_database_is_asked_once_in_a_while() {
        let (answers, asked) = (Answers::default(), std::cell::Cell::new(0));
        let ask = || {
            answers.asked(async {
                asked.set(asked.get() + 1);
                Err(Refusal::not_found("away"))
            })
        };
        for _ in 0..10 {
            assert!(ask().await.is_err(), "what failed is told again");
        }
        assert_eq!(asked.get(), 1);
    }
}
