//! The doctor over HTTP: the last round, and a wish for another.

use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Extension, Json, State};
use axum::http::StatusCode;
use postrider::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::{App, Caller, Refusal};

/// The last round of the doctor; nothing before the first.
#[derive(Serialize, ToSchema)]
pub struct Round {
    /// Nothing is left; `null` before the first round.
    pub ok: Option<bool>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Timestamp>,
    /// How long ago that was.
    pub age_seconds: Option<f64>,
    /// `check`, `part`, `count`, `ids` (at most 100), `message`, `advice`, `repaired`.
    #[schema(value_type = Vec<Object>)]
    pub findings: Vec<Value>,
}

/// What the doctor is to do.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Wish {
    /// Repair what can be repaired safely.
    #[serde(default)]
    pub repair: bool,
}

#[derive(Serialize, ToSchema)]
pub struct Asked {
    pub asked: bool,
}

/// A round speaks of everything.
fn all_lanes(caller: &Caller) -> Result<(), Refusal> {
    caller.must_be_unlimited("the doctor looks at all lanes and all memories")
}

/// Show the doctor's last round
#[utoipa::path(
    get, path = "/v1/doctor", tag = "server",
    responses((status = 200, description = "The last round and its age", body = Round))
)]
pub async fn last(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Result<Json<Round>, Refusal> {
    all_lanes(&caller)?;
    Ok(Json(match app.doctor.last() {
        None => Round { ok: None, finished_at: None, age_seconds: None, findings: vec![] },
        Some((report, age)) => Round {
            ok: Some(report.ok),
            finished_at: Some(report.finished_at),
            age_seconds: Some(age.as_secs_f64()),
            findings: report.findings.iter().map(|finding| serde_json::json!(finding)).collect(),
        },
    }))
}

/// Ask the doctor for a round
///
/// It begins at once and takes a few seconds; `GET` shows its end.
#[utoipa::path(
    post, path = "/v1/doctor", tag = "server", request_body = Wish,
    responses((status = 202, description = "It was asked for", body = Asked))
)]
pub async fn ask(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    wish: Result<Json<Wish>, JsonRejection>,
) -> Result<(StatusCode, Json<Asked>), Refusal> {
    all_lanes(&caller)?;
    let Json(wish) = wish?;
    app.doctor.ask(wish.repair);
    Ok((StatusCode::ACCEPTED, Json(Asked { asked: true })))
}
