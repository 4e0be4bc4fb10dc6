//! Roles: every role tries every operation on every table, and gets exactly what is told of it.

use std::collections::HashMap;

use mysql_async::prelude::Queryable;
use postrider_webhooks::roles::ROLES;
use postrider_webhooks::{DeadLetterFilter, NewEvent, NewSubscription, Requeued, Settings};

use crate::harness::{Home, mysql, open_migrated, postgres, settings, sqlite, wait_until, worker};
use crate::receiver::{Receiver, status_line};

const TABLES: [&str; 22] = [
    "events",
    "subscriptions",
    "subscription_gates",
    "webhook_delivery_sagas",
    "webhook_attempts",
    "webhook_results",
    "dead_letters",
    "replays",
    "webhook_state",
    "webhook_keys",
    "outbox_alerts",
    "postrider_meta",
    "postrider_migrations",
    "outbox_lanes",
    "outbox_pauses",
    "outbox",
    "outbox_done",
    "outbox_attempts",
    "outbox_dedup",
    "outbox_keys",
    "postrider_former_keys",
    "write_audit",
];

/// A column of each table that somebody might update, and which no column right names.
fn column(table: &str) -> &'static str {
    match table {
        "events" => "event_type",
        "subscription_gates" => "failures",
        "webhook_state" | "postrider_meta" => "value",
        "webhook_keys" => "fingerprint",
        "outbox_alerts" => "seen_until",
        "webhook_attempts" | "webhook_results" => "error_code",
        "outbox" | "outbox_done" | "outbox_dedup" => "target",
        "postrider_migrations" => "name",
        "outbox_lanes" => "owned_by",
        "outbox_pauses" => "lane",
        "outbox_attempts" => "code",
        "outbox_keys" | "postrider_former_keys" => "digest",
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
    let rights: Vec<&str> =
        role.all_rights().filter(|(name, _)| *name == table).flat_map(|(_, rights)| rights.iter().copied()).collect();
    let whole = right.split('(').next().unwrap();
    rights.contains(&right) || rights.contains(&whole)
}

/// What the database let a role do with a table.
type Seen = HashMap<(&'static str, &'static str, &'static str), bool>;

/// The saga's specification, §9, written out: the list in the code cannot say otherwise without this being told.
fn as_the_specification_says(seen: &Seen) {
    let may = |role: &'static str, right: &'static str, table: &'static str| seen[&(role, table, right)];
    for (table, rights) in [
        ("webhook_delivery_sagas", ["SELECT", "INSERT", "UPDATE"].as_slice()),
        ("events", &["SELECT"]),
        ("subscriptions", &["SELECT"]),
    ] {
        for right in ["SELECT", "INSERT", "UPDATE", "DELETE"] {
            assert_eq!(may("postrider_saga", right, table), rights.contains(&right), "the saga: {right} {table}");
        }
    }
    assert!(may("postrider_saga", "INSERT", "outbox"), "it makes jobs");
    for role in ROLES.iter().map(|role| role.name) {
        let moves = may(role, "UPDATE", "webhook_delivery_sagas");
        assert_eq!(moves, role == "postrider_saga", "{role}: nobody else changes a saga");
        let buries = may(role, "DELETE", "webhook_delivery_sagas");
        assert!(!buries || role == "postrider_janitor", "{role} deletes sagas");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_roles_may_what_is_told_and_nothing_else() {
    let home = postgres().await;
    home.webhooks.make_roles().await.unwrap();
    home.webhooks.make_roles().await.unwrap();
    let (client, connection) = tokio_postgres::connect(&home.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let mut seen = Seen::new();
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
                seen.insert((role.name, table, right), !denied);
                assert_eq!(!denied, allowed(role.name, table, right), "{} {right} {table}: {answer:?}", role.name);
            }
        }
        client.batch_execute("RESET ROLE").await.unwrap();
    }
    as_the_specification_says(&seen);
    for role in &ROLES {
        client.batch_execute(&format!("DROP OWNED BY {}", role.name)).await.unwrap();
    }
}

/// MariaDB and MySQL say it each in its own way.
async fn default_role(admin: &mut mysql_async::Conn, role: &str, user: &str) -> String {
    let version: String = admin.query_first("SELECT VERSION()").await.unwrap().unwrap();
    let word = if version.contains("MariaDB") { "FOR" } else { "TO" };
    format!("SET DEFAULT ROLE {role} {word} '{user}'@'%'")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_roles_may_what_is_told_and_nothing_else() {
    let home = mysql().await;
    home.webhooks.make_roles().await.unwrap();
    home.webhooks.make_roles().await.unwrap();
    let mut admin = proving::kit::mysql(&home.url).await.unwrap();
    let user = format!("tester_{}", std::process::id());
    admin.query_drop(format!("DROP USER IF EXISTS '{user}'@'%'")).await.unwrap();
    admin.query_drop(format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'secret'")).await.unwrap();
    let mut url = url::Url::parse(&home.url).unwrap();
    url.set_username(&user).unwrap();
    url.set_password(Some("secret")).unwrap();
    let mut seen = Seen::new();
    for role in &ROLES {
        admin.query_drop(format!("GRANT {} TO '{user}'@'%'", role.name)).await.unwrap();
        // Only a role that is the user's default is in force when a database is chosen at the connect.
        let sql = default_role(&mut admin, role.name, &user).await;
        admin.query_drop(sql).await.unwrap();
        let mut conn = proving::kit::mysql(url.as_str()).await.unwrap();
        for table in TABLES {
            for (right, sql) in operations(table) {
                let answer = conn.query_drop(&sql).await;
                // 1142, 1143: denied on the table, on a column.
                let denied = matches!(&answer, Err(mysql_async::Error::Server(e)) if matches!(e.code, 1142 | 1143));
                seen.insert((role.name, table, right), !denied);
                assert_eq!(!denied, allowed(role.name, table, right), "{} {right} {table}: {answer:?}", role.name);
            }
        }
        conn.disconnect().await.unwrap();
        admin.query_drop(format!("REVOKE {} FROM '{user}'@'%'", role.name)).await.unwrap();
    }
    as_the_specification_says(&seen);
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_has_none() {
    assert_eq!(sqlite().await.webhooks.make_roles().await.unwrap_err().kind, postrider::error::Kind::Invalid);
}

/// What each kind of process needs, by its name.
const PROCESSES: [(&str, &[&str]); 5] = [
    ("publisher", &["postrider_ingest", "postrider_router"]),
    ("worker", &["postrider_worker"]),
    ("orchestrator", &["postrider_saga", "postrider_admin", "postrider_janitor"]),
    ("operator", &["postrider_dead_letter"]),
    ("admin", &["postrider_admin"]),
];

/// Published, delivered, dead-lettered, brought back, resumed and pruned, each by a process that may do nothing else.
async fn a_round_in_the_roles(home: &Home, url: impl AsyncFn(&str) -> String) {
    let as_role = async |process: &str, settings: Settings| open_migrated(&url(process).await, settings).await;
    let receiver = Receiver::start(|_, nth| status_line(if nth < 2 { 500 } else { 200 }, "")).await;
    let quick = Settings { max_retry_limit: 2, ..settings() };
    let (admin, _) = as_role("admin", quick.clone()).await;
    let new = NewSubscription {
        url: receiver.url.clone(),
        event_types: vec!["*".into()],
        headers: vec![("X-Tool".into(), "nail".into())],
        ..NewSubscription::default()
    };
    let (subscription, _) = admin.subscribe(new).await.unwrap();
    let (publisher, _) = as_role("publisher", quick.clone()).await;
    let event = || NewEvent::new("a", "x").external_id("e-1");
    let published = publisher.publish(vec![event(), NewEvent::new("a", "y")]).await.unwrap();
    assert_eq!(publisher.publish(vec![event()]).await.unwrap()[0].event_id, published[0].event_id);
    let (working, outbox) = as_role("worker", quick.clone()).await;
    let _working = worker(&working, &outbox);
    let (orchestrator, _) = as_role("orchestrator", quick.clone()).await;
    let looking = orchestrator.clone();
    let moving = tokio::spawn(async move { looking.orchestrate(std::future::pending()).await });
    let ended = "webhook_delivery_sagas WHERE status IN ('Completed', 'DeadLettered')";
    wait_until("both have ended", async || home.count(ended).await == 2).await;
    let (operator, _) = as_role("operator", quick.clone()).await;
    let letters = home.webhooks.dead_letters(DeadLetterFilter::default(), None, 10).await.unwrap().items;
    for letter in &letters {
        assert!(matches!(operator.requeue(letter.id).await.unwrap(), Requeued::Created(_)));
    }
    wait_until("all are delivered", async || home.count(ended).await == 2 + letters.len() as i64).await;
    admin.pause(subscription.id).await.unwrap();
    admin.resume(subscription.id).await.unwrap();
    admin.rotate_secret(subscription.id, None, std::time::Duration::ZERO).await.unwrap();
    assert!(admin.unsubscribe(subscription.id).await.unwrap());
    moving.abort();
    let old = Settings { retention: std::time::Duration::ZERO, ..quick };
    let (janitor, _) = as_role("orchestrator", old).await;
    assert_eq!(janitor.prune().await.unwrap().1, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_roles_can_do_their_work() {
    let home = postgres().await;
    home.webhooks.make_roles().await.unwrap();
    let (client, connection) = tokio_postgres::connect(&home.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let name = |process: &str| format!("round_{process}_{}", std::process::id());
    for (process, roles) in PROCESSES {
        client.batch_execute(&format!("CREATE ROLE {} NOLOGIN", name(process))).await.unwrap();
        for role in roles {
            client.batch_execute(&format!("GRANT {role} TO {}", name(process))).await.unwrap();
        }
    }
    let mark = if home.url.contains('?') { '&' } else { '?' };
    a_round_in_the_roles(&home, async |process| format!("{}{mark}options=-c%20role%3D{}", home.url, name(process)))
        .await;
    for (process, _) in PROCESSES {
        client.batch_execute(&format!("DROP ROLE {}", name(process))).await.unwrap();
    }
    for role in &ROLES {
        client.batch_execute(&format!("DROP OWNED BY {}", role.name)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_roles_can_do_their_work() {
    let home = mysql().await;
    home.webhooks.make_roles().await.unwrap();
    let mut admin = proving::kit::mysql(&home.url).await.unwrap();
    let name = |process: &str| format!("round_{process}_{}", std::process::id());
    for (process, roles) in PROCESSES {
        let user = name(process);
        admin.query_drop(format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'secret'")).await.unwrap();
        // A user has one default role at a time: one made of the others.
        admin.query_drop(format!("CREATE ROLE all_{user}")).await.unwrap();
        for role in roles {
            admin.query_drop(format!("GRANT {role} TO all_{user}")).await.unwrap();
        }
        admin.query_drop(format!("GRANT all_{user} TO '{user}'@'%'")).await.unwrap();
        let sql = default_role(&mut admin, &format!("all_{user}"), &user).await;
        admin.query_drop(sql).await.unwrap();
    }
    a_round_in_the_roles(&home, async |process| {
        let mut url = url::Url::parse(&home.url).unwrap();
        url.set_username(&name(process)).unwrap();
        url.set_password(Some("secret")).unwrap();
        url.to_string()
    })
    .await;
    for (process, _) in PROCESSES {
        let user = name(process);
        admin.query_drop(format!("DROP USER '{user}'@'%'")).await.unwrap();
        admin.query_drop(format!("DROP ROLE all_{user}")).await.unwrap();
    }
}
