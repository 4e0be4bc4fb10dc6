//! What a worker tells of every outcome: a number, a word to whoever observes, and a line in the log. Payloads and keys are in
//! none of them; a key is told by its digest.

use super::*;
use crate::message::{hex, sha256};

/// So many successes of a lane are told in a second; the others are counted.
const SUCCESSES_PER_SECOND: u32 = 10;

/// Which of many successes are told.
#[derive(Debug, Default)]
pub(super) struct Sample {
    second: Tick,
    told: u32,
    untold: u64,
}

impl Sample {
    /// Whether this one is told, and if so, how many were not since the last.
    fn tells(&mut self, now: Tick) -> Option<u64> {
        if now.since(self.second) >= Duration::from_secs(1) {
            (self.second, self.told) = (now, 0);
        }
        if self.told == SUCCESSES_PER_SECOND {
            self.untold += 1;
            return None;
        }
        self.told += 1;
        Some(std::mem::take(&mut self.untold))
    }
}

/// What the lines have in common.
struct Line<'a> {
    id: i64,
    lane: &'a str,
    adapter: &'a str,
    outcome: &'static str,
    attempts: u32,
    latency_ms: Option<f64>,
    key: Option<String>,
}

/// One line: the fields of all, those of its own, and what happened in words.
macro_rules! tell {
    ($level:ident, $line:expr, $status:literal, $($field:tt)*) => {
        tracing::$level!(
            outbox_id = $line.id,
            lane = $line.lane,
            adapter = $line.adapter,
            outcome = $line.outcome,
            status = $status,
            attempts = $line.attempts,
            latency_ms = $line.latency_ms,
            idempotency_key = $line.key.as_deref(),
            $($field)*
        )
    };
}

impl Lane {
    pub(super) fn count(
        &mut self,
        entry: &Settlement,
        answer: Settled,
        held: Option<&Held>,
        observer: &dyn Observer,
        now: Tick,
    ) {
        let (id, lane) = (entry.lease.id, self.settings.lane.as_str());
        let outcome = match answer {
            Settled::Applied => entry.verdict.flush_code(),
            Settled::LeaseLost => FlushCode::Conflict,
            Settled::Unknown | Settled::Refused | Settled::Locked => {
                self.tally.unknown += 1;
                tracing::warn!(outbox_id = id, lane, "whether the outcome was recorded is unknown");
                return;
            }
        };
        let counter = match outcome {
            FlushCode::Success => &mut self.tally.sent,
            FlushCode::DedupHit => &mut self.tally.dedup_hits,
            FlushCode::Retry => &mut self.tally.retried,
            FlushCode::Dead => &mut self.tally.dead,
            _ => &mut self.tally.conflicts,
        };
        *counter += 1;
        let (counted, reason_code) = match &entry.verdict {
            Verdict::Sent { .. } => (true, None),
            Verdict::Retry { code, .. } => (true, Some(code.as_str())),
            Verdict::Dead { code, counted, .. } => (*counted, Some(code.as_str())),
        };
        let attempt = held.map_or(0, |held| held.attempts) + u32::from(counted);
        let took = entry.took;
        observer.settled(&Told { lane, outbox_id: id, outcome, attempt, reason_code, took });
        let untold = match outcome {
            FlushCode::Success | FlushCode::DedupHit => self.successes.tells(now),
            _ => Some(0),
        };
        let line = Line {
            id,
            lane,
            adapter: &self.settings.adapter,
            outcome: outcome.as_str(),
            attempts: attempt,
            latency_ms: took.map(|took| took.as_secs_f64() * 1000.0),
            key: held.filter(|_| untold.is_some()).and_then(|held| Some(hex(&sha256(held.key.as_ref()?.as_bytes())))),
        };
        match (&entry.verdict, outcome, untold) {
            (_, FlushCode::Conflict, _) => tell!(warn, line, "conflict", reason_code, "the lease was lost"),
            (Verdict::Retry { delay, .. }, ..) => {
                tell!(info, line, "pending", reason_code, delay_sec = delay.as_secs_f64(), "will be tried again");
            }
            (Verdict::Dead { .. }, ..) => tell!(warn, line, "dead", reason_code, "dead"),
            (_, _, Some(0)) => tell!(info, line, "sent", "sent"),
            (_, _, Some(untold)) => tell!(info, line, "sent", untold, "sent"),
            _ => tell!(debug, line, "sent", "sent"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_successes_a_few_are_told_and_the_others_counted() {
        let mut sample = Sample::default();
        let second = |n: u64| Tick::default().plus(Duration::from_secs(n));
        let told = |sample: &mut Sample, now| (0..100).filter_map(|_| sample.tells(now)).collect::<Vec<u64>>();
        assert_eq!(told(&mut sample, second(1)), [0; 10]);
        assert_eq!(told(&mut sample, second(2)), [90, 0, 0, 0, 0, 0, 0, 0, 0, 0], "what was left out is told");
        assert_eq!(sample.tells(second(60)), Some(90));
        assert_eq!(sample.tells(second(61)), Some(0));
    }
}
