//! The sweep: an operation is run again and again, and each time something else goes wrong on the wire: every message, in
//! both directions, with every kind of fault. After each one a direct look at the database says whether the answer was
//! honest, and the next operation whether anything was left behind.

// Real servers take real time.
#![allow(clippy::disallowed_methods)]

mod judge;
mod report;

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider::error::{Error, Kind, Result};
use postrider::store::{Mode, transact};
use postrider::tx::{Row, Value};
use postrider::{Options, Outbox};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinSet;

use crate::proxy::{Action, At, Direction, Fault, Proxy, Seen, Wire};
pub use judge::{Answer, Look, Part, Told, judge};
pub use report::Report;

/// What an operation may take; short, so that a sweep is soon done.
pub const DEADLINE: Duration = Duration::from_secs(1);
/// Past the deadline, and before the database ends a session that is silent.
pub const DELAY: Duration = Duration::from_millis(1500);
/// The shortest lease in use; a third of it is how long the database bears a silent transaction.
const LEASE: Duration = Duration::from_secs(6);
const SILENCE: Duration = Duration::from_secs(2);
/// The same for a migration.
const MIGRATION_SILENCE: Duration = Duration::from_secs(5);
/// Past all that, for a machine that has other things to do.
const GRACE: Duration = Duration::from_secs(2);
/// Whatever has not answered by then never will.
const HANGS: Duration = Duration::from_secs(20);
/// Faults that one handle lives through, one after the other.
const CHUNK: usize = 10;
/// Cases at the same time where one database is enough; most of them wait.
pub const SIDE_BY_SIDE: usize = 32;
/// A run without a fault is tried so often, on a machine that has other things to do.
const TRIES: usize = 10;
/// And not at once again.
const PAUSE: Duration = Duration::from_millis(500);
/// The short form takes one fault of so many.
const SHORT: usize = 23;

/// How the handle under test is opened: it fits the sweep's patience, and has so few connections that a lost one is missed.
fn impatient() -> Options {
    Options { connections: 2, deadline: DEADLINE, lease: LEASE, notifications: false, migrations: vec![] }
}

/// An operation, and how to stage it.
#[async_trait]
pub trait Subject: Send + Sync + 'static {
    /// What it is done with.
    type Handle: Send + Sync;
    /// What was prepared for one run.
    type Scene: Send + Sync;

    fn name(&self) -> String;

    /// Opens the database at this URL. `places` are names that belong to nobody else, one for each run: lanes, say.
    async fn open(&self, url: &str, options: Options, places: &[String]) -> Self::Handle;

    fn outbox<'a>(&self, handle: &'a Self::Handle) -> &'a Outbox;

    /// Makes what the operation needs, by a handle that nothing is wrong with.
    async fn prepare(&self, near: &Self::Handle, place: &str) -> Self::Scene;

    /// The operation. Answers per part of [`Look`], or once for all.
    async fn run(&self, far: &Self::Handle, scene: &Self::Scene) -> Result<Vec<Told>>;

    /// The same as the product does it when the answer was lost. `None` if it never does.
    async fn again(&self, far: &Self::Handle, scene: &Self::Scene) -> Option<Result<Vec<Told>>>;

    /// What the database holds of it.
    async fn look(&self, near: &Self::Handle, scene: &Self::Scene) -> Look;

    /// A new handle for each run: its connection is made under the fault, too.
    fn is_cold(&self) -> bool {
        false
    }
}

/// One operation under one fault.
pub struct Case {
    wire: Wire,
    operation: String,
    fault: Fault,
    /// What happened, once it did.
    what: Option<String>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.what.clone().unwrap_or_else(|| self.fault.to_string());
        write!(f, "[{}] {}: {what}", self.wire, self.operation)
    }
}

/// Which part of the sweep is wanted, by the environment: `POSTRIDER_SWEEP=all` for everything, `POSTRIDER_SWEEP_SEED` for
/// another part, `POSTRIDER_SWEEP_ONLY` for operations whose name contains a word.
pub struct Selection {
    seed: Option<usize>,
    only: Option<String>,
}

impl Selection {
    pub fn from_environment() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let seed = variable("POSTRIDER_SWEEP_SEED").and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| fastrand::usize(..SHORT));
        let all = variable("POSTRIDER_SWEEP").is_some_and(|value| value == "all");
        Selection { seed: (!all).then_some(seed), only: variable("POSTRIDER_SWEEP_ONLY") }
    }

    fn takes(&self, number: usize) -> bool {
        self.seed.is_none_or(|seed| number % SHORT == seed % SHORT)
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            None => f.write_str("the whole sweep"),
            Some(seed) => write!(f, "one fault of {SHORT} (POSTRIDER_SWEEP_SEED={})", seed % SHORT),
        }
    }
}

/// Where cases run side by side: one at a time on each of these URLs, which may be one database many times over if cases
/// leave each other alone there.
struct Grounds {
    free: Mutex<Vec<String>>,
    count: Semaphore,
}

impl Grounds {
    async fn take(&self) -> (SemaphorePermit<'_>, String) {
        let permit = self.count.acquire().await.expect("it is never closed");
        let url = self.free().pop();
        (permit, url.expect("as many as there are permits"))
    }

    fn give_back(&self, (_permit, url): (SemaphorePermit<'_>, String)) {
        self.free().push(url);
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.free.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Sweeps these operations on these databases, prints the report, and fails if anything was violated.
pub async fn sweep<S: Subject>(title: &str, urls: Vec<String>, subjects: Vec<S>, selection: &Selection) {
    let begun = Instant::now();
    let wanted = |subject: &S| selection.only.as_ref().is_none_or(|only| subject.name().contains(only.as_str()));
    let subjects: Vec<Arc<S>> = subjects.into_iter().filter(wanted).map(Arc::new).collect();
    let report = Arc::new(Report::default());
    let grounds = Arc::new(Grounds { count: Semaphore::new(urls.len()), free: Mutex::new(urls) });
    let plan = plan(&grounds, &subjects, selection, &report).await;
    let mut running = JoinSet::new();
    for (subject, faults) in plan {
        for part in faults.chunks(CHUNK) {
            let (grounds, report) = (grounds.clone(), report.clone());
            let (subject, faults) = (subject.clone(), part.to_vec());
            running.spawn(async move {
                let ground = grounds.take().await;
                let mut stage = Stage::open(&*subject, &ground.1, faults.len()).await;
                for fault in faults {
                    stage.case(fault, &report).await;
                }
                let open = stage.proxy.in_transaction().await;
                if !open.is_empty() {
                    report.violated(&subject.name(), &format!("sessions in a transaction that nobody uses: {open:?}"));
                }
                drop(stage);
                grounds.give_back(ground);
            });
        }
    }
    while let Some(ended) = running.join_next().await {
        ended.expect("a part of the sweep");
    }
    println!("{title}: {selection}, {:.0} s\n{report}", begun.elapsed().as_secs_f32());
    assert_eq!(report.violations(), 0, "{title}: {selection}\n{report}");
    let (faults, unreached) = (report.faults(), report.unreached());
    assert!(faults > unreached * 9, "{unreached} of {faults} faults were not reached: the operations are not steady");
}

/// Counts each operation's messages, and makes of them the faults to inject.
async fn plan<S: Subject>(
    grounds: &Arc<Grounds>,
    subjects: &[Arc<S>],
    selection: &Selection,
    report: &Arc<Report>,
) -> Vec<(Arc<S>, Vec<Fault>)> {
    let mut counting = JoinSet::new();
    for (n, subject) in subjects.iter().cloned().enumerate() {
        let (grounds, report) = (grounds.clone(), report.clone());
        counting.spawn(async move {
            let ground = grounds.take().await;
            let messages = Stage::open(&*subject, &ground.1, 0).await.messages;
            grounds.give_back(ground);
            report.counted(&subject.name(), messages);
            (n, messages)
        });
    }
    let mut counts = counting.join_all().await;
    counts.sort_unstable();
    let mut number = 0;
    let mut plan = Vec::new();
    for (n, messages) in counts {
        let mut faults = every_fault(messages);
        faults.retain(|_| {
            number += 1;
            selection.takes(number)
        });
        plan.push((subjects[n].clone(), faults));
    }
    plan
}

fn every_fault(messages: [usize; 2]) -> Vec<Fault> {
    let mut faults = Vec::new();
    for direction in [Direction::ToServer, Direction::ToClient] {
        for n in 1..=messages[direction as usize] {
            let fitting = Action::all(DELAY).into_iter().filter(|action| action.fits(direction));
            faults.extend(fitting.map(|action| Fault { direction, at: At::Nth(n), action }));
        }
    }
    faults
}

/// One handle through the proxy and one beside it, and what the operation leads to when nothing goes wrong.
struct Stage<'a, S: Subject> {
    subject: &'a S,
    proxy: Proxy,
    near: S::Handle,
    far: S::Handle,
    all_places: Vec<String>,
    /// Those no run has had yet.
    places: Vec<String>,
    /// After the operation, and after it was asked for again.
    applied: Vec<Vec<String>>,
    settled: Vec<Vec<String>>,
    messages: [usize; 2],
}

impl<'a, S: Subject> Stage<'a, S> {
    /// Runs it twice without a fault: the first makes the connection and prepares its statements, the second is counted.
    async fn open(subject: &'a S, url: &str, cases: usize) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let stage = NUMBER.fetch_add(1, Ordering::Relaxed);
        let places: Vec<String> = (0..cases + 2 * TRIES).map(|case| format!("s{stage}-{case}")).collect();
        let proxy = Proxy::start(url).await.expect("a proxy");
        let patient = Options { notifications: false, ..Options::default() };
        let near = subject.open(url, patient, &places).await;
        let far = subject.open(proxy.url(), impatient(), &places).await;
        let (all_places, applied, settled, messages) = (places.clone(), vec![], vec![], [0, 0]);
        let mut stage = Stage { subject, proxy, near, far, all_places, places, applied, settled, messages };
        stage.without_fault().await;
        stage.reopen_if_cold().await;
        stage.without_fault().await;
        stage
    }

    async fn reopen_if_cold(&mut self) {
        if self.subject.is_cold() {
            self.far = self.subject.open(self.proxy.url(), impatient(), &self.all_places).await;
        }
    }

    fn place(&mut self) -> String {
        self.places.pop().expect("a place for each run")
    }

    async fn without_fault(&mut self) {
        let name = self.subject.name();
        let mut last = String::new();
        for _ in 1..TRIES {
            match self.try_without_fault().await {
                Err(error) if matches!(error.kind, Kind::Timeout | Kind::Overloaded | Kind::Unreachable) => {
                    last = error.to_string();
                    tokio::time::sleep(PAUSE).await;
                }
                done => return done.unwrap_or_else(|error| panic!("{name}, without a fault: {error}")),
            }
        }
        panic!("{name}: not once without trouble: {last}")
    }

    async fn try_without_fault(&mut self) -> Result<()> {
        let (name, place) = (self.subject.name(), self.place());
        let scene = self.subject.prepare(&self.near, &place).await;
        self.proxy.arm(None);
        let told = self.subject.run(&self.far, &scene).await?;
        if told.iter().any(|told| *told != Told::Applied) {
            // Somebody beside us had a row locked for a moment.
            return Err(Error::new(Kind::Overloaded, format!("it told {told:?}")));
        }
        self.messages = [self.proxy.count(Direction::ToServer), self.proxy.count(Direction::ToClient)];
        let look = self.subject.look(&self.near, &scene).await;
        assert!(look.broken.is_empty(), "{name}, without a fault: {:?}", look.broken);
        self.applied = look.shapes();
        self.subject.again(&self.far, &scene).await.transpose()?;
        self.settled = self.subject.look(&self.near, &scene).await.shapes();
        Ok(())
    }

    async fn case(&mut self, fault: Fault, report: &Report) {
        self.reopen_if_cold().await;
        let action = fault.action;
        let mut case = Case { wire: self.proxy.wire(), operation: self.subject.name(), fault, what: None };
        let place = self.place();
        let scene = self.subject.prepare(&self.near, &place).await;
        let before = self.subject.look(&self.near, &scene).await;

        self.proxy.arm(Some(case.fault.clone()));
        let begun = Instant::now();
        let answer = answer_of(tokio::time::timeout(HANGS, self.subject.run(&self.far, &scene)).await);
        let took = begun.elapsed();
        let Some(fired) = self.proxy.fired() else { return report.not_reached() };
        case.what = Some(fired.what);
        report.injected(&case.operation, action.name(), &answer);
        let mut wrong = Vec::new();
        if took > DEADLINE * 2 + GRACE {
            wrong.push(format!("it took {took:?}"));
        }
        let asked = self.proxy.seen().len();
        wrong.extend(self.goes_on(&answer, action, report).await);
        self.proxy.quiet().await;
        wrong.extend(self.lets_go().await);
        if matches!(answer, Answer::Failed { kind: Kind::Timeout, .. }) {
            wrong.extend(self.gave_up(fired.connection, &case.fault, asked).await);
        }
        let after = self.subject.look(&self.near, &scene).await;
        wrong.extend(judge(&answer, &before, &after, &self.applied));
        wrong.extend(self.converges(&scene, &after, report).await);
        self.proxy.release();
        wrong.iter().for_each(|what| report.violated(&case.to_string(), &format!("{what}\n      answer: {answer:?}")));
    }

    /// No poison: the next thing asked of the same handle is answered. A connection that broke while nobody used it is
    /// noticed at its next use, once.
    async fn goes_on(&self, answer: &Answer, action: Action, report: &Report) -> Option<String> {
        let broke_idle = matches!(answer, Answer::Told(_)) && !action.is_silent();
        let mut allowed = usize::from(broke_idle);
        let mut patience = 2;
        loop {
            match self.subject.outbox(&self.far).store_id().await {
                Ok(_) => return None,
                Err(error) if error.kind == Kind::Unreachable && allowed > 0 => allowed -= 1,
                Err(error) if error.kind == Kind::Timeout && patience > 0 => {
                    patience -= 1;
                    report.slow();
                }
                Err(error) => return Some(format!("the next operation failed: {error}")),
            }
        }
    }

    /// A connection that did not answer in time is closed, and nothing more is asked on it.
    async fn gave_up(&self, connection: usize, fault: &Fault, asked: usize) -> Vec<String> {
        let mut wrong = Vec::new();
        let is_open = || self.proxy.backends().iter().any(|b| b.connection == connection && !b.hung_up);
        // The proxy may be holding back a message of it still, and hear of the end only then.
        let begun = Instant::now();
        while is_open() && begun.elapsed() < DELAY + GRACE {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if is_open() {
            wrong.push("the connection that did not answer was not closed".to_owned());
        }
        // What was delayed on its way there was asked before.
        let delayed = fault.direction == Direction::ToServer && matches!(fault.action, Action::Delay(_));
        let is_asked = |seen: &Seen| seen.direction == Direction::ToServer && !seen.name.contains("QUIT");
        let again = self.proxy.seen().split_off(asked);
        if !delayed && again.iter().any(|seen| seen.connection == connection && is_asked(seen)) {
            wrong.push("the connection that did not answer was used again".to_owned());
        }
        wrong
    }

    /// What ended here ends at the server too: no session of ours is left in a transaction.
    async fn lets_go(&self) -> Option<String> {
        let left = self.proxy.left_behind(MIGRATION_SILENCE.max(SILENCE) + GRACE).await;
        (!left.is_empty()).then(|| format!("sessions are still there, or in a transaction: {left:?}"))
    }

    /// Asked again as the product does it, there is exactly one effect.
    async fn converges(&self, scene: &S::Scene, after: &Look, report: &Report) -> Vec<String> {
        let mut patience = 2;
        let answer = loop {
            match self.subject.again(&self.far, scene).await {
                None => return vec![],
                Some(Err(error)) if error.kind == Kind::Timeout && patience > 0 => {
                    patience -= 1;
                    report.slow();
                }
                Some(answer) => break answer,
            }
        };
        let look = self.subject.look(&self.near, scene).await;
        let mut wrong = judge::never(after, &look);
        match answer {
            Err(error) => wrong.push(format!("asked again, it failed: {error}")),
            Ok(told) if told.contains(&Told::NotApplied) => wrong.push(format!("asked again, it told {told:?}")),
            Ok(_) => {}
        }
        if look.shapes() != self.settled {
            wrong.push(format!(
                "asked again, there is not one effect:\n      is   {:?}\n      want {:?}",
                look.shapes(),
                self.settled
            ));
        }
        wrong
    }
}

fn answer_of(ended: std::result::Result<Result<Vec<Told>>, tokio::time::error::Elapsed>) -> Answer {
    match ended {
        Ok(Ok(told)) => Answer::Told(told),
        Ok(Err(error)) => Answer::Failed { kind: error.kind, effect: error.effect, words: error.message },
        Err(_) => Answer::Hung,
    }
}

/// Rows of a portable query, by a handle that nothing is wrong with; asked again if the machine is slow.
pub async fn ask(outbox: &Outbox, sql: &str, params: Vec<Value>) -> Vec<Row> {
    let work = Arc::new((sql.to_owned(), params));
    for _ in 0..5 {
        let work = work.clone();
        let rows = transact(&**outbox.store(), Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move { tx.query(&work.0, &work.1).await })
        });
        match rows.await {
            Ok(rows) => return rows,
            Err(error) if matches!(error.kind, Kind::Timeout | Kind::Unreachable | Kind::Overloaded) => {}
            Err(error) => panic!("{sql}: {error}"),
        }
    }
    panic!("{sql}: the server does not answer")
}

/// One statement of a scene, by a handle that nothing is wrong with.
pub async fn write(outbox: &Outbox, sql: &str, params: Vec<Value>) {
    let work = Arc::new((sql.to_owned(), params));
    let written = transact(&**outbox.store(), Mode::Write, move |tx| {
        let work = work.clone();
        Box::pin(async move { tx.execute(&work.0, &work.1).await })
    });
    written.await.expect(sql);
}
