//! The drain: a whole worker with a courier that does nothing, and the limit measured before and after it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider::clock::Tick;
use postrider::couriers::Noop;
use postrider::observe::{Observer, Phase};
use postrider::tx::Dialect;
use postrider::worker::core::LaneSettings;
use postrider::{Courier, LaneRules, Message, Outbox, Outcome, Worker, courier};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::scratch::{self, LANE, Scratch, fill};
use super::{Bench, ROUNDS, bare, median, percentile, rate, timed};
use crate::failure::{Failure, Result};

/// Counts what it is given and says when all has come.
#[derive(Clone)]
struct Counter {
    inner: Arc<dyn Courier>,
    left: Arc<AtomicUsize>,
    all: Arc<Semaphore>,
}

impl Counter {
    fn new(inner: Arc<dyn Courier>, messages: usize) -> Self {
        Counter { inner, left: Arc::new(AtomicUsize::new(messages)), all: Arc::new(Semaphore::new(0)) }
    }

    async fn all(&self) {
        if let Ok(permit) = self.all.acquire().await {
            permit.forget();
        }
    }
}

#[async_trait]
impl Courier for Counter {
    async fn deliver(&self, message: &Message) -> Outcome {
        let outcome = self.inner.deliver(message).await;
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.all.add_permits(Semaphore::MAX_PERMITS);
        }
        outcome
    }
}

/// Drains `messages` with one worker; returns once every one of them is settled.
pub async fn drain_with_worker(outbox: Outbox, messages: usize, batch: usize) -> Result<()> {
    drain_with(vec![outbox], Arc::new(Noop), messages, 2 * batch, batch).await
}

/// The same with a worker per outbox, and with a courier that does something.
pub async fn drain_with(
    outboxes: Vec<Outbox>,
    courier: Arc<dyn Courier>,
    messages: usize,
    concurrency: usize,
    batch: usize,
) -> Result<()> {
    drain_observed(outboxes, courier, messages, (concurrency, batch), Arc::default()).await
}

/// How long claims took.
#[derive(Default)]
struct Claims(Mutex<Vec<Duration>>);

impl Observer for Claims {
    fn took(&self, _: &str, phase: Phase, time: Duration) {
        if phase == Phase::Claim {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(time);
        }
    }
}

async fn drain_observed(
    outboxes: Vec<Outbox>,
    courier: Arc<dyn Courier>,
    messages: usize,
    (concurrency, batch): (usize, usize),
    claims: Arc<Claims>,
) -> Result<()> {
    let counter = Counter::new(courier, messages);
    let mut workers = tokio::task::JoinSet::new();
    let workers_in_all = outboxes.len() as u32;
    for (n, outbox) in outboxes.into_iter().enumerate() {
        let shards = outbox.lanes().get(LANE)?.shards;
        // With more workers than shards some share one, with fewer some take several.
        let mine = |shard: &u32| shard % workers_in_all == n as u32 || n as u32 % shards == *shard;
        let shards = (0..shards).filter(mine).collect();
        let settings = LaneSettings { concurrency, batch, shards, ..LaneSettings::new(LANE) };
        let counter = counter.clone();
        let worker = Worker::new(outbox).lane_with(settings, Arc::new(counter.clone())).observer(claims.clone());
        workers.spawn(worker.run(async move { counter.all().await }));
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

pub async fn measure_limit(scratch: &Scratch, messages: usize, batch: usize) -> Result<f64> {
    bare::copy_outbox(scratch, false).await?;
    limit_of_copy(scratch, messages, batch, false).await
}

async fn limit_of_copy(scratch: &Scratch, messages: usize, batch: usize, beside: bool) -> Result<f64> {
    let (done, took) = timed(bare::drain(scratch, batch, beside)).await?;
    if done != messages {
        return Err(Failure::failed(format!("the bare loop moved {done} of {messages} rows")));
    }
    Ok(rate(messages, took))
}

pub async fn limit_only(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(200_000);
    fill(&scratch.outbox().await?, messages, bench.payload_bytes).await?;
    let limit = measure_limit(scratch, messages, bench.batch).await?;
    let mut figures = json!({
        "bench": "limit", "messages": messages, "payload_bytes": bench.payload_bytes, "batch": bench.batch,
        "per_second": limit, "limit_per_second": limit, "ratio": 1.0,
    });
    if bench.payload_beside {
        bare::copy_outbox(scratch, true).await?;
        let beside = limit_of_copy(scratch, messages, bench.batch, true).await?;
        figures["beside_per_second"] = json!(beside);
        figures["beside_ratio"] = json!(beside / limit);
    }
    Ok(figures)
}

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    if bench.storm > 0 {
        return after_a_storm(bench, scratch).await;
    }
    let messages = bench.messages.unwrap_or(200_000);
    let retention = if bench.delete { Duration::ZERO } else { LaneRules::default().retention };
    let rules = LaneRules { retention, shards: bench.shards.max(1), ..LaneRules::default() };
    let mut outboxes = Vec::new();
    for _ in 0..bench.workers.max(1) {
        outboxes.push(scratch::outbox_with(scratch.url(), rules.clone()).await?);
    }
    let outbox = outboxes[0].clone();
    if let Some(fillfactor) = bench.fillfactor {
        scratch.sql(&[&format!("ALTER TABLE outbox SET (fillfactor = {fillfactor})")]).await?;
    }
    let claims = Arc::new(Claims::default());
    let drain = async || {
        scratch.analyze(&["outbox"]).await?;
        if bench.history > 0 {
            scratch.settle_down().await?;
        }
        let sizes = (2 * bench.batch, bench.batch);
        let all = drain_observed(outboxes.clone(), Arc::new(Noop), messages, sizes, claims.clone());
        Ok::<_, Failure>(rate(messages, timed(all).await?.1))
    };
    // In turns, and the median of each: a vacuum or a checkpoint that falls into one of them is not measured. The first
    // round of both is for files that grow and caches that fill.
    let (mut rates, mut limits) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        fill(&outbox, messages, bench.payload_bytes).await?;
        let limit = measure_limit(scratch, messages, bench.batch).await?;
        let rate = drain().await?;
        if round > 0 {
            limits.push(limit);
            rates.push(rate);
        }
    }
    let (per_second, limit) = (median(&mut rates), median(&mut limits));
    // What one claim of a batch takes, under load.
    let mut times = std::mem::take(&mut *claims.0.lock().unwrap_or_else(PoisonError::into_inner));
    let mut figures = json!({
        "bench": "drain", "messages": messages, "payload_bytes": bench.payload_bytes, "batch": bench.batch,
        "workers": bench.workers, "shards": bench.shards, "delete": bench.delete, "fillfactor": bench.fillfactor,
        "per_second": per_second, "limit_per_second": limit, "ratio": per_second / limit,
        "p50_ms": percentile(&mut times, 0.5), "p99_ms": percentile(&mut times, 0.99),
        "rounds": rates, "limit_rounds": limits,
    });
    if bench.history > 0 {
        super::backlog::add_history(scratch, bench.history).await?;
        let mut rates = Vec::new();
        for _ in 0..ROUNDS {
            fill(&outbox, messages, bench.payload_bytes).await?;
            rates.push(drain().await?);
        }
        let with_history = median(&mut rates);
        figures["history"] = json!(bench.history);
        figures["per_second_with_history"] = json!(with_history);
        figures["flat_ratio"] = json!(with_history / per_second);
    }
    Ok(figures)
}

/// One worker that goes on: first through a storm of messages, then through those that are measured. They are all due
/// at one moment, so that it is the worker that is measured and not the enqueuer.
async fn after_a_storm(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(200_000);
    let fresh = Scratch::create(scratch.admin()).await?;
    let calm = drain_on_time(bench, &fresh, 0, messages).await;
    fresh.remove().await?;
    let (calm, stormy) = (calm?, drain_on_time(bench, scratch, bench.storm, messages).await?);
    Ok(json!({
        "bench": "drain", "messages": messages, "payload_bytes": bench.payload_bytes, "batch": bench.batch,
        "storm": bench.storm, "per_second": stormy, "per_second_fresh": calm, "storm_ratio": stormy / calm,
    }))
}

async fn drain_on_time(bench: &Bench, scratch: &Scratch, storm: usize, messages: usize) -> Result<f64> {
    if scratch.dialect() == Dialect::Postgres {
        scratch.sql(&["ALTER TABLE outbox SET (autovacuum_enabled = off)"]).await?;
    }
    let outbox = scratch.outbox().await?;
    let (before, measured) = (Counter::new(Arc::new(Noop), storm), Counter::new(Arc::new(Noop), messages));
    let first = Arc::new(OnceLock::new());
    let (seen, counters) = (first.clone(), (before.clone(), measured.clone()));
    let courier = courier(move |message: Message| {
        let ((before, measured), seen) = (counters.clone(), seen.clone());
        async move {
            if message.target.is_none() {
                return before.deliver(&message).await;
            }
            seen.get_or_init(Tick::now);
            measured.deliver(&message).await
        }
    });
    let settings = LaneSettings { concurrency: 2 * bench.batch, batch: bench.batch, ..LaneSettings::new(LANE) };
    let worker = Worker::new(outbox.clone()).lane_with(settings, Arc::new(courier));
    let done = measured.clone();
    fill(&outbox, storm, bench.payload_bytes).await?;
    let worker = tokio::spawn(worker.run(async move { done.all().await }));
    if storm > 0 {
        before.all().await;
    }
    scratch.settle_down().await?;
    // Time enough to enqueue them all, at a tenth of the usual speed.
    let (start, head_start) = (Tick::now(), Duration::from_secs(5) + Duration::from_micros(50) * messages as u32);
    for from in (0..messages).step_by(1000) {
        let delay = head_start.saturating_sub(Tick::now().since(start));
        let batch = from..messages.min(from + 1000);
        // Eight targets, so that none has more than its share of the slots.
        let message = |n: usize| scratch::message(bench.payload_bytes, n).target(format!("t{}", n % 8)).delay(delay);
        outbox.enqueue(batch.map(message).collect()).await?;
    }
    measured.all().await;
    let ended = Tick::now();
    worker.await.map_err(|e| Failure::failed(format!("the worker ended badly: {e}")))??;
    let begun = first.get().copied().unwrap_or(ended);
    Ok(rate(messages, ended.since(begun)))
}
