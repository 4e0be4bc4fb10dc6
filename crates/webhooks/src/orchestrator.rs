//! The orchestrator: the only code that moves sagas. It applies results, starts what is due, and lets held subscriptions
//! through as their gates allow. Any number of them may run: each takes what no other has locked.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use postrider::alerts::Alert;
use postrider::store::Mode;
use postrider::tx::{Dialect, Row, Tx, Value, in_ids};
use postrider::{Enqueued, Error, Result, Timestamp, clock};

use crate::Webhooks;
use crate::catalog;
use crate::decide::{Event, Status, Verdict, admits, after_failure, refill, rest_after};
use crate::publish::Job;
use crate::subscriptions::{Subscription, SubscriptionStatus};

/// Sagas of one transaction.
const BATCH: usize = 500;
/// How often it looks without being told.
const TICK: Duration = Duration::from_millis(200);
/// Results that come together are applied together.
const GATHER: Duration = Duration::from_millis(15);
/// Deliveries at a time to a receiver that has only failed lately.
const TRIAL: u32 = 8;
/// How often health is looked at, and what is old is deleted.
const HEALTH_EVERY: Duration = Duration::from_secs(5);
const PRUNE_EVERY: Duration = Duration::from_secs(30);
/// A receiver that asks for time gets at most this much for all its deliveries.
const LONGEST_HOLD: Duration = Duration::from_secs(3600);

/// Every query that looks for work, as text: what the EXPLAIN tests look at.
pub const QUERIES: [&str; 6] = [
    "SELECT job_id, saga_id, attempt, success, error_code, retry_after FROM webhook_results ORDER BY job_id LIMIT 500",
    "SELECT id, event_id, subscription_id, attempt_count, final_error_code FROM webhook_delivery_sagas WHERE status = ? AND next_attempt_at <= ? ORDER BY next_attempt_at LIMIT 500",
    "SELECT id, event_id, subscription_id, attempt_count, final_error_code FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = ? AND next_attempt_at = ? ORDER BY id LIMIT 500",
    "SELECT id, event_id, subscription_id, attempt_count, final_error_code FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = ? ORDER BY next_attempt_at, id LIMIT 500",
    "SELECT COUNT(*) FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = 'InProgress'",
    "SELECT subscription_id FROM subscription_gates WHERE parked = 1 LIMIT 10000",
];

/// A saga that waits for its next job.
struct Waiting {
    id: i64,
    event_id: i64,
    subscription_id: i64,
    attempt_count: u32,
    final_error_code: Option<String>,
    status: Status,
}

fn waiting(row: &Row, status: Status) -> Result<Waiting> {
    Ok(Waiting {
        id: row.int(0)?,
        event_id: row.int(1)?,
        subscription_id: row.int(2)?,
        attempt_count: row.int(3)? as u32,
        final_error_code: row.opt_text(4)?,
        status,
    })
}

fn skip_locked(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" }
}

/// What a result says.
struct Told {
    job_id: i64,
    saga_id: i64,
    attempt: u32,
    success: bool,
    error_code: String,
    retry_after: Option<Duration>,
}

/// What one look at everything brought.
struct Round {
    moved: usize,
    /// More was due than one look takes.
    more_due: bool,
}

/// What applying results brought.
#[derive(Default)]
struct Applied {
    results: usize,
    /// Subscriptions that want no more (410).
    gone: Vec<i64>,
    /// A gate began to cool down.
    held: bool,
}

impl Webhooks {
    /// Moves sagas until `shutdown` resolves.
    pub async fn orchestrate(&self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = std::pin::pin!(shutdown);
        let (mut health_at, mut prune_at) = (clock::Tick::default(), clock::Tick::now());
        let mut looked_at = None;
        loop {
            // Told of results only: what is due is looked for at its own pace.
            let tick = clock::Tick::now();
            let look = looked_at.is_none_or(|at| tick.since(at) >= TICK / 2);
            if look {
                looked_at = Some(tick);
            }
            let busy = match self.round(look).await {
                Ok(Round { moved, more_due }) => {
                    if more_due {
                        looked_at = None;
                    }
                    moved >= BATCH
                }
                Err(error) => {
                    tracing::warn!(%error, "the orchestrator could not go on; it will try again");
                    tokio::select! { () = &mut shutdown => return, () = tokio::time::sleep(Duration::from_secs(1)) => {} }
                    false
                }
            };
            let now = clock::Tick::now();
            if now.since(health_at) >= HEALTH_EVERY {
                health_at = now;
                if let Err(error) = self.look_after_health().await {
                    tracing::warn!(%error, "the health of subscriptions could not be looked at");
                }
            }
            if now.since(prune_at) >= PRUNE_EVERY {
                prune_at = now;
                if let Err(error) = self.prune().await {
                    tracing::warn!(%error, "what is old could not be deleted; it will be tried again");
                }
            }
            if busy {
                tokio::select! { biased; () = &mut shutdown => return, () = tokio::task::yield_now() => {} }
                continue;
            }
            tokio::select! {
                () = &mut shutdown => return,
                () = self.0.work.notified() => tokio::time::sleep(GATHER).await,
                () = tokio::time::sleep(TICK.mul_f64(0.75 + clock::chance() / 2.0)) => {}
            }
        }
    }

    /// One look at everything; answers how many sagas moved. For tests and `--once`.
    pub async fn pass(&self) -> Result<usize> {
        Ok(self.round(true).await?.moved)
    }

    async fn round(&self, look: bool) -> Result<Round> {
        let mut moved = self.apply_results().await?;
        let mut more_due = false;
        if look {
            for status in [Status::Pending, Status::PendingRetry] {
                let started = self.start_due(status).await?;
                more_due |= started >= BATCH;
                moved += started;
            }
            moved += self.replay_step().await?;
        }
        moved += self.admit_parked().await?;
        if moved > 0 {
            self.0.outbox.ring();
        }
        Ok(Round { moved, more_due })
    }

    // ---- results ----

    async fn apply_results(&self) -> Result<usize> {
        let webhooks = self.clone();
        let applied = self
            .transact(Mode::Write, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move { webhooks.apply_some(tx).await })
            })
            .await?;
        for id in applied.gone {
            self.disable_and_tell(id, "HTTP_410").await?;
        }
        if applied.held {
            self.doubt();
        }
        Ok(applied.results)
    }

    async fn apply_some(&self, tx: &mut (dyn Tx + Send)) -> Result<Applied> {
        let sql = format!("{}{}", QUERIES[0], skip_locked(tx.dialect()));
        let mut told = Vec::new();
        for row in tx.query(&sql, &[]).await? {
            told.push(Told {
                job_id: row.int(0)?,
                saga_id: row.int(1)?,
                attempt: row.int(2)? as u32,
                success: row.bool(3)?,
                error_code: row.opt_text(4)?.unwrap_or_default(),
                retry_after: row.opt_int(5)?.map(|secs| Duration::from_secs(secs as u64)),
            });
        }
        if told.is_empty() {
            return Ok(Applied::default());
        }
        let mut applied = Applied { results: told.len(), ..Applied::default() };
        let subscriptions = subscriptions_of(tx, &told).await?;
        // Never an old one: a subscription that seems gone would be given up.
        let (catalog, now) = self.catalog_in(tx).await?;
        self.complete(tx, &told, now).await?;
        let mut failures: BTreeMap<i64, (i64, Option<Duration>)> = BTreeMap::new();
        let mut deaths: BTreeMap<i64, i64> = BTreeMap::new();
        for result in told.iter().filter(|result| !result.success) {
            let Some(&subscription_id) = subscriptions.get(&result.saga_id) else { continue };
            let died = self.fail(tx, result, catalog.get(subscription_id), now).await?;
            *deaths.entry(subscription_id).or_default() += i64::from(died);
            let entry = failures.entry(subscription_id).or_default();
            entry.0 += 1;
            entry.1 = entry.1.max(result.retry_after);
            if result.error_code == "HTTP_410" && !applied.gone.contains(&subscription_id) {
                applied.gone.push(subscription_id);
            }
        }
        let succeeded = told.iter().filter(|result| result.success);
        let healthy: Vec<i64> = succeeded.filter_map(|result| subscriptions.get(&result.saga_id).copied()).collect();
        applied.held = self.note_health(tx, healthy, &failures, now).await?;
        self.tell_of_deaths(tx, &deaths).await?;
        let jobs: Vec<i64> = told.iter().map(|result| result.job_id).collect();
        let mut params = Vec::new();
        let list = in_ids(tx.dialect(), &jobs, &mut params);
        tx.execute(&format!("DELETE FROM webhook_results WHERE job_id {list}"), &params).await?;
        Ok(applied)
    }

    /// `InProgress` → `Completed`. A result that was applied before finds its saga elsewhere and changes nothing.
    async fn complete(&self, tx: &mut (dyn Tx + Send), told: &[Told], now: Timestamp) -> Result<()> {
        let mut by_attempt: BTreeMap<u32, Vec<i64>> = BTreeMap::new();
        for result in told.iter().filter(|result| result.success) {
            by_attempt.entry(result.attempt).or_default().push(result.saga_id);
        }
        for (attempt, mut ids) in by_attempt {
            ids.sort_unstable();
            let to = moves(Status::InProgress, Event::Succeeded)?;
            let mut params: Vec<Value> = vec![to.as_str().into(), i64::from(attempt).into(), now.into()];
            let list = in_ids(tx.dialect(), &ids, &mut params);
            params.push((i64::from(attempt) - 1).into());
            let sql = format!(
                "UPDATE webhook_delivery_sagas SET status = ?, attempt_count = {}, next_attempt_at = NULL, updated_at = ?
                 WHERE id {list} AND status = 'InProgress' AND attempt_count = {}",
                int(tx.dialect()),
                int(tx.dialect())
            );
            tx.execute(&sql, &params).await?;
        }
        Ok(())
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
        let (int, time) = (int(tx.dialect()), time(tx.dialect()));
        let sql = format!(
            "UPDATE webhook_delivery_sagas SET status = ?, attempt_count = {int}, next_attempt_at = {time}, final_error_code = ?, updated_at = ?
             WHERE id = ? AND status = 'InProgress' AND attempt_count = {int}"
        );
        let moved = tx.execute(&sql, &params).await? == 1;
        let died = moved && to == Status::DeadLettered;
        if died {
            bury(tx, &[result.saga_id], now).await?;
        }
        Ok(died)
    }

    /// Gates count failures since the last success, and cool down when asked to; answers whether one began to.
    async fn note_health(
        &self,
        tx: &mut (dyn Tx + Send),
        mut healthy: Vec<i64>,
        failures: &BTreeMap<i64, (i64, Option<Duration>)>,
        now: Timestamp,
    ) -> Result<bool> {
        healthy.sort_unstable();
        healthy.dedup();
        let mut held = false;
        if !healthy.is_empty() {
            let mut params = Vec::new();
            let list = in_ids(tx.dialect(), &healthy, &mut params);
            let sql =
                format!("UPDATE subscription_gates SET failures = 0 WHERE subscription_id {list} AND failures > 0");
            tx.execute(&sql, &params).await?;
        }
        for (id, (count, retry_after)) in failures {
            if !healthy.contains(id) {
                let sql = "UPDATE subscription_gates SET failures = failures + ? WHERE subscription_id = ?";
                tx.execute(sql, &[(*count).into(), (*id).into()]).await?;
            }
            let asked = retry_after.filter(|asked| !asked.is_zero());
            let rest = if healthy.contains(id) { None } else { self.rest(tx, *id).await? };
            if let Some(asked) = asked.max(rest) {
                let until = now.plus(asked.min(LONGEST_HOLD));
                let sql = "UPDATE subscription_gates SET held_until = ? WHERE subscription_id = ?";
                tx.execute(sql, &[until.into(), (*id).into()]).await?;
                catalog::bump(tx).await?;
                held = true;
            }
        }
        Ok(held)
    }

    /// How long a receiver that only fails is to be left alone.
    async fn rest(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<Duration>> {
        let sql = "SELECT failures FROM subscription_gates WHERE subscription_id = ?";
        let rows = tx.query(sql, &[id.into()]).await?;
        Ok(rows.first().map(|row| row.int(0)).transpose()?.and_then(rest_after))
    }

    async fn tell_of_deaths(&self, tx: &mut (dyn Tx + Send), deaths: &BTreeMap<i64, i64>) -> Result<()> {
        let Some(alerts) = &self.0.alerts else { return Ok(()) };
        for (subscription_id, count) in deaths.iter().filter(|death| *death.1 > 0) {
            let alert = Alert {
                kind: "dead_letters",
                subject: format!("subscription {subscription_id}"),
                message: format!(
                    "{count} webhook deliveries to subscription {subscription_id} were given up; look: postrider webhooks dead-letters, bring back: postrider webhooks requeue ID"
                ),
                count: *count,
                details: serde_json::json!({ "subscription_id": subscription_id }),
            };
            alerts.raise(tx, &alert).await?;
        }
        Ok(())
    }

    // ---- starting ----

    async fn start_due(&self, status: Status) -> Result<usize> {
        let webhooks = self.clone();
        self.transact(Mode::Write, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move { webhooks.start_some(tx, status).await })
        })
        .await
    }

    async fn start_some(&self, tx: &mut (dyn Tx + Send), status: Status) -> Result<usize> {
        let (catalog, now) = self.catalog_in(tx).await?;
        let sql = format!("{}{}", QUERIES[1], skip_locked(tx.dialect()));
        let rows = tx.query(&sql, &[status.as_str().into(), now.into()]).await?;
        let due = rows.iter().map(|row| waiting(row, status)).collect::<Result<Vec<_>>>()?;
        let (mut start, mut park, mut give_up) = (Vec::new(), Vec::new(), Vec::new());
        for saga in due {
            match catalog.get(saga.subscription_id).filter(|s| s.status != SubscriptionStatus::Disabled) {
                None => give_up.push(saga),
                Some(s) if saga.attempt_count >= s.retry_rules(&self.0.settings).limit => give_up.push(saga),
                Some(s) if catalog.is_free(s, now) => start.push(saga),
                Some(_) => park.push(saga),
            }
        }
        self.give_up(tx, &give_up, now).await?;
        self.park(tx, &park).await?;
        self.start(tx, &start, now).await?;
        Ok(start.len() + park.len() + give_up.len())
    }

    /// `Pending` or `PendingRetry` → `InProgress`, with its job.
    async fn start(&self, tx: &mut (dyn Tx + Send), sagas: &[Waiting], now: Timestamp) -> Result<()> {
        if sagas.is_empty() {
            return Ok(());
        }
        let to = moves(sagas[0].status, Event::JobCreated)?;
        let mut ids: Vec<i64> = sagas.iter().map(|saga| saga.id).collect();
        ids.sort_unstable();
        let mut params: Vec<Value> = vec![to.as_str().into(), now.into()];
        let list = in_ids(tx.dialect(), &ids, &mut params);
        params.push(sagas[0].status.as_str().into());
        let sql =
            format!("UPDATE webhook_delivery_sagas SET status = ?, updated_at = ? WHERE id {list} AND status = ?");
        if tx.execute(&sql, &params).await? != ids.len() as u64 {
            return Err(Error::new(postrider::error::Kind::Busy, "a saga moved meanwhile"));
        }
        let job = |saga: &Waiting| {
            let Waiting { id, event_id, subscription_id, attempt_count, .. } = *saga;
            Job { saga_id: id, attempt: attempt_count + 1, event_id, subscription_id }.message()
        };
        let jobs: Vec<_> = sagas.iter().map(job).collect();
        let receipt = self.0.outbox.enqueue_in(tx, &jobs).await?;
        match receipt.entries().iter().find(|entry| entry.outcome != Enqueued::Created) {
            None => Ok(()),
            Some(entry) => Err(Error::database(format!("a saga that waits has a live job already, {}", entry.id))),
        }
    }

    /// Held back: admitted later, as the gate allows.
    async fn park(&self, tx: &mut (dyn Tx + Send), sagas: &[Waiting]) -> Result<()> {
        if sagas.is_empty() {
            return Ok(());
        }
        let mut params: Vec<Value> = vec![Timestamp::FAR_FUTURE.into()];
        let ids: Vec<i64> = sagas.iter().map(|saga| saga.id).collect();
        let list = in_ids(tx.dialect(), &ids, &mut params);
        let sql = format!("UPDATE webhook_delivery_sagas SET next_attempt_at = ? WHERE id {list}");
        tx.execute(&sql, &params).await?;
        let mut gates: Vec<i64> = sagas.iter().map(|saga| saga.subscription_id).collect();
        gates.sort_unstable();
        gates.dedup();
        let mut params = Vec::new();
        let list = in_ids(tx.dialect(), &gates, &mut params);
        let sql = format!("UPDATE subscription_gates SET parked = 1 WHERE subscription_id {list} AND parked = 0");
        tx.execute(&sql, &params).await.map(drop)
    }

    /// `Pending` or `PendingRetry` → `DeadLettered`.
    async fn give_up(&self, tx: &mut (dyn Tx + Send), sagas: &[Waiting], now: Timestamp) -> Result<()> {
        let mut deaths: BTreeMap<i64, i64> = BTreeMap::new();
        for saga in sagas {
            let to = moves(saga.status, Event::GivenUp)?;
            // Out of attempts: its last error says why. Else its subscription is disabled or gone.
            let code = saga.final_error_code.clone().filter(|_| saga.attempt_count > 0);
            let code = code.unwrap_or_else(|| "SUBSCRIPTION_DISABLED".to_owned());
            let params: [Value; 5] =
                [to.as_str().into(), code.into(), now.into(), saga.id.into(), saga.status.as_str().into()];
            let sql = "UPDATE webhook_delivery_sagas SET status = ?, next_attempt_at = NULL, final_error_code = ?, updated_at = ? WHERE id = ? AND status = ?";
            if tx.execute(sql, &params).await? == 1 {
                bury(tx, &[saga.id], now).await?;
                *deaths.entry(saga.subscription_id).or_default() += 1;
            }
        }
        self.tell_of_deaths(tx, &deaths).await
    }

    // ---- gates ----

    async fn admit_parked(&self) -> Result<usize> {
        let gates = self
            .transact(Mode::Read, |tx| {
                Box::pin(async move {
                    let rows = tx.query(QUERIES[5], &[]).await?;
                    rows.iter().map(|row| row.int(0)).collect::<Result<Vec<i64>>>()
                })
            })
            .await?;
        let mut moved = 0;
        for id in gates {
            // A paused one is passed over without a transaction; if it was resumed just now, the next round sees it.
            let known = self.catalog().await?;
            if known.get(id).is_some_and(|s| s.status == SubscriptionStatus::Paused) {
                continue;
            }
            let webhooks = self.clone();
            moved += self
                .transact(Mode::Write, move |tx| {
                    let webhooks = webhooks.clone();
                    Box::pin(async move { webhooks.admit(tx, id).await })
                })
                .await?;
        }
        Ok(moved)
    }

    async fn admit(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<usize> {
        let (catalog, now) = self.catalog_in(tx).await?;
        let subscription = catalog.get(id).cloned();
        let held = subscription.as_ref().is_some_and(|s| s.status == SubscriptionStatus::Paused);
        if held || catalog.is_cooling(id, now) {
            return Ok(0);
        }
        let sql = format!(
            "SELECT tokens, tokens_at, failures FROM subscription_gates WHERE subscription_id = ? AND parked = 1{}",
            skip_locked(tx.dialect())
        );
        let rows = tx.query(&sql, &[id.into()]).await?;
        let Some(gate) = rows.first() else { return Ok(0) };
        let alive = subscription.filter(|s| s.status != SubscriptionStatus::Disabled);
        let Some(subscription) = alive else {
            return self.bury_parked(tx, id, catalog.get(id).is_none(), now).await;
        };
        let elapsed = gate.opt_time(1)?.map_or(Duration::from_secs(1), |at| now.since(at));
        let tokens = subscription
            .rate_per_sec
            .map(|rate| refill(gate.opt_float(0).ok().flatten().unwrap_or(0.0), rate, elapsed));
        let in_flight = match subscription.max_in_flight.is_some() || rest_after(gate.int(2)?).is_some() {
            false => 0,
            true => tx.query(QUERIES[4], &[id.into()]).await?.first().map_or(Ok(0), |row| row.int(0))? as u32,
        };
        // One that has only failed lately is tried with a few.
        let trial = rest_after(gate.int(2)?).map(|_| TRIAL);
        let most = subscription.max_in_flight.into_iter().chain(trial).min();
        let room = admits(tokens, most, in_flight, BATCH);
        let mut admitted = 0;
        for status in [Status::PendingRetry, Status::Pending] {
            let sagas = parked(tx, id, status, room - admitted).await?;
            self.start(tx, &sagas, now).await?;
            admitted += sagas.len();
        }
        let empty = admitted < room || (room == 0 && self.none_parked(tx, id).await?);
        let left = tokens.map_or(0.0, |tokens| tokens - admitted as f64);
        let params: [Value; 5] = [
            left.into(),
            now.into(),
            i64::from(in_flight + admitted as u32).into(),
            i64::from(!empty).into(),
            id.into(),
        ];
        // Where nothing passed and nothing changed, nothing is written.
        if admitted > 0 || empty {
            let int = int(tx.dialect());
            let sql = format!(
                "UPDATE subscription_gates SET tokens = ?, tokens_at = ?, in_flight = {int}, parked = {int} WHERE subscription_id = ?"
            );
            tx.execute(&sql, &params).await?;
        }
        Ok(admitted)
    }

    async fn none_parked(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
        for status in [Status::PendingRetry, Status::Pending] {
            if !parked(tx, id, status, 1).await?.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Its subscription is disabled or gone: whatever waits ends, due or not.
    async fn bury_parked(&self, tx: &mut (dyn Tx + Send), id: i64, gone: bool, now: Timestamp) -> Result<usize> {
        let mut buried = 0;
        for status in [Status::Pending, Status::PendingRetry] {
            let sql = format!("{}{}", QUERIES[3], skip_locked(tx.dialect()));
            let rows = tx.query(&sql, &[id.into(), status.as_str().into()]).await?;
            let sagas = rows.iter().map(|row| waiting(row, status)).collect::<Result<Vec<_>>>()?;
            self.give_up(tx, &sagas, now).await?;
            buried += sagas.len();
        }
        if buried == 0 {
            let sql = match gone {
                true => "DELETE FROM subscription_gates WHERE subscription_id = ?",
                false => "UPDATE subscription_gates SET parked = 0 WHERE subscription_id = ?",
            };
            tx.execute(sql, &[id.into()]).await?;
        }
        Ok(buried)
    }
}

/// The oldest that are parked.
async fn parked(tx: &mut (dyn Tx + Send), id: i64, status: Status, limit: usize) -> Result<Vec<Waiting>> {
    if limit == 0 {
        return Ok(vec![]);
    }
    let sql = QUERIES[2].replacen("LIMIT 500", &format!("LIMIT {limit}"), 1);
    let sql = format!("{sql}{}", skip_locked(tx.dialect()));
    let rows = tx.query(&sql, &[id.into(), status.as_str().into(), Timestamp::FAR_FUTURE.into()]).await?;
    rows.iter().map(|row| waiting(row, status)).collect()
}

/// The state machine's word on it; the statement says the same again.
fn moves(from: Status, event: Event) -> Result<Status> {
    from.next(event).map_err(|illegal| Error::database(format!("{illegal:?}")))
}

fn int(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "?::int" } else { "?" }
}

fn time(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "?::timestamptz" } else { "?" }
}

async fn subscriptions_of(tx: &mut (dyn Tx + Send), told: &[Told]) -> Result<HashMap<i64, i64>> {
    let ids: Vec<i64> = told.iter().map(|result| result.saga_id).collect();
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &ids, &mut params);
    let sql = format!("SELECT id, subscription_id FROM webhook_delivery_sagas WHERE id {list}");
    tx.query(&sql, &params).await?.iter().map(|row| Ok((row.int(0)?, row.int(1)?))).collect()
}

/// The dead letters of sagas that have just died, with the payload as it was.
async fn bury(tx: &mut (dyn Tx + Send), sagas: &[i64], now: Timestamp) -> Result<()> {
    let mut params: Vec<Value> = vec![now.into()];
    let list = in_ids(tx.dialect(), sagas, &mut params);
    let time = time(tx.dialect());
    let nothing = if tx.dialect() == Dialect::Sqlite { "COALESCE(e.payload, X'')" } else { "COALESCE(e.payload, '')" };
    let sql = format!(
        "INSERT INTO dead_letters (saga_id, event_id, subscription_id, final_error_code, payload_snapshot, failed_at)
         SELECT s.id, s.event_id, s.subscription_id, s.final_error_code, {nothing}, {time}
         FROM webhook_delivery_sagas s LEFT JOIN events e ON e.id = s.event_id WHERE s.id {list}"
    );
    tx.execute(&sql, &params).await.map(drop)
}
