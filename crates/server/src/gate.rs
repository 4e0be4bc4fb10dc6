//! What this process can do, checked; and what the gate says about it.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::error::Kind;
use postrider::store::{Mode as Access, transact};
use postrider::tx::Tx;
use postrider::{Error, Outbox};
use postrider_memories::gate::{Checked, Mode, SkipSource, Skips, Verdict, judge};
use postrider_memories::{Memories, Scope};
use postrider_webhooks::Webhooks;
use tokio::sync::Mutex;

use crate::writes;

/// All that may be required; the last two only where there is a memory gateway.
pub const CAPABILITIES: [&str; 5] = ["store", "outbox", "audit", "openmemory", "reconcile"];
/// A part that needs nothing of its own is named only when something is wrong with it.
const WEBHOOKS: &str = "webhooks";
/// Everybody may ask for `/health`, as often as they like: what is read is read once in this time,
const READ: Duration = Duration::from_secs(1);
/// and what writes or calls somebody else is tried once in this.
const TRIED: Duration = Duration::from_secs(5);
/// Whoever asks has an answer within this time: a look that takes longer goes on for those who ask next.
const PATIENCE: Duration = Duration::from_secs(10);

/// `[gate]` and the environment.
#[derive(Clone, Debug, Default)]
pub struct GateRules {
    pub mode: Mode,
    pub skips: Skips,
}

impl GateRules {
    /// With what a request leaves out too. An unknown name is answered with the known ones.
    pub fn with(&self, skip: &[String]) -> Result<GateRules, String> {
        let mut rules = self.clone();
        for name in skip {
            if !CAPABILITIES.contains(&name.as_str()) && name != WEBHOOKS {
                return Err(format!("there is no capability `{name}`; known: {}", CAPABILITIES.join(", ")));
            }
            rules.skips.entry(name.clone()).or_insert(SkipSource::Request);
        }
        Ok(rules)
    }
}

/// What some checks last saw.
type Seen = Option<(Tick, BTreeMap<String, Checked>)>;

#[derive(Default)]
struct LastSeen {
    read: Seen,
    tried: Seen,
}

fn note(checked: &mut BTreeMap<String, Checked>, name: &str, seen: Result<(), Error>) {
    let seen = seen.map_err(|error| {
        tracing::warn!(%error, capability = name, "a capability failed its check");
        // What a database says may hold data; the log has it.
        format!("{:?}", error.kind).to_lowercase()
    });
    checked.insert(name.to_owned(), seen);
}

fn noted(seen: &mut Seen, checked: BTreeMap<String, Checked>) -> BTreeMap<String, Checked> {
    *seen = Some((Tick::now(), checked.clone()));
    checked
}

/// What was seen within this time.
fn lately(seen: &Seen, time: Duration) -> Option<BTreeMap<String, Checked>> {
    seen.as_ref().filter(|(at, _)| Tick::now().since(*at) < time).map(|(_, checked)| checked.clone())
}

fn late() -> Checked {
    Err(format!("no answer within {} s", PATIENCE.as_secs()))
}

/// Checks capabilities, and remembers for a moment what it saw.
#[derive(Clone)]
pub struct Gate {
    outbox: Outbox,
    memories: Option<Memories>,
    webhooks: Option<Webhooks>,
    seen: Arc<std::sync::Mutex<LastSeen>>,
    /// One look at a time, of each kind.
    reading: Arc<Mutex<()>>,
    trying: Arc<Mutex<()>>,
}

impl Gate {
    pub fn new(outbox: Outbox, memories: Option<Memories>) -> Self {
        let (seen, reading, trying) = Default::default();
        Gate { outbox, memories, webhooks: None, seen, reading, trying }
    }

    /// Looks at webhooks too: does this process hold the key of their secrets?
    pub fn with_webhooks(self, webhooks: Webhooks) -> Self {
        Gate { webhooks: Some(webhooks), ..self }
    }

    fn seen(&self) -> MutexGuard<'_, LastSeen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub async fn look(&self, rules: &GateRules) -> Verdict {
        let (reads, tries) = (self.clone(), self.clone());
        // Tasks of their own: a request that is given up takes the answer away from nobody.
        let reading = tokio::time::timeout(PATIENCE, tokio::spawn(async move { reads.read_lately().await }));
        let trying = tokio::time::timeout(PATIENCE, tokio::spawn(async move { tries.try_lately().await }));
        let (read, tried) = tokio::join!(reading, trying);
        let mut checked = match read {
            Ok(Ok(checked)) => checked,
            _ => ["store", "outbox"].map(|name| (name.to_owned(), late())).into(),
        };
        checked.extend(match tried {
            Ok(Ok(checked)) => checked,
            _ => self.tried_before(),
        });
        // Known without asking anybody.
        if let Some(trouble) = writes::trouble() {
            note(&mut checked, "store", Err(trouble.into()));
        }
        verdict(rules, self.memories.is_some(), &checked)
    }

    async fn read_lately(&self) -> BTreeMap<String, Checked> {
        let _alone = self.reading.lock().await;
        let known = lately(&self.seen().read, READ);
        match known {
            Some(checked) => checked,
            None => {
                let checked = self.read().await;
                noted(&mut self.seen().read, checked)
            }
        }
    }

    async fn try_lately(&self) -> BTreeMap<String, Checked> {
        let _alone = self.trying.lock().await;
        let known = lately(&self.seen().tried, TRIED);
        match known {
            Some(checked) => checked,
            None => {
                let checked = self.try_out().await;
                noted(&mut self.seen().tried, checked)
            }
        }
    }

    /// What was tried before the trial that takes so long. It is OpenMemory that may take its time.
    fn tried_before(&self) -> BTreeMap<String, Checked> {
        let mut checked = lately(&self.seen().tried, 6 * PATIENCE).unwrap_or_default();
        checked.entry("audit".to_owned()).or_insert_with(late);
        if self.memories.is_some() {
            checked.entry("reconcile".to_owned()).or_insert_with(late);
            checked.insert("openmemory".to_owned(), late());
        }
        checked
    }

    /// What reading tells, at the heads of the lanes: it costs the same whatever the backlog.
    async fn read(&self) -> BTreeMap<String, Checked> {
        let mut checked = BTreeMap::new();
        note(&mut checked, "store", self.outbox.store_id().await.map(drop));
        note(&mut checked, "outbox", self.outbox.ages().await.map(drop));
        if let Some(webhooks) = &self.webhooks
            && let Err(error) = webhooks.check_key().await
        {
            // Where the key is wanted is no secret, and what to do about it.
            let told =
                if error.kind == Kind::KeyMissing { error.message } else { format!("{:?}", error.kind).to_lowercase() };
            checked.insert(WEBHOOKS.to_owned(), Err(told));
        }
        checked
    }

    /// What must be tried: a write, and a call to somebody else.
    async fn try_out(&self) -> BTreeMap<String, Checked> {
        let mut checked = BTreeMap::new();
        note(&mut checked, "audit", self.audit().await);
        if let Some(memories) = &self.memories {
            note(&mut checked, "reconcile", memories.reconcile(Scope::Glance, false).await.map(drop));
            let openmemory = memories.check().await;
            let failed = || openmemory.detail.clone().unwrap_or_else(|| "failed".to_owned());
            let seen = if openmemory.status == "ok" { Ok(()) } else { Err(failed()) };
            checked.insert("openmemory".to_owned(), seen);
        }
        checked
    }

    /// Can an audit be written? One is, and taken back.
    async fn audit(&self) -> Result<(), Error> {
        const TAKEN_BACK: &str = "the probe is taken back";
        let tried = transact(&**self.outbox.store(), Access::Write, |tx| {
            Box::pin(async move {
                write_audit(tx).await?;
                Err::<(), Error>(Error::new(Kind::Invalid, TAKEN_BACK))
            })
        });
        match tried.await {
            Err(error) if error.message == TAKEN_BACK => Ok(()),
            other => other,
        }
    }
}

async fn write_audit(tx: &mut (dyn Tx + Send)) -> Result<(), Error> {
    let mut params = Vec::new();
    let (created, updated) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
    let sql = format!(
        "INSERT INTO write_audit (created_at, updated_at, action, reason, status, evidence_refs_json)
         VALUES ({created}, {updated}, 'allow', 'gate_probe', 'success', '{{}}')"
    );
    tx.execute(&sql, &params).await.map(drop)
}

fn verdict(rules: &GateRules, gateway: bool, checked: &BTreeMap<String, Checked>) -> Verdict {
    let required = if gateway { &CAPABILITIES[..] } else { &CAPABILITIES[..3] };
    let part = checked.contains_key(WEBHOOKS).then_some(WEBHOOKS);
    let required: Vec<&str> = required.iter().copied().chain(part).collect();
    judge(rules.mode, &required, checked, &rules.skips)
}

/// Where the database cannot even be opened, nothing else can be looked at.
pub fn without_store(rules: &GateRules, gateway: bool, why: &str) -> Verdict {
    let checked = CAPABILITIES.iter().map(|name| {
        let seen = if *name == "store" { why.to_owned() } else { "the store failed".to_owned() };
        ((*name).to_owned(), Err(seen))
    });
    verdict(rules, gateway, &checked.collect())
}

/// Says at the start what the gate would say.
pub fn warn(gate: &Gate, rules: &GateRules) {
    let (gate, rules) = (gate.clone(), rules.clone());
    tokio::spawn(async move {
        let verdict = gate.look(&rules).await;
        if verdict.is_degraded() {
            let reason = verdict.reason.clone().unwrap_or_else(|| "some capabilities are skipped".to_owned());
            tracing::warn!(
                mode = verdict.mode.as_str(),
                passed = verdict.passed,
                reason,
                "the gate: postrider gate tells more"
            );
        }
    });
}
