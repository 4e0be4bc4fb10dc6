//! The health of subscriptions: one that fails all over a long time is disabled, and so is one that says 410. Done with the
//! rights of an administrator, not by the saga.

use std::collections::BTreeSet;

use postrider::Result;
use postrider::alerts::Alert;
use postrider::store::Mode;
use postrider::tx::{Dialect, Row, Tx, in_ids};

use crate::decide::{Failing, rest_after};
use crate::orchestrator::{skip_locked, time};
use crate::subscriptions::{FAILING, GONE};
use crate::{Webhooks, catalog};

/// Subscriptions of one look.
const PAGE: usize = 1000;

const GATE: &str = "subscription_id, failures, failing_from, failed_at, spell_at, spells";

fn failing(row: &Row) -> Result<Failing> {
    Ok(Failing {
        failures: row.int(1)?,
        from: row.opt_time(2)?,
        last: row.opt_time(3)?,
        spell: row.opt_time(4)?,
        spells: row.int(5)?,
    })
}

impl Webhooks {
    /// Shows since when each subscription has only failed, disables those that have for too long, and opens gates whose wait
    /// is over.
    pub(crate) async fn look_after_health(&self) -> Result<()> {
        let mut after = Some(0);
        while let Some(from) = after {
            let webhooks = self.clone();
            after = self
                .transact(Mode::Work, move |tx| {
                    let webhooks = webhooks.clone();
                    Box::pin(async move { webhooks.look_after_some(tx, from).await })
                })
                .await?;
        }
        self.transact(Mode::Work, |tx| Box::pin(async move { show_recovered(tx).await })).await
    }

    /// One page of those that fail; answers where the next one begins.
    async fn look_after_some(&self, tx: &mut (dyn Tx + Send), after: i64) -> Result<Option<i64>> {
        let now = catalog::now(tx).await?;
        let sql = format!(
            "SELECT {GATE} FROM subscription_gates WHERE failures > 0 AND subscription_id > ? ORDER BY subscription_id LIMIT {PAGE}"
        );
        let rows = tx.query(&sql, &[after.into()]).await?;
        let lasting: BTreeSet<i64> = rows
            .iter()
            .map(|row| Ok((row.int(0)?, failing(row)?)))
            .filter(|seen| seen.as_ref().map_or(true, |(_, seen)| seen.is_lasting(self.0.settings.disable_after)))
            .map(|seen| Ok(seen?.0))
            .collect::<Result<_>>()?;
        let free = changeable(tx, &lasting).await?;
        let ids: Vec<i64> = rows.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
        let unmarked = unlocked(tx, &ids, "failing_since IS NULL AND status = 'active'").await?;
        for row in &rows {
            let (id, seen) = (row.int(0)?, failing(row)?);
            if unmarked.contains(&id) {
                let sql = format!("UPDATE subscriptions SET failing_since = {} WHERE id = ?", time(tx.dialect()));
                tx.execute(&sql, &[seen.from.unwrap_or(now).into(), id.into()]).await?;
            }
            if free.contains(&id) && self.fails_for_good(tx, id).await? {
                self.disable_and_tell(tx, id, FAILING).await?;
            }
        }
        Ok((rows.len() == PAGE).then(|| rows.last().map(|row| row.int(0)).transpose()).transpose()?.flatten())
    }

    /// Asked again under the lock of its gate: it may have succeeded a moment ago.
    async fn fails_for_good(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
        let sql =
            format!("SELECT {GATE} FROM subscription_gates WHERE subscription_id = ?{}", skip_locked(tx.dialect()));
        let rows = tx.query(&sql, &[id.into()]).await?;
        let seen = rows.first().map(failing).transpose()?;
        Ok(seen.is_some_and(|seen| seen.is_lasting(self.0.settings.disable_after)))
    }

    /// Disables a subscription and raises the alert in the same transaction; answers whether it was not disabled before.
    pub(crate) async fn disable_and_tell(&self, tx: &mut (dyn Tx + Send), id: i64, reason: &str) -> Result<bool> {
        if !self.disable_in(tx, id, reason).await? {
            return Ok(false);
        }
        tracing::warn!(subscription_id = id, reason, "the subscription is disabled");
        let Some(alerts) = &self.0.alerts else { return Ok(true) };
        let why = if reason == GONE { "its receiver answered 410 Gone" } else { "it has only failed for too long" };
        let subscription = self.read(tx, id).await?;
        let failing_since = subscription.and_then(|subscription| subscription.failing_since);
        let alert = Alert {
            kind: "subscription_disabled",
            subject: format!("subscription {id}"),
            message: format!(
                "subscription {id} is disabled: {why}. What waited for it is in its dead letters, and what is published to it goes there for 30 days; resume it with POST /v1/subscriptions/{id}/resume"
            ),
            count: 1,
            details: serde_json::json!({ "subscription_id": id, "reason": reason, "failing_since": failing_since }),
        };
        alerts.raise(tx, &alert).await?;
        Ok(true)
    }
}

/// Of these subscriptions, those that fit and that nobody else has locked; locked from here on.
async fn unlocked(tx: &mut (dyn Tx + Send), ids: &[i64], fits: &str) -> Result<BTreeSet<i64>> {
    if ids.is_empty() {
        return Ok(BTreeSet::new());
    }
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), ids, &mut params);
    let sql =
        format!("SELECT id FROM subscriptions WHERE id {list} AND {fits} ORDER BY id{}", skip_locked(tx.dialect()));
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

/// Of these subscriptions, those that can be changed without waiting for anybody: nobody else changes one now, and nobody has
/// its row or its gate locked. In the order everybody takes these locks.
pub(crate) async fn changeable(tx: &mut (dyn Tx + Send), ids: &BTreeSet<i64>) -> Result<BTreeSet<i64>> {
    if tx.dialect() == Dialect::Sqlite {
        return Ok(ids.clone());
    }
    if ids.is_empty() || !catalog::try_lock(tx).await? {
        return Ok(BTreeSet::new());
    }
    let ids: Vec<i64> = ids.iter().copied().collect();
    let free: Vec<i64> = unlocked(tx, &ids, "1 = 1").await?.into_iter().collect();
    if free.is_empty() {
        return Ok(BTreeSet::new());
    }
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &free, &mut params);
    let gates = |lock: &str| {
        format!(
            "SELECT subscription_id FROM subscription_gates WHERE subscription_id {list} ORDER BY subscription_id{lock}"
        )
    };
    let mut there = BTreeSet::new();
    for row in tx.query(&gates(""), &params).await? {
        there.insert(row.int(0)?);
    }
    for row in tx.query(&gates(skip_locked(tx.dialect())), &params).await? {
        there.remove(&row.int(0)?);
    }
    // What is left there is locked.
    Ok(free.into_iter().filter(|id| !there.contains(id)).collect())
}

/// Those that succeeded since fail no more, and what asked for time and had it is free again.
async fn show_recovered(tx: &mut (dyn Tx + Send)) -> Result<()> {
    let sql = format!(
        "SELECT s.id FROM subscriptions s WHERE s.failing_since IS NOT NULL AND s.status = 'active'
         AND EXISTS (SELECT 1 FROM subscription_gates g WHERE g.subscription_id = s.id AND g.failures = 0) ORDER BY s.id LIMIT {PAGE}"
    );
    let ids: Vec<i64> = tx.query(&sql, &[]).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    let recovered: Vec<i64> =
        unlocked(tx, &ids, "failing_since IS NOT NULL AND status = 'active'").await?.into_iter().collect();
    if !recovered.is_empty() {
        let mut params = Vec::new();
        let list = in_ids(tx.dialect(), &recovered, &mut params);
        tx.execute(&format!("UPDATE subscriptions SET failing_since = NULL WHERE id {list}"), &params).await?;
    }
    let sql = format!(
        "SELECT subscription_id, failures FROM subscription_gates WHERE held_until <= ? AND parked = 0 ORDER BY held_until LIMIT {PAGE}{}",
        skip_locked(tx.dialect())
    );
    let now = catalog::now(tx).await?;
    for row in tx.query(&sql, &[now.into()]).await? {
        if rest_after(row.int(1)?).is_none() {
            let sql = "UPDATE subscription_gates SET held_until = NULL WHERE subscription_id = ?";
            tx.execute(sql, &[row.int(0)?.into()]).await?;
        }
    }
    Ok(())
}
