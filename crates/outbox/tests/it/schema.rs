//! What the database itself promises: guards on ended rows, the specifications' views, enqueue from SQL and from the
//! command-line clients, migrations.

use std::process::Command;

use mysql_async::prelude::Queryable;
use postrider::error::Kind;
use postrider::outcome::{Settled, Verdict};
use postrider::store::{Mode, Requeued, transact};
use postrider::tx::{Dialect, Row};
use postrider::{Enqueued, NewMessage, Timestamp};

use crate::harness::{self, Database, Raw, created, dead, lanes, on_every_store, retry, secs};

const MIGRATIONS: [&str; 14] = [
    "V001__outbox",
    "V002__enqueue_from_sql",
    "V003__pauses",
    "V004__alerts",
    "V005__keys_by_lane",
    "V006__enqueue_without_locks",
    "V007__times_are_numbers",
    "V008__former_keys",
    "V009__alerts_in_order",
    "V010__alerts_that_wait",
    "V011__active_keys",
    "V012__cheaper_checks",
    "V013__messages_newer_than_a_snapshot",
    "V014__active_keys_of_all",
];

on_every_store! {
    p6_ended_rows_refuse_raw_sql,
    p6_requeue_and_prune_are_let_through_and_leave_the_guard_standing,
    p6_a_failed_transaction_leaves_no_permit_behind,
    view_memory_has_the_specs_words,
    view_orders_has_the_specs_words,
    idx_claim_has_its_columns,
    views_survive_undecodable_payloads,
    the_specs_selects_run_as_printed,
    p12_enqueue_from_sql_answers_as_the_library,
    enqueue_from_sql_refuses_bad_input,
    enqueue_from_the_command_line_client,
    migrating_again_changes_nothing,
    a_newer_schema_is_refused_and_nothing_changed,
    a_newer_schema_begun_and_not_finished_is_refused,
    an_unmigrated_database_says_so,
    a_migration_that_is_kept_waiting_gives_up_and_keeps_nobody_waiting,
}

// ---- guards ----

async fn p6_ended_rows_refuse_raw_sql(db: Database) {
    let sent = db.put_sent(NewMessage::new("a", "x")).await;
    let dead = db.put_dead(NewMessage::new("a", "y")).await;
    let before = [db.show(sent).await, db.show(dead).await];
    let mut raw = db.raw().await;
    let columns = "id, lane, shard_id, due_at, attempts, crashes, maybe_sent, lease_token, payload, created_at, updated_at, status, finished_at";
    let copied = columns.replace("lease_token", "lease_token + 1");
    let mut attacks = vec![
        "UPDATE outbox_done SET status = 'sent'".to_owned(),
        format!("UPDATE outbox_done SET lane = 'b' WHERE id = {sent}"),
        format!("UPDATE outbox_done SET id = id + 1000 WHERE id = {dead}"),
        format!("DELETE FROM outbox_done WHERE id = {dead}"),
        "DELETE FROM outbox_done".to_owned(),
        format!("INSERT INTO outbox_done ({columns}) SELECT {copied} FROM outbox_done WHERE id = {sent}"),
    ];
    match db.dialect {
        Dialect::Sqlite => attacks.extend([
            format!("INSERT OR REPLACE INTO outbox_done ({columns}) SELECT {copied} FROM outbox_done WHERE id = {sent}"),
            format!("REPLACE INTO outbox_done ({columns}) SELECT {copied} FROM outbox_done"),
            format!("PRAGMA recursive_triggers = OFF; REPLACE INTO outbox_done ({columns}) SELECT {copied} FROM outbox_done"),
            "UPDATE OR REPLACE outbox_done SET id = 1".to_owned(),
        ]),
        Dialect::Postgres => attacks.extend([
            "TRUNCATE outbox_done".to_owned(),
            "TRUNCATE outbox_done, outbox_attempts CASCADE".to_owned(),
            "SET session_replication_role = replica; DELETE FROM outbox_done".to_owned(),
            "SET session_replication_role = replica; TRUNCATE outbox_done".to_owned(),
            format!(
                "INSERT INTO outbox_done ({columns}) SELECT {copied} FROM outbox_done ON CONFLICT (id) DO UPDATE SET status = 'dead'"
            ),
            "SET postrider.permit = ''; DELETE FROM outbox_done".to_owned(),
        ]),
        Dialect::Mysql => attacks.extend([
            format!("REPLACE INTO outbox_done ({columns}) SELECT {copied} FROM outbox_done WHERE id = {sent}"),
            format!("INSERT INTO outbox_done ({columns}) SELECT {columns} FROM outbox_done d2 ON DUPLICATE KEY UPDATE lane = 'b'"),
            "UPDATE IGNORE outbox_done SET lane = 'b'".to_owned(),
        ]),
    }
    for attack in attacks {
        let refused = raw.run(&attack).await;
        assert!(refused.is_err(), "let through: {attack}");
        if db.dialect == Dialect::Postgres {
            raw.run("RESET session_replication_role").await.unwrap();
        }
        assert_eq!([db.show(sent).await, db.show(dead).await], before, "{attack}");
        assert_eq!(db.count("outbox_done").await, 2, "{attack}");
    }
}

async fn p6_requeue_and_prune_are_let_through_and_leave_the_guard_standing(db: Database) {
    let one = db.put_dead(NewMessage::new("a", "x")).await;
    db.put_dead(NewMessage::new("a", "y")).await;
    assert_eq!(db.outbox.requeue(vec![one]).await.unwrap(), [Requeued::Requeued]);
    db.advance(secs(100));
    assert_eq!(db.prune(secs(10), 100).await.messages, 1);
    db.put_dead(NewMessage::new("b", "z")).await;
    // On every connection of the pool, permits given before are gone.
    for _ in 0..20 {
        assert!(db.try_sql("DELETE FROM outbox_done", vec![]).await.is_err());
    }
    assert_eq!(db.count("outbox_done").await, 1);
}

async fn p6_a_failed_transaction_leaves_no_permit_behind(db: Database) {
    db.put_dead(NewMessage::new("a", "x")).await;
    let permit = match db.dialect {
        Dialect::Sqlite => "INSERT INTO postrider_permit VALUES ('prune')",
        Dialect::Postgres => "SELECT set_config('postrider.permit', 'prune', TRUE)",
        Dialect::Mysql => "SET @postrider_permit = 'prune'",
    };
    let failing = transact(&**db.outbox.store(), Mode::Write, move |tx| {
        Box::pin(async move {
            tx.query(permit, &[]).await?;
            Err::<(), _>(postrider::Error::database("something went wrong"))
        })
    });
    failing.await.unwrap_err();
    assert!(db.try_sql("DELETE FROM outbox_done", vec![]).await.is_err());
}

// ---- views ----

async fn view_rows(db: &Database, columns: &str, view: &str, order: &str) -> Vec<Row> {
    db.sql(&format!("SELECT {columns} FROM {view} ORDER BY {order}")).await
}

fn words(rows: &[Row], column: usize) -> Vec<Option<String>> {
    rows.iter().map(|row| row.opt_text(column).unwrap()).collect()
}

fn some(words: &[&str]) -> Vec<Option<String>> {
    words.iter().map(|w| (!w.is_empty()).then(|| (*w).to_owned())).collect()
}

const MEMORY: &str =
    "outbox_id, status, retry_count, next_attempt_at, locked_at, locked_by, last_error, payload_sha, target_space";

/// A time of a view; on SQLite it is text, for people, and ends with its milliseconds.
fn moment(row: &Row, column: usize) -> Option<Timestamp> {
    match row.opt_text(column) {
        Ok(text) => text.map(|text| format!("{}Z", text.replace(' ', "T")).parse().unwrap()),
        Err(_) => row.opt_time(column).unwrap(),
    }
}

/// Both are there and the same, or neither is.
fn same_moment(shown: Option<Timestamp>, stored: Option<Timestamp>, what: &str) {
    let apart = shown.zip(stored).map(|(a, b)| (a.micros() - b.micros()).abs());
    assert!(shown.is_some() == stored.is_some() && apart.unwrap_or(0) <= 1000, "{what}: {shown:?}, not {stored:?}");
}

async fn view_memory_has_the_specs_words(db: Database) {
    let mut ids = vec![db.put_sent(NewMessage::new("memory", "plain").target("space 天")).await];
    ids.push(db.enqueue(NewMessage::new("memory", "sent")).await.id);
    let lease = db.claim_ids("memory", "w", &[ids[1]]).await[0].lease();
    db.settle("memory", "w", lease, Verdict::Sent { result_ref: Some("mem-7".into()), dedup_hit: false }).await;
    ids.push(db.put_dead(NewMessage::new("memory", "dead")).await);
    ids.push(db.put("memory", "retried").await);
    let lease = db.claim_ids("memory", "w", &[ids[3]]).await[0].lease();
    db.settle("memory", "w", lease, retry(secs(1000))).await;
    ids.push(db.put("memory", "leased").await);
    db.claim_ids("memory", "w", &[ids[4]]).await;
    ids.push(db.put("memory", "new").await);
    db.put("a", "elsewhere").await;
    let mut views = vec!["outbox_memory"];
    if db.dialect == Dialect::Postgres {
        views.push("logbook.outbox_memory");
    }
    let payloads = ["plain", "sent", "dead", "retried", "leased", "new"];
    for view in views {
        let rows = view_rows(&db, &format!("{MEMORY}, payload_md, created_at, updated_at"), view, "outbox_id").await;
        assert_eq!(rows.iter().map(|row| row.int(0).unwrap()).collect::<Vec<_>>(), ids);
        assert_eq!(words(&rows, 1), some(&["sent", "sent", "dead", "pending", "pending", "pending"]));
        let tries: Vec<i64> = rows.iter().map(|row| row.int(2).unwrap()).collect();
        assert_eq!(tries, [0, 0, 1, 1, 0, 0]);
        for (row, id) in rows.iter().zip(&ids) {
            let stored = db.show(*id).await;
            same_moment(moment(row, 3), Some(stored.due_at), "next_attempt_at");
            same_moment(moment(row, 4), stored.locked_at, "locked_at");
            same_moment(moment(row, 10), Some(stored.created_at), "created_at");
        }
        let wait = |n: usize| moment(&rows[n], 3).unwrap().since(moment(&rows[n], 10).unwrap()).as_secs();
        assert!((1000..1060).contains(&wait(3)), "due after its backoff: {}", wait(3));
        same_moment(moment(&rows[5], 3), moment(&rows[5], 10), "a new one is due when it was made");
        assert_eq!(words(&rows, 5), some(&["", "", "", "", "w", ""]), "locks of ended rows show NULL");
        let locked: Vec<bool> = rows.iter().map(|row| row.0[4] != postrider::tx::Value::Null).collect();
        assert_eq!(locked, [false, false, false, false, true, false]);
        assert_eq!(words(&rows, 6), some(&["", "mem-7", "no use", "busy", "", ""]), "000 keeps the memory id here");
        let sha = |text: &str| postrider::message::hex(&postrider::message::sha256(text.as_bytes()));
        assert_eq!(words(&rows, 7), payloads.map(|text| Some(sha(text))));
        assert_eq!(words(&rows, 8), some(&["space 天", "", "", "", "", ""]));
        assert_eq!(words(&rows, 9), some(&payloads));
    }
}

const ORDERS: &str = "id, idempotency_key, order_request_json, request_digest, status, attempts, last_error_code, last_error_msg, locked_by, locked_at, created_at, updated_at, expires_at, next_run_at";

/// Whoever looks with the library of a distribution sees the same as with ours.
#[test]
fn views_of_sqlite_ask_nothing_of_a_newer_library() {
    let views = include_str!("../../migrations/sqlite/views.sql");
    // Since 3.42: unixepoch('subsec'), which an older one takes for NULL.
    assert!(!views.contains("unixepoch("), "julianday and strftime are old enough");
}

async fn view_orders_has_the_specs_words(db: Database) {
    let order = |n: u32| NewMessage::json("orders", &serde_json::json!({ "n": n })).key(format!("key {n}"));
    let mut ids = vec![db.put_sent(order(0)).await, db.put_dead(order(1)).await];
    for (n, delay) in [(2, 1000), (3, 0)] {
        ids.push(db.enqueue(order(n)).await.id);
        let lease = db.claim_ids("orders", "w", &ids[n as usize..]).await[0].lease();
        db.settle("orders", "w", lease, retry(secs(delay))).await;
    }
    ids.push(db.enqueue(order(4)).await.id);
    db.claim_ids("orders", "w", &ids[4..]).await;
    ids.push(db.enqueue(order(5)).await.id);
    ids.push(db.enqueue(NewMessage::new("orders", "{\"n\": 6}")).await.id);
    let rows = view_rows(&db, ORDERS, "outbox_orders", "id").await;
    assert_eq!(rows.iter().map(|row| row.int(0).unwrap()).collect::<Vec<_>>(), ids);
    assert_eq!(words(&rows, 4), some(&["succeeded", "aborted", "failed", "pending", "sending", "pending", "pending"]));
    assert_eq!(words(&rows, 1), some(&["key 0", "key 1", "key 2", "key 3", "key 4", "key 5", ""]));
    let updated = "SELECT id, updated_at FROM outbox UNION ALL SELECT id, finished_at FROM outbox_done ORDER BY id";
    let updated = db.sql(updated).await;
    for (n, row) in rows.iter().enumerate() {
        let json: serde_json::Value = serde_json::from_str(&row.text(2).unwrap()).unwrap();
        assert_eq!(json["n"], n);
        assert_eq!(row.text(3).unwrap().len(), 64);
        let stored = db.show(ids[n]).await;
        same_moment(moment(row, 9), stored.locked_at, "locked_at");
        same_moment(moment(row, 10), Some(stored.created_at), "created_at");
        same_moment(moment(row, 11), Some(updated[n].time(1).unwrap()), "updated_at");
        same_moment(moment(row, 13), Some(stored.due_at), "next_run_at");
        // When its key is over: these tests' lane keeps keys for a week.
        let kept = moment(row, 12).map(|end| end.since(stored.created_at).as_secs());
        assert!(
            if n == 6 { kept.is_none() } else { kept.is_some_and(|kept| kept.abs_diff(7 * 86400) < 60) },
            "{kept:?}"
        );
    }
    let wait = moment(&rows[2], 13).unwrap().since(moment(&rows[2], 10).unwrap()).as_secs();
    assert!((1000..1060).contains(&wait), "after its backoff: {wait}");
    assert_eq!(rows.iter().map(|row| row.int(5).unwrap()).collect::<Vec<_>>(), [0, 1, 1, 1, 0, 0, 0]);
    assert_eq!(words(&rows, 6), some(&["", "BAD", "HTTP_503", "HTTP_503", "", "", ""]));
    assert_eq!(words(&rows, 7), some(&["", "no use", "busy", "busy", "", "", ""]));
    assert_eq!(words(&rows, 8), some(&["", "", "", "", "w", "", ""]));
    if db.dialect == postrider::tx::Dialect::Postgres {
        let kind = "SELECT DISTINCT pg_typeof(order_request_json)::text FROM outbox_orders WHERE order_request_json IS NOT NULL";
        assert_eq!(db.sql(kind).await[0].text(0).unwrap(), "jsonb");
    }
}

/// Live work by lane and shard in the order it is due, and nothing beside: what a claim searches is what the index has.
async fn idx_claim_has_its_columns(db: Database) {
    let sql = match db.dialect {
        Dialect::Sqlite => "SELECT group_concat(name, ', ') FROM pragma_index_info('idx_claim')",
        Dialect::Postgres => {
            "SELECT string_agg(attname, ', ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = to_regclass('idx_claim')"
        }
        Dialect::Mysql => {
            "SELECT GROUP_CONCAT(column_name ORDER BY seq_in_index SEPARATOR ', ') FROM information_schema.statistics
              WHERE table_schema = DATABASE() AND table_name = 'outbox' AND index_name = 'idx_claim'"
        }
    };
    assert_eq!(db.sql(sql).await[0].text(0).unwrap(), "lane, shard_id, due_at, id");
}

async fn views_survive_undecodable_payloads(db: Database) {
    // No UTF-8 (a stray byte, a cut sequence, an overlong one, a surrogate), no JSON, NUL, nothing.
    let undecodable: [&[u8]; 5] = [&[0xff, 0xfe], &[0x61, 0x80], &[0xe2, 0x82], &[0xc0, 0xaf], &[0xed, 0xa0, 0x80]];
    let not_json: [&[u8]; 4] = [b"{", b"", b"not json", &[0x22, 0xff, 0x22]];
    // MariaDB itself takes a surrogate for a character.
    let undecodable = if db.dialect == Dialect::Mysql { &undecodable[..4] } else { &undecodable[..] };
    let bad = undecodable.len();
    for bytes in undecodable {
        db.enqueue(NewMessage::new("memory", bytes.to_vec())).await;
        db.put_sent(NewMessage::new("memory", bytes.to_vec())).await;
    }
    for bytes in undecodable.iter().chain(&not_json) {
        db.enqueue(NewMessage::new("orders", bytes.to_vec())).await;
        db.put_dead(NewMessage::new("orders", bytes.to_vec())).await;
    }
    db.enqueue(NewMessage::new("memory", "gut: 天气 😀 \u{fffd}")).await;
    db.enqueue(NewMessage::new("orders", "{\"gut\": \"天气 😀\"}")).await;
    let memories = view_rows(&db, "payload_md", "outbox_memory", "outbox_id").await;
    assert_eq!(memories.len(), 2 * bad + 1);
    for (n, row) in memories.iter().take(2 * bad).enumerate() {
        assert_eq!(row.0[0], postrider::tx::Value::Null, "payload {n} of outbox_memory");
    }
    assert_eq!(memories[2 * bad].text(0).unwrap(), "gut: 天气 😀 \u{fffd}");
    let orders = view_rows(&db, "order_request_json", "outbox_orders", "id").await;
    assert_eq!(orders.len(), 2 * bad + 9);
    for (n, row) in orders.iter().take(2 * bad + 8).enumerate() {
        assert_eq!(row.0[0], postrider::tx::Value::Null, "payload {n} of outbox_orders");
    }
    assert!(orders[2 * bad + 8].text(0).unwrap().contains("天气"));
}

async fn the_specs_selects_run_as_printed(db: Database) {
    db.put("memory", "x").await;
    let mut printed = vec![
        "SELECT outbox_id, status, retry_count FROM outbox_memory WHERE status = 'pending'",
        "SELECT status, COUNT(*) FROM outbox_memory GROUP BY status",
        "SELECT * FROM outbox_orders WHERE status IN ('pending', 'failed')",
    ];
    if db.dialect == Dialect::Postgres {
        printed.push("SELECT * FROM logbook.outbox_memory WHERE status = 'pending' AND locked_at IS NULL");
        printed.push("SELECT * FROM governance.write_audit ORDER BY created_at DESC LIMIT 10");
    }
    for sql in printed {
        db.sql(sql).await;
    }
    let mut raw = db.raw().await;
    assert!(raw.run("UPDATE outbox_memory SET status = 'sent'").await.is_err(), "read-only");
    assert!(raw.run("DELETE FROM outbox_orders").await.is_err(), "read-only");
}

// ---- enqueue from SQL ----

/// What SQL can say in an enqueue.
#[derive(Clone, Debug, Default)]
struct Asked {
    lane: &'static str,
    payload: Vec<u8>,
    key: Option<&'static str>,
    target: Option<&'static str>,
    active_key: Option<&'static str>,
    delay_sec: u64,
}

impl Asked {
    fn message(&self) -> NewMessage {
        let mut message = NewMessage::new(self.lane, self.payload.clone()).delay(secs(self.delay_sec));
        message.key = self.key.map(str::to_owned);
        message.target = self.target.map(str::to_owned);
        message.active_key = self.active_key.map(str::to_owned);
        message
    }

    /// The statement that enqueues it, and answers id and outcome.
    fn sql(&self, dialect: Dialect) -> String {
        let text = |t: Option<&str>| t.map_or("NULL".to_owned(), |t| format!("'{}'", t.replace('\'', "''")));
        let hex = postrider::message::hex(&self.payload);
        let (key, target, active) = (text(self.key), text(self.target), text(self.active_key));
        let (lane, delay) = (self.lane, self.delay_sec);
        match dialect {
            Dialect::Postgres => format!(
                "SELECT id, outcome FROM postrider_enqueue('{lane}', decode('{hex}', 'hex'), key => {key}, target => {target}, active_key => {active}, delay => '{delay} seconds')"
            ),
            _ => {
                format!("CALL postrider_enqueue('{lane}', X'{hex}', {key}, {target}, {active}, {delay}, @id, @outcome)")
            }
        }
    }
}

/// Through a connection the kernel knows nothing of.
async fn enqueue_by_sql(raw: &mut Raw, asked: &Asked) -> Result<(i64, String), String> {
    match raw {
        Raw::Postgres(client) => {
            let row = client.query_one(&asked.sql(Dialect::Postgres), &[]).await;
            row.map(|row| (row.get(0), row.get(1)))
                .map_err(|e| e.as_db_error().map_or(e.to_string(), |d| d.message().into()))
        }
        Raw::Mysql(conn) => {
            conn.query_drop(asked.sql(Dialect::Mysql)).await.map_err(|e| e.to_string())?;
            let row: Option<(i64, String)> =
                conn.query_first("SELECT @id, @outcome").await.map_err(|e| e.to_string())?;
            row.ok_or_else(|| "no answer".to_owned())
        }
        Raw::Sqlite(_) => unreachable!("SQLite has no functions"),
    }
}

/// A story in which every answer occurs, with names that hurt.
fn story() -> Vec<Asked> {
    let base = Asked { lane: "sharded", payload: b"x".to_vec(), ..Asked::default() };
    let other = Asked { payload: vec![0, 0xff, b'\''], ..base.clone() };
    let mut story = vec![base.clone(), other.clone(), Asked { delay_sec: 1000, ..base.clone() }];
    for key in ["k", "K", "k ", "天气 😀", "it's"] {
        for asked in [&base, &base, &other] {
            story.push(Asked { key: Some(key), ..asked.clone() });
            story.push(Asked { active_key: Some(key), ..asked.clone() });
            story.push(Asked { target: Some(key), ..asked.clone() });
            story.push(Asked { key: Some(key), target: Some("t"), ..asked.clone() });
            story.push(Asked { key: Some("fresh"), active_key: Some(key), ..asked.clone() });
            story.push(Asked { lane: "brief", key: Some(key), active_key: Some("both"), ..asked.clone() });
        }
    }
    story
}

/// Everything an enqueue leaves behind but ids and times.
async fn left_behind(db: &Database) -> Vec<String> {
    let columns = "lane, shard_id, target, active_key, payload, payload_sha, attempts, crashes, lease_token, locked_by";
    let mut left = Vec::new();
    for row in db.sql(&format!("SELECT {columns} FROM outbox ORDER BY id")).await {
        left.push(format!("{row:?}"));
    }
    let key = if db.dialect == Dialect::Mysql { "`key`" } else { "key" };
    let sql = format!(
        "SELECT k.lane, k.{key}, k.digest, o.payload FROM outbox_keys k JOIN outbox o ON o.id = k.outbox_id ORDER BY o.id"
    );
    for row in db.sql(&sql).await {
        left.push(format!("{row:?}"));
    }
    left
}

async fn p12_enqueue_from_sql_answers_as_the_library(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // no functions there: other languages insert by themselves
    }
    let by_library = if db.dialect == Dialect::Postgres { harness::postgres().await } else { harness::mysql().await };
    by_library.outbox.migrate().await.unwrap();
    let mut raw = db.raw().await;
    let (mut sql_ids, mut library_ids) = (Vec::new(), Vec::new());
    for asked in story() {
        let (id, outcome) = enqueue_by_sql(&mut raw, &asked).await.unwrap_or_else(|e| panic!("{asked:?}: {e}"));
        let entry = by_library.enqueue(asked.message()).await;
        let word = match entry.outcome {
            Enqueued::Created => "created",
            Enqueued::Exists => "exists",
            Enqueued::Differs => "differs",
        };
        assert_eq!(outcome, word, "{asked:?}");
        let place = |ids: &mut Vec<i64>, id: i64| {
            ids.iter().position(|known| *known == id).unwrap_or_else(|| {
                ids.push(id);
                ids.len() - 1
            })
        };
        assert_eq!(place(&mut sql_ids, id), place(&mut library_ids, entry.id), "{asked:?}");
    }
    assert_eq!(left_behind(&db).await, left_behind(&by_library).await);
    // The other side finds what this one wrote, expired keys included.
    assert_eq!(db.enqueue(story()[3].message()).await.outcome, Enqueued::Exists);
    db.raw().await.run("UPDATE outbox_keys SET expires_at = '2001-01-01 00:00:00'").await.unwrap();
    let live = Asked { payload: b"changed".to_vec(), ..story()[3].clone() };
    assert_eq!(enqueue_by_sql(&mut raw, &live).await.unwrap().1, "differs", "expired, but its message is live");
    for message in db.outbox.seize("operator:me", sql_ids.clone(), secs(60)).await.unwrap() {
        assert_eq!(db.settle(&message.0, "operator:me", message.1, dead("BAD")).await, Settled::Applied);
    }
    assert_eq!(enqueue_by_sql(&mut raw, &live).await.unwrap().1, "created", "expired and ended");
    by_library.remove().await;
}

async fn enqueue_from_sql_refuses_bad_input(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return;
    }
    let base = Asked { lane: "a", payload: b"x".to_vec(), ..Asked::default() };
    let long: &'static str = Box::leak("k".repeat(256).into_boxed_str());
    let longer: &'static str = Box::leak("t".repeat(1025).into_boxed_str());
    let bad = [
        Asked { lane: "nowhere", ..base.clone() },
        Asked { key: Some(long), ..base.clone() },
        Asked { active_key: Some(long), ..base.clone() },
        Asked { target: Some(longer), ..base.clone() },
        Asked { key: Some(""), ..base.clone() },
        Asked { payload: vec![0; (1 << 20) + 1], ..base.clone() },
    ];
    let mut raw = db.raw().await;
    for asked in bad {
        let told = enqueue_by_sql(&mut raw, &asked).await.expect_err("refused");
        assert!(!told.is_empty());
        db.outbox.enqueue(vec![asked.message()]).await.unwrap_err();
    }
    assert_eq!(db.counts().await, [0; 4]);
}

/// `psql` and `mariadb`, as a person would use them.
async fn enqueue_from_the_command_line_client(db: Database) {
    let url = url::Url::parse(&db.url).unwrap();
    let (host, port) = (url.host_str().unwrap_or_default(), url.port().unwrap_or_default().to_string());
    let name = url.path().trim_start_matches('/');
    let statement = |asked: &Asked| asked.sql(db.dialect);
    let run = |sql: &str| -> String {
        let output = match db.dialect {
            Dialect::Sqlite => return String::new(),
            Dialect::Postgres => Command::new("psql")
                .args(["-X", "-q", "-A", "-t", "-F", " ", "-v", "ON_ERROR_STOP=1", "-d", &db.url, "-c", sql])
                .output(),
            Dialect::Mysql => Command::new("mariadb")
                .args([
                    "--no-defaults",
                    "--default-character-set=utf8mb4",
                    "-N",
                    "-B",
                    "-h",
                    host,
                    "-P",
                    &port,
                    "-u",
                    url.username(),
                    name,
                    "-e",
                ])
                .arg(format!("{sql}; SELECT CONCAT(@id, ' ', @outcome)"))
                .output(),
        };
        let output = output.expect("the client runs");
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    if db.dialect == Dialect::Sqlite {
        return;
    }
    let asked = Asked {
        lane: "a",
        payload: "天气 😀\0\n'".as_bytes().to_vec(),
        key: Some("k 天"),
        target: Some("t"),
        ..Asked::default()
    };
    let other = Asked { payload: b"other".to_vec(), ..asked.clone() };
    let first = run(&statement(&asked));
    let (id, outcome) = first.split_once(' ').expect("id and outcome");
    assert_eq!(outcome, "created");
    assert_eq!(run(&statement(&asked)), format!("{id} exists"));
    assert_eq!(run(&statement(&other)), format!("{id} differs"));
    let entry = db.enqueue(asked.message()).await;
    assert_eq!((entry.id.to_string().as_str(), entry.outcome), (id, Enqueued::Exists));
    let claimed = db.claim_one("a", "w").await;
    assert_eq!((claimed.payload.as_ref(), claimed.target.as_deref()), (asked.payload.as_slice(), Some("t")));
    assert_eq!(claimed.payload_sha, Some(postrider::message::sha256(&asked.payload)));
    // Rolled back by its own transaction.
    let begin = if db.dialect == Dialect::Postgres { "BEGIN" } else { "START TRANSACTION" };
    let fresh = Asked { key: Some("fresh"), ..asked };
    run(&format!("{begin}; {}; ROLLBACK", statement(&fresh)));
    assert_eq!(db.count("outbox").await, 1);
    // A library message is known to the client.
    let id = created(db.enqueue(NewMessage::new("b", "x").key("lib")).await);
    assert_eq!(
        run(&statement(&Asked { lane: "b", payload: b"x".to_vec(), key: Some("lib"), ..Asked::default() })),
        format!("{id} exists")
    );
}

// ---- migrations ----

async fn migrating_again_changes_nothing(db: Database) {
    assert!(db.outbox.pending_migrations().await.unwrap().is_empty());
    db.put("a", "x").await;
    assert!(db.outbox.migrate().await.unwrap().is_empty());
    assert!(db.again(lanes()).await.outbox.migrate().await.unwrap().is_empty());
    assert_eq!(db.count("outbox").await, 1);
}

async fn a_newer_schema_is_refused_and_nothing_changed(db: Database) {
    db.raw().await.run("INSERT INTO postrider_migrations VALUES (99, 'V099__future', 0)").await.unwrap();
    db.raw().await.run("DROP VIEW outbox_orders").await.unwrap(); // as the future might have it
    let newer = db.again(lanes().with("new", postrider::LaneRules::default())).await;
    let error = newer.outbox.migrate().await.unwrap_err();
    assert_eq!(error.kind, Kind::Schema);
    assert!(error.message.contains("99"), "{error}");
    assert_eq!(newer.outbox.pending_migrations().await.unwrap_err().kind, Kind::Schema);
    assert_eq!(db.count("outbox_lanes WHERE lane = 'new'").await, 0);
    assert_eq!(db.count("outbox_memory").await, 0, "the views stand as they were");
    assert!(db.try_sql("SELECT COUNT(*) FROM outbox_orders", vec![]).await.is_err());
    assert_eq!(db.count("postrider_migrations").await, MIGRATIONS.len() as i64 + 1);
}

/// Only MySQL can stop half-way, but the answer is the same.
async fn a_newer_schema_begun_and_not_finished_is_refused(db: Database) {
    db.raw().await.run("INSERT INTO postrider_migrations VALUES (99, 'V099__future', -3)").await.unwrap();
    assert_eq!(db.outbox.migrate().await.unwrap_err().kind, Kind::Schema);
    assert_eq!(db.outbox.pending_migrations().await.unwrap_err().kind, Kind::Schema);
}

async fn an_unmigrated_database_says_so(db: Database) {
    let fresh = match db.dialect {
        Dialect::Sqlite => harness::sqlite().await,
        Dialect::Postgres => harness::postgres().await,
        Dialect::Mysql => harness::mysql().await,
    };
    assert_eq!(fresh.outbox.pending_migrations().await.unwrap(), MIGRATIONS);
    let error = fresh.outbox.enqueue(vec![NewMessage::new("a", "x")]).await.unwrap_err();
    assert_eq!(error.kind, Kind::Schema, "{error}");
    assert!(error.message.contains("postrider migrate"), "{error}");
    // Several processes start at once, each as if it were the first.
    let mut starts = Vec::new();
    for _ in 0..4 {
        let process = fresh.again(lanes()).await;
        starts.push(tokio::spawn(async move { process.outbox.migrate().await }));
    }
    let mut ran = 0;
    for start in starts {
        ran += start.await.unwrap().expect("migrates").len();
    }
    assert_eq!(ran, MIGRATIONS.len(), "each migration ran once");
    fresh.put("a", "x").await;
    fresh.remove().await;
}

/// An application's transaction stays open: what alters its tables would wait for it, and everybody else for that.
async fn a_migration_that_is_kept_waiting_gives_up_and_keeps_nobody_waiting(db: Database) {
    if db.dialect == Dialect::Sqlite {
        return; // a reader keeps no writer waiting
    }
    let id = db.put("a", "x").await;
    let mut session = db.raw().await;
    session.run("DELETE FROM postrider_migrations WHERE name = 'V014__active_keys_of_all'").await.unwrap();
    let mut stranger = db.raw().await;
    stranger.run("BEGIN").await.unwrap();
    assert_eq!(stranger.number("SELECT COUNT(*) FROM outbox_memory").await, 0);
    let error = tokio::time::timeout(secs(60), db.again(lanes()).await.outbox.migrate()).await.expect("it gives up");
    let error = error.unwrap_err();
    assert!(error.kind == Kind::Locked && error.message.contains("run it again"), "{error}");
    assert_eq!(db.claim_one("a", "w").await.id, id, "and everybody goes on");
    stranger.run("ROLLBACK").await.unwrap();
    db.again(lanes()).await.outbox.migrate().await.unwrap();
    assert_eq!(stranger.number("SELECT COUNT(*) FROM outbox_memory").await, 0, "the views are back");
}

/// MySQL commits at each statement of a migration, so a process may die between any two.
mod crash {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mysql_migration_resumes_wherever_it_stopped() {
        harness::case(harness::mysql().await, resumes).await;
    }

    async fn resumes(db: Database) {
        // Steps of V001, as its file tells.
        let steps = include_str!("../../migrations/mysql/V001__outbox.sql").matches("\n-- step").count() as i64 + 1;
        let tables = [
            "outbox",
            "outbox_done",
            "outbox_keys",
            "outbox_attempts",
            "outbox_dedup",
            "outbox_lanes",
            "write_audit",
            "inbox",
            "postrider_meta",
        ];
        for stop in 0..=steps {
            for unrecorded in [false, true] {
                if stop == 0 && unrecorded {
                    continue;
                }
                let mut raw = db.raw().await;
                let fresh =
                    format!("DROP DATABASE {0}; CREATE DATABASE {0}; USE {0}", db.url.rsplit('/').next().unwrap());
                for statement in fresh.split(';') {
                    raw.run(statement).await.unwrap();
                }
                // The process gets through `stop` steps and dies, before or after it wrote the last one down.
                raw.run("CREATE TABLE postrider_migrations (version BIGINT PRIMARY KEY, name VARCHAR(255) NOT NULL, steps BIGINT NOT NULL)").await.unwrap();
                let written = if unrecorded { stop - 1 } else { stop };
                raw.run(&format!("INSERT INTO postrider_migrations VALUES (1, 'V001__outbox', {})", -written - 1))
                    .await
                    .unwrap();
                for step in
                    split(include_str!("../../migrations/mysql/V001__outbox.sql")).into_iter().take(stop as usize)
                {
                    raw.run(&step).await.unwrap_or_else(|e| panic!("{step}: {e}"));
                }
                let process = db.again(lanes()).await;
                process
                    .outbox
                    .migrate()
                    .await
                    .unwrap_or_else(|e| panic!("stopped after {stop}, unrecorded {unrecorded}: {e}"));
                for table in tables {
                    process.count(table).await;
                }
                process.put("a", "x").await;
                assert_eq!(process.count("outbox_memory").await, 0);
                assert_eq!(process.outbox.store_id().await.unwrap().len(), 16);
            }
        }
    }

    fn split(sql: &str) -> Vec<String> {
        let mut parts = vec![String::new()];
        for line in sql.lines() {
            if line.starts_with("-- step") {
                parts.push(String::new());
            } else if let Some(part) = parts.last_mut() {
                part.push_str(line);
                part.push('\n');
            }
        }
        parts.iter().map(|p| p.trim().trim_end_matches(';').to_owned()).collect()
    }

    /// Killed between the last statement and the views: the next start brings them back.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mysql_views_come_back() {
        harness::case(harness::mysql().await, |db| async move {
            let mut raw = db.raw().await;
            for sql in [
                "DROP VIEW outbox_memory",
                "DROP VIEW outbox_orders",
                "UPDATE postrider_migrations SET steps = -3 WHERE version = 2",
            ] {
                raw.run(sql).await.unwrap();
            }
            db.again(lanes()).await.outbox.migrate().await.unwrap();
            assert_eq!(db.count("outbox_memory").await + db.count("outbox_orders").await, 0);
        })
        .await;
    }
}
