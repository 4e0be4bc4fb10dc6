//! A secret in every place a secret can stand, then everything that can go wrong; and none of them is found where people,
//! logs or other programs could read it.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::api::{Response, Server};
use crate::home::{Home, wait_until};
use crate::memory::OpenMemory;
use crate::receiver::Receiver;
use crate::scratch::Database;

const JSON: (&str, &str) = ("content-type", "application/json");

/// Base64 of 32 bytes, which nobody takes for anything else.
const KEY: &str = "Y2FuYXJ5LWtleS1vZi1hbGwtc2VjcmV0cy1hYWFhYWE=";
const WEBHOOK: &str = "Y2FuYXJ5LXdlYmhvb2stc2VjcmV0LWFhYWFhYWFhYWE=";

/// What the environment holds, by the names the configuration refers to.
const ENVIRONMENT: [(&str, &str); 8] = [
    ("LANE_HEADER", "canary-lane-header"),
    ("LANE_URL", "http://127.0.0.1:RECEIVER/canary-lane-path?token=canary-lane-query"),
    ("BROKER", "Bearer canary-broker"),
    ("OPENMEMORY", "canary-openmemory"),
    ("ALERT_URL", "http://127.0.0.1:RECEIVER/canary-alert-path?key=canary-alert-query"),
    ("ALERT_HEADER", "canary-alert-header"),
    ("KEYS", "k1:Y2FuYXJ5LWtleS1vZi1hbGwtc2VjcmV0cy1hYWFhYWE="),
    ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=canary-otlp"),
];

/// What must be nowhere: the word that all of them carry, and those that are encoded.
fn planted(text: &str) -> Option<&str> {
    let known = ["canary", KEY, &WEBHOOK[..20]];
    text.lines().find(|line| known.iter().any(|secret| line.contains(secret)))
}

/// All answers, to be searched at the end.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<(String, String)>>>);

impl Told {
    fn note(&self, what: &str, text: &str) {
        self.0.lock().unwrap().push((what.to_owned(), text.to_owned()));
    }

    fn hears(&self, what: &str, response: Response) -> Response {
        // By its key an order is known to whoever placed it.
        let body = response.body.replace("canary-order-key", "");
        self.note(what, &format!("{}\n{body}", response.head));
        response
    }
}

/// Every text of every table, but for columns that hold what somebody sent, and the URL it is sent to: that is what they are
/// for.
fn columns(home: &Home, told: &Told) {
    const KEPT: [&str; 13] = [
        "payload",
        "payload_snapshot",
        "payload_md",
        "payload_json",
        "content_md",
        "key",
        "active_key",
        "external_id",
        "idempotency_key",
        "term",
        "digest",
        "request_json",
        "url",
    ];
    let tables = match home.database.is_server() {
        true => "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name IN
                 (SELECT table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE')",
        false => "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'",
    };
    let mut searched = 0;
    for column in home.rows(tables) {
        let [table, column] = &column[..] else { panic!("{column:?}") };
        if KEPT.contains(&column.as_str()) {
            continue;
        }
        // Bytes of PostgreSQL are shown as what they say.
        let text = match home.database.is_server() {
            true => format!(
                "CASE WHEN pg_typeof(\"{column}\")::text = 'bytea' THEN encode(\"{column}\"::text::bytea, 'escape') ELSE \"{column}\"::text END"
            ),
            false => format!("\"{column}\""),
        };
        for row in home.rows(&format!("SELECT {text} FROM \"{table}\"")) {
            searched += 1;
            told.note(&format!("{table}.{column}"), &row[0]);
        }
    }
    assert!(searched > 100, "there is something to search: {searched}");
}

fn a_run_with_everything_that_goes_wrong(home: &Home, database: &str) {
    let told = Told::default();
    // It repeats what it was sent, headers and all, as some do.
    let receiver = Receiver::answering(|request| {
        let headers: String = request.headers.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
        (500, format!("you said {headers}"))
    });
    let port = receiver.url.rsplit(':').next().unwrap().split('/').next().unwrap().to_owned();
    let environment: Vec<(&str, String)> =
        ENVIRONMENT.iter().map(|(name, value)| (*name, value.replace("RECEIVER", &port))).collect();
    let mut environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // Everything that can be logged is.
    environment.push(("RUST_LOG", "trace"));
    let memory = OpenMemory::start(home, &["--api-key", "another"]);
    let config = format!(
        "{database}
[auth]
mode = \"always\"
[secrets]
key = \"env:KEYS\"
[lane.work]
courier = \"http\"
url = \"env:LANE_URL\"
max_attempts = 1
audit = true
headers = {{ X-Api-Key = \"env:LANE_HEADER\", Authorization = \"exec:echo canary-from-command # canary-command\" }}
[webhooks]
allow_http = true
allow_cidrs = [\"127.0.0.0/8\"]
max_retry_limit = 1
[orders]
adapter = \"http\"
url = \"http://127.0.0.1:{port}/orders\"
idempotency = \"key\"
headers = {{ Authorization = \"env:BROKER\" }}
[memory]
url = \"{}\"
api_key = \"env:OPENMEMORY\"
[alerts]
url = \"env:ALERT_URL\"
headers = {{ X-Auth-Token = \"env:ALERT_HEADER\" }}
[telemetry]
otlp_endpoint = \"http://127.0.0.1:1\"
",
        memory.url()
    );
    home.write("postrider.toml", &config);
    let run = |args: &[&str]| {
        let output = home.command(args).envs(environment.iter().copied()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        // A token is told once, to whoever asked for it; what a message holds, to whoever asks for that.
        if !args.contains(&"create") {
            told.note(&format!("postrider {args:?}"), &format!("{stdout}\n{stderr}"));
        }
        stdout
    };
    run(&["migrate"]);
    run(&["config", "print"]);
    run(&["config", "check"]);
    let token = |scopes: &str| {
        let made: Value = serde_json::from_str(&run(&["token", "create", "--json", "--scope", scopes])).unwrap();
        made["token"].as_str().unwrap().to_owned()
    };
    let (admin, reader) = (token("admin"), token("read,payload"));
    let server = Server::start_with(home, &["--log", "json"], &environment);
    let bearer = format!("Bearer {admin}");
    let ask = |method: &str, path: &str, body: Value, more: &[(&str, &str)]| {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut headers = vec![JSON, ("authorization", &*bearer)];
        headers.extend(more);
        server.request(method, path, &headers, body.as_bytes())
    };
    let hear = |method: &str, path: &str, body: Value, more: &[(&str, &str)]| {
        told.hears(&format!("{method} {path}"), ask(method, path, body, more))
    };
    // Those who are not let in.
    for shown in ["Bearer pr_1_canary-token", "Bearer canary-token", "Basic canary-basic", "canary-scheme"] {
        let answer = server.request("GET", "/v1/outbox", &[("authorization", shown)], b"");
        assert_eq!(told.hears("wrong token", answer).status, 401);
    }
    let signed_in = server.post("/v1/session", &[JSON], "{\"token\":\"pr_1_canary-session\"}");
    told.hears("sign in", signed_in);
    let cookie = [("cookie", "postrider_session=canary-cookie; __Host-postrider_session=canary-cookie")];
    told.hears("cookie", server.request("GET", "/v1/outbox", &cookie, b""));

    // A lane whose destination repeats everything, and a key that belongs to another.
    let keys = [("Idempotency-Key", "canary-key"), ("Postrider-Active-Key", "canary-active")];
    let id = hear("POST", "/v1/outbox/work", json!({ "secret": "canary-payload" }), &keys).answered(201).json()["id"]
        .clone();
    assert_eq!(hear("POST", "/v1/outbox/work", json!({ "secret": "canary-other" }), &keys).status, 409);
    assert_eq!(hear("POST", "/v1/outbox/work", json!("canary"), &[("Postrider-Delay", "soon")]).status, 400);
    wait_until("the message is dead", || {
        ask("GET", &format!("/v1/outbox/{id}"), Value::Null, &[]).json()["status"] == "dead"
    });

    // Webhooks: a secret of one's own, headers, a path; refused and wrong ones too.
    let hook = json!({
        "url": format!("http://127.0.0.1:{port}/canary-hook?token=canary-query"), "event_types": ["a.*"],
        "secret": format!("whsec_{WEBHOOK}"), "headers": { "X-Partner-Key": "canary-partner-header" },
    });
    let made = ask("POST", "/v1/subscriptions", hook.clone(), &[]).answered(201).json();
    assert_eq!(made["secret"], format!("whsec_{WEBHOOK}"), "it is told once, to whoever made it");
    for (field, wrong) in [
        ("secret", json!("whsec_canary-not-base64!")),
        ("secret", json!("canary-plain")),
        ("headers", json!({ "X-Bad": "canary\nheader" })),
        ("headers", json!({ "host": "canary-host" })),
        ("url", json!("http://user:canary-password@127.0.0.1/")),
    ] {
        let mut body = hook.clone();
        body[field] = wrong;
        assert_eq!(hear("POST", "/v1/subscriptions", body, &[]).status, 422);
    }
    let published = hear("POST", "/v1/events", json!({ "event_type": "a.b", "payload": "canary-event" }), &[]);
    let saga = published.answered(202).json()["saga_ids"][0].clone();
    wait_until("the saga is dead", || {
        ask("GET", &format!("/v1/sagas/{saga}"), Value::Null, &[]).json()["status"] == "DeadLettered"
    });
    hear("POST", "/v1/subscriptions/1/test", Value::Null, &[]).answered(200);

    // A broker that refuses, and an OpenMemory that does not know us.
    let order = json!({ "instrument": "ACME", "side": "BUY", "qty": 1, "price": 2, "time_in_force": "IOC" });
    hear("POST", "/do/order", order.clone(), &[("Idempotency-Key", "canary-order-key")]).answered(201);
    hear("POST", "/do/order", json!({ "side": "canary-side" }), &[("Idempotency-Key", "canary-order-key")]);
    let mut other = order;
    other["qty"] = json!(7);
    assert_eq!(hear("POST", "/do/order", other, &[("Idempotency-Key", "canary-order-key")]).status, 409);
    hear("POST", "/memory/store", json!({ "payload_md": "canary-memory", "target_space": "team:a" }), &[])
        .answered(202);
    wait_until("the broker was asked", || {
        receiver.requests().iter().any(|r| r.header("authorization").contains("canary-broker"))
    });
    wait_until("an alert went out", || {
        receiver.requests().iter().any(|r| r.header("x-auth-token") == "canary-alert-header")
    });

    // All that can be looked at, by somebody who may read, payloads too.
    for path in [
        "/metrics",
        "/health",
        "/readyz",
        "/v1/outbox",
        "/v1/overview",
        "/v1/workers",
        "/v1/doctor",
        "/v1/subscriptions",
        "/v1/subscriptions/1",
        "/v1/events",
        "/v1/events/1",
        "/v1/sagas",
        "/v1/sagas/1",
        "/v1/dead-letters",
        "/v1/orders",
        "/v1/orders/conflicts",
        "/v1/audit",
        "/reliability/report",
        "/openapi.json",
        "/docs",
        "/",
        "/dashboard/app.js",
        "/v1/session",
        &format!("/v1/outbox/{id}"),
    ] {
        let headers = [("authorization", &*format!("Bearer {reader}"))];
        let answer = server.request("GET", path, &headers, b"");
        assert_eq!(answer.status / 100, if path == "/health" { answer.status / 100 } else { 2 }, "{path}: {answer:#?}");
        // Its own names are not secrets to whoever reads: the key by which an order or a message is found.
        let known = ["canary-active", "canary-order-key"];
        let body = known.iter().fold(answer.body.clone(), |body, name| body.replace(name, ""));
        told.note(&format!("GET {path}"), &format!("{}\n{body}", answer.head));
    }
    for args in [
        &["token", "list"][..],
        &["outbox", "show", "1"],
        &["outbox", "list"],
        &["lanes"],
        &["webhooks", "dead-letters"],
        &["webhooks", "saga", "1"],
        &["doctor"],
        &["gate"],
        &["memory", "flush"],
        &["scm", "sync", "gitlab", "http://127.0.0.1:1/g/p", "--token", "env:BROKER"],
        &["scm", "sync", "gitlab", "http://127.0.0.1:1/g/p", "--token", "canary-plain-token"],
        &["--database", "postgres://u:canary/pass?word@127.0.0.1:1/x", "outbox", "list"],
        &["--database", "mysql://u:canary-password@127.0.0.1:1/x", "outbox", "list"],
        &["--database", "nonsense://u:canary-password@h/x", "outbox", "list"],
    ] {
        let shown = run(args);
        assert!(!shown.contains("canary-hook"), "{args:?}: {shown}");
    }
    // What is wrong in the file is said without repeating it.
    for wrong in [
        "[orders]\nadapter = \"http\"\nidempotency = \"key\"\nurl = \"https://u:canary-password@broker.example/\"",
        "[orders]\nadapter = \"http\"\nidempotency = \"key\"\nurl = \"ht!tp://canary-password@\"",
        "[orders]\nadapter = \"http\"\nidempotency = \"key\"\nurl = \"https://b/\"\nlook_up_url = \"https://u:canary@b/{key}\"",
        "[lane.x]\ncourier = \"http\"\nurl = \"https://u:canary-password@h.example/\"",
        "[lane.x]\ncourier = \"http\"\nurl = \"https://h.example/?token=canary-token\"",
        "[lane.x]\ncourier = \"http\"\nurl = \"https://h.example/\"\nheaders = { X-Auth = \"canary-plain\" }",
        "[lane.x]\ncourier = \"http\"\nurl = \"https://h.example/\"\nheaders = { X-Any = \"Bearer canary-plain\" }",
        "[lane.x]\ncourier = \"http\"\nurl = \"exec:exit 3 # canary-command\"",
        "[alerts]\nurl = \"https://u:canary-password@h.example/\"",
        "[memory]\nurl = \"http://u:canary-password@127.0.0.1:1\"",
        "[memory]\nurl = \"http://127.0.0.1:1\"\napi_key = \"canary-plain\"",
        "[secrets]\nkey = \"canary-plain\"",
        "[tls]\ncert = \"cert.pem\"\nkey = \"-----BEGIN PRIVATE KEY----- canary-key\"",
        "[telemetry]\notlp_endpoint = \"http://u:canary-password@127.0.0.1:1\"",
    ] {
        home.write("wrong.toml", wrong);
        let refused = home.run(&["--config", "wrong.toml", "config", "check"]);
        assert_eq!(refused.code, 2, "{wrong}: {refused:#?}");
        told.note(wrong.lines().next().unwrap(), &format!("{}\n{}", refused.stdout, refused.stderr));
    }
    // And without the database.
    home.execute("ALTER TABLE outbox_keys RENAME TO gone");
    hear("POST", "/v1/outbox/work", json!("canary-payload"), &[("Idempotency-Key", "canary-third-key")]);
    home.execute("ALTER TABLE gone RENAME TO outbox_keys");
    columns(home, &told);
    let (_, log) = server.stop();
    assert!(log.contains("\"level\":\"WARN\"") && log.lines().count() > 10, "there is a log to look at: {log}");
    told.note("the log", &log);
    let tokens = [&admin, &reader].map(|token| token.rsplit('_').next().unwrap().to_owned());
    let found: Vec<String> = (told.0.lock().unwrap().iter())
        .filter_map(|(what, text)| {
            let of_token = || text.lines().find(|line| tokens.iter().any(|token| line.contains(token)));
            Some(format!("{what}: {}", planted(text).or_else(of_token)?))
        })
        .collect();
    assert!(found.is_empty(), "secrets are told:\n{}", found.join("\n"));
}

#[test]
fn no_secret_is_told_on_sqlite() {
    a_run_with_everything_that_goes_wrong(&Home::sqlite(), "");
}

#[test]
fn no_secret_is_told_on_postgres() {
    let database = Database::postgres();
    let url = url::Url::parse(database.url().unwrap()).unwrap();
    let mut with_password = url.clone();
    with_password.set_password(Some("canary-database-password")).unwrap();
    a_run_with_everything_that_goes_wrong(&Home::on(database), &format!("database = \"{with_password}\""));
}

/// MySQL repeats the key in what it says of a duplicate.
#[test]
fn a_duplicate_key_is_not_repeated_by_mysql() {
    let home = Home::on(Database::mysql());
    home.write("postrider.toml", "[lane.work]\ncourier = \"noop\"\n");
    home.run(&["migrate"]).done();
    // Whatever is written, a row of the same key is there first.
    home.execute(
        "CREATE TRIGGER first BEFORE INSERT ON outbox_keys FOR EACH ROW
         SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO = 1062, MESSAGE_TEXT = 'Duplicate entry ''work-canary-key'' for key ''PRIMARY'''",
    );
    let server = Server::start_with(&home, &["--no-workers"], &[("RUST_LOG", "trace")]);
    let answer = server.post("/v1/outbox/work", &[("Idempotency-Key", "canary-key")], "x");
    assert!(answer.status >= 400 && !answer.body.contains("canary"), "{answer:#?}");
    let (_, log) = server.stop();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("Duplicate entry")).collect();
    assert!(!told.is_empty(), "it is told: {log}");
    assert!(told.iter().all(|line| line.contains("***") && !line.contains("canary")), "{told:?}");
}
