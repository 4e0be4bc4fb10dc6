//! Claim, deliver, renew, settle: one message, two workers, a database that is reached by requests which are lost, whose
//! answers are lost, or which arrive after they were given up. A worker may stand still for any time between two steps, or
//! die. Decisions about a row are those of [`postrider::lease::Hold`].

use postrider::Timestamp;
use postrider::lease::Hold;
use stateright::{Model, Property};

/// How long a lease lasts, in the model's ticks; a delivery begins only with a third of it left.
const LEASE: i64 = 3;
const THIRD: i64 = 1;

/// A rule of the protocol that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A settle takes effect whatever its token.
    NoFence,
    /// A claim takes what others hold.
    IgnoresLeases,
    /// A claim keeps the token.
    SameToken,
    /// A lost claim is looked for among what is being delivered, too.
    AdoptsInFlight,
    /// The end of a lease is counted from when the answer was heard.
    CountsFromAnswer,
    /// A delivery begins whatever is left of its lease.
    NoLookBeforeSending,
    /// A lease that ran out can be renewed, whoever has the row.
    RenewsAnything,
    /// A settle without an answer is asked again as if it were the first.
    ForgetsDoubt,
}

/// The bounds, and what is broken.
#[derive(Clone, Copy, Debug)]
pub struct Leases {
    pub until: i64,
    /// Requests and answers that may be lost, crashes that may happen.
    pub losses: u8,
    pub crashes: u8,
    pub broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    Sent,
    Retry,
}

/// What was recorded under a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    token: i64,
    owner: u8,
    verdict: Verdict,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Row {
    live: bool,
    token: i64,
    locked_by: Option<u8>,
    lease_until: Option<i64>,
    records: Vec<Record>,
}

impl Row {
    fn hold(&self) -> Hold {
        Hold {
            token: self.token,
            locked_by: self.locked_by.map(name),
            lease_until: self.lease_until.map(Timestamp::from_micros),
            crashes: 0,
        }
    }
}

/// A process: its place and how often it was started anew.
fn name(owner: u8) -> String {
    format!("w{owner}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Work {
    Idle,
    /// It believes in its lease until then.
    Ready {
        token: i64,
        until: i64,
    },
    Delivering {
        token: i64,
        until: i64,
    },
    /// Delivered; a settle may have been asked for, and gone unanswered. Meanwhile the message may have been claimed anew.
    Outcome {
        token: i64,
        verdict: Verdict,
        again: bool,
        newer: Option<i64>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ask {
    Claim,
    Renew { token: i64 },
    Settle { token: i64, verdict: Verdict, again: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Answer {
    Claimed(Option<i64>),
    Renewed(bool),
    Settled(Told),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Told {
    Applied,
    LeaseLost,
}

/// On its way to the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Request {
    owner: u8,
    ask: Ask,
    /// When it was made. One that was given up may still arrive.
    issued: i64,
    /// What its worker holds then, which is not to be adopted.
    holds: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Worker {
    owner: u8,
    work: Work,
    /// What it waits for.
    asked: Option<(Ask, i64)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: i64,
    row: Row,
    workers: [Worker; 2],
    requests: Vec<Request>,
    answers: Vec<(u8, Ask, i64, Answer)>,
    losses: u8,
    crashes: u8,
    /// The receiver's own book: the token of each delivery.
    begun: Vec<i64>,
    told: Vec<(i64, u8, Told)>,
    /// What no state shows any more.
    taken_alive: bool,
    begun_late: bool,
    begun_of_lost: bool,
    seen: Seen,
}

/// What happened on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    takeover: bool,
    adoption: bool,
    late_ack: bool,
    proven: bool,
    lost: bool,
    refused_renewal: bool,
    renewed_what_is_not_held: bool,
    late_claim: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Tick,
    Asks(usize, Ask),
    /// The database carries out a request, and its answer goes out or is lost.
    Carries {
        request: usize,
        answered: bool,
    },
    Loses {
        request: usize,
    },
    Hears {
        answer: usize,
    },
    /// The deadline is over, or the connection gone.
    GivesUp(usize),
    Begins(usize),
    Ends(usize, Verdict),
    Dies(usize),
}

impl State {
    /// Does somebody still wait for the answer?
    fn waits(&self, request: &Request) -> bool {
        self.workers.iter().any(|w| w.owner == request.owner && w.asked == Some((request.ask, request.issued)))
    }
}

impl Leases {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn carry_out(&self, state: &mut State, request: &Request) -> Answer {
        let now = Timestamp::from_micros(state.now);
        let (me, hold) = (name(request.owner), state.row.hold());
        match request.ask {
            Ask::Claim => {
                // Of its own, what it does not work on was claimed unheard.
                let in_flight = request.holds.is_some() && !self.is(Broken::AdoptsInFlight);
                let own = hold.locked_by.as_ref() == Some(&me) && !in_flight;
                let free = hold.claimable(now, now) || self.is(Broken::IgnoresLeases);
                if !state.row.live || !(free || own) {
                    return Answer::Claimed(None);
                }
                if hold.lease_until.is_some_and(|until| until >= now) {
                    let at_work = |w: &Worker| {
                        let held = match w.work {
                            Work::Delivering { token, .. } | Work::Outcome { token, .. } => Some(token),
                            _ => None,
                        };
                        Some(w.owner) == state.row.locked_by && held == Some(state.row.token)
                    };
                    // One's own claim may be carried out long after it was given up, when the next one has taken the message:
                    // then it goes out again, as docs/protocol.md tells.
                    let late = own && request.holds.is_none() && !state.waits(request);
                    state.taken_alive |= state.workers.iter().any(at_work) && !late;
                    state.seen.late_claim |= late;
                    state.seen.adoption |= own && !late;
                }
                state.seen.takeover |= hold.takeover(&me);
                state.row.token = if self.is(Broken::SameToken) { hold.token.max(1) } else { hold.mint() };
                state.row.locked_by = Some(request.owner);
                state.row.lease_until = Some(state.now + LEASE);
                Answer::Claimed(Some(state.row.token))
            }
            Ask::Renew { token } => {
                let may = hold.renewable(token, &me, now) || (self.is(Broken::RenewsAnything) && state.row.live);
                if may && state.row.live {
                    state.row.lease_until = Some(state.now + LEASE);
                }
                state.seen.refused_renewal |= !may;
                state.seen.renewed_what_is_not_held |=
                    may && (hold.token != token || state.row.locked_by != Some(request.owner));
                Answer::Renewed(may)
            }
            Ask::Settle { token, verdict, again } => {
                let fenced = state.row.live && (hold.accepts(token, &me) || self.is(Broken::NoFence));
                if fenced {
                    state.seen.late_ack |= hold.lease_until.is_some_and(|until| until < now);
                    state.row.records.push(Record { token, owner: request.owner, verdict });
                    state.row.live = verdict == Verdict::Retry;
                    (state.row.locked_by, state.row.lease_until) = (None, None);
                    return Answer::Settled(Told::Applied);
                }
                // Asked again: the record is the proof.
                let proven =
                    again && !self.is(Broken::ForgetsDoubt) && state.row.records.iter().any(|r| r.token == token);
                state.seen.proven |= proven;
                state.seen.lost |= !proven;
                Answer::Settled(if proven { Told::Applied } else { Told::LeaseLost })
            }
        }
    }

    fn hear(&self, state: &mut State, who: usize, ask: Ask, issued: i64, answer: Answer) {
        let now = state.now;
        let worker = &mut state.workers[who];
        worker.asked = None;
        match (ask, answer, worker.work) {
            (Ask::Claim, Answer::Claimed(token), _) => {
                let from = if self.is(Broken::CountsFromAnswer) { now } else { issued };
                let until = from + LEASE;
                // What it works on takes the new token, and is not delivered again.
                worker.work = match (token, worker.work) {
                    (None, work) => work,
                    (Some(token), Work::Idle | Work::Ready { .. }) => Work::Ready { token, until },
                    (Some(token), Work::Delivering { .. }) if self.is(Broken::AdoptsInFlight) => {
                        Work::Ready { token, until }
                    }
                    (Some(token), Work::Delivering { .. }) => Work::Delivering { token, until },
                    // What may be recorded already is asked for under the token it was recorded with.
                    (Some(newer), Work::Outcome { token, verdict, again: true, .. }) => {
                        Work::Outcome { token, verdict, again: true, newer: Some(newer) }
                    }
                    (Some(token), Work::Outcome { verdict, .. }) => {
                        Work::Outcome { token, verdict, again: false, newer: None }
                    }
                };
            }
            (Ask::Renew { .. }, Answer::Renewed(held), Work::Delivering { token, until }) => {
                let until = if held { issued + LEASE } else { until };
                worker.work = Work::Delivering { token, until };
            }
            (
                Ask::Settle { .. },
                Answer::Settled(Told::LeaseLost),
                Work::Outcome { verdict, newer: Some(token), .. },
            ) => {
                worker.work = Work::Outcome { token, verdict, again: false, newer: None };
            }
            (Ask::Settle { token, .. }, Answer::Settled(told), _) => {
                let owner = worker.owner;
                worker.work = Work::Idle;
                state.told.push((token, owner, told));
            }
            _ => {}
        }
    }
}

impl Model for Leases {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let worker = |owner| Worker { owner, work: Work::Idle, asked: None };
        let row = Row { live: true, token: 0, locked_by: None, lease_until: None, records: vec![] };
        vec![State {
            now: 0,
            row,
            workers: [worker(0), worker(1)],
            requests: vec![],
            answers: vec![],
            losses: self.losses,
            crashes: self.crashes,
            begun: vec![],
            told: vec![],
            taken_alive: false,
            begun_late: false,
            begun_of_lost: false,
            seen: Seen::default(),
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        steps.push(Step::Tick);
        for (n, worker) in state.workers.iter().enumerate() {
            match (worker.asked, worker.work) {
                // Not before its deadline.
                (Some((_, issued)), _) if issued < state.now => steps.push(Step::GivesUp(n)),
                (Some(_), _) => {}
                (None, Work::Idle) => steps.push(Step::Asks(n, Ask::Claim)),
                (None, Work::Ready { .. }) => steps.push(Step::Begins(n)),
                (None, Work::Delivering { token, until }) if until - state.now <= LEASE - THIRD => {
                    steps.push(Step::Asks(n, Ask::Renew { token }));
                }
                (None, Work::Delivering { .. }) => {}
                (None, Work::Outcome { token, verdict, again, .. }) => {
                    steps.push(Step::Asks(n, Ask::Settle { token, verdict, again }));
                }
            }
            if matches!(worker.work, Work::Delivering { .. }) {
                steps.push(Step::Ends(n, Verdict::Sent));
                if state.row.records.is_empty() {
                    steps.push(Step::Ends(n, Verdict::Retry));
                }
                // Another claim goes out beside a delivery, for what else is due.
                if worker.asked.is_none() {
                    steps.push(Step::Asks(n, Ask::Claim));
                }
            }
            if state.crashes > 0 && (worker.work != Work::Idle || worker.asked.is_some()) {
                steps.push(Step::Dies(n));
            }
        }
        for request in 0..state.requests.len() {
            steps.push(Step::Carries { request, answered: true });
            if state.losses > 0 {
                steps.extend([Step::Carries { request, answered: false }, Step::Loses { request }]);
            }
        }
        steps.extend((0..state.answers.len()).map(|answer| Step::Hears { answer }));
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Tick => state.now += 1,
            Step::Asks(n, ask) => {
                let (owner, issued) = (state.workers[n].owner, state.now);
                let holds = match state.workers[n].work {
                    Work::Idle => None,
                    Work::Ready { token, .. } | Work::Delivering { token, .. } | Work::Outcome { token, .. } => {
                        Some(token)
                    }
                };
                state.workers[n].asked = Some((ask, issued));
                state.requests.push(Request { owner, ask, issued, holds });
                state.requests.sort_unstable();
            }
            Step::Carries { request, answered } => {
                let request = state.requests.remove(request);
                let answer = self.carry_out(&mut state, &request);
                state.losses -= u8::from(!answered);
                if answered {
                    state.answers.push((request.owner, request.ask, request.issued, answer));
                    state.answers.sort_unstable();
                }
            }
            Step::Loses { request } => {
                state.requests.remove(request);
                state.losses -= 1;
            }
            Step::Hears { answer } => {
                let (owner, ask, issued, answer) = state.answers.remove(answer);
                let waits = |w: &Worker| w.owner == owner && w.asked == Some((ask, issued));
                // Nobody waits for it any more: its connection was closed.
                let who = state.workers.iter().position(waits)?;
                self.hear(&mut state, who, ask, issued, answer);
            }
            Step::GivesUp(n) => {
                let worker = &mut state.workers[n];
                // Of a claim and a renewal nothing is kept in mind: the next ones find what they did.
                if let Some((Ask::Settle { token, verdict, .. }, _)) = worker.asked.take() {
                    let newer = match worker.work {
                        Work::Outcome { newer, .. } => newer,
                        _ => None,
                    };
                    worker.work = Work::Outcome { token, verdict, again: true, newer };
                }
            }
            Step::Begins(n) => {
                let Work::Ready { token, until } = state.workers[n].work else { return None };
                let enough = until - state.now >= THIRD || self.is(Broken::NoLookBeforeSending);
                if !enough {
                    state.workers[n].work = Work::Idle;
                    return Some(state);
                }
                let owner = state.workers[n].owner;
                state.workers[n].work = Work::Delivering { token, until };
                let row = &state.row;
                let held = row.live && (row.token == token || state.seen.late_claim) && row.locked_by == Some(owner);
                state.begun_of_lost |= !held;
                state.begun_late |= held && row.lease_until.is_some_and(|until| until < state.now);
                state.begun.push(token);
            }
            Step::Ends(n, verdict) => {
                let Work::Delivering { token, .. } = state.workers[n].work else { return None };
                let worker = &mut state.workers[n];
                worker.work = Work::Outcome { token, verdict, again: false, newer: None };
                if worker.asked.is_some_and(|(ask, _)| ask != Ask::Claim) {
                    worker.asked = None;
                }
            }
            Step::Dies(n) => {
                state.crashes -= 1;
                let owner = state.workers[n].owner + 2;
                state.workers[n] = Worker { owner, work: Work::Idle, asked: None };
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn token_of(worker: &Worker) -> Option<i64> {
            match worker.work {
                Work::Idle => None,
                Work::Ready { token, .. } | Work::Delivering { token, .. } | Work::Outcome { token, .. } => Some(token),
            }
        }
        vec![
            Property::always("P2: no two hold one token", |_, state: &State| {
                let held = state.workers.each_ref().map(token_of);
                held[0].is_none() || held[0] != held[1]
            }),
            Property::always("P3: an outcome is recorded under the token of its time, once", |_, state: &State| {
                let tokens: Vec<i64> = state.row.records.iter().map(|record| record.token).collect();
                tokens.windows(2).all(|pair| pair[0] < pair[1])
                    && state.row.records.iter().rev().skip(1).all(|record| record.verdict == Verdict::Retry)
            }),
            Property::always("P3: whoever is told is told the truth", |_, state: &State| {
                state.told.iter().all(|(token, owner, told)| {
                    let recorded = state.row.records.iter().any(|r| r.token == *token && r.owner == *owner);
                    recorded == (*told == Told::Applied)
                })
            }),
            Property::always("one delivery for each claim", |_, state: &State| {
                let mut begun = state.begun.clone();
                begun.sort_unstable();
                begun.windows(2).all(|pair| pair[0] != pair[1])
            }),
            Property::always("what is being delivered under a running lease is taken by nobody", |_, state: &State| {
                !state.taken_alive
            }),
            Property::always("a delivery begins only while its lease runs", |_, state: &State| !state.begun_late),
            Property::always("a delivery begins only for whoever holds the message", |_, state: &State| {
                !state.begun_of_lost
            }),
            Property::always("a renewal is of what its worker holds", |_, state: &State| {
                !state.seen.renewed_what_is_not_held
            }),
            Property::always("P6: what was sent stays sent", |_, state: &State| {
                state.row.live == state.row.records.iter().all(|record| record.verdict == Verdict::Retry)
            }),
            Property::sometimes("somebody takes over", |_, state: &State| state.seen.takeover),
            Property::sometimes("a claim without an answer is adopted", |_, state: &State| state.seen.adoption),
            Property::sometimes("P4: a late ack counts", |_, state: &State| state.seen.late_ack),
            Property::sometimes("a settle is proven", |_, state: &State| state.seen.proven),
            Property::sometimes("a lease is lost, and told", |_, state: &State| state.seen.lost),
            Property::sometimes("a late renewal is refused", |_, state: &State| state.seen.refused_renewal),
            Property::sometimes("sent at the second try", |_, state: &State| {
                !state.row.live && state.row.records.len() == 2
            }),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.now <= self.until && state.row.token <= 3 && state.requests.len() <= 2 && state.answers.len() <= 1
    }
}
