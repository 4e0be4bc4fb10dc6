//! The drain: a whole worker with a courier that does nothing, and the limit measured before and after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider::tx::Dialect;
use postrider::worker::core::LaneSettings;
use postrider::{Courier, LaneRules, Message, Outbox, Outcome, Worker};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::scratch::{self, LANE, Scratch, fill};
use super::{Bench, bare, rate, timed};
use crate::failure::{Failure, Result};

/// Counts what it is given and says when all has come.
#[derive(Clone)]
struct Counter {
    left: Arc<AtomicUsize>,
    all: Arc<Semaphore>,
}

#[async_trait]
impl Courier for Counter {
    async fn deliver(&self, _: &Message) -> Outcome {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.all.add_permits(Semaphore::MAX_PERMITS);
        }
        Outcome::sent()
    }
}

/// Drains `messages` with one worker; returns once every one of them is settled.
pub async fn drain_with_worker(outbox: Outbox, messages: usize, batch: usize) -> Result<()> {
    drain_with_workers(vec![outbox], messages, batch).await
}

async fn drain_with_workers(outboxes: Vec<Outbox>, messages: usize, batch: usize) -> Result<()> {
    let counter = Counter { left: Arc::new(AtomicUsize::new(messages)), all: Arc::new(Semaphore::new(0)) };
    let mut workers = tokio::task::JoinSet::new();
    for outbox in outboxes {
        let settings = LaneSettings { concurrency: 2 * batch, batch, ..LaneSettings::new(LANE) };
        let all = counter.all.clone();
        let worker = Worker::new(outbox).lane_with(settings, Arc::new(counter.clone()));
        workers.spawn(worker.run(async move { drop(all.acquire().await.map(|permit| permit.forget())) }));
    }
    let mut sent = 0;
    while let Some(report) = workers.join_next().await {
        let report = report.map_err(|e| Failure::failed(format!("a worker ended badly: {e}")))??;
        sent += report.first().map_or(0, |(_, tally)| tally.sent as usize);
    }
    if sent == messages {
        return Ok(());
    }
    Err(Failure::failed(format!("{sent} of {messages} messages were settled as sent")))
}

async fn measure_limit(scratch: &Scratch, messages: usize, batch: usize) -> Result<f64> {
    bare::copy_outbox(scratch).await?;
    let (done, took) = timed(bare::drain(scratch, batch)).await?;
    if done != messages {
        return Err(Failure::failed(format!("the bare loop moved {done} of {messages} rows")));
    }
    Ok(rate(messages, took))
}

pub async fn limit_only(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(200_000);
    fill(&scratch.outbox().await?, messages, bench.payload_bytes).await?;
    let limit = measure_limit(scratch, messages, bench.batch).await?;
    Ok(json!({"bench": "limit", "messages": messages, "per_second": limit, "limit_per_second": limit, "ratio": 1.0}))
}

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(200_000);
    let mut outboxes = Vec::new();
    for _ in 0..bench.workers.max(1) {
        let retention = if bench.delete { Duration::ZERO } else { LaneRules::default().retention };
        outboxes.push(scratch::outbox_with(scratch.url(), LaneRules { retention, ..LaneRules::default() }).await?);
    }
    let outbox = outboxes[0].clone();
    if let Some(fillfactor) = bench.fillfactor {
        scratch.sql(&[&format!("ALTER TABLE outbox SET (fillfactor = {fillfactor})")]).await?;
    }
    if bench.history > 0 {
        fill(&outbox, 1000, bench.payload_bytes).await?;
        drain_with_worker(outbox.clone(), 1000, bench.batch).await?;
        super::backlog::add_history(scratch, bench.history).await?;
    }
    if bench.storm > 0 {
        if scratch.dialect() == Dialect::Postgres {
            scratch.sql(&["ALTER TABLE outbox SET (autovacuum_enabled = off)"]).await?;
        }
        fill(&outbox, bench.storm, bench.payload_bytes).await?;
        drain_with_worker(outbox.clone(), bench.storm, bench.batch).await?;
    }
    fill(&outbox, messages, bench.payload_bytes).await?;
    let before = measure_limit(scratch, messages, bench.batch).await?;
    if bench.storm == 0 {
        scratch.analyze(&["outbox"]).await?;
    }
    let ((), took) = timed(drain_with_workers(outboxes, messages, bench.batch)).await?;
    // Once more afterwards: a machine that sped up or slowed down meanwhile shows.
    fill(&outbox, messages, bench.payload_bytes).await?;
    let after = measure_limit(scratch, messages, bench.batch).await?;
    let (per_second, limit) = (rate(messages, took), (before + after) / 2.0);
    Ok(json!({
        "bench": "drain", "messages": messages, "payload_bytes": bench.payload_bytes, "batch": bench.batch,
        "history": bench.history, "storm": bench.storm, "workers": bench.workers, "delete": bench.delete,
        "per_second": per_second, "limit_per_second": limit, "ratio": per_second / limit,
        "limit_before": before, "limit_after": after,
    }))
}
