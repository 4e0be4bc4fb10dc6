//! Webhooks as people use them: over HTTP, at a terminal, and by a fleet of processes that are killed.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::api::{Response, Server};
use crate::home::{Home, Running, wait_long_until, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

const LOCAL: &str =
    "[webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\nbase_delay_sec = 0.05\nmax_retry_limit = 2\n";

fn on_every_database(case: impl Fn(Home)) {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        case(Home::on(database));
    }
}

fn post(server: &Server, path: &str, body: Value) -> Response {
    server.post(path, &[("content-type", "application/json")], &body.to_string())
}

fn subscribe(server: &Server, url: &str, types: &[&str]) -> Value {
    post(server, "/v1/subscriptions", json!({"url": url, "event_types": types})).answered(201).json()
}

#[test]
fn the_routes_do_what_the_contract_says() {
    on_every_database(|home| {
        home.write("postrider.toml", LOCAL);
        let server = Server::start(&home, &[]);
        let receiver = Receiver::start(|request| Some(if request.body.contains("bad") { 500 } else { 200 }));
        let made = subscribe(&server, &receiver.url, &["order.*"]);
        let id = made["id"].as_i64().unwrap();
        assert!(made["secret"].as_str().unwrap().starts_with("whsec_"));
        let shown = server.get(&format!("/v1/subscriptions/{id}")).answered(200).json();
        assert!(shown.get("secret").is_none(), "the secret is shown once");
        assert_eq!(server.get("/v1/subscriptions").json()["items"].as_array().unwrap().len(), 1);
        let patched = server.request(
            "PATCH",
            &format!("/v1/subscriptions/{id}"),
            &[("content-type", "application/json")],
            br#"{"timeout_ms":900}"#,
        );
        assert_eq!(patched.answered(200).json()["timeout_ms"], 900);
        assert_eq!(
            post(&server, &format!("/v1/subscriptions/{id}/test"), json!({})).answered(200).json()["success"],
            true
        );
        assert!(
            post(&server, &format!("/v1/subscriptions/{id}/rotate-secret"), json!({})).answered(200).json()["secret"]
                .is_string()
        );
        server.post(&format!("/v1/subscriptions/{id}/rotate-secret"), &[], "").answered(200);

        let event = json!({"event_type": "order.paid", "payload": {"n": 1}, "external_id": "e-1"});
        let first = post(&server, "/v1/events", event.clone()).answered(202).json();
        let saga = first["saga_ids"][0].as_i64().unwrap();
        let again = post(&server, "/v1/events", event).answered(200).json();
        assert_eq!(
            (&again["event_id"], &again["saga_ids"], &again["duplicate"]),
            (&first["event_id"], &first["saga_ids"], &json!(true))
        );
        post(&server, "/v1/events", json!({"event_type": "order.paid", "payload": 2, "external_id": "e-1"}))
            .refused(409, "DIFFERS");
        post(&server, "/v1/events", json!({"event_type": "not a type", "payload": 2})).refused(422, "INVALID_MESSAGE");
        post(&server, "/v1/events", json!({"event_type": "a", "payload": 2, "colour": 1}))
            .refused(400, "INVALID_REQUEST");
        post(&server, "/v1/subscriptions", json!({"url": "http://169.254.169.254/", "event_types": ["*"]}))
            .refused(422, "INVALID_MESSAGE");
        server.post("/v1/outbox/webhooks", &[], "x").refused(409, "LANE_OWNED");
        let status = |saga: i64| server.get(&format!("/v1/sagas/{saga}")).answered(200).json()["status"].clone();
        wait_until("it is completed", || status(saga) == "Completed");
        let timeline = server.get(&format!("/v1/events/{}", first["event_id"])).answered(200).json();
        assert_eq!(timeline["sagas"][0]["attempts"][0]["response_status"], 200, "{timeline}");

        let batch = json!({"events": [{"event_type": "order.bad", "payload": "bad 1"}, {"event_type": "order.bad", "payload": "bad 2"}]});
        let results = post(&server, "/v1/events/batch", batch).answered(200).json()["results"].clone();
        assert_eq!(results[0]["outcome"], "created");
        for n in 0..2 {
            wait_until("it is dead", || status(results[n]["saga_ids"][0].as_i64().unwrap()) == "DeadLettered");
        }
        let letters = server.get("/v1/dead-letters?limit=1").answered(200).json();
        assert!(letters["next_cursor"].is_string());
        let letter = letters["items"][0]["id"].as_i64().unwrap();
        let requeued = post(&server, &format!("/v1/dead-letters/{letter}/requeue"), json!({})).answered(201).json();
        let twice = post(&server, &format!("/v1/dead-letters/{letter}/requeue"), json!({})).answered(201).json();
        assert_eq!(requeued, twice, "the same saga when asked again");
        let bulk = |dry: bool| {
            post(
                &server,
                "/v1/dead-letters/requeue",
                json!({"filter": {"subscription_id": id, "error_code": "HTTP_500"}, "dry_run": dry}),
            )
            .answered(200)
            .json()
        };
        wait_until("the requeued one is dead again", || bulk(true)["count"] == 2);
        assert_eq!(bulk(false)["count"], 2);
        let replay = json!({"subscription_id": id, "from": "2000-01-01T00:00:00Z", "to": "2100-01-01T00:00:00Z", "event_types": ["order.paid"]});
        let mut dry = replay.clone();
        dry["dry_run"] = json!(true);
        assert_eq!(post(&server, "/v1/replays", dry).answered(200).json(), json!({"count": 1}));
        let begun = post(&server, "/v1/replays", replay).answered(202).json();
        let replay = format!("/v1/replays/{}", begun["replay_id"]);
        wait_until("it is done", || server.get(&replay).answered(200).json()["status"] == "done");
        server.request("DELETE", &replay, &[], b"").answered(200);
        assert!(
            !server.get("/v1/sagas?status=Completed&limit=5").answered(200).json()["items"]
                .as_array()
                .unwrap()
                .is_empty()
        );
        server.get("/v1/sagas?status=Lost").refused(400, "INVALID_REQUEST");
        server.get("/v1/sagas/999999").refused(404, "NOT_FOUND");

        assert_eq!(
            post(&server, &format!("/v1/subscriptions/{id}/pause"), json!({})).answered(200).json()["status"],
            "paused"
        );
        let held =
            post(&server, "/v1/events", json!({"event_type": "order.paid", "payload": "held"})).answered(202).json();
        let held = held["saga_ids"][0].as_i64().unwrap();
        wait_until("it is held", || server.get(&format!("/v1/sagas/{held}")).json()["held"] == true);
        assert_eq!(
            post(&server, &format!("/v1/subscriptions/{id}/resume"), json!({})).answered(200).json()["status"],
            "active"
        );
        wait_until("it is let go", || status(held) == "Completed");
        assert_eq!(server.request("DELETE", &format!("/v1/subscriptions/{id}"), &[], b"").status, 204);
        server.request("DELETE", &format!("/v1/subscriptions/{id}"), &[], b"").refused(404, "NOT_FOUND");

        let told = home.run(&["webhooks", "saga", &saga.to_string(), "--json"]).done().json();
        assert_eq!((&told["status"], &told["attempts"][0]["response_status"]), (&json!("Completed"), &json!(200)));
        assert_eq!(home.run(&["webhooks", "subscriptions", "--json"]).done().json()["items"], json!([]));
        assert!(home.run(&["webhooks", "dead-letters", "--json"]).done().json()["items"][0]["id"].is_i64());
        assert_eq!(server.stop().0, 0);
    });
}

#[test]
fn tokens_and_lanes_hold_for_webhooks_too() {
    let home = Home::sqlite();
    home.write("postrider.toml", &format!("{LOCAL}[lane.work]\ncourier = \"noop\"\n[auth]\nmode = \"always\"\n"));
    let token = |args: &[&str]| {
        let made = home.run(&[&["token", "create", "--json"], args].concat()).done().json();
        format!("Bearer {}", made["token"].as_str().unwrap())
    };
    let (reader, elsewhere) = (token(&["--scope", "read"]), token(&["--scope", "admin", "--lane", "work"]));
    let server = Server::start(&home, &["--no-workers"]);
    let ask = |method: &str, path: &str, bearer: &str| {
        server.request(method, path, &[("authorization", bearer), ("content-type", "application/json")], b"{}")
    };
    ask("GET", "/v1/sagas", &reader).answered(200);
    ask("POST", "/v1/subscriptions", &reader).refused(403, "FORBIDDEN");
    ask("POST", "/v1/events", &reader).refused(403, "FORBIDDEN");
    ask("GET", "/v1/sagas", &elsewhere).refused(403, "FORBIDDEN");
    ask("POST", "/v1/dead-letters/1/requeue", &reader).refused(403, "FORBIDDEN");
    server.get("/v1/events").refused(401, "UNAUTHORIZED");
}

#[test]
fn workers_come_and_go_and_every_delivery_ends_once() {
    on_every_database(|home| {
        home.write("postrider.toml", &format!("{LOCAL}[lane.webhooks]\nlock_lease_sec = 2\nconcurrency = 32\n"));
        // Every seventh is refused the first time it comes, and again the second.
        let receiver = Receiver::start(|request| {
            std::thread::sleep(Duration::from_millis(2));
            let refused = request.body.trim_matches('"').parse::<u64>().is_ok_and(|n| n % 50 == 7);
            Some(if refused { 500 } else { 200 })
        });
        let api = Server::start(&home, &["--no-workers"]);
        subscribe(&api, &receiver.url, &["*"]);
        subscribe(&api, &format!("{}/second", receiver.url), &["*"]);
        let mut fleet: Vec<Running> = (0..4).map(|_| home.start_silent(&["worker", "--lane", "webhooks"])).collect();
        let events = 600;
        for part in 0..events / 100 {
            let events: Vec<Value> =
                (0..100).map(|n| json!({"event_type": "a", "payload": (part * 100 + n).to_string()})).collect();
            post(&api, "/v1/events/batch", json!({ "events": events })).answered(200);
            // Killed with work in hand, and replaced.
            let victim = fleet.remove(0);
            victim.signal(Signal::KILL);
            drop(victim);
            fleet.push(home.start_silent(&["worker", "--lane", "webhooks"]));
        }
        let open = || {
            let left = |status: &str| {
                api.get(&format!("/v1/sagas?status={status}&limit=1")).json()["items"].as_array().unwrap().len()
            };
            left("Pending") + left("InProgress") + left("PendingRetry")
        };
        wait_long_until("every saga has ended", Duration::from_secs(120), || open() == 0);
        for worker in fleet {
            worker.signal(Signal::TERM);
            worker.ends_within(Duration::from_secs(30));
        }
        let mut sagas = Vec::new();
        let mut path = "/v1/sagas?limit=1000".to_owned();
        loop {
            let page = api.get(&path).answered(200).json();
            sagas.extend(page["items"].as_array().unwrap().clone());
            let Some(cursor) = page["next_cursor"].as_str() else { break };
            path = format!("/v1/sagas?limit=1000&cursor={cursor}");
        }
        assert_eq!(sagas.len(), 2 * events, "one for every event and subscription");
        let dead: Vec<&Value> = sagas.iter().filter(|saga| saga["status"] == "DeadLettered").collect();
        assert_eq!(dead.len(), 2 * events / 50);
        let letters = api.get("/v1/dead-letters?limit=1000").json()["items"].as_array().unwrap().len();
        assert_eq!(letters, dead.len(), "one dead letter for each");
        assert!(
            sagas.iter().all(|saga| saga["attempt_count"] == if saga["status"] == "Completed" { 1 } else { 2 }),
            "attempts are results"
        );
        let got = receiver.requests().len();
        assert!(got >= 2 * events + dead.len(), "{got} arrived");
        // Nobody claims what has ended: two workers that come now send nothing.
        let late: Vec<Running> = (0..2).map(|_| home.start_silent(&["worker", "--lane", "webhooks"])).collect();
        let probe = post(&api, "/v1/events", json!({"event_type": "a", "payload": "9999"})).answered(202).json();
        let probes = probe["saga_ids"].as_array().unwrap();
        assert_eq!(probes.len(), 2, "one for each subscription");
        wait_until("they work", || {
            probes.iter().all(|id| api.get(&format!("/v1/sagas/{id}")).json()["status"] == "Completed")
        });
        for worker in late {
            worker.signal(Signal::TERM);
            worker.ends_within(Duration::from_secs(30));
        }
        let after: Vec<String> = receiver.requests()[got..].iter().map(|request| request.body.clone()).collect();
        assert!(after.iter().all(|body| body == "\"9999\""), "no send from a claim after the end: {after:?}");
        let stats = home.stats("webhooks");
        assert_eq!((&stats["pending"], &stats["leased"]), (&json!(0), &json!(0)), "nothing is left behind");
        home.is_healthy();
    });
}

/// Answers every request with a head and then bytes without end, whatever they claim to be.
fn flood(head: &'static str, piece: Vec<u8>) -> String {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let piece = piece.clone();
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 8192]);
                let _ = stream.write_all(head.as_bytes());
                while stream.write_all(&piece).is_ok() {}
            });
        }
    });
    url
}

#[test]
fn memory_stays_flat_whatever_receivers_send() {
    let home = Home::sqlite();
    home.write("postrider.toml", LOCAL);
    let server = Server::start(&home, &[]);
    // A gigabyte, a gzip bomb (a kilobyte of this is a megabyte of zeros), headers without end, and a trickle of errors.
    let bomb = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3].into_iter().chain([0xed, 0xc1, 1].repeat(400)).collect();
    let receivers = [
        flood("HTTP/1.1 200 OK\r\ncontent-length: 1073741824\r\n\r\n", vec![b'x'; 1 << 16]),
        flood("HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n", bomb),
        flood("HTTP/1.1 200 OK\r\n", b"x-more: and more and more and more and more\r\n".repeat(100)),
        flood("HTTP/1.1 500 No\r\ncontent-length: 1073741824\r\n\r\n", vec![b'x'; 1 << 16]),
    ];
    let subscriptions = receivers.map(|url| subscribe(&server, &url, &["*"]));
    let peak = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    };
    let before = peak();
    let events: Vec<Value> = (0..100).map(|n| json!({"event_type": "a", "payload": n})).collect();
    post(&server, "/v1/events/batch", json!({ "events": events })).answered(200);
    // A 200 counts whatever follows it; the others fail, and are then left alone for a while.
    let attempts = |subscription: &Value, which: &str| {
        home.number(&format!(
            "SELECT COUNT(*) FROM webhook_attempts a JOIN webhook_delivery_sagas s ON s.id = a.saga_id
             WHERE s.subscription_id = {} AND {which}",
            subscription["id"]
        ))
    };
    for (n, subscription) in subscriptions.iter().enumerate() {
        let (which, enough) = if n < 2 { ("error_code IS NULL", 100) } else { ("error_code IS NOT NULL", 5) };
        wait_until(&format!("receiver {n} has answered"), || attempts(subscription, which) >= enough);
    }
    let grown = peak() - before;
    assert!(grown < 100, "deliveries to such receivers cost {grown} MiB");
}
