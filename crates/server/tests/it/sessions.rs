//! Signing in: sessions that are not the token, end on the server, and end with their token; and what is refused to
//! whoever shows nothing.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api::{Response, Server};
use crate::home::{Home, wait_until};
use crate::scratch::Database;

const JSON: (&str, &str) = ("content-type", "application/json");
const LANES: &str = "[lane.quietly]\ncourier = \"noop\"\n[lane.another]\ncourier = \"noop\"\n";

fn on_every_database(case: impl Fn(Home)) {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        case(Home::on(database));
    }
}

/// The id and the text of a new token.
fn token(home: &Home, args: &[&str]) -> (i64, String) {
    let made = home.run(&[&["token", "create", "--json"], args].concat()).done().json();
    (made["id"].as_i64().unwrap(), made["token"].as_str().unwrap().to_owned())
}

fn sign_in(server: &Server, token: &str, headers: &[(&str, &str)]) -> Response {
    let body = json!({ "token": token }).to_string();
    server.post("/v1/session", &[&[JSON], headers].concat(), &body)
}

/// `name=value`, as a browser shows it again.
fn cookie(answer: &Response) -> String {
    answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned()
}

fn overview(server: &Server, cookie: &str) -> Response {
    server.request("GET", "/v1/overview", &[("cookie", cookie)], b"")
}

fn sessions_of(home: &Home, token: i64) -> usize {
    let list = home.run(&["token", "list", "--json"]).done().json();
    let own = list["items"].as_array().unwrap().iter().find(|item| item["id"] == token).unwrap().clone();
    let sessions = own["sessions"].as_array().unwrap();
    assert!(sessions.iter().all(|session| session["expires_at"].is_string()), "{own}");
    sessions.len()
}

#[test]
fn a_session_is_not_its_token_and_ends_with_it() {
    on_every_database(|home| {
        home.write("postrider.toml", "[auth]\nmode = \"always\"\n");
        home.run(&["migrate"]).done();
        let (id, token) = token(&home, &["--scope", "read"]);
        let server = Server::start(&home, &["--no-workers"]);
        let answer = sign_in(&server, &token, &[]).answered(200);
        let session = cookie(&answer);
        let secret = session.strip_prefix("postrider_session=").unwrap().to_owned();
        assert!(secret.len() >= 64 && !token.contains(&secret) && !session.contains(&token), "{session}");
        overview(&server, &session).answered(200);
        let told = server.request("GET", "/v1/session", &[("cookie", &session)], b"").answered(200).json();
        assert_eq!((&told["signed_in"], &told["scopes"]), (&json!(true), &json!(["read"])));
        assert_eq!(told["expires_at"], answer.json()["expires_at"]);
        assert!(told["expires_at"].is_string(), "it has an end: {told}");
        // What the database has of it is of no use to anybody.
        let kept = home.rows("SELECT * FROM postrider_sessions");
        assert_eq!(kept.len(), 1);
        assert!(!kept.concat().concat().contains(&secret));
        // One is not the other.
        overview(&server, &format!("postrider_session={token}")).refused(401, "UNAUTHORIZED");
        let bearer = format!("Bearer {secret}");
        server.request("GET", "/v1/overview", &[("authorization", &bearer)], b"").refused(401, "UNAUTHORIZED");

        // Signing out ends it here, wherever the cookie has got to; others go on.
        let other = cookie(&sign_in(&server, &token, &[]).answered(200));
        assert_eq!(sessions_of(&home, id), 2);
        server.request("DELETE", "/v1/session", &[("cookie", &session)], b"").answered(204);
        overview(&server, &session).refused(401, "UNAUTHORIZED");
        overview(&server, &other).answered(200);
        assert_eq!(sessions_of(&home, id), 1);
        let shown = home.run(&["token", "list"]).done().stdout;
        assert!(shown.contains("SESSIONS"), "{shown}");

        home.run(&["token", "revoke", &id.to_string()]).done();
        wait_until("its session is over", || overview(&server, &other).status == 401);
        assert_eq!(home.number("SELECT COUNT(*) FROM postrider_sessions"), 0);
        let (_, log) = server.stop();
        assert!(!log.contains(&secret), "{log}");
    });
}

#[test]
fn a_session_runs_out() {
    on_every_database(|home| {
        home.write("postrider.toml", "[auth]\nmode = \"always\"\nsession_ttl = \"1s\"\n");
        home.run(&["migrate"]).done();
        let (id, token) = token(&home, &["--scope", "read"]);
        let server = Server::start(&home, &["--no-workers"]);
        let session = cookie(&sign_in(&server, &token, &[]).answered(200));
        wait_until("it is over", || overview(&server, &session).status == 401);
        let bearer = format!("Bearer {token}");
        server.request("GET", "/v1/overview", &[("authorization", &bearer)], b"").answered(200);
        assert_eq!(sessions_of(&home, id), 0, "what is over is not listed");
        sign_in(&server, &token, &[]).answered(200);
        assert_eq!(home.number("SELECT COUNT(*) FROM postrider_sessions"), 1, "who signs in cleans up");
    });
}

#[test]
fn all_sessions_are_listed() {
    on_every_database(|home| {
        home.run(&["migrate"]).done();
        let (id, _) = token(&home, &["--scope", "read"]);
        // By hand: nobody signs in so often in a test.
        let (sha, far) = match home.database {
            Database::Sqlite => ("CAST(n AS BLOB)", "9000000000000000"),
            Database::Postgres { .. } => ("decode(lpad(n::text, 64, '0'), 'hex')", "TIMESTAMPTZ '2200-01-01'"),
            Database::Mysql { .. } => ("UNHEX(LPAD(n, 64, '0'))", "TIMESTAMP '2200-01-01 00:00:00'"),
        };
        // MariaDB's recursion ends after a thousand.
        for (from, to) in [(1, 900), (901, 1001)] {
            home.execute(&format!(
                "INSERT INTO postrider_sessions (session_sha, token_id, created_at, expires_at)
                 WITH RECURSIVE s (n) AS (SELECT {from} UNION ALL SELECT n + 1 FROM s WHERE n < {to}) SELECT {sha}, {id}, {far}, {far} FROM s"
            ));
        }
        assert_eq!(sessions_of(&home, id), 1001);
    });
}

#[test]
fn a_stream_ends_with_its_token_or_its_session() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[auth]\nmode = \"always\"\n");
    home.run(&["migrate"]).done();
    let (id, token) = token(&home, &["--scope", "read"]);
    let server = Server::start(&home, &["--no-workers"]);
    let session = cookie(&sign_in(&server, &token, &[]).answered(200));
    let by_session = listen(&server, &format!("cookie: {session}"));
    let by_token = listen(&server, &format!("authorization: Bearer {token}"));
    let own = format!("http://{}", server.address);
    server.request("DELETE", "/v1/session", &[("cookie", &session), ("origin", &own)], b"").answered(204);
    ends(by_session);
    home.run(&["token", "revoke", &id.to_string()]).done();
    ends(by_token);
}

/// A stream of samples that has begun.
fn listen(server: &Server, shows: &str) -> std::net::TcpStream {
    let mut stream = server.connect();
    let request = format!("GET /v1/live HTTP/1.1\r\nhost: {}\r\n{shows}\r\n\r\n", server.address);
    stream.write_all(request.as_bytes()).unwrap();
    let mut heard = vec![0; 4096];
    let n = stream.read(&mut heard).unwrap();
    assert!(heard[..n].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&heard[..n]));
    stream
}

/// A stream ends by itself after a minute; this one does so when it is asked to, and within that time the client waits.
fn ends(mut stream: std::net::TcpStream) {
    let begun = Instant::now();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let (mut heard, mut rest) = (vec![0; 4096], Vec::new());
    while !rest.ends_with(b"0\r\n\r\n") {
        let n = stream.read(&mut heard).unwrap_or_else(|e| panic!("it goes on after {:?}: {e}", begun.elapsed()));
        assert!(begun.elapsed().as_secs() < 30, "it goes on");
        if n == 0 {
            break;
        }
        rest.extend_from_slice(&heard[..n]);
    }
}

/// Anybody may show anything. What is no session is not written about: that would wait for whoever writes, and take a
/// connection from those who have something to write.
#[test]
fn signing_out_of_nothing_writes_nothing() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[auth]\nmode = \"always\"\n");
    home.run(&["migrate"]).done();
    let (_, token) = token(&home, &["--scope", "read"]);
    let server = Server::start(&home, &["--no-workers"]);
    let session = cookie(&sign_in(&server, &token, &[]).answered(200));
    let own = format!("http://{}", server.address);
    let writer = rusqlite::Connection::open(home.path("postrider.db")).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE").unwrap();
    for n in 0..50 {
        let invented = format!("postrider_session={n:064x}");
        server.request("DELETE", "/v1/session", &[("cookie", &invented), ("origin", &own)], b"").answered(204);
    }
    writer.execute_batch("ROLLBACK").unwrap();
    overview(&server, &session).answered(200);
    server.request("DELETE", "/v1/session", &[("cookie", &session), ("origin", &own)], b"").answered(204);
    overview(&server, &session).refused(401, "UNAUTHORIZED");
}

/// Who is let in by nobody would not notice.
#[test]
fn where_every_token_has_run_out_there_is_none() {
    on_every_database(|home| {
        home.run(&["migrate"]).done();
        let serve = || home.run(&["serve", "--listen", "0.0.0.0:0"]);
        assert!(serve().stderr.contains("there is none"), "no token at all");
        let (id, _) = token(&home, &["--scope", "read", "--expires", "1d"]);
        let past = match home.database {
            Database::Sqlite => "1",
            _ => "TIMESTAMP '2020-01-01 00:00:00'",
        };
        home.execute(&format!("UPDATE api_tokens SET expires_at = {past} WHERE id = {id}"));
        let refused = serve();
        assert_eq!(refused.code, 2, "{refused:#?}");
        assert!(refused.stderr.contains("there is none"), "{refused:#?}");
    });
}

#[test]
fn behind_a_proxy_that_speaks_tls_the_cookie_is_of_this_host_alone() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[auth]\nmode = \"always\"\n");
    home.run(&["migrate"]).done();
    let (_, token) = token(&home, &["--scope", "read"]);
    let server = Server::start(&home, &["--no-workers"]);
    let proxied = ("x-forwarded-proto", "https");
    let answer = sign_in(&server, &token, &[proxied]).answered(200);
    let whole = answer.header("set-cookie").unwrap();
    assert!(whole.starts_with("__Host-postrider_session=") && whole.contains("; Secure"), "{whole}");
    let ask = |cookie: &str| server.request("GET", "/v1/overview", &[("cookie", cookie), proxied], b"");
    ask(&cookie(&answer)).answered(200);
    let tossed = cookie(&answer).replace("__Host-", "");
    ask(&tossed).refused(401, "UNAUTHORIZED");
}

#[test]
fn what_a_proxy_passed_on_needs_a_token() {
    let home = Home::sqlite();
    let (_, token) = token(&home, &["--scope", "admin"]);
    let server = Server::start(&home, &["--no-workers"]);
    let proxied = [
        ("forwarded", "for=192.0.2.1"),
        ("x-forwarded-for", "192.0.2.1"),
        ("X-Forwarded-Proto", "https"),
        ("x-forwarded-host", "example.org"),
        ("via", "1.1 proxy"),
        ("x-real-ip", "192.0.2.1"),
        ("cf-connecting-ip", "192.0.2.1"),
        ("CF-Connecting-IPv6", "2001:db8::1"),
        ("X_Forwarded_For", "192.0.2.1"),
        ("Forwarded-For", "192.0.2.1"),
        ("X-Original-URL", "/v1/outbox"),
        ("X-Envoy-Original-Path", "/"),
        ("Tailscale-User-Login", "ann@example.org"),
        ("WL-Proxy-Client-IP", "192.0.2.1"),
        ("X-Originating-IP", "192.0.2.1"),
        ("X-HTTP-Forwarded-For", "192.0.2.1"),
        ("X-Forwarder-For", "192.0.2.1"),
        ("X-Remote-IP", "192.0.2.1"),
        ("X-Amzn-Trace-Id", "Root=1-67891233-abcdef012345678912345678"),
    ];
    let lower = format!("bearer {token}");
    server.request("GET", "/v1/outbox", &[("authorization", lower.as_str())], b"").answered(200);
    let bearer = format!("Bearer {token}");
    for header in proxied {
        for path in ["/v1/outbox", "/v1/overview", "/metrics", "/v1/session"] {
            let refused = server.request("GET", path, &[header], b"").refused(403, "FORWARDED_WITHOUT_TOKEN");
            let told = refused["message"].as_str().unwrap();
            assert!(told.contains("postrider token create") && told.contains("mode = \"always\""), "{told}");
        }
        server.post("/v1/outbox/log", &[header], "x").refused(403, "FORWARDED_WITHOUT_TOKEN");
        server.post("/mcp", &[header, JSON], "{}").refused(403, "FORWARDED_WITHOUT_TOKEN");
        for open in ["/livez", "/readyz", "/health", "/"] {
            server.request("GET", open, &[header], b"").answered(200);
        }
        server.request("GET", "/v1/outbox", &[header, ("authorization", &bearer)], b"").answered(200);
        let session = cookie(&sign_in(&server, &token, &[header]).answered(200));
        server.request("GET", "/v1/outbox", &[header, ("cookie", &session)], b"").answered(200);
    }
    server.get("/v1/outbox").answered(200);
    // nginx with nothing but `proxy_pass` adds no header: it names us as the host, and speaks HTTP/1.0.
    let bare = |path: &str, shows: &str| {
        server.raw(
            format!("GET {path} HTTP/1.0\r\nHost: {}\r\nConnection: close\r\n{shows}\r\n", server.address).as_bytes(),
        )
    };
    for path in ["/v1/outbox", "/v1/overview", "/metrics", "/v1/session"] {
        bare(path, "").refused(403, "FORWARDED_WITHOUT_TOKEN");
    }
    bare("/livez", "").answered(200);
    bare("/v1/outbox", &format!("Authorization: {bearer}\r\n")).answered(200);
}

/// What a page of another site, or whoever stands between, could write to look like this machine.
#[test]
fn without_a_token_the_host_is_this_machine() {
    let home = Home::sqlite();
    let server = Server::start(&home, &["--no-workers"]);
    let own = server.address.clone();
    let ask = |target: &str, hosts: &[&str]| {
        let hosts: String = hosts.iter().map(|host| format!("host: {host}\r\n")).collect();
        server.raw(format!("GET {target} HTTP/1.1\r\n{hosts}connection: close\r\n\r\n").as_bytes())
    };
    for host in [own.as_str(), "localhost", "localhost:80", "127.0.0.1", "[::1]:1"] {
        ask("/v1/outbox", &[host]).answered(200);
    }
    for host in ["evil.example", "localhost:80@evil.example", "localhost.evil.example", "127.0.0.1:80:80", "[::1].evil"]
    {
        ask("/v1/outbox", &[host]).refused(403, "FORBIDDEN");
    }
    ask("/v1/outbox", &[&own, "evil.example"]).refused(400, "INVALID_REQUEST");
    ask("http://evil.example/v1/outbox", &[&own]).refused(403, "FORBIDDEN");
    ask(&format!("http://{own}/v1/outbox"), &["evil.example"]).answered(200);
}

#[test]
fn without_a_token_little_is_read() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[auth]\nmode = \"always\"\n");
    home.run(&["migrate"]).done();
    token(&home, &["--scope", "read"]);
    let server = Server::start(&home, &["--no-workers"]);
    // Much is announced, and the rest never comes: an answer means that nobody waited for it.
    let begin = |path: &str, sent: usize| {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: 10000000\r\n\r\n",
            server.address
        );
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).unwrap();
        let _ = stream.write_all(&vec![b' '; sent]);
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        String::from_utf8_lossy(&status).into_owned()
    };
    assert_eq!(begin("/v1/session", 8192), "HTTP/1.1 413");
    for path in ["/v1/outbox/log", "/v1/outbox/log/batch", "/v1/events", "/do/order", "/mcp", "/v1/replays"] {
        assert_eq!(begin(path, 100), "HTTP/1.1 401", "{path}");
    }
}

#[test]
fn without_a_token_the_description_names_no_lane() {
    let home = Home::sqlite();
    home.write("postrider.toml", &format!("{LANES}[auth]\nmode = \"always\"\n"));
    home.run(&["migrate"]).done();
    let (_, all) = token(&home, &["--scope", "read"]);
    let (_, one) = token(&home, &["--scope", "read", "--lane", "another"]);
    let server = Server::start(&home, &["--no-workers"]);
    for path in ["/openapi.json", "/docs"] {
        let page = server.get(path).answered(200).body;
        assert!(!page.contains("quietly") && !page.contains("another\""), "{path} tells of lanes");
    }
    let seen = |token: &str| {
        let bearer = format!("Bearer {token}");
        server.request("GET", "/openapi.json", &[("authorization", &bearer)], b"").answered(200).body
    };
    assert!(seen(&all).contains("\"quietly\""));
    assert!(seen(&one).contains("\"another\"") && !seen(&one).contains("quietly"), "a token sees its own lanes");
    let bare: Value = server.get("/openapi.json").json();
    assert!(bare["paths"]["/v1/outbox/{lane_or_id}"].is_object());
}

/// Somebody who is asked for their health, and counts.
fn counting() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (url, asked) = (format!("http://{}", listener.local_addr().unwrap()), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\nconnection: close\r\n\r\n{\"ok\":true}",
            );
        }
    });
    (url, asked)
}

#[test]
fn asking_for_health_costs_nobody_a_call_each() {
    let home = Home::sqlite();
    let (url, asked) = counting();
    home.write("postrider.toml", &format!("[memory]\nurl = \"{url}\"\n"));
    let server = Server::start(&home, &["--no-workers"]);
    server.get("/health");
    let (before, begun) = (asked.load(Ordering::SeqCst), Instant::now());
    for _ in 0..200 {
        server.get("/health");
    }
    // The gateway looks after itself too, every few seconds.
    let rounds = begun.elapsed().as_secs() as usize / 4 + 2;
    let calls = asked.load(Ordering::SeqCst) - before;
    assert!(calls <= 6 * rounds, "{calls} calls for 200 questions in {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(60));
}
