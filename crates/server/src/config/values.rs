//! The values of `postrider.toml`: each type refuses nonsense itself and says what to write instead. A text that stands in
//! the wrong place may be a secret: no refusal repeats one.

use std::time::Duration;

use postrider::backoff::Backoff;
use serde::de::{Deserialize, Deserializer, Error};
use toml::Value;

/// Longer than this is a typing error.
const LONGEST: Duration = Duration::from_secs(3650 * 24 * 3600);

/// `500ms`, `5s`, `10m`, `2h`, `7d`, or `0`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || "a duration is a number and its unit: 500ms, 5s, 10m, 2h, 7d".to_owned();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit_ms: u64 = match &text[digits..] {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    let duration = number.checked_mul(unit_ms).map(Duration::from_millis);
    duration.filter(|d| *d <= LONGEST).ok_or_else(|| "longer than ten years".to_owned())
}

/// A number of seconds, fractions allowed.
pub fn parse_seconds(number: f64) -> Result<Duration, String> {
    if number.is_finite() && (0.0..=LONGEST.as_secs_f64()).contains(&number) {
        return Ok(Duration::from_secs_f64(number));
    }
    Err(format!("must be a number of seconds from 0 to ten years, not {number}"))
}

/// A retry table, as `backoff_sec` has it.
pub fn table(seconds: Vec<Duration>) -> Result<Backoff, String> {
    if seconds.is_empty() {
        Err("the list is empty; write at least one number of seconds, like [5, 10, 20]".to_owned())
    } else {
        Ok(Backoff::Table(seconds))
    }
}

/// What stands there instead: a number as it is, of everything else only what kind of value it is.
fn kind(value: &Value) -> String {
    match value {
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => value.to_string(),
        Value::String(_) => "a text".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
        Value::Datetime(_) => "a date".to_owned(),
    }
}

/// A whole number from 1 to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count<const MAX: u32>(pub u32);

impl<'de, const MAX: u32> Deserialize<'de> for Count<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Integer(n) if (1..=i64::from(MAX)).contains(&n) => Ok(Count(n as u32)),
            other => {
                let not = kind(&other);
                Err(D::Error::custom(format!("must be a whole number from 1 to {MAX}, without quotes; not {not}")))
            }
        }
    }
}

/// A whole number from 0, which means none, to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountOrNone<const MAX: u32>(pub u32);

impl<'de, const MAX: u32> Deserialize<'de> for CountOrNone<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Integer(n) if (0..=i64::from(MAX)).contains(&n) => Ok(CountOrNone(n as u32)),
            other => {
                let not = kind(&other);
                Err(D::Error::custom(format!("must be a whole number from 0 to {MAX}, without quotes; not {not}")))
            }
        }
    }
}

/// Seconds as a plain number, at least `MIN_MS` milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds<const MIN_MS: u64>(pub Duration);

impl<'de, const MIN_MS: u64> Deserialize<'de> for Seconds<MIN_MS> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = match Value::deserialize(deserializer)? {
            Value::Integer(n) => n as f64,
            Value::Float(n) => n,
            other => {
                let not = kind(&other);
                return Err(D::Error::custom(format!("must be a number of seconds, without quotes; not {not}")));
            }
        };
        let seconds = parse_seconds(number).map_err(D::Error::custom)?;
        if seconds < Duration::from_millis(MIN_MS) {
            return Err(D::Error::custom(format!("must be at least {} seconds, not {number}", MIN_MS as f64 / 1000.0)));
        }
        Ok(Seconds(seconds))
    }
}

/// A duration with its unit, like `"7d"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(text) => parse_duration(&text).map(Span).map_err(D::Error::custom),
            other => Err(D::Error::custom(format!("must be a duration in quotes, like \"7d\"; not {}", kind(&other)))),
        }
    }
}

/// `backoff_sec = [5, 10]`.
#[derive(Clone, Debug, PartialEq)]
pub struct BackoffTable(pub Backoff);

impl<'de> Deserialize<'de> for BackoffTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let seconds = Vec::<Seconds<0>>::deserialize(deserializer)?;
        table(seconds.into_iter().map(|s| s.0).collect()).map(BackoffTable).map_err(D::Error::custom)
    }
}

/// `backoff = { kind = … }`.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(try_from = "BackoffKeys")]
pub struct BackoffRule(pub Backoff);

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table like { kind = \"exponential\", base_sec = 60 }")]
struct BackoffKeys {
    kind: String,
    base_sec: Option<Seconds<0>>,
    max_sec: Option<Seconds<0>>,
    jitter: Option<f64>,
    sec: Option<Vec<Seconds<0>>>,
}

impl TryFrom<BackoffKeys> for BackoffRule {
    type Error = String;

    fn try_from(keys: BackoffKeys) -> Result<Self, String> {
        let jitter = |usual: f64| match keys.jitter.unwrap_or(usual) {
            jitter if (0.0..=1.0).contains(&jitter) => Ok(jitter),
            jitter => Err(format!("jitter must be from 0.0 to 1.0, not {jitter}; 0.3 spreads delays by ±30 %")),
        };
        let base = |usual: u64| match keys.base_sec.map_or(Duration::from_secs(usual), |s| s.0) {
            Duration::ZERO => Err("base_sec must be more than 0".to_owned()),
            base => Ok(base),
        };
        let alien = |key: &str, given: bool| match given {
            true => Err(format!("`{key}` means nothing with this kind; leave it out")),
            false => Ok(()),
        };
        match keys.kind.as_str() {
            "exponential" => {
                alien("sec", keys.sec.is_some())?;
                let (base, max) = (base(60)?, keys.max_sec.map_or(Duration::from_secs(3600), |s| s.0));
                if max < base {
                    return Err("max_sec must not be less than base_sec".to_owned());
                }
                Ok(BackoffRule(Backoff::Exponential { base, max, jitter: jitter(0.3)? }))
            }
            "doubling" => {
                alien("sec", keys.sec.is_some())?;
                alien("max_sec", keys.max_sec.is_some())?;
                Ok(BackoffRule(Backoff::Doubling { base: base(30)?, jitter: jitter(0.0)? }))
            }
            "table" => {
                let others = [
                    ("base_sec", keys.base_sec.is_some()),
                    ("max_sec", keys.max_sec.is_some()),
                    ("jitter", keys.jitter.is_some()),
                ];
                others.into_iter().try_for_each(|(key, given)| alien(key, given))?;
                let seconds = keys.sec.ok_or("kind = \"table\" needs its delays: sec = [5, 10, 20]")?;
                table(seconds.into_iter().map(|s| s.0).collect()).map(BackoffRule)
            }
            _ => Err("kind must be \"exponential\", \"table\" or \"doubling\"".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        let fine = [
            ("500ms", 500),
            ("5s", 5000),
            ("10m", 600_000),
            ("2h", 7_200_000),
            ("7d", 604_800_000),
            ("0", 0),
            ("0s", 0),
        ];
        for (text, ms) in fine {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "s", "-5s", "5 s", "1.5h", "7days", "99999999999999999999d", "5000d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
