//! The circuit breaker: after some failures in a row nobody waits for the memory service any more. A probe in the
//! background finds out when it is back; then one write is tried, and its end decides.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// What the breaker knows. Pure: it has no clock; when to probe is for those who tend it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Calls go through; so many failed in a row.
    Closed { failures: u32 },
    /// None does.
    Open,
    /// A probe was answered: one call goes through.
    Trying { under_way: bool },
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Succeeded,
    Failed,
    /// The service's health was asked for and found.
    Probed,
    Asked,
    /// Who was allowed to call did not.
    Returned,
}

impl State {
    /// The next state, and whether the one who asked may call.
    pub fn next(self, event: Event, limit: u32) -> (State, bool) {
        use Event::{Asked, Failed, Probed, Returned, Succeeded};
        use State::{Closed, Open, Trying};
        match (self, event) {
            (Closed { .. }, Asked) => (self, true),
            (Open | Trying { under_way: true }, Asked) => (self, false),
            (Trying { under_way: false }, Asked) => (Trying { under_way: true }, true),
            // What was begun before the breaker opened tells as much as a trial.
            (_, Succeeded) => (Closed { failures: 0 }, false),
            (Closed { failures }, Failed) if failures + 1 < limit => (Closed { failures: failures + 1 }, false),
            (_, Failed) => (Open, false),
            (Open, Probed) => (Trying { under_way: false }, false),
            (Closed { .. } | Trying { .. }, Probed) => (self, false),
            (Trying { .. }, Returned) => (Trying { under_way: false }, false),
            (Closed { .. } | Open, Returned) => (self, false),
        }
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

/// Leave to call once; dropped without a word it counts as a failure.
pub struct Permit {
    breaker: Breaker,
    told: bool,
}

impl Breaker {
    pub fn new(limit: u32) -> Self {
        let state = Mutex::new(State::Closed { failures: 0 });
        Breaker(Arc::new(Inner { limit: limit.max(1), state, changed: Notify::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: Event) -> bool {
        let mut state = self.lock();
        let before = *state;
        let (next, may) = before.next(event, self.0.limit);
        *state = next;
        drop(state);
        let closed = |state: State| matches!(state, State::Closed { .. });
        if closed(before) && next == State::Open {
            tracing::warn!("the memory service does not answer; memories are queued until it does");
            self.0.changed.notify_one();
        }
        if !closed(before) && closed(next) {
            tracing::info!("the memory service answers again");
            self.0.changed.notify_one();
        }
        may
    }

    /// May a call be made now? `None`: it would be in vain.
    pub fn permit(&self) -> Option<Permit> {
        self.tell(Event::Asked).then(|| Permit { breaker: self.clone(), told: false })
    }

    pub fn probed(&self) {
        self.tell(Event::Probed);
    }

    pub fn is_closed(&self) -> bool {
        matches!(*self.lock(), State::Closed { .. })
    }

    pub fn state(&self) -> &'static str {
        match *self.lock() {
            State::Closed { .. } => "closed",
            State::Open => "open",
            State::Trying { .. } => "half_open",
        }
    }

    pub fn is_open(&self) -> bool {
        *self.lock() == State::Open
    }

    /// Resolves when it opened or closed.
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

impl Permit {
    pub fn succeeded(mut self) {
        self.told = true;
        self.breaker.tell(Event::Succeeded);
    }

    /// No call was made.
    pub fn unused(mut self) {
        self.told = true;
        self.breaker.tell(Event::Returned);
    }

    pub fn failed(self) {
        drop(self);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.told {
            self.breaker.tell(Event::Failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_after_one_good_trial() {
        let breaker = Breaker::new(3);
        let call = || breaker.permit().expect("it is closed");
        call().failed();
        call().failed();
        call().succeeded();
        call().failed();
        call().failed();
        assert!(breaker.is_closed(), "a success in between starts the count anew");
        call().failed();
        assert!(breaker.is_open() && breaker.permit().is_none());
        breaker.probed();
        call().unused();
        let trial = breaker.permit().expect("one may try");
        assert!(breaker.permit().is_none(), "and no other meanwhile");
        trial.failed();
        assert!(breaker.is_open());
        breaker.probed();
        call().succeeded();
        assert!(breaker.is_closed());
        drop(call());
        assert_eq!(*breaker.lock(), State::Closed { failures: 1 }, "a call that was given up is a failure");
    }

    #[test]
    fn every_state_hears_every_event() {
        let states = [
            State::Closed { failures: 0 },
            State::Closed { failures: 2 },
            State::Open,
            State::Trying { under_way: false },
            State::Trying { under_way: true },
        ];
        for state in states {
            assert_eq!(state.next(Event::Succeeded, 3).0, State::Closed { failures: 0 });
            assert!(!state.next(Event::Probed, 3).1, "a probe calls nobody");
            let (next, may) = state.next(Event::Asked, 3);
            assert!(!may || next != State::Open);
        }
        assert_eq!(State::Open.next(Event::Failed, 3).0, State::Open);
        assert_eq!(State::Closed { failures: 2 }.next(Event::Failed, 3).0, State::Open);
    }
}
