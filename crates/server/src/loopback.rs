//! A small HTTP receiver on a free loopback port, for the demo and the benchmarks: the other side of the wire.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use crate::failure::{Failure, Result};

/// Answers every request with the status `answer` gives for its headers and body, until the process ends.
pub async fn receive<F>(answer: impl Fn(HeaderMap, Bytes) -> F + Clone + Send + 'static) -> Result<SocketAddr>
where
    F: Future<Output = StatusCode> + Send,
{
    let trouble = |e: std::io::Error| Failure::failed(format!("cannot listen on 127.0.0.1: {e}; it needs a free port"));
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(trouble)?;
    let address = listener.local_addr().map_err(trouble)?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let answer = answer.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let answer = answer.clone();
                async move {
                    let (head, body) = request.into_parts();
                    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                    let mut response = Response::new(Empty::<Bytes>::new());
                    *response.status_mut() = answer(head.headers, body).await;
                    Ok::<_, Infallible>(response)
                }
            });
            // A sender that went away is no news.
            tokio::spawn(
                async move { drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await) },
            );
        }
    });
    Ok(address)
}
