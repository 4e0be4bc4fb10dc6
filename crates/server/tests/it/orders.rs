//! Orders as people use them: over HTTP, at a terminal, by worker processes that are killed. W-101 to W-105 are spec 003's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::api::{Response, Server};
use crate::home::{Home, Running, wait_long_until, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

/// Quick retries and short leases.
const QUICK: &str = "[lane.orders]\nbackoff_sec = [0.05]\nlock_lease_sec = 1\npoll_interval_sec = 0.05\n";

fn on_every_database(case: impl Fn(Home)) {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        let home = Home::on(database);
        case(home);
    }
}

fn order(qty: &str, tag: &str) -> String {
    let tags = if tag.is_empty() { "[]".to_owned() } else { format!("[\"paper:{tag}\"]") };
    format!(r#"{{"instrument":"AAPL","side":"BUY","qty":{qty},"price":10.50,"time_in_force":"IOC","tags":{tags}}}"#)
}

fn place(server: &Server, key: &str, body: &str) -> Response {
    server.post("/do/order", &[("idempotency-key", key), ("content-type", "application/json")], body)
}

/// Refused in the flat shape of the order API.
fn refused(response: &Response, status: u16, code: &str) -> Value {
    assert_eq!(response.status, status, "{response:#?}");
    let body = response.json();
    assert_eq!(body["error"], code, "{response:#?}");
    assert!(body["message"].as_str().is_some_and(|text| !text.is_empty()), "{response:#?}");
    body
}

fn migrated(home: &Home, config: &str) {
    home.write("postrider.toml", config);
    home.run(&["migrate"]).done();
}

fn place_by_hand(home: &Home, key: &str, body: &str) -> Value {
    home.run(&["orders", "place", "--key", key, "--payload", body, "--json"]).done().json()
}

fn ledger(home: &Home, key: &str) -> Value {
    home.run(&["orders", "ledger", key, "--json"]).done().json()
}

fn worker(home: &Home) -> Running {
    home.start_silent(&["worker", "--lane", "orders"])
}

fn status_becomes(home: &Home, key: &str, status: &str) -> Value {
    wait_until(&format!("{key} is {status}"), || ledger(home, key)["status"] == status);
    ledger(home, key)
}

fn message(home: &Home, key: &str) -> Value {
    home.show(ledger(home, key)["outbox_id"].as_i64().unwrap())
}

#[test]
fn the_routes_do_what_the_contract_says() {
    on_every_database(|home| {
        home.write("postrider.toml", QUICK);
        let server = Server::start(&home, &[]);
        let first = place(&server, "\"k-1\"", &order("3", "")).answered(201).json();
        assert_eq!((&first["status"], &first["idempotency_key"]), (&json!("accepted"), &json!("k-1")));
        assert!(first["order_id"].is_string() && first["request_digest"].as_str().unwrap().len() == 64, "{first}");
        let id = first["outbox_id"].as_i64().unwrap();
        wait_until("it is sent", || home.show(id)["status"] == "sent");

        let same = r#"{ "tags": [], "time_in_force":"IOC", "qty": 3.0, "side":"BUY", "price":10.5, "instrument":"AAPL", "trace_id":"t" }"#;
        let replayed = place(&server, "k-1", same).answered(200);
        assert_eq!(replayed.header("idempotent-replayed"), Some("true"));
        let again = place(&server, "k-1", same);
        assert_eq!(again.body, replayed.body, "byte for byte");
        let shown = server.get("/do/order/k-1").answered(200);
        assert_eq!((shown.body.as_str(), shown.header("idempotent-replayed")), (replayed.body.as_str(), None));
        let result = replayed.json();
        for field in ["status", "order_id", "instrument", "side", "requested_at", "completed_at", "idempotency_key"] {
            assert!(result[field].is_string(), "{field}: {result}");
        }
        assert_eq!(
            (&result["status"], &result["executed_qty"], &result["avg_price"]),
            (&json!("ok"), &json!(3), &json!(10.5))
        );
        assert_eq!((&result["broker"]["name"], &result["order_id"]), (&json!("paper"), &first["order_id"]));
        assert!(result["fills"][0]["px"].is_number() && result["latency_ms"]["total"].is_u64(), "{result}");

        let conflict = refused(&place(&server, "k-1", &order("4", "")), 409, "IDEMPOTENCY_CONFLICT");
        assert_eq!(conflict["idempotency_key"], "k-1");
        refused(&server.post("/do/order", &[], &order("1", "")), 400, "IDEMPOTENCY_KEY_REQUIRED");
        refused(
            &server.post("/do/order", &[("idempotency-key", "\"\"")], &order("1", "")),
            400,
            "IDEMPOTENCY_KEY_REQUIRED",
        );
        let mismatch = order("1", "").replace('}', r#","idempotency_key":"other"}"#);
        refused(&place(&server, "k-2", &mismatch), 422, "IDEMPOTENCY_MISMATCH");
        let wrong =
            refused(&place(&server, "k-2", r#"{"instrument":"AAPL","qty":0,"colour":1}"#), 422, "VALIDATION_ERROR");
        let fields: Vec<&str> =
            wrong["fields"].as_array().unwrap().iter().map(|f| f["field"].as_str().unwrap()).collect();
        assert_eq!(fields, ["side", "qty", "time_in_force", "colour"]);
        refused(&place(&server, "k-2", "{"), 400, "INVALID_JSON");
        refused(&place(&server, &"k".repeat(256), &order("1", "")), 422, "VALIDATION_ERROR");
        refused(&server.get("/do/order/k-2"), 404, "ORDER_NOT_FOUND");
        refused(&server.get("/v1/ledger/k-2"), 404, "ORDER_NOT_FOUND");
        place(&server, "k-2", &order("1", "")).answered(201);

        // A failure is stored and replayed too.
        place(&server, "k-3", &order("1", "reject")).answered(201);
        wait_until("it has failed", || server.get("/do/order/k-3").status == 409);
        let stored = server.get("/do/order/k-3");
        assert_eq!(stored.json()["reason_code"], "BROKER_REJECTED");
        let replayed = place(&server, "k-3", &order("1", "reject")).answered(409);
        assert_eq!(
            (replayed.body.as_str(), replayed.header("idempotent-replayed")),
            (stored.body.as_str(), Some("true"))
        );
        let entry = server.get("/v1/ledger/k-3").answered(200).json();
        assert_eq!(
            (&entry["status"], &entry["http_status"], &entry["replays"]),
            (&json!("failed"), &json!(409), &json!(1))
        );
        assert_eq!(entry["events"][0]["to_status"], "failed");
        assert_eq!(entry["response"], stored.json());

        server.post("/v1/outbox/orders", &[], "x").refused(409, "LANE_OWNED");
        server.post(&format!("/v1/outbox/{id}/requeue"), &[], "").answered(409);
        let metrics = server.get("/metrics").answered(200).body;
        for line in [
            "idempo_ledger_writes_total{status=\"in_progress\"} 3",
            "idempo_ledger_writes_total{status=\"failed\"} 1",
            "idempotency_conflicts_total{lane=\"orders\"} 1",
        ] {
            assert!(metrics.contains(line), "{line}\n{metrics}");
        }
        let (code, log) = server.stop();
        assert_eq!(code, 0);
        assert!(!log.contains("k-1") && !log.contains("AAPL"), "neither keys nor orders stand in the log: {log}");
    });
}

#[test]
fn ten_at_once_are_one_order() {
    on_every_database(|home| {
        home.write("postrider.toml", QUICK);
        let server = Server::start(&home, &[]);
        let answers: Vec<Response> = std::thread::scope(|scope| {
            let ask = || place(&server, "one", &order("5", ""));
            let asked: Vec<_> = (0..10).map(|_| scope.spawn(ask)).collect();
            asked.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let first: Vec<&Response> = answers.iter().filter(|answer| answer.status == 201).collect();
        assert_eq!(first.len(), 1, "{answers:#?}");
        assert_eq!(answers.iter().filter(|answer| answer.status == 200).count(), 9);
        let id = &first[0].json()["order_id"];
        assert!(answers.iter().all(|answer| answer.json()["order_id"] == *id), "the same order for all");
        wait_until("it has ended", || server.get("/do/order/one").json()["status"] == "ok");
        let result = server.get("/do/order/one").body;
        assert!((0..3).all(|_| place(&server, "one", &order("5", "")).body == result), "the same result for all");
        drop(server);
        assert_eq!(home.number("SELECT COUNT(*) FROM paper_executions"), 1, "one execution");
    });
}

#[test]
fn strict_mode_follows_the_ietf_draft() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[orders]\nadapter = \"paper\"\nstrict_idempotency = true\n");
    let server = Server::start(&home, &["--no-workers"]);
    place(&server, "k", &order("1", "")).answered(201);
    refused(&place(&server, "k", &order("1", "")), 409, "IDEMPOTENCY_IN_PROGRESS");
    refused(&place(&server, "k", &order("2", "")), 422, "IDEMPOTENCY_PAYLOAD_MISMATCH");
    home.run(&["worker", "--lane", "orders", "--once"]).done();
    assert_eq!(place(&server, "k", &order("1", "")).answered(200).header("idempotent-replayed"), Some("true"));
}

#[test]
fn tokens_and_lanes_hold_for_orders_too() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[lane.work]\ncourier = \"noop\"\n[auth]\nmode = \"always\"\n");
    let token = |args: &[&str]| {
        let made = home.run(&[&["token", "create", "--json"], args].concat()).done().json();
        format!("Bearer {}", made["token"].as_str().unwrap())
    };
    let (reader, elsewhere) = (token(&["--scope", "read"]), token(&["--scope", "admin", "--lane", "work"]));
    let trader = token(&["--scope", "enqueue", "--lane", "orders"]);
    let server = Server::start(&home, &["--no-workers"]);
    let place = |bearer: &str| {
        let headers = [("authorization", bearer), ("idempotency-key", "k")];
        server.post("/do/order", &headers, &order("1", ""))
    };
    place(&reader).refused(403, "FORBIDDEN");
    place(&elsewhere).refused(403, "FORBIDDEN");
    place(&trader).answered(201);
    let look = |bearer: &str, path: &str| server.request("GET", path, &[("authorization", bearer)], b"");
    look(&reader, "/do/order/k").answered(200);
    look(&trader, "/v1/ledger/k").refused(403, "FORBIDDEN");
    server.get("/do/order/k").refused(401, "UNAUTHORIZED");
}

#[test]
fn w_101_pending_sending_succeeded() {
    on_every_database(|home| {
        migrated(&home, &format!("{QUICK}[orders]\nadapter = \"paper\"\nlatency_ms = 300\n"));
        place_by_hand(&home, "k", &order("1", ""));
        let view = || home.text("SELECT status FROM outbox_orders");
        assert_eq!(view(), "pending");
        let _worker = worker(&home);
        wait_until("it is being sent", || view() == "sending");
        let entry = status_becomes(&home, "k", "succeeded");
        assert_eq!((view().as_str(), &entry["http_status"]), ("succeeded", &json!(200)));
        assert_eq!(message(&home, "k")["status"], "sent");
    });
}

/// A broker that behaves for each order as its list says, and then well.
fn broker(answers: &'static [u16]) -> Receiver {
    let asked = AtomicUsize::new(0);
    Receiver::answering(move |_| {
        let n = asked.fetch_add(1, Ordering::SeqCst);
        match answers.get(n) {
            // Longer than the adapter waits.
            Some(0) => {
                std::thread::sleep(Duration::from_millis(600));
                (200, "{\"order_ref\":\"late\"}".to_owned())
            }
            Some(status) => (*status, String::new()),
            None => (200, format!("{{\"order_ref\":\"r-{n}\",\"fills\":[{{\"px\":1,\"qty\":1,\"ts\":\"t\"}}]}}")),
        }
    })
}

fn http_config(url: &str, idempotency: &str) -> String {
    format!(
        "{QUICK}max_attempts = 3\n[orders]\nadapter = \"http\"\nurl = \"{url}/orders\"\nidempotency = \"{idempotency}\"\ntimeout_ms = 300\n"
    )
}

#[test]
fn w_102_a_timeout_then_success() {
    on_every_database(|home| {
        let broker = broker(&[0]);
        migrated(&home, &http_config(&broker.url, "key").replace("[0.05]", "[2]"));
        place_by_hand(&home, "k", &order("1", ""));
        let view = || home.text("SELECT status FROM outbox_orders");
        let first = worker(&home);
        wait_until("it has failed", || view() == "failed");
        first.signal(Signal::TERM);
        first.ends_within(Duration::from_secs(20));
        let row = home.rows("SELECT attempts, last_error_code, locked_by FROM outbox_orders").remove(0);
        assert_eq!(row, ["1", "BROKER_TIMEOUT", ""]);
        assert_eq!(ledger(&home, "k")["status"], "in_progress");
        wait_until("its backoff is over", || view() == "pending");
        assert_eq!(broker.requests().len(), 1, "not before");
        let _worker = worker(&home);
        let entry = status_becomes(&home, "k", "succeeded");
        assert_eq!(entry["broker_ref"], "r-1");
        let history = message(&home, "k")["history"].clone();
        assert_eq!((&history[0]["kind"], &history[0]["code"]), (&json!("retry"), &json!("BROKER_TIMEOUT")));
        let keys: Vec<String> = broker.requests().iter().map(|r| r.header("idempotency-key").to_owned()).collect();
        assert_eq!(keys, ["k", "k"], "the same key downstream");
    });
}

#[test]
fn w_103_a_worker_dies_and_another_takes_over() {
    on_every_database(|home| {
        migrated(&home, &format!("{QUICK}[orders]\nadapter = \"paper\"\nlatency_ms = 400\n"));
        place_by_hand(&home, "k", &order("1", ""));
        let first = worker(&home);
        let id = ledger(&home, "k")["outbox_id"].as_i64().unwrap();
        wait_until("it holds the order", || home.show(id)["status"] == "leased");
        first.signal(Signal::KILL);
        drop(first);
        let _second = worker(&home);
        status_becomes(&home, "k", "succeeded");
        assert_eq!(home.number("SELECT COUNT(*) FROM paper_executions"), 1);
        let taken_over = message(&home, "k")["history"].as_array().unwrap().iter().any(|h| h["kind"] == "takeover");
        assert!(taken_over || message(&home, "k")["lease_token"].as_i64() >= Some(2), "another claimed it");
        home.is_healthy();
    });
}

/// A broker that takes longer than three leases: the worker's own renewals keep the order its own.
#[test]
fn a_long_send_keeps_its_lease_by_renewing_it() {
    on_every_database(|home| {
        let paper = "[orders]\nadapter = \"paper\"\nlatency_ms = 3500\ntimeout_ms = 10000\n";
        migrated(&home, &format!("{QUICK}{paper}"));
        place_by_hand(&home, "k", &order("1", ""));
        let _workers = [worker(&home), worker(&home)];
        status_becomes(&home, "k", "succeeded");
        let message = message(&home, "k");
        assert_eq!((&message["lease_token"], &message["crashes"]), (&json!(1), &json!(0)), "{message}");
        assert_eq!(home.number("SELECT COUNT(*) FROM paper_executions"), 1);
        home.is_healthy();
    });
}

/// `POST /do/order` enqueues, also where nothing is worked on; and what is switched off is switched off in a server, too.
#[test]
fn an_order_placed_by_http_is_pending_while_nothing_is_claimed() {
    on_every_database(|home| {
        migrated(&home, QUICK);
        let server = Server::start_with(&home, &[], &[("OUTBOX_ENABLED", "false")]);
        let headers = [("content-type", "application/json"), ("idempotency-key", "k")];
        server.post("/do/order", &headers, &order("1", "")).answered(201);
        let row = || home.rows("SELECT status, COALESCE(locked_by, 'nobody'), attempts FROM outbox_orders").remove(0);
        // A worker of this server would have looked by then.
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            assert_eq!(row(), ["pending", "nobody", "0"]);
        }
        let (_, log) = server.stop();
        assert!(log.contains("switched off"), "{log}");
    });
}

#[test]
fn w_104_given_up_and_brought_back() {
    on_every_database(|home| {
        let broker = broker(&[500, 500, 500]);
        migrated(&home, &http_config(&broker.url, "key"));
        place_by_hand(&home, "k", &order("1", ""));
        let _worker = worker(&home);
        let entry = status_becomes(&home, "k", "failed");
        assert_eq!((&entry["reason_code"], &entry["http_status"]), (&json!("BROKER_5XX"), &json!(503)));
        assert_eq!(home.text("SELECT status FROM outbox_orders"), "aborted");
        home.run(&["outbox", "requeue", &entry["outbox_id"].to_string()]).refused(1, &["postrider orders"]);
        home.run(&["orders", "requeue", "k"]).done();
        let entry = status_becomes(&home, "k", "succeeded");
        let moves: Vec<&Value> = entry["events"].as_array().unwrap().iter().map(|e| &e["to_status"]).collect();
        assert_eq!(moves, ["failed", "in_progress", "succeeded"]);
        home.run(&["orders", "requeue", "k"]).refused(1, &["succeeded, which is final"]);
    });
}

#[test]
fn w_105_the_ledger_knows_first() {
    on_every_database(|home| {
        migrated(&home, QUICK);
        place_by_hand(&home, "k", &order("1", ""));
        // As an older version left it: the ledger written, the outbox not.
        let later = home.database.in_a_day();
        home.execute(&format!(
            "UPDATE idempo_ledger SET status = 'succeeded', http_status = 200, response_payload_json = '{{\"status\":\"ok\"}}', broker_ref = 'r-9', finished_at = first_seen_at, expires_at = {later}"
        ));
        let _worker = worker(&home);
        wait_until("the outbox follows", || home.text("SELECT status FROM outbox_orders") == "succeeded");
        assert_eq!(home.number("SELECT COUNT(*) FROM paper_executions"), 0, "nothing was sent again");
        assert_eq!(
            (&ledger(&home, "k")["response"], &message(&home, "k")["result_ref"]),
            (&json!({"status": "ok"}), &json!("r-9"))
        );
    });
}

#[test]
fn a_key_used_again_after_its_time_is_a_new_order() {
    on_every_database(|home| {
        migrated(&home, QUICK);
        place_by_hand(&home, "k", &order("1", ""));
        let _worker = worker(&home);
        status_becomes(&home, "k", "succeeded");
        let first = home.text("SELECT response_payload_json FROM idempo_ledger");
        home.execute(&format!("UPDATE idempo_ledger SET expires_at = {}", home.database.in_a_day()));
        let replayed = home.run(&["orders", "place", "--key", "k", "--payload", &order("1", ""), "--json"]).done();
        assert_eq!(replayed.stdout.trim(), first, "a day before, it replays, byte for byte");
        home.execute("UPDATE idempo_ledger SET expires_at = first_seen_at");
        assert_eq!(place_by_hand(&home, "k", &order("7", ""))["status"], "accepted", "it starts clean");
        let entry = status_becomes(&home, "k", "succeeded");
        assert_eq!(entry["response"]["executed_qty"], 7, "the broker does not take it for the old one");
    });
}

/// Spec 003 §7, the rows W-103 and W-104 do not cover.
#[test]
fn the_recovery_table_row_by_row() {
    on_every_database(|home| {
        // The broker is down: backoff, and on when it is back.
        let (port, url) = crate::receiver::free_port();
        migrated(&home, &http_config(&url, "key").replace("max_attempts = 3", "max_attempts = 1000"));
        place_by_hand(&home, "down", &order("1", ""));
        let running = worker(&home);
        wait_until("it is retried", || message(&home, "down")["attempts"].as_i64() > Some(1));
        let broker = Receiver::answering_on(port, |_| (200, "{\"order_ref\":\"r\"}".to_owned()));
        status_becomes(&home, "down", "succeeded");

        // A broken order is aborted at once.
        drop(running);
        let broken = place_by_hand(&home, "broken", &order("1", ""))["outbox_id"].as_i64().unwrap();
        let text = home.database.bytes("{");
        home.execute(&format!("UPDATE outbox SET payload = {text}, payload_sha = NULL WHERE id = {broken}"));
        let sent = broker.requests().len();
        let running = worker(&home);
        let entry = status_becomes(&home, "broken", "failed");
        assert_eq!(
            (&entry["reason_code"], &message(&home, "broken")["attempts"]),
            (&json!("ORDER_UNREADABLE"), &json!(1))
        );
        assert_eq!(broker.requests().len(), sent, "nothing was sent");
        // Put right and placed anew, it is executed.
        place_by_hand(&home, "mended", &order("1", ""));
        status_becomes(&home, "mended", "succeeded");
        assert_eq!(ledger(&home, "broken")["status"], "failed");
        let sent = broker.requests().len();

        // The ledger cannot be written after the send: it is, once it can.
        drop(running);
        place_by_hand(&home, "late", &order("1", ""));
        let (forbid, allow) = home.database.no_updates("idempo_ledger");
        home.execute(&forbid);
        let _running = worker(&home);
        wait_until("it is sent", || broker.requests().len() > sent);
        wait_until("it is held or tried again", || home.number("SELECT COUNT(*) FROM outbox") == 1);
        assert_eq!(ledger(&home, "late")["status"], "in_progress");
        home.execute(&allow);
        status_becomes(&home, "late", "succeeded");
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 0);
    });
}

#[test]
fn a_parked_order_is_settled_by_hand() {
    on_every_database(|home| {
        let broker = broker(&[0, 0]);
        migrated(&home, &http_config(&broker.url, "none"));
        for (key, status) in [("yes", "succeeded"), ("no", "failed")] {
            let id = place_by_hand(&home, key, &order("1", ""))["outbox_id"].as_i64().unwrap();
            let running = worker(&home);
            wait_until("it is parked", || home.show(id)["last_error_code"] == "NEEDS_RECONCILE");
            running.signal(Signal::TERM);
            running.ends_within(Duration::from_secs(20));
            home.run(&["orders", "requeue", key]).refused(1, &["in progress", "orders settle"]);
            assert_eq!(home.run(&["outbox", "release", &id.to_string(), "--json"]).json()["released"], 0);
            assert_eq!(home.show(id)["last_error_code"], "NEEDS_RECONCILE", "release leaves it alone");
            let settled =
                home.run(&["orders", "settle", key, "--as", status, "--reason", "asked them", "--json"]).done();
            assert_eq!(settled.json()["status"], status);
            assert_eq!(settled.json()["events"][0]["reason"], "asked them");
            assert!(settled.json()["events"][0]["actor"].as_str().unwrap().starts_with("operator:"));
            home.run(&["orders", "settle", key, "--as", status]).refused(1, &["has ended"]);
        }
        assert_eq!(broker.requests().len(), 2, "never a blind resend");
        home.run(&["orders", "settle", "nobody", "--as", "failed"]).refused(1, &["no order under the key"]);
    });
}

/// What the paper broker executed under a key, and what ledger and outbox say.
fn agree(home: &Home, key: &str, kind: &str, place: &str) {
    let entry = ledger(home, key);
    let executed = home.number(&format!("SELECT COUNT(*) FROM paper_executions WHERE idempotency_key = '{key}'"));
    let shown = home.show(entry["outbox_id"].as_i64().unwrap());
    let parked = shown["last_error_code"] == "NEEDS_RECONCILE" && shown["status"] == "pending";
    match (entry["status"].as_str().unwrap(), parked) {
        ("succeeded", false) => {
            assert_eq!((&shown["status"], executed), (&json!("sent"), 1), "{kind} at {place}: {entry}")
        }
        ("in_progress", true) => {
            assert!(kind == "none" && executed <= 1, "{kind} at {place}: {executed} executions, {shown}")
        }
        other => panic!("{kind} at {place}: {other:?} {entry} {shown}"),
    }
}

/// A worker that is killed when it comes to this place.
fn dies_at(home: &Home, place: &str) {
    let mut command = home.command(&["worker", "--lane", "orders"]);
    let mut dying = command.env("POSTRIDER_FAILPOINT", place).stderr(std::process::Stdio::null()).spawn().unwrap();
    wait_until(&format!("it dies when {place}"), || dying.try_wait().unwrap().is_some());
    assert!(dying.wait().unwrap().code().is_none(), "killed, not ended");
}

fn killed_at_every_commit(database: Database, kind: &str) {
    let home = Home::on(database);
    let settling = if kind == "look_up" { "settling_sec = 0.2\n" } else { "" };
    migrated(&home, &format!("{QUICK}[orders]\nadapter = \"paper\"\nidempotency = \"{kind}\"\n{settling}"));
    // Before the commit nothing is there; after it the order is, though nobody heard of it.
    for (place, there) in [("placing", false), ("placed", true)] {
        let mut command = home.command(&["orders", "place", "--key", place, "--payload", &order("1", "")]);
        let killed = command.env("POSTRIDER_FAILPOINT", place).output().unwrap();
        assert!(killed.status.code().is_none(), "{place}: {killed:?}");
        let found = home.run(&["orders", "show", place]).code == 0;
        assert_eq!(found, there, "{place}");
        let again = place_by_hand(&home, place, &order("1", ""));
        assert_eq!(again["status"], "accepted");
        let running = worker(&home);
        status_becomes(&home, place, "succeeded");
        drop(running);
        agree(&home, place, kind, place);
    }
    for place in ["claimed", "begun", "sent", "settling", "settled"] {
        if place == "begun" && kind == "key" {
            continue; // where sending twice does no harm, nobody says that it begins
        }
        place_by_hand(&home, place, &order("1", ""));
        dies_at(&home, place);
        if kind == "look_up" && place == "begun" {
            // And once more, between the look-up and the send.
            dies_at(&home, "looked_up");
        }
        let running = worker(&home);
        wait_until(&format!("{kind} has got over {place}"), || {
            ledger(&home, place)["status"] == "succeeded"
                || message(&home, place)["last_error_code"] == "NEEDS_RECONCILE"
        });
        running.signal(Signal::TERM);
        running.ends_within(Duration::from_secs(30));
        agree(&home, place, kind, place);
        if ledger(&home, place)["status"] == "in_progress" {
            let in_doubt = ["begun", "sent", "settling"].contains(&place);
            assert!(in_doubt, "{place}: nothing had gone out, so nobody needs to look");
            home.run(&["orders", "settle", place, "--as", "succeeded"]).done();
        }
    }
}

macro_rules! killed_at_every_commit {
    ($($name:ident: $database:ident, $kind:literal;)*) => {
        $(#[test]
        fn $name() {
            killed_at_every_commit(Database::$database(), $kind);
        })*
    };
}
killed_at_every_commit! {
    killed_at_every_commit_sqlite_key: sqlite, "key";
    killed_at_every_commit_sqlite_look_up: sqlite, "look_up";
    killed_at_every_commit_sqlite_none: sqlite, "none";
    killed_at_every_commit_postgres_key: postgres, "key";
    killed_at_every_commit_postgres_look_up: postgres, "look_up";
    killed_at_every_commit_postgres_none: postgres, "none";
    killed_at_every_commit_mysql_key: mysql, "key";
    killed_at_every_commit_mysql_look_up: mysql, "look_up";
    killed_at_every_commit_mysql_none: mysql, "none";
}

#[test]
fn the_sums_agree_whoever_is_killed() {
    on_every_database(|home| {
        let faults = "faults = { reject = 0.05, partial = 0.05, fail = 0.08, timeout = 0.06, lose_reply = 0.06 }";
        let lane = "concurrency = 16\nmax_attempts = 1000\nmax_crashes = 1000\n";
        migrated(&home, &format!("{QUICK}{lane}[orders]\nadapter = \"paper\"\ntimeout_ms = 40\n{faults}\n"));
        let server = Server::start(&home, &["--no-workers"]);
        let mut fleet: Vec<Running> = (0..3).map(|_| worker(&home)).collect();
        let instruments = ["AAPL", "MSFT", "TSLA"];
        let total = 1000;
        let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
        println!("orders of seed {seed}");
        let mut random = u64::from(seed) | 1;
        for n in 0..total {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let side = if random & 1 == 0 { "BUY" } else { "SELL" };
            let qty = format!("{}.{}", random % 97 + 1, random / 97 % 10);
            let instrument = instruments[(random / 1009 % 3) as usize];
            let body = order(&qty, "").replace("AAPL", instrument).replace("BUY", side);
            place(&server, &format!("o-{n}"), &body).answered(201);
            if n % 250 == 249 {
                let victim = fleet.remove(0);
                victim.signal(Signal::KILL);
                drop(victim);
                fleet.push(worker(&home));
            }
        }
        // A rejection after a lost answer is nobody's to judge but a person's.
        let parked = "FROM outbox WHERE last_error_code = 'NEEDS_RECONCILE' AND locked_by IS NULL";
        let open = || {
            let open = home.number("SELECT COUNT(*) FROM idempo_ledger WHERE status = 'in_progress'");
            open - home.number(&format!("SELECT COUNT(*) {parked}"))
        };
        let mut killed_at = std::time::Instant::now();
        let mut kills = 0;
        wait_long_until("every order has ended", Duration::from_secs(180), || {
            if killed_at.elapsed() > Duration::from_secs(1) && kills < 6 {
                killed_at = std::time::Instant::now();
                kills += 1;
                let victim = fleet.remove(0);
                victim.signal(Signal::KILL);
                drop(victim);
                fleet.push(worker(&home));
            }
            open() == 0
        });
        for row in home.rows(&format!("SELECT id {parked}")) {
            let key = home.text(&format!("SELECT idempotency_key FROM outbox_orders WHERE id = {}", row[0]));
            // The person asks the broker.
            let book = format!("SELECT COUNT(*) FROM paper_executions WHERE idempotency_key = '{key}'");
            assert_eq!(home.number(&book), 0, "what was executed is answered as such, not rejected");
            home.run(&["orders", "settle", &key, "--as", "failed"]).done();
        }
        // By hand, in whole twentieths: what the broker executed, and what the ledger says it did.
        let tenths = |text: &str| (text.parse::<f64>().unwrap() * 20.0).round() as i64;
        let mut at_the_broker: BTreeMap<String, i64> = BTreeMap::new();
        for row in home.rows("SELECT instrument, executed_qty FROM paper_executions") {
            *at_the_broker.entry(row[0].clone()).or_default() += tenths(&row[1]);
        }
        let mut in_the_ledger: BTreeMap<String, i64> = BTreeMap::new();
        for row in home.rows("SELECT response_payload_json FROM idempo_ledger WHERE status = 'succeeded'") {
            let result: Value = serde_json::from_str(&row[0]).unwrap();
            *in_the_ledger.entry(result["instrument"].as_str().unwrap().to_owned()).or_default() +=
                tenths(&result["executed_qty"].to_string());
        }
        assert_eq!(at_the_broker, in_the_ledger);
        assert_eq!(at_the_broker.len(), 3);
        let twice = "SELECT COUNT(*) FROM (SELECT idempotency_key FROM paper_executions GROUP BY idempotency_key HAVING COUNT(*) > 1) AS twice";
        assert_eq!(home.number(twice), 0, "no order was executed twice");
        assert_eq!(home.number("SELECT COUNT(*) FROM idempo_ledger"), total as i64);
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 0, "the outbox agrees");
        let sent = home.number("SELECT COUNT(*) FROM outbox_done WHERE status = 'sent'");
        assert_eq!(sent, home.number("SELECT COUNT(*) FROM idempo_ledger WHERE status = 'succeeded'"));
    });
}

#[test]
fn over_http_orders_are_listed_brought_back_and_settled() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[orders]\nadapter = \"paper\"\n");
    let server = Server::start(&home, &["--no-workers"]);
    let json = ("content-type", "application/json");
    let order = |tags: Value| {
        json!({"instrument": "AAPL", "side": "BUY", "qty": 1, "time_in_force": "IOC", "tags": tags}).to_string()
    };
    server.post("/do/order", &[json, ("Idempotency-Key", "good")], &order(json!([]))).answered(201);
    server.post("/do/order", &[json, ("Idempotency-Key", "bad")], &order(json!(["paper:reject"]))).answered(201);
    let state = |key: &str| server.get(&format!("/v1/ledger/{key}")).answered(200).json()["status"].clone();
    home.run(&["worker", "--once", "--lane", "orders"]);
    assert_eq!((state("good"), state("bad")), (json!("succeeded"), json!("failed")));
    let keys = |show: &str| {
        let page = server.get(&format!("/v1/orders?show={show}")).answered(200).json();
        let items = page["items"].as_array().unwrap().iter();
        items.map(|item| item["idempotency_key"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(keys("all"), ["bad", "good"]);
    assert_eq!(keys("failed"), ["bad"]);
    assert_eq!(keys("needs_person"), Vec::<String>::new());
    let conflicts = |query: &str| server.get(&format!("/v1/orders/conflicts{query}")).answered(200).json();
    assert_eq!(conflicts("")["items"], json!([]));
    for (key, tag) in [("good", "other"), ("good", "other"), ("bad", "other")] {
        server.post("/do/order", &[json, ("Idempotency-Key", key)], &order(json!([tag]))).answered(409);
    }
    let page = conflicts("?limit=1");
    let (bad, good) = (&page["items"][0], &conflicts(&format!("?cursor={}", page["next_cursor"].as_str().unwrap())));
    assert_eq!((&bad["idempotency_key"], &bad["times"], &bad["outbox_id"]), (&json!("bad"), &json!(1), &Value::Null));
    let good = &good["items"][0];
    assert_eq!((&good["idempotency_key"], &good["times"]), (&json!("good"), &json!(2)), "the same one twice is one");
    assert_eq!(good["instrument"], "AAPL");
    assert_ne!(good["request_digest"], server.get("/v1/ledger/good").answered(200).json()["request_digest"]);
    assert_eq!((state("good"), state("bad")), (json!("succeeded"), json!("failed")), "what stands, stands");
    server.get("/v1/orders?show=some").refused(400, "INVALID_REQUEST");

    let refused = |path: &str, body: &str, status: u16, code: &str| {
        assert_eq!(server.post(path, &[json], body).answered(status).json()["error"], code, "{path}");
    };
    refused("/v1/ledger/good/requeue", "", 409, "ORDER_NOT_CHANGED");
    refused("/v1/ledger/none/requeue", "", 404, "ORDER_NOT_FOUND");
    refused("/v1/ledger/good/settle", "{\"as\":\"failed\"}", 409, "ORDER_NOT_CHANGED");
    refused("/v1/ledger/none/settle", "{\"as\":\"failed\"}", 404, "ORDER_NOT_FOUND");
    server.post("/v1/ledger/good/settle", &[json], "{\"as\":\"perhaps\"}").refused(400, "INVALID_REQUEST");

    let again = server.post("/v1/ledger/bad/requeue", &[], "").answered(200).json();
    assert_eq!(again["status"], "in_progress");
    let settled = "{\"as\":\"succeeded\",\"broker_ref\":\"R-1\",\"reason\":\"seen in their portal\"}";
    let entry = server.post("/v1/ledger/bad/settle", &[json], settled).answered(200).json();
    assert_eq!((&entry["status"], &entry["broker_ref"]), (&json!("succeeded"), &json!("R-1")), "{entry}");
    let last = entry["events"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["actor"], &last["reason"]), (&json!("api:local"), &json!("seen in their portal")), "{entry}");
    assert_eq!(home.show(entry["outbox_id"].as_i64().unwrap())["status"], "sent");
}
