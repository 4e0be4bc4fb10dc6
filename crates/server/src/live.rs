//! How things go, for the dashboard and `postrider top`: a sample now and then, and the last quarter of an hour of them.
//! What a sample costs decides how often one is taken, so that looking stays cheap.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::pulse::{Holder, Pulse};
use postrider::{Outbox, Timestamp};
use postrider_memories::Memories;
use serde::Serialize;
use tokio::sync::watch;
use utoipa::ToSchema;

use crate::http::Caller;
use crate::roll;

/// Between samples, while somebody looks and while nobody does.
const WATCHED: Duration = Duration::from_secs(1);
const UNWATCHED: Duration = Duration::from_secs(10);
/// Of the database's time, looking takes at most one part in so many, unless a sample takes longer than a tenth of a second;
/// counting a deep backlog, one part in more.
const SHARE: u32 = 100;
const COUNTING_SHARE: u32 = 200;
/// Live messages are counted for about so long at a time, and no count lasts longer than that.
const COUNTED_AT_ONCE: Duration = Duration::from_millis(20);
const LONGEST_COUNT: Duration = Duration::from_secs(30);
/// After a sample that failed.
const AGAIN: Duration = Duration::from_secs(3);
/// So much of the past is kept.
const KEPT: Duration = Duration::from_secs(15 * 60);

/// How one lane goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct LaneSample {
    pub sent_per_second: f64,
    pub retries_per_second: f64,
    pub dead_per_second: f64,
    /// Live and not under a lease, when it was last counted.
    pub pending: u64,
    pub leased: u64,
    pub oldest_due_seconds: f64,
    pub paused: bool,
}

/// How everything goes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Sample {
    /// Milliseconds since 1970, by the database's clock.
    pub at_ms: i64,
    pub lanes: BTreeMap<String, LaneSample>,
    /// When the live messages were last counted: a deep backlog is counted seldom.
    pub counted_at_ms: i64,
    pub workers: usize,
    /// The lanes of each of them.
    #[serde(skip)]
    pub working: Vec<Vec<String>>,
    /// `ok` or `failed`; null without the memory gateway.
    pub openmemory: Option<String>,
    /// The database did not answer; the rest is what was known before.
    pub stale: bool,
}

impl Sample {
    /// What somebody may see of it.
    pub fn seen_by(&self, caller: &Caller) -> Sample {
        let mut own = self.clone();
        own.lanes.retain(|name, _| caller.sees(name));
        if !caller.lanes().is_empty() {
            own.workers = self.working.iter().filter(|lanes| lanes.iter().any(|lane| caller.sees(lane))).count();
        }
        if !caller.sees(postrider_memories::LANE) {
            own.openmemory = None;
        }
        own
    }
}

pub struct Live {
    outbox: Outbox,
    memories: Option<Memories>,
    kept: Mutex<VecDeque<Arc<Sample>>>,
    newest: watch::Sender<Arc<Sample>>,
    holders: Mutex<Vec<Holder>>,
    watching: AtomicUsize,
    wanted: tokio::sync::Notify,
}

impl Live {
    pub fn new(outbox: Outbox, memories: Option<Memories>) -> Arc<Live> {
        Arc::new(Live {
            outbox,
            memories,
            kept: Mutex::default(),
            newest: watch::channel(Arc::default()).0,
            holders: Mutex::default(),
            watching: AtomicUsize::new(0),
            wanted: tokio::sync::Notify::new(),
        })
    }

    /// Takes samples until it is stopped; then streams end.
    pub fn start(self: &Arc<Self>, mut stopped: watch::Receiver<bool>) -> tokio::task::JoinHandle<()> {
        let live = self.clone();
        tokio::spawn(async move {
            let mut counting = Counting::default();
            let mut last = Tick::now();
            loop {
                let begun = Tick::now();
                let window = begun.since(last);
                last = begun;
                let pause = live.look(&mut counting, window).await;
                let rest = async {
                    if live.watching.load(Ordering::Relaxed) == 0 {
                        // Whoever comes to look is not left waiting.
                        let _ = tokio::time::timeout(UNWATCHED - WATCHED, live.wanted.notified()).await;
                    }
                    tokio::time::sleep(pause).await;
                };
                tokio::select! {
                    () = rest => {}
                    _ = stopped.wait_for(|stop| *stop) => break,
                }
            }
            live.newest.send_replace(Arc::new(Sample { at_ms: -1, ..Sample::default() }));
        })
    }

    /// Takes one sample, with rates over the time since the last one; answers how long it is to last. A count has a share
    /// of its own.
    pub async fn look(&self, counting: &mut Counting, window: Duration) -> Duration {
        let begun = Tick::now();
        match self.sample(counting, window.clamp(WATCHED, UNWATCHED)).await {
            Ok((sample, counted)) => {
                self.put(sample);
                pause_after(Tick::now().since(begun).saturating_sub(counted))
            }
            Err(error) => {
                tracing::debug!(%error, "no sample of how things go");
                let before = (**self.newest.borrow()).clone();
                self.put(Sample { stale: true, at_ms: wall_ms(), ..before });
                AGAIN
            }
        }
    }

    async fn sample(&self, counting: &mut Counting, window: Duration) -> postrider::Result<(Sample, Duration)> {
        let mut pulse = self.outbox.pulse(window).await?;
        *self.holders.lock().unwrap_or_else(PoisonError::into_inner) = std::mem::take(&mut pulse.holders);
        if let Some(webhooks) = pulse.lanes.get_mut(postrider_webhooks::LANE) {
            let rates = postrider_webhooks::pulse(&self.outbox, window).await?;
            webhooks.sent_per_second = rates.sent_per_second;
            webhooks.retries_per_second = rates.retries_per_second;
            webhooks.dead_per_second = rates.dead_per_second;
        }
        let counted = counting.refresh(&self.outbox, pulse.now).await;
        let alive = roll::roll(&self.outbox).await?.into_iter().filter(|worker| worker.alive);
        let working = alive.map(|worker| worker.lanes.into_keys().collect()).collect();
        let openmemory = self.memories.as_ref().map(|memories| memories.capability().status.to_owned());
        Ok((joined(&pulse, counting, working, openmemory), counted))
    }

    fn put(&self, sample: Sample) {
        let sample = Arc::new(sample);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = sample.at_ms - KEPT.as_millis() as i64;
        while kept.front().is_some_and(|first| first.at_ms < oldest) {
            kept.pop_front();
        }
        kept.push_back(sample.clone());
        drop(kept);
        self.newest.send_replace(sample);
    }

    /// Who held what at the last sample, one line for a worker and a lane.
    pub fn holders(&self) -> Vec<Holder> {
        let mut held: BTreeMap<(String, String), Holder> = BTreeMap::new();
        for one in self.holders.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let shards = held.entry((one.worker.clone(), one.lane.clone()));
            let merged = shards.and_modify(|all| {
                all.holds += one.holds;
                all.since = all.since.min(one.since);
                all.lease_until = all.lease_until.min(one.lease_until);
            });
            merged.or_insert_with(|| one.clone());
        }
        held.into_values().collect()
    }

    /// Each sample as it comes; one before 1970 is the end.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Sample>> {
        self.newest.subscribe()
    }

    pub fn past(&self) -> Vec<Arc<Sample>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// How long a sample that took so long is to last.
fn pause_after(took: Duration) -> Duration {
    (took * SHARE).clamp(WATCHED, UNWATCHED)
}

fn wall_ms() -> i64 {
    postrider::clock::wall().micros() / 1000
}

/// The live messages, counted as often as it is cheap, and a part of them at a time.
#[derive(Default)]
pub struct Counting {
    counted: postrider::Counting,
    at: Timestamp,
    /// When it was last done, and for how long that will do.
    last: Option<(Tick, Duration)>,
}

impl Counting {
    /// Counts on if it is time to; answers how long that took.
    async fn refresh(&mut self, outbox: &Outbox, now: Timestamp) -> Duration {
        let begun = Tick::now();
        if self.last.is_some_and(|(last, lasts)| begun.since(last) < lasts) {
            return Duration::ZERO;
        }
        match outbox.count(&mut self.counted, COUNTED_AT_ONCE).await {
            Ok(()) if !self.counted.is_under_way() => self.at = now,
            Ok(()) => {}
            // What was counted before is better than nothing, and the page says how old it is.
            Err(error) => tracing::debug!(%error, "the live messages were not counted"),
        }
        let counted = Tick::now();
        let took = counted.since(begun);
        // A round under way goes on with the next sample; a whole one lasts.
        let share = if self.counted.is_under_way() { SHARE } else { COUNTING_SHARE };
        self.last = Some((counted, (took * share).min(LONGEST_COUNT)));
        took
    }
}

fn joined(pulse: &Pulse, counting: &Counting, working: Vec<Vec<String>>, openmemory: Option<String>) -> Sample {
    let mut lanes: BTreeMap<String, LaneSample> = BTreeMap::new();
    for (lane, depth) in counting.counted.depths() {
        let sample = lanes.entry(lane.clone()).or_default();
        (sample.pending, sample.leased) = (depth.pending, depth.leased);
    }
    for (lane, of_lane) in &pulse.lanes {
        let sample = lanes.entry(lane.clone()).or_default();
        sample.sent_per_second = of_lane.sent_per_second;
        sample.retries_per_second = of_lane.retries_per_second;
        sample.dead_per_second = of_lane.dead_per_second;
        sample.oldest_due_seconds = of_lane.oldest_due_seconds;
        if of_lane.head_is_held {
            // The one behind the head is hardly younger than the last of it.
            sample.oldest_due_seconds = sample.oldest_due_seconds.max(of_lane.held_to_seconds);
        }
        sample.paused = of_lane.paused;
    }
    let counted_at_ms = counting.at.micros() / 1000;
    let (at_ms, workers) = (pulse.now.micros() / 1000, working.len());
    Sample { at_ms, lanes, counted_at_ms, workers, working, openmemory, stale: false }
}

/// Somebody looks, for as long as this lives.
pub struct Watching(Arc<Live>);

impl Watching {
    pub fn new(live: Arc<Live>) -> Watching {
        live.watching.fetch_add(1, Ordering::Relaxed);
        live.wanted.notify_one();
        Watching(live)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.watching.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use postrider::pulse::LanePulse;
    use postrider::store::{Mode, transact};
    use postrider::{Lanes, stores};

    use super::*;

    #[test]
    fn a_long_sample_is_taken_seldom_and_never_forgotten() {
        let ms = Duration::from_millis;
        assert_eq!(pause_after(ms(2)), WATCHED);
        assert_eq!(pause_after(ms(50)), Duration::from_secs(5));
        assert_eq!(pause_after(Duration::from_secs(9)), UNWATCHED);
    }

    #[test]
    fn where_the_head_is_held_its_end_tells_the_age() {
        for (head_is_held, age) in [(true, 42.0), (false, 0.0)] {
            let lane = LanePulse { head_is_held, held_to_seconds: 42.0, ..LanePulse::default() };
            let pulse = Pulse { lanes: [("a".to_owned(), lane)].into(), ..Pulse::default() };
            assert_eq!(joined(&pulse, &Counting::default(), vec![], None).lanes["a"].oldest_due_seconds, age);
        }
    }

    async fn run(outbox: &Outbox, sql: &'static str) {
        let ran = transact(&**outbox.store(), Mode::Write, move |tx| {
            Box::pin(async move { tx.execute(sql, &[]).await.map(drop) })
        });
        ran.await.unwrap();
    }

    #[tokio::test]
    async fn a_database_that_fails_is_asked_again_soon() {
        let options = stores::Options { migrations: crate::schema::migrations(), ..stores::Options::default() };
        let store = stores::open("sqlite::memory:", Lanes::new(), options).await.unwrap();
        let outbox = Outbox::new(store);
        outbox.migrate().await.unwrap();
        let (live, mut counting) = (Live::new(outbox.clone(), None), Counting::default());
        assert_eq!(live.look(&mut counting, WATCHED).await, WATCHED);
        run(&outbox, "ALTER TABLE outbox_lanes RENAME TO gone").await;
        assert_eq!(live.look(&mut counting, WATCHED).await, AGAIN);
        assert!(live.past().last().unwrap().stale);
        run(&outbox, "ALTER TABLE gone RENAME TO outbox_lanes").await;
        live.look(&mut counting, WATCHED).await;
        assert!(!live.past().last().unwrap().stale);
    }
}
