//! The gateway before an OpenMemory as unkind as the real one: it merges, forgets, limits, is slow, and says so or not.

use std::io::Write;

use serde_json::{Value, json};

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::memory::{OpenMemory, assert_deferred, configured, on_every_database, query, store};

fn contents(answer: &Value) -> Vec<String> {
    let results = answer["results"].as_array().unwrap().iter();
    results.map(|result| result["content"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn what_openmemory_merges_away_is_told_and_found() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let server = Server::start(&home, &[]);
        let a = store(&server, "We chose plan A for the rollout", "team:a").answered(200).json();
        assert_eq!((&a["deduplicated"], &a["merged_with"]), (&json!(false), &Value::Null), "{a}");
        let b = store(&server, "We chose plan B for the rollout", "team:a").answered(200).json();
        assert_eq!((&b["deduplicated"], &b["merged_with"]), (&json!(true), &a["memory_id"]), "{b}");
        assert!(b["message"].as_str().unwrap().contains("takes this for a memory it has"), "{b}");
        for spaces in [json!(["*"]), json!(["team:a"])] {
            let found = query(&server, json!({ "query": "plan B", "spaces": spaces, "top_k": 1 }));
            assert_eq!(contents(&found), ["We chose plan B for the rollout"], "{found}");
            assert_eq!((&found["degraded"], &found["results"][0]["merged_with"]), (&json!(false), &a["memory_id"]));
        }
        let texts: Vec<String> = (0..40)
            .map(|n| format!("Support closed the ticket number {} after the customer confirmed", 1700 + n))
            .collect();
        for text in &texts {
            store(&server, text, "team:a").answered(200);
        }
        let kept = memory.contents().len();
        assert!(kept < 30, "OpenMemory kept {kept}");
        for text in &texts {
            let number = text.split(' ').nth(5).unwrap();
            let found = query(&server, json!({ "query": format!("ticket number {number}") }));
            assert!(contents(&found).contains(text), "{number}: {found}");
        }
    });
}

#[test]
fn another_key_or_an_emptied_database_is_noticed_and_mended() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--api-key", "first"]);
    home.write("key", "first");
    configured(&home, &memory, "api_key = \"file:key\"\n");
    let server = Server::start(&home, &[]);
    let texts = ["we deploy on tuesdays", "the database is sqlite", "ann owns the billing service"];
    for text in texts {
        store(&server, text, "team:a").answered(200);
    }
    home.run(&["gate"]).done();
    assert_eq!(query(&server, json!({ "query": "tuesdays" }))["degraded"], false);
    // Emptied.
    memory.told(json!({ "forget": "*" }));
    let found = query(&server, json!({ "query": "tuesdays" }));
    assert_eq!((&found["degraded"], contents(&found)), (&json!(true), vec![texts[0].to_owned()]), "{found}");
    let gate = home.run(&["gate", "--json"]).ended(1).json();
    assert_eq!(gate["reason"], "FULL mode: required capability openmemory failed", "{gate}");
    assert!(gate["capabilities"]["openmemory"]["detail"].as_str().unwrap().contains("resend --missing"), "{gate}");
    let again = store(&server, texts[1], "team:a").answered(200).json();
    assert_eq!(again["deduplicated"], false, "it is written, not believed: {again}");
    let deep = home.run(&["memory", "reconcile", "--deep", "--json"]).ended(1).json();
    assert_eq!(
        (&deep["missing"], &deep["deep"]["present"], &deep["deep"]["finished"]),
        (&json!(2), &json!(1), &json!(true))
    );
    let dry = home.run(&["memory", "resend", "--missing", "--dry-run", "--json"]).done().json();
    assert_eq!((&dry["missing"], &dry["queued"]), (&json!(2), &json!(0)), "{dry}");
    assert_eq!(memory.contents().len(), 1);
    let resent = home.run(&["memory", "resend", "--missing", "--json"]).done().json();
    assert_eq!(resent["queued"], 2, "{resent}");
    wait_until("all is there again", || memory.contents().len() == 3);
    home.run(&["memory", "reconcile", "--deep"]).done();
    home.run(&["gate"]).done();
    wait_until("the server knows it again", || query(&server, json!({ "query": "tuesdays" }))["degraded"] == false);
    // Another key, on both sides: OpenMemory lets us in, and shows nothing of what the first one wrote.
    memory.told(json!({ "api_key": "second" }));
    home.write("key", "second");
    wait_until("it is noticed", || {
        let found = query(&server, json!({ "query": "tuesdays" }));
        found["degraded"] == true
            && contents(&found) == [texts[0]]
            && found["message"].as_str().unwrap().contains("it had")
    });
    home.run(&["gate"]).ended(1);
    home.run(&["memory", "resend", "--missing"]).done();
    wait_until("all is flushed", || home.stats("memory")["pending"] == 0);
    // It takes them for the other key's, which it does not show: ours are found all the same.
    home.run(&["gate"]).done();
    let found = query(&server, json!({ "query": "tuesdays" }));
    assert_eq!(contents(&found), [texts[0]], "{found}");
}

#[test]
fn the_gate_asks_what_needs_the_key() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--api-key", "right"]);
    home.write("key", "wrong");
    configured(&home, &memory, "api_key = \"file:key\"\n");
    let gate = home.run(&["gate", "--json"]).ended(1).json();
    assert!(gate["capabilities"]["openmemory"]["detail"].as_str().unwrap().contains("403"), "{gate}");
    home.write("key", "right");
    home.run(&["gate"]).done();
    let server = Server::start(&home, &["--no-workers"]);
    store(&server, "something it has", "team:a").answered(200);
    memory.told(json!({ "mode": "fail_writes", "status": 500 }));
    store(&server, "something it does not take", "team:a").answered(202);
    wait_until("the health says so", || server.get("/health").status == 503);
    home.run(&["gate"]).ended(1);
    memory.told(json!({ "mode": "well" }));
    wait_until("it is well again", || server.get("/health").status == 200);
}

#[test]
fn who_hangs_up_says_nothing_about_openmemory() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    let server = Server::start(&home, &["--no-workers"]);
    memory.told(json!({ "mode": "slow", "delay_ms": 600 }));
    let asked = memory.state()["calls"].as_u64().unwrap();
    for n in 1..=6 {
        let body = r#"{"query":"anything"}"#;
        let request = format!(
            "POST /memory/query HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            server.address,
            body.len()
        );
        let mut caller = server.connect();
        caller.write_all(request.as_bytes()).unwrap();
        // Gone while OpenMemory thinks about it.
        wait_until("it is asked", || memory.state()["calls"].as_u64().unwrap() >= asked + n);
    }
    memory.told(json!({ "mode": "well" }));
    let report = server.get("/reliability/report").json();
    assert_eq!((&report["breaker"], &report["openmemory"]["status"]), (&json!("closed"), &json!("ok")), "{report}");
    assert_eq!(query(&server, json!({ "query": "anything" }))["degraded"], false);
    // What it refuses takes no failure back: three that failed open it, whatever came between.
    for _ in 0..3 {
        memory.told(json!({ "mode": "status", "status": 500 }));
        query(&server, json!({ "query": "anything" }));
        memory.told(json!({ "mode": "status", "status": 400 }));
        query(&server, json!({ "query": "anything" }));
    }
    assert_eq!(server.get("/reliability/report").json()["breaker"], "open");
}

#[test]
fn a_slow_openmemory_gets_each_memory_once() {
    let home = Home::sqlite();
    // All of them at once would keep it busy for twelve seconds, and a write is believed to be over after five.
    let memory = OpenMemory::start(&home, &["--keep-duplicates", "--embed-ms", "200"]);
    home.write(
        "postrider.toml",
        &format!(
            "[memory]\nurl = \"{}\"\ntimeout_ms = 500\ndoubt_sec = 5\nbreaker = {{ failures = 3, probe_sec = 0.2 }}\n[lane.memory]\nbackoff_sec = [1]\n",
            memory.url()
        ),
    );
    let server = Server::start(&home, &[]);
    std::thread::scope(|scope| {
        for caller in 0..12 {
            let server = &server;
            scope.spawn(move || {
                for n in 0..5 {
                    let text = format!("slow memory {caller}-{n}");
                    assert!([200, 202].contains(&store(server, &text, "team:a").status));
                    query(server, json!({ "query": "memory" }));
                }
            });
        }
    });
    wait_until("all is flushed", || {
        let stats = home.stats("memory");
        stats["pending"] == 0 && stats["leased"] == 0
    });
    let mut contents = memory.contents();
    contents.sort();
    let count = contents.len();
    contents.dedup();
    assert_eq!((count, contents.len()), (60, 60), "each once: it would have taken them twice");
}

#[test]
fn a_limit_of_openmemory_kills_no_memory() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
    configured(&home, &memory, "[lane.memory]\nbackoff_sec = [1]\nmax_attempts = 2\n");
    memory.told(json!({ "rate_limit": { "max": 10, "window_ms": 1000 } }));
    let server = Server::start(&home, &[]);
    for n in 0..60 {
        let status = store(&server, &format!("limited {n}"), "team:a").status;
        assert!([200, 202].contains(&status), "{status}");
    }
    wait_until("all is there", || memory.contents().len() == 60);
    wait_until("all has ended", || home.stats("memory")["pending"] == 0 && home.stats("memory")["leased"] == 0);
    assert_eq!(home.stats("memory")["dead"], 0);
    assert!(memory.state()["limited"].as_u64().unwrap() > 0, "it was limited");
}

#[test]
fn what_is_too_long_is_refused_each_time_with_the_reason() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    let server = Server::start(&home, &[]);
    let long = "x".repeat(200_001);
    for _ in 0..3 {
        let refused = store(&server, &long, "team:a");
        refused.refused(403, "MEMORY_REFUSED");
        assert!(refused.json()["message"].as_str().unwrap().contains("length > 200000"));
    }
    assert_eq!(home.stats("memory")["dead"], 0);
    assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 0);
    store(&server, &"x".repeat(200_000), "team:a").answered(200);
}

#[test]
fn all_that_died_come_back_by_either_command() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "");
        home.run(&["migrate"]).done();
        for (round, command) in
            [&["memory", "requeue"][..], &["outbox", "requeue", "--lane", "memory"]].iter().enumerate()
        {
            memory.told(json!({ "mode": "status", "status": 503 }));
            for n in 0..3 {
                let text = format!("given up {round} {n}");
                assert_deferred(&home.run(&["memory", "store", &text, "--json"]).done().json());
            }
            memory.told(json!({ "mode": "status", "status": 422 }));
            home.run(&["memory", "flush"]).ended(1);
            assert_eq!(home.stats("memory")["dead"], 3);
            let dry = home.run(&[command, &["--dead", "--dry-run", "--json"][..]].concat()).done().json();
            assert_eq!((&dry["requeued"], &dry["dry_run"]), (&json!(3), &json!(true)), "{dry}");
            assert_eq!(home.stats("memory")["dead"], 3);
            memory.told(json!({ "mode": "well" }));
            let back = home.run(&[command, &["--dead", "--json"][..]].concat()).done().json();
            assert_eq!(back["requeued"], 3, "{back}");
            home.run(&["memory", "flush"]).done();
        }
        assert_eq!(memory.contents().len(), 6);
        home.run(&["outbox", "purge", "--lane", "memory", "--older-than", "1h"]).refused(1, &["postrider memory"]);
        let purged = home.run(&["memory", "purge", "--older-than", "0s", "--json"]).done().json();
        assert_eq!(purged["messages"], 6, "{purged}");
        assert_eq!(home.stats("memory")["sent"], 0);
    });
}
