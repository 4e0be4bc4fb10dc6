//! The kernel's operations, each with its scene: what is prepared, how it is asked for, and how the product asks again.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::error::Result;
use postrider::lease::Lease;
use postrider::message::sha256;
use postrider::outcome::{Certainty, GiveBack, LeaseState, Settled, Settlement, Verdict};
use postrider::store::{self, Filter, From, Requeued, Retried};
use postrider::{LaneRules, Lanes, Message, NewMessage, Options, Outbox};
use proving::sweep::{Look, Subject, Told};

use super::looking::{self, How, Witness};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Enqueue,
    EnqueueKeyed,
    EnqueueActiveKey,
    EnqueueBatch,
    Claim,
    ClaimTakeover,
    ClaimAdopt,
    ClaimIds,
    Walk,
    SettleSent,
    SettleSentReferences,
    SettleRetry,
    SettleDead,
    SettleMixed,
    SettleTwice,
    SettleKeyed,
    SettleHooked,
    SettleFleeting,
    SettleDedup,
    SettleAudited,
    Renew,
    Defer,
    Wake,
    WakeWaiting,
    Retry,
    Seize,
    Release,
    ReleaseExpired,
    Requeue,
    Prune,
    Pause,
    Resume,
    Reads,
    Begin,
    CheckDedup,
    Vitals,
    Notify,
    Migrate,
}

use Verb::*;

impl Verb {
    pub const ALL: &[Verb] = &[
        Enqueue,
        EnqueueKeyed,
        EnqueueActiveKey,
        EnqueueBatch,
        Claim,
        ClaimTakeover,
        ClaimAdopt,
        ClaimIds,
        Walk,
        SettleSent,
        SettleSentReferences,
        SettleRetry,
        SettleDead,
        SettleMixed,
        SettleTwice,
        SettleKeyed,
        SettleHooked,
        SettleFleeting,
        SettleDedup,
        SettleAudited,
        Renew,
        Defer,
        Wake,
        WakeWaiting,
        Retry,
        Seize,
        Release,
        ReleaseExpired,
        Requeue,
        Prune,
        Pause,
        Resume,
        Reads,
        Begin,
        CheckDedup,
    ];

    /// Those that are also tried with their connection still to be made.
    pub const COLD: &[Verb] = &[EnqueueKeyed, Claim, SettleSent, SettleHooked];

    fn rules(self) -> LaneRules {
        let plain = LaneRules::default();
        match self {
            SettleHooked => LaneRules { on_settled: Some(Arc::new(Witness)), ..plain },
            SettleFleeting => LaneRules { retention: Duration::ZERO, ..plain },
            SettleDedup | CheckDedup => LaneRules { dedup: true, ..plain },
            SettleAudited => LaneRules { audit: true, ..plain },
            _ => plain,
        }
    }

    fn is_settle(self) -> bool {
        format!("{self:?}").starts_with("Settle")
    }

    fn how(self) -> How {
        How {
            one_by_one: self.is_settle(),
            tokens_matter: !matches!(self, Claim | ClaimTakeover | ClaimAdopt | ClaimIds | Seize | Release),
            fleeting: self == SettleFleeting,
            // Of a message that stands twice one is a conflict, and audited as such.
            without: if self == SettleTwice { "audit" } else { "" },
        }
    }

    /// What is there beforehand.
    fn messages(self, lane: &str) -> Vec<NewMessage> {
        let plain = |n: usize| NewMessage::new(lane, format!("payload {n}"));
        let later = Duration::from_secs(600);
        match self {
            Enqueue | EnqueueKeyed | EnqueueActiveKey | EnqueueBatch | Pause | Resume | Vitals | Notify | Migrate => {
                vec![]
            }
            Wake => vec![plain(0).active_key("thing").delay(later)],
            WakeWaiting | Retry => vec![plain(0).delay(later)],
            SettleKeyed | Requeue => {
                (0..2).map(|n| plain(n).key(format!("k{n}")).active_key(format!("t{n}"))).collect()
            }
            SettleMixed | SettleHooked | SettleAudited => (0..3).map(plain).collect(),
            _ => (0..2).map(plain).collect(),
        }
    }

    fn verdicts(self) -> Vec<Verdict> {
        let sent = Verdict::sent;
        let retry = || Verdict::Retry {
            delay: Duration::from_secs(600),
            code: "HTTP_503".into(),
            error: "busy".into(),
            certainty: Certainty::MaybeSent,
        };
        let dead = || Verdict::Dead {
            code: "HTTP_400".into(),
            error: "no use".into(),
            certainty: Certainty::Unchanged,
            counted: true,
        };
        let referring = || Verdict::Sent { result_ref: Some("theirs-1".into()), dedup_hit: false };
        match self {
            SettleRetry => vec![retry(), retry()],
            SettleDead => vec![dead(), dead()],
            SettleMixed | SettleHooked | SettleAudited => vec![sent(), retry(), dead()],
            SettleSentReferences => vec![referring(), sent()],
            SettleKeyed => vec![sent(), dead()],
            _ => vec![sent(), sent()],
        }
    }
}

pub struct Operation {
    pub verb: Verb,
    pub cold: bool,
}

pub struct Scene {
    lane: String,
    ids: Vec<i64>,
    leases: Vec<Lease>,
}

const WORKER: &str = "w";
const HELD: Duration = Duration::from_secs(300);
const LONGER: Duration = Duration::from_secs(900);

fn claim(lane: &str, owner: &str, lease: Duration, from: From) -> store::Claim {
    let (lane, owner) = (lane.into(), owner.into());
    store::Claim { lane, shard: 0, limit: 10, lease, owner, max_crashes: 5, send_begun: false, from }
}

fn got(messages: &[Message], wanted: usize) -> Vec<Told> {
    vec![if messages.len() == wanted { Told::Applied } else { Told::NotApplied }]
}

fn yes(holds: bool) -> Vec<Told> {
    vec![if holds { Told::Applied } else { Told::NotApplied }]
}

impl Scene {
    fn settlements(&self, verb: Verb, again: bool) -> Vec<Settlement> {
        let entry = |(lease, verdict): (&Lease, Verdict)| Settlement { again, ..Settlement::new(*lease, verdict) };
        let mut entries: Vec<Settlement> = self.leases.iter().zip(verb.verdicts()).map(entry).collect();
        if verb == SettleTwice {
            entries.push(entries[0].clone());
        }
        entries
    }

    async fn settle(&self, outbox: &Outbox, verb: Verb, again: bool) -> Result<Vec<Told>> {
        let answers = outbox.store().settle(&self.lane, WORKER, &self.settlements(verb, again)).await?;
        let told = answers.iter().map(|answer| match answer {
            Settled::Applied => Told::Applied,
            Settled::Unknown => Told::Unknown,
            Settled::LeaseLost | Settled::Refused | Settled::Locked => Told::NotApplied,
        });
        // Of a message that stands twice, once is enough; the second was lost to the first.
        Ok(told.take(self.leases.len()).collect())
    }

    fn new_messages(&self, verb: Verb) -> Vec<NewMessage> {
        let plain = |n: usize| NewMessage::new(&*self.lane, format!("payload {n}"));
        match verb {
            EnqueueKeyed => vec![plain(0).key("k")],
            EnqueueActiveKey => vec![plain(0).active_key("thing")],
            EnqueueBatch => (0..3).map(|n| plain(n).key(format!("k{n}")).active_key(format!("t{n}"))).collect(),
            _ => vec![plain(0)],
        }
    }

    async fn reads(&self, outbox: &Outbox) -> Result<Vec<Told>> {
        let (live, id) = (outbox.waiting(&self.lane, 10).await?, self.ids[0]);
        let list = outbox.list(Filter { lane: Some(self.lane.clone()), limit: 10, ..Filter::default() }).await?;
        let shown = outbox.show(id).await?;
        let payload = outbox.payload(id).await?;
        let (stats, _) = outbox.stats_up_to(&self.lane, 10).await?;
        let whole = live == 2 && list.items.len() == 2 && shown.is_some() && payload.is_some() && stats.pending == 2;
        Ok(yes(whole))
    }
}

#[async_trait]
impl Subject for Operation {
    type Handle = Outbox;
    type Scene = Scene;

    fn name(&self) -> String {
        let verb = format!("{:?}", self.verb);
        let words =
            verb.chars().map(|c| if c.is_uppercase() { format!(" {}", c.to_lowercase()) } else { c.to_string() });
        let words = words.collect::<String>().trim().to_owned();
        if self.cold { format!("{words}, connecting") } else { words }
    }

    fn is_cold(&self) -> bool {
        self.cold
    }

    async fn open(&self, url: &str, options: Options, places: &[String]) -> Outbox {
        let lanes = places.iter().fold(Lanes::new(), |lanes, place| lanes.with(place, self.verb.rules()));
        let options = Options { notifications: self.verb == Notify, ..options };
        Outbox::new(postrider::open(url, lanes, options).await.expect("open"))
    }

    fn outbox<'a>(&self, handle: &'a Outbox) -> &'a Outbox {
        handle
    }

    async fn prepare(&self, near: &Outbox, place: &str) -> Scene {
        let messages = self.verb.messages(place);
        let entries = if messages.is_empty() { vec![] } else { near.enqueue(messages).await.expect("enqueue") };
        let ids: Vec<i64> = entries.iter().map(|entry| entry.id).collect();
        let mut scene = Scene { lane: place.to_owned(), ids, leases: vec![] };
        let (owner, lease) = match self.verb {
            ClaimAdopt | Renew | Defer | Begin => (WORKER, HELD),
            Release | Seize => ("somebody else", HELD),
            ClaimTakeover | ReleaseExpired => ("somebody else", Duration::from_millis(1)),
            Requeue | Prune | CheckDedup => (WORKER, HELD),
            verb if verb.is_settle() => (WORKER, HELD),
            Resume => {
                near.pause(place).await.expect("pause");
                return scene;
            }
            Migrate => {
                proving::sweep::write(near, "DELETE FROM outbox_lanes WHERE lane = ?", vec![place.into()]).await;
                return scene;
            }
            _ => return scene,
        };
        let claimed = near.store().claim(&claim(place, owner, lease, From::Mark(None))).await.expect("claim").messages;
        assert_eq!(claimed.len(), scene.ids.len(), "all of the scene's messages");
        scene.leases = claimed.iter().map(Message::lease).collect();
        if matches!(self.verb, Requeue | Prune | CheckDedup) {
            let ends = if self.verb == CheckDedup { SettleSent } else { SettleDead };
            let ended = |lease: &Lease| Settlement::new(*lease, ends.verdicts().remove(0));
            let entries: Vec<_> = scene.leases.iter().map(ended).collect();
            let settled = near.store().settle(place, WORKER, &entries).await.expect("settle");
            assert!(settled.iter().all(|answer| *answer == Settled::Applied));
        }
        scene
    }

    async fn run(&self, far: &Outbox, scene: &Scene) -> Result<Vec<Told>> {
        let (store, lane, all) = (far.store(), &*scene.lane, scene.ids.len());
        match self.verb {
            Enqueue | EnqueueKeyed | EnqueueActiveKey | EnqueueBatch => {
                let messages = scene.new_messages(self.verb);
                let wanted = messages.len();
                Ok(yes(far.enqueue(messages).await?.len() == wanted))
            }
            Claim | ClaimTakeover => {
                let claimed = store.claim(&claim(lane, WORKER, LONGER, From::Mark(None))).await?;
                Ok(got(&claimed.messages, all))
            }
            ClaimAdopt => {
                let from = From::Adopt { mark: None, known: vec![] };
                Ok(got(&store.claim(&claim(lane, WORKER, LONGER, from)).await?.messages, all))
            }
            ClaimIds => {
                let from = From::Ids(scene.ids.clone());
                Ok(got(&store.claim(&claim(lane, WORKER, LONGER, from)).await?.messages, all))
            }
            Walk => Ok(yes(store.walk(lane, 0, None, 10).await?.seen.len() == all)),
            Renew => {
                let states = store.renew(WORKER, &scene.leases, LONGER).await?;
                Ok(yes(states.iter().all(|state| *state == LeaseState::Held)))
            }
            Defer => {
                let how = GiveBack::after(Duration::from_secs(600), "LIMIT");
                let states = store.defer(WORKER, &scene.leases, &how).await?;
                Ok(yes(states.iter().all(|state| *state == LeaseState::Held)))
            }
            Wake => Ok(yes(far.wake(lane, vec!["thing".into()]).await? == 1)),
            WakeWaiting => Ok(yes(far.wake_waiting(lane, None).await? == 1)),
            Retry => Ok(yes(far.retry(scene.ids[0]).await? == Retried::Retried)),
            Seize => Ok(yes(far.seize("operator:me", scene.ids.clone(), LONGER).await?.len() == all)),
            Release => Ok(yes(far.release(scene.ids.clone()).await?.len() == all)),
            ReleaseExpired => Ok(yes(far.release_expired(Some(lane), 10).await?.len() == all)),
            Requeue => {
                let answers = far.requeue(scene.ids.clone()).await?;
                Ok(yes(answers.iter().all(|answer| *answer == Requeued::Requeued)))
            }
            Prune => {
                let (lane, older_than) = (Some(lane.to_owned()), Duration::ZERO);
                let pruned = far.prune(store::Prune { lane, older_than, limit: 10, dry_run: false }).await?;
                Ok(yes(pruned.messages == all as u64))
            }
            Pause => Ok(yes(far.pause(lane).await?)),
            Resume => Ok(yes(far.resume(lane).await?)),
            Reads => scene.reads(far).await,
            Begin => Ok(yes(far.begin(WORKER, scene.leases[0]).await?)),
            CheckDedup => {
                let probes = [b"payload 0".as_slice(), b"never sent"].map(|payload| (None, sha256(payload)));
                let found = far.check_dedup(lane, probes.to_vec()).await?;
                Ok(yes(found.iter().map(Option::is_some).eq([true, false])))
            }
            Vitals => Ok(yes(store.vitals().await?.pool.is_some())),
            Notify => store.notify().await.map(|()| yes(true)),
            Migrate => far.migrate().await.map(|ran| yes(ran.is_empty())),
            verb => scene.settle(far, verb, false).await,
        }
    }

    async fn again(&self, far: &Outbox, scene: &Scene) -> Option<Result<Vec<Told>>> {
        let adopting = From::Adopt { mark: None, known: vec![] };
        Some(match self.verb {
            // Without a key nobody can know; its caller was told.
            Enqueue => return None,
            Claim | ClaimTakeover => {
                let claimed = far.store().claim(&claim(&scene.lane, WORKER, LONGER, adopting)).await;
                claimed.map(|claimed| got(&claimed.messages, scene.ids.len()))
            }
            verb if verb.is_settle() => scene.settle(far, verb, true).await,
            // What was done already answers otherwise the second time; what matters is what is there then.
            Defer | Wake | WakeWaiting | Requeue | Prune | Pause | Resume | ReleaseExpired => {
                self.run(far, scene).await.map(|_| yes(true))
            }
            _ => self.run(far, scene).await,
        })
    }

    async fn look(&self, near: &Outbox, scene: &Scene) -> Look {
        looking::look(near, &scene.lane, &scene.ids, self.verb.how()).await
    }
}
