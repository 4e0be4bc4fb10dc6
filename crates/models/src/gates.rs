//! Gates: deliveries of one subscription that are parked, admitted, resumed and swept by two orchestrators, with row locks
//! that are taken without waiting, reads of what is committed, and writes that others see at the commit.

use stateright::{Model, Property};

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A delivery is parked without the gate's lock, and the gate marked where it is not yet: as it once was.
    ParksWithoutLock,
    /// The gate of a subscription that is gone is deleted though somebody else has one of its deliveries in hand.
    DeletesGateBeside,
    /// Whether anything is left parked is looked for before what was found is locked.
    LooksBeforeLocking,
}

/// The bounds, and what is left out.
#[derive(Clone, Copy, Debug)]
pub struct Gates {
    /// What waits in vain is looked for.
    pub sweeps: bool,
    pub broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Saga {
    Due,
    Parked,
    Started,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Subscription {
    Active,
    Paused,
    Gone,
}

/// Who has a row locked: an orchestrator, or a stranger.
type Lock = Option<usize>;
const STRANGER: usize = 2;

/// A transaction of an orchestrator, by the step it has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Doing {
    Nothing,
    /// It has read the subscription, and locked what is due.
    Starting {
        seen: Subscription,
        sagas: [bool; SAGAS],
    },
    /// What it has written is seen at its commit.
    Started {
        to: [Option<Saga>; SAGAS],
        mark: bool,
    },
    /// It has the gate's lock.
    Admitting,
    Admitted {
        to: [Option<Saga>; SAGAS],
        marked: Option<bool>,
        delete: bool,
    },
    /// Of the broken variant that looks for the rest first.
    Emptied {
        empty: bool,
    },
    /// It has found a gate that knows nothing of what is parked there.
    Sweeping,
}

const SAGAS: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    subscription: Subscription,
    /// Whether something is parked there, as the gate says; none: there is no gate.
    gate: Option<bool>,
    gate_lock: Lock,
    sagas: [Saga; SAGAS],
    saga_locks: [Lock; SAGAS],
    orchestrators: [Doing; 2],
    /// Pauses, resumes and a deletion that may still come.
    hands: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Start(usize),
    Admit(usize),
    Sweep(usize),
    Goes(usize),
    Dies(usize),
    Pauses,
    Resumes,
    Deletes,
    /// Somebody's forgotten session, for a while.
    Locks(usize),
    Unlocks(usize),
}

impl Gates {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn begin_start(state: &mut State, n: usize) -> Option<()> {
        let mut sagas = [false; SAGAS];
        for (i, mine) in sagas.iter_mut().enumerate() {
            if state.sagas[i] == Saga::Due && state.saga_locks[i].is_none() {
                state.saga_locks[i] = Some(n);
                *mine = true;
            }
        }
        sagas.contains(&true).then_some(())?;
        state.orchestrators[n] = Doing::Starting { seen: state.subscription, sagas };
        Some(())
    }

    fn begin_admit(state: &mut State, n: usize) -> Option<()> {
        if state.gate != Some(true) || state.gate_lock.is_some() {
            return None;
        }
        state.gate_lock = Some(n);
        state.orchestrators[n] = Doing::Admitting;
        Some(())
    }

    fn begin_sweep(&self, state: &mut State, n: usize) -> Option<()> {
        let in_vain = state.sagas.contains(&Saga::Parked) && state.gate != Some(true);
        (self.sweeps && in_vain).then_some(())?;
        state.orchestrators[n] = Doing::Sweeping;
        Some(())
    }

    /// One step further in what it does.
    fn go(&self, state: &mut State, n: usize) -> Option<()> {
        match state.orchestrators[n] {
            Doing::Nothing => return None,
            Doing::Starting { seen, sagas } => {
                let mut to = [None; SAGAS];
                let mut mark = false;
                let parks = seen == Subscription::Paused;
                let locked = state.gate.is_some() && state.gate_lock.is_none();
                for (i, _) in sagas.iter().enumerate().filter(|(_, mine)| **mine) {
                    to[i] = match seen {
                        Subscription::Active => Some(Saga::Started),
                        Subscription::Gone => Some(Saga::Dead),
                        // Under the gate's lock, or not now.
                        Subscription::Paused if locked || self.is(Broken::ParksWithoutLock) => Some(Saga::Parked),
                        Subscription::Paused => None,
                    };
                }
                if parks && self.is(Broken::ParksWithoutLock) {
                    // `UPDATE … WHERE parked = 0` waits for a lock only where there is something to change.
                    if state.gate == Some(false) {
                        if state.gate_lock.is_some() {
                            return None;
                        }
                        state.gate_lock = Some(n);
                        mark = true;
                    }
                } else if parks && locked {
                    state.gate_lock = Some(n);
                    mark = true;
                }
                state.orchestrators[n] = Doing::Started { to, mark };
            }
            Doing::Started { to, mark } => {
                if mark {
                    state.gate = Some(true);
                }
                Self::commit(state, n, to);
            }
            Doing::Admitting if self.is(Broken::LooksBeforeLocking) => {
                let empty = !state.sagas.contains(&Saga::Parked);
                if empty {
                    // Its lock is as good as none: it was looked before.
                    state.gate_lock = None;
                }
                state.orchestrators[n] = Doing::Emptied { empty };
            }
            Doing::Emptied { empty } => {
                let to = if empty { [None; SAGAS] } else { Self::take_parked(state, n, Saga::Started) };
                let marked = if empty { Some(false) } else { None };
                state.orchestrators[n] = Doing::Admitted { to, marked, delete: false };
            }
            Doing::Admitting => match state.subscription {
                Subscription::Paused => Self::commit(state, n, [None; SAGAS]),
                Subscription::Active => {
                    let to = Self::take_parked(state, n, Saga::Started);
                    let left = (0..SAGAS).any(|i| state.sagas[i] == Saga::Parked && to[i].is_none());
                    state.orchestrators[n] = Doing::Admitted { to, marked: (!left).then_some(false), delete: false };
                }
                Subscription::Gone => {
                    let mut to = [None; SAGAS];
                    for (i, to) in to.iter_mut().enumerate() {
                        if matches!(state.sagas[i], Saga::Parked | Saga::Due) && state.saga_locks[i].is_none() {
                            state.saga_locks[i] = Some(n);
                            *to = Some(Saga::Dead);
                        }
                    }
                    let buried = to.iter().any(Option::is_some);
                    let waits = state.sagas.iter().any(|saga| matches!(saga, Saga::Parked | Saga::Due));
                    let delete = !buried && (!waits || self.is(Broken::DeletesGateBeside));
                    state.orchestrators[n] = Doing::Admitted { to, marked: None, delete };
                }
            },
            Doing::Admitted { to, marked, delete } => {
                if delete {
                    state.gate = None;
                } else if let (Some(marked), Some(_)) = (marked, state.gate) {
                    state.gate = Some(marked);
                }
                Self::commit(state, n, to);
            }
            Doing::Sweeping => {
                // A gate that somebody else has locked is left to the next look.
                if state.gate_lock.is_none() {
                    state.gate = Some(true);
                }
                Self::commit(state, n, [None; SAGAS]);
            }
        }
        Some(())
    }

    fn take_parked(state: &mut State, n: usize, becomes: Saga) -> [Option<Saga>; SAGAS] {
        let mut to = [None; SAGAS];
        for (i, to) in to.iter_mut().enumerate() {
            if state.sagas[i] == Saga::Parked && state.saga_locks[i].is_none() {
                state.saga_locks[i] = Some(n);
                *to = Some(becomes);
            }
        }
        to
    }

    fn commit(state: &mut State, n: usize, to: [Option<Saga>; SAGAS]) {
        for (saga, to) in state.sagas.iter_mut().zip(to) {
            *saga = to.unwrap_or(*saga);
        }
        Self::end(state, n);
    }

    /// Its transaction is over, committed or not.
    fn end(state: &mut State, n: usize) {
        state.saga_locks.iter_mut().filter(|lock| **lock == Some(n)).for_each(|lock| *lock = None);
        if state.gate_lock == Some(n) {
            state.gate_lock = None;
        }
        state.orchestrators[n] = Doing::Nothing;
    }

    /// Once whatever is under way has ended and somebody resumes it: does one orchestrator bring everything to its end?
    fn heals(&self, state: &State) -> bool {
        let mut state = state.clone();
        state.saga_locks.iter_mut().filter(|lock| **lock == Some(STRANGER)).for_each(|lock| *lock = None);
        for n in 0..2 {
            while state.orchestrators[n] != Doing::Nothing && self.go(&mut state, n).is_some() {}
            Self::end(&mut state, n);
        }
        if state.subscription == Subscription::Paused {
            Self::resume(&mut state);
        }
        for _ in 0..4 {
            for begin in [0, 1, 2] {
                let begun = match begin {
                    0 => self.begin_sweep(&mut state, 0),
                    1 => Self::begin_start(&mut state, 0),
                    _ => Self::begin_admit(&mut state, 0),
                };
                while begun.is_some() && state.orchestrators[0] != Doing::Nothing {
                    if self.go(&mut state, 0).is_none() {
                        return false;
                    }
                }
            }
        }
        state.sagas.iter().all(|saga| matches!(saga, Saga::Started | Saga::Dead))
    }

    fn resume(state: &mut State) {
        state.subscription = Subscription::Active;
        state.gate = state.gate.map(|_| true);
    }
}

impl Model for Gates {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let state = |subscription| State {
            subscription,
            gate: Some(false),
            gate_lock: None,
            sagas: [Saga::Due; SAGAS],
            saga_locks: [None; SAGAS],
            orchestrators: [Doing::Nothing; 2],
            hands: 3,
        };
        vec![state(Subscription::Active), state(Subscription::Paused)]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (n, doing) in state.orchestrators.iter().enumerate() {
            match doing {
                Doing::Nothing => steps.extend([Step::Start(n), Step::Admit(n), Step::Sweep(n)]),
                _ => steps.extend([Step::Goes(n), Step::Dies(n)]),
            }
        }
        for (i, lock) in state.saga_locks.iter().enumerate() {
            match lock {
                None => steps.push(Step::Locks(i)),
                Some(STRANGER) => steps.push(Step::Unlocks(i)),
                Some(_) => {}
            }
        }
        if state.hands > 0 {
            steps.extend([Step::Pauses, Step::Resumes, Step::Deletes]);
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Start(n) => Self::begin_start(&mut state, n)?,
            Step::Admit(n) => Self::begin_admit(&mut state, n)?,
            Step::Sweep(n) => self.begin_sweep(&mut state, n)?,
            Step::Goes(n) => self.go(&mut state, n)?,
            // What was not committed has not been.
            Step::Dies(n) => Self::end(&mut state, n),
            Step::Locks(i) => state.saga_locks[i] = Some(STRANGER),
            Step::Unlocks(i) => state.saga_locks[i] = None,
            // Whoever changes a subscription waits for its gate: it is not locked for long.
            Step::Pauses | Step::Resumes | Step::Deletes if state.gate_lock.is_some() => return None,
            Step::Pauses if state.subscription == Subscription::Active => {
                state.subscription = Subscription::Paused;
                state.hands -= 1;
            }
            Step::Resumes if state.subscription == Subscription::Paused => {
                Self::resume(&mut state);
                state.hands -= 1;
            }
            Step::Deletes if state.subscription != Subscription::Gone => {
                state.subscription = Subscription::Gone;
                state.gate = state.gate.map(|_| true);
                state.hands -= 1;
            }
            _ => return None,
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("what is parked is found again", |model: &Gates, state: &State| model.heals(state)),
            Property::always("a gate is deleted only when its subscription is gone", |_, state: &State| {
                state.gate.is_some() || state.subscription == Subscription::Gone
            }),
            Property::sometimes("parked", |_, state: &State| state.sagas == [Saga::Parked; SAGAS]),
            Property::sometimes("parked by one while the other admits", |_, state: &State| {
                state.orchestrators.iter().any(|d| matches!(d, Doing::Admitting | Doing::Admitted { .. }))
                    && state.orchestrators.iter().any(|d| matches!(d, Doing::Starting { .. }))
            }),
            Property::sometimes("all started", |_, state: &State| state.sagas == [Saga::Started; SAGAS]),
            Property::sometimes("all buried, and their gate with them", |_, state: &State| {
                state.sagas == [Saga::Dead; SAGAS] && state.gate.is_none()
            }),
        ]
    }
}
