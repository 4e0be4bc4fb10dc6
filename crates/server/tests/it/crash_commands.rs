//! Commands that are killed at every commit they make, before it and after it, and given again by somebody who was told
//! nothing: afterwards what they are for has happened once, and the doctor finds nothing. What a server does by itself is in
//! `crash_points.rs`.

use serde_json::json;

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::memory::{OpenMemory, store};
use crate::receiver::Receiver;
use crate::scratch::Database;

const ORDER: &str = r#"{"instrument":"AAPL","side":"BUY","qty":1,"price":10.5,"time_in_force":"IOC"}"#;

/// A server that works, and what it talks to.
struct Scene {
    home: Home,
    memory: OpenMemory,
    receiver: Receiver,
    server: Server,
}

impl Scene {
    fn on(database: Database) -> Scene {
        let home = Home::on(database);
        // As a broker nobody understands it: orders wait for a person.
        let receiver = Receiver::answering(|_| (200, "{}".to_owned()));
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        home.write(
            "postrider.toml",
            &format!(
                "[outbox]\npoll_interval_sec = 0.05\n[lane.orders]\nbackoff_sec = [0.05]\n[lane.work]\ncourier = \"http\"\nurl = \"{}\"\n\
                 [lane.memory]\nbackoff_sec = [0.1]\nlock_lease_sec = 2\n\
                 [webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\n\
                 [orders]\nadapter = \"http\"\nurl = \"{}/orders\"\nidempotency = \"none\"\n\
                 [memory]\nurl = \"{}\"\ntimeout_ms = 2000\ndoubt_sec = 1\n",
                receiver.url,
                receiver.url,
                memory.url()
            ),
        );
        let server = Server::start(&home, &[]);
        let subscription = json!({"url": format!("{}/hook", receiver.url), "event_types": ["*"]}).to_string();
        server.post("/v1/subscriptions", &[("content-type", "application/json")], &subscription).answered(201);
        Scene { home, memory, receiver, server }
    }

    fn count(&self, of: &str) -> i64 {
        self.home.number(&format!("SELECT COUNT(*) FROM {of}"))
    }

    fn waits(&self, what: &str, of: &str, expected: i64) {
        wait_until(what, || self.count(of) == expected);
    }

    /// Gives a command that dies at each of its places in turn, and again. `ready` makes what it needs and answers the
    /// command; `holds` looks at what came of it.
    fn dies(&self, ready: impl Fn(&Scene, usize) -> Vec<String>, holds: impl Fn(&Scene, usize)) {
        let book = self.home.path("places");
        let _ = std::fs::remove_file(&book);
        let give = |args: &[String], variable: Option<(&str, &str)>| {
            let mut command = self.home.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
            command.envs(variable).output().unwrap()
        };
        let args = ready(self, 0);
        let first = give(&args, Some(("POSTRIDER_FAILPOINTS", book.to_str().unwrap())));
        assert!(first.status.success() || deep_finds(&args, first.status.code()), "{args:?}: {first:?}");
        holds(self, 0);
        let places = std::fs::read_to_string(&book).unwrap();
        let (mut tried, mut died) = (0, 0);
        for (n, place) in places.lines().enumerate() {
            let args = ready(self, n + 1);
            let killed = give(&args, Some(("POSTRIDER_FAILPOINT", place)));
            died += usize::from(killed.status.code().is_none());
            tried += 1;
            let again = give(&args, None);
            // What was done already may be refused as done.
            let code = again.status.code();
            assert!(matches!(code, Some(0 | 1)), "{args:?} after {place}: {again:?}");
            holds(self, n + 1);
        }
        println!("{}: {tried} places, died at {died}", args.join(" "));
        assert!(died >= 2 && died * 2 >= tried, "{args:?}: died at {died} of {places}");
    }
}

/// A look that finds something ends with 1.
fn deep_finds(args: &[String], code: Option<i32>) -> bool {
    args.iter().any(|arg| arg == "--deep") && code == Some(1)
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

fn commands_die_at_every_commit(database: Database) {
    let scene = Scene::on(database);
    what_operators_say(&scene);
    what_is_purged(&scene);
    what_memories_need(&scene);
    assert!(scene.receiver.requests().iter().any(|request| request.path.ends_with("/hook")), "webhooks arrived");
    scene.home.is_healthy();
}

fn what_operators_say(scene: &Scene) {
    scene.dies(
        |_, n| words(&format!("memory govern p{n} --team-write false --max-length 7")),
        |scene, n| {
            let of = format!("governance_settings WHERE project_key = 'p{n}' AND max_length = 7");
            assert_eq!(scene.count(&of), 1);
        },
    );
    for (status, word) in [("succeeded", "yes"), ("failed", "no")] {
        scene.dies(
            |scene, n| {
                let key = format!("{word}-{n}");
                scene.home.run(&["orders", "place", "--key", &key, "--payload", ORDER]).done();
                let parked = format!("outbox WHERE active_key = '{key}' AND last_error_code = 'NEEDS_RECONCILE'");
                scene.waits("it waits for a person", &parked, 1);
                words(&format!("orders settle {key} --as {status}"))
            },
            |scene, n| {
                let of = format!("idempo_ledger WHERE idempotency_key = '{word}-{n}' AND status = '{status}'");
                assert_eq!(scene.count(&of), 1);
                assert_eq!(scene.count(&format!("outbox WHERE active_key = '{word}-{n}'")), 0);
                assert_eq!(scene.count(&format!("outbox_done WHERE active_key = '{word}-{n}'")), 1);
            },
        );
    }
    // Whoever was not told makes a second of that name: a token is printed once.
    scene.dies(
        |_, n| words(&format!("token create --scope read --name t{n}")),
        |scene, n| assert!((1..=2).contains(&scene.count(&format!("api_tokens WHERE name = 't{n}'")))),
    );
    scene.dies(
        |_, n| {
            let lines = json!({"title": format!("c{n}"), "content_md": format!("what {n} is")}).to_string();
            scene.home.write("candidates.ndjson", &format!("{lines}\n"));
            words("memory candidates import candidates.ndjson")
        },
        |scene, n| assert_eq!(scene.count(&format!("knowledge_candidates WHERE title = 'c{n}'")), 1),
    );
    scene.dies(
        |scene, n| {
            // A new key in front.
            let key = std::fs::read_to_string(scene.home.path("postrider.key")).unwrap();
            let letter = char::from(b'B' + n as u8 % 20);
            let secret = letter.to_string().repeat(42);
            scene.home.write("postrider.key", &format!("new{n}:{secret}A=\n{key}"));
            words("webhooks reseal")
        },
        |scene, n| {
            let of = format!("subscriptions WHERE secrets NOT LIKE '%v1:new{n}:%'");
            assert_eq!(scene.count(&of), 0, "all secrets are sealed with the first key");
        },
    );
}

fn what_is_purged(scene: &Scene) {
    scene.dies(
        |scene, n| {
            scene.home.run(&["enqueue", "work", "--payload", "x", "--key", &format!("purged-{n}")]).done();
            scene.waits("it is sent", "outbox WHERE lane = 'work'", 0);
            words("outbox purge --lane work --older-than 0s")
        },
        |scene, _| {
            assert_eq!(scene.count("outbox_done WHERE lane = 'work'"), 0);
            let left = "outbox_attempts WHERE NOT EXISTS (SELECT 1 FROM outbox o WHERE o.id = outbox_id) \
                        AND NOT EXISTS (SELECT 1 FROM outbox_done d WHERE d.id = outbox_id)";
            assert_eq!(scene.count(left), 0, "no history of what is gone");
        },
    );
    scene.dies(
        |scene, n| {
            let event = json!({"event_type": "a.b", "payload": n, "external_id": format!("gone-{n}")}).to_string();
            scene.server.post("/v1/events", &[("content-type", "application/json")], &event).answered(202);
            scene.waits("it has arrived", "webhook_delivery_sagas WHERE status <> 'Completed'", 0);
            words("webhooks purge --older-than 0s")
        },
        |scene, _| {
            for table in ["webhook_delivery_sagas", "webhook_attempts", "events"] {
                assert_eq!(scene.count(table), 0, "{table}");
            }
        },
    );
}

fn what_memories_need(scene: &Scene) {
    let text = |n: usize| format!("what was forgotten {n}");
    // OpenMemory has lost it: that is found, and mended.
    scene.dies(
        |scene, n| {
            store(&scene.server, &text(n), "team:a").answered(200);
            scene.memory.told(json!({ "forget": "*" }));
            words("memory reconcile --deep")
        },
        |scene, n| {
            let lost = format!("memory_writes WHERE payload_md = '{}' AND lost_at IS NOT NULL", text(n));
            assert_eq!(scene.count(&lost), 1);
        },
    );
    scene.dies(
        |scene, n| {
            store(&scene.server, &format!("lost {n}"), "team:a").answered(200);
            scene.memory.told(json!({ "forget": "*" }));
            scene.home.run(&["memory", "reconcile", "--deep"]).ended(1);
            words("memory resend --missing")
        },
        |scene, n| {
            scene.waits("all is written again", "outbox WHERE lane = 'memory'", 0);
            let there = scene.memory.contents();
            let lost = format!("lost {n}");
            assert_eq!(there.iter().filter(|text| **text == lost).count(), 1, "{there:?}");
        },
    );
    scene.dies(
        |scene, n| {
            scene.memory.told(json!({ "mode": "fail_writes", "status": 503 }));
            store(&scene.server, &format!("queued {n}"), "team:a").answered(202);
            scene.memory.told(json!({ "mode": "well" }));
            scene.waits("it is written", "outbox WHERE lane = 'memory'", 0);
            words("memory purge --older-than 0s")
        },
        |scene, n| {
            assert_eq!(scene.count("outbox_done WHERE lane = 'memory'"), 0);
            let kept = format!("memory_writes WHERE payload_md = 'queued {n}' AND state = 'stored'");
            assert_eq!(scene.count(&kept), 1, "the memory itself stays");
        },
    );
}

#[test]
fn sqlite_commands_die_at_every_commit() {
    commands_die_at_every_commit(Database::sqlite());
}

#[test]
fn postgres_commands_die_at_every_commit() {
    commands_die_at_every_commit(Database::postgres());
}

#[test]
fn mysql_commands_die_at_every_commit() {
    commands_die_at_every_commit(Database::mysql());
}
