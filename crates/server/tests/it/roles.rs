//! A whole round by real processes as users that own nothing, each in the roles docs/operating.md names for it: subscribed,
//! published, delivered, dead-lettered, brought back, replayed and purged. And not without one of their rights.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::api::Server;
use crate::home::{Answer, Home, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

const LOCAL: &str = "[webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\nbase_delay_sec = 0.05\nmax_retry_limit = 2\n[lane.work]\ncourier = \"noop\"\n";

/// The processes of docs/operating.md and the roles it names for each.
fn processes() -> Vec<(String, Vec<String>)> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operating.md")).unwrap();
    let rows = text.lines().skip_while(|line| !line.starts_with("| process | is a member of |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|')).map(|line| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let name = cells[1].split('`').nth(1).unwrap().to_owned();
        let roles = cells[2].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        (name, roles)
    });
    rows.collect()
}

/// A user for each process, on a database that somebody else owns.
struct Users<'a> {
    home: &'a Home,
    names: Vec<String>,
}

impl Users<'_> {
    fn new(home: &Home) -> Users<'_> {
        let mut names = Vec::new();
        for (process, roles) in processes() {
            let user = user(&process);
            for sql in membership(home, &user, &roles) {
                home.execute(&sql);
            }
            names.push(user);
        }
        Users { home, names }
    }

    fn url(&self, process: &str) -> String {
        let user = user(process);
        assert!(self.names.contains(&user), "docs/operating.md does not name {process}: {:?}", self.names);
        let mut url = url::Url::parse(self.home.database.url().unwrap()).unwrap();
        url.set_username(&user).unwrap();
        url.set_password(Some("secret")).unwrap();
        url.into()
    }

    fn run(&self, process: &str, args: &[&str]) -> Answer {
        let mut command = self.home.command(args);
        Answer::from(command.env("POSTRIDER_DATABASE", self.url(process)).output().unwrap())
    }

    fn done(&self, process: &str, args: &[&str]) -> Result<Value, String> {
        let answer = self.run(process, &[args, &["--json"]].concat());
        if answer.code == 0 { Ok(answer.json()) } else { Err(format!("{process}: {args:?}: {answer:?}")) }
    }
}

impl Drop for Users<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for user in &self.names {
            match self.home.database {
                Database::Postgres { .. } => self.home.execute(&format!("DROP ROLE {user}")),
                _ => {
                    self.home.execute(&format!("DROP USER '{user}'@'%'"));
                    self.home.execute(&format!("DROP ROLE all_{user}"));
                }
            }
        }
    }
}

fn user(process: &str) -> String {
    let name = process.trim_start_matches("postrider ").replace(' ', "_");
    format!("u{}_{name}", std::process::id()).chars().take(28).collect()
}

fn membership(home: &Home, user: &str, roles: &[String]) -> Vec<String> {
    if let Database::Postgres { .. } = home.database {
        return vec![format!("CREATE ROLE {user} LOGIN PASSWORD 'secret' IN ROLE {}", roles.join(", "))];
    }
    let mariadb = home.text("SELECT VERSION()").contains("MariaDB");
    let mut all = vec![format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'secret'"), format!("CREATE ROLE all_{user}")];
    all.extend(roles.iter().map(|role| format!("GRANT {role} TO all_{user}")));
    all.push(format!("GRANT all_{user} TO '{user}'@'%'"));
    all.push(format!("SET DEFAULT ROLE all_{user} {} '{user}'@'%'", if mariadb { "FOR" } else { "TO" }));
    all
}

/// What the receiver answers, and the round itself: what did not come out, if anything.
struct Round<'a> {
    users: &'a Users<'a>,
    receiver: &'a Receiver,
    well: Arc<AtomicBool>,
}

impl Round<'_> {
    fn work(&self) -> Result<(), String> {
        let mut command = self.users.home.command(&["worker", "--lane", "webhooks", "--once"]);
        // What it may not do it tries again and again: it is told to stop then.
        let mut child = command.env("POSTRIDER_DATABASE", self.users.url("postrider worker")).spawn().unwrap();
        let begun = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() && begun.elapsed() < std::time::Duration::from_secs(20) {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = child.kill();
        let answer = child.wait_with_output().unwrap();
        let log = String::from_utf8_lossy(&answer.stderr).into_owned();
        match answer.status.code() {
            Some(0 | 1) if !log.contains("denied") => Ok(()),
            _ => Err(format!("worker: {log}")),
        }
    }

    /// The worker works until nothing of the saga is left to do.
    fn ends(&self, saga: i64, as_what: &str) -> Result<(), String> {
        let status = || self.users.home.text(&format!("SELECT status FROM webhook_delivery_sagas WHERE id = {saga}"));
        for _ in 0..20 {
            self.work()?;
            if status() == as_what {
                return Ok(());
            }
        }
        Err(format!("saga {saga} is {}, not {as_what}", status()))
    }

    /// The nth round, with a subscription and an event of its own.
    fn run(&self, nth: usize) -> Result<(), String> {
        let users = self.users;
        let (kind, id) = (format!("round.n{nth}"), format!("e-{nth}"));
        let subscribe = ["webhooks", "subscribe", &self.receiver.url, "--event-type", &kind];
        let made = users.done("postrider webhooks subscribe", &subscribe)?["id"].to_string();
        let count = |and: &str| {
            users
                .home
                .number(&format!("SELECT COUNT(*) FROM webhook_delivery_sagas WHERE subscription_id = {made}{and}"))
        };
        let publish = ["webhooks", "publish", &kind, "--payload", "{}", "--external-id", &id];
        self.well.store(false, Ordering::SeqCst);
        let published = users.done("postrider webhooks publish", &publish)?;
        if users.done("postrider webhooks publish", &publish)?["duplicate"] != true {
            return Err("published twice".to_owned());
        }
        let saga = published["saga_ids"][0].as_i64().ok_or("no saga")?;
        self.ends(saga, "DeadLettered")?;
        let list = ["webhooks", "dead-letters", "--subscription", &made];
        let letter = users.done("postrider webhooks requeue", &list)?["items"][0]["id"].to_string();
        self.well.store(true, Ordering::SeqCst);
        let requeued = users.done("postrider webhooks requeue", &["webhooks", "requeue", &letter])?;
        self.ends(requeued["saga_id"].as_i64().ok_or("no saga")?, "Completed")?;
        let replay = ["webhooks", "replay", "--subscription", &made, "--from", "2020-01-01T00:00:00Z"];
        if users.done("postrider webhooks subscribe", &replay)?["count"] != 1 {
            return Err("nothing to replay".to_owned());
        }
        for _ in 0..20 {
            self.work()?;
            if count(" AND status = 'Completed'") == 2 {
                break;
            }
        }
        if count(" AND status = 'Completed'") != 2 {
            return Err("it was not replayed".to_owned());
        }
        users.done("postrider webhooks purge", &["webhooks", "purge", "--older-than", "0s"])?;
        match (count(""), users.home.number(&format!("SELECT COUNT(*) FROM events WHERE external_id = '{id}'"))) {
            (0, 0) => Ok(()),
            left => Err(format!("{left:?} sagas and events are left")),
        }
    }
}

/// The same over HTTP by one process.
fn served(users: &Users<'_>, receiver: &Receiver, well: &AtomicBool) {
    let json = |server: &Server, path: &str, body: Value| {
        server.post(path, &[("content-type", "application/json")], &body.to_string())
    };
    let server = Server::start_with(users.home, &[], &[("POSTRIDER_DATABASE", &users.url("postrider serve"))]);
    let subscription = json!({"url": receiver.url, "event_types": ["served"]});
    let subscription = json(&server, "/v1/subscriptions", subscription).answered(201).json()["id"].clone();
    well.store(false, Ordering::SeqCst);
    let event = json!({"event_type": "served", "payload": 1});
    let saga = json(&server, "/v1/events", event).answered(202).json()["saga_ids"][0].as_i64().unwrap();
    let status = |saga: i64| server.get(&format!("/v1/sagas/{saga}")).answered(200).json()["status"].clone();
    wait_until("it is a dead letter", || status(saga) == "DeadLettered");
    let letter = server.get("/v1/dead-letters").answered(200).json()["items"][0]["id"].clone();
    well.store(true, Ordering::SeqCst);
    let requeue = format!("/v1/dead-letters/{letter}/requeue");
    let saga = json(&server, &requeue, json!({})).answered(201).json()["saga_id"].as_i64().unwrap();
    wait_until("it is delivered", || status(saga) == "Completed");
    let replay = json!({"subscription_id": subscription, "from": "2020-01-01T00:00:00Z", "to": "2100-01-01T00:00:00Z"});
    let replay = json(&server, "/v1/replays", replay).answered(202).json();
    let replay = format!("/v1/replays/{}", replay["replay_id"]);
    wait_until("it is replayed", || server.get(&replay).answered(200).json()["status"] == "done");
    // Lanes of one's own, orders, tokens and the roll of workers are in its roles too.
    server.post("/v1/outbox/work", &[("idempotency-key", "k")], "x").answered(201);
    let order = json!({"instrument": "ABC", "side": "BUY", "qty": 1, "price": null, "time_in_force": "IOC"});
    let key = [("content-type", "application/json"), ("idempotency-key", "o-1")];
    server.post("/do/order", &key, &order.to_string()).answered(201);
    wait_until("the order is executed", || server.get("/do/order/o-1").json()["status"] == "ok");
    wait_until("it is on the roll", || users.home.number("SELECT COUNT(*) FROM workers") == 1);
    assert_eq!(server.get("/health").answered(200).json()["ok"], true);
    let (code, log) = server.stop();
    let denied: Vec<&str> = log.lines().filter(|line| line.contains("denied")).collect();
    assert_eq!((code, denied), (0, vec![]), "{log}");
}

/// Without orders, tokens and lanes of one's own the roles of webhooks are enough.
fn served_by_seven(home: &Home, receiver: &Receiver) {
    let user = user("seven");
    let seven: Vec<String> =
        processes().pop().unwrap().1.into_iter().filter(|role| role != "postrider_server").collect();
    assert_eq!(seven.len(), 7);
    for sql in membership(home, &user, &seven) {
        home.execute(&sql);
    }
    let users = Users { home, names: vec![user] };
    let server = Server::start_with(home, &[], &[("POSTRIDER_DATABASE", &users.url("seven"))]);
    let json = [("content-type", "application/json")];
    let subscription = json!({"url": receiver.url, "event_types": ["seven"]}).to_string();
    server.post("/v1/subscriptions", &json, &subscription).answered(201);
    let event = json!({"event_type": "seven", "payload": 1}).to_string();
    let saga = server.post("/v1/events", &json, &event).answered(202).json()["saga_ids"][0].clone();
    wait_until("it is delivered", || server.get(&format!("/v1/sagas/{saga}")).json()["status"] == "Completed");
    assert_eq!(server.get("/readyz").status, 200);
    home.is_healthy();
    assert_eq!(server.stop().0, 0);
}

/// One right of each role: without it the round fails, and with it again it does not.
const TAKEN: [(&str, &str); 8] = [
    ("SELECT ON webhook_state", "postrider_ingest, postrider_router"),
    ("INSERT ON events", "postrider_ingest"),
    ("INSERT ON webhook_delivery_sagas", "postrider_router"),
    ("DELETE ON webhook_results", "postrider_saga"),
    ("INSERT ON webhook_attempts", "postrider_worker"),
    ("INSERT ON webhook_delivery_sagas", "postrider_dead_letter"),
    ("INSERT ON replays", "postrider_admin"),
    ("DELETE ON webhook_attempts", "postrider_janitor"),
];

fn a_round_in_the_roles(database: Database) {
    let home = Home::on(database);
    home.write("postrider.toml", LOCAL);
    let made = home.run(&["migrate", "--roles", "--json"]).done().json();
    home.run(&["migrate", "--roles"]).done();
    let users = Users::new(&home);
    for (_, roles) in processes() {
        for role in roles {
            assert!(made["roles"].as_array().unwrap().contains(&json!(role)), "{role}: {made}");
        }
    }
    let well = Arc::new(AtomicBool::new(true));
    let answers = well.clone();
    let receiver = Receiver::start(move |_| Some(if answers.load(Ordering::SeqCst) { 200 } else { 500 }));
    let round = Round { users: &users, receiver: &receiver, well: well.clone() };
    round.run(0).unwrap();
    for (nth, (right, role)) in TAKEN.into_iter().enumerate() {
        home.execute(&format!("REVOKE {right} FROM {role}"));
        let refused = round.run(nth + 1).expect_err(&format!("it goes without {right} of {role}"));
        assert!(refused.contains("denied"), "without {right} of {role}: {refused}");
        home.execute(&format!("GRANT {right} TO {role}"));
    }
    round.run(99).unwrap();
    served(&users, &receiver, &well);
    served_by_seven(&home, &receiver);
    // Who owns nothing may not migrate either.
    let refused = users.run("postrider serve", &["migrate"]);
    assert!(refused.code == 2 && refused.stderr.contains("lacks a role"), "{refused:?}");
}

#[test]
fn postgres_processes_that_own_nothing_do_their_work() {
    a_round_in_the_roles(Database::postgres());
}

#[test]
fn mysql_processes_that_own_nothing_do_their_work() {
    a_round_in_the_roles(Database::mysql());
}
