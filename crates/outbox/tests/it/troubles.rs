//! A server in trouble of its own: read-only, with callers who lock crosswise, with a reader that pins old rows, with a bit
//! that flipped, with a claim that is kept waiting; the rows 19, 20, 21, 29 and 32 of the fault matrix. What is lost on the
//! way is in `lost_replies.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postrider::error::{Class, Effect, Kind};
use postrider::store::{From, Status};
use postrider::tx::Dialect;
use postrider::worker::core::LaneSettings;
use postrider::{Enqueued, NewMessage, Outcome, Worker, courier};

use crate::harness::{Database, claim_of, lanes, on_every_store, secs, until};

on_every_store! {
    row_20_callers_who_lock_crosswise_all_get_an_answer,
    row_21_a_reader_that_stays_keeps_nobody_from_anything,
    row_29_a_flipped_bit_is_never_delivered,
    row_32_a_claim_that_was_kept_waiting_has_its_whole_lease,
}

/// What a database says when it takes no writes: told as such, nothing in doubt, nothing lost, and nobody spins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_19_a_read_only_database_refuses_and_is_left_in_peace() {
    crate::harness::case(crate::harness::postgres().await, read_only).await;
}

async fn read_only(db: Database) {
    let waits = db.put("a", "before").await;
    let mut session = db.raw().await;
    let name = db.url.rsplit('/').next().unwrap().to_owned();
    session.run(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).await.unwrap();
    // Sessions that are there already go by what was said before: a fleet of its own sees it from the start.
    let other = db.again(lanes()).await;
    let refused = other.outbox.enqueue(vec![NewMessage::new("a", "refused")]).await.unwrap_err();
    assert_eq!((refused.kind, refused.effect), (Kind::Unavailable, Effect::NotApplied), "{refused}");
    assert_eq!(refused.class(), Class::Retryable);
    let keyed = other.outbox.enqueue(vec![NewMessage::new("a", "refused").key("k")]).await.unwrap_err();
    assert_eq!((keyed.kind, keyed.effect), (Kind::Unavailable, Effect::NotApplied), "{keyed}");
    assert_eq!(other.outbox.show(waits).await.unwrap().unwrap().0.status, Status::Pending, "it can be looked at");
    let delivered = Arc::new(AtomicUsize::new(0));
    let count = delivered.clone();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let settings = LaneSettings { poll: Duration::from_millis(100), ..LaneSettings::new("a") };
    let courier = courier(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Outcome::sent() }
    });
    let worker = Worker::new(other.outbox.clone()).lane_with(settings, Arc::new(courier));
    let worker = tokio::spawn(worker.run(async move { drop(stopped.await) }));
    // Rolled back transactions are what a claim costs here.
    let tried = "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()";
    let before = session.number(tried).await;
    until(async || session.number(tried).await > before).await;
    let first = session.number(tried).await;
    tokio::time::sleep(secs(3)).await;
    let made = session.number(tried).await - first;
    assert!(made < 60, "it asks now and then, not all the time: {made} times in three seconds");
    assert_eq!(delivered.load(Ordering::SeqCst), 0, "what cannot be claimed is not delivered");
    session.run(&format!("ALTER DATABASE {name} RESET default_transaction_read_only")).await.unwrap();
    // Its sessions go by the old word until they end.
    let others = "SELECT COUNT(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    session.number(others).await;
    until(async || db.raw().await.number("SELECT COUNT(*) FROM outbox_done").await == 1).await;
    assert_eq!(delivered.load(Ordering::SeqCst), 1);
    drop(stop);
    worker.await.unwrap().unwrap();
    assert_eq!(session.number("SELECT COUNT(*) FROM outbox").await, 0, "and nothing of what was refused is there");
}

/// Sessions that take two keys in opposite orders: the database ends one of them, and everybody is told the truth.
async fn row_20_callers_who_lock_crosswise_all_get_an_answer(db: Database) {
    for round in 0..6 {
        let keys = [format!("x-{round}"), format!("y-{round}")];
        let message = |key: &str| NewMessage::new("a", "crosswise").key(key.to_owned());
        // Each takes its own first, then the other's, as callers of `enqueue` one message at a time do.
        let callers = [[0, 1], [1, 0], [0, 1], [1, 0]].map(|order| {
            let (db, keys) = (db.clone(), keys.clone());
            tokio::spawn(async move {
                let mut answers = Vec::new();
                for n in order {
                    answers.push(db.outbox.enqueue(vec![message(&keys[n])]).await);
                }
                answers.push(db.outbox.enqueue(order.map(|n| message(&keys[n])).to_vec()).await);
                answers
            })
        });
        // A stranger holds the second key for a while and then wants the first: a real deadlock for whoever has both.
        let stranger = tokio::spawn({
            let (db, keys) = (db.clone(), keys.clone());
            async move {
                if db.dialect == Dialect::Sqlite {
                    return;
                }
                let key = if db.dialect == Dialect::Mysql { "`key`" } else { "key" };
                let take = |name: &str| {
                    let expires = if db.dialect == Dialect::Mysql { "UTC_TIMESTAMP(6)" } else { "now()" };
                    format!(
                        "INSERT INTO outbox_keys (lane, {key}, outbox_id, digest, expires_at) VALUES ('a', '{name}', 0, 'x', {expires})"
                    )
                };
                let mut session = db.raw().await;
                session.run("BEGIN").await.unwrap();
                if session.run(&take(&keys[1])).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(30)).await;
                    let _ = session.run(&take(&keys[0])).await;
                }
                let _ = session.run("ROLLBACK").await;
            }
        });
        for caller in callers {
            for answer in caller.await.unwrap() {
                if let Err(error) = answer {
                    assert!(matches!(error.kind, Kind::Busy | Kind::Locked), "a definite word: {error}");
                    assert_eq!(error.effect, Effect::NotApplied, "{error}");
                }
            }
        }
        stranger.await.unwrap();
        for key in &keys {
            let again = db.enqueue(message(key)).await;
            assert!(matches!(again.outcome, Enqueued::Exists | Enqueued::Created), "{again:?}");
        }
        assert_eq!(
            db.count("outbox").await,
            2 * (round + 1),
            "one message for each key, however often it was asked for"
        );
        assert_eq!(db.count("outbox_keys WHERE outbox_id = 0").await, 0);
    }
}

/// An old snapshot keeps every version of every row: claims go on, nothing is delivered twice, and what it reads stays old.
async fn row_21_a_reader_that_stays_keeps_nobody_from_anything(db: Database) {
    let mut reader = db.raw().await;
    let begin = match db.dialect {
        Dialect::Mysql => "START TRANSACTION WITH CONSISTENT SNAPSHOT",
        Dialect::Postgres => "BEGIN ISOLATION LEVEL REPEATABLE READ",
        Dialect::Sqlite => "BEGIN",
    };
    reader.run(begin).await.unwrap();
    assert_eq!(reader.number("SELECT COUNT(*) FROM outbox").await, 0);
    let total = 3000;
    let delivered = Arc::new(std::sync::Mutex::new(Vec::new()));
    let book = delivered.clone();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let settings = LaneSettings { poll: Duration::from_millis(50), ..LaneSettings::new("a") };
    let courier = courier(move |message| {
        book.lock().unwrap().push(message.id);
        async { Outcome::sent() }
    });
    let worker = Worker::new(db.outbox.clone()).lane_with(settings, Arc::new(courier));
    let worker = tokio::spawn(worker.run(async move { drop(stopped.await) }));
    for _ in 0..10 {
        let messages = (0..total / 10).map(|n| NewMessage::new("a", n.to_string())).collect();
        db.outbox.enqueue(messages).await.unwrap();
    }
    until(async || db.count("outbox_done").await == total).await;
    assert_eq!(reader.number("SELECT COUNT(*) FROM outbox_done").await, 0, "it still looks at the past");
    reader.run("ROLLBACK").await.unwrap();
    drop(stop);
    worker.await.unwrap().unwrap();
    let mut ids = delivered.lock().unwrap().clone();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len() as i64, delivered.lock().unwrap().len() as i64), (total, total), "each once");
}

/// One bit of a stored payload is another: that message is dead and told, and its neighbours arrive as they were given.
async fn row_29_a_flipped_bit_is_never_delivered(db: Database) {
    let given: Vec<String> = (0..9).map(|n| format!("payload {n}")).collect();
    let mut ids = Vec::new();
    for payload in &given {
        ids.push(db.put("a", payload).await);
    }
    // "4" and "5" differ in one bit.
    let flipped = match db.dialect {
        Dialect::Postgres => "'payload 5'::bytea",
        Dialect::Mysql => "CAST('payload 5' AS BINARY)",
        Dialect::Sqlite => "CAST('payload 5' AS BLOB)",
    };
    db.raw().await.run(&format!("UPDATE outbox SET payload = {flipped} WHERE id = {}", ids[4])).await.unwrap();
    let delivered = Arc::new(std::sync::Mutex::new(Vec::new()));
    let book = delivered.clone();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let settings = LaneSettings { poll: Duration::from_millis(50), ..LaneSettings::new("a") };
    let courier = courier(move |message| {
        book.lock().unwrap().push((message.id, String::from_utf8_lossy(&message.payload).into_owned()));
        async { Outcome::sent() }
    });
    let worker = Worker::new(db.outbox.clone()).lane_with(settings, Arc::new(courier));
    let worker = tokio::spawn(worker.run(async move { drop(stopped.await) }));
    until(async || db.count("outbox_done").await == 9).await;
    drop(stop);
    worker.await.unwrap().unwrap();
    let mut delivered = delivered.lock().unwrap().clone();
    delivered.sort();
    let whole = |n: &usize| *n != 4;
    let expected: Vec<_> = (0..9).filter(whole).map(|n| (ids[n], given[n].clone())).collect();
    assert_eq!(delivered, expected);
    let shown = db.show(ids[4]).await;
    assert_eq!((shown.status, shown.last_error_code.as_deref()), (Status::Dead, Some("PAYLOAD_CORRUPT")));
}

/// Somebody has the whole table for longer than a lease: a claim that waited for it is not born with an old end.
async fn row_32_a_claim_that_was_kept_waiting_has_its_whole_lease(db: Database) {
    let id = db.put("a", "x").await;
    let (take, leave) = match db.dialect {
        Dialect::Sqlite => ("BEGIN IMMEDIATE", "COMMIT"),
        Dialect::Postgres => ("BEGIN; LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE", "COMMIT"),
        Dialect::Mysql => ("LOCK TABLES outbox WRITE", "UNLOCK TABLES"),
    };
    let mut stranger = db.raw().await;
    stranger.run(take).await.unwrap();
    let lease = secs(2);
    let claiming = tokio::spawn({
        let db = db.clone();
        async move {
            let mut asked = 0;
            loop {
                asked += 1;
                let claim = claim_of("a", "w", 1, lease, From::Mark(None));
                match db.outbox.store().claim(&claim).await {
                    Ok(claimed) if !claimed.messages.is_empty() => return (asked, claimed),
                    Ok(_) => {}
                    // It may be told to come again, while nothing was changed.
                    Err(error) => assert!(error.effect != Effect::Unknown, "{error}"),
                }
            }
        }
    });
    tokio::time::sleep(lease * 3 / 2).await; // so long is the lock to be held
    stranger.run(leave).await.unwrap();
    let (asked, claimed) = claiming.await.unwrap();
    let message = &claimed.messages[0];
    assert_eq!((message.id, message.lease_token), (id, 1), "after {asked} attempts");
    let left = match db.dialect {
        Dialect::Sqlite => "SELECT lease_until / 1000 - CAST(unixepoch('subsec') * 1000 AS INTEGER) FROM outbox",
        Dialect::Postgres => {
            "SELECT (extract(epoch FROM (lease_until - clock_timestamp())) * 1000)::bigint FROM outbox"
        }
        Dialect::Mysql => "SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), lease_until) DIV 1000 FROM outbox",
    };
    let left = db.raw().await.number(left).await;
    assert!(left > 0, "the lease is counted from when it had the row: {left} ms are left");
}
