//! Results: each is applied once, to the saga that waits for it. What a receiver's answers say of its health is noted in its
//! gate, and one that is gone is disabled in the same transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use postrider::store::Mode;
use postrider::tx::{Row, Tx, Value, delete_by, in_ids};
use postrider::{Result, Timestamp, clock};

use crate::catalog::Catalog;
use crate::decide::{Event, Failing, Status, Verdict, after_failure, is_receivers, rest_after};
use crate::orchestrator::{BATCH, QUERIES, bury, int, moves, sagas_by_id, skip_locked, time};
use crate::subscriptions::{GONE, Subscription, SubscriptionStatus};
use crate::{Webhooks, health};

/// A receiver that asks for time gets at most this much for all its deliveries.
const LONGEST_HOLD: Duration = Duration::from_secs(3600);

/// What a result says.
struct Told {
    job_id: i64,
    saga_id: i64,
    attempt: u32,
    success: bool,
    error_code: String,
    retry_after: Option<Duration>,
    /// Of its subscription, when it was sent.
    version: Option<i64>,
}

fn told(row: &Row) -> Result<Told> {
    Ok(Told {
        job_id: row.int(0)?,
        saga_id: row.int(1)?,
        attempt: row.int(2)? as u32,
        success: row.bool(3)?,
        error_code: row.opt_text(4)?.unwrap_or_default(),
        retry_after: row.opt_int(5)?.map(|secs| Duration::from_secs(secs as u64)),
        version: row.opt_int(6)?,
    })
}

/// A saga that results speak of, locked.
struct Met {
    subscription_id: i64,
    status: Status,
    attempt_count: u32,
}

/// Is this the result its saga waits for? One that was applied before finds its saga elsewhere.
fn is_awaited(saga: &Met, result: &Told) -> bool {
    saga.status == Status::InProgress && saga.attempt_count + 1 == result.attempt
}

/// What came of one subscription's receiver.
#[derive(Default)]
struct Seen {
    succeeded: bool,
    failures: i64,
    retry_after: Option<Duration>,
    gone: bool,
}

/// What applying results brought.
#[derive(Default)]
struct Applied {
    results: usize,
    /// Gates that were closed until then, or opened.
    held: Vec<(i64, Option<Timestamp>)>,
    /// Somebody was disabled.
    disabled: bool,
    /// Where the next page begins, if something of a full one had to wait for somebody else's lock.
    next: i64,
}

impl Webhooks {
    pub(crate) async fn apply_results(&self) -> Result<usize> {
        // What waits for somebody else's lock must not keep those behind it waiting: page by page, then from the first.
        let after = self.0.results_after.swap(0, Ordering::Relaxed);
        let webhooks = self.clone();
        let applied = self
            .transact(Mode::Work, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move { webhooks.apply_some(tx, after).await })
            })
            .await?;
        self.0.results_after.store(applied.next, Ordering::Relaxed);
        for (id, until) in applied.held {
            self.note_hold(id, until);
        }
        if applied.disabled {
            self.doubt();
        }
        Ok(applied.results)
    }

    async fn apply_some(&self, tx: &mut (dyn Tx + Send), after: i64) -> Result<Applied> {
        let sql = format!("{}{}", QUERIES[0], skip_locked(tx.dialect()));
        let told = tx.query(&sql, &[after.into()]).await?.iter().map(told).collect::<Result<Vec<_>>>()?;
        if told.is_empty() {
            return Ok(Applied::default());
        }
        let (mut sagas, mut held_back) = sagas_of(tx, &told).await?;
        // Never an old one: a subscription that seems gone would be given up.
        let (catalog, now) = self.catalog_in(tx).await?;
        // Who says 410 is disabled in this very transaction, or not at all: else its results wait.
        let gone = |result: &&Told| !result.success && result.error_code == GONE;
        let leaving = told.iter().filter(gone).filter_map(|result| Some(sagas.get(&result.saga_id)?.subscription_id));
        let leaving: BTreeSet<i64> = leaving.collect();
        let free = health::changeable(tx, &leaving).await?;
        let stays = |result: &Told, saga: &Met| gone(&result) && !free.contains(&saga.subscription_id);
        held_back.extend(told.iter().filter_map(|result| {
            sagas.get(&result.saga_id).filter(|saga| stays(result, saga)).map(|_| result.saga_id)
        }));
        let mut awaited = Vec::new();
        for result in told.iter().filter(|result| !held_back.contains(&result.saga_id)) {
            // The first one counts; whatever else speaks of the same attempt changes nothing.
            if let Some(saga) = sagas.get_mut(&result.saga_id).filter(|saga| is_awaited(saga, result)) {
                saga.status = if result.success { Status::Completed } else { Status::PendingRetry };
                awaited.push((result, saga.subscription_id));
            }
        }
        complete(tx, &awaited, now).await?;
        let mut deaths: BTreeMap<i64, i64> = BTreeMap::new();
        for (result, subscription_id) in awaited.iter().filter(|(result, _)| !result.success) {
            let died = self.fail(tx, result, catalog.get(*subscription_id), now).await?;
            *deaths.entry(*subscription_id).or_default() += i64::from(died);
        }
        let seen = seen(&awaited, &catalog);
        let mut applied = Applied::default();
        for id in seen.iter().filter(|(_, seen)| seen.gone).map(|(id, _)| *id) {
            applied.disabled |= self.disable_and_tell(tx, id, GONE).await?;
        }
        applied.held = self.note_health(tx, &seen, now).await?;
        self.tell_of_deaths(tx, &deaths).await?;
        let done = told.iter().filter(|result| !held_back.contains(&result.saga_id));
        let jobs: Vec<i64> = done.map(|result| result.job_id).collect();
        let mut params = Vec::new();
        let sql = delete_by(tx.dialect(), ("webhook_results", "job_id"), &jobs, &mut params);
        tx.execute(&sql, &params).await?;
        applied.results = jobs.len();
        if told.len() == BATCH && !held_back.is_empty() {
            applied.next = told.last().map_or(0, |last| last.job_id);
        }
        Ok(applied)
    }

    /// `InProgress` → `PendingRetry` or `DeadLettered`; answers whether it died.
    async fn fail(
        &self,
        tx: &mut (dyn Tx + Send),
        result: &Told,
        subscription: Option<&Arc<Subscription>>,
        now: Timestamp,
    ) -> Result<bool> {
        let alive = subscription.filter(|s| s.status != SubscriptionStatus::Disabled);
        let verdict = match alive {
            None => Verdict::DeadLetter,
            Some(subscription) => {
                let rules = subscription.retry_rules(&self.0.settings);
                after_failure(&rules, result.attempt, &result.error_code, result.retry_after, clock::chance())
            }
        };
        let (may_retry, due) = match verdict {
            Verdict::Retry { delay } => (true, Some(now.plus(delay))),
            Verdict::DeadLetter => (false, None),
        };
        let to = moves(Status::InProgress, Event::Failed { may_retry })?;
        let mut params: Vec<Value> = vec![to.as_str().into(), i64::from(result.attempt).into(), due.into()];
        params.extend([result.error_code.as_str().into(), now.into(), result.saga_id.into()]);
        params.push((i64::from(result.attempt) - 1).into());
        let (int, time, table) = (int(tx.dialect()), time(tx.dialect()), sagas_by_id(tx.dialect()));
        let sql = format!(
            "UPDATE {table} SET status = ?, attempt_count = {int}, next_attempt_at = {time}, final_error_code = ?, updated_at = ?
             WHERE id = ? AND status = 'InProgress' AND attempt_count = {int}"
        );
        let moved = tx.execute(&sql, &params).await? == 1;
        let died = moved && to == Status::DeadLettered;
        if died {
            bury(tx, &[result.saga_id], now).await?;
        }
        Ok(died)
    }

    /// Gates count failures since the last success, and close when asked to. What others hold is left alone: the next
    /// answer of the receiver says the same.
    async fn note_health(
        &self,
        tx: &mut (dyn Tx + Send),
        seen: &BTreeMap<i64, Seen>,
        now: Timestamp,
    ) -> Result<Vec<(i64, Option<Timestamp>)>> {
        let mut changing: Vec<i64> = Vec::new();
        let healthy: Vec<i64> = seen.iter().filter(|(_, seen)| seen.failures == 0).map(|(id, _)| *id).collect();
        if !healthy.is_empty() {
            let mut params = Vec::new();
            let list = in_ids(tx.dialect(), &healthy, &mut params);
            let sql = format!(
                "SELECT subscription_id FROM subscription_gates WHERE subscription_id {list} AND (failures > 0 OR held_until IS NOT NULL)"
            );
            let rows = tx.query(&sql, &params).await?;
            changing.extend(rows.iter().map(|row| row.int(0)).collect::<Result<Vec<_>>>()?);
        }
        changing.extend(seen.iter().filter(|(_, seen)| seen.failures > 0 && !seen.gone).map(|(id, _)| *id));
        if changing.is_empty() {
            return Ok(vec![]);
        }
        let mut params = Vec::new();
        let list = in_ids(tx.dialect(), &changing, &mut params);
        let sql = format!(
            "SELECT subscription_id, failures, held_until, failing_from, failed_at, spell_at, spells FROM subscription_gates
             WHERE subscription_id {list} ORDER BY subscription_id{}",
            skip_locked(tx.dialect())
        );
        let mut held = Vec::new();
        for row in tx.query(&sql, &params).await? {
            let id = row.int(0)?;
            let Some(seen) = seen.get(&id) else { continue };
            let old = row.opt_time(2)?;
            let mut failing = Failing {
                failures: row.int(1)?,
                from: row.opt_time(3)?,
                last: row.opt_time(4)?,
                spell: row.opt_time(5)?,
                spells: row.int(6)?,
            };
            if seen.succeeded {
                failing = Failing::default();
            } else {
                failing.note(seen.failures, now, self.0.settings.disable_after);
            }
            let asked = seen.retry_after.filter(|asked| !asked.is_zero()).max(rest_after(failing.failures));
            let until = match asked {
                Some(asked) => Some(now.plus(asked.min(LONGEST_HOLD))),
                None if seen.succeeded => None,
                None => old,
            };
            let (int, time) = (int(tx.dialect()), time(tx.dialect()));
            let sql = format!(
                "UPDATE subscription_gates SET failures = ?, held_until = {time}, failing_from = {time}, failed_at = {time}, spell_at = {time}, spells = {int} WHERE subscription_id = ?"
            );
            let Failing { failures, from, last, spell, spells } = failing;
            let params: [Value; 7] =
                [failures.into(), until.into(), from.into(), last.into(), spell.into(), spells.into(), id.into()];
            tx.execute(&sql, &params).await?;
            if until != old {
                held.push((id, until));
            }
        }
        Ok(held)
    }
}

/// The sagas of these results, locked; and those that somebody else holds, whose results wait.
async fn sagas_of(tx: &mut (dyn Tx + Send), told: &[Told]) -> Result<(HashMap<i64, Met>, Vec<i64>)> {
    let ids: Vec<i64> = told.iter().map(|result| result.saga_id).collect();
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &ids, &mut params);
    let sql = format!(
        "SELECT id, subscription_id, status, attempt_count FROM webhook_delivery_sagas WHERE id {list} ORDER BY id{}",
        skip_locked(tx.dialect())
    );
    let mut sagas = HashMap::new();
    for row in tx.query(&sql, &params).await? {
        // The schema has no other words.
        let status = Status::parse(&row.text(2)?).unwrap_or(Status::DeadLettered);
        sagas.insert(row.int(0)?, Met { subscription_id: row.int(1)?, status, attempt_count: row.int(3)? as u32 });
    }
    let missing: Vec<i64> = ids.into_iter().filter(|id| !sagas.contains_key(id)).collect();
    if missing.is_empty() {
        return Ok((sagas, vec![]));
    }
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &missing, &mut params);
    let rows = tx.query(&format!("SELECT id FROM webhook_delivery_sagas WHERE id {list}"), &params).await?;
    Ok((sagas, rows.iter().map(|row| row.int(0)).collect::<Result<_>>()?))
}

/// `InProgress` → `Completed`.
async fn complete(tx: &mut (dyn Tx + Send), awaited: &[(&Told, i64)], now: Timestamp) -> Result<()> {
    let mut by_attempt: BTreeMap<u32, Vec<i64>> = BTreeMap::new();
    for (result, _) in awaited.iter().filter(|(result, _)| result.success) {
        by_attempt.entry(result.attempt).or_default().push(result.saga_id);
    }
    for (attempt, mut ids) in by_attempt {
        ids.sort_unstable();
        let to = moves(Status::InProgress, Event::Succeeded)?;
        let mut params: Vec<Value> = vec![to.as_str().into(), i64::from(attempt).into(), now.into()];
        let list = in_ids(tx.dialect(), &ids, &mut params);
        params.push((i64::from(attempt) - 1).into());
        let sql = format!(
            "UPDATE {} SET status = ?, attempt_count = {}, next_attempt_at = NULL, updated_at = ?
             WHERE id {list} AND status = 'InProgress' AND attempt_count = {}",
            sagas_by_id(tx.dialect()),
            int(tx.dialect()),
            int(tx.dialect())
        );
        tx.execute(&sql, &params).await?;
    }
    Ok(())
}

/// By subscription. What was sent to a URL that has been changed since says nothing of the receiver there is now.
fn seen(awaited: &[(&Told, i64)], catalog: &Catalog) -> BTreeMap<i64, Seen> {
    let mut all: BTreeMap<i64, Seen> = BTreeMap::new();
    for (result, id) in awaited {
        let Some(subscription) = catalog.get(*id) else { continue };
        if result.version.is_some_and(|version| version < subscription.url_version) {
            continue;
        }
        if result.success {
            all.entry(*id).or_default().succeeded = true;
        } else if is_receivers(&result.error_code) {
            let seen = all.entry(*id).or_default();
            seen.failures += 1;
            seen.retry_after = seen.retry_after.max(result.retry_after);
            seen.gone |= result.error_code == GONE;
        }
    }
    all
}
