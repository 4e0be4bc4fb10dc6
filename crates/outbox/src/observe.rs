//! What a worker tells about itself while it works: for metrics, logs and traces.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::clock::{self, Tick};
use crate::outcome::FlushCode;
use crate::time::Timestamp;

/// The parts of a message's way that are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// One claim, of many messages as a rule.
    Claim,
    /// One delivery.
    Send,
    /// One settle, of many messages as a rule.
    Commit,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Claim => "claim",
            Phase::Send => "send",
            Phase::Commit => "commit",
        }
    }
}

/// An outcome that was offered to the database, and what became of it.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a> {
    pub lane: &'a str,
    pub outbox_id: i64,
    pub outcome: FlushCode,
    /// Outcomes so far, this one included.
    pub attempt: u32,
    /// Why it was not simply sent.
    pub reason_code: Option<&'a str>,
    /// How long the delivery took, where there was one.
    pub took: Option<Duration>,
}

/// The send within a delivery, from its first byte to the answer: a delivery may also read and write the database.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trip {
    pub began: Timestamp,
    pub took: Duration,
}

tokio::task_local! {
    static TRIP: Arc<Mutex<Option<Trip>>>;
}

/// What a courier says around the send itself, for whoever follows its delivery.
pub async fn sending<T>(send: impl Future<Output = T>) -> T {
    let Ok(trip) = TRIP.try_with(Arc::clone) else { return send.await };
    let (began, tick) = (clock::wall(), Tick::now());
    let answer = send.await;
    *trip.lock().unwrap_or_else(PoisonError::into_inner) = Some(Trip { began, took: Tick::now().since(tick) });
    answer
}

/// A delivery, and the last send within it, if there was any.
pub async fn followed<T>(delivery: impl Future<Output = T>) -> (T, Option<Trip>) {
    let trip: Arc<Mutex<Option<Trip>>> = Arc::default();
    let outcome = TRIP.scope(trip.clone(), delivery).await;
    let sent = *trip.lock().unwrap_or_else(PoisonError::into_inner);
    (outcome, sent)
}

/// How a lane stands in this process right now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Standing {
    /// Claimed and not yet settled.
    pub held: usize,
    /// Being delivered.
    pub in_flight: usize,
    /// Within this time what lies behind the mark is found: late commits, expired leases, requeued messages.
    pub walk_bound: Duration,
}

/// Hears what a worker does. Called from the worker's own task: be quick, and never wait.
pub trait Observer: Send + Sync {
    fn claimed(&self, _lane: &str, _messages: u64, _taken_over: u64) {}
    fn settled(&self, _told: &Told<'_>) {}
    /// Outcomes could not be recorded for now: the database did not answer in time, or failed.
    fn unrecorded(&self, _lane: &str, _trouble: FlushCode, _messages: u64) {}
    fn took(&self, _lane: &str, _phase: Phase, _time: Duration) {}
    /// About twice a second.
    fn standing(&self, _lane: &str, _standing: Standing) {}
}

/// Several listen.
impl Observer for Vec<std::sync::Arc<dyn Observer>> {
    fn claimed(&self, lane: &str, messages: u64, taken_over: u64) {
        self.iter().for_each(|one| one.claimed(lane, messages, taken_over));
    }
    fn settled(&self, told: &Told<'_>) {
        self.iter().for_each(|one| one.settled(told));
    }
    fn unrecorded(&self, lane: &str, trouble: FlushCode, messages: u64) {
        self.iter().for_each(|one| one.unrecorded(lane, trouble, messages));
    }
    fn took(&self, lane: &str, phase: Phase, time: Duration) {
        self.iter().for_each(|one| one.took(lane, phase, time));
    }
    fn standing(&self, lane: &str, standing: Standing) {
        self.iter().for_each(|one| one.standing(lane, standing));
    }
}

/// Nobody listens.
pub(crate) struct Silent;

impl Observer for Silent {}
