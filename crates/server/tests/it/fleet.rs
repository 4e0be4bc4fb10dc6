//! Several processes on one database: killed, paused past their lease, restarted. The receiver's log is the witness.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use postrider::store::{Filter, Shown, Status};
use postrider::{LaneRules, Lanes, Outbox};
use proving::history::{Enqueued, History, Limits, Rows, State};
use proving::kit::Session;
use proving::receiver::{Answer, Receiver};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::home::{Home, Running, wait_long_until, wait_until};
use crate::scratch::Database;

const MESSAGES: usize = 20_000;
const LEASE: Duration = Duration::from_secs(4);
/// Messages that lost several workers are served apart, for a tenth of the time while there is other work.
const SUSPECTS_TAKE_THEIR_TIME: Duration = Duration::from_secs(180);

/// A fleet fills the machine; two at a time would measure the scheduler.
pub static ONE_FLEET: Mutex<()> = Mutex::new(());

pub fn lanes() -> Lanes {
    Lanes::new().with("fleet", LaneRules::default())
}

pub fn url(home: &Home) -> String {
    home.database.url().map_or_else(|| format!("sqlite://{}", home.path("postrider.db").display()), str::to_owned)
}

pub fn prepare(home: &Home, receiver: &Receiver, more: &str) {
    let lane = format!("[lane.fleet]\ncourier = \"http\"\nurl = \"{}\"\n{more}", receiver.url());
    home.write("postrider.toml", &lane).run(&["migrate"]).done();
}

fn ended(runtime: &Runtime, home: &Home) -> HashMap<i64, Shown> {
    let outbox = runtime.block_on(Outbox::open(&url(home), lanes())).unwrap();
    let filter = Filter { limit: 1_000_000, ..Filter::default() };
    let page = runtime.block_on(outbox.list(filter)).unwrap();
    assert_eq!(page.next, None, "more than one page");
    page.items.into_iter().map(|shown| (shown.id, shown)).collect()
}

pub fn live(home: &Home) -> u64 {
    let stats = home.stats("fleet");
    stats["pending"].as_u64().unwrap() + stats["leased"].as_u64().unwrap()
}

fn killed_paused_and_restarted(database: Database) {
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let runtime = Runtime::new().unwrap();
    let slow = Answer { status: 200, after: Duration::from_millis(5) };
    let receiver = runtime.block_on(Receiver::start(move |_| slow)).unwrap();
    let home = Home::on(database);
    // No request times out while its worker is paused: what is sent again, is sent again for a lost lease and nothing else.
    let settings = format!("concurrency = 32\nbatch = 64\ntimeout_ms = 60000\nlock_lease_sec = {}\n", LEASE.as_secs());
    prepare(&home, &receiver, &settings);
    let lines: String = (0..MESSAGES).map(|n| format!("{{\"payload\":{n}}}\n")).collect();
    home.write("messages.ndjson", &lines).run(&["enqueue", "fleet", "--ndjson", "messages.ndjson"]).done();

    let start = || home.start_silent(&["worker", "--lane", "fleet"]);
    let mut workers: Vec<Running> = (0..4).map(|_| start()).collect();
    let part = |low: usize, high: usize| fastrand::usize(MESSAGES * low / 100..MESSAGES * high / 100);
    let (first_kill, pause, second_kill) = (part(5, 20), part(25, 40), part(45, 60));
    println!("kill at {first_kill}, pause at {pause}, kill at {second_kill}");
    wait_until("the first kill", || receiver.count() > first_kill);
    workers[0].signal(Signal::KILL);
    workers[0] = start();
    wait_until("the pause", || receiver.count() > pause);
    // On SQLite it may have been stopped with the file's write lock in its hand: nobody gets on until it wakes up.
    workers[1].signal(Signal::STOP);
    let paused = workers[1].pid();
    let wake_up = std::thread::spawn(move || {
        std::thread::sleep(LEASE + Duration::from_secs(2));
        rustix::process::kill_process(paused, Signal::CONT).unwrap();
    });
    wait_until("the second kill", || receiver.count() > second_kill);
    workers[2].signal(Signal::KILL);
    workers[2] = start();
    // The others take over what the paused one held; it wakes up with outcomes that may not count any more.
    wait_until("everything has ended", || live(&home) == 0);
    wake_up.join().unwrap();
    for worker in &workers {
        worker.signal(Signal::TERM);
    }
    for worker in workers {
        worker.ends_within(Duration::from_secs(30)).done();
    }

    let rows = runtime.block_on(async { Rows::of_lane(&mut Session::to(&url(&home)).await, "fleet").await });
    assert_eq!(rows.messages.len(), MESSAGES, "every message is there once");
    assert!(rows.messages.iter().all(|row| row.state == State::Sent));
    // Ids are given in the order of the lines.
    let enqueued = rows.messages.iter().enumerate().map(|(n, row)| Enqueued::accepted(row.id, n.to_string())).collect();
    let limits = Some(Limits { attempts: 8, crashes: 5 });
    let judgement = History { enqueued, book: receiver.log(), rows, limits }.judge();
    judgement.is_clean();
    println!("{} messages were sent more than once, each after a lost lease", judgement.duplicates);
    if let Database::Sqlite = home.database {
        crate::scratch::is_whole(&home.path("postrider.db"));
    }
    home.is_healthy();
}

#[test]
fn sqlite_killed_paused_and_restarted() {
    killed_paused_and_restarted(Database::sqlite());
}

#[test]
fn postgres_killed_paused_and_restarted() {
    killed_paused_and_restarted(Database::postgres());
}

#[test]
fn mysql_killed_paused_and_restarted() {
    killed_paused_and_restarted(Database::mysql());
}

/// Kills whoever holds the message, by the pid in `locked_by`.
fn kill_holder(home: &Home, id: i64) {
    let holder = home.show(id)["locked_by"].as_str().unwrap_or_default().to_owned();
    let pid = holder.rsplit(':').nth(1).and_then(|pid| pid.parse().ok());
    if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

fn poison_is_buried_alone(database: Database) {
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let runtime = Runtime::new().unwrap();
    let (poisoned, mut deaths) = std::sync::mpsc::channel::<i64>();
    let receiver = runtime.block_on(Receiver::start(move |request| {
        if request.body == b"poison" {
            let _ = poisoned.send(request.id);
            return Answer { status: 200, after: Duration::from_secs(60) };
        }
        Answer { status: 200, after: Duration::from_millis(20) }
    }));
    let receiver = receiver.unwrap();
    let home = Home::on(database);
    prepare(&home, &receiver, "concurrency = 32\nbatch = 64\nlock_lease_sec = 1\n");
    let lines: String = (0..60)
        .map(|n| if n == 30 { "{\"payload\":\"poison\"}\n".to_owned() } else { format!("{{\"payload\":{n}}}\n") })
        .collect();
    home.write("messages.ndjson", &lines).run(&["enqueue", "fleet", "--ndjson", "messages.ndjson"]).done();

    let mut worker = home.start_silent(&["worker", "--lane", "fleet"]);
    wait_long_until("everything has ended", SUSPECTS_TAKE_THEIR_TIME, || {
        if let Ok(id) = deaths.try_recv() {
            kill_holder(&home, id);
            worker = home.start_silent(&["worker", "--lane", "fleet"]);
        }
        let _ = &mut deaths;
        live(&home) == 0
    });
    worker.signal(Signal::TERM);
    worker.ends_within(Duration::from_secs(30)).done();

    let rows = ended(&runtime, &home);
    let dead: Vec<&Shown> = rows.values().filter(|row| row.status == Status::Dead).collect();
    assert_eq!(dead.len(), 1, "the poison and none of its neighbours: {dead:?}");
    assert_eq!((dead[0].last_error_code.as_deref(), dead[0].crashes), (Some("POISON"), 5), "{:?}", dead[0]);
    let deliveries = receiver.by_message().get(&dead[0].id).map_or(0, Vec::len);
    assert_eq!(deliveries, 5, "as many workers as max_crashes died of it");
    home.is_healthy();
}

#[test]
fn sqlite_poison_is_buried_alone() {
    poison_is_buried_alone(Database::sqlite());
}

#[test]
fn postgres_poison_is_buried_alone() {
    poison_is_buried_alone(Database::postgres());
}

#[test]
fn mysql_poison_is_buried_alone() {
    poison_is_buried_alone(Database::mysql());
}
