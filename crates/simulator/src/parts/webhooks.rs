//! Webhooks in the world: publishers, subscriptions that are paused and limited, and an orchestrator in every process. The
//! part is the real one; only its receivers are not.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use postrider::Outbox;
use postrider::error::Effect;
use postrider::message::Message;
use postrider::outcome::{Fault, Outcome, Reach};
use postrider::store::{Mode, transact};
use postrider_webhooks::decide::Status;
use postrider_webhooks::guard::Policy;
use postrider_webhooks::keyring::Keyring;
use postrider_webhooks::{NewEvent, NewSubscription, Publishing, Reports, Settings, WebhookCourier, Webhooks};

use super::sagas::Sagas;
use crate::checker::Step;
use crate::delivering::Delivery;
use crate::dice::{Fate, dice};
use crate::plan::{EventPlan, Plan, SECOND};
use crate::store::Reply;
use crate::world::{Action, World};

/// Looks of an orchestrator, and how many of them until it looks around.
const LOOK: u64 = SECOND / 5;
const AROUND: u64 = 8;
const KEY: &str = "sim:MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

/// What publishers know, and the record of sagas.
pub struct Publishers {
    webhooks: Webhooks,
    pub ids: Vec<i64>,
    limits: BTreeMap<i64, (Option<u32>, u32)>,
    pub sagas: Sagas,
    /// Events nobody will publish again, and those whose publisher was told.
    over: HashSet<usize>,
    answered: BTreeMap<usize, i64>,
    /// Sagas whose receiver took it.
    accepted: HashSet<i64>,
    events: BTreeMap<usize, i64>,
}

/// What a process has of webhooks.
pub struct Part {
    webhooks: Webhooks,
    courier: WebhookCourier,
}

fn settings() -> Settings {
    Settings {
        base_delay: Duration::from_secs(1),
        policy: Policy { allow_http: true, ..Policy::default() },
        ..Settings::default()
    }
}

async fn open(outbox: &Outbox, reports: &Reports) -> Webhooks {
    let keyring = Keyring::parse(KEY).expect("a key");
    Webhooks::new(outbox.clone(), settings(), keyring, reports.clone(), None).await.expect("webhooks")
}

impl Part {
    pub async fn new(outbox: &Outbox, reports: &Reports) -> Self {
        let webhooks = open(outbox, reports).await;
        Part { courier: webhooks.courier(), webhooks }
    }
}

impl Publishers {
    pub async fn new(plan: &Plan, outbox: &Outbox, reports: &Reports) -> Self {
        let webhooks = open(outbox, reports).await;
        let (mut ids, mut limits) = (Vec::new(), BTreeMap::new());
        for (n, of) in plan.subscriptions.iter().enumerate() {
            let new = NewSubscription {
                url: format!("https://receiver-{n}.example/"),
                event_types: vec!["*".to_owned()],
                max_retry_limit: Some(of.limit),
                max_in_flight: of.max_in_flight,
                rate_per_sec: of.rate_per_sec,
                ..NewSubscription::default()
            };
            let id = webhooks.subscribe(new).await.expect("a subscription").0.id;
            ids.push(id);
            limits.insert(id, (of.max_in_flight, of.limit));
        }
        Sagas::install(&**outbox.store()).await.expect("the journal of sagas");
        Publishers {
            webhooks,
            ids,
            limits,
            sagas: Sagas::default(),
            over: HashSet::new(),
            answered: BTreeMap::new(),
            accepted: HashSet::new(),
            events: BTreeMap::new(),
        }
    }

    /// Everything was published, and every saga has ended.
    pub fn is_done(&self, plan: &Plan) -> bool {
        self.over.len() == plan.events.len() && self.sagas.live() == 0
    }
}

impl World {
    /// What becomes of the transactions of a part, one after the other.
    pub fn replies(&mut self, fate: Fate, most: u64) -> Vec<Reply> {
        let mut replies = Vec::new();
        for n in 0..most {
            let one = fate ^ (n + 1).wrapping_mul(0x9e37_79b9);
            let Some(mut rng) = self.goes_wrong(one) else {
                replies.push(Reply::Good);
                continue;
            };
            let (reply, kind) = match rng.u8(0..3) {
                0 => (Reply::Refused, "a part's transaction refused"),
                1 => (Reply::LostBefore, "a part's answer lost, not applied"),
                _ => (Reply::LostAfter, "a part's answer lost, applied"),
            };
            replies.push(reply);
            self.fault(kind, Some(one), self.now + SECOND);
        }
        replies
    }

    /// Holds what a part did against both records.
    async fn part_checked(&mut self, who: &str) {
        self.checked(Step::Part).await;
        self.check_sagas(who).await;
    }

    pub async fn check_sagas(&mut self, who: &str) {
        let Some(publishers) = &mut self.publishers else { return };
        let moved = Sagas::read(&*self.store).await.expect("the journal of sagas");
        let told: Vec<String> = moved
            .iter()
            .map(|m| format!("{} {}{}", m.id, m.saga.status.as_str(), if m.parked { ", parked" } else { "" }))
            .collect();
        let wrong = publishers.sagas.check(moved, who, &publishers.limits, &mut self.checker.marks);
        if !told.is_empty() {
            self.note(format_args!("{who} moves sagas {}", told.join("; ")));
        }
        wrong.into_iter().for_each(|wrong| self.violation(wrong));
    }

    pub async fn publish(&mut self, event: usize, round: u64) {
        let EventPlan { n, keyed, .. } = self.plan.events[event];
        let fate = self.fate("publish", [n as u64, round, 0]);
        let again = self.now + dice(fate ^ 0xa9a1).u64(SECOND..5 * SECOND);
        let Some(publishers) = &self.publishers else { return };
        let webhooks = publishers.webhooks.clone();
        if self.now < self.down_until {
            self.last_fault = self.last_fault.max(again);
            return self.at(again, Action::Publish { event, round: round + 1 });
        }
        let mut new = NewEvent::new("sim.event", format!("event {n}"));
        if keyed {
            new = new.external_id(format!("event-{n}"));
        }
        let replies = self.replies(fate, 1);
        self.clients.expect(replies);
        let result = webhooks.publish(vec![new]).await;
        self.clients.expect([]);
        self.part_checked("a publisher").await;
        self.note(format_args!("event {n} is published: {:?}", result.as_ref().map_err(|error| error.effect)));
        let Some(publishers) = &mut self.publishers else { return };
        match result {
            Ok(published) => {
                let published = &published[0];
                let same = publishers.events.insert(n, published.event_id).is_none_or(|id| id == published.event_id);
                let wanted = publishers.ids.len();
                publishers.answered.insert(n, published.event_id);
                publishers.over.insert(n);
                if !same || published.outcome == Publishing::Differs || published.saga_ids.len() != wanted {
                    self.violation(format!("event {n} was published as {published:?}, for {wanted} subscriptions"));
                }
            }
            Err(error) if error.effect == Effect::NotApplied || keyed => {
                self.last_fault = self.last_fault.max(again);
                self.at(again, Action::Publish { event, round: round + 1 });
            }
            Err(_) => {
                publishers.over.insert(n);
            }
        }
    }

    pub async fn orchestrate(&mut self, process: usize, life: u64, round: u64) {
        let (now, connected) = (self.now, self.is_connected(process));
        let Some(alive) = self.alive(process, life) else { return };
        let frozen = now < alive.frozen_until;
        let wait = dice(self.fate("look", [process as u64, life, round])).u64(LOOK * 3 / 4..LOOK * 5 / 4);
        self.at(now + wait, Action::Orchestrate { process, life, round: round + 1 });
        let Some(part) = self.processes[process].part.as_ref().filter(|_| connected && !frozen) else { return };
        let (webhooks, store) = (part.webhooks.clone(), self.processes[process].store.clone());
        let who = format!("w{process}:{life}");
        let fate = self.fate("orchestrate", [((process as u64) << 32) | life, round, 0]);
        let replies = self.replies(fate, 6);
        store.expect(replies);
        // What fails here is tried again at the next look.
        let _ = webhooks.pass().await;
        store.expect([]);
        self.part_checked(&who).await;
        if round % AROUND == AROUND - 1 {
            let replies = self.replies(fate ^ 0xa40d, 6);
            store.expect(replies);
            let _ = webhooks.look_around().await;
            store.expect([]);
            self.part_checked(&who).await;
        }
    }

    /// A job arrives at its receiver, unless its subscription is not to be reached.
    pub async fn arrive_job(&mut self, delivery: &Delivery) -> Option<(Outcome, bool, u64)> {
        let soon = dice(delivery.fate ^ 0xa45e).u64(100..20_000);
        let (process, life) = (delivery.process, delivery.life);
        if self.alive(process, life).is_some() {
            let part = self.processes[process].part.clone()?;
            let away = !self.is_connected(process);
            let store = self.processes[process].store.clone();
            store.expect(if away { vec![Reply::Refused; 4] } else { vec![] });
            let unsent = part.courier.unsent(&delivery.message).await;
            store.expect([]);
            if let Some(outcome) = unsent {
                self.mark("a job put off or given up unsent");
                return Some((outcome, false, soon));
            }
        }
        let Some(mut rng) = self.goes_wrong(delivery.fate) else { return Some((Outcome::sent(), true, soon)) };
        let dead = |code: &'static str, reach| Outcome::Dead(Fault::new(code, "simulated", reach));
        let (kind, outcome, accepted, after) = match rng.u8(0..21) {
            0..7 => ("a receiver's refusal", dead("HTTP_503", Reach::Answered), false, soon),
            7..13 => ("a receiver away", dead("CONNECT_REFUSED", Reach::NeverSent), false, soon),
            13..19 => ("a receiver's answer lost", dead("TIMEOUT", Reach::Unknown), true, 5 * SECOND),
            19 => ("a receiver gone for good", dead("HTTP_410", Reach::Answered), false, soon),
            _ => ("a slow receiver", Outcome::sent(), true, 25 * SECOND),
        };
        self.fault(kind, Some(delivery.fate), self.now + after);
        Some((outcome, accepted, after))
    }

    pub fn job_accepted(&mut self, message: &Message) {
        let job: serde_json::Value = serde_json::from_slice(&message.payload).unwrap_or_default();
        if let (Some(publishers), Some(saga)) = (&mut self.publishers, job["saga_id"].as_i64()) {
            publishers.accepted.insert(saga);
        }
    }

    pub async fn hold(&mut self, subscription: usize, lasts: u64) {
        let Some(publishers) = &self.publishers else { return };
        let (webhooks, id) = (publishers.webhooks.clone(), publishers.ids[subscription]);
        if webhooks.pause(id).await.is_ok() {
            self.note(format_args!("subscription {id} is paused for {lasts} us"));
        }
        self.fault("a pause of a subscription", None, self.now + lasts + SECOND);
        self.at(self.now + lasts, Action::LetGo { subscription, round: 0 });
        self.part_checked("an operator").await;
    }

    /// Resumed by another process than the one that paused it; it may die before it has woken what was put off.
    pub async fn let_go(&mut self, subscription: usize, round: u64) {
        let fate = self.fate("let go", [subscription as u64, round, self.now]);
        let process = dice(fate).usize(0..self.processes.len());
        let Some(publishers) = &self.publishers else { return };
        let (mut webhooks, id) = (publishers.webhooks.clone(), publishers.ids[subscription]);
        let mut store = self.clients.clone();
        if let Some(part) = &self.processes[process].part {
            (webhooks, store) = (part.webhooks.clone(), self.processes[process].store.clone());
        }
        let down = self.now < self.down_until;
        let replies = if down { vec![Reply::Refused; 4] } else { self.replies(fate, 3) };
        store.expect(replies);
        let resumed = webhooks.resume(id).await;
        store.expect([]);
        self.note(format_args!("subscription {id} is resumed: {}", resumed.is_ok()));
        self.part_checked("an operator").await;
        if resumed.is_err() {
            self.last_fault = self.last_fault.max(self.now + SECOND);
            self.at(self.now + SECOND, Action::LetGo { subscription, round: round + 1 });
        }
    }

    /// After the end: what was answered is there, what is complete arrived, and every dead saga has one letter.
    pub async fn check_webhooks(&mut self) {
        let Some(publishers) = &self.publishers else { return };
        let mut wrong = Vec::new();
        for (id, saga) in &publishers.sagas.known {
            if saga.status == Status::Completed && !publishers.accepted.contains(id) {
                wrong.push(format!("S10: saga {id} is complete, and nobody received it"));
            }
        }
        for (n, event) in &publishers.answered {
            let sagas = publishers.sagas.known.values().filter(|saga| saga.event == *event).count();
            if sagas != publishers.ids.len() {
                wrong.push(format!("P1: event {n} was answered, and has {sagas} sagas"));
            }
        }
        let letters = transact(&*self.store, Mode::Read, |tx| {
            Box::pin(async move {
                let rows = tx.query("SELECT saga_id FROM dead_letters ORDER BY saga_id", &[]).await?;
                rows.iter().map(|row| row.int(0)).collect::<postrider::Result<Vec<i64>>>()
            })
        });
        let letters = letters.await.expect("the dead letters");
        let dead = |(_, saga): &(&i64, &super::sagas::Saga)| saga.status == Status::DeadLettered;
        let wanted: Vec<i64> = publishers.sagas.known.iter().filter(dead).map(|(id, _)| *id).collect();
        if letters != wanted {
            wrong.push(format!("S17: dead sagas {wanted:?} have letters {letters:?}"));
        }
        wrong.into_iter().for_each(|wrong| self.violation(wrong));
    }
}
