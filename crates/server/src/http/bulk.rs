//! Many dead messages of a lane over HTTP, as many as a few seconds allow; whoever asks again goes on with the rest.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Extension, State};
use postrider::clock::Tick;
use postrider::message::check_lane_name;
use postrider::store::Requeued;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::App;
use super::auth::Caller;
use super::error::{ErrorBody, Refusal};

/// A request takes about so long at most.
const LONGEST: Duration = Duration::from_secs(6);
/// Messages of one step.
const STEP: u32 = 500;
/// Ids that are told one by one.
const MOST_TOLD: usize = 1_000;

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RequeueFilter {
    /// All dead messages of this lane.
    #[schema(pattern = "^[A-Za-z0-9._-]{1,64}$")]
    lane: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RequeueMany {
    filter: RequeueFilter,
    /// Only count.
    #[serde(default)]
    dry_run: bool,
}

#[derive(Default, Serialize, ToSchema)]
pub struct RequeuedMany {
    /// How many came back, or would.
    count: u64,
    /// How many stay dead, because their key or active key belongs to another undelivered message.
    conflicts: u64,
    /// How many somebody else holds at the moment.
    held: u64,
    /// The first of those that did not come back.
    left: Vec<i64>,
    /// There was no time for all of them: ask again.
    more: bool,
}

/// Bring all dead messages of a lane back
///
/// As many as a few seconds allow: ask again while `more` is true. Conflicts are told and harm no other.
#[utoipa::path(
    post, path = "/v1/outbox/requeue", tag = "outbox", request_body = RequeueMany,
    responses(
        (status = 200, description = "How many", body = RequeuedMany),
        (status = 409, description = "`LANE_OWNED`", body = ErrorBody),
    )
)]
pub async fn requeue_many(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Result<Json<RequeueMany>, JsonRejection>,
) -> Result<Json<RequeuedMany>, Refusal> {
    let RequeueMany { filter: RequeueFilter { lane }, dry_run } = body?.0;
    check_lane_name(&lane).map_err(|e| Refusal::invalid(e.message))?;
    caller.may_use(&lane)?;
    if !app.outbox.has_lane(&lane).await? {
        app.outbox.lanes().get(&lane)?;
    }
    let (begun, until) = (Tick::now(), app.outbox.now().await?);
    let (mut sum, mut after) = (RequeuedMany::default(), None);
    loop {
        let died = app.outbox.dead(&lane, after, until, STEP).await?;
        let Some(last) = died.last() else { return Ok(Json(sum)) };
        if Tick::now().since(begun) > LONGEST {
            sum.more = true;
            return Ok(Json(sum));
        }
        after = Some(*last);
        let ids: Vec<i64> = died.iter().map(|died| died.id).collect();
        if dry_run {
            sum.count += ids.len() as u64;
            continue;
        }
        for (id, outcome) in ids.iter().zip(app.outbox.requeue(ids.clone()).await?) {
            match outcome {
                Requeued::Requeued => sum.count += 1,
                Requeued::Conflict => sum.conflicts += 1,
                Requeued::Held => sum.held += 1,
                Requeued::NotDead => continue,
            }
            if outcome != Requeued::Requeued && sum.left.len() < MOST_TOLD {
                sum.left.push(*id);
            }
        }
    }
}
