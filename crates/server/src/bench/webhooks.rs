//! Webhooks end to end, to a receiver in this process: from the publish call to the receiver's 200 with everything
//! recorded; then the latency of single events at a gentle pace.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use mysql_async::prelude::Queryable;
use postrider::clock::Tick;
use postrider::tx::Dialect;
use postrider::worker::core::Tally;
use postrider::{Lanes, Options, Outbox, Worker, stores};
use postrider_webhooks::guard::Policy;
use postrider_webhooks::keyring::Keyring;
use postrider_webhooks::{
    LANE, NewEvent, NewSubscription, Reports, SagaFilter, Settings, Webhooks, lane_rules, lane_settings,
};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::scratch::{Scratch, fail, mysql};
use super::{Bench, percentile, rate, timed};
use crate::commands::orchestrate;
use crate::failure::{Failure, Result};
use crate::loopback;

/// Events of one publish call, and calls under way at once.
const BATCH: usize = 500;
const PUBLISHERS: usize = 2;
/// The gentle pace.
pub const PACE_PER_SECOND: usize = 200;
const PACED: usize = 1000;

/// When each event arrived, by its number.
pub type Arrivals = Arc<Mutex<HashMap<usize, Tick>>>;

pub fn seen(arrivals: &Arrivals) -> MutexGuard<'_, HashMap<usize, Tick>> {
    arrivals.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A receiver in this process that notes what arrives.
pub async fn receiver() -> Result<(String, Arrivals)> {
    let arrivals = Arrivals::default();
    let log = arrivals.clone();
    let address = loopback::receive(move |_, body: bytes::Bytes| {
        if let Some(n) = number(&body) {
            seen(&log).insert(n, Tick::now());
        }
        std::future::ready(StatusCode::OK)
    })
    .await?;
    Ok((format!("http://{address}/"), arrivals))
}

/// Webhooks with a worker and an orchestrator that run.
pub struct Running {
    pub webhooks: Webhooks,
    stop: watch::Sender<bool>,
    worker: JoinHandle<postrider::Result<Vec<(String, Tally)>>>,
    orchestrator: JoinHandle<()>,
}

impl Running {
    pub async fn start(scratch: &Scratch) -> Result<Running> {
        let reports = Reports::default();
        let lanes = Lanes::new().with(LANE, lane_rules(&reports));
        let options = Options { migrations: crate::schema::migrations(), ..Options::default() };
        let outbox = Outbox::new(stores::open(scratch.url(), lanes, options).await?);
        let policy = Policy { allow_http: true, allow_cidrs: vec!["127.0.0.0/8".parse().map_err(Failure::failed)?] };
        let settings = Settings { policy, ..Settings::default() };
        let keyring = Keyring::parse(&Keyring::generate()?)?;
        let webhooks = Webhooks::new(outbox.clone(), settings, keyring, reports, None).await?;
        let (stop, stopped) = watch::channel(false);
        let worker = Worker::new(outbox).lane_with(lane_settings(), Arc::new(webhooks.courier()));
        let mut ended = stopped.clone();
        let worker = tokio::spawn(worker.run(async move { drop(ended.wait_for(|stop| *stop).await) }));
        let orchestrator = orchestrate(&webhooks, stopped);
        Ok(Running { webhooks, stop, worker, orchestrator })
    }

    pub async fn stop(self) -> Result<()> {
        let _ = self.stop.send(true);
        self.worker.await.map_err(fail)??;
        self.orchestrator.await.map_err(fail)
    }
}

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let events = bench.messages.unwrap_or(30_000);
    let (url, arrivals) = receiver().await?;
    let running = Running::start(scratch).await?;
    let all = NewSubscription { url, event_types: vec!["*".to_owned()], ..NewSubscription::default() };
    running.webhooks.subscribe(all).await?;

    let before = statements(scratch).await?;
    let ((), took) = timed(flood(&running.webhooks, events, bench.payload_bytes)).await?;
    let after = statements(scratch).await?;
    if seen(&arrivals).len() != events {
        return Err(Failure::failed("the receiver has not seen every event"));
    }
    let numbers = events..events + PACED;
    let mut times = paced(&running.webhooks, &arrivals, "bench.event", numbers, bench.payload_bytes).await?;
    running.stop().await?;
    let statements = before.zip(after).map(|(before, after)| (after - before) / events as f64);
    Ok(json!({
        "bench": "webhooks", "messages": events, "payload_bytes": bench.payload_bytes,
        "per_second": rate(events, took), "statements_per_event": statements,
        "p50_ms": percentile(&mut times, 0.5), "p99_ms": percentile(&mut times, 0.99), "paced_per_second": PACE_PER_SECOND,
    }))
}

fn payload(n: usize, bytes: usize) -> Vec<u8> {
    let mut payload = format!("{{\"n\":{n},\"fill\":\"").into_bytes();
    payload.resize(bytes.max(32).saturating_sub(2), b'x');
    payload.extend_from_slice(b"\"}");
    payload
}

fn number(body: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(body).ok()?.strip_prefix("{\"n\":")?;
    text.split(',').next()?.parse().ok()
}

/// Publishes events with these numbers, in batches, several at once.
pub async fn publish(webhooks: &Webhooks, kind: &str, numbers: Range<usize>, payload_bytes: usize) -> Result<()> {
    let mut publishers = tokio::task::JoinSet::new();
    for publisher in 0..PUBLISHERS {
        let (webhooks, kind, numbers) = (webhooks.clone(), kind.to_owned(), numbers.clone());
        publishers.spawn(async move {
            for start in numbers.clone().step_by(BATCH).skip(publisher).step_by(PUBLISHERS) {
                let batch = start..numbers.end.min(start + BATCH);
                webhooks.publish(batch.map(|n| NewEvent::new(&*kind, payload(n, payload_bytes))).collect()).await?;
            }
            Ok::<_, Failure>(())
        });
    }
    while let Some(done) = publishers.join_next().await {
        done.map_err(fail)??;
    }
    Ok(())
}

/// Publishes all, and waits until every saga is completed.
async fn flood(webhooks: &Webhooks, events: usize, payload_bytes: usize) -> Result<()> {
    publish(webhooks, "bench.event", 0..events, payload_bytes).await?;
    loop {
        let open = ["Pending", "InProgress", "PendingRetry"];
        let mut left = false;
        for status in open {
            let filter = SagaFilter { status: Some(status.to_owned()), limit: 1, ..SagaFilter::default() };
            let page = webhooks.sagas(filter).await?;
            left |= !page.items.is_empty() || page.next.is_some();
        }
        if !left {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// From accepted to received, one event at a time.
pub async fn paced(
    webhooks: &Webhooks,
    arrivals: &Arrivals,
    kind: &str,
    numbers: Range<usize>,
    payload_bytes: usize,
) -> Result<Vec<Duration>> {
    let mut accepted = Vec::with_capacity(numbers.len());
    let mut pace = tokio::time::interval(Duration::from_secs(1) / PACE_PER_SECOND as u32);
    for n in numbers.clone() {
        pace.tick().await;
        webhooks.publish(vec![NewEvent::new(kind, payload(n, payload_bytes))]).await?;
        accepted.push((n, Tick::now()));
    }
    let all = |seen: &HashMap<usize, Tick>| numbers.clone().all(|n| seen.contains_key(&n));
    until(Duration::from_secs(60), "every single event has arrived", || all(&seen(arrivals))).await?;
    let arrived = seen(arrivals);
    Ok(accepted.into_iter().filter_map(|(n, at)| Some(arrived.get(&n)?.since(at))).collect())
}

pub async fn until(longest: Duration, what: &str, reached: impl Fn() -> bool) -> Result<()> {
    let begun = Tick::now();
    while !reached() {
        if Tick::now().since(begun) > longest {
            return Err(Failure::failed(format!("waited {} s in vain until {what}", longest.as_secs())));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// How many statements the server has seen; only MySQL counts them for everybody.
async fn statements(scratch: &Scratch) -> Result<Option<f64>> {
    if scratch.dialect() != Dialect::Mysql {
        return Ok(None);
    }
    let mut conn = mysql(scratch.url()).await?;
    let row: Option<(String, f64)> = conn.query_first("SHOW GLOBAL STATUS LIKE 'Questions'").await.map_err(fail)?;
    Ok(row.map(|row| row.1))
}
