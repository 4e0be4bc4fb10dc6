//! Deletes what is past its retention: ended sagas with their attempts and dead letters, and events no saga needs. In
//! bounded batches, with the permit the guards ask for.

use postrider::Result;
use postrider::permit::{permit, withdraw_permit};
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Tx, Value, in_ids};

use crate::Webhooks;

/// Rows of one transaction.
const BATCH: usize = 500;

impl Webhooks {
    /// Deletes all that is old enough; answers how many sagas and events went.
    pub async fn prune(&self) -> Result<(usize, usize)> {
        let retention = micros_of(self.0.settings.retention);
        let (mut sagas, mut events) = (0, 0);
        loop {
            let gone =
                self.transact(Mode::Write, move |tx| Box::pin(async move { prune_sagas(tx, retention).await })).await?;
            sagas += gone;
            if gone < BATCH {
                break;
            }
        }
        loop {
            let gone = self
                .transact(Mode::Write, move |tx| Box::pin(async move { prune_events(tx, retention).await }))
                .await?;
            events += gone;
            if gone < BATCH {
                break;
            }
        }
        Ok((sagas, events))
    }
}

async fn ids(tx: &mut (dyn Tx + Send), sql: &str, params: &[Value]) -> Result<Vec<i64>> {
    let lock = if tx.dialect() == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" };
    tx.query(&format!("{sql}{lock}"), params).await?.iter().map(|row| row.int(0)).collect()
}

async fn prune_sagas(tx: &mut (dyn Tx + Send), retention: i64) -> Result<usize> {
    let mut gone = Vec::new();
    for status in ["Completed", "DeadLettered"] {
        let mut params: Vec<Value> = vec![status.into()];
        let before = tx.now().plus(-retention, &mut params);
        // By the primary key: the oldest come first, and the look ends at the first batch that is full.
        let sql = format!(
            "SELECT id FROM webhook_delivery_sagas WHERE status = ? AND updated_at < {before} ORDER BY id LIMIT {}",
            BATCH - gone.len()
        );
        if gone.len() < BATCH {
            gone.extend(ids(tx, &sql, &params).await?);
        }
    }
    if gone.is_empty() {
        return Ok(0);
    }
    permit(tx, "prune").await?;
    for (table, column) in
        [("webhook_attempts", "saga_id"), ("dead_letters", "saga_id"), ("webhook_delivery_sagas", "id")]
    {
        let mut params = Vec::new();
        let list = in_ids(tx.dialect(), &gone, &mut params);
        tx.execute(&format!("DELETE FROM {table} WHERE {column} {list}"), &params).await?;
    }
    withdraw_permit(tx).await?;
    Ok(gone.len())
}

/// An event goes when no saga names it any more.
async fn prune_events(tx: &mut (dyn Tx + Send), retention: i64) -> Result<usize> {
    let mut params: Vec<Value> = Vec::new();
    let before = tx.now().plus(-retention, &mut params);
    let sql = format!(
        "SELECT e.id FROM events e WHERE e.created_at < {before}
         AND NOT EXISTS (SELECT 1 FROM webhook_delivery_sagas s WHERE s.event_id = e.id) ORDER BY e.created_at, e.id LIMIT {BATCH}"
    );
    let gone: Vec<i64> = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    if gone.is_empty() {
        return Ok(0);
    }
    permit(tx, "prune").await?;
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &gone, &mut params);
    tx.execute(&format!("DELETE FROM events WHERE id {list}"), &params).await?;
    withdraw_permit(tx).await?;
    Ok(gone.len())
}
