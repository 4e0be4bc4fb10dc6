//! Signing in to the dashboard: a token goes in once and comes back as a cookie that scripts cannot read and other
//! sites cannot use.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::App;
use super::auth;
use super::error::Refusal;
use super::request::Body;
use crate::tokens::{Scope, Token};

const COOKIE: &str = "postrider_session";

/// The token a browser that signed in shows.
pub fn shown(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    cookies.flat_map(|value| value.split(';')).find_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        (name == COOKIE && !value.is_empty()).then_some(value)
    })
}

fn cookie(headers: &HeaderMap, tls: bool, value: &str, age: &str) -> HeaderValue {
    // A proxy may have taken the TLS away.
    let proxied = headers.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes() == b"https");
    let secure = if tls || proxied { "; Secure" } else { "" };
    let text = format!("{COOKIE}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{age}");
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
        }
    }
}

/// Sign in
///
/// The answer sets a cookie that stands for the token until the browser is closed or signs out.
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
    let mut response = Json(Session::of(Some(&token), app.tokens_required)).into_response();
    response.headers_mut().insert(header::SET_COOKIE, cookie(&headers, app.tls, given.trim(), ""));
    Ok(response)
}

/// Who is signed in
#[utoipa::path(
    get, path = "/v1/session", tag = "server", security(()),
    responses((status = 200, description = "You, or nobody", body = Session))
)]
pub async fn session(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Json<Session>, Refusal> {
    match auth::caller(&app, &Method::GET, &headers).await {
        Ok(caller) => Ok(Json(Session::of(caller.token(), app.tokens_required))),
        Err(refusal) if refusal.status == StatusCode::UNAUTHORIZED => {
            Ok(Json(Session { tokens_required: app.tokens_required, ..Session::default() }))
        }
        Err(refusal) => Err(refusal),
    }
}

/// Sign out
#[utoipa::path(
    delete, path = "/v1/session", tag = "server", security(()),
    responses((status = 204, description = "The cookie is gone"))
)]
pub async fn sign_out(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Response, Refusal> {
    auth::own_origin(&headers)?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    response.headers_mut().insert(header::SET_COOKIE, cookie(&headers, app.tls, "", "; Max-Age=0"));
    Ok(response)
}
