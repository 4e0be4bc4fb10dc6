//! The accept loop: connections within a limit, each with a time for its TLS handshake, for every head and for every
//! request, in HTTP/1.1 or HTTP/2. On shutdown it takes no more, lets requests under way finish, and closes the rest.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

/// What one server bears.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub connections: usize,
    /// For a TLS handshake, for the first bytes, and for each request's head; also how long a connection may be idle.
    pub head: Duration,
    pub head_bytes: usize,
    pub headers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { connections: 10_000, head: Duration::from_secs(10), head_bytes: 32 * 1024, headers: 100 }
    }
}

/// Serves until `shutdown` resolves, then for `drain` at most.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: Limits,
    drain: Duration,
    shutdown: impl Future<Output = ()>,
) {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = async {
            let slot = slots.clone().acquire_owned().await;
            (slot, listener.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            accepted = accepted => accepted,
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
        let (router, tls, watcher) = (router.clone(), tls.clone(), graceful.watcher());
        tokio::spawn(async move {
            let _slot = slot;
            let _ = stream.set_nodelay(true);
            let connection = Connection { router, limits, peer };
            match tls {
                None => {
                    let Some(version) = version_of(&stream, limits.head).await else { return };
                    connection.speak(version, stream, watcher).await;
                }
                Some(tls) => {
                    let Ok(Ok(stream)) = tokio::time::timeout(limits.head, tls.accept(stream)).await else { return };
                    let version = match stream.get_ref().1.alpn_protocol() {
                        Some(b"h2") => Version::Two,
                        _ => Version::One,
                    };
                    connection.speak(version, stream, watcher).await;
                }
            }
        });
    }
    drop(listener);
    if tokio::time::timeout(drain, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests were cut off at the end of the drain timeout");
    }
}

enum Version {
    One,
    Two,
}

/// By its first bytes, which must come in time: HTTP/2 without TLS begins with `PRI * HTTP/2.0`.
async fn version_of(stream: &TcpStream, patience: Duration) -> Option<Version> {
    let look = async {
        let mut start = [0_u8; 4];
        loop {
            let seen = stream.peek(&mut start).await.ok().filter(|n| *n > 0)?;
            if !b"PRI ".starts_with(&start[..seen]) {
                return Some(Version::One);
            }
            if seen == start.len() {
                return Some(Version::Two);
            }
            tokio::time::sleep(Duration::from_millis(5)).await; // no peek waits for more than is there
        }
    };
    tokio::time::timeout(patience, look).await.ok().flatten()
}

struct Connection {
    router: Router,
    limits: Limits,
    peer: SocketAddr,
}

impl Connection {
    async fn speak<S>(self, version: Version, stream: S, watcher: Watcher)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Connection { router, limits, peer } = self;
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            router.clone().oneshot(request)
        });
        let stream = TokioIo::new(stream);
        // An error here is a client that went away or spoke nonsense: hyper has answered what could be answered.
        let ended = match version {
            Version::One => {
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(limits.head)
                    .max_headers(limits.headers)
                    .max_buf_size(limits.head_bytes.max(8192))
                    .serve_connection(stream, service);
                watcher.watch(connection).await
            }
            Version::Two => {
                let connection = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .max_header_list_size(limits.head_bytes as u32)
                    .max_concurrent_streams(128)
                    .keep_alive_interval(limits.head)
                    .keep_alive_timeout(limits.head)
                    .serve_connection(stream, service);
                watcher.watch(connection).await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}
