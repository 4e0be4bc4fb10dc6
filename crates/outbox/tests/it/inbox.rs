//! The inbox: once per message, also when two receivers get it at the same moment.

use std::time::Duration;

use postrider::error::Kind;
use postrider::tx::Dialect;
use postrider::{Inbox, Lanes, Outbox};

use crate::callers::{Caller, DRIVERS, Driver, run};
use proving::kit::scratch::{self, Scratch};

async fn migrated(driver: Driver) -> Scratch {
    let database = driver.scratch().await;
    Outbox::open(&database.url, Lanes::new()).await.unwrap().migrate().await.unwrap();
    database
}

async fn first_time(tx: &mut Caller, id: &str) -> bool {
    Inbox::first_time(&mut **tx, "billing", id).await.unwrap()
}

#[tokio::test]
async fn a_message_is_new_once() {
    for &driver in DRIVERS {
        let database = migrated(driver).await;
        let mut tx = driver.begin(&database.url).await;
        assert!(first_time(&mut tx, "1").await, "{driver:?}");
        assert!(!first_time(&mut tx, "1").await, "{driver:?}: handled in this very transaction");
        assert!(first_time(&mut tx, "a").await && first_time(&mut tx, "A").await && first_time(&mut tx, "a ").await);
        assert!(Inbox::first_time(&mut *tx, "shipping", "1").await.unwrap(), "{driver:?}: another sender");
        run(&mut tx, "COMMIT").await;

        let mut tx = driver.begin(&database.url).await;
        assert!(!first_time(&mut tx, "1").await, "{driver:?}");
        assert!(first_time(&mut tx, "2").await, "{driver:?}");
        run(&mut tx, "ROLLBACK").await;

        let mut tx = driver.begin(&database.url).await;
        assert!(first_time(&mut tx, "2").await, "{driver:?}: it was rolled back");
        for (source, id) in [("", "x"), ("x", ""), ("x", &"i".repeat(256)[..]), ("x", "\0")] {
            let error = Inbox::first_time(&mut *tx, source, id).await.unwrap_err();
            assert_eq!(error.kind, Kind::Invalid, "{driver:?}: {error}");
        }
    }
}

/// The second receiver waits for the first and then knows; whatever it has read before.
#[tokio::test]
async fn the_second_waits_for_the_first() {
    for &driver in DRIVERS {
        for (end, taken_over) in [("COMMIT", false), ("ROLLBACK", true)] {
            let database = migrated(driver).await;
            let mut first = driver.begin(&database.url).await;
            assert!(first_time(&mut first, "1").await, "{driver:?}");
            let url = database.url.clone();
            let second = tokio::spawn(async move {
                let mut second = driver.connect(&url).await;
                match driver.dialect() {
                    Dialect::Sqlite => run(&mut second, "BEGIN IMMEDIATE").await,
                    Dialect::Postgres => run(&mut second, "BEGIN ISOLATION LEVEL READ COMMITTED").await,
                    Dialect::Mysql => {
                        run(&mut second, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ").await;
                        run(&mut second, "BEGIN").await;
                    }
                }
                // The snapshot, where there is one, is older than the first one's commit.
                assert_eq!(
                    second.query("SELECT count(*) FROM inbox", &[]).await.unwrap()[0].int(0).unwrap(),
                    i64::from(driver.dialect() == Dialect::Sqlite && !taken_over)
                );
                let answer = first_time(&mut second, "1").await;
                run(&mut second, "COMMIT").await;
                answer
            });
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert!(!second.is_finished(), "{driver:?}: it did not wait");
            run(&mut first, end).await;
            assert_eq!(second.await.unwrap(), taken_over, "{driver:?}, {end}");
        }
    }
}

/// PostgreSQL's stricter levels refuse instead of lying.
#[tokio::test]
async fn an_old_snapshot_is_told_to_start_over() {
    for &driver in DRIVERS.iter().filter(|d| d.dialect() == Dialect::Postgres) {
        let database = migrated(driver).await;
        let mut old = driver.connect(&database.url).await;
        run(&mut old, "BEGIN ISOLATION LEVEL REPEATABLE READ").await;
        old.query("SELECT 1 FROM inbox", &[]).await.unwrap();
        let mut other = driver.begin(&database.url).await;
        assert!(first_time(&mut other, "1").await);
        run(&mut other, "COMMIT").await;
        let error = Inbox::first_time(&mut *old, "billing", "1").await.unwrap_err();
        assert_eq!(error.kind, Kind::Busy, "{driver:?}: {error}");
    }
}

/// Many receivers, many copies, some of them fail: each message takes effect exactly once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_crowd_handles_each_message_once() {
    for &driver in DRIVERS {
        let database = migrated(driver).await;
        let mut owner = driver.connect(&database.url).await;
        run(&mut owner, "CREATE TABLE effects (message_id VARCHAR(20) NOT NULL)").await;
        let crowd: Vec<_> = (0..6)
            .map(|receiver| {
                let url = database.url.clone();
                tokio::spawn(async move {
                    for message in 0..12 {
                        handle(driver, &url, receiver, &message.to_string()).await;
                    }
                })
            })
            .collect();
        for receiver in crowd {
            receiver.await.unwrap();
        }
        let rows = owner.query("SELECT count(*), count(DISTINCT message_id) FROM effects", &[]).await.unwrap();
        assert_eq!((rows[0].int(0).unwrap(), rows[0].int(1).unwrap()), (12, 12), "{driver:?}");
    }
}

/// Handles one message as a receiver does: busy means again, and the odd receivers fail the first time.
async fn handle(driver: Driver, url: &str, receiver: u32, message: &str) {
    for round in 0.. {
        let mut tx = driver.begin(url).await;
        match Inbox::first_time(&mut *tx, "billing", message).await {
            Ok(true) => run_effect(&mut tx, message).await,
            Ok(false) => {}
            Err(error) => {
                assert_eq!(error.kind, Kind::Busy, "{driver:?}: {error}");
                assert!(round < 50, "{driver:?}: always busy");
                continue;
            }
        }
        if receiver % 2 == 1 && round == 0 {
            run(&mut tx, "ROLLBACK").await;
        } else {
            return run(&mut tx, "COMMIT").await;
        }
    }
}

async fn run_effect(tx: &mut Caller, message: &str) {
    assert_eq!(tx.execute("INSERT INTO effects VALUES (?)", &[message.into()]).await.unwrap(), 1);
}

#[tokio::test]
async fn what_is_old_is_forgotten() {
    for &driver in DRIVERS {
        let database = migrated(driver).await;
        let mut tx = driver.connect(&database.url).await;
        for n in 0..1003 {
            if n % 200 == 0 {
                run(&mut tx, if driver.dialect() == Dialect::Sqlite { "BEGIN IMMEDIATE" } else { "BEGIN" }).await;
            }
            assert!(first_time(&mut tx, &n.to_string()).await);
            if n % 200 == 199 || n == 1002 {
                run(&mut tx, "COMMIT").await;
            }
        }
        assert_eq!(Inbox::forget(&mut *tx, Duration::from_secs(3600)).await.unwrap(), 0, "{driver:?}");
        assert_eq!(Inbox::forget(&mut *tx, Duration::MAX).await.unwrap(), 0, "{driver:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(Inbox::forget(&mut *tx, Duration::ZERO).await.unwrap(), 1000, "{driver:?}: one batch");
        assert!(!first_time(&mut tx, "1002").await, "{driver:?}: the oldest go first");
        assert_eq!(Inbox::forget(&mut *tx, Duration::ZERO).await.unwrap(), 3, "{driver:?}");
        assert!(first_time(&mut tx, "1").await, "{driver:?}: forgotten means new");
    }
}

#[test]
fn rusqlite_needs_no_runtime() {
    let database = scratch::sqlite();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { Outbox::open(&database.url, Lanes::new()).await.unwrap().migrate().await.unwrap() });
    let mut connection = rusqlite::Connection::open(database.url.trim_start_matches("sqlite://")).unwrap();
    for (commit, answer) in [(false, true), (true, true), (true, false)] {
        let tx = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
        assert_eq!(Inbox::first_time_in_sqlite(&tx, "billing", "1").unwrap(), answer);
        if commit {
            tx.commit().unwrap();
        }
    }
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(Inbox::forget_in_sqlite(&connection, Duration::from_secs(60)).unwrap(), 0);
    assert_eq!(Inbox::forget_in_sqlite(&connection, Duration::ZERO).unwrap(), 1);
}
