//! Gates: what lets the deliveries of a subscription through that is limited, paused or left alone. What is parked there is
//! admitted under the gate's lock.

use std::sync::atomic::Ordering;

use postrider::error::Class;
use postrider::store::Mode;
use postrider::tx::{Tx, Value};
use postrider::{Result, Timestamp};

use crate::Webhooks;
use crate::decide::{Status, admits, refill, rest_after};
use crate::orchestrator::{BATCH, QUERIES, Waiting, int, skip_locked, time, waiting};
use crate::subscriptions::SubscriptionStatus;

/// Deliveries at a time to a receiver that has only failed lately.
const TRIAL: u32 = 8;
/// Gates of one look; the next one goes on where it ended.
const PAGE: usize = 1000;

const WAIT: [Status; 2] = [Status::PendingRetry, Status::Pending];

impl Webhooks {
    pub(crate) async fn admit_parked(&self) -> Result<usize> {
        let after = self.0.gates_seen.load(Ordering::Relaxed);
        let webhooks = self.clone();
        let (catalog, now, gates) = self
            .transact(Mode::Read, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move {
                    let (catalog, now) = webhooks.catalog_in(tx).await?;
                    let rows = tx.query_often(QUERIES[5], &[after.into()]).await?;
                    let gate = |row: &postrider::tx::Row| Ok((row.int(0)?, row.opt_time(1)?));
                    Ok((catalog, now, rows.iter().map(gate).collect::<Result<Vec<_>>>()?))
                })
            })
            .await?;
        let next = if gates.len() == PAGE { gates.last().map_or(0, |gate| gate.0) } else { 0 };
        self.0.gates_seen.store(next, Ordering::Relaxed);
        let mut moved = 0;
        for (id, held_until) in gates {
            // Those that are paused or left alone are passed over without a transaction; the next round sees them again.
            let paused = catalog.get(id).is_some_and(|s| s.status == SubscriptionStatus::Paused);
            let resting = catalog.get(id).is_some_and(|s| s.status == SubscriptionStatus::Active)
                && held_until.is_some_and(|until| until > now);
            if paused || resting {
                continue;
            }
            let webhooks = self.clone();
            let admitted = self.transact(Mode::Work, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move { webhooks.admit(tx, id).await })
            });
            match admitted.await {
                Ok(admitted) => moved += admitted,
                // The database is away: so it is for all of them.
                Err(error) if error.class() == Class::Retryable => return Err(error),
                Err(error) => tracing::error!(%error, subscription_id = id, "a gate could not be looked at"),
            }
        }
        Ok(moved)
    }

    async fn admit(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<usize> {
        let sql = format!(
            "SELECT tokens, tokens_at, failures, held_until FROM subscription_gates WHERE subscription_id = ? AND parked = 1{}",
            skip_locked(tx.dialect())
        );
        let rows = tx.query(&sql, &[id.into()]).await?;
        let Some(gate) = rows.first() else { return Ok(0) };
        let (catalog, now) = self.catalog_in(tx).await?;
        let Some(subscription) = catalog.get(id).filter(|s| s.status != SubscriptionStatus::Disabled) else {
            return self.bury_parked(tx, id, catalog.get(id).is_none(), now).await;
        };
        let held_until = gate.opt_time(3)?;
        if subscription.status == SubscriptionStatus::Paused || held_until.is_some_and(|until| until > now) {
            return Ok(0);
        }
        let since = gate.opt_time(1)?.map(|at| now.since(at));
        let tokens =
            subscription.rate_per_sec.map(|rate| refill(gate.opt_float(0).ok().flatten().unwrap_or(0.0), rate, since));
        // One that has only failed lately is tried with a few.
        let trial = rest_after(gate.int(2)?).map(|_| TRIAL);
        let most = subscription.max_in_flight.into_iter().chain(trial).min();
        let in_flight = match most {
            None => 0,
            Some(_) => tx.query(QUERIES[4], &[id.into()]).await?.first().map_or(Ok(0), |row| row.int(0))? as u32,
        };
        let room = admits(tokens, most, in_flight, BATCH);
        let limit = subscription.retry_rules(&self.0.settings).limit;
        let (mut admitted, mut given_up) = (0, 0);
        for status in WAIT {
            let sagas = parked(tx, id, status, room - admitted).await?;
            let (start, end): (Vec<Waiting>, Vec<Waiting>) =
                sagas.into_iter().partition(|saga| saga.attempt_count < limit);
            self.give_up(tx, &end, now).await?;
            self.start(tx, &start, now).await?;
            admitted += start.len();
            given_up += end.len();
        }
        let empty = !anything(tx, id, Some(Timestamp::FAR_FUTURE)).await?;
        // A wait that was asked for is over; only failures keep it half closed.
        let open = held_until.is_some() && trial.is_none();
        // Where nothing passed and nothing changed, nothing is written.
        if admitted > 0 || empty || open {
            let (int, time) = (int(tx.dialect()), time(tx.dialect()));
            let left = tokens.map_or(0.0, |tokens| tokens - admitted as f64);
            let params: [Value; 6] = [
                left.into(),
                now.into(),
                i64::from(in_flight + admitted as u32).into(),
                i64::from(!empty).into(),
                held_until.filter(|_| !open).into(),
                id.into(),
            ];
            let sql = format!(
                "UPDATE subscription_gates SET tokens = ?, tokens_at = ?, in_flight = {int}, parked = {int}, held_until = {time} WHERE subscription_id = ?"
            );
            tx.execute(&sql, &params).await?;
        }
        if open {
            self.note_hold(id, None);
        }
        Ok(admitted + given_up)
    }

    /// Its subscription is disabled or gone: whatever waits ends, due or not.
    async fn bury_parked(&self, tx: &mut (dyn Tx + Send), id: i64, gone: bool, now: Timestamp) -> Result<usize> {
        let mut buried = 0;
        for status in WAIT {
            let sql = format!("{}{}", QUERIES[3], skip_locked(tx.dialect()));
            let rows = tx.query(&sql, &[id.into(), status.as_str().into()]).await?;
            let sagas = rows.iter().map(|row| waiting(row, status)).collect::<Result<Vec<_>>>()?;
            self.give_up(tx, &sagas, now).await?;
            buried += sagas.len();
        }
        // Somebody else may hold one of them.
        if buried == 0 && !anything(tx, id, None).await? {
            let sql = match gone {
                true => "DELETE FROM subscription_gates WHERE subscription_id = ?",
                false => "UPDATE subscription_gates SET parked = 0 WHERE subscription_id = ?",
            };
            tx.execute(sql, &[id.into()]).await?;
        }
        Ok(buried)
    }
}

/// Does anything wait for this subscription, or, more precisely, until then? Whoever holds it.
async fn anything(tx: &mut (dyn Tx + Send), id: i64, until: Option<Timestamp>) -> Result<bool> {
    for status in WAIT {
        let mut params: Vec<Value> = vec![id.into(), status.as_str().into()];
        let then = if until.is_some() { " AND next_attempt_at = ?" } else { "" };
        params.extend(until.map(Value::from));
        let sql =
            format!("SELECT 1 FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = ?{then} LIMIT 1");
        if !tx.query(&sql, &params).await?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
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
