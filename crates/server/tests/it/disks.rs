//! What an embedded database survives of its disk: the power fails at every write of a scripted run, syncs fail or lie, a
//! reader lets the log grow. Below it is a file system of the test's own, which knows what was synced.

use std::time::Duration;

use proving::disk::{Disk, Fault, Image, Loss, Medium, Op};
use proving::receiver::{Answer, Receiver};
use rusqlite::{Connection, OpenFlags};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::api::{Response, Server};
use crate::home::{Home, wait_until};

/// Something that was answered, or seen, when the disk had been told so much: from then on it is there for good.
struct Fact {
    told: usize,
    what: What,
}

enum What {
    Message { id: i64, body: Vec<u8> },
    Sent(i64),
    Event(i64),
    Subscription(i64),
    Order(String),
}

/// A product whose files are all on one disk of the test's own.
struct Run {
    home: Home,
    disk: Disk,
    facts: Vec<Fact>,
}

const SETTINGS: &str =
    "[webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\n[lane.later]\ncourier = \"noop\"\n";

/// Names the file to another process.
const CHECKPOINT: &str = "POSTRIDER_CHECKPOINT";
const JSON: (&str, &str) = ("Content-Type", "application/json");

impl Run {
    fn begin(receiver: &Receiver) -> Run {
        let disk = Disk::mount().unwrap_or_else(|error| panic!("{error}"));
        let home = Home::sqlite();
        let folder = disk.path().display();
        let config = format!(
            "database = \"sqlite://{folder}/postrider.db\"\n[secrets]\nkey = \"file:{folder}/postrider.key\"\n\
             [lane.work]\ncourier = \"http\"\nurl = \"{}\"\n{SETTINGS}",
            receiver.url()
        );
        home.write("postrider.toml", &config);
        Run { home, disk, facts: vec![] }
    }

    fn serve(&self) -> Server {
        Server::start(&self.home, &[])
    }

    fn is_true(&mut self, what: What) {
        self.facts.push(Fact { told: self.disk.told(), what });
    }

    fn enqueue(&mut self, server: &Server, lane: &str, body: &[u8]) -> Response {
        let answer = server.request("POST", &format!("/v1/outbox/{lane}"), &[], body);
        if answer.status == 201 {
            let id = answer.json()["id"].as_i64().unwrap();
            self.is_true(What::Message { id, body: body.to_vec() });
        }
        answer
    }

    fn is_sent(&mut self, server: &Server, id: i64) {
        let path = format!("/v1/outbox/{id}");
        wait_until("it is sent", || server.get(&path).json()["status"] == "sent");
        self.is_true(What::Sent(id));
    }

    fn publish(&mut self, server: &Server, n: usize) {
        let event = json!({"event_type": "order.paid", "payload": {"n": n}}).to_string();
        let answer = server.request("POST", "/v1/events", &[JSON], event.as_bytes()).answered(202);
        self.is_true(What::Event(answer.json()["event_id"].as_i64().unwrap()));
    }

    fn subscribe(&mut self, server: &Server, url: &str) {
        let subscription = json!({"url": url, "event_types": ["order.*"]}).to_string();
        let answer = server.request("POST", "/v1/subscriptions", &[JSON], subscription.as_bytes()).answered(201);
        self.is_true(What::Subscription(answer.json()["id"].as_i64().unwrap()));
    }

    fn order(&mut self, server: &Server, n: usize) {
        let key = format!("order-{n}");
        let order = json!({"instrument": "ABC", "side": "BUY", "qty": 1, "price": 10, "time_in_force": "GTC"});
        let headers = [("Idempotency-Key", key.as_str()), JSON];
        server.request("POST", "/do/order", &headers, order.to_string().as_bytes()).answered(201);
        self.is_true(What::Order(key));
    }

    /// Somebody else copies the log into the database, as a backup or a shell does.
    ///
    /// Not in this process, which is the file system: a page of it that we map ourselves is a page we wait for while nobody
    /// here can get memory to bring it.
    fn checkpoint(&self) {
        let mut other = std::process::Command::new(std::env::current_exe().unwrap());
        other.args(["--exact", "disks::checkpoint_as_another_process", "--ignored"]);
        let done = other.env(CHECKPOINT, self.disk.path().join("postrider.db")).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }

    /// What is wrong with the disk if the power fails after so much, and this is lost of the rest.
    fn judge(&self, told: usize, image: &Image) -> Result<(), String> {
        let folder = lay_out(image);
        let file = folder.path().join("postrider.db");
        let facts: Vec<&What> = self.facts.iter().filter(|fact| fact.told <= told).map(|fact| &fact.what).collect();
        if !file.exists() {
            return if facts.is_empty() { Ok(()) } else { Err("the database is gone".to_owned()) };
        }
        let read = || -> rusqlite::Result<Result<(), String>> {
            let database = Connection::open_with_flags(&file, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
            let integrity: String = database.query_row("PRAGMA integrity_check", (), |row| row.get(0))?;
            if integrity != "ok" {
                return Ok(Err(format!("integrity_check: {integrity}")));
            }
            for fact in facts {
                if let Some(missing) = missing(&database, fact)? {
                    return Ok(Err(missing));
                }
            }
            Ok(Ok(()))
        };
        read().map_err(|error| format!("it cannot be read: {error}"))?
    }
}

fn lay_out(image: &Image) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in image {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn missing(database: &Connection, what: &What) -> rusqlite::Result<Option<String>> {
    let there = |sql: &str, value: &dyn rusqlite::ToSql| {
        database.prepare_cached(sql).and_then(|mut sql| sql.query_row([value], |row| row.get::<_, bool>(0)))
    };
    let (is_there, name) = match what {
        What::Message { id, body } => {
            let sql =
                "SELECT payload FROM outbox WHERE id = ?1 UNION ALL SELECT payload FROM outbox_done WHERE id = ?1";
            let mut payloads = database.prepare_cached(sql)?;
            let payloads: Vec<Vec<u8>> = payloads.query_map([id], |row| row.get(0))?.collect::<Result<_, _>>()?;
            (payloads == [body.clone()], format!("message {id}"))
        }
        What::Sent(id) => (
            there("SELECT EXISTS (SELECT 1 FROM outbox_done WHERE id = ? AND status = 'sent')", id)?,
            format!("the end of message {id}"),
        ),
        What::Event(id) => (there("SELECT EXISTS (SELECT 1 FROM events WHERE id = ?)", id)?, format!("event {id}")),
        What::Subscription(id) => {
            (there("SELECT EXISTS (SELECT 1 FROM subscriptions WHERE id = ?)", id)?, format!("subscription {id}"))
        }
        What::Order(key) => {
            let sql = "SELECT EXISTS (SELECT 1 FROM idempo_ledger WHERE idempotency_key = ?)";
            (there(sql, key)?, format!("the order {key}"))
        }
    };
    Ok((!is_there).then(|| format!("{name} was answered, and is not there")))
}

/// The script: messages, deliveries, webhooks, orders, checkpoints, a crash, a graceful stop.
fn scripted(run: &mut Run, receiver: &Receiver) {
    run.home.run(&["migrate"]).done();
    let server = run.serve();
    run.subscribe(&server, &receiver.url());
    for n in 0..6 {
        let id = run.enqueue(&server, "work", format!("small {n}").as_bytes()).answered(201).json()["id"].as_i64();
        run.enqueue(&server, "later", &vec![b'a' + n as u8; 20_000]).answered(201);
        run.is_sent(&server, id.unwrap());
        run.publish(&server, n);
        run.order(&server, n);
        if n % 3 == 1 {
            run.checkpoint();
        }
    }
    drop(server); // killed
    let server = run.serve();
    for n in 6..9 {
        run.enqueue(&server, "work", format!("again {n}").as_bytes()).answered(201);
        run.publish(&server, n);
    }
    server.stop();
    let server = run.serve();
    run.enqueue(&server, "later", b"the last").answered(201);
    server.stop();
}

fn receiver(runtime: &Runtime) -> Receiver {
    runtime.block_on(Receiver::start(|_| Answer::OK)).unwrap()
}

/// The power fails after each thing the disk was told; what it says of each is judged. Answers how many are wrong.
fn power_fails(run: &Run, losses: impl Fn(usize) -> Vec<Loss>) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut medium = Medium::default();
    for (n, op) in run.disk.journal().iter().enumerate() {
        medium.apply(op);
        for loss in losses(n) {
            if let Err(what) = run.judge(n + 1, &medium.after(loss)) {
                wrong.push(format!("the power fails after {} operations, {loss:?} is lost: {what}", n + 1));
            }
        }
    }
    wrong
}

#[test]
#[ignore = "a step of the next one, in a process of its own"]
fn checkpoint_as_another_process() {
    let file = std::env::var(CHECKPOINT).expect("the file");
    let database = Connection::open(file).unwrap();
    database.busy_timeout(Duration::from_secs(10)).unwrap();
    database.query_row("PRAGMA wal_checkpoint(RESTART)", (), |_| Ok(())).unwrap();
}

#[test]
fn row_25_the_power_fails_at_every_write() {
    let runtime = Runtime::new().unwrap();
    let receiver = receiver(&runtime);
    let mut run = Run::begin(&receiver);
    scripted(&mut run, &receiver);
    let journal = run.disk.journal();
    println!("{} operations, {} facts", journal.len(), run.facts.len());
    let synced = journal.iter().filter(|op| matches!(op, Op::Sync { .. })).count();
    assert!(synced > run.facts.len(), "{synced} syncs for {} facts", run.facts.len());
    // One loss for each in turn; all of them where there is time.
    let all = std::env::var("POSTRIDER_DISKS").is_ok_and(|which| which == "all");
    let wrong = power_fails(&run, |n| {
        let losses = [Loss::Everything, Loss::Torn(n as u64), Loss::Nothing, Loss::Torn(!(n as u64))];
        if all { losses.to_vec() } else { vec![losses[n % losses.len()]] }
    });
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), journal.len(), wrong[..wrong.len().min(10)].join("\n"));

    // The product itself begins again on what is left, with its key.
    let mut medium = Medium::default();
    let subscribed = run.facts.iter().find(|fact| matches!(fact.what, What::Subscription(_))).unwrap().told;
    let step = (journal.len() - subscribed).div_ceil(if all { 100 } else { 8 });
    for (n, op) in journal.iter().enumerate() {
        medium.apply(op);
        if n >= subscribed && (n - subscribed) % step == 0 {
            begins_again(&medium.after(Loss::Torn(n as u64)), &receiver);
        }
    }
}

fn begins_again(image: &Image, receiver: &Receiver) {
    let folder = lay_out(image);
    let home = Home::sqlite();
    let place = folder.path().display();
    let config = format!(
        "database = \"sqlite://{place}/postrider.db\"\n[secrets]\nkey = \"file:{place}/postrider.key\"\n\
         [lane.work]\ncourier = \"http\"\nurl = \"{}\"\nlock_lease_sec = 2\n{SETTINGS}",
        receiver.url()
    );
    home.write("postrider.toml", &config);
    let server = Server::start(&home, &[]);
    server.get("/readyz").answered(200);
    let event = json!({"event_type": "order.paid", "payload": {}}).to_string();
    let answer = server.request("POST", "/v1/events", &[JSON], event.as_bytes()).answered(202);
    let saga = answer.json()["saga_ids"][0].as_i64().unwrap();
    let path = format!("/v1/sagas/{saga}");
    // It is signed with a secret that only the right key opens.
    wait_until("the webhook is delivered", || server.get(&path).json()["status"] == "Completed");
    server.stop();
}

/// A disk that lies loses what it was trusted with. That is seen, or the test above would see nothing.
#[test]
fn a_disk_that_lies_is_found_out() {
    let runtime = Runtime::new().unwrap();
    let receiver = receiver(&runtime);
    let mut run = Run::begin(&receiver);
    run.home.run(&["migrate"]).done();
    let server = run.serve();
    run.enqueue(&server, "later", b"before").answered(201);
    let honest = run.disk.told();
    run.disk.is(Fault::SyncLies);
    for n in 0..5 {
        run.enqueue(&server, "later", format!("trusted {n}").as_bytes()).answered(201);
    }
    let lied = run.disk.told();
    run.disk.is(Fault::None);
    // The next honest sync brings everything before it.
    run.enqueue(&server, "later", b"after").answered(201);
    let healed = run.disk.told();
    drop(server);

    let journal = run.disk.journal();
    let after = |told: usize, loss: Loss| {
        let mut medium = Medium::default();
        journal[..told].iter().for_each(|op| medium.apply(op));
        run.judge(told, &medium.after(loss))
    };
    assert_eq!(after(honest, Loss::Everything), Ok(()));
    let lost = after(lied, Loss::Everything).expect_err("the loss is seen");
    assert!(lost.contains("was answered, and is not there"), "no more than what was trusted to it is lost: {lost}");
    assert_eq!(after(healed, Loss::Everything), Ok(()));
}

#[test]
fn row_26_what_a_sync_fails_for_is_not_acknowledged() {
    let runtime = Runtime::new().unwrap();
    let receiver = receiver(&runtime);
    let mut run = Run::begin(&receiver);
    run.home.run(&["migrate"]).done();
    let server = run.serve();
    for n in 0..3 {
        run.enqueue(&server, "later", format!("before {n}").as_bytes()).answered(201);
    }
    run.disk.is(Fault::SyncFails);
    for n in 0..5 {
        let answer = run.enqueue(&server, "later", format!("failed {n}").as_bytes());
        // Its bytes may be in the log, for whoever recovers it: nobody can say that it is not there.
        answer.refused(503, "OUTCOME_UNKNOWN");
    }
    server.get("/readyz").refused(503, "STORE_UNAVAILABLE");
    run.disk.is(Fault::None);
    wait_until("it is ready again", || server.get("/readyz").status == 200);
    for n in 0..3 {
        run.enqueue(&server, "later", format!("after {n}").as_bytes()).answered(201);
    }
    server.stop();
    let wrong = power_fails(&run, |n| vec![[Loss::Everything, Loss::Nothing, Loss::Torn(n as u64)][n % 3]]);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The disk is full while messages are under way: what it has no room for is refused for certain, what was delivered is
/// recorded once there is room again, and nothing that was acknowledged is lost, whenever the power fails.
#[test]
fn row_27_a_full_disk_refuses_what_it_cannot_keep_and_loses_nothing() {
    let runtime = Runtime::new().unwrap();
    let slow = Answer { status: 200, after: Duration::from_millis(300) };
    let receiver = runtime.block_on(Receiver::start(move |_| slow)).unwrap();
    let mut run = Run::begin(&receiver);
    run.home.run(&["migrate"]).done();
    let server = run.serve();
    let under_way: Vec<i64> = (0..6)
        .map(|n| {
            run.enqueue(&server, "work", format!("under way {n}").as_bytes()).answered(201).json()["id"]
                .as_i64()
                .unwrap()
        })
        .collect();
    wait_until("they are under way", || receiver.count() > 0);
    run.disk.is(Fault::Full);
    // There may be room in what the files have already.
    let (mut accepted, mut refused) = (0, 0);
    while refused < 5 {
        let answer = run.enqueue(&server, "later", &[b'x'; 20_000]);
        if answer.status == 201 {
            accepted += 1;
        } else {
            answer.refused(503, "STORE_UNAVAILABLE");
            refused += 1;
        }
        assert!(accepted < 1000, "it is not full");
    }
    server.get("/readyz").refused(503, "STORE_UNAVAILABLE");
    // What has arrived meanwhile cannot be recorded, or can; what nobody has claimed cannot be.
    run.disk.is(Fault::None);
    wait_until("it is ready again", || server.get("/readyz").status == 200);
    for id in under_way {
        run.is_sent(&server, id);
    }
    run.enqueue(&server, "later", b"after").answered(201);
    let there = server.get("/v1/outbox?lane=later&limit=1000").json()["items"].as_array().unwrap().len();
    assert_eq!(there, accepted + 1, "what was refused is not there");
    server.stop();
    let wrong = power_fails(&run, |n| vec![[Loss::Everything, Loss::Nothing, Loss::Torn(n as u64)][n % 3]]);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What grows is told, nothing else suffers, and with the reader's end it is over.
#[test]
fn row_28_a_reader_that_never_ends_lets_the_log_grow_and_is_told() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[lane.later]\ncourier = \"noop\"\n").run(&["migrate"]).done();
    let server = Server::start(&home, &["--no-workers"]);
    let log = || std::fs::metadata(home.path("postrider.db-wal")).map_or(0, |file| file.len());
    let reader = Connection::open(home.path("postrider.db")).unwrap();
    reader.execute_batch("BEGIN; SELECT COUNT(*) FROM outbox").unwrap();
    let payload = vec![b'x'; 1_000_000];
    // More than the log is let grow otherwise.
    for _ in 0..80 {
        server.request("POST", "/v1/outbox/later", &[], &payload).answered(201);
    }
    assert!(log() > 80_000_000, "{} bytes", log());
    let told = |server: &Server| -> f64 {
        let metrics = server.get("/metrics").body;
        let line = metrics.lines().find(|line| line.starts_with("outbox_sqlite_wal_bytes")).map(str::to_owned);
        line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).unwrap_or(0.0)
    };
    wait_until("the metric says so", || told(&server) > 80e6);
    server.get("/readyz").answered(200);
    reader.execute_batch("COMMIT").unwrap();
    wait_until("the log begins anew", || {
        let before = log();
        server.request("POST", "/v1/outbox/later", &[], &payload).answered(201);
        log() == before
    });
    server.stop();
}
