//! Looks at the lanes now and then and raises what an operator should hear of; and sends it, in order.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::alerts::{Alert, Alerts, Place};
use postrider::clock::Tick;
use postrider::outcome::code;
use postrider::{Courier, Message, Outbox, Outcome, clock};

use crate::config::{ALERTS, Config};

/// How often it looks. All processes do: whoever comes first raises the alert, for all.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// How often troubles of long ago are taken away.
const FORGET_EVERY: Duration = Duration::from_secs(3600);
/// After this time it is looked again whether the alert before this one has ended.
const NEXT_LOOK: Duration = Duration::from_millis(300);

/// The courier of alerts: what is told of one trouble is told in order, and what is overtaken is not told.
pub fn in_order(config: &Config, outbox: &Outbox, courier: Arc<dyn Courier>) -> Arc<dyn Courier> {
    match config.alerts {
        Some(rules) => Arc::new(InOrder { courier, alerts: Alerts::new(outbox.clone(), ALERTS, rules.every) }),
        None => courier,
    }
}

struct InOrder {
    courier: Arc<dyn Courier>,
    alerts: Alerts,
}

#[async_trait]
impl Courier for InOrder {
    fn name(&self) -> &str {
        self.courier.name()
    }

    fn settled(&self, id: i64) {
        self.courier.settled(id);
    }

    async fn ready(&self) -> bool {
        self.courier.ready().await
    }

    async fn deliver(&self, message: &Message) -> Outcome {
        match self.alerts.place(message).await {
            Ok(Place::Last) => self.courier.deliver(message).await,
            Ok(Place::Overtaken(by)) => Outcome::Sent { result_ref: Some(format!("not sent: overtaken by {by}")) },
            Ok(Place::Waits) => Outcome::Defer { delay: NEXT_LOOK, code: "ALERT_IN_ORDER".into() },
            Err(_) => Outcome::Defer { delay: Duration::from_secs(1), code: code::STORE_UNAVAILABLE.into() },
        }
    }
}

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
    let (outbox, alerts) = (outbox.clone(), Alerts::new(outbox.clone(), ALERTS, rules.every));
    let limits: HashMap<String, Duration> =
        config.lanes.iter().map(|(name, lane)| (name.clone(), lane.max_age.unwrap_or(rules.max_age))).collect();
    Some(tokio::spawn(async move {
        let mut outage = Outage::default();
        let mut forgot: Option<Tick> = None;
        loop {
            if forgot.is_none_or(|at| Tick::now().since(at) >= FORGET_EVERY) {
                forgot = Some(Tick::now());
                if let Err(error) = alerts.forget().await {
                    tracing::debug!(%error, "old alerts are not forgotten yet");
                }
            }
            let limit = |lane: &str| limits.get(lane).copied().unwrap_or(Duration::ZERO);
            // Each for itself: somebody may have locked what one of them needs.
            let (dead, ages, waiting) =
                tokio::join!(alerts.look_for_the_dead(), alerts.look_at_ages(limit), alerts.tell_what_waits());
            let looked = dead.and(ages).and(waiting);
            if let Err(error) = &looked {
                tracing::warn!(%error, "cannot look for what should be alerted; it will be tried again");
            }
            // What is slow or fails for a reason of its own is not a store that is away.
            let answers = looked.is_ok() || outbox.store_id().await.is_ok();
            if let Some(away) = outage.over(answers, Tick::now()) {
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
