//! Killed at every commit: before it, when all statements have run, and after it, when nobody has heard of it yet. A server
//! with everything in it is asked for everything, dies at one of the places, is started again, and is asked again by clients
//! that were told nothing. Then everything has happened once, the receivers' books and the rows agree, and the doctor finds
//! nothing.
//!
//! The places are not written down here: the first round is run with `POSTRIDER_FAILPOINTS`, and tells them.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proving::history::Deliveries;
use proving::kit::Session;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::api::{Response, Server, try_exchange};
use crate::home::{Home, Running, wait_until};
use crate::memory::OpenMemory;
use crate::receiver::{Receiver, Request};
use crate::scratch::Database;

const ORDER: &str = r#"{"instrument":"AAPL","side":"BUY","qty":1,"price":10.5,"time_in_force":"IOC"}"#;
const LEASE: Duration = Duration::from_secs(2);
/// Of the places, one in so many is tried, unless `POSTRIDER_CRASH_POINTS=all`.
const EVERY: usize = 9;

/// Answers 500 to a body that holds a word that is not well yet, except to who is always well.
#[derive(Clone, Default)]
struct Sick(Arc<Mutex<HashSet<String>>>);

impl Sick {
    fn falls_ill(&self, word: &str) {
        self.0.lock().unwrap().insert(word.to_owned());
    }

    fn is_well(&self, word: &str) {
        self.0.lock().unwrap().remove(word);
    }

    fn answer(&self, request: &Request) -> Option<u16> {
        let sick = self.0.lock().unwrap().iter().any(|word| request.body.contains(word));
        let sick = sick && !request.path.ends_with("/well");
        Some(if sick { 500 } else { 200 })
    }
}

/// A server, everything it talks to, and clients that do not give up.
struct Story {
    home: Home,
    memory: OpenMemory,
    receiver: Receiver,
    sick: Sick,
    server: Option<Server>,
    well: i64,
    ailing: i64,
}

impl Story {
    fn begin(database: Database) -> Story {
        let home = Home::on(database);
        let sick = Sick::default();
        let answers = sick.clone();
        let receiver = Receiver::start(move |request| answers.answer(request));
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        let lease = LEASE.as_secs();
        let quick = format!("lock_lease_sec = {lease}\npoll_interval_sec = 0.1\n");
        home.write(
            "postrider.toml",
            &format!(
                "[lane.work]\ncourier = \"http\"\nurl = \"{}\"\nmax_attempts = 2\nbackoff_sec = [0.05]\n{quick}\
                 [lane.webhooks]\nlock_lease_sec = {lease}\n\
                 [lane.orders]\n{quick}\
                 [lane.memory]\nbackoff_sec = [0.2]\n{quick}\
                 [webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\nbase_delay_sec = 0.05\nmax_retry_limit = 2\n\
                 [orders]\nadapter = \"paper\"\nidempotency = \"key\"\n\
                 [memory]\nurl = \"{}\"\ntimeout_ms = 2000\ndoubt_sec = 1\nbreaker = {{ failures = 3, probe_sec = 0.2 }}\n",
                receiver.url,
                memory.url()
            ),
        );
        let mut story = Story { home, memory, receiver, sick, server: None, well: 0, ailing: 0 };
        story.start(&[]);
        let subscribe = |story: &mut Story, path: &str, event_types: Value| {
            let url = format!("{}/{path}", story.receiver.url);
            let wish = json!({"url": url, "event_types": event_types});
            story.post("/v1/subscriptions", "", &wish, &[201]).json()["id"].as_i64().unwrap()
        };
        story.well = subscribe(&mut story, "well", json!(["*"]));
        story.ailing = subscribe(&mut story, "ailing", json!(["a.*"]));
        story
    }

    /// Starts a server with these variables; if it dies of them before it listens, one without. Does it live with them?
    fn start(&mut self, variables: &[(&str, &str)]) -> bool {
        self.server = None; // killed
        let mut command = self.home.command(&["serve", "--listen", "127.0.0.1:0"]);
        command.envs(variables.iter().copied());
        self.server = Server::unless_it_dies(command).ok();
        let lives = self.server.is_some();
        if !lives {
            assert!(!variables.is_empty(), "it does not start any more");
            self.start(&[]);
        }
        lives
    }

    /// Asks until there is an answer, as somebody does who was told nothing; starts the server again when it died.
    fn ask(&mut self, method: &str, path: &str, key: &str, body: &str, expected: &[u16]) -> Response {
        let key = [("content-type", "application/json"), ("Idempotency-Key", key)];
        let headers = if key[1].1.is_empty() { &key[..1] } else { &key[..] };
        for _ in 0..200 {
            let address = self.server.as_ref().unwrap().address.clone();
            match try_exchange(&address, method, path, headers, body.as_bytes()) {
                Ok(answer) if expected.contains(&answer.status) => return answer,
                Ok(answer) if !matches!(answer.status, 0 | 408 | 500..) => panic!("{method} {path}: {answer:#?}"),
                _ => {}
            }
            self.revive();
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{method} {path} is never answered");
    }

    fn post(&mut self, path: &str, key: &str, body: &Value, expected: &[u16]) -> Response {
        self.ask("POST", path, key, &body.to_string(), expected)
    }

    fn revive(&mut self) {
        if self.server.as_mut().unwrap().is_gone() {
            self.start(&[]);
        }
    }

    fn wait(&mut self, what: &str, sql: &str, expected: i64) {
        wait_until(what, || {
            self.revive();
            self.home.number(sql) == expected
        });
    }

    fn outbox(&mut self, body: &str) -> i64 {
        let answer = self.ask("POST", "/v1/outbox/work", body, body, &[200, 201]).json();
        answer["id"].as_i64().unwrap()
    }

    fn publish(&mut self, event_type: &str, name: &str) -> i64 {
        let event = json!({"event_type": event_type, "payload": name, "external_id": name});
        self.post("/v1/events", "", &event, &[200, 202]).json()["event_id"].as_i64().unwrap()
    }

    /// Everything once, with names of its own.
    fn round(&mut self, n: usize) {
        let (bad, ailing) = (format!("bad-{n};"), format!("ailing-{n};"));
        self.sick.falls_ill(&bad);
        self.sick.falls_ill(&ailing);
        // Messages: one arrives, one is given up and brought back.
        let good = self.outbox(&format!("good-{n};"));
        let died = self.outbox(&bad);
        self.post(&format!("/v1/outbox/{good}/retry"), "", &json!({}), &[200, 404, 409]);
        // An order, two memories (OpenMemory is away for the second), events: one is given up at one of two.
        self.ask("POST", "/do/order", &format!("order-{n}"), ORDER, &[200, 201]);
        let note = |which: &str| json!({"payload_md": format!("{which} note {n};"), "target_space": "team:a"});
        self.post("/memory/store", "", &note("direct"), &[200, 202]);
        self.memory.told(json!({"mode": "fail_writes", "status": 503}));
        self.post("/memory/store", "", &note("deferred"), &[200, 202]);
        self.memory.told(json!({"mode": "well"}));
        let event = self.publish("a.happened", &ailing);
        // A pause, an event meanwhile, changes, and the end of the pause.
        let subscription = format!("/v1/subscriptions/{}", self.well);
        self.post(&format!("{subscription}/pause"), "", &json!({}), &[200]);
        let waiting = self.publish("b.happened", &format!("waiting-{n};"));
        self.post(&format!("{subscription}/rotate-secret"), "", &json!({"overlap": "1s"}), &[200]);
        let change = json!({"description": format!("round {n}"), "max_in_flight": 3 + n % 2}).to_string();
        self.ask("PATCH", &subscription, "", &change, &[200]);
        self.post(&format!("{subscription}/resume"), "", &json!({}), &[200]);
        // One that is made only to go again; whoever was not told of it makes a second.
        let passing = json!({"url": format!("{}/passing", self.receiver.url), "event_types": [format!("passing-{n}")]});
        let passing = self.post("/v1/subscriptions", "", &passing, &[201]).json()["id"].as_i64().unwrap();
        self.ask("DELETE", &format!("/v1/subscriptions/{passing}"), "", "", &[200, 204, 404]);
        self.post("/v1/reconcile", "", &json!({}), &[200]);
        self.post("/v1/lanes/work/pause", "", &json!({}), &[200]);
        self.post("/v1/lanes/work/resume", "", &json!({}), &[200]);

        let of_message =
            |id: i64, status: &str| format!("SELECT COUNT(*) FROM outbox_done WHERE id = {id} AND status = '{status}'");
        self.wait("the message is given up", &of_message(died, "dead"), 1);
        let of_event = |id: i64, status: &str| {
            format!("SELECT COUNT(*) FROM webhook_delivery_sagas WHERE event_id = {id} AND status = '{status}'")
        };
        self.wait("the delivery is given up", &of_event(event, "DeadLettered"), 1);
        self.sick.is_well(&bad);
        self.sick.is_well(&ailing);
        if n.is_multiple_of(2) {
            self.post(&format!("/v1/outbox/{died}/requeue"), "", &json!({}), &[200, 409]);
        } else {
            self.post("/v1/outbox/requeue", "", &json!({"filter": {"lane": "work"}}), &[200]);
        }
        let letter = self.home.number(&format!("SELECT id FROM dead_letters WHERE event_id = {event}"));
        self.post(&format!("/v1/dead-letters/{letter}/requeue"), "", &json!({}), &[200, 201]);

        for id in [good, died] {
            self.wait("the message is sent", &of_message(id, "sent"), 1);
        }
        self.wait("the event has arrived at both", &of_event(event, "Completed"), 2);
        self.wait("the event has arrived after the pause", &of_event(waiting, "Completed"), 1);
        let at = self.ask("GET", &format!("/v1/events/{waiting}"), "", "", &[200]).json()["created_at"].clone();
        let replay =
            json!({"subscription_id": self.well, "from": at, "to": "9999-01-01T00:00:00Z", "event_types": ["b.*"]});
        self.post("/v1/replays", "", &replay, &[202]);
        self.wait("the replay is over", "SELECT COUNT(*) FROM replays WHERE status <> 'done'", 0);
        let open = "SELECT COUNT(*) FROM webhook_delivery_sagas WHERE status NOT IN ('Completed', 'DeadLettered')";
        self.wait("what was replayed has arrived", open, 0);
        let order =
            format!("SELECT COUNT(*) FROM idempo_ledger WHERE idempotency_key = 'order-{n}' AND status = 'succeeded'");
        self.wait("the order is executed", &order, 1);
        self.wait("nothing is left", "SELECT COUNT(*) FROM outbox", 0);
        self.wait("no result waits", "SELECT COUNT(*) FROM webhook_results", 0);
        let undecided = "SELECT COUNT(*) FROM memory_writes WHERE state <> 'stored'";
        self.wait("the memories are stored", undecided, 0);
        self.judge(n);
    }

    /// By the books of others and the rows.
    fn judge(&mut self, n: usize) {
        let requests = self.receiver.requests();
        let arrived = |word: &str| requests.iter().filter(|request| request.body.contains(word)).count();
        // One crash, so at most one of them twice; two attempts that fail, and again by hand.
        let (good, bad) = (arrived(&format!("good-{n};")), arrived(&format!("bad-{n};")));
        assert!((1..=2).contains(&good) && (3..=4).contains(&bad), "{good} and {bad} requests");
        let (ailing, waiting) = (arrived(&format!("ailing-{n};")), arrived(&format!("waiting-{n};")));
        assert!((4..=5).contains(&ailing), "{ailing} requests");
        // Replayed once, or twice by whoever was not told of the first.
        assert!((2..=4).contains(&waiting), "{waiting} requests");
        let replays = self.home.number("SELECT COUNT(*) FROM replays");
        let replayed = self.home.number("SELECT COUNT(*) FROM webhook_delivery_sagas WHERE replay_id IS NOT NULL");
        assert!(
            replayed <= replays && (n as i64 + 1..=2 * (n as i64 + 1)).contains(&replayed),
            "{replayed} of {replays}"
        );
        let executions = format!("SELECT COUNT(*) FROM paper_executions WHERE idempotency_key = 'order-{n}'");
        assert_eq!(self.home.number(&executions), 1, "the order is executed once");
        let contents = self.memory.contents();
        for which in ["direct", "deferred"] {
            let note = format!("{which} note {n};");
            assert_eq!(contents.iter().filter(|text| **text == note).count(), 1, "{note} is there once");
        }
        let rounds = n as i64 + 1;
        for (what, sql, expected) in [
            ("messages", "SELECT COUNT(*) FROM outbox_done WHERE lane = 'work'", 2 * rounds),
            ("events", "SELECT COUNT(*) FROM events", 2 * rounds),
            ("deliveries", "SELECT COUNT(*) FROM webhook_delivery_sagas WHERE replay_id IS NULL", 4 * rounds),
            ("dead letters", "SELECT COUNT(*) FROM dead_letters", rounds),
            ("orders", "SELECT COUNT(*) FROM idempo_ledger", rounds),
            ("open audits", "SELECT COUNT(*) FROM write_audit WHERE status = 'pending'", 0),
        ] {
            assert_eq!(self.home.number(sql), expected, "{what}");
        }
    }

    fn url(&self) -> String {
        let file = || format!("sqlite://{}", self.home.path("postrider.db").display());
        self.home.database.url().map_or_else(file, str::to_owned)
    }
}

/// Runs the story once to learn the places, then once for each of them, with a server that dies there.
fn dies_at_every_commit(database: Database) {
    let mut story = Story::begin(database);
    let book = story.home.path("places");
    story.start(&[("POSTRIDER_FAILPOINTS", book.to_str().unwrap())]);
    story.round(0);
    let places = std::fs::read_to_string(&book).unwrap();
    let mut places: Vec<&str> = places.lines().collect();
    places.sort_unstable();
    for part in ["postrider::", "postrider_webhooks::", "postrider_orders::", "postrider_memories::"] {
        assert!(places.iter().any(|place| place.starts_with(part)), "no commit of {part} in {places:#?}");
    }
    let all = std::env::var("POSTRIDER_CRASH_POINTS").is_ok_and(|value| value == "all");
    // Each run tries others: which, it says.
    let which = fastrand::usize(..EVERY);
    println!("every {EVERY}th place, from place {which} on");
    let chosen: Vec<&str> =
        places.iter().copied().enumerate().filter(|(i, _)| all || i % EVERY == which).map(|p| p.1).collect();
    let mut unreached = Vec::new();
    for (i, place) in chosen.iter().enumerate() {
        println!("{i} {place}");
        let lives = story.start(&[("POSTRIDER_FAILPOINT", place)]);
        let before = story.server.as_ref().unwrap().pid();
        story.round(i + 1);
        if lives && story.server.as_ref().unwrap().pid() == before {
            unreached.push(*place);
        }
    }
    println!("{} places, {} tried, not reached again: {unreached:?}", places.len(), chosen.len());
    // What only happens now and then (a sweep that finds something, a retry after a busy moment) may not happen again.
    assert!(unreached.len() * 2 <= chosen.len(), "hardly any died: {unreached:?} of {chosen:?}");
    story.home.is_healthy();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let url = story.url();
    runtime.block_on(async { Deliveries::read(&mut Session::to(&url).await).await }).judge().is_clean();
}

#[test]
fn sqlite_dies_at_every_commit() {
    dies_at_every_commit(Database::sqlite());
}

#[test]
fn postgres_dies_at_every_commit() {
    dies_at_every_commit(Database::postgres());
}

#[test]
fn mysql_dies_at_every_commit() {
    dies_at_every_commit(Database::mysql());
}

// The faults of docs/guarantees.md that need a place to die at.

fn on_every_database(case: impl Fn(Home)) {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        case(Home::on(database));
    }
}

fn lane_to(home: &Home, receiver: &Receiver) {
    let lease = LEASE.as_secs();
    let lane = format!(
        "[outbox]\ndrain_timeout_sec = 30\n[lane.work]\ncourier = \"http\"\nurl = \"{}\"\nlock_lease_sec = {lease}\npoll_interval_sec = 0.1\n",
        receiver.url
    );
    home.write("postrider.toml", &lane).run(&["migrate"]).done();
}

fn worker(home: &Home) -> Running {
    home.start_silent(&["worker", "--lane", "work"])
}

fn worker_with(home: &Home, place: &str) -> std::process::Child {
    let mut command = home.command(&["worker", "--lane", "work"]);
    command.env("POSTRIDER_FAILPOINT", place).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.spawn().unwrap()
}

fn dies_at(home: &Home, place: &str) {
    let mut dying = worker_with(home, place);
    wait_until(&format!("it dies at {place}"), || dying.try_wait().unwrap().is_some());
    assert!(dying.wait().unwrap().code().is_none(), "killed, not ended");
}

fn is_sent(home: &Home, id: i64) -> Value {
    wait_until("it is sent", || home.show(id)["status"] == "sent");
    home.show(id)
}

/// The client hears nothing, asks again with its key, and is told of the one message there is.
#[test]
fn row_1_killed_after_the_commit_of_an_enqueue() {
    on_every_database(|home| {
        home.write("postrider.toml", "[lane.work]\ncourier = \"noop\"\n").run(&["migrate"]).done();
        let places = [("before", "created", 0), ("after", "exists", 1)];
        for (when, outcome, there) in places {
            let command = ["enqueue", "work", "--payload", "x", "--key", when];
            let place = format!("postrider::outbox::Outbox::enqueue_as/{when}");
            let killed = home.command(&command).env("POSTRIDER_FAILPOINT", &place).output().unwrap();
            assert!(killed.status.code().is_none() && killed.stdout.is_empty(), "{place}: {killed:?}");
            let count = |table: &str| home.number(&format!("SELECT COUNT(*) FROM {table}"));
            let (messages, keys) = (count("outbox"), count("outbox_keys"));
            let again = home.run(&command).done().json();
            assert_eq!(again["outcome"], outcome, "{when}");
            let before = i64::from(when == "after");
            assert_eq!((messages - before, keys - before), (there, there), "{when}");
            assert_eq!(count("outbox") - before, 1, "one message, whoever asked");
        }
    });
}

/// After the claim's commit, before the first byte, and after the answer: the lease ends, somebody else takes over under the
/// next token, and the takeover is counted.
#[test]
fn rows_3_4_5_killed_after_claim_before_send_and_before_ack() {
    on_every_database(|home| {
        let receiver = Receiver::start(|_| Some(200));
        lane_to(&home, &receiver);
        for (place, requests) in [("claimed", 1), ("sending", 1), ("delivered", 2)] {
            let id = home.enqueue(&["work", "--payload", place]);
            dies_at(&home, place);
            let held = home.show(id);
            assert_eq!((&held["status"], &held["lease_token"]), (&json!("leased"), &json!(1)), "{place}: {held}");
            let running = worker(&home);
            let shown = is_sent(&home, id);
            assert_eq!((&shown["lease_token"], &shown["crashes"]), (&json!(2), &json!(1)), "{place}: {shown}");
            assert_eq!(shown["history"][0]["kind"], "takeover", "{place}: {shown}");
            drop(running);
            let requested: Vec<Request> =
                receiver.requests().into_iter().filter(|request| request.body == place).collect();
            assert_eq!(requested.len(), requests, "{place}");
            let keys: HashSet<&str> = requested.iter().map(|request| request.header("idempotency-key")).collect();
            assert_eq!(keys.len(), 1, "the same key each time, so that a receiver can tell");
            let last = requested.last().unwrap();
            assert_eq!(last.header("postrider-lease-token"), "2", "{place}");
        }
        home.is_healthy();
    });
}

#[test]
fn row_6_killed_in_the_middle_of_a_drain() {
    on_every_database(|home| {
        let (arrived, release) = (Arc::new(Mutex::new(0)), Arc::new(Mutex::new(false)));
        let (count, open) = (arrived.clone(), release.clone());
        let receiver = Receiver::start(move |_| {
            *count.lock().unwrap() += 1;
            let begun = std::time::Instant::now();
            while !*open.lock().unwrap() && begun.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(10));
            }
            Some(200)
        });
        lane_to(&home, &receiver);
        let ids: Vec<i64> = (0..20).map(|n| home.enqueue(&["work", "--payload", &n.to_string()])).collect();
        let mut dying = worker_with(&home, "draining");
        wait_until("deliveries are under way", || *arrived.lock().unwrap() > 0);
        let pid = rustix::process::Pid::from_child(&dying);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        wait_until("it dies draining", || dying.try_wait().unwrap().is_some());
        assert!(dying.wait().unwrap().code().is_none(), "killed, not ended");
        *release.lock().unwrap() = true;
        let running = worker(&home);
        for id in &ids {
            is_sent(&home, *id);
        }
        drop(running);
        let bodies: HashSet<String> = receiver.requests().into_iter().map(|request| request.body).collect();
        assert_eq!(bodies.len(), ids.len(), "nothing is lost");
        home.is_healthy();
    });
}

/// Between the claim's commit and the first byte, for longer than the lease: whoever took over has the one outcome, whatever
/// the sleeper does when it wakes up.
#[test]
fn row_8_paused_between_the_claim_and_the_send() {
    on_every_database(|home| {
        let receiver = Receiver::start(|_| Some(200));
        lane_to(&home, &receiver);
        let id = home.enqueue(&["work", "--payload", "x"]);
        let mut asleep = worker_with(&home, "sending=stop");
        wait_until("it holds the message", || home.show(id)["status"] == "leased");
        let running = worker(&home);
        let shown = is_sent(&home, id);
        assert_eq!((&shown["lease_token"], &shown["crashes"]), (&json!(2), &json!(1)), "{shown}");
        let pid = rustix::process::Pid::from_child(&asleep);
        rustix::process::kill_process(pid, Signal::CONT).unwrap();
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        wait_until("the sleeper has ended", || asleep.try_wait().unwrap().is_some());
        drop(running);
        assert_eq!(home.show(id), shown, "what has ended stays as it is");
        let tokens: Vec<String> =
            receiver.requests().iter().map(|request| request.header("postrider-lease-token").to_owned()).collect();
        assert!(tokens == ["2"] || tokens == ["2", "1"], "a late one can be told by its token: {tokens:?}");
        home.is_healthy();
    });
}
