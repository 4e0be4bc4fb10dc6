//! What a run has left, and whether that can be: an independent judge of histories. It knows what producers were told,
//! what receivers wrote down in books of their own, and the rows of the database afterwards; of the engine it asks nothing.
//! Which test decides which invariant stands in `docs/guarantees.md`.

mod rows;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

pub use rows::{Deliveries, Rows};

use crate::receiver::Request;

/// What a producer was told about one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// It is there, under this id.
    Accepted(i64),
    /// Certainly not there.
    Refused,
    Unknown,
}

/// One enqueue, and its answer.
#[derive(Clone, Debug)]
pub struct Enqueued {
    pub key: Option<String>,
    pub body: Vec<u8>,
    pub told: Told,
}

impl Enqueued {
    pub fn accepted(id: i64, body: impl Into<Vec<u8>>) -> Enqueued {
        Enqueued { key: None, body: body.into(), told: Told::Accepted(id) }
    }
}

/// A message as the database has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub id: i64,
    pub state: State,
    pub lease_token: i64,
    pub attempts: i64,
    pub crashes: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Live,
    Sent,
    Dead,
}

/// A row of a message's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub id: i64,
    pub lease_token: i64,
    pub what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// An outcome that was no success.
    Failed,
    Takeover,
    /// Given back by a process that was told to stop, in the middle of a request. That counts as no attempt.
    BrokenOff,
}

/// How often a lane tries, and how many workers it lets die of a message.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub attempts: i64,
    pub crashes: i64,
}

/// Everything that is known of a lane's run. Nothing was requeued, pruned or deduplicated in it.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub enqueued: Vec<Enqueued>,
    /// Requests in the order in which they arrived.
    pub book: Vec<Request>,
    pub rows: Rows,
    pub limits: Option<Limits>,
}

/// What cannot be, by the invariant's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub invariant: &'static str,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}

/// What was found, and how many messages went out more than once, each of them explained.
#[derive(Debug, Default)]
pub struct Judgement {
    pub violations: Vec<Violation>,
    pub duplicates: usize,
}

impl Judgement {
    fn says(&mut self, invariant: &'static str, what: impl fmt::Display) {
        self.violations.push(Violation { invariant, what: what.to_string() });
    }

    /// Fails a test with everything that cannot be.
    pub fn is_clean(&self) {
        let told: Vec<String> = self.violations.iter().take(20).map(Violation::to_string).collect();
        assert!(told.is_empty(), "{} violations:\n{}", self.violations.len(), told.join("\n"));
    }
}

impl History {
    pub fn judge(&self) -> Judgement {
        let mut judgement = Judgement::default();
        let requests = self.requests();
        self.what_was_promised_is_there(&mut judgement);
        self.nothing_is_there_unasked(&requests, &mut judgement);
        self.a_key_names_one_message(&mut judgement);
        self.every_claim_has_one_outcome(&mut judgement);
        let mut steps: HashMap<i64, Vec<&Step>> = HashMap::new();
        for step in &self.rows.steps {
            steps.entry(step.id).or_default().push(step);
        }
        for row in &self.rows.messages {
            let steps = steps.get(&row.id).map_or(&[][..], Vec::as_slice);
            what_was_sent_arrived(row, steps, requests.get(&row.id).map_or(&[], Vec::as_slice), &mut judgement);
            if let Some(limits) = self.limits {
                budgets_hold(row, steps, limits, &mut judgement);
            }
        }
        judgement
    }

    fn requests(&self) -> HashMap<i64, Vec<&Request>> {
        let mut requests: HashMap<i64, Vec<&Request>> = HashMap::new();
        for request in &self.book {
            requests.entry(request.id).or_default().push(request);
        }
        requests
    }

    /// S1, S25.
    fn what_was_promised_is_there(&self, judgement: &mut Judgement) {
        let mut places: HashMap<i64, Vec<State>> = HashMap::new();
        for row in &self.rows.messages {
            places.entry(row.id).or_default().push(row.state);
        }
        for (id, states) in &places {
            if states.len() > 1 {
                judgement.says("S7", format!("message {id} is in several places at once: {states:?}"));
            }
        }
        let accepted: BTreeSet<i64> = self.accepted().collect();
        for id in accepted.iter().filter(|id| !places.contains_key(id)) {
            judgement.says("S1", format!("message {id} was accepted and is nowhere"));
        }
        let unknown = self.enqueued.iter().filter(|enqueued| enqueued.told == Told::Unknown).count();
        if places.len() > accepted.len() + unknown {
            let (there, most) = (places.len(), accepted.len() + unknown);
            judgement.says("S25", format!("{there} messages are there, and at most {most} were enqueued"));
        }
    }

    fn accepted(&self) -> impl Iterator<Item = i64> {
        self.enqueued.iter().filter_map(|enqueued| match enqueued.told {
            Told::Accepted(id) => Some(id),
            _ => None,
        })
    }

    /// S2, S13.
    fn nothing_is_there_unasked(&self, requests: &HashMap<i64, Vec<&Request>>, judgement: &mut Judgement) {
        let bodies: HashMap<i64, &[u8]> = (self.enqueued.iter())
            .filter_map(|enqueued| match enqueued.told {
                Told::Accepted(id) => Some((id, enqueued.body.as_slice())),
                _ => None,
            })
            .collect();
        let unknown: BTreeSet<&[u8]> = (self.enqueued.iter())
            .filter(|enqueued| enqueued.told == Told::Unknown)
            .map(|enqueued| enqueued.body.as_slice())
            .collect();
        let there: BTreeSet<i64> = self.rows.messages.iter().map(|row| row.id).collect();
        for (id, requests) in requests {
            if !there.contains(id) {
                judgement.says("S2", format!("message {id} was delivered and is not in the database"));
            }
            for request in requests {
                match bodies.get(id) {
                    Some(body) if *body != request.body => {
                        judgement.says("S13", format!("message {id} arrived with another body than it was given"));
                    }
                    None if !unknown.contains(request.body.as_slice()) => {
                        judgement.says("S2", format!("message {id} was delivered and nobody enqueued it"));
                    }
                    _ => {}
                }
            }
        }
    }

    /// S4.
    fn a_key_names_one_message(&self, judgement: &mut Judgement) {
        let mut known: BTreeMap<&str, (i64, &[u8])> = BTreeMap::new();
        for enqueued in &self.enqueued {
            let (Some(key), Told::Accepted(id)) = (&enqueued.key, &enqueued.told) else { continue };
            let first = *known.entry(key).or_insert((*id, &enqueued.body));
            if first.0 != *id {
                judgement.says("S4", format!("key {key} names the messages {} and {id}", first.0));
            } else if first.1 != enqueued.body {
                judgement.says("S4", format!("key {key} was accepted with two bodies"));
            }
        }
    }

    /// S6: at most one outcome under one token, and none under a token that was never given out.
    fn every_claim_has_one_outcome(&self, judgement: &mut Judgement) {
        let rows: HashMap<i64, &Row> = self.rows.messages.iter().map(|row| (row.id, row)).collect();
        let mut outcomes: BTreeSet<(i64, i64)> = BTreeSet::new();
        for step in self.rows.steps.iter().filter(|step| step.what != What::Takeover) {
            if !outcomes.insert((step.id, step.lease_token)) {
                judgement.says("S6", format!("message {} has two outcomes under token {}", step.id, step.lease_token));
            }
            if rows.get(&step.id).is_some_and(|row| step.lease_token > row.lease_token) {
                judgement.says("S5", format!("message {} has an outcome under a token never given", step.id));
            }
        }
        for row in self.rows.messages.iter().filter(|row| row.state == State::Sent) {
            if outcomes.contains(&(row.id, row.lease_token)) {
                judgement.says("S6", format!("message {} was sent and failed under one token", row.id));
            }
        }
    }
}

/// S5, S9, S10, S11.
fn what_was_sent_arrived(row: &Row, steps: &[&Step], requests: &[&Request], judgement: &mut Judgement) {
    let id = row.id;
    let tokens: BTreeSet<i64> = requests.iter().map(|request| request.token).collect();
    if tokens.len() != requests.len() {
        judgement.says("S9", format!("message {id} went out twice under one token: {tokens:?}"));
    }
    if tokens.iter().any(|token| *token < 1 || *token > row.lease_token) {
        let last = row.lease_token;
        judgement.says("S11", format!("message {id} went out under {tokens:?}, and its last token is {last}"));
    }
    let taken = requests.iter().filter(|request| (200..300).contains(&request.answered)).count();
    if row.state == State::Sent && taken == 0 {
        judgement.says("S10", format!("message {id} is called sent, and no receiver took it"));
    }
    if taken > 1 {
        judgement.duplicates += 1;
    }
    // Whoever was taken over may have sent, and so may whoever broke off, or heard no answer or one too late, which is
    // recorded under that token, or under one that the same worker was given for what it had in flight.
    let took = requests.iter().filter(|request| (200..300).contains(&request.answered)).map(|request| request.token);
    let took: BTreeSet<i64> = took.collect();
    for (first, again) in took.iter().zip(took.iter().skip(1)) {
        let explains = |step: &&&Step| match step.what {
            What::Takeover => step.lease_token > *first && step.lease_token <= *again,
            What::Failed | What::BrokenOff => step.lease_token >= *first && step.lease_token < *again,
        };
        if !steps.iter().any(|step| explains(&step)) {
            judgement
                .says("S9", format!("message {id} was taken under {first} and again under {again}, for no reason"));
        }
    }
}

/// S12, L6.
fn budgets_hold(row: &Row, steps: &[&Step], limits: Limits, judgement: &mut Judgement) {
    if row.attempts > limits.attempts || row.crashes > limits.crashes {
        judgement.says("S12", format!("message {} is beyond its budget: {row:?}", row.id));
    }
    let outcomes = steps.iter().filter(|step| step.what == What::Failed).count();
    if outcomes as i64 > limits.attempts {
        judgement.says("S12", format!("message {} has {outcomes} outcomes of {}", row.id, limits.attempts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: i64, token: i64, answered: u16) -> Request {
        Request { id, attempt: 1, token, idempotency_key: String::new(), body: b"x".to_vec(), answered }
    }

    fn row(id: i64, state: State, lease_token: i64) -> Row {
        Row { id, state, lease_token, attempts: 0, crashes: 0 }
    }

    /// One message that was enqueued, sent once and recorded.
    fn fine() -> History {
        History {
            enqueued: vec![Enqueued { key: Some("k".to_owned()), ..Enqueued::accepted(1, *b"x") }],
            book: vec![request(1, 1, 200)],
            rows: Rows { messages: vec![row(1, State::Sent, 1)], steps: vec![] },
            limits: Some(Limits { attempts: 2, crashes: 2 }),
        }
    }

    fn found(change: impl FnOnce(&mut History)) -> Vec<&'static str> {
        let mut history = fine();
        change(&mut history);
        let mut names: Vec<_> = history.judge().violations.iter().map(|violation| violation.invariant).collect();
        names.dedup();
        names
    }

    #[test]
    fn what_is_fine_is_fine() {
        assert_eq!(found(|_| {}), [""; 0]);
    }

    #[test]
    fn each_invariant_is_decided() {
        assert_eq!(found(|h| h.rows.messages.clear()), ["S1", "S2"]);
        assert_eq!(found(|h| h.book.push(Request { body: b"y".to_vec(), ..request(2, 1, 200) })), ["S2"]);
        assert_eq!(found(|h| h.rows.messages.push(row(2, State::Live, 0))), ["S25"]);
        assert_eq!(found(|h| h.rows.messages.push(row(1, State::Live, 1))), ["S7"]);
        assert_eq!(found(|h| h.book[0].body = b"y".to_vec()), ["S13"]);
        assert_eq!(found(|h| h.book.clear()), ["S10"]);
        assert_eq!(found(|h| h.book[0].answered = 500), ["S10"]);
        assert_eq!(found(|h| h.book.push(request(1, 1, 200))), ["S9"]);
        assert_eq!(found(|h| h.book.push(request(1, 2, 500))), ["S11"]);
        let two = |h: &mut History| {
            h.enqueued.push(Enqueued { key: Some("k".to_owned()), ..Enqueued::accepted(2, *b"x") });
            h.rows.messages.push(row(2, State::Live, 0));
        };
        assert_eq!(found(two), ["S4"]);
        let failed = Step { id: 1, lease_token: 1, what: What::Failed };
        assert_eq!(found(|h| h.rows.steps.push(failed.clone())), ["S6"]);
        assert_eq!(found(|h| h.rows.steps.push(Step { lease_token: 9, ..failed.clone() })), ["S5"]);
        assert_eq!(found(|h| h.rows.messages[0].crashes = 3), ["S12"]);
        let thrice = |h: &mut History| {
            h.rows.messages[0].lease_token = 5;
            h.rows.steps.extend((1..4).map(|lease_token| Step { lease_token, ..failed.clone() }));
        };
        assert_eq!(found(thrice), ["S12"]);
    }

    #[test]
    fn a_second_delivery_needs_a_reason() {
        let twice = |h: &mut History| {
            h.book.push(request(1, 2, 200));
            h.rows.messages[0].lease_token = 2;
        };
        assert_eq!(found(twice), ["S9"]);
        let because = |lease_token: i64, what: What| {
            found(|h| {
                twice(h);
                h.rows.steps.push(Step { id: 1, lease_token, what });
            })
        };
        assert_eq!(because(2, What::Takeover), [""; 0], "taken over");
        assert_eq!(because(1, What::Failed), [""; 0], "nobody heard the answer");
        assert_eq!(because(1, What::BrokenOff), [""; 0], "a stop broke it off");
        assert_eq!(because(1, What::Takeover), ["S9"], "that was before it was taken");
        // Something that failed before is no reason to send again what was taken since.
        let earlier = |h: &mut History| {
            h.book = vec![request(1, 1, 503), request(1, 2, 200), request(1, 3, 200)];
            h.rows.messages[0].lease_token = 3;
            h.rows.steps.push(Step { id: 1, lease_token: 1, what: What::Failed });
        };
        assert_eq!(found(earlier), ["S9"]);
    }
}
