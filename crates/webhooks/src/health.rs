//! The health of subscriptions: one that has only failed for long enough is disabled, and so is one that says 410. Done with
//! the rights of an administrator, not by the saga.

use postrider::Result;
use postrider::alerts::Alert;
use postrider::store::Mode;
use postrider::tx::Dialect;

use crate::{Webhooks, catalog};

impl Webhooks {
    /// Notes since when each subscription has only failed, and disables those that have for too long.
    pub(crate) async fn look_after_health(&self) -> Result<()> {
        let sick = self
            .transact(Mode::Write, |tx| {
                Box::pin(async move {
                    let (_, now) = catalog::version(tx).await?;
                    let time = if tx.dialect() == Dialect::Postgres { "?::timestamptz" } else { "?" };
                    let failing = "IN (SELECT subscription_id FROM subscription_gates WHERE failures > 0)";
                    let begin = format!("UPDATE subscriptions SET failing_since = {time} WHERE failing_since IS NULL AND status = 'active' AND id {failing}");
                    tx.execute(&begin, &[now.into()]).await?;
                    let end = "UPDATE subscriptions SET failing_since = NULL WHERE failing_since IS NOT NULL
                               AND id IN (SELECT subscription_id FROM subscription_gates WHERE failures = 0)";
                    tx.execute(end, &[]).await?;
                    let sql = "SELECT id, failing_since FROM subscriptions WHERE failing_since IS NOT NULL AND status = 'active'";
                    let rows = tx.query(sql, &[]).await?;
                    rows.iter().map(|row| Ok((row.int(0)?, now.since(row.time(1)?)))).collect::<Result<Vec<_>>>()
                })
            })
            .await?;
        let limit = self.0.settings.disable_after;
        for (id, _) in sick.into_iter().filter(|(_, failing)| !limit.is_zero() && *failing >= limit) {
            self.disable_and_tell(id, "FAILING").await?;
        }
        Ok(())
    }

    pub(crate) async fn disable_and_tell(&self, id: i64, reason: &str) -> Result<()> {
        let Some(subscription) = self.disable(id, reason).await? else { return Ok(()) };
        tracing::warn!(subscription_id = id, reason, "the subscription is disabled");
        let Some(alerts) = &self.0.alerts else { return Ok(()) };
        let why =
            if reason == "HTTP_410" { "its receiver answered 410 Gone" } else { "it has only failed for too long" };
        let alert = Alert {
            kind: "subscription_disabled",
            subject: format!("subscription {id}"),
            message: format!(
                "subscription {id} is disabled: {why}. What waited for it is in its dead letters; resume it with POST /v1/subscriptions/{id}/resume"
            ),
            count: 1,
            details: serde_json::json!({ "subscription_id": id, "reason": reason, "failing_since": subscription.failing_since }),
        };
        alerts.tell(alert, true).await
    }
}
