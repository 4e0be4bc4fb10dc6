//! HTTP both ways, on loopback in this process: single messages posted to the API by many clients at once, against the
//! library doing the same without HTTP; and deliveries by the `http` courier, against the bare limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use postrider::clock::Tick;
use postrider::couriers::http::{Http, HttpSettings};
use postrider::{Courier, Message, Outbox, Outcome};
use postrider_webhooks::keyring::Keyring;
use postrider_webhooks::{Reports, Webhooks};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::drain::{drain_with, measure_limit};
use super::scratch::{self, LANE, Scratch, fail, fill};
use super::{Bench, percentile, rate, timed};
use crate::failure::{Failure, Result};
use crate::http::{self, App, Limits};
use crate::loopback;
use crate::metrics::Meters;

/// Clients at once, and deliveries at once: as many as a lane has by default.
const CONCURRENCY: usize = 64;

struct Stopwatch {
    http: Http,
    samples: mpsc::UnboundedSender<Duration>,
}

#[async_trait]
impl Courier for Stopwatch {
    async fn deliver(&self, message: &Message) -> Outcome {
        let start = Tick::now();
        let outcome = self.http.deliver(message).await;
        let _ = self.samples.send(Tick::now().since(start));
        outcome
    }
}

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(50_000);
    let outbox = scratch.outbox().await?;
    let library = in_process(&outbox, messages, bench.payload_bytes).await?;
    let (posted, mut answers) = over_http(&outbox, messages, bench.payload_bytes).await?;
    scratch.sql(&["DELETE FROM outbox"]).await?;
    let (delivered, limit, mut times) = deliveries(bench, scratch, messages).await?;
    Ok(json!({
        "bench": "http", "messages": messages, "payload_bytes": bench.payload_bytes, "concurrency": CONCURRENCY,
        "per_second": posted, "limit_per_second": library, "ratio": posted / library,
        "p50_ms": percentile(&mut answers, 0.5), "p99_ms": percentile(&mut answers, 0.99),
        "delivered_per_second": delivered, "delivered_limit_per_second": limit, "delivered_ratio": delivered / limit,
        "delivery_p50_ms": percentile(&mut times, 0.5), "delivery_p99_ms": percentile(&mut times, 0.99),
    }))
}

/// Hands out the numbers below `messages`, each once.
#[derive(Clone)]
struct Numbers(Arc<AtomicUsize>, usize);

impl Numbers {
    fn next(&self) -> Option<usize> {
        Some(self.0.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < self.1)
    }
}

async fn joined(mut tasks: JoinSet<Result<Vec<Duration>>>) -> Result<Vec<Duration>> {
    let mut samples = Vec::new();
    while let Some(task) = tasks.join_next().await {
        samples.extend(task.map_err(fail)??);
    }
    Ok(samples)
}

/// The library, one message a transaction, as many callers at once.
async fn in_process(outbox: &Outbox, messages: usize, payload_bytes: usize) -> Result<f64> {
    let numbers = Numbers(Arc::default(), messages);
    let start = Tick::now();
    let mut tasks = JoinSet::new();
    for _ in 0..CONCURRENCY {
        let (outbox, numbers) = (outbox.clone(), numbers.clone());
        tasks.spawn(async move {
            while let Some(n) = numbers.next() {
                outbox.enqueue(vec![scratch::message(payload_bytes, n)]).await?;
            }
            Ok(vec![])
        });
    }
    joined(tasks).await?;
    Ok(rate(messages, Tick::now().since(start)))
}

/// The API, one message a request.
async fn over_http(outbox: &Outbox, messages: usize, payload_bytes: usize) -> Result<(f64, Vec<Duration>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    let (settings, keyring) = (postrider_webhooks::Settings::default(), Keyring::none());
    let webhooks = Webhooks::new(outbox.clone(), settings, keyring, Reports::default(), None).await?;
    let app = App::new(outbox.clone(), webhooks, false, Arc::new(Meters::new()));
    let router = http::router(&app);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let stopped = async { drop(stopped.await) };
        http::serve(listener, None, router, Limits::default(), Duration::from_secs(5), stopped).await;
    });
    let numbers = Numbers(Arc::default(), messages);
    let start = Tick::now();
    let mut tasks = JoinSet::new();
    for _ in 0..CONCURRENCY {
        let numbers = numbers.clone();
        tasks.spawn(async move {
            let stream = TcpStream::connect(address).await.map_err(fail)?;
            stream.set_nodelay(true).map_err(fail)?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(fail)?;
            tokio::spawn(connection);
            let mut samples = Vec::new();
            while let Some(n) = numbers.next() {
                let body = Full::<Bytes>::new(scratch::message(payload_bytes, n).payload);
                let request =
                    Request::post(format!("/v1/outbox/{LANE}")).header("host", address.to_string()).body(body);
                let begun = Tick::now();
                let response = sender.send_request(request.map_err(fail)?).await.map_err(fail)?;
                let status = response.status();
                response.into_body().collect().await.map_err(fail)?;
                samples.push(Tick::now().since(begun));
                if status != StatusCode::CREATED {
                    return Err(Failure::failed(format!("the API answered {status}")));
                }
            }
            Ok(samples)
        });
    }
    let samples = joined(tasks).await?;
    let per_second = rate(messages, Tick::now().since(start));
    drop(stop);
    server.await.map_err(fail)?;
    Ok((per_second, samples))
}

async fn deliveries(bench: &Bench, scratch: &Scratch, messages: usize) -> Result<(f64, f64, Vec<Duration>)> {
    let address = loopback::receive(|_, _| std::future::ready(StatusCode::OK)).await?;
    let outbox = scratch.outbox().await?;
    let settings = HttpSettings::new(format!("http://{address}/"), outbox.store_id().await?);
    let (samples, mut heard) = mpsc::unbounded_channel();
    let courier = Arc::new(Stopwatch { http: Http::new(settings)?, samples });
    fill(&outbox, messages, bench.payload_bytes).await?;
    let limit = measure_limit(scratch, messages, bench.batch).await?;
    scratch.analyze(&["outbox"]).await?;
    let ((), took) = timed(drain_with(vec![outbox], courier, messages, CONCURRENCY, bench.batch)).await?;
    let mut times = Vec::with_capacity(messages);
    while let Some(time) = heard.recv().await {
        times.push(time);
    }
    Ok((rate(messages, took), limit, times))
}
