//! Everything at once: servers and workers in folders of their own on one database, while they are killed, paused and
//! stopped, while strangers hold rows locked, while the network, the database and OpenMemory fail, hosts' clocks jump and
//! operators pause and resume. Then it heals, everything ends, and receivers' books and the rows are judged; for whatever
//! was taken twice there is a reason. `make soak MINUTES=…` lets it go on.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proving::clocks;
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
/// How long a process that is told to stop lets what it has begun go on.
const DRAIN: Duration = Duration::from_secs(8);
/// A message may lose many workers here, and is no poison for that.
const CRASHES: i64 = 1000;
const ATTEMPTS: i64 = 1000;
const SERVERS: usize = 2;
const WORKERS: usize = 3;
/// What OpenMemory is asked in vain may be applied as long as this afterwards: it is never paused for so long.
const DOUBT: Duration = Duration::from_secs(8);
/// The members whose host has a clock of its own.
const CLOCKLESS: [usize; 2] = [1, SERVERS];
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
    memories: Vec<String>,
    accepted_at: HashMap<String, Instant>,
    arrived_at: HashMap<String, Instant>,
    /// When it was taken, each time.
    taken_at: HashMap<String, Vec<Instant>>,
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
            0..6 => ("/v1/outbox/work", vec![("Idempotency-Key", body.as_str())], body.clone()),
            6 => {
                let memory = json!({"payload_md": format!("remember {body}"), "target_space": "team:soak"});
                ("/memory/store", vec![("Content-Type", "application/json")], memory.to_string())
            }
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
            (0..6, Ok(answer)) => {
                book.messages.insert(body, answer["id"].as_i64().expect("an id"));
            }
            (6, Ok(_)) => book.memories.push(format!("remember {body}")),
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
        let fails = n.is_multiple_of(23) && lock(&failed).insert(body.clone());
        let mut book = lock(&book);
        book.arrived_at.entry(body.clone()).or_insert_with(Instant::now);
        if !fails {
            book.taken_at.entry(body).or_default().push(Instant::now());
        }
        drop(book);
        let after = match n % 200 {
            11 => LEASE + Duration::from_secs(1),
            m if m % 20 == 3 => Duration::from_millis(400),
            _ => Duration::from_millis(5),
        };
        Answer { status: if fails { 503 } else { 200 }, after }
    }
}

// ---- what goes wrong ----

/// Something that went wrong, from when until when.
struct Trouble {
    from: Instant,
    until: Instant,
    what: &'static str,
    whose: Option<usize>,
}

struct Soak {
    fleet: Fleet,
    /// The number of OpenMemory's process in the fleet.
    memory: usize,
    /// Where the clocks of some hosts stand.
    clocks: Vec<std::path::PathBuf>,
    troubles: Vec<Trouble>,
    /// Rows that strangers hold, and until when.
    held: Vec<(Instant, Session)>,
    /// Members that are paused, and until when.
    paused: Vec<(Instant, usize)>,
    counts: BTreeMap<&'static str, usize>,
    /// What the proxy does at the message it waits for, and since when it waits.
    armed: Option<(&'static str, Instant)>,
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

    /// It went wrong now, and does for so long.
    fn count(&mut self, what: &'static str, whose: Option<usize>, lasts: Duration) {
        let from = Instant::now();
        self.troubles.push(Trouble { from, until: from + lasts, what, whose });
        *self.counts.entry(what).or_default() += 1;
    }

    fn with_memory(&self) -> std::ops::RangeInclusive<usize> {
        0..=self.memory
    }

    /// Whoever has ended (by itself, when it began without a database) begins again; and where servers listen now.
    fn tend(&mut self) {
        let now = Instant::now();
        for n in self.with_memory() {
            if self.fleet.has_ended(n) {
                self.fleet.restart(n);
                let of_it = self.troubles.iter_mut().filter(|trouble| trouble.whose == Some(n));
                of_it.for_each(|trouble| trouble.until = trouble.until.min(now));
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
            0..22 => {
                self.fleet.signal(member, Signal::KILL);
                self.count("processes killed", Some(member), Duration::ZERO);
            }
            22..36 if self.paused.len() < 2 => self.pause(member, "processes paused"),
            36..46 => {
                self.fleet.signal(member, Signal::TERM);
                self.count("processes told to stop", Some(member), DRAIN + Duration::from_secs(1));
            }
            46..64 => self.somebody_locks(),
            64..80 => self.the_network_fails(),
            80..84 => self.a_clock_jumps(),
            84..90 => self.openmemory_fails(),
            90..94 if self.restarted_at.elapsed() > Duration::from_secs(10) => self.the_database_restarts(),
            _ => self.an_operator_changes_something(),
        }
    }

    fn pause(&mut self, member: usize, what: &'static str) {
        self.fleet.signal(member, Signal::STOP);
        let longer = Duration::from_millis(fastrand::u64(100..2 * LEASE.as_millis() as u64));
        self.paused.push((Instant::now() + longer, member));
        self.count(what, Some(member), longer);
    }

    fn openmemory_fails(&mut self) {
        if self.paused.iter().any(|(_, paused)| *paused == self.memory) {
            return;
        }
        if fastrand::bool() {
            self.fleet.signal(self.memory, Signal::KILL);
            self.count("OpenMemory killed", None, Duration::ZERO);
        } else {
            self.pause(self.memory, "OpenMemory paused");
        }
    }

    fn a_clock_jumps(&mut self) {
        if let Some(clock) = fastrand::choice(&self.clocks) {
            clocks::set(clock, fastrand::i64(-7200..7200)).expect("a file");
            self.count("jumps of a host's clock", None, Duration::ZERO);
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
            self.count("rows locked by strangers", None, until.saturating_duration_since(Instant::now()));
        }
    }

    fn the_network_fails(&mut self) {
        let Some(proxy) = &self.proxy else { return };
        let direction = fastrand::choice([Direction::ToServer, Direction::ToClient]).expect("two");
        let actions = Action::all(LEASE.mul_f64(fastrand::f64())).into_iter().filter(|action| action.fits(direction));
        let action = fastrand::choice(actions.collect::<Vec<_>>()).expect("some fit");
        let was_reached = proxy.fired().is_some();
        let now = Instant::now();
        if was_reached {
            proxy.release();
        }
        proxy.arm(Some(Fault { direction, at: At::Nth(fastrand::usize(1..40)), action }));
        let what = match action {
            Action::CutBefore | Action::CutAfter => "connections to the database cut",
            Action::Delay(_) => "its answers or our requests delayed",
            Action::Swallow => "its answers swallowed",
            Action::HalfOpen => "connections left half-open",
            Action::Terminate => "sessions terminated",
        };
        if let Some((what, since)) = self.armed.replace((what, now)).filter(|_| was_reached) {
            self.count(what, None, LEASE);
            self.troubles.last_mut().expect("just counted").from = since;
        }
    }

    fn the_database_restarts(&mut self) {
        if matches!(self.below, Below::File(_)) {
            return;
        }
        self.held.clear();
        let from = Instant::now();
        self.below.restart();
        self.restarted_at = Instant::now();
        self.count("restarts of the database", None, LEASE);
        self.troubles.last_mut().expect("just counted").from = from;
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
        self.count("pauses and resumes by operators", None, pause);
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

fn config(folder: &std::path::Path, receiver: &Receiver, memory: &str, hooks: bool) -> String {
    let listen = if hooks { "listen = \"127.0.0.1:0\"\n" } else { "" };
    let (lease, key) = (LEASE.as_secs(), folder.join("postrider.key"));
    let (drain, doubt) = (DRAIN.as_secs(), DOUBT.as_secs());
    format!(
        "{listen}[outbox]\nlock_lease_sec = {lease}\npoll_interval_sec = 0.1\nmax_crashes = {CRASHES}\nmax_attempts = {ATTEMPTS}\n\
         backoff_sec = [1]\ndrain_timeout_sec = {drain}\n[lane.work]\ncourier = \"http\"\nurl = \"{}\"\ntimeout_ms = 20000\n\
         concurrency = 16\nbatch = 32\n[lane.webhooks]\nlock_lease_sec = {lease}\n[orders]\nadapter = \"paper\"\n\
         [webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\nbase_delay_sec = 0.5\nmax_retry_limit = 1000\n\
         [memory]\nurl = \"http://{memory}\"\ntimeout_ms = 500\ndoubt_sec = {doubt}\n\
         breaker = {{ failures = 3, probe_sec = 0.5 }}\n[secrets]\nkey = \"file:{}\"\n",
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
    let memory = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    // SQLite has no clock but its processes', which on one machine is one.
    let clockless: &[usize] = if url.starts_with("sqlite") { &[] } else { &CLOCKLESS };
    let clocks: Vec<_> = clockless.iter().map(|n| shared.path().join(format!("clock-{n}"))).collect();
    for n in 0..SERVERS + WORKERS {
        let serves = n < SERVERS;
        let config = config(shared.path(), &receiver, &memory, serves);
        let clock = clockless.iter().position(|clockless| *clockless == n).map(|which| &clocks[which]);
        let environment = clock.map_or(vec![], |clock| clocks::wall_clock_set_by(clock).unwrap());
        fleet.start_with(&config, &[if serves { "serve" } else { "worker" }], environment);
        if serves {
            fleet.address(n);
        }
    }
    let data = shared.path().join("openmemory.ndjson");
    let args = ["stand-in", "openmemory", "--listen", &memory, "--keep-duplicates", "--data", data.to_str().unwrap()];
    let remembering = fleet.start("", &args);
    let subscription = json!({"url": hooks.url(), "event_types": ["soak.*"]});
    assert_eq!(fleet.ask(0, "POST", "/v1/subscriptions", Some(subscription)).0, 201);
    let mut soak = Soak {
        fleet,
        memory: remembering,
        clocks,
        troubles: vec![],
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
    let remembered = try_exchange(&memory, "GET", "/stand-in", &[], b"").unwrap().json();
    let remembered = remembered["memories"].as_array().expect("a list").iter();
    let remembered = remembered.map(|memory| memory["content"].as_str().expect("a text").to_owned()).collect();
    let report = judge(name, &soak, &url, [&receiver, &hooks], [&lock(&book), &lock(&hooked)], remembered);
    println!("{report}");
    if let Ok(folder) = std::env::var("POSTRIDER_SOAK_REPORT") {
        std::fs::write(format!("{folder}/{name}.md"), report).unwrap();
    }
}

/// Events whose attempts failed though they may have arrived, with the code.
async fn doubtful(session: &mut Session) -> HashMap<String, Vec<String>> {
    let sql = "SELECT concat_ws('|', e.external_id, concat('attempt ', a.attempt, ': ', a.error_code))
               FROM webhook_attempts a JOIN webhook_delivery_sagas s ON s.id = a.saga_id JOIN events e ON e.id = s.event_id
               WHERE a.error_code IS NOT NULL AND a.error_code NOT LIKE 'HTTP%'";
    let mut doubtful: HashMap<String, Vec<String>> = HashMap::new();
    for line in session.texts(sql).await {
        let (event, what) = line.split_once('|').expect("two columns");
        doubtful.entry(event.to_owned()).or_default().push(what.to_owned());
    }
    doubtful
}

/// Of whatever was taken more than once: when, and what went wrong between the first time and the last. That there was
/// something is asserted; jobs of webhooks leave no history in the database that could say more.
fn explained(
    soak: &Soak,
    taken: &HashMap<String, Vec<Instant>>,
    doubtful: &HashMap<String, Vec<String>>,
) -> Vec<String> {
    let Some(began) = soak.troubles.first().map(|trouble| trouble.from) else { return vec![] };
    let at = |time: Instant| format!("{:.1}", time.saturating_duration_since(began).as_secs_f64());
    let mut told = Vec::new();
    for (body, times) in taken.iter().filter(|(_, times)| times.len() > 1) {
        let mut why: Vec<String> = doubtful.get(body).cloned().unwrap_or_default();
        for pair in times.windows(2) {
            let between = |trouble: &&Trouble| trouble.from <= pair[1] && trouble.until >= pair[0];
            why.extend(soak.troubles.iter().filter(between).filter(|trouble| trouble.doubles()).map(|trouble| {
                let whose = trouble.whose.map_or(String::new(), |n| format!(" ({n})"));
                format!("{}{whose} at {}", trouble.what, at(trouble.from))
            }));
        }
        let times: Vec<String> = times.iter().map(|time| at(*time)).collect();
        assert!(!why.is_empty(), "{body} was taken at {times:?} for no reason");
        why.dedup();
        told.push(format!("- {body}: taken at {} s; {}", times.join(", "), why.join(", ")));
    }
    told.sort();
    told
}

impl Trouble {
    /// Can it be why something goes out twice?
    fn doubles(&self) -> bool {
        !self.what.starts_with("OpenMemory") && !self.what.contains("operators") && !self.what.contains("clock")
    }
}

fn judge(
    name: &str,
    soak: &Soak,
    url: &str,
    [receiver, hooks]: [&Receiver; 2],
    [book, hooked]: [&Book; 2],
    remembered: Vec<String>,
) -> String {
    assert!(book.wrong.is_empty(), "{} were refused: {:?}", book.wrong.len(), &book.wrong[..book.wrong.len().min(5)]);
    let (rows, deliveries, ledger, executed, doubtful) = soak.runtime.block_on(async {
        let mut session = Session::to(url).await;
        let rows = Rows::of_lane(&mut session, "work").await;
        let deliveries = Deliveries::read(&mut session).await;
        let ledger = session.texts("SELECT concat_ws('|', idempotency_key, status) FROM idempo_ledger").await;
        let executed = session.texts("SELECT idempotency_key FROM paper_executions").await;
        (rows, deliveries, ledger, executed, doubtful(&mut session).await)
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
    // Memories: each is there, and once, however often OpenMemory was asked in vain.
    let mut kept: BTreeMap<&str, usize> = BTreeMap::new();
    remembered.iter().for_each(|memory| *kept.entry(memory).or_default() += 1);
    let not_once = |memory: &&String| kept.get(memory.as_str()) != Some(&1);
    let wrong: Vec<&String> = book.memories.iter().filter(not_once).collect();
    assert!(wrong.is_empty(), "{} memories are not there once: {:?}", wrong.len(), &wrong[..wrong.len().min(5)]);
    assert_eq!(kept.len(), book.memories.len(), "nothing else is remembered");

    let mut report = format!("## {name}\n\n| | |\n| --- | --- |\n");
    for (what, count) in &soak.counts {
        let _ = writeln!(report, "| {what} | {count} |");
    }
    if let Below::File(folder) = &soak.below {
        crate::scratch::is_whole(&folder.path().join("soak.db"));
    }
    let twice = explained(soak, &hooked.taken_at, &doubtful);
    let requests = |receiver: &Receiver| receiver.log().len();
    let _ = writeln!(report, "| messages, sent more than once | {}, {} |", book.messages.len(), judgement.duplicates);
    let _ = writeln!(report, "| events, delivered more than once | {}, {} |", book.events.len(), twice.len());
    let _ = writeln!(report, "| orders, executed more than once | {}, 0 |", book.orders.len());
    let _ = writeln!(report, "| memories, written more than once | {}, 0 |", book.memories.len());
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
    let _ =
        writeln!(report, "\nEvents that were taken more than once, and what went wrong in between (seconds; whose):\n");
    let _ = writeln!(report, "{}", twice.join("\n"));
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
