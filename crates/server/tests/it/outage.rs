//! The database goes away for ten seconds under a running worker, and comes back.

use std::any::Any;
use std::time::Duration;

use proving::receiver::{Answer, Receiver};
use proving::servers::{MariaDb, Postgres};
use rustix::process::Signal;
use tokio::runtime::Runtime;

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
