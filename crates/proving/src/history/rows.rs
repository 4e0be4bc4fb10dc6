//! The rows a history is judged by, read through a session the product knows nothing of.

use std::collections::BTreeMap;

use super::{Judgement, Row, State, Step, What};
use crate::kit::Session;

/// A lane's messages, live and ended, and what was recorded of their attempts.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    pub messages: Vec<Row>,
    pub steps: Vec<Step>,
}

/// The columns of one line, joined by bars.
async fn lines(session: &mut Session, sql: &str) -> Vec<Vec<String>> {
    let split = |line: String| line.split('|').map(str::to_owned).collect();
    session.texts(sql).await.into_iter().map(split).collect()
}

fn number(text: &str) -> i64 {
    text.parse().unwrap_or_else(|_| panic!("a number, not {text:?}"))
}

impl Rows {
    pub async fn of_lane(session: &mut Session, lane: &str) -> Rows {
        let mut messages = Vec::new();
        for (table, status) in [("outbox", "'live'"), ("outbox_done", "status")] {
            let sql = format!(
                "SELECT concat_ws('|', id, lease_token, attempts, crashes, {status}) FROM {table} WHERE lane = '{lane}' ORDER BY id"
            );
            messages.extend(lines(session, &sql).await.into_iter().map(|line| Row {
                id: number(&line[0]),
                lease_token: number(&line[1]),
                attempts: number(&line[2]),
                crashes: number(&line[3]),
                state: match line[4].as_str() {
                    "live" => State::Live,
                    "sent" => State::Sent,
                    _ => State::Dead,
                },
            }));
        }
        let of_lane = format!(
            "outbox_id IN (SELECT id FROM outbox WHERE lane = '{lane}' UNION ALL SELECT id FROM outbox_done WHERE lane = '{lane}')"
        );
        let sql = format!(
            "SELECT concat_ws('|', outbox_id, lease_token, kind, code) FROM outbox_attempts WHERE {of_lane} ORDER BY id"
        );
        let steps = lines(session, &sql).await.into_iter().map(|line| Step {
            id: number(&line[0]),
            lease_token: number(&line[1]),
            what: match (line[2].as_str(), line.get(3).map(String::as_str)) {
                ("takeover", _) => What::Takeover,
                ("retry", Some("SHUTDOWN")) => What::BrokenOff,
                _ => What::Failed,
            },
        });
        Rows { messages, steps: steps.collect() }
    }
}

/// Deliveries of webhooks as the database has them.
#[derive(Clone, Debug, Default)]
pub struct Deliveries {
    /// Saga, status, attempts counted.
    pub sagas: Vec<(i64, String, i64)>,
    /// Saga, number of the attempt, whether it succeeded.
    pub attempts: Vec<(i64, i64, bool)>,
    /// Sagas with a dead letter, one entry each.
    pub dead_letters: Vec<i64>,
    /// Sagas with a live job.
    pub jobs: Vec<i64>,
}

impl Deliveries {
    pub async fn read(session: &mut Session) -> Deliveries {
        let mut of = async |sql: &str| lines(session, sql).await;
        let sagas = of("SELECT concat_ws('|', id, status, attempt_count) FROM webhook_delivery_sagas").await;
        let attempts = of(
            "SELECT concat_ws('|', saga_id, attempt, CASE WHEN error_code IS NULL THEN 1 ELSE 0 END) FROM webhook_attempts",
        )
        .await;
        let dead_letters = of("SELECT concat_ws('|', saga_id) FROM dead_letters").await;
        let jobs = of("SELECT concat_ws('|', active_key) FROM outbox WHERE lane = 'webhooks'").await;
        Deliveries {
            sagas: sagas.iter().map(|line| (number(&line[0]), line[1].clone(), number(&line[2]))).collect(),
            attempts: attempts.iter().map(|line| (number(&line[0]), number(&line[1]), line[2] == "1")).collect(),
            dead_letters: dead_letters.iter().map(|line| number(&line[0])).collect(),
            jobs: jobs.iter().filter_map(|line| line[0].strip_prefix("saga:")?.parse().ok()).collect(),
        }
    }

    /// S17.
    pub fn judge(&self) -> Judgement {
        let mut judgement = Judgement::default();
        let mut counted: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
        for (saga, attempt, success) in &self.attempts {
            let (last, successes) = counted.entry(*saga).or_default();
            *last = (*last).max(*attempt);
            *successes += i64::from(*success);
        }
        let times = |ids: &[i64], saga: i64| ids.iter().filter(|id| **id == saga).count();
        for (saga, status, attempt_count) in &self.sagas {
            let (last, successes) = counted.get(saga).copied().unwrap_or_default();
            let (letters, jobs) = (times(&self.dead_letters, *saga), times(&self.jobs, *saga));
            let mut says = |what: String| judgement.says("S17", format!("delivery {saga} ({status}): {what}"));
            if letters != usize::from(status == "DeadLettered") {
                says(format!("{letters} dead letters"));
            }
            if jobs > usize::from(status == "InProgress") {
                says(format!("{jobs} live jobs"));
            }
            if successes != i64::from(status == "Completed") {
                says(format!("{successes} attempts succeeded"));
            }
            if matches!(status.as_str(), "Completed" | "PendingRetry") && last != *attempt_count {
                says(format!("{attempt_count} attempts counted, {last} recorded"));
            }
        }
        judgement
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(change: impl FnOnce(&mut Deliveries)) -> usize {
        let mut deliveries = Deliveries {
            sagas: vec![
                (1, "Completed".to_owned(), 2),
                (2, "DeadLettered".to_owned(), 1),
                (3, "InProgress".to_owned(), 0),
            ],
            attempts: vec![(1, 1, false), (1, 2, true), (2, 1, false)],
            dead_letters: vec![2],
            jobs: vec![3],
        };
        change(&mut deliveries);
        deliveries.judge().violations.len()
    }

    #[test]
    fn deliveries_are_judged() {
        assert_eq!(found(|_| {}), 0);
        assert_eq!(found(|d| d.dead_letters.push(2)), 1);
        assert_eq!(found(|d| d.dead_letters.clear()), 1);
        assert_eq!(found(|d| d.dead_letters.push(1)), 1);
        assert_eq!(found(|d| d.jobs.push(1)), 1);
        assert_eq!(found(|d| d.jobs.push(3)), 1);
        assert_eq!(found(|d| d.attempts[1].2 = false), 1);
        assert_eq!(found(|d| d.attempts[0].2 = true), 1);
        assert_eq!(found(|d| d.sagas[0].2 = 3), 1);
    }
}
