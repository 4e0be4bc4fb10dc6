//! Everything at once: servers and workers in folders of their own on one database, while they are killed, paused and
//! stopped, while strangers hold rows locked, while the network and the database fail and operators pause and resume. Then
//! it heals, everything ends, and receivers' books and the rows are judged. `make soak MINUTES=…` lets it go on.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proving::history::{Deliveries, Enqueued, History, Limits, Rows, State, What};
use proving::kit::{Fleet, Session};
use proving::proxy::{Action, At, Direction, Fault, Proxy};
use proving::receiver::{Answer, Receiver, Request};
use proving::servers::{MariaDb, Postgres};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::api::try_exchange;
use crate::fleet::ONE_FLEET;
use crate::home::wait_long_until;

const LEASE: Duration = Duration::from_secs(3);
/// A message may lose many workers here, and is no poison for that.
const CRASHES: i64 = 1000;
const ATTEMPTS: i64 = 1000;
const SERVERS: usize = 2;
const WORKERS: usize = 3;
/// How long everything may take to end once nothing fails any more.
const HEALING: Duration = Duration::from_secs(180);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---- the database, which may be restarted ----

enum Below {
    File(tempfile::TempDir),
    Postgres(Postgres),
    MariaDb(MariaDb),
}

impl Below {
    /// The URL of an empty database.
    fn url(&self) -> String {
        match self {
            Below::File(folder) => format!("sqlite://{}", folder.path().join("soak.db").display()),
            Below::Postgres(server) => server.url(),
            Below::MariaDb(server) => {
                let mut url = url::Url::parse(&server.url()).unwrap();
                url.set_path("soak");
                url.into()
            }
        }
    }

    /// As after a crash of its machine, but for what the system has in memory.
    fn restart(&mut self) {
        match self {
            Below::File(_) => {}
            Below::Postgres(server) => server.start_again().unwrap(),
            Below::MariaDb(server) => server.start_again().unwrap(),
        }
    }
}

// ---- producers ----

/// What was accepted, by body, and when; and when it arrived first.
#[derive(Default)]
struct Book {
    messages: BTreeMap<String, i64>,
    events: Vec<String>,
    orders: Vec<String>,
    accepted_at: HashMap<String, Instant>,
    arrived_at: HashMap<String, Instant>,
    /// Requests that had no answer, or one that asked to come again.
    again: usize,
    /// What nobody should have been answered.
    wrong: Vec<String>,
}

/// Where the servers listen at the moment.
type Addresses = Arc<Mutex<Vec<Option<String>>>>;

/// Sends one thing after the other, each until it has a definite answer: with its key, that harms nobody.
fn produce(name: usize, addresses: &Addresses, book: &Mutex<Book>, enough: &AtomicBool) {
    for n in 0.. {
        if enough.load(Ordering::Relaxed) {
            return;
        }
        let body = format!("{name}-{n}");
        let (path, headers, sent) = match n % 10 {
            0..7 => ("/v1/outbox/work", vec![("Idempotency-Key", body.as_str())], body.clone()),
            7 | 8 => {
                let event = json!({"event_type": "soak.event", "payload": body, "external_id": body});
                ("/v1/events", vec![("Content-Type", "application/json")], event.to_string())
            }
            _ => {
                let order = json!({"instrument": "ABC", "side": "BUY", "qty": 1, "price": 10, "time_in_force": "GTC"});
                let headers = vec![("Idempotency-Key", body.as_str()), ("Content-Type", "application/json")];
                ("/do/order", headers, order.to_string())
            }
        };
        let answer = until_definite(addresses, path, &headers, sent.as_bytes(), book);
        let mut book = lock(book);
        book.accepted_at.entry(body.clone()).or_insert_with(Instant::now);
        match (n % 10, answer) {
            (0..7, Ok(answer)) => {
                book.messages.insert(body, answer["id"].as_i64().expect("an id"));
            }
            (7 | 8, Ok(_)) => book.events.push(body),
            (_, Ok(_)) => book.orders.push(body),
            (_, Err(refused)) => book.wrong.push(format!("{path} {body}: {refused}")),
        }
        drop(book);
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn until_definite(
    addresses: &Addresses,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
    book: &Mutex<Book>,
) -> Result<Value, String> {
    let begun = Instant::now();
    loop {
        let listening: Vec<String> = lock(addresses).iter().flatten().cloned().collect();
        let address = fastrand::choice(listening);
        let answer = address.map(|address| try_exchange(&address, "POST", path, headers, body));
        match answer {
            Some(Ok(answer)) if (200..300).contains(&answer.status) => return Ok(answer.json()),
            Some(Ok(answer)) if (400..500).contains(&answer.status) && answer.status != 408 && answer.status != 429 => {
                return Err(format!("{} {}", answer.status, answer.body));
            }
            _ => {}
        }
        if begun.elapsed() > HEALING {
            return Err(format!("no definite answer within {HEALING:?}"));
        }
        lock(book).again += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Some fail at first, some take their time, a few longer than a lease.
fn rule(book: Arc<Mutex<Book>>) -> impl Fn(&Request) -> Answer + Send + Sync {
    let failed = Mutex::new(std::collections::HashSet::new());
    move |request| {
        let body = String::from_utf8_lossy(&request.body).trim_matches('"').to_owned();
        let n: usize = body.rsplit('-').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        lock(&book).arrived_at.entry(body.clone()).or_insert_with(Instant::now);
        let fails = n.is_multiple_of(23) && lock(&failed).insert(body);
        let after = match n % 200 {
            11 => LEASE + Duration::from_secs(1),
            m if m % 20 == 3 => Duration::from_millis(400),
            _ => Duration::from_millis(5),
        };
        Answer { status: if fails { 503 } else { 200 }, after }
    }
}

// ---- what goes wrong ----

struct Soak {
    fleet: Fleet,
    /// Rows that strangers hold, and until when.
    held: Vec<(Instant, Session)>,
    /// Members that are paused, and until when.
    paused: Vec<(Instant, usize)>,
    counts: BTreeMap<&'static str, usize>,
    /// What the proxy does at the message it waits for.
    armed: Option<&'static str>,
    below: Below,
    proxy: Option<Proxy>,
    runtime: Runtime,
    addresses: Addresses,
    restarted_at: Instant,
}

impl Soak {
    fn members(&self) -> std::ops::Range<usize> {
        0..SERVERS + WORKERS
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Whoever has ended (by itself, when it began without a database) begins again; and where servers listen now.
    fn tend(&mut self) {
        let now = Instant::now();
        for n in self.members() {
            if self.fleet.has_ended(n) {
                self.fleet.restart(n);
            }
        }
        let woken: Vec<usize> = self.paused.extract_if(.., |(until, _)| *until <= now).map(|(_, n)| n).collect();
        woken.into_iter().for_each(|n| self.fleet.signal(n, Signal::CONT));
        self.held.retain(|(until, _)| *until > now);
        *lock(&self.addresses) = (0..SERVERS).map(|n| self.fleet.listens(n)).collect();
    }

    fn awake(&self) -> Vec<usize> {
        self.members().filter(|n| self.paused.iter().all(|(_, paused)| paused != n)).collect()
    }

    fn one_goes_wrong(&mut self) {
        let Some(member) = fastrand::choice(self.awake()) else { return };
        match fastrand::u32(0..100) {
            0..25 => {
                self.fleet.signal(member, Signal::KILL);
                self.count("processes killed");
            }
            25..40 if self.paused.len() < 2 => {
                self.fleet.signal(member, Signal::STOP);
                let longer = Duration::from_millis(fastrand::u64(100..2 * LEASE.as_millis() as u64));
                self.paused.push((Instant::now() + longer, member));
                self.count("processes paused");
            }
            40..50 => {
                self.fleet.signal(member, Signal::TERM);
                self.count("processes told to stop");
            }
            50..70 => self.somebody_locks(),
            70..90 => self.the_network_fails(),
            90..94 if self.restarted_at.elapsed() > Duration::from_secs(10) => self.the_database_restarts(),
            _ => self.an_operator_changes_something(),
        }
    }

    fn somebody_locks(&mut self) {
        let url = self.below.url();
        let (rows, longest) = if matches!(self.below, Below::File(_)) {
            ("nothing else can be locked", LEASE / 3) // it is the whole file
        } else {
            let rows = [
                "outbox WHERE id = (SELECT * FROM (SELECT min(id) FROM outbox) AS first)",
                "webhook_delivery_sagas WHERE id = (SELECT * FROM (SELECT max(id) FROM webhook_delivery_sagas) AS last)",
                "subscriptions WHERE id = 1",
                "idempo_ledger WHERE status = 'in_progress' LIMIT 1",
                "subscription_gates WHERE subscription_id = 1",
            ];
            (fastrand::choice(rows).unwrap_or(rows[0]), LEASE * 2)
        };
        let until = Instant::now() + longest.mul_f64(fastrand::f64());
        // It may have to wait for us, or not get it at all.
        let session = self.runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(2), async {
                let mut session = Session::to(&url).await;
                let sqlite = matches!(session, Session::Sqlite(_));
                session.run(if sqlite { "BEGIN IMMEDIATE" } else { "BEGIN" }).await.ok()?;
                let locks =
                    if sqlite { vec![] } else { session.texts(&format!("SELECT 'x' FROM {rows} FOR UPDATE")).await };
                (sqlite || !locks.is_empty()).then_some(session)
            })
            .await
        });
        if let Ok(Some(session)) = session {
            self.held.push((until, session));
            self.count("rows locked by strangers");
        }
    }

    fn the_network_fails(&mut self) {
        let Some(proxy) = &self.proxy else { return };
        let direction = fastrand::choice([Direction::ToServer, Direction::ToClient]).expect("two");
        let actions = Action::all(LEASE.mul_f64(fastrand::f64())).into_iter().filter(|action| action.fits(direction));
        let action = fastrand::choice(actions.collect::<Vec<_>>()).expect("some fit");
        let was_reached = proxy.fired().is_some();
        if was_reached {
            proxy.release();
        }
        proxy.arm(Some(Fault { direction, at: At::Nth(fastrand::usize(1..40)), action }));
        let before = self.armed.replace(match action {
            Action::CutBefore | Action::CutAfter => "connections to the database cut",
            Action::Delay(_) => "its answers or our requests delayed",
            Action::Swallow => "its answers swallowed",
            Action::HalfOpen => "connections left half-open",
            Action::Terminate => "sessions terminated",
        });
        if let Some(what) = before.filter(|_| was_reached) {
            self.count(what);
        }
    }

    fn the_database_restarts(&mut self) {
        if matches!(self.below, Below::File(_)) {
            return;
        }
        self.held.clear();
        self.below.restart();
        self.restarted_at = Instant::now();
        self.count("restarts of the database");
    }

    /// In a thread of its own: whoever asks a server that is paused then waits, and nobody else.
    fn an_operator_changes_something(&mut self) {
        let awake = |n: &usize| self.paused.iter().all(|(_, paused)| paused != n);
        let Some(n) = (0..SERVERS).find(awake) else { return };
        let Some(address) = lock(&self.addresses)[n].clone() else { return };
        let what = fastrand::choice(["lanes/work", "subscriptions/1"]).expect("two");
        let pause = Duration::from_millis(fastrand::u64(0..2000));
        std::thread::spawn(move || {
            // What is lost is lost; everything is resumed at the end.
            let ask = |verb| try_exchange(&address, "POST", &format!("/v1/{what}/{verb}"), &[], b"");
            let _ = ask("pause");
            std::thread::sleep(pause);
            let _ = ask("resume");
        });
        self.count("pauses and resumes by operators");
    }

    /// Nothing fails any more, and everybody is there.
    fn heal(&mut self) {
        self.held.clear();
        if let Some(proxy) = &self.proxy {
            proxy.release();
            proxy.arm(None);
        }
        for (_, n) in std::mem::take(&mut self.paused) {
            self.fleet.signal(n, Signal::CONT);
        }
        wait_long_until("everybody is there again, and nothing is paused", HEALING, || {
            self.tend();
            let addresses = lock(&self.addresses).clone();
            let Some(Some(address)) = addresses.first() else { return false };
            let resumed = ["/v1/lanes/work/resume", "/v1/subscriptions/1/resume"].map(|path| {
                try_exchange(address, "POST", path, &[], b"").is_ok_and(|answer| (200..300).contains(&answer.status))
            });
            addresses.iter().all(Option::is_some) && resumed == [true, true]
        });
    }
}

// ---- a run, and what is said of it ----

fn config(folder: &std::path::Path, receiver: &Receiver, hooks: bool) -> String {
    let listen = if hooks { "listen = \"127.0.0.1:0\"\n" } else { "" };
    let (lease, key) = (LEASE.as_secs(), folder.join("postrider.key"));
    format!(
        "{listen}[outbox]\nlock_lease_sec = {lease}\npoll_interval_sec = 0.1\nmax_crashes = {CRASHES}\nmax_attempts = {ATTEMPTS}\n\
         backoff_sec = [1]\ndrain_timeout_sec = 8\n[lane.work]\ncourier = \"http\"\nurl = \"{}\"\ntimeout_ms = 20000\n\
         concurrency = 16\nbatch = 32\n[lane.webhooks]\nlock_lease_sec = {lease}\n[orders]\nadapter = \"paper\"\n\
         [webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\nbase_delay_sec = 0.5\nmax_retry_limit = 1000\n\
         [secrets]\nkey = \"file:{}\"\n",
        receiver.url(),
        key.display()
    )
}

fn soak(name: &str, below: Below) {
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let minutes: f64 =
        std::env::var("POSTRIDER_SOAK_MINUTES").map_or(0.25, |n| n.parse().expect("a number of minutes"));
    let seed = fastrand::u64(..);
    fastrand::seed(seed);
    println!("{name}: seed {seed}");
    let runtime = Runtime::new().unwrap();
    if let Below::MariaDb(server) = &below {
        crate::scratch::on_mysql(&server.url(), "CREATE DATABASE soak");
    }
    let url = below.url();
    let proxy = (!url.starts_with("sqlite")).then(|| runtime.block_on(Proxy::start(&url)).unwrap());
    let (book, hooked) = (Arc::new(Mutex::new(Book::default())), Arc::new(Mutex::new(Book::default())));
    let receiver = runtime.block_on(Receiver::start(rule(book.clone()))).unwrap();
    let hooks = runtime.block_on(Receiver::start(rule(hooked.clone()))).unwrap();
    let shared = tempfile::tempdir().unwrap();
    let mut fleet = Fleet::new(env!("CARGO_BIN_EXE_postrider"), proxy.as_ref().map_or(url.as_str(), Proxy::url));
    for _ in 0..SERVERS {
        let n = fleet.start(&config(shared.path(), &receiver, true), &["serve"]);
        fleet.address(n);
    }
    for _ in 0..WORKERS {
        fleet.start(&config(shared.path(), &receiver, false), &["worker"]);
    }
    let subscription = json!({"url": hooks.url(), "event_types": ["soak.*"]});
    assert_eq!(fleet.ask(0, "POST", "/v1/subscriptions", Some(subscription)).0, 201);
    let mut soak = Soak {
        fleet,
        held: vec![],
        paused: vec![],
        counts: BTreeMap::new(),
        armed: None,
        below,
        proxy,
        runtime,
        addresses: Arc::default(),
        restarted_at: Instant::now(),
    };
    soak.tend();
    let enough = Arc::new(AtomicBool::new(false));
    let producers: Vec<JoinHandle<()>> = (0..2)
        .map(|name| {
            let (addresses, book, enough) = (soak.addresses.clone(), book.clone(), enough.clone());
            std::thread::spawn(move || produce(name, &addresses, &book, &enough))
        })
        .collect();
    let begun = Instant::now();
    while begun.elapsed().as_secs_f64() < 60.0 * minutes {
        std::thread::sleep(Duration::from_millis(fastrand::u64(20..500)));
        soak.one_goes_wrong();
        soak.tend();
    }
    let lasted = begun.elapsed();
    enough.store(true, Ordering::Relaxed);
    soak.heal();
    producers.into_iter().for_each(|producer| producer.join().unwrap());
    let healed = Instant::now();
    wait_long_until("everything has ended", HEALING, || {
        soak.tend();
        let left =
            ["outbox", "webhook_results", "webhook_delivery_sagas WHERE status NOT IN ('Completed', 'DeadLettered')"];
        soak.runtime.block_on(async {
            let mut session = Session::to(&url).await;
            for left in left {
                if session.number(&format!("SELECT COUNT(*) FROM {left}")).await > 0 {
                    return false;
                }
            }
            true
        })
    });
    println!("{name}: {:.1?} of everything at once, {:.1?} to heal", lasted, healed.elapsed());
    let happened: usize = soak.counts.values().sum();
    assert!(happened >= 10 && soak.counts.contains_key("processes killed"), "nothing went wrong: {:?}", soak.counts);
    for n in 0..SERVERS {
        soak.fleet.is_healthy(n);
    }
    let report = judge(name, &soak, &url, [&receiver, &hooks], [&lock(&book), &lock(&hooked)]);
    println!("{report}");
    if let Ok(folder) = std::env::var("POSTRIDER_SOAK_REPORT") {
        std::fs::write(format!("{folder}/{name}.md"), report).unwrap();
    }
}

fn judge(name: &str, soak: &Soak, url: &str, [receiver, hooks]: [&Receiver; 2], [book, hooked]: [&Book; 2]) -> String {
    assert!(book.wrong.is_empty(), "{} were refused: {:?}", book.wrong.len(), &book.wrong[..book.wrong.len().min(5)]);
    let (rows, deliveries, ledger, executed) = soak.runtime.block_on(async {
        let mut session = Session::to(url).await;
        let rows = Rows::of_lane(&mut session, "work").await;
        let deliveries = Deliveries::read(&mut session).await;
        let ledger = session.texts("SELECT concat_ws('|', idempotency_key, status) FROM idempo_ledger").await;
        let executed = session.texts("SELECT idempotency_key FROM paper_executions").await;
        (rows, deliveries, ledger, executed)
    });
    // Messages: the independent judge of histories.
    assert!(rows.messages.iter().all(|row| row.state == State::Sent), "every message was sent");
    assert_eq!(rows.messages.len(), book.messages.len(), "what was accepted is there, and nothing else");
    let enqueued = book
        .messages
        .iter()
        .map(|(body, id)| Enqueued { key: Some(body.clone()), ..Enqueued::accepted(*id, body.clone()) });
    let limits = Some(Limits { attempts: ATTEMPTS, crashes: CRASHES });
    let history = History { enqueued: enqueued.collect(), book: receiver.log(), rows: rows.clone(), limits };
    let judgement = history.judge();
    judgement.is_clean();
    // Webhooks: one completed delivery for each event, and it arrived.
    deliveries.judge().is_clean();
    assert_eq!(deliveries.sagas.len(), book.events.len(), "one delivery for each event");
    assert!(deliveries.sagas.iter().all(|(_, status, _)| status == "Completed"), "all of them completed");
    let mut arrived: HashMap<String, usize> = HashMap::new();
    for request in hooks.log().iter().filter(|request| request.answered == 200) {
        *arrived.entry(String::from_utf8_lossy(&request.body).trim_matches('"').to_owned()).or_default() += 1;
    }
    assert!(book.events.iter().all(|event| arrived.contains_key(event)), "each event arrived");
    // Orders: succeeded, and executed once.
    assert_eq!(ledger.len(), book.orders.len(), "one entry of the ledger for each order");
    assert!(ledger.iter().all(|line| line.ends_with("|succeeded")), "all orders succeeded: {ledger:?}");
    let once: std::collections::BTreeSet<&String> = executed.iter().collect();
    assert_eq!((once.len(), executed.len()), (ledger.len(), ledger.len()), "each was executed once");

    let mut report = format!("## {name}\n\n| | |\n| --- | --- |\n");
    for (what, count) in &soak.counts {
        let _ = writeln!(report, "| {what} | {count} |");
    }
    if let Below::File(folder) = &soak.below {
        crate::scratch::is_whole(&folder.path().join("soak.db"));
    }
    let twice = arrived.values().filter(|times| **times > 1).count();
    // Taken more often than the one attempt that succeeded: an attempt before it was cut off, timed out, or was broken off.
    let requests = |receiver: &Receiver| receiver.log().len();
    let _ = writeln!(report, "| messages, sent more than once | {}, {} |", book.messages.len(), judgement.duplicates);
    let _ = writeln!(report, "| events, delivered more than once | {}, {twice} |", book.events.len());
    let _ = writeln!(report, "| orders, executed more than once | {}, 0 |", book.orders.len());
    let _ = writeln!(
        report,
        "| requests that receivers had, of messages and of events | {}, {} |",
        requests(receiver),
        requests(hooks)
    );
    let _ = writeln!(report, "| requests that had to be made again | {} |", book.again);
    for (what, accepted, arrivals) in [
        ("messages", &book.messages.keys().collect::<Vec<_>>(), &book.arrived_at),
        ("events", &book.events.iter().collect(), &hooked.arrived_at),
    ] {
        let mut times: Vec<Duration> = accepted
            .iter()
            .filter_map(|body| Some(arrivals.get(*body)?.saturating_duration_since(*book.accepted_at.get(*body)?)))
            .collect();
        times.sort();
        let at = |part: f64| times.get(((times.len() as f64 * part) as usize).min(times.len().saturating_sub(1)));
        let [half, most, worst] = [at(0.5), at(0.99), at(1.0)].map(|time| time.copied().unwrap_or_default());
        let _ = writeln!(
            report,
            "| {what}: accepted to first arrival, p50, p99, worst | {half:.1?}, {most:.1?}, {worst:.1?} |"
        );
    }
    let _ = writeln!(report, "\nMessages that were taken more than once, and why:\n");
    let requests = receiver.by_message();
    for row in &rows.messages {
        let taken: Vec<i64> =
            requests.get(&row.id).into_iter().flatten().filter(|r| r.answered == 200).map(|r| r.token).collect();
        if taken.len() > 1 {
            let steps = rows.steps.iter().filter(|step| step.id == row.id);
            let word = |what: What| match what {
                What::Takeover => "taken over under",
                What::Failed => "failed or unknown under",
                What::BrokenOff => "broken off by a stop under",
            };
            let why: Vec<String> = steps.map(|step| format!("{} {}", word(step.what), step.lease_token)).collect();
            let _ = writeln!(report, "- {}: taken under {taken:?}; {}", row.id, why.join(", "));
        }
    }
    report
}

#[test]
fn sqlite_everything_at_once() {
    soak("SQLite", Below::File(tempfile::tempdir().unwrap()));
}

#[test]
fn postgres_everything_at_once() {
    soak("PostgreSQL", Below::Postgres(Postgres::start().unwrap()));
}

#[test]
fn mysql_everything_at_once() {
    soak("MariaDB", Below::MariaDb(MariaDb::start().unwrap()));
}
