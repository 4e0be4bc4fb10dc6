//! Two servers in two folders on one database, as on two hosts: one key for both, and nothing is left behind by whatever is
//! asked of one while the other works.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proving::history::Deliveries;
use proving::kit::Session;
use serde_json::{Value, json};

use crate::api::{Response, Server};
use crate::home::{Home, wait_long_until, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

const LOCAL: &str =
    "[webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\nbase_delay_sec = 0.05\nmax_retry_limit = 4\n";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn on_every_database(case: impl Fn(Home)) {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        case(Home::on(database));
    }
}

/// Another folder, and the database of the first as its own.
fn elsewhere(home: &Home) -> (Home, String) {
    let other = Home::sqlite();
    other.write("postrider.toml", LOCAL);
    let file = format!("sqlite://{}", home.path("postrider.db").display());
    (other, home.database.url().map_or(file, str::to_owned))
}

fn post(server: &Server, path: &str, body: Value) -> Response {
    server.post(path, &JSON, &body.to_string())
}

fn wish(url: &str) -> Value {
    json!({"url": url, "event_types": ["*"]})
}

#[test]
fn the_second_server_asks_for_the_key_of_the_first() {
    on_every_database(|home| {
        home.write("postrider.toml", LOCAL);
        let (other, url) = elsewhere(&home);
        let receiver = Receiver::start(|_| Some(200));
        let first = Server::start(&home, &[]);
        let second = Server::start_with(&other, &[], &[("POSTRIDER_DATABASE", &url)]);
        assert_eq!(second.get("/health").answered(200).json()["ok"], true, "nobody has needed a key so far");
        let made = post(&first, "/v1/subscriptions", wish(&receiver.url)).answered(201).json();
        let id = &made["id"];
        assert!(home.path("postrider.key").exists() && !other.path("postrider.key").exists());

        post(&second, "/v1/subscriptions", wish(&receiver.url)).refused(503, "SECRETS_KEY_MISSING");
        post(&second, &format!("/v1/subscriptions/{id}/rotate-secret"), json!({})).refused(503, "SECRETS_KEY_MISSING");
        assert!(!other.path("postrider.key").exists(), "it makes none of its own");
        wait_until("its health fails", || second.get("/health").status == 503);
        let health = second.get("/health").json();
        assert_eq!((&health["ok"], &health["capabilities"]["webhooks"]), (&json!(false), &json!("failed")), "{health}");
        assert_eq!(first.get("/health").answered(200).json()["ok"], true);
        let gate = other.command(&["gate", "--json"]).env("POSTRIDER_DATABASE", &url).output().unwrap();
        assert_eq!(gate.status.code(), Some(1), "{gate:?}");

        // What needs no secret goes on, at both.
        for (n, server) in [&first, &second].into_iter().enumerate() {
            let event = json!({"event_type": "a", "payload": n});
            let published = post(server, "/v1/events", event).answered(202).json();
            let saga = published["saga_ids"][0].as_i64().unwrap();
            wait_until("it is delivered", || first.get(&format!("/v1/sagas/{saga}")).json()["status"] == "Completed");
            assert_eq!(server.get(&format!("/v1/subscriptions/{id}")).answered(200).json()["id"], *id);
        }
        let described = json!({"description": "by the second"}).to_string();
        second.request("PATCH", &format!("/v1/subscriptions/{id}"), &JSON, described.as_bytes()).answered(200);

        // Brought there, it is found without a restart.
        std::fs::copy(home.path("postrider.key"), other.path("postrider.key")).unwrap();
        wait_until("its health is well", || second.get("/health").status == 200);
        post(&second, "/v1/subscriptions", wish(&receiver.url)).answered(201);
        home.is_healthy();
        assert_eq!((first.stop().0, second.stop().0), (0, 0));
    });
}

/// A delivery does not wait until it happens to meet the one process that can sign it.
#[test]
fn whoever_has_no_key_takes_no_delivery() {
    on_every_database(|home| {
        home.write("postrider.toml", LOCAL);
        let receiver = Receiver::start(|_| Some(200));
        let first = Server::start(&home, &[]);
        post(&first, "/v1/subscriptions", wish(&receiver.url)).answered(201);
        let (other, url) = elsewhere(&home);
        let second = Server::start_with(&other, &[], &[("POSTRIDER_DATABASE", &url)]);
        wait_until("its health fails", || second.get("/health").status == 503);
        for n in 0..20 {
            post(&second, "/v1/events", json!({"event_type": "a", "payload": n})).answered(202);
        }
        wait_until("all are delivered", || receiver.requests().len() == 20);
        let claimed = |server: &Server| {
            let page = server.get("/metrics").body;
            let of = |line: &str| line.starts_with("outbox_claimed_total{") && line.contains("lane=\"webhooks\"");
            page.lines()
                .filter(|line| of(line))
                .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
                .sum::<u64>()
        };
        assert_eq!((claimed(&first), claimed(&second)), (20, 0));
        // Brought there, it takes its share without a restart.
        std::fs::copy(home.path("postrider.key"), other.path("postrider.key")).unwrap();
        assert_eq!(first.stop().0, 0);
        post(&second, "/v1/events", json!({"event_type": "a", "payload": "last"})).answered(202);
        wait_until("the last is delivered", || receiver.requests().len() == 21);
        home.is_healthy();
        assert_eq!(second.stop().0, 0);
    });
}

#[test]
fn an_empty_key_file_is_what_a_crash_left() {
    let home = Home::sqlite();
    home.write("postrider.toml", LOCAL).write("postrider.key", "");
    let server = Server::start(&home, &["--no-workers"]);
    post(&server, "/v1/subscriptions", wish("http://127.0.0.1:1/")).answered(201);
    let key = std::fs::read_to_string(home.path("postrider.key")).unwrap();
    assert!(key.contains(':'), "{key}");
    let (_, log) = server.stop();
    assert!(log.contains("was empty"), "{log}");
    // Once there are secrets, it is not.
    home.write("postrider.key", "");
    let server = Server::start(&home, &["--no-workers"]);
    let refused = post(&server, "/v1/subscriptions", wish("http://127.0.0.1:1/"));
    let error = refused.refused(503, "SECRETS_KEY_MISSING");
    assert!(error["message"].as_str().unwrap().contains("postrider.key"), "{error}");
    server.stop();
    home.write("postrider.key", "nonsense");
    home.run(&["serve"]).refused(2, &["ID:BASE64"]);
}

/// One bad event must not cost the others their shared transaction, and what no database of ours can keep is refused
/// alike on all of them.
#[test]
fn what_cannot_be_kept_is_refused_alike_everywhere() {
    on_every_database(|home| {
        home.write("postrider.toml", &format!("{LOCAL}[lane.work]\ncourier = \"noop\"\n"));
        let server = Server::start(&home, &["--no-workers"]);
        let nul = "a\u{0}b";
        let event = |change: &dyn Fn(&mut Value)| {
            let mut event = json!({"event_type": "a", "payload": 1});
            change(&mut event);
            post(&server, "/v1/events", event)
        };
        event(&|event| event["event_type"] = json!("not a type")).refused(422, "INVALID_MESSAGE");
        event(&|event| event["event_type"] = json!(nul)).refused(422, "INVALID_MESSAGE");
        event(&|event| event["external_id"] = json!(nul)).refused(422, "INVALID_MESSAGE");
        event(&|event| event["external_id"] = json!("x".repeat(256))).refused(422, "INVALID_MESSAGE");
        event(&|event| event["payload"] = json!(nul)).answered(202);
        let mut subscription = wish("http://127.0.0.1:1/");
        subscription["description"] = json!(nul);
        post(&server, "/v1/subscriptions", subscription.clone()).refused(422, "INVALID_MESSAGE");
        subscription["description"] = json!("fine");
        let id = post(&server, "/v1/subscriptions", subscription).answered(201).json()["id"].clone();
        let patch = json!({ "description": nul }).to_string();
        server
            .request("PATCH", &format!("/v1/subscriptions/{id}"), &JSON, patch.as_bytes())
            .refused(422, "INVALID_MESSAGE");
        for (url, headers) in [
            ("http://127.0.0.1:1/a\nb", json!({})),
            ("http://127.0.0.1:1/a b", json!({})),
            ("http://127.0.0.1:1/", json!({"User-Agent": "mine"})),
            ("http://127.0.0.1:1/", json!({"Expect": "100-continue"})),
            ("http://127.0.0.1:1/", json!({"Content-Encoding": "gzip"})),
            ("http://127.0.0.1:1/", json!({"X-Long": "x".repeat(100_000)})),
            ("http://127.0.0.1:1/", json!({ "X-Nul": nul })),
        ] {
            let mut wish = wish(url);
            wish["headers"] = headers;
            post(&server, "/v1/subscriptions", wish).refused(422, "INVALID_MESSAGE");
        }
        let filter = json!({"filter": {"error_code": nul}, "dry_run": true});
        post(&server, "/v1/dead-letters/requeue", filter).refused(422, "INVALID_MESSAGE");
        for path in [
            "/v1/events?event_type=a%00b",
            "/v1/dead-letters?error_code=%00",
            "/v1/dead-letters?event_type=%00",
            "/v1/sagas?status=%00",
            "/v1/outbox?key=%00",
            "/do/order/%00",
            "/v1/ledger/a%00",
        ] {
            server.get(path).refused(400, "INVALID_REQUEST");
        }
        let batch = |change: &dyn Fn(&mut Value)| {
            let mut message = json!({"payload": "x"});
            change(&mut message);
            post(&server, "/v1/outbox/work/batch", json!({ "messages": [message] }))
        };
        let refused = batch(&|message| message["headers"] = json!({ "X-Tool": nul }));
        refused.refused(400, "INVALID_REQUEST");
        batch(&|message| message["headers"] = json!({ "X Tool": "x" })).refused(400, "INVALID_REQUEST");
        for field in ["key", "target", "active_key", "content_type"] {
            batch(&|message| message[field] = json!(nul)).refused(422, "INVALID_MESSAGE");
        }
        batch(&|message| message["headers"] = json!({ "X-Tool": "nail" })).answered(200);
        let order = json!({"order_id": nul, "instrument": "AAPL", "side": "BUY", "qty": "1", "time_in_force": "IOC"});
        let headers = [JSON[0], ("Idempotency-Key", "k-1")];
        let refused = server.post("/do/order", &headers, &order.to_string());
        assert!((400..500).contains(&refused.status), "{refused:#?}");
        assert_eq!(server.stop().0, 0);
    });
}

#[test]
fn whoever_owns_nothing_may_serve() {
    let home = Home::on(Database::postgres());
    home.write("postrider.toml", LOCAL);
    home.run(&["migrate"]).done();
    let guest = format!("guest_{}", std::process::id());
    home.execute(&format!(
        "CREATE ROLE {guest} NOLOGIN; GRANT USAGE ON SCHEMA public TO {guest};
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {guest};
         GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {guest}"
    ));
    let url = format!("{}?options=-c%20role%3D{guest}", home.database.url().unwrap());
    let receiver = Receiver::start(|_| Some(200));
    let server = Server::start_with(&home, &[], &[("POSTRIDER_DATABASE", &url)]);
    post(&server, "/v1/subscriptions", wish(&receiver.url)).answered(201);
    let published = post(&server, "/v1/events", json!({"event_type": "a", "payload": 1})).answered(202).json();
    let saga = published["saga_ids"][0].as_i64().unwrap();
    wait_until("it is delivered", || server.get(&format!("/v1/sagas/{saga}")).json()["status"] == "Completed");
    assert_eq!(server.stop().0, 0);
    home.execute(&format!("DROP OWNED BY {guest}; DROP ROLE {guest}"));
}

/// By the rows alone, whatever the servers say of themselves.
fn judge_deliveries(home: &Home, url: &str) {
    let url = home.database.url().unwrap_or(url);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { Deliveries::read(&mut Session::to(url).await).await }).judge().is_clean();
}

/// How long the storm goes on.
fn storm() -> Duration {
    let secs = std::env::var("POSTRIDER_STORM_SEC").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(secs.unwrap_or(10))
}

/// A small generator, so that a run can be repeated.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

#[test]
fn whatever_is_asked_of_two_servers_every_delivery_ends() {
    on_every_database(|home| {
        home.write("postrider.toml", LOCAL);
        let (other, url) = elsewhere(&home);
        let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
        println!("seed {seed} on {url}");
        // Mostly fine; now and then it fails, or asks for a moment.
        let calls = Arc::new(AtomicU64::new(0));
        let counted = calls.clone();
        let receiver = Receiver::start(move |_| {
            let n = counted.fetch_add(1, Ordering::Relaxed);
            Some(if n % 11 == 3 { 503 } else { 200 })
        });
        let first = Server::start(&home, &[]);
        let ids: Vec<i64> = (0..4)
            .map(|n| {
                let mut wish = wish(&format!("{}/{n}", receiver.url));
                if n == 3 {
                    wish["max_in_flight"] = json!(2);
                }
                post(&first, "/v1/subscriptions", wish).answered(201).json()["id"].as_i64().unwrap()
            })
            .collect();
        std::fs::copy(home.path("postrider.key"), other.path("postrider.key")).unwrap();
        let second = Server::start_with(&other, &[], &[("POSTRIDER_DATABASE", &url)]);
        let servers = [&first, &second];
        let published = Mutex::new(HashSet::new());
        let end = Instant::now() + storm();
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (published, ids) = (&published, &ids);
                scope.spawn(move || {
                    let mut dice = Dice(seed.wrapping_mul(2 * thread + 3) | 1);
                    let mut n = 0;
                    while Instant::now() < end {
                        let server = servers[dice.roll(2) as usize];
                        let id = ids[dice.roll(ids.len() as u64) as usize];
                        let act = |what: &str| post(server, &format!("/v1/subscriptions/{id}/{what}"), json!({}));
                        let patch = |change: Value| {
                            let path = format!("/v1/subscriptions/{id}");
                            server.request("PATCH", &path, &JSON, change.to_string().as_bytes()).answered(200)
                        };
                        match dice.roll(12) {
                            0 => drop(act("pause").answered(200)),
                            1 | 2 => drop(act("resume").answered(200)),
                            3 => {
                                let path = format!("/v1/subscriptions/{id}/rotate-secret");
                                post(server, &path, json!({"overlap": "0"})).answered(200);
                            }
                            4 => drop(patch(json!({"rate_per_sec": 50.0}))),
                            5 => drop(patch(json!({"rate_per_sec": null, "max_in_flight": 3}))),
                            6 => drop(patch(json!({"rate_per_sec": null, "max_in_flight": null}))),
                            _ => {
                                let name = format!("{thread}-{n}");
                                n += 1;
                                let event = json!({"event_type": "a", "payload": name, "external_id": name});
                                let answer = post(server, "/v1/events", event).answered(202).json();
                                assert_eq!(answer["saga_ids"].as_array().unwrap().len(), ids.len());
                                published.lock().unwrap().insert(answer["event_id"].as_i64().unwrap());
                            }
                        }
                    }
                });
            }
        });
        // The storm is over: all are free.
        for id in &ids {
            post(&second, &format!("/v1/subscriptions/{id}/resume"), json!({})).answered(200);
        }
        let open = "SELECT COUNT(*) FROM webhook_delivery_sagas WHERE status NOT IN ('Completed', 'DeadLettered')";
        wait_long_until("every delivery has ended", Duration::from_secs(90), || home.number(open) == 0);
        let published = published.into_inner().unwrap();
        let ended = home.number("SELECT COUNT(*) FROM webhook_delivery_sagas");
        assert_eq!(ended as usize, published.len() * ids.len(), "one for every event and subscription");
        let dead = home.number("SELECT COUNT(*) FROM webhook_delivery_sagas WHERE status = 'DeadLettered'");
        assert_eq!(home.number("SELECT COUNT(*) FROM dead_letters WHERE final_error_code IS NOT NULL"), dead);
        let live = home.number("SELECT COUNT(*) FROM outbox WHERE lane = 'webhooks'");
        let results = home.number("SELECT COUNT(*) FROM webhook_results");
        assert_eq!((live, results), (0, 0), "nothing is left behind");
        println!("{} events, {} calls, {dead} dead", published.len(), calls.load(Ordering::Relaxed));
        home.is_healthy();
        judge_deliveries(&home, &url);
        let logs = [first.stop(), second.stop()].map(|(code, log)| {
            assert_eq!(code, 0);
            log
        });
        for log in logs {
            assert!(!log.contains("parked where nobody looked"), "the race is mended, not only swept up after: {log}");
        }
    });
}
