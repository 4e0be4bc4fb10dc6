//! The accept loop: connections within limits, in HTTP/1.1 or HTTP/2, each for as long as it is used. On shutdown it takes
//! no more, lets requests under way finish, and closes the rest.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use postrider::clock::Tick;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use super::slots::{RESERVE, Rules, Slots};
use super::traffic::{Judgement, Outgoing, Patience, Traffic, UnderWay, Wire};

/// What one server bears.
#[derive(Clone, Debug)]
pub struct Limits {
    pub slots: Rules,
    /// A TLS handshake, the first bytes and a request's head must come within its `idle`, too.
    pub patience: Patience,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            slots: Rules { most: 10_000, per_peer: 2500, trusted: vec![], reserve: RESERVE },
            patience: Patience { idle: Duration::from_secs(15), write: Duration::from_secs(30) },
        }
    }
}

const HEAD_BYTES: usize = 32 * 1024;
const HEADERS: usize = 100;
/// The kernel's part of an answer that is not read. With more, a slow reader would look like one who does not read.
const SEND_BUFFER: usize = 256 * 1024;
/// For a client to hear that its connection ends.
const FAREWELL: Duration = Duration::from_secs(2);
/// Whoever has a slot of the reserve asks at once.
const BRIEF: Patience = Patience { idle: Duration::from_secs(2), write: Duration::from_secs(2) };
/// How often it is told that somebody had to be turned away.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// With a request that came in over the reserve: only probes are answered.
#[derive(Clone, Copy, Debug)]
pub struct ProbesOnly;

/// Serves until `shutdown` resolves, then for `drain` at most.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: Limits,
    drain: Duration,
    shutdown: impl Future<Output = ()>,
) {
    let slots = Slots::new(limits.slots);
    let (close, closing) = watch::channel(false);
    // Nothing is ever sent: it ends when the last connection has.
    let (alive, mut ended) = mpsc::channel::<()>(1);
    let mut shutdown = pin!(shutdown);
    let mut told: Option<Tick> = None;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let (stream, peer) = match accepted {
            Ok(connection) => connection,
            Err(error) => {
                // Out of file descriptors, as a rule: others will be closed.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let slot = slots.enter(peer.ip());
        if slot.is_reserved() && told.is_none_or(|told| Tick::now().since(told) >= TOLD_EVERY) {
            told = Some(Tick::now());
            tracing::warn!(peer = %peer.ip(), "too many connections, of this peer or in all; only probes are answered ([http] max_connections, max_connections_per_peer)");
        }
        let patience = if slot.is_reserved() { brief(limits.patience) } else { limits.patience };
        let connection = Connection {
            router: router.clone(),
            tls: tls.clone(),
            patience,
            peer,
            closing: closing.clone(),
            only_probes: slot.is_reserved(),
        };
        let alive = alive.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = connection.run(stream) => {}
                () = slot.is_wanted() => {}
            }
            drop((slot, alive));
        });
    }
    drop((listener, alive));
    let _ = close.send(true);
    if tokio::time::timeout(drain, ended.recv()).await.is_err() {
        tracing::warn!("requests were cut off at the end of the drain timeout");
    }
}

fn brief(usual: Patience) -> Patience {
    Patience { idle: usual.idle.min(BRIEF.idle), write: usual.write.min(BRIEF.write) }
}

#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
}

/// By its first bytes: HTTP/2 without TLS begins with `PRI * HTTP/2.0`.
async fn version_of(stream: &TcpStream) -> Option<Version> {
    let mut start = [0_u8; 4];
    let mut pause = Duration::from_millis(5);
    loop {
        let seen = stream.peek(&mut start).await.ok().filter(|n| *n > 0)?;
        if !b"PRI ".starts_with(&start[..seen]) {
            return Some(Version::One);
        }
        if seen == start.len() {
            return Some(Version::Two);
        }
        // No peek waits for more than is there. Whoever dawdles over four bytes is not to cost more than it does.
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(Duration::from_millis(500));
    }
}

/// What the platform can do about a client that takes nothing, or is gone.
fn prepare(stream: &TcpStream, patience: Patience) {
    let _ = stream.set_nodelay(true);
    #[cfg(unix)]
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, SEND_BUFFER);
    #[cfg(target_os = "linux")]
    let _ = rustix::net::sockopt::set_tcp_user_timeout(stream, patience.write.as_millis().try_into().unwrap_or(0));
}

struct Connection {
    router: Router,
    tls: Option<TlsAcceptor>,
    patience: Patience,
    peer: SocketAddr,
    closing: watch::Receiver<bool>,
    only_probes: bool,
}

impl Connection {
    async fn run(self, stream: TcpStream) {
        prepare(&stream, self.patience);
        let (mut closing, patience) = (self.closing.clone(), self.patience.idle);
        // Before anything is asked for there is nothing to finish.
        let not_begun = async {
            tokio::select! {
                () = tokio::time::sleep(patience) => {}
                _ = closing.wait_for(|closing| *closing) => {}
            }
        };
        let traffic = Traffic::new(Tick::now());
        match self.tls.clone() {
            None => {
                let version = tokio::select! { version = version_of(&stream) => version, () = not_begun => None };
                let Some(version) = version else { return };
                let wire = Wire::new(stream, traffic.clone());
                self.speak(version, wire, traffic).await;
            }
            Some(tls) => {
                let wire = Wire::new(stream, traffic.clone());
                let greeted = tokio::select! { greeted = tls.accept(wire) => greeted.ok(), () = not_begun => None };
                let Some(stream) = greeted else { return };
                let version = match stream.get_ref().1.alpn_protocol() {
                    Some(b"h2") => Version::Two,
                    _ => Version::One,
                };
                self.speak(version, stream, traffic).await;
            }
        }
    }

    async fn speak<S>(self, version: Version, stream: S, traffic: Arc<Traffic>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Connection { router, patience, peer, closing, only_probes, .. } = self;
        let requests = traffic.clone();
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            if only_probes {
                request.extensions_mut().insert(ProbesOnly);
            }
            answer(router.clone(), request, requests.begin())
        });
        let stream = TokioIo::new(stream);
        // An error here is a client that went away or spoke nonsense: hyper has answered what could be answered.
        let ended = match version {
            Version::One => {
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    // A little later than we would end it ourselves, and without a word.
                    .header_read_timeout(patience.idle + FAREWELL)
                    .max_headers(HEADERS)
                    .max_buf_size(HEAD_BYTES)
                    .keep_alive(!only_probes)
                    .serve_connection(stream, service);
                attend(connection, |connection| connection.graceful_shutdown(), &traffic, patience, closing).await
            }
            Version::Two => {
                let connection = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .max_header_list_size(HEAD_BYTES as u32)
                    .max_concurrent_streams(128)
                    .keep_alive_interval(patience.idle)
                    .keep_alive_timeout(patience.idle)
                    .serve_connection(stream, service);
                attend(connection, |connection| connection.graceful_shutdown(), &traffic, patience, closing).await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    under_way: UnderWay,
) -> Result<Response<Outgoing>, Infallible> {
    let response = router.oneshot(request).await?;
    Ok(response.map(|body| under_way.sends(body)))
}

/// Runs a connection until it ends by itself, nobody uses it, its client does not read, or the server closes.
async fn attend<C>(
    connection: C,
    say_goodbye: impl Fn(Pin<&mut C>),
    traffic: &Traffic,
    mut patience: Patience,
    mut closing: watch::Receiver<bool>,
) -> hyper::Result<()>
where
    C: Future<Output = hyper::Result<()>>,
{
    let mut connection = pin!(connection);
    let mut leaving = false;
    let mut wait = Duration::ZERO;
    loop {
        tokio::select! {
            ended = &mut connection => return ended,
            _ = closing.wait_for(|closing| *closing), if !leaving => {}
            () = tokio::time::sleep(wait) => match traffic.judge(Tick::now(), patience) {
                Judgement::Stays(time) => {
                    wait = time;
                    continue;
                }
                Judgement::Idle if !leaving => {}
                Judgement::Idle => return Ok(()),
                Judgement::Stalled => {
                    traffic.reset_at_end();
                    return Ok(());
                }
            }
        }
        // A request that is on its way here is still answered.
        leaving = true;
        say_goodbye(connection.as_mut());
        patience.idle = FAREWELL;
        wait = FAREWELL;
    }
}
