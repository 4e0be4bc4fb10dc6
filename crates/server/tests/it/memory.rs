//! The memory gateway with all its parts: servers, workers, databases, and an OpenMemory that is stopped, started and told
//! to misbehave. What holds is looked up in the database and in what OpenMemory was given, not in what the gateway says.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::api::{Response, Server, exchange};
use crate::home::{Home, PATIENCE, Running, wait_until};
use crate::scratch::Database;

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

/// An OpenMemory of our own, on a port that stays its own while it is stopped.
pub struct OpenMemory {
    running: Option<Running>,
    pub address: String,
    flags: Vec<String>,
}

impl OpenMemory {
    pub fn start(home: &Home, flags: &[&str]) -> OpenMemory {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let mut memory = OpenMemory { running: None, address, flags };
        memory.start_again(home);
        memory
    }

    pub fn start_again(&mut self, home: &Home) {
        let data = home.path("openmemory.ndjson");
        let mut args = vec!["stand-in", "openmemory", "--listen", &self.address, "--data", data.to_str().unwrap()];
        args.extend(self.flags.iter().map(String::as_str));
        self.running = Some(home.start_silent(&args));
        wait_until("OpenMemory listens", || std::net::TcpStream::connect(&self.address).is_ok());
    }

    pub fn stop(&mut self) {
        self.running = None;
    }

    pub fn pid(&self) -> i32 {
        self.running.as_ref().unwrap().pid().as_raw_nonzero().get()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn told(&self, body: Value) {
        exchange(&self.address, "POST", "/stand-in", &[], body.to_string().as_bytes()).answered(200);
    }

    pub fn state(&self) -> Value {
        exchange(&self.address, "GET", "/stand-in", &[], b"").answered(200).json()
    }

    /// What it has, by content.
    pub fn contents(&self) -> Vec<String> {
        let state = self.state();
        let contents = state["memories"].as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap().to_owned());
        contents.collect()
    }
}

pub fn on_every_database(case: impl Fn(Home)) {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        case(Home::on(database));
    }
}

/// A gateway that finds out fast.
pub fn configured(home: &Home, memory: &OpenMemory, more: &str) {
    home.write(
        "postrider.toml",
        &format!(
            "[memory]\nurl = \"{}\"\ntimeout_ms = 2000\ndoubt_sec = 3\nbreaker = {{ failures = 3, probe_sec = 0.2 }}\n{more}",
            memory.url()
        ),
    );
}

pub fn store(server: &Server, text: &str, space: &str) -> Response {
    let body = json!({ "payload_md": text, "target_space": space });
    server.post("/memory/store", &JSON, &body.to_string())
}

pub fn query(server: &Server, body: Value) -> Value {
    server.post("/memory/query", &JSON, &body.to_string()).answered(200).json()
}

fn audit_of(server: &Server, outbox_id: i64) -> Vec<(String, String, String)> {
    let rows = server.get(&format!("/v1/audit?outbox_id={outbox_id}")).answered(200).json();
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let rows = rows["items"].as_array().unwrap().iter();
    rows.rev().map(|row| (text(row, "action"), text(row, "status"), text(row, "reason"))).collect()
}

/// Every field of a store's answer is there, whatever became of it; one that has nothing to say is null.
pub fn has_all_fields(answer: &Value) {
    for name in
        ["ok", "action", "outbox_id", "correlation_id", "space_written", "memory_id", "evidence_refs", "message"]
    {
        assert!(answer.get(name).is_some(), "{name} is missing: {answer}");
    }
    assert!(answer["outbox_id"].is_null() || answer["outbox_id"].is_i64(), "{answer}");
    assert!(answer["correlation_id"].as_str().is_some_and(|id| !id.is_empty()), "{answer}");
}

/// All fields of the deferred answer, with their types.
pub fn assert_deferred(answer: &Value) -> i64 {
    has_all_fields(answer);
    assert_eq!(answer["ok"], false, "{answer}");
    assert_eq!(answer["action"], "deferred", "{answer}");
    assert!(answer["space_written"].is_null() && answer["memory_id"].is_null(), "{answer}");
    assert!(answer["evidence_refs"].is_array() && answer["message"].is_string(), "{answer}");
    assert!(answer["deduplicated"].is_boolean() && answer["payload_sha"].is_string(), "{answer}");
    answer["outbox_id"].as_i64().unwrap_or_else(|| panic!("an integer: {answer}"))
}

#[test]
fn an_outage_from_its_beginning_to_its_end() {
    on_every_database(|home| {
        let mut memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "[lane.memory]\nbackoff_sec = [1]\n");
        let server = Server::start(&home, &[]);
        let first = store(&server, "before the outage", "team:a").answered(200).json();
        has_all_fields(&first);
        assert_eq!(
            (&first["ok"], &first["action"], &first["outbox_id"]),
            (&json!(true), &json!("allow"), &Value::Null)
        );
        assert_eq!(first["space_written"], "team:a");
        assert!(first["memory_id"].is_string());

        memory.stop();
        for n in 0..3 {
            assert_deferred(&store(&server, &format!("finding out {n}"), "team:a").answered(202).json());
        }
        let next = AtomicUsize::new(0);
        let slowest = std::sync::Mutex::new(Duration::ZERO);
        let ids: Vec<(String, i64)> = std::thread::scope(|scope| {
            let clients = (0..8).map(|_| {
                scope.spawn(|| {
                    let mut ids = Vec::new();
                    loop {
                        let n = next.fetch_add(1, Ordering::Relaxed);
                        if n >= 100 {
                            return ids;
                        }
                        let (text, began) = (format!("outage note {n} 天气"), Instant::now());
                        let answer = store(&server, &text, "team:a").answered(202).json();
                        let mut slowest = slowest.lock().unwrap();
                        *slowest = slowest.max(began.elapsed());
                        ids.push((text, assert_deferred(&answer)));
                    }
                })
            });
            clients.collect::<Vec<_>>().into_iter().flat_map(|client| client.join().unwrap()).collect()
        });
        let slowest = *slowest.lock().unwrap();
        assert!(slowest < Duration::from_secs(2), "nobody waits for OpenMemory: {slowest:?}");
        let mut distinct: Vec<i64> = ids.iter().map(|(_, id)| *id).collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 100, "each has its own");

        let found = query(&server, json!({ "query": "天气", "top_k": 100 }));
        assert_eq!((&found["degraded"], &found["total"]), (&json!(true), &json!(100)), "{found}");
        assert!(found["message"].as_str().unwrap().contains("ely less"), "{found}");
        assert!(found["results"].as_array().unwrap().iter().all(|r| r["source"] == "outbox_memory"));
        let other = query(&server, json!({ "query": "天气", "spaces": ["team:b"] }));
        assert_eq!(other["total"], 0, "another team's memories stay its own: {other}");
        let stored = query(&server, json!({ "query": "before", "spaces": ["team:a"] }));
        assert_eq!(stored["results"][0]["source"], "memory_writes", "{stored}");

        memory.start_again(&home);
        wait_until("all is flushed", || home.stats("memory")["sent"] == 103);
        let stats = home.stats("memory");
        assert_eq!((&stats["pending"], &stats["leased"], &stats["dead"]), (&json!(0), &json!(0), &json!(0)));
        let contents = memory.contents();
        assert_eq!(contents.len(), 104, "each once, though it would have taken them twice");
        for (text, id) in &ids {
            assert_eq!(contents.iter().filter(|content| *content == text).count(), 1, "{text}");
            let story = audit_of(&server, *id);
            let (first, last) = (&story[0], story.last().unwrap());
            assert_eq!((first.0.as_str(), first.1.as_str()), ("redirect", "redirected"), "{story:?}");
            assert!(first.2.starts_with("openmemory_write_failed:"), "{story:?}");
            assert_eq!((last.0.as_str(), last.2.as_str()), ("allow", "outbox_flush_success"), "{story:?}");
        }
        assert_eq!(query(&server, json!({ "query": "天气", "top_k": 100 }))["degraded"], false);
        let again = store(&server, "outage note 7 天气", "team:a").answered(200).json();
        assert_eq!(again["deduplicated"], true, "what was flushed is known: {again}");
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit WHERE status = 'pending'"), 0);
        if matches!(home.database, Database::Postgres { .. }) {
            for view in ["logbook.outbox_memory", "governance.write_audit"] {
                assert!(home.number(&format!("SELECT COUNT(*) FROM {view}")) > 100, "{view}");
            }
            for view in ["logbook.events", "analysis.knowledge_candidates"] {
                assert_eq!(home.number(&format!("SELECT COUNT(*) FROM {view}")), 0, "{view}");
            }
            let cursors = "SELECT COUNT(*) FROM logbook.kv WHERE namespace <> 'gateway.upstream'";
            assert_eq!(home.number(cursors), 0, "nothing but what OpenMemory is known by");
        }
    });
}

/// A service that takes connections and does not answer costs three callers a timeout, and nobody else.
#[test]
fn while_the_breaker_is_open_nobody_asks() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
    home.write(
        "postrider.toml",
        &format!(
            "[memory]\nurl = \"{}\"\ntimeout_ms = 400\nbreaker = {{ failures = 3, probe_sec = 0.2 }}\n[lane.memory]\nbackoff_sec = [1]\n",
            memory.url()
        ),
    );
    let server = Server::start(&home, &[]);
    store(&server, "before", "team:a").answered(200);
    memory.told(json!({ "mode": "slow", "delay_ms": 3000 }));
    for n in 0..3 {
        assert_deferred(&store(&server, &format!("timed out {n}"), "team:a").answered(202).json());
    }
    wait_until("the breaker is open", || server.get("/reliability/report").json()["breaker"] == "open");
    let asked = memory.state()["calls"].clone();
    let begun = Instant::now();
    for n in 0..30 {
        assert_deferred(&store(&server, &format!("at once {n}"), "team:a").answered(202).json());
    }
    assert!(begun.elapsed() < 30 * Duration::from_millis(400), "no caller waits for a timeout");
    assert_eq!(query(&server, json!({ "query": "once" }))["degraded"], true);
    assert_eq!(memory.state()["calls"], asked, "neither callers nor the flush asked");
    let report = server.get("/reliability/report").json();
    assert_eq!((&report["breaker"], &report["openmemory"]["status"]), (&json!("open"), &json!("failed")), "{report}");
    memory.told(json!({ "mode": "well" }));
    wait_until("all is flushed", || home.stats("memory")["sent"] == 33);
    assert_eq!(server.get("/reliability/report").json()["breaker"], "closed");
    // It closes by itself, though nobody calls.
    memory.told(json!({ "mode": "down" }));
    for _ in 0..3 {
        query(&server, json!({ "query": "once" }));
    }
    assert_eq!(server.get("/reliability/report").json()["breaker"], "open");
    memory.told(json!({ "mode": "well" }));
    wait_until("it is closed again", || server.get("/reliability/report").json()["breaker"] == "closed");
}

/// It answers questions and fails writes: the breaker opens and closes, and no memory is tried more often for that.
#[test]
fn a_service_that_is_half_well_costs_no_memory_its_attempts() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
    configured(&home, &memory, "");
    let server = Server::start(&home, &[]);
    memory.told(json!({ "mode": "fail_writes", "status": 500 }));
    let mut stored = 0;
    wait_until("it was asked in vain often enough", || {
        store(&server, &format!("half well {stored}"), "team:a").answered(202);
        stored += 1;
        memory.state()["failed_adds"].as_i64().unwrap() >= 15
    });
    assert_eq!(home.stats("memory")["dead"], 0);
    let most = home.number("SELECT MAX(attempts) FROM outbox WHERE lane = 'memory'");
    assert!(most <= 1, "each waits its minute, whatever the breaker does: {most} attempts");
    memory.told(json!({ "mode": "well" }));
    home.run(&["memory", "flush"]).done();
    assert_eq!(memory.contents().len(), stored);
}

/// A proxy's page is not what OpenMemory says of a memory.
#[test]
fn what_stands_before_openmemory_condemns_no_memory() {
    let home = Home::sqlite();
    let proxy = crate::receiver::Receiver::start(|_| Some(400));
    home.write("postrider.toml", &format!("[memory]\nurl = \"{}\"\n", proxy.url.trim_end_matches('/')));
    home.run(&["migrate"]).done();
    let id = assert_deferred(&home.run(&["memory", "store", "kept", "--json"]).done().json());
    let flushed = home.run(&["memory", "flush", "--json"]).ended(1).json();
    assert_eq!((&flushed["dead"], &flushed["left"]), (&json!(0), &json!(1)), "{flushed}");
    assert_eq!((&home.show(id)["attempts"], &home.show(id)["status"]), (&json!(0), &json!("pending")));
}

#[test]
fn a_memory_that_was_applied_though_its_answer_was_lost_is_one_memory() {
    for dialect in ["js", "py"] {
        let home = Home::sqlite();
        let memory = OpenMemory::start(&home, &["--dialect", dialect]);
        configured(&home, &memory, "[lane.memory]\nbackoff_sec = [1]\n");
        let server = Server::start(&home, &[]);
        memory.told(json!({ "mode": "lose_reply" }));
        let answer = store(&server, "said once", "team:a").answered(202).json();
        let id = assert_deferred(&answer);
        let twin = store(&server, "said once", "team:a").answered(202).json();
        assert_eq!((twin["outbox_id"].as_i64(), &twin["deduplicated"]), (Some(id), &json!(true)), "{twin}");
        assert_eq!(memory.contents(), ["said once"], "it was applied");
        memory.told(json!({ "mode": "well" }));
        wait_until("it is flushed", || home.stats("memory")["sent"] == 1);
        assert_eq!(memory.contents(), ["said once"], "and is one memory still");
        assert_eq!(home.show(id)["result_ref"], "mem-1");
        let found = query(&server, json!({ "query": "once", "spaces": ["team:a"] }));
        assert_eq!(
            (&found["degraded"], &found["results"][0]["memory_id"]),
            (&json!(false), &json!("mem-1")),
            "{dialect}"
        );
    }
}

#[test]
fn a_rotated_key_loses_nothing_and_is_told() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--api-key", "right"]);
    home.write("key", "right\n");
    let pager = proving_receiver();
    configured(
        &home,
        &memory,
        &format!(
            "api_key = \"file:key\"\n[alerts]\nurl = \"{}\"\nevery = \"1s\"\n[lane.memory]\nbackoff_sec = [1]\n",
            pager.url
        ),
    );
    let server = Server::start(&home, &[]);
    store(&server, "with the right key", "team:a").answered(200);
    memory.told(json!({ "api_key": "rotated" }));
    let ids: Vec<i64> = (0..5)
        .map(|n| assert_deferred(&store(&server, &format!("rotated {n}"), "team:a").answered(202).json()))
        .collect();
    assert_eq!(audit_of(&server, ids[0])[0].2, "openmemory_write_failed:http_403");
    let report = server.get("/reliability/report").answered(200).json();
    assert_eq!(report["openmemory"]["status"], "failed", "{report}");
    assert!(report["openmemory"]["detail"].as_str().unwrap().contains("403"), "{report}");
    wait_until("the alert has come", || pager.requests().iter().any(|r| r.body.contains("capability_failed")));
    wait_until("it was tried and given back", || {
        home.number("SELECT COUNT(*) FROM outbox WHERE last_error_code = 'OPENMEMORY_UNUSABLE' AND attempts = 0") == 5
    });
    // The new key is put where the old one was; nobody restarts anything.
    home.write("key", "rotated\n");
    let mut tries = 0;
    wait_until("the new key is taken", || {
        tries += 1;
        store(&server, &format!("with the new key {tries}"), "team:a").status == 200
    });
    wait_until("all is flushed", || home.stats("memory")["sent"] == 5 + tries - 1);
    assert_eq!(home.stats("memory")["dead"], 0);
    // The key is another tenant's: what was written with the first one is not shown to it.
    let resent = home.run(&["memory", "resend", "--missing", "--json"]).done().json();
    assert_eq!((&resent["missing"], &resent["queued"]), (&json!(1), &json!(1)), "{resent}");
    wait_until("it is the one we know", || {
        query(&server, json!({ "query": "key" }));
        server.get("/reliability/report").json()["openmemory"]["status"] == "ok"
    });
    wait_until("its end is told too", || {
        pager.requests().iter().any(|r| r.body.contains("capability_failed") && r.body.contains("resolved"))
    });
    // Restarted with another key: what is told is not taken back while the key is wrong.
    let told = |what: &str| {
        pager.requests().iter().filter(|r| r.body.contains("capability_failed") && r.body.contains(what)).count()
    };
    let (raised, resolved) = (told("raised"), told("resolved"));
    memory.told(json!({ "mode": "down" }));
    for n in 0..3 {
        store(&server, &format!("down {n}"), "team:a").answered(202);
    }
    wait_until("the outage is told", || told("raised") > raised);
    memory.told(json!({ "mode": "well", "api_key": "once more" }));
    wait_until("it is known to refuse", || {
        server.get("/reliability/report").json()["openmemory"]["detail"].as_str().is_some_and(|d| d.contains("403"))
    });
    assert_eq!(told("resolved"), resolved, "it cannot be used yet");
    home.write("key", "once more\n");
    wait_until("the last key is taken", || {
        tries += 1;
        store(&server, &format!("with the last key {tries}"), "team:a").status == 200
    });
    wait_until("all is written for the last key too", || {
        home.run(&["memory", "resend", "--missing", "--json"]).code == 0
    });
    wait_until("the end is told", || {
        query(&server, json!({ "query": "key" }));
        told("resolved") > resolved
    });
    let (_, log) = server.stop();
    assert!(log.contains("cannot be used as it is configured"), "{log}");
    assert!(!log.contains("rotated 1") && !log.contains("right key"), "no memory in the log");
}

fn proving_receiver() -> crate::receiver::Receiver {
    crate::receiver::Receiver::start(|_| Some(200))
}

/// D8's table, by what is stored, queued and told.
#[test]
fn what_openmemory_answers_decides() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
    configured(&home, &memory, "[lane.memory]\nbackoff_sec = [3600]\n");
    let server = Server::start(&home, &["--no-workers"]);
    for (status, answer, class) in [
        (400, 403, "openmemory_refused:http_400"),
        (413, 403, "openmemory_refused:http_413"),
        (422, 403, "openmemory_refused:http_422"),
        (401, 202, "openmemory_write_failed:http_401"),
        (403, 202, "openmemory_write_failed:http_403"),
        (404, 202, "openmemory_write_failed:http_404"),
        (405, 202, "openmemory_write_failed:http_405"),
        (503, 202, "openmemory_write_failed:http_503"),
    ] {
        memory.told(json!({ "mode": "status", "status": status }));
        let answer = store(&server, &format!("status {status}"), "team:a").answered(answer).json();
        let id = answer["correlation_id"].as_str().unwrap();
        let rows = server.get(&format!("/v1/audit?correlation_id={id}")).json();
        assert_eq!(rows["items"].as_array().unwrap().len(), 1, "one row in two phases: {rows}");
        assert_eq!(rows["items"][0]["reason"], class);
        has_all_fields(&answer);
        if answer["action"] == "reject" {
            assert_eq!((&answer["ok"], &answer["outbox_id"]), (&json!(false), &Value::Null), "{answer}");
            assert_eq!(answer["error"]["code"], "MEMORY_REFUSED", "{answer}");
            assert_eq!(rows["items"][0]["status"], "failed");
        }
        memory.told(json!({ "mode": "well" }));
        store(&server, &format!("fine after {status}"), "team:a").answered(200);
    }
    memory.told(json!({ "mode": "status", "status": 503, "error": "auth_not_configured" }));
    store(&server, "nobody configured it", "team:a").answered(202);
    let report = server.get("/reliability/report").json();
    assert_eq!(report["openmemory"]["status"], "failed", "that is ours: {report}");
    memory.told(json!({ "mode": "well" }));
    store(&server, "fine again", "team:a").answered(200);
    // What was refused was never taken, and is not recalled.
    memory.told(json!({ "mode": "down" }));
    let found = query(&server, json!({ "query": "status", "top_k": 100 }));
    let contents: Vec<&str> =
        found["results"].as_array().unwrap().iter().map(|r| r["content"].as_str().unwrap()).collect();
    assert!(contents.contains(&"status 503") && !contents.contains(&"status 422"), "{contents:?}");
    memory.told(json!({ "mode": "well" }));
    wait_until("it answers", || store(&server, "and again", "team:a").status == 200);
    memory.told(json!({ "mode": "no_id" }));
    let answer = store(&server, "an answer without an id", "team:a").answered(202).json();
    assert_eq!(audit_of(&server, assert_deferred(&answer))[0].2, "openmemory_write_failed:no_id");
    // Refused by the service, then good: the next store of the same asks it again.
    memory.told(json!({ "mode": "well" }));
    store(&server, "status 400", "team:a").answered(200);
    assert!(memory.contents().contains(&"status 400".to_owned()));
}

#[test]
fn a_refused_memory_dies_in_the_flush_with_an_alert_and_can_be_brought_back() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        let pager = proving_receiver();
        configured(&home, &memory, &format!("[alerts]\nurl = \"{}\"\n", pager.url));
        home.run(&["migrate"]).done();
        memory.told(json!({ "mode": "status", "status": 503 }));
        let stored = home.run(&["memory", "store", "too much", "--space", "team:a", "--json"]).done().json();
        let id = assert_deferred(&stored);
        memory.told(json!({ "mode": "status", "status": 422 }));
        let flushed = home.run(&["memory", "flush", "--json"]).ended(1).json();
        assert_eq!((&flushed["dead"], &flushed["left"]), (&json!(1), &json!(0)), "{flushed}");
        assert_eq!(home.text("SELECT state FROM memory_writes"), "dead");
        home.run(&["worker", "--lane", "alerts", "--once"]).done();
        assert!(pager.requests().iter().any(|r| r.body.contains("dead_memories") && r.body.contains("requeue")));
        home.run(&["outbox", "requeue", &id.to_string()]).ended(1);
        memory.told(json!({ "mode": "well" }));
        home.run(&["memory", "requeue", &id.to_string()]).done();
        assert_eq!(home.text("SELECT state FROM memory_writes"), "queued");
        home.run(&["worker", "--lane", "memory", "--once"]).done();
        assert_eq!(home.text("SELECT state FROM memory_writes"), "stored");
        assert_eq!(memory.contents(), ["too much"]);
        home.run(&["memory", "requeue", &id.to_string()]).ended(1);
    });
}

#[test]
fn a_memory_that_fails_too_often_is_given_up_with_an_alert() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        let pager = proving_receiver();
        let more =
            format!("[alerts]\nurl = \"{}\"\n[lane.memory]\nmax_attempts = 3\nbackoff_sec = [0.05]\n", pager.url);
        configured(&home, &memory, &more);
        home.run(&["migrate"]).done();
        memory.told(json!({ "mode": "fail_writes", "status": 500 }));
        let stored = home.run(&["memory", "store", "in vain", "--space", "team:a", "--json"]).done().json();
        let id = assert_deferred(&stored);
        let mut seen = Vec::new();
        wait_until("it is given up", || {
            home.run(&["worker", "--lane", "memory", "--once"]);
            let shown = home.show(id);
            seen.push((shown["attempts"].as_i64().unwrap(), shown["status"].as_str().unwrap().to_owned()));
            shown["status"] == "dead"
        });
        let last = seen.pop().unwrap();
        assert_eq!(last, (3, "dead".to_owned()), "at the third failure: {seen:?}");
        assert!(seen.iter().all(|(failures, status)| *failures < 3 && status == "pending"), "and not before: {seen:?}");
        let row = home.rows(&format!("SELECT status, retry_count FROM outbox_memory WHERE outbox_id = {id}")).remove(0);
        assert_eq!(row, ["dead", "3"]);
        assert!(memory.contents().is_empty());
        let audit = "SELECT COUNT(*) FROM write_audit WHERE reason = ";
        assert_eq!(home.number(&format!("{audit}'outbox_flush_retry' AND outbox_id = {id}")), 2);
        assert_eq!(home.number(&format!("{audit}'outbox_flush_dead' AND outbox_id = {id}")), 1);
        home.run(&["worker", "--lane", "alerts", "--once"]).done();
        assert!(pager.requests().iter().any(|r| r.body.contains("dead_memories")), "somebody is told");
    });
}

#[test]
fn twins_meet_whatever_became_of_the_first() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let servers = [Server::start(&home, &[]), Server::start(&home, &["--no-workers"])];
        let server = &servers[0];
        memory.told(json!({ "mode": "slow", "delay_ms": 300 }));
        let answers: Vec<Value> = std::thread::scope(|scope| {
            let clients = (0..8).map(|n| {
                let server = &servers[n % 2];
                scope.spawn(move || store(server, "the same", "team:a").answered(200).json())
            });
            clients.collect::<Vec<_>>().into_iter().map(|client| client.join().unwrap()).collect()
        });
        assert_eq!(answers.iter().filter(|answer| answer["deduplicated"] == false).count(), 1, "one wrote it");
        assert!(answers.iter().all(|answer| answer["memory_id"] == "mem-1"), "{answers:?}");
        assert_eq!(memory.state()["adds"], 1, "and asked once");
        // In another space it is another memory of ours, and the same one there.
        let elsewhere = store(server, "the same", "team:b").answered(200).json();
        assert_eq!((&elsewhere["deduplicated"], &elsewhere["memory_id"]), (&json!(true), &json!("mem-1")));
        assert_eq!(elsewhere["merged_with"], Value::Null, "nothing of it is lost: {elsewhere}");
        for space in ["team:a", "team:b"] {
            let found = query(server, json!({ "query": "same", "spaces": [space] }));
            assert_eq!((&found["total"], &found["results"][0]["space"]), (&json!(1), &json!(space)), "{found}");
        }
        assert_eq!(query(server, json!({ "query": "same", "spaces": ["team:c"] }))["total"], 0);
        // A crowd in one space does not hide what another has.
        memory.told(json!({ "mode": "well" }));
        for n in 0..60 {
            store(server, &format!("deploy deploy deploy {n}"), "team:big").answered(200);
        }
        store(server, "how we deploy on weekdays", "team:small").answered(200);
        let found = query(server, json!({ "query": "deploy", "spaces": ["team:small"], "top_k": 5 }));
        assert_eq!((&found["total"], &found["degraded"]), (&json!(1), &json!(false)), "{found}");
        server.post("/memory/query", &JSON, r#"{"query":"x","spaces":[]}"#).refused(422, "INVALID_MESSAGE");
        server.get("/v1/audit?correlation_id=%00").refused(400, "INVALID_REQUEST");
    });
}

/// Who waits for another's write of the same text looks, and writes nothing meanwhile.
#[test]
fn waiting_for_a_twin_writes_nothing() {
    // A server of its own: it counts the transactions of all its databases.
    let alone = proving::servers::Postgres::start().unwrap();
    let home = Home::on(Database::postgres_at(&alone.url()));
    let memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    let server = Server::start(&home, &["--no-workers"]);
    memory.told(json!({ "mode": "slow", "delay_ms": 1800 }));
    // Numbers of transactions are given to those that write or lock.
    let writes = || home.number("SELECT txid_current()");
    let before = writes();
    std::thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| assert_eq!(store(&server, "the same", "team:a").status / 100, 2));
        }
    });
    let made = writes() - before;
    assert!(made < 150, "ten stores made {made} transactions that write");
}

#[test]
fn a_server_killed_in_the_middle_of_a_write_leaves_nothing_undecided() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let server = Server::start(&home, &["--no-workers"]);
        memory.told(json!({ "mode": "slow", "delay_ms": 1500 }));
        let mut caller = server.connect();
        let body = r#"{"payload_md":"half written","target_space":"team:a"}"#;
        let request = format!(
            "POST /memory/store HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            server.address,
            body.len()
        );
        caller.write_all(request.as_bytes()).unwrap();
        wait_until("it is being written", || {
            home.number("SELECT COUNT(*) FROM write_audit WHERE status = 'pending'") == 1
        });
        server.signal(Signal::KILL);
        drop(server);
        memory.told(json!({ "mode": "well" }));
        let report = home.run(&["memory", "reconcile", "--report", "--json"]);
        assert_eq!(report.json()["repaired"], 0);
        // Nobody knows what became of it: once its time is over it goes through the outbox.
        wait_until("its time is over", || {
            home.run(&["memory", "reconcile", "--json"]).done().json()["stale_pending"] == 1
        });
        assert_eq!(home.text("SELECT state FROM memory_writes"), "queued");
        assert_eq!(home.text("SELECT status FROM write_audit"), "redirected");
        assert_eq!(home.text("SELECT reason FROM write_audit"), "openmemory_write_failed:left_behind");
        // It may have been sent, or not: it is looked for, and written once it cannot be under way any more.
        wait_until("it is there", || home.run(&["memory", "flush"]).code == 0);
        assert_eq!(memory.contents(), ["half written"]);
        let again = home.run(&["memory", "reconcile", "--json"]).done().json();
        assert_eq!(again["repaired"], 0, "doing it again changes nothing: {again}");
    });
}

#[test]
fn reconcile_completes_audits_and_touches_no_message() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        home.run(&["migrate"]).done();
        memory.told(json!({ "mode": "status", "status": 503 }));
        let store = |text: &str| {
            assert_deferred(&home.run(&["memory", "store", text, "--space", "team:a", "--json"]).done().json())
        };
        let sent = store("sent");
        memory.told(json!({ "mode": "well" }));
        home.run(&["memory", "flush"]).done();
        memory.told(json!({ "mode": "status", "status": 503 }));
        let dead = store("dead");
        memory.told(json!({ "mode": "status", "status": 400 }));
        home.run(&["memory", "flush"]).ended(1);
        memory.told(json!({ "mode": "status", "status": 503 }));
        let stuck = store("stuck");
        // Its worker holds it and is gone.
        memory.told(json!({ "mode": "slow", "delay_ms": 1900 }));
        let worker = home.start_silent(&["worker", "--lane", "memory", "--lease-seconds", "1"]);
        wait_until("it is held", || home.number("SELECT COUNT(*) FROM outbox WHERE locked_by IS NOT NULL") == 1);
        worker.signal(Signal::KILL);
        drop(worker);
        wait_until("its lease is over", || home.stats("memory")["leased"] == 0);
        home.execute("DELETE FROM write_audit");
        let messages = || {
            let live = "SELECT id, attempts, lease_token, payload_sha FROM outbox ORDER BY id";
            let done = "SELECT id, status, attempts, payload_sha FROM outbox_done ORDER BY id";
            (home.rows(live), home.rows(done))
        };
        let before = messages();
        let report = home.run(&["memory", "reconcile", "--report", "--json"]).ended(1).json();
        assert_eq!((&report["missing_audit"], &report["repaired"]), (&json!(3), &json!(0)), "{report}");
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit"), 0, "a report writes nothing");
        let at_once: Vec<Running> = (0..4).map(|_| home.start(&["memory", "reconcile", "--json"])).collect();
        let repaired: Vec<Value> = at_once.into_iter().map(|run| run.ends_within(PATIENCE).done().json()).collect();
        let all: i64 = repaired.iter().map(|run| run["repaired"].as_i64().unwrap()).sum();
        assert_eq!(all, 3, "each once, though four reconcile: {repaired:?}");
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit"), 3);
        for (id, reason) in [(sent, "outbox_flush_success"), (dead, "outbox_flush_dead"), (stuck, "outbox_stale")] {
            assert_eq!(home.text(&format!("SELECT reason FROM write_audit WHERE outbox_id = {id}")), reason);
        }
        assert_eq!(messages(), before, "no message was touched");
        let again = home.run(&["memory", "reconcile", "--json"]).done().json();
        assert_eq!((&again["missing_audit"], &again["repaired"]), (&json!(0), &json!(0)), "{again}");
    });
}

#[test]
fn projects_are_asked_what_they_take() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let server = Server::start(&home, &[]);
        store(&server, "anything", "team:pay").answered(200);
        home.run(&["memory", "govern", "pay", "--kinds", "fact,decision", "--max-length", "20"]).done();
        let body = json!({ "payload_md": "a mood", "target_space": "team:pay", "kind": "mood" });
        let refused = server.post("/memory/store", &JSON, &body.to_string());
        refused.refused(403, "GOVERNANCE_REJECTED");
        let answer = refused.json();
        assert_eq!((&answer["action"], &answer["ok"]), (&json!("reject"), &json!(false)));
        assert!(answer["message"].as_str().unwrap().contains("fact, decision"), "{answer}");
        let long = json!({ "payload_md": "x".repeat(21), "target_space": "team:pay", "kind": "fact" });
        server.post("/memory/store", &JSON, &long.to_string()).refused(403, "GOVERNANCE_REJECTED");
        let good = json!({ "payload_md": "a fact", "target_space": "team:pay", "kind": "fact" });
        server.post("/memory/store", &JSON, &good.to_string()).answered(200);
        store(&server, "elsewhere", "team:other").answered(200);
        home.run(&["memory", "govern", "pay", "--team-write", "false", "--kinds", "any", "--max-length", "0"]).done();
        store(&server, "closed", "team:pay").refused(403, "GOVERNANCE_REJECTED");
        store(&server, "closed", "private:pay").answered(200);
        let rejected = home.number("SELECT COUNT(*) FROM write_audit WHERE action = 'reject' AND status = 'failed'");
        assert_eq!(rejected, 3, "and each is audited");
        assert_eq!(memory.contents().len(), 4);
    });
}

#[test]
fn without_openmemory_all_we_have_is_found() {
    on_every_database(|home| {
        let mut memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let server = Server::start(&home, &["--no-workers"]);
        store(&server, "会議は明日の十時から", "team:a").answered(200);
        let lines = [
            json!({"title": "部署手册", "content_md": "先备份数据库，再升级。", "kind": "howto", "confidence": 0.9}),
            json!({"title": "Secret", "content_md": "数据库 of team b", "target_space": "team:b"}),
            json!({"title": "缓存", "content_md": "缓存 旧的做法"}),
            json!({"title": "缓存", "content_md": "缓存 新的做法"}),
        ];
        let lines = lines.map(|line| line.to_string()).join("\n");
        let imported = home.run_with(&["memory", "candidates", "import", "-", "--json"], &lines).done().json();
        assert_eq!((&imported["imported"], &imported["known"]), (&json!(4), &json!(0)));
        if matches!(home.database, Database::Postgres { .. }) {
            assert_eq!(home.number("SELECT COUNT(*) FROM analysis.knowledge_candidates"), 4);
        }
        let again = home.run_with(&["memory", "candidates", "import", "-", "--json"], &lines).done().json();
        assert_eq!((&again["imported"], &again["known"]), (&json!(0), &json!(4)), "importing twice is importing once");
        home.run_with(&["memory", "candidates", "import", "-"], "{\"title\":\"x\"}\n")
            .refused(2, &["line 1", "content_md"]);
        // Another program writes to the logbook behind our back.
        let json = r#"{"note":"回滚了发布 release 42"}"#;
        home.execute(&format!("INSERT INTO logbook_events (event_type, payload_json) VALUES ('rollback', '{json}')"));
        // Very many more of them do not hide a memory with the same word.
        let many = "(SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9 UNION ALL SELECT 10 UNION ALL SELECT 11)";
        store(&server, "telemetry is sampled", "team:a").answered(200);
        home.execute(&format!(
            "INSERT INTO logbook_events (event_type, payload_json) SELECT 'noise', '{{\"about\":\"telemetry\"}}' FROM {many} a, {many} b, {many} c"
        ));
        memory.stop();
        let found = |question: &str, spaces: Value| {
            let answer = query(&server, json!({ "query": question, "spaces": spaces }));
            assert_eq!(answer["degraded"], true, "{answer}");
            let results = answer["results"].as_array().unwrap().iter();
            results.map(|result| result["source"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(found("会議", json!(["team:a"])), ["memory_writes"]);
        assert_eq!(found("明日", json!(["team:a"])), ["memory_writes"]);
        assert_eq!(found("数据", json!(["team:a"])), ["knowledge_candidates"], "team b's stays team b's");
        assert_eq!(found("数据", json!(["team:b"])).len(), 2);
        assert_eq!(found("备份", json!(["team:a"])), ["knowledge_candidates"]);
        let newest = query(&server, json!({ "query": "缓存", "spaces": ["team:a"] }));
        let contents = newest["results"].as_array().unwrap().iter().map(|result| result["content"].as_str().unwrap());
        let place = |words: &str| contents.clone().position(|content| content.contains(words)).unwrap();
        assert!(place("新的") < place("旧的"), "of equals the newest first: {newest}");
        assert_eq!(found("回滚", json!(["team:a"])), ["logbook_events"]);
        assert_eq!(found("release", json!(["*"])), ["logbook_events"]);
        assert!(found("天气", json!(["*"])).is_empty());
        let crowded = || found("telemetry", json!(["team:a"]));
        wait_until("all is indexed", || {
            crowded();
            home.number("SELECT COUNT(*) FROM memory_terms WHERE term = 'noise'") == 1331
        });
        assert_eq!(crowded()[0], "memory_writes");
        server.post("/memory/query", &JSON, r#"{"query":" "}"#).refused(422, "INVALID_MESSAGE");
        server.post("/memory/query", &JSON, r#"{"query":"x","top_k":0}"#).refused(422, "INVALID_MESSAGE");
        server.post("/memory/query", &JSON, r#"{"question":"x"}"#).refused(422, "INVALID_ARGUMENTS");
    });
}

#[test]
fn without_our_database_nothing_is_written_and_nothing_promised() {
    let mut postgres = proving::servers::Postgres::start().unwrap();
    let home = Home::sqlite();
    let mut memory = OpenMemory::start(&home, &[]);
    home.write("postrider.toml", &format!("database = \"{}\"\n[memory]\nurl = \"{}\"\n", postgres.url(), memory.url()));
    let server = Server::start(&home, &[]);
    store(&server, "while all is well", "team:a").answered(200);
    postgres.stop_immediate();
    let answer = store(&server, "unaudited", "team:a");
    answer.refused(503, "AUDIT_WRITE_FAILED");
    assert_eq!((&answer.json()["ok"], &answer.json()["action"]), (&json!(false), &json!("error")));
    assert_eq!(memory.contents(), ["while all is well"], "an unaudited write is not allowed");
    memory.stop();
    store(&server, "nowhere to go", "team:a").refused(503, "AUDIT_WRITE_FAILED");
    server.post("/memory/query", &JSON, r#"{"query":"well"}"#).refused(503, "STORE_UNAVAILABLE");
    postgres.start_again().unwrap();
    memory.start_again(&home);
    wait_until("it takes memories again", || store(&server, "unaudited", "team:a").status == 200);
}

/// The database goes away between the two halves of a write.
#[test]
fn a_second_half_that_cannot_be_written_is_no_success() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let server = Server::start(&home, &["--no-workers"]);
        wait_until("the gate has asked at the start", || memory.state()["calls"] == 1);
        let (break_it, mend_it) = home.database.refuse("INSERT", "write_audit");
        home.execute(&break_it);
        for n in 0..4 {
            store(&server, &format!("unaudited {n}"), "team:a").refused(503, "AUDIT_WRITE_FAILED");
        }
        home.execute(&mend_it);
        assert_eq!(memory.state()["calls"], 1, "no store was shown to it");
        let report = server.get("/reliability/report").json();
        assert_eq!(report["openmemory"]["status"], "ok", "our database's failures are not OpenMemory's: {report}");
        let (break_it, mend_it) = home.database.refuse("UPDATE", "memory_writes");
        home.execute(&break_it);
        store(&server, "written and not recorded", "team:a").refused(503, "AUDIT_WRITE_FAILED");
        home.execute(&mend_it);
        memory.told(json!({ "mode": "status", "status": 503 }));
        let (break_it, mend_it) = home.database.refuse("INSERT", "outbox");
        home.execute(&break_it);
        store(&server, "neither here nor there", "team:a").refused(503, "OUTBOX_ENQUEUE_FAILED");
        home.execute(&mend_it);
        // Redirected and queued are one thing: neither is there without the other.
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit WHERE status = 'redirected'"), 0);
        let (break_it, mend_it) = home.database.refuse("UPDATE", "write_audit");
        home.execute(&break_it);
        let failed = store(&server, "not audited to its end", "team:a");
        assert_eq!(failed.status, 503, "{failed:#?}");
        has_all_fields(&failed.json());
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 0);
        home.execute(&mend_it);
        memory.told(json!({ "mode": "well" }));
        // Both were kept as far as they came, and reconciliation brings them to their end.
        wait_until("their time is over", || {
            home.run(&["memory", "reconcile", "--json"]).done();
            home.number("SELECT COUNT(*) FROM write_audit WHERE status = 'pending'") == 0
        });
        // It may be under way for a while, as far as anybody knows.
        wait_until("all are there", || home.run(&["memory", "flush"]).code == 0);
        let mut contents = memory.contents();
        contents.sort();
        assert_eq!(contents, ["neither here nor there", "not audited to its end", "written and not recorded"]);
    });
}

#[test]
fn ten_workers_with_leases_of_their_own_never_hold_one_memory_together() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let server = Server::start(&home, &["--no-workers"]);
        memory.told(json!({ "mode": "status", "status": 503 }));
        let memories = 120;
        for n in 0..memories {
            store(&server, &format!("held {n}"), "team:a").answered(202);
        }
        // Longer than the shortest lease's third, so that renewals are needed.
        memory.told(json!({ "mode": "slow", "delay_ms": 700 }));
        let before = memory.state()["adds"].as_i64().unwrap();
        let workers: Vec<Running> = (1..=10)
            .map(|seconds| home.start_silent(&["worker", "--lane", "memory", "--lease-seconds", &seconds.to_string()]))
            .collect();
        wait_until("all is flushed", || home.stats("memory")["sent"] == memories);
        for worker in workers {
            worker.signal(Signal::TERM);
            worker.ends_within(Duration::from_secs(30));
        }
        assert_eq!(memory.state()["adds"].as_i64().unwrap() - before, memories, "each was sent once");
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit WHERE reason = 'outbox_flush_conflict'"), 0);
        assert_eq!(home.number("SELECT COALESCE(MAX(crashes), 0) FROM outbox_done"), 0);
        home.is_healthy();
    });
}

#[test]
fn tools_over_mcp_in_both_eras_and_as_a_plain_body() {
    let home = Home::sqlite();
    let mut memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    let server = Server::start(&home, &["--no-workers"]);
    let accept = ("accept", "application/json, text/event-stream");
    let ask = |body: Value, more: &[(&str, &str)]| {
        server.post("/mcp", &[&JSON[..], &[accept], more].concat(), &body.to_string())
    };
    // As it is printed in the specification.
    let plain =
        ask(json!({"tool": "memory_store", "arguments": {"payload_md": "test", "target_space": "team:test"}}), &[]);
    assert_eq!(plain.answered(200).json()["action"], "allow");
    ask(json!({"tool": "no_such"}), &[]).refused(404, "UNKNOWN_TOOL");
    ask(json!({"tool": "memory_store", "arguments": {"text": "x"}}), &[]).refused(422, "INVALID_ARGUMENTS");
    ask(json!({"tool": "memory_store"}), &[("origin", "http://evil.example")]).refused(403, "FORBIDDEN");
    let own = format!("http://{}", server.address);
    let two = [("origin", own.as_str()), ("origin", "http://evil.example")];
    ask(json!({"tool": "outbox_status"}), &two).refused(403, "FORBIDDEN");
    ask(json!({"tool": "outbox_status"}), &[("origin", &own)]).answered(200);

    let initialize = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    assert_eq!(ask(initialize.clone(), &[]).answered(200).json()["result"]["protocolVersion"], "2025-06-18");
    let old = [("mcp-protocol-version", "2025-06-18")];
    let list = ask(json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list"}), &old).answered(200).json();
    let names: Vec<&str> =
        list["result"]["tools"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    let tools = ["memory_store", "memory_query", "outbox_status", "outbox_requeue", "reliability_report", "reconcile"];
    assert_eq!(names, tools);
    let call = |name: &str, arguments: Value| {
        let params = json!({"name": name, "arguments": arguments});
        let body = json!({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params});
        ask(body, &old).answered(200).json()["result"].clone()
    };
    let stored = call("memory_store", json!({"payload_md": "over mcp"}));
    assert_eq!((&stored["isError"], &stored["structuredContent"]["action"]), (&json!(false), &json!("allow")));
    let found = call("memory_query", json!({"query": "mcp"}));
    assert_eq!(found["structuredContent"]["results"][0]["content"], "over mcp", "{found}");
    assert_eq!(call("memory_store", json!({"payload_md": ""}))["isError"], true);
    assert_eq!(call("memory_store", json!({}))["isError"], true);
    assert_eq!(call("reconcile", json!({}))["structuredContent"]["missing_audit"], 0);
    assert_eq!(call("reliability_report", json!({}))["structuredContent"]["ok"], true);
    memory.stop();
    let deferred = call("memory_store", json!({"payload_md": "deferred over mcp"}));
    assert_eq!(deferred["isError"], false, "else a model stores it twice: {deferred}");
    assert_eq!(deferred["structuredContent"]["action"], "deferred");
    assert_deferred(&deferred["structuredContent"]);
    assert_eq!(call("outbox_status", json!({"lane": "memory"}))["structuredContent"]["lanes"]["memory"]["pending"], 1);
    let again = call("outbox_requeue", json!({"ids": [deferred["structuredContent"]["outbox_id"], 999]}));
    assert_eq!(again["structuredContent"]["results"][0]["outcome"], "not_dead", "{again}");
    assert_eq!(again["structuredContent"]["results"][1]["outcome"], "not_found", "{again}");

    // The newest revision knows no handshake; headers and body must agree.
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
    let new = |method: &str| [("mcp-protocol-version", "2026-07-28".to_owned()), ("mcp-method", method.to_owned())];
    let modern = |headers: [(&str, String); 2], name: Option<&str>, body: Value| {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let name: Vec<(&str, &str)> = name.map(|name| ("mcp-name", name)).into_iter().collect();
        ask(body, &[headers, name].concat())
    };
    let discover = json!({"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {"_meta": meta}});
    let discovered = modern(new("server/discover"), None, discover).answered(200).json();
    assert!(
        discovered["result"]["supportedVersions"].as_array().unwrap().contains(&json!("2026-07-28")),
        "{discovered}"
    );
    let body = json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call",
        "params": {"_meta": meta, "name": "outbox_status", "arguments": {}}});
    let called = modern(new("tools/call"), Some("outbox_status"), body.clone()).answered(200).json();
    assert_eq!(called["result"]["structuredContent"]["ok"], true, "{called}");
    let disagreeing = modern(new("tools/list"), None, body);
    assert!(disagreeing.status == 400 || disagreeing.json()["error"].is_object(), "{disagreeing:?}");
}

#[test]
fn a_token_is_asked_for_each_tool() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "[auth]\nmode = \"always\"\n");
    home.run(&["migrate"]).done();
    let token = |args: &[&str]| {
        let made = home.run(&[&["token", "create", "--json"], args].concat()).done().json();
        format!("Bearer {}", made["token"].as_str().unwrap())
    };
    let (reader, writer) = (token(&["--scope", "read"]), token(&["--scope", "enqueue", "--lane", "memory"]));
    let elsewhere = token(&["--scope", "admin", "--lane", "log"]);
    let server = Server::start(&home, &[]);
    let call = |bearer: &str, tool: &str, arguments: Value| {
        let headers = [JSON[0], ("authorization", bearer)];
        server.post("/mcp", &headers, &json!({ "tool": tool, "arguments": arguments }).to_string())
    };
    server.post("/mcp", &JSON, r#"{"tool":"outbox_status"}"#).refused(401, "UNAUTHORIZED");
    call(&writer, "memory_store", json!({"payload_md": "x"})).answered(200);
    call(&reader, "memory_store", json!({"payload_md": "x"})).refused(403, "FORBIDDEN");
    call(&reader, "memory_query", json!({"query": "x"})).answered(200);
    call(&writer, "memory_query", json!({"query": "x"})).refused(403, "FORBIDDEN");
    call(&reader, "reconcile", json!({})).refused(403, "FORBIDDEN");
    call(&elsewhere, "memory_store", json!({"payload_md": "x"})).refused(403, "FORBIDDEN");
    let seen = call(&elsewhere, "outbox_status", json!({})).answered(200).json();
    assert_eq!(seen["lanes"].as_object().unwrap().len(), 1, "{seen}");
    let headers = [JSON[0], ("authorization", reader.as_str()), ("origin", "https://evil.example")];
    server.post("/mcp", &headers, r#"{"tool":"outbox_status"}"#).refused(403, "FORBIDDEN");
}

#[test]
fn mcp_on_standard_input_flushes_what_is_queued() {
    let home = Home::sqlite();
    let mut memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    memory.stop();
    home.run(&["memory", "store", "from before", "--space", "team:a"]).done();
    memory.start_again(&home);
    let mut child = home.command(&["mcp"]).stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut say = |message: Value| writeln!(input, "{message}").unwrap();
    let mut hear = || {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    };
    say(json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}}));
    assert_eq!(hear()["result"]["serverInfo"]["name"], "postrider");
    say(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
    let arguments = json!({"payload_md": "over stdio", "target_space": "team:a"});
    say(
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "memory_store", "arguments": arguments}}),
    );
    let stored = hear();
    assert_eq!(stored["result"]["structuredContent"]["action"], "allow", "{stored}");
    wait_until("what was queued is flushed", || memory.contents().contains(&"from before".to_owned()));
    drop(input);
    assert!(child.wait().unwrap().success(), "it ends when its client goes");
}

#[test]
fn without_a_section_there_is_no_gateway() {
    let home = Home::sqlite();
    home.run(&["memory", "store", "x"]).refused(2, &["[memory] url"]);
    let server = Server::start(&home, &[]);
    store(&server, "x", "team:a").refused(404, "MEMORY_NOT_CONFIGURED");
    server.get("/v1/audit").refused(404, "MEMORY_NOT_CONFIGURED");
    home.write("postrider.toml", "[memory]\n");
    home.run(&["migrate"]).done();
    let answer = home.run(&["memory", "store", "kept for later", "--json"]).done().json();
    assert_deferred(&answer);
    let found = home.run(&["memory", "query", "later", "--json"]).done().json();
    assert_eq!((&found["degraded"], &found["total"]), (&json!(true), &json!(1)), "{found}");
}
