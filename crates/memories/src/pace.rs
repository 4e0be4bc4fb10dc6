//! How fast a service takes requests that has said it takes no more: nobody asks until its limit is over, and those who
//! wait get their turns one after the other, at the rate it took them before. Pure: time is an argument.

use std::time::Duration;

use postrider::clock::Tick;

/// Where it does not say how long its limit lasts.
const USUAL: Duration = Duration::from_secs(5);
/// A limit is believed for so long at most; then it is asked again.
const LONGEST: Duration = Duration::from_secs(600);
/// Turns lie so far apart at least, and at most.
const CLOSEST: Duration = Duration::from_millis(5);
const FARTHEST: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// It takes nothing before.
    until: Option<Tick>,
    /// When the next turn is.
    next: Option<Tick>,
    every: Duration,
    /// Since when requests were answered, and how many.
    since: Option<Tick>,
    answered: u32,
}

impl Pace {
    /// A request was answered.
    pub fn answered(&mut self, now: Tick) {
        self.since.get_or_insert(now);
        self.answered = self.answered.saturating_add(1);
    }

    /// It takes no more for so long.
    pub fn refused(&mut self, now: Tick, retry_after: Option<Duration>) {
        let wait = retry_after.unwrap_or(USUAL).clamp(Duration::from_millis(100), LONGEST);
        let until = now.plus(wait);
        if self.left(now).is_some() {
            // Several were under way when it said so.
            self.until = self.until.max(Some(until));
            return;
        }
        let span = self.since.map_or(Duration::ZERO, |since| now.since(since)) + wait;
        self.every = (span / self.answered.max(1)).clamp(CLOSEST, FARTHEST);
        (self.until, self.since, self.answered) = (Some(until), Some(until), 0);
    }

    /// For how much longer it takes nothing.
    pub fn left(&self, now: Tick) -> Option<Duration> {
        self.until.map(|until| until.since(now)).filter(|left| !left.is_zero())
    }

    /// How long the next one who waits has to wait.
    pub fn turn(&mut self, now: Tick) -> Duration {
        let turn = [self.next, self.until].into_iter().flatten().fold(now, Tick::max);
        self.next = Some(turn.plus(self.every));
        turn.since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_wait_come_one_after_the_other_at_the_rate_it_takes() {
        let start = Tick::default().plus(Duration::from_secs(1000));
        let mut pace = Pace::default();
        assert_eq!(pace.left(start), None);
        for n in 0..100 {
            pace.answered(start.plus(Duration::from_millis(10 * n)));
        }
        let now = start.plus(Duration::from_secs(1));
        pace.refused(now, Some(Duration::from_secs(59)));
        pace.refused(now.plus(Duration::from_millis(3)), Some(Duration::from_secs(59)));
        assert_eq!(pace.left(now.plus(Duration::from_secs(60))), None, "it is asked again once its limit is over");
        let turns: Vec<u64> = (0..101).map(|_| pace.turn(now).as_millis() as u64).collect();
        assert!((59_000..59_010).contains(&turns[0]), "nobody before: {}", turns[0]);
        let minute = turns[100] - turns[0];
        assert!((59_000..61_000).contains(&minute), "a hundred in the next minute: {minute}");
        assert!(turns.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn nonsense_is_not_believed() {
        let now = Tick::default().plus(Duration::from_secs(1000));
        let mut pace = Pace::default();
        pace.refused(now, Some(Duration::from_secs(365 * 86_400)));
        assert_eq!(pace.left(now), Some(LONGEST));
        let mut pace = Pace::default();
        pace.refused(now, None);
        assert_eq!(pace.left(now), Some(USUAL));
    }
}
