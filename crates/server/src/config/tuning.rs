//! The settings that may come from several places, and their order: the lane's defaults, `[outbox]`, `[lane.X]`, then
//! `OUTBOX_*` in the environment.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use postrider::backoff::Backoff;
use postrider::worker::core::LaneSettings;

use super::file::{LaneKeys, OutboxKeys};
use super::values::{parse_seconds, table};

/// What one place says; `None` leaves it to the place before.
#[derive(Debug, Default)]
pub struct Tuning {
    pub concurrency: Option<u32>,
    pub batch: Option<u32>,
    pub poll: Option<Duration>,
    pub lease: Option<Duration>,
    pub max_attempts: Option<u32>,
    pub max_crashes: Option<u32>,
    pub backoff: Option<Backoff>,
}

impl Tuning {
    pub fn apply(&self, lane: &mut LaneSettings) {
        set(&mut lane.concurrency, self.concurrency.map(|n| n as usize));
        set(&mut lane.batch, self.batch.map(|n| n as usize));
        set(&mut lane.poll, self.poll);
        set(&mut lane.lease, self.lease);
        set(&mut lane.budgets.max_attempts, self.max_attempts);
        set(&mut lane.budgets.max_crashes, self.max_crashes);
        set(&mut lane.budgets.backoff, self.backoff.clone());
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

macro_rules! tuning_of {
    ($keys:ty) => {
        impl From<&$keys> for Tuning {
            fn from(keys: &$keys) -> Self {
                let backoff_sec = keys.backoff_sec.as_ref().map(|table| table.get_ref().0.clone());
                Tuning {
                    concurrency: keys.concurrency.map(|n| n.0),
                    batch: keys.batch.map(|n| n.0),
                    poll: keys.poll_interval_sec.map(|s| s.0),
                    lease: keys.lock_lease_sec.map(|s| s.0),
                    max_attempts: keys.max_attempts.map(|n| n.0),
                    max_crashes: keys.max_crashes.map(|n| n.0),
                    backoff: keys.backoff.as_ref().map(|rule| rule.0.clone()).or(backoff_sec),
                }
            }
        }
    };
}
tuning_of!(OutboxKeys);
tuning_of!(LaneKeys);

/// What `OUTBOX_*` in the environment says.
#[derive(Debug, Default)]
pub struct FromEnvironment {
    pub enabled: Option<bool>,
    pub drain: Option<Duration>,
    pub tuning: Tuning,
}

impl FromEnvironment {
    /// The error names the variable and what to write.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let count = |name: &str, max: u32| number(name, get(name), 1, max);
        let seconds = |name: &str, least: f64| -> Result<Option<Duration>, String> {
            let Some(number) = number(name, get(name), least, f64::MAX)? else { return Ok(None) };
            parse_seconds(number).map(Some).map_err(|e| format!("{name} {e}"))
        };
        Ok(FromEnvironment {
            enabled: get("OUTBOX_ENABLED").map(|value| switch(&value)).transpose()?,
            drain: seconds("OUTBOX_DRAIN_TIMEOUT_SEC", 0.0)?,
            tuning: Tuning {
                concurrency: count("OUTBOX_CONCURRENCY", 100_000)?,
                batch: count("OUTBOX_BATCH", 10_000)?,
                poll: seconds("OUTBOX_POLL_INTERVAL_SEC", 0.001)?,
                lease: seconds("OUTBOX_LOCK_LEASE_SEC", 1.0)?,
                max_attempts: count("OUTBOX_MAX_ATTEMPTS", 1_000_000)?,
                max_crashes: count("OUTBOX_MAX_CRASHES", 1_000)?,
                backoff: get("OUTBOX_BACKOFF_SEC").map(|value| backoff(&value)).transpose()?,
            },
        })
    }
}

fn number<N: FromStr + PartialOrd + Display>(
    name: &str,
    text: Option<String>,
    least: N,
    most: N,
) -> Result<Option<N>, String> {
    let Some(text) = text else { return Ok(None) };
    match text.trim().parse::<N>() {
        Ok(number) if number >= least && number <= most => Ok(Some(number)),
        _ => Err(format!("{name} must be a number of at least {least}")),
    }
}

fn switch(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err("OUTBOX_ENABLED must be true or false".to_owned()),
    }
}

fn backoff(text: &str) -> Result<Backoff, String> {
    let wrong = || "OUTBOX_BACKOFF_SEC must be seconds separated by commas, like 5,10,20".to_owned();
    let seconds =
        text.split(',').map(|part| part.trim().parse::<f64>().ok().and_then(|number| parse_seconds(number).ok()));
    table(seconds.collect::<Option<Vec<Duration>>>().ok_or_else(wrong)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, value: &str) -> Result<FromEnvironment, String> {
        FromEnvironment::read(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn the_environment_is_read_and_nonsense_is_named() {
        assert_eq!(read("OUTBOX_ENABLED", "false").unwrap().enabled, Some(false));
        assert_eq!(read("OUTBOX_CONCURRENCY", "4").unwrap().tuning.concurrency, Some(4));
        assert_eq!(read("OUTBOX_CONCURRENCY", "").unwrap().tuning.concurrency, None);
        let table = Backoff::Table([5, 10, 20].map(Duration::from_secs).to_vec());
        assert_eq!(read("OUTBOX_BACKOFF_SEC", "5, 10,20").unwrap().tuning.backoff, Some(table));
        for (name, value) in [
            ("OUTBOX_ENABLED", "perhaps"),
            ("OUTBOX_CONCURRENCY", "0"),
            ("OUTBOX_BATCH", "many"),
            ("OUTBOX_LOCK_LEASE_SEC", "0"),
            ("OUTBOX_POLL_INTERVAL_SEC", "nan"),
            ("OUTBOX_BACKOFF_SEC", "5,,10"),
            ("OUTBOX_MAX_CRASHES", "-1"),
            ("OUTBOX_DRAIN_TIMEOUT_SEC", "inf"),
        ] {
            assert!(read(name, value).unwrap_err().contains(name), "{name}={value}");
        }
    }
}
