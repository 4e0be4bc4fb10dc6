//! PgBouncer in transaction mode stands between us and PostgreSQL.

use std::time::Duration;

use proving::receiver::{Answer, Receiver};
use proving::servers::{Pooler, Postgres};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::home::{Home, wait_until};
use crate::scratch::Database;

#[test]
#[ignore = "needs a PgBouncer that knows prepared statements: make databases NAMES=pgbouncer brings one"]
fn behind_a_pooler_everything_goes_on_and_it_is_said() {
    let database = Postgres::start().unwrap();
    let pooler = Pooler::before(database.port(), "postrider").unwrap();
    let url = database.url().replace(&database.port().to_string(), &pooler.port().to_string());
    let runtime = Runtime::new().unwrap();
    let takes = Answer { status: 200, after: Duration::from_millis(5) };
    let receiver = runtime.block_on(Receiver::start(move |_| takes)).unwrap();
    let home = Home::on(Database::sqlite());
    let lane = "courier = \"http\"\npoll_interval_sec = 0.1\n";
    home.write("postrider.toml", &format!("database = \"{url}\"\n[lane.a]\nurl = \"{}\"\n{lane}", receiver.url()));
    home.run(&["migrate"]).done();
    let logs = ["one.log", "two.log"];
    let workers = logs.map(|log| home.start_logging(&["worker", "--lane", "a"], log));
    let lines: String = (0..500).map(|n| format!("{{\"payload\":{n},\"key\":\"k{n}\"}}\n")).collect();
    home.write("messages.ndjson", &lines);
    // The same once more: it is there already.
    for _ in 0..2 {
        home.run(&["enqueue", "a", "--ndjson", "messages.ndjson"]).done();
    }
    wait_until("all have arrived", || receiver.count() >= 500);
    // They have nothing to do: whatever comes now is found by a poll.
    let last = home.enqueue(&["a", "--payload", "500"]);
    wait_until("it has ended", || home.show(last)["status"] == "sent");
    let mut bodies: Vec<Vec<u8>> = receiver.log().into_iter().map(|request| request.body.to_vec()).collect();
    bodies.sort();
    bodies.dedup();
    assert_eq!((bodies.len(), receiver.count()), (501, 501), "each once");
    home.is_healthy();
    for worker in workers {
        worker.signal(Signal::TERM);
        worker.ends_within(Duration::from_secs(30)).done();
    }
    for log in logs {
        let log = std::fs::read_to_string(home.path(log)).unwrap();
        assert_eq!(log.matches("a pooler stands before PostgreSQL").count(), 1, "it is said, once: {log}");
        assert!(!log.contains(" ERROR "), "{log}");
    }
}
