//! Signing in to the dashboard: a token goes in once, and a session comes back as a cookie that scripts cannot read and
//! other sites cannot use.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};
use axum::response::{IntoResponse, Response};
use postrider::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::App;
use super::auth;
use super::error::Refusal;
use super::request::Body;
use crate::tokens::{Scope, Token};

/// Under TLS browsers themselves see to it that nobody else sets this one.
const SECURE_COOKIE: &str = "__Host-postrider_session";
const COOKIE: &str = "postrider_session";
/// More than a token and its JSON need.
pub const MOST_BODY: usize = 4 << 10;

/// The browser speaks TLS, to us or to a proxy that took it away.
fn is_secure(headers: &HeaderMap, tls: bool) -> bool {
    tls || headers.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes().eq_ignore_ascii_case(b"https"))
}

/// The session a browser that signed in shows.
pub fn shown(headers: &HeaderMap, tls: bool) -> Option<&str> {
    let wanted = if is_secure(headers, tls) { SECURE_COOKIE } else { COOKIE };
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    cookies.flat_map(|value| value.split(';')).find_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        (name == wanted && !value.is_empty()).then_some(value)
    })
}

/// The same, where it is what lets a request in: a token of its own goes before.
pub fn by_cookie(headers: &HeaderMap, tls: bool) -> Option<&str> {
    shown(headers, tls).filter(|_| !headers.contains_key(header::AUTHORIZATION))
}

fn cookie(headers: &HeaderMap, tls: bool, value: &str, age: &str) -> HeaderValue {
    let (name, secure) = if is_secure(headers, tls) { (SECURE_COOKIE, "; Secure") } else { (COOKIE, "") };
    let text = format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{age}");
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("postrider_session=; Path=/; Max-Age=0"))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignIn {
    /// From `postrider token create`.
    #[schema(example = "pr_1_…", max_length = 200)]
    token: String,
}

/// Who is signed in.
#[derive(Default, Serialize, ToSchema)]
pub struct Session {
    /// Requests are let in: with a token, or where none is needed.
    signed_in: bool,
    /// The token's name; null where none is needed.
    name: Option<String>,
    /// What it allows.
    scopes: Vec<&'static str>,
    /// The first of the lanes it is for.
    lane: Option<String>,
    /// The lanes it is for; empty: all.
    lanes: Vec<String>,
    /// The spaces of memories it is for; empty: all.
    spaces: Vec<String>,
    /// Nobody gets in without a token.
    tokens_required: bool,
    /// When a browser that signed in must do so again, unless its token ends before.
    expires_at: Option<String>,
}

impl Session {
    fn of(token: Option<&Token>, tokens_required: bool) -> Session {
        let allowed = |scope: &Scope| token.is_none_or(|token| token.allows(*scope));
        Session {
            signed_in: true,
            name: token.map(|token| token.name.clone()),
            scopes: Scope::ALL.iter().filter(|scope| allowed(scope)).map(|scope| scope.as_str()).collect(),
            lane: token.and_then(|token| token.lane.clone()),
            lanes: token.map_or(vec![], |token| token.lanes.clone()),
            spaces: token.map_or(vec![], |token| token.spaces.clone()),
            tokens_required,
            expires_at: None,
        }
    }

    fn until(self, end: Timestamp) -> Session {
        Session { expires_at: Some(end.to_string()), ..self }
    }
}

/// Sign in
///
/// The answer sets a cookie for a session that stands for the token: until the browser is closed or signs out, the token is revoked or expires, or `[auth] session_ttl` is over. The cookie is `__Host-postrider_session` under TLS, else `postrider_session`.
#[utoipa::path(
    post, path = "/v1/session", tag = "server", security(()), request_body = SignIn,
    responses((status = 200, description = "Signed in", body = Session))
)]
pub async fn sign_in(State(app): State<Arc<App>>, headers: HeaderMap, body: Body<SignIn>) -> Result<Response, Refusal> {
    auth::own_origin(&headers)?;
    let given = body?.0.token;
    let token = app.tokens.verify(given.trim()).await?.ok_or_else(|| {
        let what = "this token is not valid: wrong, expired or revoked";
        Refusal::new(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", what)
    })?;
    let (session, secret) = app.sessions.begin(&token).await?;
    let view = Session::of(Some(&token), app.tokens_required).until(session.expires_at);
    let mut response = Json(view).into_response();
    response.headers_mut().insert(header::SET_COOKIE, cookie(&headers, app.tls, &secret, ""));
    Ok(response)
}

/// Who is signed in
#[utoipa::path(
    get, path = "/v1/session", tag = "server", security(()),
    responses((status = 200, description = "You, or nobody", body = Session))
)]
pub async fn session(
    State(app): State<Arc<App>>,
    version: Version,
    headers: HeaderMap,
) -> Result<Json<Session>, Refusal> {
    match auth::caller(&app, &Method::GET, version, &headers).await {
        Ok(caller) => {
            let view = Session::of(caller.token(), app.tokens_required);
            let session = match by_cookie(&headers, app.tls) {
                Some(session) => app.sessions.verify(session).await?,
                None => None,
            };
            Ok(Json(match session {
                Some((session, _)) => view.until(session.expires_at),
                None => view,
            }))
        }
        Err(refusal) if refusal.status == StatusCode::UNAUTHORIZED => {
            Ok(Json(Session { tokens_required: app.tokens_required, ..Session::default() }))
        }
        Err(refusal) => Err(refusal),
    }
}

/// Sign out
///
/// The session ends here, wherever its cookie may have got to.
#[utoipa::path(
    delete, path = "/v1/session", tag = "server", security(()),
    responses((status = 204, description = "The session is over, and the cookie gone"))
)]
pub async fn sign_out(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Response, Refusal> {
    auth::own_origin(&headers)?;
    if let Some(session) = shown(&headers, app.tls) {
        app.sessions.end(session).await?;
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    response.headers_mut().insert(header::SET_COOKIE, cookie(&headers, app.tls, "", "; Max-Age=0"));
    Ok(response)
}
