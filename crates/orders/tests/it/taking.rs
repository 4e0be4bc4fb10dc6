//! Taking orders in: once per key, whoever asks how often.

use postrider::error::Kind;
use postrider::store::{Mode, transact};
use postrider_orders::{Idempotency, NewOrder, Order, Placed, Status};

use crate::harness::{Ground, Home, on_every_store, order};

on_every_store!(
    ten_at_once_with_one_key_are_one_order,
    the_same_order_in_other_words_is_the_same,
    conflicts_under_one_key_do_not_grow_without_end,
    a_batch_takes_each_key_once,
    in_the_callers_own_transaction,
    a_key_past_its_time_starts_clean,
    nothing_unfinished_is_reaped,
);

async fn ten_at_once_with_one_key_are_one_order(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    let ask = |_| {
        let orders = home.orders.clone();
        tokio::spawn(async move { orders.place(vec![NewOrder::new("k", order("1"))]).await.unwrap().remove(0) })
    };
    let mut accepted = 0;
    for task in (0..10).map(ask).collect::<Vec<_>>() {
        match task.await.unwrap() {
            Placed::Accepted { .. } => accepted += 1,
            Placed::Replayed(entry) => assert_eq!(entry.status, Status::InProgress),
            Placed::Conflict => panic!("they are the same"),
        }
    }
    assert_eq!(accepted, 1);
    let entry = home.entry("k").await;
    assert_eq!(entry.replays, 9);
    assert_eq!((home.count("outbox").await, home.count("idempo_ledger").await), (1, 1));
    home.work_until("k", "succeeded").await;
    assert_eq!(home.broker.executions("k"), 1);
}

async fn the_same_order_in_other_words_is_the_same(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("k").await;
    let same = r#" {"time_in_force":"IOC","price":10.00,"qty":1.0,"side":"BUY","instrument":"AAPL","trace_id":"t9"} "#;
    let again = NewOrder::new("k", Order::parse(same.as_bytes()).unwrap());
    assert!(matches!(home.orders.place(vec![again]).await.unwrap()[0], Placed::Replayed(_)));
    assert_eq!(home.place_as("k", "1.0000000000000000001").await, Placed::Conflict);
    assert_eq!(home.place_as("k", "2").await, Placed::Conflict);
    assert_eq!(home.place_as("k", "2").await, Placed::Conflict);
    assert_eq!(home.entry("k").await.replays, 1, "a conflict is no replay");
    let noted = home.orders.conflicts(None, 10).await.unwrap().items;
    let noted: Vec<_> = noted.iter().map(|c| (c.idempotency_key.as_str(), c.times, c.outbox_id)).collect();
    assert_eq!(noted, [("k", 2, None), ("k", 1, None)], "each other order once, the newest first");
    // Keys are bytes: case and blanks make another.
    for other in ["K", "k ", " k"] {
        home.place(other).await;
    }
    let digests = home.rows("SELECT request_digest FROM outbox_orders ORDER BY id").await;
    assert_eq!(digests[0].text(0).unwrap(), home.entry("k").await.request_digest, "the view tells the ledger's digest");
}

async fn conflicts_under_one_key_do_not_grow_without_end(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("k").await;
    for qty in 2..=110 {
        assert_eq!(home.place_as("k", &qty.to_string()).await, Placed::Conflict);
    }
    let noted = home.orders.conflicts(None, 1000).await.unwrap().items;
    assert_eq!(noted.len(), 101, "a hundred, and one for all others");
    assert_eq!((noted[0].request_digest.as_str(), noted[0].times), ("", 9));
    assert_eq!(noted.iter().map(|conflict| conflict.times).sum::<i64>(), 109, "each is counted");
}

async fn a_batch_takes_each_key_once(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("old").await;
    let batch = [("b", "1"), ("a", "1"), ("b", "1"), ("b", "2"), ("old", "1"), ("old", "5")];
    let batch = batch.map(|(key, qty)| NewOrder::new(key, order(qty))).to_vec();
    let placed = home.orders.place(batch).await.unwrap();
    let kinds: Vec<&str> = placed
        .iter()
        .map(|placed| match placed {
            Placed::Accepted { .. } => "accepted",
            Placed::Replayed(_) => "replayed",
            Placed::Conflict => "conflict",
        })
        .collect();
    assert_eq!(kinds, ["accepted", "accepted", "replayed", "conflict", "replayed", "conflict"]);
    assert_eq!(home.count("outbox").await, 3);
    let refused = home.orders.place(vec![NewOrder::new("", order("1"))]).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Invalid);
}

async fn in_the_callers_own_transaction(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    let attempt = |fails: bool| {
        let orders = home.orders.clone();
        transact(&**home.outbox.store(), Mode::Write, move |tx| {
            let orders = orders.clone();
            Box::pin(async move {
                let placed = orders.place_in(tx, &[NewOrder::new("k", order("1"))]).await?;
                match fails {
                    true => Err(postrider::Error::invalid("the caller thinks better of it")),
                    false => Ok(placed),
                }
            })
        })
    };
    attempt(true).await.unwrap_err();
    assert_eq!((home.count("idempo_ledger").await, home.count("outbox").await), (0, 0), "all or nothing");
    assert_eq!(home.count("outbox_keys").await, 0);
    assert!(matches!(attempt(false).await.unwrap()[..], [Placed::Accepted { .. }]));
    assert!(matches!(attempt(false).await.unwrap()[..], [Placed::Replayed(_)]));
    home.orders.committed();
}

/// With the drivers' own transactions, under what MySQL callers have by default: REPEATABLE READ.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_transaction_of_mysql_async() {
    use mysql_async::prelude::Queryable;
    let ground = crate::harness::mysql().await;
    let url = ground.url();
    let home = ground.open(Idempotency::Key).await;
    let mut connection = proving::kit::mysql(&url).await.unwrap();
    let mut tx = connection.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
    // Its snapshot is older than the order.
    tx.query_drop("SELECT COUNT(*) FROM outbox").await.unwrap();
    let id = home.place("k").await;
    let placed = home.orders.place_in(&mut tx, &[NewOrder::new("k", order("1"))]).await.unwrap();
    let Placed::Replayed(entry) = &placed[0] else { panic!("{placed:?}") };
    assert_eq!(entry.outbox_id, Some(id), "it sees what is there now");
    let placed = home.orders.place_in(&mut tx, &[NewOrder::new("mine", order("1"))]).await.unwrap();
    assert!(matches!(placed[..], [Placed::Accepted { .. }]));
    tx.rollback().await.unwrap();
    assert!(home.orders.entry("mine").await.unwrap().is_none());
    connection.disconnect().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_transaction_of_tokio_postgres() {
    let ground = crate::harness::postgres().await;
    let url = ground.url();
    let home = ground.open(Idempotency::Key).await;
    let (mut client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let mut tx = client.transaction().await.unwrap();
    let placed = home.orders.place_in(&mut tx, &[NewOrder::new("k", order("1"))]).await.unwrap();
    assert!(matches!(placed[..], [Placed::Accepted { .. }]));
    assert!(home.orders.entry("k").await.unwrap().is_none(), "not before the commit");
    tx.commit().await.unwrap();
    home.orders.committed();
    home.work_until("k", "succeeded").await;
}

/// Sets when an entry that has ended expires, in seconds from now.
async fn expires_in(home: &Home, key: &str, seconds: i64) {
    let at = match home.outbox.store().dialect().name() {
        "sqlite" => format!("{} + {seconds} * 1000000", postrider::clock::wall().micros()),
        "postgres" => format!("clock_timestamp() + {seconds} * INTERVAL '1 second'"),
        _ => format!("UTC_TIMESTAMP(6) + INTERVAL {seconds} SECOND"),
    };
    let column = if home.outbox.store().dialect().name() == "mysql" { "`key`" } else { "key" };
    for what in [
        "idempo_ledger SET expires_at = {at} WHERE idempotency_key",
        "outbox_keys SET expires_at = {at} WHERE {column}",
    ] {
        let sql = format!("UPDATE {} = '{key}'", what.replace("{at}", &at).replace("{column}", column));
        assert_eq!(home.execute(&sql).await.unwrap(), 1);
    }
}

async fn a_key_past_its_time_starts_clean(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    let first = home.place("k").await;
    home.work_until("k", "succeeded").await;
    let entry = home.entry("k").await;
    let kept = entry.expires_at.unwrap().since(entry.finished_at.unwrap());
    assert_eq!(kept.as_secs(), 48 * 3600, "48 hours after the end");

    expires_in(&home, "k", 24 * 3600).await;
    assert_eq!(home.orders.reap().await.unwrap(), 0);
    let Placed::Replayed(replayed) = home.place_as("k", "1").await else { panic!("a day before, it replays") };
    assert_eq!(replayed.response_payload_json, entry.response_payload_json);
    assert_eq!(home.place_as("k", "2").await, Placed::Conflict);
    assert_eq!(home.count("order_conflicts").await, 1);

    expires_in(&home, "k", -1).await;
    assert!(home.orders.entry("k").await.unwrap().is_none(), "checked on read");
    // Another order, even: the key is free.
    let Placed::Accepted { outbox_id } = home.place_as("k", "7").await else { panic!("it starts clean") };
    assert_ne!(outbox_id, first);
    assert_eq!(home.count("outbox_done").await, 0, "the old message went with its entry");
    assert_eq!(home.count("order_conflicts").await, 0, "and what was refused under it");
    home.work_until("k", "succeeded").await;
    assert_eq!(home.broker.executions("k"), 2, "two orders");

    expires_in(&home, "k", -1).await;
    assert_eq!(home.orders.reap().await.unwrap(), 1);
    for table in ["idempo_ledger", "ledger_events", "outbox_keys", "outbox_done", "outbox_attempts"] {
        assert_eq!(home.count(table).await, 0, "{table}");
    }
}

async fn nothing_unfinished_is_reaped(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("k").await;
    assert!(home.entry("k").await.expires_at.is_none());
    assert_eq!(home.orders.reap().await.unwrap(), 0);
    let forced = home.execute("UPDATE idempo_ledger SET expires_at = first_seen_at").await;
    assert!(forced.is_err(), "the database refuses an expiry of what has not ended");
    assert_eq!(home.count("idempo_ledger").await, 1);
}
