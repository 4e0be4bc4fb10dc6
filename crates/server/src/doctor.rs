//! The doctor: asks the database what the promises of every part can be asked, twice, and repairs what can be repaired
//! safely. Its rounds are bounded, and take at most a hundredth of the time.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider::clock::{self, Tick};
use postrider::doctor::{Case, Examine, Finding, MOST_CASES, confirmed, findings};
use postrider::{Outbox, Timestamp};
use serde::Serialize;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::config::Config;
use crate::parts::Parts;

/// Between the two looks: what is only passed through is gone by then.
const BETWEEN_LOOKS: Duration = Duration::from_secs(2);
/// A round that took so long is followed by a pause of this many times that.
const PAUSE: u32 = 99;

/// What a round found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Nothing is left.
    pub ok: bool,
    pub finished_at: Timestamp,
    pub findings: Vec<Finding>,
}

pub struct Doctor {
    parts: Vec<Arc<dyn Examine>>,
    /// What is reported has stood for at least this long: longer than a lease and a poll.
    stood: Duration,
    last: Mutex<Option<(Tick, Report)>>,
    /// The last round has taken the doctor's share of the time up to here.
    rests_until: Mutex<Tick>,
    wanted: Mutex<Option<bool>>,
    asked: Notify,
}

impl Doctor {
    pub fn new(config: &Config, outbox: &Outbox, parts: &Parts) -> Arc<Self> {
        let lanes = || config.lanes.values().map(|lane| &lane.settings);
        let lease = lanes().map(|settings| settings.lease).max().unwrap_or_default();
        let poll = lanes().map(|settings| settings.poll).max().unwrap_or_default();
        Doctor::of(outbox, parts, lease + poll)
    }

    /// Reports what has stood for at least this long.
    pub fn of(outbox: &Outbox, parts: &Parts, stood: Duration) -> Arc<Self> {
        let mut examined: Vec<Arc<dyn Examine>> =
            vec![Arc::new(outbox.clone()), Arc::new(parts.webhooks.clone()), Arc::new(parts.orders.clone())];
        examined.extend(parts.memories.clone().map(|memories| Arc::new(memories) as Arc<dyn Examine>));
        Arc::new(Doctor {
            parts: examined,
            stood,
            last: Mutex::default(),
            rests_until: Mutex::default(),
            wanted: Mutex::default(),
            asked: Notify::new(),
        })
    }

    /// One round: two looks, and with `repair` what can be repaired safely. What keeps one part from it is not the others'.
    pub async fn round(&self, repair: bool) -> postrider::Result<Report> {
        let (mut cases, mut repaired): (Vec<Case>, HashSet<Case>) = (Vec::new(), HashSet::new());
        let (begun, mut waited) = (Tick::now(), Duration::ZERO);
        loop {
            let first = self.look().await?;
            if first.is_empty() {
                break;
            }
            tokio::time::sleep(BETWEEN_LOOKS).await;
            waited += BETWEEN_LOOKS;
            let seen = confirmed(&first, self.look().await?);
            let before = repaired.len();
            if repair && !seen.is_empty() {
                for part in &self.parts {
                    match part.repair(&seen).await {
                        Ok(done) => repaired.extend(done),
                        Err(error) => tracing::warn!(%error, "the doctor could not repair all of a part"),
                    }
                }
            }
            // A look is bounded: what it had no room for comes after what was repaired, as long as that becomes more.
            let again = seen.len() >= MOST_CASES as usize && repaired.len() > before;
            cases.extend(seen);
            if !again {
                break;
            }
        }
        let now = Tick::now();
        let rest = now.since(begun).saturating_sub(waited) * PAUSE;
        *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = now.plus(rest);
        let repaired: Vec<Case> = repaired.into_iter().collect();
        let findings = findings(&cases, &repaired);
        let ok = findings.iter().all(|finding| finding.repaired);
        let report = Report { ok, finished_at: clock::wall(), findings };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((Tick::now(), report.clone()));
        Ok(report)
    }

    async fn look(&self) -> postrider::Result<Vec<Case>> {
        let mut cases = Vec::new();
        for part in &self.parts {
            cases.extend(part.look(self.stood).await?);
        }
        Ok(cases)
    }

    /// The last round and its age.
    pub fn last(&self) -> Option<(Report, Duration)> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|(at, report)| (report.clone(), Tick::now().since(*at)))
    }

    /// Asks for a round as soon as the doctor's share of the time allows; several askers share one, which repairs if one of
    /// them wants that.
    pub fn ask(&self, repair: bool) {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        *wanted = Some(repair || wanted.unwrap_or(false));
        self.asked.notify_one();
    }

    /// Makes rounds now and then, and when asked.
    pub fn start(self: &Arc<Self>, every: Duration, mut stopped: watch::Receiver<bool>) -> JoinHandle<()> {
        let doctor = self.clone();
        tokio::spawn(async move {
            loop {
                let due = async {
                    match every.is_zero() {
                        true => doctor.asked.notified().await,
                        false => {
                            let usual = tokio::time::sleep(every.mul_f64(0.75 + 0.5 * clock::chance()));
                            tokio::select! { () = usual => {}, () = doctor.asked.notified() => {} }
                        }
                    }
                    doctor.rested().await;
                };
                tokio::select! {
                    () = due => {}
                    _ = stopped.wait_for(|stop| *stop) => return,
                }
                let wanted = doctor.wanted.lock().unwrap_or_else(PoisonError::into_inner).take();
                match doctor.round(wanted.unwrap_or(false)).await {
                    Ok(report) => tell(&report),
                    Err(error) => tracing::warn!(%error, "the doctor's round could not be finished"),
                }
            }
        })
    }

    async fn rested(&self) {
        let until = *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner);
        tokio::time::sleep(until.since(Tick::now())).await;
    }
}

fn tell(report: &Report) {
    for finding in &report.findings {
        let (part, count, ids) = (finding.part, finding.count, format!("{:?}", finding.ids));
        if finding.repaired {
            tracing::info!(part, count, ids, "repaired: {}", finding.message);
        } else {
            tracing::warn!(part, count, ids, advice = finding.advice, "{}", finding.message);
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    /// Takes its time to look, and says when it is asked.
    struct Slow(tokio::sync::mpsc::UnboundedSender<Tick>);

    const LOOK: Duration = Duration::from_millis(20);

    #[async_trait::async_trait]
    impl Examine for Slow {
        async fn look(&self, _: Duration) -> postrider::Result<Vec<Case>> {
            let _ = self.0.send(Tick::now());
            std::thread::sleep(LOOK);
            Ok(vec![])
        }

        async fn repair(&self, _: &[Case]) -> postrider::Result<Vec<Case>> {
            Ok(vec![])
        }
    }

    #[tokio::test]
    async fn whoever_asks_without_pause_gets_a_hundredth_of_the_time() {
        let (asked, mut looks) = tokio::sync::mpsc::unbounded_channel();
        let doctor = Arc::new(Doctor {
            parts: vec![Arc::new(Slow(asked))],
            stood: Duration::ZERO,
            last: Mutex::default(),
            rests_until: Mutex::default(),
            wanted: Mutex::default(),
            asked: Notify::new(),
        });
        let (_stop, stopped) = watch::channel(false);
        let rounds = doctor.start(Duration::ZERO, stopped);
        doctor.ask(false);
        let first = looks.recv().await.unwrap();
        for _ in 0..3 {
            doctor.ask(false);
        }
        assert!(looks.recv().await.unwrap().since(first) >= LOOK * (PAUSE + 1));
        rounds.abort();
    }
}
