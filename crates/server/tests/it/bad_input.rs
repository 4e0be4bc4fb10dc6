//! Wrong input is refused with the right code, a remedy, and nothing half-written.

use serde_json::json;

use crate::api::Server;
use crate::home::Home;
use crate::scratch::Database;

#[test]
fn what_a_lane_cannot_take() {
    let home = Home::sqlite();
    home.write("big", &"x".repeat((1 << 20) + 1)).write("limit", &"x".repeat(1 << 20));
    let refused = |args: &[&str], says: &[&str]| home.run(&[&["enqueue"], args].concat()).refused(2, says);
    refused(&["nope", "--payload", "x"], &["no lane `nope`", "log", "[lane.nope]"]);
    refused(&["no pe", "--payload", "x"], &["is no lane name"]);
    refused(&["webhooks", "--payload", "x"], &["has an owner", "postrider webhooks"]);
    refused(&["orders", "--payload", "x"], &["has an owner", "postrider orders"]);
    refused(&["memory", "--payload", "x"], &["memory gateway", "[memory] url"]);
    refused(&["log", "--payload-file", "big"], &["more than 1048576 bytes", "max_payload_bytes"]);
    refused(&["log", "--payload", "x", "--key", &"k".repeat(256)], &["256 bytes", "at most 255"]);
    refused(&["log", "--payload", "x", "--key", ""], &["empty"]);
    refused(&["log", "--payload", "x", "--active-key", &"k".repeat(256)], &["at most 255"]);
    refused(&["log", "--payload", "x", "--target", &"k".repeat(1025)], &["at most 1024"]);
    refused(&["log", "--payload", "x", "--delay", "soon"], &["5s"]);
    refused(&["log", "--payload", "x", "--deliver-before", "tomorrow"], &["2026-03-01T12:00:00Z"]);
    refused(&["log", "--payload-file", "not there"], &["cannot read not there"]);
    refused(&["log", "--ndjson", "not there"], &["cannot read not there"]);
    refused(&["log"], &["--payload"]);
    refused(&["log", "--payload", "x", "--ndjson", "-"], &["cannot be used with"]);
    refused(&["log", "--ndjson", "-", "--key", "k"], &["cannot be used with"]);
    assert!(!home.path("postrider.db").exists(), "nothing of all this created a database");
    home.enqueue(&["log", "--payload-file", "limit", "--key", &"k".repeat(255)]);
}

/// What was put in the wrong place may be a secret, or a megabyte.
#[test]
fn what_is_refused_is_not_repeated() {
    let home = Home::sqlite();
    let server = Server::start(&home, &["--no-workers"]);
    let json = [("content-type", "application/json")];
    let subscription =
        r#"{"url": "https://h.example/", "event_types": ["*"], "headers": "Authorization: Bearer canary"}"#;
    // A whole header where its name belongs.
    let whole =
        r#"{"url": "https://h.example/", "event_types": ["*"], "headers": {"Authorization: Bearer canary": "x"}}"#;
    let whole_of_one = r#"{"messages": [{"payload": 1, "headers": {"Authorization: Bearer canary": "x"}}]}"#;
    let long = "x".repeat(1 << 20);
    let long_name = format!(r#"{{"{long}": 1}}"#);
    let long_delay = format!(r#"{{"messages": [{{"payload": 1, "delay": "{long}"}}]}}"#);
    for (path, body) in [
        ("/v1/subscriptions", subscription),
        ("/v1/subscriptions", whole),
        ("/v1/outbox/log/batch", whole_of_one),
        ("/v1/subscriptions", &long_name),
        ("/v1/events", &long_name),
        ("/v1/outbox/log/batch", &long_delay),
        ("/do/order", &long_name),
    ] {
        let headers = [json[0], ("idempotency-key", "k")];
        let answer = server.post(path, &headers, body);
        assert!((400..500).contains(&answer.status), "{path}: {}", answer.status);
        assert!(!answer.body.contains("canary") && answer.body.len() < 10_000, "{path}: {} bytes", answer.body.len());
    }
    // Two who say who they are: neither is believed.
    let two = [json[0], ("authorization", "Bearer pr_a"), ("authorization", "Bearer pr_b")];
    assert!(server.post("/v1/events", &two, "{}").answered(401).body.contains("two different Authorization"));
    home.write("lines", r#"{"payload": 1, "headers": "X-Api-Key: canary"}"#);
    for args in [
        &["enqueue", "log", "--ndjson", "lines"][..],
        &["webhooks", "subscribe", "--url", "https://h.example/", "--header", "X-Api-Key=canary"],
    ] {
        let answer = home.run(args);
        assert!(answer.code != 0 && !answer.stderr.contains("canary"), "{answer:?}");
    }
}

#[test]
fn databases_that_are_not_there() {
    let home = Home::sqlite();
    home.write("folder-is-a-file", "").write("garbage.db", &"no database ".repeat(100));
    let migrate = |url: &str| home.run(&["--database", url, "migrate"]);
    migrate("sqlite:///no/such/folder/x.db").refused(3, &["/no/such/folder/x.db", "choose a folder"]);
    migrate("sqlite://folder-is-a-file/x.db").refused(3, &["folder-is-a-file"]);
    migrate("sqlite://garbage.db").refused(3, &["garbage.db"]);
    migrate("postgres://127.0.0.1:1/x").refused(3, &["127.0.0.1:1", "is it running"]);
    migrate("mysql://127.0.0.1:1/x").refused(3, &["127.0.0.1:1", "is it running"]);
    migrate("oracle://x").refused(2, &["sqlite://FILE", "postgres://", "mysql://"]);
    migrate("sqlite://").refused(2, &["names no file"]);
    let secret = home.run(&["--database", "postgres://me:hush@127.0.0.1:1/x", "worker", "--once"]);
    assert!(!secret.stderr.contains("hush"), "{secret:?}");
    secret.refused(3, &["127.0.0.1:1"]);
    home.run(&["outbox", "stats"]).refused(3, &["there is no database postrider.db"]);
    assert!(!home.path("postrider.db").exists(), "looking creates nothing");
}

#[test]
fn wrong_usage() {
    let home = Home::sqlite();
    home.run(&["migrate"]).done();
    for args in [
        &["fly"][..],
        &["outbox", "requeue"],
        &["outbox", "requeue", "--dead"],
        &["outbox", "requeue", "--lane", "log"],
        &["outbox", "requeue", "1", "--lane", "log", "--dead"],
        &["outbox", "release"],
        &["outbox", "release", "1", "--expired"],
        &["outbox", "show", "one"],
        &["outbox", "list", "--limit", "0"],
        &["outbox", "purge", "--older-than", "7"],
        &["worker", "--concurrency", "0"],
        &["worker", "--lease-seconds", "0"],
        &["completions", "tcsh98"],
    ] {
        home.run(args).refused(2, &[]);
    }
    home.run(&["outbox", "show", "1"]).refused(1, &["no message 1"]);
}

#[test]
fn a_byte_order_mark_is_named() {
    let home = Home::sqlite();
    home.run(&["migrate"]).done();
    let bytes = |name: &str, bytes: &[u8]| std::fs::write(home.path(name), bytes).unwrap();
    bytes("utf8.ndjson", b"\xef\xbb\xbf{\"payload\":1}\n");
    bytes("utf16.ndjson", b"\xff\xfe{\0\"\0p\0\n\0");
    for name in ["utf8.ndjson", "utf16.ndjson"] {
        home.run(&["enqueue", "log", "--ndjson", name]).refused(2, &["line 1", "byte order mark", "UTF-8"]);
    }
    bytes("postrider.toml", b"\xef\xbb\xbf[outbox]\n");
    home.run(&["config", "check"]).refused(2, &["postrider.toml:1: ", "byte order mark"]);
    bytes("postrider.toml", b"\xff\xfe[\0");
    home.run(&["config", "check"]).refused(2, &["postrider.toml is not UTF-8"]);
}

#[test]
fn a_line_has_no_header_that_cannot_be_sent() {
    let home = Home::sqlite();
    home.run(&["migrate"]).done();
    for headers in [json!({ "X-A": "a\0b" }), json!({ "X\0A": "a" }), json!({ "X A": "a" }), json!({ "X-A": "a\nb" })] {
        home.write("lines", &format!("{}\n", json!({ "payload": 1, "headers": headers })));
        home.run(&["enqueue", "log", "--ndjson", "lines"]).refused(2, &["line 1", "cannot be sent"]);
    }
    home.write("lines", "{\"payload\":1,\"headers\":{\"X-A\":\"a\"}}\n");
    home.run(&["enqueue", "log", "--ndjson", "lines"]).done();
    assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 1);
}

#[test]
fn keys_are_remembered_for_a_second_at_least() {
    let home = Home::sqlite();
    for ttl in ["0", "500ms", "999ms"] {
        home.write("postrider.toml", &format!("[lane.a]\ncourier = \"noop\"\nkey_ttl = \"{ttl}\"\n"));
        home.run(&["config", "check"]).refused(2, &["postrider.toml:1: ", "key_ttl"]);
    }
    home.write("postrider.toml", "[lane.a]\ncourier = \"noop\"\nkey_ttl = \"1s\"\n");
    home.run(&["config", "check"]).done();
}

#[test]
fn two_keys_are_none() {
    let home = Home::sqlite();
    let server = Server::start(&home, &["--no-workers"]);
    let post = |path: &str, keys: &[&str], body: &str| {
        let headers: Vec<(&str, &str)> = keys.iter().map(|key| ("idempotency-key", *key)).collect();
        server.post(path, &headers, body)
    };
    post("/v1/outbox/log", &["a", "b"], "x").refused(400, "INVALID_REQUEST");
    let order = r#"{"instrument":"AAPL","side":"BUY","qty":1,"time_in_force":"IOC"}"#;
    let marked = post("/do/order", &["a"], &format!("\u{feff}{order}")).answered(400).json();
    assert!(marked["message"].as_str().unwrap().contains("byte order mark"), "{marked}");
    let refused = post("/do/order", &["a", "b"], order).answered(400).json();
    assert_eq!(refused["error"], "INVALID_REQUEST", "{refused}");
    assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 0);
    post("/v1/outbox/log", &["a", "a"], "x").answered(201);
    post("/do/order", &["a", "a"], order).answered(201);
    let trace = [("tracestate", "a=1"), ("tracestate", "b=2")];
    server.post("/v1/outbox/log", &trace, "x").answered(201);
}

/// The last moment there is, never, and times in lines and batches.
#[test]
fn deliver_before_in_every_way() {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        let home = Home::on(database);
        home.run(&["migrate"]).done();
        let before = |id: i64| home.show(id)["deliver_before"].clone();
        let last = home.enqueue(&["log", "--payload", "x", "--deliver-before", "9999-12-31T23:59:59Z"]);
        assert_eq!(before(last), "9999-12-31T23:59:59Z");
        home.write("lines", "{\"payload\":1,\"deliver_before\":\"2031-02-03T04:05:06Z\"}\n");
        home.run(&["enqueue", "log", "--ndjson", "lines"]).done();
        assert_eq!(before(last + 1), "2031-02-03T04:05:06Z");
        home.write("lines", "{\"payload\":1,\"deliver_before\":\"soon\"}\n");
        home.run(&["enqueue", "log", "--ndjson", "lines"]).refused(2, &["line 1", "2026-03-01T12:00:00Z"]);
        let server = Server::start(&home, &["--no-workers"]);
        let batch = |before: &str| {
            let body = json!({"messages": [{"payload": 1, "deliver_before": before}]}).to_string();
            server.post("/v1/outbox/log/batch", &[("content-type", "application/json")], &body)
        };
        let id = batch("2031-02-03T04:05:06Z").answered(200).json()["results"][0]["id"].as_i64().unwrap();
        assert_eq!(before(id), "2031-02-03T04:05:06Z");
        let wrong = batch("soon").refused(400, "INVALID_REQUEST");
        assert!(wrong["message"].as_str().unwrap().contains("messages[0]"), "{wrong}");
        if home.database.url().is_some_and(|url| url.starts_with("postgres")) {
            home.execute("SELECT postrider_enqueue('log', 'x'::bytea, deliver_before => 'infinity')");
            let id = home.number("SELECT MAX(id) FROM outbox");
            assert_eq!(before(id), "9999-12-31T23:59:59.999999Z", "never, not 1970");
        }
    }
}
