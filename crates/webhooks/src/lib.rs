//! Webhooks on the outbox: events are published in the caller's own transaction, and every matching subscription gets a
//! delivery saga that ends `Completed` or `DeadLettered`.
//!
//! - [`Webhooks::publish_in`] writes the event, its sagas and their first jobs, all or nothing.
//! - Jobs are messages of the lane [`LANE`], one active per saga (by its active key). The [courier] sends, signed; what
//!   came of it is recorded with the settle, as an attempt and a result.
//! - The [orchestrator] is the only code that moves sagas: it applies results, starts what is due, and lets held
//!   subscriptions through as their gate allows. What it decides is in [`decide`], pure.

mod catalog;
mod courier;
mod dead_letters;
pub mod decide;
mod doctor;
mod gates;
pub mod guard;
mod health;
mod janitor;
pub mod keyring;
mod keys;
mod orchestrator;
mod publish;
mod pulse;
mod reads;
mod replays;
mod results;
pub mod roles;
mod secrets;
pub mod sign;
mod starting;
mod subscriptions;
mod sweep;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use postrider::alerts::Alerts;
use postrider::clock::Tick;
use postrider::couriers::exchange::{Exchange, Resolve};
use postrider::error::Kind;
use postrider::store::{Mode, transact};
use postrider::tx::{BoxFuture, Tx};
use postrider::worker::core::LaneSettings;
use postrider::{LaneRules, Migration, Outbox, Result};
use tokio::sync::Notify;

use self::catalog::{Knowledge, Standings};
pub use self::courier::{Reports, WebhookCourier};
pub use self::dead_letters::{DeadLetter, DeadLetterFilter, Requeued};
use self::guard::{Guarded, Policy};
use self::keyring::Keyring;
pub use self::orchestrator::{QUERIES, query};
pub use self::publish::{NewEvent, Published, Publishing};
pub use self::pulse::{Rates, pulse};
pub use self::reads::{Attempt, EventShown, Saga, SagaFilter, Timeline};
pub use self::replays::{Counted, NewReplay, Replay};
use self::secrets::Cabinet;
pub use self::subscriptions::{NewSubscription, Patch, Subscription, SubscriptionStatus};
use self::sweep::Cursors;

/// The outbox lane of webhook jobs.
pub const LANE: &str = "webhooks";
/// Who owns it: the command generic verbs point to.
pub const OWNER: &str = "postrider webhooks";

/// The tables of this part: versions 201 to 299.
pub const MIGRATIONS: [Migration; 2] = postrider::migrations![201 "V201__webhooks", 202 "V202__webhooks_fleet"];

/// How webhooks are delivered unless a subscription says otherwise.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Attempts in all.
    pub max_retry_limit: u32,
    /// Waits double from this one on.
    pub base_delay: Duration,
    pub jitter: f64,
    /// For one attempt, from DNS to the last byte.
    pub timeout: Duration,
    pub policy: Policy,
    /// Name servers to ask instead of the system's.
    pub dns: Vec<SocketAddr>,
    /// How long ended sagas, their attempts and events are kept.
    pub retention: Duration,
    /// A subscription that has only failed for so long is disabled; zero: never.
    pub disable_after: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            max_retry_limit: 5,
            base_delay: Duration::from_secs(30),
            jitter: 0.0,
            timeout: Duration::from_secs(15),
            policy: Policy::default(),
            dns: vec![],
            retention: Duration::from_secs(30 * 24 * 3600),
            disable_after: Duration::from_secs(5 * 24 * 3600),
        }
    }
}

/// What the store must know of the lane. `reports` is shared with [`Webhooks::new`]: what the courier saw is written with
/// the settle.
pub fn lane_rules(reports: &Reports) -> LaneRules {
    LaneRules {
        on_settled: Some(Arc::new(reports.clone())),
        owned_by: Some(OWNER),
        retention: Duration::ZERO,
        history: false,
        ..LaneRules::default()
    }
}

/// How the lane is worked unless configured otherwise: many at a time, since receivers are slow and one of them gets at
/// most a quarter; and one attempt a job, since the saga decides about the next.
pub fn lane_settings() -> LaneSettings {
    let mut settings = LaneSettings::new(LANE);
    (settings.concurrency, settings.batch) = (512, 256);
    settings.settle_wait = Duration::from_millis(10);
    settings.budgets.max_attempts = 1;
    settings
}

/// Webhooks on one outbox. Cheap to clone.
#[derive(Clone)]
pub struct Webhooks(Arc<Inner>);

struct Inner {
    outbox: Outbox,
    settings: Settings,
    keyring: Keyring,
    reports: Reports,
    known: Knowledge,
    standing: Standings,
    cabinet: Cabinet,
    cursors: Cursors,
    /// Where the look at gates goes on, and that at results.
    gates_seen: AtomicI64,
    results_after: AtomicI64,
    exchange: Exchange,
    guarded: Arc<dyn Resolve>,
    store_id: String,
    alerts: Option<Alerts>,
    /// The orchestrator has something to do.
    work: Arc<Notify>,
}

impl Webhooks {
    /// On an outbox whose lane [`LANE`] has [`lane_rules`] of the same reports.
    pub async fn new(
        outbox: Outbox,
        settings: Settings,
        keyring: Keyring,
        reports: Reports,
        alerts: Option<Alerts>,
    ) -> Result<Self> {
        let guarded = Guarded::new(settings.policy.clone(), &settings.dns).map_err(postrider::Error::invalid)?;
        let guarded: Arc<dyn Resolve> = Arc::new(guarded);
        let exchange = Exchange::new(guarded.clone(), settings.timeout.max(Duration::from_secs(30)))?;
        let store_id = outbox.store_id().await?;
        let outbox = outbox.owning(OWNER);
        let work = reports.work();
        Ok(Webhooks(Arc::new(Inner {
            outbox,
            settings,
            keyring,
            reports,
            known: Knowledge::default(),
            standing: Standings::default(),
            cabinet: Cabinet::default(),
            cursors: Cursors::default(),
            gates_seen: AtomicI64::new(0),
            results_after: AtomicI64::new(0),
            exchange,
            guarded,
            store_id,
            alerts,
            work,
        })))
    }

    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// The address guard, for others who want it.
    pub fn guard(&self) -> Arc<dyn Resolve> {
        self.0.guarded.clone()
    }

    pub fn outbox(&self) -> &Outbox {
        &self.0.outbox
    }

    /// Delivers jobs of the lane: one for every worker.
    pub fn courier(&self) -> WebhookCourier {
        WebhookCourier::new(self.clone())
    }

    /// `work` in a transaction of the store's own.
    async fn transact<R, F>(&self, mode: Mode, work: F) -> Result<R>
    where
        R: Send + 'static,
        F: for<'a> FnMut(&'a mut (dyn Tx + Send)) -> BoxFuture<'a, Result<R>> + Send + 'static,
    {
        let begun = Tick::now();
        let done = transact(&**self.0.outbox.store(), mode, work).await;
        if mode.writes() && done.as_ref().is_err_and(|error| error.kind != Kind::Invalid) {
            self.forget_since(begun);
        }
        done
    }

    /// There is something for workers and the orchestrator.
    fn ring(&self) {
        self.0.outbox.ring();
        self.0.work.notify_one();
    }
}
