//! A memory gateway on Postrider's outbox: writes to OpenMemory, and when it cannot, keeps the memory, says so, and brings
//! it there later; every write is audited before and after.
//!
//! A memory is never in neither place: it is in the service, or in the outbox, or the caller was told that it failed.

pub mod audit;
pub mod breaker;
pub mod gate;
pub mod note;
pub mod scm;
pub mod terms;
pub mod upstream;

mod answer;
mod candidates;
mod copies;
mod courier;
mod deep;
mod doctor;
mod governance;
mod index;
mod kv;
mod operate;
mod pace;
mod probing;
mod query;
mod ranking;
mod recognise;
mod reconcile;
mod report;
mod settling;
mod spaces;
mod store;
mod tend;
mod turns;
mod writing;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use postrider::alerts::Alerts;
use postrider::backoff::Backoff;
use postrider::paging::Page;
use postrider::store::{Mode, transact};
use postrider::tx::{BoxFuture, Tx};
use postrider::worker::core::LaneSettings;
use postrider::{LaneRules, Migration, Outbox, Result};

pub use self::answer::{Action, Stored, code};
pub use self::audit::{AuditFilter, AuditRow};
use self::breaker::Breaker;
pub use self::candidates::{Imported, NewCandidate};
pub use self::courier::MemoryCourier;
pub use self::deep::{Deep, Resent};
pub use self::note::{Governance, NewMemory, Note};
pub use self::query::{Answer, MOST_SPACES, Question, Recalled};
pub use self::reconcile::{Reconciled, Scope};
pub use self::report::{AuditStats, OutboxStats, Report};
pub use self::settling::Settling;
pub use self::spaces::Spaces;
pub use self::tend::Capability;
use self::tend::Health;
use self::turns::Turns;
use self::upstream::OpenMemory;
use self::writing::Listed;
pub use self::writing::usual_under_way;

/// The outbox lane of memories.
pub const LANE: &str = "memory";
/// Who owns it: the command generic verbs point to.
pub const OWNER: &str = "postrider memory";

/// The tables of this part: versions 401 to 499.
pub const MIGRATIONS: [Migration; 3] =
    postrider::migrations![401 "V401__memories", 402 "V402__scm", 403 "V403__merged_and_lost"];

#[derive(Clone, Debug)]
pub struct Settings {
    pub upstream: upstream::Settings,
    /// Where a memory goes that names no space.
    pub default_space: String,
    /// Longest memory, in bytes.
    pub max_bytes: usize,
    /// Failures in a row after which nobody waits for the service any more.
    pub breaker_failures: u32,
    /// How often it is then looked whether it is back.
    pub probe: Duration,
    /// For so long a write that got no answer in time may still be applied: [`usual_under_way`].
    pub under_way: Duration,
    /// It should have what we believe it has; a stand-in has not.
    pub recognise: bool,
}

/// What the store must know of the lane. `settling` is shared with [`Memories::new`].
pub fn lane_rules(settling: &Settling) -> LaneRules {
    LaneRules {
        on_settled: Some(Arc::new(settling.clone())),
        owned_by: Some(OWNER),
        dedup: true,
        audit: true,
        ..LaneRules::default()
    }
}

/// How the lane is worked unless configured otherwise: 000's numbers.
pub fn lane_settings() -> LaneSettings {
    let mut settings = LaneSettings::new(LANE);
    (settings.concurrency, settings.batch) = (10, 10);
    (settings.lease, settings.poll) = (Duration::from_secs(120), Duration::from_millis(500));
    settings.one_destination = true;
    settings.budgets.max_attempts = 5;
    let (base, max) = (Duration::from_secs(60), Duration::from_secs(3600));
    settings.budgets.backoff = Backoff::Exponential { base, max, jitter: 0.3 };
    settings
}

/// Memories on one outbox. Cheap to clone.
#[derive(Clone)]
pub struct Memories(Arc<Inner>);

struct Inner {
    outbox: Outbox,
    settings: Settings,
    upstream: OpenMemory,
    breaker: Breaker,
    alerts: Option<Alerts>,
    health: Mutex<Health>,
    /// Who asks whether it is the one we know does so alone.
    recognising: tokio::sync::Mutex<()>,
    listed: tokio::sync::Mutex<Listed>,
    turns: Arc<Turns>,
}

impl Memories {
    /// On an outbox whose lane [`LANE`] has [`lane_rules`] of the same settling.
    pub fn new(outbox: Outbox, settings: Settings, settling: &Settling, alerts: Option<Alerts>) -> Result<Self> {
        let upstream = OpenMemory::new(settings.upstream.clone())?;
        Ok(Self::with(upstream, outbox, settings, settling, alerts))
    }

    /// With a client of OpenMemory that is there already.
    pub fn with(
        upstream: OpenMemory,
        outbox: Outbox,
        settings: Settings,
        settling: &Settling,
        alerts: Option<Alerts>,
    ) -> Self {
        settling.open(alerts.clone());
        let breaker = Breaker::new(settings.breaker_failures);
        let outbox = outbox.owning(OWNER);
        let turns = Turns::new(settings.upstream.timeout, settings.under_way);
        let (health, recognising, listed) = Default::default();
        Memories(Arc::new(Inner { outbox, settings, upstream, breaker, alerts, health, recognising, listed, turns }))
    }

    /// Reads the key of OpenMemory again, from where it is kept.
    pub async fn renew_key(&self) {
        self.0.upstream.read_key_again().await;
    }

    /// Longest memory, in bytes.
    pub fn max_bytes(&self) -> usize {
        self.0.settings.max_bytes
    }

    pub fn default_space(&self) -> &str {
        &self.0.settings.default_space
    }

    async fn transact<R, F>(&self, mode: Mode, work: F) -> Result<R>
    where
        R: Send + 'static,
        F: for<'a> FnMut(&'a mut (dyn Tx + Send)) -> BoxFuture<'a, Result<R>> + Send + 'static,
    {
        transact(&**self.0.outbox.store(), mode, work).await
    }

    /// The audit, newest first.
    pub async fn audit(&self, filter: AuditFilter) -> Result<Page<AuditRow>> {
        self.transact(Mode::Look, move |tx| {
            let filter = filter.clone();
            Box::pin(async move { audit::list(tx, &filter).await })
        })
        .await
    }
}
