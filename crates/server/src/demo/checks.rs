//! Did it all come out as told? Judged by the books of those who received; the outbox's own come last.

use std::collections::{BTreeMap, BTreeSet};

use postrider::Enqueued;
use postrider::store::LaneStats;
use postrider_memories::Action;
use serde::Serialize;

use super::receiver::Arrival;
use super::{BROKEN, LANE, Story};

#[derive(Debug, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub passed: bool,
    pub seen: String,
}

pub fn all(story: &Story, arrivals: &[Arrival], books: &BTreeMap<String, LaneStats>) -> Vec<Check> {
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
        {
            let statuses: Vec<u16> = story.calls.iter().map(|call| call.status).collect();
            let ids: BTreeSet<&str> = story.calls.iter().map(|call| call.webhook_id.as_str()).collect();
            let genuine = story.calls.iter().filter(|call| call.genuine).count();
            check(
                "a webhook became a dead letter and arrived after its requeue",
                story.dead_letters == 1 && statuses == [500, 500, 200] && ids.len() == 1 && genuine == 3,
                format!("answers {statuses:?}, {genuine} signatures genuine, {} webhook-id", ids.len()),
            )
        },
        check(
            "an order sent twice was executed once",
            story.accepted == 1 && story.replayed && story.conflict && story.executions == 1,
            format!(
                "{} accepted, {} executed, the stored answer {}, another order {}",
                story.accepted,
                story.executions,
                if story.replayed { "came back" } else { "did not come back" },
                if story.conflict { "refused" } else { "not refused" }
            ),
        ),
        check(
            "memories outlived an outage, each written once",
            story.stored == [Action::Allow, Action::Deferred, Action::Deferred] && written_once(&story.remembered),
            format!(
                "{}; OpenMemory has {}",
                story.stored.iter().map(|action| action.as_str()).collect::<Vec<_>>().join(", "),
                story.remembered.len()
            ),
        ),
        {
            let of = |lane: &str| books.get(lane).copied().unwrap_or_default();
            let (invoices, orders, memories) = (of(LANE), of(postrider_orders::LANE), of(postrider_memories::LANE));
            let open: u64 = books.values().map(|lane| lane.pending + lane.leased + lane.dead).sum();
            check(
                "the outbox's books agree",
                (invoices.sent, orders.sent, memories.sent, open) == (total as u64, 1, 2, 0),
                format!(
                    "sent: {} invoices, {} order, {} deferred memories; {open} open or dead",
                    invoices.sent, orders.sent, memories.sent
                ),
            )
        },
    ]
}

fn written_once(remembered: &[String]) -> bool {
    remembered.len() == 3 && remembered.iter().collect::<BTreeSet<_>>().len() == 3
}

fn check(name: &'static str, passed: bool, seen: String) -> Check {
    Check { name, passed, seen }
}

pub fn told(checks: &[Check]) -> String {
    let mut text = String::from("\nPromised, and seen in the books of those who received:\n");
    for check in checks {
        let mark = if check.passed { "ok    " } else { "FAILED" };
        text.push_str(&format!("  {mark}  {} ({})\n", check.name, check.seen));
    }
    let passed = checks.iter().all(|check| check.passed);
    text.push_str(if passed { "\nAll came out as told.\n" } else { "\nNot all came out as told.\n" });
    text
}
