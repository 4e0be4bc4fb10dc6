//! What goes on beside the calls: probing a service that is away, waking what waited for it, completing audits, taking
//! new rows into the index, and saying loudly what only a person can correct.

use std::sync::PoisonError;
use std::time::Duration;

use postrider::Result;
use postrider::alerts::Alert;
use postrider::clock::{self, Tick};
use postrider::store::Prune;
use serde::Serialize;

use crate::pace::Pace;
use crate::recognise::{Recognised, STRANGER};
use crate::reconcile::Scope;
use crate::upstream::{Blame, Fault};
use crate::{LANE, Memories};

/// How often audits are completed and the index catches up.
const EVERY: Duration = Duration::from_secs(30);
/// Messages pruned in one transaction.
const PRUNE: u32 = 1000;
/// When those are woken who waited for the service: at once, and a little later who was just then being given back.
const WAKES: [Duration; 3] = [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(5)];
/// How often a queued memory is tried while the service cannot be used as it is configured.
const SCOUT_EVERY: Duration = Duration::from_secs(30);

/// What the flush gives memories back with while the service cannot be used; these are woken when it can.
pub(crate) mod waiting {
    pub const BREAKER_OPEN: &str = "BREAKER_OPEN";
    pub const UNUSABLE: &str = "OPENMEMORY_UNUSABLE";
    /// Those who wait only for the service, or whose last attempt it did not answer: they come as soon as it does again.
    pub const FOR_SERVICE: [&str; 6] =
        [BREAKER_OPEN, UNUSABLE, "TIMEOUT", "CONNECT_REFUSED", "CONNECTION_RESET", "DNS_FAILED"];
    /// It takes no more for now; each comes at its turn.
    pub const LIMITED: &str = "OPENMEMORY_LIMITED";
    /// An earlier write may yet be applied; it is looked for.
    pub const IN_DOUBT: &str = "OPENMEMORY_IN_DOUBT";
}

/// Whether the memory service can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capability {
    /// `ok` or `failed`.
    pub status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// What is known of the service besides the breaker.
#[derive(Default)]
pub(crate) struct Health {
    /// Why it cannot be used, where that is ours to correct, and when a queued memory may try again.
    trouble: Option<(String, Tick)>,
    /// It was told that the service cannot be used.
    told: bool,
    /// When those who wait for the service are to be woken.
    wakes: Vec<Tick>,
    /// When it is next asked whether it is back, while the breaker is open.
    probe_at: Option<Tick>,
    /// How much it takes.
    pace: Pace,
    /// Whether it is the one we know.
    pub(crate) recognised: Option<Recognised>,
    /// When it could not be asked, and why.
    pub(crate) unrecognised: Option<(Tick, Fault)>,
    /// Up to this audit failed writes were followed by one that succeeded.
    pub(crate) cleared: i64,
}

impl Memories {
    /// Does all of it until told to stop.
    pub async fn tend(&self, stopped: impl Future<Output = ()>) {
        tokio::select! {
            () = stopped => {}
            () = self.attend_for_ever() => {}
            () = self.tidy_for_ever() => {}
        }
    }

    async fn attend_for_ever(&self) {
        loop {
            match self.attend().await {
                Some(pause) => drop(tokio::time::timeout(pause, self.0.breaker.changed()).await),
                None => self.0.breaker.changed().await,
            }
        }
    }

    /// Tells what has changed, wakes whose turn it is, and asks a service that is away whether it is back, where that is due.
    /// Answers when to come again at the latest; sooner, if something changes.
    pub async fn attend(&self) -> Option<Duration> {
        self.tell_of_change().await;
        self.wake_in_turn().await;
        self.probe_in_turn().await;
        let health = self.health();
        let next = health.wakes.iter().copied().chain(health.probe_at).min()?;
        Some(next.since(Tick::now()))
    }

    async fn wake_in_turn(&self) {
        let due = {
            let (now, mut health) = (Tick::now(), self.health());
            let before = health.wakes.len();
            health.wakes.retain(|at| *at > now);
            health.wakes.len() < before
        };
        if due && let Err(error) = self.wake().await {
            tracing::warn!(%error, "memories that waited could not be woken; they come by themselves");
        }
    }

    async fn probe_in_turn(&self) {
        let due = {
            let (now, mut health) = (Tick::now(), self.health());
            let pause = self.0.breaker.probe_after(self.0.settings.probe).mul_f64(0.9 + clock::chance() / 5.0);
            match (self.0.breaker.is_open(), health.probe_at) {
                (false, _) => health.probe_at = None,
                (true, None) => health.probe_at = Some(now.plus(pause)),
                (true, Some(_)) => {}
            }
            health.probe_at.take_if(|at| *at <= now).is_some()
        };
        if !due {
            return;
        }
        // Something that needs the key is as good as a write to find out, and does no harm.
        let answered = self.0.upstream.ping().await;
        self.note_answer(answered.as_ref().err());
        if answered.as_ref().err().is_none_or(|fault| !fault.counts()) {
            self.0.breaker.probed();
        }
        // Whether it is back or not, there is something to do about it.
        self.0.breaker.stir();
    }

    async fn tidy_for_ever(&self) {
        loop {
            let memories = self.clone();
            // A task of its own: what is begun is not cut off when we are told to stop.
            let _ = tokio::spawn(async move { memories.tidy().await }).await;
            tokio::time::sleep(EVERY.mul_f64(0.9 + clock::chance() / 5.0)).await;
        }
    }

    /// One round of what is done every now and then.
    pub async fn tidy(&self) {
        self.0.breaker.stir();
        if let Err(error) = self.reconcile(Scope::Recent, true).await {
            tracing::warn!(%error, "audits could not be completed; it will be tried again");
        }
        if let Err(error) = self.heal().await {
            tracing::warn!(%error, "memories that wait in vain could not be looked for; it will be tried again");
        }
        if let Err(error) = self.prune().await {
            tracing::warn!(%error, "pruning failed; it will be tried again");
        }
        if self.0.settings.upstream.url.is_some() && !self.0.breaker.is_open() && self.limited().is_none() {
            // Said in the log and by the gate, whoever asks.
            let _ = self.recognise(EVERY / 2).await;
        }
        if let Err(error) = self.catch_up(10).await {
            tracing::warn!(%error, "the index of memories could not catch up; it will be tried again");
        }
    }

    /// Deletes queued memories' messages that ended long enough ago; the memories themselves stay.
    async fn prune(&self) -> Result<()> {
        let retention = self.0.outbox.lanes().get(LANE)?.retention;
        loop {
            let pruned = self.purge(retention, false).await?;
            if pruned < u64::from(PRUNE) {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
    }

    /// One bounded batch of messages that ended so long ago; answers how many went, or would go.
    pub async fn purge(&self, older_than: Duration, dry_run: bool) -> Result<u64> {
        let prune = Prune { lane: Some(LANE.to_owned()), older_than, limit: PRUNE, dry_run };
        Ok(self.0.outbox.prune(prune).await?.messages)
    }

    pub(crate) fn health(&self) -> std::sync::MutexGuard<'_, Health> {
        self.0.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how much longer the service takes nothing, as it said.
    pub(crate) fn limited(&self) -> Option<Duration> {
        self.health().pace.left(Tick::now())
    }

    /// How long the next memory waits that finds the limit used up.
    pub(crate) fn next_turn(&self) -> Duration {
        self.health().pace.turn(Tick::now())
    }

    /// Why the service cannot be used now, if so.
    fn unusable(&self) -> Option<String> {
        if self.0.settings.upstream.url.is_none() {
            return Some(Fault::not_configured().message);
        }
        let trouble = self.health().trouble.as_ref().map(|(why, _)| why.clone());
        let open = || self.0.breaker.is_open().then(|| "it does not answer; memories are queued".to_owned());
        let stranger = || self.is_stranger().then(|| STRANGER.to_owned());
        trouble.or_else(open).or_else(stranger)
    }

    /// As this process knows it from its last calls.
    pub fn capability(&self) -> Capability {
        let detail = self.unusable();
        Capability { status: if detail.is_some() { "failed" } else { "ok" }, detail }
    }

    /// For those who know that the service is back: the breaker closes at once.
    pub fn recovered(&self) {
        self.0.breaker.probed();
    }

    /// Does the service answer at all?
    pub async fn check_health(&self) -> std::result::Result<(), String> {
        let answered = self.0.upstream.health().await;
        answered.map(drop).map_err(|fault| format!("{} {}", fault.code, fault.message))
    }

    /// Asks the service itself: does it let us in, is it the one we know, does it take what is written?
    pub async fn check(&self) -> Capability {
        let failed = |detail: String| Capability { status: "failed", detail: Some(detail) };
        let mut asked = self.recognise(Duration::ZERO).await.map(drop);
        if asked.is_ok() && !self.health().recognised.is_some_and(|seen| seen.asked) {
            // There was nothing to ask for; whether it lets us in is asked all the same.
            asked = self.0.upstream.ping().await.map(drop);
            self.note_answer(asked.as_ref().err());
        }
        match asked {
            Ok(()) => {}
            // It answers, and would do more.
            Err(fault) if fault.blame == Blame::Limit => return self.capability(),
            Err(fault) => return failed(format!("{} {}", fault.code, fault.message)),
        }
        if self.is_stranger() {
            return self.capability();
        }
        if let Some(why) = self.writes_fail().await {
            return failed(why);
        }
        self.capability()
    }

    /// May a queued memory be shown to the service? While it cannot be used as it is configured, one now and then.
    pub(crate) fn may_scout(&self) -> bool {
        let mut health = self.health();
        let Some((_, next)) = &mut health.trouble else { return true };
        let now = Tick::now();
        let may = now >= *next;
        if may {
            *next = now.plus(SCOUT_EVERY);
        }
        may
    }

    /// Keeps what an answer says beside its matter: its limits, what only a person can correct, that it may be another.
    pub(crate) fn note_answer(&self, fault: Option<&Fault>) {
        let now = Tick::now();
        let ours = match fault {
            None => {
                self.health().pace.answered(now);
                None
            }
            Some(fault) => match fault.blame {
                Blame::Ours => Some(format!("{} {}", fault.code, fault.message)),
                Blame::Limit => {
                    self.health().pace.refused(now, fault.retry_after);
                    return;
                }
                // It does not answer at all, and may be another when it does; nothing is known about the rest.
                Blame::Service => return self.doubt_recognition(),
                Blame::Memory => None,
            },
        };
        let changed = {
            let mut health = self.health();
            let changed = health.trouble.is_some() != ours.is_some();
            let next = health.trouble.take().map_or_else(Tick::now, |(_, next)| next);
            health.trouble = ours.clone().map(|why| (why, next));
            changed
        };
        if let (true, Some(why)) = (changed, &ours) {
            tracing::error!(
                why,
                "OpenMemory cannot be used as it is configured; memories are queued until [memory] url and api_key are right"
            );
        }
        if changed {
            // Nobody who stores a memory waits until it is told.
            self.0.breaker.stir();
        }
    }

    /// Tells whoever should know when the service can no longer be used, and when it can again; then what waited is woken.
    async fn tell_of_change(&self) {
        let unusable = self.unusable();
        {
            let mut health = self.health();
            if health.told == unusable.is_some() {
                return;
            }
            health.told = unusable.is_some();
            if unusable.is_none() {
                let now = Tick::now();
                health.wakes = WAKES.iter().map(|later| now.plus(*later)).collect();
            }
        }
        let Some(alerts) = &self.0.alerts else { return };
        let message = match &unusable {
            Some(why) => format!("the capability openmemory failed: {why}"),
            None => "the capability openmemory is back".to_owned(),
        };
        let alert = Alert {
            kind: "capability_failed",
            subject: "openmemory".to_owned(),
            message,
            count: 1,
            details: serde_json::json!({ "capability": "openmemory" }),
        };
        if let Err(error) = alerts.tell(alert, unusable.is_some()).await {
            tracing::warn!(%error, "an alert could not be written; it will be tried again");
            self.health().told = unusable.is_none();
        }
    }
}
