//! `postrider demo`: an application, a worker and a moody receiver on an embedded database in a temporary folder. What
//! it tells is checked at the end against the receiver's own log.

mod checks;
mod receiver;
mod view;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use postrider::backoff::Backoff;
use postrider::clock::Tick;
use postrider::store::{Requeued, Status};
use postrider::worker::core::LaneSettings;
use postrider::{Enqueued, Entry, LaneRules, Lanes, NewMessage, Outbox, Worker};
use rusqlite::{Connection, TransactionBehavior};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use self::receiver::Receiver;
use self::view::View;
use crate::cli::Demo;
use crate::couriers::Destination;
use crate::failure::{Ending, Failure, Result};
use crate::output::{Output, print};

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
}

pub async fn run(args: Demo, output: Output) -> Result<Ending> {
    let folder = tempfile::Builder::new().prefix("postrider-demo-").tempdir();
    let folder = folder.map_err(|e| {
        Failure::failed(format!("cannot create a temporary folder: {e}; set TMPDIR to one that is writable"))
    })?;
    let file = folder.path().join("demo.db");
    let url = format!("sqlite://{}", file.display());
    let outbox = Outbox::open(&url, Lanes::new().with(LANE, LaneRules::default())).await?;
    outbox.migrate().await?;
    let receiver = Receiver::start().await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = tokio::spawn(worker(&outbox, &receiver, output).await?.run(async move { drop(stopped.await) }));

    let mut view = View::new(output);
    view.tell(&format!("database  {url}\nreceiver  {} (a moody one)\n", receiver.url))?;
    let story = play(&file, &outbox, &receiver, &mut view).await?;
    let checks =
        checks::all(&story, &receiver.arrivals(), outbox.stats().await?.get(LANE).copied().unwrap_or_default());
    view.tell(&view::counts(&outbox, &receiver).await?)?;
    let passed = checks.iter().all(|check| check.passed);
    output.show(&json!({ "passed": passed, "steps": checks }), || checks::told(&checks))?;

    if args.stay {
        stay(&url, output).await?;
    }
    drop(stop);
    // Its database goes with the folder; nothing is under way any more.
    let _ = worker.await;
    Ok(Ending::failed_if(!passed))
}

async fn worker(outbox: &Outbox, receiver: &Receiver, output: Output) -> Result<Worker> {
    let mut settings = LaneSettings::new(LANE);
    settings.concurrency = 8;
    settings.batch = 32;
    settings.poll = Duration::from_millis(100);
    settings.budgets.backoff = Backoff::Table([200, 400, 800].map(Duration::from_millis).to_vec());
    let destination = Destination::Http { url: receiver.url.clone(), timeout: Duration::from_secs(5), headers: vec![] };
    let courier: Arc<_> = destination.courier(outbox, None, output).await?;
    Ok(Worker::new(outbox.clone()).lane_with(settings, courier).drain(Duration::from_secs(2)))
}

async fn play(file: &Path, outbox: &Outbox, receiver: &Receiver, view: &mut View) -> Result<Story> {
    let mut story = Story::default();
    let mut application = Application::open(file, outbox.clone())?;

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
        view.watch(outbox, receiver).await?;
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
    wait(view, outbox, receiver, async || Ok(outbox.stats().await?.get(LANE).is_some_and(|s| s.sent >= wanted)))
        .await?;

    let broken = application.bill(BROKEN, None, true)?.map_or(0, |entry| entry.id);
    story.committed.push(BROKEN);
    let is_dead = async || Ok(outbox.show(broken).await?.is_some_and(|(m, _)| m.status == Status::Dead));
    story.died = wait(view, outbox, receiver, is_dead).await?;
    view.tell(&format!(
        "Invoice {BROKEN} has no amount: 422, and no retry would help. It is dead, kept, and holds up nobody."
    ))?;

    receiver.mend();
    story.requeued = outbox.requeue(vec![broken]).await? == [Requeued::Requeued];
    let is_sent = async || Ok(outbox.show(broken).await?.is_some_and(|(m, _)| m.status == Status::Sent));
    wait(view, outbox, receiver, is_sent).await?;
    view.tell("The receiver is mended, the message requeued under its id and its Idempotency-Key, and delivered.\n")?;
    Ok(story)
}

/// Watches until the condition holds; false if it does not in time.
async fn wait(
    view: &mut View,
    outbox: &Outbox,
    receiver: &Receiver,
    holds: impl AsyncFn() -> Result<bool>,
) -> Result<bool> {
    let begun = Tick::now();
    while Tick::now().since(begun) < PATIENCE {
        if holds().await? {
            return Ok(true);
        }
        view.watch(outbox, receiver).await?;
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

fn trouble(error: rusqlite::Error) -> Failure {
    Failure::failed(format!("the demo's database: {error}"))
}

async fn stay(url: &str, output: Output) -> Result<()> {
    if !output.json {
        print(&format!(
            "\nStaying until Ctrl-C. Look around in another terminal:\n  postrider --database {url} outbox list\n"
        ))?;
    }
    let _ = tokio::signal::ctrl_c().await;
    Ok(())
}
