//! Delivers by HTTP POST: one [exchange](super::exchange) per attempt, headers that say which message it is, and an outcome
//! from the status.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::Full;
use rustls::pki_types::ServerName;
use url::Url;

use super::blot::Blot;
use super::exchange::{Answer, Exchange, Resolve, System, retry_after};
use crate::courier::Courier;
use crate::decide::{HttpClass, HttpClasses, honours_retry_after};
use crate::error::{Error, Result};
use crate::message::Message;
use crate::observe::sending;
use crate::outcome::{Fault, Outcome, Reach, SAID};

/// More headers than any message within its limits has; a header map that is full panics.
const MAX_MESSAGE_HEADERS: usize = 4096;
/// How many characters of a refusal's body go into the error.
const EXCERPT_CHARS: usize = 200;
/// So many characters that also stand in the payload, or the whole of a shorter one, were repeated from it; fewer are words.
const ECHO_CHARS: usize = 12;
const SHORTEST_ECHO: usize = 6;
/// How much of a payload is looked through.
const MOST_PAYLOAD: usize = 64 << 10;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const MESSAGE_ID: HeaderName = HeaderName::from_static("postrider-message-id");
const ATTEMPT: HeaderName = HeaderName::from_static("postrider-attempt");
const LEASE_TOKEN: HeaderName = HeaderName::from_static("postrider-lease-token");
const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");
const OCTET_STREAM: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// Where an [`Http`] courier delivers, and as whom.
#[derive(Clone)]
pub struct HttpSettings {
    /// `http` or `https`, without credentials.
    pub url: String,
    /// From the name look-up to the last byte read.
    pub timeout: Duration,
    /// [`Outbox::store_id`](crate::Outbox::store_id): makes message ids unique among all stores.
    pub store_id: String,
    /// Sent with every message, an `Authorization` for instance. A message's own header of the same name gives way.
    pub headers: Vec<(String, String)>,
    /// What statuses mean, where it differs from custom.
    pub statuses: HttpClasses,
    /// Who says which addresses are connected to.
    pub resolver: Arc<dyn Resolve>,
}

impl HttpSettings {
    /// 2.5 s, no headers.
    pub fn new(url: impl Into<String>, store_id: impl Into<String>) -> Self {
        let timeout = Duration::from_millis(2500);
        HttpSettings {
            url: url.into(),
            timeout,
            store_id: store_id.into(),
            headers: Vec::new(),
            statuses: HttpClasses::default(),
            resolver: Arc::new(System),
        }
    }
}

/// Delivers by HTTP POST over a pool of kept-alive connections.
pub struct Http {
    exchange: Exchange,
    uri: Uri,
    /// Scheme, host and port: all that errors ever say of the URL, since paths and queries carry secrets too.
    origin: String,
    timeout: Duration,
    store_id: String,
    /// What every request carries.
    headers: HeaderMap,
    /// What a body that echoes the request must not bring into an error.
    secrets: Blot,
    statuses: HttpClasses,
}

impl Http {
    /// Fails on what could never be delivered, saying what to write instead. Connects to nothing yet.
    pub fn new(settings: HttpSettings) -> Result<Self> {
        let HttpSettings { url, timeout, store_id, headers, statuses, resolver } = settings;
        if timeout.is_zero() {
            return Err(Error::invalid("the http courier's timeout is zero; 2.5 s is usual"));
        }
        if store_id.is_empty() || HeaderValue::from_str(&store_id).is_err() {
            return Err(Error::invalid("the http courier's store_id cannot stand in a header; use Outbox::store_id"));
        }
        let url = check_url(&url)?;
        let uri = Uri::try_from(url.as_str()).map_err(|e| {
            Error::invalid(format!("the http courier's url cannot be requested ({e}); percent-encode it"))
        })?;
        let headers = lane_headers(&headers)?;
        Ok(Http {
            exchange: Exchange::new(resolver, timeout)?,
            uri,
            origin: url.origin().ascii_serialization(),
            timeout,
            store_id,
            secrets: secrets(&url, &headers),
            headers,
            statuses,
        })
    }

    fn request(&self, message: &Message) -> Result<Request<Full<Bytes>>, http::Error> {
        let key = format!("{}-{}-{}", self.store_id, message.lane, message.id);
        let mut headers = with_message_headers(&self.headers, message);
        headers.insert(IDEMPOTENCY_KEY, HeaderValue::try_from(key)?);
        headers.insert(MESSAGE_ID, message.id.into());
        headers.insert(ATTEMPT, message.attempts.saturating_add(1).into());
        headers.insert(LEASE_TOKEN, message.lease_token.into());
        // hyper leaves it out of an empty POST, and some servers then answer 411.
        headers.insert(CONTENT_LENGTH, message.payload.len().into());

        let mut request = Request::new(Full::new(message.payload.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// No status came back. `reach` says whether anything may have gone out.
    fn unanswered(&self, code: &'static str, cause: &str, reach: Reach) -> Outcome {
        let origin = &self.origin;
        let what = match (code, reach) {
            ("DNS_FAILED", _) => format!("the host of {origin} could not be resolved"),
            ("TLS_FAILED", _) => format!("no TLS session with {origin}"),
            ("RESPONSE_INVALID", _) => format!("the answer of {origin} is no acceptable HTTP/1.1"),
            ("TIMEOUT", Reach::NeverSent) => format!("no connection to {origin} in time"),
            ("TIMEOUT", _) => format!("no answer from {origin} in time"),
            (_, Reach::NeverSent) => format!("no connection to {origin}"),
            _ => format!("{origin} closed the connection without an answer"),
        };
        let effect = if reach == Reach::Unknown { "; it may have been received" } else { "" };
        Outcome::retry(code, format!("{what}: {cause}{effect}"), reach)
    }

    fn refused(&self, status: StatusCode, body: &[u8], message: &Message, retry_after: Option<Duration>) -> Outcome {
        let mut error = format!("{} answered {status}", self.origin);
        let class = self.statuses.of(status.as_u16());
        let code = if status.is_redirection() {
            error.push_str("; redirects are not followed: configure the final url");
            "REDIRECT_REFUSED".into()
        } else {
            format!("HTTP_{}", status.as_u16())
        };
        let secrets = self.secrets.and(&message.headers);
        if let Some(excerpt) = excerpt(body, &secrets, &message.payload) {
            error.push_str(SAID);
            error.push_str(&excerpt);
        }
        let fault = Fault::new(code, error, Reach::Answered);
        match class {
            HttpClass::Retry => Outcome::Retry { fault, retry_after },
            HttpClass::Dead | HttpClass::Sent => Outcome::Dead(fault),
        }
    }
}

#[async_trait]
impl Courier for Http {
    fn name(&self) -> &str {
        "http"
    }

    async fn deliver(&self, message: &Message) -> Outcome {
        let request = match self.request(message) {
            Ok(request) => request,
            Err(e) => return Outcome::Dead(Fault::new("INVALID_HEADER", e.to_string(), Reach::NeverSent)),
        };
        let (status, headers, body) = match sending(self.exchange.send(request, self.timeout)).await {
            Answer::Answered { status, headers, body, .. } => (status, headers, body),
            Answer::Unanswered { code, cause, reach, .. } => return self.unanswered(code, &cause, reach),
        };
        if self.statuses.of(status.as_u16()) == HttpClass::Sent {
            return Outcome::sent();
        }
        let retry_after = if honours_retry_after(status.as_u16()) { retry_after(&headers) } else { None };
        self.refused(status, &body, message, retry_after)
    }
}

/// Errors never repeat the URL: it may be wrong in the very part that is secret.
fn check_url(url: &str) -> Result<Url> {
    let mut url = Url::parse(url)
        .map_err(|e| Error::invalid(format!("the http courier's url is none ({e}); write it as https://host/path")))?;
    if !matches!(url.scheme(), "http" | "https") {
        let scheme = url.scheme();
        return Err(Error::invalid(format!(
            "the http courier cannot deliver to `{scheme}:`; use an http or https url"
        )));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Error::invalid(
            "the http courier's url has credentials in it; send an Authorization header instead",
        ));
    }
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    if url.scheme() == "https" && ServerName::try_from(host).is_err() {
        return Err(Error::invalid("the host of the http courier's url is no name a certificate can have"));
    }
    url.set_fragment(None);
    Ok(url)
}

/// The lane's own headers. They are configuration: a wrong one is refused at the start, not left out.
fn lane_headers(wanted: &[(String, String)]) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION"))));
    for (name, value) in wanted {
        let (name, mut value) =
            check_header(name, value).map_err(|why| match HeaderName::from_bytes(name.as_bytes()) {
                Ok(name) => {
                    Error::invalid(format!("the http courier cannot send the header \"{name}\": {why}; remove it"))
                }
                // It may be a whole header, with its secret.
                Err(_) => {
                    Error::invalid(format!("the http courier cannot send a header: {why}; write Name = \"value\""))
                }
            })?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

/// The lane's headers and what the message brings along.
///
/// A header that cannot or must not be sent is left out, and the message still goes: the headers of an enqueued message
/// cannot be mended, so killing it would help nobody, and a destination that needed the header says so by its status.
fn with_message_headers(lane: &HeaderMap, message: &Message) -> HeaderMap {
    let mut headers = lane.clone();
    for (name, value) in message.headers.iter().take(MAX_MESSAGE_HEADERS) {
        let added = check_header(name, value).and_then(|(name, value)| match lane.contains_key(&name) {
            true => Err("the lane sets it"),
            false => Ok(headers.append(name, value)),
        });
        if let Err(why) = added {
            tracing::debug!(id = message.id, lane = message.lane, header = ?name, why, "header left out");
        }
    }
    let field = |text: &Option<String>| text.as_ref().and_then(|text| HeaderValue::from_bytes(text.as_bytes()).ok());
    if let Some(id) = field(&message.correlation_id) {
        headers.insert(CORRELATION_ID, id);
    }
    if let Some(content_type) = field(&message.content_type) {
        headers.insert(CONTENT_TYPE, content_type);
    }
    headers.entry(CONTENT_TYPE).or_insert(OCTET_STREAM);
    headers
}

/// A header somebody else wants sent; not those that frame the message, steer the connection or are ours to say.
fn check_header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), &'static str> {
    let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| "no header name")?;
    let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| "no header value")?;
    let reserved = match name.as_str() {
        "host" | "content-length" | "transfer-encoding" | "connection" | "keep-alive" | "te" | "trailer"
        | "upgrade" => true,
        "idempotency-key" => true,
        other => ["proxy-", "webhook-", "postrider-"].iter().any(|prefix| other.starts_with(prefix)),
    };
    if reserved { Err("reserved") } else { Ok((name, value)) }
}

/// The beginning of a body, on one line, if it is text; without what it repeats of the payload, which errors do not show.
fn excerpt(body: &[u8], secrets: &Blot, payload: &[u8]) -> Option<String> {
    let text = secrets.text(String::from_utf8_lossy(body).into_owned());
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let payload = &payload[..payload.len().min(MOST_PAYLOAD)];
    let payload = String::from_utf8_lossy(payload).split_whitespace().collect::<Vec<_>>().join(" ");
    let mut excerpt: String = without_echo(&line.chars().take(2 * EXCERPT_CHARS).collect::<String>(), &payload);
    excerpt = excerpt.chars().take(EXCERPT_CHARS).collect();
    if excerpt.is_empty() || excerpt.contains(|c: char| c.is_control() || c == char::REPLACEMENT_CHARACTER) {
        return None;
    }
    if line.chars().count() > EXCERPT_CHARS {
        excerpt.push('…');
    }
    Some(excerpt)
}

/// Blots out every run of characters that stands in the payload, too.
fn without_echo(line: &str, payload: &str) -> String {
    let chars: Vec<char> = line.chars().collect();
    let run = ECHO_CHARS.min(payload.chars().count());
    if run < SHORTEST_ECHO {
        return line.to_owned();
    }
    let mut echoed = vec![false; chars.len()];
    for (at, window) in chars.windows(run).enumerate() {
        if payload.contains(&window.iter().collect::<String>()) {
            echoed[at..at + run].fill(true);
        }
    }
    let mut kept = String::with_capacity(line.len());
    for (at, c) in chars.iter().enumerate() {
        match echoed[at] {
            false => kept.push(*c),
            true if at == 0 || !echoed[at - 1] => kept.push_str("***"),
            true => {}
        }
    }
    kept
}

/// What a destination may echo and nobody should read in an error.
fn secrets(url: &Url, lane: &HeaderMap) -> Blot {
    let values = lane.iter().filter(|(_, value)| value.is_sensitive()).filter_map(|(_, value)| value.to_str().ok());
    Blot::new(Some(url), values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;

    fn message(headers: &[(&str, &str)]) -> Message {
        let at = Timestamp::from_micros(0);
        Message {
            id: 7,
            lane: "invoices".into(),
            shard_id: 0,
            due_at: at,
            lease_until: at,
            lease_token: 3,
            attempts: 1,
            crashes: 0,
            maybe_sent: false,
            target: None,
            active_key: None,
            payload: Bytes::from_static(b"x"),
            content_type: None,
            headers: headers.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect(),
            payload_sha: None,
            correlation_id: None,
            created_at: at,
            deliver_before: None,
            taken_over_from: None,
        }
    }

    fn settings(url: &str) -> HttpSettings {
        HttpSettings::new(url, "store")
    }

    fn refusal(settings: HttpSettings) -> String {
        Http::new(settings).err().expect("must be refused").message
    }

    #[test]
    fn settings_are_refused_with_a_remedy_and_without_their_secrets() {
        assert!(refusal(settings("ftp://files.example/in")).contains("use an http or https url"));
        assert!(refusal(settings("erp.example/invoices")).contains("https://host/path"));
        assert!(refusal(settings("file:///etc/passwd")).contains("`file:`"));
        let credentials = refusal(settings("https://me:hunter22@erp.example/"));
        assert!(credentials.contains("Authorization") && !credentials.contains("hunter22"), "{credentials}");
        assert!(!refusal(settings("https://me:hunter22@:443:x/")).contains("hunter22"));
        assert!(refusal(HttpSettings { timeout: Duration::ZERO, ..settings("http://a/") }).contains("timeout"));
        assert!(refusal(HttpSettings { store_id: "a\nb".into(), ..settings("http://a/") }).contains("store_id"));
        let header = |name: &str, value: &str| HttpSettings {
            headers: vec![(name.into(), value.into())],
            ..settings("https://erp.example/")
        };
        assert!(refusal(header("Host", "other")).contains("reserved"));
        let whole = refusal(header("Authorization: hunter22", "c"));
        assert!(whole.contains("no header name") && !whole.contains("hunter22"), "{whole}");
        let split = refusal(header("Authorization", "Bearer hunter22\r\nEvil: 1"));
        assert!(split.contains("no header value") && !split.contains("hunter22"), "{split}");
        assert!(Http::new(header("Authorization", "Bearer hunter22")).is_ok());
        assert!(Http::new(settings("https://[::1]:8443/a?b=c#d")).is_ok());
    }

    #[test]
    fn reserved_and_broken_headers_are_left_out_and_the_rest_goes() {
        let refused = [
            "Host",
            "Content-Length",
            "Transfer-Encoding",
            "Connection",
            "TE",
            "Trailer",
            "Upgrade",
            "Proxy-Authorization",
        ];
        let ours = ["Webhook-Id", "Idempotency-Key", "Postrider-Attempt", "Postrider-Anything"];
        for name in refused.into_iter().chain(ours) {
            assert_eq!(check_header(name, "x").unwrap_err(), "reserved", "{name}");
        }
        let lane = lane_headers(&[("X-Tenant".into(), "acme".into())]).unwrap();
        let wanted = [
            ("X-One", "1"),
            ("x-one", "2"),
            ("X-Greeting", "grüße"),
            ("Idempotency-Key", "forged"),
            ("x bad", "v"),
            ("X-Split", "a\r\nEvil: 1"),
            ("X-Tenant", "mallory"),
        ];
        let headers = with_message_headers(&lane, &message(&wanted));
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-type", "user-agent", "x-greeting", "x-one", "x-tenant"]);
        assert_eq!(headers.get_all("x-one").iter().collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(headers["x-tenant"], "acme");
        assert_eq!(headers["x-greeting"].as_bytes(), "grüße".as_bytes());
        assert_eq!(headers["content-type"], "application/octet-stream");
    }

    #[test]
    fn the_content_type_is_the_messages_own() {
        let content_type = |field: Option<&str>, header: &[(&str, &str)]| {
            let content_type = field.map(str::to_owned);
            let headers = with_message_headers(&HeaderMap::new(), &Message { content_type, ..message(header) });
            assert_eq!(headers.get_all(CONTENT_TYPE).iter().count(), 1);
            headers[CONTENT_TYPE].to_str().unwrap().to_owned()
        };
        assert_eq!(content_type(Some("application/json"), &[("content-type", "text/plain")]), "application/json");
        assert_eq!(content_type(None, &[("content-type", "text/plain")]), "text/plain");
        assert_eq!(content_type(Some("a\nb"), &[]), "application/octet-stream");
    }

    #[test]
    fn thousands_of_headers_do_not_break_a_delivery() {
        let many: Vec<_> = (0..40_000).map(|n| (format!("x-{n}"), "v".to_owned())).collect();
        let headers = with_message_headers(&HeaderMap::new(), &Message { headers: many, ..message(&[]) });
        assert_eq!(headers.len(), MAX_MESSAGE_HEADERS + 1);
    }

    #[test]
    fn an_excerpt_is_short_text_on_one_line_without_secrets() {
        let none = Blot::default();
        let excerpt =
            |body: &[u8], secrets: &Blot| super::excerpt(body, secrets, b"{\"card\": \"4111 1111 1111 1111\"}");
        assert_eq!(excerpt(b"  no such\r\n invoice ", &none).as_deref(), Some("no such invoice"));
        assert_eq!(excerpt(b" \n", &none), None);
        assert_eq!(excerpt(b"\x1f\x8b\x08\x00gzip", &none), None);
        assert_eq!(excerpt(b"\x1b[2Jterminal", &none), None);
        for (said, kept) in [
            ("cannot parse: {\"card\":  \"4111 1111 1111 1111\"} at all", "cannot parse: *** at all"),
            ("no card has the number 4111 1111 1111 1111.", "no card has the number ***."),
            ("which card?", "which card?"),
        ] {
            assert_eq!(excerpt(said.as_bytes(), &none).as_deref(), Some(kept));
        }
        assert_eq!(super::excerpt(b"no: hunter2 x", &none, b"hunter2").as_deref(), Some("no: *** x"));
        let long = excerpt("ä".repeat(9000).as_bytes(), &none).unwrap();
        assert_eq!(long.chars().count(), EXCERPT_CHARS + 1);

        let lane = lane_headers(&[("Authorization".into(), "Bearer hunter22".into())]).unwrap();
        let secrets = secrets(&Url::parse("https://erp.example/in?token=swordfish").unwrap(), &lane);
        let echo = b"POST /in?token=swordfish authorization: Bearer hunter22 bad token hunter22";
        assert_eq!(excerpt(echo, &secrets).unwrap(), "POST /in?*** authorization: *** bad token ***");
        let mut padded = vec![b'x'; EXCERPT_CHARS - 3];
        padded.extend_from_slice(b"hunter22");
        assert!(!excerpt(&padded, &secrets).unwrap().contains("hun"), "not even cut off");
    }
}
