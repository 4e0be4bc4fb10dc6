//! The description of the API: what every route may also answer, and a page that people can read.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, Method, Version, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::Type;
use utoipa::openapi::security::SecurityRequirement;
use utoipa::openapi::{Content, ObjectBuilder, OpenApi, Ref, RefOr, Response};

use super::App;
use super::auth;

/// What any route may answer besides its own: told once, for all.
const ALWAYS: [(&str, &str); 10] = [
    ("400", "`INVALID_REQUEST`: malformed"),
    ("401", "`UNAUTHORIZED`: no token, or one that is not valid"),
    (
        "403",
        "`FORBIDDEN`: the token lacks the scope or is for another lane; `FORWARDED_WITHOUT_TOKEN`: it came through a proxy, without a token",
    ),
    ("404", "`NOT_FOUND` or `UNKNOWN_LANE`"),
    ("408", "`TIMEOUT`: not done within the deadline"),
    ("413", "`PAYLOAD_TOO_LARGE`"),
    ("415", "`UNSUPPORTED_MEDIA_TYPE`"),
    ("422", "`INVALID_MESSAGE`: well-formed, but not acceptable"),
    ("500", "`INTERNAL`: the log says why"),
    (
        "503",
        "`STORE_UNAVAILABLE`, `OVERLOADED`, `LOCKED`, `OUTCOME_UNKNOWN` or `SECRETS_KEY_MISSING`, with `Retry-After`",
    ),
];

fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    let all =
        [("GET", &mut item.get), ("POST", &mut item.post), ("PATCH", &mut item.patch), ("DELETE", &mut item.delete)];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// Adds what is the same for all routes.
pub fn complete(description: &mut OpenApi) {
    for item in description.paths.paths.values_mut() {
        for (_, operation) in operations(item) {
            if operation.security.is_none() {
                operation.security = Some(vec![SecurityRequirement::new("token", Vec::<String>::new())]);
            }
            for (status, told) in ALWAYS {
                let content = Content::new(Some(Ref::from_schema_name("ErrorBody")));
                let mut response = Response::new(told);
                response.content.insert("application/json".to_owned(), RefOr::T(content));
                operation.responses.responses.entry(status.to_owned()).or_insert(RefOr::T(response));
            }
        }
    }
}

/// Names the lanes wherever one is asked for.
fn name_lanes(description: &mut OpenApi, lanes: &[&str]) {
    for (path, item) in &mut description.paths.paths {
        for (method, operation) in operations(item) {
            let takes_lane = path.contains("{lane}") || (method == "POST" && !path.ends_with("/requeue"));
            for parameter in operation.parameters.iter_mut().flatten().filter(|_| takes_lane) {
                if let RefOr::T(parameter) = parameter
                    && parameter.name.starts_with("lane")
                {
                    let names = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(lanes.to_vec()));
                    parameter.schema = Some(names.into());
                }
            }
        }
    }
}

/// The description, written once for those who show no token and once for those who may use all lanes: it is long, and
/// anybody may ask for it.
pub struct Shown {
    app: Arc<App>,
    description: OpenApi,
    bare: Bytes,
    whole: Bytes,
}

impl Shown {
    pub fn new(app: Arc<App>, description: OpenApi) -> Shown {
        let lanes: Vec<&str> = app.outbox.lanes().iter().map(|(lane, _)| lane).collect();
        let (bare, whole) = (written(&description, None), written(&description, Some(&lanes)));
        Shown { app, description, bare, whole }
    }
}

fn written(description: &OpenApi, lanes: Option<&[&str]>) -> Bytes {
    let mut description = description.clone();
    if let Some(lanes) = lanes {
        name_lanes(&mut description, lanes);
    }
    serde_json::to_vec(&description).unwrap_or_default().into()
}

/// `GET /openapi.json`.
pub async fn document(State(shown): State<Arc<Shown>>, version: Version, headers: HeaderMap) -> impl IntoResponse {
    let text = match auth::caller(&shown.app, &Method::GET, version, &headers).await {
        Ok(caller) => {
            let lanes = shown.app.outbox.lanes();
            let own: Vec<&str> =
                lanes.iter().map(|(lane, _)| lane).filter(|lane| caller.may_use(lane).is_ok()).collect();
            let has_all = own.len() == lanes.iter().count();
            if has_all { shown.whole.clone() } else { written(&shown.description, Some(&own)) }
        }
        Err(_) => shown.bare.clone(),
    };
    ([(header::CONTENT_TYPE, "application/json")], text)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The same for people, without anything from elsewhere.
pub fn page(description: &OpenApi) -> String {
    let mut html = String::from(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>Postrider API</title><h1>Postrider API</h1>\
         <p>For machines: <a href=\"/openapi.json\">openapi.json</a>. Errors are \
         <code>{\"error\":{\"code\",\"message\",\"details\"}}</code>; every answer carries <code>X-Correlation-ID</code>.</p>",
    );
    let mut paths = description.paths.paths.clone();
    for (path, item) in &mut paths {
        for (method, operation) in operations(item) {
            html.push_str(&format!("<h2>{method} {}</h2>", escaped(path)));
            for text in [&operation.summary, &operation.description].into_iter().flatten() {
                html.push_str(&format!("<p>{}</p>", escaped(text)));
            }
            html.push_str("<table>");
            for parameter in operation.parameters.iter().flatten() {
                let RefOr::T(parameter) = parameter else { continue };
                let told = parameter.description.as_deref().unwrap_or_default();
                html.push_str(&format!("<tr><td><code>{}</code><td>{}", escaped(&parameter.name), escaped(told)));
            }
            for (status, response) in &operation.responses.responses {
                if let RefOr::T(response) = response {
                    html.push_str(&format!("<tr><td>{}<td>{}", escaped(status), escaped(&response.description)));
                }
            }
            html.push_str("</table>");
        }
    }
    html
}
