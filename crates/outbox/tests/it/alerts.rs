//! Alerts: one trouble is one alert, in the transaction that saw it.

use std::time::Duration;

use postrider::NewMessage;
use postrider::alerts::{Alert, Alerts, kind};
use postrider::store::{Mode, transact};
use serde_json::{Value as Json, json};

use crate::harness::{Database, on_every_store, secs};

on_every_store!(
    the_dead_are_told_once_and_counted,
    a_lane_that_waits_too_long_is_told_and_its_end_too,
    an_alert_goes_with_its_transaction,
    several_look_and_one_tells,
);

fn alerts(db: &Database) -> Alerts {
    Alerts::new(db.outbox.clone(), "b", secs(300))
}

/// What was written on the lane of alerts so far, in order.
async fn told(db: &Database) -> Vec<Json> {
    let rows = db.sql("SELECT payload FROM outbox WHERE lane = 'b' ORDER BY id").await;
    rows.iter().map(|row| serde_json::from_slice(&row.bytes(0).unwrap()).unwrap()).collect()
}

async fn look(db: &Database, alerts: &Alerts) -> usize {
    db.advance(secs(3)); // past what may still be settling
    alerts.look_for_the_dead().await.unwrap();
    told(db).await.len()
}

async fn the_dead_are_told_once_and_counted(db: Database) {
    let alerts = alerts(&db);
    db.put_dead(NewMessage::new("a", "long ago")).await;
    assert_eq!(look(&db, &alerts).await, 0, "what died before anybody looked is history");
    assert_eq!(look(&db, &alerts).await, 0);
    let id = db.put_dead(NewMessage::new("a", "x")).await;
    assert_eq!(look(&db, &alerts).await, 1);
    let first = told(&db).await.remove(0);
    assert_eq!(
        (&first["kind"], &first["subject"], &first["state"]),
        (&json!("dead_messages"), &json!("a"), &json!("raised"))
    );
    assert_eq!((&first["count"], &first["details"]["last_id"]), (&json!(1), &json!(id)));
    assert_eq!(first["details"]["last_error_code"], "BAD");
    assert!(first["text"].as_str().unwrap().contains("outbox requeue --lane a"), "{first}");
    for _ in 0..3 {
        db.put_dead(NewMessage::new("a", "x")).await;
    }
    assert_eq!(look(&db, &alerts).await, 1, "within five minutes they are only counted");
    db.put_dead(NewMessage::new("audited", "x")).await;
    assert_eq!(look(&db, &alerts).await, 2, "another lane is another trouble");
    db.advance(secs(300));
    assert_eq!(look(&db, &alerts).await, 3, "and what was only counted is told in the end");
    let last = told(&db).await.remove(2);
    assert_eq!((&last["subject"], &last["suppressed"]), (&json!("a"), &json!(3)), "{last}");
    db.advance(secs(300));
    assert_eq!(look(&db, &alerts).await, 3, "nothing new, nothing told");
}

async fn a_lane_that_waits_too_long_is_told_and_its_end_too(db: Database) {
    let alerts = alerts(&db);
    let limit = |lane: &str| if lane == "a" { secs(60) } else { Duration::ZERO };
    let id = db.put("a", "x").await;
    alerts.look_at_ages(limit).await.unwrap();
    assert_eq!(told(&db).await.len(), 0);
    db.advance(secs(61));
    db.outbox.pause("a").await.unwrap();
    alerts.look_at_ages(limit).await.unwrap();
    assert_eq!(told(&db).await.len(), 0, "it is held on purpose");
    db.outbox.resume("a").await.unwrap();
    for _ in 0..2 {
        alerts.look_at_ages(limit).await.unwrap();
    }
    let raised = told(&db).await;
    assert_eq!(raised.len(), 1);
    assert_eq!((&raised[0]["kind"], &raised[0]["subject"]), (&json!(kind::LANE_TOO_OLD), &json!("a")));
    assert_eq!(raised[0]["details"]["limit_seconds"], 60);
    let message = db.claim_ids("a", "w", &[id]).await.remove(0);
    db.settle("a", "w", message.lease(), postrider::outcome::Verdict::sent()).await;
    for _ in 0..2 {
        alerts.look_at_ages(limit).await.unwrap();
    }
    let states: Vec<Json> = told(&db).await.iter().map(|alert| alert["state"].clone()).collect();
    assert_eq!(states, ["raised", "resolved"]);
}

async fn an_alert_goes_with_its_transaction(db: Database) {
    let raise = |alerts: Alerts, fail: bool| {
        let alert = Alert { kind: "test", subject: "s".into(), message: "m".into(), count: 1, details: json!({}) };
        let store = db.outbox.store().clone();
        async move {
            transact(&*store, Mode::Write, move |tx| {
                let (alerts, alert) = (alerts.clone(), alert.clone());
                Box::pin(async move {
                    let raised = alerts.raise(tx, &alert).await?;
                    if fail { Err(postrider::Error::invalid("no")) } else { Ok(raised) }
                })
            })
            .await
        }
    };
    let alerts = alerts(&db);
    assert!(raise(alerts.clone(), true).await.is_err());
    assert_eq!((told(&db).await.len(), db.count("outbox_alerts").await), (0, 0));
    assert!(raise(alerts.clone(), false).await.unwrap());
    assert!(!raise(alerts, false).await.unwrap());
    assert_eq!(told(&db).await.len(), 1);
}

async fn several_look_and_one_tells(db: Database) {
    alerts(&db).look_for_the_dead().await.unwrap();
    db.advance(secs(3));
    db.put_dead(NewMessage::new("a", "x")).await;
    db.advance(secs(3));
    let looks = (0..8).map(|_| {
        let alerts = alerts(&db);
        tokio::spawn(async move { alerts.look_for_the_dead().await })
    });
    for look in futures_util::future::join_all(looks).await {
        look.unwrap().unwrap();
    }
    assert_eq!(told(&db).await.len(), 1);
}
