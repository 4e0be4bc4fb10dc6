//! Looks at the lanes now and then and raises what an operator should hear of.

use std::collections::HashMap;
use std::time::Duration;

use postrider::alerts::{Alert, Alerts};
use postrider::clock::Tick;
use postrider::{Outbox, clock};

use crate::config::{ALERTS, Config};

/// How often it looks. All processes do: whoever comes first raises the alert, for all.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// The capability `store`, as this process sees it.
#[derive(Default)]
struct Outage {
    since: Option<Tick>,
}

impl Outage {
    /// How long it was away, once it is back.
    fn over(&mut self, answers: bool, now: Tick) -> Option<Duration> {
        if answers {
            return self.since.take().map(|since| now.since(since));
        }
        self.since.get_or_insert(now);
        None
    }
}

fn store_failed(away: Duration) -> Alert {
    let seconds = away.as_secs().max(1);
    Alert {
        kind: "capability_failed",
        subject: "store".to_owned(),
        message: format!(
            "the database did not answer for about {seconds} s and does so again; messages waited, none was lost"
        ),
        count: 1,
        details: serde_json::json!({ "capability": "store", "seconds": seconds }),
    }
}

/// Watches until it is aborted; nothing to do without `[alerts]`.
pub fn watch(config: &Config, outbox: &Outbox) -> Option<tokio::task::JoinHandle<()>> {
    let rules = config.alerts?;
    let alerts = Alerts::new(outbox.clone(), ALERTS, rules.every);
    let limits: HashMap<String, Duration> =
        config.lanes.iter().map(|(name, lane)| (name.clone(), lane.max_age.unwrap_or(rules.max_age))).collect();
    Some(tokio::spawn(async move {
        let mut outage = Outage::default();
        loop {
            let limit = |lane: &str| limits.get(lane).copied().unwrap_or(Duration::ZERO);
            let looked = async {
                alerts.look_for_the_dead().await?;
                alerts.look_at_ages(limit).await
            };
            let looked = looked.await;
            if let Err(error) = &looked {
                tracing::warn!(%error, "cannot look for what should be alerted; it will be tried again");
            }
            if let Some(away) = outage.over(looked.is_ok(), Tick::now()) {
                // Nothing can be written while the store is away; it is told as soon as it is back.
                let told = alerts.tell(store_failed(away), true).await;
                if told.is_err() {
                    outage.since = Some(Tick::now());
                }
            }
            tokio::time::sleep(LOOK_EVERY.mul_f64(0.75 + clock::chance() / 2.0)).await;
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_told_once_when_it_is_over() {
        let at = |secs: u64| Tick::default().plus(Duration::from_secs(secs));
        let mut outage = Outage::default();
        assert_eq!(outage.over(true, at(1)), None);
        assert_eq!(outage.over(false, at(2)), None);
        assert_eq!(outage.over(false, at(5)), None, "it goes on");
        assert_eq!(outage.over(true, at(9)), Some(Duration::from_secs(7)));
        assert_eq!(outage.over(true, at(10)), None);
        let alert = store_failed(Duration::from_millis(300));
        assert_eq!(
            (alert.kind, alert.subject.as_str(), &alert.details["seconds"]),
            ("capability_failed", "store", &serde_json::json!(1))
        );
    }
}
