//! The circuit breaker: after some failures in a row nobody waits for the memory service any more. Whoever tends it finds
//! out in the background when the service is back, so no caller ever pays for the question.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// What the breaker knows. Pure: it has no clock; when to probe is for those who tend it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub open: bool,
    /// Calls that failed in a row.
    pub failures: u32,
    /// How often it opened since a call last succeeded: a service that is back only for probes is asked less and less.
    pub strikes: u32,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Succeeded,
    Failed,
    /// A probe was answered as a call would be.
    Probed,
}

impl State {
    pub const CLOSED: State = State { open: false, failures: 0, strikes: 0 };

    pub fn next(self, event: Event, limit: u32) -> State {
        match event {
            Event::Succeeded => State::CLOSED,
            Event::Probed => State { open: false, failures: 0, ..self },
            Event::Failed if self.open => self,
            Event::Failed if self.failures + 1 < limit => State { failures: self.failures + 1, ..self },
            Event::Failed => State { open: true, failures: 0, strikes: self.strikes.saturating_add(1) },
        }
    }

    /// How long until the next probe: twice as long each time it opened in vain, up to sixteen times.
    pub fn probe_after(self, probe: Duration) -> Duration {
        probe * (1 << self.strikes.saturating_sub(1).min(4))
    }
}

/// Shared by all who call from this process.
#[derive(Clone)]
pub struct Breaker(Arc<Inner>);

struct Inner {
    limit: u32,
    state: Mutex<State>,
    changed: Notify,
}

/// Leave to call once. Only what the service did is told; who goes away before its answer has said nothing about it.
pub struct Permit(Breaker);

/// What an answer says of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    Well,
    Unwell,
    /// Neither: it refused what it was asked, or limits how often.
    Neither,
}

impl Breaker {
    pub fn new(limit: u32) -> Self {
        Breaker(Arc::new(Inner { limit: limit.max(1), state: Mutex::new(State::CLOSED), changed: Notify::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: Event) {
        let (before, next) = {
            let mut state = self.lock();
            let before = *state;
            *state = before.next(event, self.0.limit);
            (before, *state)
        };
        if before.open != next.open {
            match next.open {
                true => tracing::warn!("the memory service does not answer; memories are queued until it does"),
                false => tracing::info!("the memory service answers again"),
            }
            self.0.changed.notify_one();
        }
    }

    /// May a call be made now? `None`: it would be in vain.
    pub fn permit(&self) -> Option<Permit> {
        (!self.is_open()).then(|| Permit(self.clone()))
    }

    pub fn probed(&self) {
        self.tell(Event::Probed);
    }

    pub fn is_open(&self) -> bool {
        self.lock().open
    }

    pub fn state(&self) -> &'static str {
        if self.is_open() { "open" } else { "closed" }
    }

    pub fn probe_after(&self, probe: Duration) -> Duration {
        self.lock().probe_after(probe)
    }

    /// Something else has changed that whoever tends the service wants to know.
    pub(crate) fn stir(&self) {
        self.0.changed.notify_one();
    }

    /// Resolves when it opened or closed, or was [stirred](Breaker::stir).
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

impl Permit {
    pub fn tell(self, sign: Sign) {
        match sign {
            Sign::Well => self.0.tell(Event::Succeeded),
            Sign::Unwell => self.0.tell(Event::Failed),
            Sign::Neither => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_when_a_probe_is_answered() {
        let breaker = Breaker::new(3);
        let call = |sign: Sign| breaker.permit().expect("it is closed").tell(sign);
        call(Sign::Unwell);
        call(Sign::Unwell);
        call(Sign::Well);
        call(Sign::Unwell);
        call(Sign::Neither);
        call(Sign::Unwell);
        assert!(!breaker.is_open(), "a success in between starts the count anew");
        for _ in 0..5 {
            drop(breaker.permit());
        }
        assert!(!breaker.is_open(), "who goes away says nothing about the service");
        call(Sign::Neither);
        call(Sign::Unwell);
        assert!(breaker.is_open() && breaker.permit().is_none(), "a refusal in between takes no failure back");
        breaker.probed();
        assert!(!breaker.is_open());
    }

    #[test]
    fn who_is_back_only_for_probes_is_asked_less_and_less() {
        let second = Duration::from_secs(1);
        let mut state = State::CLOSED;
        let mut waits = Vec::new();
        for _ in 0..7 {
            state = state.next(Event::Failed, 1);
            assert!(state.open);
            waits.push(state.probe_after(second).as_secs());
            state = state.next(Event::Probed, 1);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 16, 16]);
        state = state.next(Event::Succeeded, 1).next(Event::Failed, 1);
        assert_eq!(state.probe_after(second), second, "a call that succeeded makes it good");
        assert_eq!(state.next(Event::Failed, 1), state, "what was begun before it opened changes nothing");
    }
}
