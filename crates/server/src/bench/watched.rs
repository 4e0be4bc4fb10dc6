//! What an open dashboard costs: the same drain with nobody looking and with somebody who does, in turns.

use std::time::Duration;

use postrider::Outbox;
use postrider::clock::Tick;
use postrider::store::Filter;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::drain::drain_with_worker;
use super::scratch::{self, LANE, Scratch, fill};
use super::{Bench, median, rate, timed};
use crate::failure::Result;
use crate::live::{Live, Watching};

/// Pairs that are compared; the first is for files that grow and caches that fill.
const PAIRS: usize = 7;
/// How often the page of messages asks again.
const PAGE_EVERY: Duration = Duration::from_secs(2);

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(500_000);
    let outbox = scratch.outbox().await?;
    let mut shares = Vec::new();
    let mut drain = async |watched: bool| {
        fill(&outbox, messages, bench.payload_bytes).await?;
        scratch.analyze(&["outbox"]).await?;
        // A process of its own, as far as the database can tell.
        let looking = if watched { Some(Looking::start(scratch::outbox(scratch.url()).await?).await) } else { None };
        let took = timed(drain_with_worker(outbox.clone(), messages, bench.batch)).await?.1;
        if let Some(looking) = looking {
            shares.push(looking.stop().await.as_secs_f64() / took.as_secs_f64());
        }
        Ok::<_, crate::failure::Failure>(rate(messages, took))
    };
    let (mut alone, mut watched, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..=PAIRS {
        // Each goes first as often as the other.
        let first = drain(pair % 2 == 0).await?;
        let second = drain(pair % 2 != 0).await?;
        let (with, without) = if pair % 2 == 0 { (first, second) } else { (second, first) };
        if pair > 0 {
            alone.push(without);
            watched.push(with);
            ratios.push(with / without);
        }
    }
    let rounds = ratios.clone();
    Ok(json!({
        "bench": "drain", "messages": messages, "payload_bytes": bench.payload_bytes, "batch": bench.batch,
        "per_second": median(&mut alone), "per_second_watched": median(&mut watched),
        "watched_ratio": median(&mut ratios), "watched_rounds": rounds, "looking_share": median(&mut shares),
    }))
}

/// What a page that is open has the server ask: samples, and a list.
struct Looking {
    stop: watch::Sender<bool>,
    asking: tokio::task::JoinHandle<Duration>,
}

impl Looking {
    /// It is open already when the drain begins.
    async fn start(outbox: Outbox) -> Looking {
        let (stop, mut stopped) = watch::channel(false);
        let live = Live::new(outbox.clone(), None);
        let mut newest = live.subscribe();
        let watching = Watching::new(live.clone());
        let sampling = live.start(stopped.clone());
        let _ = newest.changed().await;
        let before = live.spent();
        let asking = tokio::spawn(async move {
            let _watching = watching;
            let page = Filter { lane: Some(LANE.to_owned()), limit: 50, ..Filter::default() };
            let mut listing = Duration::ZERO;
            loop {
                let begun = Tick::now();
                if let Err(error) = outbox.list(page.clone()).await {
                    tracing::warn!(%error, "the page could not be read");
                }
                listing += Tick::now().since(begun);
                tokio::select! {
                    () = tokio::time::sleep(PAGE_EVERY) => {}
                    _ = stopped.wait_for(|stop| *stop) => break,
                }
            }
            let _ = sampling.await;
            listing + live.spent().saturating_sub(before)
        });
        Looking { stop, asking }
    }

    /// How long its questions took, together.
    async fn stop(self) -> Duration {
        let _ = self.stop.send(true);
        self.asking.await.unwrap_or_default()
    }
}
