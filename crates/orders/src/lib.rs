//! Orders on Postrider's outbox: taken in once per key, sent to a broker, and recorded in a ledger that is the truth.
//!
//! An order is a ledger entry and an outbox message, written in one transaction and ended in one. The message is delivered
//! at least once; what the broker executes is kept to one by the order's key, by asking it, or by a person: an order that
//! may have gone out is never sent blindly again.

pub mod adapters;
pub mod canonical;
pub mod decide;
pub mod ledger;
pub mod request;
pub mod result;

mod book;
mod conflicts;
mod courier;
mod doctor;
mod intake;
mod janitor;
mod listing;
mod operate;

use std::sync::Arc;
use std::time::Duration;

use postrider::alerts::Alerts;
use postrider::backoff::Backoff;
use postrider::store::{Mode, transact};
use postrider::tx::{BoxFuture, Tx};
use postrider::worker::core::LaneSettings;
use postrider::{LaneRules, Migration, Outbox, Result};

use self::adapters::Adapter;
pub use self::book::Book;
pub use self::conflicts::Conflict;
pub use self::courier::OrderCourier;
use self::decide::Reason;
pub use self::decide::{Idempotency, Status};
pub use self::intake::{NewOrder, Placed, check_key};
pub use self::ledger::{By, Entry, LedgerEvent};
pub use self::listing::{Listed, Which};
pub use self::operate::{ByHand, Reopened};
pub use self::request::{FieldError, Invalid, Order};

/// The outbox lane of orders.
pub const LANE: &str = "orders";
/// Who owns it: the command generic verbs point to.
pub const OWNER: &str = "postrider orders";
/// How long an order is parked that waits for a person: as good as for ever.
pub(crate) const PARKED_FOR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// Kept until the ledger's entry goes.
const NEVER: Duration = Duration::from_secs(3650 * 24 * 3600);

/// The tables of this part: versions 301 to 399.
pub const MIGRATIONS: [Migration; 3] =
    postrider::migrations![301 "V301__orders", 302 "V302__expiry_by_key", 303 "V303__conflicts"];

#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long an order that has ended is remembered under its key.
    pub ledger_ttl: Duration,
    /// Workers that may die over an order before it is not tried again.
    pub max_crashes: u32,
    /// Of [`lane_settings`]: after so many outcomes a broker that answers nonsense is not asked again.
    pub max_attempts: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { ledger_ttl: Duration::from_secs(48 * 3600), max_crashes: 5, max_attempts: 6 }
    }
}

/// What the store must know of the lane. `book` is shared with [`Orders::new`].
pub fn lane_rules(book: &Book, idempotency: Idempotency) -> LaneRules {
    LaneRules {
        on_settled: Some(Arc::new(book.clone())),
        owned_by: Some(OWNER),
        retention: NEVER,
        send_begun: courier::says_begun(idempotency),
        ..LaneRules::default()
    }
}

/// How the lane is worked unless configured otherwise: 003's numbers.
pub fn lane_settings() -> LaneSettings {
    let mut settings = LaneSettings::new(LANE);
    (settings.concurrency, settings.batch) = (4, 32);
    (settings.lease, settings.poll) = (Duration::from_secs(120), Duration::from_millis(500));
    settings.budgets.max_attempts = 6;
    settings.budgets.backoff = Backoff::Table([5, 10, 20, 40, 80, 160].map(Duration::from_secs).to_vec());
    settings.budgets.keep_unresolved = true;
    // Whatever their instrument, they all go to one broker.
    settings.one_destination = true;
    settings.keyed = true;
    settings
}

/// The id of an order that came without one.
pub fn order_id(store_id: &str, outbox_id: i64) -> String {
    format!("ord-{}-{outbox_id}", store_id.chars().take(8).collect::<String>())
}

/// Orders on one outbox. Cheap to clone.
#[derive(Clone)]
pub struct Orders(Arc<Inner>);

struct Inner {
    outbox: Outbox,
    settings: Settings,
    book: Book,
    adapter: Arc<dyn Adapter>,
    store_id: String,
    alerts: Option<Alerts>,
    rounds: std::sync::Mutex<doctor::Rounds>,
}

impl Orders {
    /// On an outbox whose lane [`LANE`] has [`lane_rules`] of the same book.
    pub async fn new(
        outbox: Outbox,
        settings: Settings,
        book: Book,
        adapter: Arc<dyn Adapter>,
        alerts: Option<Alerts>,
    ) -> Result<Self> {
        let store_id = outbox.store_id().await?;
        let (ledger_ttl, rules_id) = (settings.ledger_ttl, store_id.clone());
        book.open(book::Rules { ledger_ttl, store_id: rules_id, alerts: alerts.clone() });
        let outbox = outbox.owning(OWNER);
        Ok(Orders(Arc::new(Inner { outbox, settings, book, adapter, store_id, alerts, rounds: Default::default() })))
    }

    /// Reads the broker's credentials again; answers whether they are others now.
    pub async fn renew_credentials(&self) -> bool {
        let renewed = self.0.adapter.renew().await;
        if renewed {
            self.wake_refused().await;
        }
        renewed
    }

    /// What was refused with the old credentials goes on with the new ones.
    async fn wake_refused(&self) {
        let woken = self.0.outbox.wake_waiting(LANE, Some(&[Reason::Unauthorized.as_str()])).await;
        if let Err(error) = woken {
            tracing::warn!(%error, "orders that wait for new credentials could not be woken; they go on by themselves");
        }
    }

    /// The id of an order, its own or ours.
    pub fn order_id(&self, order: &Order, outbox_id: i64) -> String {
        order.order_id.clone().unwrap_or_else(|| order_id(&self.0.store_id, outbox_id))
    }

    async fn transact<R, F>(&self, mode: Mode, work: F) -> Result<R>
    where
        R: Send + 'static,
        F: for<'a> FnMut(&'a mut (dyn Tx + Send)) -> BoxFuture<'a, Result<R>> + Send + 'static,
    {
        transact(&**self.0.outbox.store(), mode, work).await
    }
}
