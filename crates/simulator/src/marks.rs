//! Rare things that did happen. Over a campaign each of [`SOMETIMES`] must be reached, or it tests less than it says.

use std::collections::BTreeMap;

#[derive(Clone, Debug, Default)]
pub struct Marks(pub BTreeMap<&'static str, u64>);

impl Marks {
    pub fn reach(&mut self, mark: &'static str) {
        *self.0.entry(mark).or_default() += 1;
    }

    pub fn add(&mut self, other: &Marks) {
        for (mark, times) in &other.0 {
            *self.0.entry(mark).or_default() += times;
        }
    }
}

/// What a long campaign must have seen.
pub const RARE: &[&str] = &["a queued memory given up"];

/// What a campaign must have seen.
pub const SOMETIMES: &[&str] = &[
    "a cut-off process came back",
    "a dedup hit",
    "a keyed enqueue repeated",
    "a late ack counted",
    "a late commit behind the mark",
    "a locked row settled alone later",
    "a lost lease told to a renewal",
    "a lost lease told to a settle",
    "a memory applied late",
    "a memory deferred",
    "a memory put off",
    "a memory refused",
    "a memory stored at once",
    "a memory waited for its twin",
    "a memory waited in doubt",
    "a message expired",
    "a poison buried",
    "a queued memory brought",
    "a rollback after all",
    "a saga admitted by another process",
    "a saga completed",
    "a saga given up",
    "a saga out of attempts",
    "a saga parked at its gate",
    "a saga tried again",
    "a job put off or given up unsent",
    "a settle met a lock",
    "a settle unknown, then proved",
    "a renewal met a lock",
    "a stray shard served",
    "a suspect taken over",
    "given back for its twin",
    "adopted",
    "a write that failed, queued",
    "adopted by the walk",
    "an audit ended",
    "an enqueue nobody knows of",
    "an operator never came back",
    "an operator settled it",
    "an order executed",
    "an order looked up",
    "an order parked for a person",
    "an order refused",
    "an order settled by hand",
    "crashed",
    "cut off by a stop",
    "delivered, answer lost",
    "died of its attempts",
    "froze",
    "given back for a crowd",
    "kept although its attempts are over",
    "nothing left to prove a settle by",
    "released by hand",
    "renewed too late",
    "requeued",
    "send begun, and never told",
    "stopped without an answer",
    "taken over",
    "the database restarted under way",
    "told to stop",
];
