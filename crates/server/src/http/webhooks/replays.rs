//! Replays over HTTP.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use postrider::Timestamp;
use postrider_webhooks::{NewReplay, Replay};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::super::App;
use super::super::error::Refusal;
use super::super::request::{Body, Id, id_of, no};

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
/// A job of its own that survives a restart. With `dry_run` only counts. What is still being delivered is left out. With
/// very many events counting is given up after a few seconds: `count` is then a least number, and `count_at_least` is true.
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
    let mut answer = json!({ "count": count.count });
    if count.at_least {
        answer["count_at_least"] = json!(true);
    }
    if dry_run {
        return Ok((StatusCode::OK, Json(answer)));
    }
    let replay = app.webhooks.replay(wanted).await?.ok_or_else(missing)?;
    answer["replay_id"] = json!(replay.id);
    Ok((StatusCode::ACCEPTED, Json(answer)))
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
