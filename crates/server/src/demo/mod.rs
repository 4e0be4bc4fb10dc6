//! `postrider demo`: the whole system in a temporary folder, on an embedded database: an application with a moody receiver,
//! a webhook that becomes a dead letter, an order sent twice, and a memory service that goes away. What it tells is checked
//! at the end against the books of those who received: the receiver's log, the partner's, the broker's executions, the
//! memories that arrived.

mod checks;
mod partner;
mod receiver;
mod view;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use postrider::clock::{self, Tick};
use postrider::store::{Mode, Requeued, Status, transact};
use postrider::{Enqueued, Entry, NewMessage, Outbox};
use postrider_memories::{Action, NewMemory};
use postrider_orders::{NewOrder, Order, Placed};
use postrider_webhooks::{DeadLetterFilter, NewEvent, NewSubscription};
use rusqlite::{Connection, TransactionBehavior};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::partner::{Call, Partner};
use self::receiver::Receiver;
use self::view::View;
use crate::cli::Demo;
use crate::commands::{build, orchestrate, tend};
use crate::config::Config;
use crate::database;
use crate::doctor::Doctor;
use crate::failure::{Ending, Failure, Result};
use crate::http::{self, Access, App, Limits};
use crate::metrics::Meters;
use crate::output::{Output, print};
use crate::parts::Parts;
use crate::roll::Roll;
use crate::stand_in::{self, OpenMemory};

pub const LANE: &str = "invoices";
const INVOICES: u64 = 200;
/// Of so many invoices the application changes its mind about one, and rolls back.
const ROLLED_BACK: u64 = 20;
/// The invoice whose amount is missing.
const BROKEN: u64 = INVOICES + 1;
const PATIENCE: Duration = Duration::from_secs(15);

/// What happened, to be held against the receiver's log.
#[derive(Debug, Default)]
struct Story {
    committed: Vec<u64>,
    rolled_back: Vec<u64>,
    again: Option<Enqueued>,
    other_content: Option<Enqueued>,
    died: bool,
    requeued: bool,
    /// In the partner's book, and how many dead letters there were before it was mended.
    calls: Vec<Call>,
    dead_letters: usize,
    /// Of the same order, sent twice at once.
    accepted: usize,
    replayed: bool,
    conflict: bool,
    /// In the broker's own book.
    executions: i64,
    stored: Vec<Action>,
    /// What OpenMemory has at the end.
    remembered: Vec<String>,
}

/// As a user would write it; what is quick here is slow by default.
const CONFIGURATION: &str = r#"
listen = "127.0.0.1:8787"

[lane.invoices]
courier = "http"
url = "{receiver}"
concurrency = 8
batch = 32
poll_interval_sec = 0.1
backoff = { kind = "table", sec = [0.2, 0.4, 0.8] }

[webhooks]
allow_http = true
allow_cidrs = ["127.0.0.0/8"]

[orders]
adapter = "paper"

[memory]
url = "{memory}"
timeout_ms = 1000
breaker = { failures = 1, probe_sec = 0.2 }

[gate]
mode = "DEGRADED"

[secrets]
key = "file:{folder}/postrider.key"
"#;
const ORDER_KEY: &str = "order-4711";

pub async fn run(args: Demo, output: Output) -> Result<Ending> {
    let folder = tempfile::Builder::new().prefix("postrider-demo-").tempdir();
    let folder = folder.map_err(|e| {
        Failure::failed(format!("cannot create a temporary folder: {e}; set TMPDIR to one that is writable"))
    })?;
    let stage = Stage::set(folder.path(), output).await?;
    let mut view = View::new(output);
    view.tell(&format!(
        "database  {}\nreceiver  {} (a moody one)\nbroker    paper\nmemories  a stand-in for OpenMemory\n",
        stage.config.database, stage.receiver.url
    ))?;
    let mut application = Application::open(&folder.path().join("demo.db"), stage.outbox.clone())?;
    let mut story = Story::default();
    play(&mut application, &stage, &mut view, &mut story).await?;
    publish(&stage, &mut view, &mut story).await?;
    order(&stage, &mut view, &mut story).await?;
    remember(&stage, &mut view, &mut story).await?;
    let books = stage.outbox.stats().await?;
    let checks = checks::all(&story, &stage.receiver.arrivals(), &books);
    view.tell(&view::counts(&stage).await?)?;
    let passed = checks.iter().all(|check| check.passed);
    output.show(&json!({ "passed": passed, "steps": checks }), || checks::told(&checks))?;

    if args.stay {
        stay(&stage, &mut application, output).await?;
    }
    stage.end().await;
    Ok(Ending::failed_if(!passed))
}

/// Everything that plays: the outbox with its parts and workers, as `serve` would open them, and the world around it.
struct Stage {
    config: Config,
    outbox: Outbox,
    parts: Parts,
    receiver: Receiver,
    partner: Partner,
    memory: OpenMemory,
    stop: watch::Sender<bool>,
    stopped: watch::Receiver<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Stage {
    async fn set(folder: &Path, output: Output) -> Result<Stage> {
        let (receiver, partner) = (Receiver::start().await?, Partner::start().await?);
        let memory = OpenMemory::new(&stand_in::Settings::default())?;
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(trouble)?;
        let address = listener.local_addr().map_err(trouble)?;
        let file = folder.join("postrider.toml");
        let text = CONFIGURATION
            .replace("{folder}", &folder.display().to_string())
            .replace("{receiver}", &receiver.url)
            .replace("{memory}", &format!("http://{address}"));
        std::fs::write(&file, text).map_err(trouble)?;
        let config = Config::load(Some(&file), Some(format!("sqlite://{}", folder.join("demo.db").display())))?;
        let outbox = database::open_migrated(&config).await?;
        let parts = Parts::open(&config, &outbox).await?;
        let (stop, stopped) = watch::channel(false);
        let lanes: Vec<_> = config.lanes.iter().map(|(name, lane)| (name.as_str(), lane)).collect();
        let names: Vec<&str> = lanes.iter().map(|(name, _)| *name).collect();
        let worker = build(&config, &outbox, &parts, &lanes, output, None).await?;
        let (roll, calling) = Roll::start(&outbox, worker.owner(), &names, stopped.clone());
        let (worker, mut ending) = (worker.observer(roll), stopped.clone());
        let working = tokio::spawn(async move {
            let _ = worker.run(async move { drop(ending.wait_for(|stop| *stop).await) }).await;
        });
        let mut tasks = vec![calling, working, orchestrate(&parts.webhooks, stopped.clone())];
        tasks.extend(parts.memories.as_ref().map(|memories| tend(memories, false, stopped.clone())));
        tokio::spawn(memory.clone().serve(listener));
        Ok(Stage { config, outbox, parts, receiver, partner, memory, stop, stopped, tasks })
    }

    /// Its database goes with the folder; nothing is under way any more.
    async fn end(self) {
        let _ = self.stop.send(true);
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

async fn play(application: &mut Application, stage: &Stage, view: &mut View, story: &mut Story) -> Result<()> {
    let (outbox, receiver) = (&stage.outbox, &stage.receiver);
    view.tell(&format!("An application writes {INVOICES} invoices, each in one transaction with its message."))?;
    for invoice in 1..=INVOICES {
        let commit = invoice % ROLLED_BACK != 0;
        application.bill(invoice, Some(invoice * 10), commit)?;
        if commit {
            story.committed.push(invoice)
        } else {
            story.rolled_back.push(invoice)
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
        view.watch(stage).await?;
    }
    view.tell(&format!(
        "{} were committed and {} rolled back: those must never arrive.",
        story.committed.len(),
        story.rolled_back.len()
    ))?;

    story.again = application.bill(1, Some(10), true)?.map(|entry| entry.outcome);
    story.other_content = application.bill(1, Some(99), true)?.map(|entry| entry.outcome);
    view.tell(
        "Invoice 1 again, same key, same content: `exists`. With another amount: `differs`. Neither is sent twice.",
    )?;

    view.tell("The receiver answers 500 and 503 now and then; the worker tries again until it takes them.")?;
    let wanted = story.committed.len() as u64;
    wait(view, stage, async || Ok(outbox.stats().await?.get(LANE).is_some_and(|s| s.sent >= wanted))).await?;

    let broken = application.bill(BROKEN, None, true)?.map_or(0, |entry| entry.id);
    story.committed.push(BROKEN);
    let is_dead = async || Ok(outbox.show(broken).await?.is_some_and(|(m, _)| m.status == Status::Dead));
    story.died = wait(view, stage, is_dead).await?;
    view.tell(&format!(
        "Invoice {BROKEN} has no amount: 422, and no retry would help. It is dead, kept, and holds up nobody."
    ))?;

    receiver.mend();
    story.requeued = outbox.requeue(vec![broken]).await? == [Requeued::Requeued];
    let is_sent = async || Ok(outbox.show(broken).await?.is_some_and(|(m, _)| m.status == Status::Sent));
    wait(view, stage, is_sent).await?;
    view.tell("The receiver is mended, the message requeued under its id and its Idempotency-Key, and delivered.\n")
}

/// A webhook that nobody can take for a while.
async fn publish(stage: &Stage, view: &mut View, story: &mut Story) -> Result<()> {
    let (webhooks, partner) = (&stage.parts.webhooks, &stage.partner);
    let wish = NewSubscription {
        url: partner.url.clone(),
        event_types: vec!["order.*".to_owned()],
        max_retry_limit: Some(2),
        retry_schedule_sec: Some(vec![0.2]),
        ..NewSubscription::default()
    };
    let (_, secret) = webhooks.subscribe(wish).await?;
    partner.trusts(&secret);
    let paid = json!({ "order": 7 }).to_string();
    webhooks.publish(vec![NewEvent::new("order.paid", paid)]).await?;
    let letters = async || Ok::<_, Failure>(webhooks.dead_letters(DeadLetterFilter::default(), None, 10).await?.items);
    wait(view, stage, async || Ok(!letters().await?.is_empty())).await?;
    view.tell("A partner has a webhook for `order.*` and answers 500, twice: the event becomes a dead letter.")?;
    let letters = letters().await?;
    story.dead_letters = letters.len();
    partner.mend();
    for letter in &letters {
        webhooks.requeue(letter.id).await?;
    }
    wait(view, stage, async || Ok(partner.calls().iter().any(|call| call.status == 200))).await?;
    story.calls = partner.calls();
    view.tell("The partner is mended and the dead letter requeued: it arrives, signed, under the same webhook-id.\n")
}

/// The same order three times, and another one under its key.
async fn order(stage: &Stage, view: &mut View, story: &mut Story) -> Result<()> {
    let orders = &stage.parts.orders;
    let wish = |qty: u32| {
        let body = json!({"instrument": "DEMO", "side": "BUY", "qty": qty, "price": 10.5, "time_in_force": "IOC"});
        let order = Order::parse(body.to_string().as_bytes()).map_err(|e| Failure::failed(e.to_string()))?;
        Ok::<_, Failure>(NewOrder::new(ORDER_KEY, order))
    };
    view.tell("A client sends an order, hears nothing, and sends it again: same key, same order.")?;
    let twice = orders.place(vec![wish(7)?, wish(7)?]).await?;
    story.accepted = twice.iter().filter(|placed| matches!(placed, Placed::Accepted { .. })).count();
    let ended = async || Ok(orders.entry(ORDER_KEY).await?.is_some_and(|entry| entry.finished_at.is_some()));
    wait(view, stage, ended).await?;
    let again = orders.place(vec![wish(7)?, wish(8)?]).await?;
    story.replayed = matches!(&again[0], Placed::Replayed(entry) if entry.response_payload_json.is_some());
    story.conflict = again[1] == Placed::Conflict;
    story.executions = executions(stage).await?;
    view.tell(
        "It was executed once; asked again, the stored answer comes back. Another quantity under its key is refused.\n",
    )
}

/// In the paper broker's own book.
async fn executions(stage: &Stage) -> Result<i64> {
    let counted = transact(&**stage.outbox.store(), Mode::Read, |tx| {
        Box::pin(async move {
            let rows = tx.query("SELECT COUNT(*) FROM paper_executions", &[]).await?;
            rows.first().map_or(Ok(0), |row| row.int(0))
        })
    });
    Ok(counted.await?)
}

/// A memory service that goes away and comes back.
async fn remember(stage: &Stage, view: &mut View, story: &mut Story) -> Result<()> {
    let Some(memories) = &stage.parts.memories else { return Err(Failure::failed("there is no memory gateway")) };
    let store = async |text: &str| {
        let memory = NewMemory {
            payload_md: text.to_owned(),
            correlation_id: format!("demo-{text}"),
            target_space: Some("team:demo".to_owned()),
            ..NewMemory::default()
        };
        memories.store(memory).await.action
    };
    story.stored.push(store("The customer prefers tea.").await);
    view.tell("A memory goes to OpenMemory. Then OpenMemory goes away, and two more are to be remembered.")?;
    stage.memory.be_down(true);
    for text in ["Invoices are due in 30 days.", "The office moves in May."] {
        story.stored.push(store(text).await);
        view.watch(stage).await?;
    }
    view.tell("Both are deferred: in the outbox, with their audit, and the caller did not wait.")?;
    stage.memory.be_down(false);
    wait(view, stage, async || Ok(stage.memory.contents().len() >= 3)).await?;
    let settled = async || Ok(stage.outbox.depths().await?.values().all(|lane| lane.pending + lane.leased == 0));
    wait(view, stage, settled).await?;
    story.remembered = stage.memory.contents();
    view.tell("OpenMemory is back, and so are they: each once.\n")
}

/// Watches until the condition holds; false if it does not in time.
async fn wait(view: &mut View, stage: &Stage, holds: impl AsyncFn() -> Result<bool>) -> Result<bool> {
    let begun = Tick::now();
    while Tick::now().since(begun) < PATIENCE {
        if holds().await? {
            return Ok(true);
        }
        view.watch(stage).await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(false)
}

/// An application with a table of its own in the same database, on a connection of its own.
struct Application {
    connection: Connection,
    outbox: Outbox,
}

impl Application {
    fn open(file: &Path, outbox: Outbox) -> Result<Self> {
        let connection = Connection::open(file).map_err(trouble)?;
        connection.busy_timeout(Duration::from_secs(5)).map_err(trouble)?;
        let table = "CREATE TABLE invoice (number INTEGER PRIMARY KEY, amount INTEGER)";
        connection.execute_batch(table).map_err(trouble)?;
        Ok(Application { connection, outbox })
    }

    /// Invoice and message in one transaction. Rolled back, neither exists.
    fn bill(&mut self, invoice: u64, amount: Option<u64>, commit: bool) -> Result<Option<Entry>> {
        let content: Value = json!({ "invoice": invoice, "amount": amount });
        let message = NewMessage::json(LANE, &content).key(format!("invoice-{invoice}"));
        let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(trouble)?;
        tx.execute("INSERT OR IGNORE INTO invoice VALUES (?, ?)", (invoice as i64, amount.map(|a| a as i64)))
            .map_err(trouble)?;
        let receipt = self.outbox.enqueue_in_sqlite(&tx, &[message])?;
        if !commit {
            tx.rollback().map_err(trouble)?;
            return Ok(None);
        }
        tx.commit().map_err(trouble)?;
        Ok(receipt.committed().first().copied())
    }
}

fn trouble(error: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("the demo cannot go on: {error}"))
}

/// The dashboard on what was played, with an invoice now and then so that there is something to see.
async fn stay(stage: &Stage, application: &mut Application, output: Output) -> Result<()> {
    let listener = match TcpListener::bind(stage.config.listen).await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind("127.0.0.1:0").await.map_err(trouble)?,
    };
    let address = listener.local_addr().map_err(trouble)?;
    let app = App::new(
        stage.outbox.clone(),
        stage.parts.clone(),
        false,
        stage.config.gate.clone(),
        Access::default(),
        Arc::new(Meters::new()),
        Doctor::new(&stage.config, &stage.outbox, &stage.parts),
    );
    let sampling = app.live.start(stage.stopped.clone());
    let (leave, left) = watch::channel(false);
    let mut closing = left.clone();
    let serving = tokio::spawn(async move {
        let closed = async move { drop(closing.wait_for(|stop| *stop).await) };
        http::serve(listener, None, http::router(&app), Limits::default(), Duration::from_millis(500), closed).await;
    });
    if !output.json {
        print(&format!(
            "\nThe dashboard is at http://{address}/ and an invoice is written now and then. Ctrl-C ends it.\n\
             In another terminal: postrider --database {} top\n",
            stage.config.database
        ))?;
    }
    let mut interrupted = std::pin::pin!(crate::signals::end_signal()?);
    for invoice in BROKEN + 1.. {
        application.bill(invoice, Some(invoice), true)?;
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(50).mul_f64(1.0 + 4.0 * clock::chance())) => {}
            () = &mut interrupted => break,
        }
    }
    let _ = (stage.stop.send(true), leave.send(true));
    let _ = (serving.await, sampling.await);
    Ok(())
}
