//! Publishing: all or nothing, once per external id, in the caller's own transaction.

use postrider::Error;
use postrider::store::{Mode, transact};
use postrider_webhooks::{NewEvent, Publishing};

use crate::harness::{Home, on_every_store, open, settings};
use crate::receiver::Receiver;

on_every_store!(
    an_external_id_makes_publishing_idempotent,
    the_same_external_id_at_the_same_time_is_one_event,
    a_batch_is_all_or_nothing,
    it_goes_with_the_callers_transaction,
    only_those_that_want_it_get_it,
    nonsense_is_refused,
);

fn event(id: &str, payload: &str) -> NewEvent {
    NewEvent::new("order.paid", payload.to_owned()).external_id(id)
}

async fn an_external_id_makes_publishing_idempotent(home: Home) {
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let first = home.webhooks.publish(vec![event("a", "1")]).await.unwrap().remove(0);
    assert_eq!((first.outcome, first.saga_ids.len()), (Publishing::Created, 1));
    let batch = vec![
        event("a", "1"),
        event("a", "2"),
        event("b", "1"),
        event("b", "1"),
        event("b", "3"),
        NewEvent::new("x", "y"),
    ];
    let again = home.webhooks.publish(batch).await.unwrap();
    let outcomes: Vec<Publishing> = again.iter().map(|p| p.outcome).collect();
    use Publishing::{Created, Differs, Exists};
    assert_eq!(outcomes, [Exists, Differs, Created, Exists, Differs, Created]);
    assert_eq!((again[0].event_id, &again[0].saga_ids), (first.event_id, &first.saga_ids));
    assert_eq!(again[2].event_id, again[3].event_id);
    let other = NewEvent::new("order.void", "1").external_id("a");
    assert_eq!(home.webhooks.publish(vec![other]).await.unwrap()[0].outcome, Differs, "another type is another event");
    assert_eq!((home.count("events").await, home.count("webhook_delivery_sagas").await), (3, 3));
    assert_eq!(home.count("outbox WHERE lane = 'webhooks'").await, 3);
}

async fn the_same_external_id_at_the_same_time_is_one_event(home: Home) {
    let tasks = (0..8).map(|_| {
        let webhooks = home.webhooks.clone();
        tokio::spawn(async move { webhooks.publish(vec![event("same", "x")]).await.unwrap().remove(0) })
    });
    let all = futures_util::future::join_all(tasks).await;
    let ids: std::collections::HashSet<i64> = all.iter().map(|p| p.as_ref().unwrap().event_id).collect();
    assert_eq!((ids.len(), home.count("events").await), (1, 1));
    let created = all.iter().filter(|p| p.as_ref().unwrap().outcome == Publishing::Created).count();
    assert_eq!(created, 1);
}

async fn a_batch_is_all_or_nothing(home: Home) {
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let mut batch: Vec<NewEvent> = (0..700).map(|n| NewEvent::new("a.b", n.to_string())).collect();
    batch.push(NewEvent::new("not a type", "x"));
    assert!(home.webhooks.publish(batch.clone()).await.is_err());
    assert_eq!((home.count("events").await, home.count("outbox").await), (0, 0));
    batch.pop();
    let published = home.webhooks.publish(batch).await.unwrap();
    assert_eq!((home.count("events").await, home.count("webhook_delivery_sagas").await), (700, 700));
    for (n, one) in published.iter().enumerate().step_by(99) {
        let sql = format!("SELECT payload FROM events WHERE id = {}", one.event_id);
        assert_eq!(&home.rows(&sql).await[0].bytes(0).unwrap()[..], n.to_string().as_bytes(), "answers are in order");
        let sql = format!("SELECT event_id FROM webhook_delivery_sagas WHERE id = {}", one.saga_ids[0]);
        assert_eq!(home.rows(&sql).await[0].int(0).unwrap(), one.event_id);
    }
}

async fn it_goes_with_the_callers_transaction(home: Home) {
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let publish = |fail: bool| {
        let (webhooks, store) = (home.webhooks.clone(), home.outbox.store().clone());
        async move {
            transact(&*store, Mode::Write, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move {
                    webhooks.publish_in(tx, &[NewEvent::new("a", "x")]).await?;
                    if fail { Err(Error::invalid("the business says no")) } else { Ok(()) }
                })
            })
            .await
        }
    };
    assert!(publish(true).await.is_err());
    for table in ["events", "webhook_delivery_sagas", "outbox"] {
        assert_eq!(home.count(table).await, 0, "{table}");
    }
    publish(false).await.unwrap();
    for table in ["events", "webhook_delivery_sagas", "outbox"] {
        assert_eq!(home.count(table).await, 1, "{table}");
    }
}

async fn only_those_that_want_it_get_it(home: Home) {
    let (elsewhere, _) = open(&home.url, settings()).await;
    let receiver = Receiver::with_status(200).await;
    let (all, _) = home.subscribe(&receiver.url, &["*"]).await;
    let (orders, _) = home.subscribe(&receiver.url, &["order.*", "refund.made"]).await;
    let (paused, _) = home.subscribe(&receiver.url, &["order.paid"]).await;
    home.webhooks.pause(paused.id).await.unwrap();
    // Another process, which has never looked, sees them at once.
    for (event_type, expected) in [
        ("order.paid", vec![all.id, orders.id, paused.id]),
        ("order.void", vec![all.id, orders.id]),
        ("refund.made", vec![all.id, orders.id]),
        ("other", vec![all.id]),
    ] {
        let published = elsewhere.publish(vec![NewEvent::new(event_type, "x")]).await.unwrap().remove(0);
        let sql = format!(
            "SELECT subscription_id FROM webhook_delivery_sagas WHERE event_id = {} ORDER BY 1",
            published.event_id
        );
        let got: Vec<i64> = home.rows(&sql).await.iter().map(|row| row.int(0).unwrap()).collect();
        assert_eq!(got, expected, "{event_type}");
    }
    home.webhooks.unsubscribe(all.id).await.unwrap();
    assert_eq!(elsewhere.publish(vec![NewEvent::new("other", "x")]).await.unwrap()[0].saga_ids, Vec::<i64>::new());
    assert_eq!(home.count("webhook_delivery_sagas WHERE status = 'Pending'").await, 1, "the paused one has no job yet");
}

async fn nonsense_is_refused(home: Home) {
    let long = "x".repeat(256);
    for wrong in [
        NewEvent::new("", "x"),
        NewEvent::new("a..b", "x"),
        NewEvent::new("order.*", "x"),
        NewEvent::new(long.clone(), "x"),
        NewEvent::new("a", "x").external_id(""),
        NewEvent::new("a", "x").external_id(long),
        NewEvent::new("a", "x").external_id("a\0b"),
        NewEvent::new("a", vec![0; (1 << 20) + 1]),
        NewEvent { content_type: Some("a\r\nb: c".into()), ..NewEvent::new("a", "x") },
        NewEvent { correlation_id: Some("a\nb".into()), ..NewEvent::new("a", "x") },
    ] {
        let error = home.webhooks.publish(vec![wrong.clone()]).await.unwrap_err();
        assert_eq!(error.kind, postrider::error::Kind::Invalid, "{wrong:?}");
    }
    assert_eq!(home.count("events").await, 0);
}
