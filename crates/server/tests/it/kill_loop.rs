//! Workers that are killed over and over, each a moment after it began: row 52 of the fault matrix. What they got done and
//! what they left behind is judged by the receiver's book and the rows. `POSTRIDER_KILLS=1000` kills more often.

use std::time::Duration;

use proving::history::{Enqueued, History, Limits, Rows, State, What};
use proving::kit::Session;
use proving::receiver::{Answer, Receiver};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::fleet::{ONE_FLEET, live, prepare, url};
use crate::home::{Home, wait_long_until};
use crate::scratch::Database;

/// A message may lose a worker each time, and is no poison for that.
const CRASHES: i64 = 1000;
/// So many are there at first, and so many come with each pack of workers.
const FIRST: usize = 2000;
const MORE: usize = 20;
/// Workers that run beside each other until each is killed in its turn.
const PACK: usize = 4;

fn killed_over_and_over(database: Database) {
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let kills: usize = std::env::var("POSTRIDER_KILLS").map_or(40, |n| n.parse().expect("POSTRIDER_KILLS is a number"));
    let runtime = Runtime::new().unwrap();
    let receiver =
        runtime.block_on(Receiver::start(|_| Answer { status: 200, after: Duration::from_millis(3) })).unwrap();
    let home = Home::on(database);
    let lane = "concurrency = 16\nbatch = 32\ntimeout_ms = 60000\nlock_lease_sec = 2\npoll_interval_sec = 0.05\n";
    prepare(&home, &receiver, &format!("{lane}[outbox]\nmax_crashes = {CRASHES}\n"));
    let mut total = 0;
    let mut enqueue = |count: usize| {
        let line = |n: usize| format!("{{\"payload\":{n}}}\n");
        let lines: String = (total..total + count).map(line).collect();
        home.write("messages.ndjson", &lines).run(&["enqueue", "fleet", "--ndjson", "messages.ndjson"]).done();
        total += count;
    };
    enqueue(FIRST);
    let mut killed = 0;
    for _ in 0..kills.div_ceil(PACK) {
        let workers = [(); PACK].map(|()| home.start_silent(&["worker", "--lane", "fleet"]));
        enqueue(MORE);
        // Some die before they have claimed anything, some in the middle of everything.
        for mut worker in workers {
            std::thread::sleep(Duration::from_millis(fastrand::u64(5..100)));
            assert!(!worker.has_ended(), "it runs until it is killed");
            worker.signal(Signal::KILL);
            killed += 1;
        }
    }
    let worker = home.start_silent(&["worker", "--lane", "fleet"]);
    wait_long_until("everything has ended", Duration::from_secs(120), || live(&home) == 0);
    drop(worker);

    let rows = runtime.block_on(async { Rows::of_lane(&mut Session::to(&url(&home)).await, "fleet").await });
    assert_eq!(rows.messages.len(), total, "every message is there once");
    assert!(rows.messages.iter().all(|row| row.state == State::Sent));
    // Ids are given in the order of the lines.
    let enqueued = rows.messages.iter().enumerate().map(|(n, row)| Enqueued::accepted(row.id, n.to_string())).collect();
    let takeovers = rows.steps.iter().filter(|step| step.what == What::Takeover).count();
    let limits = Some(Limits { attempts: 8, crashes: CRASHES });
    let judgement = History { enqueued, book: receiver.log(), rows, limits }.judge();
    judgement.is_clean();
    println!(
        "{killed} kills: {total} messages, {takeovers} takeovers, {} went out more than once, each for a reason",
        judgement.duplicates
    );
    assert!(takeovers > 0, "somebody died in the middle of something");
    assert!(judgement.duplicates < total, "most went out once");
    if let Database::Sqlite = home.database {
        crate::scratch::is_whole(&home.path("postrider.db"));
    }
    home.is_healthy();
}

#[test]
fn row_52_sqlite_workers_killed_over_and_over() {
    killed_over_and_over(Database::sqlite());
}

#[test]
fn row_52_postgres_workers_killed_over_and_over() {
    killed_over_and_over(Database::postgres());
}

#[test]
fn row_52_mysql_workers_killed_over_and_over() {
    killed_over_and_over(Database::mysql());
}
