//! The worker: a thin driver over the steppable [`core`]. It carries the core's commands to the store and the couriers
//! and brings back what came of them; every decision is the core's.

pub mod core;

use std::collections::HashMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::core::{Command, Core, Event, LaneSettings, Settings, Tally};
use crate::clock::{self, Tick};
use crate::courier::{Begin, Courier};
use crate::error::{Error, Result, panicked};
use crate::failpoint::reach;
use crate::message::Message;
use crate::observe::{Observer, Phase, Silent};
use crate::outbox::Outbox;
use crate::outcome::{Outcome, Reach, Settled, code};
use crate::store::{Prune, Store};

const TELL_EVERY: Duration = Duration::from_millis(500);
const ONCE_POLL: Duration = Duration::from_millis(100);
const STRAYS_EVERY: Duration = Duration::from_secs(3);
/// Audits are kept this long, whatever became of their messages.
const AUDIT_RETENTION: Duration = Duration::from_secs(400 * 24 * 3600);

/// What a worker did, per lane.
pub type Report = Vec<(String, Tally)>;

/// Delivers messages of some lanes until told to stop.
///
/// ```no_run
/// # async fn run() -> postrider::Result<()> {
/// use postrider::{LaneRules, Lanes, Outbox, Outcome, Worker, courier};
/// let outbox = Outbox::open("sqlite://app.db", Lanes::new().with("emails", LaneRules::default())).await?;
/// outbox.migrate().await?;
/// let mailer = courier(|message| async move {
///     println!("mailing {} bytes", message.payload.len());
///     Outcome::sent()
/// });
/// Worker::new(outbox).lane("emails", mailer).run(std::future::pending()).await?;
/// # Ok(()) }
/// ```
pub struct Worker {
    outbox: Outbox,
    lanes: Vec<LaneSettings>,
    couriers: Vec<Arc<dyn Courier>>,
    drain: Duration,
    once: bool,
    observer: Arc<dyn Observer>,
    owner: String,
}

impl Worker {
    pub fn new(outbox: Outbox) -> Self {
        Worker {
            outbox,
            lanes: vec![],
            couriers: vec![],
            drain: Duration::from_secs(20),
            once: false,
            observer: Arc::new(Silent),
            owner: clock::incarnation(None),
        }
    }

    /// Serves all shards of a lane with the usual settings.
    pub fn lane(self, lane: impl Into<String>, courier: impl Courier) -> Self {
        self.lane_with(LaneSettings::new(lane), Arc::new(courier))
    }

    /// Serves a lane with settings of its own: all of its shards, unless the settings name some.
    pub fn lane_with(mut self, settings: LaneSettings, courier: Arc<dyn Courier>) -> Self {
        self.lanes.push(settings);
        self.couriers.push(courier);
        self
    }

    /// A name for `locked_by`, instead of the host's.
    pub fn name(mut self, name: impl AsRef<str>) -> Self {
        self.owner = clock::incarnation(Some(name.as_ref()));
        self
    }

    /// What stands in `locked_by` of the messages it holds: `name:pid:incarnation`.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// Tells somebody what happens while it runs.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// How long a shutdown may take.
    pub fn drain(mut self, drain: Duration) -> Self {
        self.drain = drain;
        self
    }

    /// Handle all that is due, then end.
    pub fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// Runs until `shutdown` resolves (then drains) or, with `once`, until nothing is due.
    pub async fn run(mut self, shutdown: impl Future<Output = ()>) -> Result<Report> {
        for (lane, courier) in self.lanes.iter_mut().zip(&self.couriers) {
            lane.adapter = courier.name().to_owned();
            let rules = self.outbox.lanes().get(&lane.lane)?;
            lane.dedup = rules.dedup;
            lane.send_begun = rules.send_begun;
            if let Some(wrong) = lane.shards.iter().find(|s| **s >= rules.shards) {
                return Err(Error::invalid(format!(
                    "lane `{}` has {} shards; there is no shard {wrong}",
                    lane.lane, rules.shards
                )));
            }
            if lane.shards.is_empty() {
                lane.shards = (0..rules.shards).collect();
            }
            if self.once {
                // Whether anything is left is asked at once, however seldom the lane is polled otherwise.
                lane.poll = lane.poll.min(ONCE_POLL);
            }
        }
        let served: Vec<Served> = self.lanes.iter().map(|lane| Served::new(lane, &self.outbox)).collect();
        for (lane, served) in self.lanes.iter_mut().zip(&served) {
            // Without the database there is nothing to serve yet; the watch looks again.
            lane.shards.extend(served.strays(&self.outbox).await.unwrap_or_default());
        }
        let settings =
            Settings { owner: self.owner, lanes: self.lanes, drain: self.drain, once: self.once, seed: clock::seed() };
        let janitor = (!self.once).then(|| tokio::spawn(sweep(self.outbox.clone())));
        let lanes = settings.lanes.iter().map(|lane| lane.lane.clone());
        let couriers: Vec<(String, Arc<dyn Courier>)> = lanes.zip(self.couriers.iter().cloned()).collect();
        let driver = Driver::new(self.outbox.clone(), settings, self.couriers, self.observer);
        let gatekeeper = tokio::spawn(watch_gates(self.outbox.clone(), couriers, driver.sender.clone()));
        let scout = tokio::spawn(watch_shards(self.outbox, served, driver.sender.clone()));
        let report = driver.run(shutdown).await;
        gatekeeper.abort();
        scout.abort();
        if let Some(janitor) = janitor {
            janitor.abort();
        }
        Ok(report)
    }
}

/// Tells the core which lanes to leave alone, because they are paused or their courier can deliver nothing; at once and
/// then about every second.
async fn watch_gates(outbox: Outbox, couriers: Vec<(String, Arc<dyn Courier>)>, core: UnboundedSender<Event>) {
    let mut known = None;
    loop {
        match outbox.paused_lanes().await {
            Ok(mut lanes) => {
                for (lane, courier) in &couriers {
                    if !lanes.contains(lane) && !courier.ready().await {
                        lanes.push(lane.clone());
                    }
                }
                if known.as_ref() != Some(&lanes) {
                    if core.send(Event::Paused { lanes: lanes.clone() }).is_err() {
                        return;
                    }
                    known = Some(lanes);
                }
            }
            // Unchanged until the database says otherwise.
            Err(error) => tracing::warn!(%error, "cannot see which lanes are paused"),
        }
        tokio::time::sleep(Duration::from_millis(500).mul_f64(1.0 + clock::chance())).await;
    }
}

/// The part of a lane that this worker serves.
struct Served {
    lane: String,
    shards: u32,
    /// Of the configured ones.
    ours: Vec<u32>,
}

impl Served {
    fn new(settings: &LaneSettings, outbox: &Outbox) -> Self {
        let shards = outbox.lanes().get(&settings.lane).map_or(1, |rules| rules.shards);
        Served { lane: settings.lane.clone(), shards, ours: settings.shards.clone() }
    }

    /// Shards beyond the configured ones in which messages wait: one with fewer shards takes every n-th of them.
    async fn strays(&self, outbox: &Outbox) -> Result<Vec<u32>> {
        let found = outbox.stray_shards(&self.lane).await?;
        Ok(found.into_iter().filter(|shard| self.ours.contains(&(shard % self.shards))).collect())
    }
}

/// Looks for messages in shards the configuration does not know: while the number of shards changes, some processes have
/// more of them than others, and what they wrote must not lie there for ever.
async fn watch_shards(outbox: Outbox, served: Vec<Served>, core: UnboundedSender<Event>) {
    loop {
        tokio::time::sleep(STRAYS_EVERY.mul_f64(0.5 + clock::chance())).await;
        for lane in &served {
            match lane.strays(&outbox).await {
                Ok(strays) => {
                    for shard in strays {
                        if core.send(Event::Strayed { lane: lane.lane.clone(), shard }).is_err() {
                            return;
                        }
                    }
                }
                Err(error) => tracing::debug!(%error, lane = lane.lane, "cannot look for stray shards"),
            }
        }
    }
}

/// Deletes what is past its retention, in small batches, now and then.
async fn sweep(outbox: Outbox) {
    loop {
        tokio::time::sleep(Duration::from_secs(30).mul_f64(0.5 + clock::chance())).await;
        // Owners prune their own lanes, together with what they keep beside them.
        let lanes: Vec<(String, Duration)> = (outbox.lanes().iter())
            .filter(|(_, rules)| !rules.has_upkeep())
            .map(|(lane, rules)| (lane.to_owned(), rules.retention))
            .collect();
        if let Err(error) = outbox.prune_audit(AUDIT_RETENTION, 1000).await {
            tracing::warn!(%error, "old audits could not be deleted; it will be tried again");
        }
        for (lane, retention) in lanes {
            // Zero keeps no sent rows at all, and the dead until somebody purges them; expired keys go in any case.
            let retention = if retention.is_zero() { Duration::from_secs(3650 * 24 * 3600) } else { retention };
            let prune = Prune { lane: Some(lane), older_than: retention, limit: 1000, dry_run: false };
            loop {
                match outbox.prune(prune.clone()).await {
                    Ok(pruned) if pruned.messages >= 1000 || pruned.keys >= 1000 => tokio::task::yield_now().await,
                    Ok(_) => break,
                    Err(error) => {
                        tracing::warn!(%error, "pruning failed; it will be tried again");
                        break;
                    }
                }
            }
        }
    }
}

struct Driver {
    core: Core,
    outbox: Outbox,
    store: Arc<dyn Store>,
    couriers: Vec<Arc<dyn Courier>>,
    /// Per lane: its name, and whether it commits *send begun*.
    names: Vec<Arc<str>>,
    begins: Vec<bool>,
    observer: Arc<dyn Observer>,
    /// When it last told how the lanes stand.
    told_at: Tick,
    sender: UnboundedSender<Event>,
    events: UnboundedReceiver<Event>,
    running: HashMap<i64, tokio::task::AbortHandle>,
}

impl Driver {
    fn new(outbox: Outbox, settings: Settings, couriers: Vec<Arc<dyn Courier>>, observer: Arc<dyn Observer>) -> Self {
        let (sender, events) = unbounded_channel();
        let store = outbox.store().clone();
        let names = settings.lanes.iter().map(|lane| lane.lane.as_str().into()).collect();
        let begins = settings.lanes.iter().map(|lane| lane.send_begun).collect();
        let mut core = Core::new(settings, Tick::now());
        core.observe(observer.clone());
        Driver {
            names,
            begins,
            observer,
            told_at: Tick::default(),
            core,
            outbox,
            store,
            couriers,
            sender,
            events,
            running: HashMap::new(),
        }
    }

    async fn run(mut self, shutdown: impl Future<Output = ()>) -> Report {
        let mut shutdown = std::pin::pin!(shutdown.fuse());
        let mut bell = self.outbox.listen();
        let store = self.store.clone();
        let mut notified = store.notified();
        let mut heard: Vec<Event> = Vec::new();
        loop {
            let now = Tick::now();
            let commands = self.core.step(now);
            let instant = self.carry_out(commands);
            if self.core.finished(now) {
                break;
            }
            if instant {
                while let Ok(event) = self.events.try_recv() {
                    self.hear(now, event);
                }
                continue;
            }
            if now.since(self.told_at) >= TELL_EVERY {
                self.told_at = now;
                self.core.standing().for_each(|(lane, standing)| self.observer.standing(lane, standing));
            }
            let pause = self.core.next_step(now).since(now);
            tokio::select! {
                _ = self.events.recv_many(&mut heard, 4096) => {
                    let now = Tick::now();
                    for event in heard.drain(..) {
                        self.hear(now, event);
                    }
                }
                () = tokio::time::sleep(pause) => {}
                _ = bell.changed() => self.core.handle(Tick::now(), Event::Wake),
                () = &mut notified => {
                    notified = store.notified();
                    self.core.handle(Tick::now(), Event::Wake);
                }
                () = &mut shutdown => {
                    self.core.handle(Tick::now(), Event::Shutdown);
                    reach("draining");
                }
            }
        }
        self.core.tally().map(|(lane, tally)| (lane.to_owned(), tally)).collect()
    }

    fn hear(&mut self, now: Tick, event: Event) {
        if let Event::Delivered { id, .. } = &event {
            self.running.remove(id);
        }
        self.core.handle(now, event);
    }

    /// Starts what the core asked for; answers whether deliveries ended on the spot.
    fn carry_out(&mut self, commands: Vec<Command>) -> bool {
        let mut instant = false;
        for command in commands {
            match command {
                Command::Deliver { lane, message } => instant |= self.deliver(lane, message),
                Command::Abort { id } => {
                    if let Some(delivery) = self.running.remove(&id) {
                        delivery.abort();
                    }
                }
                other => self.ask_store(other),
            }
        }
        instant
    }

    /// Store operations run as tasks of their own, so that none is ever dropped half-way.
    fn ask_store(&self, command: Command) {
        let (store, outbox, sender) = (self.store.clone(), self.outbox.clone(), self.sender.clone());
        let owner = self.core.owner().to_owned();
        let lane_name = |lane: usize| self.core.lane_name(lane).to_owned();
        let timed = match &command {
            Command::Claim { claim, .. } => Some((claim.lane.clone(), Phase::Claim)),
            Command::Settle { lane, .. } => Some((lane_name(*lane), Phase::Commit)),
            _ => None,
        };
        let failed = no_answer(&command);
        let work: Pin<Box<dyn Future<Output = Event> + Send>> = match command {
            Command::Claim { op, claim } => Box::pin(async move {
                let result = store.claim(&claim).await;
                if result.as_ref().is_ok_and(|claimed| !claimed.messages.is_empty()) {
                    reach("claimed");
                }
                Event::Claimed { op, result }
            }),
            Command::Walk { op, lane, shard, after, limit } => {
                let lane = lane_name(lane);
                Box::pin(async move { Event::Walked { op, result: store.walk(&lane, shard, after, limit).await } })
            }
            Command::Dedup { op, lane, probes } => {
                let lane = lane_name(lane);
                Box::pin(async move { Event::Deduped { op, result: outbox.check_dedup(&lane, probes).await } })
            }
            Command::Settle { op, lane, entries } => {
                let (courier, lane) = (self.couriers[lane].clone(), lane_name(lane));
                Box::pin(async move {
                    let result = store.settle(&lane, &owner, &entries).await;
                    reach("settled");
                    for (entry, answer) in entries.iter().zip(result.iter().flatten()) {
                        if !matches!(answer, Settled::Refused | Settled::Locked) {
                            courier.settled(entry.lease.id);
                        }
                    }
                    Event::Settled { op, result }
                })
            }
            Command::Defer { op, leases, how } => Box::pin(async move {
                let result = store.defer(&owner, &leases, &how).await;
                reach("deferred");
                Event::Deferred { op, result }
            }),
            Command::Renew { op, leases, lease } => Box::pin(async move {
                let result = store.renew(&owner, &leases, lease).await;
                reach("renewed");
                Event::Renewed { op, result }
            }),
            Command::Deliver { .. } | Command::Abort { .. } => return,
        };
        let (observer, timed) = (self.observer.clone(), timed);
        tokio::spawn(async move {
            let start = Tick::now();
            // Without an answer the core would wait for one for ever.
            let event = AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|panic| failed(panicked(&*panic)));
            if let Some((lane, phase)) = timed {
                observer.took(&lane, phase, Tick::now().since(start));
            }
            let _ = sender.send(event);
        });
    }

    /// Polls the delivery once on the spot; only what has to wait becomes a task.
    fn deliver(&mut self, lane: usize, message: Box<Message>) -> bool {
        let (courier, sender, id) = (self.couriers[lane].clone(), self.sender.clone(), message.id);
        let begin =
            self.begins[lane].then(|| Begin::new(self.outbox.clone(), self.core.owner().to_owned(), message.lease()));
        let (observer, name) = (self.observer.clone(), self.names[lane].clone());
        let mut delivery = Box::pin(async move {
            let start = Tick::now();
            let outcome = deliver_guarded(courier, message, begin.as_ref()).await;
            observer.took(&name, Phase::Send, Tick::now().since(start));
            Event::Delivered { id, outcome, begun: begin.is_some_and(|b| b.was_committed()) }
        });
        match delivery.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(event) => {
                let _ = sender.send(event);
                true
            }
            Poll::Pending => {
                let task = tokio::spawn(async move {
                    let _ = sender.send(delivery.await);
                });
                self.running.insert(id, task.abort_handle());
                false
            }
        }
    }
}

/// What the core hears of an operation that panicked: whether it was applied is unknown.
fn no_answer(command: &Command) -> impl FnOnce(String) -> Event + Send + use<> {
    let which: fn(u64, Error) -> Event = match command {
        Command::Walk { .. } => |op, error| Event::Walked { op, result: Err(error) },
        Command::Dedup { .. } => |op, error| Event::Deduped { op, result: Err(error) },
        Command::Settle { .. } => |op, error| Event::Settled { op, result: Err(error) },
        Command::Defer { .. } => |op, error| Event::Deferred { op, result: Err(error) },
        Command::Renew { .. } => |op, error| Event::Renewed { op, result: Err(error) },
        _ => |op, error| Event::Claimed { op, result: Err(error) },
    };
    let op = match command {
        Command::Claim { op, .. }
        | Command::Walk { op, .. }
        | Command::Dedup { op, .. }
        | Command::Settle { op, .. }
        | Command::Defer { op, .. }
        | Command::Renew { op, .. } => *op,
        Command::Deliver { .. } | Command::Abort { .. } => 0,
    };
    move |words| which(op, Error::database(format!("an operation of the store {words}")).unknown())
}

/// A courier that panics has failed one delivery, not the worker.
async fn deliver_guarded(courier: Arc<dyn Courier>, message: Box<Message>, begin: Option<&Begin>) -> Outcome {
    let delivery = match begin {
        Some(begin) => courier.deliver_begun(&message, begin),
        None => courier.deliver(&message),
    };
    reach("sending");
    match AssertUnwindSafe(delivery).catch_unwind().await {
        Ok(outcome) => {
            reach("delivered");
            outcome
        }
        Err(panic) => Outcome::retry(code::COURIER_PANIC, format!("the courier {}", panicked(&*panic)), Reach::Unknown),
    }
}
