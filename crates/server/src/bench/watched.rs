//! What an open dashboard costs: one drain, with a page that is open and closed in turns. Windows next to each other are
//! compared: drains differ far more among themselves than by somebody who looks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider::clock::Tick;
use postrider::store::Filter;
use postrider::{Courier, Message, Outbox, Outcome};
use serde_json::{Value, json};

use super::drain::drain_with;
use super::scratch::{self, LANE, Scratch, fill};
use super::{Bench, rate};
use crate::failure::{Failure, Result};
use crate::live::{Counting, Live};

/// Pairs of windows that are compared, from as many drains as that takes.
const PAIRS: usize = 16;
/// How long the page stays open, and closed.
const WINDOW: Duration = Duration::from_secs(2);

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(2_000_000);
    let outbox = scratch.outbox().await?;
    let mut pairs = Vec::new();
    while pairs.len() < PAIRS {
        fill(&outbox, messages, bench.payload_bytes).await?;
        scratch.analyze(&["outbox"]).await?;
        let windows = drain_in_windows(outbox.clone(), scratch, messages, bench.batch).await?;
        // The first pair is for files that grow and caches that fill.
        let before = pairs.len();
        pairs.extend(windows.chunks_exact(2).skip(1).map(Pair::of));
        if pairs.len() == before {
            return Err(Failure::usage("the drain was over too soon; give it more --messages"));
        }
    }
    let sum = |of: fn(&Pair) -> f64| pairs.iter().map(of).sum::<f64>();
    let count = pairs.len() as f64;
    let ratios: Vec<f64> = pairs.iter().map(|pair| pair.open / pair.closed).collect();
    let mean = ratios.iter().sum::<f64>() / count;
    let variance = ratios.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>() / (count - 1.0);
    Ok(json!({
        "bench": "drain", "messages": messages, "payload_bytes": bench.payload_bytes, "batch": bench.batch,
        "per_second": sum(|pair| pair.closed) / count, "per_second_watched": sum(|pair| pair.open) / count,
        "watched_ratio": mean, "watched_error": (variance / count).sqrt(), "watched_rounds": ratios,
        "looking_share": sum(|pair| pair.looking) / count,
    }))
}

/// What went in so much time, and which part of that time the page's questions took.
struct Window {
    open: bool,
    per_second: f64,
    looking: f64,
}

/// Messages a second while the page was open and while it was closed.
struct Pair {
    open: f64,
    closed: f64,
    looking: f64,
}

impl Pair {
    fn of(windows: &[Window]) -> Pair {
        let of = |open: bool| windows.iter().find(|window| window.open == open);
        let rate = |open: bool| of(open).map_or(f64::NAN, |window| window.per_second);
        Pair { open: rate(true), closed: rate(false), looking: of(true).map_or(f64::NAN, |window| window.looking) }
    }
}

async fn drain_in_windows(outbox: Outbox, scratch: &Scratch, messages: usize, batch: usize) -> Result<Vec<Window>> {
    // A process of its own, as far as the database can tell; it is there already when the drain begins.
    let mut page = Page::of(scratch::outbox(scratch.url()).await?);
    page.ask().await;
    let counted = Arc::new(Counted::default());
    let draining = drain_with(vec![outbox], counted.clone(), messages, 2 * batch, batch);
    let mut windows = Vec::new();
    let looking = async {
        // Each goes first as often as the other.
        for open in [true, false, false, true].into_iter().cycle() {
            let (sent, begun) = (counted.so_far(), Tick::now());
            let looked = if open { page.stay_open(WINDOW).await } else { page.stay_closed(WINDOW).await };
            let took = Tick::now().since(begun);
            windows.push(Window {
                open,
                per_second: rate(counted.so_far() - sent, took),
                looking: looked.as_secs_f64() / took.as_secs_f64(),
            });
        }
    };
    tokio::select! {
        drained = draining => drained?,
        () = looking => {}
    }
    Ok(windows)
}

/// Counts what it sends nowhere.
#[derive(Default)]
struct Counted(AtomicUsize);

impl Counted {
    fn so_far(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl Courier for Counted {
    async fn deliver(&self, _: &Message) -> Outcome {
        self.0.fetch_add(1, Ordering::Relaxed);
        Outcome::sent()
    }
}

/// What a page has the server ask while it is open: samples, and a list; each the less often the longer its answer takes.
struct Page {
    outbox: Outbox,
    live: Arc<Live>,
    counting: Counting,
    sample_at: Tick,
    list_at: Tick,
}

impl Page {
    fn of(outbox: Outbox) -> Page {
        let live = Live::new(outbox.clone(), None);
        Page { outbox, live, counting: Counting::default(), sample_at: Tick::now(), list_at: Tick::now() }
    }

    /// Asks what is to be asked by now; answers how long that took.
    async fn ask(&mut self) -> Duration {
        let begun = Tick::now();
        if begun >= self.sample_at {
            let lasts = self.live.look(&mut self.counting, WINDOW).await;
            self.sample_at = Tick::now().plus(lasts);
        }
        let sampled = Tick::now();
        if sampled >= self.list_at {
            let filter = Filter { lane: Some(LANE.to_owned()), limit: 50, ..Filter::default() };
            if let Err(error) = self.outbox.list(filter).await {
                tracing::warn!(%error, "the page could not be read");
            }
            let listed = Tick::now();
            // As the page itself does (`every` in app.js).
            let pause = (listed.since(sampled) * 100).clamp(Duration::from_secs(2), Duration::from_secs(20));
            self.list_at = listed.plus(pause);
        }
        Tick::now().since(begun)
    }

    /// The time does not count: what would be asked next is asked when it is open again.
    async fn stay_closed(&mut self, window: Duration) -> Duration {
        tokio::time::sleep(window).await;
        (self.sample_at, self.list_at) = (self.sample_at.plus(window), self.list_at.plus(window));
        Duration::ZERO
    }

    /// For so long; answers how much of it its questions took.
    async fn stay_open(&mut self, window: Duration) -> Duration {
        let end = Tick::now().plus(window);
        let mut looked = Duration::ZERO;
        while Tick::now() < end {
            looked += self.ask().await;
            let next = self.sample_at.min(self.list_at).min(end);
            tokio::time::sleep(next.since(Tick::now())).await;
        }
        looked
    }
}
