//! Every route with every kind of token, made from the server's own description: a route that is not in the table fails the
//! test. What belongs to others carries the word `canary`, so that no answer can tell of it unnoticed.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::api::{Response, Server};
use crate::home::{Home, wait_until};
use crate::memory::{OpenMemory, on_every_database};
use crate::receiver::Receiver;

/// How a route keeps a token to its lanes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keeps {
    /// It needs no token, and tells of no lane.
    Open,
    /// It is a part's, and refuses tokens of other lanes.
    Part,
    /// It names a lane, and refuses tokens of others.
    Lane,
    /// It names a message; that of another lane is not there.
    Message,
    /// It answers with what is the caller's own.
    Filters,
    /// It looks at everything, and refuses tokens for a part of it.
    Whole,
}
use Keeps::{Filters, Lane, Message, Open, Part, Whole};

struct Route {
    name: &'static str,
    /// The scope it needs; empty: any, or none.
    scope: &'static str,
    keeps: Keeps,
    body: fn() -> Value,
}

fn nothing() -> Value {
    Value::Null
}

const fn route(name: &'static str, scope: &'static str, keeps: Keeps) -> Route {
    Route { name, scope, keeps, body: nothing }
}

const fn with(name: &'static str, scope: &'static str, keeps: Keeps, body: fn() -> Value) -> Route {
    Route { name, scope, keeps, body }
}

fn event() -> Value {
    json!({ "event_type": "canary.made", "payload": { "n": 1 } })
}

fn order() -> Value {
    json!({ "instrument": "CANARY", "side": "BUY", "qty": 1, "price": 2, "time_in_force": "IOC", "idempotency_key": "canary-order" })
}

fn hook() -> Value {
    json!({ "url": "https://hooks.example.com/canary-path?key=canary-query", "event_types": ["canary.*"] })
}

/// What a refusal says: each has a correlation id of its own.
fn said(refusal: &Response) -> String {
    refusal.json()["error"].to_string()
}

/// In the order in which they are asked with the right token: what takes something away comes last.
const TABLE: &[Route] = &[
    route("GET /v1/outbox", "read", Filters),
    route("GET /v1/outbox/{lane_or_id}", "read", Message),
    route("POST /v1/outbox/{lane_or_id}", "enqueue", Lane),
    with("POST /v1/outbox/{lane_or_id}/batch", "enqueue", Lane, || json!({ "messages": [{ "payload": 1 }] })),
    route("POST /v1/outbox/{lane_or_id}/requeue", "operate", Message),
    route("POST /v1/outbox/{lane_or_id}/retry", "operate", Message),
    with(
        "POST /v1/outbox/requeue",
        "operate",
        Lane,
        || json!({ "filter": { "lane": "canary-lane" }, "dry_run": true }),
    ),
    route("POST /v1/lanes/{lane}/pause", "operate", Lane),
    route("POST /v1/lanes/{lane}/resume", "operate", Lane),
    route("GET /v1/overview", "read", Filters),
    route("GET /v1/workers", "read", Filters),
    route("GET /metrics", "read", Filters),
    route("GET /v1/doctor", "read", Whole),
    with("POST /v1/doctor", "operate", Whole, || json!({})),
    with("POST /v1/subscriptions", "operate", Part, hook),
    route("GET /v1/subscriptions", "read", Part),
    route("GET /v1/subscriptions/{id}", "read", Part),
    with("PATCH /v1/subscriptions/{id}", "operate", Part, || json!({ "description": "canary" })),
    route("POST /v1/subscriptions/{id}/pause", "operate", Part),
    route("POST /v1/subscriptions/{id}/resume", "operate", Part),
    route("POST /v1/subscriptions/{id}/rotate-secret", "operate", Part),
    route("POST /v1/subscriptions/{id}/test", "operate", Part),
    with("POST /v1/events", "enqueue", Part, event),
    with("POST /v1/events/batch", "enqueue", Part, || json!({ "events": [event()] })),
    route("GET /v1/events", "read", Part),
    route("GET /v1/events/{id}", "read", Part),
    route("GET /v1/sagas", "read", Part),
    route("GET /v1/sagas/{id}", "read", Part),
    route("GET /v1/dead-letters", "read", Part),
    route("POST /v1/dead-letters/{id}/requeue", "operate", Part),
    with("POST /v1/dead-letters/requeue", "operate", Part, || json!({ "filter": {}, "dry_run": true })),
    with("POST /v1/replays", "operate", Part, || {
        let (from, to) = ("2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z");
        json!({ "subscription_id": 1, "from": from, "to": to, "dry_run": true })
    }),
    route("GET /v1/replays/{id}", "read", Part),
    route("DELETE /v1/replays/{id}", "operate", Part),
    with("POST /do/order", "enqueue", Part, order),
    route("GET /do/order/{key}", "read", Part),
    route("GET /v1/ledger/{key}", "read", Part),
    route("GET /v1/orders", "read", Part),
    route("GET /v1/orders/conflicts", "read", Part),
    route("POST /v1/ledger/{key}/requeue", "operate", Part),
    with("POST /v1/ledger/{key}/settle", "operate", Part, || json!({ "as": "failed" })),
    with("POST /memory/store", "enqueue", Part, || json!({ "payload_md": "canary text", "target_space": "team:a" })),
    with("POST /memory/query", "read", Part, || json!({ "query": "canary" })),
    route("GET /reliability/report", "read", Part),
    route("GET /v1/audit", "read", Part),
    route("POST /v1/reconcile", "operate", Part),
    with("POST /mcp", "", Filters, || json!({ "tool": "outbox_status", "arguments": {} })),
    route("GET /v1/session", "", Open),
    with("POST /v1/session", "", Open, || json!({ "token": "pr_1_no" })),
    route("DELETE /v1/session", "", Open),
    route("GET /livez", "", Open),
    route("GET /readyz", "", Open),
    route("GET /health", "", Open),
    route("DELETE /v1/subscriptions/{id}", "operate", Part),
];

const SCOPES: [&str; 4] = ["enqueue", "read", "payload", "operate"];

impl Route {
    fn method(&self) -> &str {
        self.name.split(' ').next().unwrap()
    }

    fn path(&self, message: i64) -> String {
        let path = self.name.split(' ').nth(1).unwrap();
        let lane_or_id = if self.keeps == Message { message.to_string() } else { "canary-lane".to_owned() };
        let path = path.replace("{lane_or_id}", &lane_or_id).replace("{lane}", "canary-lane");
        path.replace("{id}", "1").replace("{key}", "canary-order")
    }

    /// The lane of a part's route.
    fn part(&self) -> &'static str {
        match self.name.split(' ').nth(1).unwrap() {
            path if path.starts_with("/do/") || path.contains("/ledger") || path.contains("/orders") => "orders",
            path if ["/memory", "/reliability", "/v1/audit", "/v1/reconcile"].iter().any(|p| path.starts_with(p)) => {
                "memory"
            }
            _ if self.keeps == Part => "webhooks",
            _ => "canary-lane",
        }
    }
}

struct World {
    home: Home,
    server: Server,
    /// A dead message of `canary-lane`.
    message: i64,
    _memory: OpenMemory,
}

impl World {
    /// A server with something of everybody's, behind tokens.
    fn new(home: Home) -> World {
        let memory = OpenMemory::start(&home, &[]);
        let lane = |name: &str| {
            format!(
                "[lane.{name}]\ncourier = \"http\"\nurl = \"http://127.0.0.1:1/\"\nmax_attempts = 1\naudit = true\n"
            )
        };
        let config = format!(
            "[auth]\nmode = \"always\"\n[memory]\nurl = \"{}\"\n[alerts]\nurl = \"http://127.0.0.1:1/\"\n{}{}",
            memory.url(),
            lane("canary-lane"),
            lane("own")
        );
        home.write("postrider.toml", &config);
        home.run(&["migrate"]).done();
        let canary = ["--target", "canary-target", "--active-key", "canary-active", "--key", "canary-key", "--json"];
        let message = home.enqueue(&[&["canary-lane", "--payload", "canary-payload"], &canary[..]].concat());
        home.enqueue(&["own", "--payload", "mine", "--json"]);
        // Both die, and leave an audit each.
        home.run(&["worker", "--once", "--lane", "canary-lane", "--lane", "own"]).ended(1);
        assert_eq!(home.show(message)["status"], "dead");
        home.enqueue(&["own", "--payload", "mine", "--json"]);
        home.run(&["token", "create", "--scope", "read"]).done();
        let server = Server::start(&home, &["--no-workers"]);
        World { home, server, message, _memory: memory }
    }

    fn token(&self, args: &[&str]) -> String {
        let made = self.home.run(&[&["token", "create", "--json"], args].concat()).done().json();
        format!("Bearer {}", made["token"].as_str().unwrap())
    }

    fn ask(&self, route: &Route, path: &str, token: Option<&str>) -> Response {
        let mut headers = vec![("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
        headers.extend(token.map(|token| ("authorization", token)));
        if route.name == "POST /do/order" {
            headers.push(("Idempotency-Key", "canary-order"));
        }
        let body = (route.body)();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.server.request(route.method(), path, &headers, body.as_bytes())
    }

    fn mcp(&self, token: &str, body: &Value) -> Value {
        let headers = [
            ("content-type", "application/json"),
            ("accept", "application/json, text/event-stream"),
            ("authorization", token),
        ];
        self.server.post("/mcp", &headers, &body.to_string()).json()
    }

    fn get(&self, token: &str, path: &str) -> Response {
        self.server.request("GET", path, &[("authorization", token)], b"")
    }
}

#[test]
fn every_route_with_every_kind_of_token() {
    on_every_database(|home| {
        let world = World::new(home);
        let admin = world.token(&["--scope", "admin"]);
        let description = world.get(&admin, "/openapi.json").answered(200).json();
        let mut described = BTreeSet::new();
        for (path, item) in description["paths"].as_object().unwrap() {
            for method in item.as_object().unwrap().keys() {
                described.insert(format!("{} {path}", method.to_uppercase()));
            }
        }
        let known: BTreeSet<String> = TABLE.iter().map(|route| route.name.to_owned()).collect();
        assert_eq!(described, known, "each route has an entry here that says who may use it");

        let all = SCOPES.join(",");
        let bobs = json!({ "payload_md": "the bobolink of canary street", "target_space": "private:bob" }).to_string();
        let headers = [("content-type", "application/json"), ("authorization", &*admin)];
        world.server.post("/memory/store", &headers, &bobs).answered(200);
        let elsewhere = world.token(&["--scope", &all, "--space", "team:elsewhere"]);
        let own = world.token(&["--scope", &all, "--lane", "own"]);
        let expired = world.token(&["--scope", "admin", "--expires", "1ms"]);
        let revoked = world.token(&["--scope", "admin"]);
        let id = revoked.split('_').nth(1).unwrap().to_owned();
        world.home.run(&["token", "revoke", &id]).done();
        let without: Vec<(&str, String)> = SCOPES
            .iter()
            .map(|scope| {
                let others = SCOPES.iter().filter(|other| *other != scope).copied().collect::<Vec<_>>().join(",");
                (*scope, world.token(&["--scope", &others]))
            })
            .collect();
        for route in TABLE {
            let path = route.path(world.message);
            if route.keeps == Open {
                let answer = world.ask(route, &path, None);
                assert!(!answer.body.contains("canary"), "{}: {answer:#?}", route.name);
                continue;
            }
            for bad in [None, Some("Bearer pr_1_wrong"), Some(&*expired), Some(&*revoked)] {
                assert_eq!(world.ask(route, &path, bad).status, 401, "{} {bad:?}", route.name);
            }
            for (_, token) in without.iter().filter(|(scope, _)| *scope == route.scope) {
                assert_eq!(world.ask(route, &path, Some(token)).status, 403, "{} without its scope", route.name);
            }
            let foreign = world.ask(route, &path, Some(&own));
            assert!(!foreign.body.contains("canary"), "{} with another lane's token: {foreign:#?}", route.name);
            let expected = match route.keeps {
                Open => unreachable!("asked above"),
                Part | Lane | Whole => 403,
                Filters => 200,
                Message => {
                    let missing = world.ask(route, &route.path(987_654), Some(&own));
                    let told = said(&missing).replace("987654", &world.message.to_string());
                    assert_eq!(said(&foreign), told, "{}: what is not there looks the same", route.name);
                    404
                }
            };
            assert_eq!(foreign.status, expected, "{} with another lane's token: {foreign:#?}", route.name);
        }
        // Another space: what looks at all of them is refused, and no answer tells of bob's.
        for route in TABLE {
            let refused = match route.name {
                "POST /memory/store" | "POST /v1/reconcile" => true,
                _ if route.keeps == Whole => true,
                name if name.contains("/memory/") || name.contains("/audit") || name.contains("/reliability") => false,
                _ if route.method() != "GET" => continue,
                _ => false,
            };
            let answer = world.ask(route, &route.path(world.message), Some(&elsewhere));
            assert_eq!(answer.status == 403, refused, "{} with another space's token: {answer:#?}", route.name);
            assert!(!answer.body.contains("bob"), "{} with another space's token: {answer:#?}", route.name);
        }
        // Nobody of them changed anything.
        assert_eq!(world.home.show(world.message)["status"], "dead");
        assert_eq!(world.home.stats("canary-lane")["pending"], 0);
        for route in TABLE.iter().filter(|route| route.keeps != Open) {
            let scope = if route.scope.is_empty() { "read" } else { route.scope };
            let mut limits = vec!["--scope", scope];
            if route.keeps != Whole {
                limits.extend(["--lane", route.part()]);
            }
            let answer = world.ask(route, &route.path(world.message), Some(&world.token(&limits)));
            let good = ![401, 403].contains(&answer.status) && answer.status < 500;
            assert!(good, "{} with what it needs: {answer:#?}", route.name);
        }
    });
}

/// What is not in the description, or speaks of many lanes at once.
#[test]
fn a_token_for_some_lanes_hears_of_no_other() {
    let world = World::new(Home::sqlite());
    let all = SCOPES.join(",");
    let own = world.token(&["--scope", &all, "--lane", "own"]);
    let both = world.token(&["--scope", &all, "--lane", "own", "--lane", "canary-lane"]);
    let admin = world.token(&["--scope", "admin"]);
    let lanes = |token: &str| {
        let list = world.get(token, "/v1/outbox?limit=1").json();
        let page = world.get(token, "/v1/outbox").json();
        let mut lanes: Vec<String> =
            page["items"].as_array().unwrap().iter().map(|m| m["lane"].as_str().unwrap().to_owned()).collect();
        lanes.dedup();
        lanes.sort();
        lanes.dedup();
        (lanes, list["items"].as_array().unwrap().len())
    };
    assert_eq!(lanes(&own), (vec!["own".to_owned()], 1));
    assert_eq!(lanes(&both), (vec!["canary-lane".to_owned(), "own".to_owned()], 1));
    world.get(&own, "/v1/outbox?lane=canary-lane").refused(403, "FORBIDDEN");
    let keyed = world.get(&own, "/v1/outbox?key=canary-key").answered(200).json();
    assert_eq!(keyed["items"], json!([]), "{keyed}");

    let metrics = world.get(&own, "/metrics").answered(200).body;
    assert!(metrics.contains("outbox_depth{lane=\"own\",status=\"Pending\"} 1"), "{metrics}");
    let labels = metrics.lines().filter(|line| !line.starts_with('#'));
    assert!(labels.into_iter().all(|line| line.contains("lane=\"own\"")), "{metrics}");
    let metrics = world.get(&both, "/metrics").answered(200).body;
    assert!(metrics.contains("\"canary-lane\"") && !metrics.contains("\"orders\""), "{metrics}");
    let metrics = world.get(&admin, "/metrics").answered(200).body;
    assert!(metrics.contains("outbox_sqlite_wal_bytes") && metrics.contains("memory_capability_up"), "{metrics}");

    // Also those that only describe.
    let enumerated = |headers: &[(&str, &str)]| {
        let described = world.server.request("GET", "/openapi.json", headers, b"").answered(200);
        let parameters = &described.json()["paths"]["/v1/lanes/{lane}/pause"]["post"]["parameters"];
        parameters[0]["schema"]["enum"].clone()
    };
    assert_eq!(enumerated(&[]), Value::Null, "without a token no lane is named");
    assert_eq!(enumerated(&[("authorization", "Bearer pr_1_no")]), Value::Null);
    assert_eq!(enumerated(&[("authorization", &own)]), json!(["own"]));
    assert!(enumerated(&[("authorization", &admin)]).to_string().contains("canary-lane"));
    let docs = world.server.get("/docs").answered(200);
    assert!(docs.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));
    assert!(!docs.body.contains("canary"), "{docs:#?}");

    let tools = |token: &str| {
        let listed = world.mcp(token, &json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" }));
        let tools = listed["result"]["tools"].as_array().unwrap_or_else(|| panic!("{listed}")).clone();
        tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(tools(&own), ["outbox_status", "outbox_requeue"]);
    assert_eq!(tools(&world.token(&["--scope", "read", "--lane", "own"])), ["outbox_status"]);
    assert_eq!(tools(&admin).len(), 6);
    let call = |tool: &str, arguments: Value| world.mcp(&own, &json!({ "tool": tool, "arguments": arguments }));
    let status = call("outbox_status", json!({}));
    assert_eq!(status["lanes"].as_object().unwrap().keys().collect::<Vec<_>>(), ["own"], "{status}");
    assert_eq!(
        status["lanes"]["own"],
        json!({ "pending": 1, "leased": 0, "sent": 0, "dead": 1,
        "oldest_due_seconds": status["lanes"]["own"]["oldest_due_seconds"] })
    );
    assert_eq!(call("outbox_status", json!({ "lane": "canary-lane" }))["error"]["code"], "FORBIDDEN");
    let answers = call("outbox_requeue", json!({ "ids": [world.message, 987_654] }));
    assert_eq!(answers["results"][0]["outcome"], "not_found", "{answers}");
    assert_eq!(answers["results"][0]["outcome"], answers["results"][1]["outcome"]);
    assert_eq!(world.home.show(world.message)["status"], "dead", "nothing came back");
    for tool in ["memory_query", "reliability_report", "reconcile"] {
        assert_eq!(call(tool, json!({ "query": "x" }))["error"]["code"], "FORBIDDEN", "{tool}");
    }

    // The dashboard's stream.
    let stream = |token: &str| {
        use std::io::{BufRead, BufReader, Write};
        let mut connection = world.server.connect();
        let ask = format!("GET /v1/live HTTP/1.1\r\nhost: {}\r\nauthorization: {token}\r\n\r\n", world.server.address);
        connection.write_all(ask.as_bytes()).unwrap();
        let lines = BufReader::new(connection).lines().map(|line| line.unwrap());
        lines.into_iter().find_map(|line| line.strip_prefix("data: ").map(str::to_owned)).unwrap()
    };
    let sample = stream(&own);
    assert!(sample.contains("\"own\"") && !sample.contains("canary") && !sample.contains("\"orders\""), "{sample}");
    assert!(stream(&admin).contains("canary-lane"));
    // It is in no description: who may not read is refused here, too.
    world.get(&world.token(&["--scope", "enqueue"]), "/v1/live").refused(403, "FORBIDDEN");
    world.get(&world.token(&["--scope", "read", "--expires", "1ms"]), "/v1/live").refused(401, "UNAUTHORIZED");
}

/// The audit and the report are the memory gateway's, and of other lanes they tell nothing to its tokens.
#[test]
fn the_audit_of_another_lane_is_not_the_gateways() {
    on_every_database(|home| {
        let world = World::new(home);
        let store = |text: &str| {
            let headers =
                [("content-type", "application/json"), ("authorization", &*world.token(&["--scope", "enqueue"]))];
            let body = json!({ "payload_md": text, "target_space": "team:a" });
            world.server.post("/memory/store", &headers, &body.to_string()).answered(200);
        };
        store("a memory of ours");
        let memory = world.token(&["--scope", "read", "--lane", "memory"]);
        let admin = world.token(&["--scope", "admin"]);
        let rows = |token: &str, query: &str| {
            world.get(token, &format!("/v1/audit{query}")).answered(200).json()["items"].as_array().unwrap().clone()
        };
        assert_eq!(rows(&admin, "").len(), 3, "one of each lane, and the memory's");
        let seen = rows(&memory, "");
        assert_eq!(seen.len(), 1, "{seen:?}");
        assert_eq!(seen[0]["target_space"], "team:a");
        assert_eq!(rows(&memory, "?limit=1").len(), 1, "a page goes on over what is not seen");
        assert!(rows(&memory, &format!("?outbox_id={}", world.message)).is_empty());
        assert_eq!(rows(&admin, &format!("?outbox_id={}", world.message)).len(), 1);
        let report = |token: &str| world.get(token, "/reliability/report").answered(200).json();
        assert_eq!(report(&memory)["audit_stats"]["total"], 1, "{}", report(&memory));
        assert_eq!(report(&admin)["audit_stats"]["total"], 3);
        assert_eq!(report(&memory)["audit_stats"]["complete"], true);
    });
}

#[test]
fn a_token_for_some_spaces_looks_into_no_other() {
    on_every_database(|home| {
        let world = World::new(home);
        let all = SCOPES.join(",");
        let admin = world.token(&["--scope", "admin"]);
        let ask = |token: &str, path: &str, body: Value| {
            let headers = [("content-type", "application/json"), ("authorization", token)];
            world.server.post(path, &headers, &body.to_string())
        };
        let store = |token: &str, space: Option<&str>, text: &str| {
            let mut body = json!({ "payload_md": text });
            body["target_space"] = space.map_or(Value::Null, Value::from);
            ask(token, "/memory/store", body)
        };
        for (space, text) in [
            ("team:a", "the sparrow of team a sings"),
            ("team:b", "the sparrow of team b, a canary, sleeps"),
            ("private:bob", "the sparrow of bob, a canary, hides its key"),
        ] {
            store(&admin, Some(space), text).answered(200);
        }
        let of_a = world.token(&["--scope", &all, "--space", "team:a"]);
        let teams = world.token(&["--scope", &all, "--space", "team:*"]);
        let most = world.token(&["--scope", &all, "--space", "*"]);
        let bob = world.token(&["--scope", &all, "--space", "*", "--space", "private:bob"]);
        let unlimited = world.token(&["--scope", &all]);
        let question = |spaces: Option<&str>| match spaces {
            Some(space) => json!({ "query": "sparrow", "spaces": [space] }),
            None => json!({ "query": "sparrow" }),
        };
        let spaces = |token: &str, named: Option<&str>| {
            let answer = ask(token, "/memory/query", question(named)).answered(200).json();
            let mut found: Vec<String> = answer["results"]
                .as_array()
                .unwrap()
                .iter()
                .map(|found| found["space"].as_str().unwrap_or("none").to_owned())
                .collect();
            found.sort();
            found
        };
        let check = || {
            for (token, seen) in [
                (&of_a, &["team:a"][..]),
                (&teams, &["team:a", "team:b"]),
                (&most, &["team:a", "team:b"]),
                (&bob, &["private:bob", "team:a", "team:b"]),
                (&unlimited, &["private:bob", "team:a", "team:b"]),
                (&admin, &["private:bob", "team:a", "team:b"]),
            ] {
                assert_eq!(spaces(token, None), seen);
                assert_eq!(spaces(token, Some("*")), seen);
            }
            assert_eq!(spaces(&teams, Some("team:*")), ["team:a", "team:b"]);
            assert_eq!(spaces(&most, Some("team:b")), ["team:b"]);
            for (token, foreign) in [
                (&of_a, "team:b"),
                (&of_a, "private:bob"),
                (&of_a, "team:*"),
                (&teams, "private:bob"),
                (&most, "private:bob"),
                (&most, "private:*"),
                (&bob, "private:ann"),
                (&of_a, "private:nobody"),
            ] {
                let refused = ask(token, "/memory/query", question(Some(foreign)));
                assert_eq!(refused.status, 403, "{foreign}: {refused:#?}");
                assert!(!refused.body.contains("canary"), "{refused:#?}");
            }
        };
        check();

        assert_eq!(store(&of_a, Some("private:bob"), "planted").status, 403);
        assert_eq!(store(&of_a, None, "planted").status, 403, "the default space is not its own either");
        store(&of_a, Some("team:a"), "a second of team a").answered(200);
        assert_eq!(world.home.number("SELECT COUNT(*) FROM memory_writes WHERE payload_md = 'planted'"), 0);

        let audit = world.get(&of_a, "/v1/audit").answered(200).json();
        let of_memories = |row: &&Value| row["evidence_refs_json"]["source"] == "gateway";
        let rows: Vec<&Value> = audit["items"].as_array().unwrap().iter().filter(of_memories).collect();
        assert!(rows.len() == 2 && rows.iter().all(|row| row["target_space"] == "team:a"), "{audit}");
        let total =
            |token: &str| world.get(token, "/reliability/report").answered(200).json()["audit_stats"]["total"].clone();
        assert_eq!((total(&of_a), total(&teams)), (json!(2), json!(3)));
        assert_eq!(ask(&of_a, "/v1/reconcile", json!({})).status, 403);
        for verb in ["pause", "resume"] {
            let path = format!("/v1/lanes/memory/{verb}");
            assert_eq!(ask(&of_a, &path, json!({})).status, 403, "other spaces' memories go there, too");
            ask(&unlimited, &path, json!({})).answered(200);
        }
        world.get(&of_a, "/v1/doctor").refused(403, "FORBIDDEN");
        let metrics = world.get(&of_a, "/metrics").answered(200).body;
        assert!(!metrics.contains("memory_stores"), "{metrics}");
    });
}

/// Messages of the lane `memory` go to a space, and are seen by whoever may look into it.
#[test]
fn deferred_memories_are_messages_of_their_space() {
    let mut world = World::new(Home::sqlite());
    let admin = world.token(&["--scope", "admin"]);
    world._memory.stop();
    let headers = [("content-type", "application/json"), ("authorization", &*admin)];
    let body = json!({ "payload_md": "the sparrow of bob", "target_space": "private:bob" });
    let deferred = world.server.post("/memory/store", &headers, &body.to_string()).answered(202).json();
    let id = deferred["outbox_id"].as_i64().unwrap();
    let of_a = world.token(&["--scope", "read,operate", "--space", "team:a"]);
    let bob = world.token(&["--scope", "read,operate", "--space", "private:bob"]);
    world.get(&bob, &format!("/v1/outbox/{id}")).answered(200);
    let (foreign, missing) = (world.get(&of_a, &format!("/v1/outbox/{id}")), world.get(&of_a, "/v1/outbox/987654"));
    assert_eq!((foreign.status, said(&foreign)), (404, said(&missing).replace("987654", &id.to_string())));
    assert!(!world.get(&of_a, "/v1/outbox").body.contains("private:bob"));
    assert!(world.get(&bob, "/v1/outbox?lane=memory").body.contains("private:bob"));
    let requeue = |token: &str| {
        let call = json!({ "tool": "outbox_requeue", "arguments": { "ids": [id] } });
        world.mcp(token, &call)["results"][0]["outcome"].clone()
    };
    assert_eq!((requeue(&of_a), requeue(&bob)), (json!("not_found"), json!("not_dead")));
    // Keywords of our own copies are kept apart as well.
    let query = |token: &str| {
        let headers = [("content-type", "application/json"), ("authorization", token)];
        let answer = world.server.post("/memory/query", &headers, "{\"query\":\"sparrow\"}").answered(200).json();
        (answer["degraded"].clone(), answer["total"].clone())
    };
    wait_until("it is known to be away", || query(&bob).0 == true);
    assert_eq!((query(&of_a), query(&bob)), ((json!(true), json!(0)), (json!(true), json!(1))));
}

/// Nobody tells of troubles but Postrider itself.
#[test]
fn alerts_cannot_be_forged() {
    on_every_database(|home| {
        let world = World::new(home);
        let admin = world.token(&["--scope", "admin"]);
        let forge = |path: &str, body: &str| {
            let headers = [("content-type", "application/json"), ("authorization", &*admin)];
            world.server.post(path, &headers, body)
        };
        forge("/v1/outbox/alerts", "{}").refused(409, "LANE_OWNED");
        forge("/v1/outbox/alerts/batch", "{\"messages\":[{\"payload\":1}]}").refused(409, "LANE_OWNED");
        world.home.run(&["enqueue", "alerts", "--payload", "x"]).refused(2, &["has an owner", "[alerts]"]);
        if world.home.database.is_server() {
            let owner = world.home.text("SELECT owned_by FROM outbox_lanes WHERE lane = 'alerts'");
            assert!(owner.contains("[alerts]"), "what SQL refuses by: {owner}");
            let call = match world.home.database.url().unwrap().starts_with("mysql") {
                true => "CALL postrider_enqueue('alerts', 'x', NULL, NULL, NULL, 0, @id, @outcome)",
                false => "SELECT postrider_enqueue('alerts', 'x'::bytea)",
            };
            let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.home.execute(call)));
            assert!(refused.is_err(), "SQL refuses it");
        }
        assert_eq!(world.home.number("SELECT COUNT(*) FROM outbox WHERE lane = 'alerts'"), 0);
    });
}

/// A URL often carries a secret in its path; who cannot change it need not read it.
#[test]
fn a_subscriptions_url_is_short_for_those_who_only_read() {
    let world = World::new(Home::sqlite());
    let operator = world.token(&["--scope", "read,operate"]);
    let reader = world.token(&["--scope", "read,payload,enqueue"]);
    let headers = [("content-type", "application/json"), ("authorization", &*operator)];
    let made = world.server.post("/v1/subscriptions", &headers, &hook().to_string()).answered(201).json();
    assert_eq!(made["url"], hook()["url"], "whoever made it sees what was made");
    let url = |token: &str, path: &str, at: &str| world.get(token, path).answered(200).json().pointer(at).cloned();
    let id = made["id"].as_i64().unwrap();
    let (one, list) = (format!("/v1/subscriptions/{id}"), "/v1/subscriptions");
    for (token, shown) in [(&operator, hook()["url"].clone()), (&reader, json!("https://hooks.example.com/…"))] {
        assert_eq!(url(token, &one, "/url"), Some(shown.clone()));
        assert_eq!(url(token, list, "/items/0/url"), Some(shown));
    }
    for path in ["/v1/sagas", "/v1/events", "/v1/dead-letters", "/v1/overview"] {
        assert!(!world.get(&reader, path).answered(200).body.contains("canary-path"), "{path}");
    }
}

/// A destination may repeat what it was sent, in whatever spelling: what it said is for those who may see payloads.
#[test]
fn what_a_destination_said_is_for_those_who_may_see_payloads() {
    let echo = Receiver::answering(|_| (422, "no such card \\u0034111".to_owned()));
    let home = Home::sqlite();
    let lane = format!("[lane.cards]\ncourier = \"http\"\nurl = \"{}\"\nmax_attempts = 1\n", echo.url);
    home.write("postrider.toml", &format!("[auth]\nmode = \"always\"\n{lane}"));
    home.run(&["migrate"]).done();
    let id = home.enqueue(&["cards", "--payload", "4111", "--json"]);
    home.run(&["worker", "--once", "--lane", "cards"]).ended(1);
    let token = |scopes: &str| {
        let made = home.run(&["token", "create", "--json", "--scope", scopes]).done().json();
        format!("Bearer {}", made["token"].as_str().unwrap())
    };
    let (reader, trusted) = (token("read"), token("read,payload"));
    let server = Server::start(&home, &["--no-workers"]);
    let get = |token: &str, path: &str| {
        server.request("GET", path, &[("authorization", token)], b"").answered(200).body.clone()
    };
    for path in [format!("/v1/outbox/{id}"), "/v1/outbox?status=dead".to_owned()] {
        let (ours, whole) = (get(&reader, &path), get(&trusted, &path));
        assert!(ours.contains("422") && !ours.contains("no such card"), "{path}: {ours}");
        assert!(whole.contains("422") && whole.contains("no such card"), "{path}: {whole}");
    }
    // Nor what a receiver of webhooks answered, with its headers.
    for sql in [
        "INSERT INTO events (id, event_type, payload, payload_sha, content_type, created_at) VALUES (7, 'a.b', X'31', zeroblob(32), 'application/json', 1)",
        "INSERT INTO webhook_delivery_sagas (id, event_id, subscription_id, generation, status, attempt_count, created_at, updated_at) VALUES (7, 7, 1, 0, 'Completed', 1, 1, 1)",
        "INSERT INTO webhook_attempts (job_id, saga_id, attempt, started_at, duration_ms, response_status, response_headers, response_body) VALUES (7, 7, 1, 1, 1, 200, '[[\"x-canary\",\"no such card\"]]', CAST('no such card' AS BLOB))",
    ] {
        home.execute(sql);
    }
    for path in ["/v1/sagas/7", "/v1/events/7"] {
        let (ours, whole) = (get(&reader, path), get(&trusted, path));
        assert!(ours.contains("200") && !ours.contains("no such card") && !ours.contains("x-canary"), "{path}: {ours}");
        assert_eq!(whole.matches("no such card").count(), 2, "{path}: {whole}");
    }
    // Nothing else that a reader may ask repeats it either.
    for path in ["/v1/overview", "/metrics", "/v1/lanes", "/v1/doctor"] {
        let answer = server.request("GET", path, &[("authorization", &*reader)], b"");
        assert!(!answer.body.contains("no such card"), "{path}: {}", answer.body);
    }
}

/// What is asked costs a bounded amount, and so does saying no to it.
#[test]
fn answers_have_bounds() {
    let world = World::new(Home::sqlite());
    let admin = world.token(&["--scope", "admin"]);
    let headers = [("content-type", "application/json"), ("authorization", &*admin)];
    let spaces: Vec<String> = (0..40_000).map(|n| format!("team:{n}")).collect();
    let refused = world.server.post("/memory/query", &headers, &json!({ "query": "x", "spaces": spaces }).to_string());
    assert_eq!(refused.status, 422, "{}", &refused.body[..200]);
    assert!(refused.body.len() < 1000, "{} bytes", refused.body.len());
    let spaces = &spaces[..100];
    let asked = world.server.post("/memory/query", &headers, &json!({ "query": "x", "spaces": spaces }).to_string());
    assert_eq!(asked.status, 200);

    // An event with more sagas and attempts than an answer bears.
    let event = json!({ "event_type": "a.b", "payload": 1 }).to_string();
    let id = world.server.post("/v1/events", &headers, &event).answered(202).json()["event_id"].as_i64().unwrap();
    let series =
        |most: i64| format!("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {most})");
    world.home.execute(&format!(
        "{} INSERT INTO webhook_delivery_sagas (event_id, subscription_id, generation, status, attempt_count, created_at, updated_at)
         SELECT {id}, i, 0, 'Completed', 0, 1, 1 FROM n",
        series(300)
    ));
    world.home.execute(&format!(
        "{} INSERT INTO webhook_attempts (job_id, saga_id, attempt, started_at, duration_ms, response_body)
         SELECT 1000000 + i, 1 + i / 500, i % 500, 1, 1, zeroblob(20000) FROM n",
        series(1000)
    ));
    let timeline = world.get(&admin, &format!("/v1/events/{id}")).answered(200).json();
    let sagas = timeline["sagas"].as_array().unwrap();
    let attempts: usize = sagas.iter().map(|saga| saga["attempts"].as_array().unwrap().len()).sum();
    assert_eq!((sagas.len(), attempts, &timeline["more"]), (100, 200, &json!(true)));
    let saga = world.get(&admin, "/v1/sagas/1").answered(200).json();
    let attempts = saga["attempts"].as_array().unwrap();
    assert_eq!((attempts.len(), &attempts[199]["attempt"]), (200, &json!(499)), "the last of them");

    // Subscriptions that say much: a page ends where it is long enough, and the next one goes on.
    world.home.execute(&format!(
        "{} INSERT INTO subscriptions (id, url, event_types, status, description, secrets, signature, created_at, updated_at, version, url_version)
         SELECT 9000 + i, 'https://hooks.example.com/' || i, '[\"x.y\"]', 'paused', hex(zeroblob(20000)), '', 'v1', 1, 1, 1, 1 FROM n",
        series(300)
    ));
    let (mut seen, mut after) = (0, String::new());
    loop {
        let answer = world.get(&admin, &format!("/v1/subscriptions?limit=1000{after}")).answered(200);
        assert!(answer.body.len() < 10 << 20, "{} bytes", answer.body.len());
        let page = answer.json();
        let listed = page["items"].as_array().unwrap().iter().filter(|one| one["id"].as_i64() > Some(9000)).count();
        assert!(listed < 300, "not all at once");
        seen += listed;
        match page["next_cursor"].as_str() {
            Some(cursor) => after = format!("&cursor={cursor}"),
            None => break,
        }
    }
    assert_eq!(seen, 300, "each once");

    // Numbers of a long history.
    world.home.execute(&format!(
        "{} INSERT INTO outbox_done (id, lane, shard_id, due_at, attempts, crashes, maybe_sent, lease_token, payload, payload_sha, created_at, updated_at, status, finished_at)
         SELECT 1000000 + i, CASE i % 2 WHEN 0 THEN 'memory' ELSE 'own' END, 0, 1, 0, 0, 0, 1, X'', zeroblob(32), 1, 1, 'sent', i FROM n",
        series(120_000)
    ));
    let status = world.mcp(&admin, &json!({ "tool": "outbox_status", "arguments": {} }));
    assert_eq!((&status["lanes"]["own"]["sent"], &status["lanes"]["own"]["more"]), (&json!(50_000), &json!(true)));
    let report = world.get(&admin, "/reliability/report").answered(200).json();
    let outbox = &report["outbox_stats"];
    assert_eq!((&outbox["by_status"]["sent"], &outbox["complete"]), (&json!(50_000), &json!(false)), "{report}");
    assert_eq!(report["audit_stats"]["complete"], true);
    // Whoever runs the command may wait for all of it.
    assert_eq!(world.home.stats("own")["sent"], 60_000);
    let (_, log) = world.server.stop();
    assert!(log.lines().all(|line| line.len() < 10_000), "no line of the log is long");
}

/// Messages of memories belong to a space, whatever is asked of them.
#[test]
fn a_message_of_another_space_is_like_one_that_is_not_there() {
    let world = World::new(Home::sqlite());
    let elsewhere = world.token(&["--scope", &SCOPES.join(","), "--space", "team:elsewhere"]);
    let columns = "id, lane, shard_id, due_at, attempts, crashes, maybe_sent, lease_token, target, payload, payload_sha, created_at, updated_at, status, finished_at";
    world.home.execute(&format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50) INSERT INTO outbox_done ({columns})
         SELECT 5000 + i, 'memory', 0, 1, 0, 0, 0, 1, 'private:bob', X'', zeroblob(32), 1, 1, 'dead', i FROM n"
    ));
    let headers = [("content-type", "application/json"), ("authorization", &*elsewhere)];
    for verb in ["requeue", "retry"] {
        let told = |id: i64| {
            let answer = world.server.post(&format!("/v1/outbox/{id}/{verb}"), &headers, "{}");
            (answer.status, said(&answer).replace(&id.to_string(), "ID"))
        };
        assert_eq!(told(5001), told(987_654), "{verb}");
        assert_eq!(told(5001).0, 404, "{verb}");
    }
    world.get(&elsewhere, "/v1/outbox/5001").refused(404, "NOT_FOUND");
    for query in ["lane=memory&target=private:bob&limit=1", "lane=memory&target=private:nobody&limit=1"] {
        let list = world.get(&elsewhere, &format!("/v1/outbox?{query}")).answered(200).json();
        assert_eq!((&list["items"], &list["next_cursor"]), (&json!([]), &Value::Null), "{query}");
    }
    let bulk = json!({ "filter": { "lane": "memory" }, "dry_run": false }).to_string();
    let refused = world.server.post("/v1/outbox/requeue", &headers, &bulk);
    assert!((400..500).contains(&refused.status), "{refused:#?}");
    assert_eq!(world.home.stats("memory")["dead"], 50, "nothing came back");
}

/// The table above is held against the description: what is in no description is named here, and asked for in a test of its
/// own or open to all.
#[test]
fn what_is_in_no_description_is_known() {
    // The stream is asked above, the documents and the dashboard's files are public, the last two are another listener's.
    let known = ["/v1/live", "/openapi.json", "/docs", "&path", "/metrics", "/livez"];
    let mut found = BTreeSet::new();
    let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = std::fs::read_to_string(&path).unwrap();
            for other in [".nest(", ".route_service(", ".nest_service(", ".fallback_service("] {
                assert!(!source.contains(other), "{}: `{other}` makes routes nobody looks at", path.display());
            }
            let called = source.split(".route(").skip(1);
            found.extend(called.map(|rest| rest.split(',').next().unwrap().trim().trim_matches('"').to_owned()));
        }
    }
    assert_eq!(found, BTreeSet::from(known.map(str::to_owned)), "give a new route a test of its own");
}
