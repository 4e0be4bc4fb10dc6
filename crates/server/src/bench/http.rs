//! HTTP both ways, on loopback in this process: single messages posted to the API by many clients at once, against the
//! library doing the same without HTTP; orders against messages; and deliveries by the `http` courier, against the limit.

use std::net::SocketAddr;
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
use postrider::{Courier, LaneRules, Lanes, Message, Options, Outbox, Outcome, stores};
use postrider_orders::adapters::{PaperBroker, PaperSettings};
use postrider_orders::{Book, Idempotency, Orders};
use postrider_webhooks::keyring::Keyring;
use postrider_webhooks::{Reports, Webhooks};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};

use super::drain::{drain_with, measure_limit};
use super::scratch::{self, LANE, Scratch, fail, fill};
use super::{Bench, median, percentile, rate, timed};
use crate::doctor::Doctor;
use crate::failure::{Failure, Result};
use crate::gate::GateRules;
use crate::http::{self, Access, App, Limits};
use crate::loopback;
use crate::metrics::Meters;
use crate::parts::Parts;

/// Clients at once, and deliveries at once: as many as a lane has by default.
const CONCURRENCY: usize = 64;
/// Orders and messages are measured in turns, so many times; their ratio is taken turn by turn, as the machine is not the
/// same from one second to the next.
const ROUNDS: usize = 9;

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
    let api = Api::start(scratch).await?;
    let payload_bytes = bench.payload_bytes;
    let payload = move |n| scratch::message(payload_bytes, n).payload;
    let plain = |_| Request::post(format!("/v1/outbox/{LANE}"));
    let (posted, mut answers) = api.post(messages, plain, payload).await?;
    // What an order is to be measured by: a message of the same size, without and with a key, in turns.
    let mut rounds: [Vec<f64>; 3] = Default::default();
    let share = (messages / 6).max(1);
    for round in 0..ROUNDS {
        let keyed = move |n| plain(n).header("idempotency-key", format!("m-{round}-{n}"));
        rounds[0].push(api.post(share, plain, order).await?.0);
        rounds[1].push(api.post(share, keyed, order).await?.0);
        let place = move |n| Request::post("/do/order").header("idempotency-key", format!("o-{round}-{n}"));
        rounds[2].push(api.post(share, place, order).await?.0);
    }
    let mut ratios: Vec<f64> = rounds[2].iter().zip(&rounds[0]).map(|(orders, plain)| orders / plain).collect();
    let [plain, keyed, orders] = rounds.map(|mut rates| median(&mut rates));
    api.stop().await?;
    scratch.sql(&["DELETE FROM outbox", "DELETE FROM outbox_keys"]).await?;
    let (delivered, limit, mut times) = deliveries(bench, scratch, messages).await?;
    Ok(json!({
        "bench": "http", "messages": messages, "payload_bytes": bench.payload_bytes, "concurrency": CONCURRENCY,
        "per_second": posted, "limit_per_second": library, "ratio": posted / library,
        "p50_ms": percentile(&mut answers, 0.5), "p99_ms": percentile(&mut answers, 0.99),
        "orders_per_second": orders, "orders_limit_per_second": plain, "orders_ratio": median(&mut ratios),
        "keyed_per_second": keyed,
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

/// The API on a free port, until it is dropped.
struct Api {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

impl Api {
    async fn start(scratch: &Scratch) -> Result<Api> {
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let book = Book::default();
        let lanes = Lanes::new()
            .with(LANE, LaneRules::default())
            .with(postrider_orders::LANE, postrider_orders::lane_rules(&book, Idempotency::Key));
        let options = Options { migrations: crate::schema::migrations(), ..Options::default() };
        let outbox = Outbox::new(stores::open(scratch.url(), lanes, options).await?);
        let (settings, keyring) = (postrider_webhooks::Settings::default(), Keyring::none());
        let webhooks = Webhooks::new(outbox.clone(), settings, keyring, Reports::default(), None).await?;
        let broker = Arc::new(PaperBroker::new(outbox.clone(), PaperSettings::default()));
        let orders = Orders::new(outbox.clone(), postrider_orders::Settings::default(), book, broker, None).await?;
        let parts = Parts { webhooks, orders, memories: None };
        let doctor = Doctor::of(&outbox, &parts, Duration::from_secs(60));
        let app =
            App::new(outbox, parts, false, GateRules::default(), Access::default(), Arc::new(Meters::new()), doctor);
        let router = http::router(&app);
        let (stop, stopped) = oneshot::channel::<()>();
        let server = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            http::serve(listener, None, router, Limits::default(), Duration::from_secs(5), stopped).await;
        });
        Ok(Api { address, stop, server })
    }

    /// Posts what `request` makes of the numbers below `count`, many clients at once; answers how fast, and how long each took.
    async fn post(
        &self,
        count: usize,
        request: impl Fn(usize) -> hyper::http::request::Builder + Clone + Send + 'static,
        body: impl Fn(usize) -> Bytes + Clone + Send + 'static,
    ) -> Result<(f64, Vec<Duration>)> {
        let (address, numbers) = (self.address, Numbers(Arc::default(), count));
        let start = Tick::now();
        let mut tasks = JoinSet::new();
        for _ in 0..CONCURRENCY {
            let (numbers, request, body) = (numbers.clone(), request.clone(), body.clone());
            tasks.spawn(async move {
                let stream = TcpStream::connect(address).await.map_err(fail)?;
                stream.set_nodelay(true).map_err(fail)?;
                let (mut sender, connection) =
                    hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(fail)?;
                tokio::spawn(connection);
                let mut samples = Vec::new();
                while let Some(n) = numbers.next() {
                    let body = Full::<Bytes>::new(body(n));
                    let request = request(n).header("host", address.to_string()).body(body);
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
        Ok((rate(count, Tick::now().since(start)), samples))
    }

    async fn stop(self) -> Result<()> {
        drop(self.stop);
        self.server.await.map_err(fail)
    }
}

fn order(n: usize) -> Bytes {
    let qty = n % 100 + 1;
    let order = format!(r#"{{"instrument":"BENCH","side":"BUY","qty":{qty},"price":10.5,"time_in_force":"IOC"}}"#);
    order.into()
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
