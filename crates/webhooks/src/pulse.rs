//! How deliveries go at this moment, for an operator's screen. The lane keeps no history of its own: the attempts tell.

use std::time::Duration;

use postrider::pulse::per_second;
use postrider::store::{Mode, transact};
use postrider::{Outbox, Result};

/// Attempts and dead letters looked at, the newest.
const ATTEMPTS: u64 = 1_000;
const DEAD: u64 = 200;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub sent_per_second: f64,
    pub retries_per_second: f64,
    pub dead_per_second: f64,
}

/// Over the last moments, at most `window`.
pub async fn pulse(outbox: &Outbox, window: Duration) -> Result<Rates> {
    transact(&**outbox.store(), Mode::Look, move |tx| {
        Box::pin(async move {
            let mut params = Vec::new();
            let now = tx.now().plus(0, &mut params);
            let attempts = format!(
                "SELECT {now}, started_at, duration_ms, CASE WHEN error_class IS NULL THEN 1 ELSE 0 END
                 FROM webhook_attempts ORDER BY id DESC LIMIT {ATTEMPTS}"
            );
            let (mut sent, mut failed, mut earliest) = (0, 0, Duration::ZERO);
            for row in tx.query(&attempts, &params).await? {
                let ended = row.time(1)?.plus(Duration::from_millis(row.int(2)?.max(0) as u64));
                let age = row.time(0)?.since(ended);
                if age <= window {
                    earliest = earliest.max(age);
                    *if row.bool(3)? { &mut sent } else { &mut failed } += 1;
                }
            }
            let of = |seen: u64| match sent + failed == ATTEMPTS {
                true => per_second(seen, 0, earliest, window),
                false => per_second(seen, u64::MAX, earliest, window),
            };
            let (sent_per_second, failed_per_second) = (of(sent), of(failed));
            let mut params = Vec::new();
            let now = tx.now().plus(0, &mut params);
            let dead = format!("SELECT {now}, failed_at FROM dead_letters ORDER BY id DESC LIMIT {DEAD}");
            let (mut died, mut earliest) = (0, Duration::ZERO);
            for row in tx.query(&dead, &params).await? {
                let age = row.time(0)?.since(row.time(1)?);
                if age <= window {
                    (died, earliest) = (died + 1, earliest.max(age));
                }
            }
            let dead_per_second = per_second(died, DEAD, earliest, window);
            let retries_per_second = (failed_per_second - dead_per_second).max(0.0);
            Ok(Rates { sent_per_second, retries_per_second, dead_per_second })
        })
    })
    .await
}
