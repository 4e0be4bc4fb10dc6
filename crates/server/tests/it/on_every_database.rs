//! What holds whatever the database is.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::home::{Home, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

macro_rules! on_every_database {
    ($($case:ident),* $(,)?) => {
        mod sqlite { $(#[test] fn $case() { super::$case(super::Home::on(super::Database::sqlite())) })* }
        mod postgres { $(#[test] fn $case() { super::$case(super::Home::on(super::Database::postgres())) })* }
        mod mariadb { $(#[test] fn $case() { super::$case(super::Home::on(super::Database::mysql())) })* }
    };
}

on_every_database!(
    migrate_says_what_it_runs,
    a_message_from_enqueue_to_sent,
    keys_answer_exists_and_differs,
    keys_that_look_alike_are_different,
    what_died_comes_back_by_requeue,
    lines_of_json_in_bulk,
    a_bad_line_stops_the_run,
    lists_go_page_by_page,
    purge_deletes_what_ended,
    a_lease_is_released_by_hand,
    a_newer_schema_is_left_alone,
    fewer_shards_strand_nobody,
    sigterm_leaves_nothing_leased,
);

/// A home that is ready, with lanes that need no destination.
fn ready(home: Home) -> Home {
    home.write("postrider.toml", "[lane.quiet]\ncourier = \"noop\"\n[lane.other]\ncourier = \"noop\"\n");
    home.run(&["migrate"]).done();
    home
}

fn with_receiver(home: &Home, url: &str, more: &str) {
    home.write("postrider.toml", &format!("[lane.invoices]\ncourier = \"http\"\nurl = \"{url}\"\n{more}"));
    home.run(&["migrate"]).done();
}

fn migrate_says_what_it_runs(home: Home) {
    let pending = home.run(&["migrate", "--check", "--json"]).ended(1).json()["pending"].clone();
    assert_eq!(pending[0], "V001__outbox");
    assert!(!home.path("postrider.db").exists(), "a check creates nothing");
    if home.database.is_server() {
        home.run(&["enqueue", "log", "--payload", "x"]).refused(2, &["postrider migrate"]);
        home.run(&["worker", "--once"]).refused(2, &["postrider migrate"]);
        home.run(&["outbox", "stats"]).refused(2, &["postrider migrate"]);
    }
    assert_eq!(home.run(&["migrate", "--json"]).done().json()["ran"], pending);
    assert_eq!(home.run(&["migrate", "--check", "--json"]).done().json(), json!({ "pending": [] }));
    assert!(home.run(&["migrate"]).done().stdout.contains("up to date"));
}

fn a_message_from_enqueue_to_sent(home: Home) {
    let receiver = Receiver::start(|_| Some(200));
    with_receiver(&home, &receiver.url, "headers = { X-Source = \"test\" }");
    let id = home.enqueue(&["invoices", "--payload", "{\"invoice\":7}", "--target", "erp"]);
    let stats = home.stats("invoices");
    assert_eq!(
        (&stats["pending"], &stats["leased"], &stats["sent"], &stats["dead"]),
        (&json!(1), &json!(0), &json!(0), &json!(0))
    );
    assert!(stats["oldest_due_seconds"].is_number());

    let report = home.run(&["worker", "--once", "--json"]).done().json();
    assert_eq!((&report["lanes"]["invoices"]["sent"], &report["lanes"]["log"]["sent"]), (&json!(1), &json!(0)));
    let message = home.show(id);
    assert_eq!(
        (&message["status"], &message["lease_token"], &message["target"]),
        (&json!("sent"), &json!(1), &json!("erp"))
    );
    let promised =
        ["id", "lane", "status", "attempts", "crashes", "lease_token", "due_at", "lease_until", "locked_by", "target"]
            .into_iter()
            .chain([
                "payload_sha",
                "result_ref",
                "last_error_code",
                "last_error",
                "correlation_id",
                "created_at",
                "finished_at",
                "history",
            ]);
    for key in promised {
        assert!(message.get(key).is_some(), "{key} is missing: {message}");
    }

    let [request] = receiver.requests().try_into().unwrap();
    assert_eq!(request.body, "{\"invoice\":7}");
    assert_eq!(request.header("content-type"), "application/json");
    assert_eq!(request.header("x-source"), "test");
    assert_eq!(request.header("postrider-attempt"), "1");
    assert!(request.header("idempotency-key").ends_with(&format!("-invoices-{id}")));
    assert_eq!(home.run(&["outbox", "show", &id.to_string(), "--payload"]).done().stdout, "{\"invoice\":7}");
}

fn keys_answer_exists_and_differs(home: Home) {
    let home = ready(home);
    let enqueue = |lane: &str, payload: &str| home.run(&["enqueue", lane, "--payload", payload, "--key", "k"]);
    assert_eq!(enqueue("quiet", "a").done().stdout, "{\"id\":1,\"outcome\":\"created\"}\n");
    assert_eq!(enqueue("quiet", "a").done().stdout, "{\"id\":1,\"outcome\":\"exists\"}\n");
    let differs = enqueue("quiet", "b").ended(1);
    assert_eq!(differs.stdout, "{\"id\":1,\"outcome\":\"differs\"}\n");
    assert!(differs.stderr.starts_with("error: the key belongs to another message"), "{differs:?}");
    assert_eq!(enqueue("other", "b").done().json()["outcome"], "created", "another lane has keys of its own");

    let active = |payload: &str| home.run(&["enqueue", "quiet", "--payload", payload, "--active-key", "one at a time"]);
    assert_eq!(active("x").done().json()["outcome"], "created");
    assert_eq!(active("x").done().json()["outcome"], "exists");
    assert_eq!(active("y").ended(1).json()["outcome"], "differs");
    home.run(&["worker", "--once"]).done();
    assert_eq!(active("y").done().json()["outcome"], "created", "the holder has ended");
    assert_eq!(enqueue("quiet", "a").done().json()["outcome"], "exists", "a key outlives its message");
}

fn keys_that_look_alike_are_different(home: Home) {
    let home = ready(home);
    for (n, key) in ["key", "KEY", "key ", " key", "kéy", "ke\u{301}y"].iter().enumerate() {
        home.enqueue(&["quiet", "--payload", &n.to_string(), "--key", key]);
        home.enqueue(&["quiet", "--payload", &n.to_string(), "--active-key", key]);
    }
    assert_eq!(home.stats("quiet")["pending"], 12);
}

fn what_died_comes_back_by_requeue(home: Home) {
    let mended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let fixed = mended.clone();
    let receiver = Receiver::start(move |request| match request.body.as_str() {
        _ if fixed.load(std::sync::atomic::Ordering::SeqCst) => Some(200),
        "later" => Some(503),
        _ => Some(422),
    });
    with_receiver(&home, &receiver.url, "backoff = { kind = \"doubling\", base_sec = 3600 }");
    let dead: Vec<i64> = (0..3).map(|n| home.enqueue(&["invoices", "--payload", &n.to_string()])).collect();
    let later = home.enqueue(&["invoices", "--payload", "later"]);
    let once = home.run(&["worker", "--once"]).ended(1);
    assert!(once.stdout.starts_with("LANE"), "{once:?}");
    let message = home.show(dead[0]);
    assert_eq!((&message["status"], &message["last_error_code"]), (&json!("dead"), &json!("HTTP_422")));
    assert_eq!((&message["history"][0]["kind"], &message["history"][0]["attempt"]), (&json!("dead"), &json!(1)));
    assert_eq!(home.show(later)["attempts"], 1);

    let dry = home.run(&["outbox", "requeue", "--lane", "invoices", "--dead", "--dry-run", "--json"]).done().json();
    assert_eq!((&dry["count"], &dry["ids"]), (&json!(3), &json!(dead)));
    let one =
        home.run(&["outbox", "requeue", &dead[0].to_string(), &later.to_string(), "999999", "--json"]).ended(1).json();
    let outcomes: Vec<&Value> = one["results"].as_array().unwrap().iter().map(|r| &r["outcome"]).collect();
    assert_eq!(
        (&one["requeued"], outcomes),
        (&json!(1), vec![&json!("requeued"), &json!("not_dead"), &json!("not_dead")])
    );
    let all = home.run(&["outbox", "requeue", "--lane", "invoices", "--dead", "--json"]).done().json();
    assert_eq!(all["requeued"], 2);

    mended.store(true, std::sync::atomic::Ordering::SeqCst);
    home.run(&["worker", "--once"]).done();
    let stats = home.stats("invoices");
    assert_eq!((&stats["sent"], &stats["dead"], &stats["pending"]), (&json!(3), &json!(0), &json!(1)));
    let keys = |body: &str| -> Vec<String> {
        receiver.requests().iter().filter(|r| r.body == body).map(|r| r.header("idempotency-key").to_owned()).collect()
    };
    let [first, second] = keys("0").try_into().unwrap();
    assert_eq!(first, second, "the same message, before and after its requeue");
}

fn lines_of_json_in_bulk(home: Home) {
    let home = ready(home);
    let mut lines = String::new();
    for n in 0..2500 {
        lines.push_str(&format!(
            "{{\"payload\": {{\"b\": {n}, \"a\": 1.50}}, \"key\": \"k{n}\", \"target\": \"t\"}}\n\n"
        ));
    }
    home.write("messages.ndjson", &lines);
    let first = home.run(&["enqueue", "quiet", "--ndjson", "messages.ndjson", "--json"]).done().json();
    assert_eq!((&first["lines"], &first["created"], &first["exists"]), (&json!(2500), &json!(2500), &json!(0)));
    let payload = home.run(&["outbox", "show", "1", "--payload"]).done().stdout;
    assert_eq!(payload, "{\"b\": 0, \"a\": 1.50}", "JSON is sent as it was written");

    let more =
        "{\"payload\": \"text\", \"delay\": \"1h\", \"headers\": {\"x\": \"y\"}}\n{\"payload\": 5, \"key\": \"k0\"}\n";
    let mixed = home.run_with(&["enqueue", "quiet", "--ndjson", "-"], more).ended(1);
    assert_eq!(mixed.stdout, "2 messages: 1 created, 1 differ\n");
    assert!(mixed.stderr.contains("line 2"), "{mixed:?}");
    assert!(
        home.run(&["enqueue", "quiet", "--ndjson", "messages.ndjson"]).done().stdout.contains("2500 already there")
    );
    home.run(&["worker", "--once"]).done();
    let stats = home.stats("quiet");
    assert_eq!((&stats["sent"], &stats["pending"]), (&json!(2500), &json!(1)), "what is delayed stays");
}

fn a_bad_line_stops_the_run(home: Home) {
    let home = ready(home);
    let good = "{\"payload\": 1}\n".repeat(1200);
    for (bad, says) in [
        ("{\"payload\": ", "EOF"),
        ("{\"payload\": 1, \"keys\": \"x\"}", "unknown field `keys`"),
        ("{\"key\": \"x\"}", "missing field `payload`"),
        ("{\"payload\": 1, \"delay\": \"soon\"}", "500ms, 5s"),
        (&format!("{{\"payload\": 1, \"key\": \"{}\"}}", "k".repeat(256)), "at most 255"),
    ] {
        let before = home.stats("quiet")["pending"].as_u64().unwrap();
        let answer = home.run_with(&["enqueue", "quiet", "--ndjson", "-"], &format!("{good}{bad}\n{good}"));
        answer.refused(2, &["line 1201: ", says, "1200 lines committed before it"]);
        assert_eq!(home.stats("quiet")["pending"].as_u64().unwrap(), before + 1200);
    }
    let json =
        home.run_with(&["enqueue", "quiet", "--ndjson", "-", "--json"], "{\"payload\": 1}\nno\n").ended(2).json();
    assert_eq!(json, json!({ "lines": 1, "created": 1, "exists": 0, "differs": 0, "stopped_at_line": 2 }));
}

fn lists_go_page_by_page(home: Home) {
    let home = ready(home);
    home.run_with(&["enqueue", "quiet", "--ndjson", "-"], &"{\"payload\": 1}\n".repeat(5)).done();
    home.enqueue(&["other", "--payload", "x"]);
    let page = |args: &[&str]| home.run(&[&["outbox", "list", "--json"], args].concat()).done().json();
    let ids = |page: &Value| -> Vec<i64> {
        page["items"].as_array().unwrap().iter().map(|m| m["id"].as_i64().unwrap()).collect()
    };
    let first = page(&["--lane", "quiet", "--limit", "3"]);
    assert_eq!((ids(&first), &first["next_cursor"]), (vec![5, 4, 3], &json!("3")));
    let second = page(&["--lane", "quiet", "--limit", "3", "--before", "3"]);
    assert_eq!((ids(&second), &second["next_cursor"]), (vec![2, 1], &Value::Null));
    assert_eq!(ids(&page(&["--status", "sent"])), Vec::<i64>::new());
    assert_eq!(ids(&page(&[])).len(), 6);
    home.run(&["outbox", "list", "--lane", "qiet"]).refused(2, &["no lane `qiet`", "quiet"]);
    home.run(&["outbox", "list", "--status", "lost"]).refused(2, &["pending, leased, sent or dead"]);
}

fn purge_deletes_what_ended(home: Home) {
    let home = ready(home);
    home.run_with(&["enqueue", "quiet", "--ndjson", "-"], &"{\"payload\": 1}\n".repeat(1500)).done();
    home.run(&["worker", "--once"]).done();
    home.enqueue(&["quiet", "--payload", "live"]);
    let purge = |args: &[&str]| home.run(&[&["outbox", "purge", "--json"], args].concat()).done().json();
    assert_eq!(purge(&["--older-than", "7d"])["messages"], 0);
    assert_eq!(purge(&["--older-than", "0", "--dry-run"]), json!({ "messages": 1500, "keys": 0, "dry_run": true }));
    assert_eq!(home.stats("quiet")["sent"], 1500);
    assert_eq!(purge(&["--older-than", "0"])["messages"], 1500);
    let stats = home.stats("quiet");
    assert_eq!((&stats["sent"], &stats["pending"]), (&json!(0), &json!(1)));
    home.run(&["outbox", "purge"]).refused(2, &["--older-than"]);
}

fn a_lease_is_released_by_hand(home: Home) {
    let receiver = Receiver::start(|_| None);
    with_receiver(&home, &receiver.url, "timeout_ms = 600000\nlock_lease_sec = 600");
    let id = home.enqueue(&["invoices", "--payload", "x"]);
    let worker = home.start(&["worker"]);
    wait_until("the worker holds the message", || home.stats("invoices")["leased"] == 1);
    worker.signal(Signal::KILL);
    worker.ends_within(Duration::from_secs(10));
    assert_eq!(home.show(id)["status"], "leased", "nobody told the database");

    let none = home.run(&["outbox", "release", "--expired", "--json"]).done().json();
    assert_eq!(none, json!({ "released": 0, "ids": [] }), "its lease still runs");
    let dry = home.run(&["outbox", "release", &id.to_string(), "--dry-run", "--json"]).done().json();
    assert_eq!(dry["ids"], json!([id]));
    let released = home.run(&["outbox", "release", &id.to_string(), "--json"]).done().json();
    assert_eq!(released, json!({ "released": 1, "ids": [id] }));
    let message = home.show(id);
    assert_eq!(
        (&message["status"], &message["locked_by"], &message["maybe_sent"]),
        (&json!("pending"), &Value::Null, &json!(true))
    );
    home.run(&["outbox", "release", "999999"]).ended(1);
}

fn a_newer_schema_is_left_alone(home: Home) {
    let home = ready(home);
    let folder = home.path("");
    home.database
        .sql(&folder, "INSERT INTO postrider_migrations (version, name, steps) VALUES (999, 'V999__later', 0)");
    for args in [
        &["migrate"][..],
        &["migrate", "--check"],
        &["enqueue", "quiet", "--payload", "x"],
        &["worker", "--once"],
        &["outbox", "stats"],
    ] {
        home.run(args).refused(2, &["999", "run a newer postrider"]);
    }
}

fn fewer_shards_strand_nobody(home: Home) {
    let shards = |n: u32| {
        home.write("postrider.toml", &format!("[lane.quiet]\ncourier = \"noop\"\nshards = {n}\n"));
    };
    shards(4);
    home.run(&["migrate"]).done();
    for key in 0..20 {
        home.enqueue(&["quiet", "--payload", "x", "--key", &key.to_string()]);
    }
    shards(1);
    // A command with another configuration leaves the rules of those who serve the lane as they are.
    home.run(&["outbox", "stats"]).done();
    assert_eq!(home.number("SELECT shards FROM outbox_lanes WHERE lane = 'quiet'"), 4);
    home.run(&["worker", "--once"]).done();
    let stats = home.stats("quiet");
    assert_eq!((&stats["pending"], &stats["sent"]), (&0.into(), &20.into()), "{stats}");
}

fn sigterm_leaves_nothing_leased(home: Home) {
    let receiver = Receiver::start(|request| (request.body != "hang").then_some(200));
    with_receiver(&home, &receiver.url, "timeout_ms = 600000\n[outbox]\ndrain_timeout_sec = 3\n");
    home.run_with(&["enqueue", "invoices", "--ndjson", "-"], &"{\"payload\": \"quick\"}\n".repeat(300)).done();
    home.run_with(&["enqueue", "invoices", "--ndjson", "-"], &"{\"payload\": \"hang\"}\n".repeat(100)).done();
    let worker = home.start(&["worker", "--worker-id", "tired"]);
    wait_until("only hanging deliveries are under way", || {
        home.stats("invoices")["sent"] == 300 && receiver.requests().iter().filter(|r| r.body == "hang").count() >= 10
    });
    let held = home.run(&["outbox", "list", "--status", "leased", "--limit", "1", "--json"]).done().json();
    assert!(held["items"][0]["locked_by"].as_str().unwrap().starts_with("tired:"), "{held}");
    worker.signal(Signal::TERM);
    let answer = worker.ends_within(Duration::from_secs(3 + 5)).done();
    assert!(answer.stderr.contains("worker started") && answer.stderr.contains("stopping"), "{answer:?}");
    let stats = home.stats("invoices");
    assert_eq!((&stats["leased"], &stats["pending"], &stats["dead"]), (&json!(0), &json!(100), &json!(0)));
}
