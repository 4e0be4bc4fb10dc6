//! Deletes what is past its retention: ended sagas with their attempts and dead letters, and events no saga needs. In
//! bounded batches, with the permit the guards ask for.

use std::time::Duration;

use postrider::Result;
use postrider::permit::{permit, withdraw_permit};
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Tx, Value, delete_by, in_ids};

use crate::decide::Status;
use crate::{Webhooks, catalog};

/// Rows of one transaction.
const BATCH: usize = 500;

impl Webhooks {
    /// Deletes all that is past the configured retention; answers how many sagas and events went.
    pub async fn prune(&self) -> Result<(usize, usize)> {
        self.prune_older_than(self.0.settings.retention).await
    }

    /// Deletes what ended longer ago than this; answers how many sagas and events went.
    pub async fn prune_older_than(&self, retention: Duration) -> Result<(usize, usize)> {
        let (mut sagas, mut events) = (0, 0);
        let mut after = Some(0);
        while let Some(from) = after {
            let page =
                self.transact(Mode::Work, move |tx| Box::pin(async move { prune_sagas(tx, retention, from).await }));
            let (gone, next) = page.await?;
            sagas += gone;
            after = next;
        }
        loop {
            let retention = micros_of(retention);
            let gone =
                self.transact(Mode::Work, move |tx| Box::pin(async move { prune_events(tx, retention).await })).await?;
            events += gone;
            if gone < BATCH {
                break;
            }
        }
        Ok((sagas, events))
    }
}

/// One page in the order of ids, which is that of their making: it ends where sagas are too young, so what is looked at is
/// what is old and little more. Answers how many went, and where to go on.
async fn prune_sagas(tx: &mut (dyn Tx + Send), retention: Duration, after: i64) -> Result<(usize, Option<i64>)> {
    let now = catalog::now(tx).await?;
    let before = now.minus(retention);
    let sql = format!(
        "SELECT id, status, created_at, updated_at FROM webhook_delivery_sagas WHERE id > ? ORDER BY id LIMIT {BATCH}"
    );
    let rows = tx.query(&sql, &[after.into()]).await?;
    let (mut gone, mut last, mut young) = (Vec::new(), after, rows.len() < BATCH);
    for row in &rows {
        last = row.int(0)?;
        if row.time(2)? >= before {
            young = true;
            break;
        }
        let ended = Status::parse(&row.text(1)?).is_some_and(Status::has_ended);
        if ended && row.time(3)? < before {
            gone.push(last);
        }
    }
    if !gone.is_empty() {
        permit(tx, "prune").await?;
        for of in [("webhook_attempts", "saga_id"), ("dead_letters", "saga_id"), ("webhook_delivery_sagas", "id")] {
            let mut params = Vec::new();
            let sql = delete_by(tx.dialect(), of, &gone, &mut params);
            tx.execute(&sql, &params).await?;
        }
        withdraw_permit(tx).await?;
    }
    Ok((gone.len(), (!young).then_some(last)))
}

/// An event goes when no saga names it any more.
async fn prune_events(tx: &mut (dyn Tx + Send), retention: i64) -> Result<usize> {
    let mut params: Vec<Value> = Vec::new();
    let before = tx.now().bound(-retention, &mut params);
    let sql = format!(
        "SELECT e.id FROM events e WHERE e.created_at < {before}
         AND NOT EXISTS (SELECT 1 FROM webhook_delivery_sagas s WHERE s.event_id = e.id) ORDER BY e.created_at, e.id LIMIT {BATCH}{}",
        // A publisher of the same external id may hold one until it commits.
        if tx.dialect() == Dialect::Mysql { " FOR UPDATE SKIP LOCKED" } else { "" }
    );
    let mut gone: Vec<i64> = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    if gone.is_empty() {
        return Ok(0);
    }
    // MySQL locks the newest events, and looked for their sagas in an older snapshot: asked once more, with them in hand.
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &gone, &mut params);
    let sql = format!("SELECT DISTINCT event_id FROM webhook_delivery_sagas WHERE event_id {list}");
    let wanted: Vec<i64> = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    gone.retain(|id| !wanted.contains(id));
    if gone.is_empty() {
        return Ok(0);
    }
    permit(tx, "prune").await?;
    let mut params = Vec::new();
    let sql = delete_by(tx.dialect(), ("events", "id"), &gone, &mut params);
    tx.execute(&sql, &params).await?;
    withdraw_permit(tx).await?;
    Ok(gone.len())
}
