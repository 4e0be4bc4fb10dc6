//! What waits is found again: every state that waits for somebody has a query here that finds all who wait in vain, whatever
//! race, crash or hand led there. The orchestrators run them in bounded pages; the doctor asks the same.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postrider::store::Mode;
use postrider::tx::{Dialect, Row, Tx, Value, in_ids};
use postrider::{Enqueued, Result, Timestamp};

use crate::courier::{PAUSED, RESTING};
use crate::decide::Status;
use crate::orchestrator::{BATCH, QUERIES, sagas_by_id, skip_locked, waiting};
use crate::publish::Job;
use crate::subscriptions::SubscriptionStatus;
use crate::{LANE, Webhooks};

/// Subscriptions of one page.
const PAGE: i64 = 400;
/// Pages of live deliveries in one sweep.
const PAGES: usize = 4;

/// Where the sweeps of this process are.
#[derive(Default)]
pub(crate) struct Cursors {
    parked: AtomicI64,
    under_way: AtomicI64,
    deferred: Mutex<Option<(Timestamp, i64)>>,
}

/// Subscriptions with parked deliveries that nobody will look at, since their gate says that there are none or is not
/// there; and where the next page begins. One entry of an index for every subscription.
pub(crate) async fn parked_in_vain(
    tx: &mut (dyn Tx + Send),
    after: i64,
    before: Option<Timestamp>,
) -> Result<(Vec<i64>, Option<i64>)> {
    // The distinct ids, each found by one step in the index: a DISTINCT would walk all deliveries.
    let sql = format!(
        "WITH RECURSIVE t (id, n) AS (
             SELECT MIN(subscription_id), 1 FROM webhook_delivery_sagas WHERE subscription_id > ?
             UNION ALL
             SELECT (SELECT MIN(s.subscription_id) FROM webhook_delivery_sagas s WHERE s.subscription_id > t.id), t.n + 1 FROM t
             WHERE t.id IS NOT NULL AND t.n < {PAGE})
         SELECT t.id, COALESCE(g.parked, 0) FROM t LEFT JOIN subscription_gates g ON g.subscription_id = t.id WHERE t.id IS NOT NULL ORDER BY t.id"
    );
    let rows = tx.query(&sql, &[after.into()]).await?;
    let next = (rows.len() as i64 == PAGE).then(|| rows.last().map(|row| row.int(0)).transpose()).transpose()?;
    let closed = rows.iter().filter(|row| row.int(1).is_ok_and(|parked| parked == 0));
    let closed = closed.map(|row| row.int(0)).collect::<Result<Vec<i64>>>()?;
    if closed.is_empty() {
        return Ok((vec![], next.flatten()));
    }
    let mut params: Vec<Value> = Vec::new();
    let list = in_ids(tx.dialect(), &closed, &mut params);
    params.push(Timestamp::FAR_FUTURE.into());
    let long = if before.is_some() { " AND s.updated_at < ?" } else { "" };
    params.extend(before.map(Value::from));
    // Usually there are none, so this is a step in the index for each of them. The gate is asked again in the same statement:
    // by now one may have been parked there in good order.
    let sql = format!(
        "SELECT DISTINCT s.subscription_id FROM webhook_delivery_sagas s
         WHERE s.subscription_id {list} AND s.status IN ('Pending', 'PendingRetry') AND s.next_attempt_at = ?{long}
           AND NOT EXISTS (SELECT 1 FROM subscription_gates g WHERE g.subscription_id = s.subscription_id AND g.parked > 0)"
    );
    let found = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    Ok((found, next.flatten()))
}

/// Their gates are looked at again, and made where there is none; one that somebody else has locked is left to the next look. Answers which.
pub(crate) async fn reopen_gates(tx: &mut (dyn Tx + Send), ids: &[i64]) -> Result<Vec<i64>> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), ids, &mut params);
    let gates = format!("SELECT subscription_id FROM subscription_gates WHERE subscription_id {list}");
    let ids_of = |rows: Vec<Row>| rows.iter().map(|row| row.int(0)).collect::<Result<HashSet<i64>>>();
    let there = ids_of(tx.query(&gates, &params).await?)?;
    let order = format!("{gates} ORDER BY subscription_id{}", skip_locked(tx.dialect()));
    let free = ids_of(tx.query(&order, &params).await?)?;
    for id in ids.iter().filter(|id| free.contains(id)) {
        tx.execute("UPDATE subscription_gates SET parked = 1 WHERE subscription_id = ?", &[(*id).into()]).await?;
    }
    let make = match tx.dialect() {
        Dialect::Mysql => "INSERT IGNORE INTO subscription_gates (subscription_id, parked) VALUES (?, 1)",
        _ => {
            "INSERT INTO subscription_gates (subscription_id, parked) VALUES (?, 1) ON CONFLICT (subscription_id) DO NOTHING"
        }
    };
    for id in ids.iter().filter(|id| !there.contains(id)) {
        tx.execute(make, &[(*id).into()]).await?;
    }
    Ok(ids.iter().copied().filter(|id| free.contains(id) || !there.contains(id)).collect())
}

/// Deliveries that wait without a time, which no look by time finds.
pub(crate) async fn without_time(tx: &mut (dyn Tx + Send)) -> Result<Vec<i64>> {
    let mut found = Vec::new();
    for status in [Status::Pending, Status::PendingRetry] {
        let sql =
            format!("SELECT id FROM webhook_delivery_sagas WHERE status = ? AND next_attempt_at IS NULL LIMIT {BATCH}");
        let rows = tx.query_often(&sql, &[status.as_str().into()]).await?;
        found.extend(rows.iter().map(|row| row.int(0)).collect::<Result<Vec<_>>>()?);
    }
    Ok(found)
}

/// Makes them due; what somebody else has locked is left to the next look. Answers which.
pub(crate) async fn make_due(tx: &mut (dyn Tx + Send), ids: &[i64]) -> Result<Vec<i64>> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let mut params: Vec<Value> = Vec::new();
    let list = in_ids(tx.dialect(), ids, &mut params);
    let sql = format!(
        "SELECT id FROM {} WHERE id {list} AND next_attempt_at IS NULL AND status IN ('Pending', 'PendingRetry') ORDER BY id{}",
        sagas_by_id(tx.dialect()),
        skip_locked(tx.dialect())
    );
    let free = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<Vec<i64>>>()?;
    if !free.is_empty() {
        let mut params: Vec<Value> = Vec::new();
        let (due, now) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
        let list = in_ids(tx.dialect(), &free, &mut params);
        let table = sagas_by_id(tx.dialect());
        let sql = format!("UPDATE {table} SET next_attempt_at = {due}, updated_at = {now} WHERE id {list}");
        tx.execute(&sql, &params).await?;
    }
    Ok(free)
}

fn key_of(saga_id: i64) -> String {
    format!("saga:{saga_id}")
}

/// Of these deliveries under way, those that have neither a live job nor a result.
async fn without_job(tx: &mut (dyn Tx + Send), ids: &[i64]) -> Result<Vec<i64>> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let marks = vec!["?"; ids.len()].join(", ");
    let mut params: Vec<Value> = vec![LANE.into()];
    params.extend(ids.iter().map(|id| Value::from(key_of(*id))));
    let sql = format!("SELECT active_key FROM outbox WHERE lane = ? AND active_key IN ({marks})");
    let rows = tx.query(&sql, &params).await?;
    let keys = rows.iter().map(|row| row.text(0)).collect::<Result<HashSet<String>>>()?;
    let left: Vec<i64> = ids.iter().copied().filter(|id| !keys.contains(&key_of(*id))).collect();
    if left.is_empty() {
        return Ok(left);
    }
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &left, &mut params);
    let sql = format!("SELECT saga_id FROM webhook_results WHERE saga_id {list}");
    let rows = tx.query(&sql, &params).await?;
    let told = rows.iter().map(|row| row.int(0)).collect::<Result<HashSet<i64>>>()?;
    Ok(left.into_iter().filter(|id| !told.contains(id)).collect())
}

/// A page of deliveries under way: those nobody works on, and where the next page begins.
pub(crate) async fn under_way_in_vain(tx: &mut (dyn Tx + Send), after: i64) -> Result<(Vec<i64>, Option<i64>)> {
    let rows = tx.query_often(QUERIES[6], &[after.into()]).await?;
    let ids = rows.iter().map(|row| row.int(0)).collect::<Result<Vec<i64>>>()?;
    let next = (ids.len() == BATCH).then(|| ids.last().copied()).flatten();
    Ok((without_job(tx, &ids).await?, next))
}

impl Webhooks {
    /// One look for what waits in vain; each in a transaction of its own and a bounded page, which the next look goes on
    /// from.
    pub(crate) async fn sweep(&self) -> Result<()> {
        // What keeps one of them up is not the other's.
        let parked = self.sweep_parked().await;
        self.sweep_under_way().await.and(parked)
    }

    async fn sweep_parked(&self) -> Result<()> {
        let cursor = &self.0.cursors.parked;
        let after = cursor.load(Ordering::Relaxed);
        let (found, next) =
            self.transact(Mode::Read, move |tx| Box::pin(async move { parked_in_vain(tx, after, None).await })).await?;
        cursor.store(next.unwrap_or(0), Ordering::Relaxed);
        if !found.is_empty() {
            let reopened = self.transact(Mode::Work, move |tx| {
                let found = found.clone();
                Box::pin(async move { reopen_gates(tx, &found).await })
            });
            let reopened = reopened.await?;
            if !reopened.is_empty() {
                tracing::warn!(subscriptions = ?reopened, "deliveries were parked where nobody looked; they are looked at again");
            }
        }
        self.transact(Mode::Work, |tx| {
            Box::pin(async move {
                let found = without_time(tx).await?;
                make_due(tx, &found).await.map(drop)
            })
        })
        .await
    }

    async fn sweep_under_way(&self) -> Result<()> {
        let cursor = &self.0.cursors.under_way;
        for _ in 0..PAGES {
            let after = cursor.load(Ordering::Relaxed);
            let (found, next) = self
                .transact(Mode::Read, move |tx| Box::pin(async move { under_way_in_vain(tx, after).await }))
                .await?;
            cursor.store(next.unwrap_or(0), Ordering::Relaxed);
            if !found.is_empty() {
                self.give_jobs(found).await?;
            }
            if next.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// A new job for each of these deliveries that has none, each checked again under its lock. The attempt is the same: how
    /// the last one ended is not known. Answers which.
    pub(crate) async fn give_jobs(&self, ids: Vec<i64>) -> Result<Vec<i64>> {
        let webhooks = self.clone();
        let given = self
            .transact(Mode::Work, move |tx| {
                let (webhooks, ids) = (webhooks.clone(), ids.clone());
                Box::pin(async move {
                    let mut params = Vec::new();
                    let list = in_ids(tx.dialect(), &ids, &mut params);
                    // Whoever applies a result holds its saga: what is still under way here has a job, a result, or nothing.
                    let sql = format!(
                        "SELECT id, event_id, subscription_id, attempt_count, final_error_code FROM webhook_delivery_sagas
                         WHERE id {list} AND status = 'InProgress' ORDER BY id{}",
                        skip_locked(tx.dialect())
                    );
                    let rows = tx.query(&sql, &params).await?;
                    let sagas =
                        rows.iter().map(|row| waiting(row, Status::InProgress)).collect::<Result<Vec<_>>>()?;
                    let idle = without_job(tx, &sagas.iter().map(|saga| saga.id).collect::<Vec<_>>()).await?;
                    let jobs: Vec<_> = sagas
                        .iter()
                        .filter(|saga| idle.contains(&saga.id))
                        .map(|saga| Job {
                            saga_id: saga.id,
                            attempt: saga.attempt_count + 1,
                            event_id: saga.event_id,
                            subscription_id: saga.subscription_id,
                        })
                        .collect();
                    let messages: Vec<_> = jobs.iter().map(|job| job.message()).collect();
                    let receipt = webhooks.0.outbox.enqueue_in(tx, &messages).await?;
                    let made = jobs.iter().zip(receipt.entries()).filter(|(_, entry)| entry.outcome == Enqueued::Created);
                    Ok(made.map(|(job, _)| job.saga_id).collect::<Vec<i64>>())
                })
            })
            .await?;
        if !given.is_empty() {
            tracing::warn!(sagas = ?given, "deliveries under way had no job; they have one again");
            self.ring();
        }
        Ok(given)
    }

    /// Jobs that were put off while their subscription is free: because it has been resumed since, or its rest is over.
    /// The latest first, which those are that met a resume; then, with every look, a page of the others. With an id: all
    /// of that subscription. Answers how many were woken.
    pub(crate) async fn wake_deferred(&self, only: Option<i64>) -> Result<u64> {
        let mut woken = 0;
        let mut before: Option<(Timestamp, i64)> = None;
        loop {
            let (keys, next) = self.deferred_in_vain(before, only, Duration::ZERO).await?;
            if !keys.is_empty() {
                woken += self.0.outbox.wake(LANE, keys).await?;
            }
            match (next, only) {
                (None, _) => {
                    *self.cursor() = None;
                    return Ok(woken);
                }
                (next, Some(_)) => before = next,
                // The first page, then the one the last look ended before.
                (next, None) if before.is_none() => {
                    let resumed = *self.cursor();
                    before = resumed.filter(|at| Some(*at) < next).or(next);
                }
                (next, None) => {
                    *self.cursor() = next;
                    return Ok(woken);
                }
            }
        }
    }

    fn cursor(&self) -> MutexGuard<'_, Option<(Timestamp, i64)>> {
        self.0.cursors.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page of jobs that were put off, the latest first: the keys of those whose subscription is free, and where the next
    /// page begins.
    pub(crate) async fn deferred_in_vain(
        &self,
        before: Option<(Timestamp, i64)>,
        only: Option<i64>,
        stood: Duration,
    ) -> Result<(Vec<String>, Option<(Timestamp, i64)>)> {
        let webhooks = self.clone();
        let shards = self.0.outbox.lanes().get(LANE)?.shards;
        self.transact(Mode::Read, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move {
                let (catalog, now) = webhooks.catalog_in(tx).await?;
                let (mut keys, mut next) = (Vec::new(), None);
                let mut held: HashMap<i64, bool> = HashMap::new();
                for shard in 0..shards {
                    let (end, id) = before.unwrap_or((Timestamp::FAR_FUTURE, i64::MAX));
                    let least = now.plus(Duration::from_secs(1));
                    let params: [Value; 6] =
                        [LANE.into(), shard.into(), least.into(), end.into(), end.into(), id.into()];
                    let sql = format!(
                        "SELECT due_at, id, active_key, target, updated_at, last_error_code FROM outbox
                         WHERE lane = ? AND shard_id = ? AND due_at > ? AND due_at <= ? AND (due_at < ? OR id < ?) AND locked_by IS NULL
                         ORDER BY due_at DESC, id DESC LIMIT {BATCH}"
                    );
                    let rows = tx.query_often(&sql, &params).await?;
                    for row in &rows {
                        let subscription = row.opt_text(3)?.and_then(|target| target.parse::<i64>().ok());
                        let Some(id) = subscription.filter(|id| only.is_none_or(|only| only == *id)) else { continue };
                        if !row.opt_text(5)?.is_some_and(|code| [PAUSED, RESTING].contains(&code.as_str())) {
                            continue;
                        }
                        let held = match held.get(&id) {
                            Some(held) => *held,
                            None => {
                                let paused = catalog.get(id).is_some_and(|s| s.status == SubscriptionStatus::Paused);
                                let is_held = paused || is_held(tx, id).await?;
                                held.insert(id, is_held);
                                is_held
                            }
                        };
                        let long = row.opt_time(4)?.is_none_or(|at| now.since(at) >= stood);
                        if let Some(key) = row.opt_text(2)?.filter(|_| !held && long) {
                            keys.push(key);
                        }
                    }
                    if rows.len() == BATCH {
                        let last = rows.last().map(|row| Ok((row.time(0)?, row.int(1)?))).transpose()?;
                        next = next.max(last);
                    }
                }
                Ok((keys, next))
            })
        })
        .await
    }
}

/// Does its gate hold this subscription back? One whose rest is over and that has not succeeded since is tried with a few,
/// so what was put off comes at its time.
async fn is_held(tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
    let sql = "SELECT 1 FROM subscription_gates WHERE subscription_id = ? AND held_until IS NOT NULL";
    Ok(!tx.query_often(sql, &[id.into()]).await?.is_empty())
}
