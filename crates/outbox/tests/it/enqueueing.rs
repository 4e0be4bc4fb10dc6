//! P1 no loss, P8 idempotent enqueue, P9 transactional; payloads, limits, shards.

use std::collections::HashSet;

use bytes::Bytes;
use mysql_async::prelude::Queryable;
use postrider::error::Kind;
use postrider::outcome::{Settled, Verdict};
use postrider::store::{Claim, From, Status};
use postrider::tx::Dialect;
use postrider::{Enqueued, NewMessage, Timestamp};

use crate::harness::{Database, Raw, claim_of, created, dead, lanes, on_every_store, retry, secs};

on_every_store! {
    p8_an_active_key_holds_against_whoever_writes_rows_alone,
    sql_enqueue_refuses_what_the_library_refuses,
    p1_enqueued_stays_until_it_ended_and_is_past_retention,
    p1_bytes_survive,
    p1_everything_else_survives,
    p1_ids_are_never_used_twice,
    p8_same_key_same_content_is_the_same_message,
    p8_other_content_differs_and_nothing_is_written,
    p8_target_belongs_to_the_content,
    p8_keys_differ_by_case_blanks_accents_and_lane,
    p8_expired_key_of_a_live_message_is_not_free,
    p8_expired_key_of_an_ended_message_is_free,
    p8_unexpired_key_of_an_ended_message_is_not_free,
    p8_active_key_is_held_by_one_live_message,
    p8_active_key_taken_leaves_the_own_key_alone,
    p8_active_key_taken_puts_an_expired_key_back,
    p8_active_keys_differ_by_case_blanks_and_lane,
    p8_one_key_twice_in_a_batch,
    p8_one_key_in_a_batch_with_and_without_an_active_key,
    p8_active_keys_in_one_batch,
    p8_large_batches_keep_ids_with_their_messages,
    p8_large_batches_half_known,
    p8_concurrent_enqueues_of_one_key_make_one_message,
    p8_concurrent_batches_of_the_same_keys_make_each_once,
    p8_concurrent_active_keys_make_one_live_message,
    p8_a_key_that_lasts_for_ever,
    p9_rolled_back_leaves_nothing,
    p9_committed_is_always_there,
    p9_an_open_transaction_is_not_seen,
    p9_caller_sees_the_same_answers_as_the_library,
    p9_callers_with_distinct_keys_do_not_wait_for_each_other,
    p9_repeatable_read_caller_sees_keys_committed_meanwhile,
    p9_repeatable_read_caller_respects_an_expired_key_of_a_live_message,
    bad_input_is_refused_and_nothing_written,
    one_bad_message_refuses_the_batch,
    shards_follow_key_then_active_key_then_target,
    p12_claims_follow_the_order_of_the_batch,
}

fn message(payload: &str) -> NewMessage {
    NewMessage::new("a", payload.to_owned())
}

// ---- P1 ----

async fn p1_enqueued_stays_until_it_ended_and_is_past_retention(db: Database) {
    let id = db.put("a", "x").await;
    db.advance(secs(400 * 24 * 3600));
    assert_eq!(db.prune(secs(0), 100).await.messages, 0, "live rows are never pruned");
    let lease = db.claim_one("a", "w").await.lease();
    db.settle("a", "w", lease, postrider::outcome::Verdict::sent()).await;
    db.advance(secs(50));
    assert_eq!(db.prune(secs(100), 100).await.messages, 0, "ended, but not long enough ago");
    assert_eq!(db.status(id).await, Status::Sent);
    db.advance(secs(100));
    assert_eq!(db.prune(secs(100), 100).await.messages, 1);
    assert!(db.is_gone(id).await);
}

async fn p1_bytes_survive(db: Database) {
    let every_byte: Vec<u8> = (0..=255).collect();
    let megabyte: Vec<u8> = (0..1_usize << 20).map(|n| (n * 31 % 251) as u8).collect();
    let payloads: [Vec<u8>; 7] = [
        vec![],
        vec![0],
        b"\0a\0".to_vec(),
        vec![0xff, 0xfe, 0xc3, 0x28],
        every_byte,
        "naïve 天气 😀 '\"\\%_$1?".as_bytes().to_vec(),
        megabyte,
    ];
    let messages: Vec<NewMessage> = payloads.iter().map(|p| NewMessage::new("a", p.clone())).collect();
    let mut ids = Vec::new();
    for entry in db.outbox.enqueue(messages).await.unwrap() {
        ids.push(created(entry));
    }
    // Once more with keys, which takes another way.
    for (n, payload) in payloads.iter().enumerate() {
        let keyed = NewMessage::new("a", payload.clone()).key(format!("k{n}")).active_key(format!("k{n}"));
        ids.push(created(db.enqueue(keyed).await));
    }
    for (n, id) in ids.iter().enumerate() {
        assert_eq!(db.payload(*id).await, payloads[n % 7], "payload {n}");
    }
    for claimed in db.claim("a", "w", 100).await {
        let n = ids.iter().position(|id| *id == claimed.id).unwrap();
        assert_eq!(claimed.payload, payloads[n % 7], "payload {n} as claimed");
        assert_eq!(claimed.payload_sha, Some(postrider::message::sha256(&payloads[n % 7])));
        let verdict = if n % 2 == 0 { dead("BAD") } else { postrider::outcome::Verdict::sent() };
        db.settle("a", "w", claimed.lease(), verdict).await;
    }
    for (n, id) in ids.iter().enumerate() {
        assert_eq!(db.payload(*id).await, payloads[n % 7], "payload {n} once ended");
    }
}

async fn p1_everything_else_survives(db: Database) {
    let limit: Timestamp = "2100-01-02T03:04:05.678901Z".parse().unwrap();
    let text = "ünïcode 天气 😀 '\"\\ `$1 ?";
    let full = message("x")
        .key(text)
        .target(text)
        .active_key(text)
        .content_type("text/plain; charset=\"utf-8\"")
        .header("X-Ünï", text)
        .header("x-twice", "1")
        .header("x-twice", "2")
        .correlation_id(text)
        .deliver_before(limit);
    let plain = message("x").target(text).header("X-Ünï", text).correlation_id(text).deliver_before(limit);
    let ids = [created(db.enqueue(full.clone()).await), created(db.enqueue(plain.clone()).await)];
    let claimed = db.claim("a", "w", 10).await;
    assert_eq!(claimed.iter().map(|m| m.id).collect::<Vec<_>>(), ids);
    for (got, wanted) in claimed.iter().zip([full, plain]) {
        let shown = db.show(got.id).await;
        assert_eq!((got.lane.as_str(), got.shard_id, &got.payload[..]), ("a", 0, &b"x"[..]));
        assert_eq!(
            (got.due_at, got.created_at, Some(got.lease_until)),
            (shown.due_at, shown.created_at, shown.lease_until)
        );
        assert_eq!(got.payload_sha, Some(postrider::message::sha256(b"x")));
        assert_eq!(got.target, wanted.target);
        assert_eq!(got.active_key, wanted.active_key);
        assert_eq!(got.content_type, wanted.content_type);
        assert_eq!(got.headers, wanted.headers);
        assert_eq!(got.correlation_id, wanted.correlation_id);
        assert_eq!(got.deliver_before, wanted.deliver_before);
        assert_eq!((got.attempts, got.crashes, got.maybe_sent, got.lease_token), (0, 0, false, 1));
        assert_eq!(got.taken_over_from, None);
    }
}

async fn p1_ids_are_never_used_twice(db: Database) {
    let mut last = 0;
    for _ in 0..3 {
        let id = db.put("fleeting", "x").await;
        assert!(id > last, "id {id} came after {last}");
        last = id;
        let lease = db.claim_one("fleeting", "w").await.lease();
        db.settle("fleeting", "w", lease, postrider::outcome::Verdict::sent()).await;
        assert!(db.is_gone(id).await);
    }
}

// ---- P8 ----

async fn p8_same_key_same_content_is_the_same_message(db: Database) {
    let first = db.enqueue(message("x").key("k")).await;
    let before = db.counts().await;
    for again in [message("x").key("k"), message("x").key("k").delay(secs(50)).correlation_id("c").header("h", "v")] {
        let second = db.enqueue(again).await;
        assert_eq!((second.id, second.outcome), (created(first), Enqueued::Exists));
    }
    assert_eq!(db.counts().await, before);
    // Also once it has been sent.
    let lease = db.claim_one("a", "w").await.lease();
    db.settle("a", "w", lease, postrider::outcome::Verdict::sent()).await;
    let third = db.enqueue(message("x").key("k")).await;
    assert_eq!((third.id, third.outcome), (first.id, Enqueued::Exists));
}

async fn p8_other_content_differs_and_nothing_is_written(db: Database) {
    let id = created(db.enqueue(message("x").key("k")).await);
    let keys = db.sql("SELECT * FROM outbox_keys").await;
    let differs = db.enqueue(message("y").key("k")).await;
    assert_eq!((differs.id, differs.outcome), (id, Enqueued::Differs));
    assert_eq!(db.counts().await, [1, 0, 1, 0]);
    assert_eq!(db.sql("SELECT * FROM outbox_keys").await, keys);
    let mut own = message("z").key("d");
    own.digest = Some([7; 32]);
    let id = created(db.enqueue(own.clone()).await);
    own.payload = Bytes::from_static(b"whatever");
    let same = db.enqueue(own).await;
    assert_eq!((same.id, same.outcome), (id, Enqueued::Exists), "a digest of its own decides");
}

async fn p8_target_belongs_to_the_content(db: Database) {
    created(db.enqueue(message("x").key("k").target("t")).await);
    assert_eq!(db.enqueue(message("x").key("k").target("t")).await.outcome, Enqueued::Exists);
    assert_eq!(db.enqueue(message("x").key("k").target("u")).await.outcome, Enqueued::Differs);
    assert_eq!(db.enqueue(message("x").key("k")).await.outcome, Enqueued::Differs);
}

async fn p8_keys_differ_by_case_blanks_accents_and_lane(db: Database) {
    let keys =
        ["key", "KEY", "Key", "key ", "key  ", " key", "key\t", "kéy", "ke\u{301}y", "k\u{e9}y ", "ß", "ss", "ｋｅｙ"];
    let mut ids = HashSet::new();
    for key in keys {
        for lane in ["a", "b"] {
            assert!(ids.insert(created(db.enqueue(NewMessage::new(lane, "x").key(key)).await)), "{lane} {key:?}");
        }
    }
    let batch: Vec<NewMessage> = keys.iter().map(|k| NewMessage::new("brief", "x").key(*k)).collect();
    for entry in db.outbox.enqueue(batch).await.unwrap() {
        assert!(ids.insert(created(entry)));
    }
}

async fn p8_expired_key_of_a_live_message_is_not_free(db: Database) {
    let id = created(db.enqueue(NewMessage::new("brief", "x").key("k")).await);
    db.advance(secs(1000));
    let same = db.enqueue(NewMessage::new("brief", "x").key("k")).await;
    assert_eq!((same.id, same.outcome), (id, Enqueued::Exists));
    let other = db.enqueue(NewMessage::new("brief", "y").key("k")).await;
    assert_eq!((other.id, other.outcome), (id, Enqueued::Differs));
    let batch = vec![NewMessage::new("brief", "y").key("k"), NewMessage::new("brief", "y").key("l")];
    let entries = db.outbox.enqueue(batch).await.unwrap();
    assert_eq!((entries[0].id, entries[0].outcome), (id, Enqueued::Differs));
    assert_eq!(entries[1].outcome, Enqueued::Created);
    assert_eq!(db.prune(secs(0), 100).await.keys, 0, "the key of a live message stays");
}

async fn p8_expired_key_of_an_ended_message_is_free(db: Database) {
    for (n, ends) in [postrider::outcome::Verdict::sent(), dead("BAD")].into_iter().enumerate() {
        let key = format!("k{n}");
        let id = created(db.enqueue(NewMessage::new("brief", "x").key(&key)).await);
        let lease = db.claim_one("brief", "w").await.lease();
        db.settle("brief", "w", lease, ends).await;
        db.advance(secs(1000));
        let other = db.enqueue(NewMessage::new("brief", "y").key(&key)).await;
        assert!(created(other) > id);
        assert_eq!(db.enqueue(NewMessage::new("brief", "y").key(&key)).await.outcome, Enqueued::Exists, "held again");
        assert_eq!(db.enqueue(NewMessage::new("brief", "x").key(&key)).await.outcome, Enqueued::Differs);
        let lease = db.claim_one("brief", "w").await.lease();
        db.settle("brief", "w", lease, postrider::outcome::Verdict::sent()).await;
    }
}

async fn p8_unexpired_key_of_an_ended_message_is_not_free(db: Database) {
    let id = db.put_dead(NewMessage::new("brief", "x").key("k")).await;
    db.advance(secs(50));
    let differs = db.enqueue(NewMessage::new("brief", "y").key("k")).await;
    assert_eq!((differs.id, differs.outcome), (id, Enqueued::Differs));
    db.prune(secs(0), 100).await;
    assert!(db.is_gone(id).await);
    let differs = db.enqueue(NewMessage::new("brief", "y").key("k")).await;
    assert_eq!(differs.outcome, Enqueued::Differs, "the key outlives the message until its own expiry");
}

async fn p8_active_key_is_held_by_one_live_message(db: Database) {
    let id = created(db.enqueue(message("x").active_key("k")).await);
    let twin = db.enqueue(message("x").active_key("k")).await;
    assert_eq!((twin.id, twin.outcome), (id, Enqueued::Exists));
    let other = db.enqueue(message("y").active_key("k")).await;
    assert_eq!((other.id, other.outcome), (id, Enqueued::Differs));
    let elsewhere = db.enqueue(message("x").active_key("k").target("t")).await;
    assert_eq!(elsewhere.outcome, Enqueued::Exists, "by the holder's payload_sha alone");
    // Leased and waiting for a retry is live; dead is not.
    let lease = db.claim_one("a", "w").await.lease();
    assert_eq!(db.enqueue(message("x").active_key("k")).await.outcome, Enqueued::Exists);
    db.settle("a", "w", lease, retry(secs(0))).await;
    assert_eq!(db.enqueue(message("y").active_key("k")).await.outcome, Enqueued::Differs);
    let lease = db.claim_one("a", "w").await.lease();
    db.settle("a", "w", lease, dead("BAD")).await;
    if db.dialect == Dialect::Mysql {
        assert_eq!(db.count("outbox_active_keys").await, 0, "it went with its message");
    }
    assert!(created(db.enqueue(message("y").active_key("k")).await) > id);
}

async fn p8_active_key_taken_leaves_the_own_key_alone(db: Database) {
    let id = created(db.enqueue(message("x").active_key("k")).await);
    for (payload, outcome) in [("x", Enqueued::Exists), ("y", Enqueued::Differs)] {
        let entry = db.enqueue(message(payload).active_key("k").key("own")).await;
        assert_eq!((entry.id, entry.outcome), (id, outcome));
        assert_eq!(db.counts().await, [1, 0, 0, 0], "the key row is not written either");
    }
    let free = db.enqueue(message("z").key("own")).await;
    assert_eq!(free.outcome, Enqueued::Created);
    // The own key comes first.
    let held = db.enqueue(message("z").key("own").active_key("k")).await;
    assert_eq!((held.id, held.outcome), (free.id, Enqueued::Exists));
}

async fn p8_active_key_taken_puts_an_expired_key_back(db: Database) {
    let old = db.put_sent(NewMessage::new("brief", "x").key("own")).await;
    db.advance(secs(1000));
    let holder = created(db.enqueue(NewMessage::new("brief", "x").active_key("k")).await);
    let before = db.sql("SELECT * FROM outbox_keys").await;
    let entry = db.enqueue(NewMessage::new("brief", "y").active_key("k").key("own")).await;
    assert_eq!((entry.id, entry.outcome), (holder, Enqueued::Differs));
    assert_eq!(db.sql("SELECT * FROM outbox_keys").await, before, "of message {old}");
}

async fn p8_active_keys_differ_by_case_blanks_and_lane(db: Database) {
    let mut ids = HashSet::new();
    for key in ["key", "KEY", "key ", "kéy"] {
        for lane in ["a", "b"] {
            assert!(ids.insert(created(db.enqueue(NewMessage::new(lane, "x").active_key(key)).await)));
        }
    }
}

async fn p8_one_key_twice_in_a_batch(db: Database) {
    let batch =
        vec![message("x").key("k"), message("p"), message("x").key("k"), message("y").key("k"), message("x").key("l")];
    let entries = db.outbox.enqueue(batch).await.unwrap();
    let outcomes: Vec<Enqueued> = entries.iter().map(|e| e.outcome).collect();
    use Enqueued::{Created, Differs, Exists};
    assert_eq!(outcomes, [Created, Created, Exists, Differs, Created]);
    assert_eq!([entries[2].id, entries[3].id], [entries[0].id; 2]);
    assert_eq!(db.payload(entries[0].id).await, b"x");
    assert_eq!(db.counts().await, [3, 0, 2, 0]);
}

async fn p8_one_key_in_a_batch_with_and_without_an_active_key(db: Database) {
    let entries = db.outbox.enqueue(vec![message("x").key("k").active_key("a"), message("y").key("k")]).await.unwrap();
    assert_eq!(entries[0].outcome, Enqueued::Created, "the first of the batch wins");
    assert_eq!((entries[1].id, entries[1].outcome), (entries[0].id, Enqueued::Differs));
    assert_eq!(db.show(entries[0].id).await.active_key.as_deref(), Some("a"));
}

async fn p8_active_keys_in_one_batch(db: Database) {
    let batch = vec![
        message("x").active_key("k"),
        message("x").active_key("k").key("own"),
        message("y").active_key("k"),
        message("y").active_key("l").key("other"),
    ];
    let entries = db.outbox.enqueue(batch).await.unwrap();
    let outcomes: Vec<Enqueued> = entries.iter().map(|e| e.outcome).collect();
    use Enqueued::{Created, Differs, Exists};
    assert_eq!(outcomes, [Created, Exists, Differs, Created]);
    assert_eq!(db.counts().await, [2, 0, 1, 0]);
}

async fn p8_large_batches_keep_ids_with_their_messages(db: Database) {
    // Keys in an order that is not the messages' order; every third without one.
    let batch: Vec<NewMessage> = (0..1000_usize)
        .map(|n| {
            let m = message(&format!("payload {n}"));
            if n % 3 == 0 { m } else { m.key(format!("key {}", (n * 7919) % 1000)) }
        })
        .collect();
    let entries = db.outbox.enqueue(batch.clone()).await.unwrap();
    let mut of_id = std::collections::HashMap::new();
    for (n, entry) in entries.iter().enumerate() {
        assert!(of_id.insert(created(*entry), n).is_none(), "two messages have id {}", entry.id);
    }
    let rows = db.sql("SELECT id, payload FROM outbox").await;
    assert_eq!(rows.len(), 1000);
    for row in rows {
        let n = of_id[&row.int(0).unwrap()];
        assert_eq!(row.bytes(1).unwrap(), format!("payload {n}"), "id {}", row.int(0).unwrap());
    }
    // Again: every key finds its own message.
    let keyed: Vec<(usize, NewMessage)> = batch.into_iter().enumerate().filter(|(n, _)| n % 3 != 0).collect();
    let again = db.outbox.enqueue(keyed.iter().map(|(_, m)| m.clone()).collect()).await.unwrap();
    for ((n, _), entry) in keyed.iter().zip(again) {
        assert_eq!((entry.id, entry.outcome), (entries[*n].id, Enqueued::Exists), "message {n}");
    }
}

async fn p8_large_batches_half_known(db: Database) {
    let of = |n: usize, payload: usize| message(&format!("payload {payload}")).key(format!("key {:04}", n * 37 % 1000));
    let first = db.outbox.enqueue((0..1000).step_by(2).map(|n| of(n, n)).collect()).await.unwrap();
    let second =
        db.outbox.enqueue((0..1000).map(|n| of(n, if n % 4 == 0 { 9999 } else { n })).collect()).await.unwrap();
    for (n, entry) in second.iter().enumerate() {
        let (outcome, id) = match n % 4 {
            0 => (Enqueued::Differs, first[n / 2].id),
            2 => (Enqueued::Exists, first[n / 2].id),
            _ => (Enqueued::Created, entry.id),
        };
        assert_eq!((entry.outcome, entry.id), (outcome, id), "message {n}");
        if n < 60 {
            assert_eq!(db.payload(entry.id).await, format!("payload {n}").as_bytes());
        }
    }
    assert_eq!(db.counts().await, [1000, 0, 1000, 0]);
}

async fn p8_concurrent_enqueues_of_one_key_make_one_message(db: Database) {
    let other = db.again(lanes()).await;
    let tasks: Vec<_> = (0..24)
        .map(|n| {
            let db = if n % 2 == 0 { db.clone() } else { other.clone() };
            tokio::spawn(async move { db.enqueue(message(["x", "y"][usize::from(n % 8 == 0)]).key("k")).await })
        })
        .collect();
    let mut entries = Vec::new();
    for task in tasks {
        entries.push(task.await.unwrap());
    }
    let made = entries.iter().filter(|e| e.outcome == Enqueued::Created).count();
    assert_eq!(made, 1, "{entries:?}");
    assert_eq!(entries.iter().map(|e| e.id).collect::<HashSet<_>>().len(), 1);
    assert_eq!(db.counts().await, [1, 0, 1, 0]);
}

async fn p8_concurrent_batches_of_the_same_keys_make_each_once(db: Database) {
    let other = db.again(lanes()).await;
    let tasks: Vec<_> = (0..8_usize)
        .map(|task| {
            let db = if task % 2 == 0 { db.clone() } else { other.clone() };
            let batch = (0..40).map(|n| message("x").key(format!("k{}", (n * 7 + task * 3) % 40))).collect();
            tokio::spawn(async move { db.outbox.enqueue(batch).await.unwrap() })
        })
        .collect();
    let mut made = 0;
    let mut ids = HashSet::new();
    for task in tasks {
        for entry in task.await.unwrap() {
            made += usize::from(entry.outcome == Enqueued::Created);
            ids.insert(entry.id);
        }
    }
    assert_eq!((made, ids.len()), (40, 40));
    assert_eq!(db.counts().await, [40, 0, 40, 0]);
}

async fn p8_concurrent_active_keys_make_one_live_message(db: Database) {
    let tasks: Vec<_> = (0..24)
        .map(|n| {
            let db = db.clone();
            let keyed = message("x").active_key("k");
            let keyed = if n % 2 == 0 { keyed.key(format!("own {n}")) } else { keyed };
            tokio::spawn(async move { db.enqueue(keyed).await })
        })
        .collect();
    let mut made = Vec::new();
    for task in tasks {
        let entry = task.await.unwrap();
        if entry.outcome == Enqueued::Created {
            made.push(entry.id);
        }
    }
    assert_eq!(made.len(), 1);
    assert!(db.count("outbox_keys").await <= 1, "losers leave no key behind");
}

async fn p8_a_key_that_lasts_for_ever(db: Database) {
    let for_ever = postrider::LaneRules {
        key_ttl: std::time::Duration::MAX,
        retention: std::time::Duration::MAX,
        dedup: true,
        ..postrider::LaneRules::default()
    };
    let db = db.again(postrider::Lanes::new().with("ever", for_ever)).await;
    db.outbox.migrate().await.expect("such a lane can be registered");
    let id = db.put_sent(NewMessage::new("ever", "x").key("k")).await;
    db.advance(secs(10 * 365 * 24 * 3600));
    let same = db.enqueue(NewMessage::new("ever", "x").key("k")).await;
    assert_eq!((same.id, same.outcome), (id, Enqueued::Exists));
    let hits = db.outbox.check_dedup("ever", vec![(None, postrider::message::sha256(b"x"))]).await.unwrap();
    assert_eq!(hits, [Some(None)]);
}

// ---- P9 ----

/// Enqueues in a transaction of the application's own, next to its own write.
async fn in_callers_transaction(db: &Database, messages: &[NewMessage], commit: bool) -> Vec<postrider::Entry> {
    let write = "INSERT INTO app VALUES (1)";
    match db.raw().await {
        Raw::Sqlite(mut connection) => {
            let tx = connection.transaction().unwrap();
            tx.execute(write, []).unwrap();
            let receipt = db.outbox.enqueue_in_sqlite(&tx, messages).unwrap();
            if commit {
                tx.commit().unwrap()
            } else {
                tx.rollback().unwrap()
            }
            receipt.committed()
        }
        Raw::Postgres(mut client) => {
            let mut tx = client.transaction().await.unwrap();
            tx.execute(write, &[]).await.unwrap();
            let receipt = db.outbox.enqueue_in(&mut tx, messages).await.unwrap();
            if commit {
                tx.commit().await.unwrap()
            } else {
                tx.rollback().await.unwrap()
            }
            receipt.committed()
        }
        Raw::Mysql(mut conn) => {
            let mut tx = conn.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
            tx.query_drop(write).await.unwrap();
            let receipt = db.outbox.enqueue_in(&mut tx, messages).await.unwrap();
            if commit {
                tx.commit().await.unwrap()
            } else {
                tx.rollback().await.unwrap()
            }
            receipt.committed()
        }
    }
}

fn every_kind() -> Vec<NewMessage> {
    let mut messages = vec![message("p"), message("q").target("t").delay(secs(0))];
    messages.push(message("k").key("k"));
    messages.push(message("a").active_key("a"));
    messages.push(message("ka").key("k2").active_key("a2"));
    messages.extend((0..600).map(|n| message(&format!("many {n}")).key(format!("many {}", n * 7 % 600))));
    messages
}

async fn p9_rolled_back_leaves_nothing(db: Database) {
    db.raw().await.run("CREATE TABLE app (id INT)").await.unwrap();
    let entries = in_callers_transaction(&db, &every_kind(), false).await;
    assert!(entries.iter().all(|e| e.outcome == Enqueued::Created));
    assert_eq!(db.counts().await, [0; 4]);
    assert_eq!(db.count("app").await, 0);
    assert!(db.claim("a", "w", 1000).await.is_empty());
    assert_eq!(db.enqueue(message("other").key("k")).await.outcome, Enqueued::Created, "its keys are free");
}

async fn p9_committed_is_always_there(db: Database) {
    db.raw().await.run("CREATE TABLE app (id INT)").await.unwrap();
    let messages = every_kind();
    let entries = in_callers_transaction(&db, &messages, true).await;
    assert_eq!(db.count("app").await, 1);
    let claimed = db.claim("a", "w", 1000).await;
    assert_eq!(claimed.len(), messages.len());
    for (entry, wanted) in entries.iter().zip(&messages) {
        let got = claimed.iter().find(|m| m.id == entry.id).expect("claimed");
        assert_eq!(got.payload, wanted.payload);
    }
}

async fn p9_an_open_transaction_is_not_seen(db: Database) {
    match db.raw().await {
        Raw::Sqlite(mut connection) => {
            let tx = connection.transaction().unwrap();
            let _ = db.outbox.enqueue_in_sqlite(&tx, &[message("x").key("k")]).unwrap();
            assert_eq!(db.outbox.stats().await.unwrap()["a"].pending, 0);
            drop(tx);
        }
        Raw::Postgres(mut client) => {
            let mut tx = client.transaction().await.unwrap();
            let _ = db.outbox.enqueue_in(&mut tx, &[message("x").key("k")]).await.unwrap();
            assert!(db.claim("a", "w", 10).await.is_empty());
            drop(tx);
        }
        Raw::Mysql(mut conn) => {
            let mut tx = conn.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
            let _ = db.outbox.enqueue_in(&mut tx, &[message("x").key("k")]).await.unwrap();
            assert!(db.claim("a", "w", 10).await.is_empty());
            drop(tx);
            conn.disconnect().await.unwrap();
        }
    }
    // A caller that dropped its transaction has rolled back.
    assert_eq!(created(db.enqueue(message("y").key("k")).await), db.claim_one("a", "w").await.id);
}

async fn p9_caller_sees_the_same_answers_as_the_library(db: Database) {
    db.raw().await.run("CREATE TABLE app (id INT)").await.unwrap();
    let known = db.enqueue(message("x").key("k")).await;
    let active = db.enqueue(message("x").active_key("a")).await;
    let asked = [
        message("x").key("k"),
        message("y").key("k"),
        message("x").active_key("a"),
        message("y").active_key("a").key("n"),
    ];
    let entries = in_callers_transaction(&db, &asked, true).await;
    use Enqueued::{Differs, Exists};
    let got: Vec<(i64, Enqueued)> = entries.iter().map(|e| (e.id, e.outcome)).collect();
    assert_eq!(got, [(known.id, Exists), (known.id, Differs), (active.id, Exists), (active.id, Differs)]);
    assert_eq!(db.counts().await, [2, 0, 1, 0]);
}

/// Two applications' transactions, both open, both with keys of their own: neither may wait for the other.
async fn p9_callers_with_distinct_keys_do_not_wait_for_each_other(db: Database) {
    let batch = |name: &str| (0..20).map(|n| message("x").key(format!("{name} {n}"))).collect::<Vec<_>>();
    match (db.raw().await, db.raw().await) {
        (Raw::Postgres(mut one), Raw::Postgres(mut two)) => {
            let (mut one, mut two) = (one.transaction().await.unwrap(), two.transaction().await.unwrap());
            for round in 0..3 {
                let _ = db.outbox.enqueue_in(&mut one, &batch(&format!("one {round}"))).await.unwrap();
                let _ = db.outbox.enqueue_in(&mut two, &batch(&format!("two {round}"))).await.unwrap();
            }
            one.commit().await.unwrap();
            two.commit().await.unwrap();
        }
        (Raw::Mysql(mut one), Raw::Mysql(mut two)) => {
            for conn in [&mut one, &mut two] {
                conn.query_drop("SET innodb_lock_wait_timeout = 1").await.unwrap();
            }
            let mut one = one.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
            let mut two = two.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
            for round in 0..3 {
                let _ = db.outbox.enqueue_in(&mut one, &batch(&format!("one {round}"))).await.unwrap();
                let _ = db.outbox.enqueue_in(&mut two, &batch(&format!("two {round}"))).await.unwrap();
            }
            one.commit().await.unwrap();
            two.commit().await.unwrap();
        }
        // One writer at a time.
        _ => return,
    }
    assert_eq!(db.counts().await, [120, 0, 120, 0]);
}

/// Runs `first` between a caller's first read and its enqueue, in the strictest isolation its database uses by default.
async fn enqueue_after_snapshot<F: Future<Output = ()>>(
    db: &Database,
    first: F,
    asked: NewMessage,
) -> Option<postrider::Entry> {
    let asked = [asked];
    match db.raw().await {
        Raw::Sqlite(mut connection) => {
            first.await; // a read transaction of SQLite cannot become a writer after somebody else wrote
            let tx = connection.transaction().unwrap();
            let receipt = db.outbox.enqueue_in_sqlite(&tx, &asked).unwrap();
            tx.commit().unwrap();
            Some(receipt.entries()[0])
        }
        Raw::Postgres(mut client) => {
            let begin = client.build_transaction().isolation_level(tokio_postgres::IsolationLevel::RepeatableRead);
            let mut tx = begin.start().await.unwrap();
            tx.query("SELECT count(*) FROM outbox", &[]).await.unwrap();
            first.await;
            match db.outbox.enqueue_in(&mut tx, &asked).await {
                Ok(receipt) => {
                    tx.commit().await.unwrap();
                    Some(receipt.entries()[0])
                }
                Err(error) => {
                    assert_eq!(error.kind, Kind::Busy, "a serialisation failure, nothing else: {error}");
                    None
                }
            }
        }
        Raw::Mysql(mut conn) => {
            conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ").await.unwrap();
            let mut tx = conn.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
            tx.query_drop("SELECT COUNT(*) FROM outbox").await.unwrap();
            first.await;
            match db.outbox.enqueue_in(&mut tx, &asked).await {
                Ok(receipt) => {
                    tx.commit().await.unwrap();
                    Some(receipt.entries()[0])
                }
                Err(error) => {
                    assert_eq!(error.kind, Kind::Busy, "{error}");
                    None
                }
            }
        }
    }
}

async fn p9_repeatable_read_caller_sees_keys_committed_meanwhile(db: Database) {
    let batch: Vec<NewMessage> = (0..10).map(|n| message("x").key(format!("k{n}"))).collect();
    let first = async { drop(db.outbox.enqueue(batch).await.unwrap()) };
    if let Some(entry) = enqueue_after_snapshot(&db, first, message("x").key("k3")).await {
        assert_eq!(entry.outcome, Enqueued::Exists);
    }
    let first = async { assert!(created(db.enqueue(message("x").active_key("a")).await) > 0) };
    if let Some(entry) = enqueue_after_snapshot(&db, first, message("y").active_key("a")).await {
        assert_eq!(entry.outcome, Enqueued::Differs);
    }
    assert_eq!(db.counts().await, [11, 0, 10, 0]);
}

/// A caller whose snapshot is older than the message under an expired key has been open for longer than keys live. MySQL
/// cannot show it that message without a lock that would stop its worker (docs/protocol.md).
async fn p9_repeatable_read_caller_respects_an_expired_key_of_a_live_message(db: Database) {
    let first = async {
        created(db.enqueue(NewMessage::new("brief", "x").key("k")).await);
        let long_ago = match db.dialect {
            Dialect::Sqlite => "UPDATE outbox_keys SET expires_at = 0",
            _ => "UPDATE outbox_keys SET expires_at = '2001-01-01 00:00:00'",
        };
        db.raw().await.run(long_ago).await.unwrap();
    };
    let entry = enqueue_after_snapshot(&db, first, NewMessage::new("brief", "y").key("k")).await;
    if db.dialect == Dialect::Mysql {
        assert_eq!(entry.map(|entry| entry.outcome), Some(Enqueued::Created));
        return;
    }
    if let Some(entry) = entry {
        assert_eq!(entry.outcome, Enqueued::Differs);
    }
    assert_eq!(db.counts().await, [1, 0, 1, 0]);
}

// ---- limits ----

async fn bad_input_is_refused_and_nothing_written(db: Database) {
    let bad = [
        (NewMessage::new("nowhere", "x"), Kind::UnknownLane),
        (NewMessage::new("a", vec![0; (1 << 20) + 1]), Kind::Invalid),
        (message("x").key("k".repeat(256)), Kind::Invalid),
        (message("x").key("é".repeat(128)), Kind::Invalid),
        (message("x").key(""), Kind::Invalid),
        (message("x").key("a\0b"), Kind::Invalid),
        (message("x").active_key("k".repeat(256)), Kind::Invalid),
        (message("x").active_key(""), Kind::Invalid),
        (message("x").target("t".repeat(1025)), Kind::Invalid),
        (message("x").correlation_id("c".repeat(256)), Kind::Invalid),
        (message("x").content_type("c".repeat(256)), Kind::Invalid),
        (message("x").header("h", "v".repeat(20_000)), Kind::Invalid),
        (message("x").delay(secs(u64::MAX)), Kind::Invalid),
        // What not every database can store must be refused by all.
        (message("x").deliver_before(Timestamp::from_micros(i64::MAX)), Kind::Invalid),
        (message("x").deliver_before(Timestamp::from_micros(i64::MIN)), Kind::Invalid),
    ];
    for (message, kind) in bad {
        let shown = format!("{:.120}", format!("{message:?}"));
        let error = db.outbox.enqueue(vec![message]).await.expect_err(&shown);
        assert_eq!(error.kind, kind, "{shown}: {error}");
    }
    assert_eq!(db.counts().await, [0; 4]);
    // The longest that are allowed.
    let long = message("x")
        .key("k".repeat(255))
        .active_key("😀".repeat(63))
        .target("t".repeat(1024))
        .correlation_id("c".repeat(255))
        .content_type("c".repeat(255))
        .header("h", "v".repeat(16_000))
        .deliver_before(Timestamp::FAR_FUTURE)
        .delay(postrider::message::MAX_DELAY);
    let id = created(db.enqueue(long).await);
    assert_eq!(db.show(id).await.deliver_before, Some(Timestamp::FAR_FUTURE));
}

async fn one_bad_message_refuses_the_batch(db: Database) {
    let batch = vec![message("x"), message("y").key("k"), message("z").key("")];
    db.outbox.enqueue(batch).await.unwrap_err();
    assert_eq!(db.counts().await, [0; 4]);
}

// ---- shards ----

async fn shards_follow_key_then_active_key_then_target(db: Database) {
    let on = |name: &str| NewMessage::new("sharded", name.to_owned());
    let mut seen = HashSet::new();
    for n in 0..24 {
        let name = format!("name {n}");
        let by_key = on(&name).key(&name);
        let shard = by_key.shard(8);
        seen.insert(shard);
        let messages = [
            by_key.active_key(format!("other {n}")).target("t"),
            on(&name).active_key(&name).target("t"),
            on(&name).target(&name),
        ];
        for message in messages {
            let id = created(db.enqueue(message).await);
            assert_eq!(db.show(id).await.shard_id, shard, "{name}");
        }
    }
    assert_eq!(seen.len(), 8, "24 names should meet all 8 shards");
    let none = created(db.enqueue(on("plain")).await);
    assert_eq!(db.show(none).await.shard_id, 0);
    // A claim names one shard and gets nothing else.
    let mut claimed = 0;
    for shard in 0..8 {
        let claim = Claim { shard, ..claim_of("sharded", "w", 100, secs(60), From::Mark(None)) };
        let got = db.outbox.store().claim(&claim).await.unwrap().messages;
        assert!(got.iter().all(|m| m.shard_id == shard));
        claimed += got.len();
    }
    assert_eq!(claimed, 24 * 3 + 1);
}

// ---- P12 ----

/// Whatever the order of the keys, claims come in the order of the messages.
async fn p12_claims_follow_the_order_of_the_batch(db: Database) {
    let keys: Vec<usize> = (0..700).map(|n| (n * 7919 + 350) % 700).collect();
    let batch =
        keys.iter().enumerate().map(|(n, key)| message(&format!("{n:03}")).key(format!("key {key:03}"))).collect();
    db.outbox.enqueue(batch).await.unwrap();
    let claimed = db.claim("a", "w", 1000).await;
    let order: Vec<String> = claimed.iter().map(|m| String::from_utf8(m.payload.to_vec()).unwrap()).collect();
    let wanted: Vec<String> = (0..700).map(|n| format!("{n:03}")).collect();
    assert_eq!(order, wanted);
}

/// On SQLite there is no function: the documented inserts are the caller's own.
async fn sql_enqueue_refuses_what_the_library_refuses(db: Database) {
    let long = "x".repeat(256);
    let wrong: Vec<(String, &str)> = match db.dialect {
        Dialect::Sqlite => vec![],
        Dialect::Postgres => vec![
            ("SELECT postrider_enqueue('a', 'x', delay => '11 years')".to_owned(), "ten years"),
            ("SELECT postrider_enqueue('a', 'x', delay => '-1 s')".to_owned(), "ten years"),
            (format!("SELECT postrider_enqueue('a', 'x', content_type => '{long}')"), "content_type"),
            (format!("SELECT postrider_enqueue('a', 'x', correlation_id => '{long}')"), "correlation_id"),
            (format!("SELECT postrider_enqueue('a', 'x', key => '{long}')"), "255 bytes"),
            ("SELECT postrider_enqueue('owned', 'x')".to_owned(), "shop pay"),
            ("SELECT postrider_enqueue('nope', 'x')".to_owned(), "no lane"),
        ],
        Dialect::Mysql => vec![
            ("CALL postrider_enqueue('a', 'x', NULL, NULL, NULL, 1e12, @id, @o)".to_owned(), "ten years"),
            ("CALL postrider_enqueue('a', 'x', NULL, NULL, NULL, -1, @id, @o)".to_owned(), "ten years"),
            (format!("CALL postrider_enqueue('a', 'x', '{long}', NULL, NULL, 0, @id, @o)"), "255 bytes"),
            ("CALL postrider_enqueue('owned', 'x', NULL, NULL, NULL, 0, @id, @o)".to_owned(), "shop pay"),
            ("CALL postrider_enqueue('nope', 'x', NULL, NULL, NULL, 0, @id, @o)".to_owned(), "no lane"),
        ],
    };
    let mut raw = db.raw().await;
    for (sql, says) in wrong {
        let error = raw.run(&sql).await.expect_err(&sql);
        assert!(error.contains(says), "{sql}: {error}");
    }
    assert_eq!(db.counts().await, [0; 4]);
}

/// SQL by hand, and processes of a version that knew of no other place for keys: the database keeps them out.
async fn p8_an_active_key_holds_against_whoever_writes_rows_alone(db: Database) {
    let message = |key: &str| NewMessage::new("a", "x").active_key(key.to_owned());
    let ours = created(db.enqueue(message("ours")).await);
    let now = match db.dialect {
        Dialect::Sqlite => "1",
        Dialect::Postgres => "now()",
        Dialect::Mysql => "UTC_TIMESTAMP(6)",
    };
    let row = |key: &str| format!("('a', {now}, '{key}', 'x', {now}, {now})");
    let columns = "outbox (lane, due_at, active_key, payload, created_at, updated_at) VALUES";
    let mut hand = db.raw().await;
    let refused = hand.run(&format!("INSERT INTO {columns} {}", row("ours"))).await.unwrap_err();
    assert!(refused.to_lowercase().contains("unique") || refused.contains("Duplicate"), "{refused}");
    let (verb, tail) = match db.dialect {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", "ON CONFLICT DO NOTHING"),
    };
    let some = format!("{verb} INTO {columns} {}, {}, {} {tail}", row("theirs"), row("ours"), row("last"));
    hand.run(&some).await.unwrap();
    let theirs = "SELECT COUNT(*) FROM outbox WHERE active_key IN ('theirs', 'last')";
    assert_eq!((db.count("outbox").await, hand.number(theirs).await), (3, 2), "the one that is taken is left out");

    // Theirs keep us out, as ours keep them; and what is gone, by whatever way, is free for both.
    assert_eq!(db.enqueue(message("theirs")).await.outcome, Enqueued::Exists);
    assert_eq!(db.enqueue(message("last")).await.outcome, Enqueued::Exists);
    hand.run("DELETE FROM outbox WHERE active_key = 'theirs'").await.unwrap();
    hand.run(&format!("DELETE FROM outbox WHERE id = {ours}")).await.unwrap();
    created(db.enqueue(message("theirs")).await);
    hand.run(&format!("INSERT INTO {columns} {}", row("ours"))).await.unwrap();
    assert_eq!(db.enqueue(message("ours")).await.outcome, Enqueued::Exists);
    for leased in db.claim("a", "w", 10).await {
        assert_eq!(db.settle("a", "w", leased.lease(), Verdict::sent()).await, Settled::Applied);
    }
    for key in ["ours", "theirs", "last"] {
        created(db.enqueue(message(key)).await);
    }
}
