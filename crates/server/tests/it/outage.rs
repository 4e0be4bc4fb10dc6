//! The database goes away for ten seconds under a running worker, and comes back; or its disk is full for a while; or it has
//! no connections left.

use std::any::Any;
use std::time::Duration;

use proving::kit::Session;
use proving::receiver::{Answer, Receiver};
use proving::servers::{MariaDb, Postgres};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use tokio::runtime::Runtime;

use crate::api::{Server, exchange};
use crate::home::{Home, wait_until};
use crate::scratch::Database;

const OUTAGE: Duration = Duration::from_secs(10);

/// `down` takes the database away; what it gives brings it back.
fn goes_on_by_itself(url: Option<String>, down: impl FnOnce(&Home) -> Box<dyn FnOnce() -> Box<dyn Any>>) {
    let runtime = Runtime::new().unwrap();
    // The delivery ends while the database is away.
    let slow = Answer { status: 200, after: Duration::from_secs(3) };
    let receiver = runtime.block_on(Receiver::start(move |_| slow)).unwrap();
    let home = Home::on(Database::sqlite());
    let database = url.map_or(String::new(), |url| format!("database = \"{url}\"\n"));
    let lane = format!("{database}[lane.a]\ncourier = \"http\"\ntimeout_ms = 20000\nurl = \"{}\"\n", receiver.url());
    home.write("postrider.toml", &lane).run(&["migrate"]).done();
    let id = home.enqueue(&["a", "--payload", "before"]);
    let worker = home.start_silent(&["worker", "--lane", "a"]);
    wait_until("the delivery has begun", || receiver.count() == 1);

    let up = down(&home);
    std::thread::sleep(OUTAGE);
    let _database = up();

    wait_until("the delivery is settled", || home.show(id)["status"] == "sent");
    assert_eq!(home.show(id)["lease_token"], 1, "under the lease it had before the outage");
    let after = home.enqueue(&["a", "--payload", "after"]);
    wait_until("new work is done", || home.show(after)["status"] == "sent");
    let arrived: Vec<i64> = receiver.log().iter().map(|r| r.id).collect();
    assert_eq!(arrived, [id, after], "nothing was sent again");
    worker.signal(Signal::TERM);
    worker.ends_within(Duration::from_secs(30)).done();
}

#[test]
fn postgres_stopped_for_ten_seconds() {
    let server = Postgres::start().unwrap();
    goes_on_by_itself(Some(server.url()), move |_| {
        let mut server = server;
        server.stop_immediate();
        Box::new(move || {
            server.start_again().unwrap();
            Box::new(server)
        })
    });
}

#[test]
fn mysql_stopped_for_ten_seconds() {
    let server = MariaDb::start().unwrap();
    let url = server.url();
    // The server's own database takes no triggers.
    crate::scratch::on_mysql(&url, "CREATE DATABASE outage");
    let mut named = url::Url::parse(&url).unwrap();
    named.set_path("outage");
    goes_on_by_itself(Some(named.into()), move |_| {
        let mut server = server;
        server.stop_immediate();
        Box::new(move || {
            server.start_again().unwrap();
            Box::new(server)
        })
    });
}

#[test]
fn sqlite_locked_by_another_for_ten_seconds() {
    goes_on_by_itself(None, |home| {
        let other = rusqlite::Connection::open(home.path("postrider.db")).unwrap();
        other.busy_timeout(Duration::from_secs(5)).unwrap();
        other.execute_batch("BEGIN EXCLUSIVE").unwrap();
        Box::new(move || {
            other.execute_batch("COMMIT").unwrap();
            Box::new(())
        })
    });
}

#[test]
fn a_full_disk_is_told_and_nothing_is_in_doubt() {
    use std::io::{BufRead, BufReader};
    let home = Home::sqlite();
    home.write("postrider.toml", "[lane.work]\ncourier = \"noop\"\n").run(&["migrate"]).done();
    let serve = home.command(&["serve", "--listen", "127.0.0.1:0", "--no-workers"]);
    // No file may grow beyond two megabytes: to a database that is a disk without space.
    let mut limited = std::process::Command::new("bash");
    let line = format!("trap '' XFSZ; ulimit -S -f 2048; exec {} \"$@\"", serve.get_program().to_string_lossy());
    limited.args(["-c", &line, "serve"]).args(serve.get_args()).current_dir(serve.get_current_dir().unwrap());
    let mut child = limited.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    let address = first.trim().rsplit_once("://").unwrap().1.to_owned();
    let ask = |method: &str, path: &str, body: &[u8]| exchange(&address, method, path, &[], body);
    assert_eq!(ask("GET", "/readyz", b"").status, 200);
    let payload = vec![b'x'; 100_000];
    let mut written = 0;
    let refused = loop {
        let answer = ask("POST", "/v1/outbox/work", &payload);
        if answer.status != 201 {
            break answer;
        }
        written += 1;
        assert!(written < 1000, "the disk is never full");
    };
    refused.refused(503, "STORE_UNAVAILABLE");
    ask("GET", "/readyz", b"").refused(503, "STORE_UNAVAILABLE");
    wait_until("health tells it", || {
        let health = ask("GET", "/health", b"");
        health.status == 503 && health.json()["capabilities"]["store"] == "failed"
    });
    for _ in 0..10 {
        // What is small may still find room: it does not hide what fails.
        written += i64::from(ask("POST", "/v1/outbox/work", b"x").status == 201);
        ask("POST", "/v1/outbox/work", &payload).refused(503, "STORE_UNAVAILABLE");
        ask("GET", "/readyz", b"").refused(503, "STORE_UNAVAILABLE");
    }
    let pid = Pid::from_child(&child);
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
    wait_until("it is ready again", || ask("GET", "/readyz", b"").status == 200);
    assert_eq!(ask("GET", "/health", b"").status, 200);
    ask("POST", "/v1/outbox/work", &payload).answered(201);
    assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), written + 1, "what was refused is not there");
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
}

/// Five connections for a server that would have more, and then none at all.
#[test]
fn row_22_a_server_with_five_connections() {
    let mut database = Postgres::start().unwrap();
    database.start_with("max_connections = 5\nsuperuser_reserved_connections = 0").unwrap();
    let url = database.url();
    let runtime = Runtime::new().unwrap();
    let takes = Answer { status: 200, after: Duration::from_millis(5) };
    let receiver = runtime.block_on(Receiver::start(move |_| takes)).unwrap();
    let home = Home::on(Database::sqlite());
    let lane = format!("database = \"{url}\"\n[lane.a]\ncourier = \"http\"\nurl = \"{}\"\n", receiver.url());
    home.write("postrider.toml", &lane).run(&["migrate"]).done();
    let mut strangers = vec![runtime.block_on(Session::to(&url))];
    let server = Server::start(&home, &[]);
    // Eight clients, each with a key for each message, who come again when they are told to.
    let refused = std::sync::atomic::AtomicUsize::new(0);
    let patience = std::time::Instant::now() + crate::home::PATIENCE;
    let clients: Vec<Vec<i64>> = std::thread::scope(|scope| {
        let (server, refused) = (&server, &refused);
        let client = |client: usize| {
            move || {
                let accept = |n: usize| loop {
                    let key = format!("{client}-{n}");
                    let answer = server.post("/v1/outbox/a", &[("Idempotency-Key", &key)], &key);
                    if answer.status == 200 || answer.status == 201 {
                        break answer.json()["id"].as_i64().unwrap();
                    }
                    assert_eq!(answer.status, 503, "{answer:#?}");
                    assert!(answer.header("retry-after").is_some(), "{answer:#?}");
                    assert!(std::time::Instant::now() < patience, "nobody gets through");
                    refused.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                };
                (0..50).map(accept).collect()
            }
        };
        let clients: Vec<_> = (0..8).map(|n| scope.spawn(client(n))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    println!("{} times somebody was told to come again", refused.into_inner());
    let mut accepted = clients.concat();
    accepted.sort_unstable();
    wait_until("all have arrived", || receiver.count() >= accepted.len());
    let mut arrived: Vec<i64> = receiver.log().iter().map(|request| request.id).collect();
    arrived.sort_unstable();
    assert_eq!(arrived, accepted, "each once");

    // Somebody else takes all of them: nobody waits beyond a deadline, and it is told why.
    wait_until("somebody else has all five", || {
        let ours = "SELECT pg_terminate_backend(pid)::text FROM pg_stat_activity WHERE application_name = 'postrider'";
        runtime.block_on(strangers[0].texts(ours));
        while let Ok(stranger) = runtime.block_on(Session::to_postgres(&url)) {
            strangers.push(stranger);
        }
        strangers.len() == 5
    });
    let refused = server.post("/v1/outbox/a", &[], "in vain");
    assert_eq!(refused.status, 503, "{refused:#?}");
    assert!(refused.header("retry-after").is_some(), "{refused:#?}");
    server.get("/livez").answered(200);
    home.run(&["outbox", "stats"]).refused(3, &["too many clients already", "max_connections"]);
    drop(strangers);
    let mut last = None;
    wait_until("they are let in again", || {
        let answer = server.post("/v1/outbox/a", &[], "again");
        last = (answer.status == 201).then(|| answer.json()["id"].clone());
        last.is_some()
    });
    let last = format!("/v1/outbox/{}", last.unwrap());
    wait_until("and work goes on", || server.get(&last).json()["status"] == "sent");
    assert_eq!(server.stop().0, 0);
}
