//! Who may do what: bearer tokens with scopes. Without a token only where the server listens on loopback alone, and then
//! not for pages of other sites.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;
use super::error::Refusal;
use super::session;
use crate::tokens::{Scope, Token};

/// Who asks. Without a token: everybody on this machine, with all rights.
#[derive(Clone, Debug)]
pub struct Caller(Option<Arc<Token>>);

impl Caller {
    /// Who runs the command itself.
    pub fn local() -> Self {
        Caller(None)
    }

    pub fn may(&self, scope: Scope) -> Result<(), Refusal> {
        match &self.0 {
            Some(token) if !token.allows(scope) => Err(forbidden(format!("this token lacks the scope `{scope}`"))),
            _ => Ok(()),
        }
    }

    pub fn token(&self) -> Option<&Token> {
        self.0.as_deref()
    }
}

fn forbidden(message: String) -> Refusal {
    Refusal::forbidden(message)
}

fn unauthorized(message: &str) -> Refusal {
    Refusal::new(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", message)
}

/// Lets a request through to routes that need `scope`, with its [`Caller`].
pub async fn require(app: Arc<App>, scope: Scope, request: Request, next: Next) -> Response {
    let asked = caller(&app, request.method(), request.version(), request.headers()).await;
    let asked = asked.and_then(|caller| caller.may(scope).map(|()| caller));
    admit(asked, request, next).await
}

/// For routes that ask for scopes themselves. Pages of other sites are refused whatever they show.
pub async fn any(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let asked = match own_origin(request.headers()) {
        Ok(()) => caller(&app, request.method(), request.version(), request.headers()).await,
        Err(refusal) => Err(refusal),
    };
    admit(asked, request, next).await
}

async fn admit(asked: Result<Caller, Refusal>, mut request: Request, next: Next) -> Response {
    match asked {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(refusal) => {
            hear_out(request).await;
            refusal.into_response()
        }
    }
}

/// Of a body that is refused unread.
const HEARD_OUT: usize = 16 << 10;

/// Reads a small body to its end: a connection closed while the client still writes may lose it our answer.
pub async fn hear_out(request: Request) {
    let body = axum::body::to_bytes(request.into_body(), HEARD_OUT);
    let _ = tokio::time::timeout(Duration::from_secs(1), body).await;
}

pub async fn caller(app: &App, method: &Method, version: Version, headers: &HeaderMap) -> Result<Caller, Refusal> {
    let mut authorizations = headers.get_all(header::AUTHORIZATION).iter();
    let shown = authorizations.next();
    if shown.is_some_and(|shown| authorizations.any(|other| other != shown)) {
        return Err(unauthorized("the request has two different Authorization headers; send one"));
    }
    let Some(shown) = shown else {
        if let Some(session) = session::shown(headers, app.tls) {
            // A browser shows its cookie whoever made it ask: what changes something must come from our own page.
            own_origin(headers)?;
            if !method.is_safe() && headers.get(header::ORIGIN).is_none() {
                return Err(forbidden("a change with a cookie must say where it comes from (Origin)".to_owned()));
            }
            match app.sessions.verify(session).await? {
                Some((_, token)) => return Ok(Caller(Some(Arc::new(token)))),
                None if app.tokens_required => {
                    return Err(unauthorized("this session is over: it ran out, or it or its token was ended"));
                }
                // A cookie of another server on this machine, where none is needed.
                None => {}
            }
        }
        if app.tokens_required {
            return Err(unauthorized("a token is needed: `Authorization: Bearer pr_…` (postrider token create)"));
        }
        not_forwarded(version, headers)?;
        return same_site(headers).map(|()| Caller(None));
    };
    known(app, shown.to_str().ok().and_then(bearer).unwrap_or_default()).await
}

/// The token of an `Authorization` header; its scheme may be written in any case.
pub fn bearer(shown: &str) -> Option<&str> {
    let (scheme, token) = shown.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token)
}

async fn known(app: &App, token: &str) -> Result<Caller, Refusal> {
    match app.tokens.verify(token.trim()).await? {
        Some(token) => Ok(Caller(Some(Arc::new(token)))),
        None => Err(unauthorized("this token is not valid: wrong, expired or revoked")),
    }
}

/// What proxies add to the requests they pass on.
const OF_PROXIES: [&str; 25] = [
    "ali-cdn-real-ip",
    "cdn-loop",
    "client-ip",
    "do-connecting-ip",
    "front-end-https",
    "incap-client-ip",
    "proxy-client-ip",
    "proxy-connection",
    "remote-addr",
    "rs-client-ip",
    "true-client-ip",
    "via",
    "x-client-ip",
    "x-amzn-trace-id",
    "x-cluster-client-ip",
    "x-from-ip",
    "x-originating-ip",
    "x-real-ip",
    "x-realip",
    "x-remote-addr",
    "x-remote-ip",
    "x-scheme",
    "x-sucuri-clientip",
    "x-url-scheme",
    "x-varnish",
];

/// The same by how their names begin.
const BEGIN_OF_PROXIES: [&str; 25] = [
    "akamai-",
    "cf-",
    "cloudfront-",
    "fastly-",
    "fly-",
    "forwarded",
    "ngrok-",
    "tailscale-",
    "wl-proxy-",
    "x-akamai-",
    "x-amz-cf-",
    "x-appengine-",
    "x-appgw-",
    "x-arr-",
    "x-azure-",
    "x-envoy-",
    "x-forward",
    "x-http-forwarded",
    "x-nf-",
    "x-nginx-",
    "x-original-",
    "x-proxy",
    "x-rewrite-",
    "x-vercel-",
    "z-forwarded",
];

/// A request that a proxy passed on comes from this machine and from anywhere: without a token the world would be let in.
pub fn not_forwarded(version: Version, headers: &HeaderMap) -> Result<(), Refusal> {
    let of_a_proxy = |name: &str| {
        let name = name.replace('_', "-");
        OF_PROXIES.contains(&name.as_str()) || BEGIN_OF_PROXIES.iter().any(|begin| name.starts_with(begin))
    };
    let header = headers.keys().map(|name| name.as_str()).find(|name| of_a_proxy(name));
    let seen = match header {
        Some(header) => format!("it has the header {header}"),
        // nginx with nothing but `proxy_pass` adds no header, names us as the host, and speaks as hardly anybody else does.
        None if version < Version::HTTP_11 => "it is in HTTP/1.0, as nginx passes requests on".to_owned(),
        None => return Ok(()),
    };
    let what = format!(
        "this request came through a proxy ({seen}), and this server lets everybody on its machine in without a token. Make one (postrider token create) and send it as `Authorization: Bearer pr_…`, or sign in with it; set [auth] mode = \"always\" so that nobody gets in without"
    );
    let refusal = Refusal::new(StatusCode::FORBIDDEN, "FORWARDED_WITHOUT_TOKEN", what);
    Err(match header {
        Some(header) => refusal.with("header", header),
        None => refusal.with("version", "HTTP/1.0"),
    })
}

/// A page of another site, open in a browser on this machine, must not act for its user.
pub fn same_site(headers: &HeaderMap) -> Result<(), Refusal> {
    let host = headers.get(header::HOST).map_or("", |host| host.to_str().unwrap_or("?"));
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').map_or(host, |(name, port)| if is_port(port) { name } else { host });
    // Another name for this machine is how a page gets around the rule on origins.
    let is_loopback = name.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback());
    if !is_loopback && !["", "localhost", "[::1]"].contains(&name) {
        return Err(forbidden(format!(
            "without a token this server answers to 127.0.0.1 and localhost, not to {name}"
        )));
    }
    own_origin(headers)
}

pub fn own_origin(headers: &HeaderMap) -> Result<(), Refusal> {
    let host = headers.get(header::HOST).map_or("", |host| host.to_str().unwrap_or("?"));
    let is_own = |origin: &HeaderValue| {
        origin.to_str().ok().and_then(|origin| origin.split_once("://")).is_some_and(|(_, site)| site == host)
    };
    if headers.get_all(header::ORIGIN).iter().all(is_own) {
        Ok(())
    } else {
        Err(forbidden("requests from pages of other sites are refused".to_owned()))
    }
}

/// A part's routes are for tokens that reach its lane.
pub async fn one_lane(
    State(lane): State<&'static str>,
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Response {
    match caller.may_use(lane) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// For `from_fn_with_state`: the scope is part of the state.
pub async fn guard(State((app, scope)): State<(Arc<App>, Scope)>, request: Request, next: Next) -> Response {
    require(app, scope, request, next).await
}
