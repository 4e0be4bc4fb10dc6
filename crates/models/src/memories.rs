//! A memory's two halves: two callers store the same text, a flush brings what was queued, and reconciliation ends what was
//! left behind, beside an OpenMemory that answers, fails, loses its answer, or applies a write a while after it was given up.
//! It takes every write for a new memory, so that whatever is written twice is there twice.

use stateright::{Model, Property};

/// A write that got no answer may be applied for so long.
const UNDER_WAY: u8 = 2;
/// A caller waits so long for an answer; one tick later its copy counts as left behind.
const TIMEOUT: u8 = 1;
const MARGIN: u8 = 1;
/// A flush that died is taken over after this.
const LEASE: u8 = 2;

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A write without an answer is made again at once.
    NoDoubt,
    /// When the doubt is over, nobody looks whether it is there.
    NoLookUp,
    /// The copy is told to be queued in one transaction, and its message written in another.
    QueuesInTwo,
    /// Whoever takes a message over from a flush that died writes it at once.
    TakesOverBlindly,
    /// A second caller writes while the first one's write is under way.
    WritesBeside,
    /// What a caller left behind is written at once.
    LeavesBehindBlindly,
    /// What a caller left behind is looked for by nobody.
    ForgetsLeftBehind,
}

/// The bounds, and what is left out.
#[derive(Clone, Copy, Debug)]
pub struct Halves {
    pub crashes: u8,
    pub broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Copy {
    None,
    Writing {
        by: usize,
        until: u8,
    },
    Stored,
    /// It waits in the outbox; an earlier write may be applied until then.
    Queued {
        doubt: Option<u8>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Message {
    None,
    Waiting { maybe_sent: bool },
    Leased { until: u8, maybe_sent: bool },
    Sent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Heard {
    Written,
    /// It was not done.
    Refused,
    /// There was no answer.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Caller {
    New,
    /// Its write is on its way since then.
    Calls {
        since: u8,
    },
    /// The second half is to be written.
    Ends(Heard),
    Told(Told),
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Told {
    Stored,
    Queued,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Flush {
    Idle,
    /// It has claimed the message; `crashed`: from somebody who died.
    Claimed {
        doubtful: bool,
    },
    Calls {
        since: u8,
    },
    Settles(Heard),
    /// It found it there.
    Found,
}

/// A write on its way to OpenMemory: by a caller, or by the flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct OnItsWay {
    by: usize,
    until: u8,
}

const CALLERS: usize = 2;
const FLUSH: usize = CALLERS;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: u8,
    copy: Copy,
    message: Message,
    callers: [Caller; CALLERS],
    flush: Flush,
    on_their_way: Vec<OnItsWay>,
    /// What OpenMemory has.
    written: u8,
    crashes: u8,
    /// Half of a queueing that is done in two.
    half_queued: bool,
    looked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Tick,
    /// The first half of a caller, and the request it leads to.
    Begins(usize),
    /// OpenMemory takes what is on its way, and answers, or does not.
    Takes {
        request: usize,
        answers: bool,
    },
    Refuses {
        request: usize,
    },
    /// It never arrives.
    Vanishes {
        request: usize,
    },
    TimesOut(usize),
    Ends(usize),
    Reconciles,
    Claims,
    Decides,
    Settles,
    Dies(usize),
    QueuesTheRest,
}

impl Halves {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn doubt(&self, state: &State) -> Option<u8> {
        (!self.is(Broken::NoDoubt)).then_some(state.now + UNDER_WAY)
    }

    fn queue(&self, state: &mut State, doubt: Option<u8>) {
        state.copy = Copy::Queued { doubt };
        if self.is(Broken::QueuesInTwo) {
            state.half_queued = true;
        } else if matches!(state.message, Message::None | Message::Sent) {
            state.message = Message::Waiting { maybe_sent: false };
        }
    }

    fn calls(state: &mut State, by: usize) {
        // As long as its connection is there, and then as long as OpenMemory may have it in hand.
        state.on_their_way.push(OnItsWay { by, until: state.now + UNDER_WAY });
        state.on_their_way.sort_unstable();
    }

    fn begin(&self, state: &mut State, n: usize) -> Option<()> {
        let overdue = |until: u8| until < state.now;
        state.callers[n] = match state.copy {
            Copy::None => {
                state.copy = Copy::Writing { by: n, until: state.now + TIMEOUT + MARGIN };
                Self::calls(state, n);
                Caller::Calls { since: state.now }
            }
            Copy::Writing { until, .. } if !overdue(until) => {
                if !self.is(Broken::WritesBeside) {
                    return None; // it waits
                }
                state.copy = Copy::Writing { by: n, until: state.now + TIMEOUT + MARGIN };
                Self::calls(state, n);
                Caller::Calls { since: state.now }
            }
            Copy::Writing { .. } => {
                let doubt = self.doubt(state).filter(|_| !self.is(Broken::LeavesBehindBlindly));
                self.queue(state, doubt);
                Caller::Told(Told::Queued)
            }
            Copy::Stored => Caller::Told(Told::Stored),
            Copy::Queued { .. } => Caller::Told(Told::Queued),
        };
        Some(())
    }

    fn heard(state: &mut State, by: usize, heard: Heard) {
        if by == FLUSH {
            if matches!(state.flush, Flush::Calls { .. }) {
                state.flush = Flush::Settles(heard);
            }
        } else if matches!(state.callers[by], Caller::Calls { .. }) {
            state.callers[by] = Caller::Ends(heard);
        }
    }

    fn end(&self, state: &mut State, n: usize, heard: Heard) {
        let ours = matches!(state.copy, Copy::Writing { by, .. } if by == n);
        state.callers[n] = Caller::Told(match heard {
            Heard::Written => {
                // Also where somebody thought us gone and queued it: the flush then finds it stored.
                state.copy = Copy::Stored;
                Told::Stored
            }
            Heard::Refused | Heard::Nothing if ours => {
                let doubt = if heard == Heard::Nothing { self.doubt(state) } else { None };
                self.queue(state, doubt);
                Told::Queued
            }
            _ if state.copy == Copy::Stored => Told::Stored,
            _ => Told::Queued,
        });
    }

    fn decide(&self, state: &mut State, doubtful: bool) {
        let Copy::Queued { doubt } = state.copy else {
            // Stored meanwhile.
            state.flush = Flush::Found;
            return;
        };
        let doubt = match doubt {
            None if doubtful && !self.is(Broken::TakesOverBlindly) => self.doubt(state),
            doubt => doubt,
        };
        state.copy = Copy::Queued { doubt };
        let Some(until) = doubt else {
            Self::calls(state, FLUSH);
            state.flush = Flush::Calls { since: state.now };
            return;
        };
        if state.written > 0 && !self.is(Broken::NoLookUp) {
            state.looked = true;
            state.flush = Flush::Found;
            return;
        }
        if state.now > until {
            state.copy = Copy::Queued { doubt: None };
            Self::calls(state, FLUSH);
            state.flush = Flush::Calls { since: state.now };
        } else {
            // Given back until then.
            state.message = Message::Waiting { maybe_sent: false };
            state.flush = Flush::Idle;
        }
    }

    fn settle(&self, state: &mut State, heard: Heard) {
        let leased = matches!(state.message, Message::Leased { .. });
        state.flush = Flush::Idle;
        match heard {
            Heard::Written => {
                state.copy = Copy::Stored;
                if leased {
                    state.message = Message::Sent;
                }
            }
            _ if state.copy == Copy::Stored => {}
            Heard::Refused | Heard::Nothing => {
                let doubt = if heard == Heard::Nothing { self.doubt(state) } else { None };
                state.copy = Copy::Queued { doubt };
            }
        }
        if leased && state.message != Message::Sent {
            state.message = Message::Waiting { maybe_sent: false };
        }
    }

    /// When nothing goes wrong any more: is it brought to where it was said to be, once?
    fn heals(&self, state: &State) -> bool {
        let mut state = state.clone();
        for n in 0..CALLERS {
            match state.callers[n] {
                Caller::Calls { .. } => Self::heard(&mut state, n, Heard::Nothing),
                Caller::New => state.callers[n] = Caller::Dead,
                _ => {}
            }
            if let Caller::Ends(heard) = state.callers[n] {
                self.end(&mut state, n, heard);
            }
        }
        state.flush = Flush::Idle;
        if let Message::Leased { .. } = state.message {
            state.message = Message::Waiting { maybe_sent: true };
        }
        // What is still on its way is lost now.
        state.on_their_way.clear();
        state.now += UNDER_WAY + TIMEOUT + MARGIN + LEASE + 1;
        self.reconcile(&mut state);
        for _ in 0..3 {
            let Message::Waiting { maybe_sent } = state.message else { break };
            state.message = Message::Leased { until: state.now + LEASE, maybe_sent };
            self.decide(&mut state, maybe_sent);
            match state.flush {
                Flush::Calls { .. } => {
                    state.on_their_way.clear();
                    state.written += 1;
                    self.settle(&mut state, Heard::Written);
                }
                Flush::Found => self.settle(&mut state, Heard::Written),
                _ => state.now += UNDER_WAY + 1,
            }
        }
        let promised = state.callers.iter().any(|caller| matches!(caller, Caller::Told(_)));
        let untouched = state.copy == Copy::None;
        untouched && !promised || state.copy == Copy::Stored && state.written >= 1
    }

    fn reconcile(&self, state: &mut State) -> bool {
        let overdue = matches!(state.copy, Copy::Writing { until, .. } if until < state.now);
        if !overdue || self.is(Broken::ForgetsLeftBehind) {
            return false;
        }
        let doubt = self.doubt(state).filter(|_| !self.is(Broken::LeavesBehindBlindly));
        self.queue(state, doubt);
        true
    }
}

impl Model for Halves {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            now: 0,
            copy: Copy::None,
            message: Message::None,
            callers: [Caller::New; CALLERS],
            flush: Flush::Idle,
            on_their_way: vec![],
            written: 0,
            crashes: self.crashes,
            half_queued: false,
            looked: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        steps.extend([Step::Tick, Step::Reconciles, Step::Claims, Step::Decides, Step::Settles, Step::QueuesTheRest]);
        for (n, caller) in state.callers.iter().enumerate() {
            match caller {
                Caller::New => steps.push(Step::Begins(n)),
                Caller::Calls { .. } => steps.push(Step::TimesOut(n)),
                Caller::Ends(_) => steps.push(Step::Ends(n)),
                _ => {}
            }
        }
        steps.push(Step::TimesOut(FLUSH));
        for request in 0..state.on_their_way.len() {
            let answers = |answers| Step::Takes { request, answers };
            steps.extend([answers(true), answers(false), Step::Refuses { request }, Step::Vanishes { request }]);
        }
        if state.crashes > 0 {
            steps.extend((0..=FLUSH).map(Step::Dies));
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Tick => {
                state.now += 1;
                // What has not arrived by then never will.
                if state.on_their_way.iter().any(|request| request.until < state.now) {
                    return None;
                }
            }
            Step::Begins(n) => self.begin(&mut state, n)?,
            Step::Takes { request, answers } => {
                let request = state.on_their_way.remove(request);
                state.written += 1;
                if answers {
                    Self::heard(&mut state, request.by, Heard::Written);
                }
            }
            Step::Refuses { request } => {
                let request = state.on_their_way.remove(request);
                Self::heard(&mut state, request.by, Heard::Refused);
            }
            Step::Vanishes { request } => drop(state.on_their_way.remove(request)),
            Step::TimesOut(n) => {
                let since = match (n, state.flush) {
                    (FLUSH, Flush::Calls { since }) => since,
                    (FLUSH, _) => return None,
                    (n, _) => match state.callers[n] {
                        Caller::Calls { since } => since,
                        _ => return None,
                    },
                };
                (state.now >= since + TIMEOUT).then_some(())?;
                Self::heard(&mut state, n, Heard::Nothing);
            }
            Step::Ends(n) => {
                let Caller::Ends(heard) = state.callers[n] else { return None };
                self.end(&mut state, n, heard);
            }
            Step::Reconciles => {
                if !self.reconcile(&mut state) {
                    return None;
                }
            }
            Step::Claims => {
                let (free, doubtful) = match state.message {
                    Message::Waiting { maybe_sent } => (true, maybe_sent),
                    Message::Leased { until, .. } => (until < state.now, true),
                    _ => (false, false),
                };
                (free && state.flush == Flush::Idle).then_some(())?;
                state.message = Message::Leased { until: state.now + LEASE, maybe_sent: doubtful };
                state.flush = Flush::Claimed { doubtful };
            }
            Step::Decides => {
                let Flush::Claimed { doubtful } = state.flush else { return None };
                // A worker looks at its lease before it sends.
                let held = matches!(state.message, Message::Leased { until, .. } if until >= state.now);
                if held {
                    self.decide(&mut state, doubtful);
                } else {
                    state.flush = Flush::Idle;
                }
            }
            Step::Settles => match state.flush {
                Flush::Settles(heard) => self.settle(&mut state, heard),
                Flush::Found => self.settle(&mut state, Heard::Written),
                _ => return None,
            },
            Step::QueuesTheRest => {
                (state.half_queued).then_some(())?;
                state.half_queued = false;
                state.message = Message::Waiting { maybe_sent: false };
            }
            Step::Dies(n) => {
                state.crashes -= 1;
                if n == FLUSH {
                    (state.flush != Flush::Idle).then_some(())?;
                    state.flush = Flush::Idle;
                } else {
                    matches!(state.callers[n], Caller::Calls { .. } | Caller::Ends(_)).then_some(())?;
                    state.callers[n] = Caller::Dead;
                }
                // Whoever was about to write the rest is gone with it.
                state.half_queued = false;
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("whoever is told *stored* can find it there", |_, state: &State| {
                !state.callers.contains(&Caller::Told(Told::Stored)) || state.written > 0
            }),
            Property::always("nothing is written twice", |_, state: &State| state.written <= 1),
            Property::always("what was promised is brought to its end", |model: &Halves, state: &State| {
                model.heals(state)
            }),
            Property::sometimes("stored at once", |_, state: &State| {
                state.callers == [Caller::Told(Told::Stored); CALLERS] && state.message == Message::None
            }),
            Property::sometimes("found when it was looked for", |_, state: &State| state.looked),
            Property::sometimes("written by the flush", |_, state: &State| {
                state.message == Message::Sent && state.written == 1 && !state.looked
            }),
            Property::sometimes("left behind, and queued by another", |_, state: &State| {
                state.callers.contains(&Caller::Dead) && state.callers.contains(&Caller::Told(Told::Queued))
            }),
            Property::sometimes("one is told queued, the other stored", |_, state: &State| {
                let has = |told: Told| state.callers.contains(&Caller::Told(told));
                has(Told::Stored) && has(Told::Queued)
            }),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.now <= 9 && state.on_their_way.len() <= 2
    }
}
