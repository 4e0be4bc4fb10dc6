//! What has ended and is past its time goes: entry, events, key and message together. Nothing unfinished ever does.

use std::time::Duration;

use postrider::Result;
use postrider::permit::{permit, withdraw_permit};
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Tx, delete_by};

use crate::decide::code;
use crate::ledger::{self, Entry, in_keys, key_hash};
use crate::{LANE, Orders};

/// Entries of one transaction.
const BATCH: usize = 500;
/// Messages looked at for strangers in one transaction.
const STRANGERS: usize = 200;

impl Orders {
    /// Reaps all that is past its time, and wakes what waits for nobody; answers how many orders went.
    pub async fn reap(&self) -> Result<usize> {
        self.wake_stranded().await?;
        let mut gone = 0;
        loop {
            let batch = self.transact(Mode::Write, |tx| Box::pin(reap_some(tx))).await?;
            gone += batch;
            if batch < BATCH {
                break;
            }
        }
        let ttl = self.0.settings.ledger_ttl;
        while self.transact(Mode::Write, move |tx| Box::pin(reap_strangers(tx, ttl))).await? == STRANGERS {}
        Ok(gone)
    }
}

async fn reap_some(tx: &mut (dyn Tx + Send)) -> Result<usize> {
    let mut params = Vec::new();
    let now = tx.now().bound(0, &mut params);
    let skip = if tx.dialect() == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" };
    // By the kernel's key, which lasts as long as the entry and is written at the order's end: an index on the entries
    // themselves would cost every order that comes in.
    let column = ledger::key_column(tx.dialect());
    let sql = format!(
        "SELECT {column} FROM outbox_keys WHERE lane = '{LANE}' AND expires_at <= {now} ORDER BY expires_at LIMIT {BATCH}{skip}"
    );
    let rows = tx.query(&sql, &params).await?;
    let mut keys: Vec<String> = rows.iter().map(|row| row.text(0)).collect::<Result<_>>()?;
    if keys.is_empty() {
        return Ok(0);
    }
    keys.sort_unstable();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let entries = ledger::find(tx, &keys, true).await?;
    let over: Vec<&Entry> = entries.iter().filter(|entry| entry.expired).collect();
    if !over.is_empty() {
        reap(tx, &over).await?;
    }
    Ok(over.len())
}

/// Messages that ended without an entry of their own: another order has their key, or they have none. They are kept as
/// long as any order that has ended.
async fn reap_strangers(tx: &mut (dyn Tx + Send), ttl: Duration) -> Result<usize> {
    let dialect = tx.dialect();
    let mut params = Vec::new();
    let old = tx.now().bound(-micros_of(ttl), &mut params);
    // Any other that is as old goes with its entry.
    let sql = format!(
        "SELECT id FROM (SELECT id, last_error_code, active_key FROM outbox_done
                         WHERE lane = '{LANE}' AND status = 'dead' AND finished_at < {old} ORDER BY finished_at LIMIT {STRANGERS}) oldest
         WHERE last_error_code = '{}' OR active_key IS NULL",
        code::CONFLICT
    );
    let rows = tx.query(&sql, &params).await?;
    let ids: Vec<i64> = rows.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    if !ids.is_empty() {
        permit(tx, "prune").await?;
        for of in [("outbox_done", "id"), ("outbox_attempts", "outbox_id")] {
            let mut params = Vec::new();
            let sql = delete_by(dialect, of, &ids, &mut params);
            tx.execute(&sql, &params).await?;
        }
        withdraw_permit(tx).await?;
    }
    Ok(ids.len())
}

/// Takes entries that are past their time away, with all that belongs to them.
pub(crate) async fn reap(tx: &mut (dyn Tx + Send), over: &[&Entry]) -> Result<()> {
    let dialect = tx.dialect();
    let keys: Vec<&str> = over.iter().map(|entry| entry.idempotency_key.as_str()).collect();
    let hashes: Vec<String> = keys.iter().map(|key| key_hash(key)).collect();
    let hashes: Vec<&str> = hashes.iter().map(String::as_str).collect();
    let ids: Vec<i64> = over.iter().filter_map(|entry| entry.outbox_id).collect();
    permit(tx, "prune").await?;
    // The paper broker forgets with us: a key used again is a new order to it.
    let by_key = [
        ("idempo_ledger WHERE idempotency_key", &keys),
        ("paper_executions WHERE idempotency_key", &keys),
        ("order_conflicts WHERE idempotency_key", &keys),
        ("ledger_events WHERE key_hash", &hashes),
    ];
    for (what, keys) in by_key {
        let mut params = Vec::new();
        let list = in_keys(dialect, keys, &mut params);
        tx.execute(&format!("DELETE FROM {what} {list}"), &params).await?;
    }
    ledger::forget_keys(tx, &keys).await?;
    for of in [("outbox_done", "id"), ("outbox_attempts", "outbox_id")] {
        let mut params = Vec::new();
        let sql = delete_by(dialect, of, &ids, &mut params);
        tx.execute(&sql, &params).await?;
    }
    withdraw_permit(tx).await
}
