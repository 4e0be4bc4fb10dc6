//! Orders in doubt, seen from outside: a stop in the middle of a last attempt, answers nobody can read, refusals that may
//! only mean that the broker has the order already.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::home::{Home, Running, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

const ORDER: &str = r#"{"instrument":"AAPL","side":"BUY","qty":10,"price":10.5,"time_in_force":"IOC"}"#;
const EXECUTED: &str = r#"{"order_ref":"r-1","fills":[{"px":10.5,"qty":10,"ts":"2026-01-01T00:00:00Z"}]}"#;

fn configured(home: &Home, broker: &Receiver, idempotency: &str, more: &str) {
    let look_up = match idempotency {
        "look_up" => format!("look_up_url = \"{}/{{key}}\"\nsettling_sec = 0.2\n", broker.url),
        _ => String::new(),
    };
    home.write(
        "postrider.toml",
        &format!(
            "[outbox]\ndrain_timeout_sec = 2\n[lane.orders]\nbackoff_sec = [0.05]\nlock_lease_sec = 5\npoll_interval_sec = 0.05\nmax_attempts = 1\n\
             [orders]\nadapter = \"http\"\nurl = \"{}\"\nidempotency = \"{idempotency}\"\ntimeout_ms = 60000\n{look_up}{more}",
            broker.url
        ),
    );
    home.run(&["migrate"]).done();
}

fn place(home: &Home, key: &str) -> i64 {
    home.run(&["orders", "place", "--key", key, "--payload", ORDER, "--json"]).done().json()["outbox_id"]
        .as_i64()
        .unwrap()
}

fn ledger(home: &Home, key: &str) -> Value {
    home.run(&["orders", "ledger", key, "--json"]).done().json()
}

fn worker(home: &Home) -> Running {
    home.start_silent(&["worker", "--lane", "orders"])
}

fn parked(home: &Home, id: i64) -> bool {
    home.show(id)["last_error_code"] == "NEEDS_RECONCILE"
}

/// The broker has executed it and is slow to say so; the worker is told to stop, and nothing is left of its budget.
fn stopped_in_the_last_attempt(database: Database, idempotency: &str) {
    let home = Home::on(database);
    let posts = Arc::new(AtomicUsize::new(0));
    let seen = posts.clone();
    let broker = Receiver::answering(move |request| {
        // The first order hangs; look-ups and later ones are answered.
        if !request.body.is_empty() && seen.fetch_add(1, Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_secs(40));
        }
        (200, EXECUTED.to_owned())
    });
    configured(&home, &broker, idempotency, "");
    let id = place(&home, "k");
    let running = worker(&home);
    wait_until("the broker has it", || posts.load(Ordering::SeqCst) == 1);
    running.signal(Signal::TERM);
    running.ends_within(Duration::from_secs(20));
    let entry = ledger(&home, "k");
    assert_eq!(entry["status"], "in_progress", "{idempotency}: it may have been executed: {entry} {}", home.show(id));
    let shown = home.show(id);
    assert!(["pending", "leased"].contains(&shown["status"].as_str().unwrap()), "{idempotency}: {shown}");
    assert_eq!(shown["maybe_sent"], true, "{idempotency}: {shown}");

    let _running = worker(&home);
    match idempotency {
        "none" => wait_until("a person is asked", || parked(&home, id)),
        _ => wait_until("it has ended", || ledger(&home, "k")["status"] == "succeeded"),
    }
    let sends = if idempotency == "key" { 2 } else { 1 };
    assert_eq!(posts.load(Ordering::SeqCst), sends, "{idempotency}");
}

macro_rules! stopped_in_the_last_attempt {
    ($($name:ident: $database:ident, $idempotency:literal;)*) => {
        $(#[test]
        fn $name() {
            stopped_in_the_last_attempt(Database::$database(), $idempotency);
        })*
    };
}
stopped_in_the_last_attempt! {
    stopped_in_the_last_attempt_sqlite_none: sqlite, "none";
    stopped_in_the_last_attempt_sqlite_look_up: sqlite, "look_up";
    stopped_in_the_last_attempt_sqlite_key: sqlite, "key";
    stopped_in_the_last_attempt_postgres_none: postgres, "none";
    stopped_in_the_last_attempt_postgres_look_up: postgres, "look_up";
    stopped_in_the_last_attempt_mysql_none: mysql, "none";
    stopped_in_the_last_attempt_mysql_look_up: mysql, "look_up";
}

#[test]
fn answers_that_make_no_sense_are_for_a_person() {
    for (what, body) in [
        ("no JSON", "accepted, thank you"),
        ("nothing", ""),
        ("no reference", "{}"),
        ("more than was ordered", r#"{"order_ref":"r","fills":[{"px":10,"qty":11,"ts":"t"}]}"#),
        ("a price below nothing", r#"{"order_ref":"r","fills":[{"px":-1,"qty":10,"ts":"t"}]}"#),
    ] {
        let home = Home::sqlite();
        let broker = Receiver::answering(move |_| (200, body.to_owned()));
        configured(&home, &broker, "key", "");
        home.write(
            "postrider.toml",
            &std::fs::read_to_string(home.path("postrider.toml"))
                .unwrap()
                .replace("max_attempts = 1", "max_attempts = 3"),
        );
        let id = place(&home, "k");
        let running = worker(&home);
        wait_until(&format!("{what}: a person is asked"), || parked(&home, id));
        running.signal(Signal::TERM);
        running.ends_within(Duration::from_secs(20));
        assert_eq!(broker.requests().len(), 3, "{what}: within its budget, and no more");
        assert_eq!(ledger(&home, "k")["status"], "in_progress", "{what}");
        assert_eq!(home.run(&["orders", "settle", "k", "--as", "failed", "--json"]).done().json()["status"], "failed");
    }
}

#[test]
fn a_refusal_after_a_failure_is_not_believed() {
    let home = Home::sqlite();
    let asked = AtomicUsize::new(0);
    let broker = Receiver::answering(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => (500, String::new()),
        _ => (409, "{\"error\":\"duplicate\"}".to_owned()),
    });
    configured(&home, &broker, "key", "");
    home.write(
        "postrider.toml",
        &std::fs::read_to_string(home.path("postrider.toml")).unwrap().replace("max_attempts = 1", "max_attempts = 3"),
    );
    let id = place(&home, "k");
    let _running = worker(&home);
    wait_until("a person is asked", || parked(&home, id) || ledger(&home, "k")["status"] != "in_progress");
    assert_eq!(ledger(&home, "k")["status"], "in_progress", "the first one may have been executed");
}

/// A secret that is rotated while the worker runs.
#[test]
fn a_rotated_secret_is_read_again() {
    let home = Home::sqlite();
    home.write("token", "old\n");
    let broker = Receiver::answering(|request| match request.header("authorization") {
        "new" => (200, EXECUTED.to_owned()),
        _ => (401, String::new()),
    });
    let path = home.path("token");
    configured(&home, &broker, "none", &format!("headers = {{ Authorization = \"file:{}\" }}\n", path.display()));
    let id = place(&home, "k");
    let _running = worker(&home);
    wait_until("it is refused", || home.show(id)["last_error_code"] == "BROKER_UNAUTHORIZED");
    home.write("token", "new\n");
    // It is not read again for every order. Once one finds it changed, those that were refused go on, too.
    let mut others = 0;
    wait_until("the new one is read", || {
        others += 1;
        place(&home, &format!("other {others}"));
        std::thread::sleep(Duration::from_millis(300));
        home.show(id)["status"] == "sent"
    });
    wait_until("all are sent", || home.number("SELECT COUNT(*) FROM outbox") == 0);
}
