//! One HTTP exchange with a destination that is not trusted: one deadline from the name look-up to the last byte read, at
//! most [`MAX_HEAD_BYTES`] of headers and [`MAX_BODY_BYTES`] of body are kept, nothing is decompressed, no redirect is
//! followed, and nothing is sent twice.

use std::error::Error as StdError;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::connect::{HttpConnector, HttpInfo, capture_connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::clock;
use crate::error::{Error, Result};
use crate::outcome::Reach;
use crate::time::{Timestamp, micros_of};
use crate::tx::BoxFuture;

/// Most bytes of a response's status line and headers. How many headers: a hundred, hyper's own limit.
pub const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Most bytes of a response's body; a longer one costs the connection.
pub const MAX_BODY_BYTES: usize = 20_000;
/// How long a delivered message waits for its body to end, so that the connection can be used again.
const DRAIN_GRACE: Duration = Duration::from_secs(1);
/// Common servers close idle connections after five seconds; being first avoids a request written into a closing one.
const IDLE: Duration = Duration::from_secs(4);

/// From a name to the addresses that may be connected to; these and no others are. (A host that is an address already is
/// not asked about.)
pub trait Resolve: Send + Sync + 'static {
    fn resolve(&self, name: String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;

    /// May this address be connected to? Asked of a host that is an address, and of every peer once it is connected.
    fn permit(&self, _: IpAddr) -> std::result::Result<(), Forbidden> {
        Ok(())
    }
}

/// As the operating system resolves names.
pub struct System;

impl Resolve for System {
    fn resolve(&self, name: String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.collect()) })
    }
}

/// An address that must not be connected to; a resolver's error that [`Exchange`] knows.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Forbidden(pub String);

/// What came of a request.
#[derive(Debug)]
pub enum Answer {
    /// A status came within the deadline, whatever the body did then.
    /// `whole`: the body is there to its end.
    Answered { status: StatusCode, headers: HeaderMap, body: Vec<u8>, whole: bool, remote: Option<SocketAddr> },
    /// None did. `reach` says whether anything may have gone out.
    Unanswered { code: &'static str, cause: String, reach: Reach, remote: Option<SocketAddr> },
}

/// Who carries a request to where it goes: [`Exchange`], or a simulated network.
#[async_trait]
pub trait Ask: Send + Sync {
    /// As [`Exchange::ask`].
    async fn ask(&self, request: Request<Full<Bytes>>, timeout: Duration, most: usize) -> Answer;
}

/// A pool of kept-alive connections.
pub struct Exchange {
    client: Client<HttpsConnector<Checked>, Full<Bytes>>,
}

impl Exchange {
    /// `longest` bounds what goes on in the background after a request was given up.
    pub fn new(resolver: Arc<dyn Resolve>, longest: Duration) -> Result<Self> {
        let mut tcp = HttpConnector::new_with_resolver(Resolver(resolver.clone()));
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        // A connect another request no longer waits for goes on in the background; this ends it.
        tcp.set_connect_timeout(Some(longest));
        // A receiver that stops reading would otherwise hold a connection we have given up, until we are restarted.
        #[cfg(target_os = "linux")]
        tcp.set_tcp_user_timeout(Some(longest));
        let https = HttpsConnectorBuilder::new()
            .with_provider_and_webpki_roots(rustls::crypto::ring::default_provider())
            .map_err(|e| Error::invalid(format!("TLS cannot be set up: {e}")))?
            .https_or_http()
            .enable_http1()
            .wrap_connector(Checked { tcp, resolver });
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .retry_canceled_requests(false)
            .http1_max_buf_size(MAX_HEAD_BYTES)
            .build(https);
        Ok(Exchange { client })
    }

    /// For those who want the status: of a body only what is sent soon and fits.
    pub async fn send(&self, request: Request<Full<Bytes>>, timeout: Duration) -> Answer {
        self.exchange(request, timeout, DRAIN_GRACE, MAX_BODY_BYTES).await
    }

    /// For those who need the body: up to `most` bytes of it, as long as the timeout allows.
    pub async fn ask(&self, request: Request<Full<Bytes>>, timeout: Duration, most: usize) -> Answer {
        self.exchange(request, timeout, timeout, most).await
    }

    async fn exchange(
        &self,
        mut request: Request<Full<Bytes>>,
        timeout: Duration,
        grace: Duration,
        most: usize,
    ) -> Answer {
        let connection = capture_connection(&mut request);
        let remote = || {
            let metadata = connection.connection_metadata();
            let mut extensions = http::Extensions::new();
            metadata.as_ref()?.get_extras(&mut extensions);
            extensions.get::<HttpInfo>().map(HttpInfo::remote_addr)
        };
        // A request is written only once it has a connection.
        let reach = |cancelled: bool| match connection.connection_metadata().is_none() || cancelled {
            true => Reach::NeverSent,
            false => Reach::Unknown,
        };
        let unanswered = |code, cause, cancelled| {
            let reach = reach(cancelled);
            Answer::Unanswered { code, cause, reach, remote: remote() }
        };
        let mut deadline = pin!(sleep(timeout));

        // The answer is looked at first: a status that came in time counts, however late we look.
        let answer = tokio::select! {
            biased;
            answer = self.client.request(request) => answer,
            () = &mut deadline => return unanswered("TIMEOUT", format!("the timeout is {timeout:?}"), false),
        };
        let (head, body) = match answer {
            Ok(response) => response.into_parts(),
            Err(e) => {
                let (code, cancelled) = classify(&e, e.is_connect());
                return unanswered(code, root_cause(&e), cancelled);
            }
        };
        let mut kept = Vec::new();
        // Dropping an unfinished body closes its connection; the status stands whatever the body does.
        let whole = tokio::select! {
            biased;
            whole = read_body(body, &mut kept, most) => whole,
            () = &mut deadline => false,
            () = sleep(grace), if head.status.is_success() => false,
        };
        Answer::Answered { status: head.status, headers: head.headers, body: kept, whole, remote: remote() }
    }
}

#[async_trait]
impl Ask for Exchange {
    async fn ask(&self, request: Request<Full<Bytes>>, timeout: Duration, most: usize) -> Answer {
        Exchange::ask(self, request, timeout, most).await
    }
}

/// Connects, and looks whom it got: nothing is said to a peer that is not permitted, however it came about.
#[derive(Clone)]
struct Checked {
    tcp: HttpConnector<Resolver>,
    resolver: Arc<dyn Resolve>,
}

type BoxError = Box<dyn StdError + Send + Sync>;

impl tower_service::Service<Uri> for Checked {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = std::result::Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<std::result::Result<(), BoxError>> {
        self.tcp.poll_ready(context).map_err(BoxError::from)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).parse::<IpAddr>();
        let resolver = self.resolver.clone();
        let permitted = host.map_or(Ok(()), |address| resolver.permit(address));
        let connecting = permitted.map(|()| self.tcp.call(uri));
        Box::pin(async move {
            let stream = connecting?.await?;
            resolver.permit(stream.inner().peer_addr()?.ip())?;
            Ok(stream)
        })
    }
}

#[derive(Clone)]
struct Resolver(Arc<dyn Resolve>);

impl tower_service::Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let addresses = self.0.resolve(name.as_str().to_owned());
        Box::pin(async move { Ok(addresses.await?.into_iter()) })
    }
}

/// What `Retry-After` asks for.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    parse_retry_after(headers.get(RETRY_AFTER)?.to_str().ok()?, clock::wall())
}

/// The code of a request that got no status, and whether it provably never left.
fn classify(error: &(dyn StdError + 'static), connecting: bool) -> (&'static str, bool) {
    // The connector boxes what TLS says as an I/O error; name look-up and TCP have a type of their own, which is private.
    let first = error.source();
    if connecting && first.is_some_and(|e| e.is::<io::Error>()) {
        return ("TLS_FAILED", false);
    }
    if causes(error).any(|e| e.is::<Forbidden>()) {
        return ("ADDRESS_FORBIDDEN", false);
    }
    if connecting && first.is_some_and(|e| e.to_string() == "dns error") {
        return ("DNS_FAILED", false);
    }
    let mut cancelled = false;
    for cause in causes(error) {
        if cause.is::<rustls::Error>() {
            return ("TLS_FAILED", cancelled);
        }
        if let Some(e) = cause.downcast_ref::<hyper::Error>() {
            if e.is_parse() {
                return ("RESPONSE_INVALID", cancelled);
            }
            // The pooled connection closed before this request was begun.
            cancelled |= e.is_canceled();
        }
        if cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::TimedOut) {
            return ("TIMEOUT", cancelled);
        }
    }
    (if connecting { "CONNECT_REFUSED" } else { "CONNECTION_RESET" }, cancelled)
}

/// An error and what is beneath it. `source` of an I/O error skips the error it wraps.
fn causes<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&e| match e.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => Some(inner as &(dyn StdError + 'static)),
        None => e.source(),
    })
}

fn root_cause(error: &(dyn StdError + 'static)) -> String {
    causes(error).last().unwrap_or(error).to_string()
}

/// Seconds, or a date, which counts from `now`; a date gone by is no wait at all. How long is too long, the lane decides.
pub(crate) fn parse_retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(value).ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Timestamp::from_micros(micros_of(date)).since(now))
}

/// Keeps the body up to its end or so many bytes, whichever is first; answers whether it came to the end.
async fn read_body(mut body: Incoming, kept: &mut Vec<u8>, most: usize) -> bool {
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return false };
        let Ok(data) = frame.into_data() else { continue };
        let room = most - kept.len();
        kept.extend_from_slice(&data[..data.len().min(room)]);
        if data.len() > room {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resolves every name to this machine, and permits nothing of it.
    struct Closed(SocketAddr);

    impl Resolve for Closed {
        fn resolve(&self, _: String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
            let address = self.0;
            Box::pin(async move { Ok(vec![address]) })
        }

        fn permit(&self, address: IpAddr) -> std::result::Result<(), Forbidden> {
            if address.is_loopback() { Err(Forbidden("closed".to_owned())) } else { Ok(()) }
        }
    }

    /// Whatever a name resolved to: a peer that is not permitted hears nothing, and an address is not even connected to.
    #[tokio::test]
    async fn the_peer_is_looked_at_before_anything_is_said() {
        use tokio::io::AsyncReadExt;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let exchange = Exchange::new(Arc::new(Closed(address)), Duration::from_secs(5)).unwrap();
        let ask = async |host: String| {
            let mut request = Request::new(Full::new(Bytes::from_static(b"secret")));
            *request.uri_mut() = format!("http://{host}/").parse().unwrap();
            match exchange.send(request, Duration::from_secs(5)).await {
                Answer::Unanswered { code, reach, .. } => (code, reach),
                answered => panic!("{answered:?}"),
            }
        };
        let refused = ("ADDRESS_FORBIDDEN", Reach::NeverSent);
        // Only the second one connects.
        assert_eq!(ask(address.to_string()).await, refused);
        assert_eq!(ask(format!("rebound.example:{}", address.port())).await, refused);
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).await.unwrap();
        assert_eq!(heard, b"");
        let another = tokio::time::timeout(Duration::from_millis(200), listener.accept()).await;
        assert!(another.is_err(), "an address that is forbidden is not connected to");
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now: Timestamp = "2026-03-01T12:00:00Z".parse().unwrap();
        let seconds = |value| parse_retry_after(value, now).map(|d| d.as_secs());
        assert_eq!(seconds("120"), Some(120));
        assert_eq!(seconds(" 0 "), Some(0));
        assert_eq!(seconds("Sun, 01 Mar 2026 12:01:30 GMT"), Some(90));
        assert_eq!(seconds("Sun, 01 Mar 2026 11:59:00 GMT"), Some(0), "gone by");
        assert!(seconds("Fri, 31 Dec 9999 23:59:59 GMT").unwrap() > 200_000_000_000);
        assert_eq!(seconds("99999999999999999999999"), Some(u64::MAX));
        for nonsense in ["", "-5", "1.5", "soon", "Sun, 99 Mar 2026 12:01:30 GMT"] {
            assert_eq!(seconds(nonsense), None, "{nonsense}");
        }
    }

    /// An error with something beneath, as the client's are.
    #[derive(Debug)]
    struct Above(&'static str, Box<dyn StdError + Send + Sync>);

    impl std::fmt::Display for Above {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl StdError for Above {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&*self.1)
        }
    }

    #[test]
    fn failures_have_codes() {
        let io = |kind: io::ErrorKind| Box::new(io::Error::from(kind));
        let tcp = |kind| Above("client error", Box::new(Above("tcp connect error", io(kind))));
        let dns = Above("client error", Box::new(Above("dns error", io(io::ErrorKind::NotFound))));
        let certificate = rustls::Error::General("bad certificate".into());
        let tls = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, certificate.clone()));
        let tls = Above("client error", Box::new(tls));
        let later = Above("client error", Box::new(Above("hyper", Box::new(io::Error::other(certificate)))));
        let handshake = Above("client error", io(io::ErrorKind::UnexpectedEof));
        for (code, error, connecting) in [
            ("DNS_FAILED", &dns, true),
            ("CONNECT_REFUSED", &tcp(io::ErrorKind::ConnectionRefused), true),
            ("CONNECT_REFUSED", &tcp(io::ErrorKind::HostUnreachable), true),
            ("TIMEOUT", &tcp(io::ErrorKind::TimedOut), true),
            ("TLS_FAILED", &tls, true),
            ("TLS_FAILED", &handshake, true),
            ("TLS_FAILED", &later, false),
            ("TIMEOUT", &tcp(io::ErrorKind::TimedOut), false),
            ("CONNECTION_RESET", &tcp(io::ErrorKind::ConnectionReset), false),
            ("CONNECTION_RESET", &tcp(io::ErrorKind::BrokenPipe), false),
        ] {
            assert_eq!(classify(error, connecting), (code, false), "{error:?}");
        }
        assert!(root_cause(&tls).contains("bad certificate"), "{}", root_cause(&tls));
    }
}
