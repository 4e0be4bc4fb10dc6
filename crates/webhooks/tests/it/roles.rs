//! Roles: every role tries every operation on every table, and gets exactly what is told of it.

use mysql_async::prelude::Queryable;
use postrider_webhooks::roles::ROLES;

use crate::harness::{mysql, postgres, sqlite};

const TABLES: [&str; 14] = [
    "events",
    "subscriptions",
    "subscription_gates",
    "webhook_delivery_sagas",
    "webhook_attempts",
    "webhook_results",
    "dead_letters",
    "replays",
    "webhook_state",
    "outbox",
    "outbox_done",
    "outbox_attempts",
    "outbox_keys",
    "write_audit",
];

/// A column of each table that somebody might update, and which no column right names.
fn column(table: &str) -> &'static str {
    match table {
        "events" => "event_type",
        "subscription_gates" => "failures",
        "webhook_state" => "value",
        "webhook_attempts" | "webhook_results" => "error_code",
        "outbox" | "outbox_done" => "target",
        "outbox_attempts" => "code",
        "outbox_keys" => "digest",
        "dead_letters" => "final_error_code",
        "write_audit" => "reason",
        _ => "status",
    }
}

/// Every operation on a table, and the right it needs. None of them finds a row: it is the permission that is tried.
fn operations(table: &str) -> Vec<(&'static str, String)> {
    let column = column(table);
    let mut all = vec![
        ("SELECT", format!("SELECT * FROM {table} WHERE 1 = 0")),
        ("INSERT", format!("INSERT INTO {table} ({column}) SELECT 'x' FROM (SELECT 1 AS one) AS t WHERE 1 = 0")),
        ("UPDATE", format!("UPDATE {table} SET {column} = NULL WHERE 1 = 0")),
        ("DELETE", format!("DELETE FROM {table} WHERE 1 = 0")),
    ];
    if table == "outbox" {
        all.push(("UPDATE(due_at)", "UPDATE outbox SET due_at = CURRENT_TIMESTAMP WHERE 1 = 0".to_owned()));
    }
    if table == "dead_letters" {
        all.push(("UPDATE(requeued_saga_id)", "UPDATE dead_letters SET requeued_saga_id = 1 WHERE 1 = 0".to_owned()));
    }
    all
}

/// What the role should be allowed; a WHERE needs no right to SELECT here, since it names no column.
fn allowed(role: &str, table: &str, right: &str) -> bool {
    let role = ROLES.iter().find(|r| r.name == role).unwrap();
    let rights = role.rights.iter().find(|(name, _)| *name == table).map_or(&[][..], |(_, rights)| rights);
    let whole = right.split('(').next().unwrap();
    rights.contains(&right) || rights.contains(&whole)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_roles_may_what_is_told_and_nothing_else() {
    let home = postgres().await;
    home.webhooks.make_roles().await.unwrap();
    home.webhooks.make_roles().await.unwrap();
    let (client, connection) = tokio_postgres::connect(&home.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    for role in &ROLES {
        client.batch_execute(&format!("SET ROLE {}", role.name)).await.unwrap();
        for table in TABLES {
            for (right, sql) in operations(table) {
                // Of a literal the type must fit; it is planned, not run.
                let sql = sql.replace("SELECT 'x'", "SELECT NULL");
                let answer = client.batch_execute(&format!("EXPLAIN {sql}")).await;
                let denied =
                    answer.as_ref().err().and_then(|e| e.as_db_error()).is_some_and(|e| e.code().code() == "42501");
                // EXPLAIN of a statement checks its rights when the executor starts.
                assert_eq!(!denied, allowed(role.name, table, right), "{} {right} {table}: {answer:?}", role.name);
            }
        }
        client.batch_execute("RESET ROLE").await.unwrap();
    }
    for role in &ROLES {
        client.batch_execute(&format!("DROP OWNED BY {}", role.name)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_roles_may_what_is_told_and_nothing_else() {
    let home = mysql().await;
    home.webhooks.make_roles().await.unwrap();
    home.webhooks.make_roles().await.unwrap();
    let mut admin = mysql_async::Conn::from_url(&home.url).await.unwrap();
    let user = format!("tester_{}", std::process::id());
    admin.query_drop(format!("CREATE OR REPLACE USER '{user}'@'%' IDENTIFIED BY 'secret'")).await.unwrap();
    let mut url = url::Url::parse(&home.url).unwrap();
    url.set_username(&user).unwrap();
    url.set_password(Some("secret")).unwrap();
    for role in &ROLES {
        admin.query_drop(format!("GRANT {} TO '{user}'@'%'", role.name)).await.unwrap();
        // Only a role that is the user's default is in force when a database is chosen at the connect.
        admin.query_drop(format!("SET DEFAULT ROLE {} FOR '{user}'@'%'", role.name)).await.unwrap();
        let mut conn = mysql_async::Conn::from_url(url.as_str()).await.unwrap();
        for table in TABLES {
            for (right, sql) in operations(table) {
                let answer = conn.query_drop(&sql).await;
                // 1142, 1143: denied on the table, on a column.
                let denied = matches!(&answer, Err(mysql_async::Error::Server(e)) if matches!(e.code, 1142 | 1143));
                assert_eq!(!denied, allowed(role.name, table, right), "{} {right} {table}: {answer:?}", role.name);
            }
        }
        conn.disconnect().await.unwrap();
        admin.query_drop(format!("REVOKE {} FROM '{user}'@'%'", role.name)).await.unwrap();
    }
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_has_none() {
    assert_eq!(sqlite().await.webhooks.make_roles().await.unwrap_err().kind, postrider::error::Kind::Invalid);
}
