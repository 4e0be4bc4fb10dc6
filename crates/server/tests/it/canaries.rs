//! A secret in every place a secret can stand, then everything that can go wrong; and none of them is found where people,
//! logs or other programs could read it.

use std::io::{Read, Write};
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

/// What must be nowhere: the word that all of them carry, also as a database shows bytes, and those that are encoded.
fn planted(text: &str) -> Option<&str> {
    let known = ["canary", "63616e617279", "63616E617279", KEY, &WEBHOOK[..20]];
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

    /// Nothing of what was told is a secret, nor one of these, which were made meanwhile.
    fn is_clean(&self, made: &[String]) {
        let found: Vec<String> = (self.0.lock().unwrap().iter())
            .filter_map(|(what, text)| {
                let of_made = || text.lines().find(|line| made.iter().any(|secret| line.contains(secret.as_str())));
                Some(format!("{what}: {}", planted(text).or_else(of_made)?))
            })
            .collect();
        assert!(found.is_empty(), "secrets are told:\n{}", found.join("\n"));
    }
}

/// Columns that hold what somebody sent, the name it was sent under, or the URL it is sent to: that is what they are for.
const KEPT: [&str; 19] = [
    "dead_letters.payload_snapshot",
    "events.external_id",
    "events.payload",
    "idempo_ledger.idempotency_key",
    "ledger_events.idempotency_key",
    "memory_terms.term",
    "memory_writes.payload_md",
    "order_conflicts.idempotency_key",
    "outbox.active_key",
    "outbox.headers",
    "outbox.payload",
    "outbox_active_keys.active_key",
    "outbox_done.active_key",
    "outbox_done.headers",
    "outbox_done.payload",
    "outbox_keys.key",
    "postrider_former_keys.key",
    "subscriptions.url",
    "write_audit.active_key",
];

/// Every value of every table but those, as text.
fn columns(home: &Home, told: &Told) {
    let tables = match home.database {
        Database::Sqlite => {
            "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'".to_owned()
        }
        _ => {
            let schema = if matches!(home.database, Database::Mysql { .. }) { "DATABASE()" } else { "'public'" };
            format!(
                "SELECT c.table_name, c.column_name FROM information_schema.columns c JOIN information_schema.tables t
                 ON t.table_schema = c.table_schema AND t.table_name = c.table_name WHERE c.table_schema = {schema} AND t.table_type = 'BASE TABLE'"
            )
        }
    };
    let mut searched = 0;
    for column in home.rows(&tables) {
        let [table, column] = &column[..] else { panic!("{column:?}") };
        if KEPT.contains(&format!("{table}.{column}").as_str()) {
            continue;
        }
        let sql = match home.database {
            Database::Mysql { .. } => format!("SELECT `{column}` FROM `{table}`"),
            Database::Sqlite => format!("SELECT \"{column}\" FROM \"{table}\""),
            // Bytes of PostgreSQL are shown as what they say.
            Database::Postgres { .. } => format!(
                "SELECT CASE WHEN pg_typeof(\"{column}\")::text = 'bytea' THEN encode(\"{column}\"::text::bytea, 'escape') ELSE \"{column}\"::text END FROM \"{table}\""
            ),
        };
        for row in home.rows(&sql) {
            searched += 1;
            told.note(&format!("{table}.{column}"), &row[0]);
        }
    }
    assert!(searched > 100, "there is something to search: {searched}");
}

/// Every path that can be read, as the server describes them, with something in their braces; and the dashboard's files.
fn everything_to_look_at(description: &Value, message: &Value) -> Vec<String> {
    let paths = description["paths"].as_object().unwrap().iter().filter(|(_, methods)| methods["get"].is_object());
    let filled = paths.map(|(path, _)| {
        let path = path.replace("{key}", "canary-order-key").replace("{id}", "1");
        path.replace("{lane_or_id}", &message.to_string()).replace("{lane}", "work")
    });
    let mut all: Vec<String> = filled.collect();
    assert!(all.len() > 20 && all.iter().all(|path| !path.contains('{')), "{all:?}");
    let page = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/dashboard")).unwrap();
    let files = page.map(|file| file.unwrap().file_name().into_string().unwrap()).filter(|name| name != "index.html");
    all.extend(files.map(|name| format!("/dashboard/{name}")));
    all.extend(["/", "/openapi.json", "/docs"].map(str::to_owned));
    all
}

/// Makes every message that is written fail as a constraint does, the whole row in what the database says of it; answers
/// what ends that.
fn refuse_with_the_row(home: &Home) -> String {
    match home.database {
        // SQLite never repeats values.
        Database::Sqlite => {
            let (broken, mended) = home.database.refuse("INSERT", "outbox");
            home.execute(&broken);
            mended
        }
        Database::Postgres { .. } => {
            home.execute(
                "CREATE FUNCTION telling() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                     RAISE EXCEPTION 'new row violates check constraint'
                     USING ERRCODE = '23514', DETAIL = 'Failing row contains ' || NEW::text, HINT = 'Take ' || NEW::text;
                 END $$;
                 CREATE TRIGGER telling BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION telling()",
            );
            "DROP TRIGGER telling ON outbox".to_owned()
        }
        Database::Mysql { .. } => {
            home.execute(
                "CREATE TRIGGER telling BEFORE INSERT ON outbox FOR EACH ROW BEGIN
                     DECLARE told VARCHAR(128);
                     SET told = CONCAT('Duplicate entry ''', LEFT(CONVERT(NEW.payload USING latin1), 90), ''' for key ''PRIMARY''');
                     SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO = 1062, MESSAGE_TEXT = told;
                 END",
            );
            "DROP TRIGGER telling".to_owned()
        }
    }
}

/// The first of what the server goes on telling.
fn live(server: &Server, token: &str) -> String {
    let mut stream = server.connect();
    let request = format!("GET /v1/live HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {token}\r\n\r\n", server.address);
    stream.write_all(request.as_bytes()).unwrap();
    let mut heard = String::new();
    let mut bytes = [0; 4096];
    while !heard.contains("\n\n") || !heard.contains("data:") {
        let n = stream.read(&mut bytes).unwrap();
        assert!(n > 0, "it ended: {heard}");
        heard.push_str(&String::from_utf8_lossy(&bytes[..n]));
    }
    heard
}

/// `database`: its URL with a password in it, where it has one.
fn a_run_with_everything_that_goes_wrong(home: &Home, database: Option<&str>) {
    let told = Told::default();
    // It repeats what it was sent, path and headers and all, as some do; the broker does not know us.
    let receiver = Receiver::answering(|request| {
        let headers: String = request.headers.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
        let known = !request.header("authorization").contains("canary-broker");
        (if known { 500 } else { 401 }, format!("you said {}\n{headers}", request.path))
    });
    let collector = Receiver::start(|_| Some(200));
    let port = receiver.url.rsplit(':').next().unwrap().split('/').next().unwrap().to_owned();
    let environment: Vec<(&str, String)> =
        ENVIRONMENT.iter().map(|(name, value)| (*name, value.replace("RECEIVER", &port))).collect();
    let mut environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // Everything that can be logged is.
    environment.push(("RUST_LOG", "trace"));
    environment.extend(database.map(|url| ("POSTRIDER_DATABASE", url)));
    home.write("secret", "canary-from-file");
    let memory = OpenMemory::start(home, &["--api-key", "another"]);
    let config = format!(
        "{}
[auth]
mode = \"always\"
[secrets]
key = \"env:KEYS\"
[lane.work]
courier = \"http\"
url = \"env:LANE_URL\"
max_attempts = 1
audit = true
headers = {{ X-Api-Key = \"env:LANE_HEADER\", X-File-Token = \"file:secret\", Authorization = \"exec:echo canary-from-command # canary-command\" }}
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
otlp_endpoint = \"{}\"
",
        database.map(|url| format!("database = \"{url}\"")).unwrap_or_default(),
        memory.url(),
        collector.url.trim_end_matches("/in"),
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
    let signed_in = server.post("/v1/session", &[JSON], &json!({ "token": admin }).to_string());
    let session = signed_in.header("set-cookie").unwrap().split(['=', ';']).nth(1).unwrap().to_owned();
    assert!(session.len() > 20, "{signed_in:#?}");
    let cookie = [("cookie", &*format!("postrider_session={session}"))];
    told.hears("session", server.request("GET", "/v1/session", &cookie, b"").answered(200));
    let cookie = [("cookie", "postrider_session=canary-cookie; __Host-postrider_session=canary-cookie")];
    told.hears("cookie", server.request("GET", "/v1/outbox", &cookie, b""));

    // A lane whose destination repeats everything, and a key that belongs to another.
    let keys = [("Idempotency-Key", "canary-key"), ("Postrider-Active-Key", "canary-active")];
    let id = hear("POST", "/v1/outbox/work", json!({ "secret": "canary-payload" }), &keys).answered(201).json()["id"]
        .clone();
    assert_eq!(hear("POST", "/v1/outbox/work", json!({ "secret": "canary-other" }), &keys).status, 409);
    assert_eq!(hear("POST", "/v1/outbox/work", json!("canary"), &[("Postrider-Delay", "soon")]).status, 400);
    let of_a_message = json!({ "payload": "x", "headers": { "X-Card-Token": "canary-message-header" } });
    let batch = hear("POST", "/v1/outbox/work/batch", json!({ "messages": [of_a_message] }), &[]).answered(200).json();
    for id in [&id, &batch["results"][0]["id"]] {
        wait_until("the message is dead", || {
            ask("GET", &format!("/v1/outbox/{id}"), Value::Null, &[]).json()["status"] == "dead"
        });
    }

    // Webhooks: a secret of one's own, headers, a path; refused and wrong ones too.
    let hook = json!({
        "url": format!("http://127.0.0.1:{port}/canary-hook-of-a-partner?token=canary-query"), "event_types": ["a.*"],
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
    let order = json!({
        "instrument": "ACME", "side": "BUY", "qty": 1, "price": 2, "time_in_force": "IOC", "tags": ["canary-order-tag"],
    });
    hear("POST", "/do/order", order.clone(), &[("Idempotency-Key", "canary-order-key")]).answered(201);
    hear("POST", "/do/order", json!({ "side": "canary-side" }), &[("Idempotency-Key", "canary-order-key")]);
    let mut other = order.clone();
    other["qty"] = json!(7);
    assert_eq!(hear("POST", "/do/order", other, &[("Idempotency-Key", "canary-order-key")]).status, 409);
    hear("POST", "/memory/store", json!({ "payload_md": "canary-memory", "target_space": "team:a" }), &[])
        .answered(202);
    // By MCP too, where a client also says who it is.
    let call = |method: &str, params: Value| {
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        hear("POST", "/mcp", body, &[("accept", "application/json, text/event-stream")]).answered(200);
    };
    let client = json!({ "name": "canary-client", "version": "canary-version" });
    call("initialize", json!({ "protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": client }));
    call(
        "tools/call",
        json!({ "name": "memory_store", "arguments": { "payload_md": "canary-by-mcp", "target_space": "team:a" } }),
    );
    call("tools/call", json!({ "name": "no-such-tool", "arguments": {} }));
    wait_until("the broker was asked", || {
        receiver.requests().iter().any(|r| r.header("authorization").contains("canary-broker"))
    });
    let alerts = || receiver.requests().into_iter().filter(|r| r.header("x-auth-token") == "canary-alert-header");
    wait_until("an alert went out", || alerts().next().is_some());
    wait_until("traces went out", || !collector.requests().is_empty());

    // All that can be looked at, by somebody who may read, payloads too.
    let bearer = [("authorization", &*format!("Bearer {reader}"))];
    let description = server.request("GET", "/openapi.json", &bearer, b"").answered(200).json();
    for path in everything_to_look_at(&description, &id) {
        let answer = server.request("GET", &path, &bearer, b"");
        let fine = answer.status == 200 || path == "/health" || (path == "/v1/replays/1" && answer.status == 404);
        assert!(fine, "{path}: {answer:#?}");
        // Its own names are not secrets to whoever reads: the key by which an order or a message is found.
        let known = ["canary-active", "canary-order-key"];
        let body = known.iter().fold(answer.body.clone(), |body, name| body.replace(name, ""));
        told.note(&format!("GET {path}"), &format!("{}\n{body}", answer.head));
    }
    told.note("GET /v1/live", &live(&server, &reader));
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
        &["--database", "postgres://u@h/x?passwd=canary-password", "outbox", "list"],
        &["--database", "canary-password-alone", "outbox", "list"],
        &["scm", "sync", "gitlab", "https://u:canary-password@gitlab.example/g/p"],
        &["scm", "sync", "git", "https://canary-token@git.example/g/p"],
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
        "[lane.x]\ncourier = \"http\"\nurl = \"https://h.example/\"\nheaders = \"Authorization: canary-plain\"",
        "[tls]\ncert = \"cert.pem\"\nkey = \"-----BEGIN PRIVATE KEY----- canary-key\"",
        "[telemetry]\notlp_endpoint = \"http://u:canary-password@127.0.0.1:1\"",
    ] {
        home.write("wrong.toml", wrong);
        let refused = home.run(&["--config", "wrong.toml", "config", "check"]);
        assert_eq!(refused.code, 2, "{wrong}: {refused:#?}");
        told.note(wrong.lines().next().unwrap(), &format!("{}\n{}", refused.stdout, refused.stderr));
    }
    // And with a database that fails, in ways of its own.
    let all_fail = |what: &str| {
        let batch = json!({ "messages": [{ "payload": "canary-payload", "key": "canary-batch-key" }] });
        let event = json!({ "event_type": "a.b", "payload": "canary-event", "external_id": "canary-external" });
        let memory = json!({ "payload_md": format!("canary-memory {what}"), "target_space": "team:a" });
        for (path, body, more) in [
            ("/v1/outbox/work", json!("canary-payload"), vec![("Idempotency-Key", "canary-third-key")]),
            ("/v1/outbox/work/batch", batch, vec![]),
            ("/v1/events", event, vec![]),
            ("/do/order", order.clone(), vec![("Idempotency-Key", "canary-order-key-2")]),
            ("/memory/store", memory, vec![]),
        ] {
            let answer = ask("POST", path, body, &more);
            // An order that needs none of it is taken in, and its answer has its own key.
            if answer.status >= 400 {
                told.note(&format!("{what}: {path}"), &format!("{}\n{}", answer.head, answer.body));
            }
        }
        run(&["enqueue", "work", "--payload", "canary-payload", "--key", "canary-fourth-key"]);
        run(&["webhooks", "publish", "a.b", "--payload", "canary-payload", "--external-id", "canary-external"]);
    };
    let mended = refuse_with_the_row(home);
    all_fail("a row that is refused");
    home.execute(&mended);
    for table in ["outbox_keys", "outbox", "events", "idempo_ledger"] {
        home.execute(&format!("ALTER TABLE {table} RENAME TO gone"));
        all_fail(&format!("no table {table}"));
        home.execute(&format!("ALTER TABLE gone RENAME TO {table}"));
    }
    columns(home, &told);
    let (_, log) = server.stop();
    assert!(
        log.contains("\"level\":\"WARN\"") && log.contains("\"level\":\"DEBUG\""),
        "there is a log to look at: {log}"
    );
    told.note("the log", &log);
    for alert in alerts() {
        told.note("an alert", &alert.body);
    }
    for traces in collector.requests() {
        assert_eq!(traces.header("authorization"), "canary-otlp");
        told.note("traces", &traces.body);
    }
    assert!(collector.requests().iter().any(|traces| traces.body.contains("outbox.process")));
    let secret = |token: &String| token.rsplit('_').next().unwrap().to_owned();
    told.is_clean(&[secret(&admin), secret(&reader), session]);
}

#[test]
fn no_secret_is_told_on_sqlite() {
    a_run_with_everything_that_goes_wrong(&Home::sqlite(), None);
}

#[test]
fn no_secret_is_told_on_postgres() {
    let database = Database::postgres();
    let mut url = url::Url::parse(database.url().unwrap()).unwrap();
    // Whoever it is, the test's server lets them in.
    url.set_password(Some("canary-database-password")).unwrap();
    a_run_with_everything_that_goes_wrong(&Home::on(database), Some(url.as_str()));
}

#[test]
fn no_secret_is_told_on_mysql() {
    let home = Home::on(Database::mysql());
    let mut url = url::Url::parse(home.database.url().unwrap()).unwrap();
    let user = format!("canaries_{}", std::process::id());
    home.execute(&format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'canary-database-password'"));
    home.execute(&format!("GRANT ALL ON {}.* TO '{user}'@'%'", url.path().trim_start_matches('/')));
    url.set_username(&user).unwrap();
    url.set_password(Some("canary-database-password")).unwrap();
    a_run_with_everything_that_goes_wrong(&home, Some(url.as_str()));
    home.execute(&format!("DROP USER '{user}'@'%'"));
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
