//! Many dead messages come back: conflicts are told and harm no other, two operators at once do each its part, and however
//! it ends it says how far it came.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

fn databases() -> [Database; 3] {
    [Database::sqlite(), Database::postgres(), Database::mysql()]
}

/// A lane whose messages all die, migrated.
fn deadly(database: Database) -> Home {
    let home = Home::on(database);
    let refuses = Receiver::start(|_| Some(400));
    let lane = format!("[lane.work]\ncourier = \"http\"\nurl = \"{}\"\nkey_ttl = \"1s\"\n", refuses.url);
    home.write("postrider.toml", &lane).run(&["migrate"]).done();
    home
}

fn enqueue(home: &Home, lines: &[Value]) {
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    home.run_with(&["enqueue", "work", "--ndjson", "-"], &lines).done();
}

const ALL: [&str; 6] = ["outbox", "requeue", "--lane", "work", "--dead", "--json"];

fn dry_run(home: &Home) -> Value {
    home.run(&[&ALL[..], &["--dry-run"]].concat()).done().json()
}

/// Each ended row twice as often, so many times.
fn double(home: &Home, times: u32) {
    let columns = "lane, shard_id, due_at, attempts, crashes, maybe_sent, lease_token, payload, created_at, updated_at, finished_at, status";
    for _ in 0..times {
        let by = home.number("SELECT MAX(id) FROM outbox_done");
        home.execute(&format!("INSERT INTO outbox_done (id, {columns}) SELECT id + {by}, {columns} FROM outbox_done"));
    }
}

#[test]
fn conflicts_are_told_and_the_rest_goes_on() {
    for database in databases() {
        let home = deadly(database);
        let lines: Vec<Value> = (0..40).map(|n| json!({ "payload": n, "active_key": format!("k{n}") })).collect();
        enqueue(&home, &lines);
        home.run(&["worker", "--once", "--lane", "work"]).ended(1);
        assert_eq!(home.stats("work")["dead"], 40);
        enqueue(&home, &[lines[3].clone(), lines[17].clone()]);
        let dry = dry_run(&home);
        assert_eq!(dry["count"], 40, "{dry}");
        let told = home.run(&ALL).ended(1).json();
        assert_eq!((&told["requeued"], &told["conflicts"]), (&json!(38), &json!(2)), "{told}");
        let conflicts = told["results"].as_array().unwrap().iter().filter(|one| one["outcome"] == "conflict");
        assert_eq!(conflicts.count(), 2, "{told}");
        assert_eq!((home.stats("work")["pending"].clone(), home.stats("work")["dead"].clone()), (json!(40), json!(2)));
    }
}

#[test]
fn producers_and_an_operator_race_for_active_keys() {
    for database in databases() {
        let home = deadly(database);
        let lines: Vec<Value> = (0..400).map(|n| json!({ "payload": n, "active_key": format!("k{n}") })).collect();
        enqueue(&home, &lines);
        home.run(&["worker", "--once", "--lane", "work"]).ended(1);
        let told = std::thread::scope(|scope| {
            // The same keys again, from the other end.
            scope.spawn(|| {
                let mut lines = lines.clone();
                lines.reverse();
                lines.chunks(20).for_each(|part| enqueue(&home, part));
            });
            home.run(&ALL)
        });
        let told = told.json();
        let sum = told["requeued"].as_i64().unwrap() + told["conflicts"].as_i64().unwrap();
        assert_eq!(sum, 400, "{told}");
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 400, "one live message for each key");
    }
}

#[test]
fn a_key_that_another_message_has_is_a_conflict() {
    for database in databases() {
        let home = deadly(database);
        let first = home.enqueue(&["work", "--payload", "x", "--key", "k"]);
        home.run(&["worker", "--once", "--lane", "work"]).ended(1);
        // Its key is over after a second, and somebody else takes it.
        let mut second = None;
        wait_until("the key is free again", || {
            let answer = home.run(&["enqueue", "work", "--payload", "y", "--key", "k"]).json();
            second = answer["id"].as_i64();
            answer["outcome"] == "created"
        });
        let told = home.run(&["outbox", "requeue", &first.to_string(), "--json"]).ended(1).json();
        assert_eq!(told["results"][0]["outcome"], "conflict", "{told}");
        assert_eq!(
            (home.show(first)["status"].clone(), home.show(second.unwrap())["status"].clone()),
            (json!("dead"), json!("pending"))
        );
    }
}

#[test]
fn two_operators_at_once() {
    for database in databases() {
        let home = deadly(database);
        enqueue(&home, &[json!({ "payload": 1 })]);
        home.run(&["worker", "--once", "--lane", "work"]).ended(1);
        double(&home, 12);
        let (one, two) = std::thread::scope(|scope| {
            let other = scope.spawn(|| home.run(&ALL).done().json());
            (home.run(&ALL).done().json(), other.join().unwrap())
        });
        let sum = one["requeued"].as_i64().unwrap() + two["requeued"].as_i64().unwrap();
        assert_eq!(sum, 4096, "{one} {two}");
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 4096);
    }
}

#[test]
fn all_of_a_lane_over_http() {
    for database in databases() {
        let home = deadly(database);
        let lines: Vec<Value> = (0..30).map(|n| json!({ "payload": n, "active_key": format!("k{n}") })).collect();
        enqueue(&home, &lines);
        home.run(&["worker", "--once", "--lane", "work"]).ended(1);
        enqueue(&home, &lines[5..6]);
        let server = Server::start(&home, &["--no-workers"]);
        let ask = |body: Value| {
            let headers = [("content-type", "application/json")];
            server.post("/v1/outbox/requeue", &headers, &body.to_string())
        };
        let dry = ask(json!({ "filter": { "lane": "work" }, "dry_run": true })).answered(200).json();
        assert_eq!((&dry["count"], &dry["more"]), (&json!(30), &json!(false)), "{dry}");
        let done = ask(json!({ "filter": { "lane": "work" } })).answered(200).json();
        assert_eq!((&done["count"], &done["conflicts"]), (&json!(29), &json!(1)), "{done}");
        assert_eq!(done["left"].as_array().unwrap().len(), 1, "{done}");
        ask(json!({ "filter": { "lane": "webhooks" } })).refused(409, "LANE_OWNED");
        ask(json!({ "filter": { "lane": "nope" } })).refused(404, "UNKNOWN_LANE");
    }
}

#[test]
fn interrupted_it_says_how_far_it_came_and_goes_on_later() {
    let home = deadly(Database::sqlite());
    enqueue(&home, &[json!({ "payload": 1 })]);
    home.run(&["worker", "--once", "--lane", "work"]).ended(1);
    double(&home, 16);
    let dry = dry_run(&home);
    assert_eq!(
        (&dry["count"], dry["ids"].as_array().unwrap().len()),
        (&json!(65_536), 10_000),
        "named as far as that helps"
    );
    let running = home.start(&ALL);
    wait_until("it has begun", || home.number("SELECT COUNT(*) FROM outbox") > 0);
    running.signal(Signal::INT);
    let told = running.ends_within(crate::home::PATIENCE).ended(1).json();
    let back = home.number("SELECT COUNT(*) FROM outbox");
    assert_eq!((&told["interrupted"], &told["requeued"]), (&json!(true), &json!(back)));
    let rest = home.run(&ALL).done().json();
    assert_eq!(rest["requeued"], json!(65_536 - back));
}

#[test]
fn interrupted_lines_say_how_far_they_came() {
    use std::io::Write;
    let home = deadly(Database::sqlite());
    let mut child = home
        .command(&["enqueue", "work", "--ndjson", "-", "--json"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let lines: String = (0..1500).map(|n| format!("{{\"payload\": {n}}}\n")).collect();
    stdin.write_all(lines.as_bytes()).unwrap();
    wait_until("a thousand are committed", || home.number("SELECT COUNT(*) FROM outbox") == 1000);
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::INT).unwrap();
    let answer = crate::home::Answer::from(child.wait_with_output().unwrap()).ended(1);
    drop(stdin);
    let told = answer.json();
    assert_eq!(
        (&told["lines"], &told["stopped_at_line"], &told["interrupted"]),
        (&json!(1000), &json!(1001), &json!(true))
    );
    assert!(answer.stderr.contains("1000 lines committed"), "{answer:?}");
}
