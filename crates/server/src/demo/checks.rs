//! Did it all come out as told? Judged by the receiver's log; the outbox's own books come last.

use std::collections::{BTreeMap, BTreeSet};

use postrider::Enqueued;
use postrider::store::LaneStats;
use serde::Serialize;

use super::receiver::Arrival;
use super::{BROKEN, Story};

#[derive(Debug, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub passed: bool,
    pub seen: String,
}

pub fn all(story: &Story, arrivals: &[Arrival], books: LaneStats) -> Vec<Check> {
    let mut taken: BTreeMap<u64, u32> = BTreeMap::new();
    let mut keys: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    for arrival in arrivals {
        *taken.entry(arrival.invoice).or_default() += u32::from(arrival.taken());
        keys.entry(arrival.invoice).or_default().insert(&arrival.idempotency_key);
    }
    let arrived = story.committed.iter().filter(|n| taken.get(n).is_some_and(|times| *times > 0)).count();
    let strays = story.rolled_back.iter().filter(|n| taken.contains_key(n)).count();
    let twice = taken.values().filter(|times| **times > 1).count();
    let refused = arrivals.iter().filter(|a| matches!(a.status, 500 | 503)).count();
    let late: BTreeSet<u64> = arrivals.iter().filter(|a| matches!(a.status, 500 | 503)).map(|a| a.invoice).collect();
    let made_up = late.iter().filter(|n| taken.get(n).is_some_and(|times| *times > 0)).count();
    let of_broken: Vec<u16> = arrivals.iter().filter(|a| a.invoice == BROKEN).map(|a| a.status).collect();
    let total = story.committed.len();
    vec![
        check("every committed invoice arrived", arrived == total, format!("{arrived} of {total}")),
        check(
            "no rolled-back invoice arrived",
            strays == 0 && !story.rolled_back.is_empty(),
            format!("{strays} of {}", story.rolled_back.len()),
        ),
        check("nothing was taken twice", twice == 0, format!("{twice} twice")),
        check(
            "every refused one was taken later",
            refused > 0 && made_up == late.len(),
            format!("{refused} refusals of {} invoices, {made_up} taken later", late.len()),
        ),
        check(
            "all attempts at one invoice had one Idempotency-Key",
            keys.values().all(|k| k.len() == 1),
            format!("{} keys for {} invoices", keys.values().map(BTreeSet::len).sum::<usize>(), keys.len()),
        ),
        check(
            "a duplicate was recognised",
            (story.again, story.other_content) == (Some(Enqueued::Exists), Some(Enqueued::Differs)),
            format!("{:?}, {:?}", story.again, story.other_content)
                .replace("Some(", "")
                .replace(')', "")
                .to_lowercase(),
        ),
        check(
            "the broken invoice died and arrived after its requeue",
            story.died && story.requeued && of_broken.last() == Some(&200),
            format!("answers {of_broken:?}"),
        ),
        check(
            "the outbox's books agree",
            (books.sent, books.pending, books.leased, books.dead) == (total as u64, 0, 0, 0),
            format!("{} sent, {} pending, {} leased, {} dead", books.sent, books.pending, books.leased, books.dead),
        ),
    ]
}

fn check(name: &'static str, passed: bool, seen: String) -> Check {
    Check { name, passed, seen }
}

pub fn told(checks: &[Check]) -> String {
    let mut text = String::from("\nChecked against the receiver's log:\n");
    for check in checks {
        let mark = if check.passed { "ok    " } else { "FAILED" };
        text.push_str(&format!("  {mark}  {} ({})\n", check.name, check.seen));
    }
    let passed = checks.iter().all(|check| check.passed);
    text.push_str(if passed { "\nAll came out as told.\n" } else { "\nNot all came out as told.\n" });
    text
}
