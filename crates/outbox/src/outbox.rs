//! The handle an application holds: enqueue in its own transaction, and the operator's verbs, all on one [`Store`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::Tick;
use crate::cold::{self, Register};
use crate::depths::{self, Age, Counting};
use crate::enqueue::{self, Admit};
use crate::error::{Error, Kind, Result};
use crate::lanes::Lanes;
use crate::lease::Lease;
use crate::looking;
use crate::message::{Entry, NewMessage, Sha};
use crate::migrate;
use crate::outcome::{Certainty, GiveBack, LeaseState, Settled, Settlement, Verdict, code};
use crate::paging::Page;
use crate::pulse::Pulse;
use crate::requeue::{self, Died, Held};
use crate::store::{
    Filter, History, LaneStats, Mode, Prune, Pruned, Requeued, Retried, Shown, Store, Vitals, repeat, transact,
};
use crate::stores::{self, Options};
use crate::time::Timestamp;
use crate::tx::Tx;

/// How often and how soon a single row is asked for again that another session has locked: for five seconds.
const ASK_AGAIN: usize = 250;
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// One outbox on one database. Cheap to clone.
#[derive(Clone)]
pub struct Outbox {
    store: Arc<dyn Store>,
    bell: Arc<Bell>,
    /// What it may touch beyond lanes without an owner.
    owns: Option<&'static str>,
}

/// What an enqueue answered, and the bell to ring once it is committed.
#[must_use = "call .committed() after your COMMIT, so that workers wake at once"]
pub struct Receipt {
    entries: Vec<Entry>,
    outbox: Outbox,
}

impl Receipt {
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn ids(&self) -> Vec<i64> {
        self.entries.iter().map(|entry| entry.id).collect()
    }

    /// To be called after the caller's COMMIT: wakes workers of this process at once and those of others by one coalesced
    /// notification. Without it their poll finds the message a little later.
    pub fn committed(self) -> Vec<Entry> {
        self.outbox.ring();
        self.entries
    }
}

/// What somebody else holds is asked for again so often, after such a pause.
const HELD_ROUNDS: usize = 5;
const HELD_PAUSE: Duration = Duration::from_millis(200);

/// How an operator's hold begins.
pub const OPERATOR: &str = "operator:";

/// Wakes workers: in this process directly, in others through the database, many rings in one notification.
struct Bell {
    local: watch::Sender<u64>,
    wanted: AtomicBool,
    ringing: tokio::sync::Mutex<()>,
}

impl Outbox {
    pub fn new(store: Arc<dyn Store>) -> Self {
        let bell =
            Bell { local: watch::Sender::new(0), wanted: AtomicBool::new(false), ringing: tokio::sync::Mutex::new(()) };
        Outbox { store, bell: Arc::new(bell), owns: None }
    }

    /// The same outbox in the hands of the peer that owns the lanes with this `owned_by`.
    pub fn owning(&self, owned_by: &'static str) -> Self {
        Outbox { owns: Some(owned_by), ..self.clone() }
    }

    fn permit(&self, messages: &[NewMessage]) -> Result<()> {
        messages.iter().try_for_each(|message| self.lanes().permit(&message.lane, self.owns))
    }

    /// Opens `sqlite://…`, `postgres://…` or `mysql://…`. The schema is left as it is; see [`Outbox::migrate`].
    pub async fn open(url: &str, lanes: Lanes) -> Result<Self> {
        Ok(Outbox::new(stores::open(url, lanes, Options::default()).await?))
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub fn lanes(&self) -> &Arc<Lanes> {
        self.store.lanes()
    }

    /// Creates or upgrades the schema and registers the lanes; answers the migrations it ran.
    pub async fn migrate(&self) -> Result<Vec<String>> {
        let ran = self.store.migrate().await?;
        self.register_lanes().await.map_err(|error| error.after(true))?;
        Ok(ran)
    }

    /// Tells the database the lanes' rules, for SQL clients. For those who serve the lanes; [`Outbox::migrate`] does this
    /// too.
    pub async fn register_lanes(&self) -> Result<()> {
        self.register(Register::All).await
    }

    /// The same for lanes the database does not know yet: the rules of those who serve the others stay.
    pub async fn register_missing_lanes(&self) -> Result<()> {
        self.register(Register::Missing).await
    }

    async fn register(&self, how: Register) -> Result<()> {
        let lanes = self.lanes().clone();
        transact(&*self.store, Mode::Write, move |tx| {
            let lanes = lanes.clone();
            Box::pin(async move { cold::register_lanes(tx, &lanes, how).await })
        })
        .await
    }

    /// The shards of a lane beyond the configured ones in which messages wait: somebody has, or had, more shards.
    pub async fn stray_shards(&self, lane: &str) -> Result<Vec<u32>> {
        let shards = self.lanes().get(lane)?.shards;
        let lane: Arc<str> = lane.into();
        transact(&*self.store, Mode::Read, move |tx| {
            let lane = lane.clone();
            Box::pin(async move { cold::stray_shards(tx, &lane, shards).await })
        })
        .await
    }

    /// The migrations still missing; an error if the schema is newer than this binary.
    pub async fn pending_migrations(&self) -> Result<Vec<String>> {
        let schema = Arc::new(self.store.schema().clone());
        transact(&*self.store, Mode::Read, move |tx| {
            let schema = schema.clone();
            Box::pin(async move { migrate::pending(tx, &schema).await })
        })
        .await
    }

    // ---- enqueue ----

    /// Enqueues inside the caller's own transaction: `&mut tx` of tokio-postgres or mysql_async, `&mut *tx` of sqlx.
    /// If this fails, roll back.
    pub async fn enqueue_in<T: Tx + ?Sized>(&self, tx: &mut T, messages: &[NewMessage]) -> Result<Receipt> {
        if tx.dialect() != self.store.dialect() {
            return Err(Error::invalid(format!(
                "the transaction is on {}, the outbox on {}",
                tx.dialect().name(),
                self.store.dialect().name()
            )));
        }
        self.permit(messages)?;
        let entries = enqueue::enqueue(tx, self.lanes(), messages).await?;
        Ok(Receipt { entries, outbox: self.clone() })
    }

    /// For a peer that keeps a row of its own for each active key, which says what is new: those messages get an entry.
    pub async fn enqueue_admitted_in<T: Tx + ?Sized>(
        &self,
        tx: &mut T,
        admit: Admit<'_>,
        messages: &[NewMessage],
    ) -> Result<Vec<Option<Entry>>> {
        self.permit(messages)?;
        enqueue::enqueue_admitted(tx, self.lanes(), admit, messages).await
    }

    /// Enqueues inside a transaction of rusqlite, without a runtime.
    #[cfg(feature = "sqlite")]
    pub fn enqueue_in_sqlite(&self, connection: &rusqlite::Connection, messages: &[NewMessage]) -> Result<Receipt> {
        self.permit(messages)?;
        let lanes = self.lanes().clone();
        let work = async move |tx: &mut dyn Tx| enqueue::enqueue(tx, &lanes, messages).await;
        let entries = stores::sqlite::on_connection(connection, work)?;
        Ok(Receipt { entries, outbox: self.clone() })
    }

    /// Enqueues in a transaction of its own and wakes workers. If the commit's answer is lost, messages with keys are
    /// sent again (the key makes that harmless); without keys the caller learns that it is unknown.
    pub async fn enqueue(&self, messages: Vec<NewMessage>) -> Result<Vec<Entry>> {
        self.enqueue_as(Mode::Write, messages).await
    }

    /// The same, and with [`Mode::Work`] somebody else's lock on a key is waited for only for a moment.
    #[doc(hidden)]
    pub async fn enqueue_as(&self, mode: Mode, messages: Vec<NewMessage>) -> Result<Vec<Entry>> {
        self.permit(&messages)?;
        let repeatable = messages.iter().all(|m| m.key.is_some());
        let work = Arc::new((self.lanes().clone(), messages));
        let run = |_: u32| {
            let work = work.clone();
            transact(&*self.store, mode, move |tx| {
                let work = work.clone();
                Box::pin(async move { enqueue::enqueue(tx, &work.0, &work.1).await })
            })
        };
        let entries = if repeatable { repeat(run).await? } else { run(0).await? };
        self.ring();
        Ok(entries)
    }

    // ---- waking ----

    /// Wakes workers here and elsewhere.
    pub fn ring(&self) {
        self.bell.local.send_modify(|n| *n += 1);
        self.bell.wanted.store(true, Ordering::SeqCst);
        // Whoever comes first sends one for all. Without a runtime it waits for the next ring that has one.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let outbox = self.clone();
            runtime.spawn(async move { outbox.flush().await });
        }
    }

    /// Sends the notification that is due, if any. For programs that end right after enqueueing.
    pub async fn flush(&self) {
        let _one_at_a_time = self.bell.ringing.lock().await;
        if self.bell.wanted.swap(false, Ordering::SeqCst)
            && let Err(error) = self.store.notify().await
        {
            tracing::debug!(%error, "no notification; workers will find the message by polling");
        }
    }

    pub(crate) fn listen(&self) -> watch::Receiver<u64> {
        self.bell.local.subscribe()
    }

    // ---- the protocol's single-row verbs, named as in Outbox Lease Protocol v1 ----

    pub async fn ack_sent(&self, lane: &str, owner: &str, lease: Lease, result_ref: Option<String>) -> Result<Settled> {
        self.settle_one(lane, owner, lease, Verdict::Sent { result_ref, dedup_hit: false }).await
    }

    pub async fn fail_retry(
        &self,
        lane: &str,
        owner: &str,
        lease: Lease,
        code: &str,
        error: &str,
        delay: Duration,
    ) -> Result<Settled> {
        let (code, error) = (code.to_owned(), error.to_owned());
        self.settle_one(lane, owner, lease, Verdict::Retry { delay, code, error, certainty: Certainty::Unchanged })
            .await
    }

    pub async fn mark_dead(&self, lane: &str, owner: &str, lease: Lease, code: &str, error: &str) -> Result<Settled> {
        let (code, error) = (code.to_owned(), error.to_owned());
        self.settle_one(
            lane,
            owner,
            lease,
            Verdict::Dead { code, error, certainty: Certainty::Unchanged, counted: true },
        )
        .await
    }

    pub async fn renew_lease(&self, owner: &str, lease: Lease, extend: Duration) -> Result<bool> {
        for _ in 0..ASK_AGAIN {
            match self.store.renew(owner, &[lease], extend).await?.first() {
                Some(LeaseState::Held) => return Ok(true),
                Some(LeaseState::Locked) => tokio::time::sleep(ASK_AGAIN_AFTER).await,
                Some(LeaseState::Lost) | None => return Ok(false),
            }
        }
        Err(Error::new(Kind::Locked, format!("another session has message {} locked; nothing was changed", lease.id)))
    }

    /// Commits that a delivery is about to begin, for lanes with `send_begun`; `false` if the lease is lost.
    #[doc(hidden)]
    pub async fn begin(&self, owner: &str, lease: Lease) -> Result<bool> {
        self.set_begun(owner, lease, true).await
    }

    pub(crate) async fn take_back_begin(&self, owner: &str, lease: Lease) -> Result<bool> {
        self.set_begun(owner, lease, false).await
    }

    async fn set_begun(&self, owner: &str, lease: Lease, begun: bool) -> Result<bool> {
        let owner: Arc<str> = owner.into();
        transact(&*self.store, Mode::Work, move |tx| {
            let owner = owner.clone();
            Box::pin(async move { cold::begin(tx, &owner, lease, begun).await })
        })
        .await
    }

    /// Records one outcome, for somebody who has nothing else to do meanwhile: a row that another session has locked is
    /// asked for again for a few seconds. A worker settles many at once and comes back for such a row by itself.
    pub async fn settle_one(&self, lane: &str, owner: &str, lease: Lease, verdict: Verdict) -> Result<Settled> {
        let entry = [Settlement::new(lease, verdict)];
        for _ in 0..ASK_AGAIN {
            let answers = self.store.settle(lane, owner, &entry).await?;
            match answers.first() {
                Some(Settled::Locked) => tokio::time::sleep(ASK_AGAIN_AFTER).await,
                Some(answer) => return Ok(*answer),
                None => return Err(Error::database("a settle without an answer")),
            }
        }
        Ok(Settled::Locked)
    }

    /// Per probe (target, payload digest): `Some(result_ref)` if it was delivered on this lane before, within retention.
    pub async fn check_dedup(
        &self,
        lane: &str,
        probes: Vec<(Option<String>, Sha)>,
    ) -> Result<Vec<Option<Option<String>>>> {
        let retention = self.lanes().get(lane)?.retention;
        let work = Arc::new((lane.to_owned(), probes));
        transact(&*self.store, Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move { cold::check_dedup(tx, &work.0, retention, &work.1).await })
        })
        .await
    }

    // ---- the operator's verbs ----

    /// Makes waiting messages with these active keys due now; answers how many.
    pub async fn wake(&self, lane: &str, active_keys: Vec<String>) -> Result<u64> {
        let work = Arc::new((lane.to_owned(), active_keys));
        let woken = transact(&*self.store, Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move { cold::wake(tx, &work.0, &work.1).await })
        })
        .await?;
        if woken > 0 {
            self.ring();
        }
        Ok(woken)
    }

    /// Makes messages of a lane that wait for a later time due now: what kept them back is over. Only those that were given
    /// back or failed with one of these codes last, if any are named. Answers how many.
    pub async fn wake_waiting(&self, lane: &str, codes: Option<&[&str]>) -> Result<usize> {
        const BATCH: usize = 500;
        let shards = self.lanes().get(lane)?.shards;
        let codes: Option<Vec<String>> = codes.map(|codes| codes.iter().map(|code| (*code).to_owned()).collect());
        let work = Arc::new((lane.to_owned(), codes));
        let mut woken = 0;
        loop {
            let work = work.clone();
            let batch = transact(&*self.store, Mode::Write, move |tx| {
                let work = work.clone();
                Box::pin(async move { cold::wake_waiting(tx, &work.0, shards, work.1.as_deref(), BATCH).await })
            })
            .await
            .map_err(|error| error.after(woken > 0))?;
            woken += batch;
            if batch < BATCH {
                break;
            }
        }
        if woken > 0 {
            self.ring();
        }
        Ok(woken)
    }

    /// Makes a message that waits for a later time due now, whatever it waits for.
    pub async fn retry(&self, id: i64) -> Result<Retried> {
        let work = Arc::new((self.lanes().clone(), self.owns));
        let retried = transact(&*self.store, Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move { cold::retry(tx, id, &work.0, work.1).await })
        })
        .await?;
        self.ring();
        Ok(retried)
    }

    /// Stops all workers from claiming on a lane, within about a second; what is under way is finished. The backlog waits
    /// and loses nothing. Answers whether it was open before.
    pub async fn pause(&self, lane: &str) -> Result<bool> {
        self.set_paused(lane, true).await
    }

    /// Lets workers claim on a paused lane again.
    pub async fn resume(&self, lane: &str) -> Result<bool> {
        let resumed = self.set_paused(lane, false).await?;
        self.ring();
        Ok(resumed)
    }

    async fn set_paused(&self, lane: &str, paused: bool) -> Result<bool> {
        self.lanes().get(lane)?;
        let lane: Arc<str> = lane.into();
        transact(&*self.store, Mode::Write, move |tx| {
            let lane = lane.clone();
            Box::pin(async move { cold::pause(tx, &lane, paused).await })
        })
        .await
    }

    /// The lanes that are paused now.
    pub async fn paused_lanes(&self) -> Result<Vec<String>> {
        transact(&*self.store, Mode::Read, |tx| Box::pin(cold::paused(tx))).await
    }

    /// Takes live messages whatever their due time or lease, under a new token; then settle or defer them as `owner`.
    pub async fn seize(&self, owner: &str, ids: Vec<i64>, lease: Duration) -> Result<Vec<(String, Lease)>> {
        self.seize_where(owner, ids, lease, |_: &str, _: Option<&str>| true).await
    }

    /// The same, but only what nobody holds, or an operator who did not come back.
    pub async fn seize_idle(&self, owner: &str, ids: Vec<i64>, lease: Duration) -> Result<Vec<(String, Lease)>> {
        let idle = |_: &str, holder: Option<&str>| holder.is_none_or(|holder| holder.starts_with(OPERATOR));
        self.seize_where(owner, ids, lease, idle).await
    }

    /// Those for whose lane and holder `wanted` says yes.
    async fn seize_where(
        &self,
        owner: &str,
        ids: Vec<i64>,
        lease: Duration,
        wanted: impl Fn(&str, Option<&str>) -> bool + Send + Sync + 'static,
    ) -> Result<Vec<(String, Lease)>> {
        let work = Arc::new((owner.to_owned(), ids, wanted));
        transact(&*self.store, Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move { cold::seize(tx, &work.0, &work.1, lease, &work.2).await })
        })
        .await
    }

    /// Gives messages back to be claimed by anybody now, whoever held them; answers which were live. What nobody holds on
    /// a lane that has an owner waits for a reason the owner knows, and is left alone.
    pub async fn release(&self, ids: Vec<i64>) -> Result<Vec<i64>> {
        let owner = format!("{OPERATOR}{}", crate::clock::incarnation(None));
        let lanes = self.lanes().clone();
        let wanted = move |lane: &str, holder: Option<&str>| {
            holder.is_some_and(|holder| !holder.starts_with(OPERATOR)) || lanes.permit_upkeep(lane, None).is_ok()
        };
        // In one transaction: whoever had it must not lose it to an operator who then could not give it back.
        let work = Arc::new((owner, ids, wanted));
        let given = transact(&*self.store, Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let seized = cold::seize(tx, &work.0, &work.1, Duration::from_secs(60), &work.2).await?;
                let leases: Vec<Lease> = seized.into_iter().map(|(_, lease)| lease).collect();
                let how = GiveBack::after(Duration::ZERO, code::RELEASED);
                let given = cold::defer(tx, &work.0, &leases, &how).await?;
                let given = leases.iter().zip(given).filter(|(_, state)| *state == LeaseState::Held);
                Ok(given.map(|(lease, _)| lease.id).collect())
            })
        })
        .await?;
        self.ring();
        Ok(given)
    }

    /// Gives back messages whose lease ran out and that nobody took yet, at most so many of each lane; answers which.
    pub async fn release_expired(&self, lane: Option<&str>, limit: u32) -> Result<Vec<i64>> {
        let lanes: Vec<(String, bool)> = match lane {
            Some(lane) => vec![(lane.to_owned(), self.lanes().get(lane)?.send_begun)],
            None => self.lanes().iter().map(|(lane, rules)| (lane.to_owned(), rules.send_begun)).collect(),
        };
        let mut released = Vec::new();
        for (lane, send_begun) in lanes {
            let ids = transact(&*self.store, Mode::Write, move |tx| {
                let lane = lane.clone();
                Box::pin(async move { cold::release_expired(tx, &lane, send_begun, limit).await })
            });
            released.extend(ids.await.map_err(|error| error.after(!released.is_empty()))?);
        }
        if !released.is_empty() {
            self.ring();
        }
        Ok(released)
    }

    /// Deletes one batch of audits that ended this long ago; answers how many.
    pub async fn prune_audit(&self, older_than: Duration, limit: u32) -> Result<usize> {
        transact(&*self.store, Mode::Write, move |tx| Box::pin(cold::prune_audit(tx, older_than, limit))).await
    }

    /// Live messages whose lease ran out and that nobody took yet.
    pub async fn expired_leases(&self, lane: Option<&str>, limit: u32) -> Result<Vec<i64>> {
        let lane = lane.map(str::to_owned);
        transact(&*self.store, Mode::Read, move |tx| {
            let lane = lane.clone();
            Box::pin(async move { depths::expired_leases(tx, lane.as_deref(), limit).await })
        })
        .await
    }

    /// Brings dead messages back under their ids, in transactions of many; answers in the order given. Whatever keeps one
    /// from coming back harms no other.
    pub async fn requeue(&self, ids: Vec<i64>) -> Result<Vec<Requeued>> {
        let mut answers = Vec::with_capacity(ids.len());
        let moved = |answers: &[Requeued]| answers.contains(&Requeued::Requeued);
        for part in ids.chunks(requeue::BATCH) {
            let some = self.requeue_some(part).await;
            answers.extend(some.map_err(|error| error.after(moved(&answers)))?);
        }
        // What others held a moment ago is soon free again.
        for _ in 0..HELD_ROUNDS {
            let held: Vec<usize> = (0..ids.len()).filter(|&i| answers[i] == Requeued::Held).collect();
            if held.is_empty() {
                break;
            }
            tokio::time::sleep(HELD_PAUSE).await;
            for part in held.chunks(requeue::BATCH) {
                let again: Vec<i64> = part.iter().map(|&i| ids[i]).collect();
                let some = self.requeue_some(&again).await.map_err(|error| error.after(moved(&answers)))?;
                for (&i, answer) in part.iter().zip(some) {
                    answers[i] = answer;
                }
            }
        }
        Ok(answers)
    }

    /// A batch in one transaction; if one of it is in the way of the others, one by one.
    async fn requeue_some(&self, ids: &[i64]) -> Result<Vec<Requeued>> {
        let answers = match self.requeue_together(ids.to_vec()).await {
            Err(error) if requeue::one_by_one(&error) => {
                let mut answers = Vec::with_capacity(ids.len());
                for &id in ids {
                    answers.extend(match self.requeue_together(vec![id]).await {
                        Err(error) if requeue::one_by_one(&error) => Ok(vec![Requeued::Held]),
                        answer => answer.map_err(|error| error.after(answers.contains(&Requeued::Requeued))),
                    }?);
                }
                Ok(answers)
            }
            answers => answers,
        };
        self.ring();
        answers
    }

    async fn requeue_together(&self, ids: Vec<i64>) -> Result<Vec<Requeued>> {
        let work = Arc::new((self.lanes().clone(), self.owns, ids));
        // Not waiting for locks: what is in the way is told, and the rest goes on.
        transact(&*self.store, Mode::Work, move |tx| {
            let work = work.clone();
            Box::pin(async move { requeue::requeue(tx, &work.2, &work.0, work.1, Held::Skip).await })
        })
        .await
    }

    /// The same of one message inside a transaction of the peer that owns the lane.
    pub async fn requeue_in(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<Requeued> {
        let answers = requeue::requeue(tx, &[id], self.lanes(), self.owns, Held::Wait).await?;
        answers.first().copied().ok_or_else(|| Error::database("a requeue without an answer"))
    }

    /// The next dead messages of a lane that may be requeued here, in the order of their deaths: after `after`, and not after
    /// `until`.
    pub async fn dead(&self, lane: &str, after: Option<Died>, until: Timestamp, limit: u32) -> Result<Vec<Died>> {
        self.lanes().permit_upkeep(lane, self.owns)?;
        let lane: Arc<str> = lane.into();
        transact(&*self.store, Mode::Read, move |tx| {
            let lane = lane.clone();
            Box::pin(async move { requeue::dead(tx, &lane, after, until, limit).await })
        })
        .await
    }

    /// Those of these messages that are dead, in the order given.
    pub async fn dead_among(&self, ids: Vec<i64>) -> Result<Vec<i64>> {
        let ids = Arc::new(ids);
        transact(&*self.store, Mode::Read, move |tx| {
            let ids = ids.clone();
            Box::pin(async move { requeue::dead_among(tx, &ids).await })
        })
        .await
    }

    /// What the database's clock says.
    pub async fn now(&self) -> Result<Timestamp> {
        transact(&*self.store, Mode::Read, |tx| Box::pin(cold::clock(tx))).await
    }

    /// Does the database know this lane, whether or not it is configured here?
    pub async fn has_lane(&self, lane: &str) -> Result<bool> {
        let lanes = transact(&*self.store, Mode::Read, |tx| Box::pin(cold::lane_names(tx))).await?;
        Ok(lanes.iter().any(|known| known == lane))
    }

    /// Deletes one bounded batch of what ended long enough ago; of each lane without an owner, if none is named.
    pub async fn prune(&self, prune: Prune) -> Result<Pruned> {
        if let Some(lane) = prune.lane.clone() {
            self.lanes().permit_upkeep(&lane, self.owns)?;
            return self.prune_lane(lane, prune).await;
        }
        let mut all = Pruned::default();
        let lanes = transact(&*self.store, Mode::Read, |tx| Box::pin(cold::lane_names(tx))).await?;
        for lane in lanes.into_iter().filter(|lane| self.lanes().permit_upkeep(lane, self.owns).is_ok()) {
            let pruned = self.prune_lane(lane, prune.clone()).await;
            let pruned = pruned.map_err(|error| error.after(all != Pruned::default() && !prune.dry_run))?;
            all = Pruned { messages: all.messages + pruned.messages, keys: all.keys + pruned.keys };
        }
        Ok(all)
    }

    async fn prune_lane(&self, lane: String, prune: Prune) -> Result<Pruned> {
        let mode = if prune.dry_run { Mode::Read } else { Mode::Write };
        let work = Arc::new((lane, prune));
        transact(&*self.store, mode, move |tx| {
            let work = work.clone();
            Box::pin(async move { cold::prune(tx, &work.0, &work.1).await })
        })
        .await
    }

    // ---- reads ----

    pub async fn store_id(&self) -> Result<String> {
        transact(&*self.store, Mode::Read, |tx| Box::pin(cold::store_id(tx))).await
    }

    pub async fn stats(&self) -> Result<BTreeMap<String, LaneStats>> {
        let stats = transact(&*self.store, Mode::Count, |tx| Box::pin(depths::stats(tx))).await?;
        Ok(self.with_all_lanes(stats))
    }

    /// Counts of a lane for whoever asks often or from outside: of each kind up to `most`, and whether there may be more.
    /// Bounded, whatever there is.
    pub async fn stats_up_to(&self, lane: &str, most: u64) -> Result<(LaneStats, bool)> {
        let lane: Arc<str> = lane.into();
        transact(&*self.store, Mode::Look, move |tx| {
            let lane = lane.clone();
            Box::pin(async move { depths::stats_up_to(tx, &lane, most).await })
        })
        .await
    }

    /// How fast things went within `window`, who holds what, and how long the oldest waits. Bounded, whatever there is.
    pub async fn pulse(&self, window: Duration) -> Result<Pulse> {
        transact(&*self.store, Mode::Look, move |tx| Box::pin(crate::pulse::pulse(tx, window))).await
    }

    /// Counts on, for at most about `patience`, whatever the backlog; at least one step, and never a second round.
    pub async fn count(&self, counting: &mut Counting, patience: Duration) -> Result<()> {
        let begun = Tick::now();
        loop {
            let before = Arc::new(counting.clone());
            let step = transact(&*self.store, Mode::Look, move |tx| {
                let before = before.clone();
                Box::pin(async move { depths::count(tx, (*before).clone()).await })
            });
            let (after, ended) = step.await?;
            *counting = after;
            if ended || Tick::now().since(begun) >= patience {
                return Ok(());
            }
        }
    }

    /// How long the oldest due message of each lane has waited. Bounded, whatever the backlog.
    pub async fn ages(&self) -> Result<BTreeMap<String, Age>> {
        let mut ages = transact(&*self.store, Mode::Look, |tx| Box::pin(depths::ages(tx))).await?;
        for (lane, _) in self.lanes().iter() {
            ages.entry(lane.to_owned()).or_default();
        }
        Ok(ages)
    }

    /// How many messages of a lane wait or are under way, counted up to `most`.
    pub async fn waiting(&self, lane: &str, most: u64) -> Result<u64> {
        let lane: Arc<str> = lane.into();
        transact(&*self.store, Mode::Look, move |tx| {
            let lane = lane.clone();
            Box::pin(async move { depths::waiting(tx, &lane, most).await })
        })
        .await
    }

    /// What is live, per lane; `sent` and `dead` are not counted. Does not grow with history, but with the backlog.
    pub async fn depths(&self) -> Result<BTreeMap<String, LaneStats>> {
        let stats = transact(&*self.store, Mode::Count, |tx| Box::pin(depths::depths(tx))).await?;
        Ok(self.with_all_lanes(stats))
    }

    fn with_all_lanes(&self, mut stats: BTreeMap<String, LaneStats>) -> BTreeMap<String, LaneStats> {
        for (lane, _) in self.lanes().iter() {
            stats.entry(lane.to_owned()).or_default();
        }
        stats
    }

    /// How the database and the connections to it are doing.
    pub async fn vitals(&self) -> Result<Vitals> {
        self.store.vitals().await
    }

    /// A page of messages, the newest first. It costs a bounded number of rows; a page that is not full but has a `next`
    /// says how far it has looked.
    pub async fn list(&self, filter: Filter) -> Result<Page<Shown>> {
        let filter = Arc::new(filter);
        transact(&*self.store, Mode::Look, move |tx| {
            let filter = filter.clone();
            Box::pin(async move { looking::list(tx, &filter).await })
        })
        .await
    }

    pub async fn show(&self, id: i64) -> Result<Option<(Shown, History)>> {
        transact(&*self.store, Mode::Look, move |tx| Box::pin(looking::show(tx, id))).await
    }

    pub async fn payload(&self, id: i64) -> Result<Option<bytes::Bytes>> {
        transact(&*self.store, Mode::Look, move |tx| Box::pin(looking::payload(tx, id))).await
    }
}
