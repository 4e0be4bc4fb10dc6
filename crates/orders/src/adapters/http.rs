//! A broker with a JSON API: where it is, what it wants in its headers, and what its statuses mean are configured. The key
//! of the order goes with every request as `Idempotency-Key`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use postrider::couriers::exchange::{Answer as Reply, Exchange, System, retry_after};
use postrider::outcome::Reach;
use postrider::{Error, Result};
use serde_json::{Value, json};
use url::Url;

use super::{Adapter, Answer, Found, Sending};
use crate::decide::{Idempotency, Reason, Refusal, reach_of_server_error};
use crate::result::{Execution, Fill, Number};

/// Most bytes of a broker's answer.
const MOST_BODY: usize = 1 << 20;

/// What a status of the broker means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    Executed,
    Refused(Reason),
}

impl Meaning {
    /// By the name of the reason, in the words of the configuration.
    pub fn parse(text: &str) -> Option<Meaning> {
        Some(match text {
            "executed" => Meaning::Executed,
            "already_processed" => Meaning::Refused(Reason::AlreadyProcessed),
            "rejected" => Meaning::Refused(Reason::Rejected),
            "bad_request" => Meaning::Refused(Reason::BadRequest),
            "unauthorized" => Meaning::Refused(Reason::Unauthorized),
            "rate_limited" => Meaning::Refused(Reason::RateLimited),
            "server_error" => Meaning::Refused(Reason::ServerError),
            "timeout" => Meaning::Refused(Reason::Timeout),
            "unknown" => Meaning::Refused(Reason::Unknown),
            _ => return None,
        })
    }

    pub const WORDS: &str = "executed, already_processed, rejected, bad_request, unauthorized, rate_limited, server_error, timeout, unknown";

    fn of(status: u16) -> Meaning {
        match status {
            200..=299 => Meaning::Executed,
            401 | 403 => Meaning::Refused(Reason::Unauthorized),
            408 | 504 => Meaning::Refused(Reason::Timeout),
            409 => Meaning::Refused(Reason::Rejected),
            429 => Meaning::Refused(Reason::RateLimited),
            400..=499 => Meaning::Refused(Reason::BadRequest),
            500..=599 => Meaning::Refused(Reason::ServerError),
            _ => Meaning::Refused(Reason::Unknown),
        }
    }
}

#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// Where orders are posted.
    pub url: String,
    /// Where a key is looked up, with `{key}` in it.
    pub look_up_url: Option<String>,
    pub headers: Vec<(String, String)>,
    pub statuses: BTreeMap<u16, Meaning>,
    pub idempotency: Idempotency,
    pub timeout: Duration,
}

pub struct HttpBroker {
    exchange: Exchange,
    settings: HttpSettings,
    url: Uri,
    headers: HeaderMap,
}

impl HttpBroker {
    pub fn new(settings: HttpSettings) -> Result<Self> {
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION"))));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for (name, value) in &settings.headers {
            let wrong = || Error::invalid(format!("the header {name} of the broker cannot be sent"));
            headers.insert(HeaderName::try_from(name).map_err(|_| wrong())?, value.parse().map_err(|_| wrong())?);
        }
        let url = uri(&settings.url)?;
        match (&settings.look_up_url, settings.idempotency) {
            (None, Idempotency::LookUp { .. }) => {
                return Err(Error::invalid("look_up_url is missing: where is a key looked up?"));
            }
            (Some(look_up), _) if !look_up.contains("{key}") => {
                return Err(Error::invalid("look_up_url must have {key} where the key belongs"));
            }
            (Some(look_up), _) => drop(uri(&look_up.replace("{key}", "k"))?),
            (None, _) => {}
        }
        let exchange = Exchange::new(Arc::new(System), settings.timeout)?;
        Ok(HttpBroker { exchange, settings, url, headers })
    }

    async fn ask(&self, method: Method, url: Uri, key: &str, trace: &[(String, String)], body: Bytes) -> Reply {
        let mut request = Request::new(Full::new(body));
        (*request.method_mut(), *request.uri_mut()) = (method, url);
        *request.headers_mut() = self.headers.clone();
        for (name, value) in trace.iter().filter(|(name, _)| name == "traceparent" || name == "tracestate") {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                request.headers_mut().insert(name, value);
            }
        }
        match HeaderValue::from_bytes(key.as_bytes()) {
            Ok(key) => request.headers_mut().insert("idempotency-key", key),
            Err(_) => {
                let cause = "the idempotency key cannot be sent as a header".to_owned();
                return Reply::Unanswered { code: "KEY", cause, reach: Reach::NeverSent, remote: None };
            }
        };
        self.exchange.ask(request, self.settings.timeout, MOST_BODY).await
    }
}

fn uri(text: &str) -> Result<Uri> {
    let wrong = |why: &dyn std::fmt::Display| Error::invalid(format!("`{text}` is no URL of a broker: {why}"));
    let url = Url::parse(text).map_err(|e| wrong(&e))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(wrong(&"use http or https"));
    }
    url.as_str().parse().map_err(|e| wrong(&e))
}

fn body(sending: &Sending<'_>) -> String {
    let order = sending.order;
    let mut body = json!({
        "order_id": sending.order_id,
        "idempotency_key": sending.key,
        "instrument": order.instrument,
        "side": order.side.as_str(),
        "time_in_force": order.time_in_force.as_str(),
    })
    .to_string();
    // Exact numbers, which the JSON value above could not hold.
    let number = |n| serde_json::to_string(&Number(n)).unwrap_or_default();
    body.pop();
    body.push_str(&format!(",\"qty\":{}", number(order.qty)));
    body.push_str(&order.price.map_or(",\"price\":null".to_owned(), |price| format!(",\"price\":{}", number(price))));
    if let Some(tags) = &order.tags {
        body.push_str(&format!(",\"tags\":{tags}"));
    }
    body.push('}');
    body
}

/// What a broker says became of an order: `order_ref` (or `id`), `fills`, `status`.
fn said(body: &[u8], whole: bool) -> Result<Found, String> {
    #[derive(serde::Deserialize)]
    struct Said {
        order_ref: Option<Value>,
        id: Option<Value>,
        status: Option<String>,
        #[serde(default)]
        fills: Vec<Fill>,
    }
    if !whole {
        return Err("it was cut off".to_owned());
    }
    let said: Said = serde_json::from_slice(body).map_err(|e| e.to_string())?;
    let refused = ["rejected", "canceled", "cancelled", "expired"];
    let status = said.status.unwrap_or_default().to_ascii_lowercase();
    // What was filled before the rest was cancelled is executed.
    if said.fills.is_empty() && refused.contains(&status.as_str()) {
        return Ok(Found::Rejected(format!("the broker says: {status}")));
    }
    let reference = said.order_ref.or(said.id).ok_or("it has neither order_ref nor id")?;
    let order_ref = reference.as_str().map_or_else(|| reference.to_string(), str::to_owned);
    if order_ref.len() > 255 || order_ref.chars().any(char::is_control) {
        return Err("its order_ref is no reference".to_owned());
    }
    let execution = Execution { order_ref, fills: said.fills };
    execution.check().map(|()| Found::Executed(execution))
}

fn unanswered(code: &str, cause: String, reach: Reach) -> Refusal {
    let reason = if code == "TIMEOUT" { Reason::Timeout } else { Reason::Unknown };
    Refusal { reason, message: format!("{code}: {cause}"), reach, retry_after: None }
}

#[async_trait]
impl Adapter for HttpBroker {
    fn name(&self) -> &str {
        "http"
    }

    fn idempotency(&self) -> Idempotency {
        self.settings.idempotency
    }

    async fn send(&self, sending: &Sending<'_>) -> Answer {
        let body = body(sending).into();
        let reply = self.ask(Method::POST, self.url.clone(), sending.key, sending.headers, body).await;
        let (status, headers, said) = match reply {
            Reply::Unanswered { code, cause, reach, .. } => return Answer::Refused(unanswered(code, cause, reach)),
            Reply::Answered { status, headers, body, whole, .. } => (status.as_u16(), headers, said(&body, whole)),
        };
        let meaning = self.settings.statuses.get(&status).copied().unwrap_or_else(|| Meaning::of(status));
        let refused = |reason: Reason, message: String, reach| {
            let retry_after = retry_after(&headers).filter(|_| matches!(status, 429 | 503));
            Answer::Refused(Refusal { reason, message, reach, retry_after })
        };
        // Where a key is executed once, not knowing does no harm.
        let doubt = if self.settings.idempotency == Idempotency::Key { Reach::Answered } else { Reach::Unknown };
        let (reason, reach) = match meaning {
            Meaning::Executed => match said {
                Ok(Found::Executed(done)) => return Answer::Executed(done, None),
                Ok(Found::Rejected(why)) => return refused(Reason::Rejected, why, Reach::Answered),
                // It said yes in words that cannot be read: whatever it did is done.
                Ok(Found::Nothing) | Err(_) => (Reason::Unknown, Reach::Unknown),
            },
            Meaning::Refused(Reason::AlreadyProcessed) => {
                let done = said.ok().and_then(Found::executed).unwrap_or_default();
                return Answer::Executed(done, Some(Reason::AlreadyProcessed));
            }
            Meaning::Refused(Reason::Timeout) => (Reason::Timeout, Reach::Unknown),
            Meaning::Refused(Reason::ServerError) => {
                (Reason::ServerError, reach_of_server_error(status, self.settings.idempotency))
            }
            Meaning::Refused(Reason::Unknown) => (Reason::Unknown, doubt),
            Meaning::Refused(reason) => (reason, Reach::Answered),
        };
        refused(reason, format!("status {status}"), reach)
    }

    async fn look_up(&self, key: &str) -> Result<Found, Refusal> {
        let template = self.settings.look_up_url.as_deref().unwrap_or_default();
        let encoded: String = url::form_urlencoded::byte_serialize(key.as_bytes()).collect();
        let url = uri(&template.replace("{key}", &encoded.replace('+', "%20")));
        let url = url.map_err(|e| unanswered("URL", e.to_string(), Reach::NeverSent))?;
        match self.ask(Method::GET, url, key, &[], Bytes::new()).await {
            Reply::Unanswered { code, cause, .. } => Err(unanswered(code, cause, Reach::NeverSent)),
            Reply::Answered { status, .. } if status.as_u16() == 404 => Ok(Found::Nothing),
            Reply::Answered { status, body, whole, .. } if status.is_success() => {
                said(&body, whole).map_err(|why| unanswered("LOOK_UP", why, Reach::NeverSent))
            }
            Reply::Answered { status, .. } => {
                let message = format!("the look-up answered {status}");
                Err(unanswered("LOOK_UP", message, Reach::NeverSent))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_a_meaning() {
        use Meaning::*;
        for (status, meaning) in [
            (200, Executed),
            (202, Executed),
            (302, Refused(Reason::Unknown)),
            (400, Refused(Reason::BadRequest)),
            (401, Refused(Reason::Unauthorized)),
            (403, Refused(Reason::Unauthorized)),
            (404, Refused(Reason::BadRequest)),
            (408, Refused(Reason::Timeout)),
            (409, Refused(Reason::Rejected)),
            (422, Refused(Reason::BadRequest)),
            (429, Refused(Reason::RateLimited)),
            (500, Refused(Reason::ServerError)),
            (504, Refused(Reason::Timeout)),
        ] {
            assert_eq!(Meaning::of(status), meaning, "{status}");
        }
        assert!(Meaning::WORDS.split(", ").all(|word| Meaning::parse(word).is_some()));
    }

    #[test]
    fn answers_are_read() {
        let read = |body: &str| said(body.as_bytes(), true);
        let executed = |body: &str| read(body).unwrap().executed().unwrap();
        assert_eq!(executed(r#"{"order_ref":"r1"}"#).order_ref, "r1");
        assert_eq!(executed(r#"{"id":17,"fills":[{"px":1.5,"qty":2,"ts":"t"}]}"#).executed_qty(), 2.into());
        let partly = r#"{"id":"r","status":"Canceled","fills":[{"px":1,"qty":40,"ts":"t"}]}"#;
        assert_eq!(executed(partly).executed_qty(), 40.into(), "what was filled is executed");
        assert!(matches!(read(r#"{"id":"r","status":"REJECTED"}"#), Ok(Found::Rejected(_))));
        let huge = r#"{"id":"r","fills":[{"px":1,"qty":7e28,"ts":"t"},{"px":1,"qty":7e28,"ts":"t"}]}"#;
        for nonsense in ["{}", "done", "{\"id\":\"a\\u0000b\"}", huge] {
            assert!(read(nonsense).is_err(), "{nonsense}");
        }
        assert!(said(br#"{"id":"r"}"#, false).is_err(), "cut off");
    }
}
