//! Orders that came under the key of another. They are refused; that they came is kept as long as the other one is
//! remembered, for whoever has to find out why.

use postrider::paging::Page;
use postrider::store::Mode;
use postrider::tx::{Dialect, Tx, Value};
use postrider::{Result, Timestamp};

use crate::Orders;

/// A refused order, and how often it came.
#[derive(Clone, Debug, PartialEq)]
pub struct Conflict {
    pub id: i64,
    pub idempotency_key: String,
    /// Its own digest, not that of the order that stands.
    pub request_digest: String,
    pub instrument: Option<String>,
    /// Its message, if it came by the outbox and not by a request.
    pub outbox_id: Option<i64>,
    pub times: i64,
    pub first_seen_at: Timestamp,
    pub last_seen_at: Timestamp,
}

impl Orders {
    /// The newest conflicts with ids below `before`, at most `limit`.
    pub async fn conflicts(&self, before: Option<i64>, limit: u32) -> Result<Page<Conflict>> {
        let found = self.transact(Mode::Look, move |tx| {
            Box::pin(async move {
                let sql = format!(
                    "SELECT id, idempotency_key, request_digest, instrument, outbox_id, times, first_seen_at, last_seen_at
                     FROM order_conflicts WHERE id < ? ORDER BY id DESC LIMIT {}", limit.saturating_add(1)
                );
                let rows = tx.query(&sql, &[before.unwrap_or(i64::MAX).into()]).await?;
                let conflict = |row: &postrider::tx::Row| {
                    Ok(Conflict {
                        id: row.int(0)?,
                        idempotency_key: row.text(1)?,
                        request_digest: row.text(2)?,
                        instrument: row.opt_text(3)?,
                        outbox_id: row.opt_int(4)?,
                        times: row.int(5)?,
                        first_seen_at: row.time(6)?,
                        last_seen_at: row.time(7)?,
                    })
                };
                rows.iter().map(conflict).collect::<Result<Vec<_>>>()
            })
        });
        Ok(Page::of(found.await?, limit as usize, |conflict| conflict.id))
    }
}

/// Different orders noted under one key; what comes beyond is counted together, without a digest.
const MOST: i64 = 100;

/// Notes that an order with this digest came under a key that has another.
pub(crate) async fn note(
    tx: &mut (dyn Tx + Send),
    key: &str,
    digest: &str,
    instrument: Option<&str>,
    outbox_id: Option<i64>,
) -> Result<()> {
    let noted = tx.query("SELECT COUNT(*) FROM order_conflicts WHERE idempotency_key = ?", &[key.into()]).await?;
    let many = noted.first().map_or(Ok(0), |row| row.int(0))? >= MOST;
    let (digest, outbox_id) = if many { ("", None) } else { (digest, outbox_id) };
    let mut params: Vec<Value> = vec![key.into(), digest.into(), instrument.into(), outbox_id.into()];
    let (first, last) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
    let again = match tx.dialect() {
        Dialect::Mysql => "ON DUPLICATE KEY UPDATE",
        _ => "ON CONFLICT (idempotency_key, request_digest) DO UPDATE SET",
    };
    let seen = tx.now().plus(0, &mut params);
    let sql = format!(
        "INSERT INTO order_conflicts (idempotency_key, request_digest, instrument, outbox_id, first_seen_at, last_seen_at)
         VALUES (?, ?, ?, ?, {first}, {last}) {again} times = order_conflicts.times + 1, last_seen_at = {seen}"
    );
    tx.execute(&sql, &params).await.map(drop)
}
