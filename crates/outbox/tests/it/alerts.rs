//! Alerts: one trouble is one alert, in the transaction that saw it.

use std::time::Duration;

use postrider::NewMessage;
use postrider::alerts::{Alert, Alerts, Place, kind};
use postrider::store::{Mode, transact};
use postrider::tx::Dialect;
use serde_json::{Value as Json, json};

use crate::harness::{Database, on_every_store, secs};

on_every_store!(
    the_dead_are_told_once_and_counted,
    what_dies_before_the_first_look_is_told,
    a_lane_that_waits_too_long_is_told_and_its_end_too,
    an_alert_goes_with_its_transaction,
    several_look_and_one_tells,
    a_lane_that_comes_and_goes_is_told_once_in_a_while,
    only_the_last_word_of_a_trouble_is_sent_and_in_order,
    a_death_that_is_committed_late_is_told,
    troubles_of_long_ago_are_forgotten,
    a_deep_lane_is_counted_in_steps_and_its_age_at_once,
    a_trouble_that_somebody_has_locked_holds_up_nobody,
    what_a_pager_missed_is_counted_by_the_next_word,
    a_locked_trouble_of_one_lane_silences_no_other,
    a_slow_pager_hears_of_each_death_once,
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
    db.put_dead(NewMessage::new("a", "long ago")).await;
    db.advance(secs(1));
    let alerts = alerts(&db);
    assert_eq!(look(&db, &alerts).await, 0, "what died before anybody watched is history");
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
    assert_eq!(
        (&last["subject"], &last["suppressed"]),
        (&json!("a"), &json!(4)),
        "with the first, which was not sent: {last}"
    );
    db.advance(secs(300));
    assert_eq!(look(&db, &alerts).await, 3, "nothing new, nothing told");
}

/// Workers begin with the watch: what they bury at once must not pass for history.
async fn what_dies_before_the_first_look_is_told(db: Database) {
    db.put_dead(NewMessage::new("a", "long ago")).await;
    db.advance(secs(1));
    let alerts = alerts(&db);
    let id = db.put_dead(NewMessage::new("a", "x")).await;
    alerts.look_for_the_dead().await.unwrap();
    let told = told(&db).await;
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((&told[0]["count"], &told[0]["details"]["last_id"]), (&json!(1), &json!(id)));
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

/// Raises an alert beside somebody's work.
async fn raise(db: &Database, alerts: &Alerts, alert: Alert, fail: bool) -> postrider::Result<bool> {
    let work = std::sync::Arc::new((alerts.clone(), alert));
    transact(&**db.outbox.store(), Mode::Write, move |tx| {
        let work = work.clone();
        Box::pin(async move {
            let raised = work.0.raise(tx, &work.1).await?;
            if fail { Err(postrider::Error::invalid("no")) } else { Ok(raised) }
        })
    })
    .await
}

async fn an_alert_goes_with_its_transaction(db: Database) {
    let alerts = alerts(&db);
    assert!(raise(&db, &alerts, trouble("m"), true).await.is_err());
    assert_eq!((told(&db).await.len(), db.count("outbox_alerts").await), (0, 0));
    assert!(raise(&db, &alerts, trouble("m"), false).await.unwrap());
    let first = db.claim_one("b", "w").await;
    assert_eq!(alerts.place(&first).await.unwrap(), Place::Last);
    assert!(!raise(&db, &alerts, trouble("m"), false).await.unwrap());
    assert_eq!(told(&db).await.len(), 1);
}

/// On a server the row of a trouble can be locked: by one of us who raises it too, or by anybody else.
async fn a_trouble_that_somebody_has_locked_holds_up_nobody(db: Database) {
    let alerts = alerts(&db);
    let suppressed =
        async || db.sql("SELECT suppressed FROM outbox_alerts WHERE subject = 's'").await[0].int(0).unwrap();
    assert!(raise(&db, &alerts, trouble("the first"), false).await.unwrap());
    let first = db.claim_one("b", "w").await;
    assert_eq!(alerts.place(&first).await.unwrap(), Place::Last);
    assert_eq!(alerts.place(&first).await.unwrap(), Place::Last, "asked again, it is the same");
    db.settle("b", "w", first.lease(), postrider::outcome::Verdict::sent()).await;
    if db.dialect == Dialect::Sqlite {
        return; // it has no locks on rows
    }
    let mut stranger = db.raw().await;
    stranger.run("BEGIN").await.unwrap();
    stranger.run("SELECT * FROM outbox_alerts FOR UPDATE").await.unwrap();
    let many = |count| Alert { count, ..trouble("again") };
    let beside = tokio::time::timeout(secs(5), async {
        raise(&db, &alerts, many(3), false).await.unwrap();
        raise(&db, &alerts, Alert { subject: "another".into(), ..trouble("new") }, false).await.unwrap();
    });
    beside.await.expect("the work goes on while somebody has the rows locked");
    assert_eq!(told(&db).await.len(), 2);
    let notes = db.claim("b", "w", 10).await;
    let [again, other] = &notes[..] else { panic!("{notes:?}") };
    stranger.run("ROLLBACK").await.unwrap();
    // Within five minutes it is only counted, as it would have been then; another trouble is told.
    assert_eq!(alerts.place(again).await.unwrap(), Place::Overtaken(first.id));
    assert_eq!(suppressed().await, 3);
    assert_eq!(alerts.place(other).await.unwrap(), Place::Last);
    db.settle("b", "w", again.lease(), postrider::outcome::Verdict::sent()).await;
    // After that time it is told.
    db.advance(secs(301));
    let mut stranger = db.raw().await;
    stranger.run("BEGIN").await.unwrap();
    stranger.run("SELECT * FROM outbox_alerts FOR UPDATE").await.unwrap();
    raise(&db, &alerts, many(2), false).await.unwrap();
    stranger.run("ROLLBACK").await.unwrap();
    let later = db.claim("b", "w", 10).await;
    let later = later.iter().find(|message| message.id > other.id).expect("the note");
    assert_eq!(alerts.place(later).await.unwrap(), Place::Last);
    assert_eq!(suppressed().await, 3, "what was counted before is not in the note, and told with the next");
    db.settle("b", "w", later.lease(), postrider::outcome::Verdict::sent()).await;
    db.advance(secs(301));
    raise(&db, &alerts, many(1), false).await.unwrap();
    assert_eq!(told(&db).await.pop().unwrap()["suppressed"], 3);
}

/// Somebody has locked what is told of one lane: the others are told.
async fn a_locked_trouble_of_one_lane_silences_no_other(db: Database) {
    let alerts = alerts(&db);
    alerts.look_for_the_dead().await.unwrap();
    if db.dialect == Dialect::Sqlite {
        return; // it has no locks on rows
    }
    let mut stranger = db.raw().await;
    stranger.run("BEGIN").await.unwrap();
    stranger
        .run("SELECT * FROM outbox_alerts WHERE kind = 'dead_messages' AND subject = 'a' FOR UPDATE")
        .await
        .unwrap();
    db.put_dead(NewMessage::new("a", "x")).await;
    db.put_dead(NewMessage::new("audited", "x")).await;
    db.advance(secs(3));
    assert!(alerts.look_for_the_dead().await.is_err(), "it is said that one could not be looked at");
    let subjects: Vec<Json> = told(&db).await.iter().map(|alert| alert["subject"].clone()).collect();
    assert_eq!(subjects, ["audited"]);
    stranger.run("ROLLBACK").await.unwrap();
    assert_eq!(look(&db, &alerts).await, 2);
}

/// An alert that is just being sent counts as told.
async fn a_slow_pager_hears_of_each_death_once(db: Database) {
    let alerts = alerts(&db);
    alerts.look_for_the_dead().await.unwrap();
    db.put_dead(NewMessage::new("a", "x")).await;
    assert_eq!(look(&db, &alerts).await, 1);
    let _on_its_way = db.claim_with("b", "w", 1, secs(3600), postrider::store::From::Mark(None)).await;
    db.advance(secs(300));
    db.put_dead(NewMessage::new("a", "x")).await;
    assert_eq!(look(&db, &alerts).await, 2);
    let last = told(&db).await.pop().unwrap();
    assert_eq!((&last["count"], &last["suppressed"]), (&json!(1), &json!(0)), "{last}");
}

/// An alert that was never sent is overtaken by the next one, which speaks for both.
async fn what_a_pager_missed_is_counted_by_the_next_word(db: Database) {
    let alerts = alerts(&db);
    alerts.look_for_the_dead().await.unwrap();
    for deaths in [4, 2, 1] {
        for _ in 0..deaths {
            db.put_dead(NewMessage::new("a", "x")).await;
        }
        look(&db, &alerts).await;
        db.advance(secs(300));
    }
    let told = told(&db).await;
    let numbers: Vec<_> = told.iter().map(|a| (a["count"].as_i64(), a["suppressed"].as_i64())).collect();
    assert_eq!(numbers, [(Some(4), Some(0)), (Some(2), Some(4)), (Some(1), Some(6))]);
    assert!(told[2]["message"].as_str().unwrap().starts_with("7 messages of lane `a` died"), "{told:?}");
    assert_eq!(look(&db, &alerts).await, 3, "and what waits is no news");
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

fn trouble(state: &str) -> Alert {
    Alert { kind: "test", subject: "s".into(), message: state.into(), count: 1, details: json!({}) }
}

async fn a_lane_that_comes_and_goes_is_told_once_in_a_while(db: Database) {
    let alerts = alerts(&db);
    for _ in 0..6 {
        alerts.tell(trouble("it is there"), true).await.unwrap();
        db.advance(secs(10));
        alerts.tell(trouble("it is over"), false).await.unwrap();
        db.advance(secs(10));
    }
    let states = |told: Vec<Json>| told.iter().map(|a| a["state"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(states(told(&db).await), ["raised", "resolved"], "six times within five minutes");
    db.advance(secs(300));
    alerts.tell_what_waits().await.unwrap();
    assert_eq!(told(&db).await.len(), 2, "it is over");
    alerts.tell(trouble("it is there"), true).await.unwrap();
    let last = told(&db).await.pop().unwrap();
    assert_eq!((&last["state"], &last["suppressed"]), (&json!("raised"), &json!(5)), "{last}");
    // Over, and back at once, and said only once: it is told when it may be.
    alerts.tell(trouble("it is over"), false).await.unwrap();
    alerts.tell(trouble("it is back"), true).await.unwrap();
    alerts.tell_what_waits().await.unwrap();
    assert_eq!(states(told(&db).await)[2..], ["raised", "resolved"]);
    db.advance(secs(300));
    for _ in 0..2 {
        alerts.tell_what_waits().await.unwrap();
    }
    assert_eq!(states(told(&db).await)[2..], ["raised", "resolved", "raised"]);
    assert_eq!(told(&db).await.pop().unwrap()["message"], "it is back");
}

async fn only_the_last_word_of_a_trouble_is_sent_and_in_order(db: Database) {
    let alerts = alerts(&db);
    alerts.tell(trouble("it is there"), true).await.unwrap();
    let raised = db.claim_one("b", "w").await;
    assert_eq!(alerts.place(&raised).await.unwrap(), Place::Last);
    alerts.tell(trouble("it is over"), false).await.unwrap();
    let resolved = db.claim_one("b", "w").await;
    assert_eq!(alerts.place(&resolved).await.unwrap(), Place::Waits, "the other may be on its way");
    // The pager was down: it is to be tried again in an hour.
    let retry = postrider::outcome::Verdict::Retry {
        delay: secs(3600),
        code: "HTTP_503".into(),
        error: "down".into(),
        certainty: postrider::outcome::Certainty::Unchanged,
    };
    db.settle("b", "w", raised.lease(), retry).await;
    assert_eq!(alerts.place(&resolved).await.unwrap(), Place::Waits);
    let raised = db.claim_one("b", "w").await;
    assert!(raised.id < resolved.id, "it is due now, since it will not be sent");
    assert_eq!(alerts.place(&raised).await.unwrap(), Place::Overtaken(resolved.id), "it is no news any more");
    db.settle("b", "w", raised.lease(), postrider::outcome::Verdict::sent()).await;
    assert_eq!(alerts.place(&resolved).await.unwrap(), Place::Last);
}

async fn a_death_that_is_committed_late_is_told(db: Database) {
    let alerts = alerts(&db);
    assert_eq!(look(&db, &alerts).await, 0);
    let id = db.put_dead(NewMessage::new("a", "x")).await;
    assert_eq!(look(&db, &alerts).await, 1);
    db.advance(secs(300));
    assert_eq!(look(&db, &alerts).await, 1);
    // Stamped thirty seconds ago, and committed only now.
    let late = match db.dialect {
        postrider::tx::Dialect::Sqlite => "finished_at - 30000000 + 300000000",
        postrider::tx::Dialect::Postgres => "finished_at + INTERVAL '270 seconds'",
        postrider::tx::Dialect::Mysql => "finished_at + INTERVAL 270 SECOND",
    };
    let columns =
        "lane, shard_id, due_at, attempts, crashes, maybe_sent, lease_token, payload, created_at, updated_at, status";
    let sql = format!(
        "INSERT INTO outbox_done (id, finished_at, {columns}) SELECT id + 1000, {late}, {columns} FROM outbox_done WHERE id = {id}"
    );
    db.raw().await.run(&sql).await.unwrap();
    assert_eq!(look(&db, &alerts).await, 2, "it died before the last look, and nobody knew");
    assert_eq!(told(&db).await[1]["details"]["last_id"], json!(id + 1000));
    assert_eq!(look(&db, &alerts).await, 2, "and is counted once");
}

async fn troubles_of_long_ago_are_forgotten(db: Database) {
    let alerts = alerts(&db);
    alerts.tell(trouble("it is there"), true).await.unwrap();
    assert_eq!((alerts.forget().await.unwrap(), db.count("outbox_alerts").await), (0, 1));
    db.advance(secs(31 * 24 * 3600));
    assert_eq!((alerts.forget().await.unwrap(), db.count("outbox_alerts").await), (1, 0));
}

async fn a_deep_lane_is_counted_in_steps_and_its_age_at_once(db: Database) {
    let many: Vec<NewMessage> = (0..12_000).map(|_| NewMessage::new("a", "x")).collect();
    for part in many.chunks(4_000) {
        db.outbox.enqueue(part.to_vec()).await.unwrap();
    }
    db.put("audited", "x").await;
    db.advance(secs(61));
    let mut counting = postrider::Counting::default();
    db.outbox.count(&mut counting, Duration::ZERO).await.unwrap();
    assert!(counting.is_under_way(), "a step is bounded");
    assert_eq!(counting.depths()["a"].pending, 10_000, "at least so many");
    assert_eq!(db.claim("a", "w", 1).await.len(), 1);
    db.outbox.count(&mut counting, Duration::ZERO).await.unwrap();
    assert!(!counting.is_under_way());
    assert_eq!((counting.depths()["a"].pending, counting.depths()["audited"].pending), (12_000, 1));
    db.outbox.count(&mut counting, secs(60)).await.unwrap();
    assert_eq!((counting.depths()["a"].pending, counting.depths()["a"].leased), (11_999, 1));
    let ages = db.outbox.ages().await.unwrap();
    assert!(ages["a"].oldest_due_seconds > 60.0 && ages["b"].oldest_due_seconds == 0.0, "{ages:?}");
    assert_eq!(db.outbox.waiting("a", 500).await.unwrap(), 500);
}
