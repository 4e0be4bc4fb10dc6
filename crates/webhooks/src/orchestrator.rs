//! The orchestrator: the only code that moves sagas. It applies results (`results.rs`), starts what is due
//! (`starting.rs`), lets held subscriptions through as their gates allow (`gates.rs`), and finds again what waits for
//! nobody (`sweep.rs`). Any number of them may run: each takes what no other has locked.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

use postrider::alerts::Alert;
use postrider::tx::{Dialect, Row, Tx, Value, in_ids};
use postrider::{Error, Result, Timestamp, clock};

use crate::Webhooks;
use crate::decide::{Event, Status};

/// Sagas of one transaction.
pub(crate) const BATCH: usize = 500;
/// How often it looks without being told.
const TICK: Duration = Duration::from_millis(200);
/// Results that come together are applied together.
const GATHER: Duration = Duration::from_millis(15);
/// How often health is looked at, and what is old is deleted.
const HEALTH_EVERY: Duration = Duration::from_secs(5);
const PRUNE_EVERY: Duration = Duration::from_secs(30);
/// How often those are looked for that wait in vain, and jobs that were put off for what is over.
const SWEEP_EVERY: Duration = Duration::from_secs(5);
const WAKE_EVERY: Duration = Duration::from_secs(1);

/// Every query that looks for work, as text: what the EXPLAIN tests look at.
pub const QUERIES: [&str; 8] = [
    "SELECT job_id, saga_id, attempt, success, error_code, retry_after, sent_version FROM webhook_results WHERE job_id > ? ORDER BY job_id LIMIT 500",
    "SELECT id, event_id, subscription_id, attempt_count, final_error_code FROM webhook_delivery_sagas WHERE status = ? AND next_attempt_at <= ? ORDER BY next_attempt_at LIMIT 500",
    "SELECT id, event_id, subscription_id, attempt_count, final_error_code FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = ? AND next_attempt_at = ? ORDER BY id LIMIT 500",
    "SELECT id, event_id, subscription_id, attempt_count, final_error_code FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = ? ORDER BY next_attempt_at, id LIMIT 500",
    "SELECT COUNT(*) FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = 'InProgress'",
    "SELECT subscription_id, held_until FROM subscription_gates WHERE parked = 1 AND subscription_id > ? ORDER BY subscription_id LIMIT 1000",
    "SELECT id FROM webhook_delivery_sagas WHERE status = 'InProgress' AND id > ? ORDER BY id LIMIT 500",
    "SELECT subscription_id, held_until FROM subscription_gates WHERE held_until IS NOT NULL",
];

/// A query as a database is asked it. MySQL may merge two indexes where one has all it needs.
pub fn query(dialect: Dialect, n: usize) -> String {
    match dialect {
        Dialect::Mysql if n == 1 => QUERIES[n].replacen(
            "webhook_delivery_sagas",
            "webhook_delivery_sagas FORCE INDEX (idx_saga_status_retry)",
            1,
        ),
        _ => QUERIES[n].to_owned(),
    }
}

/// A saga that waits for its next job.
pub(crate) struct Waiting {
    pub id: i64,
    pub event_id: i64,
    pub subscription_id: i64,
    pub attempt_count: u32,
    pub final_error_code: Option<String>,
    pub status: Status,
}

pub(crate) fn waiting(row: &Row, status: Status) -> Result<Waiting> {
    Ok(Waiting {
        id: row.int(0)?,
        event_id: row.int(1)?,
        subscription_id: row.int(2)?,
        attempt_count: row.int(3)? as u32,
        final_error_code: row.opt_text(4)?,
        status,
    })
}

pub(crate) fn skip_locked(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" }
}

/// The sagas, where they are changed by their ids. MySQL locks every row it looks at, and by another index, or past the rest
/// of the table, those would be somebody else's.
pub(crate) fn sagas_by_id(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Mysql => "webhook_delivery_sagas FORCE INDEX (PRIMARY)",
        _ => "webhook_delivery_sagas",
    }
}

/// What one look at everything brought.
struct Round {
    moved: usize,
    /// More was due than one look takes.
    more_due: bool,
}

impl Webhooks {
    /// Moves sagas until `shutdown` resolves.
    pub async fn orchestrate(&self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = std::pin::pin!(shutdown);
        let (mut health_at, mut prune_at) = (clock::Tick::default(), clock::Tick::now());
        let (mut sweep_at, mut wake_at) = (clock::Tick::default(), clock::Tick::default());
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
            // Each has its time counted from its end: what takes long is not due again at once.
            if clock::Tick::now().since(health_at) >= HEALTH_EVERY {
                if let Err(error) = self.look_after_health().await {
                    tracing::warn!(%error, "the health of subscriptions could not be looked at");
                }
                health_at = clock::Tick::now();
            }
            if clock::Tick::now().since(wake_at) >= WAKE_EVERY {
                if let Err(error) = self.wake_deferred(None).await {
                    tracing::warn!(%error, "jobs that were put off could not be looked at; it will be tried again");
                }
                wake_at = clock::Tick::now();
            }
            if clock::Tick::now().since(sweep_at) >= SWEEP_EVERY {
                if let Err(error) = self.sweep().await {
                    tracing::warn!(%error, "what waits in vain could not be looked for; it will be tried again");
                }
                sweep_at = clock::Tick::now();
            }
            if clock::Tick::now().since(prune_at) >= PRUNE_EVERY {
                if let Err(error) = self.prune().await {
                    tracing::warn!(%error, "what is old could not be deleted; it will be tried again");
                }
                prune_at = clock::Tick::now();
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

    /// What an orchestrator does beside, now and then: for simulators.
    #[doc(hidden)]
    pub async fn look_around(&self) -> Result<()> {
        self.wake_deferred(None).await?;
        self.sweep().await?;
        self.look_after_health().await.map(drop)
    }

    async fn round(&self, look: bool) -> Result<Round> {
        // What fails is no reason for the others to wait: it is told at the end.
        let mut failed = None;
        let mut done = |result: Result<usize>| {
            result.unwrap_or_else(|error| {
                failed.get_or_insert(error);
                0
            })
        };
        let mut moved = done(self.apply_results().await);
        let mut more_due = false;
        if look {
            for status in [Status::Pending, Status::PendingRetry] {
                let started = done(self.start_due(status).await);
                more_due |= started >= BATCH;
                moved += started;
            }
            moved += done(self.replay_step().await);
        }
        moved += done(self.admit_parked().await);
        if moved > 0 {
            self.0.outbox.ring();
        }
        failed.map_or(Ok(Round { moved, more_due }), Err)
    }
}

// ---- what its files share ----

impl Webhooks {
    /// `Pending` or `PendingRetry` → `DeadLettered`.
    pub(crate) async fn give_up(&self, tx: &mut (dyn Tx + Send), sagas: &[Waiting], now: Timestamp) -> Result<()> {
        let mut deaths: BTreeMap<i64, i64> = BTreeMap::new();
        for saga in sagas {
            let to = moves(saga.status, Event::GivenUp)?;
            // Out of attempts: its last error says why. Else its subscription is disabled or gone.
            let code = saga.final_error_code.clone().filter(|_| saga.attempt_count > 0);
            let code = code.unwrap_or_else(|| "SUBSCRIPTION_DISABLED".to_owned());
            let params: [Value; 5] =
                [to.as_str().into(), code.into(), now.into(), saga.id.into(), saga.status.as_str().into()];
            let table = sagas_by_id(tx.dialect());
            let sql = format!(
                "UPDATE {table} SET status = ?, next_attempt_at = NULL, final_error_code = ?, updated_at = ? WHERE id = ? AND status = ?"
            );
            if tx.execute(&sql, &params).await? == 1 {
                bury(tx, &[saga.id], now).await?;
                *deaths.entry(saga.subscription_id).or_default() += 1;
            }
        }
        self.tell_of_deaths(tx, &deaths).await
    }

    pub(crate) async fn tell_of_deaths(&self, tx: &mut (dyn Tx + Send), deaths: &BTreeMap<i64, i64>) -> Result<()> {
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
}

/// The state machine's word on it; the statement says the same again.
pub(crate) fn moves(from: Status, event: Event) -> Result<Status> {
    from.next(event).map_err(|illegal| Error::database(format!("{illegal:?}")))
}

pub(crate) fn int(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "?::int" } else { "?" }
}

pub(crate) fn time(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "?::timestamptz" } else { "?" }
}

/// The dead letters of sagas that have just died, with the payload as it was.
pub(crate) async fn bury(tx: &mut (dyn Tx + Send), sagas: &[i64], now: Timestamp) -> Result<()> {
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
