//! The memory gateway over HTTP: the routes of `/memory`, the audit, and `/mcp`, which takes both MCP and the plain
//! `{"tool","arguments"}` body.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Extension, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use postrider_memories::{AuditFilter, AuditRow, Memories};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use super::error::{ErrorBody, ErrorDetail, Refusal, bounded};
use super::request::{cursor, listing, page_of, seen_of_any_size};
use super::{App, CORRELATION_ID, Caller, MOST_BODY};
use crate::mcp;
use crate::mcp_wire;
use crate::tools::{Answered, Tools};

/// A memory to store.
#[derive(Deserialize, ToSchema)]
#[allow(dead_code)] // it only describes: the tool reads it
#[serde(deny_unknown_fields)]
pub struct StoreBody {
    /// What to remember, in Markdown.
    #[schema(min_length = 1, example = "We chose SQLite by default: one file, no server.")]
    payload_md: String,
    /// Who shares it.
    #[schema(example = "team:payments")]
    target_space: Option<String>,
    kind: Option<String>,
    #[schema(value_type = Option<Vec<Value>>)]
    evidence_refs: Option<Vec<Value>>,
    #[schema(value_type = Option<Object>)]
    meta_json: Option<Value>,
    actor_user_id: Option<String>,
    skip: Option<Vec<String>>,
}

/// What became of it; the same fields whatever happened.
#[derive(ToSchema)]
#[allow(dead_code)]
pub struct StoreAnswer {
    ok: bool,
    /// `allow`, `deferred`, `reject` or `error`.
    #[schema(pattern = "^(allow|deferred|reject|error)$")]
    action: String,
    /// The message that will bring it, when deferred.
    outbox_id: Option<i64>,
    correlation_id: String,
    space_written: Option<String>,
    memory_id: Option<String>,
    #[schema(value_type = Vec<Value>)]
    evidence_refs: Vec<Value>,
    message: String,
    /// It was stored before, or OpenMemory takes it for a memory it has.
    deduplicated: bool,
    /// OpenMemory keeps only this memory, which it takes for the same; the text is kept here and found by questions.
    merged_with: Option<String>,
    payload_sha: Option<String>,
    /// Only when it was not taken.
    error: Option<ErrorDetail>,
}

/// A question.
#[derive(Deserialize, ToSchema)]
#[allow(dead_code)]
#[serde(deny_unknown_fields)]
pub struct QueryBody {
    #[schema(min_length = 1, example = "which database")]
    query: String,
    /// Left out: all.
    spaces: Option<Vec<String>>,
    #[schema(minimum = 1, maximum = 100)]
    top_k: Option<u32>,
}

/// One thing that was found.
#[derive(ToSchema)]
#[allow(dead_code)]
pub struct RecalledView {
    memory_id: Option<String>,
    content: String,
    score: Option<f64>,
    space: Option<String>,
    /// `openmemory`, `memory_writes` (our copy of what OpenMemory merged away) or `outbox_memory` (not delivered yet);
    /// degraded also `knowledge_candidates` or `logbook_events`.
    source: String,
    kind: Option<String>,
    outbox_id: Option<i64>,
    #[schema(format = "date-time")]
    created_at: Option<String>,
    /// The memory OpenMemory keeps in its place.
    merged_with: Option<String>,
    #[schema(value_type = Vec<Value>)]
    evidence_refs: Vec<Value>,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct QueryAnswer {
    ok: bool,
    results: Vec<RecalledView>,
    total: usize,
    spaces_searched: Vec<String>,
    /// The memory service could not be asked.
    degraded: bool,
    message: String,
    correlation_id: String,
}

/// One row of `write_audit`.
#[derive(Serialize, ToSchema)]
pub struct AuditView {
    audit_id: i64,
    #[schema(format = "date-time")]
    created_at: String,
    #[schema(format = "date-time")]
    updated_at: String,
    actor_user_id: Option<String>,
    target_space: Option<String>,
    /// `allow`, `redirect` or `reject`.
    action: String,
    reason: String,
    /// `pending`, `success`, `redirected` or `failed`.
    status: String,
    payload_sha: Option<String>,
    correlation_id: Option<String>,
    outbox_id: Option<i64>,
    #[schema(value_type = Object)]
    evidence_refs_json: Value,
}

impl From<AuditRow> for AuditView {
    fn from(row: AuditRow) -> Self {
        AuditView {
            audit_id: row.audit_id,
            created_at: row.created_at.to_string(),
            updated_at: row.updated_at.to_string(),
            actor_user_id: row.actor_user_id,
            target_space: row.target_space,
            action: row.action,
            reason: row.reason,
            status: row.status,
            payload_sha: row.payload_sha,
            correlation_id: row.correlation_id,
            outbox_id: row.outbox_id,
            evidence_refs_json: row.evidence_refs_json,
        }
    }
}

listing!(AuditRows, AuditView);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct AuditQuery {
    correlation_id: Option<String>,
    outbox_id: Option<i64>,
    limit: Option<u32>,
    cursor: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[allow(dead_code)]
#[serde(deny_unknown_fields)]
pub struct ReconcileBody {
    /// Only count, repair nothing.
    report: Option<bool>,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct ReconcileAnswer {
    scanned: usize,
    missing_audit: usize,
    stale_pending: usize,
    repaired: usize,
}

impl IntoResponse for Answered {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body)).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, super::error::RETRY_AFTER);
        }
        response
    }
}

fn correlation_id(headers: &HeaderMap) -> &str {
    headers.get(&CORRELATION_ID).and_then(|id| id.to_str().ok()).unwrap_or_default()
}

async fn call(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    tool: &str,
    body: Result<Json<Map<String, Value>>, JsonRejection>,
) -> Answered {
    let id = correlation_id(headers);
    match body {
        Ok(Json(arguments)) => app.tools.call(caller, tool, arguments, id).await,
        Err(rejection) => Answered::refused(rejection.into(), id),
    }
}

/// Store a memory
///
/// 200 once it is in OpenMemory; 202 when it is queued and will be brought there (`deferred`). Storing the same text again
/// is harmless.
#[utoipa::path(
    post, path = "/memory/store", tag = "memory", request_body = StoreBody,
    responses(
        (status = 200, description = "Written", body = StoreAnswer),
        (status = 202, description = "Deferred: queued, and written later", body = StoreAnswer),
        (status = 403, description = "`reject`: the project or OpenMemory does not take it", body = StoreAnswer),
        (status = 404, description = "`MEMORY_NOT_CONFIGURED`", body = ErrorBody),
        (status = 422, description = "It cannot be stored as it is", body = ErrorBody),
        (status = 503, description = "`AUDIT_WRITE_FAILED`, `OUTBOX_ENQUEUE_FAILED`: try again later", body = StoreAnswer),
    )
)]
pub async fn store(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Result<Json<Map<String, Value>>, JsonRejection>,
) -> Answered {
    call(&app, &caller, &headers, "memory_store", body).await
}

/// Look into memory
///
/// OpenMemory is asked; when it cannot be, the answer comes from local copies by keywords, with `degraded: true`.
#[utoipa::path(
    post, path = "/memory/query", tag = "memory", request_body = QueryBody,
    responses(
        (status = 200, description = "What was found", body = QueryAnswer),
        (status = 404, description = "`MEMORY_NOT_CONFIGURED`", body = ErrorBody),
        (status = 422, description = "The question is not right", body = ErrorBody),
    )
)]
pub async fn query(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Result<Json<Map<String, Value>>, JsonRejection>,
) -> Answered {
    call(&app, &caller, &headers, "memory_query", body).await
}

/// How reliable memory was
#[utoipa::path(
    get, path = "/reliability/report", tag = "memory",
    responses(
        (status = 200, description = "Numbers of the outbox and the audit", body = Object),
        (status = 404, description = "`MEMORY_NOT_CONFIGURED`", body = ErrorBody),
    )
)]
pub async fn report(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>, headers: HeaderMap) -> Answered {
    call(&app, &caller, &headers, "reliability_report", Ok(Json(Map::new()))).await
}

/// Complete the audit
///
/// Writes without their audit and audits without their end are found and completed; no message is changed.
#[utoipa::path(
    post, path = "/v1/reconcile", tag = "memory", request_body = Option<ReconcileBody>,
    responses(
        (status = 200, description = "What was found and done", body = ReconcileAnswer),
        (status = 404, description = "`MEMORY_NOT_CONFIGURED`", body = ErrorBody),
    )
)]
pub async fn reconcile(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: axum::body::Bytes,
) -> Answered {
    let arguments = match body.is_empty() {
        true => Ok(Map::new()),
        false => serde_json::from_slice(&body),
    };
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(e) => {
            let refusal = Refusal::invalid(format!("the body is no object: {}", bounded(&e.to_string())));
            return Answered::refused(refusal, correlation_id(&headers));
        }
    };
    call(&app, &caller, &headers, "reconcile", Ok(Json(arguments))).await
}

/// Audits read at a time: each may have as much evidence as a memory.
const AUDITS: u32 = 20;

/// The audit of writes, newest first
///
/// A page looks at a bounded number of rows; one that is not full and has a `next_cursor` has not seen all. A token for some
/// lanes or spaces sees their rows.
#[utoipa::path(
    get, path = "/v1/audit", tag = "memory", params(AuditQuery),
    responses(
        (status = 200, description = "Rows of write_audit", body = AuditRows),
        (status = 400, description = "The question is not right", body = ErrorBody),
        (status = 404, description = "`MEMORY_NOT_CONFIGURED`", body = ErrorBody),
    )
)]
pub async fn audit(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<AuditQuery>, QueryRejection>,
) -> Result<Json<AuditRows>, Refusal> {
    let Query(wanted) = query?;
    let (limit, before) = page_of(wanted.limit, wanted.cursor.as_ref())?;
    if wanted.correlation_id.as_ref().is_some_and(|id| id.chars().any(char::is_control)) {
        return Err(Refusal::invalid("correlation_id has no control characters"));
    }
    let filter =
        AuditFilter { correlation_id: wanted.correlation_id, outbox_id: wanted.outbox_id, status: None, before, limit };
    let memories = memories(&app)?;
    let list = |before, limit| memories.audit(AuditFilter { before, limit, ..filter.clone() });
    let bytes = |row: &AuditRow| row.evidence_refs_json.to_string().len();
    let page = seen_of_any_size((before, limit), AUDITS, list, |row: &AuditRow| caller.sees_audit(row), bytes).await?;
    let items = page.items.into_iter().map(AuditView::from).collect();
    Ok(Json(AuditRows { items, next_cursor: cursor(page.next) }))
}

fn memories(app: &App) -> Result<&Memories, Refusal> {
    app.memories.as_ref().ok_or_else(|| {
        let what = "this server has no memory gateway; say where OpenMemory is, with [memory] url in postrider.toml";
        Refusal::new(StatusCode::NOT_FOUND, "MEMORY_NOT_CONFIGURED", what)
    })
}

/// The SDK's side of `/mcp`. Every request stands alone: no session is kept, so any server of a fleet may answer it.
pub type Mcp = StreamableHttpService<mcp::Server, LocalSessionManager>;

pub fn mcp_service(tools: Tools) -> Mcp {
    // Hosts and origins are judged by our own guard, which knows about tokens.
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        .with_max_request_body_bytes(MOST_BODY)
        .disable_allowed_hosts();
    StreamableHttpService::new(
        move || Ok(mcp::Server { tools: tools.clone(), caller: None }),
        Arc::new(LocalSessionManager::default()),
        config,
    )
}

fn is_json(headers: &HeaderMap) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    given.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// Media types have no case, and a list may come in parts; the SDK knows one way to write them.
fn in_small_letters(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let accepted: Vec<String> = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| Some(value.to_str().ok()?.to_ascii_lowercase()))
        .collect();
    if let Ok(accepted) = HeaderValue::from_str(&accepted.join(", "))
        && !accepted.is_empty()
    {
        headers.insert(header::ACCEPT, accepted);
    }
}

/// The longest refusal of the SDK's that is passed on.
const MOST_SAID: usize = 64 << 10;

/// A plain call of a tool.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolCall {
    tool: String,
    #[serde(default)]
    arguments: Map<String, Value>,
}

/// Call a tool, plainly or over MCP
///
/// A body `{"tool","arguments"}` is answered with the tool's own object; anything else is MCP over streamable HTTP, and
/// described by MCP itself. A request with a foreign `Origin` is refused.
#[utoipa::path(
    post, path = "/mcp", tag = "memory", request_body = Object,
    responses(
        (status = 200, description = "The tool's answer, or MCP's", body = Object),
        (status = 202, description = "Deferred; or an MCP notification, without a body"),
        (status = 400, description = "No MCP", body = Object),
        (status = 403, description = "A foreign `Origin`, a token without the scope, or a memory that was rejected", body = Object),
        (status = 404, description = "`UNKNOWN_TOOL`, `MEMORY_NOT_CONFIGURED`", body = Object),
        (status = 406, description = "MCP wants `Accept: application/json, text/event-stream`", body = Object),
        (status = 415, description = "`UNSUPPORTED_MEDIA_TYPE`: not sent as JSON", body = ErrorBody),
        (status = 422, description = "`INVALID_ARGUMENTS`, `INVALID_MEMORY`", body = Object),
        (status = 503, description = "`AUDIT_WRITE_FAILED`, `OUTBOX_ENQUEUE_FAILED`", body = Object),
    )
)]
pub async fn mcp(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, Refusal> {
    let (mut parts, body) = request.into_parts();
    let too_large = || Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE", "the body is too large");
    let bytes = axum::body::to_bytes(body, MOST_BODY).await.map_err(|_| too_large())?;
    let plain = serde_json::from_slice::<Value>(&bytes).ok().filter(|body| body.get("tool").is_some());
    if let Some(body) = plain {
        let wrong = |e: serde_json::Error| {
            Refusal::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "INVALID_ARGUMENTS",
                format!("send {{\"tool\",\"arguments\"}}: {}", bounded(&e.to_string())),
            )
        };
        let id = correlation_id(&parts.headers);
        let answered = match serde_json::from_value::<ToolCall>(body).map_err(wrong) {
            Ok(call) => app.tools.call(&caller, &call.tool, call.arguments, id).await,
            Err(refusal) => Answered::refused(refusal, id),
        };
        return Ok(answered.into_response());
    }
    if !is_json(&parts.headers) {
        let what = "send JSON, with `Content-Type: application/json`";
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_MEDIA_TYPE", what));
    }
    in_small_letters(&mut parts.headers);
    if let Some(refused) = mcp_wire::refusal(&bytes) {
        // As the SDK has it: what a tool is given is no matter of HTTP.
        let of_the_tool = refused["error"]["code"] == mcp_wire::INVALID_PARAMS;
        let status = if of_the_tool { StatusCode::OK } else { StatusCode::BAD_REQUEST };
        return Ok((status, Json(refused)).into_response());
    }
    let request = Request::from_parts(parts, Body::from(bytes.clone()));
    let (parts, body) = app.mcp.handle(request).await.into_parts();
    let of_content = parts.headers.get(header::CONTENT_TYPE).map(|value| value.as_bytes());
    if !parts.status.is_client_error() || of_content.is_some_and(|of| of.starts_with(b"application/json")) {
        return Ok(Response::from_parts(parts, Body::new(body)));
    }
    // The SDK says in plain text what was wrong with the headers; whoever speaks JSON-RPC is answered in it.
    let said = axum::body::to_bytes(Body::new(body), MOST_SAID).await.unwrap_or_default();
    let said = mcp_wire::told(&bytes, &String::from_utf8_lossy(&said));
    Ok((parts.status, Json(said)).into_response())
}
