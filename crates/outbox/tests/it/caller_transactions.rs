//! Enqueue in the caller's own transaction: the same answers and the same rows whatever the driver.

use std::time::Duration;

use bytes::Bytes;
use postrider::error::Kind;
use postrider::store::Shown;
use postrider::tx::{Dialect, Value};
use postrider::{Enqueued, LaneRules, Lanes, NewMessage, Outbox, Timestamp};

use crate::callers::{DRIVERS, run};

async fn outbox(url: &str, key_ttl: Duration) -> Outbox {
    let rules = LaneRules { shards: 8, key_ttl, ..LaneRules::default() };
    let outbox = Outbox::open(url, Lanes::new().with("l", rules)).await.unwrap();
    outbox.migrate().await.unwrap();
    outbox
}

/// One of every kind; the last but one is the second of its key, the last the second of its active key.
fn batch(mark: &str) -> Vec<NewMessage> {
    let full = NewMessage::new("l", Bytes::from_static(b"\x00\xff bytes \xf0\x9f\x93\xaf"))
        .content_type("application/octet-stream")
        .header("X-Tool", "näil")
        .target("smithy")
        .key(format!("{mark}-k"))
        .correlation_id("c-1")
        .delay(Duration::from_secs(3600))
        .deliver_before(Timestamp::FAR_FUTURE);
    vec![
        NewMessage::new("l", ""),
        full.clone(),
        NewMessage::new("l", "a").active_key(format!("{mark}-a")),
        NewMessage::new("l", "both").key(format!("{mark}-b")).active_key(format!("{mark}-c")),
        full,
        NewMessage::new("l", "other").active_key(format!("{mark}-a")),
    ]
}

const OUTCOMES: [Enqueued; 6] =
    [Enqueued::Created, Enqueued::Created, Enqueued::Created, Enqueued::Created, Enqueued::Exists, Enqueued::Differs];

/// What two drivers must agree on.
fn comparable(shown: Shown) -> impl PartialEq + std::fmt::Debug {
    let delayed = shown.due_at.since(shown.created_at).as_secs();
    (
        (shown.status, shown.payload_sha, shown.payload_bytes, shown.target.clone(), shown.content_type, delayed),
        (shown.correlation_id, shown.deliver_before, shown.attempts, shown.lease_token),
    )
}

#[tokio::test]
async fn every_driver_writes_the_same() {
    for driver in DRIVERS {
        let database = driver.scratch().await;
        let outbox = outbox(&database.url, Duration::from_secs(3600)).await;

        let mut tx = driver.begin(&database.url).await;
        let receipt = outbox.enqueue_in(&mut *tx, &batch("theirs")).await.unwrap();
        run(&mut tx, "COMMIT").await;
        let theirs = receipt.committed();
        let ours = outbox.enqueue(batch("ours")).await.unwrap();
        for (their, our) in theirs.iter().zip(&ours) {
            assert_eq!(their.outcome, our.outcome, "{driver:?}");
            let (theirs, _) = outbox.show(their.id).await.unwrap().unwrap();
            let (ours, _) = outbox.show(our.id).await.unwrap().unwrap();
            assert_eq!(comparable(theirs), comparable(ours), "{driver:?}");
            assert_eq!(outbox.payload(their.id).await.unwrap(), outbox.payload(our.id).await.unwrap(), "{driver:?}");
        }
        assert_eq!(theirs.iter().map(|e| e.outcome).collect::<Vec<_>>(), OUTCOMES, "{driver:?}");
        assert_eq!(outbox.stats().await.unwrap()["l"].pending, 8, "{driver:?}");

        // Again, in a transaction that has looked around before: all but the plain one are known.
        let mut tx = driver.begin(&database.url).await;
        tx.query("SELECT count(*) FROM outbox", &[]).await.unwrap();
        let again = outbox.enqueue_in(&mut *tx, &batch("theirs")).await.unwrap();
        let known: Vec<i64> = again.entries()[1..].iter().map(|e| e.id).collect();
        assert_eq!(known, theirs[1..].iter().map(|e| e.id).collect::<Vec<_>>(), "{driver:?}");
        run(&mut tx, "ROLLBACK").await;
        assert_eq!(outbox.stats().await.unwrap()["l"].pending, 8, "{driver:?}: rolled back, and yet there");
    }
}

#[tokio::test]
async fn many_at_once() {
    for driver in DRIVERS {
        let database = driver.scratch().await;
        let outbox = outbox(&database.url, Duration::from_secs(3600)).await;
        let many: Vec<NewMessage> = (0..1200)
            .map(|n| NewMessage::new("l", n.to_string()))
            .map(|m| {
                if m.payload.len() % 2 == 0 {
                    m
                } else {
                    let key = format!("{:?}", m.payload);
                    m.key(key)
                }
            })
            .collect();
        let mut tx = driver.begin(&database.url).await;
        let receipt = outbox.enqueue_in(&mut *tx, &many).await.unwrap();
        run(&mut tx, "COMMIT").await;
        for (n, entry) in receipt.committed().iter().enumerate().step_by(97) {
            let payload = outbox.payload(entry.id).await.unwrap().unwrap();
            assert_eq!(payload, n.to_string(), "{driver:?}: the id belongs to another message");
        }
    }
}

/// A message that is refused gives an expired key back as it was, its time to the microsecond.
#[tokio::test]
async fn an_expired_key_is_given_back_unchanged() {
    for driver in DRIVERS {
        let database = driver.scratch().await;
        let outbox = outbox(&database.url, Duration::ZERO).await;
        outbox.enqueue(vec![NewMessage::new("l", "old").key("k")]).await.unwrap();
        outbox.enqueue(vec![NewMessage::new("l", "holder").active_key("a")]).await.unwrap();
        let mut tx = driver.begin(&database.url).await;
        let column = if driver.dialect() == Dialect::Mysql { "`key`" } else { "key" };
        let look = format!("SELECT outbox_id, digest, expires_at FROM outbox_keys WHERE {column} = ?");
        let before = tx.query(&look, &["k".into()]).await.unwrap();
        let gone = tx.execute("DELETE FROM outbox WHERE id = ?", &[before[0].int(0).unwrap().into()]).await.unwrap();
        assert_eq!(gone, 1);
        let refused = NewMessage::new("l", "new").key("k").active_key("a");
        let receipt = outbox.enqueue_in(&mut *tx, &[refused]).await.unwrap();
        assert_eq!(receipt.entries()[0].outcome, Enqueued::Differs, "{driver:?}");
        assert_eq!(tx.query(&look, &["k".into()]).await.unwrap(), before, "{driver:?}");
        assert!(before[0].time(2).unwrap() > Timestamp::from_micros(0), "{driver:?}");
        run(&mut tx, "COMMIT").await;
    }
}

#[tokio::test]
async fn values_survive_the_way_there_and_back() {
    let text = "text ü 📯";
    let moment: Timestamp = "2026-03-01T12:00:00.123456Z".parse().unwrap();
    for driver in DRIVERS {
        let database = driver.scratch().await;
        let mut tx = driver.connect(&database.url).await;
        let (bytes, time, double) = match driver.dialect() {
            Dialect::Postgres => ("BYTEA", "TIMESTAMPTZ", "DOUBLE PRECISION"),
            Dialect::Mysql => ("BLOB", "DATETIME(6)", "DOUBLE"),
            Dialect::Sqlite => ("BLOB", "INTEGER", "REAL"),
        };
        let table = format!("CREATE TABLE v (i BIGINT, t TEXT, b {bytes}, m {time}, d {double}, n INT, f BOOLEAN)");
        run(&mut tx, &table).await;
        let row: [Value; 7] = [
            i64::MIN.into(),
            text.into(),
            (&b"\x00\xff"[..]).into(),
            moment.into(),
            1.5.into(),
            Value::Null,
            true.into(),
        ];
        assert_eq!(tx.execute("INSERT INTO v VALUES (?, ?, ?, ?, ?, ?, ?)", &row).await.unwrap(), 1, "{driver:?}");
        let nothing = vec![Value::Null; 7];
        assert_eq!(tx.execute("INSERT INTO v VALUES (?, ?, ?, ?, ?, ?, ?)", &nothing).await.unwrap(), 1, "{driver:?}");
        let rows = tx.query("SELECT i, t, b, m, d, n, f, 7 FROM v ORDER BY i IS NULL", &[]).await.unwrap();
        assert_eq!(rows[0].int(0).unwrap(), i64::MIN, "{driver:?}");
        assert_eq!(rows[0].text(1).unwrap(), text, "{driver:?}");
        assert_eq!(rows[0].bytes(2).unwrap(), &b"\x00\xff"[..], "{driver:?}");
        assert_eq!(rows[0].time(3).unwrap(), moment, "{driver:?}");
        assert_eq!(rows[0].0[4], Value::Float(1.5), "{driver:?}");
        assert_eq!(rows[0].opt_int(5).unwrap(), None, "{driver:?}");
        assert!(rows[0].bool(6).unwrap(), "{driver:?}");
        assert_eq!(rows[0].int(7).unwrap(), 7, "{driver:?}");
        assert_eq!(rows[1].0[..7], nothing, "{driver:?}");
    }
}

#[tokio::test]
async fn errors_keep_their_meaning() {
    for driver in DRIVERS {
        let database = driver.scratch().await;
        let lanes = Lanes::new().with("l", LaneRules::default());
        let outbox = Outbox::open(&database.url, lanes).await.unwrap();
        let mut tx = driver.connect(&database.url).await;
        let error = outbox.enqueue_in(&mut *tx, &[NewMessage::new("l", "x")]).await.err().unwrap();
        assert_eq!(error.kind, Kind::Schema, "{driver:?}: {error}");
        assert!(error.message.contains("postrider migrate"), "{driver:?}: {error}");
        run(&mut tx, "CREATE TABLE u (n INT PRIMARY KEY)").await;
        run(&mut tx, "INSERT INTO u VALUES (1)").await;
        let error = tx.execute("INSERT INTO u VALUES (?)", &[1i64.into()]).await.unwrap_err();
        assert_eq!(error.kind, Kind::Conflict, "{driver:?}: {error}");
    }
}
