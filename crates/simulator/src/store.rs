//! The database as a process sees it: the real SQLite store, with rows that somebody else has locked (skipped and answered as
//! PostgreSQL would), transactions that are still open, and answers that are lost.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider::error::{Effect, Error, Kind};
use postrider::lease::{Hold, Lease};
use postrider::outcome::{GiveBack, LeaseState, Settled, Settlement};
use postrider::store::{Claim, Claimed, Mark, Mode, Store, Walked, Work, transact};
use postrider::stores::sqlite::SqliteStore;
use postrider::tx::{Dialect, Value, in_ids};
use postrider::{Lanes, Result, Schema};
use tokio::sync::Notify;

use crate::journal::HIDDEN;

/// What becomes of one transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    Good,
    /// Not even begun.
    Refused,
    /// Not applied, and the caller does not learn it.
    LostBefore,
    /// Applied, and the caller does not learn it.
    LostAfter,
}

/// What is locked is the same for all processes.
#[derive(Default)]
pub struct Locks(Mutex<BTreeMap<i64, bool>>);

impl Locks {
    fn rows(&self) -> MutexGuard<'_, BTreeMap<i64, bool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `weak`: it can be claimed and renewed, and not be settled.
    pub fn lock(&self, id: i64, weak: bool) {
        self.rows().insert(id, weak);
    }

    pub fn release(&self, id: i64) {
        self.rows().remove(&id);
    }

    pub fn release_all(&self) {
        self.rows().clear();
    }

    pub fn any(&self, id: i64) -> bool {
        self.rows().contains_key(&id)
    }

    /// Nobody can change it at all.
    pub fn strong(&self, id: i64) -> bool {
        self.rows().get(&id) == Some(&false)
    }

    pub fn is_empty(&self) -> bool {
        self.rows().is_empty()
    }

    fn hidden(&self) -> Vec<i64> {
        self.rows().iter().filter(|(_, weak)| !**weak).map(|(id, _)| *id).collect()
    }
}

/// Transactions under way: whoever waits for one waits for nothing else.
#[derive(Default)]
pub struct Activity {
    under_way: AtomicUsize,
    ended: Notify,
}

impl Activity {
    pub fn is_busy(&self) -> bool {
        self.under_way.load(Ordering::SeqCst) > 0
    }

    /// Until one has ended.
    pub async fn idle(&self) {
        self.ended.notified().await;
    }
}

/// Counts one transaction.
struct UnderWay<'a>(&'a Activity);

impl<'a> UnderWay<'a> {
    fn new(activity: &'a Activity) -> Self {
        activity.under_way.fetch_add(1, Ordering::SeqCst);
        UnderWay(activity)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
        self.0.ended.notify_one();
    }
}

pub struct SimStore {
    pub inner: Arc<SqliteStore>,
    pub locks: Arc<Locks>,
    pub activity: Arc<Activity>,
    lanes: Arc<Lanes>,
    /// What becomes of the next transactions, in order; then they are good.
    replies: Mutex<VecDeque<Reply>>,
}

pub fn lost() -> Error {
    Error { kind: Kind::Unreachable, effect: Effect::Unknown, message: "simulated".to_owned() }
}

pub fn refused() -> Error {
    Error { kind: Kind::Unreachable, effect: Effect::NotApplied, message: "simulated".to_owned() }
}

impl SimStore {
    pub fn new(inner: Arc<SqliteStore>, lanes: Arc<Lanes>, locks: Arc<Locks>, activity: Arc<Activity>) -> Self {
        SimStore { inner, lanes, locks, activity, replies: Mutex::default() }
    }

    /// Says what becomes of the next transactions.
    pub fn expect(&self, replies: impl IntoIterator<Item = Reply>) {
        let mut queue = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        queue.clear();
        queue.extend(replies);
    }

    fn reply(&self) -> Reply {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner).pop_front().unwrap_or(Reply::Good)
    }

    /// Takes rows out of everybody's sight, or brings them back.
    pub async fn hide(&self, ids: &[i64], hide: bool) -> Result<()> {
        let (ids, by) = (ids.to_vec(), if hide { HIDDEN } else { -HIDDEN });
        transact(&*self.inner, Mode::Write, move |tx| {
            let ids = ids.clone();
            Box::pin(async move {
                let mut params: Vec<Value> = vec![by.into()];
                let list = in_ids(Dialect::Sqlite, &ids, &mut params);
                tx.execute(&format!("UPDATE outbox SET shard_id = shard_id + ? WHERE id {list}"), &params).await
            })
        })
        .await
        .map(drop)
    }

    /// A transaction, which leaves alone what somebody else has locked: the journal's triggers refuse changes of what is
    /// hidden.
    async fn apply(&self, mode: Mode, work: Work) -> Result<()> {
        let hidden = if mode == Mode::Write { self.locks.hidden() } else { vec![] };
        if hidden.is_empty() {
            return self.inner.transact(mode, work).await;
        }
        self.hide(&hidden, true).await?;
        let applied = self.inner.transact(mode, work).await;
        self.hide(&hidden, false).await?;
        applied
    }

    /// Of these leases, those that are in force.
    async fn in_force(&self, owner: &str, leases: Vec<Lease>) -> Result<Vec<Lease>> {
        let owner = owner.to_owned();
        transact(&*self.inner, Mode::Read, move |tx| {
            let (owner, leases) = (owner.clone(), leases.clone());
            Box::pin(async move {
                let mut held = Vec::new();
                for lease in leases {
                    let sql = "SELECT lease_token, locked_by FROM outbox WHERE id = ?";
                    for row in tx.query(sql, &[lease.id.into()]).await? {
                        let hold = Hold { token: row.int(0)?, locked_by: row.opt_text(1)?, ..Hold::default() };
                        held.extend(hold.accepts(lease.token, &owner).then_some(lease));
                    }
                }
                Ok(held)
            })
        })
        .await
    }

    /// Which of these leases are in force and cannot be touched.
    async fn locked(&self, owner: &str, leases: impl Iterator<Item = Lease>, weak: bool) -> Result<Vec<Lease>> {
        let met = |lease: &Lease| if weak { self.locks.any(lease.id) } else { self.locks.strong(lease.id) };
        let met: Vec<Lease> = leases.filter(met).collect();
        if met.is_empty() { Ok(met) } else { self.in_force(owner, met).await }
    }
}

#[async_trait]
impl Store for SimStore {
    fn dialect(&self) -> Dialect {
        self.inner.dialect()
    }

    fn lanes(&self) -> &Arc<Lanes> {
        &self.lanes
    }

    fn schema(&self) -> &Schema {
        self.inner.schema()
    }

    async fn migrate(&self) -> Result<Vec<String>> {
        self.inner.migrate().await
    }

    async fn claim(&self, claim: &Claim) -> Result<Claimed> {
        let hidden = self.locks.hidden();
        if hidden.is_empty() {
            return self.inner.claim(claim).await;
        }
        self.hide(&hidden, true).await?;
        let claimed = self.inner.claim(claim).await;
        self.hide(&hidden, false).await?;
        claimed
    }

    async fn walk(&self, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked> {
        self.inner.walk(lane, shard, after, limit).await
    }

    async fn settle(&self, lane: &str, owner: &str, entries: &[Settlement]) -> Result<Vec<Settled>> {
        let locked = self.locked(owner, entries.iter().map(|e| e.lease), true).await?;
        let free: Vec<Settlement> = entries.iter().filter(|e| !locked.contains(&e.lease)).cloned().collect();
        let mut answers = self.inner.settle(lane, owner, &free).await?.into_iter();
        let answer = |e: &Settlement| if locked.contains(&e.lease) { Some(Settled::Locked) } else { answers.next() };
        Ok(entries.iter().filter_map(answer).collect())
    }

    async fn renew(&self, owner: &str, leases: &[Lease], lease: Duration) -> Result<Vec<LeaseState>> {
        let locked = self.locked(owner, leases.iter().copied(), false).await?;
        let free: Vec<Lease> = leases.iter().filter(|l| !locked.contains(l)).copied().collect();
        Ok(merge(leases, &locked, self.inner.renew(owner, &free, lease).await?))
    }

    async fn defer(&self, owner: &str, leases: &[Lease], how: &GiveBack) -> Result<Vec<LeaseState>> {
        match self.reply() {
            Reply::Good => {}
            Reply::Refused => return Err(refused()),
            _ => return Err(lost()),
        }
        let locked = self.locked(owner, leases.iter().copied(), false).await?;
        let free: Vec<Lease> = leases.iter().filter(|l| !locked.contains(l)).copied().collect();
        Ok(merge(leases, &locked, self.inner.defer(owner, &free, how).await?))
    }

    async fn transact(&self, mode: Mode, work: Work) -> Result<()> {
        let _under_way = UnderWay::new(&self.activity);
        match self.reply() {
            Reply::Good => self.apply(mode, work).await,
            Reply::Refused => Err(refused()),
            Reply::LostBefore => Err(lost()),
            Reply::LostAfter => self.apply(mode, work).await.and(Err(lost())),
        }
    }

    fn advance_clock(&self, by: Duration) {
        self.inner.advance_clock(by);
    }
}

fn merge(leases: &[Lease], locked: &[Lease], free: Vec<LeaseState>) -> Vec<LeaseState> {
    let mut free = free.into_iter();
    let state = |lease: &Lease| if locked.contains(lease) { Some(LeaseState::Locked) } else { free.next() };
    leases.iter().filter_map(state).collect()
}
