//! How long to wait before the next attempt. Pure: the jitter is an argument.

use std::time::Duration;

/// A retry schedule. `attempts` below always counts outcomes so far, the one just recorded included (so at least 1).
#[derive(Clone, Debug, PartialEq)]
pub enum Backoff {
    /// `min(base * 2^attempts, max)`, spread by `±jitter`, whole seconds, at least one (Outbox Lease Protocol v1, §5.2).
    Exponential { base: Duration, max: Duration, jitter: f64 },
    /// One delay per attempt; the last one repeats.
    Table(Vec<Duration>),
    /// Exactly `base * 2^(attempts-1)`, spread only if a jitter is configured.
    Doubling { base: Duration, jitter: f64 },
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff::Exponential { base: Duration::from_secs(60), max: Duration::from_secs(3600), jitter: 0.3 }
    }
}

/// A delay longer than this helps nobody and overflows dates.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

impl Backoff {
    /// The delay after `attempts` outcomes. `chance` is uniform in `0.0..1.0`.
    pub fn delay(&self, attempts: u32, chance: f64) -> Duration {
        match self {
            Backoff::Exponential { base, max, jitter } => {
                let raw = doubled(*base, attempts).min(*max).min(LONGEST);
                let spread = raw.as_secs_f64() * spread(*jitter, chance);
                Duration::from_secs((spread as u64).max(1))
            }
            Backoff::Table(delays) => {
                let index = (attempts.max(1) as usize - 1).min(delays.len().saturating_sub(1));
                delays.get(index).copied().unwrap_or(Duration::from_secs(1))
            }
            Backoff::Doubling { base, jitter } => {
                let raw = doubled(*base, attempts.max(1) - 1).min(LONGEST);
                if *jitter == 0.0 { raw } else { raw.mul_f64(spread(*jitter, chance)) }
            }
        }
    }
}

fn doubled(base: Duration, times: u32) -> Duration {
    2u32.checked_pow(times).and_then(|factor| base.checked_mul(factor)).unwrap_or(LONGEST)
}

/// A factor in `1-jitter ..= 1+jitter`.
fn spread(jitter: f64, chance: f64) -> f64 {
    let jitter = jitter.clamp(0.0, 1.0);
    1.0 + jitter * (2.0 * chance.clamp(0.0, 1.0) - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEC: fn(u64) -> Duration = Duration::from_secs;

    /// The table of Outbox Lease Protocol v1, §5.3.
    #[test]
    fn exponential_matches_the_numbers_of_the_protocol() {
        let backoff = Backoff::default();
        let rows =
            [(1, 84, 120, 156), (2, 168, 240, 312), (3, 336, 480, 624), (4, 672, 960, 1248), (5, 1344, 1920, 2496)];
        for (attempts, low, middle, high) in rows.into_iter().chain((6..70).map(|n| (n, 2520, 3600, 4680))) {
            assert_eq!(backoff.delay(attempts, 0.0), SEC(low), "lower end at {attempts}");
            assert_eq!(backoff.delay(attempts, 0.5), SEC(middle), "base at {attempts}");
            assert_eq!(backoff.delay(attempts, 1.0), SEC(high), "upper end at {attempts}");
        }
    }

    #[test]
    fn exponential_is_whole_seconds_and_never_below_one() {
        let backoff = Backoff::Exponential { base: Duration::from_millis(10), max: SEC(1), jitter: 0.5 };
        assert_eq!(backoff.delay(1, 0.0), SEC(1));
        let backoff = Backoff::Exponential { base: SEC(1), max: SEC(60), jitter: 0.3 };
        assert_eq!(backoff.delay(2, 0.0), SEC(2), "2.8 seconds: what is over is cut off");
    }

    #[test]
    fn table_repeats_its_last_entry() {
        let table = Backoff::Table([5, 10, 20, 40, 80, 160].map(SEC).to_vec());
        let seen: Vec<u64> = (1..9).map(|n| table.delay(n, 0.9).as_secs()).collect();
        assert_eq!(seen, [5, 10, 20, 40, 80, 160, 160, 160]);
        assert_eq!(Backoff::Table(vec![]).delay(3, 0.0), SEC(1));
    }

    #[test]
    fn doubling_is_exact_without_jitter() {
        let backoff = Backoff::Doubling { base: SEC(30), jitter: 0.0 };
        assert_eq!([1, 2, 3, 4, 5].map(|n| backoff.delay(n, 0.77).as_secs()), [30, 60, 120, 240, 480]);
        assert_eq!(backoff.delay(4000, 0.5), LONGEST);
        let spread = Backoff::Doubling { base: SEC(30), jitter: 0.5 };
        assert_eq!([0.0, 0.5, 1.0].map(|chance| spread.delay(2, chance).as_secs()), [30, 60, 90]);
    }
}
