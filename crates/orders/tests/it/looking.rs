//! What people look at, and what is looked for again and again, costs no more when there is more of it.

use std::sync::Arc;

use postrider::Outbox;
use postrider::alerts::Alerts;
use postrider::doctor::Examine;
use postrider_orders::{Book, Idempotency, Orders, Settings, Which};
use proving::watched::{Watched, numbers};

use crate::harness::{Ground, on_every_store};

on_every_store! {
    lists_and_the_reaper_are_bounded,
}

/// Many live orders, as many that ended, their keys, and a lane that is busier than all of them.
async fn lists_and_the_reaper_are_bounded(ground: Ground) {
    let url = ground.url();
    let home = ground.open(Idempotency::None).await;
    let dialect = home.outbox.store().dialect().name();
    let (now, later, payload, no) = match dialect {
        "sqlite" => ("1700000000000000", "1900000000000000", "x'7b7d'", "0"),
        "postgres" => ("TIMESTAMP '2023-11-14'", "TIMESTAMP '2099-01-01'", "'{}'::bytea", "FALSE"),
        _ => ("'2023-11-14 00:00:00'", "'2099-01-01 00:00:00'", "x'7b7d'", "0"),
    };
    let sha = match dialect {
        "postgres" => "'\\x00'::bytea",
        _ => "x'00'",
    };
    let (key, name) = match dialect {
        "mysql" => ("`key`", "CONCAT('k', n)"),
        _ => ("key", "'k' || n"),
    };
    let columns =
        "lane, target, payload, shard_id, due_at, created_at, updated_at, attempts, crashes, lease_token, maybe_sent";
    if dialect == "postgres" {
        for table in ["outbox", "outbox_done", "outbox_keys"] {
            home.execute(&format!("ALTER TABLE {table} SET (autovacuum_enabled = off)")).await.unwrap();
        }
    }
    for lane in ["orders", "alerts"] {
        let values = format!("'{lane}', 'AAPL', {payload}, 0, {now}, {now}, {now}, 0, 0, 0, {no}");
        home.execute(&format!("INSERT INTO outbox ({columns}) SELECT {values} FROM {} WHERE n < 80000", numbers()))
            .await
            .unwrap();
        let base = if lane == "orders" { 10_000_000 } else { 20_000_000 };
        home.execute(&format!(
            "INSERT INTO outbox_done (id, {columns}, status, finished_at) SELECT {base} + n, {values}, CASE n % 2 WHEN 0 THEN 'dead' ELSE 'sent' END, {now}
             FROM {} WHERE n < 80000",
            numbers()
        ))
        .await
        .unwrap();
        // None of them is over: the reaper has nothing to find.
        home.execute(&format!(
            "INSERT INTO outbox_keys (lane, {key}, outbox_id, digest, expires_at) SELECT '{lane}', {name}, {base} + n, {sha}, {later} FROM {} WHERE n < 80000",
            numbers()
        ))
        .await
        .unwrap();
    }
    // PostgreSQL has no statistics, and must do without.
    if dialect == "mysql" {
        home.rows("ANALYZE TABLE outbox, outbox_done, outbox_keys").await;
    }
    let watched = Watched::over(home.outbox.store().clone(), &url);
    let outbox = Outbox::new(watched.clone() as Arc<dyn postrider::store::Store>);
    let alerts = Alerts::new(outbox.clone(), "alerts", std::time::Duration::from_secs(300));
    let broker = home.broker.clone();
    let orders = Orders::new(outbox, Settings::default(), Book::default(), broker, Some(alerts)).await.unwrap();
    watched.take();
    for which in [Which::All, Which::Failed, Which::NeedsPerson] {
        for before in [None, Some(10_040_000)] {
            let page = orders.list(which, before, 50).await.unwrap();
            assert!(page.items.len() == 50 || page.next.is_some() || which == Which::NeedsPerson, "{which:?}");
            watched.assert_bounded(&format!("{which:?} before {before:?}"), 60_000);
        }
    }
    // More wait for a person than one look finds by its index: one comes to all of them.
    let far = if dialect == "sqlite" { "5000000000000000" } else { "TIMESTAMP '2126-01-01 00:00:00'" };
    home.execute(&format!(
        "INSERT INTO outbox ({columns}, last_error_code) SELECT 'orders', 'AAPL', {payload}, 0, {far}, {now}, {now}, 1, 0, 1, {no}, 'NEEDS_RECONCILE'
         FROM {} WHERE n < 6000",
        numbers()
    ))
    .await
    .unwrap();
    let (mut before, mut parked) = (None, 0);
    loop {
        let page = orders.list(Which::NeedsPerson, before, 1000).await.unwrap();
        watched.assert_bounded("those that need a person", 60_000);
        parked += page.items.len();
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(parked, 6000);
    orders.conflicts(None, 50).await.unwrap();
    orders.entry("k").await.unwrap();
    watched.assert_bounded("conflicts and one entry", 1_000);
    assert_eq!(orders.reap().await.unwrap(), 0);
    watched.assert_bounded("the reaper", 1_000);
    // In the rows above nobody knows of a key, so the parked ones are for a person as they should be.
    assert_eq!(orders.look(std::time::Duration::from_secs(3600)).await.unwrap(), []);
    watched.assert_bounded("the doctor", 20_000);
}
