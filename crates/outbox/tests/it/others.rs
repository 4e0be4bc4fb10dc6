//! Beside others: somebody else's locks and open transactions, readers that never pause, a lane, a target or a row in
//! trouble. None of it may cost the rest anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider::decide::Budgets;
use postrider::error::{Effect, Kind};
use postrider::lease::Lease;
use postrider::outcome::{GiveBack, LeaseState, Outcome, Settled, Settlement, Verdict};
use postrider::store::{Mode, Requeued, Status, transact};
use postrider::tx::{Dialect, Tx};
use postrider::worker::core::LaneSettings;
use postrider::{
    Courier, Enqueued, LaneRules, Lanes, NewMessage, OnSettled, Options, Outbox, Result, Winner, Worker, courier, open,
};

use crate::harness::{Database, Raw, created, dead, lanes, on_every_store, retry, secs, until};

on_every_store! {
    p3_a_row_that_another_session_has_locked_costs_the_others_nothing,
    p3_a_row_that_another_session_refers_to_keeps_its_lease,
    p3_a_history_read_with_locks_costs_no_lease,
    what_is_given_up_is_over_on_the_server_too,
    a_crowd_of_locked_rows_at_the_head_stops_nobody_else,
    p9_a_caller_told_that_a_key_exists_stops_no_worker,
    p9_a_caller_told_that_an_active_key_exists_costs_no_lease,
    p9_a_key_newer_than_the_callers_snapshot_costs_no_lease,
    p9_a_caller_told_that_an_ended_message_exists_keeps_nobody_waiting,
    p8_a_key_that_came_back_is_taken_for_a_caller_with_an_old_snapshot,
    p9_a_caller_with_an_active_key_keeps_nobody_waiting,
    p8_the_active_key_of_a_message_taken_away_by_hand_is_free,
    p8_of_several_dead_under_one_key_one_comes_back,
    a_requeue_goes_on_beside_an_open_producer,
    p8_callers_told_the_same_do_not_wait_for_each_other,
    p8_a_refused_enqueue_from_sql_leaves_no_key_behind,
    a_read_sees_what_was_committed_before_it_was_asked,
    a_pool_in_use_is_told_as_such_and_in_time,
    those_who_wait_for_a_lock_leave_connections_to_the_engine,
    p7_what_was_due_before_1970_is_due,
    p6_a_part_that_panics_costs_one_entry,
    p11_a_stop_in_the_last_attempt_ends_nothing,
    p7_what_expires_while_it_waits_is_not_sent,
    a_suspect_of_one_lane_holds_up_no_other,
    twins_that_wait_leave_room_for_others,
    release_of_expired_leases_leaves_alone_what_was_taken_over,
    what_one_process_tells_another_hears,
    the_doctor_finds_what_waits_in_vain,
    the_doctor_looks_beyond_the_first_page,
    the_doctor_gives_keys_back_that_name_nobody,
    the_doctor_mends_all_but_what_is_locked,
    what_a_hand_wrote_holds_up_nobody_and_is_told,
    audits_go_when_they_are_old,
}

/// `SELECT … FOR UPDATE`, in a transaction that stays open.
async fn lock(db: &Database, table: &str) -> crate::harness::Raw {
    let mut session = db.raw().await;
    session.run("BEGIN").await.unwrap();
    session.run(&format!("SELECT 1 FROM {table} FOR UPDATE")).await.unwrap();
    session
}

async fn p3_a_row_that_another_session_has_locked_costs_the_others_nothing(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // it has no locks on rows
    }
    let store = db.outbox.store();
    for (lane, verdict) in
        [("a", Verdict::sent()), ("audited", Verdict::sent()), ("b", retry(secs(5))), ("fleeting", dead("BAD"))]
    {
        for n in 0..10 {
            db.put(lane, &n.to_string()).await;
        }
        let claimed = db.claim(lane, "w", 10).await;
        let leases: Vec<Lease> = claimed.iter().map(|m| m.lease()).collect();
        let mut session = lock(&db, &format!("outbox WHERE id = {}", claimed[3].id)).await;

        let mut expected = vec![LeaseState::Held; 10];
        expected[3] = LeaseState::Locked;
        assert_eq!(store.renew("w", &leases, secs(60)).await.unwrap(), expected, "{lane}");
        let lost = Lease { token: leases[3].token + 1, ..leases[3] };
        assert_eq!(store.renew("w", &[lost], secs(60)).await.unwrap(), [LeaseState::Lost]);
        assert_eq!(store.defer("w", &leases[3..5], &GiveBack::now()).await.unwrap(), expected[3..5]);

        let left: Vec<Settlement> = (leases.iter().enumerate())
            .filter(|(n, _)| *n != 4)
            .map(|(_, lease)| Settlement::new(*lease, verdict.clone()))
            .collect();
        let answers = store.settle(lane, "w", &left).await.unwrap();
        let mut expected = vec![Settled::Applied; 9];
        expected[3] = Settled::Locked;
        assert_eq!(answers, expected, "{lane}");
        session.run("COMMIT").await.unwrap();
        assert_eq!(store.settle(lane, "w", &left[3..4]).await.unwrap(), [Settled::Applied], "{lane}");
    }
}

/// A claim passes such a lock: whatever keeps the claim must pass it, too, or the message goes out once a lease.
async fn p3_a_row_that_another_session_refers_to_keeps_its_lease(db: Database) {
    let holds = match db.dialect {
        Dialect::Sqlite => return,
        Dialect::Postgres => "SELECT id FROM outbox WHERE lane = '{lane}' ORDER BY due_at, id LIMIT 3 FOR KEY SHARE",
        // By the index alone: its entries are locked, and the rows are not.
        Dialect::Mysql => {
            "SELECT id FROM outbox FORCE INDEX (idx_claim) WHERE lane = '{lane}' AND shard_id = 0 ORDER BY due_at, id LIMIT 3 LOCK IN SHARE MODE"
        }
    };
    let store = db.outbox.store();
    for (lane, verdict) in [("a", Verdict::sent()), ("audited", Verdict::sent()), ("b", retry(secs(5)))] {
        for n in 0..10 {
            db.put(lane, &n.to_string()).await;
        }
        let leases: Vec<Lease> = db.claim(lane, "w", 10).await.iter().map(|m| m.lease()).collect();
        let mut session = db.raw().await;
        session.run("BEGIN").await.unwrap();
        session.run(&holds.replace("{lane}", lane)).await.unwrap();
        assert_eq!(store.renew("w", &leases, secs(60)).await.unwrap(), [LeaseState::Held; 10], "{lane}");
        let all: Vec<Settlement> = leases.iter().map(|lease| Settlement::new(*lease, verdict.clone())).collect();
        // What met a lock is asked for again, alone.
        let mut left = Vec::new();
        for (mut entry, answer) in all.clone().into_iter().zip(store.settle(lane, "w", &all).await.unwrap()) {
            let mut answer = answer;
            if answer == Settled::Locked {
                entry.wary = true;
                answer = store.settle(lane, "w", std::slice::from_ref(&entry)).await.unwrap()[0];
            }
            match answer {
                Settled::Locked => left.push(entry),
                other => assert_eq!(other, Settled::Applied, "{lane}"),
            }
        }
        // InnoDB locks the entry where it stops, too.
        assert!((3..=4).contains(&left.len()), "{lane}: {left:?}");
        assert_eq!(store.renew("w", &leases[..3], secs(60)).await.unwrap(), [LeaseState::Held; 3], "{lane}");
        session.run("COMMIT").await.unwrap();
        assert_eq!(store.settle(lane, "w", &left).await.unwrap(), vec![Settled::Applied; left.len()], "{lane}");
    }
}

/// InnoDB locks where new rows would go, too. Outcomes wait, and their leases are renewed.
async fn p3_a_history_read_with_locks_costs_no_lease(db: Database) {
    if db.dialect != Dialect::Mysql {
        return;
    }
    for n in 0..10 {
        db.put("a", &n.to_string()).await;
    }
    let leases: Vec<Lease> = db.claim("a", "w", 10).await.iter().map(|m| m.lease()).collect();
    let mut session = db.raw().await;
    session.run("BEGIN").await.unwrap();
    let report = "SELECT id FROM outbox_done WHERE lane = 'a' AND status = 'sent' LOCK IN SHARE MODE";
    session.run(report).await.unwrap();
    let store = db.outbox.store();
    let all: Vec<Settlement> = leases.iter().map(|lease| Settlement::new(*lease, Verdict::sent())).collect();
    let settle = store.settle("a", "w", &all);
    let begun = std::time::Instant::now();
    assert_eq!(settle.await.unwrap(), [Settled::Locked; 10]);
    // One wait for all of them: while it lasts they cannot be renewed.
    assert!(begun.elapsed() < secs(4), "{:?}", begun.elapsed());
    assert_eq!(store.renew("w", &leases, secs(60)).await.unwrap(), [LeaseState::Held; 10]);
    session.run("COMMIT").await.unwrap();
    assert_eq!(store.settle("a", "w", &all).await.unwrap(), [Settled::Applied; 10]);
}

async fn what_is_given_up_is_over_on_the_server_too(db: Database) {
    let (take, leave, waiting) = match db.dialect {
        Dialect::Sqlite => return, // there is no server
        Dialect::Postgres => (
            "BEGIN; LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE",
            "ROLLBACK",
            "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        ),
        Dialect::Mysql => (
            "LOCK TABLES outbox WRITE",
            "UNLOCK TABLES",
            "information_schema.processlist WHERE db = DATABASE() AND state LIKE '%lock%'",
        ),
    };
    let id = created(db.enqueue(NewMessage::new("a", "x").key("k")).await);
    let mut session = db.raw().await;
    session.run(take).await.unwrap();
    let claim = crate::harness::claim_of("a", "w", 1, secs(60), postrider::store::From::Mark(None));
    for _ in 0..3 {
        let error = db.outbox.store().claim(&claim).await.unwrap_err();
        assert_eq!((error.kind, error.effect), (Kind::Locked, Effect::NotApplied), "{error}");
    }
    assert_eq!(db.count(waiting).await, 0);
    session.run(leave).await.unwrap();
    assert_eq!(db.claim_one("a", "w").await.id, id);
}

/// However few are wanted: those that can be had stand behind those that cannot.
async fn a_crowd_of_locked_rows_at_the_head_stops_nobody_else(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // it has no locks on rows
    }
    let free = created(db.enqueue(NewMessage::new("a", "free").delay(secs(1))).await);
    for n in 0..3 {
        let messages = (0..200).map(|m| NewMessage::new("a", format!("{n} {m}"))).collect();
        db.outbox.enqueue(messages).await.unwrap();
    }
    db.advance(secs(2));
    let table = if db.dialect == Dialect::Mysql { "outbox FORCE INDEX (PRIMARY)" } else { "outbox" };
    let _session = lock(&db, &format!("{table} WHERE id > {free}")).await;
    assert_eq!(db.claim_one("a", "w").await.id, free);
    // With nothing left to have a claim says so, and nobody looks again at once.
    let claim = crate::harness::claim_of("a", "w", 1, secs(60), postrider::store::From::Mark(None));
    let nothing = db.outbox.store().claim(&claim).await.unwrap();
    assert!(nothing.messages.is_empty() && nothing.exhausted);
}

/// A transaction of an application's own, with its default isolation.
async fn enqueue_and_stay_open(db: &Database, message: NewMessage) -> (crate::harness::Raw, Enqueued) {
    let mut session = db.raw().await;
    session.run("BEGIN").await.unwrap();
    let outcome = enqueue_in(db, &mut session, message).await;
    (session, outcome)
}

async fn enqueue_in(db: &Database, session: &mut crate::harness::Raw, message: NewMessage) -> Enqueued {
    let entry = match session {
        crate::harness::Raw::Sqlite(_) => unreachable!("not for SQLite"),
        crate::harness::Raw::Postgres(client) => db.outbox.enqueue_in(client, &[message]).await,
        crate::harness::Raw::Mysql(conn) => db.outbox.enqueue_in(conn, &[message]).await,
    };
    entry.unwrap().entries()[0].outcome
}

/// What a worker needs of a message: renewed, then settled.
async fn renewed_and_settled(db: &Database, lease: Lease) -> (LeaseState, Settled) {
    let store = db.outbox.store();
    let renewed = store.renew("w", &[lease], secs(60)).await.unwrap()[0];
    (renewed, store.settle("a", "w", &[Settlement::new(lease, Verdict::sent())]).await.unwrap()[0])
}

async fn p9_a_caller_told_that_a_key_exists_stops_no_worker(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // a caller's transaction is the only writer while it is open
    }
    for n in 0..2 {
        let message = || NewMessage::new("a", "x").key(format!("k{n}"));
        let id = created(db.enqueue(message()).await);
        let (mut session, outcome) = match n {
            0 => enqueue_and_stay_open(&db, message()).await,
            _ => call_and_stay_open(&db, &format!("k{n}")).await,
        };
        assert_eq!(outcome, Enqueued::Exists);
        let claimed = db.claim_one("a", "w").await;
        assert_eq!(claimed.id, id);
        assert_eq!(renewed_and_settled(&db, claimed.lease()).await, (LeaseState::Held, Settled::Applied));
        session.run("COMMIT").await.unwrap();
    }
}

/// The same by the database's own function.
async fn call_and_stay_open(db: &Database, key: &str) -> (crate::harness::Raw, Enqueued) {
    use mysql_async::prelude::Queryable;
    let mut session = db.raw().await;
    session.run("BEGIN").await.unwrap();
    let outcome: String = match &mut session {
        crate::harness::Raw::Sqlite(_) => unreachable!("not for SQLite"),
        crate::harness::Raw::Postgres(client) => {
            let sql = "SELECT outcome FROM postrider_enqueue('a', 'x'::bytea, key => $1)";
            client.query_one(sql, &[&key]).await.unwrap().get(0)
        }
        crate::harness::Raw::Mysql(conn) => {
            let call = format!("CALL postrider_enqueue('a', 'x', '{key}', NULL, NULL, NULL, @id, @outcome)");
            conn.query_drop(call).await.unwrap();
            conn.query_first("SELECT @outcome").await.unwrap().unwrap()
        }
    };
    (session, if outcome == "exists" { Enqueued::Exists } else { Enqueued::Created })
}

async fn p9_a_caller_told_that_an_active_key_exists_costs_no_lease(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return;
    }
    let ids = [created(db.enqueue(NewMessage::new("a", "x").active_key("k")).await), db.put("a", "y").await];
    let (mut session, outcome) = enqueue_and_stay_open(&db, NewMessage::new("a", "x").active_key("k")).await;
    assert_eq!(outcome, Enqueued::Exists);
    let claimed = db.claim("a", "w", 10).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), ids);
    let leases: Vec<Lease> = claimed.iter().map(|m| m.lease()).collect();
    let store = db.outbox.store();
    assert_eq!(store.renew("w", &leases, secs(60)).await.unwrap(), [LeaseState::Held; 2]);
    let sent: Vec<Settlement> = leases.iter().map(|lease| Settlement::new(*lease, Verdict::sent())).collect();
    let answers = store.settle("a", "w", &sent).await.unwrap();
    // MySQL keeps a lock on the key's entry for the caller: its message waits for that, renewed, and no other does.
    let first = if db.dialect == Dialect::Mysql { Settled::Locked } else { Settled::Applied };
    assert_eq!(answers, [first, Settled::Applied]);
    session.run("COMMIT").await.unwrap();
    if first == Settled::Locked {
        assert_eq!(store.renew("w", &leases[..1], secs(60)).await.unwrap(), [LeaseState::Held]);
        assert_eq!(store.settle("a", "w", &sent[..1]).await.unwrap(), [Settled::Applied]);
    }
    assert_eq!(db.counts().await[..2], [0, 2]);
}

/// On MySQL under REPEATABLE READ: neither the library nor the procedure locks a message that the caller cannot see.
async fn p9_a_key_newer_than_the_callers_snapshot_costs_no_lease(db: Database) {
    use mysql_async::prelude::Queryable;
    if db.dialect != Dialect::Mysql {
        return; // PostgreSQL refuses such a caller (40001), SQLite has one writer
    }
    for by_procedure in [false, true] {
        let mut session = db.raw().await;
        session.run("BEGIN").await.unwrap();
        session.run("SELECT COUNT(*) FROM outbox").await.unwrap(); // what it sees from now on
        let message = || NewMessage::new("a", "x").active_key("k");
        let id = created(db.enqueue(message()).await);
        let exists = if by_procedure {
            let crate::harness::Raw::Mysql(conn) = &mut session else { unreachable!("MySQL") };
            let call = "CALL postrider_enqueue('a', 'x', NULL, NULL, 'k', NULL, @id, @outcome)";
            conn.query_drop(call).await.unwrap();
            conn.query_first::<String, _>("SELECT @outcome").await.unwrap().as_deref() == Some("exists")
        } else {
            enqueue_in(&db, &mut session, message()).await == Enqueued::Exists
        };
        assert!(exists, "by the procedure: {by_procedure}");
        let claimed = db.claim_one("a", "w").await;
        assert_eq!(claimed.id, id, "it can be claimed");
        let answers = renewed_and_settled(&db, claimed.lease()).await;
        assert_eq!(answers, (LeaseState::Held, Settled::Locked), "renewed; its end waits for the caller's");
        session.run("COMMIT").await.unwrap();
        let store = db.outbox.store();
        let sent = Settlement::new(claimed.lease(), Verdict::sent());
        assert_eq!(store.settle("a", "w", &[sent]).await.unwrap(), [Settled::Applied]);
    }
}

/// A key is over and its message dead when the caller first looks, and comes back before it enqueues under the same key.
async fn p8_a_key_that_came_back_is_taken_for_a_caller_with_an_old_snapshot(db: Database) {
    use mysql_async::prelude::Queryable;
    if db.dialect != Dialect::Mysql {
        return; // PostgreSQL refuses such a caller (40001), SQLite has one writer
    }
    for by_procedure in [false, true] {
        let key = format!("k-{by_procedure}");
        let message = || NewMessage::new("a", "x").key(key.clone());
        let id = db.put_dead(message()).await;
        let over = "UPDATE outbox_keys SET expires_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE outbox_id = ";
        db.raw().await.run(&format!("{over}{id}")).await.unwrap();
        let mut session = db.raw().await;
        session.run("BEGIN").await.unwrap();
        session.run("SELECT COUNT(*) FROM outbox").await.unwrap(); // what it sees from now on
        assert_eq!(db.outbox.requeue(vec![id]).await.unwrap(), [Requeued::Requeued]);
        let exists = if by_procedure {
            let crate::harness::Raw::Mysql(conn) = &mut session else { unreachable!("MySQL") };
            let call = format!("CALL postrider_enqueue('a', 'x', '{key}', NULL, NULL, NULL, @id, @outcome)");
            conn.query_drop(call).await.unwrap();
            conn.query_first::<String, _>("SELECT @outcome").await.unwrap().as_deref() == Some("exists")
        } else {
            enqueue_in(&db, &mut session, message()).await == Enqueued::Exists
        };
        assert!(exists, "by the procedure: {by_procedure}");
        session.run("COMMIT").await.unwrap();
    }
    assert_eq!(db.count("outbox").await, 2);
}

async fn p9_a_caller_told_that_an_ended_message_exists_keeps_nobody_waiting(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return;
    }
    db.put_sent(NewMessage::new("a", "x").key("k")).await;
    let (mut session, outcome) = enqueue_and_stay_open(&db, NewMessage::new("a", "x").key("k")).await;
    assert_eq!(outcome, Enqueued::Exists);
    for lane in ["a", "b", "sharded"] {
        assert!(db.put(lane, "new").await > 0);
        created(db.enqueue(NewMessage::new(lane, "new").active_key("other")).await);
    }
    session.run("COMMIT").await.unwrap();
}

async fn p9_a_caller_with_an_active_key_keeps_nobody_waiting(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return;
    }
    let message = || NewMessage::new("b", "x").active_key("m");
    for (round, isolation) in ["READ COMMITTED", "REPEATABLE READ"].into_iter().enumerate() {
        let isolation = match db.dialect {
            Dialect::Mysql => format!("SET SESSION TRANSACTION ISOLATION LEVEL {isolation}"),
            _ => format!("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}"),
        };
        // Told that it exists; that it exists, by one newer than what it sees; or the first after its end.
        for story in ["exists", "newer", "free"] {
            if story == "newer" && round == 1 && db.dialect == Dialect::Postgres {
                continue; // PostgreSQL refuses: 40001
            }
            if story != "newer" {
                created(db.enqueue(message()).await);
            }
            let (mut session, mut other) = (db.raw().await, db.raw().await);
            for caller in [&mut session, &mut other] {
                caller.run(&isolation).await.unwrap();
                caller.run("BEGIN").await.unwrap();
                caller.run("SELECT COUNT(*) FROM outbox").await.unwrap();
            }
            match story {
                "newer" => assert!(created(db.enqueue(message()).await) > 0),
                "free" => all_sent(&db, "b").await,
                _ => {}
            }
            if story == "free" && round == 1 && db.dialect == Dialect::Postgres {
                continue; // PostgreSQL refuses: 40001
            }
            let outcome = enqueue_in(&db, &mut session, message()).await;
            assert_eq!(outcome, if story == "free" { Enqueued::Created } else { Enqueued::Exists }, "{story}");
            if story != "free" {
                let call = match db.dialect {
                    Dialect::Mysql => "CALL postrider_enqueue('b', 'x', NULL, NULL, 'm', NULL, @id, @outcome)",
                    _ => "SELECT postrider_enqueue('b', 'x'::bytea, active_key => 'm')",
                };
                other.run(call).await.unwrap();
            }
            for lane in ["a", "b", "sharded"] {
                assert!(db.put(lane, "new").await > 0);
                for key in ["a", "l", "n"] {
                    let key = format!("{key} {round} {story}");
                    created(db.enqueue(NewMessage::new(lane, "new").active_key(key)).await);
                }
            }
            session.run("ROLLBACK").await.unwrap();
            other.run("ROLLBACK").await.unwrap();
            all_sent(&db, "b").await;
        }
    }
}

async fn all_sent(db: &Database, lane: &str) {
    let claimed = db.claim(lane, "w", 100).await;
    let sent: Vec<Settlement> = claimed.iter().map(|m| Settlement::new(m.lease(), Verdict::sent())).collect();
    let answers = db.outbox.store().settle(lane, "w", &sent).await.unwrap();
    assert_eq!(answers, vec![Settled::Applied; claimed.len()]);
    assert_eq!(db.count(&format!("outbox WHERE lane = '{lane}'")).await, 0);
}

/// Whoever deletes messages by hand does not have to know where their keys are.
async fn p8_the_active_key_of_a_message_taken_away_by_hand_is_free(db: Database) {
    let message = |key: &str| NewMessage::new("a", "x").active_key(key);
    let dead = db.put_dead(message("dead")).await;
    for key in ["one", "many", "from sql", "dead"] {
        created(db.enqueue(message(key)).await);
    }
    let mut session = db.raw().await;
    session.run("DELETE FROM outbox").await.unwrap();
    created(db.enqueue(message("one")).await);
    let several = db.outbox.enqueue(vec![message("many"), message("new")]).await.unwrap();
    assert!(several.iter().all(|entry| entry.outcome == Enqueued::Created), "{several:?}");
    if db.dialect == Dialect::Mysql {
        session.run("CALL postrider_enqueue('a', 'x', NULL, NULL, 'from sql', NULL, @id, @outcome)").await.unwrap();
        assert_eq!(db.count("outbox WHERE active_key = 'from sql'").await, 1);
    }
    assert_eq!(db.outbox.requeue(vec![dead]).await.unwrap(), [Requeued::Requeued]);
}

async fn p8_of_several_dead_under_one_key_one_comes_back(db: Database) {
    let mut ids = Vec::new();
    for n in 0..3 {
        ids.push(db.put_dead(NewMessage::new("brief", n.to_string()).key("k")).await);
        db.advance(secs(101));
    }
    let answers = db.outbox.requeue(ids).await.unwrap();
    let back = answers.iter().filter(|answer| **answer == Requeued::Requeued).count();
    assert_eq!((back, db.count("outbox").await), (1, 1), "{answers:?}");
}

async fn a_requeue_goes_on_beside_an_open_producer(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return;
    }
    let mut ids = Vec::new();
    for n in 0..10 {
        ids.push(db.put_dead(NewMessage::new("a", "x").active_key(format!("c{n}"))).await);
    }
    let (mut session, outcome) = enqueue_and_stay_open(&db, NewMessage::new("a", "y").active_key("c5")).await;
    assert_eq!(outcome, Enqueued::Created);
    let answers = db.outbox.requeue(ids.clone()).await.unwrap();
    let mut expected = vec![Requeued::Requeued; 10];
    expected[5] = Requeued::Held;
    assert_eq!(answers, expected);
    session.run("ROLLBACK").await.unwrap();
    let left: Vec<i64> = ids.into_iter().zip(answers).filter(|(_, a)| *a == Requeued::Held).map(|(id, _)| id).collect();
    assert!(db.outbox.requeue(left).await.unwrap().iter().all(|answer| *answer == Requeued::Requeued));
}

async fn p8_callers_told_the_same_do_not_wait_for_each_other(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return;
    }
    let known = || NewMessage::new("a", "x").key("known");
    created(db.enqueue(known()).await);
    let (mut one, first) = enqueue_and_stay_open(&db, known()).await;
    let (mut other, second) = enqueue_and_stay_open(&db, known()).await;
    assert_eq!((first, second), (Enqueued::Exists, Enqueued::Exists));
    assert_eq!(db.enqueue(known()).await.outcome, Enqueued::Exists);
    one.run("COMMIT").await.unwrap();
    other.run("COMMIT").await.unwrap();
}

/// Key and message are one transaction, also for a caller who has none.
async fn p8_a_refused_enqueue_from_sql_leaves_no_key_behind(db: Database) {
    let (refuse, call) = match db.dialect {
        Dialect::Sqlite => return,
        Dialect::Postgres => (
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
             CREATE TRIGGER no BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION no()",
            "SELECT postrider_enqueue('a', 'x'::bytea, key => 'k')",
        ),
        Dialect::Mysql => (
            "CREATE TRIGGER no BEFORE INSERT ON outbox FOR EACH ROW SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'",
            "CALL postrider_enqueue('a', 'x', 'k', NULL, NULL, NULL, @id, @outcome)",
        ),
    };
    let mut session = db.raw().await;
    session.run(refuse).await.unwrap();
    assert!(session.run(call).await.unwrap_err().contains("no"));
    assert_eq!(db.counts().await, [0, 0, 0, 0]);
    session
        .run(if db.dialect == Dialect::Mysql { "DROP TRIGGER no" } else { "DROP TRIGGER no ON outbox" })
        .await
        .unwrap();
    session.run(call).await.unwrap();
    assert_eq!(db.counts().await, [1, 0, 1, 0]);
}

/// Whatever others read meanwhile, and for however long.
async fn a_read_sees_what_was_committed_before_it_was_asked(db: Database) {
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..8)
        .map(|n| {
            let (outbox, stop) = (db.outbox.clone(), stop.clone());
            let mode = [Mode::Read, Mode::Look, Mode::Count][n % 3];
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    transact(&**outbox.store(), mode, |tx| Box::pin(slow_read(tx))).await.unwrap();
                }
            })
        })
        .collect();
    for n in 0..200 {
        let id = db.put("a", &n.to_string()).await;
        assert!(db.outbox.show(id).await.unwrap().is_some(), "message {id} is not seen right after its enqueue");
        let found = db.outbox.payload(id).await.unwrap();
        assert_eq!(found.as_deref(), Some(n.to_string().as_bytes()));
    }
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.await.unwrap();
    }
}

/// Looks at the table, dawdles, and looks again.
async fn slow_read(tx: &mut (dyn Tx + Send)) -> postrider::Result<()> {
    tx.query("SELECT COUNT(*) FROM outbox", &[]).await?;
    for _ in 0..20 {
        let sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500) SELECT MAX(i) FROM n";
        tx.query(sql, &[]).await?;
    }
    tx.query("SELECT COUNT(*) FROM outbox", &[]).await.map(drop)
}

async fn a_pool_in_use_is_told_as_such_and_in_time(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // one writer, and requests wait for it
    }
    let options = Options { connections: 1, deadline: Duration::from_millis(600), ..Options::default() };
    let outbox = Outbox::new(open(&db.url, lanes(), options).await.unwrap());
    let sleep = if db.dialect == Dialect::Mysql { "SELECT SLEEP(3)" } else { "SELECT pg_sleep(3)" };
    let reader = tokio::spawn({
        let outbox = outbox.clone();
        async move {
            transact(&**outbox.store(), Mode::Read, move |tx| Box::pin(async move { tx.query(sleep, &[]).await })).await
        }
    });
    tokio::task::yield_now().await;
    let error = loop {
        // Until the reader has the connection.
        match outbox.enqueue(vec![NewMessage::new("b", "x").key("k")]).await {
            Ok(_) => assert!(!reader.is_finished(), "nobody was told"),
            Err(error) => break error,
        }
    };
    assert_eq!((error.kind, error.effect), (Kind::Overloaded, Effect::NotApplied), "{error}");
    let error = reader.await.unwrap().unwrap_err();
    assert_eq!((error.kind, error.effect), (Kind::Timeout, Effect::NotApplied), "a read changes nothing: {error}");
}

async fn those_who_wait_for_a_lock_leave_connections_to_the_engine(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // one writer
    }
    let options = Options { connections: 4, deadline: Duration::from_secs(4), ..Options::default() };
    let outbox = Outbox::new(open(&db.url, lanes(), options).await.unwrap());
    // Eight who come to no end, as many as one may wish.
    let waiting: Vec<_> = (0..8)
        .map(|_| {
            let outbox = outbox.clone();
            tokio::spawn(async move {
                let wait = transact(&**outbox.store(), Mode::Write, |_| Box::pin(std::future::pending::<Result<()>>()));
                wait.await
            })
        })
        .collect();
    until(async || outbox.vitals().await.unwrap().pool.is_some_and(|pool| pool.in_use >= 2)).await;
    for mode in [Mode::Read, Mode::Work] {
        let needed = transact(&**outbox.store(), mode, |tx| Box::pin(slow_read(tx)));
        tokio::time::timeout(Duration::from_secs(1), needed).await.expect("the engine does not wait for them").unwrap();
    }
    for one in waiting {
        one.abort();
    }
}

async fn p7_what_was_due_before_1970_is_due(db: Database) {
    let id = db.put("a", "x").await;
    let due = if db.dialect == Dialect::Sqlite { "-1000000" } else { "'1960-01-02 03:04:05'" };
    db.raw().await.run(&format!("UPDATE outbox SET due_at = {due} WHERE id = {id}")).await.unwrap();
    assert_eq!(db.walk("a", None, 10).await, [id]);
    assert_eq!(db.claim_one("a", "w").await.id, id);
}

struct Panics;

#[async_trait]
impl OnSettled for Panics {
    async fn on_settled(&self, _: &mut (dyn Tx + Send), winners: &[Winner]) -> postrider::Result<()> {
        assert!(winners.iter().all(|w| w.payload.as_ref() != b"bad"), "a fault of the part's");
        Ok(())
    }
}

async fn p6_a_part_that_panics_costs_one_entry(db: Database) {
    let rules = LaneRules { on_settled: Some(Arc::new(Panics)), ..LaneRules::default() };
    let db = db.again(Lanes::new().with("a", rules)).await;
    for payload in ["good", "bad", "fine"] {
        db.put("a", payload).await;
    }
    let claimed = db.claim("a", "w", 3).await;
    let entries: Vec<Settlement> = claimed.iter().map(|m| Settlement::new(m.lease(), Verdict::sent())).collect();
    let answers = db.outbox.store().settle("a", "w", &entries).await.unwrap();
    assert_eq!(answers, [Settled::Applied, Settled::Refused, Settled::Applied]);
    assert!(db.put("a", "later").await > 0, "whoever panicked took nobody along");
}

/// Never ends a delivery by itself; says how many were begun.
fn hanging(begun: &Arc<AtomicUsize>) -> Arc<dyn Courier> {
    let begun = begun.clone();
    Arc::new(courier(move |_| {
        begun.fetch_add(1, Ordering::SeqCst);
        std::future::pending::<Outcome>()
    }))
}

async fn p11_a_stop_in_the_last_attempt_ends_nothing(db: Database) {
    for lane in ["a", "careful"] {
        let id = db.put(lane, "x").await;
        let begun = Arc::new(AtomicUsize::new(0));
        let budgets = Budgets { max_attempts: 1, ..Budgets::default() };
        let settings = LaneSettings { budgets, ..LaneSettings::new(lane) };
        let seen = begun.clone();
        Worker::new(db.outbox.clone())
            .lane_with(settings, hanging(&begun))
            .drain(secs(2)) // of which the last moments are for giving back, on a busy machine, too
            .run(until(async move || seen.load(Ordering::SeqCst) == 1))
            .await
            .unwrap();
        let shown = db.show(id).await;
        assert_eq!((shown.status, shown.attempts), (Status::Pending, 0), "{shown:?}");
        assert_eq!(shown.last_error_code.as_deref(), Some("SHUTDOWN"));
        assert!(shown.maybe_sent, "its request was under way");
        let broken_off = db.history(id).await;
        let told: Vec<_> = broken_off.iter().map(|a| (a.kind.as_str(), a.lease_token, a.code.as_deref())).collect();
        assert_eq!(told, [("retry", 1, Some("SHUTDOWN"))], "why it may come again");
        assert_eq!(db.claim_one(lane, "w").await.crashes, 0, "nobody crashed");
    }
}

async fn p7_what_expires_while_it_waits_is_not_sent(db: Database) {
    let first = db.put("a", "first").await;
    let now = db.show(first).await.created_at;
    let message = NewMessage::new("a", "second").deliver_before(now.plus(Duration::from_millis(1500)));
    let second = created(db.enqueue(message).await);
    let sent = Arc::new(AtomicUsize::new(0));
    let slow = {
        let sent = sent.clone();
        courier(move |_| {
            let n = sent.fetch_add(1, Ordering::SeqCst);
            async move {
                if n == 0 {
                    tokio::time::sleep(Duration::from_millis(2500)).await;
                }
                Outcome::sent()
            }
        })
    };
    // Both are claimed at once; the second waits for the only slot.
    let settings = LaneSettings { concurrency: 1, batch: 8, ..LaneSettings::new("a") };
    Worker::new(db.outbox.clone())
        .lane_with(settings, Arc::new(slow))
        .once()
        .run(std::future::pending())
        .await
        .unwrap();
    assert_eq!(db.status(first).await, Status::Sent);
    let shown = db.show(second).await;
    assert_eq!((shown.status, shown.last_error_code.as_deref()), (Status::Dead, Some("EXPIRED")), "{shown:?}");
    assert_eq!(sent.load(Ordering::SeqCst), 1);
}

async fn a_suspect_of_one_lane_holds_up_no_other(db: Database) {
    let suspect = db.put("a", "killed two workers").await;
    let lease = if db.dialect == Dialect::Sqlite { "1" } else { "'2001-01-01 00:00:00'" };
    let sql = format!("UPDATE outbox SET crashes = 2, locked_by = 'gone', lease_until = {lease} WHERE id = {suspect}");
    db.raw().await.run(&sql).await.unwrap();
    db.put("b", "hangs").await;
    let (begun, suspected) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let worker = Worker::new(db.outbox.clone())
        .lane_with(LaneSettings::new("a"), hanging(&suspected))
        .lane_with(LaneSettings::new("b"), hanging(&begun))
        .lane_with(LaneSettings::new("orders"), Arc::new(courier(|_| async { Outcome::sent() })))
        .drain(Duration::from_millis(100));
    let worker = tokio::spawn(worker.run(async { drop(stopped.await) }));
    // Served although another lane has something under way.
    until(async || begun.load(Ordering::SeqCst) == 1 && suspected.load(Ordering::SeqCst) == 1).await;
    // And while it is served, apart from all of its own lane, a third lane goes on.
    for _ in 0..3 {
        let id = db.put("orders", "x").await;
        until(async || db.status(id).await == Status::Sent).await;
    }
    assert_eq!(db.status(suspect).await, Status::Leased, "it was served all the while");
    stop.send(()).unwrap();
    worker.await.unwrap().unwrap();
}

async fn twins_that_wait_leave_room_for_others(db: Database) {
    let twins = (0..200).map(|_| NewMessage::new("dedup", "the same").target("dead"));
    let others = (0..10).map(|n| NewMessage::new("dedup", format!("other {n}")).target(format!("t{n}")));
    db.outbox.enqueue(twins.chain(others).collect()).await.unwrap();
    let delivered = Arc::new(AtomicUsize::new(0));
    let seen = delivered.clone();
    let targets = courier(move |message| {
        let (dead, delivered) = (message.target.as_deref() == Some("dead"), delivered.clone());
        async move {
            if dead {
                std::future::pending::<()>().await;
            }
            delivered.fetch_add(1, Ordering::SeqCst);
            Outcome::sent()
        }
    });
    Worker::new(db.outbox.clone())
        .lane("dedup", targets)
        .drain(Duration::from_millis(100))
        .run(until(async move || seen.load(Ordering::SeqCst) == 10))
        .await
        .unwrap();
}

async fn release_of_expired_leases_leaves_alone_what_was_taken_over(db: Database) {
    for n in 0..3 {
        db.put("a", &n.to_string()).await;
    }
    let old = db.claim("a", "gone", 3).await;
    db.advance(secs(61));
    let taken = db.claim_ids("a", "w", &[old[1].id]).await;
    assert_eq!(taken.len(), 1);
    let released = db.outbox.release_expired(None, 100).await.unwrap();
    assert_eq!(released, [old[0].id, old[2].id]);
    let free = db.show(old[0].id).await;
    assert_eq!((free.status, free.locked_by, free.locked_at), (Status::Pending, None, None));
    assert_eq!(db.status(old[1].id).await, Status::Leased);
    assert!(db.renew("w", taken[0].lease()).await);
    assert_eq!(db.settle("a", "gone", old[0].lease(), Verdict::sent()).await, Settled::LeaseLost, "its token is over");
    assert!(db.show(old[0].id).await.maybe_sent);
    assert_eq!(db.claim("a", "w", 10).await.len(), 2);
}

async fn the_doctor_finds_what_waits_in_vain(db: Database) {
    use postrider::doctor::{Check, Examine};
    let found = async |stood: Duration| {
        let cases = db.outbox.look(stood).await.unwrap();
        let mut found: Vec<(Check, i64)> = cases.iter().map(|case| (case.ailment.check, case.id)).collect();
        found.sort_unstable();
        found
    };
    assert_eq!(found(Duration::ZERO).await, []);
    let nobody = db.put("a", "nobody takes it").await;
    let paused = db.put("b", "its lane is paused").await;
    db.outbox.pause("b").await.unwrap();
    let taken = db.put("orders", "its worker died").await;
    db.claim_ids("orders", "gone", &[taken]).await;
    let fell = db.put("careful", "its token fell").await;
    db.claim_ids("careful", "w", &[fell]).await;
    db.advance(secs(61));
    db.claim_ids("careful", "other", &[fell]).await;
    let mut session = db.raw().await;
    session.run(&format!("UPDATE outbox SET lease_token = 1 WHERE id = {fell}")).await.unwrap();
    let digest = if db.dialect == Dialect::Postgres { "''::bytea" } else { "''" };
    let key = if db.dialect == Dialect::Mysql { "`key`" } else { "key" };
    let later = if db.dialect == Dialect::Sqlite { "9000000000000000" } else { "'2100-01-01 00:00:00'" };
    let sql = format!(
        "INSERT INTO outbox_keys (lane, {key}, outbox_id, digest, expires_at) VALUES ('a', 'k', 0, {digest}, {later})"
    );
    session.run(&sql).await.unwrap();
    let expected = [
        (Check::WaitsInVain, taken),
        (Check::UnservedShard, nobody),
        (Check::TokenFell, fell),
        (Check::KeyWithoutMessage, 0),
    ];
    assert_eq!(found(Duration::ZERO).await, expected, "not {paused}");
    assert_eq!(found(secs(120)).await, expected[2..], "what has not stood for long may be passed through");
    let cases = db.outbox.look(Duration::ZERO).await.unwrap();
    let repaired = db.outbox.repair(&cases).await.unwrap();
    assert_eq!(repaired.len(), 1);
    assert_eq!(found(Duration::ZERO).await, expected[..3]);
    created(db.enqueue(NewMessage::new("a", "x").key("k")).await);
    // Somebody is at it: what waits behind is a backlog.
    db.advance(secs(1));
    db.claim_ids("a", "w", &[nobody]).await;
    let unserved = found(Duration::ZERO).await.into_iter().filter(|(check, _)| *check == Check::UnservedShard);
    assert_eq!(unserved.count(), 0);
}

/// On PostgreSQL new work wakes workers of other processes.
async fn what_one_process_tells_another_hears(db: Database) {
    if db.dialect != Dialect::Postgres {
        return; // they poll
    }
    let other = db.again(lanes()).await;
    let mut heard = other.outbox.store().notified();
    // Its listener may still be on its way.
    for _ in 0..200 {
        db.outbox.store().notify().await.unwrap();
        if tokio::time::timeout(Duration::from_millis(50), &mut heard).await.is_ok() {
            return;
        }
    }
    panic!("nothing is heard");
}

/// A token that fell long ago is not covered up by what has happened since.
async fn the_doctor_looks_beyond_the_first_page(db: Database) {
    use postrider::doctor::{Check, Examine};
    // More live messages than a page before it, and a history of theirs after its own.
    let many = (0..6000).map(|n| NewMessage::new("b", n.to_string())).collect();
    db.outbox.enqueue(many).await.unwrap();
    let fell = db.put("careful", "its token fell").await;
    db.claim_ids("careful", "gone", &[fell]).await;
    db.advance(secs(61));
    db.claim_ids("careful", "other", &[fell]).await;
    let mut session = db.raw().await;
    session.run(&format!("UPDATE outbox SET lease_token = 1 WHERE id = {fell}")).await.unwrap();
    let history = "SELECT COUNT(*) FROM outbox_attempts";
    let before = session.number(history).await;
    let copied = "INSERT INTO outbox_attempts (outbox_id, lease_token, kind, attempt, at)
         SELECT o.id, 0, a.kind, 1, a.at FROM outbox o, (SELECT kind, at FROM outbox_attempts LIMIT 1) a WHERE o.lane = 'b'";
    session.run(copied).await.unwrap();
    assert!(session.number(history).await > before + 5000);
    let found = db.outbox.look(Duration::ZERO).await.unwrap();
    let fallen: Vec<i64> = found.iter().filter(|c| c.ailment.check == Check::TokenFell).map(|c| c.id).collect();
    assert_eq!(fallen, [fell]);
}

/// As after a dump that left the triggers out.
async fn the_doctor_gives_keys_back_that_name_nobody(db: Database) {
    use postrider::doctor::{Check, Examine};
    if db.dialect != Dialect::Mysql {
        return; // elsewhere an index keeps them
    }
    let live = created(db.enqueue(NewMessage::new("a", "x").active_key("live")).await);
    let mut session = db.raw().await;
    session.run("UPDATE outbox_active_keys SET outbox_id = 0").await.unwrap();
    let alone = "INSERT INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha) VALUES ('a', 'alone', 0, UNHEX(SHA2('', 256)))";
    session.run(alone).await.unwrap();
    let cases = db.outbox.look(Duration::ZERO).await.unwrap();
    let told: Vec<Check> = cases.iter().map(|case| case.ailment.check).collect();
    assert!(told.contains(&Check::KeyWithoutMessage), "{told:?}");
    db.outbox.repair(&cases).await.unwrap();
    let again = db.enqueue(NewMessage::new("a", "x").active_key("live")).await;
    assert_eq!((again.id, again.outcome), (live, Enqueued::Exists), "it has its key again");
    created(db.enqueue(NewMessage::new("a", "x").active_key("alone")).await);
    let cases = db.outbox.look(Duration::ZERO).await.unwrap();
    assert!(cases.iter().all(|case| case.ailment.check != Check::KeyWithoutMessage), "{cases:?}");
}

/// More keys without a message than a look takes, and one that somebody has: the others are freed, and it is told as left.
async fn the_doctor_mends_all_but_what_is_locked(db: Database) {
    use postrider::doctor::{Check, Examine};
    let (mut session, key) = (db.raw().await, if db.dialect == Dialect::Mysql { "`key`" } else { "key" });
    let digest = if db.dialect == Dialect::Postgres { "''::bytea" } else { "''" };
    let later = if db.dialect == Dialect::Sqlite { "9000000000000000" } else { "'2100-01-01 00:00:00'" };
    let alone = |n: i64| format!("('a', 'k{n}', 0, {digest}, {later})");
    for hundred in 0..25 {
        let rows: Vec<String> = (hundred * 100..hundred * 100 + 100).map(alone).collect();
        let into = format!("INSERT INTO outbox_keys (lane, {key}, outbox_id, digest, expires_at) VALUES ");
        session.run(&(into + &rows.join(", "))).await.unwrap();
    }
    let look = async || -> Vec<_> {
        let cases = db.outbox.look(Duration::ZERO).await.unwrap();
        cases.into_iter().filter(|case| case.ailment.check == Check::KeyWithoutMessage).collect()
    };
    let left = "SELECT COUNT(*) FROM outbox_keys";
    if db.dialect == Dialect::Sqlite {
        let cases = look().await;
        assert_eq!(db.outbox.repair(&cases).await.unwrap(), cases);
        assert_eq!(session.number(left).await, 0);
        return; // nobody can have one row of it
    }
    let mut stranger = lock(&db, &format!("outbox_keys WHERE lane = 'a' AND {key} = 'k7'")).await;
    let cases = look().await;
    assert_eq!(db.outbox.repair(&cases).await.unwrap(), [], "one is left");
    assert_eq!(session.number(left).await, 1);
    stranger.run("ROLLBACK").await.unwrap();
    assert_eq!(db.outbox.repair(&cases).await.unwrap(), cases);
    assert_eq!(session.number(left).await, 0);
    if db.dialect != Dialect::Mysql {
        return;
    }
    for n in 0..600 {
        let row = format!("('a', 'k{n}', 0, UNHEX(SHA2('', 256)))");
        let into = "INSERT INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha) VALUES ";
        session.run(&(into.to_owned() + &row)).await.unwrap();
    }
    let left = "SELECT COUNT(*) FROM outbox_active_keys";
    let mut stranger = lock(&db, "outbox_active_keys WHERE lane = 'a' AND active_key = 'k7'").await;
    let cases = look().await;
    assert_eq!(db.outbox.repair(&cases).await.unwrap(), [], "one is left");
    assert_eq!(session.number(left).await, 1);
    stranger.run("ROLLBACK").await.unwrap();
    assert_eq!(db.outbox.repair(&cases).await.unwrap(), cases);
    assert_eq!(session.number(left).await, 0);
}

/// Rows as only a hand writes them: the greatest token, a lease without an end, a lane that is no text.
async fn what_a_hand_wrote_holds_up_nobody_and_is_told(db: Database) {
    use postrider::doctor::{Check, Examine};
    let found = async || {
        let cases = db.outbox.look(Duration::ZERO).await.unwrap();
        cases.iter().map(|case| (case.ailment.check, case.id)).collect::<Vec<_>>()
    };
    let (last, endless) = (db.put("a", "last").await, db.put("b", "endless").await);
    db.claim_ids("b", "ghost", &[endless]).await;
    let beside = db.put("b", "nobody takes it").await;
    let mut session = db.raw().await;
    let far = if db.dialect == Dialect::Sqlite { "4000000000000000" } else { "'2090-01-01 00:00:00'" };
    session.run(&format!("UPDATE outbox SET lease_token = {} WHERE id = {last}", i64::MAX)).await.unwrap();
    session.run(&format!("UPDATE outbox SET lease_until = {far} WHERE id = {endless}")).await.unwrap();
    let neighbour = db.put("a", "neighbour").await;
    db.advance(secs(100));
    let claimed: Vec<i64> = db.claim("a", "w", 10).await.iter().map(|m| m.id).collect();
    assert_eq!(claimed, [neighbour], "the other one waits for a hand");
    let told = found().await;
    assert!(told.contains(&(Check::UnreadableRow, last)), "{told:?}");
    assert!(told.contains(&(Check::WaitsInVain, endless)), "{told:?}");
    assert!(told.contains(&(Check::UnservedShard, beside)), "nobody is at it, whatever holds the first: {told:?}");
    if db.dialect == Dialect::Postgres {
        return; // it takes no text that is none
    }
    let now = if db.dialect == Dialect::Sqlite { "1" } else { "UTC_TIMESTAMP(6)" };
    let columns = "lane, payload, due_at, created_at, updated_at";
    if session.run(&format!("INSERT INTO outbox ({columns}) VALUES (x'ff', 'x', {now}, {now}, {now})")).await.is_ok() {
        let told = tokio::time::timeout(secs(10), found()).await.expect("it goes past it");
        assert!(told.iter().filter(|(check, _)| *check == Check::UnreadableRow).count() >= 2, "{told:?}");
    }
}

async fn audits_go_when_they_are_old(db: Database) {
    for n in 0..5 {
        db.put_sent(NewMessage::new("audited", n.to_string())).await;
    }
    // The oldest have no end: they stay, and hold up nobody behind them.
    let oldest = "SELECT audit_id FROM (SELECT audit_id FROM write_audit ORDER BY audit_id LIMIT 2) AS oldest";
    db.raw()
        .await
        .run(&format!("UPDATE write_audit SET status = 'pending' WHERE audit_id IN ({oldest})"))
        .await
        .unwrap();
    assert_eq!(db.outbox.prune_audit(secs(100), 10).await.unwrap(), 0);
    db.advance(secs(101));
    assert_eq!(db.outbox.prune_audit(secs(100), 2).await.unwrap(), 2);
    assert_eq!(db.outbox.prune_audit(secs(100), 2).await.unwrap(), 1);
    assert_eq!(db.count("write_audit WHERE status = 'pending'").await, 2);
    assert_eq!(db.count("write_audit").await, 2);
}

/// SQLite keeps a number where bytes are expected: it is delivered as it is written.
#[tokio::test]
async fn a_payload_that_is_a_number_is_its_text() {
    crate::harness::case(crate::harness::sqlite().await, async |db: Database| {
        let mut session = db.raw().await;
        for number in ["42", "-1.5"] {
            session.run(&format!("INSERT INTO outbox (lane, payload) VALUES ('a', {number})")).await.unwrap();
        }
        let claimed = db.claim("a", "w", 10).await;
        let payloads: Vec<&[u8]> = claimed.iter().map(|message| &message.payload[..]).collect();
        assert_eq!(payloads, [&b"42"[..], b"-1.5"]);
        for message in &claimed {
            assert_eq!(db.outbox.payload(message.id).await.unwrap().as_ref(), Some(&message.payload));
        }
    })
    .await;
}

/// Whoever writes times by hand gets an error, and what an older version let in is put right.
#[tokio::test]
async fn a_time_that_is_no_number_is_refused_and_harms_nobody() {
    crate::harness::case(crate::harness::sqlite().await, async |db: Database| {
        let mut session = db.raw().await;
        let insert = "INSERT INTO outbox (lane, payload, due_at) VALUES ('a', 'x', 1.5)";
        assert!(session.run(insert).await.unwrap_err().contains("CHECK"));
        every_number_is_checked(&mut session).await;
        session.run("INSERT INTO outbox (lane, payload, due_at) VALUES ('a', 'x', 1.0e15)").await.unwrap();
        // As an older version let it in.
        session.run(&format!("PRAGMA ignore_check_constraints = ON; {insert}")).await.unwrap();
        let text = insert.replace("1.5", "'2020-01-02 03:04:05'");
        session.run(&text).await.unwrap();
        assert_eq!(db.outbox.stats().await.unwrap()["a"].pending, 3);
        assert_eq!(db.walk("a", None, 10).await.len(), 2);
        let (last, gone) = (db.put("b", "y").await, db.put("b", "z").await);
        session
            .run(&format!("DELETE FROM outbox WHERE id = {gone}; CREATE VIEW mine AS SELECT id FROM outbox"))
            .await
            .unwrap();
        session.run("DELETE FROM postrider_migrations WHERE version IN (7, 12)").await.unwrap();
        drop(session);
        db.outbox.migrate().await.unwrap();
        assert_eq!(db.claim("a", "w", 10).await.len(), 3);
        assert_eq!(db.claim_one("b", "w").await.id, last);
        assert_eq!(db.put("b", "new").await, gone + 1, "an id is never used twice");
        assert_eq!(db.count("mine").await, 5, "a view of the application's own still stands");
        every_number_is_checked(&mut db.raw().await).await;
    })
    .await;
}

/// By an insert and by an update, each column alone, and none by a slow comparison with a type's name.
async fn every_number_is_checked(session: &mut Raw) {
    let columns = [
        "due_at",
        "created_at",
        "updated_at",
        "lease_until",
        "locked_at",
        "deliver_before",
        "shard_id",
        "attempts",
        "crashes",
        "maybe_sent",
        "lease_token",
    ];
    session.run("INSERT INTO outbox (id, lane, payload) VALUES (99, 'checked', 'x')").await.unwrap();
    for column in columns {
        for bad in ["1.5", "'soon'", "x'31'", "'99999999999999999999'", "9.3e18"] {
            // The lock's own rule is another.
            let locked = if column == "lease_until" { ", locked_by = 'w'" } else { "" };
            let update = format!("UPDATE outbox SET {column} = {bad}{locked} WHERE id = 99");
            let refused = session.run(&update).await.expect_err(&update);
            assert!(refused.contains(&format!("CHECK constraint failed: {column}")), "{update}: {refused}");
        }
    }
    session.run("DELETE FROM outbox WHERE id = 99").await.unwrap();
    let slow = "SELECT count(*) FROM sqlite_master WHERE name = 'outbox' AND sql LIKE '%typeof%'";
    assert_eq!(session.number(slow).await, 0);
}

/// What would be written into a file that nobody finds again is refused.
#[cfg(unix)]
#[tokio::test]
async fn a_file_that_was_moved_or_replaced_takes_no_more_messages() {
    crate::harness::case(crate::harness::sqlite().await, async |db: Database| {
        let id = db.put("a", "x").await;
        let path = std::path::PathBuf::from(db.url.strip_prefix("sqlite://").unwrap());
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).unwrap();
        for round in 0..2 {
            let error = db.outbox.enqueue(vec![NewMessage::new("a", "lost")]).await.unwrap_err();
            assert_eq!((error.kind, error.effect), (Kind::Unavailable, Effect::NotApplied), "{error}");
            assert!(db.outbox.show(id).await.is_err(), "and health, which reads, sees it too");
            if round == 0 {
                std::fs::write(&path, "").unwrap(); // somebody puts another one in its place
            }
        }
        std::fs::rename(&moved, &path).unwrap();
        assert!(db.put("a", "again").await > id, "put back, it is the same file");
        assert_eq!(db.count("outbox").await, 2);
    })
    .await;
}

/// Opened by a link, or found by one later: what counts is the file beside which SQLite keeps its log, and whether others
/// would still come to it.
#[cfg(unix)]
#[tokio::test]
async fn a_file_behind_a_link_is_watched_where_it_is() {
    use std::os::unix::fs::symlink;
    let refused = async |outbox: &postrider::Outbox, what: &str| {
        let error = outbox.enqueue(vec![NewMessage::new("a", "lost")]).await.expect_err(what);
        assert_eq!((error.kind, error.effect), (Kind::Unavailable, Effect::NotApplied), "{what}: {error}");
    };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let open = async |name: &str| {
        let outbox = postrider::Outbox::open(&format!("sqlite://{}", at(name).display()), lanes()).await.unwrap();
        outbox.migrate().await.unwrap();
        outbox.enqueue(vec![NewMessage::new("a", "x")]).await.unwrap();
        outbox
    };
    std::fs::create_dir(at("data")).unwrap();
    symlink(at("data").join("real.db"), at("link.db")).unwrap();
    let outbox = open("link.db").await;
    assert!(at("data").join("real.db-wal").exists(), "the log is beside the file");
    std::fs::remove_file(at("data").join("real.db-wal")).unwrap();
    refused(&outbox, "its log is gone").await;
    drop(outbox);

    // The same file under the same name, but only by a link: whoever comes next looks for its log elsewhere.
    let outbox = open("moved.db").await;
    std::fs::rename(at("moved.db"), at("elsewhere.db")).unwrap();
    symlink(at("elsewhere.db"), at("moved.db")).unwrap();
    refused(&outbox, "it is a link by now").await;
    drop(outbox);

    // The link leads to another one now.
    std::fs::write(at("data").join("other.db"), "not empty").unwrap();
    symlink(at("data").join("third.db"), at("turned.db")).unwrap();
    let outbox = open("turned.db").await;
    std::fs::remove_file(at("turned.db")).unwrap();
    symlink(at("data").join("other.db"), at("turned.db")).unwrap();
    refused(&outbox, "it leads elsewhere").await;
}

/// Its log cut off in place: what was in it is gone, and so is what would follow. A checkpoint may truncate it, too.
#[cfg(unix)]
#[tokio::test]
async fn a_log_that_was_cut_off_takes_no_more_messages() {
    crate::harness::case(crate::harness::sqlite().await, async |db: Database| {
        db.put("a", "x").await;
        let path = db.url.strip_prefix("sqlite://").unwrap().to_owned();
        let other = rusqlite::Connection::open(&path).unwrap();
        other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", (), |row| row.get::<_, i64>(0)).unwrap();
        assert_eq!(std::fs::metadata(format!("{path}-wal")).unwrap().len(), 0, "truncated in good order");
        for n in 0..3 {
            db.put("a", &n.to_string()).await;
        }
        std::fs::OpenOptions::new().write(true).open(format!("{path}-wal")).unwrap().set_len(0).unwrap();
        for _ in 0..2 {
            let error = db.outbox.enqueue(vec![NewMessage::new("a", "lost")]).await.unwrap_err();
            assert_eq!((error.kind, error.effect), (Kind::Unavailable, Effect::NotApplied), "{error}");
        }
    })
    .await;
}

/// Its log, the index of that, or its content: without any of them what is committed is found by nobody.
#[cfg(unix)]
#[tokio::test]
async fn a_file_that_lost_its_log_takes_no_more_messages() {
    for end in ["-wal", "-shm", ""] {
        crate::harness::case(crate::harness::sqlite().await, async |db: Database| {
            db.put("a", "x").await;
            let path = format!("{}{end}", db.url.strip_prefix("sqlite://").unwrap());
            let away = format!("{path}.away");
            std::fs::copy(&path, &away).unwrap();
            match end {
                "" => std::fs::write(&path, "").unwrap(),
                _ => std::fs::remove_file(&path).unwrap(),
            }
            for _ in 0..2 {
                let error = db.outbox.enqueue(vec![NewMessage::new("a", "lost")]).await.unwrap_err();
                assert_eq!((error.kind, error.effect), (Kind::Unavailable, Effect::NotApplied), "{path}: {error}");
                // Another one in its place is not it.
                if !end.is_empty() {
                    std::fs::copy(&away, &path).unwrap();
                }
            }
        })
        .await;
    }
}
