//! Starting what is due: a job for each saga whose subscription is free, the rest parked at its gate or given up.

use postrider::store::Mode;
use postrider::tx::{Tx, Value, in_ids};
use postrider::{Enqueued, Error, Result, Timestamp};

use crate::Webhooks;
use crate::decide::{Event, Status};
use crate::orchestrator::{Waiting, moves, query, sagas_by_id, skip_locked, waiting};
use crate::publish::Job;
use crate::subscriptions::SubscriptionStatus;

/// A saga whose gate somebody else holds is looked at again after this.
const LOOK_AGAIN_AFTER: std::time::Duration = std::time::Duration::from_secs(1);

impl Webhooks {
    pub(crate) async fn start_due(&self, status: Status) -> Result<usize> {
        let webhooks = self.clone();
        self.transact(Mode::Work, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move { webhooks.start_some(tx, status).await })
        })
        .await
    }

    async fn start_some(&self, tx: &mut (dyn Tx + Send), status: Status) -> Result<usize> {
        let (catalog, now) = self.catalog_in(tx).await?;
        let sql = format!("{}{}", query(tx.dialect(), 1), skip_locked(tx.dialect()));
        let rows = tx.query(&sql, &[status.as_str().into(), now.into()]).await?;
        if rows.is_empty() {
            return Ok(0);
        }
        self.read_holds(tx).await?;
        let due = rows.iter().map(|row| waiting(row, status)).collect::<Result<Vec<_>>>()?;
        let (mut start, mut park, mut give_up) = (Vec::new(), Vec::new(), Vec::new());
        for saga in due {
            match catalog.get(saga.subscription_id).filter(|s| s.status != SubscriptionStatus::Disabled) {
                None => give_up.push(saga),
                Some(s) if saga.attempt_count >= s.retry_rules(&self.0.settings).limit => give_up.push(saga),
                Some(s) if self.is_free(s) => start.push(saga),
                Some(_) => park.push(saga),
            }
        }
        self.give_up(tx, &give_up, now).await?;
        self.park(tx, &park, now).await?;
        self.start(tx, &start, now).await?;
        Ok(start.len() + park.len() + give_up.len())
    }

    /// `Pending` or `PendingRetry` → `InProgress`, with its job.
    pub(crate) async fn start(&self, tx: &mut (dyn Tx + Send), sagas: &[Waiting], now: Timestamp) -> Result<()> {
        if sagas.is_empty() {
            return Ok(());
        }
        let to = moves(sagas[0].status, Event::JobCreated)?;
        let mut ids: Vec<i64> = sagas.iter().map(|saga| saga.id).collect();
        ids.sort_unstable();
        let mut params: Vec<Value> = vec![to.as_str().into(), now.into()];
        let list = in_ids(tx.dialect(), &ids, &mut params);
        params.push(sagas[0].status.as_str().into());
        let table = sagas_by_id(tx.dialect());
        let sql = format!("UPDATE {table} SET status = ?, updated_at = ? WHERE id {list} AND status = ?");
        if tx.execute(&sql, &params).await? != ids.len() as u64 {
            return Err(Error::new(postrider::error::Kind::Busy, "a saga moved meanwhile"));
        }
        let job = |saga: &Waiting| {
            let Waiting { id, event_id, subscription_id, attempt_count, .. } = *saga;
            Job { saga_id: id, attempt: attempt_count + 1, event_id, subscription_id }.message()
        };
        let jobs: Vec<_> = sagas.iter().map(job).collect();
        let receipt = self.0.outbox.enqueue_in(tx, &jobs).await?;
        for (saga, entry) in sagas.iter().zip(receipt.entries()) {
            // One job at a time: it is under way, as its job says. If that is none of its attempts, the sweep finds it.
            if entry.outcome != Enqueued::Created {
                tracing::warn!(saga_id = saga.id, job_id = entry.id, "a saga that waited had a live job already");
            }
        }
        Ok(())
    }

    /// Held back: admitted later, as the gate allows. Under the gate's lock, so that whoever finds nothing parked there
    /// and says so cannot have looked just before. Where somebody else has the lock, the saga stays due.
    async fn park(&self, tx: &mut (dyn Tx + Send), sagas: &[Waiting], now: Timestamp) -> Result<()> {
        if sagas.is_empty() {
            return Ok(());
        }
        let mut gates: Vec<i64> = sagas.iter().map(|saga| saga.subscription_id).collect();
        gates.sort_unstable();
        gates.dedup();
        let mut params = Vec::new();
        let list = in_ids(tx.dialect(), &gates, &mut params);
        let sql = format!(
            "SELECT subscription_id FROM subscription_gates WHERE subscription_id {list} ORDER BY subscription_id{}",
            skip_locked(tx.dialect())
        );
        let locked: Vec<i64> = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
        let (park, later): (Vec<&Waiting>, Vec<&Waiting>) =
            sagas.iter().partition(|saga| locked.contains(&saga.subscription_id));
        for (sagas, until) in [(park, Timestamp::FAR_FUTURE), (later, now.plus(LOOK_AGAIN_AFTER))] {
            if sagas.is_empty() {
                continue;
            }
            let ids: Vec<i64> = sagas.iter().map(|saga| saga.id).collect();
            let mut params: Vec<Value> = vec![until.into(), now.into()];
            let list = in_ids(tx.dialect(), &ids, &mut params);
            let table = sagas_by_id(tx.dialect());
            let sql = format!("UPDATE {table} SET next_attempt_at = ?, updated_at = ? WHERE id {list}");
            tx.execute(&sql, &params).await?;
        }
        if !locked.is_empty() {
            let mut params = Vec::new();
            let list = in_ids(tx.dialect(), &locked, &mut params);
            let sql = format!("UPDATE subscription_gates SET parked = 1 WHERE subscription_id {list} AND parked = 0");
            tx.execute(&sql, &params).await?;
        }
        Ok(())
    }
}
