//! What the doctor looks for, and what it says of it. Each part names its ailments and finds their cases in bounded
//! pages; only what is found twice, some time apart, is reported: a state that is passed through is no ailment.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;

use crate::error::Result;

/// The most cases of one ailment a part reports in one look.
pub const MOST_CASES: u32 = 1000;
/// The most ids a finding names.
const MOST_IDS: usize = 100;

/// What kind of promise a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Check {
    WaitsInVain,
    UnservedShard,
    UnreadableRow,
    TokenFell,
    KeyWithoutMessage,
    LedgerAgainstOutbox,
    SagaAgainstJob,
    CopyAgainstMessage,
    AuditOpen,
}

/// Something that can be wrong, in plain words.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Ailment {
    pub check: Check,
    /// The part it belongs to: `outbox`, `webhooks`, `orders`, `memory`.
    pub part: &'static str,
    /// What is wrong with the ids named.
    pub message: &'static str,
    /// What to do about it.
    pub advice: &'static str,
}

/// One case of an ailment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Case {
    pub ailment: &'static Ailment,
    pub id: i64,
}

/// A part of the system that can be examined.
#[async_trait]
pub trait Examine: Send + Sync {
    /// What looks wrong and has stood for at least this long, at most [`MOST_CASES`] of each ailment. Changes nothing, and
    /// asks in bounded pages, each in a transaction of its own.
    async fn look(&self, stood: Duration) -> Result<Vec<Case>>;

    /// Repairs what can be repaired safely, each case checked again under its lock; returns those it repaired.
    async fn repair(&self, cases: &[Case]) -> Result<Vec<Case>>;
}

/// What is left, or was repaired.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub check: Check,
    pub part: &'static str,
    pub count: usize,
    pub ids: Vec<i64>,
    pub message: &'static str,
    pub advice: &'static str,
    /// All of them were repaired.
    pub repaired: bool,
}

/// Only what both looks saw.
pub fn confirmed(first: &[Case], second: Vec<Case>) -> Vec<Case> {
    let first: HashSet<&Case> = first.iter().collect();
    second.into_iter().filter(|case| first.contains(case)).collect()
}

/// The cases by ailment, those that were repaired apart from those that are left.
pub fn findings(cases: &[Case], repaired: &[Case]) -> Vec<Finding> {
    let repaired: HashSet<&Case> = repaired.iter().collect();
    let mut groups: BTreeMap<(Check, &str, &str, bool), Vec<i64>> = BTreeMap::new();
    let mut ailments: HashMap<(&str, &str), &'static Ailment> = HashMap::new();
    for case in cases {
        let ailment = case.ailment;
        ailments.insert((ailment.part, ailment.message), ailment);
        let key = (ailment.check, ailment.part, ailment.message, repaired.contains(case));
        groups.entry(key).or_default().push(case.id);
    }
    let finding = |((check, part, message, repaired), mut ids): ((Check, &str, &str, bool), Vec<i64>)| {
        let ailment = ailments[&(part, message)];
        ids.sort_unstable();
        ids.dedup();
        let count = ids.len();
        ids.truncate(MOST_IDS);
        Finding { check, part: ailment.part, count, ids, message: ailment.message, advice: ailment.advice, repaired }
    };
    groups.into_iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    static STUCK: Ailment =
        Ailment { check: Check::WaitsInVain, part: "outbox", message: "waits", advice: "run it again" };

    #[test]
    fn what_only_one_look_saw_is_not_reported() {
        let case = |id| Case { ailment: &STUCK, id };
        let cases = confirmed(&[case(1), case(2)], vec![case(2), case(3)]);
        assert_eq!(cases, [case(2)]);
        let found = findings(&cases, &[]);
        assert_eq!((found.len(), found[0].count, found[0].repaired), (1, 1, false));
        assert_eq!(found[0].ids, [2]);
        assert_eq!(serde_json::json!(found[0].check), "WAITS_IN_VAIN");
    }

    #[test]
    fn what_was_repaired_stands_apart_from_what_is_left() {
        let case = |id| Case { ailment: &STUCK, id };
        let found = findings(&[case(1), case(2), case(3)], &[case(2)]);
        let told: Vec<_> = found.iter().map(|f| (f.ids.clone(), f.repaired)).collect();
        assert_eq!(told, [(vec![1, 3], false), (vec![2], true)]);
    }
}
