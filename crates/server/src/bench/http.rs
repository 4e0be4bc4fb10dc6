//! The drain with real deliveries: a whole worker, the `http` courier, and a receiver in this process on loopback.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hyper::StatusCode;
use postrider::clock::Tick;
use postrider::couriers::http::{Http, HttpSettings};
use postrider::{Courier, Message, Outcome};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::drain::{drain_with, measure_limit};
use super::scratch::{Scratch, fill};
use super::{Bench, percentile, rate, timed};
use crate::failure::Result;
use crate::loopback;

/// As many at a time as a lane has by default.
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
    let messages = bench.messages.unwrap_or(100_000);
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
    let per_second = rate(messages, took);
    Ok(json!({
        "bench": "http", "messages": messages, "payload_bytes": bench.payload_bytes, "concurrency": CONCURRENCY,
        "per_second": per_second, "limit_per_second": limit, "ratio": per_second / limit,
        "p50_ms": percentile(&mut times, 0.5), "p99_ms": percentile(&mut times, 0.99),
    }))
}
