//! Webhooks beside readers: people who page without pause through a long lane of the same database. The latency of single
//! events against their own without anybody who reads, in turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postrider::store::Filter;
use postrider_webhooks::NewSubscription;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::scratch::{LANE, Scratch, fill};
use super::webhooks::{PACE_PER_SECOND, Running, paced, receiver};
use super::{Bench, percentile};
use crate::failure::Result;

/// What they page through.
const ROWS: usize = 400_000;
const PAGE: u32 = 500;
/// Events of one turn; each kind has as many turns as the other.
const EVENTS: usize = 1000;
const TURNS: usize = 4;

pub async fn run(bench: &Bench, scratch: &Scratch, readers: usize) -> Result<Value> {
    let rows = bench.messages.unwrap_or(ROWS);
    fill(&scratch.outbox().await?, rows, bench.payload_bytes).await?;
    let (url, arrivals) = receiver().await?;
    let running = Running::start(scratch).await?;
    let all = NewSubscription { url, event_types: vec!["*".to_owned()], ..NewSubscription::default() };
    running.webhooks.subscribe(all).await?;
    let mut events = 0;
    let mut turn = async || {
        events += EVENTS;
        paced(&running.webhooks, &arrivals, "bench.event", events - EVENTS..events, bench.payload_bytes).await
    };
    turn().await?; // caches fill
    let (mut alone, mut beside, mut pages) = (Vec::new(), Vec::new(), 0);
    for _ in 0..TURNS {
        alone.extend(turn().await?);
        let reading = Reading::start(&running, readers);
        reading.begun().await?;
        beside.extend(turn().await?);
        pages += reading.stop().await;
    }
    running.stop().await?;
    let (p99_alone, p99) = (percentile(&mut alone, 0.99), percentile(&mut beside, 0.99));
    Ok(json!({
        "bench": "webhooks", "readers": readers, "messages": rows, "events": beside.len(), "pages": pages,
        "payload_bytes": bench.payload_bytes, "paced_per_second": PACE_PER_SECOND,
        "p50_ms": percentile(&mut beside, 0.5), "p99_ms": p99,
        "alone_p50_ms": percentile(&mut alone, 0.5), "alone_p99_ms": p99_alone, "p99_ratio": p99 / p99_alone,
    }))
}

/// Readers under way.
struct Reading {
    tasks: JoinSet<()>,
    pages: Arc<AtomicUsize>,
    readers: usize,
}

impl Reading {
    fn start(running: &Running, readers: usize) -> Reading {
        let (mut tasks, pages) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..readers {
            let (outbox, pages) = (running.webhooks.outbox().clone(), pages.clone());
            tasks.spawn(async move {
                let mut filter = Filter { lane: Some(LANE.to_owned()), limit: PAGE, ..Filter::default() };
                loop {
                    let page = match outbox.list(filter.clone()).await {
                        Ok(page) => page,
                        Err(error) => return tracing::error!(%error, "a reader was refused"),
                    };
                    pages.fetch_add(1, Ordering::Relaxed);
                    filter.before = page.next;
                }
            });
        }
        Reading { tasks, pages, readers }
    }

    async fn begun(&self) -> Result<()> {
        let each = || self.pages.load(Ordering::Relaxed) >= self.readers;
        super::webhooks::until(Duration::from_secs(60), "everybody reads", each).await
    }

    /// How many pages they had.
    async fn stop(mut self) -> usize {
        self.tasks.shutdown().await;
        self.pages.load(Ordering::Relaxed)
    }
}
