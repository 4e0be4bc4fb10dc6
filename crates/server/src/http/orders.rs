//! Orders over HTTP. Their errors are flat, as the order API has it; what has ended is answered as it was stored, byte for
//! byte.

use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use postrider_orders::{
    By, ByHand, Conflict, Entry, Invalid, LANE, LedgerEvent, Listed, NewOrder, Order, Placed, Reopened, Status, Which,
    check_key,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::auth::Caller;
use super::error::Refusal;
use super::request::{cursor, first, header, listing, page_of, unquoted};

const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// An order, as `docs/orders.md` tells; unknown fields are refused.
#[derive(ToSchema)]
#[allow(dead_code)] // it only describes: the order is read strictly by its own rules
pub struct OrderBody {
    order_id: Option<String>,
    #[schema(pattern = "^[A-Z0-9._-]{3,20}$", example = "AAPL")]
    instrument: String,
    #[schema(pattern = "^(BUY|SELL)$", example = "BUY")]
    side: String,
    #[schema(exclusive_minimum = 0.0, example = 10)]
    qty: f64,
    /// Left out or null: at the market.
    #[schema(exclusive_minimum = 0.0)]
    price: Option<f64>,
    #[schema(pattern = "^(IOC|FOK|GTC)$", example = "IOC")]
    time_in_force: String,
    #[schema(value_type = Option<Object>)]
    tags: Option<Value>,
    /// Not part of what the key is bound to.
    trace_id: Option<String>,
    /// If given, equal to the header.
    idempotency_key: Option<String>,
    #[schema(format = "date-time")]
    requested_at: Option<String>,
}

/// An order that was taken in and has not ended.
#[derive(Serialize, ToSchema)]
pub struct AcceptedOrder {
    #[schema(example = "accepted")]
    status: &'static str,
    idempotency_key: String,
    order_id: String,
    outbox_id: i64,
    /// SHA-256 over the canonical JSON of the order.
    request_digest: String,
}

/// Why an order was not taken.
#[derive(Serialize, ToSchema)]
pub struct OrderError {
    #[schema(example = "IDEMPOTENCY_CONFLICT")]
    error: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    fields: Vec<WrongField>,
    #[serde(skip)]
    status: StatusCode,
}

#[derive(Serialize, ToSchema)]
pub struct WrongField {
    field: String,
    message: String,
}

impl OrderError {
    fn new(status: StatusCode, error: &'static str, message: impl Into<String>) -> Self {
        OrderError { error, message: message.into(), idempotency_key: None, fields: vec![], status }
    }

    fn of(mut self, key: &str) -> Self {
        self.idempotency_key = Some(key.to_owned());
        self
    }
}

impl IntoResponse for OrderError {
    fn into_response(self) -> Response {
        (self.status, Json(self)).into_response()
    }
}

/// Either shape of error.
pub enum Wrong {
    Order(OrderError),
    Server(Refusal),
}

impl IntoResponse for Wrong {
    fn into_response(self) -> Response {
        match self {
            Wrong::Order(error) => error.into_response(),
            Wrong::Server(refusal) => refusal.into_response(),
        }
    }
}

impl From<OrderError> for Wrong {
    fn from(error: OrderError) -> Self {
        Wrong::Order(error)
    }
}

impl<E: Into<Refusal>> From<E> for Wrong {
    fn from(error: E) -> Self {
        Wrong::Server(error.into())
    }
}

fn key_of(headers: &HeaderMap) -> Result<String, Wrong> {
    let missing = || {
        let what = "send the header Idempotency-Key with a key of your own for this order, the same for every attempt";
        OrderError::new(StatusCode::BAD_REQUEST, "IDEMPOTENCY_KEY_REQUIRED", what)
    };
    let several = |refusal: Refusal| OrderError::new(refusal.status, refusal.code, refusal.message);
    let key = header(headers, "Idempotency-Key")
        .map_err(several)?
        .map(|text| unquoted(text.trim()))
        .filter(|key| !key.is_empty());
    let key = key.ok_or_else(missing)?;
    check_key(key)
        .map_err(|e| invalid(vec![WrongField { field: "Idempotency-Key".to_owned(), message: e.message }]))?;
    Ok(key.to_owned())
}

fn invalid(fields: Vec<WrongField>) -> OrderError {
    let names: Vec<&str> = fields.iter().map(|wrong| wrong.field.as_str()).collect();
    let message = format!("the order cannot be taken: {}", names.join(", "));
    OrderError { fields, ..OrderError::new(StatusCode::UNPROCESSABLE_ENTITY, "VALIDATION_ERROR", message) }
}

fn read(body: &[u8], key: &str) -> Result<Order, OrderError> {
    if body.starts_with(b"\xef\xbb\xbf") {
        let what = "the body begins with a byte order mark (BOM); send UTF-8 without one";
        return Err(OrderError::new(StatusCode::BAD_REQUEST, "INVALID_JSON", what));
    }
    let order = Order::parse(body).map_err(|wrong| match wrong {
        Invalid::NotJson(why) => {
            OrderError::new(StatusCode::BAD_REQUEST, "INVALID_JSON", format!("the body is no JSON: {why}"))
        }
        Invalid::Fields(fields) => {
            invalid(fields.into_iter().map(|e| WrongField { field: e.field, message: e.message }).collect())
        }
    })?;
    if order.idempotency_key.as_deref().is_some_and(|own| own != key) {
        let what = "the header Idempotency-Key and the body's idempotency_key differ";
        return Err(OrderError::new(StatusCode::UNPROCESSABLE_ENTITY, "IDEMPOTENCY_MISMATCH", what).of(key));
    }
    Ok(order)
}

/// Place an order
///
/// Answered once ledger entry and message are committed. The same key and order again is answered with where it stands, and
/// once it has ended with its stored result; another order under the key is refused.
#[utoipa::path(
    post, path = "/do/order", tag = "orders", request_body = OrderBody,
    params(("Idempotency-Key" = String, Header, description = "Yours, for this order; bare or in quotes")),
    responses(
        (status = 201, description = "Taken in", body = AcceptedOrder),
        (status = 200, description = "It was before (`Idempotent-Replayed: true`): where it stands, or its stored result", body = Object),
        (status = 400, description = "`IDEMPOTENCY_KEY_REQUIRED`, or no JSON (an OrderError); or the stored result", body = Object),
        (status = 409, description = "`IDEMPOTENCY_CONFLICT`: the key belongs to another order (an OrderError); or the stored result", body = Object),
        (status = 422, description = "`VALIDATION_ERROR`, `IDEMPOTENCY_MISMATCH`", body = OrderError),
        (status = 502, description = "The stored result of an order that failed", body = Object),
        (status = 504, description = "The stored result of an order that failed", body = Object),
    )
)]
pub async fn place(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Wrong> {
    let key = key_of(&headers)?;
    let order = Arc::new(read(&body?, &key)?);
    let mut new = NewOrder::new(&key, order.clone());
    new.correlation_id = header(&headers, "X-Correlation-ID")?.map(str::to_owned);
    for name in ["traceparent", "tracestate"] {
        new.trace.extend(first(&headers, name)?.map(|value| (name.to_owned(), value.to_owned())));
    }
    match app.placing.put(new).await? {
        Placed::Accepted { outbox_id } => {
            app.meters.ledger_write("in_progress");
            Ok((StatusCode::CREATED, Json(accepted(&app, &order, key, outbox_id))).into_response())
        }
        Placed::Conflict => {
            app.meters.conflict(LANE);
            Err(conflict(app.strict_orders).of(&key).into())
        }
        Placed::Replayed(entry) if app.strict_orders && entry.status == Status::InProgress => {
            let what = "the first request with this key is still being worked on; ask again later";
            Err(OrderError::new(StatusCode::CONFLICT, "IDEMPOTENCY_IN_PROGRESS", what).of(&key).into())
        }
        Placed::Replayed(entry) => {
            let mut response = standing(&app, &order, *entry);
            response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
            Ok(response)
        }
    }
}

fn conflict(strict: bool) -> OrderError {
    let what = "this key belongs to another order; nothing was taken in. Use a new key for a new order";
    match strict {
        false => OrderError::new(StatusCode::CONFLICT, "IDEMPOTENCY_CONFLICT", what),
        true => OrderError::new(StatusCode::UNPROCESSABLE_ENTITY, "IDEMPOTENCY_PAYLOAD_MISMATCH", what),
    }
}

fn accepted(app: &App, order: &Order, key: String, outbox_id: i64) -> AcceptedOrder {
    AcceptedOrder {
        status: "accepted",
        idempotency_key: key,
        order_id: app.orders.order_id(order, outbox_id),
        outbox_id,
        request_digest: order.digest.clone(),
    }
}

/// Where an order stands: accepted, or its stored result.
fn standing(app: &App, order: &Order, entry: Entry) -> Response {
    match (entry.http_status, entry.response_payload_json) {
        (Some(status), Some(stored)) => {
            let mut response = Response::new(Body::from(stored));
            *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        _ => {
            let outbox_id = entry.outbox_id.unwrap_or_default();
            Json(accepted(app, order, entry.idempotency_key, outbox_id)).into_response()
        }
    }
}

type Key = Result<Path<String>, PathRejection>;

fn unknown(key: &str) -> OrderError {
    OrderError::new(StatusCode::NOT_FOUND, "ORDER_NOT_FOUND", "there is no order under this key, or its time is over")
        .of(key)
}

/// Where an order stands
#[utoipa::path(
    get, path = "/do/order/{key}", tag = "orders", params(("key" = String, Path)),
    responses(
        (status = 200, description = "Accepted, or its stored result with its stored status", body = Object),
        (status = 404, description = "`ORDER_NOT_FOUND`", body = OrderError),
    )
)]
pub async fn show(State(app): State<Arc<App>>, path: Key) -> Result<Response, Wrong> {
    let key = path?.0;
    let entry = app.orders.entry(&key).await?.ok_or_else(|| unknown(&key))?;
    if entry.status != Status::InProgress {
        // The order itself is not needed for what is stored.
        let none = Order::parse(br#"{"instrument":"NONE","side":"BUY","qty":1,"time_in_force":"IOC"}"#);
        if let Ok(order) = none {
            return Ok(standing(&app, &order, entry));
        }
    }
    let id = entry.outbox_id.unwrap_or_default();
    let payload = app.outbox.payload(id).await?.ok_or_else(|| unknown(&key))?;
    let order = Order::parse(&payload).map_err(|_| unknown(&key))?;
    Ok(standing(&app, &order, entry))
}

/// An entry of the ledger.
#[derive(Serialize, ToSchema)]
pub struct LedgerView {
    idempotency_key: String,
    request_digest: String,
    /// `in_progress`, `succeeded` or `failed`.
    status: &'static str,
    http_status: Option<u16>,
    /// The stored result, as it is answered.
    #[schema(value_type = Option<Object>)]
    response: Option<Box<RawValue>>,
    result_digest: Option<String>,
    broker_ref: Option<String>,
    reason_code: Option<String>,
    outbox_id: Option<i64>,
    first_seen_at: String,
    last_seen_at: String,
    finished_at: Option<String>,
    /// How often it was asked for again.
    replays: i64,
    expires_at: Option<String>,
    /// How it moved, and by whom.
    events: Vec<LedgerEventView>,
}

#[derive(Serialize, ToSchema)]
pub struct LedgerEventView {
    from_status: Option<String>,
    to_status: String,
    actor: String,
    reason: Option<String>,
    at: String,
}

/// One entry of the ledger, with how it came about
#[utoipa::path(
    get, path = "/v1/ledger/{key}", tag = "orders", params(("key" = String, Path)),
    responses(
        (status = 200, description = "It", body = LedgerView),
        (status = 404, description = "`ORDER_NOT_FOUND`", body = OrderError),
    )
)]
pub async fn ledger(State(app): State<Arc<App>>, path: Key) -> Result<Json<LedgerView>, Wrong> {
    let key = path?.0;
    let entry = app.orders.entry(&key).await?.ok_or_else(|| unknown(&key))?;
    let events = app.orders.events(&key).await?;
    Ok(Json(ledger_view(entry, events)))
}

/// An entry as it is shown, here and on the command line.
pub fn ledger_view(entry: Entry, events: Vec<LedgerEvent>) -> LedgerView {
    LedgerView {
        idempotency_key: entry.idempotency_key,
        request_digest: entry.request_digest,
        status: entry.status.as_str(),
        http_status: entry.http_status,
        response: entry.response_payload_json.and_then(|text| RawValue::from_string(text).ok()),
        result_digest: entry.result_digest,
        broker_ref: entry.broker_ref,
        reason_code: entry.reason_code,
        outbox_id: entry.outbox_id,
        first_seen_at: entry.first_seen_at.to_string(),
        last_seen_at: entry.last_seen_at.to_string(),
        finished_at: entry.finished_at.map(|at| at.to_string()),
        replays: entry.replays,
        expires_at: entry.expires_at.map(|at| at.to_string()),
        events: events
            .into_iter()
            .map(|e| LedgerEventView {
                from_status: e.from_status,
                to_status: e.to_status,
                actor: e.actor,
                reason: e.reason,
                at: e.at.to_string(),
            })
            .collect(),
    }
}

/// An order in a list.
#[derive(Serialize, ToSchema)]
pub struct OrderRow {
    idempotency_key: Option<String>,
    outbox_id: i64,
    /// `in_progress`, `succeeded`, `failed`, `needs_person` or `conflict`.
    status: &'static str,
    instrument: Option<String>,
    attempts: u32,
    http_status: Option<u16>,
    reason_code: Option<String>,
    broker_ref: Option<String>,
    /// How often it was asked for again.
    replays: i64,
    first_seen_at: String,
    finished_at: Option<String>,
}

impl From<Listed> for OrderRow {
    fn from(order: Listed) -> Self {
        let (status, first_seen_at) = (order.status(), order.seen_at().to_string());
        let Listed { message, entry } = order;
        OrderRow {
            idempotency_key: message.active_key,
            outbox_id: message.id,
            status,
            instrument: message.target,
            attempts: message.attempts,
            http_status: entry.as_ref().and_then(|e| e.http_status),
            reason_code: entry.as_ref().and_then(|e| e.reason_code.clone()).or(message.last_error_code),
            broker_ref: entry.as_ref().and_then(|e| e.broker_ref.clone()),
            replays: entry.as_ref().map_or(0, |e| e.replays),
            first_seen_at,
            finished_at: entry.and_then(|e| e.finished_at).or(message.finished_at).map(|at| at.to_string()),
        }
    }
}

listing!(OrderList, OrderRow);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct OrderQuery {
    /// `all`, `failed` or `needs_person`.
    #[param(pattern = "^(all|failed|needs_person)$", default = "all")]
    show: Option<String>,
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    #[param(pattern = "^[0-9]{1,18}$")]
    cursor: Option<String>,
}

/// List orders, the newest first
///
/// A page looks at a bounded number of rows; one that is not full and has a `next_cursor` has not seen all.
#[utoipa::path(
    get, path = "/v1/orders", tag = "orders", params(OrderQuery),
    responses((status = 200, description = "A page of them", body = OrderList))
)]
pub async fn list(
    State(app): State<Arc<App>>,
    query: Result<Query<OrderQuery>, QueryRejection>,
) -> Result<Json<OrderList>, Refusal> {
    let query = query?.0;
    let which = match query.show.as_deref().unwrap_or("all") {
        "all" => Which::All,
        "failed" => Which::Failed,
        "needs_person" => Which::NeedsPerson,
        other => {
            let what = format!("`{other}` is nothing to show; there are all, failed and needs_person");
            return Err(Refusal::invalid(what));
        }
    };
    let (limit, before) = page_of(query.limit, query.cursor.as_ref())?;
    let page = app.orders.list(which, before, limit).await?;
    let items = page.items.into_iter().map(OrderRow::from).collect();
    Ok(Json(OrderList { items, next_cursor: cursor(page.next) }))
}

/// An order that came under the key of another and was refused.
#[derive(Serialize, ToSchema)]
pub struct ConflictRow {
    id: i64,
    idempotency_key: String,
    /// SHA-256 of the refused order; the ledger's entry has that of the one that stands.
    request_digest: String,
    instrument: Option<String>,
    /// Its message, if it came by the outbox and not by a request.
    outbox_id: Option<i64>,
    /// How often it came.
    times: i64,
    first_seen_at: String,
    last_seen_at: String,
}

impl From<Conflict> for ConflictRow {
    fn from(conflict: Conflict) -> Self {
        ConflictRow {
            id: conflict.id,
            idempotency_key: conflict.idempotency_key,
            request_digest: conflict.request_digest,
            instrument: conflict.instrument,
            outbox_id: conflict.outbox_id,
            times: conflict.times,
            first_seen_at: conflict.first_seen_at.to_string(),
            last_seen_at: conflict.last_seen_at.to_string(),
        }
    }
}

listing!(ConflictList, ConflictRow);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ConflictQuery {
    #[param(minimum = 1, maximum = 1000, default = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    #[param(pattern = "^[0-9]{1,18}$")]
    cursor: Option<String>,
}

/// List orders that were refused because their key belongs to another, the newest first
///
/// They are kept as long as the order that has the key.
#[utoipa::path(
    get, path = "/v1/orders/conflicts", tag = "orders", params(ConflictQuery),
    responses((status = 200, description = "A page of them", body = ConflictList))
)]
pub async fn conflicts(
    State(app): State<Arc<App>>,
    query: Result<Query<ConflictQuery>, QueryRejection>,
) -> Result<Json<ConflictList>, Refusal> {
    let query = query?.0;
    let (limit, before) = page_of(query.limit, query.cursor.as_ref())?;
    let page = app.orders.conflicts(before, limit).await?;
    let items = page.items.into_iter().map(ConflictRow::from).collect();
    Ok(Json(ConflictList { items, next_cursor: cursor(page.next) }))
}

fn by(caller: &Caller, reason: &str) -> By {
    let name = caller.token().map_or("local", |token| token.name.as_str());
    By { actor: format!("api:{name}"), reason: Some(reason.to_owned()) }
}

fn refused(key: &str, why: String) -> Wrong {
    OrderError::new(StatusCode::CONFLICT, "ORDER_NOT_CHANGED", why).of(key).into()
}

/// Bring a failed order back: entry and message together
#[utoipa::path(
    post, path = "/v1/ledger/{key}/requeue", tag = "orders", params(("key" = String, Path)),
    responses(
        (status = 200, description = "It is due now", body = LedgerView),
        (status = 404, description = "`ORDER_NOT_FOUND`", body = OrderError),
        (status = 409, description = "`ORDER_NOT_CHANGED`: it has not failed", body = OrderError),
    )
)]
pub async fn requeue(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Key,
) -> Result<Json<LedgerView>, Wrong> {
    let key = path?.0;
    match app.orders.requeue(&key, by(&caller, "requeue")).await? {
        Reopened::Reopened { .. } => ledger(State(app), Ok(Path(key))).await,
        Reopened::NotFound => Err(unknown(&key).into()),
        Reopened::Refused(why) => Err(refused(&key, why)),
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SettleBody {
    /// `succeeded` or `failed`.
    #[schema(pattern = "^(succeeded|failed)$")]
    r#as: String,
    /// The broker's reference, if it was executed.
    broker_ref: Option<String>,
    /// Why; it goes into the ledger's events.
    reason: Option<String>,
}

/// Say what became of an order that waits for a person
#[utoipa::path(
    post, path = "/v1/ledger/{key}/settle", tag = "orders", params(("key" = String, Path)), request_body = SettleBody,
    responses(
        (status = 200, description = "It has ended so", body = LedgerView),
        (status = 404, description = "`ORDER_NOT_FOUND`", body = OrderError),
        (status = 409, description = "`ORDER_NOT_CHANGED`: it has ended, or a worker holds it", body = OrderError),
    )
)]
pub async fn settle(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    path: Key,
    body: super::request::Body<SettleBody>,
) -> Result<Json<LedgerView>, Wrong> {
    let (key, body) = (path?.0, body?.0);
    let executed = match body.r#as.as_str() {
        "succeeded" => true,
        "failed" => false,
        other => return Err(Refusal::invalid(format!("`as` is `succeeded` or `failed`, not `{other}`")).into()),
    };
    let odd = |text: &String| text.len() > 255 || text.chars().any(char::is_control);
    if [&body.broker_ref, &body.reason].into_iter().flatten().any(odd) {
        let what = "broker_ref and reason have at most 255 bytes and no control characters";
        return Err(Refusal::invalid(what).into());
    }
    let by = by(&caller, body.reason.as_deref().unwrap_or("settled by hand"));
    match app.orders.settle(&key, executed, body.broker_ref, by).await? {
        ByHand::Done(_) => ledger(State(app), Ok(Path(key))).await,
        ByHand::NotFound => Err(unknown(&key).into()),
        ByHand::Refused(why) => Err(refused(&key, why)),
    }
}
