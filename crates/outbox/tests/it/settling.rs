//! P3 fenced, P4 late ack, P6 ended, P11 bounded; the peer's part, audit, unknown answers, retention.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postrider::error::{Class, Kind};
use postrider::lease::Lease;
use postrider::outcome::{Certainty, FlushCode, GiveBack, LeaseState, Outcome, Reach, Settled, Settlement, Verdict};
use postrider::store::{Mode, Status, transact};
use postrider::tx::Tx;
use postrider::worker::core::LaneSettings;
use postrider::{Error, LaneRules, Lanes, NewMessage, OnSettled, Winner, Worker, courier};

use crate::harness::{Database, dead, on_every_store, retry, secs};

on_every_store! {
    p3_fenced_ack_after_takeover,
    p3_every_verb_needs_the_current_token_and_owner,
    p3_the_right_token_of_another_lane_is_not_enough,
    p3_stale_and_current_token_in_one_batch,
    p3_an_entry_twice_in_one_batch_counts_once,
    p3_winners_and_losers_in_one_batch,
    p3_concurrent_settles_of_one_lease_count_once,
    p3_settle_against_takeover_has_one_winner,
    p4_late_ack_if_nobody_took_it,
    p4_late_retry_and_dead_if_nobody_took_it,
    p4_late_renew_is_refused,
    p4_late_defer_is_accepted,
    p6_ended_is_not_settled_again,
    p6_sent_leaves_a_done_row_and_nothing_live,
    p6_retention_zero_keeps_no_sent_row_but_the_dead,
    p6_one_entry_that_cannot_be_recorded_harms_no_other,
    p6_a_settle_that_fails_harms_no_concurrent_request,
    retry_keeps_it_live_and_counts,
    dead_counts_and_keeps_the_last_error,
    burial_counts_no_attempt,
    maybe_sent_is_sticky,
    long_words_are_cut_and_not_refused,
    hook_sees_winners_only,
    hook_error_rolls_back_and_the_batch_goes_row_by_row,
    hook_that_is_busy_does_not_hide_what_was_settled,
    hook_writes_in_the_same_transaction,
    audit_rows_of_every_outcome,
    conflicts_are_audited_on_every_lane,
    audit_tells_of_database_trouble,
    again_is_judged_by_what_was_recorded,
    again_is_unknown_when_nothing_remains,
    again_applies_what_was_not_applied,
    again_after_requeue_and_release,
    a_transaction_that_saw_an_error_refuses_to_commit,
    p11_attempts_are_bounded,
    p11_crashes_are_bounded,
    p11_expired_unless_maybe_sent,
    many_settles_at_once_lose_nothing,
}

fn sent_with(reference: &str) -> Verdict {
    Verdict::Sent { result_ref: Some(reference.into()), dedup_hit: false }
}

fn again(lease: Lease, verdict: Verdict) -> Settlement {
    Settlement { again: true, ..Settlement::new(lease, verdict) }
}

// ---- P3 ----

async fn p3_fenced_ack_after_takeover(db: Database) {
    for (n, lane) in ["a", "audited", "fleeting", "dedup"].into_iter().enumerate() {
        let id = db.put(lane, "x").await;
        let old = db.claim_one(lane, "slow").await.lease();
        db.advance(secs(100));
        let new = db.claim_one(lane, "fast").await.lease();
        for verdict in [Verdict::sent(), sent_with("r"), retry(secs(0)), dead("BAD")] {
            assert_eq!(db.settle(lane, "slow", old, verdict.clone()).await, Settled::LeaseLost, "{lane} {verdict:?}");
        }
        assert!(!db.renew("slow", old).await);
        assert!(!db.defer("slow", old, secs(0)).await);
        let shown = db.show(id).await;
        assert_eq!((shown.status, shown.lease_token, shown.attempts), (Status::Leased, 2, 0), "nothing was changed");
        assert_eq!(shown.locked_by.as_deref(), Some("fast"));
        assert_eq!(db.settle(lane, "fast", new, Verdict::sent()).await, Settled::Applied);
        assert_eq!(db.settle(lane, "slow", old, Verdict::sent()).await, Settled::LeaseLost, "also once it has ended");
        assert_eq!(db.count("outbox").await, 0, "round {n}");
    }
}

async fn p3_every_verb_needs_the_current_token_and_owner(db: Database) {
    let id = db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    let before = db.show(id).await;
    let stale = Lease { token: lease.token - 1, ..lease };
    let future = Lease { token: lease.token + 1, ..lease };
    let wrong = [("w", stale), ("w", future), ("v", lease), ("", lease), ("W", lease), ("w ", lease)];
    for (owner, lease) in wrong {
        for verdict in [Verdict::sent(), retry(secs(0)), dead("BAD")] {
            assert_eq!(db.settle("a", owner, lease, verdict).await, Settled::LeaseLost, "{owner:?} {lease:?}");
        }
        assert!(!db.renew(owner, lease).await);
        assert!(!db.defer(owner, lease, secs(0)).await);
    }
    let nobody = Lease { id: 999_999, token: 1 };
    assert_eq!(db.settle("a", "w", nobody, Verdict::sent()).await, Settled::LeaseLost);
    assert!(!db.renew("w", nobody).await && !db.defer("w", nobody, secs(0)).await);
    assert_eq!(db.show(id).await, before);
    assert_eq!(db.settle("a", "w", lease, Verdict::sent()).await, Settled::Applied);
}

async fn p3_the_right_token_of_another_lane_is_not_enough(db: Database) {
    let id = db.put("b", "x").await;
    let lease = db.claim_one("b", "w").await.lease();
    for verdict in [Verdict::sent(), retry(secs(0))] {
        assert_eq!(db.settle("a", "w", lease, verdict).await, Settled::LeaseLost);
    }
    assert_eq!(db.status(id).await, Status::Leased);
}

async fn p3_stale_and_current_token_in_one_batch(db: Database) {
    for (lane, verdict) in [("a", Verdict::sent()), ("audited", Verdict::sent()), ("a", retry(secs(0)))] {
        db.put(lane, "x").await;
        let old = db.claim_one(lane, "w").await.lease();
        db.advance(secs(100));
        let new = db.claim_one(lane, "w").await.lease();
        let store = db.outbox.store();
        assert_eq!(store.renew("w", &[old, new], secs(60)).await.unwrap(), [LeaseState::Lost, LeaseState::Held]);
        let entries = [Settlement::new(old, verdict.clone()), Settlement::new(new, verdict.clone())];
        let answers = db.settle_all(lane, "w", &entries).await;
        assert_eq!(answers, [Settled::LeaseLost, Settled::Applied], "{lane} {verdict:?}");
        if let Some(left) = db.claim(lane, "w", 1).await.first() {
            assert_eq!(
                db.outbox.store().defer("w", &[new, left.lease()], &GiveBack::now()).await.unwrap(),
                [LeaseState::Lost, LeaseState::Held]
            );
        }
    }
}

async fn p3_an_entry_twice_in_one_batch_counts_once(db: Database) {
    for (lane, verdict) in
        [("a", Verdict::sent()), ("fleeting", Verdict::sent()), ("audited", Verdict::sent()), ("a", dead("BAD"))]
    {
        db.put(lane, "x").await;
        let other = db.put(lane, "y").await;
        let claimed = db.claim(lane, "w", 10).await;
        let entry = Settlement::new(claimed[0].lease(), verdict.clone());
        let entries = [entry.clone(), Settlement::new(claimed[1].lease(), verdict.clone()), entry];
        let answers = db.settle_all(lane, "w", &entries).await;
        assert_eq!(answers, [Settled::Applied, Settled::Applied, Settled::LeaseLost], "{lane} {verdict:?}");
        assert!(db.claim(lane, "w", 10).await.is_empty(), "{other}");
    }
}

async fn p3_winners_and_losers_in_one_batch(db: Database) {
    for lane in ["a", "audited"] {
        let batch = (0..40).map(|n| NewMessage::new(lane, n.to_string())).collect();
        db.outbox.enqueue(batch).await.unwrap();
        let claimed = db.claim(lane, "w", 40).await;
        let mut entries = Vec::new();
        for (n, message) in claimed.iter().enumerate().rev() {
            let lease = if n % 3 == 0 { Lease { token: 7, ..message.lease() } } else { message.lease() };
            let verdict = match n % 4 {
                0 => Verdict::sent(),
                1 => sent_with(&format!("ref {n}")),
                2 => retry(secs(1000)),
                _ => dead("BAD"),
            };
            entries.push(Settlement::new(lease, verdict));
        }
        let answers = db.settle_all(lane, "w", &entries).await;
        for (entry, answer) in entries.iter().zip(answers) {
            let n = claimed.iter().position(|m| m.id == entry.lease.id).unwrap();
            assert_eq!(answer, if n % 3 == 0 { Settled::LeaseLost } else { Settled::Applied }, "entry {n}");
            let shown = db.show(entry.lease.id).await;
            let status = match n % 4 {
                _ if n % 3 == 0 => Status::Leased,
                0 | 1 => Status::Sent,
                2 => Status::Pending,
                _ => Status::Dead,
            };
            assert_eq!(shown.status, status, "entry {n}");
            let reference = (n % 4 == 1 && n % 3 != 0).then(|| format!("ref {n}"));
            assert_eq!(shown.result_ref, reference);
        }
    }
}

async fn p3_concurrent_settles_of_one_lease_count_once(db: Database) {
    for (lane, verdict) in
        [("a", Verdict::sent()), ("fleeting", Verdict::sent()), ("a", retry(secs(1000))), ("audited", dead("BAD"))]
    {
        db.put(lane, "x").await;
        let lease = db.claim_one(lane, "w").await.lease();
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let (db, verdict) = (db.clone(), verdict.clone());
                tokio::spawn(async move { db.settle(lane, "w", lease, verdict).await })
            })
            .collect();
        let mut applied = 0;
        for task in tasks {
            applied += usize::from(task.await.unwrap() == Settled::Applied);
        }
        assert_eq!(applied, 1, "{lane} {verdict:?}");
    }
    assert_eq!(db.count("outbox WHERE attempts = 1").await, 1);
}

async fn p3_settle_against_takeover_has_one_winner(db: Database) {
    for n in 0..10 {
        let id = db.put("a", "x").await;
        let lease = db.claim_one("a", "slow").await.lease();
        db.advance(secs(100));
        let settling = tokio::spawn({
            let db = db.clone();
            async move { db.settle("a", "slow", lease, if n % 2 == 0 { Verdict::sent() } else { dead("BAD") }).await }
        });
        let taking = tokio::spawn({
            let db = db.clone();
            async move { db.claim("a", "fast", 1).await }
        });
        let (settled, taken) = (settling.await.unwrap(), taking.await.unwrap());
        match settled {
            Settled::Applied => assert!(taken.is_empty(), "settled and claimed"),
            Settled::LeaseLost => {
                assert_eq!(taken.len(), 1);
                assert_eq!(db.settle("a", "fast", taken[0].lease(), Verdict::sent()).await, Settled::Applied);
            }
            other => panic!("{other:?}"),
        }
        let live = db.count(&format!("outbox WHERE id = {id}")).await;
        let done = db.count(&format!("outbox_done WHERE id = {id}")).await;
        assert_eq!((live, done), (0, 1), "never live and done");
    }
}

// ---- P4 ----

async fn p4_late_ack_if_nobody_took_it(db: Database) {
    for lane in ["a", "audited", "fleeting", "dedup"] {
        db.put(lane, "x").await;
        let lease = db.claim_one(lane, "w").await.lease();
        db.advance(secs(10_000));
        assert_eq!(db.settle(lane, "w", lease, Verdict::sent()).await, Settled::Applied, "{lane}");
        assert!(db.claim(lane, "v", 1).await.is_empty());
    }
}

async fn p4_late_retry_and_dead_if_nobody_took_it(db: Database) {
    let id = db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    db.advance(secs(100));
    assert_eq!(db.settle("a", "w", lease, retry(secs(0))).await, Settled::Applied);
    let next = db.claim_one("a", "w").await;
    assert_eq!((next.attempts, next.crashes), (1, 0));
    db.advance(secs(100));
    assert_eq!(db.settle("a", "w", next.lease(), dead("BAD")).await, Settled::Applied);
    assert_eq!(db.status(id).await, Status::Dead);
}

async fn p4_late_renew_is_refused(db: Database) {
    let id = db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    db.advance(secs(58));
    assert!(db.renew("w", lease).await);
    db.advance(secs(62));
    assert!(!db.renew("w", lease).await);
    assert_eq!(db.status(id).await, Status::Pending, "a refused renewal changes nothing");
    assert_eq!(db.claim("a", "v", 1).await.len(), 1);
}

async fn p4_late_defer_is_accepted(db: Database) {
    db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    db.advance(secs(100));
    assert!(db.defer("w", lease, secs(0)).await);
    assert_eq!(db.claim_one("a", "v").await.crashes, 0, "given back, not taken over");
}

// ---- P6 and the records ----

async fn p6_ended_is_not_settled_again(db: Database) {
    for first in [Verdict::sent(), dead("BAD")] {
        let id = db.put("a", "x").await;
        let lease = db.claim_one("a", "w").await.lease();
        assert_eq!(db.settle("a", "w", lease, first).await, Settled::Applied);
        let before = db.show(id).await;
        for second in [Verdict::sent(), retry(secs(0)), dead("WORSE")] {
            assert_eq!(db.settle("a", "w", lease, second).await, Settled::LeaseLost);
        }
        assert!(!db.renew("w", lease).await && !db.defer("w", lease, secs(0)).await);
        assert!(db.outbox.seize("operator:me", vec![id], secs(60)).await.unwrap().is_empty());
        assert_eq!(db.outbox.wake("a", vec!["k".into()]).await.unwrap(), 0);
        assert_eq!(db.show(id).await, before);
    }
}

async fn p6_sent_leaves_a_done_row_and_nothing_live(db: Database) {
    for lane in ["a", "audited", "dedup"] {
        let id = db.enqueue(NewMessage::new(lane, "x").target("t").active_key("k").correlation_id("c")).await.id;
        let lease = db.claim_one(lane, "w").await.lease();
        assert_eq!(db.settle(lane, "w", lease, sent_with("their 😀 name")).await, Settled::Applied);
        let shown = db.show(id).await;
        assert_eq!((shown.status, shown.attempts, shown.lease_token), (Status::Sent, 0, 1));
        assert_eq!(shown.result_ref.as_deref(), Some("their 😀 name"));
        assert_eq!((shown.locked_by, shown.lease_until), (None, None), "no lock survives the end");
        assert_eq!(shown.claimed_by.as_deref(), Some("w"), "but who delivered it is known");
        assert!(shown.created_at <= shown.claimed_at.unwrap() && shown.claimed_at <= shown.finished_at);
        assert_eq!(shown.target.as_deref(), Some("t"));
        assert_eq!((shown.active_key.as_deref(), shown.correlation_id.as_deref()), (Some("k"), Some("c")));
        assert!(shown.finished_at.is_some());
        assert!(db.history(id).await.is_empty(), "a first-try success writes no attempt");
        assert_eq!(db.count("outbox").await, 0);
    }
}

async fn p6_retention_zero_keeps_no_sent_row_but_the_dead(db: Database) {
    let plain = db.put_sent(NewMessage::new("fleeting", "x")).await;
    assert!(db.is_gone(plain).await);
    let id = db.put("fleeting", "y").await;
    let lease = db.claim_one("fleeting", "w").await.lease();
    assert_eq!(db.settle("fleeting", "w", lease, retry(secs(0))).await, Settled::Applied);
    let lease = db.claim_one("fleeting", "w").await.lease();
    let mut entry = Settlement::new(lease, sent_with("r"));
    entry.trouble = Some(FlushCode::DbError); // takes the long way
    assert_eq!(db.count("outbox_attempts").await, 1);
    assert_eq!(db.settle_all("fleeting", "w", &[entry]).await, [Settled::Applied]);
    assert!(db.is_gone(id).await);
    assert_eq!(db.count("outbox_attempts").await, 0, "nor is its history kept");
    let dead = db.put_dead(NewMessage::new("fleeting", "z")).await;
    assert_eq!(db.status(dead).await, Status::Dead);
    assert_eq!(db.counts().await[..2], [0, 1]);
}

/// Puts a done row where the live message will want to go.
async fn stand_in_the_way_of(db: &Database, id: i64) {
    let columns =
        "id, lane, shard_id, due_at, attempts, crashes, maybe_sent, lease_token, payload, created_at, updated_at";
    let copy = format!(
        "INSERT INTO outbox_done ({columns}, status, finished_at) SELECT {columns}, 'dead', created_at FROM outbox WHERE id = {id}"
    );
    db.raw().await.run(&copy).await.unwrap();
}

/// A row that stands in the way of one message must not hold up its batch for ever.
async fn p6_one_entry_that_cannot_be_recorded_harms_no_other(db: Database) {
    for (lane, verdict) in [("a", Verdict::sent()), ("audited", Verdict::sent()), ("b", dead("BAD"))] {
        for n in 0..3 {
            db.put(lane, &n.to_string()).await;
        }
        let claimed = db.claim(lane, "w", 3).await;
        stand_in_the_way_of(&db, claimed[1].id).await;
        let entries: Vec<Settlement> = claimed.iter().map(|m| Settlement::new(m.lease(), verdict.clone())).collect();
        let answers = db.settle_all(lane, "w", &entries).await;
        assert_eq!(answers, [Settled::Applied, Settled::Refused, Settled::Applied], "{lane}");
        assert_eq!(db.count(&format!("outbox WHERE lane = '{lane}'")).await, 1, "still held");
    }
}

/// Whatever shares a commit with it, too.
async fn p6_a_settle_that_fails_harms_no_concurrent_request(db: Database) {
    db.put("b", "blocked").await;
    let blocked = db.claim_one("b", "w").await.lease();
    stand_in_the_way_of(&db, blocked.id).await;
    let mut tasks = Vec::new();
    for n in 0..40 {
        let db = db.clone();
        tasks.push(tokio::spawn(async move {
            match n % 4 {
                0 => assert_eq!(db.settle("b", "w", blocked, Verdict::sent()).await, Settled::Refused),
                1 => drop(db.claim("a", "w", 1).await),
                2 => assert!(db.renew("w", blocked).await),
                _ => assert!(db.put("a", "x").await > 0),
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(db.count("outbox WHERE lane = 'a'").await, 10);
}

async fn retry_keeps_it_live_and_counts(db: Database) {
    let id = db.put("a", "x").await;
    for n in 1..=3_u32 {
        let claimed = db.claim_one("a", "w").await;
        assert_eq!(claimed.attempts, n - 1);
        assert_eq!(db.settle("a", "w", claimed.lease(), retry(secs(50))).await, Settled::Applied);
        let shown = db.show(id).await;
        assert_eq!((shown.status, shown.attempts, shown.crashes, shown.maybe_sent), (Status::Pending, n, 0, false));
        assert_eq!((shown.last_error_code.as_deref(), shown.last_error.as_deref()), (Some("HTTP_503"), Some("busy")));
        assert_eq!((shown.locked_by, shown.lease_until), (None, None));
        db.advance(secs(60));
    }
    let history = db.history(id).await;
    let kinds: Vec<(&str, u32, i64)> = history.iter().map(|a| (a.kind.as_str(), a.attempt, a.lease_token)).collect();
    assert_eq!(kinds, [("retry", 1, 1), ("retry", 2, 2), ("retry", 3, 3)]);
    assert_eq!(history[0].worker.as_deref(), Some("w"));
    let lease = db.claim_one("a", "w").await.lease();
    db.settle("a", "w", lease, Verdict::sent()).await;
    let shown = db.show(id).await;
    assert_eq!((shown.attempts, shown.last_error.as_deref()), (3, Some("busy")), "why earlier attempts failed is kept");
}

async fn dead_counts_and_keeps_the_last_error(db: Database) {
    let id = db.put_dead(NewMessage::new("a", "x")).await;
    let shown = db.show(id).await;
    assert_eq!((shown.status, shown.attempts), (Status::Dead, 1));
    assert_eq!((shown.last_error_code.as_deref(), shown.last_error.as_deref()), (Some("BAD"), Some("no use")));
    let history = db.history(id).await;
    assert_eq!((history[0].kind.as_str(), history[0].attempt, history[0].code.as_deref()), ("dead", 1, Some("BAD")));
}

async fn burial_counts_no_attempt(db: Database) {
    let id = db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    let burial =
        Verdict::Dead { code: "POISON".into(), error: "e".into(), certainty: Certainty::Unchanged, counted: false };
    assert_eq!(db.settle("a", "w", lease, burial).await, Settled::Applied);
    assert_eq!(db.show(id).await.attempts, 0);
    assert_eq!(db.history(id).await[0].attempt, 0);
}

async fn maybe_sent_is_sticky(db: Database) {
    let id = db.put("a", "x").await;
    let with = |certainty| Verdict::Retry { delay: secs(0), code: "C".into(), error: "e".into(), certainty };
    let steps = [
        (Certainty::Unchanged, false),
        (Certainty::MaybeSent, true),
        (Certainty::Unchanged, true),
        (Certainty::Resolved, false),
        (Certainty::MaybeSent, true),
    ];
    for (certainty, expected) in steps {
        let lease = db.claim_one("a", "w").await.lease();
        db.settle("a", "w", lease, with(certainty)).await;
        assert_eq!(db.show(id).await.maybe_sent, expected, "{certainty:?}");
    }
    let claimed = db.claim_one("a", "w").await;
    assert!(claimed.maybe_sent);
    db.settle("a", "w", claimed.lease(), dead("BAD")).await;
    assert!(db.show(id).await.maybe_sent);
    db.outbox.requeue(vec![id]).await.unwrap();
    assert!(db.show(id).await.maybe_sent, "not even a requeue resolves it");
}

async fn long_words_are_cut_and_not_refused(db: Database) {
    let long = "😀é\0x'\"\\".repeat(300);
    let cut: String = long.chars().filter(|c| *c != '\0').take(512).collect();
    for lane in ["a", "audited"] {
        let id = db.put(lane, "x").await;
        let words = |n: usize| (long.chars().filter(|c| *c != '\0').take(n).collect::<String>(), long.clone());
        let (code, error) = words(600);
        let lease = db.claim_one(lane, "w").await.lease();
        let verdict = Verdict::Retry {
            delay: secs(0),
            code: code.clone(),
            error: error.clone(),
            certainty: Certainty::Unchanged,
        };
        assert_eq!(db.settle(lane, "w", lease, verdict).await, Settled::Applied);
        assert_eq!(db.show(id).await.last_error.as_deref(), Some(cut.as_str()));
        assert_eq!(db.history(id).await[0].error.as_deref(), Some(cut.as_str()));
        let lease = db.claim_one(lane, "w").await.lease();
        let how = GiveBack::after(secs(0), format!("{code}\0"));
        assert_eq!(db.outbox.store().defer("w", &[lease], &how).await.unwrap(), [LeaseState::Held]);
        let lease = db.claim_one(lane, "w").await.lease();
        let verdict =
            Verdict::Dead { code: format!("{code}\0"), error, certainty: Certainty::Unchanged, counted: true };
        assert_eq!(db.settle(lane, "w", lease, verdict).await, Settled::Applied);
        let shown = db.show(id).await;
        assert_eq!(shown.last_error.as_deref(), Some(cut.as_str()));
        assert!(code.starts_with(&shown.last_error_code.unwrap()));
        let id = db.put(lane, "y").await;
        let lease = db.claim_one(lane, "w").await.lease();
        assert_eq!(db.settle(lane, "w", lease, sent_with(&long)).await, Settled::Applied);
        assert_eq!(db.show(id).await.result_ref.as_deref(), Some(cut.as_str()));
    }
}

// ---- the peer's part ----

/// Writes a ledger row per winner, remembers what it was told, and refuses payloads that say so.
#[derive(Default)]
struct Peer {
    heard: Mutex<Vec<Winner>>,
}

#[async_trait]
impl OnSettled for Peer {
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> postrider::Result<()> {
        for winner in winners {
            let sql = "INSERT INTO ledger (id, token) VALUES (?, ?)";
            tx.execute(sql, &[winner.id.into(), winner.lease_token.into()]).await?;
            if winner.payload == "bad" {
                return Err(Error::database("the ledger refuses this one"));
            }
            if winner.payload == "busy" {
                return Err(Error::new(Kind::Busy, "the ledger is busy"));
            }
            if winner.payload == "sql" {
                tx.execute("INSERT INTO no_such_table VALUES (1)", &[]).await?;
            }
        }
        self.heard.lock().unwrap().extend(winners.iter().cloned());
        Ok(())
    }
}

async fn with_peer(db: &Database) -> (Database, Arc<Peer>) {
    let peer = Arc::new(Peer::default());
    let rules = LaneRules { on_settled: Some(peer.clone()), ..LaneRules::default() };
    let db = db.again(Lanes::new().with("peer", rules)).await;
    db.outbox.migrate().await.unwrap();
    db.raw().await.run("CREATE TABLE ledger (id BIGINT, token BIGINT)").await.unwrap();
    (db, peer)
}

async fn hook_sees_winners_only(db: Database) {
    let (db, peer) = with_peer(&db).await;
    let batch = (0..6)
        .map(|n| NewMessage::new("peer", n.to_string()).target("t").active_key(format!("k{n}")).correlation_id("c"));
    db.outbox.enqueue(batch.collect()).await.unwrap();
    let old = db.claim("peer", "slow", 6).await;
    db.advance(secs(100));
    let new = db.claim("peer", "fast", 3).await;
    let verdict = |n: usize| [Verdict::sent(), retry(secs(0)), dead("BAD")][n % 3].clone();
    let entries: Vec<Settlement> =
        old.iter().enumerate().map(|(n, m)| Settlement::new(m.lease(), verdict(n))).collect();
    let answers = db.settle_all("peer", "slow", &entries).await;
    assert_eq!(answers[..3], [Settled::LeaseLost; 3]);
    assert_eq!(answers[3..], [Settled::Applied; 3], "late, but nobody took them");
    let heard = std::mem::take(&mut *peer.heard.lock().unwrap());
    assert_eq!(heard.iter().map(|w| w.id).collect::<Vec<_>>(), old[3..].iter().map(|m| m.id).collect::<Vec<_>>());
    for (winner, message) in heard.iter().zip(&old[3..]) {
        let n = old.iter().position(|m| m.id == message.id).unwrap();
        assert_eq!((winner.lease_token, winner.attempts, winner.maybe_sent), (1, 0, false));
        assert_eq!((winner.payload.clone(), winner.verdict.clone()), (message.payload.clone(), verdict(n)));
        assert_eq!((&winner.target, &winner.active_key), (&message.target, &message.active_key));
        assert_eq!((winner.lane.as_str(), winner.correlation_id.as_deref()), ("peer", Some("c")));
    }
    assert_eq!(db.count("ledger").await, 3);
    let only_losers: Vec<Settlement> = old[..3].iter().map(|m| Settlement::new(m.lease(), Verdict::sent())).collect();
    db.settle_all("peer", "slow", &only_losers).await;
    assert!(peer.heard.lock().unwrap().is_empty(), "no winners, no call");
    for message in &new {
        assert_eq!(db.settle("peer", "fast", message.lease(), Verdict::sent()).await, Settled::Applied);
    }
    assert!(peer.heard.lock().unwrap().iter().all(|w| w.lease_token == 2 && w.maybe_sent));
}

async fn hook_error_rolls_back_and_the_batch_goes_row_by_row(db: Database) {
    let (db, peer) = with_peer(&db).await;
    let batch = ["fine", "bad", "good", "sql", "well"].map(|p| NewMessage::new("peer", p));
    db.outbox.enqueue(batch.to_vec()).await.unwrap();
    let claimed = db.claim("peer", "w", 10).await;
    let verdicts = [Verdict::sent(), Verdict::sent(), retry(secs(1000)), dead("BAD"), dead("BAD")];
    let entries: Vec<Settlement> =
        claimed.iter().zip(verdicts).map(|(m, verdict)| Settlement::new(m.lease(), verdict)).collect();
    let answers = db.settle_all("peer", "w", &entries).await;
    use Settled::{Applied, Refused};
    assert_eq!(answers, [Applied, Refused, Applied, Refused, Applied]);
    let ledger: Vec<i64> =
        db.sql("SELECT id FROM ledger ORDER BY id").await.iter().map(|r| r.int(0).unwrap()).collect();
    let fine: Vec<i64> = [0, 2, 4].map(|n: usize| claimed[n].id).to_vec();
    assert_eq!(ledger, fine, "each winner once, the refused not at all");
    assert_eq!(peer.heard.lock().unwrap().len(), 3);
    for n in [1, 3] {
        let shown = db.show(claimed[n].id).await;
        assert_eq!((shown.status, shown.attempts, shown.lease_token), (Status::Leased, 0, 1), "still held");
    }
    assert_eq!(db.settle("peer", "w", claimed[1].lease(), Verdict::sent()).await, Refused, "alone as well");
}

async fn hook_that_is_busy_does_not_hide_what_was_settled(db: Database) {
    let (db, _) = with_peer(&db).await;
    let batch = ["fine", "bad", "busy"].map(|p| NewMessage::new("peer", p));
    db.outbox.enqueue(batch.to_vec()).await.unwrap();
    let claimed = db.claim("peer", "w", 10).await;
    let entries: Vec<Settlement> = claimed.iter().map(|m| Settlement::new(m.lease(), Verdict::sent())).collect();
    let answers = db.settle_all("peer", "w", &entries).await;
    assert_eq!(answers, [Settled::Applied, Settled::Refused, Settled::Refused]);
    let error = db.outbox.store().settle("peer", "w", &entries[2..]).await.unwrap_err();
    assert_eq!(error.class(), Class::Retryable, "alone it may be tried again");
}

async fn hook_writes_in_the_same_transaction(db: Database) {
    let (db, _) = with_peer(&db).await;
    let id = db.put("peer", "x").await;
    let lease = db.claim_one("peer", "w").await.lease();
    db.settle("peer", "w", lease, Verdict::sent()).await;
    let rows = db.sql("SELECT l.token FROM ledger l JOIN outbox_done d ON d.id = l.id").await;
    assert_eq!(rows.len(), 1, "message {id}");
    // Burials and operators take the same path.
    let id = db.put("peer", "y").await;
    let (lane, lease) = db.outbox.seize("operator:me", vec![id], secs(60)).await.unwrap().remove(0);
    assert_eq!(db.settle(&lane, "operator:me", lease, dead("BAD")).await, Settled::Applied);
    assert_eq!(db.count("ledger").await, 2);
}

// ---- audit ----

async fn audit_of(db: &Database, id: i64) -> Vec<(String, String, String, serde_json::Value)> {
    let sql = format!(
        "SELECT action, reason, status, evidence_refs_json FROM write_audit WHERE outbox_id = {id} ORDER BY audit_id"
    );
    let text = |row: &postrider::tx::Row, n| row.text(n).unwrap();
    db.sql(&sql)
        .await
        .iter()
        .map(|row| (text(row, 0), text(row, 1), text(row, 2), serde_json::from_str(&text(row, 3)).unwrap()))
        .collect()
}

async fn audit_rows_of_every_outcome(db: Database) {
    let id = db.enqueue(NewMessage::new("audited", "x").target("team 😀").correlation_id("corr")).await.id;
    let lease = db.claim_one("audited", "w").await.lease();
    db.settle("audited", "w", lease, retry(secs(0))).await;
    let lease = db.claim_one("audited", "w").await.lease();
    db.settle("audited", "w", lease, sent_with("mem-1")).await;
    let rows = audit_of(&db, id).await;
    let words: Vec<(&str, &str, &str)> = rows.iter().map(|r| (r.0.as_str(), r.1.as_str(), r.2.as_str())).collect();
    assert_eq!(words, [("redirect", "outbox_flush_retry", "redirected"), ("allow", "outbox_flush_success", "success")]);
    let evidence = &rows[1].3;
    let sha = postrider::message::hex(&postrider::message::sha256(b"x"));
    assert_eq!(evidence["outbox_id"], id);
    assert_eq!((&evidence["memory_id"], &evidence["payload_sha"]), (&"mem-1".into(), &sha.clone().into()));
    assert_eq!(evidence["extra"]["worker_id"], "w");
    assert_eq!(evidence["extra"]["correlation_id"], "corr");
    let row = db
        .sql("SELECT target_space, correlation_id, payload_sha FROM write_audit WHERE reason = 'outbox_flush_success'")
        .await;
    assert_eq!(row[0].text(0).unwrap(), "team 😀");
    assert_eq!((row[0].text(1).unwrap(), row[0].text(2).unwrap()), ("corr".to_owned(), sha));
    let id = db.put_dead(NewMessage::new("audited", "y")).await;
    assert_eq!(audit_of(&db, id).await[0].1, "outbox_flush_dead");
    let id = db.put("audited", "z").await;
    let lease = db.claim_one("audited", "w").await.lease();
    db.settle("audited", "w", lease, Verdict::Sent { result_ref: Some("mem-1".into()), dedup_hit: true }).await;
    assert_eq!(audit_of(&db, id).await[0].1, "outbox_flush_dedup_hit");
    let plain = db.put_sent(NewMessage::new("a", "x")).await;
    assert!(audit_of(&db, plain).await.is_empty(), "it costs a write, so other lanes have none");
}

async fn conflicts_are_audited_on_every_lane(db: Database) {
    for lane in ["a", "audited", "fleeting"] {
        for verdict in [Verdict::sent(), retry(secs(0)), dead("BAD")] {
            let id = db.enqueue(NewMessage::new(lane, "x").target("t").correlation_id("corr")).await.id;
            let old = db.claim_one(lane, "slow").await.lease();
            db.advance(secs(100));
            let new = db.claim_one(lane, "fast").await.lease();
            db.settle(lane, "slow", old, verdict.clone()).await;
            let rows = audit_of(&db, id).await;
            assert_eq!(rows.len(), 1, "{lane} {verdict:?}");
            let (action, reason, status, evidence) = &rows[0];
            assert_eq!(
                (action.as_str(), reason.as_str(), status.as_str()),
                ("redirect", "outbox_flush_conflict", "redirected")
            );
            assert_eq!(evidence["intended"]["outcome"], verdict.flush_code().as_str());
            assert_eq!(evidence["intended"]["lease_token"], old.token);
            assert_eq!(evidence["observed"]["lease_token"], new.token);
            assert_eq!(evidence["observed"]["locked_by"], "fast");
            assert_eq!(evidence["extra"]["worker_id"], "slow");
            assert_eq!(evidence["extra"]["correlation_id"], "corr");
            db.settle(lane, "fast", new, Verdict::sent()).await;
            db.settle(lane, "slow", old, verdict).await;
            let last = audit_of(&db, id).await.pop().unwrap();
            assert_eq!(last.1, "outbox_flush_conflict");
            assert_eq!(last.3["observed"]["status"], if lane == "fleeting" { "gone" } else { "sent" });
        }
    }
}

async fn audit_tells_of_database_trouble(db: Database) {
    for (trouble, reason) in
        [(FlushCode::DbTimeout, "outbox_flush_db_timeout"), (FlushCode::DbError, "outbox_flush_db_error")]
    {
        let id = db.put("audited", "x").await;
        let lease = db.claim_one("audited", "w").await.lease();
        let entry = Settlement { again: true, trouble: Some(trouble), ..Settlement::new(lease, Verdict::sent()) };
        assert_eq!(db.settle_all("audited", "w", &[entry]).await, [Settled::Applied]);
        let reasons: Vec<String> = audit_of(&db, id).await.into_iter().map(|r| r.1).collect();
        assert_eq!(reasons, [reason, "outbox_flush_success"]);
    }
}

// ---- unknown answers ----

async fn again_is_judged_by_what_was_recorded(db: Database) {
    for lane in ["a", "audited"] {
        for verdict in [Verdict::sent(), retry(secs(1000)), dead("BAD")] {
            db.put(lane, "x").await;
            let lease = db.claim_one(lane, "w").await.lease();
            assert_eq!(db.settle(lane, "w", lease, verdict.clone()).await, Settled::Applied); // its answer was lost
            let audits = db.count("write_audit").await;
            let answers = db.settle_all(lane, "w", &[again(lease, verdict.clone())]).await;
            assert_eq!(answers, [Settled::Applied], "{lane} {verdict:?}");
            assert_eq!(db.count("write_audit").await, audits, "no conflict, and not told twice");
            // Somebody who intended something else has lost.
            let other = if matches!(verdict, Verdict::Retry { .. }) { dead("BAD") } else { retry(secs(0)) };
            assert_eq!(db.settle_all(lane, "w", &[again(lease, other)]).await, [Settled::LeaseLost]);
        }
    }
    // A takeover in between: whoever took it has it, and we did not settle.
    let id = db.put("b", "x").await;
    let old = db.claim_one("b", "slow").await.lease();
    db.advance(secs(100));
    let new = db.claim_one("b", "fast").await.lease();
    for verdict in [Verdict::sent(), retry(secs(0)), dead("BAD")] {
        assert_eq!(db.settle_all("b", "slow", &[again(old, verdict)]).await, [Settled::LeaseLost]);
    }
    db.settle("b", "fast", new, Verdict::sent()).await;
    assert_eq!(
        db.settle_all("b", "slow", &[again(old, Verdict::sent())]).await,
        [Settled::LeaseLost],
        "sent by another: {id}"
    );
}

async fn again_is_unknown_when_nothing_remains(db: Database) {
    db.put("fleeting", "x").await;
    let lease = db.claim_one("fleeting", "w").await.lease();
    db.settle("fleeting", "w", lease, Verdict::sent()).await;
    let audits = db.count("write_audit").await;
    assert_eq!(db.settle_all("fleeting", "w", &[again(lease, Verdict::sent())]).await, [Settled::Unknown]);
    assert_eq!(db.count("write_audit").await, audits, "unknown is counted as neither");
    // Still live in other hands: ours was certainly not applied.
    db.put("fleeting", "y").await;
    let old = db.claim_one("fleeting", "slow").await.lease();
    db.advance(secs(100));
    db.claim_one("fleeting", "fast").await;
    assert_eq!(db.settle_all("fleeting", "slow", &[again(old, Verdict::sent())]).await, [Settled::LeaseLost]);
}

async fn again_applies_what_was_not_applied(db: Database) {
    for lane in ["a", "fleeting", "audited"] {
        for verdict in [Verdict::sent(), retry(secs(1000)), dead("BAD")] {
            db.put(lane, "x").await;
            let lease = db.claim_one(lane, "w").await.lease();
            assert_eq!(db.settle_all(lane, "w", &[again(lease, verdict)]).await, [Settled::Applied]);
            assert!(db.claim(lane, "w", 1).await.is_empty());
        }
    }
}

async fn again_after_requeue_and_release(db: Database) {
    let id = db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    db.settle("a", "w", lease, dead("BAD")).await;
    db.outbox.requeue(vec![id]).await.unwrap();
    assert_eq!(db.settle_all("a", "w", &[again(lease, dead("BAD"))]).await, [Settled::Applied], "it was ours");
    assert_eq!(db.status(id).await, Status::Pending, "and stays requeued");
    let lease = db.claim_one("a", "w").await.lease();
    assert_eq!(db.outbox.release(vec![id]).await.unwrap(), [id]);
    let lost = db.settle_all("a", "w", &[again(lease, retry(secs(0)))]).await;
    assert_eq!(lost, [Settled::LeaseLost], "a release is no retry of ours");
}

async fn a_transaction_that_saw_an_error_refuses_to_commit(db: Database) {
    let run = transact(&**db.outbox.store(), Mode::Write, |tx| {
        Box::pin(async move {
            tx.execute("INSERT INTO postrider_meta (name, value) VALUES ('a', 'b')", &[]).await?;
            let ignored = tx.execute("INSERT INTO no_such_table VALUES (1)", &[]).await;
            assert!(ignored.is_err());
            Ok(())
        })
    });
    assert!(run.await.is_err());
    assert_eq!(db.count("postrider_meta WHERE name = 'a'").await, 0);
    // The next transaction is not affected.
    db.put("a", "x").await;
}

// ---- P11, through a worker ----

fn impatient(lane: &str, max_attempts: u32) -> LaneSettings {
    let mut settings = LaneSettings::new(lane);
    settings.budgets.max_attempts = max_attempts;
    settings.budgets.max_crashes = 3;
    settings
}

async fn p11_attempts_are_bounded(db: Database) {
    let id = db.put("a", "x").await;
    for n in 1..=3_u32 {
        let failing = courier(|_| async { Outcome::retry("HTTP_500", "broken", Reach::Answered) });
        let worker = Worker::new(db.outbox.clone()).lane_with(impatient("a", 3), Arc::new(failing)).once();
        worker.run(std::future::pending()).await.unwrap();
        let shown = db.show(id).await;
        assert_eq!(shown.attempts, n);
        assert_eq!(shown.status, if n == 3 { Status::Dead } else { Status::Pending });
        db.advance(secs(10_000));
    }
    let shown = db.show(id).await;
    assert_eq!((shown.last_error_code.as_deref(), shown.last_error.as_deref()), (Some("HTTP_500"), Some("broken")));
    assert!(db.claim("a", "w", 1).await.is_empty());
}

async fn p11_crashes_are_bounded(db: Database) {
    let id = db.put("a", "poison").await;
    let neighbour = db.put("a", "neighbour").await;
    for n in 0..3 {
        db.claim_ids("a", &format!("crashed {n}"), &[id]).await;
        db.advance(secs(100));
    }
    let sending = courier(|message| async move {
        assert_ne!(message.payload, "poison", "it must be buried, not delivered");
        Outcome::sent()
    });
    let worker = Worker::new(db.outbox.clone()).lane_with(impatient("a", 3), Arc::new(sending)).once();
    tokio::time::timeout(Duration::from_secs(30), worker.run(std::future::pending())).await.expect("ends").unwrap();
    let shown = db.show(id).await;
    assert_eq!((shown.status, shown.last_error_code.as_deref()), (Status::Dead, Some("POISON")));
    assert_eq!((shown.crashes, shown.attempts), (3, 0));
    assert_eq!(db.status(neighbour).await, Status::Sent);
}

async fn p11_expired_unless_maybe_sent(db: Database) {
    let now = db.outbox.store().walk("a", 0, None, 1).await.unwrap().now;
    let limit = now.plus(secs(50));
    let late = db.enqueue(NewMessage::new("a", "late").deliver_before(limit)).await.id;
    let maybe = db.enqueue(NewMessage::new("a", "maybe").deliver_before(limit)).await.id;
    db.claim_ids("a", "crashed", &[maybe]).await;
    db.advance(secs(100));
    let sending = courier(|message| async move {
        assert_eq!(message.payload, "maybe");
        Outcome::sent()
    });
    let worker = Worker::new(db.outbox.clone()).lane_with(impatient("a", 3), Arc::new(sending)).once();
    tokio::time::timeout(Duration::from_secs(30), worker.run(std::future::pending())).await.expect("ends").unwrap();
    assert_eq!(db.show(late).await.last_error_code.as_deref(), Some("EXPIRED"));
    assert_eq!(db.status(maybe).await, Status::Sent);
}

/// Many workers settle, renew, defer and claim the same lane at once; nothing is lost and nothing ends twice.
async fn many_settles_at_once_lose_nothing(db: Database) {
    let total = 240;
    db.outbox.enqueue((0..total).map(|n| NewMessage::new("a", n.to_string())).collect()).await.unwrap();
    let tasks: Vec<_> = (0..6)
        .map(|w| {
            let db = db.clone();
            tokio::spawn(async move {
                let owner = format!("w{w}");
                let mut dry = 0;
                for round in 0.. {
                    let claimed = db.claim("a", &owner, 9).await;
                    dry = if claimed.is_empty() { dry + 1 } else { 0 };
                    if dry > 20 {
                        break;
                    }
                    if claimed.is_empty() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        continue;
                    }
                    let leases: Vec<Lease> = claimed.iter().map(|m| m.lease()).rev().collect();
                    let kept = db.outbox.store().renew(&owner, &leases, secs(60)).await.unwrap();
                    // Another claim may be looking at a row for a moment.
                    assert!(kept.iter().all(|k| *k != LeaseState::Lost));
                    let mut entries = Vec::new();
                    for (n, message) in claimed.iter().enumerate().rev() {
                        let verdict = match (n + round) % 4 {
                            0 | 1 => Verdict::sent(),
                            2 if message.attempts < 2 => retry(secs(0)),
                            _ => dead("BAD"),
                        };
                        entries.push(Settlement::new(message.lease(), verdict));
                    }
                    let answers = db.settle_all("a", &owner, &entries).await;
                    assert!(answers.iter().all(|a| *a == Settled::Applied), "{answers:?}");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(db.counts().await[..2], [0, total]);
}
