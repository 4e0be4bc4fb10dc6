//! Couriers carry one leased message to where it belongs and answer with an [`Outcome`].

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Effect, Error, Result};
use crate::lease::Lease;
use crate::message::Message;
use crate::outbox::Outbox;
use crate::outcome::{Outcome, code};

/// Delivers one message. It never retries by itself: that is what the outcome is for. No transaction is open meanwhile.
///
/// The future may be dropped before it ends (a drain that ran out of time); the message then counts as maybe sent.
#[async_trait]
pub trait Courier: Send + Sync + 'static {
    async fn deliver(&self, message: &Message) -> Outcome;

    /// What it answered for this message is recorded, or lost: it may forget what it kept of it for
    /// [`OnSettled`](crate::OnSettled).
    fn settled(&self, _id: i64) {}

    /// Can it deliver anything at all? Asked about every second; while it cannot, this worker leaves the lane to others.
    async fn ready(&self) -> bool {
        true
    }

    /// What it is called in logs and traces.
    fn name(&self) -> &str {
        "courier"
    }

    /// The same on lanes with [`send_begun`](crate::LaneRules::send_begun). A courier that may still decide not to send
    /// (its own limits, a look-up first) does so before it commits `begin`.
    async fn deliver_begun(&self, message: &Message, begin: &Begin) -> Outcome {
        match begin.commit().await {
            Ok(true) => self.deliver(message).await,
            // Nothing was sent, so nothing is counted; if the lease is lost, giving it back does nothing either.
            Ok(false) => Outcome::Defer { delay: Duration::ZERO, code: code::LEASE_LOST.into() },
            Err(_) => Outcome::Defer { delay: Duration::from_secs(1), code: code::STORE_UNAVAILABLE.into() },
        }
    }
}

/// The record that a delivery is about to begin, for destinations that can neither recognise a repeated request nor be
/// asked about an earlier one: what a dead worker had not begun may safely be sent again.
pub struct Begin {
    outbox: Outbox,
    owner: String,
    lease: Lease,
    begun: Arc<AtomicBool>,
}

impl Begin {
    /// For those who drive a courier themselves, as simulators do.
    #[doc(hidden)]
    pub fn new(outbox: Outbox, owner: String, lease: Lease) -> Self {
        Begin { outbox, owner, lease, begun: Arc::default() }
    }

    /// Commits it. `false`: the lease is lost, send nothing.
    pub async fn commit(&self) -> Result<bool> {
        let (outbox, owner, lease) = (self.outbox.clone(), self.owner.clone(), self.lease);
        // A task of its own: a delivery may be dropped half-way, a transaction may not.
        let commit = tokio::spawn(async move { outbox.begin(&owner, lease).await });
        let answer = commit.await.unwrap_or_else(|e| Err(Error::database(e.to_string()).unknown()));
        let unknown = answer.as_ref().is_err_and(|e| e.effect == Effect::Unknown);
        self.begun.fetch_or(unknown || matches!(answer, Ok(true)), Ordering::Relaxed);
        answer
    }

    /// Nothing was sent after all, and nothing before this delivery either: takes the record back. To be called before the
    /// message is deferred; an outcome that says so does it by itself.
    pub async fn take_back(&self) -> Result<bool> {
        let (outbox, owner, lease) = (self.outbox.clone(), self.owner.clone(), self.lease);
        let commit = tokio::spawn(async move { outbox.take_back_begin(&owner, lease).await });
        commit.await.unwrap_or_else(|e| Err(Error::database(e.to_string()).unknown()))
    }

    /// It was, or may have been.
    #[doc(hidden)]
    pub fn was_committed(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }
}

/// A courier from a closure.
///
/// ```
/// use postrider::{Outcome, courier};
/// let printer = courier(|message| async move {
///     println!("{}", String::from_utf8_lossy(&message.payload));
///     Outcome::sent()
/// });
/// ```
pub fn courier<F, Fut>(deliver: F) -> FnCourier<F>
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send,
{
    FnCourier(deliver)
}

/// See [`courier`].
pub struct FnCourier<F>(F);

#[async_trait]
impl<F, Fut> Courier for FnCourier<F>
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send,
{
    async fn deliver(&self, message: &Message) -> Outcome {
        (self.0)(message.clone()).await
    }
}
