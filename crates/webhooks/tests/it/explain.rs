//! No query of the orchestrator scans a table: each goes by an index, on every database, with rows enough that the planner
//! has a choice.

use postrider::tx::Dialect;
use postrider_webhooks::{QUERIES, query};

use crate::harness::{Home, mysql, postgres, sqlite};

/// The index of each query, by name: what is due must be found by (status, next_attempt_at).
const INDEXES: [&[&str]; 8] = [
    &["webhook_results_pkey", "PRIMARY"],
    &["idx_saga_status_retry"],
    &["idx_saga_subscription"],
    &["idx_saga_subscription"],
    &["idx_saga_subscription", "idx_saga_in_progress"],
    &["idx_gates_waiting", "idx_gates_parked"],
    &["idx_saga_in_progress", "idx_saga_status", "idx_saga_status_retry"],
    &["idx_gates_held"],
];

async fn fill(home: &Home) {
    let (time, far) = match home.url.split(':').next() {
        Some("sqlite") => ("1700000000000000", "253402214400000000"),
        _ => ("'2023-11-14 00:00:00'", "'9999-12-31 00:00:00'"),
    };
    let columns =
        "event_id, subscription_id, status, attempt_count, next_attempt_at, created_at, updated_at, generation";
    // Mostly ended, as in real life.
    for status in ["Completed", "Completed", "Completed", "DeadLettered", "Pending", "PendingRetry", "InProgress"] {
        let rows: Vec<String> = (0..400)
            .map(|n| {
                let due = if n % 2 == 0 { time } else { far };
                let due = if status.starts_with("Pend") { due } else { "NULL" };
                format!("({n}, {}, '{status}', 0, {due}, {time}, {time}, (SELECT COALESCE(MAX(g.id), 0) FROM (SELECT id FROM webhook_delivery_sagas) g) + {n})", n % 20)
            })
            .collect();
        home.rows(&format!("INSERT INTO webhook_delivery_sagas ({columns}) VALUES {}", rows.join(", "))).await;
    }
    let results: Vec<String> = (0..2000).map(|n| format!("({n}, {n}, 1, 1, {time})")).collect();
    let columns = "job_id, saga_id, attempt, success, at";
    home.rows(&format!("INSERT INTO webhook_results ({columns}) VALUES {}", results.join(", "))).await;
    let gates: Vec<String> = (0..2000).map(|n| format!("({n}, {})", i32::from(n < 3))).collect();
    home.rows(&format!("INSERT INTO subscription_gates (subscription_id, parked) VALUES {}", gates.join(", "))).await;
}

/// The query with values in place of its marks.
fn with_values(sql: &str, time: &str, far: &str) -> String {
    let mut sql = sql.to_owned();
    for (mark, value) in [
        ("subscription_id = ?", "subscription_id = 7"),
        ("subscription_id > ?", "subscription_id > 0"),
        ("job_id > ?", "job_id > 0"),
        ("id > ?", "id > 0"),
        ("status = ?", "status = 'PendingRetry'"),
        ("next_attempt_at <= ?", &format!("next_attempt_at <= {time}")),
        ("next_attempt_at = ?", &format!("next_attempt_at = {far}")),
    ] {
        sql = sql.replace(mark, value);
    }
    assert!(!sql.contains('?'), "{sql}");
    sql
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_goes_by_indexes() {
    let home = sqlite().await;
    fill(&home).await;
    home.rows("ANALYZE").await;
    for (n, query) in QUERIES.into_iter().enumerate() {
        let sql = with_values(query, "1800000000000000", "253402214400000000");
        let plan: Vec<String> =
            home.rows(&format!("EXPLAIN QUERY PLAN {sql}")).await.iter().map(|row| row.text(3).unwrap()).collect();
        let plan = plan.join("; ");
        let by_key = plan.starts_with("SCAN webhook_results") && !plan.contains("TEMP B-TREE"); // in the order of its key
        assert!(
            plan.contains("USING") && (plan.contains("INDEX") || plan.contains("PRIMARY KEY")) || by_key,
            "{sql}\n{plan}"
        );
        assert!(!plan.contains("SCAN webhook_delivery_sagas") && !plan.contains("TEMP B-TREE"), "{sql}\n{plan}");
        assert!(n != 1 || plan.contains("idx_saga_status_retry (status=? AND next_attempt_at<?)"), "{sql}\n{plan}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_goes_by_indexes() {
    let home = postgres().await;
    fill(&home).await;
    for table in ["webhook_delivery_sagas", "subscription_gates", "webhook_results"] {
        home.rows(&format!("ANALYZE {table}")).await;
    }
    for (query, names) in QUERIES.into_iter().zip(INDEXES) {
        let sql = with_values(query, "'2030-01-01'", "'9999-12-31'");
        let rows = home.rows(&format!("EXPLAIN {sql}")).await;
        let plan: Vec<String> = rows.iter().map(|row| row.text(0).unwrap()).collect();
        let plan = plan.join("\n");
        assert!(!plan.contains("Seq Scan"), "{sql}\n{plan}");
        assert!(names.iter().any(|name| plan.contains(name)), "not by {names:?}:\n{sql}\n{plan}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_goes_by_indexes() {
    let home = mysql().await;
    fill(&home).await;
    home.rows("ANALYZE TABLE webhook_delivery_sagas, subscription_gates").await;
    for (n, names) in INDEXES.into_iter().enumerate() {
        let sql = with_values(&query(Dialect::Mysql, n), "'2030-01-01'", "'9999-12-31'");
        for row in home.rows(&format!("EXPLAIN FORMAT=TRADITIONAL {sql}")).await {
            let (kind, key) = (row.opt_text(3).unwrap(), row.opt_text(5).unwrap());
            assert_ne!(kind.as_deref(), Some("ALL"), "{sql}");
            // MySQL may meet in the middle of several.
            let goes_by: Vec<&str> = key.as_deref().unwrap_or("none").split(',').collect();
            assert!(goes_by.iter().any(|key| names.contains(key)), "{sql} goes by {key:?}, not by {names:?}");
        }
    }
}

/// The statements that move sagas, as they stand in the source: with values in place of their marks.
fn transitions(dialect: Dialect) -> Vec<String> {
    let mut found = Vec::new();
    for file in ["orchestrator.rs", "results.rs", "starting.rs", "sweep.rs"] {
        let text = std::fs::read_to_string(format!("{}/src/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        for (at, _) in text.match_indices("\"UPDATE ") {
            let sql = text[at + 1..].split('"').next().unwrap();
            // Elsewhere they name their table by a mark: with the index that MySQL is to go by.
            if !(sql.starts_with("UPDATE webhook_delivery_sagas ") || sql.starts_with("UPDATE {")) {
                continue;
            }
            let by_id = match dialect {
                Dialect::Mysql => "UPDATE webhook_delivery_sagas FORCE INDEX (PRIMARY) ",
                _ => "UPDATE webhook_delivery_sagas ",
            };
            let (_, rest) = sql.split_once(" SET ").unwrap();
            let table = if sql.starts_with("UPDATE {") { by_id } else { "UPDATE webhook_delivery_sagas " };
            let mut sql = format!("{table}SET {rest}").split_whitespace().collect::<Vec<_>>().join(" ");
            sql = sql.replace("{list}", "IN (3, 5, 8)").replace("id = ?", "id = 3");
            for name in ["updated_at", "next_attempt_at"] {
                for mark in ["?", "{time}", "{due}", "{now}"] {
                    sql = sql.replace(&format!("{name} = {mark}"), &format!("{name} = created_at"));
                }
            }
            sql = sql
                .replace("status = ?", "status = 'PendingRetry'")
                .replace("final_error_code = ?", "final_error_code = 'X'");
            for mark in ["?", "{int}", "{}"] {
                sql = sql.replace(&format!("attempt_count = {mark}"), "attempt_count = 1");
            }
            assert!(!sql.contains(['?', '{']), "{file}: {sql}");
            found.push(sql);
        }
    }
    assert!(found.len() >= 6, "{found:#?}");
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transitions_find_their_sagas_by_id() {
    for home in [sqlite().await, postgres().await, mysql().await] {
        fill(&home).await;
        let dialect = match home.url.split(':').next() {
            Some("sqlite") => Dialect::Sqlite,
            Some("mysql") => Dialect::Mysql,
            _ => Dialect::Postgres,
        };
        home.rows(match dialect {
            Dialect::Sqlite => "ANALYZE",
            Dialect::Postgres => "ANALYZE webhook_delivery_sagas",
            Dialect::Mysql => "ANALYZE TABLE webhook_delivery_sagas",
        })
        .await;
        for sql in transitions(dialect) {
            let (explain, column) = match dialect {
                Dialect::Sqlite => ("EXPLAIN QUERY PLAN", 3),
                Dialect::Postgres => ("EXPLAIN", 0),
                Dialect::Mysql => ("EXPLAIN FORMAT=TRADITIONAL", 5),
            };
            let rows = home.rows(&format!("{explain} {sql}")).await;
            let plan: Vec<String> = rows.iter().filter_map(|row| row.opt_text(column).unwrap()).collect();
            let (plan, key) = (
                plan.join("\n"),
                match dialect {
                    Dialect::Sqlite => "USING INTEGER PRIMARY KEY",
                    Dialect::Postgres => "Index Cond: (id ",
                    Dialect::Mysql => "PRIMARY",
                },
            );
            assert!(plan.contains(key) && !plan.contains("SCAN") && !plan.contains("Seq Scan"), "{sql}\n{plan}");
        }
    }
}
