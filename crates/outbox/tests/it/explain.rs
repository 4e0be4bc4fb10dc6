//! How the hot statements are run, on tables of 20,000 rows: one range on `idx_claim` or look-ups by primary key, nothing
//! sorted, nothing scanned. The texts are the stores' own.

use mysql_async::prelude::Queryable;
use postrider::store::{From, Mark};
use postrider::{NewMessage, Timestamp};

use crate::harness::{self, Database, Raw, claim_of, secs};

const ROWS: usize = 20_000;

/// Three lanes; half of the rows wait, some are leased, as in a lane at work.
async fn fill(db: &Database) -> Vec<i64> {
    for start in (0..ROWS).step_by(1000) {
        let batch = (start..start + 1000).map(|n| {
            let message = NewMessage::new(["a", "b", "orders"][n % 3], format!("{n:0100}"));
            if n % 2 == 0 { message } else { message.delay(secs(100_000)) }
        });
        db.outbox.enqueue(batch.collect()).await.expect("enqueue");
    }
    let leased = db.claim("a", "w", 500).await;
    assert_eq!(leased.len(), 500);
    leased.iter().map(|m| m.id).collect()
}

fn froms(ids: &[i64]) -> [From; 4] {
    let mark = Mark { due_at: Timestamp::from_micros(1_700_000_000_000_000), id: 7 };
    [
        From::Mark(None),
        From::Mark(Some(mark)),
        From::Adopt { mark: Some(mark), known: ids[..100].to_vec() },
        From::Ids(ids[..100].to_vec()),
    ]
}

// ---- SQLite ----

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_plans() {
    harness::case(harness::sqlite().await, |db| async move {
        let ids = fill(&db).await;
        let mut raw = db.raw().await;
        raw.run("ANALYZE").await.unwrap();
        let Raw::Sqlite(connection) = raw else { unreachable!() };
        let plan = |sql: &str| -> Vec<String> {
            let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).expect(sql);
            let nulls = vec![rusqlite::types::Null; statement.parameter_count()];
            let rows = statement.query_map(rusqlite::params_from_iter(nulls), |row| row.get::<_, String>(3)).unwrap();
            rows.map(Result::unwrap).collect()
        };
        for from in froms(&ids) {
            let steps = plan(&postrider::stores::sqlite::claim_sql(&from));
            if matches!(from, From::Ids(_)) {
                assert!(
                    steps.iter().any(|s| s.contains("SEARCH outbox USING INTEGER PRIMARY KEY")),
                    "{from:?} {steps:#?}"
                );
            } else {
                let wanted = "SEARCH outbox USING INDEX idx_claim (lane=? AND shard_id=? AND due_at";
                assert!(steps.iter().any(|s| s.contains(wanted)), "{steps:#?}");
                assert!(!steps.iter().any(|s| s.contains("TEMP B-TREE")), "sorted: {steps:#?}");
            }
            assert!(!steps.iter().any(|s| s.contains("SCAN outbox")), "{steps:#?}");
        }
        let steps = plan(postrider::stores::sqlite::WALK_SQL);
        assert!(
            steps[0].contains("SEARCH outbox USING INDEX idx_claim (lane=? AND shard_id=? AND due_at"),
            "{steps:#?}"
        );
        assert_eq!(steps.len(), 1, "nothing else: {steps:#?}");
    })
    .await;
}

// ---- PostgreSQL ----

/// The plan as it is for these values, and as it is once PostgreSQL plans for any values.
async fn postgres_plans_of(client: &tokio_postgres::Client, sql: &str, values: &str) -> [String; 2] {
    let mut plans = [String::new(), String::new()];
    for (plan, mode) in plans.iter_mut().zip(["force_custom_plan", "force_generic_plan"]) {
        client
            .batch_execute(&format!("DEALLOCATE ALL; SET plan_cache_mode = {mode}; PREPARE p AS {sql}"))
            .await
            .expect(sql);
        client.batch_execute(postrider::stores::postgres::BEGIN_BY_INDEX).await.expect("begin");
        let rows = client.simple_query(&format!("EXPLAIN EXECUTE p({values})")).await.expect(values);
        client.batch_execute("ROLLBACK").await.expect("roll back");
        for row in rows {
            if let tokio_postgres::SimpleQueryMessage::Row(row) = row {
                plan.push_str(row.get(0).unwrap_or_default());
                plan.push('\n');
            }
        }
    }
    plans
}

fn assert_no_scan(plan: &str) {
    assert!(!plan.contains("Seq Scan on outbox"), "{plan}");
    assert!(!plan.contains("Sort"), "{plan}");
    assert!(!plan.contains("Bitmap"), "{plan}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_plans() {
    harness::case(harness::postgres().await, |db| async move {
        let ids = fill(&db).await;
        let mut raw = db.raw().await;
        raw.run("ANALYZE").await.unwrap();
        let Raw::Postgres(client) = raw else { unreachable!() };
        let array = |n: usize| {
            let list: Vec<String> = ids[..n].iter().map(i64::to_string).collect();
            format!("'{{{}}}'", list.join(","))
        };
        for from in froms(&ids) {
            let (mark, known) = match &from {
                From::Mark(mark) => (mark.unwrap_or_default(), "'{}'".to_owned()),
                From::Adopt { mark, .. } => (mark.unwrap_or_default(), array(100)),
                From::Ids(_) => (Mark::default(), array(100)),
            };
            let values = format!("'a', 0, 'v', 256, 60000000, '{}', {}, {known}, 5, FALSE", mark.due_at, mark.id);
            let sql = postrider::stores::postgres::claim_sql(&from, "clock_timestamp()");
            for plan in postgres_plans_of(&client, &sql, &values).await {
                assert!(!plan.contains("Seq Scan on outbox"), "{from:?}\n{plan}");
                if matches!(from, From::Ids(_)) {
                    continue; // a hundred rows by primary key may be sorted
                }
                assert_no_scan(&plan);
                assert!(plan.contains("Index Scan using idx_claim on outbox"), "{plan}");
                let condition =
                    plan.lines().find(|l| l.contains("Index Cond") && l.contains("lane")).unwrap_or_default();
                for part in ["lane", "shard_id", "due_at <="] {
                    assert!(condition.contains(part), "`{part}` is no index condition:\n{plan}");
                }
            }
        }
        let sql = postrider::stores::postgres::walk_sql("clock_timestamp()");
        for plan in postgres_plans_of(&client, &sql, "'a', 0, '2026-01-01', 7, 1000").await {
            assert_no_scan(&plan);
            assert!(plan.contains("Index Scan using idx_claim on outbox"), "{plan}");
        }
        for (keep, n) in [(true, 1), (true, 500), (false, 500)] {
            let sql = postrider::stores::postgres::settle_sent_sql(keep, "clock_timestamp()");
            let nulls = format!("'{{{}}}'", vec!["NULL"; n].join(","));
            let values = format!("{}, {}, {nulls}, 'w', 'a'", array(n), array(n));
            for plan in postgres_plans_of(&client, &sql, &values).await {
                assert_no_scan(&plan);
                assert!(plan.contains("Index Scan using outbox_pkey on outbox"), "{n} rows\n{plan}");
            }
        }
    })
    .await;
}

// ---- MySQL ----

#[derive(Debug)]
struct Step {
    access: String,
    key: Option<String>,
    extra: String,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_plans() {
    harness::case(harness::mysql().await, |db| async move {
        let ids = fill(&db).await;
        let Raw::Mysql(mut conn) = db.raw().await else { unreachable!() };
        conn.query_drop("ANALYZE TABLE outbox, outbox_done").await.unwrap();
        let mut plan = async |sql: &str| -> Vec<Step> {
            let rows: Vec<mysql_async::Row> = conn.query(format!("EXPLAIN FORMAT=TRADITIONAL {sql}")).await.expect(sql);
            let text = |row: &mysql_async::Row, name: &str| row.get::<Option<String>, _>(name).flatten();
            rows.iter()
                .map(|row| Step {
                    access: text(row, "type").unwrap_or_default(),
                    key: text(row, "key"),
                    extra: text(row, "Extra").unwrap_or_default(),
                })
                .collect()
        };
        let now = "UTC_TIMESTAMP(6)";
        for from in froms(&ids) {
            let by_ids = matches!(from, From::Ids(_));
            let sql = postrider::stores::mysql::candidates_sql(&claim_of("a", "v", 100, secs(60), from), now);
            let steps = plan(&sql).await;
            assert_eq!((steps.len(), steps[0].access.as_str()), (1, "range"), "{steps:?}\n{sql}");
            if by_ids {
                assert_eq!(steps[0].key.as_deref(), Some("PRIMARY"), "{steps:?}");
            } else {
                assert_eq!(steps[0].key.as_deref(), Some("idx_claim"), "{steps:?}");
                assert!(!steps[0].extra.contains("filesort"), "{steps:?}\n{sql}");
            }
        }
        for after in [None, Some(Mark { due_at: Timestamp::from_micros(1_700_000_000_000_000), id: 7 })] {
            let steps = plan(&postrider::stores::mysql::walk_sql("a", 0, after, 1000, now)).await;
            assert_eq!((steps[0].access.as_str(), steps[0].key.as_deref()), ("range", Some("idx_claim")), "{steps:?}");
            assert!(!steps[0].extra.contains("filesort"), "{steps:?}");
        }
        // The settle touches rows by primary key only: whatever InnoDB scans, it locks.
        for n in [1, 500] {
            let list: Vec<String> = ids[..n].iter().map(i64::to_string).collect();
            let list = list.join(",");
            for sql in [
                format!("SELECT id, lease_token FROM outbox FORCE INDEX (PRIMARY) WHERE id IN ({list}) AND locked_by = X'77' AND lane = X'61' ORDER BY id FOR UPDATE"),
                format!("DELETE FROM outbox WHERE id IN ({list})"),
            ] {
                let steps = plan(&sql).await;
                assert_eq!(steps[0].key.as_deref(), Some("PRIMARY"), "{n} rows: {steps:?}");
                assert!(["range", "const"].contains(&steps[0].access.as_str()), "{n} rows: {steps:?}");
            }
        }
    })
    .await;
}
