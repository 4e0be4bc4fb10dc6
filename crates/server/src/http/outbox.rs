//! The outbox over HTTP: enqueue one or many, list, show, requeue, pause and resume. Wire types live here.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use postrider::message::{check_lane_name, hex, sha256};
use postrider::outcome::in_our_words;
use postrider::store::{Attempt, Filter, History, Requeued, Retried, Shown, Status};
use postrider::{Enqueued, Entry, NewMessage, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::auth::Caller;
use super::error::{ErrorBody, Refusal};
use super::request::{cursor, first, header, id_of, listing, page_of, seen, unquoted};
use crate::config::values::parse_duration;
use crate::tokens::Scope;

const MOST_OF_A_BATCH: usize = 1000;

/// What became of a message.
#[derive(Serialize, ToSchema)]
pub struct Accepted {
    #[schema(example = 17)]
    pub id: i64,
    /// `created`, or `exists` when the same message is there already under its key; in a batch also `differs`.
    #[schema(example = "created")]
    pub outcome: &'static str,
}

impl From<Entry> for Accepted {
    fn from(entry: Entry) -> Self {
        let outcome = match entry.outcome {
            Enqueued::Created => "created",
            Enqueued::Exists => "exists",
            Enqueued::Differs => "differs",
        };
        Accepted { id: entry.id, outcome }
    }
}

/// The headers of an enqueue, besides `Content-Type`.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[allow(dead_code)] // it only documents: headers are read by name
pub struct EnqueueHeaders {
    /// The same key with the same content again is the same message. At most 255 bytes; quotes around it are not part of it.
    #[param(rename = "Idempotency-Key", min_length = 1, max_length = 255)]
    idempotency_key: Option<String>,
    /// Where it goes, as far as the lane tells destinations apart.
    #[param(rename = "Postrider-Target", min_length = 1, max_length = 1024)]
    target: Option<String>,
    /// At most one undelivered message of the lane has this.
    #[param(rename = "Postrider-Active-Key", min_length = 1, max_length = 255)]
    active_key: Option<String>,
    /// Not before this has passed: `500ms`, `5s`, `10m`, `2h`, `1d`.
    #[param(rename = "Postrider-Delay", example = "5s", pattern = "^([0-9]+(ms|s|m|h|d)|0)$")]
    delay: Option<String>,
    /// Past this moment it is not worth delivering.
    #[param(rename = "Postrider-Deliver-Before", example = "2030-01-01T00:00:00Z", format = "date-time")]
    deliver_before: Option<String>,
}

fn lane_of(path: Result<Path<String>, PathRejection>) -> Result<String, Refusal> {
    Ok(path?.0)
}

fn parsed<T>(headers: &HeaderMap, name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, Refusal> {
    let read = header(headers, name)?.map(|text| parse(text.trim()));
    read.transpose().map_err(|e| Refusal::invalid(format!("{name}: {e}")))
}

fn message(lane: &str, headers: &HeaderMap, payload: Bytes) -> Result<NewMessage, Refusal> {
    let text = |name: &str| Ok::<_, Refusal>(header(headers, name)?.map(str::to_owned));
    let mut message = NewMessage::new(lane, payload);
    message.content_type = text("Content-Type")?;
    message.key = header(headers, "Idempotency-Key")?.map(|key| unquoted(key).to_owned());
    message.target = text("Postrider-Target")?;
    message.active_key = text("Postrider-Active-Key")?;
    message.delay = parsed(headers, "Postrider-Delay", parse_duration)?.unwrap_or_default();
    message.deliver_before = parsed(headers, "Postrider-Deliver-Before", Timestamp::from_str)?;
    message.correlation_id = text("X-Correlation-ID")?;
    // The trace of whoever enqueues goes on to the destination.
    for name in ["traceparent", "tracestate"] {
        message.headers.extend(first(headers, name)?.map(|value| (name.to_owned(), value.to_owned())));
    }
    Ok(message)
}

fn checked(app: &App, message: NewMessage) -> Result<NewMessage, Refusal> {
    let rules = app.outbox.lanes().get(&message.lane)?;
    if message.payload.len() > rules.max_payload_bytes {
        let most = rules.max_payload_bytes;
        let what =
            format!("the payload has {} bytes, the lane takes {most}; send a reference instead", message.payload.len());
        return Err(
            Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE", what).with("max_payload_bytes", most)
        );
    }
    message.validate(rules)?;
    Ok(message)
}

/// Write one message
///
/// The body is the payload, as it is. Answered only once it is committed.
#[utoipa::path(
    post, path = "/v1/outbox/{lane_or_id}", tag = "outbox",
    params(("lane_or_id" = String, Path, description = "A lane of the configuration"), EnqueueHeaders),
    request_body(content = String, content_type = "application/octet-stream", description = "The payload, of any content type"),
    responses(
        (status = 201, description = "Committed", body = Accepted),
        (status = 200, description = "It is there already, under its key", body = Accepted),
        (status = 409, description = "`DIFFERS`: the key belongs to another message, nothing was written; `LANE_OWNED`", body = ErrorBody),
    )
)]
pub async fn enqueue(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<Accepted>), Refusal> {
    let lane = lane_of(path)?;
    caller.may_use(&lane)?;
    app.outbox.lanes().get(&lane)?;
    let message = checked(&app, message(&lane, &headers, body?)?)?;
    // Who looks for a message by its key finds it by the key's digest; the key itself is never told.
    let key = message.key.as_ref().map(|key| hex(&sha256(key.as_bytes())));
    let entry = app.messages.put(message).await?;
    let outcome = Accepted::from(entry).outcome;
    tracing::debug!(idempotency_key = key, outbox_id = entry.id, lane, status = outcome, "taken in");
    match entry.outcome {
        Enqueued::Created => Ok((StatusCode::CREATED, Json(entry.into()))),
        Enqueued::Exists => Ok((StatusCode::OK, Json(entry.into()))),
        Enqueued::Differs => {
            app.meters.conflict(&lane);
            let what = format!("the key belongs to another message, {}; nothing was written", entry.id);
            Err(Refusal::new(StatusCode::CONFLICT, "DIFFERS", what).with("id", entry.id))
        }
    }
}

/// Many messages for one transaction.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    #[schema(max_items = 1000)]
    messages: Vec<BatchMessage>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchMessage {
    /// A string is sent as text, anything else as its JSON.
    #[schema(value_type = serde_json::Value)]
    payload: Box<RawValue>,
    #[schema(min_length = 1, max_length = 255)]
    key: Option<String>,
    #[schema(min_length = 1, max_length = 1024)]
    target: Option<String>,
    #[schema(min_length = 1, max_length = 255)]
    active_key: Option<String>,
    #[schema(example = "5s", pattern = "^([0-9]+(ms|s|m|h|d)|0)$")]
    delay: Option<String>,
    /// Past this moment it is not worth delivering.
    #[schema(example = "2030-01-01T00:00:00Z", format = "date-time")]
    deliver_before: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    content_type: Option<String>,
}

impl BatchMessage {
    fn into_message(self, lane: &str) -> Result<NewMessage, String> {
        let raw = self.payload.get();
        let (payload, usual) = if raw.starts_with('"') {
            (serde_json::from_str::<String>(raw).map_err(|e| e.to_string())?, "text/plain")
        } else {
            (raw.to_owned(), "application/json")
        };
        let mut message = NewMessage::new(lane, payload);
        message.content_type = self.content_type.or(Some(usual.to_owned()));
        message.key = self.key;
        message.target = self.target;
        message.active_key = self.active_key;
        message.delay = self.delay.as_deref().map(parse_duration).transpose()?.unwrap_or(Duration::ZERO);
        message.deliver_before = self.deliver_before.as_deref().map(Timestamp::from_str).transpose()?;
        check_headers(&self.headers)?;
        message.headers = self.headers.into_iter().collect();
        Ok(message)
    }
}

/// Refuses what could never be sent as a header. What is no name may be a whole header, with its secret: it is not repeated.
pub fn check_headers(headers: &BTreeMap<String, String>) -> Result<(), String> {
    for (name, value) in headers {
        if HeaderName::from_bytes(name.as_bytes()).is_err() {
            return Err("a header has a name that cannot be sent; write {\"Name\": \"value\"}".to_owned());
        }
        if HeaderValue::from_bytes(value.as_bytes()).is_err() {
            return Err(format!("the header `{name}` cannot be sent: its value is none of a header"));
        }
    }
    Ok(())
}

#[derive(Serialize, ToSchema)]
pub struct Results {
    /// In the order of the messages. One that `differs` wrote nothing and harmed no other.
    results: Vec<Accepted>,
}

/// Write many messages in one transaction
#[utoipa::path(
    post, path = "/v1/outbox/{lane_or_id}/batch", tag = "outbox",
    params(("lane_or_id" = String, Path, description = "A lane of the configuration")),
    request_body = Batch,
    responses(
        (status = 200, description = "Committed", body = Results),
        (status = 409, description = "`LANE_OWNED`", body = ErrorBody),
    )
)]
pub async fn enqueue_batch(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<String>, PathRejection>,
    body: Result<Json<Batch>, JsonRejection>,
) -> Result<Json<Results>, Refusal> {
    let lane = lane_of(path)?;
    caller.may_use(&lane)?;
    app.outbox.lanes().get(&lane)?;
    let batch = body?.0.messages;
    if batch.len() > MOST_OF_A_BATCH {
        let what = format!("{} messages at once are too many; send at most {MOST_OF_A_BATCH}", batch.len());
        return Err(Refusal::invalid(what).with("max_messages", MOST_OF_A_BATCH));
    }
    let mut messages = Vec::with_capacity(batch.len());
    for (n, entry) in batch.into_iter().enumerate() {
        let numbered = |refusal: Refusal| Refusal { message: format!("messages[{n}]: {}", refusal.message), ..refusal };
        let message = entry.into_message(&lane).map_err(|e| numbered(Refusal::invalid(e)))?;
        messages.push(checked(&app, message).map_err(numbered)?);
    }
    let entries = app.outbox.enqueue(messages).await?;
    Ok(Json(Results { results: entries.into_iter().map(Accepted::from).collect() }))
}

/// A message, without its payload.
#[derive(Serialize, ToSchema)]
pub struct MessageView {
    id: i64,
    lane: String,
    shard_id: u32,
    /// `pending`, `leased`, `sent` or `dead`.
    status: &'static str,
    attempts: u32,
    crashes: u32,
    maybe_sent: bool,
    lease_token: i64,
    due_at: String,
    lease_until: Option<String>,
    /// Who holds it, or held it last and never came back. An outcome ends it.
    locked_by: Option<String>,
    locked_at: Option<String>,
    /// Who holds it, or held it when it ended; since its claim, or its last renewal.
    claimed_by: Option<String>,
    claimed_at: Option<String>,
    target: Option<String>,
    active_key: Option<String>,
    payload_sha: Option<String>,
    payload_bytes: i64,
    content_type: Option<String>,
    result_ref: Option<String>,
    last_error_code: Option<String>,
    /// What the destination said is told to those who have the scope `payload`.
    last_error: Option<String>,
    correlation_id: Option<String>,
    created_at: String,
    deliver_before: Option<String>,
    finished_at: Option<String>,
}

impl From<Shown> for MessageView {
    fn from(m: Shown) -> Self {
        let moment = |at: Option<Timestamp>| at.map(|at| at.to_string());
        MessageView {
            id: m.id,
            lane: m.lane,
            shard_id: m.shard_id,
            status: m.status.as_str(),
            attempts: m.attempts,
            crashes: m.crashes,
            maybe_sent: m.maybe_sent,
            lease_token: m.lease_token,
            due_at: m.due_at.to_string(),
            lease_until: moment(m.lease_until),
            locked_by: m.locked_by,
            locked_at: moment(m.locked_at),
            claimed_by: m.claimed_by,
            claimed_at: moment(m.claimed_at),
            target: m.target,
            active_key: m.active_key,
            payload_sha: m.payload_sha,
            payload_bytes: m.payload_bytes,
            content_type: m.content_type,
            result_ref: m.result_ref,
            last_error_code: m.last_error_code,
            last_error: m.last_error,
            correlation_id: m.correlation_id,
            created_at: m.created_at.to_string(),
            deliver_before: moment(m.deliver_before),
            finished_at: moment(m.finished_at),
        }
    }
}

/// An attempt that did not simply succeed.
#[derive(Serialize, ToSchema)]
pub struct AttemptView {
    at: String,
    /// `retry`, `dead` or `takeover`.
    kind: String,
    attempt: u32,
    lease_token: i64,
    code: Option<String>,
    error: Option<String>,
    worker: Option<String>,
}

impl From<Attempt> for AttemptView {
    fn from(a: Attempt) -> Self {
        let at = a.at.to_string();
        AttemptView {
            at,
            kind: a.kind,
            attempt: a.attempt,
            lease_token: a.lease_token,
            code: a.code,
            error: a.error,
            worker: a.worker,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub struct MessageWithHistory {
    #[serde(flatten)]
    message: MessageView,
    /// Attempts that did not simply succeed, at most the latest thousand.
    history: Vec<AttemptView>,
    /// There were more before these.
    history_truncated: bool,
}

impl From<(Shown, History)> for MessageWithHistory {
    fn from((message, history): (Shown, History)) -> Self {
        MessageWithHistory {
            message: message.into(),
            history: history.attempts.into_iter().map(AttemptView::from).collect(),
            history_truncated: history.truncated,
        }
    }
}

listing!(MessageList, MessageView);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// Only this lane.
    #[param(pattern = "^[A-Za-z0-9._-]{1,64}$")]
    lane: Option<String>,
    /// Only `pending`, `leased`, `sent` or `dead`.
    #[param(pattern = "^(pending|leased|sent|dead)$")]
    status: Option<String>,
    /// Only the message with this key or active key.
    #[param(max_length = 255)]
    key: Option<String>,
    /// Only this target. A page searches 50,000 messages; the next one goes on.
    #[param(max_length = 255)]
    target: Option<String>,
    /// At most this many.
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    #[param(pattern = "^[0-9]{1,18}$")]
    cursor: Option<String>,
}

/// List messages, newest first
///
/// A page looks at a bounded number of messages. One with fewer than `limit` items and a `next_cursor` has not seen all: what
/// is older is on the next.
#[utoipa::path(
    get, path = "/v1/outbox", tag = "outbox", params(ListQuery),
    responses((status = 200, description = "A page of them", body = MessageList))
)]
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<MessageList>, Refusal> {
    let query = query?.0;
    let lane = match (query.lane, caller.lanes()) {
        (Some(lane), _) => {
            check_lane_name(&lane).map_err(|e| Refusal::invalid(e.message))?;
            caller.may_use(&lane)?;
            Some(lane)
        }
        (None, [own]) => Some(own.clone()),
        // Of several the page is made of what is seen.
        (None, _) => None,
    };
    let status =
        query.status.map(|text| text.parse::<Status>()).transpose().map_err(|e| Refusal::invalid(e.to_string()))?;
    let (limit, before) = page_of(query.limit, query.cursor.as_ref())?;
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let (key, target) = (given(query.key), given(query.target));
    if [&key, &target].into_iter().flatten().any(|text| text.contains('\0')) {
        return Err(Refusal::invalid("a key or a target has no NUL".to_owned()));
    }
    // Not even by where a next page would begin is told whether another space has any.
    if lane.as_deref().zip(target.as_deref()).is_some_and(|(lane, target)| !caller.sees_message(lane, Some(target))) {
        return Ok(Json(MessageList { items: vec![], next_cursor: None }));
    }
    let filter = Filter { lane, status, before, key, target, limit };
    let list = |before, limit| app.outbox.list(Filter { before, limit, ..filter.clone() });
    let page = seen((before, limit), list, |m: &Shown| caller.sees_message(&m.lane, m.target.as_deref())).await?;
    let view = |mut message: Shown| {
        keep_from(&caller, &mut message.last_error);
        MessageView::from(message)
    };
    let items = page.items.into_iter().map(view).collect();
    Ok(Json(MessageList { items, next_cursor: cursor(page.next) }))
}

async fn find(app: &App, caller: &Caller, id: i64) -> Result<(Shown, History), Refusal> {
    let found = app.outbox.show(id).await?.filter(|(m, _)| caller.sees_message(&m.lane, m.target.as_deref()));
    let (mut message, mut history) = found.ok_or_else(|| Refusal::not_found(format!("there is no message {id}")))?;
    keep_from(caller, &mut message.last_error);
    history.attempts.iter_mut().for_each(|attempt| keep_from(caller, &mut attempt.error));
    Ok((message, history))
}

/// What a destination said may repeat what was sent: it is for those who may see payloads.
fn keep_from(caller: &Caller, error: &mut Option<String>) {
    if caller.may(Scope::Payload).is_err()
        && let Some(error) = error
    {
        error.truncate(in_our_words(error).len());
    }
}

/// Show a message and its history
#[utoipa::path(
    get, path = "/v1/outbox/{lane_or_id}", tag = "outbox",
    params(("lane_or_id" = i64, Path, description = "A message's id")),
    responses((status = 200, description = "The message", body = MessageWithHistory))
)]
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<MessageWithHistory>, Refusal> {
    Ok(Json(find(&app, &caller, id_of(path)?).await?.into()))
}

/// Bring a dead message back
///
/// Under its id, with all attempts before it.
#[utoipa::path(
    post, path = "/v1/outbox/{lane_or_id}/requeue", tag = "outbox",
    params(("lane_or_id" = i64, Path, description = "A message's id")),
    responses(
        (status = 200, description = "It is due now", body = MessageWithHistory),
        (status = 409, description = "`NOT_DEAD`, `ACTIVE_KEY_TAKEN`, `MESSAGE_HELD` or `LANE_OWNED`", body = ErrorBody),
    )
)]
pub async fn requeue(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<MessageWithHistory>, Refusal> {
    let id = id_of(path)?;
    let (message, _) = find(&app, &caller, id).await?;
    let conflict = |code, what: String| Err(Refusal::new(StatusCode::CONFLICT, code, what).with("id", id));
    match app.outbox.requeue(vec![id]).await?.first() {
        Some(Requeued::Requeued) => Ok(Json(find(&app, &caller, id).await?.into())),
        Some(Requeued::Conflict) => {
            conflict("ACTIVE_KEY_TAKEN", format!("another message has the key or the active key of message {id}"))
        }
        Some(Requeued::Held) => {
            conflict("MESSAGE_HELD", format!("somebody else holds message {id} or its key at the moment; try again"))
        }
        _ => conflict("NOT_DEAD", format!("message {id} is {}; only dead ones come back", message.status.as_str())),
    }
}

/// What became of a message that was to be tried now.
#[derive(Serialize, ToSchema)]
pub struct RetryAnswer {
    id: i64,
    /// `retried`: it is due now; `leased`: a worker is at it; `ended`: it is over.
    #[schema(example = "retried")]
    outcome: &'static str,
}

/// Try a waiting message now
///
/// Whatever it waits for: its delay, its next attempt. What was given up comes back by `requeue`.
#[utoipa::path(
    post, path = "/v1/outbox/{lane_or_id}/retry", tag = "outbox",
    params(("lane_or_id" = i64, Path, description = "A message's id")),
    responses(
        (status = 200, description = "What became of it", body = RetryAnswer),
        (status = 409, description = "`LANE_OWNED`", body = ErrorBody),
    )
)]
pub async fn retry(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<RetryAnswer>, Refusal> {
    let id = id_of(path)?;
    let (message, _) = find(&app, &caller, id).await?;
    let retried = match &app.memories {
        Some(memories) if message.lane == postrider_memories::LANE => memories.retry(id).await?,
        _ => app.outbox.retry(id).await?,
    };
    let outcome = match retried {
        Retried::Retried => "retried",
        Retried::Leased => "leased",
        Retried::Ended => "ended",
    };
    Ok(Json(RetryAnswer { id, outcome }))
}

/// Whether workers claim from a lane.
#[derive(Serialize, ToSchema)]
pub struct LaneState {
    lane: String,
    paused: bool,
}

async fn set_paused(
    app: &App,
    caller: &Caller,
    path: Result<Path<String>, PathRejection>,
    paused: bool,
) -> Result<Json<LaneState>, Refusal> {
    let lane = lane_of(path)?;
    caller.may_use(&lane)?;
    if lane == postrider_memories::LANE && !caller.spaces().are_all() {
        return Err(Refusal::forbidden("the lane `memory` serves every space; this token is for some of them only"));
    }
    if paused {
        app.outbox.pause(&lane).await?
    } else {
        app.outbox.resume(&lane).await?
    };
    Ok(Json(LaneState { lane, paused }))
}

/// Hold a lane
///
/// Workers stop claiming within about a second; the backlog waits and loses nothing.
#[utoipa::path(
    post, path = "/v1/lanes/{lane}/pause", tag = "lanes",
    params(("lane" = String, Path, description = "A lane of the configuration")),
    responses((status = 200, description = "It is paused", body = LaneState))
)]
pub async fn pause(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<LaneState>, Refusal> {
    set_paused(&app, &caller, path, true).await
}

/// Let a lane go on
#[utoipa::path(
    post, path = "/v1/lanes/{lane}/resume", tag = "lanes",
    params(("lane" = String, Path, description = "A lane of the configuration")),
    responses((status = 200, description = "It is open", body = LaneState))
)]
pub async fn resume(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<LaneState>, Refusal> {
    set_paused(&app, &caller, path, false).await
}
