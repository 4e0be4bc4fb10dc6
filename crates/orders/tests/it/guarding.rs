//! What the database itself refuses, whoever asks.

use postrider_orders::Idempotency;

use crate::harness::{Ground, on_every_store};

on_every_store!(the_ledger_guards_itself);

async fn the_ledger_guards_itself(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("done").await;
    home.work_until("done", "succeeded").await;
    home.place("open").await;
    let key = |key: &str| format!("WHERE idempotency_key = '{key}'");
    let refused = [
        format!("UPDATE idempo_ledger SET status = 'failed' {}", key("done")),
        format!(
            "UPDATE idempo_ledger SET status = 'in_progress', expires_at = NULL, response_payload_json = NULL {}",
            key("done")
        ),
        format!("UPDATE idempo_ledger SET response_payload_json = '{{}}' {}", key("done")),
        format!("UPDATE idempo_ledger SET http_status = 500 {}", key("done")),
        format!("UPDATE idempo_ledger SET request_digest = 'x' {}", key("open")),
        format!("UPDATE idempo_ledger SET idempotency_key = 'other' {}", key("open")),
        format!("UPDATE idempo_ledger SET status = 'lost' {}", key("open")),
        "DELETE FROM idempo_ledger".to_owned(),
        "UPDATE ledger_events SET actor = 'nobody'".to_owned(),
        "DELETE FROM ledger_events".to_owned(),
    ];
    let mut refused = refused.to_vec();
    let columns = "idempotency_key, request_digest, status, first_seen_at, last_seen_at";
    match home.outbox.store().dialect().name() {
        "postgres" => refused.extend(["TRUNCATE idempo_ledger".to_owned(), "TRUNCATE ledger_events".to_owned()]),
        dialect => {
            let verb = if dialect == "sqlite" { "INSERT OR REPLACE" } else { "REPLACE" };
            refused.push(format!(
                "{verb} INTO idempo_ledger ({columns}) SELECT {columns} FROM (SELECT idempotency_key, 'x' AS request_digest, 'in_progress' AS status, first_seen_at, last_seen_at FROM idempo_ledger {}) AS old",
                key("done")
            ));
            refused.push(format!(
                "{verb} INTO ledger_events (id, key_hash, to_status, actor, at) SELECT id, 'x', 'y', 'z', at FROM (SELECT id, at FROM ledger_events) AS old"
            ));
        }
    }
    let before = (home.entry("done").await, home.entry("open").await);
    for sql in refused {
        assert!(home.execute(&sql).await.is_err(), "{sql}");
    }
    assert_eq!((home.entry("done").await, home.entry("open").await), before);
}
