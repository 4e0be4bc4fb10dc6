//! What people look at: searches and the pulse, the same on every store, and bounded.

use std::collections::BTreeSet;
use std::sync::Arc;

use postrider::paging::Page;
use postrider::store::{Filter, Prune, Pruned, Status};
use postrider::tx::Dialect;
use postrider::{NewMessage, Outbox};
use proving::watched::{Watched, numbers};

use crate::harness::{Database, on_every_store, retry, secs};

on_every_store! {
    keys_and_targets_are_found,
    the_dead_and_the_held_are_found_in_every_lane,
    the_pulse_tells_rates_holders_and_age,
    the_pulse_does_not_grow_with_what_there_is,
    the_pulse_says_when_it_sees_only_what_is_held,
    a_look_costs_no_more_for_a_lane_that_is_long_and_quiet,
    pages_follow_each_other_through_all_there_is,
    the_largest_limit_is_no_trap,
}

async fn found(db: &Database, filter: Filter) -> Vec<i64> {
    db.outbox.list(Filter { limit: 10, ..filter }).await.unwrap().items.iter().map(|shown| shown.id).collect()
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

async fn the_pulse_says_when_it_sees_only_what_is_held(db: Database) {
    db.outbox.enqueue((0..1_100).map(|n| NewMessage::new("a", format!("{n}"))).collect()).await.unwrap();
    let lane = async || db.outbox.pulse(secs(10)).await.unwrap().lanes["a"];
    db.claim("a", "w", 900).await;
    assert!(!lane().await.head_is_held, "there is one that waits");
    db.claim("a", "w", 150).await;
    assert!(lane().await.head_is_held, "behind it are fifty");
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

/// So many live messages of a lane, written by SQL alone; the `ended` first of them have ended, one in six of those is dead.
async fn fill(db: &Database, lane: &str, messages: u32, ended: u32) {
    let (now, target, payload) = match db.dialect {
        Dialect::Sqlite => ("CAST(unixepoch('subsec') * 1000000 AS INTEGER)", "'t' || (n % 7)", "x'7b7d'"),
        Dialect::Postgres => ("clock_timestamp()", "'t' || (n % 7)", "'{}'::bytea"),
        Dialect::Mysql => ("UTC_TIMESTAMP(6)", "CONCAT('t', n % 7)", "x'7b7d'"),
    };
    let columns =
        "lane, target, payload, shard_id, due_at, created_at, updated_at, attempts, crashes, lease_token, maybe_sent";
    let no = if db.dialect == Dialect::Postgres { "FALSE" } else { "0" };
    db.raw()
        .await
        .run(&format!(
            "INSERT INTO outbox ({columns}) SELECT '{lane}', {target}, {payload}, 0, {now}, {now}, {now}, 0, 0, 0, {no}
             FROM {} WHERE n < {messages}",
            numbers()
        ))
        .await
        .unwrap();
    let last = db.sql(&format!("SELECT id FROM outbox WHERE lane = '{lane}' ORDER BY id LIMIT 1 OFFSET {ended}")).await;
    let below = last.first().map_or(i64::MAX, |row| row.int(0).unwrap());
    let mut raw = db.raw().await;
    for sql in [
        format!(
            "INSERT INTO outbox_done (id, {columns}, status, finished_at)
             SELECT id, {columns}, CASE WHEN id % 6 = 0 THEN 'dead' ELSE 'sent' END, created_at FROM outbox WHERE lane = '{lane}' AND id < {below}"
        ),
        format!("DELETE FROM outbox WHERE lane = '{lane}' AND id < {below}"),
        // SQLite and PostgreSQL have no statistics until somebody asks for them.
        if db.dialect == Dialect::Mysql { "ANALYZE TABLE outbox, outbox_done" } else { "SELECT 1" }.to_owned(),
    ] {
        raw.run(&sql).await.unwrap();
    }
}

fn of(lane: Option<&str>, status: Option<Status>) -> Filter {
    Filter { lane: lane.map(str::to_owned), status, limit: 100, ..Filter::default() }
}

const STATUSES: [Option<Status>; 5] =
    [None, Some(Status::Pending), Some(Status::Leased), Some(Status::Sent), Some(Status::Dead)];

/// The lane is larger than a page may look at, and so is everything that came after it.
async fn a_look_costs_no_more_for_a_lane_that_is_long_and_quiet(db: Database) {
    fill(&db, "a", 300_000, 150_000).await;
    fill(&db, "b", 300_000, 150_000).await;
    db.claim("a", "w", 100).await;
    let watched = Watched::over(db.outbox.store().clone(), &db.url);
    let outbox = Outbox::new(watched.clone() as Arc<dyn postrider::store::Store>);
    // A page looks at 50,000 rows at a time; each table has 300,000.
    let check = |what: &str| watched.assert_bounded(what, 60_000);
    for lane in [Some("a"), Some("b"), None] {
        for status in STATUSES {
            for (target, before) in [(None, None), (Some("t3"), None), (Some("nowhere"), None), (None, Some(250_000))] {
                let filter = Filter { target: target.map(str::to_owned), before, ..of(lane, status) };
                outbox.list(filter.clone()).await.unwrap();
                check(&format!("{filter:?}"));
            }
        }
    }
    outbox.list(Filter { key: Some("k".to_owned()), ..of(None, None) }).await.unwrap();
    outbox.show(7).await.unwrap();
    check("by key and by id");
    for window in [secs(3600), std::time::Duration::from_micros(1)] {
        outbox.pulse(window).await.unwrap();
        watched.assert_bounded("the pulse", 4_000);
    }
    // What is asked again and again, and mostly finds nothing.
    let (key, name) = if db.dialect == Dialect::Mysql { ("`key`", "CONCAT('k', n)") } else { ("key", "'k' || n") };
    let (digest, later) = match db.dialect {
        Dialect::Sqlite => ("x'00'", "4000000000000000"),
        Dialect::Postgres => ("'0'::bytea", "TIMESTAMP '2099-01-01'"),
        Dialect::Mysql => ("x'00'", "'2099-01-01'"),
    };
    // Those of b are over, and their messages are not: none of them goes, and they are nothing to a.
    let past = match db.dialect {
        Dialect::Sqlite => "1",
        _ => "'2001-01-01'",
    };
    for (lane, later) in [("a", later), ("b", past)] {
        let from = format!("{} WHERE n < 100000", numbers());
        let values = format!("'{lane}', {name}, n, {digest}, {later}");
        let sql =
            format!("INSERT INTO outbox_keys (lane, {key}, outbox_id, digest, expires_at) SELECT {values} FROM {from}");
        db.raw().await.run(&sql).await.unwrap();
    }
    if db.dialect == Dialect::Postgres {
        // As autovacuum does; of a table it has never looked at it knows nothing.
        db.raw().await.run("ANALYZE outbox_keys").await.unwrap();
    }
    let all = Prune { lane: Some("a".to_owned()), older_than: secs(86_400), limit: 1000, dry_run: false };
    assert_eq!(outbox.prune(all.clone()).await.unwrap(), Pruned::default());
    watched.assert_bounded("pruning", 2_000);
    outbox.prune(Prune { lane: Some("b".to_owned()), ..all }).await.unwrap();
    watched.assert_bounded("pruning what may not go", 20_000);
    assert_eq!(outbox.wake_waiting("b", None).await.unwrap(), 0);
    watched.assert_bounded("waking", 2_000);
}

/// All there is at once, for those who want it so.
async fn the_largest_limit_is_no_trap(db: Database) {
    for n in 0..3 {
        db.put("a", &n.to_string()).await;
    }
    for lane in [Some("a"), None] {
        let page = db.outbox.list(Filter { limit: u32::MAX, ..of(lane, None) }).await.unwrap();
        assert_eq!((page.items.len(), page.next), (3, None));
    }
}

async fn all_of(outbox: &Outbox, mut filter: Filter) -> Vec<i64> {
    let mut ids: Vec<i64> = Vec::new();
    loop {
        let Page { items, next } = outbox.list(filter.clone()).await.unwrap();
        ids.extend(items.iter().map(|m| m.id));
        match next {
            Some(next) => assert!(filter.before.is_none_or(|before| next < before), "{filter:?} goes on at {next}"),
            None => return ids,
        }
        filter.before = next;
    }
}

/// One lane that lies deep below another, one that is small, and one in the middle of which many are gone.
async fn pages_follow_each_other_through_all_there_is(db: Database) {
    fill(&db, "a", 30_000, 14_000).await;
    fill(&db, "brief", 40, 20).await;
    fill(&db, "b", 130_000, 60_000).await;
    db.raw().await.run("DELETE FROM outbox WHERE lane = 'b' AND id % 400 <> 3").await.unwrap();
    let mut held: BTreeSet<i64> = db.claim("a", "w", 100).await.iter().map(|m| m.id).collect();
    // More is held of one of its eight shards than a look at the head would tell.
    fill(&db, "sharded", 2_000, 0).await;
    held.extend(db.claim("sharded", "w", 1_600).await.iter().map(|m| m.id));
    assert!(held.len() > 1_500, "{}", held.len());
    for lane in [Some("a"), Some("b"), Some("brief"), Some("sharded"), None] {
        for status in STATUSES {
            for target in [None, Some("t3")] {
                let filter = Filter { target: target.map(str::to_owned), limit: 1000, ..of(lane, status) };
                let found = all_of(&db.outbox, filter).await;
                let mut wanted: Vec<i64> = Vec::new();
                for (table, of_status) in [("outbox", "1 = 1"), ("outbox_done", "status = ?")] {
                    let mut sql = format!("SELECT id FROM {table} WHERE 1 = 1");
                    sql.push_str(&lane.map_or(String::new(), |lane| format!(" AND lane = '{lane}'")));
                    sql.push_str(&target.map_or(String::new(), |target| format!(" AND target = '{target}'")));
                    let of_status = match status {
                        Some(Status::Sent | Status::Dead) if table == "outbox" => continue,
                        Some(Status::Pending | Status::Leased) if table == "outbox_done" => continue,
                        Some(ended @ (Status::Sent | Status::Dead)) => {
                            of_status.replace('?', &format!("'{}'", ended.as_str()))
                        }
                        _ => "1 = 1".to_owned(),
                    };
                    for row in db.sql(&format!("{sql} AND {of_status}")).await {
                        wanted.push(row.int(0).unwrap());
                    }
                }
                match status {
                    Some(Status::Leased) => wanted.retain(|id| held.contains(id)),
                    Some(Status::Pending) => wanted.retain(|id| !held.contains(id)),
                    _ => {}
                }
                wanted.sort_unstable_by(|a, b| b.cmp(a));
                assert!(found == wanted, "{lane:?} {status:?} {target:?}: {} of {}", found.len(), wanted.len());
            }
        }
    }
}
