//! OpenMemory over HTTP, in both of its dialects, which its `/health` tells apart. It is asked once per call: what to do
//! about a failure is for the caller, and [`classify`] says whose it is. Everybody may ask for `/health`, so nothing is
//! concluded from it but the dialect.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body_util::Full;
use postrider::clock::Tick;
use postrider::couriers::blot::Blot;
use postrider::couriers::exchange::{Answer, Ask, Exchange, Resolve, System, retry_after};
use postrider::outcome::{Reach, SAID};
use postrider::{Error, Result};
use serde_json::{Value, json};
use url::Url;

/// Most bytes of an answer.
const MOST_BODY: usize = 4 << 20;
/// A refused key is read again at most this often.
const KEY_EVERY: Duration = Duration::from_secs(3);

/// Which of its two servers it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Js,
    Py,
}

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The memory's: it would fail again.
    Memory,
    /// Ours: a key, an address, a configuration. Nothing is lost over it.
    Ours,
    /// The service's: later may be better.
    Service,
    /// Nobody's: it takes so many requests at a time, and said so.
    Limit,
}

/// What a write that failed may have left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Doubt {
    #[default]
    Nothing,
    /// It was answered, and may have been applied: looking tells.
    Answered,
    /// The connection ended without an answer: whoever was at its other end is most likely gone.
    CutOff,
    /// Nobody answered in time: it may be applied much later.
    UnderWay,
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// `SCREAMING_SNAKE`: `HTTP_503`, `TIMEOUT`, `NO_ID`, …
    pub code: String,
    pub message: String,
    pub blame: Blame,
    pub reach: Reach,
    pub doubt: Doubt,
    pub retry_after: Option<Duration>,
}

impl Fault {
    fn new(code: impl Into<String>, message: impl Into<String>, blame: Blame, reach: Reach) -> Self {
        let doubt = Doubt::Nothing;
        Fault { code: code.into(), message: message.into(), blame, reach, doubt, retry_after: None }
    }

    /// As the audit names it: `openmemory_write_failed:<class>`.
    pub fn class(&self) -> String {
        self.code.to_ascii_lowercase()
    }

    /// Does the breaker count it? Only what a service does that is not well: what it refuses and limits is no outage, and
    /// no proof of health either.
    pub fn counts(&self) -> bool {
        self.blame == Blame::Service
    }

    pub fn breaker_open() -> Self {
        Fault::new("BREAKER_OPEN", "OpenMemory did not answer before", Blame::Service, Reach::NeverSent)
    }

    pub fn not_configured() -> Self {
        Fault::new("NOT_CONFIGURED", "no url of OpenMemory is configured in [memory]", Blame::Ours, Reach::NeverSent)
    }

    /// Our own database did not tell what to ask for.
    pub fn our_database(error: &Error) -> Self {
        // What a database says may hold data; the log has it.
        tracing::warn!(%error, "our copies cannot be read");
        let what = "our own database does not answer";
        Fault::new("STORE_UNAVAILABLE", what, Blame::Service, Reach::NeverSent)
    }
}

/// A memory that was written, or taken for another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Added {
    pub id: String,
    /// It says that it had it, or something like it.
    pub deduplicated: bool,
}

/// What is seen of a memory by its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    Seen(Held),
    /// There is none.
    Missing,
    /// There is one, and it is another key's.
    Hidden,
    /// This service cannot be asked for one memory.
    Unaskable,
}

/// A memory the service has, as far as it tells whose it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub id: String,
    /// Whole, or its beginning.
    pub content: String,
    /// As we wrote it along.
    pub payload_sha: Option<String>,
    pub space: Option<String>,
}

impl Held {
    /// It is the memory with this digest, as far as it tells: ids may be given to others when a service numbers anew.
    pub fn may_be(&self, payload_sha: &str) -> bool {
        self.payload_sha.as_ref().is_none_or(|sha| sha == payload_sha)
    }
}

/// Something it found.
#[derive(Clone, Debug, PartialEq)]
pub struct Match {
    pub id: String,
    pub content: String,
    pub score: Option<f64>,
}

/// A memory to add.
#[derive(Clone, Debug)]
pub struct Addition<'a> {
    pub content: &'a str,
    pub tags: Vec<&'a str>,
    pub metadata: Value,
}

/// Where its key is kept; asked again when the service refuses the one we have.
pub type KeySource = Arc<dyn Fn() -> Result<Option<String>, String> + Send + Sync>;

#[derive(Clone)]
pub struct Settings {
    pub url: Option<Url>,
    pub key: KeySource,
    pub timeout: Duration,
    /// Who says which addresses are connected to; `None`: the operating system.
    pub resolver: Option<Arc<dyn Resolve>>,
}

impl std::fmt::Debug for Settings {
    /// The key is a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

/// A client of one OpenMemory.
pub struct OpenMemory {
    network: Arc<dyn Ask>,
    settings: Settings,
    /// Found out at the first call, and again after a failure.
    dialect: Mutex<Option<Dialect>>,
    key: Mutex<Option<HeaderValue>>,
    key_read_at: Mutex<Option<Tick>>,
    /// How often the key was found changed: with another key it is another tenant, with other memories.
    key_changes: AtomicU64,
    /// It has shown a memory by its id, so it can.
    shows_one: AtomicBool,
}

impl OpenMemory {
    pub fn new(settings: Settings) -> Result<Self> {
        let resolver = settings.resolver.clone().unwrap_or_else(|| Arc::new(System));
        let exchange = Exchange::new(resolver, settings.timeout)?;
        Self::over(Arc::new(exchange), settings)
    }

    /// Over a network of the caller's.
    pub fn over(network: Arc<dyn Ask>, settings: Settings) -> Result<Self> {
        let key = header_of(&settings)?;
        let (dialect, key_read_at) = (Mutex::new(None), Mutex::new(None));
        let (key_changes, shows_one) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(OpenMemory { network, settings, dialect, key: Mutex::new(key), key_read_at, key_changes, shows_one })
    }

    /// Rises whenever the key in use has become another.
    pub fn key_changes(&self) -> u64 {
        self.key_changes.load(Ordering::Relaxed)
    }

    /// Is it there, and which is it?
    pub async fn health(&self) -> Result<Dialect, Fault> {
        self.health_by(self.deadline()).await
    }

    /// One call, whatever it takes (finding out the dialect, a key read again), has one timeout.
    fn deadline(&self) -> Tick {
        Tick::now().plus(self.settings.timeout)
    }

    async fn health_by(&self, deadline: Tick) -> Result<Dialect, Fault> {
        let (status, body) = self.call(Method::GET, "/health", None, deadline).await?;
        if !(200..300).contains(&status.0) {
            let fault = classify(status.0, &body, &status.1);
            // No memory was shown to it, so none is to blame.
            let blame = if fault.blame == Blame::Memory { Blame::Ours } else { fault.blame };
            return Err(Fault { blame, reach: Reach::NeverSent, ..fault });
        }
        let dialect = dialect_of(&body).ok_or_else(|| {
            let what = "what answers at /health is no OpenMemory; correct [memory] url";
            Fault::new("NOT_OPENMEMORY", what, Blame::Ours, Reach::Answered)
        })?;
        *self.dialect.lock().unwrap_or_else(PoisonError::into_inner) = Some(dialect);
        Ok(dialect)
    }

    /// Asks something that needs the key and costs little: does it do what it is for?
    pub async fn ping(&self) -> Result<Dialect, Fault> {
        let deadline = self.deadline();
        let dialect = self.known_dialect(deadline).await?;
        let asked = match dialect {
            Dialect::Js => self.ask(Method::GET, "/memory/all?l=1&u=0", None, deadline).await,
            Dialect::Py => {
                let body = json!({ "query": "postrider", "limit": 1 });
                self.ask(Method::POST, "/memory/search", Some(&body), deadline).await
            }
        };
        match asked {
            // An older one that cannot list can still be asked a question.
            Err(fault) if dialect == Dialect::Js && fault.code == "HTTP_404" => {
                self.query_by("postrider", 1, deadline).await.map(|_| dialect)
            }
            asked => asked.map(|_| dialect),
        }
    }

    /// Writes a memory; its id. An answer without one is a failure.
    pub async fn add(&self, addition: &Addition<'_>) -> Result<Added, Fault> {
        let deadline = self.deadline();
        // Whatever happens before, the memory has not been shown to it.
        let unsent = |fault| Fault { doubt: Doubt::Nothing, reach: Reach::NeverSent, ..fault };
        self.known_dialect(deadline).await.map_err(unsent)?;
        let body = json!({ "content": addition.content, "tags": addition.tags, "metadata": addition.metadata });
        let body = self.ask(Method::POST, "/memory/add", Some(&body), deadline).await?;
        let id = id_of(&body).ok_or_else(|| {
            let fault = Fault::new("NO_ID", "OpenMemory answered without an id", Blame::Service, Reach::Unknown);
            Fault { doubt: Doubt::Answered, ..fault }
        })?;
        let said = [Some(&body), body.get("data")].into_iter().flatten();
        let deduplicated = said.filter_map(|part| part.get("deduplicated")).any(|said| *said == Value::Bool(true));
        Ok(Added { id, deduplicated })
    }

    /// What it has under this id.
    pub async fn see(&self, id: &str) -> Result<Sight, Fault> {
        let deadline = self.deadline();
        if self.known_dialect(deadline).await? == Dialect::Py {
            return Ok(Sight::Unaskable);
        }
        let path = format!("/memory/{}", escaped(id));
        match self.ask(Method::GET, &path, None, deadline).await {
            Ok(body) => {
                let held = held_of(&body).ok_or_else(|| {
                    Fault::new("RESPONSE_INVALID", "no memory with an id", Blame::Service, Reach::Answered)
                })?;
                self.shows_one.store(true, Ordering::Relaxed);
                Ok(Sight::Seen(held))
            }
            Err(fault) if fault.code == "HTTP_404" => {
                // `nf` is its own word; any other 404 may be of a server that has no such route.
                let its_own = fault.message.ends_with(" nf") || self.shows_one.load(Ordering::Relaxed);
                Ok(if its_own { Sight::Missing } else { Sight::Unaskable })
            }
            Err(fault) if fault.code == "HTTP_403" && fault.message.ends_with(" forbidden") => Ok(Sight::Hidden),
            Err(fault) => Err(fault),
        }
    }

    /// What was written last, the newest first; `None` where it cannot be asked.
    pub async fn newest(&self, limit: usize, offset: usize) -> Result<Option<Vec<Held>>, Fault> {
        let deadline = self.deadline();
        if self.known_dialect(deadline).await? == Dialect::Py {
            return Ok(None);
        }
        let path = format!("/memory/all?l={limit}&u={offset}");
        match self.ask(Method::GET, &path, None, deadline).await {
            Ok(body) => {
                let items = body.get("items").and_then(Value::as_array);
                Ok(items.map(|items| items.iter().filter_map(held_of).collect()))
            }
            Err(fault) if fault.code == "HTTP_404" => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Takes a memory out; `false`: it was not there, or cannot be taken out.
    pub async fn forget(&self, id: &str) -> Result<bool, Fault> {
        let deadline = self.deadline();
        if self.known_dialect(deadline).await? == Dialect::Py {
            return Ok(false);
        }
        match self.ask(Method::DELETE, &format!("/memory/{}", escaped(id)), None, deadline).await {
            Ok(_) => Ok(true),
            Err(fault) if matches!(fault.code.as_str(), "HTTP_404" | "HTTP_405") => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    pub async fn query(&self, question: &str, k: usize) -> Result<Vec<Match>, Fault> {
        self.query_by(question, k, self.deadline()).await
    }

    async fn query_by(&self, question: &str, k: usize, deadline: Tick) -> Result<Vec<Match>, Fault> {
        let (path, body, list) = match self.known_dialect(deadline).await? {
            Dialect::Js => ("/memory/query", json!({ "query": question, "k": k }), "matches"),
            Dialect::Py => ("/memory/search", json!({ "query": question, "limit": k }), "results"),
        };
        let body = self.ask(Method::POST, path, Some(&body), deadline).await?;
        let strange = || Fault::new("RESPONSE_INVALID", "no list of matches", Blame::Service, Reach::Answered);
        let found = body.get(list).and_then(Value::as_array).ok_or_else(strange)?;
        Ok(found.iter().filter_map(match_of).collect())
    }

    async fn known_dialect(&self, deadline: Tick) -> Result<Dialect, Fault> {
        let known = *self.dialect.lock().unwrap_or_else(PoisonError::into_inner);
        match known {
            Some(dialect) => Ok(dialect),
            None => self.health_by(deadline).await,
        }
    }

    async fn ask(&self, method: Method, path: &str, body: Option<&Value>, deadline: Tick) -> Result<Value, Fault> {
        let mut answer = self.call(method.clone(), path, body, deadline).await;
        let refused = |answer: &Result<((u16, Option<Duration>), Value), Fault>| match answer {
            // That the memory is another's is no word about the key.
            Ok((status, body)) => matches!(status.0, 401 | 403) && body.get("err").is_none(),
            Err(_) => false,
        };
        if refused(&answer) && self.renew_key(deadline).await {
            answer = self.call(method, path, body, deadline).await;
        }
        let forget = || *self.dialect.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let (status, body) = answer.inspect_err(|_| forget())?;
        if (200..300).contains(&status.0) {
            return Ok(body);
        }
        let fault = classify(status.0, &body, &status.1);
        // Only what does not speak like the one we know may be another one.
        if !matches!(fault.blame, Blame::Limit | Blame::Memory) && body.get("err").is_none() {
            forget();
        }
        Err(fault)
    }

    /// Reads the key again from where it is kept, whenever it was read last.
    pub async fn read_key_again(&self) {
        *self.key_read_at.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.renew_key(self.deadline()).await;
    }

    /// Reads the key again from where it is kept, now and then; was it changed?
    async fn renew_key(&self, deadline: Tick) -> bool {
        {
            let mut read_at = self.key_read_at.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Tick::now();
            if read_at.is_some_and(|at| now.since(at) < KEY_EVERY) {
                return false;
            }
            *read_at = Some(now);
        }
        let settings = self.settings.clone();
        // A secrets manager's client may take its time.
        let read = tokio::task::spawn_blocking(move || header_of(&settings));
        let Ok(Ok(Ok(fresh))) = tokio::time::timeout(deadline.since(Tick::now()), read).await else { return false };
        let mut key = self.key.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *key != fresh;
        *key = fresh;
        if changed {
            self.key_changes.fetch_add(1, Ordering::Relaxed);
        }
        changed
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        deadline: Tick,
    ) -> Result<((u16, Option<Duration>), Value), Fault> {
        let url = self.settings.url.as_ref().ok_or_else(Fault::not_configured)?;
        let address = format!("{}{path}", url.as_str().trim_end_matches('/'));
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION"))));
        if let Some(key) = &*self.key.lock().unwrap_or_else(PoisonError::into_inner) {
            headers.insert(AUTHORIZATION, key.clone());
        }
        // Some servers repeat a key that they refuse.
        let secrets = Blot::new(Some(url), headers.get(AUTHORIZATION).and_then(|key| key.to_str().ok()));
        let bytes = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        let request = Request::builder().method(method).uri(address).body(Full::new(bytes));
        let mut request = request.map_err(|e| Fault::new("BAD_URL", e.to_string(), Blame::Ours, Reach::NeverSent))?;
        *request.headers_mut() = headers;
        let left = deadline.since(Tick::now());
        if left.is_zero() {
            return Err(Fault::new("TIMEOUT", "there was no time left to ask", Blame::Service, Reach::NeverSent));
        }
        match self.network.ask(request, left, MOST_BODY).await {
            Answer::Answered { status, headers, body, whole, .. } => {
                if status.is_success() && !whole {
                    let what = "the answer broke off";
                    let fault = Fault::new("RESPONSE_INVALID", what, Blame::Service, Reach::Unknown);
                    return Err(Fault { doubt: Doubt::Answered, ..fault });
                }
                let body = if status.is_success() { body } else { secrets.bytes(body) };
                let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
                Ok(((status.as_u16(), retry_after(&headers)), body))
            }
            Answer::Unanswered { code, cause, reach, .. } => {
                let doubt = match (reach, code) {
                    (Reach::Unknown, "CONNECTION_RESET") => Doubt::CutOff,
                    (Reach::Unknown, _) => Doubt::UnderWay,
                    _ => Doubt::Nothing,
                };
                Err(Fault { doubt, ..Fault::new(code, cause, Blame::Service, reach) })
            }
        }
    }
}

fn header_of(settings: &Settings) -> Result<Option<HeaderValue>> {
    let wrong = |e: String| Error::invalid(format!("[memory] api_key: {e}"));
    let Some(key) = (settings.key)().map_err(wrong)? else { return Ok(None) };
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
        .map_err(|_| Error::invalid("[memory] api_key cannot stand in a header"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// Which dialect a `/health` speaks.
fn dialect_of(body: &Value) -> Option<Dialect> {
    if body.get("ok") == Some(&Value::Bool(true)) {
        return Some(Dialect::Js);
    }
    (body.get("status").and_then(Value::as_str) == Some("ok")).then_some(Dialect::Py)
}

/// `{"id"}` or `{"success":true,"data":{"id"}}`.
fn id_of(body: &Value) -> Option<String> {
    let id = body.get("id").or_else(|| body.get("data").and_then(|data| data.get("id")))?;
    text_of(id).filter(|id| is_id(id))
}

/// A memory as it shows one.
fn held_of(body: &Value) -> Option<Held> {
    let text = |name: &str| body.get("metadata")?.get(name)?.as_str().map(str::to_owned);
    Some(Held {
        id: id_of(body)?,
        content: body.get("content").and_then(Value::as_str).unwrap_or_default().to_owned(),
        payload_sha: text("payload_sha"),
        space: text("target_space"),
    })
}

/// As a part of a path.
fn escaped(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~');
    id.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// It goes into our database and back.
fn is_id(id: &str) -> bool {
    (1..=500).contains(&id.len()) && !id.chars().any(char::is_control)
}

fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn match_of(found: &Value) -> Option<Match> {
    Some(Match {
        id: text_of(found.get("id")?).filter(|id| is_id(id))?,
        content: found.get("content").and_then(Value::as_str).unwrap_or_default().replace('\0', ""),
        score: found.get("score").and_then(Value::as_f64),
    })
}

/// Whose fault an answer is that is no success.
fn classify(status: u16, body: &Value, retry_after: &Option<Duration>) -> Fault {
    let said = ["error", "err", "detail", "message"].iter().find_map(|name| body.get(name));
    let said = said.map_or(String::new(), |said| text_of(said).unwrap_or_else(|| said.to_string()));
    let not_configured = said.contains("auth_not_configured");
    // What is not in its words was not said by OpenMemory, but by something before it.
    let its_own = body.is_object() && !said.is_empty();
    let blame = match status {
        413 => Blame::Memory,
        400 | 422 if its_own => Blame::Memory,
        400 | 422 => Blame::Ours,
        401 | 403 | 404 | 405 => Blame::Ours,
        429 => Blame::Limit,
        503 if not_configured => Blame::Ours,
        300..=399 => Blame::Ours,
        _ => Blame::Service,
    };
    // What exactly is wrong with it, where that is told too.
    let details = body.get("details").and_then(Value::as_array).map_or(String::new(), |details| {
        let details: Vec<String> = details.iter().filter_map(text_of).collect();
        if details.is_empty() { String::new() } else { format!(": {}", details.join(", ")) }
    });
    let mut message = format!("OpenMemory answered {status}");
    if !said.is_empty() {
        message.push_str(&format!("{SAID}{said}{details}"));
    }
    let message: String = message.trim_end().chars().take(300).collect();
    // A server that failed may have applied it all the same; what stands before it may not even have waited for it.
    let reach = if status >= 500 && !not_configured { Reach::Unknown } else { Reach::Answered };
    let doubt = match status {
        500.. if not_configured => Doubt::Nothing,
        500.. if its_own => Doubt::Answered,
        500.. | 408 => Doubt::UnderWay,
        _ => Doubt::Nothing,
    };
    let asked = body.get("retry_after").and_then(Value::as_u64).map(Duration::from_secs);
    let fault = Fault::new(format!("HTTP_{status}"), message, blame, reach);
    Fault { retry_after: retry_after.or(asked), doubt, ..fault }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_fault_it_is() {
        for (status, body, blame) in [
            (400, json!({"error": "invalid_input"}), Blame::Memory),
            (400, Value::Null, Blame::Ours),
            (413, Value::Null, Blame::Memory),
            (422, json!({"detail": [{"loc": ["content"]}]}), Blame::Memory),
            (401, json!({"error": "authentication_required"}), Blame::Ours),
            (403, json!({"error": "invalid_api_key"}), Blame::Ours),
            (404, Value::Null, Blame::Ours),
            (405, Value::Null, Blame::Ours),
            (302, Value::Null, Blame::Ours),
            (503, json!({"error": "auth_not_configured"}), Blame::Ours),
            (503, Value::Null, Blame::Service),
            (500, json!({"err": "boom"}), Blame::Service),
            (408, Value::Null, Blame::Service),
            (429, json!({"error": "rate_limit_exceeded", "retry_after": 60}), Blame::Limit),
            (418, Value::Null, Blame::Service),
        ] {
            assert_eq!(classify(status, &body, &None).blame, blame, "{status} {body}");
        }
        let limited = classify(429, &json!({"retry_after": 60}), &None);
        assert_eq!((limited.class().as_str(), limited.retry_after), ("http_429", Some(Duration::from_secs(60))));
        let long = json!({"error": "invalid_input", "details": ["content: length > 200000"]});
        let told = classify(400, &long, &None).message;
        assert_eq!(told, "OpenMemory answered 400, saying: invalid_input: content: length > 200000");
    }

    #[test]
    fn what_a_failed_write_leaves_behind() {
        for (status, body, doubt) in [
            (500, json!({"err": "boom"}), Doubt::Answered),
            (504, Value::Null, Doubt::UnderWay),
            (503, json!({"error": "auth_not_configured"}), Doubt::Nothing),
            (429, json!({"error": "rate_limit_exceeded"}), Doubt::Nothing),
            (400, json!({"error": "invalid_input"}), Doubt::Nothing),
        ] {
            assert_eq!(classify(status, &body, &None).doubt, doubt, "{status} {body}");
        }
    }

    #[test]
    fn ids_and_dialects() {
        assert_eq!(dialect_of(&json!({"ok": true, "version": "1"})), Some(Dialect::Js));
        assert_eq!(dialect_of(&json!({"status": "ok"})), Some(Dialect::Py));
        assert_eq!(dialect_of(&json!({"status": "down"})), None);
        assert_eq!(escaped("a-b/../c?d"), "a-b%2F%2E%2E%2Fc%3Fd");
        assert_eq!(id_of(&json!({"id": "a", "deduplicated": true})).as_deref(), Some("a"));
        assert_eq!(id_of(&json!({"success": true, "data": {"id": 7}})).as_deref(), Some("7"));
        for nothing in [json!({}), json!({"id": ""}), json!({"id": "a\u{0}"}), json!({"id": null}), json!({"data": {}})]
        {
            assert_eq!(id_of(&nothing), None, "{nothing}");
        }
    }
}
