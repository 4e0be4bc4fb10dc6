//! How things go, for the dashboard and `postrider top`: a sample now and then, the last quarter of an hour of them, and
//! a stream that tells each new one. What a sample costs decides how often one is taken, so that looking stays cheap.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use postrider::clock::Tick;
use postrider::pulse::Pulse;
use postrider::store::LaneStats;
use postrider::{Outbox, Timestamp};
use postrider_memories::Memories;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use super::App;
use super::auth::Caller;
use super::error::Refusal;
use crate::roll::{self, Load};

/// Between samples, while somebody looks and while nobody does.
const WATCHED: Duration = Duration::from_secs(1);
const UNWATCHED: Duration = Duration::from_secs(10);
/// Of the database's time, looking takes at most one part in so many; counting a deep backlog, one part in more.
const SHARE: u32 = 50;
const COUNTING_SHARE: u32 = 200;
/// So much of the past is kept.
const KEPT: Duration = Duration::from_secs(15 * 60);

/// How one lane goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Milliseconds since 1970, by the database's clock.
    pub at_ms: i64,
    pub lanes: BTreeMap<String, LaneSample>,
    /// When the live messages were last counted: a deep backlog is counted seldom.
    pub counted_at_ms: i64,
    pub workers: usize,
    /// `ok` or `failed`; null without the memory gateway.
    pub openmemory: Option<String>,
    /// The database did not answer; the rest is what was known before.
    pub stale: bool,
}

impl Sample {
    /// What a token for one lane may see.
    fn of(&self, lane: Option<&str>) -> Sample {
        let mut own = self.clone();
        own.lanes.retain(|name, _| lane.is_none_or(|lane| lane == name));
        own
    }
}

pub struct Live {
    outbox: Outbox,
    memories: Option<Memories>,
    kept: Mutex<VecDeque<Arc<Sample>>>,
    newest: watch::Sender<Arc<Sample>>,
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
                let window = begun.since(last).clamp(WATCHED, UNWATCHED);
                last = begun;
                live.put(match live.sample(&mut counting, window).await {
                    Ok(sample) => sample,
                    Err(error) => {
                        tracing::debug!(%error, "no sample of how things go");
                        Sample { stale: true, at_ms: wall_ms(), ..(**live.newest.borrow()).clone() }
                    }
                });
                let pause = (Tick::now().since(begun) * SHARE).clamp(WATCHED, UNWATCHED);
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

    async fn sample(&self, counting: &mut Counting, window: Duration) -> postrider::Result<Sample> {
        let pulse = self.outbox.pulse(window).await?;
        counting.refresh(&self.outbox, pulse.now).await?;
        let workers = roll::roll(&self.outbox).await?.iter().filter(|worker| worker.alive).count();
        let openmemory = self.memories.as_ref().map(|memories| memories.capability().status.to_owned());
        Ok(joined(&pulse, counting, workers, openmemory))
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

    fn past(&self) -> Vec<Arc<Sample>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

fn wall_ms() -> i64 {
    postrider::clock::wall().micros() / 1000
}

/// The live messages, counted as often as it is cheap.
#[derive(Default)]
struct Counting {
    lanes: BTreeMap<String, LaneStats>,
    at: Timestamp,
    /// When it was last done, and for how long that will do.
    last: Option<(Tick, Duration)>,
}

impl Counting {
    async fn refresh(&mut self, outbox: &Outbox, now: Timestamp) -> postrider::Result<()> {
        let begun = Tick::now();
        if self.last.is_none_or(|(last, lasts)| begun.since(last) >= lasts) {
            self.lanes = outbox.depths().await?;
            self.at = now;
            let now = Tick::now();
            self.last = Some((now, now.since(begun) * COUNTING_SHARE));
        }
        Ok(())
    }
}

fn joined(pulse: &Pulse, counting: &Counting, workers: usize, openmemory: Option<String>) -> Sample {
    let mut lanes: BTreeMap<String, LaneSample> = BTreeMap::new();
    for (lane, stats) in &counting.lanes {
        let sample = lanes.entry(lane.clone()).or_default();
        (sample.pending, sample.leased) = (stats.pending, stats.leased);
    }
    for (lane, of_lane) in &pulse.lanes {
        let sample = lanes.entry(lane.clone()).or_default();
        sample.sent_per_second = of_lane.sent_per_second;
        sample.retries_per_second = of_lane.retries_per_second;
        sample.dead_per_second = of_lane.dead_per_second;
        sample.oldest_due_seconds = of_lane.oldest_due_seconds;
        sample.paused = of_lane.paused;
    }
    let counted_at_ms = counting.at.micros() / 1000;
    Sample { at_ms: pulse.now.micros() / 1000, lanes, counted_at_ms, workers, openmemory, stale: false }
}

/// How it goes now, and went in the last quarter of an hour.
#[derive(Serialize, ToSchema)]
pub struct Overview {
    /// `sqlite`, `postgres` or `mysql`.
    database: &'static str,
    version: &'static str,
    /// The oldest first; the last one is now.
    samples: Vec<Sample>,
}

/// How it goes, with the last quarter of an hour
#[utoipa::path(
    get, path = "/v1/overview", tag = "server",
    responses((status = 200, description = "Samples of every lane", body = Overview))
)]
pub async fn overview(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Overview> {
    Json(Overview {
        database: app.outbox.store().dialect().name(),
        version: env!("CARGO_PKG_VERSION"),
        samples: app.live.past().iter().map(|sample| sample.of(caller.lane())).collect(),
    })
}

/// Somebody looks, for as long as this lives.
struct Watching(Arc<Live>);

impl Watching {
    fn new(live: Arc<Live>) -> Watching {
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

/// `GET /v1/live`: each new sample as a server-sent event `sample`, until the client leaves or the server stops.
pub async fn stream(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let watching = Watching::new(app.live.clone());
    let newest = app.live.newest.subscribe();
    let lane = caller.lane().map(str::to_owned);
    let events = futures_util::stream::unfold((watching, newest, lane), async |(watching, mut newest, lane)| {
        newest.changed().await.ok()?;
        let sample = newest.borrow_and_update().clone();
        if sample.at_ms < 0 {
            return None;
        }
        let event = Event::default().event("sample").json_data(sample.of(lane.as_deref()));
        Some((Ok(event.unwrap_or_default()), (watching, newest, lane)))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

/// A worker: alive by its own call, holding by its leases.
#[derive(Serialize, ToSchema)]
pub struct WorkerView {
    worker: String,
    /// It has called within the last 20 seconds. Workers of applications that embed the library do not call.
    alive: bool,
    started_at: Option<String>,
    seen_at: Option<String>,
    /// By lane.
    lanes: BTreeMap<String, WorkerLane>,
}

#[derive(Default, Serialize, ToSchema)]
pub struct WorkerLane {
    #[serde(flatten)]
    load: Load,
    /// Since when it holds the message it holds longest, as far as the head of the lane tells.
    holds_since: Option<String>,
    lease_until: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct Workers {
    items: Vec<WorkerView>,
}

/// Who works, and what they hold
#[utoipa::path(get, path = "/v1/workers", tag = "server", responses((status = 200, description = "All of them", body = Workers)))]
pub async fn workers(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Workers>, Refusal> {
    let visible = |lane: &str| caller.lane().is_none_or(|own| own == lane);
    let mut items: BTreeMap<String, WorkerView> = BTreeMap::new();
    for called in roll::roll(&app.outbox).await? {
        let lanes = called.lanes.into_iter().filter(|(lane, _)| visible(lane));
        let view = WorkerView {
            worker: called.worker.clone(),
            alive: called.alive,
            started_at: Some(called.started_at.to_string()),
            seen_at: Some(called.seen_at.to_string()),
            lanes: lanes.map(|(lane, load)| (lane, WorkerLane { load, ..WorkerLane::default() })).collect(),
        };
        items.insert(called.worker, view);
    }
    for holder in app.outbox.pulse(WATCHED).await?.holders.into_iter().filter(|holder| visible(&holder.lane)) {
        let view = items.entry(holder.worker.clone()).or_insert_with(|| WorkerView {
            worker: holder.worker.clone(),
            alive: true,
            started_at: None,
            seen_at: None,
            lanes: BTreeMap::new(),
        });
        let lane = view.lanes.entry(holder.lane).or_default();
        lane.load.held = lane.load.held.max(holder.holds as usize);
        lane.holds_since = Some(holder.since.to_string());
        lane.lease_until = Some(holder.lease_until.to_string());
    }
    Ok(Json(Workers { items: items.into_values().collect() }))
}
