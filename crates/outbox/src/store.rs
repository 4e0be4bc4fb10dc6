//! The seam: the verbs of the lease protocol, each with its promise. Three databases keep them (`stores/`), and one
//! conformance suite holds all three to them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Effect, Result};
use crate::failpoint::Commit;
use crate::lanes::Lanes;
use crate::lease::{Hold, Lease};
use crate::message::Message;
use crate::migrate::Schema;
use crate::outcome::{GiveBack, LeaseState, Settled, Settlement};
use crate::time::Timestamp;
use crate::tx::{BoxFuture, Dialect, Tx};

/// A place in the order of claims: `(due_at, id)`. A claim starts at its mark, to avoid walking again over rows that
/// others hold; it is for speed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Mark {
    pub due_at: Timestamp,
    pub id: i64,
}

impl Mark {
    /// Before every place: a due time may lie before 1970, and before the common era no database of ours can go.
    pub(crate) const FIRST: Mark = Mark { due_at: Timestamp::from_micros(-62_135_596_800_000_000), id: 0 };
}

/// A claim names one lane and shard.
#[derive(Clone, Debug)]
pub struct Claim {
    pub lane: String,
    pub shard: u32,
    pub limit: u32,
    pub lease: Duration,
    pub owner: String,
    /// Takeovers are counted up to this: whoever finds a message there buries it, and may die over it too.
    pub max_crashes: u32,
    /// The lane commits *send begun* before its first byte: a takeover alone does not mean that anything was sent.
    pub send_begun: bool,
    pub from: From,
}

/// Which rows a claim looks at.
#[derive(Clone, Debug)]
pub enum From {
    /// From the mark on (from the head without one), rows taken over at most once.
    Mark(Option<Mark>),
    /// As `Mark`, and rows this owner holds but does not know of, whatever their lease: an earlier claim's answer was
    /// lost. `known` are the ids it does know of.
    Adopt { mark: Option<Mark>, known: Vec<i64> },
    /// Exactly these, if they are still claimable or this owner's already (an earlier claim's answer was lost), however
    /// often they were taken over.
    Ids(Vec<i64>),
}

impl From {
    /// Does it take rows its own owner holds, whatever their lease?
    pub(crate) fn adopts(&self) -> bool {
        !matches!(self, From::Mark(_))
    }
}

/// What a claim got, and the database's clock.
#[derive(Clone, Debug, Default)]
pub struct Claimed {
    pub messages: Vec<Message>,
    pub now: Timestamp,
    /// Nothing claimable was left behind the last message: the claim came to the end of what is due.
    pub exhausted: bool,
}

/// One entry of the walk from the head.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    pub mark: Mark,
    pub hold: Hold,
}

/// One step of the walk, in order, and the database's clock.
#[derive(Clone, Debug, Default)]
pub struct Walked {
    pub seen: Vec<Seen>,
    pub now: Timestamp,
}

/// The answer of a requeue, per id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Requeued {
    Requeued,
    /// It is not dead (live, sent, or unknown): nothing changed.
    NotDead,
    /// Its key or its active key belongs to another live message: nothing changed.
    Conflict,
    /// Somebody else holds its row or its key at the moment: nothing changed, ask again.
    Held,
}

/// The answer to somebody who wants a waiting message tried now, per id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Retried {
    /// It is due now.
    Retried,
    /// A worker is at it, or somebody else has it locked: nothing changed.
    Leased,
    /// It has ended, or was never there: nothing changed.
    Ended,
}

/// What a prune may delete.
#[derive(Clone, Debug)]
pub struct Prune {
    pub lane: Option<String>,
    /// Only what ended at least this long ago.
    pub older_than: Duration,
    /// At most this many messages in one transaction.
    pub limit: u32,
    /// Count only.
    pub dry_run: bool,
}

/// What was (or would be) deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Pruned {
    pub messages: u64,
    pub keys: u64,
}

/// A message's state, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Live and not under a running lease.
    Pending,
    Leased,
    Sent,
    Dead,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "pending",
            Status::Leased => "leased",
            Status::Sent => "sent",
            Status::Dead => "dead",
        }
    }
}

impl std::str::FromStr for Status {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        [Status::Pending, Status::Leased, Status::Sent, Status::Dead]
            .into_iter()
            .find(|s| s.as_str() == text)
            .ok_or_else(|| format!("`{text}` is no status: use pending, leased, sent or dead"))
    }
}

/// Everything about one message but its payload.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Shown {
    pub id: i64,
    pub lane: String,
    pub shard_id: u32,
    pub status: Status,
    pub attempts: u32,
    pub crashes: u32,
    pub maybe_sent: bool,
    pub lease_token: i64,
    pub due_at: Timestamp,
    pub lease_until: Option<Timestamp>,
    /// Who holds it, or held it last and never came back. An outcome ends it.
    pub locked_by: Option<String>,
    pub locked_at: Option<Timestamp>,
    /// Who holds it, or held it when it ended; and since when: its claim, or its last renewal.
    pub claimed_by: Option<String>,
    pub claimed_at: Option<Timestamp>,
    pub target: Option<String>,
    pub active_key: Option<String>,
    pub payload_sha: Option<String>,
    pub payload_bytes: i64,
    pub content_type: Option<String>,
    pub result_ref: Option<String>,
    pub last_error_code: Option<String>,
    pub last_error: Option<String>,
    pub correlation_id: Option<String>,
    pub created_at: Timestamp,
    pub deliver_before: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
}

/// One line of a message's history: an attempt that did not simply succeed.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Attempt {
    pub at: Timestamp,
    /// `retry`, `dead` or `takeover`.
    pub kind: String,
    pub attempt: u32,
    pub lease_token: i64,
    pub code: Option<String>,
    pub error: Option<String>,
    pub worker: Option<String>,
}

/// What happened to a message, in order: at most its latest thousand attempts.
#[derive(Clone, Debug, PartialEq)]
pub struct History {
    pub attempts: Vec<Attempt>,
    /// There were more before these.
    pub truncated: bool,
}

/// Counts of one lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct LaneStats {
    pub pending: u64,
    pub leased: u64,
    pub sent: u64,
    pub dead: u64,
    /// Age of the oldest row that is due and not held.
    pub oldest_due_seconds: f64,
}

/// Which messages a list shows, newest first.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub lane: Option<String>,
    pub status: Option<Status>,
    /// Only ids below this one (the cursor).
    pub before: Option<i64>,
    /// Only the message that has this key or active key.
    pub key: Option<String>,
    /// Only this target. No index knows it: a page searches 50,000 messages, and the next one goes on.
    pub target: Option<String>,
    pub limit: u32,
}

/// What a transaction of the store's own is for. A read sees everything that was committed before it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Something the engine needs: a few rows.
    Read,
    /// Something people page through: a bounded number of index entries, whatever the database believes of its tables.
    /// On SQLite it keeps no `Read` waiting.
    Look,
    /// A count of whole tables, for people. On SQLite it keeps no `Read` waiting.
    Count,
    Write,
    /// A write of a worker, or of many strangers at once: it waits for a lock of somebody else's only for a moment, and is
    /// not run again because of it.
    Work,
}

impl Mode {
    pub fn writes(self) -> bool {
        matches!(self, Mode::Write | Mode::Work)
    }
}

/// Work to run in a transaction of the store. After a deadlock it is run again, from the start.
pub type Work = Box<dyn for<'a> FnMut(&'a mut (dyn Tx + Send)) -> BoxFuture<'a, Result<()>> + Send>;

/// The verbs a database must keep. Every write is atomic; an error says whether it was applied
/// ([`crate::error::Effect`]). Everything else (enqueue, seize, requeue, prune, reads) is written once, on
/// [`Store::transact`].
#[async_trait]
pub trait Store: Send + Sync {
    fn dialect(&self) -> Dialect;

    /// The rules of the configured lanes.
    fn lanes(&self) -> &Arc<Lanes>;

    /// The migrations it is made of.
    fn schema(&self) -> &Schema;

    /// Creates or upgrades the schema and registers lanes the database does not know; safe when several processes start at
    /// once. Answers the migrations it ran.
    async fn migrate(&self) -> Result<Vec<String>>;

    /// At most `limit` claimable rows, each under a new token, lease counted from after the row lock.
    async fn claim(&self, claim: &Claim) -> Result<Claimed>;

    /// Reads up to `limit` due entries after `after`, held or not, in claim order. Locks nothing.
    async fn walk(&self, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked>;

    /// Records outcomes of one lane, each only under its current token, exactly once; answers in the order given. A
    /// lost lease is an answer, audited with what was intended and observed, and harms no other entry; a row that
    /// somebody else has locked is skipped, and answered so.
    async fn settle(&self, lane: &str, owner: &str, entries: &[Settlement]) -> Result<Vec<Settled>>;

    /// Extends what is still held and not expired, skipping rows that somebody else has locked; answers per lease.
    async fn renew(&self, owner: &str, leases: &[Lease], lease: Duration) -> Result<Vec<LeaseState>>;

    /// Gives back without counting anything, skipping rows that somebody else has locked; answers per lease.
    async fn defer(&self, owner: &str, leases: &[Lease], how: &GiveBack) -> Result<Vec<LeaseState>>;

    /// Runs `work` in one transaction: committed if it answers ok, else rolled back.
    async fn transact(&self, mode: Mode, work: Work) -> Result<()>;

    /// Waits until another process says there may be new work; for ever where the database cannot tell.
    async fn notified(&self) {
        std::future::pending().await
    }

    /// Tells workers of other processes that there may be new work, outside any producer's transaction.
    async fn notify(&self) -> Result<()> {
        Ok(())
    }

    /// How the database and our connections to it are doing; for gauges.
    async fn vitals(&self) -> Result<Vitals> {
        Ok(Vitals::default())
    }

    /// Moves the clock this store lives by. For tests only.
    #[doc(hidden)]
    fn advance_clock(&self, by: Duration);
}

/// What an operator watches beside the outbox itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vitals {
    pub pool: Option<Connections>,
    /// PostgreSQL: rows nobody sees any more and vacuum has not taken away yet, by table.
    pub dead_tuples: Vec<(String, i64)>,
    /// PostgreSQL: how many transactions ago the oldest snapshot was taken that keeps vacuum from its work.
    pub oldest_xmin_age: Option<i64>,
    /// SQLite: bytes that wait to be brought from the log into the file.
    pub wal_bytes: Option<u64>,
}

/// Connections to the database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    pub most: usize,
    pub in_use: usize,
    pub idle: usize,
}

/// Runs again what may be repeated without harm, as long as nobody knows whether it was applied; a few times. If a later
/// round fails for certain, an earlier one may still have been applied, and the error says so.
pub async fn repeat<R, F>(mut run: impl FnMut(u32) -> F) -> Result<R>
where
    F: Future<Output = Result<R>>,
{
    for round in 0.. {
        match run(round).await {
            Err(error) if error.effect == Effect::Unknown && round < 3 => {}
            Err(error) => return Err(error.after(round > 0)),
            done => return done,
        }
    }
    unreachable!("the loop ends by returning")
}

/// Runs `work` in one transaction of the store and hands its result out.
pub async fn transact<R, F>(store: &dyn Store, mode: Mode, mut work: F) -> Result<R>
where
    R: Send + 'static,
    F: for<'a> FnMut(&'a mut (dyn Tx + Send)) -> BoxFuture<'a, Result<R>> + Send + 'static,
{
    let result = Arc::new(std::sync::Mutex::new(None));
    let slot = result.clone();
    let commit = Commit::of::<F>(mode.writes());
    let committing = commit.clone();
    store
        .transact(
            mode,
            Box::new(move |tx| {
                let (slot, commit) = (slot.clone(), committing.clone());
                let answer = work(tx);
                Box::pin(async move {
                    let value = answer.await?;
                    *slot.lock().unwrap_or_else(|e| e.into_inner()) = Some(value);
                    commit.before();
                    Ok(())
                })
            }),
        )
        .await?;
    commit.after();
    let value = result.lock().unwrap_or_else(|e| e.into_inner()).take();
    value.ok_or_else(|| crate::error::Error::database("the transaction ran without a result"))
}
