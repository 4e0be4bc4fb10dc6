//! `docs/sql.md` as it stands: its statements are taken from the file and given to `psql`, `mariadb` and Python, and the
//! library must agree with what they wrote.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use postrider::store::{Filter, Shown};
use postrider::{Enqueued, LaneRules, Lanes, NewMessage, Outbox, Worker, couriers};

use proving::kit::scratch::{self, Scratch};

const DOCS: &str = include_str!("../../../../docs/sql.md");
const SHARDS: u32 = 8;

/// The fenced blocks after `<!-- run: WHAT -->`.
fn blocks(what: &str) -> Vec<&'static str> {
    let marker = format!("<!-- run: {what} -->\n```");
    let found: Vec<&str> = DOCS.split(&marker).skip(1).map(fenced).collect();
    assert!(!found.is_empty(), "docs/sql.md has nothing to run with {what}");
    found
}

/// What follows an opening fence, without the language's name.
fn fenced(text: &'static str) -> &'static str {
    let body = text.split_once('\n').map_or("", |(_, body)| body);
    body.split("```").next().unwrap_or_default()
}

/// Runs a program and answers what it printed.
fn run(program: &str, arguments: &[&str], input: &str) -> String {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("`{program}` cannot be run ({e}); this test needs it"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program}: {errors}\n{printed}\n{input}");
    printed.into_owned()
}

/// A migrated database with the documentation's lane and the table of its application.
async fn shop(database: &Scratch) -> Outbox {
    let lane = LaneRules { shards: SHARDS, ..LaneRules::default() };
    let outbox = Outbox::open(&database.url, Lanes::new().with("emails", lane)).await.unwrap();
    outbox.migrate().await.unwrap();
    outbox
}

const ORDERS: &str = "CREATE TABLE orders (id BIGINT PRIMARY KEY, item VARCHAR(100) NOT NULL);\n";

fn order(number: u32) -> NewMessage {
    NewMessage::new("emails", format!(r#"{{"order": {number}}}"#)).key(format!("order-{number}"))
}

/// The library finds `message` there: same content, so same digest; and it lies in the shard a worker expects.
async fn is_known(outbox: &Outbox, message: NewMessage) -> Shown {
    let (text, shard) = (format!("{message:?}"), message.shard(SHARDS));
    let other = NewMessage { payload: "something else".into(), ..message.clone() };
    let payload = message.payload.clone();
    let entries = outbox.enqueue(vec![message, other]).await.unwrap();
    assert_eq!(entries[0].outcome, Enqueued::Exists, "{text}");
    assert_eq!((entries[1].outcome, entries[1].id), (Enqueued::Differs, entries[0].id), "{text}");
    let (shown, _) = outbox.show(entries[0].id).await.unwrap().unwrap();
    assert_eq!(shown.shard_id, shard, "{text}");
    assert_eq!(outbox.payload(shown.id).await.unwrap().unwrap(), payload, "{text}");
    shown
}

/// The documented message with every option.
async fn the_full_one_is_known(outbox: &Outbox) {
    let full = NewMessage::new("emails", Bytes::from_static(b"\x00\xff")).key("order-8").target("shop");
    let shown = is_known(outbox, full).await;
    assert_eq!(shown.active_key.as_deref(), Some("customer-3"));
    assert_eq!(shown.content_type.as_deref(), Some("application/octet-stream"));
    assert_eq!(shown.correlation_id.as_deref(), Some("request-99"));
    assert!((29..=30).contains(&shown.due_at.since(shown.created_at).as_secs()), "{shown:?}");
    let left = shown.deliver_before.unwrap().since(shown.created_at);
    assert!(left.abs_diff(Duration::from_secs(24 * 3600)) < Duration::from_secs(60), "{shown:?}");
}

/// A worker delivers what is due: this many messages, nothing is wrong with any of them.
async fn a_worker_delivers(outbox: &Outbox, count: usize) {
    Worker::new(outbox.clone()).lane("emails", couriers::Noop).once().run(std::future::pending()).await.unwrap();
    let sent = Filter { status: Some(postrider::store::Status::Sent), limit: 100, ..Filter::default() };
    assert_eq!(outbox.list(sent).await.unwrap().items.len(), count);
}

#[tokio::test]
async fn postgres_statements_work_in_psql() {
    let database = scratch::postgres().await;
    let outbox = shop(&database).await;
    let psql = |sql: &str| run("psql", &["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", &database.url], sql);
    psql(ORDERS);
    for block in blocks("psql") {
        let printed = psql(block);
        assert!(printed.contains("|created"), "{printed}\n{block}");
    }
    is_known(&outbox, order(7)).await;
    the_full_one_is_known(&outbox).await;

    let again = psql("SELECT outcome FROM postrider_enqueue('emails', '{\"order\": 7}', key => 'order-7')");
    assert_eq!(again.trim(), "exists");
    let again = psql("SELECT outcome FROM postrider_enqueue('emails', 'else', key => 'order-7')");
    assert_eq!(again.trim(), "differs");
    let headers = psql("SELECT headers FROM outbox WHERE headers IS NOT NULL");
    assert_eq!(headers.trim(), r#"[["X-Shop", "main"]]"#);
    a_worker_delivers(&outbox, 2).await;
}

#[tokio::test]
async fn the_documented_notification_arrives_at_commit() {
    let database = scratch::postgres().await;
    let _outbox = shop(&database).await;
    let (client, mut connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls).await.unwrap();
    let (sender, mut notified) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
        while let Some(Ok(message)) = messages.next().await {
            if let tokio_postgres::AsyncMessage::Notification(n) = message {
                let _ = sender.send(n.channel().to_owned());
            }
        }
    });
    client.batch_execute("LISTEN postrider").await.unwrap();
    let block = blocks("psql").into_iter().find(|b| b.contains("NOTIFY")).expect("a block with NOTIFY");
    let rolled_back = block.replace("COMMIT", "ROLLBACK");
    run("psql", &["-X", "-q", "-v", "ON_ERROR_STOP=1", &database.url], &rolled_back);
    client.batch_execute("SELECT 1").await.unwrap(); // whatever was to come has come
    assert!(notified.try_recv().is_err(), "a rollback must not notify");
    run("psql", &["-X", "-q", "-v", "ON_ERROR_STOP=1", &database.url], block);
    let channel = tokio::time::timeout(Duration::from_secs(10), notified.recv()).await.expect("no notification");
    assert_eq!(channel.as_deref(), Some("postrider"));
}

#[tokio::test]
async fn mysql_statements_work_in_the_mariadb_client() {
    let database = scratch::mysql().await;
    let outbox = shop(&database).await;
    let server = mysql_async::Opts::from_url(&database.url).unwrap();
    let mut arguments = vec![
        "--no-defaults".to_owned(),
        "--protocol=tcp".to_owned(),
        "--batch".to_owned(),
        "--skip-column-names".to_owned(),
        "--default-character-set=utf8mb4".to_owned(),
        format!("--host={}", server.ip_or_hostname()),
        format!("--port={}", server.tcp_port()),
        format!("--user={}", server.user().unwrap_or("root")),
    ];
    arguments.extend(server.pass().map(|password| format!("--password={password}")));
    arguments.extend(server.db_name().map(str::to_owned));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mariadb = |sql: &str| run("mariadb", &arguments, sql);
    mariadb(ORDERS);
    for block in blocks("mariadb") {
        let printed = mariadb(block);
        assert!(printed.contains("\tcreated"), "{printed}\n{block}");
    }
    is_known(&outbox, order(7)).await;
    the_full_one_is_known(&outbox).await;

    let call = |payload: &str| {
        mariadb(&format!(
            "CALL postrider_enqueue('emails', '{payload}', 'order-7', NULL, NULL, NULL, @i, @o); SELECT @o"
        ))
    };
    assert_eq!(call("{\"order\": 7}").trim(), "exists");
    assert_eq!(call("else").trim(), "differs");
    a_worker_delivers(&outbox, 1).await;
}

#[tokio::test]
async fn sqlite_statements_work_in_python() {
    let database = scratch::sqlite();
    let outbox = shop(&database).await;
    let file = database.url.trim_start_matches("sqlite://");
    let python = |script: &str| run("python3", &["-"], script);
    let statement = blocks("sqlite").concat();
    python(&format!(
        "import sqlite3\ndb = sqlite3.connect({file:?})\ndb.executescript({:?})",
        ORDERS.to_owned() + &statement
    ));

    let script = blocks("python").concat();
    assert_eq!(script.matches("\"app.db\"").count(), 1);
    let script = script.replace("\"app.db\"", &format!("{file:?}"));
    assert!(python(&script).contains("'created'"));
    let known = is_known(&outbox, order(17)).await;
    let more = r#"
db.execute("BEGIN IMMEDIATE")
print(enqueue(db, "emails", b'{"order": 17}', key="order-17"))
print(enqueue(db, "emails", b'else', key="order-17"))
print(enqueue(db, "emails", b'goods', key="order-18", target="shop"))
print(enqueue(db, "emails", b'goods', active_key="customer-3"))
print(enqueue(db, "emails", b'goods', active_key="customer-3"))
print(enqueue(db, "emails", b'other', active_key="customer-3"))
for lane, payload in (("nowhere", b""), ("emails", bytes(1 << 21))):
    try:
        enqueue(db, lane, payload)
    except ValueError as error:
        print(error)
db.execute("COMMIT")
"#;
    let printed = python(&(script.replace("(17, \"saddle\")", "(18, \"reins\")") + more));
    let outcomes: Vec<&str> = printed.lines().map(|l| l.split('\'').nth(1).unwrap_or(l)).collect();
    assert_eq!(outcomes[..7], ["exists", "exists", "differs", "created", "created", "exists", "differs"], "{printed}");
    assert!(outcomes[7].contains("no lane nowhere") && outcomes[8].contains("at most"), "{printed}");
    assert!(printed.starts_with(&format!("({}, ", known.id)), "{printed}");
    is_known(&outbox, NewMessage::new("emails", "goods").key("order-18").target("shop")).await;
    a_worker_delivers(&outbox, 4).await;
}

/// The snippets for drivers we do not install: at least they are Python, and they call what is tested above.
#[test]
fn every_python_snippet_parses() {
    let snippets: Vec<&str> = DOCS.split("```python").skip(1).map(|text| text.split("```").next().unwrap()).collect();
    assert_eq!(snippets.len(), 4);
    for snippet in snippets {
        run("python3", &["-c", "import ast, sys; ast.parse(sys.stdin.read())"], snippet);
    }
    for driver in ["psycopg", "pymysql", "'pg'", "mysql2/promise", "pgx.", "db.BeginTx"] {
        assert!(DOCS.contains(driver), "{driver} is shown");
    }
}
