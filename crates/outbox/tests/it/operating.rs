//! P6's one door (requeue), P10 dedup, and the verbs for operators: defer, wake, seize, release, prune, reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postrider::error::Kind;
use postrider::message::sha256;
use postrider::observe::{Observer, Phase, Told};
use postrider::outcome::{GiveBack, LeaseState, Outcome, Reach, Settled, Verdict};
use postrider::store::{Claim, Filter, From, Prune, Requeued, Status};
use postrider::tx::Dialect;
use postrider::worker::core::LaneSettings;
use postrider::{Begin, Courier, Enqueued, LaneRules, Lanes, Message, NewMessage, Worker, courier};

use crate::harness::{Database, OWNER, claim_of, created, dead, lanes, on_every_store, retry, secs, until};

on_every_store! {
    p6_requeue_brings_a_dead_message_back,
    p6_requeue_is_for_the_dead_only,
    p6_requeue_lifts_a_deadline_that_is_over,
    p6_requeue_never_lowers_the_token,
    p6_requeue_conflicts_with_a_taken_active_key,
    p6_concurrent_requeues_bring_it_back_once,
    p6_requeue_against_enqueue_of_the_same_active_key,
    p6_requeue_of_many_harms_no_other,
    p8_requeue_respects_a_key_that_another_has,
    p8_requeue_and_enqueue_race_for_a_key_that_is_over,
    requeue_waits_for_nobody,
    two_operators_requeue_a_lane_at_once,
    p10_dedup_hits_what_was_sent,
    p10_dedup_ends_with_retention,
    p10_dedup_knows_lane_and_target,
    p10_dedup_without_retention_is_refused,
    p10_a_worker_delivers_twins_once,
    defer_counts_nothing,
    defer_gives_many_back_at_once,
    wake_makes_waiting_rows_due,
    wake_leaves_leased_and_other_rows_alone,
    seize_takes_whatever_is_live,
    seize_then_settle_or_defer,
    release_sets_maybe_sent_on_a_leased_row_only,
    send_begun_is_what_a_takeover_remembers,
    send_begun_needs_a_lease_that_runs,
    send_begun_is_taken_back_by_a_definite_outcome,
    an_owned_lane_refuses_everybody_else,
    a_paused_lane_holds_its_backlog,
    pause_and_resume_say_whether_they_changed_anything,
    an_observer_hears_what_happens,
    a_long_history_is_shown_from_its_end,
    prune_is_bounded,
    prune_takes_its_lane_only,
    prune_dry_run_changes_nothing,
    prune_takes_history_and_dedup_along,
    prune_keeps_unexpired_keys_and_those_of_live_messages,
    concurrent_prunes_delete_each_row_once,
    lists_filter_and_page,
    stats_count_by_lane_and_status,
    store_ids_differ_and_stay,
    what_lies_in_a_shard_beyond_the_configured_ones_is_delivered,
    lanes_that_are_registered_keep_their_rules,
}

// ---- requeue ----

async fn p6_requeue_of_many_harms_no_other(db: Database) {
    let mut ids = Vec::new();
    for n in 0..30 {
        // Each third shares its active key with the next, and one of them is taken by somebody else.
        let message = NewMessage::new("a", n.to_string());
        ids.push(db.put_dead(if n % 3 < 2 { message.active_key(format!("k{}", n / 3)) } else { message }).await);
    }
    let holder = created(db.enqueue(NewMessage::new("a", "y").active_key("k4")).await);
    let sent = db.put_sent(NewMessage::new("a", "sent")).await;
    let asked: Vec<i64> = [&ids[..], &[sent, ids[0]]].concat();
    let answers = db.outbox.requeue(asked).await.unwrap();
    for (n, answer) in answers[..30].iter().enumerate() {
        let expected = match (n / 3, n % 3) {
            (4, 0 | 1) | (_, 1) => Requeued::Conflict,
            _ => Requeued::Requeued,
        };
        assert_eq!(*answer, expected, "message {n}");
    }
    assert_eq!(answers[30..], [Requeued::NotDead, Requeued::NotDead], "sent, and named twice");
    assert_eq!(db.status(holder).await, Status::Pending);
    assert_eq!(db.counts().await[..2], [20, 12], "live: 19 came back; ended: 11 conflicts and the one sent");
}

async fn p8_requeue_respects_a_key_that_another_has(db: Database) {
    let keyed = |payload: &str| NewMessage::new("brief", payload.to_owned()).key("k 😀");
    let first = db.put_dead(keyed("x")).await;
    // Over, and taken again.
    db.advance(secs(101));
    let second = created(db.enqueue(keyed("y")).await);
    assert_eq!(db.outbox.requeue(vec![first]).await.unwrap(), [Requeued::Conflict]);
    assert_eq!((db.status(first).await, db.status(second).await), (Status::Dead, Status::Pending));
    let lease = db.claim_ids("brief", "w", &[second]).await[0].lease();
    db.settle("brief", "w", lease, Verdict::sent()).await;
    assert_eq!(db.outbox.requeue(vec![first]).await.unwrap(), [Requeued::Conflict], "it was done since");
    // The other has ended and its key is over too: the first has it again as long as it lives.
    db.advance(secs(101));
    assert_eq!(db.outbox.requeue(vec![first]).await.unwrap(), [Requeued::Requeued]);
    let again = db.enqueue(keyed("x")).await;
    assert_eq!((again.id, again.outcome), (first, Enqueued::Exists), "it has its key");
    db.advance(secs(101));
    let entry = db.enqueue(keyed("z")).await;
    assert_eq!((entry.id, entry.outcome), (first, Enqueued::Differs), "a key is not free while its message lives");
    // Over, and pruned, and taken again.
    let third = db.put_dead(NewMessage::new("brief", "x").key("pruned")).await;
    db.advance(secs(101));
    let prune = Prune { lane: Some("brief".into()), older_than: secs(100_000), limit: 100, dry_run: false };
    assert!(db.outbox.prune(prune).await.unwrap().keys > 0);
    let fourth = created(db.enqueue(NewMessage::new("brief", "y").key("pruned")).await);
    assert_eq!(db.outbox.requeue(vec![third]).await.unwrap(), [Requeued::Conflict], "{fourth} has its key");
    // Dead, and so are those who came later under its key: of them the one that has it comes back, and no second one.
    let lease = db.claim_ids("brief", "w", &[fourth]).await[0].lease();
    db.settle("brief", "w", lease, dead("BAD")).await;
    assert_eq!(db.outbox.requeue(vec![third]).await.unwrap(), [Requeued::Conflict], "{fourth} may come back with it");
    assert_eq!(db.outbox.requeue(vec![fourth]).await.unwrap(), [Requeued::Requeued]);
    assert_eq!(db.outbox.requeue(vec![third]).await.unwrap(), [Requeued::Conflict]);
    db.advance(secs(101));
    assert_eq!(db.outbox.requeue(vec![third]).await.unwrap(), [Requeued::Conflict], "it is over, and {fourth} lives");
}

async fn p8_requeue_and_enqueue_race_for_a_key_that_is_over(db: Database) {
    for round in 0..10 {
        let key = format!("k{round}");
        let id = db.put_dead(NewMessage::new("brief", "x").key(&key)).await;
        db.advance(secs(101));
        let (requeuing, enqueuing) = (db.outbox.clone(), db.clone());
        let message = NewMessage::new("brief", "y").key(&key);
        let requeuing = tokio::spawn(async move { requeuing.requeue(vec![id]).await.unwrap()[0] });
        let enqueuing = tokio::spawn(async move { enqueuing.enqueue(message).await });
        match (requeuing.await.unwrap(), enqueuing.await.unwrap()) {
            (Requeued::Requeued, entry) => assert_eq!((entry.id, entry.outcome), (id, Enqueued::Differs)),
            (Requeued::Conflict, entry) => assert_eq!(entry.outcome, Enqueued::Created),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(db.count("outbox").await, 10, "one live message for each key");
}

async fn requeue_waits_for_nobody(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // whoever writes there has the file for himself
    }
    let mut ids = Vec::new();
    for n in 0..41 {
        ids.push(db.put_dead(NewMessage::new("a", n.to_string())).await);
    }
    let mut other = db.raw().await;
    other.run("BEGIN").await.unwrap();
    for id in &ids[..40] {
        other.run(&format!("SELECT id FROM outbox_done WHERE id = {id} FOR UPDATE")).await.unwrap();
    }
    // Whoever waited for each of them, if only for a moment, would be at it for forty of those.
    let answers = tokio::time::timeout(secs(20), db.outbox.requeue(ids.clone())).await.expect("it waits").unwrap();
    let mut expected = vec![Requeued::Held; 40];
    expected.push(Requeued::Requeued);
    assert_eq!(answers, expected, "those that are held hold up no other");
    other.run("ROLLBACK").await.unwrap();
    assert_eq!(db.outbox.requeue(vec![ids[0]]).await.unwrap(), [Requeued::Requeued]);
}

async fn two_operators_requeue_a_lane_at_once(db: Database) {
    for n in 0..60 {
        db.put_dead(NewMessage::new("a", n.to_string())).await;
    }
    let until = db.outbox.now().await.unwrap();
    let operator = |outbox: postrider::Outbox| async move {
        let (mut after, mut back) = (None, 0);
        loop {
            let died = outbox.dead("a", after, until, 7).await.unwrap();
            let Some(last) = died.last() else { return back };
            after = Some(*last);
            let answers = outbox.requeue(died.iter().map(|died| died.id).collect()).await.unwrap();
            assert!(
                answers.iter().all(|answer| matches!(answer, Requeued::Requeued | Requeued::NotDead)),
                "{answers:?}"
            );
            back += answers.iter().filter(|answer| **answer == Requeued::Requeued).count();
        }
    };
    let other = db.again(crate::harness::lanes()).await;
    let (one, two) = tokio::join!(operator(db.outbox.clone()), operator(other.outbox));
    assert_eq!(one + two, 60, "each came back once");
    assert_eq!(db.counts().await[..2], [60, 0]);
}

async fn p6_requeue_brings_a_dead_message_back(db: Database) {
    let id = db
        .put_dead(NewMessage::new("a", "x").target("t").active_key("k").key("key").header("h", "v").correlation_id("c"))
        .await;
    db.advance(secs(1000));
    assert_eq!(db.outbox.requeue(vec![id]).await.unwrap(), [Requeued::Requeued]);
    let shown = db.show(id).await;
    assert_eq!((shown.status, shown.attempts, shown.crashes, shown.lease_token), (Status::Pending, 0, 0, 1));
    assert_eq!((shown.target.as_deref(), shown.active_key.as_deref()), (Some("t"), Some("k")));
    assert_eq!((shown.last_error_code, shown.last_error), (None, None), "it begins anew");
    let (_, history) = db.outbox.show(id).await.unwrap().unwrap();
    assert_eq!(history.attempts.last().unwrap().code.as_deref(), Some("BAD"), "why it died stays in its history");
    assert_eq!(db.counts().await[..2], [1, 0]);
    let claimed = db.claim_one("a", "w").await;
    assert_eq!((claimed.id, claimed.lease_token, claimed.attempts, claimed.payload.as_ref()), (id, 2, 0, &b"x"[..]));
    assert_eq!((claimed.headers.len(), claimed.correlation_id.as_deref()), (1, Some("c")));
    assert_eq!(db.enqueue(NewMessage::new("a", "x").target("t").key("key")).await.outcome, Enqueued::Exists);
    assert_eq!(db.settle("a", "w", claimed.lease(), Verdict::sent()).await, Settled::Applied);
}

async fn p6_requeue_lifts_a_deadline_that_is_over(db: Database) {
    let first = db.put("b", "x").await;
    let limit = db.show(first).await.created_at.plus(secs(1000));
    for (code, kept) in [("EXPIRED", None), ("BAD", Some(limit))] {
        let id = created(db.enqueue(NewMessage::new("a", "x").deliver_before(limit)).await);
        let lease = db.claim_one("a", "w").await.lease();
        assert_eq!(db.settle("a", "w", lease, dead(code)).await, Settled::Applied);
        assert_eq!(db.outbox.requeue(vec![id]).await.unwrap(), [Requeued::Requeued]);
        assert_eq!(db.show(id).await.deliver_before, kept, "{code}");
        let lease = db.claim_one("a", "w").await.lease();
        assert_eq!(db.settle("a", "w", lease, Verdict::sent()).await, Settled::Applied);
    }
}

async fn p6_requeue_is_for_the_dead_only(db: Database) {
    let sent = db.put_sent(NewMessage::new("a", "sent")).await;
    let live = db.put("a", "live").await;
    let leased = db.put("b", "leased").await;
    db.claim_one("b", "w").await;
    let before = [db.show(sent).await, db.show(live).await, db.show(leased).await];
    let answers = db.outbox.requeue(vec![sent, live, leased, 999_999]).await.unwrap();
    assert_eq!(answers, [Requeued::NotDead; 4]);
    assert_eq!([db.show(sent).await, db.show(live).await, db.show(leased).await], before);
    assert!(db.outbox.requeue(vec![]).await.unwrap().is_empty());
}

async fn p6_requeue_never_lowers_the_token(db: Database) {
    let id = db.put("a", "x").await;
    let mut leases = Vec::new();
    for round in 1..=3 {
        let claimed = db.claim_one("a", "w").await;
        assert_eq!(claimed.lease_token, round);
        leases.push(claimed.lease());
        db.settle("a", "w", claimed.lease(), dead("BAD")).await;
        assert_eq!(db.outbox.requeue(vec![id]).await.unwrap(), [Requeued::Requeued]);
        for old in &leases {
            assert_eq!(db.settle("a", "w", *old, Verdict::sent()).await, Settled::LeaseLost);
        }
    }
    db.claim_one("a", "w").await;
    for old in &leases {
        assert_eq!(db.settle("a", "w", *old, Verdict::sent()).await, Settled::LeaseLost, "attempts are no fence");
    }
}

async fn p6_requeue_conflicts_with_a_taken_active_key(db: Database) {
    let id = db.put_dead(NewMessage::new("a", "x").active_key("k 😀")).await;
    let holder = created(db.enqueue(NewMessage::new("a", "y").active_key("k 😀")).await);
    let other = db.put_dead(NewMessage::new("a", "z").active_key("other")).await;
    let answers = db.outbox.requeue(vec![id, other]).await.unwrap();
    assert_eq!(answers, [Requeued::Conflict, Requeued::Requeued]);
    assert_eq!(db.status(id).await, Status::Dead);
    let lease = db.claim_ids("a", "w", &[holder]).await[0].lease();
    db.settle("a", "w", lease, Verdict::sent()).await;
    assert_eq!(db.outbox.requeue(vec![id]).await.unwrap(), [Requeued::Requeued]);
    assert_eq!(db.enqueue(NewMessage::new("a", "y").active_key("k 😀")).await.outcome, Enqueued::Differs);
}

async fn p6_concurrent_requeues_bring_it_back_once(db: Database) {
    let id = db.put_dead(NewMessage::new("a", "x")).await;
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let outbox = db.outbox.clone();
            tokio::spawn(async move { outbox.requeue(vec![id]).await.unwrap()[0] })
        })
        .collect();
    let mut back = 0;
    for task in tasks {
        back += usize::from(task.await.unwrap() == Requeued::Requeued);
    }
    assert_eq!(back, 1);
    assert_eq!(db.counts().await[..2], [1, 0]);
}

async fn p6_requeue_against_enqueue_of_the_same_active_key(db: Database) {
    for round in 0..10 {
        let key = format!("k{round}");
        let id = db.put_dead(NewMessage::new("a", "x").active_key(&key)).await;
        let (requeuing, enqueuing) = (db.outbox.clone(), db.clone());
        let message = NewMessage::new("a", "y").active_key(&key);
        let requeuing = tokio::spawn(async move { requeuing.requeue(vec![id]).await.unwrap()[0] });
        let enqueuing = tokio::spawn(async move { enqueuing.enqueue(message).await });
        let (back, entry) = (requeuing.await.unwrap(), enqueuing.await.unwrap());
        match back {
            Requeued::Requeued => assert_eq!((entry.id, entry.outcome), (id, Enqueued::Differs)),
            Requeued::Conflict => assert_eq!(entry.outcome, Enqueued::Created),
            other => panic!("it was dead and free: {other:?}"),
        }
    }
    assert_eq!(db.count("outbox").await, 10);
}

// ---- P10 ----

async fn p10_dedup_hits_what_was_sent(db: Database) {
    let probe = |payload: &[u8]| (Some("t".to_owned()), sha256(payload));
    let check = || db.outbox.check_dedup("dedup", vec![probe(b"x"), probe(b"y"), (None, sha256(b"x"))]);
    let message = || NewMessage::new("dedup", "x").target("t");
    assert_eq!(check().await.unwrap(), [None, None, None]);
    db.enqueue(message()).await;
    let lease = db.claim_one("dedup", "w").await.lease();
    assert_eq!(check().await.unwrap()[0], None, "leased is not sent");
    db.settle("dedup", "w", lease, retry(secs(0))).await;
    let lease = db.claim_one("dedup", "w").await.lease();
    assert_eq!(check().await.unwrap()[0], None, "tried is not sent");
    let first = Verdict::Sent { result_ref: Some("mem 😀".into()), dedup_hit: false };
    db.settle("dedup", "w", lease, first).await;
    assert_eq!(check().await.unwrap(), [Some(Some("mem 😀".into())), None, None]);
    db.put_dead(NewMessage::new("dedup", "y").target("t")).await;
    assert_eq!(check().await.unwrap()[1], None, "dead is not sent");
    db.put_sent(NewMessage::new("dedup", "x")).await;
    assert_eq!(check().await.unwrap(), [Some(Some("mem 😀".into())), None, Some(None)], "without a reference");
    // A hit is acked with the first one's reference and is no new first.
    db.enqueue(message()).await;
    let lease = db.claim_one("dedup", "w").await.lease();
    let hit = Verdict::Sent { result_ref: Some("mem 😀".into()), dedup_hit: true };
    assert_eq!(db.settle("dedup", "w", lease, hit).await, Settled::Applied);
    assert_eq!(db.count("outbox_dedup").await, 2);
}

async fn p10_dedup_ends_with_retention(db: Database) {
    let rules = LaneRules { dedup: true, retention: secs(100), ..LaneRules::default() };
    let db = db.again(Lanes::new().with("short", rules)).await;
    db.outbox.migrate().await.unwrap();
    db.put_sent(NewMessage::new("short", "x")).await;
    let check = || db.outbox.check_dedup("short", vec![(None, sha256(b"x"))]);
    db.advance(secs(90));
    assert_eq!(check().await.unwrap(), [Some(None)]);
    db.advance(secs(20));
    assert_eq!(check().await.unwrap(), [None], "past retention, even before the row is pruned");
}

async fn p10_dedup_knows_lane_and_target(db: Database) {
    db.put_sent(NewMessage::new("dedup", "x").target("t")).await;
    db.put_sent(NewMessage::new("a", "z")).await;
    let probe = |target: &str, payload: &[u8]| (Some(target.to_owned()), sha256(payload));
    let hits =
        db.outbox.check_dedup("dedup", vec![probe("t", b"x"), probe("T", b"x"), probe("t ", b"x")]).await.unwrap();
    assert_eq!(hits, [Some(None), None, None]);
    assert_eq!(db.outbox.check_dedup("memory", vec![probe("t", b"x")]).await.unwrap(), [None]);
    assert_eq!(db.outbox.check_dedup("a", vec![(None, sha256(b"z"))]).await.unwrap(), [None], "no dedup on this lane");
    assert!(db.outbox.check_dedup("dedup", vec![]).await.unwrap().is_empty());
    db.outbox.check_dedup("nowhere", vec![]).await.unwrap_err();
}

async fn p10_dedup_without_retention_is_refused(db: Database) {
    let rules = LaneRules { dedup: true, retention: Duration::ZERO, ..LaneRules::default() };
    let opened = postrider::Outbox::open(&db.url, Lanes::new().with("bad", rules)).await;
    assert!(opened.err().expect("refused").message.contains("dedup"));
}

async fn p10_a_worker_delivers_twins_once(db: Database) {
    let twins = (0..6).map(|n| NewMessage::new("memory", "x").target(if n % 2 == 0 { "t" } else { "u" })).collect();
    let ids: Vec<i64> = db.outbox.enqueue(twins).await.unwrap().iter().map(|e| e.id).collect();
    let delivered = Arc::new(AtomicUsize::new(0));
    let running = Arc::new(AtomicUsize::new(0));
    let (count, side_by_side) = (delivered.clone(), running.clone());
    let slow = courier(move |message| {
        let (count, side_by_side) = (count.clone(), side_by_side.clone());
        async move {
            let target = message.target.unwrap_or_default();
            assert!(side_by_side.fetch_add(1, Ordering::SeqCst) < 2, "twins never run side by side");
            tokio::time::sleep(Duration::from_millis(50)).await;
            side_by_side.fetch_sub(1, Ordering::SeqCst);
            count.fetch_add(1, Ordering::SeqCst);
            Outcome::Sent { result_ref: Some(format!("ref {target}")) }
        }
    });
    let worker = Worker::new(db.outbox.clone()).lane("memory", slow).once();
    tokio::time::timeout(Duration::from_secs(30), worker.run(std::future::pending())).await.expect("ends").unwrap();
    assert_eq!(delivered.load(Ordering::SeqCst), 2, "once per target");
    assert_eq!(db.count("write_audit WHERE reason = 'outbox_flush_success'").await, 2);
    assert_eq!(db.count("write_audit WHERE reason = 'outbox_flush_dedup_hit'").await, 4);
    for (n, id) in ids.iter().enumerate() {
        let shown = db.show(*id).await;
        let reference = if n % 2 == 0 { "ref t" } else { "ref u" };
        assert_eq!((shown.status, shown.result_ref.as_deref()), (Status::Sent, Some(reference)));
    }
}

// ---- defer, wake, seize, release ----

async fn defer_counts_nothing(db: Database) {
    let id = db.put("a", "x").await;
    for n in 1..=20 {
        let claimed = db.claim_one("a", "w").await;
        assert_eq!((claimed.lease_token, claimed.attempts, claimed.crashes, claimed.maybe_sent), (n, 0, 0, false));
        assert!(db.defer("w", claimed.lease(), secs(0)).await);
    }
    let shown = db.show(id).await;
    assert_eq!((shown.attempts, shown.crashes, shown.maybe_sent, shown.status), (0, 0, false, Status::Pending));
    assert_eq!(shown.last_error_code.as_deref(), Some("PAUSED"), "but it is visible");
    assert!(db.history(id).await.is_empty());
    // Neither does it forget anything.
    db.claim_one("a", "gone").await;
    db.advance(secs(100));
    let taken = db.claim_one("a", "w").await;
    assert_eq!(db.outbox.store().defer("w", &[taken.lease()], &GiveBack::now()).await.unwrap(), [LeaseState::Held]);
    let shown = db.show(id).await;
    assert_eq!((shown.crashes, shown.maybe_sent), (1, true));
    assert_eq!(shown.last_error_code.as_deref(), Some("PAUSED"), "no code leaves the old one");
}

async fn defer_gives_many_back_at_once(db: Database) {
    db.outbox.enqueue((0..20).map(|n| NewMessage::new("a", n.to_string())).collect()).await.unwrap();
    let claimed = db.claim("a", "w", 20).await;
    let mut leases: Vec<_> = claimed.iter().map(|m| m.lease()).rev().collect();
    leases[7].token += 1;
    let given = db.outbox.store().defer("w", &leases, &GiveBack::after(secs(1000), "PAUSED")).await.unwrap();
    assert_eq!(given.iter().filter(|g| **g == LeaseState::Held).count(), 19);
    assert_eq!(given[7], LeaseState::Lost);
    assert!(db.claim("a", "w", 20).await.is_empty());
    assert!(db.outbox.store().defer("w", &[], &GiveBack::now()).await.unwrap().is_empty());
    assert!(db.outbox.store().renew("w", &[], secs(60)).await.unwrap().is_empty());
}

async fn wake_makes_waiting_rows_due(db: Database) {
    let later = db.enqueue(NewMessage::new("a", "x").active_key("k").delay(secs(1000))).await.id;
    db.enqueue(NewMessage::new("a", "y").active_key("l").delay(secs(1000))).await;
    assert_eq!(db.outbox.wake("a", vec!["nobody".into()]).await.unwrap(), 0);
    assert_eq!(db.outbox.wake("a", vec!["k".into(), "nobody".into()]).await.unwrap(), 1);
    let claimed = db.claim_one("a", "w").await;
    assert_eq!((claimed.id, claimed.attempts), (later, 0));
    db.settle("a", "w", claimed.lease(), retry(secs(1000))).await;
    assert_eq!(db.outbox.wake("a", vec!["k".into(), "l".into()]).await.unwrap(), 2);
    assert_eq!(db.outbox.wake("a", vec!["k".into(), "l".into()]).await.unwrap(), 0, "they are due already");
    assert_eq!(db.claim("a", "w", 10).await.len(), 2);
}

async fn wake_leaves_leased_and_other_rows_alone(db: Database) {
    let id = db.enqueue(NewMessage::new("a", "x").active_key("k")).await.id;
    db.enqueue(NewMessage::new("b", "x").active_key("k").delay(secs(1000))).await;
    db.enqueue(NewMessage::new("a", "x").active_key("K").delay(secs(1000))).await;
    db.claim_one("a", "w").await;
    let before = db.show(id).await;
    assert_eq!(db.outbox.wake("a", vec!["k".into()]).await.unwrap(), 0);
    assert_eq!(db.show(id).await, before);
    assert!(db.claim("b", "w", 1).await.is_empty());
}

async fn seize_takes_whatever_is_live(db: Database) {
    let waiting = db.enqueue(NewMessage::new("a", "x").delay(secs(1000))).await.id;
    let leased = db.put("b", "y").await;
    let old = db.claim_one("b", "w").await.lease();
    let ended = db.put_sent(NewMessage::new("a", "z")).await;
    let seized = db.outbox.seize("operator:me", vec![leased, waiting, ended, 999_999, leased], secs(60)).await.unwrap();
    let got: Vec<(&str, i64, i64)> = seized.iter().map(|(lane, l)| (lane.as_str(), l.id, l.token)).collect();
    assert_eq!(got, [("a", waiting, 1), ("b", leased, 2)]);
    assert_eq!(db.settle("b", "w", old, Verdict::sent()).await, Settled::LeaseLost);
    assert!(!db.renew("w", old).await);
    let (waiting, leased) = (db.show(waiting).await, db.show(leased).await);
    assert_eq!((waiting.status, leased.status), (Status::Leased, Status::Leased));
    assert_eq!((waiting.maybe_sent, leased.maybe_sent), (false, true));
    assert_eq!(leased.locked_by.as_deref(), Some("operator:me"));
    assert_eq!((leased.crashes, leased.attempts), (0, 0));
}

async fn seize_then_settle_or_defer(db: Database) {
    let (one, two) = (db.put("a", "x").await, db.put("a", "y").await);
    let seized = db.outbox.seize("operator:me", vec![one, two], secs(60)).await.unwrap();
    assert_eq!(db.settle("a", "operator:me", seized[0].1, dead("CANCELLED")).await, Settled::Applied);
    assert!(db.defer("operator:me", seized[1].1, secs(0)).await);
    assert_eq!(db.status(one).await, Status::Dead);
    assert_eq!(db.claim_one("a", "w").await.id, two);
}

async fn release_sets_maybe_sent_on_a_leased_row_only(db: Database) {
    let leased = db.put("a", "x").await;
    let held = db.claim_one("a", "w").await;
    let free = db.put("a", "y").await;
    let waiting = db.enqueue(NewMessage::new("a", "z").delay(secs(1000))).await.id;
    assert_eq!(db.outbox.release(vec![leased, free, waiting, 999_999]).await.unwrap(), [leased, free, waiting]);
    for (id, maybe_sent, token) in [(leased, true, 2), (free, false, 1), (waiting, false, 1)] {
        let shown = db.show(id).await;
        assert_eq!((shown.maybe_sent, shown.lease_token, shown.crashes, shown.attempts), (maybe_sent, token, 0, 0));
        assert_eq!((shown.status, shown.last_error_code.as_deref()), (Status::Pending, Some("RELEASED")));
    }
    assert_eq!(db.settle("a", "w", held.lease(), Verdict::sent()).await, Settled::LeaseLost);
    let claimed = db.claim("a", "v", 10).await;
    assert_eq!(claimed.len(), 3, "due now, whatever it was before");
    assert!(claimed.iter().all(|m| m.crashes == 0 && m.taken_over_from.is_none()));
}

// ---- prune ----

// ---- send begun, owned lanes ----

/// Dies (never answers) before or after it said that it begins; refuses definitely; or delivers.
struct Careful {
    dies: Option<bool>,
    outcome: Outcome,
}

#[async_trait::async_trait]
impl Courier for Careful {
    async fn deliver(&self, _: &Message) -> Outcome {
        self.outcome.clone()
    }

    async fn deliver_begun(&self, message: &Message, begin: &Begin) -> Outcome {
        if self.dies == Some(false) {
            std::future::pending::<()>().await;
        }
        assert!(begin.commit().await.unwrap(), "the lease is ours");
        if self.dies == Some(true) {
            std::future::pending::<()>().await;
        }
        self.deliver(message).await
    }
}

/// Runs a worker on the lane `careful` until `until` holds, then makes an end of it without a drain.
async fn work_and_die(db: &Database, courier: Careful, until: impl AsyncFn() -> bool) {
    let settings = LaneSettings { lease: secs(30), ..LaneSettings::new("careful") };
    let worker = Worker::new(db.outbox.clone()).lane_with(settings, Arc::new(courier)).run(std::future::pending());
    let worker = tokio::spawn(worker);
    tokio::time::timeout(secs(30), async {
        while !until().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it comes about");
    worker.abort();
}

/// Comes to its send when its lease is over; keeps what it was told, and never ends.
struct Late {
    db: Database,
    told: Arc<std::sync::Mutex<Option<bool>>>,
}

#[async_trait::async_trait]
impl Courier for Late {
    async fn deliver(&self, _: &Message) -> Outcome {
        Outcome::sent()
    }

    async fn deliver_begun(&self, _: &Message, begin: &Begin) -> Outcome {
        self.db.advance(secs(31));
        let told = begin.commit().await.unwrap();
        self.told.lock().unwrap().get_or_insert(told);
        std::future::pending().await
    }
}

async fn send_begun_needs_a_lease_that_runs(db: Database) {
    let id = db.put("careful", "x").await;
    let told = Arc::new(std::sync::Mutex::new(None));
    let late = Late { db: db.clone(), told: told.clone() };
    let settings = LaneSettings { lease: secs(30), ..LaneSettings::new("careful") };
    let worker = Worker::new(db.outbox.clone()).lane_with(settings, Arc::new(late)).run(std::future::pending());
    let worker = tokio::spawn(worker);
    proving::kit::until("it is about to send", async || told.lock().unwrap().is_some()).await;
    worker.abort();
    assert_eq!(*told.lock().unwrap(), Some(false), "somebody else may have it by now");
    assert!(!maybe_sent(&db, id).await, "nothing was begun");
}

async fn maybe_sent(db: &Database, id: i64) -> bool {
    db.sql(&format!("SELECT maybe_sent FROM outbox WHERE id = {id}")).await[0].bool(0).expect("a flag")
}

async fn send_begun_is_what_a_takeover_remembers(db: Database) {
    for (begins, name) in [(false, "before"), (true, "after")] {
        let id = db.put("careful", name).await;
        let dies = Careful { dies: Some(begins), outcome: Outcome::sent() };
        work_and_die(&db, dies, async || db.status(id).await == Status::Leased && maybe_sent(&db, id).await == begins)
            .await;
        db.advance(secs(100));
        let claim = Claim { send_begun: true, ..claim_of("careful", "next", 10, secs(60), From::Mark(None)) };
        let claimed = db.outbox.store().claim(&claim).await.unwrap().messages;
        assert_eq!((claimed.len(), claimed[0].crashes), (1, 1));
        assert_eq!((claimed[0].maybe_sent, maybe_sent(&db, id).await), (begins, begins), "died {name} the first byte");
        assert_eq!(db.settle("careful", "next", claimed[0].lease(), Verdict::sent()).await, Settled::Applied);
    }
}

async fn send_begun_is_taken_back_by_a_definite_outcome(db: Database) {
    for (reach, maybe) in [(Reach::NeverSent, false), (Reach::Unknown, true), (Reach::Answered, true)] {
        // Once it may have been sent, only a definite resolution says otherwise; a refusal of a later attempt is none.
        let id = match reach {
            Reach::Answered => db.sql("SELECT MAX(id) FROM outbox").await[0].int(0).unwrap(),
            _ => db.put("careful", "x").await,
        };
        let before = db.show(id).await.attempts;
        let refused = Careful { dies: None, outcome: Outcome::retry("REFUSED", "no", reach) };
        work_and_die(&db, refused, async || db.show(id).await.attempts == before + 1).await;
        assert_eq!(maybe_sent(&db, id).await, maybe, "{reach:?}");
        db.advance(secs(3600));
    }
}

async fn an_owned_lane_refuses_everybody_else(db: Database) {
    let owner = db.outbox.owning(OWNER);
    let message = || NewMessage::new("owned", "x");
    let refused = db.outbox.enqueue(vec![NewMessage::new("a", "free"), message()]).await.unwrap_err();
    assert_eq!(refused.kind, Kind::LaneOwned);
    assert!(refused.message.contains(OWNER), "it names the command to use: {refused}");
    assert_eq!(db.counts().await, [0; 4], "nothing half-written");
    assert_eq!(db.outbox.owning("somebody else").enqueue(vec![message()]).await.unwrap_err().kind, Kind::LaneOwned);

    let id = created(owner.enqueue(vec![message()]).await.unwrap()[0]);
    let lease = db.claim_one("owned", "w").await.lease();
    db.settle("owned", "w", lease, dead("BAD")).await;
    assert_eq!(db.outbox.requeue(vec![id]).await.unwrap_err().kind, Kind::LaneOwned);
    assert_eq!(owner.requeue(vec![id]).await.unwrap(), [Requeued::Requeued]);
    let lease = db.claim_one("owned", "w").await.lease();
    db.settle("owned", "w", lease, dead("BAD")).await;

    db.advance(secs(1000));
    let prune =
        |lane: Option<&str>| Prune { lane: lane.map(str::to_owned), older_than: secs(1), limit: 10, dry_run: false };
    assert_eq!(db.outbox.prune(prune(Some("owned"))).await.unwrap_err().kind, Kind::LaneOwned);
    assert_eq!(db.outbox.prune(prune(None)).await.unwrap().messages, 0, "all lanes means all that have no owner");
    assert_eq!(db.status(id).await, Status::Dead);
    assert_eq!(owner.prune(prune(Some("owned"))).await.unwrap().messages, 1);
}

async fn pause_and_resume_say_whether_they_changed_anything(db: Database) {
    assert!(db.outbox.pause("a").await.unwrap());
    assert!(!db.outbox.pause("a").await.unwrap(), "it was paused already");
    assert_eq!(db.outbox.paused_lanes().await.unwrap(), ["a"]);
    assert!(db.outbox.resume("a").await.unwrap());
    assert!(!db.outbox.resume("a").await.unwrap());
    assert_eq!(db.outbox.pause("nope").await.unwrap_err().kind, Kind::UnknownLane);
}

async fn a_paused_lane_holds_its_backlog(db: Database) {
    let (sent, log) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counting = |counter: &Arc<AtomicUsize>| {
        let counter = counter.clone();
        courier(move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            async { Outcome::sent() }
        })
    };
    db.outbox.pause("a").await.unwrap();
    for n in 0..20 {
        db.put("a", &n.to_string()).await;
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let worker = Worker::new(db.outbox.clone()).lane("a", counting(&sent)).lane("b", counting(&log));
    let worker = tokio::spawn(worker.run(async move { drop(stopped.await) }));
    let until = async |counter: &Arc<AtomicUsize>, least: usize| {
        let reached = async {
            while counter.load(Ordering::SeqCst) < least {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(secs(30), reached).await.expect("it comes about");
    };
    // The other lane is served, time and again, so this one could have been.
    for n in 1..=5 {
        db.put("b", "x").await;
        until(&log, n).await;
    }
    assert_eq!(sent.load(Ordering::SeqCst), 0);
    let stats = db.outbox.stats().await.unwrap();
    assert_eq!((stats["a"].pending, stats["a"].leased), (20, 0), "the backlog waits");
    db.outbox.resume("a").await.unwrap();
    until(&sent, 20).await;
    drop(stop);
    worker.await.unwrap().unwrap();
    assert_eq!(db.outbox.stats().await.unwrap()["a"].sent, 20, "and loses nothing");
}

#[derive(Default)]
struct Listener(std::sync::Mutex<Vec<String>>);

impl Observer for Listener {
    fn claimed(&self, lane: &str, messages: u64, taken_over: u64) {
        if messages > 0 {
            self.0.lock().unwrap().push(format!("{lane} claimed {messages}, {taken_over} taken over"));
        }
    }

    fn settled(&self, told: &Told<'_>) {
        let Told { lane, outbox_id, outcome, attempt, reason_code, took: _ } = told;
        self.0.lock().unwrap().push(format!("{lane} {outbox_id} {} {attempt} {reason_code:?}", outcome.as_str()));
    }

    fn took(&self, lane: &str, phase: Phase, time: Duration) {
        if phase == Phase::Send {
            self.0.lock().unwrap().push(format!("{lane} took {}", time < secs(30)));
        }
    }
}

async fn an_observer_hears_what_happens(db: Database) {
    let id = db.put("a", "x").await;
    db.claim_ids("a", "crashed", &[id]).await;
    db.advance(secs(100));
    let listener = Arc::new(Listener::default());
    let worker = Worker::new(db.outbox.clone()).name("me").observer(listener.clone()).once();
    assert!(worker.owner().starts_with("me:"), "{}", worker.owner());
    let refusing = courier(|_| async { Outcome::retry("HTTP_503", "busy", Reach::Answered) });
    worker.lane("a", refusing).run(std::future::pending()).await.unwrap();
    let retry = format!("a {id} outbox_flush_retry 1 Some(\"HTTP_503\")");
    assert_eq!(*listener.0.lock().unwrap(), ["a claimed 1, 1 taken over", "a took true", &retry]);
}

async fn a_long_history_is_shown_from_its_end(db: Database) {
    let id = db.put("a", "x").await;
    let at = if db.dialect == Dialect::Sqlite { "n" } else { "TIMESTAMP '2026-01-01 00:00:00'" };
    let attempts = async |from: usize, to: usize| {
        db.sql(&format!(
            "INSERT INTO outbox_attempts (outbox_id, kind, attempt, lease_token, at)
             WITH RECURSIVE s (n) AS (SELECT {from} UNION ALL SELECT n + 1 FROM s WHERE n < {to})
             SELECT {id}, 'retry', n, n, {at} FROM s"
        ))
        .await;
        db.outbox.show(id).await.unwrap().unwrap().1
    };
    // MariaDB's recursion ends after a thousand.
    attempts(1, 500).await;
    let whole = attempts(501, 1000).await;
    assert_eq!((whole.attempts.len(), whole.truncated, whole.attempts[0].attempt), (1000, false, 1));
    let cut = attempts(1001, 1003).await;
    let ends = (cut.attempts[0].attempt, cut.attempts[999].attempt);
    assert_eq!((cut.attempts.len(), cut.truncated, ends), (1000, true, (4, 1003)));
}

async fn prune_is_bounded(db: Database) {
    for n in 0..12 {
        let message = NewMessage::new("a", n.to_string());
        if n % 3 == 0 {
            db.put_dead(message).await
        } else {
            db.put_sent(message).await
        };
    }
    db.advance(secs(100));
    let mut left = 12;
    for _ in 0..3 {
        assert_eq!(db.prune(secs(50), 5).await.messages, 5.min(left) as u64);
        left -= 5.min(left);
        assert_eq!(db.count("outbox_done").await, left);
    }
    assert_eq!(db.prune(secs(50), 0).await.messages, 0);
}

async fn prune_takes_its_lane_only(db: Database) {
    let (a, b) = (db.put_sent(NewMessage::new("a", "x")).await, db.put_sent(NewMessage::new("b", "x")).await);
    db.advance(secs(100));
    let prune = Prune { lane: Some("a".into()), older_than: secs(10), limit: 100, dry_run: false };
    assert_eq!(db.outbox.prune(prune).await.unwrap().messages, 1);
    assert!(db.is_gone(a).await);
    assert_eq!(db.status(b).await, Status::Sent);
}

async fn prune_dry_run_changes_nothing(db: Database) {
    db.put_sent(NewMessage::new("brief", "x").key("k")).await;
    db.put_dead(NewMessage::new("brief", "y")).await;
    db.advance(secs(1000));
    let before = db.counts().await;
    let dry = Prune { lane: None, older_than: secs(10), limit: 100, dry_run: true };
    let would = db.outbox.prune(dry).await.unwrap();
    assert_eq!((would.messages, would.keys), (2, 1));
    assert_eq!(db.counts().await, before);
    assert_eq!(db.prune(secs(10), 100).await, would, "and then it does what it said");
}

async fn prune_takes_history_and_dedup_along(db: Database) {
    let id = db.put("dedup", "x").await;
    let lease = db.claim_one("dedup", "w").await.lease();
    db.settle("dedup", "w", lease, retry(secs(0))).await;
    let lease = db.claim_one("dedup", "w").await.lease();
    db.settle("dedup", "w", lease, Verdict::sent()).await;
    assert_eq!((db.count("outbox_attempts").await, db.count("outbox_dedup").await), (1, 1));
    db.advance(secs(100));
    db.prune(secs(10), 100).await;
    assert!(db.is_gone(id).await);
    assert_eq!((db.count("outbox_attempts").await, db.count("outbox_dedup").await), (0, 0));
}

async fn prune_keeps_unexpired_keys_and_those_of_live_messages(db: Database) {
    db.enqueue(NewMessage::new("brief", "live").key("live")).await;
    db.claim_one("brief", "w").await;
    db.put_sent(NewMessage::new("brief", "sent").key("sent")).await;
    db.put_sent(NewMessage::new("a", "other").key("long")).await;
    assert_eq!(db.prune(secs(1000), 100).await.keys, 0, "none has expired");
    db.advance(secs(200));
    assert_eq!(db.prune(secs(1000), 100).await.keys, 1);
    let column = if db.dialect == postrider::tx::Dialect::Mysql { "`key`" } else { "key" };
    let left = db.sql(&format!("SELECT {column} FROM outbox_keys ORDER BY {column}")).await;
    let left: Vec<String> = left.iter().map(|row| row.text(0).unwrap()).collect();
    assert_eq!(left, ["live", "long"]);
}

async fn concurrent_prunes_delete_each_row_once(db: Database) {
    for n in 0..30 {
        db.put_sent(NewMessage::new("brief", n.to_string()).key(n.to_string())).await;
    }
    db.advance(secs(1000));
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let db = db.clone();
            tokio::spawn(async move {
                let (mut messages, mut keys) = (0, 0);
                for _ in 0..10 {
                    let pruned = db.prune(secs(10), 4).await;
                    messages += pruned.messages;
                    keys += pruned.keys;
                }
                (messages, keys)
            })
        })
        .collect();
    let mut sum = (0, 0);
    for task in tasks {
        let (messages, keys) = task.await.unwrap();
        sum = (sum.0 + messages, sum.1 + keys);
    }
    assert_eq!(sum, (30, 30));
    assert_eq!(db.counts().await, [0; 4]);
}

// ---- reads ----

async fn lists_filter_and_page(db: Database) {
    let sent = db.put_sent(NewMessage::new("a", "sent")).await;
    let dead = db.put_dead(NewMessage::new("a", "dead")).await;
    let leased = db.put("a", "leased").await;
    db.claim_one("a", "w").await;
    let pending = db.put("a", "pending").await;
    let other = db.put("b", "other").await;
    let list = |status, before, limit| {
        let filter = Filter { lane: Some("a".into()), status, before, limit, ..Filter::default() };
        let outbox = db.outbox.clone();
        async move { outbox.list(filter).await.unwrap().items.iter().map(|s| s.id).collect::<Vec<_>>() }
    };
    assert_eq!(list(None, None, 10).await, [pending, leased, dead, sent], "newest first");
    assert_eq!(list(None, None, 2).await, [pending, leased]);
    assert_eq!(list(None, Some(leased), 2).await, [dead, sent]);
    for (status, id) in
        [(Status::Sent, sent), (Status::Dead, dead), (Status::Leased, leased), (Status::Pending, pending)]
    {
        assert_eq!(list(Some(status), None, 10).await, [id], "{status:?}");
    }
    let all = db.outbox.list(Filter { limit: 10, ..Filter::default() }).await.unwrap().items;
    assert_eq!(all.len(), 5);
    assert_eq!(all[0].id, other);
    assert_eq!(all[0].payload_bytes, 5);
    db.advance(secs(100));
    assert_eq!(list(Some(Status::Pending), None, 10).await, [pending, leased], "an expired lease is pending");
}

async fn stats_count_by_lane_and_status(db: Database) {
    db.put_sent(NewMessage::new("a", "x")).await;
    db.put_sent(NewMessage::new("a", "x")).await;
    db.put_dead(NewMessage::new("a", "x")).await;
    db.put("a", "x").await;
    db.claim_one("a", "w").await;
    db.put("a", "x").await;
    db.enqueue(NewMessage::new("a", "x").delay(secs(1000))).await;
    db.advance(secs(30));
    let stats = db.outbox.stats().await.unwrap();
    let a = stats["a"];
    assert_eq!((a.pending, a.leased, a.sent, a.dead), (2, 1, 2, 1));
    assert!((30.0..60.0).contains(&a.oldest_due_seconds), "{}", a.oldest_due_seconds);
    assert_eq!(stats["b"], postrider::store::LaneStats::default());
    assert_eq!(stats.len(), lanes().iter().count());
}

async fn store_ids_differ_and_stay(db: Database) {
    let id = db.outbox.store_id().await.unwrap();
    assert_eq!(id.len(), 16);
    db.outbox.migrate().await.unwrap();
    assert_eq!(db.again(lanes()).await.outbox.store_id().await.unwrap(), id);
}

/// While the number of shards changes, some processes still write into shards that others do not know.
async fn what_lies_in_a_shard_beyond_the_configured_ones_is_delivered(db: Database) {
    let with = |shards| Lanes::new().with("sharded", LaneRules { shards, ..LaneRules::default() });
    let fewer = db.again(with(2)).await.outbox;
    fewer.migrate().await.unwrap();
    let put = async |names: std::ops::Range<u32>| {
        for n in names {
            db.enqueue(NewMessage::new("sharded", "x").key(format!("n{n}"))).await; // into one of eight
        }
    };
    put(0..20).await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let worker = Worker::new(fewer.clone()).lane("sharded", courier(|_| async { Outcome::sent() }));
    let worker = tokio::spawn(worker.run(async { drop(stopped.await) }));
    until(async || db.count("outbox").await == 0).await;
    put(20..40).await; // while it runs
    until(async || db.count("outbox").await == 0).await;
    stop.send(()).unwrap();
    worker.await.unwrap().unwrap();
    assert_eq!(db.count("outbox_done WHERE status = 'sent'").await, 40);
}

/// A command with another configuration does not change the rules of those who serve the lane.
async fn lanes_that_are_registered_keep_their_rules(db: Database) {
    let other = Lanes::new().with("sharded", LaneRules::default()).with("new", LaneRules::default());
    let other = db.again(other).await.outbox;
    other.store().migrate().await.unwrap();
    other.register_missing_lanes().await.unwrap();
    let shards = async |lane: &str| db.count(&format!("outbox_lanes WHERE lane = '{lane}' AND shards = 8")).await;
    assert_eq!((shards("sharded").await, db.count("outbox_lanes WHERE lane = 'new'").await), (1, 1));
    other.register_lanes().await.unwrap();
    assert_eq!(shards("sharded").await, 0);
}
