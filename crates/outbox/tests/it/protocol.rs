//! The lease protocol word for word: its functions under their own names, what they write, and what they leave alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::error::{Error, Kind};
use postrider::observe::{Observer, Told};
use postrider::outcome::{FlushCode, LeaseState, Outcome, Reach, Settled, Verdict};
use postrider::store::{Claimed, From, Mode, Requeued, Retried, Status, transact};
use postrider::tx::Dialect;
use postrider::worker::core::{Command, Core, Event, LaneSettings, Settings};
use postrider::{Message, NewMessage, Timestamp, Worker, courier};
use tokio::sync::Semaphore;

use crate::harness::{Database, claim_of, on_every_store, retry, secs, until};

on_every_store! {
    a_claim_passes_by_what_others_have_locked_and_waits_for_nobody,
    two_claims_at_once_have_rows_of_their_own,
    nothing_is_open_while_a_message_is_delivered,
    a_claim_sets_holder_and_times,
    a_claim_that_fails_leaves_everything_as_it_was,
    a_claim_that_fails_after_its_update_takes_it_back,
    a_row_whose_update_does_not_take_is_not_claimed,
    ack_sent_ends_a_message_and_clears_its_lock,
    fail_retry_counts_and_waits_as_it_was_told,
    mark_dead_ends_a_message_with_its_reason,
    renew_lease_moves_the_lock_and_refuses_what_was_lost,
    a_renewed_message_is_not_stuck_in_the_view_of_orders,
    check_dedup_knows_what_was_sent_to_the_same_target,
    whoever_lost_its_lease_is_told_and_the_conflict_is_audited,
    requeue_begins_anew_with_nothing_said_of_the_last_error,
    retry_makes_what_waits_due_and_leaves_the_rest,
    no_more_are_delivered_side_by_side_than_the_lane_allows,
}

async fn put_many(db: &Database, lane: &str, n: usize) -> Vec<i64> {
    let messages = (0..n).map(|n| NewMessage::new(lane, n.to_string())).collect();
    db.outbox.enqueue(messages).await.unwrap().iter().map(|entry| entry.id).collect()
}

async fn a_claim_passes_by_what_others_have_locked_and_waits_for_nobody(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // it has no locks on rows
    }
    let ids = put_many(&db, "a", 6).await;
    let mut session = db.raw().await;
    session.run("BEGIN").await.unwrap();
    for id in &ids[..3] {
        // One by one: whatever InnoDB scans, it locks.
        session.run(&format!("SELECT id FROM outbox WHERE id = {id} FOR UPDATE")).await.unwrap();
    }
    // The lock is held until after the answer: whoever waited for it would not have got one.
    let claimed: Vec<i64> = db.claim("a", "b", 3).await.iter().map(|m| m.id).collect();
    assert_eq!(claimed, ids[3..6]);
    session.run("ROLLBACK").await.unwrap();
    let claimed: Vec<i64> = db.claim("a", "a", 3).await.iter().map(|m| m.id).collect();
    assert_eq!(claimed, ids[..3], "each has its own three");
}

/// One claim takes its time between its locks and its commit; the other does not wait for it and gets what is left.
async fn two_claims_at_once_have_rows_of_their_own(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // it has one writer
    }
    let ids = put_many(&db, "a", 6).await;
    let mut session = db.raw().await;
    let (slow, sleepers) = if db.dialect == Dialect::Mysql {
        let slow = "CREATE TRIGGER slow BEFORE UPDATE ON outbox FOR EACH ROW IF NEW.locked_by = 'slow' AND OLD.id = {id} THEN DO SLEEP(3); END IF";
        (slow, "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User sleep'")
    } else {
        let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.locked_by = 'slow' AND OLD.id = {id} THEN PERFORM pg_sleep(3); END IF; RETURN NEW; END $$;
                    CREATE TRIGGER slow BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION slow()";
        (slow, "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'")
    };
    session.run(&slow.replace("{id}", &ids[0].to_string())).await.unwrap();
    let first = tokio::spawn({
        let db = db.clone();
        async move { db.claim("a", "slow", 3).await }
    });
    until(async || session.number(sleepers).await == 1).await;
    let second: Vec<i64> = db.claim("a", "quick", 3).await.iter().map(|m| m.id).collect();
    assert!(!first.is_finished(), "it did not wait");
    let first: Vec<i64> = first.await.unwrap().iter().map(|m| m.id).collect();
    assert_eq!((first.len(), second.len()), (3, 3));
    let mut all = [first, second].concat();
    all.sort_unstable();
    assert_eq!(all, ids, "nobody has another's");
    assert_eq!(db.count("outbox WHERE lease_token = 1").await, 6, "and each was claimed once");
    for id in ids {
        // Both have committed: no lock is left.
        session.run(&format!("SELECT id FROM outbox WHERE id = {id} FOR UPDATE NOWAIT")).await.unwrap();
    }
}

/// What a transaction of ours that is still open would show to a stranger.
async fn open_transactions(db: &Database, session: &mut crate::harness::Raw) -> i64 {
    let sql = match db.dialect {
        // With one open it could not write.
        Dialect::Sqlite => return i64::from(session.run("BEGIN IMMEDIATE; ROLLBACK").await.is_err()),
        Dialect::Postgres => {
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
        }
        Dialect::Mysql => return session.others_in_transaction_on_mysql().await,
    };
    session.number(sql).await
}

async fn nothing_is_open_while_a_message_is_delivered(db: Database) {
    let id = db.put("a", "x").await;
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (tell, wait) = (begun.clone(), go.clone());
    let waiting = courier(move |_| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            tell.add_permits(1);
            wait.acquire().await.unwrap().forget();
            Outcome::sent()
        }
    });
    let worker = tokio::spawn(Worker::new(db.outbox.clone()).lane("a", waiting).once().run(std::future::pending()));
    begun.acquire().await.unwrap().forget();
    let mut session = db.raw().await;
    assert_eq!(db.status(id).await, Status::Leased);
    // The worker may be looking for more at this moment; it does not look for as long as a delivery takes.
    until(async || open_transactions(&db, &mut session).await == 0).await;
    if db.dialect != Dialect::Sqlite {
        session.run(&format!("SELECT id FROM outbox WHERE id = {id} FOR UPDATE NOWAIT")).await.unwrap();
    }
    go.add_permits(1);
    worker.await.unwrap().unwrap();
    assert_eq!(db.status(id).await, Status::Sent);
}

async fn a_claim_sets_holder_and_times(db: Database) {
    let id = db.put("memory", "x").await;
    let updated = "SELECT updated_at, locked_at FROM outbox";
    let before = db.sql(updated).await[0].time(0).unwrap();
    db.advance(secs(100));
    let claimed = db.claim_one("memory", "host:1:a").await;
    let row = db.sql(updated).await.remove(0);
    assert!(row.time(0).unwrap().since(before) >= secs(100), "updated_at moves at the claim");
    let apart = row.time(0).unwrap().micros() - row.time(1).unwrap().micros();
    assert!(apart.abs() < 1000, "and locked_at with it: {apart} µs");
    let shown = db.show(id).await;
    assert_eq!((shown.status, shown.locked_by.as_deref()), (Status::Leased, Some("host:1:a")));
    let lease = shown.lease_until.unwrap().since(row.time(1).unwrap());
    assert!(claimed.id == id && (59.0..61.0).contains(&lease.as_secs_f64()), "an absolute end, counted from the claim");
    let view = db.sql("SELECT status, locked_by, retry_count FROM outbox_memory").await.remove(0);
    let view = (view.text(0).unwrap(), view.text(1).unwrap(), view.int(2).unwrap());
    assert_eq!(view, ("pending".to_owned(), "host:1:a".to_owned(), 0), "a leased message is pending, with a lock");
}

/// SQL that keeps row `id` from being updated: with an error, or without a word.
fn guard(db: &Database, id: i64, aloud: bool) -> (String, &'static str) {
    match (db.dialect, aloud) {
        (Dialect::Sqlite, _) => {
            let what = if aloud { "RAISE(ABORT, 'not this one')" } else { "RAISE(IGNORE)" };
            let sql =
                format!("CREATE TRIGGER guard BEFORE UPDATE ON outbox WHEN OLD.id = {id} BEGIN SELECT {what}; END");
            (sql, "DROP TRIGGER guard")
        }
        (Dialect::Postgres, _) => {
            let what = if aloud { "RAISE EXCEPTION 'not this one'" } else { "RETURN NULL" };
            let sql = format!(
                "CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF OLD.id = {id} THEN {what}; END IF; RETURN NEW; END $$;
                 CREATE TRIGGER guard BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION guard()"
            );
            (sql, "DROP TRIGGER guard ON outbox")
        }
        (Dialect::Mysql, _) => {
            let sql = format!(
                "CREATE TRIGGER guard BEFORE UPDATE ON outbox FOR EACH ROW IF OLD.id = {id} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF"
            );
            (sql, "DROP TRIGGER guard")
        }
    }
}

async fn a_claim_that_fails_leaves_everything_as_it_was(db: Database) {
    let ids = put_many(&db, "a", 4).await;
    let (broken, mended) = guard(&db, ids[2], true);
    let mut session = db.raw().await;
    session.run(&broken).await.unwrap();
    let claim = claim_of("a", "w", 4, secs(60), From::Mark(None));
    db.outbox.store().claim(&claim).await.unwrap_err();
    assert_eq!(db.count("outbox WHERE locked_by IS NULL AND lease_token = 0 AND lease_until IS NULL").await, 4);
    session.run(mended).await.unwrap();
    let claimed = db.claim("a", "v", 4).await;
    let claimed: Vec<(i64, i64)> = claimed.iter().map(|m| (m.id, m.lease_token)).collect();
    assert_eq!(claimed, ids.iter().map(|id| (*id, 1)).collect::<Vec<_>>(), "no lock and no token was left behind");
}

/// What a takeover writes into the history comes after the update of its row.
async fn a_claim_that_fails_after_its_update_takes_it_back(db: Database) {
    let id = db.put("a", "x").await;
    db.claim_one("a", "gone").await;
    db.advance(secs(100));
    let (before, row) = (db.show(id).await, "SELECT locked_by, lease_token, updated_at, crashes FROM outbox");
    let row_before = db.sql(row).await;
    let mut session = db.raw().await;
    let (broken, mended) = match db.dialect {
        Dialect::Sqlite => (
            "CREATE TRIGGER guard BEFORE INSERT ON outbox_attempts BEGIN SELECT RAISE(ABORT, 'not now'); END",
            "DROP TRIGGER guard",
        ),
        Dialect::Postgres => (
            "CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not now'; END $$;
             CREATE TRIGGER guard BEFORE INSERT ON outbox_attempts FOR EACH ROW EXECUTE FUNCTION guard()",
            "DROP TRIGGER guard ON outbox_attempts",
        ),
        Dialect::Mysql => (
            "CREATE TRIGGER guard BEFORE INSERT ON outbox_attempts FOR EACH ROW SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not now'",
            "DROP TRIGGER guard",
        ),
    };
    session.run(broken).await.unwrap();
    db.outbox.store().claim(&claim_of("a", "w", 1, secs(60), From::Mark(None))).await.unwrap_err();
    assert_eq!(db.show(id).await, before, "token 1, still in the name of who is gone");
    assert_eq!(format!("{:?}", db.sql(row).await), format!("{row_before:?}"));
    session.run(mended).await.unwrap();
    assert_eq!(db.claim_one("a", "w").await.lease_token, 2);
}

async fn a_row_whose_update_does_not_take_is_not_claimed(db: Database) {
    if db.dialect == Dialect::Mysql {
        return; // no trigger of its can pass a row over in silence
    }
    let ids = put_many(&db, "a", 3).await;
    let (broken, mended) = guard(&db, ids[1], false);
    let mut session = db.raw().await;
    session.run(&broken).await.unwrap();
    let claim = claim_of("a", "w", 3, secs(60), From::Mark(None));
    // Never a row that still belongs to nobody: SQLite refuses the lot, PostgreSQL leaves it out.
    let claimed = db.outbox.store().claim(&claim).await.map(|claimed| claimed.messages);
    let claimed = match db.dialect {
        Dialect::Sqlite => claimed.map_or(vec![], |claimed| panic!("{claimed:?}")),
        _ => claimed.unwrap(),
    };
    let wanted: &[i64] = if db.dialect == Dialect::Sqlite { &[] } else { &[ids[0], ids[2]] };
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), wanted);
    assert_eq!(db.count("outbox WHERE locked_by = 'w'").await, claimed.len() as i64);
    assert_eq!(db.count(&format!("outbox WHERE id = {} AND lease_token = 0", ids[1])).await, 1);
    session.run(mended).await.unwrap();
    assert_eq!(db.claim("a", "v", 3).await.len(), 3 - claimed.len());
}

/// The memory's row as its specification shows it.
async fn memory(db: &Database) -> (String, i64, Option<String>, Option<String>) {
    let unlocked = "CASE WHEN locked_at IS NULL THEN 1 ELSE 0 END";
    let sql = format!("SELECT status, retry_count, locked_by, last_error, {unlocked} FROM outbox_memory");
    let row = db.sql(&sql).await.remove(0);
    assert_eq!(row.bool(4).unwrap(), row.opt_text(2).unwrap().is_none(), "locked_at goes with locked_by: {row:?}");
    (row.text(0).unwrap(), row.int(1).unwrap(), row.opt_text(2).unwrap(), row.opt_text(3).unwrap())
}

async fn ack_sent_ends_a_message_and_clears_its_lock(db: Database) {
    db.put("memory", "x").await;
    let lease = db.claim_one("memory", "w").await.lease();
    let ack = async |owner: &str| db.outbox.ack_sent("memory", owner, lease, Some("mem-7".to_owned())).await.unwrap();
    assert_eq!(ack("other").await, Settled::LeaseLost, "only its holder may");
    assert_eq!(ack("w").await, Settled::Applied);
    assert_eq!(memory(&db).await, ("sent".to_owned(), 0, None, Some("mem-7".to_owned())));
    let late = db.outbox.fail_retry("memory", "w", lease, "X", "x", secs(1)).await.unwrap();
    assert_eq!(late, Settled::LeaseLost, "what is sent stays sent");
}

async fn fail_retry_counts_and_waits_as_it_was_told(db: Database) {
    let id = db.put("memory", "x").await;
    let lease = db.claim_one("memory", "w").await.lease();
    let fail =
        async |owner: &str| db.outbox.fail_retry("memory", owner, lease, "HTTP_503", "busy", secs(120)).await.unwrap();
    assert_eq!(fail("other").await, Settled::LeaseLost);
    let before = db.outbox.now().await.unwrap();
    db.advance(secs(10));
    assert_eq!(fail("w").await, Settled::Applied);
    assert_eq!(memory(&db).await, ("pending".to_owned(), 1, None, Some("busy".to_owned())));
    let shown = db.show(id).await;
    assert_eq!(shown.last_error_code.as_deref(), Some("HTTP_503"));
    let updated = db.sql("SELECT updated_at FROM outbox").await[0].time(0).unwrap();
    assert!(updated.since(before) >= secs(10), "updated_at moves too");
    let wait = shown.due_at.since(updated);
    assert!((119..121).contains(&wait.as_secs()), "the caller's own time, without jitter: {wait:?}");
    assert!(db.claim("memory", "v", 1).await.is_empty(), "not before");
    db.advance(secs(200));
    assert_eq!(db.claim_one("memory", "v").await.attempts, 1);
}

async fn mark_dead_ends_a_message_with_its_reason(db: Database) {
    db.put("memory", "x").await;
    let lease = db.claim_one("memory", "w").await.lease();
    let mark = async |owner: &str| db.outbox.mark_dead("memory", owner, lease, "BAD", "no such space").await.unwrap();
    assert_eq!(mark("other").await, Settled::LeaseLost);
    assert_eq!(mark("w").await, Settled::Applied);
    let (status, retries, locked_by, last_error) = memory(&db).await;
    assert_eq!((status.as_str(), locked_by, last_error.as_deref()), ("dead", None, Some("no such space")));
    assert_eq!(retries, 1, "the last failure is counted, too");
    assert_eq!(mark("w").await, Settled::LeaseLost, "what is dead stays dead");
    assert_eq!(db.count("outbox_done").await, 1);
}

async fn renew_lease_moves_the_lock_and_refuses_what_was_lost(db: Database) {
    let id = db.put("a", "x").await;
    let first = db.claim_one("a", "w").await;
    let (claimed, updated) = (db.show(id).await, "SELECT updated_at FROM outbox");
    let before = db.sql(updated).await[0].time(0).unwrap();
    db.advance(secs(40));
    assert!(db.renew("w", first.lease()).await);
    let renewed = db.show(id).await;
    for (moved, from) in [(renewed.locked_at, claimed.locked_at), (renewed.lease_until, claimed.lease_until)] {
        let by = moved.unwrap().since(from.unwrap());
        assert!((40..60).contains(&by.as_secs()), "{by:?}");
    }
    assert!(db.sql(updated).await[0].time(0).unwrap().since(before) >= secs(40));
    assert!(!db.renew("v", first.lease()).await, "somebody else's");
    db.advance(secs(100));
    assert!(!db.renew("w", first.lease()).await, "it ran out");
    let second = db.claim_one("a", "v").await;
    assert!(!db.renew("w", first.lease()).await, "somebody took it over");
    assert!(db.renew("v", second.lease()).await);
    assert_eq!(db.settle("a", "v", second.lease(), Verdict::sent()).await, Settled::Applied);
    assert!(!db.renew("v", second.lease()).await, "it ended");
}

/// The check an operator runs on the view finds who has stopped, and nobody who works.
async fn a_renewed_message_is_not_stuck_in_the_view_of_orders(db: Database) {
    let (works, stopped) = (db.put("orders", "1").await, db.put("orders", "2").await);
    let claim = async |id: i64| db.claim_with("orders", "w", 1, secs(120), From::Ids(vec![id])).await.remove(0).lease();
    let (lease, _) = (claim(works).await, claim(stopped).await);
    let stuck = async || {
        let since = transact(&**db.outbox.store(), Mode::Read, |tx| {
            Box::pin(async move {
                let mut params = Vec::new();
                let since = tx.now().plus(-120_000_000, &mut params);
                // On SQLite the view tells times as text, for people.
                let sql = match tx.dialect() {
                    Dialect::Sqlite => {
                        format!("SELECT id FROM outbox WHERE locked_by IS NOT NULL AND locked_at < {since}")
                    }
                    _ => format!("SELECT id FROM outbox_orders WHERE status = 'sending' AND locked_at < {since}"),
                };
                tx.query(&sql, &params).await
            })
        });
        since.await.unwrap().iter().map(|row| row.int(0).unwrap()).collect::<Vec<i64>>()
    };
    for _ in 0..2 {
        assert_eq!(stuck().await, Vec::<i64>::new());
        db.advance(secs(50));
        assert!(db.outbox.renew_lease("w", lease, secs(120)).await.unwrap());
    }
    db.advance(secs(50));
    assert_eq!(stuck().await, [stopped], "150 seconds after its claim, and the other 50 after its last heartbeat");
}

async fn check_dedup_knows_what_was_sent_to_the_same_target(db: Database) {
    let message = NewMessage::new("memory", "x").target("team:a");
    db.enqueue(message).await;
    let claimed = db.claim_one("memory", "w").await;
    let sha = claimed.sha();
    let probe = async |target: &str| {
        let hits = db.outbox.check_dedup("memory", vec![(Some(target.to_owned()), sha)]).await.unwrap();
        hits[0].clone()
    };
    assert_eq!(probe("team:a").await, None, "not sent yet");
    let lease = claimed.lease();
    assert_eq!(db.outbox.ack_sent("memory", "w", lease, Some("mem-1".to_owned())).await.unwrap(), Settled::Applied);
    assert_eq!(probe("team:a").await, Some(Some("mem-1".to_owned())), "with the id it was stored under");
    assert_eq!(probe("team:b").await, None, "another target");
}

async fn whoever_lost_its_lease_is_told_and_the_conflict_is_audited(db: Database) {
    let id = db.put("a", "x").await;
    let first = db.claim_one("a", "first").await.lease();
    db.advance(secs(100));
    let second = db.claim_one("a", "second").await.lease();
    assert_eq!(db.outbox.ack_sent("a", "first", first, None).await.unwrap(), Settled::LeaseLost);
    let rows = db.sql("SELECT action, reason, evidence_refs_json FROM write_audit").await;
    assert_eq!(rows.len(), 1, "one conflict, one row, on a lane without an audit too");
    let (action, reason) = (rows[0].text(0).unwrap(), rows[0].text(1).unwrap());
    assert_eq!((action.as_str(), reason.as_str()), ("redirect", "outbox_flush_conflict"));
    let seen = rows[0].text(2).unwrap();
    assert!(seen.contains("intended") && seen.contains("observed") && seen.contains("second"), "{seen}");
    let shown = db.show(id).await;
    assert_eq!((shown.status, shown.locked_by.as_deref()), (Status::Leased, Some("second")), "it is left alone");
    assert_eq!(db.outbox.ack_sent("a", "second", second, None).await.unwrap(), Settled::Applied);
}

async fn requeue_begins_anew_with_nothing_said_of_the_last_error(db: Database) {
    let id = db.put_dead(NewMessage::new("a", "x")).await;
    assert_eq!(db.show(id).await.last_error_code.as_deref(), Some("BAD"));
    let died = db.outbox.now().await.unwrap();
    db.advance(secs(100));
    assert_eq!(db.outbox.requeue(vec![id]).await.unwrap(), [Requeued::Requeued]);
    let shown = db.show(id).await;
    assert_eq!((shown.attempts, shown.last_error_code, shown.last_error), (0, None, None));
    assert!(shown.due_at.since(died) >= secs(100), "due when it was asked for, not before it died");
    assert_eq!(db.claim_one("a", "w").await.id, id, "and at once");
    assert!(db.sql("SELECT updated_at FROM outbox").await[0].time(0).unwrap().since(died) >= secs(100));
    assert!(db.history(id).await.iter().any(|past| past.code.as_deref() == Some("BAD")), "why it died stays known");
}

async fn retry_makes_what_waits_due_and_leaves_the_rest(db: Database) {
    let waits = db.enqueue(NewMessage::new("a", "x").delay(secs(1000))).await.id;
    let leased = db.put("b", "x").await;
    let lease = db.claim_one("b", "w").await.lease();
    let ended = db.put_sent(NewMessage::new("a", "y")).await;
    let retry_of = async |id: i64| db.outbox.retry(id).await.unwrap();
    assert!(db.claim("a", "w", 1).await.is_empty());
    assert_eq!(retry_of(waits).await, Retried::Retried);
    assert_eq!(db.claim_one("a", "w").await.id, waits);
    assert_eq!(
        [retry_of(leased).await, retry_of(ended).await, retry_of(999).await],
        [Retried::Leased, Retried::Ended, Retried::Ended]
    );
    assert_eq!(db.settle("b", "w", lease, retry(secs(500))).await, Settled::Applied);
    let shown = db.show(leased).await;
    assert_eq!(retry_of(leased).await, Retried::Retried);
    let again = db.show(leased).await;
    assert_eq!((again.attempts, again.lease_token), (shown.attempts, shown.lease_token), "nothing but its time");
    let owned = db.outbox.owning(crate::harness::OWNER).enqueue(vec![NewMessage::new("owned", "x")]).await.unwrap()[0];
    assert_eq!(db.outbox.retry(owned.id).await.unwrap_err().kind, Kind::LaneOwned);
}

async fn no_more_are_delivered_side_by_side_than_the_lane_allows(db: Database) {
    let (now, most, done) =
        (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let messages = (0..40).map(|n| NewMessage::new("a", n.to_string()).target(n.to_string())).collect();
    db.outbox.enqueue(messages).await.unwrap();
    let (running, peak, ended) = (now.clone(), most.clone(), done.clone());
    let slow = courier(move |_| {
        let (running, peak, ended) = (running.clone(), peak.clone(), ended.clone());
        async move {
            peak.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Until four stand side by side, or the last few are left: a fifth would be seen.
            for _ in 0..100 {
                if peak.load(Ordering::SeqCst) >= 4 {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            running.fetch_sub(1, Ordering::SeqCst);
            ended.fetch_add(1, Ordering::SeqCst);
            Outcome::sent()
        }
    });
    let settings = LaneSettings { concurrency: 4, batch: 32, ..LaneSettings::new("a") };
    Worker::new(db.outbox.clone())
        .lane_with(settings, Arc::new(slow))
        .once()
        .run(std::future::pending())
        .await
        .unwrap();
    assert_eq!((most.load(Ordering::SeqCst), done.load(Ordering::SeqCst)), (4, 40));
}

// ---- the worker's mind, without a database ----

fn at(second: u64) -> Tick {
    Tick::default().plus(secs(second))
}

fn message(id: i64) -> Message {
    let now = Timestamp::from_micros(1_700_000_000_000_000);
    Message {
        id,
        lane: "a".to_owned(),
        shard_id: 0,
        due_at: now,
        lease_until: now,
        lease_token: 1,
        attempts: 0,
        crashes: 0,
        maybe_sent: false,
        target: None,
        active_key: None,
        payload: "x".into(),
        content_type: None,
        headers: vec![],
        payload_sha: None,
        correlation_id: None,
        created_at: now,
        deliver_before: None,
        taken_over_from: None,
    }
}

/// A core of one slot that has claimed two messages for a minute, at second 1, and delivers the first.
fn core_at_work() -> Core {
    let mut core = core_that_claimed(1, vec![message(1), message(2)]);
    assert_eq!(begun(&core.step(at(1))), [1], "one slot");
    core
}

/// A core of so many slots that has claimed these for a minute, at second 1.
fn core_that_claimed(concurrency: usize, messages: Vec<Message>) -> Core {
    let batch = messages.len();
    let lane = LaneSettings { concurrency, batch, lease: secs(60), shards: vec![0], ..LaneSettings::new("a") };
    let settings = Settings { owner: "w".to_owned(), lanes: vec![lane], drain: secs(5), once: false, seed: 1 };
    let mut core = Core::new(settings, at(0));
    core.handle(at(1), Event::Paused { lanes: vec![] });
    let claims = core.step(at(1));
    let op = claims.iter().find_map(|command| if let Command::Claim { op, .. } = command { Some(*op) } else { None });
    let now = Timestamp::from_micros(1_700_000_000_000_000);
    let claimed = Claimed { messages, now, exhausted: true };
    core.handle(at(1), Event::Claimed { op: op.expect("a claim"), result: Ok(claimed) });
    core
}

fn begun(commands: &[Command]) -> Vec<i64> {
    let begun =
        |command: &Command| if let Command::Deliver { message, .. } = command { Some(message.id) } else { None };
    commands.iter().filter_map(begun).collect()
}

#[test]
fn a_delivery_with_less_than_a_third_of_its_lease_left_is_renewed_first() {
    let mut core = core_at_work();
    let commands = core.step(at(22));
    let renewal = |command: &Command| {
        if let Command::Renew { op, leases, .. } = command { Some((*op, leases.len())) } else { None }
    };
    let (op, leases) = commands.iter().find_map(renewal).expect("a renewal at a third of the lease");
    assert_eq!(leases, 2, "of all it holds");
    // The database takes its time, and the first delivery too: of the second lease 11 of 60 seconds are left.
    core.handle(at(50), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
    assert_eq!(begun(&core.step(at(50))), Vec::<i64>::new(), "not a byte goes out");
    core.handle(at(51), Event::Renewed { op, result: Ok(vec![LeaseState::Held; 2]) });
    assert_eq!(begun(&core.step(at(51))), [2], "renewed, it is begun");
}

/// What is to be settled, by id.
fn settles(commands: &[Command]) -> Vec<(u64, i64)> {
    let settle = |command: &Command| match command {
        Command::Settle { op, entries, .. } => entries.iter().map(|entry| (*op, entry.lease.id)).collect(),
        _ => vec![],
    };
    commands.iter().flat_map(settle).collect()
}

fn renewed(commands: &[Command]) -> Vec<i64> {
    let renewed = |command: &Command| match command {
        Command::Renew { leases, .. } => leases.iter().map(|lease| lease.id).collect(),
        _ => vec![],
    };
    commands.iter().flat_map(renewed).collect()
}

#[test]
fn what_is_delivered_and_not_yet_recorded_is_renewed_too() {
    let mut core = core_at_work();
    core.handle(at(2), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
    let settle = settles(&core.step(at(3)));
    assert_eq!(settle.iter().map(|(_, id)| *id).collect::<Vec<_>>(), [1]);
    // The database takes its time, or is away.
    assert_eq!(renewed(&core.step(at(20))), Vec::<i64>::new(), "not before a third of the lease");
    let mut renewed = renewed(&core.step(at(22)));
    renewed.sort_unstable();
    assert_eq!(renewed, [1, 2], "its outcome is known, and it is held all the same");
}

#[test]
fn whoever_is_told_that_its_lease_is_lost_gives_the_message_up() {
    #[derive(Default)]
    struct Heard(std::sync::Mutex<Vec<(i64, FlushCode)>>);
    impl Observer for Heard {
        fn settled(&self, told: &Told<'_>) {
            self.0.lock().unwrap().push((told.outbox_id, told.outcome));
        }
    }
    let heard = Arc::new(Heard::default());
    let mut core = core_at_work();
    core.observe(heard.clone());
    core.handle(at(2), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
    let (op, _) = settles(&core.step(at(3)))[0];
    core.handle(at(3), Event::Settled { op, result: Ok(vec![Settled::LeaseLost]) });
    for second in 4..60 {
        let commands = core.step(at(second));
        assert!(settles(&commands).is_empty() && begun(&commands).iter().all(|id| *id == 2), "{commands:?}");
        assert!(!renewed(&commands).contains(&1), "{commands:?}");
    }
    assert_eq!(*heard.0.lock().unwrap(), [(1, FlushCode::Conflict)], "told once, as a conflict");
}

#[test]
fn a_claim_asks_for_a_batch_at_most() {
    let asks = |concurrency, batch| {
        let lane = LaneSettings { concurrency, batch, shards: vec![0], ..LaneSettings::new("a") };
        let settings = Settings { owner: "w".to_owned(), lanes: vec![lane], drain: secs(5), once: false, seed: 1 };
        let mut core = Core::new(settings, at(0));
        core.handle(at(1), Event::Paused { lanes: vec![] });
        let limit =
            |command: &Command| if let Command::Claim { claim, .. } = command { Some(claim.limit) } else { None };
        core.step(at(1)).iter().find_map(limit).expect("a claim")
    };
    assert_eq!((asks(64, 32), asks(64, 3), asks(100, 1)), (32, 3, 1));
    assert_eq!(asks(4, 32), 6, "and no more than its slots and a few at hand");
}

#[test]
fn one_target_has_a_quarter_of_the_slots() {
    let to = |id: i64, target: &str| Message { target: Some(target.to_owned()), ..message(id) };
    let messages = (1..=6).map(|id| to(id, "slow")).chain([to(7, "other"), message(8)]);
    let mut core = core_that_claimed(8, messages.collect());
    assert_eq!(begun(&core.step(at(1))), [1, 2, 7, 8], "slots are left, but not for that one");
    core.handle(at(2), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
    assert_eq!(begun(&core.step(at(2))), [3], "one ended, one begins");
}

#[test]
fn what_the_database_did_not_record_in_time_is_told_by_its_code() {
    #[derive(Default)]
    struct Heard(std::sync::Mutex<Vec<(FlushCode, u64)>>);
    impl Observer for Heard {
        fn unrecorded(&self, lane: &str, trouble: FlushCode, messages: u64) {
            assert_eq!(lane, "a");
            self.0.lock().unwrap().push((trouble, messages));
        }
    }
    let heard = Arc::new(Heard::default());
    let mut core = core_at_work();
    core.observe(heard.clone());
    core.handle(at(2), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
    let settle = |commands: Vec<Command>| {
        let settle = commands.into_iter().find_map(|command| match command {
            Command::Settle { op, entries, .. } => Some((op, entries[0].trouble)),
            _ => None,
        });
        settle.expect("a settle")
    };
    let away = |kind| Err(Error::new(kind, "away"));
    let mut told = Vec::new();
    for (second, result) in [
        (3, away(Kind::Timeout)),
        (13, away(Kind::Unreachable)),
        (23, Ok(vec![Settled::Refused])),
        (33, away(Kind::Timeout)),
    ] {
        let (op, trouble) = settle(core.step(at(second)));
        told.push(trouble);
        core.handle(at(second), Event::Settled { op, result });
    }
    let (late, wrong) = (FlushCode::DbTimeout, FlushCode::DbError);
    assert_eq!(*heard.0.lock().unwrap(), [(late, 1), (wrong, 1), (wrong, 1), (late, 1)]);
    assert_eq!(told, [None, Some(late), Some(wrong), Some(wrong)], "what the next settle has to audit");
}

#[test]
fn a_refused_outcome_is_audited_by_the_next_settle() {
    let mut core = core_at_work();
    core.handle(at(2), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
    let trouble = |commands: &[Command]| {
        commands.iter().find_map(|command| match command {
            Command::Settle { op, entries, .. } => Some((*op, entries[0].trouble)),
            _ => None,
        })
    };
    let (op, before) = trouble(&core.step(at(3))).expect("a settle");
    assert_eq!(before, None);
    core.handle(at(3), Event::Settled { op, result: Ok(vec![Settled::Refused]) });
    assert_eq!(trouble(&core.step(at(13))).expect("another").1, Some(FlushCode::DbError));
}

#[test]
fn failures_wait_the_lanes_backoff_each_with_a_chance_of_its_own() {
    let mut core = core_that_claimed(40, (1..=40).map(message).collect());
    assert_eq!(begun(&core.step(at(1))).len(), 40);
    for id in 1..=40 {
        let outcome = Outcome::retry("HTTP_503", "busy", Reach::Answered);
        core.handle(at(2), Event::Delivered { id, outcome, begun: false });
    }
    let mut waits = Vec::new();
    for command in core.step(at(3)) {
        let Command::Settle { entries, .. } = command else { continue };
        for entry in entries {
            let Verdict::Retry { delay, .. } = entry.verdict else { panic!("a retry: {entry:?}") };
            waits.push(delay.as_secs());
        }
    }
    // The first wait of a lane: a minute doubled for the first failure, a third more or less.
    assert!(waits.len() == 40 && waits.iter().all(|wait| (84..=156).contains(wait)), "{waits:?}");
    let different: std::collections::HashSet<u64> = waits.iter().copied().collect();
    assert!(different.len() > 10, "not all at the same moment: {waits:?}");
}
