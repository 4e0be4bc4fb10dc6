//! The API: routes in groups by the scope they need, one shape for errors, one deadline for every request.

mod accept;
mod auth;
mod bulk;
mod dashboard;
mod doctor;
mod error;
mod health;
mod intake;
mod live;
mod memory;
mod orders;
mod outbox;
mod reach;
mod reference;
mod request;
mod scrape;
mod session;
mod slots;
mod traffic;
mod webhooks;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use postrider::store::Mode;
use postrider::{Entry, NewMessage, Outbox, clock};
use postrider_memories::Memories;
use postrider_orders::{NewOrder, Orders, Placed};
use postrider_webhooks::{NewEvent, Published, Webhooks};
use utoipa::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::intake::{Intake, Ways};
use self::webhooks::{dead_letters, events, replays, sagas, subscriptions};
use crate::doctor::Doctor;
use crate::gate::{Gate, GateRules};
use crate::live::Live;
use crate::metrics;
use crate::parts::Parts;
use crate::sessions::Sessions;
use crate::tokens::{Scope, Tokens};
use crate::tools::Tools;

pub use accept::{Limits, serve};
pub use auth::Caller;
pub use error::{Refusal, bounded};
pub use orders::ledger_view;
pub use outbox::check_headers;
pub use scrape::Scrape;
pub use slots::{RESERVE, Rules as SlotRules};
pub use traffic::Patience;

/// Every request is answered within this time, or told that it was not.
const DEADLINE: Duration = Duration::from_secs(15);
/// Of the body of any request; a lane may take less.
const MOST_BODY: usize = 16 << 20;

const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");

/// What the routes work with.
pub struct App {
    pub outbox: Outbox,
    pub tokens: Tokens,
    pub sessions: Sessions,
    pub tokens_required: bool,
    /// The server speaks TLS itself.
    pub tls: bool,
    pub meters: metrics::Shared,
    pub live: Arc<Live>,
    pub doctor: Arc<Doctor>,
    pub webhooks: Webhooks,
    pub orders: Orders,
    /// Where `[memory]` is.
    pub memories: Option<Memories>,
    tools: Tools,
    answers: health::Answers,
    gate: Gate,
    gate_rules: GateRules,
    mcp: memory::Mcp,
    /// After the IETF's draft: 409 while in flight, 422 for another order.
    pub strict_orders: bool,
    placing: Intake<NewOrder, Placed>,
    messages: Intake<NewMessage, Entry>,
    events: Intake<NewEvent, Published>,
}

/// How one gets in; by default nobody needs a token.
#[derive(Default)]
pub struct Access {
    pub tokens_required: bool,
    /// The server speaks TLS itself.
    pub tls: bool,
    pub session_ttl: Duration,
}

impl App {
    pub fn new(
        outbox: Outbox,
        parts: Parts,
        strict_orders: bool,
        gate_rules: GateRules,
        access: Access,
        meters: metrics::Shared,
        doctor: Arc<Doctor>,
    ) -> Arc<Self> {
        let Parts { webhooks, orders, memories } = parts;
        let tools = Tools { outbox: outbox.clone(), memories: memories.clone(), meters: Some(meters.clone()) };
        // A little less than the request has, so that the answer is still heard.
        let patience = DEADLINE - Duration::from_secs(2);
        let (queue, hooks, book) = (outbox.clone(), webhooks.clone(), orders.clone());
        let messages = Ways {
            write: Box::new(move |messages| {
                let queue = queue.clone();
                Box::pin(async move { queue.enqueue_as(Mode::Work, messages).await })
            }),
            bytes: |message: &NewMessage| message.payload.len(),
            repeatable: |message| message.key.is_some(),
            key: |message| message.key.clone().or_else(|| message.active_key.clone()),
        };
        let events = Ways {
            write: Box::new(move |events| {
                let hooks = hooks.clone();
                Box::pin(async move { hooks.publish_as(Mode::Work, events).await })
            }),
            bytes: |event: &NewEvent| event.payload.len(),
            repeatable: |event| event.external_id.is_some(),
            key: |event| event.external_id.clone(),
        };
        let placing = Ways {
            write: Box::new(move |orders| {
                let book = book.clone();
                Box::pin(async move { book.place_as(Mode::Work, orders).await })
            }),
            bytes: |_: &NewOrder| 512,
            repeatable: |_| true,
            key: |order| Some(order.key.clone()),
        };
        let gate = Gate::new(outbox.clone(), memories.clone()).with_webhooks(webhooks.clone());
        let tokens = Tokens::new(outbox.clone());
        Arc::new(App {
            sessions: Sessions::new(outbox.clone(), tokens.clone(), access.session_ttl),
            tokens,
            live: Live::new(outbox.clone(), memories.clone()),
            doctor,
            outbox,
            webhooks,
            orders,
            answers: health::Answers::default(),
            gate,
            gate_rules,
            memories,
            mcp: memory::mcp_service(tools.clone()),
            tools,
            strict_orders,
            tokens_required: access.tokens_required,
            tls: access.tls,
            meters,
            placing: Intake::start(placing, patience),
            messages: Intake::start(messages, patience),
            events: Intake::start(events, patience),
        })
    }
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Postrider", description = "Delivers what a database has promised."),
    tags(
        (name = "outbox", description = "Messages: write, look, bring back"),
        (name = "webhooks", description = "Events, subscriptions, deliveries"),
        (name = "orders", description = "Orders to a broker, once per key"),
        (name = "memory", description = "The memory gateway: store, query, audit"),
        (name = "lanes", description = "Lanes: hold and let go"),
        (name = "server", description = "The server itself"),
    )
)]
struct Description;

/// The routes and their description, which is made from them.
fn described(app: &Arc<App>) -> OpenApiRouter {
    let group = |scope: Scope, routes: OpenApiRouter<Arc<App>>| {
        routes.layer(from_fn_with_state((app.clone(), scope), auth::guard))
    };
    // A token for one lane has no business with another's routes.
    let of_lane = |lane: &'static str, scope: Scope, routes: OpenApiRouter<Arc<App>>| {
        group(scope, routes.layer(from_fn_with_state(lane, auth::one_lane)))
    };
    let hooks = |scope: Scope, routes: OpenApiRouter<Arc<App>>| of_lane(postrider_webhooks::LANE, scope, routes);
    let place = of_lane(postrider_orders::LANE, Scope::Enqueue, OpenApiRouter::new().routes(routes!(orders::place)));
    let orders = of_lane(
        postrider_orders::LANE,
        Scope::Read,
        OpenApiRouter::new()
            .routes(routes!(orders::show))
            .routes(routes!(orders::list))
            .routes(routes!(orders::conflicts))
            .routes(routes!(orders::ledger)),
    );
    let settle = of_lane(
        postrider_orders::LANE,
        Scope::Operate,
        OpenApiRouter::new().routes(routes!(orders::requeue)).routes(routes!(orders::settle)),
    );
    let remembering = |scope: Scope, routes: OpenApiRouter<Arc<App>>| of_lane(postrider_memories::LANE, scope, routes);
    let remember = remembering(Scope::Enqueue, OpenApiRouter::new().routes(routes!(memory::store)));
    let recall = remembering(
        Scope::Read,
        OpenApiRouter::new()
            .routes(routes!(memory::query))
            .routes(routes!(memory::report))
            .routes(routes!(memory::audit)),
    );
    let reconcile = remembering(Scope::Operate, OpenApiRouter::new().routes(routes!(memory::reconcile)));
    let enqueue = group(
        Scope::Enqueue,
        OpenApiRouter::new().routes(routes!(outbox::enqueue)).routes(routes!(outbox::enqueue_batch)),
    );
    let publish = hooks(
        Scope::Enqueue,
        OpenApiRouter::new().routes(routes!(events::publish)).routes(routes!(events::publish_batch)),
    );
    let read = group(
        Scope::Read,
        OpenApiRouter::new()
            .routes(routes!(outbox::list))
            .routes(routes!(outbox::show))
            .routes(routes!(live::overview))
            .routes(routes!(live::workers))
            .routes(routes!(doctor::last))
            .routes(routes!(health::metrics)),
    );
    let look = hooks(
        Scope::Read,
        OpenApiRouter::new()
            .routes(routes!(subscriptions::subscriptions))
            .routes(routes!(subscriptions::subscription))
            .routes(routes!(events::events))
            .routes(routes!(events::event_shown))
            .routes(routes!(sagas::sagas))
            .routes(routes!(sagas::saga))
            .routes(routes!(dead_letters::dead_letters))
            .routes(routes!(replays::replay_shown)),
    );
    let operate = group(
        Scope::Operate,
        OpenApiRouter::new()
            .routes(routes!(outbox::requeue))
            .routes(routes!(outbox::retry))
            .routes(routes!(bulk::requeue_many))
            .routes(routes!(outbox::pause))
            .routes(routes!(outbox::resume))
            .routes(routes!(doctor::ask)),
    );
    let manage = hooks(
        Scope::Operate,
        OpenApiRouter::new()
            .routes(routes!(subscriptions::subscribe))
            .routes(routes!(subscriptions::change))
            .routes(routes!(subscriptions::unsubscribe))
            .routes(routes!(subscriptions::pause))
            .routes(routes!(subscriptions::resume))
            .routes(routes!(subscriptions::rotate_secret))
            .routes(routes!(subscriptions::test))
            .routes(routes!(dead_letters::requeue))
            .routes(routes!(dead_letters::requeue_many))
            .routes(routes!(replays::replay))
            .routes(routes!(replays::replay_cancelled)),
    );
    // What a tool needs is asked when it is called. Without sessions MCP has no other methods here.
    let mcp = OpenApiRouter::new().routes(routes!(memory::mcp)).layer(from_fn_with_state(app.clone(), auth::any));
    // Whoever signs in shows no token yet: nothing large is read.
    let signing = OpenApiRouter::new()
        .routes(routes!(session::session, session::sign_in, session::sign_out))
        .layer(DefaultBodyLimit::max(session::MOST_BODY));
    let open = OpenApiRouter::new()
        .routes(routes!(health::livez))
        .routes(routes!(health::readyz))
        .routes(routes!(health::health));
    OpenApiRouter::with_openapi(Description::openapi())
        .merge(enqueue)
        .merge(publish)
        .merge(place)
        .merge(orders)
        .merge(settle)
        .merge(remember)
        .merge(recall)
        .merge(reconcile)
        .merge(read)
        .merge(look)
        .merge(operate)
        .merge(manage)
        .merge(mcp)
        .merge(signing)
        .merge(open)
        .with_state(app.clone())
}

impl App {
    /// Says at the start what does not work.
    pub fn warn_of_gate(&self) {
        crate::gate::warn(&self.gate, &self.gate_rules);
    }
}

/// All that is served.
pub fn router(app: &Arc<App>) -> Router {
    let (router, mut description) = described(app).split_for_parts();
    reference::complete(&mut description);
    let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    description.components.get_or_insert_default().add_security_scheme("token", scheme);
    // Shared by all answers: many may be under way.
    let page = Bytes::from(reference::page(&description));
    let descriptions = Router::new()
        .route("/openapi.json", axum::routing::get(reference::document))
        .with_state(Arc::new(reference::Shown::new(app.clone(), description)));
    // An endless answer: said in words, not in the description, whose readers wait for the end of answers.
    let stream = Router::new()
        .route("/v1/live", axum::routing::get(live::stream))
        .layer(from_fn_with_state((app.clone(), Scope::Read), auth::guard))
        .with_state(app.clone());
    router
        .merge(stream)
        .merge(dashboard::routes())
        .merge(descriptions)
        .route("/docs", axum::routing::get(move || async move { dashboard::document(page) }))
        .fallback(|| async { Refusal::not_found("there is nothing at this path; /docs tells what there is") })
        .method_not_allowed_fallback(|| async {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", "this path has other methods; see /docs")
        })
        .layer(DefaultBodyLimit::max(MOST_BODY))
        .layer(from_fn(frame))
}

/// Around every request: its deadline, its correlation id, and headers that keep browsers from guessing.
async fn frame(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(&CORRELATION_ID).filter(|id| acceptable(id)).cloned();
    let id = given.unwrap_or_else(new_correlation_id);
    // Who asks is judged by the header. HTTP/2 has it in the address, and where an address has one, that one counts.
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if let Some(host) = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
        request.headers_mut().insert(header::HOST, host);
    }
    request.headers_mut().insert(CORRELATION_ID, id.clone());
    let told = id.to_str().unwrap_or_default().to_owned();
    let mut response = error::CORRELATED.scope(told, answer(request, hosts, next)).await;
    let headers = response.headers_mut();
    headers.insert(CORRELATION_ID, id);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn answer(request: Request, hosts: usize, next: Next) -> Response {
    if request.extensions().get::<accept::ProbesOnly>().is_some() && !is_probe(&request) {
        auth::hear_out(request).await;
        let what = "this server has all the connections it bears, of this address or in all; try again soon";
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "OVERLOADED", what).into_response()
    } else if hosts > 1 {
        Refusal::invalid("a request has one Host").into_response()
    } else if has_nul(&request) {
        // No text of ours has one, and only some databases could even be asked.
        Refusal::invalid("the address contains a NUL character (%00)").into_response()
    } else if too_large(&request) {
        // Not one byte of it is waited for.
        let what = format!("the body is larger than the {MOST_BODY} bytes this server takes");
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE", what).into_response()
    } else {
        tokio::time::timeout(DEADLINE, next.run(request)).await.unwrap_or_else(|_| {
            let what = "the request was not done within its deadline; whether it was written is unknown";
            Refusal::new(StatusCode::REQUEST_TIMEOUT, "TIMEOUT", what).into_response()
        })
    }
}

/// What is answered even where there is no room for anything else.
fn is_probe(request: &Request) -> bool {
    ["/livez", "/readyz", "/health"].contains(&request.uri().path())
}

fn has_nul(request: &Request) -> bool {
    request.uri().path_and_query().is_some_and(|address| address.as_str().contains("%00"))
}

fn too_large(request: &Request) -> bool {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    length.is_some_and(|bytes| bytes > MOST_BODY as u64)
}

/// It goes into the database and into logs.
fn acceptable(id: &HeaderValue) -> bool {
    let bytes = id.as_bytes();
    (1..=128).contains(&bytes.len()) && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(b))
}

fn new_correlation_id() -> HeaderValue {
    let id = format!("{:016x}{:016x}", clock::seed(), clock::seed());
    HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("none"))
}
