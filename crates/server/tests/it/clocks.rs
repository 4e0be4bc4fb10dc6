//! Clocks that are wrong: of hosts, of the database, and of machines that slept.

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use proving::clocks;
use proving::history::{Enqueued, History, Limits, Rows, State};
use proving::kit::Session;
use proving::receiver::{Answer, Receiver};
use proving::servers::{MariaDb, Postgres};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::fleet::{ONE_FLEET, live, url};
use crate::home::{Home, Running, wait_long_until, wait_until};
use crate::scratch::{self, Database};

const HOUR: i64 = 3600;
const MESSAGES: usize = 600;

/// A home with messages for a receiver that takes its time over each.
struct Scene {
    runtime: Runtime,
    receiver: Receiver,
    home: Home,
    total: usize,
}

impl Scene {
    fn on(database: Database, more: &str) -> Scene {
        let runtime = Runtime::new().unwrap();
        let takes = Answer { status: 200, after: Duration::from_millis(20) };
        let receiver = runtime.block_on(Receiver::start(move |_| takes)).unwrap();
        let home = Home::on(database);
        let lane = "concurrency = 8\nbatch = 16\ntimeout_ms = 60000\nlock_lease_sec = 3\npoll_interval_sec = 0.05\n";
        // The top of the file comes before its sections.
        let config = format!("{more}[lane.fleet]\ncourier = \"http\"\nurl = \"{}\"\n{lane}", receiver.url());
        home.write("postrider.toml", &config).run(&["migrate"]).done();
        Scene { runtime, receiver, home, total: 0 }
    }

    fn enqueue(&mut self, count: usize) {
        let lines: String = (self.total..self.total + count).map(|n| format!("{{\"payload\":{n}}}\n")).collect();
        self.home.write("messages.ndjson", &lines);
        self.home.run(&["enqueue", "fleet", "--ndjson", "messages.ndjson"]).done();
        self.total += count;
    }

    fn worker(&self) -> Running {
        self.home.start_silent(&["worker", "--lane", "fleet"])
    }

    /// Everything has ended, and the receiver's book and the rows agree; answers how many came twice.
    fn is_settled(&self, within: Duration, url: &str) -> usize {
        wait_long_until("everything has ended", within, || live(&self.home) == 0);
        let rows = self.runtime.block_on(async { Rows::of_lane(&mut Session::to(url).await, "fleet").await });
        assert_eq!(rows.messages.len(), self.total, "every message is there once");
        assert!(rows.messages.iter().all(|row| row.state == State::Sent));
        let told = |(n, row): (usize, &proving::history::Row)| Enqueued::accepted(row.id, n.to_string());
        let enqueued = rows.messages.iter().enumerate().map(told).collect();
        let limits = Some(Limits { attempts: 8, crashes: 5 });
        let judgement = History { enqueued, book: self.receiver.log(), rows, limits }.judge();
        judgement.is_clean();
        judgement.duplicates
    }
}

fn borrowed<'a, N: AsRef<str>, V: AsRef<OsStr>>(environment: &'a [(N, V)]) -> Vec<(&'a str, &'a str)> {
    let text = |value: &'a V| value.as_ref().to_str().expect("a path of ours is text");
    environment.iter().map(|(name, value)| (name.as_ref(), text(value))).collect()
}

/// One worker's host is an hour ahead, another's an hour behind; only the database's clock counts.
fn hosts_an_hour_off(database: Database) {
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let mut scene = Scene::on(database, "");
    let (ahead, behind) = (clocks::wall_clock_off_by(HOUR).unwrap(), clocks::wall_clock_off_by(-HOUR).unwrap());
    let hosts = [&ahead, &Vec::new(), &behind].map(|environment| clocks::wall_clock_of(environment).unwrap());
    assert!(hosts[0] - hosts[1] > HOUR - 60 && hosts[1] - hosts[2] > HOUR - 60, "the hosts disagree: {hosts:?}");
    let start = |environment: &[(&str, std::ffi::OsString)]| {
        scene.home.start_below(&["env"], &borrowed(environment), &["worker", "--lane", "fleet"])
    };
    let workers = [start(&ahead), start(&behind)];
    // By a host's clock it would be due at once, or not for an hour.
    let begun = Instant::now();
    let later = scene.home.enqueue(&["fleet", "--payload", "0", "--delay", "3s"]);
    scene.total = 1;
    scene.enqueue(MESSAGES);
    wait_until("what was put off arrives", || scene.receiver.log().iter().any(|request| request.id == later));
    assert!(begun.elapsed() >= Duration::from_secs(3), "it came after {:?}", begun.elapsed());
    assert_eq!(scene.is_settled(Duration::from_secs(60), &url(&scene.home)), 0, "no lease seemed to have run out");
    for worker in workers {
        worker.signal(Signal::TERM);
        worker.ends_within(Duration::from_secs(30)).done();
    }
    scene.home.is_healthy();
}

#[test]
fn row_30_postgres_hosts_an_hour_off() {
    hosts_an_hour_off(Database::postgres());
}

#[test]
fn row_30_mysql_hosts_an_hour_off() {
    hosts_an_hour_off(Database::mysql());
}

/// The database's clock is set forward and back by more than a lease while messages are under way: some come twice, none is
/// settled twice or lost.
fn the_databases_clock_jumps(url: &str, set: impl Fn(i64)) {
    const JUMP: i64 = 8;
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let mut scene = Scene::on(Database::sqlite(), &format!("database = \"{url}\"\n"));
    scene.enqueue(MESSAGES);
    let workers = [scene.worker(), scene.worker(), scene.worker()];
    let after = |part: usize| wait_until("some have arrived", || scene.receiver.count() > MESSAGES * part / 10);
    after(1);
    set(JUMP);
    let ahead = scene.runtime.block_on(async {
        let now =
            if url.starts_with("mysql") { "UNIX_TIMESTAMP()" } else { "extract(epoch FROM clock_timestamp())::bigint" };
        Session::to(url).await.number(&format!("SELECT {now}")).await
    }) - clocks::wall_clock_of(&[]).unwrap();
    assert!((JUMP - 2..=JUMP + 2).contains(&ahead), "the server believes it: {ahead} s ahead");
    after(4);
    set(0);
    after(6);
    set(-JUMP);
    after(8);
    set(0);
    // What was claimed while the clock was ahead is held until then.
    let twice = scene.is_settled(Duration::from_secs(60 + 2 * JUMP as u64), url);
    println!("{twice} of {MESSAGES} came more than once");
    scene.enqueue(50);
    scene.is_settled(Duration::from_secs(60), url);
    drop(workers);
    scene.home.is_healthy();
}

#[test]
fn row_31_postgres_clock_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let file = for_all(&folder);
    let environment = clocks::wall_clock_set_by(&file).unwrap();
    let mut server = Postgres::start().unwrap();
    let environment: Vec<(&str, &OsStr)> = environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
    server.start_again_with(&environment).unwrap();
    the_databases_clock_jumps(&server.url(), |seconds| clocks::set(&file, seconds).unwrap());
}

#[test]
fn row_31_mysql_clock_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let file = for_all(&folder);
    let environment = clocks::wall_clock_set_by(&file).unwrap();
    let mut server = MariaDb::start().unwrap();
    let environment: Vec<(&str, &OsStr)> = environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
    server.start_again_with(&environment).unwrap();
    crate::scratch::on_mysql(&server.url(), "CREATE DATABASE clocks");
    let mut named = url::Url::parse(&server.url()).unwrap();
    named.set_path("clocks");
    the_databases_clock_jumps(named.as_str(), |seconds| clocks::set(&file, seconds).unwrap());
}

/// A file in a folder that the server's user may look into.
fn for_all(folder: &tempfile::TempDir) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    folder.path().join("clock")
}

/// Whoever is stopped in the middle of a write to SQLite keeps all others out for as long.
fn stop_between_writes(worker: &Running, home: &Home) {
    loop {
        worker.signal(Signal::STOP);
        if !matches!(home.database, Database::Sqlite) || scratch::takes_writes(&home.path("postrider.db")) {
            return;
        }
        worker.signal(Signal::CONT);
    }
}

/// A machine that slept for a month counts more time since its boot than it has been awake; another was booted just now.
/// Leases are measured by that clock, and no two of them agree.
fn machines_that_slept(database: Database) {
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let mut scene = Scene::on(database, "");
    scene.enqueue(MESSAGES);
    let start = |seconds: i64| {
        let words = clocks::booted(seconds);
        let off =
            clocks::time_since_boot_of(&words).unwrap() - clocks::time_since_boot_of(&["env".to_owned()]).unwrap();
        assert!((seconds - 5..=seconds + 5).contains(&off), "it believes it: {off} s instead of {seconds}");
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        scene.home.start_below(&words, &[], &["worker", "--lane", "fleet"])
    };
    let workers = [start(30 * 24 * HOUR), start(-30), start(0)];
    assert_eq!(scene.is_settled(Duration::from_secs(60), &url(&scene.home)), 0, "no lease seemed to have run out");
    // Whoever is stopped for longer than a lease sees it by the same clock, wherever that began.
    let asleep = &workers[0];
    scene.enqueue(MESSAGES);
    let before = scene.receiver.count();
    wait_until("it is in the middle", || scene.receiver.count() > before + MESSAGES / 10);
    stop_between_writes(asleep, &scene.home);
    wait_until("the others have done the rest", || live(&scene.home) == 0);
    asleep.signal(Signal::CONT);
    scene.is_settled(Duration::from_secs(60), &url(&scene.home));
    for worker in workers {
        worker.signal(Signal::TERM);
        worker.ends_within(Duration::from_secs(30)).done();
    }
    scene.home.is_healthy();
}

#[test]
fn row_9_postgres_machines_that_slept() {
    machines_that_slept(Database::postgres());
}

#[test]
fn row_9_sqlite_machines_that_slept() {
    machines_that_slept(Database::sqlite());
}
