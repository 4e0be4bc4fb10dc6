//! What people look at: searches and the pulse, the same on every store, and bounded.

use postrider::NewMessage;
use postrider::store::{Filter, Status};

use crate::harness::{Database, on_every_store, retry, secs};

on_every_store! {
    keys_and_targets_are_found,
    the_dead_and_the_held_are_found_in_every_lane,
    the_pulse_tells_rates_holders_and_age,
    the_pulse_does_not_grow_with_what_there_is,
}

async fn found(db: &Database, filter: Filter) -> Vec<i64> {
    db.outbox.list(Filter { limit: 10, ..filter }).await.unwrap().iter().map(|shown| shown.id).collect()
}

async fn keys_and_targets_are_found(db: Database) {
    let keyed = db.enqueue(NewMessage::new("a", "1").key("invoice-7").target("erp")).await.id;
    let active = db.enqueue(NewMessage::new("b", "2").active_key("invoice-7")).await.id;
    let sent = db.put_sent(NewMessage::new("a", "3").key("invoice-8").target("erp")).await;
    let key = |key: &str| Filter { key: Some(key.to_owned()), ..Filter::default() };
    assert_eq!(found(&db, key("invoice-7")).await, [active, keyed]);
    assert_eq!(found(&db, Filter { lane: Some("a".to_owned()), ..key("invoice-7") }).await, [keyed]);
    assert_eq!(found(&db, key("invoice-8")).await, [sent], "what has ended, too");
    assert_eq!(found(&db, Filter { status: Some(Status::Dead), ..key("invoice-8") }).await, Vec::<i64>::new());
    assert_eq!(found(&db, key("'; DROP TABLE outbox; --")).await, Vec::<i64>::new());
    let target = |status| Filter { target: Some("erp".to_owned()), status, ..Filter::default() };
    assert_eq!(found(&db, target(None)).await, [sent, keyed]);
    assert_eq!(found(&db, target(Some(Status::Pending))).await, [keyed]);
    assert_eq!(found(&db, Filter { target: Some("er".to_owned()), ..Filter::default() }).await, Vec::<i64>::new());
}

async fn the_dead_and_the_held_are_found_in_every_lane(db: Database) {
    let (one, two) = (db.put_dead(NewMessage::new("a", "1")).await, db.put_dead(NewMessage::new("b", "2")).await);
    let held = db.put("a", "3").await;
    db.claim_one("a", "w").await;
    let other = db.put("b", "4").await;
    db.claim_one("b", "w").await;
    let of = |status, before| Filter { status: Some(status), before, ..Filter::default() };
    assert_eq!(found(&db, of(Status::Dead, None)).await, [two, one]);
    assert_eq!(found(&db, of(Status::Dead, Some(two))).await, [one]);
    assert_eq!(found(&db, of(Status::Leased, None)).await, [other, held]);
    assert_eq!(found(&db, of(Status::Leased, Some(other))).await, [held]);
}

async fn the_pulse_tells_rates_holders_and_age(db: Database) {
    let pulse = db.outbox.pulse(secs(10)).await.unwrap();
    assert_eq!(pulse.lanes["a"], postrider::pulse::LanePulse::default());
    db.put("a", "waits").await;
    db.advance(secs(30));
    for n in 0..5 {
        db.put_sent(NewMessage::new("b", format!("{n}"))).await;
    }
    db.put_dead(NewMessage::new("b", "dead")).await;
    db.put("b", "again").await;
    let held = db.claim_one("b", "w1").await;
    db.settle("b", "w1", held.lease(), retry(secs(60))).await;
    db.put("b", "held").await;
    db.claim_one("b", "w2").await;
    db.outbox.pause("a").await.unwrap();
    let pulse = db.outbox.pulse(secs(10)).await.unwrap();
    let (a, b) = (pulse.lanes["a"], pulse.lanes["b"]);
    assert!((30.0..60.0).contains(&a.oldest_due_seconds) && a.paused, "{a:?}");
    assert_eq!((b.sent_per_second, b.dead_per_second, b.retries_per_second), (0.5, 0.1, 0.1), "{b:?}");
    assert!(!b.paused && b.oldest_due_seconds == 0.0, "{b:?}");
    assert_eq!(pulse.holders.len(), 1, "{:?}", pulse.holders);
    let holder = &pulse.holders[0];
    assert_eq!((holder.worker.as_str(), holder.lane.as_str(), holder.holds), ("w2", "b", 1));
    assert!(holder.since <= pulse.now && holder.lease_until > pulse.now, "{holder:?} at {:?}", pulse.now);
    db.advance(secs(30));
    let b = db.outbox.pulse(secs(10)).await.unwrap().lanes["b"];
    assert_eq!((b.sent_per_second, b.dead_per_second, b.retries_per_second), (0.0, 0.0, 0.0), "only within the window");
}

/// More than a sample takes: the rate is told by the span of the sample.
async fn the_pulse_does_not_grow_with_what_there_is(db: Database) {
    let messages = (0..3_000).map(|n| NewMessage::new("a", format!("{n}"))).collect();
    db.outbox.enqueue(messages).await.unwrap();
    let held = db.claim("a", "w", 3_000).await;
    let entries: Vec<_> = held
        .iter()
        .map(|m| {
            let sent = postrider::outcome::Verdict::Sent { result_ref: None, dedup_hit: false };
            postrider::outcome::Settlement::new(m.lease(), sent)
        })
        .collect();
    for part in entries.chunks(500) {
        db.settle_all("a", "w", part).await;
    }
    let sent = db.count("outbox_done").await;
    assert!(sent > 2_000, "{sent}");
    let rate = db.outbox.pulse(secs(1000)).await.unwrap().lanes["a"].sent_per_second;
    assert!(rate > 20.0, "1,000 of {sent} were looked at, which ended within moments, not {rate}/s");
}
