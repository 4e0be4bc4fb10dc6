//! What people look at costs no more when there is more of it.

use std::sync::Arc;

use postrider::Outbox;
use postrider::paging::Page;
use postrider_webhooks::keyring::Keyring;
use postrider_webhooks::{DeadLetterFilter, Rates, Reports, SagaFilter, Webhooks, pulse};
use proving::watched::{Watched, numbers};

use crate::harness::{Home, KEY, on_every_store, secs, settings};
use crate::receiver::{Receiver, status_line};

on_every_store! {
    lists_are_bounded_and_whole,
    the_pulse_tells_of_attempts,
}

/// Subscription 1 first, in every status, with dead letters; then as much again of subscription 2, which is all well.
async fn fill(home: &Home) {
    let dialect = home.outbox.store().dialect().name();
    let (time, payload) = match dialect {
        "sqlite" => ("1700000000000000", "x'7b7d'"),
        "postgres" => ("TIMESTAMP '2023-11-14 00:00:00'", "'{}'::bytea"),
        _ => ("'2023-11-14 00:00:00'", "x'7b7d'"),
    };
    let columns = "event_id, subscription_id, status, attempt_count, created_at, updated_at, generation";
    let status =
        "CASE n % 4 WHEN 0 THEN 'Completed' WHEN 1 THEN 'DeadLettered' WHEN 2 THEN 'PendingRetry' ELSE 'Pending' END";
    if dialect == "postgres" {
        for table in ["webhook_delivery_sagas", "dead_letters"] {
            home.rows(&format!("ALTER TABLE {table} SET (autovacuum_enabled = off)")).await;
        }
    }
    for (subscription, status) in [(1, status), (2, "'Completed'")] {
        home.rows(&format!(
            "INSERT INTO webhook_delivery_sagas ({columns}) SELECT n, {subscription}, {status}, 0, {time}, {time}, 0
             FROM {} WHERE n < 80000",
            numbers()
        ))
        .await;
        home.rows(&format!(
            "INSERT INTO dead_letters (saga_id, event_id, subscription_id, final_error_code, payload_snapshot, failed_at)
             SELECT n + {subscription} * 1000000, n, {subscription}, 'HTTP_50{subscription}', {payload}, {time} FROM {} WHERE n < 80000",
            numbers()
        ))
        .await;
    }
    // PostgreSQL has no statistics, and must do without.
    if dialect == "mysql" {
        home.rows("ANALYZE TABLE webhook_delivery_sagas, dead_letters").await;
    }
}

/// Three attempts that fail, the last of them for good, and one that does not.
async fn the_pulse_tells_of_attempts(home: Home) {
    let minute = secs(60);
    assert_eq!(pulse(&home.outbox, minute).await.unwrap(), Rates::default());
    let receiver = Receiver::start(|_, nth| status_line(if nth < 3 { 500 } else { 200 }, "")).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let _working = home.work();
    let (_, dies) = home.publish("a", "x").await;
    home.ends(dies[0], "DeadLettered").await;
    let (_, arrives) = home.publish("a", "y").await;
    home.ends(arrives[0], "Completed").await;
    let rates = pulse(&home.outbox, minute).await.unwrap();
    let per_minute =
        [rates.sent_per_second, rates.retries_per_second, rates.dead_per_second].map(|n| (n * 60.0).round());
    assert_eq!(per_minute, [1.0, 2.0, 1.0]);
    assert_eq!(home.webhooks.requeueable(DeadLetterFilter::default(), 10).await.unwrap().0, 1);
    home.rows("UPDATE subscriptions SET status = 'disabled'").await;
    let none = home.webhooks.requeueable(DeadLetterFilter::default(), 10).await.unwrap();
    assert_eq!(none, (0, vec![]), "nobody could be sent this one");
}

async fn lists_are_bounded_and_whole(home: Home) {
    fill(&home).await;
    let watched = Watched::over(home.outbox.store().clone(), &home.url);
    let outbox = Outbox::new(watched.clone() as Arc<dyn postrider::store::Store>);
    let keyring = Keyring::parse(KEY).unwrap();
    let webhooks = Webhooks::new(outbox, settings(), keyring, Reports::default(), None).await.unwrap();
    watched.take();
    let statuses = [None, Some("Completed"), Some("DeadLettered"), Some("InProgress")];
    for (subscription_id, event_id) in [(None, None), (Some(1), None), (Some(2), None), (None, Some(7))] {
        for status in statuses {
            let status = status.map(str::to_owned);
            let filter = SagaFilter { status, subscription_id, event_id, before: None, limit: 50 };
            webhooks.sagas(filter.clone()).await.unwrap();
            watched.assert_bounded(&format!("{filter:?}"), 60_000);
        }
        let filter = DeadLetterFilter { subscription_id, error_code: Some("HTTP_501".into()), ..Default::default() };
        for (error_code, waiting) in [(None, false), (filter.error_code.clone(), true)] {
            let filter = DeadLetterFilter { error_code, waiting, ..filter.clone() };
            webhooks.dead_letters(filter.clone(), None, 50).await.unwrap();
            watched.assert_bounded(&format!("{filter:?}"), 60_000);
        }
    }
    webhooks.events(Some("order.paid".to_owned()), None, 50).await.unwrap();
    webhooks.subscriptions(0, 50).await.unwrap();
    webhooks.saga(7).await.unwrap();
    watched.assert_bounded("the rest", 60_000);

    // From page to page one comes to all of them, wherever they lie.
    let (mut before, mut seen) = (None, 0);
    loop {
        let status = Some("DeadLettered".to_owned());
        let Page { items, next } =
            home.webhooks.sagas(SagaFilter { status, before, limit: 1000, ..SagaFilter::default() }).await.unwrap();
        assert!(items.iter().all(|saga| saga.status == "DeadLettered" && before.is_none_or(|before| saga.id < before)));
        seen += items.len();
        before = next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(seen, 20_000);
}
