//! Webhooks end to end, to a receiver in this process: from the publish call to the receiver's 200 with everything
//! recorded; then the latency of single events at a gentle pace.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use mysql_async::prelude::Queryable;
use postrider::clock::Tick;
use postrider::tx::Dialect;
use postrider::{Lanes, Options, Outbox, Worker, stores};
use postrider_webhooks::guard::Policy;
use postrider_webhooks::keyring::Keyring;
use postrider_webhooks::{LANE, NewEvent, NewSubscription, Reports, Settings, Webhooks, lane_rules, lane_settings};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::scratch::{Scratch, fail, mysql};
use super::{Bench, percentile, rate, timed};
use crate::commands::orchestrate;
use crate::failure::{Failure, Result};
use crate::loopback;

/// Events of one publish call, and calls under way at once.
const BATCH: usize = 500;
const PUBLISHERS: usize = 2;
/// The gentle pace.
const PACE_PER_SECOND: usize = 200;
const PACED: usize = 1000;

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let events = bench.messages.unwrap_or(30_000);
    let arrived: Arc<Mutex<HashMap<usize, Tick>>> = Arc::default();
    let log = arrived.clone();
    let address = loopback::receive(move |_, body: bytes::Bytes| {
        if let Some(n) = number(&body) {
            log.lock().unwrap_or_else(PoisonError::into_inner).insert(n, Tick::now());
        }
        std::future::ready(StatusCode::OK)
    })
    .await?;
    let reports = Reports::default();
    let lanes = Lanes::new().with(LANE, lane_rules(&reports));
    let options = Options { migrations: crate::schema::migrations(), ..Options::default() };
    let outbox = Outbox::new(stores::open(scratch.url(), lanes, options).await?);
    let policy = Policy { allow_http: true, allow_cidrs: vec!["127.0.0.0/8".parse().map_err(Failure::failed)?] };
    let settings = Settings { policy, ..Settings::default() };
    let keyring = Keyring::parse(&Keyring::generate()?)?;
    let webhooks = Webhooks::new(outbox.clone(), settings, keyring, reports, None).await?;
    let url = format!("http://{address}/");
    let all = NewSubscription { url, event_types: vec!["*".to_owned()], ..NewSubscription::default() };
    webhooks.subscribe(all).await?;

    let (stop, stopped) = watch::channel(false);
    let worker = Worker::new(outbox).lane_with(lane_settings(), Arc::new(webhooks.courier()));
    let mut ended = stopped.clone();
    let worker = tokio::spawn(worker.run(async move { drop(ended.wait_for(|stop| *stop).await) }));
    let orchestrator = orchestrate(&webhooks, stopped);

    let before = statements(scratch).await?;
    let ((), took) = timed(flood(&webhooks, events, bench.payload_bytes)).await?;
    let after = statements(scratch).await?;
    if arrived.lock().unwrap_or_else(PoisonError::into_inner).len() != events {
        return Err(Failure::failed("the receiver has not seen every event"));
    }
    let mut times = paced(&webhooks, &arrived, events, bench.payload_bytes).await?;
    let _ = stop.send(true);
    worker.await.map_err(fail)??;
    orchestrator.await.map_err(fail)?;
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

/// Publishes all, and waits until every saga is completed.
async fn flood(webhooks: &Webhooks, events: usize, payload_bytes: usize) -> Result<()> {
    let mut publishers = tokio::task::JoinSet::new();
    for publisher in 0..PUBLISHERS {
        let webhooks = webhooks.clone();
        publishers.spawn(async move {
            for start in (0..events).step_by(BATCH).skip(publisher).step_by(PUBLISHERS) {
                let batch =
                    (start..events.min(start + BATCH)).map(|n| NewEvent::new("bench.event", payload(n, payload_bytes)));
                webhooks.publish(batch.collect()).await?;
            }
            Ok::<_, Failure>(())
        });
    }
    while let Some(done) = publishers.join_next().await {
        done.map_err(fail)??;
    }
    loop {
        let open = ["Pending", "InProgress", "PendingRetry"];
        let mut left = false;
        for status in open {
            let filter =
                postrider_webhooks::SagaFilter { status: Some(status.to_owned()), limit: 1, ..Default::default() };
            left |= !webhooks.sagas(filter).await?.items.is_empty();
        }
        if !left {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// From accepted to received, one event at a time.
async fn paced(
    webhooks: &Webhooks,
    arrived: &Mutex<HashMap<usize, Tick>>,
    first: usize,
    payload_bytes: usize,
) -> Result<Vec<Duration>> {
    let mut accepted = Vec::with_capacity(PACED);
    let mut pace = tokio::time::interval(Duration::from_secs(1) / PACE_PER_SECOND as u32);
    for n in first..first + PACED {
        pace.tick().await;
        webhooks.publish(vec![NewEvent::new("bench.event", payload(n, payload_bytes))]).await?;
        accepted.push((n, Tick::now()));
    }
    for _ in 0..500 {
        if arrived.lock().unwrap_or_else(PoisonError::into_inner).len() >= first + PACED {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let arrived = arrived.lock().unwrap_or_else(PoisonError::into_inner);
    let time = |(n, at): (usize, Tick)| Some(arrived.get(&n)?.since(at));
    Ok(accepted.into_iter().filter_map(time).collect())
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
