//! A broker with a JSON API: where it is, what it wants in its headers, and what its statuses mean are configured. The key
//! of the order goes with every request as `Idempotency-Key`.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use postrider::clock::Tick;
use postrider::couriers::exchange::{Answer as Reply, Exchange, Resolve, System, retry_after};
use postrider::outcome::Reach;
use postrider::{Error, Result};
use serde_json::{Value, json};
use url::Url;

use super::{Adapter, Answer, Found, Sending};
use crate::decide::{Idempotency, Reason, Refusal, reach_of_server_error};
use crate::result::{Execution, Fill, Number};

/// Most bytes of a broker's answer.
const MOST_BODY: usize = 1 << 20;

/// Credentials are not read again before this time has passed: they may come from a program.
const BETWEEN_READINGS: Duration = Duration::from_secs(2);
/// Credentials that are read again must be there within this time; until then those in use stay.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a status of the broker means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    Executed,
    Refused(Reason),
    /// The broker failed, and surely did nothing.
    NothingDone,
}

/// Where the values of headers come from when they are read again: secrets are references. It may block.
pub type Credentials = Arc<dyn Fn() -> Result<Vec<(String, String)>, String> + Send + Sync>;

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
            "nothing_done" => Meaning::NothingDone,
            "timeout" => Meaning::Refused(Reason::Timeout),
            "unknown" => Meaning::Refused(Reason::Unknown),
            _ => return None,
        })
    }

    pub const WORDS: &str = "executed, already_processed, rejected, bad_request, unauthorized, rate_limited, server_error, nothing_done, timeout, unknown";

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
    look_up: Option<LookUp>,
    headers: RwLock<HeaderMap>,
    credentials: Option<Credentials>,
    read_at: tokio::sync::Mutex<Option<Tick>>,
}

impl HttpBroker {
    pub fn new(settings: HttpSettings) -> Result<Self> {
        let headers = RwLock::new(request_headers(&settings.headers)?);
        let url = uri(&settings.url)?;
        let look_up = settings.look_up_url.as_deref().map(LookUp::new).transpose()?;
        if let (None, Idempotency::LookUp { .. }) = (&look_up, settings.idempotency) {
            return Err(Error::invalid("look_up_url is missing: where is a key looked up?"));
        }
        let exchange = Exchange::new(Arc::new(System), settings.timeout)?;
        Ok(HttpBroker { exchange, settings, url, look_up, headers, credentials: None, read_at: Default::default() })
    }

    /// Connects to addresses that this resolver permits, and to no others.
    pub fn resolving_by(mut self, resolver: Arc<dyn Resolve>) -> Result<Self> {
        self.exchange = Exchange::new(resolver, self.settings.timeout)?;
        Ok(self)
    }

    /// Reads its headers from there when the broker refuses those it has, and when it is told to.
    pub fn with_credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// As often as it is wanted, but of many who are refused at once the first reads for all.
    async fn renew_for(&self, refused: &HeaderMap) -> bool {
        let mut read_at = self.read_at.lock().await;
        if *self.headers.read().unwrap_or_else(PoisonError::into_inner) != *refused {
            return true;
        }
        if read_at.is_some_and(|at| Tick::now().since(at) < BETWEEN_READINGS) {
            return false;
        }
        let changed = self.read_headers().await;
        // Counted from its end: whoever waited for a slow reading does not begin another.
        *read_at = Some(Tick::now());
        changed
    }

    async fn read_headers(&self) -> bool {
        let Some(credentials) = self.credentials.clone() else { return false };
        // An order is under way, and its outcome known: it does not wait for ever for what the next one needs.
        let reading = tokio::task::spawn_blocking(move || credentials());
        let read = match tokio::time::timeout(PATIENCE, reading).await {
            Ok(read) => read.unwrap_or_else(|e| Err(e.to_string())),
            Err(_) => Err("they were not there in time".to_owned()),
        };
        let read = read.and_then(|headers| request_headers(&headers).map_err(|e| e.message));
        match read {
            Err(error) => {
                tracing::warn!(error, "the credentials for the broker cannot be read again; those in use stay");
                false
            }
            Ok(headers) => {
                let mut in_use = self.headers.write().unwrap_or_else(PoisonError::into_inner);
                let changed = *in_use != headers;
                *in_use = headers;
                changed
            }
        }
    }

    fn headers(&self) -> HeaderMap {
        self.headers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Our credentials are refused; with others it may be tried at once.
    async fn unauthorized(&self, status: u16, sent: &HeaderMap) -> Refusal {
        let retry_after = self.renew_for(sent).await.then_some(Duration::ZERO);
        let message = format!("status {status}");
        Refusal { reason: Reason::Unauthorized, message, reach: Reach::Answered, retry_after }
    }

    async fn ask(
        &self,
        (method, url): (Method, Uri),
        headers: HeaderMap,
        key: &str,
        trace: &[(String, String)],
        body: Bytes,
    ) -> Reply {
        let mut request = Request::new(Full::new(body));
        (*request.method_mut(), *request.uri_mut()) = (method, url);
        *request.headers_mut() = headers;
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

/// What every request carries. Errors name a header, never its value.
fn request_headers(wanted: &[(String, String)]) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION"))));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    for (name, value) in wanted {
        let wrong = || Error::invalid(format!("the header {name} of the broker cannot be sent"));
        let mut value: HeaderValue = value.parse().map_err(|_| wrong())?;
        value.set_sensitive(true);
        headers.insert(HeaderName::try_from(name).map_err(|_| wrong())?, value);
    }
    Ok(headers)
}

/// Where keys are looked up: what stands before a key and behind it.
#[derive(Debug)]
struct LookUp {
    before: String,
    after: String,
}

impl LookUp {
    fn new(template: &str) -> Result<Self> {
        /// Stands for the key while the URL is read.
        const PLACE: &str = "postrider-key-here";
        if !template.contains("{key}") {
            return Err(Error::invalid("look_up_url must have {key} where the key belongs"));
        }
        let whole = uri(&template.replace("{key}", PLACE))?.to_string();
        let mut parts = whole.split(PLACE);
        match (parts.next(), parts.next(), parts.next()) {
            (Some(before), Some(after), None) => Ok(LookUp { before: before.to_owned(), after: after.to_owned() }),
            _ => Err(Error::invalid("look_up_url must have {key} once, in its path or its query")),
        }
    }

    /// The URL that asks about this key and no other.
    fn of(&self, key: &str) -> std::result::Result<Uri, String> {
        // A path of dots is another path, however it is written: on the way somebody would make it one.
        let whole_segment = self.before.ends_with('/') && (self.after.is_empty() || self.after.starts_with(['/', '?']));
        if matches!(key, "." | "..") && whole_segment && !self.before.contains('?') {
            return Err(format!("the key `{key}` cannot stand in a path, so the broker cannot be asked about it"));
        }
        let encoded: String = url::form_urlencoded::byte_serialize(key.as_bytes()).collect();
        let url = format!("{}{}{}", self.before, encoded.replace('+', "%20"), self.after);
        url.parse().map_err(|e| format!("the broker cannot be asked about this key: {e}"))
    }
}

fn uri(text: &str) -> Result<Uri> {
    // The text itself may hold a secret.
    let wrong = |why: &dyn std::fmt::Display| Error::invalid(format!("this is no URL of a broker: {why}"));
    let url = Url::parse(text).map_err(|e| wrong(&e))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(wrong(&"use http or https"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong(&"it has credentials in it, which are not sent; send an Authorization header instead"));
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

/// Whatever its status, such an answer says nothing of this order.
const OF_ANOTHER: &str = "it names the idempotency_key of another order";

/// What a broker says became of the order with this key: `order_ref` (or `id`), `fills`, `status`.
fn said(key: &str, body: &[u8], whole: bool) -> Result<Found, String> {
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
    // Not in the words of the parser, which repeat what it met: an answer may repeat the order.
    let wrong = |e: serde_json::Error| format!("it is not as documented, at line {} column {}", e.line(), e.column());
    // Looked at before all else, which may not be as documented.
    if names_another(key, &serde_json::from_slice(body).map_err(wrong)?) {
        return Err(OF_ANOTHER.to_owned());
    }
    let said: Said = serde_json::from_slice(body).map_err(wrong)?;
    let refused = ["rejected", "canceled", "cancelled", "expired"];
    let unknown = ["not_found", "unknown_key"];
    let status = said.status.unwrap_or_default().to_ascii_lowercase();
    // What was filled before the rest was cancelled is executed.
    if said.fills.is_empty() && refused.contains(&status.as_str()) {
        return Ok(Found::Rejected(format!("the broker says: {status}")));
    }
    if said.fills.is_empty() && unknown.contains(&status.as_str()) {
        return Ok(Found::Nothing);
    }
    let reference = said.order_ref.or(said.id).ok_or("it has neither order_ref nor id")?;
    let order_ref = match reference {
        Value::String(text) if !text.trim().is_empty() => text,
        Value::Number(number) => number.to_string(),
        _ => return Err("its order_ref is neither a text nor a number".to_owned()),
    };
    if order_ref.len() > 255 || order_ref.chars().any(char::is_control) {
        return Err("its order_ref is no reference".to_owned());
    }
    Ok(Found::Executed(Execution { order_ref, fills: said.fills }))
}

fn names_another(key: &str, said: &Value) -> bool {
    match said {
        Value::Object(members) => members.get("idempotency_key").is_some_and(|named| !named.is_null() && named != key),
        Value::Array(items) => items.iter().any(|item| names_another(key, item)),
        _ => false,
    }
}

/// A 404 says that the broker knows nothing of a key only where it may be the broker's: a page about a path that is not
/// there comes from something in between.
fn knows_nothing(body: &[u8], whole: bool) -> bool {
    whole && (body.trim_ascii().is_empty() || serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok())
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
        let (body, ours) = (body(sending).into(), self.headers());
        let to = (Method::POST, self.url.clone());
        let reply = self.ask(to, ours.clone(), sending.key, sending.headers, body).await;
        let (status, headers, said) = match reply {
            Reply::Unanswered { code, cause, reach, .. } => return Answer::Refused(unanswered(code, cause, reach)),
            Reply::Answered { status, headers, body, whole, .. } => {
                (status.as_u16(), headers, said(sending.key, &body, whole))
            }
        };
        if said.as_ref().is_err_and(|why| why == OF_ANOTHER) {
            return Answer::Nonsense(format!("status {status}, but {OF_ANOTHER}"));
        }
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
                Ok(Found::Nothing) => return Answer::Nonsense(format!("status {status}, and it knows nothing of it")),
                Ok(Found::Nonsense(why)) | Err(why) => {
                    return Answer::Nonsense(format!("status {status}, but the answer cannot be read: {why}"));
                }
            },
            Meaning::Refused(Reason::AlreadyProcessed) => match said {
                // What was processed already may have been a refusal.
                Ok(Found::Rejected(why)) => return refused(Reason::Rejected, why, Reach::Answered),
                Ok(Found::Nothing | Found::Nonsense(_)) => {
                    return Answer::Nonsense(format!("status {status}, and it knows nothing of it"));
                }
                said => {
                    let done = said.ok().and_then(Found::executed).unwrap_or_default();
                    return Answer::Executed(done, Some(Reason::AlreadyProcessed));
                }
            },
            Meaning::Refused(Reason::Unauthorized) => return Answer::Refused(self.unauthorized(status, &ours).await),
            Meaning::Refused(Reason::Timeout) => (Reason::Timeout, Reach::Unknown),
            Meaning::Refused(Reason::ServerError) => {
                (Reason::ServerError, reach_of_server_error(status, headers.contains_key(RETRY_AFTER)))
            }
            Meaning::NothingDone => (Reason::ServerError, Reach::Answered),
            Meaning::Refused(Reason::Unknown) => (Reason::Unknown, doubt),
            Meaning::Refused(reason) => (reason, Reach::Answered),
        };
        refused(reason, format!("status {status}"), reach)
    }

    async fn look_up(&self, key: &str) -> Result<Found, Refusal> {
        let Some(look_up) = &self.look_up else { return Ok(Found::Nonsense("there is no look_up_url".to_owned())) };
        let url = match look_up.of(key) {
            Ok(url) => url,
            Err(why) => return Ok(Found::Nonsense(why)),
        };
        let ours = self.headers();
        match self.ask((Method::GET, url), ours.clone(), key, &[], Bytes::new()).await {
            Reply::Unanswered { code, cause, .. } => Err(unanswered(code, cause, Reach::NeverSent)),
            Reply::Answered { status, body, whole, .. } if status.as_u16() == 404 => {
                Ok(match knows_nothing(&body, whole) {
                    true => Found::Nothing,
                    false => Found::Nonsense("a 404 that is not the broker's; is look_up_url right?".to_owned()),
                })
            }
            Reply::Answered { status, body, whole, .. } if status.is_success() => Ok(said(key, &body, whole)
                .unwrap_or_else(|why| Found::Nonsense(format!("the answer cannot be read: {why}")))),
            Reply::Answered { status, .. } if matches!(status.as_u16(), 401 | 403) => {
                Err(self.unauthorized(status.as_u16(), &ours).await)
            }
            Reply::Answered { status, .. } => {
                let message = format!("the look-up answered {status}");
                Err(unanswered("LOOK_UP", message, Reach::NeverSent))
            }
        }
    }

    async fn renew(&self) -> bool {
        self.read_headers().await
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
        let read = |body: &str| said("k-1", body.as_bytes(), true);
        let executed = |body: &str| read(body).unwrap().executed().unwrap();
        assert_eq!(executed(r#"{"order_ref":"r1"}"#).order_ref, "r1");
        assert_eq!(executed(r#"{"id":17,"fills":[{"px":1.5,"qty":2,"ts":"t"}]}"#).executed_qty(), 2.into());
        let partly = r#"{"id":"r","status":"Canceled","fills":[{"px":1,"qty":40,"ts":"t"}]}"#;
        assert_eq!(executed(partly).executed_qty(), 40.into(), "what was filled is executed");
        assert!(matches!(read(r#"{"id":"r","status":"REJECTED"}"#), Ok(Found::Rejected(_))));
        assert_eq!(read(r#"{"status":"not_found"}"#), Ok(Found::Nothing));
        let no_reference =
            ["true", "{}", "[\"r\"]", "\"\"", "\" \"", "null"].map(|it| format!("{{\"order_ref\":{it}}}"));
        assert_eq!(executed(r#"{"order_ref":17}"#).order_ref, "17");
        for nonsense in
            ["{}", "done", "{\"id\":\"a\\u0000b\"}"].into_iter().chain(no_reference.iter().map(String::as_str))
        {
            assert!(read(nonsense).is_err(), "{nonsense}");
        }
        assert!(said("k-1", br#"{"id":"r"}"#, false).is_err(), "cut off");
        assert_eq!(executed(r#"{"id":"r","idempotency_key":"k-1"}"#).order_ref, "r");
        for another in [
            r#"{"id":"r","idempotency_key":"k-2"}"#,
            r#"{"status":"rejected","idempotency_key":"k-2"}"#,
            r#"{"id":"r","idempotency_key":"k-2","fills":"none","status":7}"#,
            r#"[{"id":"r","idempotency_key":"k-2"}]"#,
        ] {
            assert_eq!(read(another), Err(OF_ANOTHER.to_owned()), "{another}");
        }
    }

    #[test]
    fn only_a_404_of_the_broker_says_that_it_knows_nothing() {
        for its_own in ["", " ", "{}", r#"{"error":"not found"}"#] {
            assert!(knows_nothing(its_own.as_bytes(), true), "{its_own}");
        }
        for page in ["<html>404</html>", "404 page not found", "Not Found"] {
            assert!(!knows_nothing(page.as_bytes(), true), "{page}");
        }
        assert!(!knows_nothing(b"", false), "cut off");
    }

    #[test]
    fn a_key_is_asked_about_and_no_other() {
        let asks = |template: &str, key: &str| LookUp::new(template).unwrap().of(key).map(|uri| uri.to_string());
        assert_eq!(asks("https://b.example/o/{key}", "a/b c").unwrap(), "https://b.example/o/a%2Fb%20c");
        assert_eq!(asks("https://b.example/o/{key}/state", "...").unwrap(), "https://b.example/o/.../state");
        assert_eq!(asks("https://b.example/o?key={key}", "..").unwrap(), "https://b.example/o?key=..");
        assert_eq!(asks("https://b.example/o/x{key}", "..").unwrap(), "https://b.example/o/x..");
        for key in [".", ".."] {
            assert!(asks("https://b.example/o/{key}", key).is_err(), "{key}");
            assert!(asks("https://b.example/o/{key}?full=1", key).is_err(), "{key}");
        }
        for template in ["https://b.example/o", "https://b.example/{key}/{key}", "ftp://b.example/{key}"] {
            assert!(LookUp::new(template).is_err(), "{template}");
        }
    }
}
