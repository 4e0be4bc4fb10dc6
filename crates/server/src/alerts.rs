//! Looks at the lanes now and then and raises what an operator should hear of.

use std::collections::HashMap;
use std::time::Duration;

use postrider::alerts::Alerts;
use postrider::{Outbox, clock};

use crate::config::{ALERTS, Config};

/// How often it looks. All processes do: whoever comes first raises the alert, for all.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// Watches until it is aborted; nothing to do without `[alerts]`.
pub fn watch(config: &Config, outbox: &Outbox) -> Option<tokio::task::JoinHandle<()>> {
    let rules = config.alerts?;
    let alerts = Alerts::new(outbox.clone(), ALERTS, rules.every);
    let limits: HashMap<String, Duration> =
        config.lanes.iter().map(|(name, lane)| (name.clone(), lane.max_age.unwrap_or(rules.max_age))).collect();
    Some(tokio::spawn(async move {
        loop {
            let limit = |lane: &str| limits.get(lane).copied().unwrap_or(Duration::ZERO);
            let looked = async {
                alerts.look_for_the_dead().await?;
                alerts.look_at_ages(limit).await
            };
            if let Err(error) = looked.await {
                tracing::warn!(%error, "cannot look for what should be alerted; it will be tried again");
            }
            tokio::time::sleep(LOOK_EVERY.mul_f64(0.75 + clock::chance() / 2.0)).await;
        }
    }))
}
