//! `postrider serve`: the API as clients meet it.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::scratch::Database;

fn on_every_database(case: impl Fn(Home)) {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        case(Home::on(database));
    }
}

fn with_lanes(home: &Home) {
    let lanes = "[lane.work]\ncourier = \"noop\"\n[lane.small]\ncourier = \"noop\"\nmax_payload_bytes = 10\n";
    home.write("postrider.toml", lanes);
}

#[test]
fn messages_go_in_and_are_delivered() {
    on_every_database(|home| {
        with_lanes(&home);
        let server = Server::start(&home, &[]);
        let first =
            server.post("/v1/outbox/work", &[("Idempotency-Key", "k1"), ("content-type", "text/plain")], "hello");
        let id = first.answered(201).json()["id"].as_i64().unwrap();
        let again = server.post("/v1/outbox/work", &[("Idempotency-Key", "\"k1\"")], "hello").answered(200).json();
        assert_eq!(again, json!({"id": id, "outcome": "exists"}), "the quoted form is the same key");
        let differs = server.post("/v1/outbox/work", &[("Idempotency-Key", "k1")], "other").refused(409, "DIFFERS");
        assert_eq!(differs["details"]["id"], id);
        let sent = || server.get(&format!("/v1/outbox/{id}")).answered(200).json();
        wait_until("it is sent", || sent()["status"] == "sent");
        assert_eq!(sent()["history"], json!([]));
        assert_eq!(sent()["content_type"], "text/plain");
        assert_eq!(home.show(id)["status"], "sent", "the command line sees the same");
        let (code, _) = server.stop();
        assert_eq!(code, 0);
    });
}

#[test]
fn headers_say_when_and_where() {
    let home = Home::sqlite();
    with_lanes(&home);
    let server = Server::start(&home, &["--no-workers"]);
    let headers = [
        ("Postrider-Target", "erp"),
        ("Postrider-Active-Key", "invoice-7"),
        ("Postrider-Delay", "1h"),
        ("Postrider-Deliver-Before", "2100-01-01T00:00:00Z"),
        ("X-Correlation-ID", "abc-1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ];
    let answer = server.post("/v1/outbox/work", &headers, "x").answered(201);
    assert_eq!(answer.header("x-correlation-id"), Some("abc-1"));
    let shown = server.get(&format!("/v1/outbox/{}", answer.json()["id"])).json();
    assert_eq!((&shown["target"], &shown["active_key"]), (&json!("erp"), &json!("invoice-7")));
    assert_eq!((&shown["status"], &shown["correlation_id"]), (&json!("pending"), &json!("abc-1")));
    assert_eq!(shown["deliver_before"], "2100-01-01T00:00:00Z");
    assert!(shown["due_at"].as_str() > shown["created_at"].as_str());
    for (name, value) in [("Postrider-Delay", "soon"), ("Postrider-Deliver-Before", "tomorrow")] {
        let error = server.post("/v1/outbox/work", &[(name, value)], "x").refused(400, "INVALID_REQUEST");
        assert!(error["message"].as_str().unwrap().contains(name), "{error}");
    }
    let long = "k".repeat(256);
    server.post("/v1/outbox/work", &[("Idempotency-Key", &long)], "x").refused(422, "INVALID_MESSAGE");
    server.post("/v1/outbox/nope", &[], "x").refused(404, "UNKNOWN_LANE");
    server.post("/v1/outbox/small", &[], "more than ten").refused(413, "PAYLOAD_TOO_LARGE");
    server.get("/v1/nothing").refused(404, "NOT_FOUND");
    server.request("DELETE", "/v1/outbox", &[], b"").refused(405, "METHOD_NOT_ALLOWED");
    server.get("/v1/outbox/seventeen").refused(400, "INVALID_REQUEST");
    server.get("/v1/outbox/999999").refused(404, "NOT_FOUND");
    assert_eq!(
        server.get("/v1/outbox").json()["items"].as_array().unwrap().len(),
        1,
        "nothing of the rest was written"
    );
}

#[test]
fn batches_are_one_transaction() {
    on_every_database(|home| {
        with_lanes(&home);
        let server = Server::start(&home, &["--no-workers"]);
        let json = [("content-type", "application/json")];
        server.post("/v1/outbox/work", &[("Idempotency-Key", "taken")], "first").answered(201);
        let batch = json!({"messages": [
            {"payload": {"n": 1}, "key": "a", "target": "t", "headers": {"x-one": "1"}},
            {"payload": "text", "key": "taken"},
            {"payload": [1, 2], "delay": "5s"},
        ]});
        let answer = server.post("/v1/outbox/work/batch", &json, &batch.to_string()).answered(200).json();
        let outcomes: Vec<&str> =
            answer["results"].as_array().unwrap().iter().map(|r| r["outcome"].as_str().unwrap()).collect();
        assert_eq!(outcomes, ["created", "differs", "created"], "one that differs harms no other");
        assert_eq!(home.stats("work")["pending"], 3);
        // One that is wrong is refused with all the others, by its number.
        let wrong = json!({"messages": [{"payload": 1}, {"payload": 2, "delay": "soon"}]});
        let error = server.post("/v1/outbox/work/batch", &json, &wrong.to_string()).refused(400, "INVALID_REQUEST");
        assert!(error["message"].as_str().unwrap().contains("messages[1]"), "{error}");
        let many = json!({"messages": vec![json!({"payload": 1}); 1001]});
        server.post("/v1/outbox/work/batch", &json, &many.to_string()).refused(400, "INVALID_REQUEST");
        server.post("/v1/outbox/work/batch", &json, "{\"messages\":[{}]}").refused(400, "INVALID_REQUEST");
        server
            .post("/v1/outbox/work/batch", &[("content-type", "text/plain")], "{}")
            .refused(415, "UNSUPPORTED_MEDIA_TYPE");
        assert_eq!(home.stats("work")["pending"], 3);
    });
}

#[test]
fn lists_page_and_filter() {
    let home = Home::sqlite();
    with_lanes(&home);
    let server = Server::start(&home, &["--no-workers"]);
    for n in 0..5 {
        let lane = if n < 3 { "work" } else { "small" };
        server.post(&format!("/v1/outbox/{lane}"), &[], "x").answered(201);
    }
    let mut seen = Vec::new();
    let mut path = "/v1/outbox?lane=work&limit=2".to_owned();
    loop {
        let page = server.get(&path).answered(200).json();
        seen.extend(page["items"].as_array().unwrap().iter().map(|m| m["id"].as_i64().unwrap()));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        path = format!("/v1/outbox?lane=work&limit=2&cursor={cursor}");
    }
    assert_eq!(seen, [3, 2, 1]);
    assert_eq!(server.get("/v1/outbox?status=pending").json()["items"].as_array().unwrap().len(), 5);
    assert_eq!(server.get("/v1/outbox?status=dead").json()["items"], json!([]));
    for wrong in ["limit=0", "limit=1001", "limit=x", "status=lost", "cursor=next", "colour=red"] {
        server.get(&format!("/v1/outbox?{wrong}")).refused(400, "INVALID_REQUEST");
    }
}

#[test]
fn the_dead_come_back_and_lanes_are_held() {
    on_every_database(|home| {
        home.write(
            "postrider.toml",
            "[lane.work]\ncourier = \"http\"\nurl = \"http://127.0.0.1:1/\"\nmax_attempts = 1\n[lane.other]\ncourier = \"noop\"\n",
        );
        let server = Server::start(&home, &[]);
        let id = server.post("/v1/outbox/work", &[], "x").answered(201).json()["id"].as_i64().unwrap();
        let path = format!("/v1/outbox/{id}");
        wait_until("it is dead", || server.get(&path).json()["status"] == "dead");
        assert_eq!(server.get(&path).json()["history"][0]["kind"], "dead");
        let paused = server.post("/v1/lanes/work/pause", &[], "").answered(200).json();
        assert_eq!(paused, json!({"lane": "work", "paused": true}));
        let put = |lane: &str| server.post(&format!("/v1/outbox/{lane}"), &[], "x").answered(201).json()["id"].clone();
        let shown = |id: &serde_json::Value| server.get(&format!("/v1/outbox/{id}")).json();
        wait_until("workers have heard of it", || {
            let (held, other) = (put("work"), put("other"));
            wait_until("another lane goes on", || shown(&other)["status"] == "sent");
            shown(&held)["lease_token"] == 0
        });
        let back = server.post(&format!("{path}/requeue"), &[], "").answered(200).json();
        assert_eq!((&back["status"], &back["attempts"]), (&json!("pending"), &json!(0)));
        server.post(&format!("{path}/requeue"), &[], "").refused(409, "NOT_DEAD");
        server.post("/v1/outbox/999/requeue", &[], "").refused(404, "NOT_FOUND");
        server.post("/v1/lanes/nope/pause", &[], "").refused(404, "UNKNOWN_LANE");
        server.post("/v1/lanes/work/resume", &[], "").answered(200);
        wait_until("it is dead again", || server.get(&path).json()["status"] == "dead");
    });
}

#[test]
fn it_describes_itself() {
    let home = Home::sqlite();
    with_lanes(&home);
    let server = Server::start(&home, &[]);
    let description = server.get("/openapi.json").answered(200).json();
    for path in [
        "/v1/outbox",
        "/v1/outbox/{lane_or_id}",
        "/v1/outbox/{lane_or_id}/batch",
        "/v1/outbox/{lane_or_id}/requeue",
        "/livez",
        "/readyz",
    ] {
        assert!(description["paths"][path].is_object(), "{path} is not described");
    }
    let page = server.get("/docs").answered(200);
    assert!(page.body.contains("POST /v1/outbox/{lane_or_id}"), "{page:?}");
    assert_eq!(server.get("/livez").answered(200).json(), json!({"status": "ok"}));
    assert_eq!(server.get("/readyz").answered(200).json(), json!({"status": "ok"}));
    server.post("/v1/outbox/work", &[], "x").answered(201);
    wait_until("it is counted", || {
        let page = server.get("/metrics").answered(200).body;
        [
            "outbox_claimed_total{lane=\"work\"} 1",
            "outbox_processed_total{lane=\"work\",outcome=\"outbox_flush_success\"} 1",
        ]
        .iter()
        .all(|line| page.contains(line))
    });
    let page = server.get("/metrics").body;
    for name in [
        "outbox_latency_ms_bucket",
        "outbox_depth",
        "outbox_oldest_due_seconds",
        "outbox_in_flight",
        "outbox_walk_bound_seconds",
    ] {
        assert!(page.contains(name), "{name} is missing:\n{page}");
    }
}

#[test]
fn tokens_open_what_they_are_for() {
    on_every_database(|home| {
        with_lanes(&home);
        home.write(
            "postrider.toml",
            &(std::fs::read_to_string(home.path("postrider.toml")).unwrap() + "[auth]\nmode = \"always\"\n"),
        );
        home.run(&["migrate"]).done();
        home.run(&["serve", "--listen", "127.0.0.1:0"]).refused(2, &["postrider token create"]);
        let create = |args: &[&str]| {
            let answer = home.run(&[&["token", "create", "--json"], args].concat()).done().json();
            (answer["id"].as_i64().unwrap(), format!("Bearer {}", answer["token"].as_str().unwrap()))
        };
        let (_, admin) = create(&["--scope", "admin"]);
        let (_, writer) = create(&["--scope", "enqueue", "--lane", "work", "--expires", "90d", "--name", "shop"]);
        let (id, reader) = create(&["--scope", "read"]);
        let (_, expired) = create(&["--scope", "admin", "--expires", "1ms"]);
        let server = Server::start(&home, &["--no-workers"]);
        let put =
            |token: &str, lane: &str| server.post(&format!("/v1/outbox/{lane}"), &[("authorization", token)], "x");
        let list = |token: &str| server.request("GET", "/v1/outbox", &[("authorization", token)], b"");
        put(&admin, "work").answered(201);
        put(&writer, "work").answered(201);
        put(&writer, "small").refused(403, "FORBIDDEN");
        put(&reader, "work").refused(403, "FORBIDDEN");
        list(&reader).answered(200);
        list(&writer).refused(403, "FORBIDDEN");
        let wrong = format!("{}x", &admin[..admin.len() - 1]);
        for bad in [wrong.as_str(), "Bearer pr_999_aa", "Bearer nonsense", "Basic eA==", &expired] {
            list(bad).refused(401, "UNAUTHORIZED");
        }
        server.get("/v1/outbox").refused(401, "UNAUTHORIZED");
        server.get("/livez").answered(200);
        home.run(&["token", "revoke", &id.to_string()]).done();
        wait_until("the revoked one is refused", || list(&reader).status == 401);
        home.run(&["token", "revoke", &id.to_string()]).ended(1);
        let shown = home.run(&["token", "list"]).done().stdout;
        assert!(shown.contains("shop") && !shown.contains(admin.trim_start_matches("Bearer ")), "{shown}");
        let (_, log) = server.stop();
        for token in [&admin, &writer, &reader] {
            assert!(!log.contains(token.rsplit('_').next().unwrap()), "a token is in the log:\n{log}");
        }
    });
}

#[test]
fn nobody_is_let_in_from_elsewhere_without_a_token() {
    let home = Home::sqlite();
    home.run(&["serve", "--listen", "0.0.0.0:0"]).refused(2, &["needs tokens", "postrider token create"]);
    let server = Server::start(&home, &["--no-workers"]);
    let from = |origin: &str| server.post("/v1/outbox/log", &[("origin", origin)], "x");
    from("https://evil.example").refused(403, "FORBIDDEN");
    from(&format!("http://{}", server.address)).answered(201);
    // A name that was made to point at this machine.
    let called = |name: &str| {
        let request = format!(
            "POST /v1/outbox/log HTTP/1.1\r\nhost: {name}\r\norigin: http://{name}\r\ncontent-length: 1\r\nconnection: close\r\n\r\nx"
        );
        server.raw(request.as_bytes())
    };
    for name in [
        "evil.example:8787",
        "127.evil.example:8787",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1:8787",
    ] {
        called(name).refused(403, "FORBIDDEN");
    }
    for name in ["localhost:8787", "127.0.0.1", "127.3.2.1:8787", "[::1]:8787"] {
        called(name).answered(201);
    }
}

#[test]
fn nonsense_is_answered_and_harms_nobody() {
    let home = Home::sqlite();
    let server = Server::start(&home, &["--no-workers"]);
    let many = (0..200).map(|n| format!("x-{n}: 1\r\n")).collect::<String>();
    let cases: [Vec<u8>; 8] = [
        b"\x00\x01\x02\x03\r\n\r\n".to_vec(),
        b"GET\r\n\r\n".to_vec(),
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n".to_vec(),
        format!("GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n{many}\r\n").into_bytes(),
        format!("GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nx: {}\r\n\r\n", "y".repeat(100_000)).into_bytes(),
        b"POST /v1/outbox/log HTTP/1.1\r\nhost: 127.0.0.1\r\nidempotency-key: \xff\xfe\r\ncontent-length: 1\r\nconnection: close\r\n\r\nx".to_vec(),
        b"POST /v1/outbox/log HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\nconnection: close\r\n\r\nshort".to_vec(),
        b"GET /v1/outbox/%ff%fe HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".to_vec(),
    ];
    for case in &cases {
        let answer = server.cut_short(case);
        assert!(
            answer.status == 0 || (400..500).contains(&answer.status),
            "{}: {answer:?}",
            String::from_utf8_lossy(case)
        );
    }
    server.raw(&cases[5]).refused(400, "INVALID_REQUEST");
    server.raw(&cases[7]).refused(400, "INVALID_REQUEST");
    let huge = format!(
        "POST /v1/outbox/log HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        17 << 20
    );
    server.raw(huge.as_bytes()).refused(413, "PAYLOAD_TOO_LARGE");
    assert_eq!(server.get("/v1/outbox").answered(200).json()["items"], json!([]));
}

#[test]
fn idle_and_slow_clients_hold_nobody_up() {
    let home = Home::sqlite();
    let server = Server::start(&home, &["--no-workers"]);
    raise_own_file_limit();
    let idle: Vec<_> = (0..2000).map(|_| server.connect()).collect();
    let mut slow: Vec<_> = (0..200).map(|_| server.connect()).collect();
    for stream in &mut slow {
        stream.write_all(b"POST /v1/outbox/log HTTP/1.1\r\nhost: 127.0").unwrap();
    }
    let mut times: Vec<Duration> = (0..21)
        .map(|_| {
            let begun = Instant::now();
            server.post("/v1/outbox/log", &[], "x").answered(201);
            begun.elapsed()
        })
        .collect();
    // The median: other tests use the same two cores.
    times.sort_unstable();
    assert!(times[10] < Duration::from_millis(100), "{times:?}");
    // They are not borne for ever: both kinds are hung up on.
    for mut stream in [idle.into_iter().next().unwrap(), slow.pop().unwrap()] {
        let mut rest = Vec::new();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.read_to_end(&mut rest).expect("it is closed by the server");
    }
}

fn raise_own_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most.map(|most| most.min(8192)), maximum: most }).unwrap();
}

#[test]
fn without_its_database_it_says_so_and_recovers() {
    let mut database = proving::servers::Postgres::start().unwrap();
    let home = Home::sqlite();
    home.write("postrider.toml", &format!("database = \"{}\"\n[lane.work]\ncourier = \"noop\"\n", database.url()));
    let server = Server::start(&home, &["--no-workers"]);
    server.post("/v1/outbox/work", &[], "x").answered(201);
    database.stop_immediate();
    let away = |begun: Instant, response: crate::api::Response| {
        assert!(begun.elapsed() < Duration::from_secs(16), "it took {:?}", begun.elapsed());
        assert_eq!(response.status, 503, "{response:#?}");
        assert!(response.header("retry-after").is_some(), "{response:#?}");
        let code = response.json()["error"]["code"].clone();
        assert!(code == "STORE_UNAVAILABLE" || code == "OUTCOME_UNKNOWN", "{response:#?}");
    };
    away(Instant::now(), server.post("/v1/outbox/work", &[], "x"));
    away(Instant::now(), server.get("/v1/outbox"));
    away(Instant::now(), server.get("/readyz"));
    server.get("/livez").answered(200);
    database.start_again().unwrap();
    wait_until("it is ready again", || server.get("/readyz").status == 200);
    server.post("/v1/outbox/work", &[], "x").answered(201);
}

#[test]
fn secrets_stay_where_they_belong() {
    let mut database = proving::servers::Postgres::start().unwrap();
    let home = Home::sqlite();
    let url = database.url().replace("postrider@", "postrider:canary-password@");
    let lane = "[lane.work]\ncourier = \"http\"\nurl = \"http://127.0.0.1:1/canary-path?q=canary-query\"\nmax_attempts = 1\nheaders = { Authorization = \"env:SECRET\" }\n";
    home.write("postrider.toml", &format!("database = \"{url}\"\n{lane}"));
    // Everything that can be logged is.
    let environment = [("SECRET", "canary-secret"), ("RUST_LOG", "trace,h2=off,hyper=off,mio=off,rustls=off")];
    let server = Server::start_with(&home, &["--log", "json"], &environment);
    let headers = [
        ("Idempotency-Key", "canary-key"),
        ("Postrider-Active-Key", "canary-active"),
        ("authorization", "Bearer canary-token"),
    ];
    let mut told = String::new();
    let mut ask = |response: crate::api::Response| {
        told.push_str(&response.head);
        told.push_str(&response.body);
        response
    };
    ask(server.post("/v1/outbox/work", &headers, "canary-payload")).refused(401, "UNAUTHORIZED");
    let id = ask(server.post("/v1/outbox/work", &headers[..2], "canary-payload")).answered(201).json()["id"].clone();
    ask(server.post("/v1/outbox/work", &headers[..2], "canary-payload, another")).refused(409, "DIFFERS");
    wait_until("it is dead", || server.get(&format!("/v1/outbox/{id}")).json()["status"] == "dead");
    ask(server.get("/metrics")).answered(200);
    database.stop_immediate();
    ask(server.post("/v1/outbox/work", &headers[..2], "canary-payload"));
    ask(server.get("/v1/outbox"));
    let (_, log) = server.stop();
    assert!(log.contains("\"level\":\"WARN\""), "there is a log to look at");
    for (what, text) in [("log", &log), ("answers", &told)] {
        let line = text.lines().find(|line| line.contains("canary"));
        assert!(line.is_none(), "a canary is in the {what}: {line:?}");
    }
}
