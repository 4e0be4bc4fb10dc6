//! The dashboard's files, inside the binary. A strict policy lets the page load nothing but them.

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

const SCRIPT: &str = "text/javascript; charset=utf-8";
const FILES: [(&str, &str, &str); 10] = [
    ("index.html", "text/html; charset=utf-8", include_str!("../../dashboard/index.html")),
    ("style.css", "text/css; charset=utf-8", include_str!("../../dashboard/style.css")),
    ("icon.svg", "image/svg+xml", include_str!("../../dashboard/icon.svg")),
    ("app.js", SCRIPT, include_str!("../../dashboard/app.js")),
    ("api.js", SCRIPT, include_str!("../../dashboard/api.js")),
    ("parts.js", SCRIPT, include_str!("../../dashboard/parts.js")),
    ("charts.js", SCRIPT, include_str!("../../dashboard/charts.js")),
    ("overview.js", SCRIPT, include_str!("../../dashboard/overview.js")),
    ("messages.js", SCRIPT, include_str!("../../dashboard/messages.js")),
    ("peers.js", SCRIPT, include_str!("../../dashboard/peers.js")),
];

/// `/` and what its page loads.
pub fn routes() -> Router {
    FILES.into_iter().fold(Router::new(), |router, (name, kind, text)| {
        let path = if name == "index.html" { "/".to_owned() } else { format!("/dashboard/{name}") };
        router.route(&path, get(move || async move { file(kind, text) }))
    })
}

/// A page that loads nothing at all.
pub fn document(html: Bytes) -> Response {
    let mut response = file("text/html; charset=utf-8", "");
    let policy = "default-src 'none'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    *response.body_mut() = html.into();
    response
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, HeaderValue); 4] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    ];
    (headers, text).into_response()
}
