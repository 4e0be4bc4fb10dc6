//! P2 one holder, P5 reclaim, P7 due; takeovers, adoption, suspects, marks and the walk.

use std::collections::HashSet;
use std::time::Duration;

use postrider::NewMessage;
use postrider::outcome::{Settled, Verdict};
use postrider::store::{Claim, From, Mark, Mode, Status, transact};

use crate::harness::{Database, claim_of, lanes, on_every_store, retry, secs};

on_every_store! {
    p2_concurrent_claimers_never_share_a_row,
    p2_every_claim_has_a_new_token,
    p2_concurrent_takeovers_have_one_winner,
    p2_what_was_settled_meanwhile_is_not_claimed,
    p2_a_claim_takes_no_more_than_its_limit,
    p2_a_claim_takes_its_lane_only,
    p2_a_claim_takes_its_shard_only,
    p2_a_shorter_lease_cannot_steal_a_longer_one,
    p2_a_renewed_lease_is_not_claimable,
    p5_an_expired_lease_is_claimable_by_anyone,
    p5_a_lease_is_held_to_its_end,
    p5_a_claim_from_the_mark_misses_what_lies_before_and_the_walk_finds_it,
    p5_the_walk_goes_in_steps_and_sees_held_rows,
    p5_claim_by_ids_takes_only_what_is_claimable,
    p5_claim_by_ids_goes_by_due_time,
    p7_nothing_is_claimed_before_it_is_due,
    p7_claims_go_by_due_time_then_id,
    p7_retry_and_defer_are_not_due_earlier,
    p7_hosts_clocks_do_not_matter,
    takeover_counts_a_crash_and_remembers_it,
    takeover_is_not_when_the_owner_itself_reclaims,
    takeovers_add_up_and_an_outcome_forgets_them,
    suspects_are_not_in_ordinary_claims,
    adoption_after_a_lost_answer,
    adoption_of_suspects_by_id,
    adoption_leaves_out_what_is_in_flight,
    adoption_takes_ordinary_rows_too,
    adoption_does_not_touch_what_others_hold,
    claimed_now_is_the_databases_clock,
    time_goes_on_in_a_transaction,
    a_worker_may_have_a_long_name,
}

// ---- P2 ----

async fn p2_concurrent_claimers_never_share_a_row(db: Database) {
    let total = 400;
    let messages = (0..total).map(|n| NewMessage::new("a", format!("{n}"))).collect();
    db.outbox.enqueue(messages).await.unwrap();
    let other = db.again(lanes()).await;
    let tasks: Vec<_> = (0..12)
        .map(|n| {
            let db = if n % 2 == 0 { db.clone() } else { other.clone() };
            tokio::spawn(async move {
                let (mut got, mut dry) = (Vec::new(), 0);
                // A claim may come back short or empty while others hold the locks: ask again.
                while dry < 20 {
                    let claimed = db.claim("a", &format!("w{n}"), 7).await;
                    dry = if claimed.is_empty() { dry + 1 } else { 0 };
                    got.extend(claimed.iter().map(|m| (m.id, m.lease_token)));
                    if claimed.is_empty() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
                got
            })
        })
        .collect();
    let mut seen = HashSet::new();
    for task in tasks {
        for (id, token) in task.await.unwrap() {
            assert_eq!(token, 1);
            assert!(seen.insert(id), "message {id} was claimed twice");
        }
    }
    assert_eq!(seen.len(), total);
}

async fn p2_every_claim_has_a_new_token(db: Database) {
    let id = db.put("a", "x").await;
    let mut last = 0;
    for round in 0..6 {
        let claimed = db.claim_ids("a", "w", &[id]).await.remove(0);
        assert!(claimed.lease_token > last);
        last = claimed.lease_token;
        match round % 3 {
            0 => assert_eq!(db.settle("a", "w", claimed.lease(), retry(secs(0))).await, Settled::Applied),
            1 => assert!(db.defer("w", claimed.lease(), secs(0)).await),
            _ => db.advance(secs(100)),
        }
        assert_eq!(db.show(id).await.lease_token, last);
    }
}

/// What was a candidate a moment ago may have ended or been put off before it is locked.
async fn p2_what_was_settled_meanwhile_is_not_claimed(db: Database) {
    let total = 400;
    let messages = (0..total).map(|n| NewMessage::new("a", format!("{n}"))).collect();
    db.outbox.enqueue(messages).await.unwrap();
    let other = db.again(lanes()).await;
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let db = if n % 2 == 0 { db.clone() } else { other.clone() };
            tokio::spawn(async move {
                let (mut got, mut dry, owner) = (Vec::new(), 0, format!("w{n}"));
                while dry < 20 {
                    let claimed = db.claim("a", &owner, 3).await;
                    dry = if claimed.is_empty() { dry + 1 } else { 0 };
                    for m in &claimed {
                        got.push((m.id, m.lease_token));
                        let verdict = if m.id % 2 == 0 { Verdict::sent() } else { retry(secs(1000)) };
                        assert_eq!(db.settle("a", &owner, m.lease(), verdict).await, Settled::Applied);
                    }
                    if claimed.is_empty() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
                got
            })
        })
        .collect();
    let mut seen = HashSet::new();
    for task in tasks {
        for (id, token) in task.await.unwrap() {
            assert_eq!(token, 1, "message {id} was put off, and claimed all the same");
            assert!(seen.insert(id), "message {id} was claimed twice");
        }
    }
    assert_eq!(seen.len(), total);
    let even = seen.iter().filter(|id| *id % 2 == 0).count() as i64;
    assert_eq!(db.count("outbox WHERE attempts = 1").await, total as i64 - even);
    assert_eq!(db.count("outbox_done").await, even);
}

async fn p2_concurrent_takeovers_have_one_winner(db: Database) {
    for n in 0..20 {
        db.put("a", &n.to_string()).await;
    }
    assert_eq!(db.claim("a", "gone", 20).await.len(), 20);
    db.advance(secs(100));
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let db = db.clone();
            tokio::spawn(async move { db.claim("a", &format!("w{n}"), 20).await })
        })
        .collect();
    let mut seen = HashSet::new();
    for task in tasks {
        for message in task.await.unwrap() {
            assert_eq!((message.lease_token, message.crashes), (2, 1));
            assert_eq!(message.taken_over_from.as_deref(), Some("gone"));
            assert!(seen.insert(message.id));
        }
    }
    assert_eq!(db.count("outbox_attempts").await, seen.len() as i64, "one takeover row each");
    let rest = db.claim("a", "last", 20).await.len();
    assert!(!seen.is_empty() && seen.len() + rest == 20, "{} were taken over, {rest} are left", seen.len());
}

async fn p2_a_claim_takes_no_more_than_its_limit(db: Database) {
    for n in 0..10 {
        db.put("a", &n.to_string()).await;
    }
    assert_eq!(db.claim("a", "w", 3).await.len(), 3);
    assert_eq!(db.claim("a", "w", 0).await.len(), 0);
    assert_eq!(db.claim("a", "w", 100).await.len(), 7);
    assert_eq!(db.count("outbox WHERE locked_by IS NOT NULL").await, 10);
}

async fn p2_a_claim_takes_its_lane_only(db: Database) {
    let (a, b) = (db.put("a", "x").await, db.put("b", "x").await);
    assert_eq!(db.claim_one("a", "w").await.id, a);
    assert!(db.claim_ids("a", "w", &[b]).await.is_empty(), "not by id either");
    assert_eq!(db.claim_one("b", "w").await.id, b);
}

async fn p2_a_claim_takes_its_shard_only(db: Database) {
    let messages = (0..80).map(|n| NewMessage::new("sharded", n.to_string()).key(n.to_string())).collect();
    db.outbox.enqueue(messages).await.unwrap();
    let mut claimed = 0;
    for shard in 0..8 {
        let there = db.count(&format!("outbox WHERE shard_id = {shard} AND locked_by IS NULL")).await;
        let claim = Claim { shard, ..claim_of("sharded", "w", 100, secs(60), From::Mark(None)) };
        let got = db.outbox.store().claim(&claim).await.unwrap().messages;
        assert!(there > 0 && got.len() as i64 == there, "{} of {there} in shard {shard}", got.len());
        assert!(got.iter().all(|m| m.shard_id == shard), "{got:?}");
        claimed += got.len();
    }
    assert_eq!(claimed, 80);
}

async fn p2_a_shorter_lease_cannot_steal_a_longer_one(db: Database) {
    db.put("a", "x").await;
    assert_eq!(db.claim_with("a", "long", 1, secs(600), From::Mark(None)).await.len(), 1);
    db.advance(secs(300));
    assert!(db.claim_with("a", "short", 1, secs(1), From::Mark(None)).await.is_empty());
}

async fn p2_a_renewed_lease_is_not_claimable(db: Database) {
    db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    for _ in 0..5 {
        db.advance(secs(40));
        assert!(db.renew("w", lease).await);
        assert!(db.claim("a", "v", 1).await.is_empty());
    }
    assert_eq!(db.settle("a", "w", lease, Verdict::sent()).await, Settled::Applied, "the token stayed the same");
}

// ---- P5 ----

async fn p5_an_expired_lease_is_claimable_by_anyone(db: Database) {
    for name in ["x", "y"] {
        db.put("a", name).await;
    }
    assert_eq!(db.claim("a", "gone", 10).await.len(), 2);
    db.advance(secs(59));
    assert!(db.claim("a", "w", 10).await.is_empty());
    db.advance(secs(2));
    let claimed = db.claim("a", "w", 1).await;
    assert_eq!(claimed.len(), 1);
    let claimed = db.again(lanes()).await.claim("a", "gone", 10).await;
    assert!(claimed.is_empty(), "another process's clock was not moved, and there the lease still runs");
    assert_eq!(db.claim("a", "gone", 1).await.len(), 1);
}

async fn p5_a_lease_is_held_to_its_end(db: Database) {
    let id = db.put("a", "x").await;
    let claimed = db.claim_with("a", "w", 1, secs(60), From::Mark(None)).await.remove(0);
    let until = claimed.lease_until;
    assert_eq!(db.show(id).await.lease_until, Some(until), "what the claim told is what is stored");
    let now = db.outbox.store().walk("a", 0, None, 1).await.unwrap().now;
    let left = until.since(now);
    assert!(left > secs(50) && left <= secs(60), "{left:?}");
    db.advance(left - secs(5));
    assert_eq!(db.status(id).await, Status::Leased);
    assert!(db.claim("a", "v", 1).await.is_empty());
    db.advance(secs(6));
    assert_eq!(db.status(id).await, Status::Pending);
    assert_eq!(db.outbox.expired_leases(None, 10).await.unwrap(), [id]);
    assert_eq!(db.claim("a", "v", 1).await.len(), 1);
}

async fn p5_a_claim_from_the_mark_misses_what_lies_before_and_the_walk_finds_it(db: Database) {
    let mut ids = Vec::new();
    for n in 0..4 {
        ids.push(db.put("a", &n.to_string()).await);
    }
    let first = db.claim("a", "gone", 2).await;
    let mark = Mark { due_at: first[1].due_at, id: first[1].id + 1 };
    db.advance(secs(100));
    let claimed = db.claim_with("a", "w", 10, secs(60), From::Mark(Some(mark))).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), ids[2..]);
    assert_eq!(db.walk("a", None, 10).await, ids);
    // A mark names the first row that counts.
    let mark = Mark { due_at: first[1].due_at, id: first[1].id };
    let claimed = db.claim_with("a", "w", 10, secs(60), From::Mark(Some(mark))).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), [ids[1]]);
    assert_eq!(db.claim("a", "w", 10).await[0].id, ids[0], "from the head it is found at once");
}

async fn p5_the_walk_goes_in_steps_and_sees_held_rows(db: Database) {
    let batch = (0..10).map(|n| NewMessage::new("a", n.to_string())).collect();
    let ids: Vec<i64> = db.outbox.enqueue(batch).await.unwrap().iter().map(|e| e.id).collect();
    db.enqueue(NewMessage::new("a", "later").delay(secs(100))).await;
    db.put("b", "elsewhere").await;
    let held = db.claim("a", "w", 4).await;
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let walked = db.outbox.store().walk("a", 0, after, 3).await.unwrap();
        let Some(last) = walked.seen.last() else { break };
        after = Some(last.mark);
        seen.extend(walked.seen);
        assert!(seen.len() <= 10, "the walk does not end");
    }
    assert_eq!(seen.iter().map(|s| s.mark.id).collect::<Vec<_>>(), ids);
    for entry in &seen {
        let mine = held.iter().find(|m| m.id == entry.mark.id);
        assert_eq!(entry.hold.locked_by.as_deref(), mine.map(|_| "w"));
        assert_eq!(entry.hold.lease_until, mine.map(|m| m.lease_until));
        assert_eq!(entry.hold.token, i64::from(mine.is_some()));
    }
}

async fn p5_claim_by_ids_takes_only_what_is_claimable(db: Database) {
    let held = db.put("a", "held").await;
    db.claim_one("a", "w").await;
    let waiting = db.enqueue(NewMessage::new("a", "later").delay(secs(100))).await.id;
    let ended = db.put_sent(NewMessage::new("a", "ended")).await;
    let free = db.put("a", "free").await;
    let claimed = db.claim_ids("a", "v", &[ended, held, waiting, free, 999_999]).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), [free]);
    assert!(db.claim_ids("a", "v", &[]).await.is_empty());
}

async fn p5_claim_by_ids_goes_by_due_time(db: Database) {
    let mut ids = Vec::new();
    for delay in [40, 30, 20, 10] {
        ids.push(db.enqueue(NewMessage::new("a", "x").delay(secs(delay))).await.id);
    }
    db.advance(secs(100));
    let claimed = db.claim_with("a", "w", 2, secs(60), From::Ids(ids.clone())).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), [ids[3], ids[2]]);
}

// ---- P7 ----

async fn p7_nothing_is_claimed_before_it_is_due(db: Database) {
    let id = db.enqueue(NewMessage::new("a", "x").delay(secs(100))).await.id;
    let with_key = db.enqueue(NewMessage::new("a", "x").delay(secs(100)).key("k")).await.id;
    let active = db.enqueue(NewMessage::new("a", "x").delay(secs(100)).active_key("k")).await.id;
    for _ in 0..3 {
        assert!(db.claim("a", "w", 10).await.is_empty());
        assert!(db.claim_ids("a", "w", &[id, with_key, active]).await.is_empty());
        let adopt = From::Adopt { mark: None, known: vec![] };
        assert!(db.claim_with("a", "w", 10, secs(60), adopt).await.is_empty());
        assert!(db.walk("a", None, 10).await.is_empty());
        db.advance(secs(33));
    }
    db.advance(secs(2));
    assert_eq!(db.claim("a", "w", 10).await.len(), 3);
}

async fn p7_claims_go_by_due_time_then_id(db: Database) {
    let mut ids = Vec::new();
    for delay in [30, 10, 20, 10] {
        ids.push(db.enqueue(NewMessage::new("a", "x").delay(secs(delay))).await.id);
    }
    db.advance(secs(25));
    let claimed = db.claim("a", "w", 10).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), [ids[1], ids[3], ids[2]]);
    db.advance(secs(10));
    assert_eq!(db.claim_one("a", "w").await.id, ids[0]);
}

async fn p7_retry_and_defer_are_not_due_earlier(db: Database) {
    db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    db.settle("a", "w", lease, retry(secs(100))).await;
    db.advance(secs(95));
    assert!(db.claim("a", "w", 10).await.is_empty());
    db.advance(secs(10));
    let lease = db.claim_one("a", "w").await.lease();
    assert!(db.defer("w", lease, secs(100)).await);
    db.advance(secs(95));
    assert!(db.claim("a", "w", 10).await.is_empty());
    db.advance(secs(10));
    db.claim_one("a", "w").await;
}

/// Due times are told by the database, even to a session that lives elsewhere.
async fn p7_hosts_clocks_do_not_matter(db: Database) {
    let far_east = match db.dialect {
        postrider::tx::Dialect::Postgres => "SET TIME ZONE '+14'",
        postrider::tx::Dialect::Mysql => "SET time_zone = '+13:00'",
        postrider::tx::Dialect::Sqlite => "SELECT 1",
    };
    let messages = [NewMessage::new("a", "now"), NewMessage::new("a", "later").delay(secs(100)).key("k")];
    match db.raw().await {
        crate::harness::Raw::Sqlite(connection) => drop(db.outbox.enqueue_in_sqlite(&connection, &messages).unwrap()),
        crate::harness::Raw::Postgres(mut client) => {
            client.batch_execute(far_east).await.unwrap();
            let mut tx = client.transaction().await.unwrap();
            let _ = db.outbox.enqueue_in(&mut tx, &messages).await.unwrap();
            tx.commit().await.unwrap();
        }
        crate::harness::Raw::Mysql(mut conn) => {
            mysql_async::prelude::Queryable::query_drop(&mut conn, far_east).await.unwrap();
            let mut tx = conn.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
            let _ = db.outbox.enqueue_in(&mut tx, &messages).await.unwrap();
            tx.commit().await.unwrap();
        }
    }
    assert_eq!(db.claim_one("a", "w").await.payload, "now");
    db.advance(secs(105));
    assert!(db.claim("a", "v", 10).await.iter().any(|m| m.payload == "later"));
}

// ---- takeovers ----

async fn takeover_counts_a_crash_and_remembers_it(db: Database) {
    let id = db.put("a", "x").await;
    db.claim_one("a", "gone").await;
    assert!(db.history(id).await.is_empty());
    db.advance(secs(100));
    let taken = db.claim_one("a", "w").await;
    assert_eq!((taken.crashes, taken.maybe_sent, taken.attempts), (1, true, 0));
    assert_eq!(taken.taken_over_from.as_deref(), Some("gone"));
    let shown = db.show(id).await;
    assert_eq!((shown.crashes, shown.maybe_sent, shown.locked_by.as_deref()), (1, true, Some("w")));
    let history = db.history(id).await;
    assert_eq!(history.len(), 1);
    assert_eq!((history[0].kind.as_str(), history[0].lease_token, history[0].attempt), ("takeover", 2, 0));
    assert_eq!(history[0].worker.as_deref(), Some("gone"));
}

async fn takeover_is_not_when_the_owner_itself_reclaims(db: Database) {
    let id = db.put("a", "x").await;
    db.claim_one("a", "w").await;
    db.advance(secs(100));
    let again = db.claim_one("a", "w").await;
    assert_eq!((again.crashes, again.maybe_sent, again.lease_token), (0, false, 2));
    assert_eq!(again.taken_over_from, None);
    assert!(db.history(id).await.is_empty());
    let shown = db.show(id).await;
    assert_eq!((shown.crashes, shown.maybe_sent), (0, false));
}

async fn takeovers_add_up_and_an_outcome_forgets_them(db: Database) {
    let id = db.put("a", "x").await;
    for n in 0..4_u32 {
        let claimed = db.claim_ids("a", &format!("w{n}"), &[id]).await.remove(0);
        assert_eq!(claimed.crashes, n);
        db.advance(secs(100));
    }
    let claimed = db.claim_ids("a", "last", &[id]).await.remove(0);
    assert_eq!(claimed.crashes, 4);
    assert_eq!(db.settle("a", "last", claimed.lease(), retry(secs(0))).await, Settled::Applied);
    let shown = db.show(id).await;
    assert_eq!((shown.crashes, shown.attempts, shown.maybe_sent), (0, 1, true), "maybe_sent is sticky");
    assert_eq!(db.claim_one("a", "w").await.crashes, 0, "and ordinary again");
}

async fn suspects_are_not_in_ordinary_claims(db: Database) {
    let (suspect, other) = (db.put("a", "suspect").await, db.put("a", "other").await);
    db.claim_ids("a", "w1", &[suspect]).await;
    db.advance(secs(100));
    assert_eq!(db.claim("a", "w2", 1).await[0].crashes, 1, "one takeover is ordinary");
    db.advance(secs(100));
    let claimed = db.claim("a", "w3", 10).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), [other]);
    let adopt = From::Adopt { mark: None, known: vec![] };
    assert!(db.claim_with("a", "w3", 10, secs(60), adopt).await.iter().all(|m| m.id == other));
    // Its own holder would not take it over: to it this is no second crash.
    assert_eq!(db.claim("a", "w2", 10).await[0].id, suspect);
    db.advance(secs(100));
    assert!(!db.claim("a", "w3", 10).await.iter().any(|m| m.id == suspect));
    let seen = db.outbox.store().walk("a", 0, None, 10).await.unwrap();
    let entry = seen.seen.iter().find(|s| s.mark.id == suspect).unwrap();
    assert_eq!(entry.hold.suspicion("w3"), 2, "the walk sees it");
    let claimed = db.claim_ids("a", "w3", &[suspect]).await;
    assert_eq!(claimed[0].crashes, 2);
    // Deferred by its worker it is not taken over any more, but still a suspect.
    assert!(db.defer("w3", claimed[0].lease(), secs(0)).await);
    assert!(!db.claim("a", "w4", 10).await.iter().any(|m| m.id == suspect));
}

// ---- adoption ----

async fn adoption_after_a_lost_answer(db: Database) {
    let mut ids = Vec::new();
    for n in 0..3 {
        ids.push(db.put("a", &n.to_string()).await);
    }
    let lost = db.claim("a", "w", 3).await; // suppose this answer never arrived
    assert!(db.claim("a", "w", 3).await.is_empty(), "an ordinary claim does not see them");
    let adopt = From::Adopt { mark: None, known: vec![] };
    let adopted = db.claim_with("a", "w", 10, secs(60), adopt).await;
    assert_eq!(adopted.iter().map(|m| m.id).collect::<Vec<_>>(), ids);
    for message in &adopted {
        assert_eq!((message.lease_token, message.crashes, message.maybe_sent), (2, 0, false));
        assert_eq!(message.taken_over_from, None);
    }
    assert_eq!(db.count("outbox_attempts").await, 0);
    // The first claim's leases are lost, the adopted ones count.
    assert_eq!(db.settle("a", "w", lost[0].lease(), Verdict::sent()).await, Settled::LeaseLost);
    assert!(!db.renew("w", lost[0].lease()).await);
    assert_eq!(db.settle("a", "w", adopted[0].lease(), Verdict::sent()).await, Settled::Applied);
}

/// A suspect whose claim went unanswered is its claimer's all the same: asked for again, it costs no crash.
async fn adoption_of_suspects_by_id(db: Database) {
    let id = db.put("a", "suspect").await;
    for n in 0..4 {
        db.claim_ids("a", &format!("crashed {n}"), &[id]).await;
        db.advance(secs(100));
    }
    let lost = db.claim_ids("a", "w", &[id]).await;
    assert_eq!((lost[0].crashes, lost[0].lease_token), (4, 5));
    assert!(db.claim_ids("a", "another", &[id]).await.is_empty(), "nobody else gets it");
    let again = db.claim_ids("a", "w", &[id]).await;
    assert_eq!((again[0].crashes, again[0].lease_token), (4, 6));
    assert_eq!(again[0].taken_over_from, None);
    assert_eq!(db.settle("a", "w", again[0].lease(), Verdict::sent()).await, Settled::Applied);
}

async fn adoption_leaves_out_what_is_in_flight(db: Database) {
    let known = db.put("a", "known").await;
    let in_flight = db.claim_one("a", "w").await;
    let lost = db.put("a", "lost").await;
    db.claim_one("a", "w").await;
    let adopt = From::Adopt { mark: None, known: vec![known] };
    let adopted = db.claim_with("a", "w", 10, secs(60), adopt.clone()).await;
    assert_eq!(adopted.iter().map(|m| m.id).collect::<Vec<_>>(), [lost]);
    assert_eq!(db.settle("a", "w", in_flight.lease(), Verdict::sent()).await, Settled::Applied);
    // Even expired it is left alone: its own worker is still at it.
    let known = db.put("a", "known").await;
    let in_flight = db.claim_ids("a", "w", &[known]).await.remove(0);
    db.advance(secs(100));
    let adopt = From::Adopt { mark: None, known: vec![known, lost] };
    assert!(db.claim_with("a", "w", 10, secs(60), adopt).await.is_empty());
    assert_eq!(db.settle("a", "w", in_flight.lease(), Verdict::sent()).await, Settled::Applied);
}

async fn adoption_takes_ordinary_rows_too(db: Database) {
    db.put("a", "lost").await;
    db.claim_one("a", "w").await;
    let free = db.put("a", "free").await;
    let adopt = From::Adopt { mark: None, known: vec![] };
    let claimed = db.claim_with("a", "w", 10, secs(60), adopt).await;
    assert_eq!(claimed.len(), 2);
    assert_eq!(claimed[1].id, free);
    assert_eq!(claimed[1].lease_token, 1);
}

async fn adoption_does_not_touch_what_others_hold(db: Database) {
    db.put("a", "x").await;
    let held = db.claim_one("a", "other").await;
    let adopt = || From::Adopt { mark: None, known: vec![] };
    assert!(db.claim_with("a", "w", 10, secs(60), adopt()).await.is_empty());
    assert!(db.renew("other", held.lease()).await);
    db.advance(secs(100));
    let taken = db.claim_with("a", "w", 10, secs(60), adopt()).await;
    assert_eq!((taken[0].crashes, taken[0].maybe_sent), (1, true), "a takeover, not an adoption");
}

async fn claimed_now_is_the_databases_clock(db: Database) {
    db.put("a", "x").await;
    let claim = |limit| claim_of("a", "w", limit, secs(60), From::Mark(None));
    let store = db.outbox.store();
    let before = store.walk("a", 0, None, 1).await.unwrap().now;
    db.advance(secs(1000));
    let got = store.claim(&claim(1)).await.unwrap();
    let after = store.claim(&claim(1)).await.unwrap();
    for now in [got.now, after.now, got.messages[0].lease_until.minus(secs(60))] {
        let moved = now.since(before);
        assert!(moved >= secs(1000) && moved < secs(1060), "{moved:?}");
    }
}

/// Else a lease that was waited for would be born as old as the wait.
async fn time_goes_on_in_a_transaction(db: Database) {
    let moved = transact(&**db.outbox.store(), Mode::Write, |tx| {
        Box::pin(async move {
            let mut moments = HashSet::new();
            for _ in 0..1000 {
                let mut params = Vec::new();
                let now = tx.now().plus(0, &mut params);
                moments.insert(tx.query(&format!("SELECT {now}"), &params).await?[0].time(0)?);
                if moments.len() > 1 {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    });
    assert!(moved.await.unwrap(), "it stands still");
}

async fn a_worker_may_have_a_long_name(db: Database) {
    let id = db.put("a", "x").await;
    let owner = postrider::clock::incarnation(Some(&"😀'\"\\".repeat(100)));
    let lease = db.claim_one("a", &owner).await.lease();
    assert!(db.renew(&owner, lease).await);
    assert_eq!(db.show(id).await.locked_by.as_deref(), Some(owner.as_str()));
    assert_eq!(db.settle("a", &owner, lease, retry(secs(0))).await, Settled::Applied);
    assert_eq!(db.history(id).await[0].worker.as_deref(), Some(owner.as_str()));
}
