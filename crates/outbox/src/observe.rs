//! What a worker tells about itself while it works: for metrics, logs and traces.

use std::time::Duration;

use crate::outcome::FlushCode;

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
