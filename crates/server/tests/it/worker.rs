//! What a worker takes and leaves, on the embedded database.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::home::{Home, wait_until};
use crate::receiver::Receiver;

#[test]
fn the_lane_log_prints_and_needs_no_configuration() {
    let home = Home::sqlite();
    home.enqueue(&["log", "--payload", "hello"]);
    let once = home.run(&["worker", "--once"]).done();
    assert!(once.stdout.starts_with("log #1 attempt 1: 5 bytes"), "{once:?}");
    assert!(
        !once.stdout.contains("hello") && !once.stderr.contains("hello"),
        "a payload is shown only where asked for"
    );
    home.write("postrider.toml", "[lane.log]\nshow_payload = true\n").enqueue(&["log", "--payload", "hello"]);
    assert!(home.run(&["worker", "--once"]).done().stdout.contains("log #2 attempt 1: hello\n"));
}

#[test]
fn json_leaves_stdout_to_the_document() {
    let home = Home::sqlite();
    home.enqueue(&["log", "--payload", "hello"]);
    let once = home.run(&["worker", "--once", "--json", "--log", "json"]).done();
    assert_eq!(once.json()["lanes"]["log"]["sent"], 1);
    assert!(once.stderr.contains("log #1 attempt 1"), "{once:?}");
    assert!(once.stderr.lines().any(|line| line.starts_with('{') && line.contains("worker started")), "{once:?}");
}

#[test]
fn only_the_lanes_and_shards_it_is_given() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[lane.a]\ncourier = \"noop\"\nshards = 4\n[lane.b]\ncourier = \"noop\"\n");
    for key in 0..40 {
        home.enqueue(&["a", "--payload", "x", "--key", &key.to_string()]);
    }
    home.enqueue(&["b", "--payload", "x"]);
    let one = home.run(&["worker", "--once", "--lane", "a", "--shard", "1", "--json"]).done().json();
    let sent = one["lanes"]["a"]["sent"].as_u64().unwrap();
    assert!(sent > 0 && sent < 40 && one["lanes"].get("b").is_none(), "{one}");
    let of_shard =
        |table: &str| home.number(&format!("SELECT COUNT(*) FROM {table} WHERE lane = 'a' AND shard_id = 1"));
    assert_eq!((of_shard("outbox_done") as u64, of_shard("outbox")), (sent, 0), "all of that shard, and no other's");
    home.run(&["worker", "--once", "--lane", "a"]).done();
    assert_eq!((home.stats("a")["sent"].clone(), home.stats("b")["sent"].clone()), (json!(40), json!(0)));
    home.run(&["worker", "--once", "--lane", "a", "--shard", "4"]).refused(2, &["no shard 4", "0 to 3"]);
    home.run(&["worker", "--once", "--lane", "c"]).refused(2, &["no lane `c`", "a, b, log"]);
}

#[test]
fn switched_off_it_claims_nothing_and_intake_goes_on() {
    let home = Home::sqlite();
    home.enqueue(&["log", "--payload", "x"]);
    let run = |args: &[&str]| home.command(args).env("OUTBOX_ENABLED", "false").output().unwrap();
    let once = run(&["worker", "--once"]);
    assert!(once.status.success() && String::from_utf8_lossy(&once.stderr).contains("switched off"));
    assert!(run(&["enqueue", "log", "--payload", "y"]).status.success());
    assert_eq!(home.stats("log")["pending"], 2);
}

#[test]
fn a_retry_makes_once_end_with_1() {
    let home = Home::sqlite();
    let receiver = Receiver::start(|_| Some(500));
    home.write("postrider.toml", &format!("[lane.a]\ncourier = \"http\"\nurl = \"{}\"\n", receiver.url));
    let id = home.enqueue(&["a", "--payload", "x"]);
    home.run(&["worker", "--once"]).ended(1);
    let message = home.show(id);
    assert_eq!(
        (&message["status"], &message["attempts"], &message["last_error_code"]),
        (&json!("pending"), &json!(1), &json!("HTTP_500"))
    );
    home.run(&["worker", "--once"]).done();
    assert_eq!(receiver.requests().len(), 1, "it is not due yet");
}

#[test]
fn delays_and_deadlines_are_kept() {
    let home = Home::sqlite();
    let late = home.enqueue(&["log", "--payload", "x", "--deliver-before", "2020-01-01T00:00:00Z"]);
    let delayed = home.enqueue(&["log", "--payload", "x", "--delay", "1h"]);
    home.run(&["worker", "--once"]).ended(1);
    let message = home.show(late);
    assert_eq!((&message["status"], &message["last_error_code"]), (&json!("dead"), &json!("EXPIRED")));
    assert_eq!(home.show(delayed)["status"], "pending");
}

#[test]
fn a_running_worker_takes_new_work_and_stops_at_ctrl_c() {
    let home = Home::sqlite();
    let worker = home.start(&["worker", "--concurrency", "2", "--batch", "3", "--lease-seconds", "5"]);
    for _ in 0..3 {
        home.enqueue(&["log", "--payload", "x"]);
    }
    wait_until("all are sent", || home.stats("log")["sent"] == 3);
    worker.signal(Signal::INT);
    let answer = worker.ends_within(Duration::from_secs(10)).done();
    assert_eq!(answer.stdout.lines().filter(|line| line.starts_with("log #")).count(), 3);
}
