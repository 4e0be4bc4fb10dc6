//! What the API refuses, in one shape: `{"error":{"code","message","details"}}`.

use axum::Json;
use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use postrider::error::{Effect, Kind};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::secret::without_value;
use crate::writes;

tokio::task_local! {
    /// The id of the request at hand: it is in the body of every error, too.
    pub static CORRELATED: String;
}

/// An answer that is no success.
#[derive(Clone, Debug)]
pub struct Refusal {
    pub status: StatusCode,
    pub code: &'static str,
    pub message: String,
    pub details: Map<String, Value>,
}

/// The shape of every error.
#[derive(Serialize, ToSchema)]
pub struct ErrorBody {
    pub error: ErrorDetail,
    /// As in `X-Correlation-ID`.
    pub correlation_id: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct ErrorDetail {
    /// For machines, `SCREAMING_SNAKE`.
    #[schema(example = "UNKNOWN_LANE")]
    pub code: String,
    /// For people: what happened and what to do.
    pub message: String,
    pub details: Map<String, Value>,
}

/// Seconds after which a database that is away is worth another try.
pub(super) const RETRY_AFTER: HeaderValue = HeaderValue::from_static("2");

/// Characters of a message: who sends a megabyte is not to get it back.
const LONGEST: usize = 2000;

/// What a parser says of what somebody sent, without the text that it repeats, which may be a secret.
pub fn bounded(message: &str) -> String {
    cut(&without_value(message), 300)
}

fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

impl Refusal {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Refusal { status, code, message: cut(&message.into(), LONGEST), details: Map::new() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Refusal::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message)
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Refusal::new(StatusCode::FORBIDDEN, "FORBIDDEN", message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Refusal::new(StatusCode::NOT_FOUND, "NOT_FOUND", message)
    }

    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.details.insert(name.to_owned(), value.into());
        self
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut body = json!({"error": {"code": self.code, "message": self.message, "details": self.details}});
        if let Ok(id) = CORRELATED.try_with(Clone::clone) {
            body["correlation_id"] = json!(id);
        }
        let mut response = (self.status, Json(body)).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE || self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"postrider\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

impl From<postrider::Error> for Refusal {
    fn from(error: postrider::Error) -> Self {
        writes::note_failure(&error);
        if error.effect == Effect::Unknown {
            tracing::warn!(%error, "a write without an answer");
            let message = "whether it was written is unknown: the database was lost before it answered. Sent again with the same key (Idempotency-Key, or an event's external_id) it is not written twice; without one look first";
            return Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "OUTCOME_UNKNOWN", message);
        }
        // What the caller did wrong is said; what a database says may hold data, so it goes to the log alone.
        match error.kind {
            Kind::Invalid => Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "INVALID_MESSAGE", error.message),
            Kind::KeyMissing => {
                tracing::error!(%error, "what needs the key for secrets cannot be done");
                Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "SECRETS_KEY_MISSING", error.message)
            }
            Kind::UnknownLane => Refusal::new(StatusCode::NOT_FOUND, "UNKNOWN_LANE", error.message),
            Kind::LaneOwned => Refusal::new(StatusCode::CONFLICT, "LANE_OWNED", error.message),
            Kind::Conflict => {
                tracing::warn!(%error, "a conflict");
                Refusal::new(
                    StatusCode::CONFLICT,
                    "CONFLICT",
                    "another row stands in the way; look at it and try again",
                )
            }
            Kind::Overloaded => {
                let message = "all connections to the database are in use; nothing was written. Try again soon";
                Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "OVERLOADED", message)
            }
            Kind::Locked => {
                let message = "a transaction that has not ended yet holds what this needs, as the same key; nothing was written. Try again soon";
                Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "LOCKED", message)
            }
            Kind::Unreachable | Kind::Timeout | Kind::Busy | Kind::Unavailable | Kind::Schema => {
                tracing::warn!(%error, "the database does not answer as it should");
                let message = "the database is not available; nothing was written. Try again soon";
                Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "STORE_UNAVAILABLE", message)
            }
            Kind::Denied | Kind::Database => {
                tracing::error!(%error, "the database refused");
                Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL", "the database refused; the log says why")
            }
        }
    }
}

impl From<BytesRejection> for Refusal {
    fn from(rejection: BytesRejection) -> Self {
        let status = rejection.status();
        if status == StatusCode::PAYLOAD_TOO_LARGE {
            return Refusal::new(status, "PAYLOAD_TOO_LARGE", "the body is larger than this server takes");
        }
        Refusal::invalid("the body could not be read to its end")
    }
}

impl From<JsonRejection> for Refusal {
    fn from(rejection: JsonRejection) -> Self {
        match rejection {
            JsonRejection::BytesRejection(bytes) => bytes.into(),
            JsonRejection::MissingJsonContentType(_) => Refusal::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "UNSUPPORTED_MEDIA_TYPE",
                "send JSON, with `Content-Type: application/json`",
            ),
            other => Refusal::invalid(bounded(&other.body_text())),
        }
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Self {
        Refusal::invalid(bounded(&rejection.body_text()))
    }
}

impl From<PathRejection> for Refusal {
    fn from(rejection: PathRejection) -> Self {
        Refusal::invalid(bounded(&rejection.body_text()))
    }
}
