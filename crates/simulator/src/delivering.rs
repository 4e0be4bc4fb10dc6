//! Deliveries, the receiver's own log, and who is to blame: what a process may begin, what a receiver may see, and from whom
//! a message may be taken.

use std::time::Duration;

use postrider::decide::suspect_group;
use postrider::error::Effect;
use postrider::message::{Message, Sha};
use postrider::outcome::{Fault, Outcome, Reach, code};
use postrider::worker::core::Event;
use postrider::{OPERATOR, Timestamp};

use crate::checker::{End, Known, Seen, Step};
use crate::dice::{Fate, dice};
use crate::plan::{CONTENTS, LaneKind, MAX_CRASHES, SECOND};
use crate::processes::Alive;
use crate::store::Reply;
use crate::world::{Action, World};

/// A delivery on its way.
pub struct Delivery {
    pub process: usize,
    pub life: u64,
    pub owner: String,
    pub message: Box<Message>,
    pub kind: LaneKind,
    pub begun: bool,
    pub fate: Fate,
}

impl World {
    pub fn send_out(&mut self, process: usize, life: u64, lane: usize, message: Box<Message>) {
        let Some(owner) = self.owner(process) else { return };
        let kind = self.processes[process].plan.lanes[lane];
        self.check_beginning(process, life, &owner, kind, &message);
        self.under_way.entry((process, life)).or_default().insert(message.id, (*message).clone());
        let n = self.planned.get(&message.id).map_or(!message.id as u64, |n| *n as u64);
        let fate = self.fate("delivery", [n, message.lease_token as u64, 0]);
        let there = self.now + dice(fate ^ 0x7e11).u64(100..20_000);
        let delivery = Box::new(Delivery { process, life, owner, message, kind, begun: false, fate });
        if kind == LaneKind::Begun {
            let begins = fate ^ 0xbe61;
            let reply = self.reply(begins, "send begun");
            let there = self.now + self.latency(process, begins);
            self.at(there, Action::Begin { delivery, reply, era: self.era });
        } else {
            self.at(there, Action::Arrive { delivery });
        }
    }

    /// What is begun was claimed by this very process, is worth it, and is in no bad company.
    fn check_beginning(&mut self, process: usize, life: u64, owner: &str, kind: LaneKind, message: &Message) {
        let (id, lease) = (message.id, message.lease());
        if self.claims.get(&lease).is_none_or(|claimed| claimed != owner) {
            self.violation(format!("S9: {owner} delivers {lease:?}, which it never claimed"));
        }
        let steady = self.struck_all == 0;
        let late = |limit: Timestamp| self.db_now() > limit.micros() + SECOND as i64;
        if steady && !message.maybe_sent && message.deliver_before.is_some_and(late) {
            self.violation(format!("{owner} delivers message {id} after its time: {:?}", message.deliver_before));
        }
        let others: Vec<Message> =
            self.under_way.get(&(process, life)).into_iter().flat_map(|all| all.values()).cloned().collect();
        let same_lane = |other: &&Message| other.lane == message.lane && other.id != id;
        let share = (self.processes[process].plan.concurrency / 4).max(1);
        let to_target = others.iter().filter(same_lane).filter(|other| other.target == message.target).count();
        // Whatever their instrument, orders go to one broker; and memories to one service.
        if to_target >= share && !kind.is_orders() && kind != LaneKind::Memories {
            let target = message.target.clone();
            self.violation(format!("{owner} has more than {share} under way to {target:?} on {}", kind.name()));
        }
        if kind == LaneKind::Dedup {
            let twin = |other: &Message| (other.target.clone(), other.sha()) == (message.target.clone(), message.sha());
            if let Some(other) = others.iter().filter(same_lane).find(|other| twin(other)) {
                self.violation(format!("P10: {owner} delivers the twins {} and {id} side by side", other.id));
            }
        }
        let suspects = others.iter().filter(same_lane).filter(|other| other.crashes > 1).count();
        if let Some(group) = suspect_group(message.crashes, MAX_CRASHES).filter(|_| message.crashes < MAX_CRASHES)
            && suspects >= group
        {
            let crashes = message.crashes;
            self.violation(format!("{owner} delivers suspect {id} ({crashes} crashes) beside {suspects} others"));
        }
    }

    pub async fn begin(&mut self, mut delivery: Box<Delivery>, reply: Reply, era: u64) {
        let (process, life, id) = (delivery.process, delivery.life, delivery.message.id);
        let lease = delivery.message.lease();
        let away = era != self.era || !self.is_connected(process);
        let locked = self.locks.strong(id);
        let answer = match reply {
            _ if away || locked || reply == Reply::Refused => Err(Effect::NotApplied),
            Reply::LostBefore => Err(Effect::Unknown),
            _ => {
                let outbox = self.processes[process].outbox.clone();
                let held = outbox.begin(&delivery.owner, lease).await.expect("a database in memory");
                self.note(format_args!("{} begins {}@{} {held}", delivery.owner, lease.id, lease.token));
                self.checked(Step::Begin { owner: &delivery.owner, lease, held }).await;
                if reply == Reply::LostAfter { Err(Effect::Unknown) } else { Ok(held) }
            }
        };
        let put_off = |delay, code: &'static str| Outcome::Defer { delay, code: code.into() };
        let (outcome, begun) = match answer {
            Ok(true) => {
                delivery.begun = true;
                let there = self.now + dice(delivery.fate ^ 0x7e11).u64(100..20_000);
                self.at(there, Action::Arrive { delivery });
                return;
            }
            Ok(false) => (put_off(Duration::ZERO, code::LEASE_LOST), false),
            Err(effect) => {
                if effect == Effect::Unknown {
                    self.mark("send begun, and never told");
                }
                (put_off(Duration::from_secs(1), code::STORE_UNAVAILABLE), effect == Effect::Unknown)
            }
        };
        let back = self.now + self.latency(process, delivery.fate ^ 0xbac4);
        self.at(back, Action::Hear { process, life, event: Event::Delivered { id, outcome, begun }, era: None });
    }

    /// How a delivery goes, by its fate: the answer, whether the receiver takes it, and after how long it answers.
    fn outcome(&mut self, delivery: &Delivery) -> (Outcome, bool, u64) {
        let soon = dice(delivery.fate ^ 0xa45e).u64(100..20_000);
        let Some(mut rng) = self.goes_wrong(delivery.fate) else {
            let reference = Some(format!("r{}", delivery.message.id));
            return (Outcome::Sent { result_ref: reference.filter(|_| delivery.fate.is_multiple_of(2)) }, true, soon);
        };
        let retry = |code: &'static str, reach, retry_after| Outcome::Retry {
            fault: Fault::new(code, "simulated", reach),
            retry_after,
        };
        let (kind, outcome, accepted, after) = match rng.u8(0..6) {
            0 => ("a receiver away", retry("CONNECT_REFUSED", Reach::NeverSent, None), false, soon),
            1 => {
                let wait = rng.bool().then(|| Duration::from_secs(5));
                ("a receiver's refusal", retry("HTTP_503", Reach::Answered, wait), false, soon)
            }
            2 => {
                self.mark("delivered, answer lost");
                ("a receiver's answer lost", retry("TIMEOUT", Reach::Unknown, None), true, 5 * SECOND)
            }
            // Longer than the lease: it must be renewed meanwhile.
            3 => ("a slow receiver", Outcome::sent(), true, 25 * SECOND),
            4 => ("a receiver's last word", Outcome::dead("HTTP_400", "simulated"), false, soon),
            _ => {
                let defer = Outcome::Defer { delay: Duration::from_secs(2), code: "PAUSED".into() };
                ("a delivery put off", defer, false, soon)
            }
        };
        self.fault(kind, Some(delivery.fate), self.now + after);
        (outcome, accepted, after)
    }

    /// A request on its way arrives even if its sender is gone.
    pub async fn arrive(&mut self, mut delivery: Delivery) {
        let (id, token) = (delivery.message.id, delivery.message.lease_token);
        let (process, life) = (delivery.process, delivery.life);
        let n = self.planned.get(&id).copied();
        if n.is_some_and(|n| self.plan.messages.iter().any(|m| m.n == n && m.poison)) {
            if self.alive(process, life).is_some() {
                self.poisoned.insert(delivery.owner);
                self.fault("a poison's kill", None, self.now);
                self.note(format_args!("poison {id}@{token} kills w{process}"));
                self.crash(process);
            }
            return;
        }
        let (outcome, accepted, after) = match delivery.kind {
            LaneKind::Memories => return self.arrive_memory(delivery).await,
            LaneKind::Webhooks => match self.arrive_job(&delivery).await {
                Some(outcome) => outcome,
                None => return,
            },
            LaneKind::KeyedOrders | LaneKind::Orders => match self.arrive_order(&mut delivery).await {
                Some(outcome) => outcome,
                None => return,
            },
            _ => self.outcome(&delivery),
        };
        self.note(format_args!("the receiver gets {id}@{token} of {}: {}", delivery.owner, told(&outcome)));
        if !matches!(outcome, Outcome::Defer { .. }) {
            let tokens = self.received.entry(id).or_default();
            let twice = tokens.contains(&token);
            tokens.push(token);
            if twice {
                self.violation(format!("P2: message {id} was sent twice under token {token}"));
            }
            if accepted {
                self.accepted.insert(id);
                self.job_accepted(&delivery.message);
            }
        }
        let event = Event::Delivered { id, outcome, begun: delivery.begun };
        self.at(self.now + after, Action::Hear { process, life, event, era: None });
    }

    /// A message may be taken from whoever was struck, and be buried for it. What lost only its poisonous neighbour's
    /// workers, or healthy ones, must not be.
    pub fn blame(&mut self, seen: Seen) {
        for takeover in seen.takeovers {
            let (id, from) = (takeover.id, &takeover.from);
            if self.checker.known.get(&id).is_some_and(|known| known.row.crashes == 0) {
                self.unlucky.remove(&id);
            }
            let row = self.struck_rows.get(&id).copied().unwrap_or(0);
            let excused = self.struck.get(from).copied().unwrap_or(0).max(self.struck_all).max(row);
            if from.starts_with(OPERATOR) {
                self.mark("an operator never came back");
                self.unlucky.insert(id);
            } else if (excused > 0 && takeover.expired <= excused) || self.could_not_adopt(id, from) {
                self.unlucky.insert(id);
            } else if !self.poisoned.contains(from) {
                self.violation(format!("P5: {from} is well, and lost message {id}"));
            }
        }
        for (id, end) in seen.ended {
            self.check_end(id, &end);
        }
    }

    /// It held this message without knowing, and could not look for it: that failed, it had no room, or it is gone.
    fn could_not_adopt(&self, id: i64, owner: &str) -> bool {
        if self.lost_claims.get(&id).is_none_or(|lost| lost != owner) {
            return false;
        }
        let alive = self.processes.iter().filter_map(|p| Some((p.alive.as_ref()?, p.plan.concurrency)));
        let full = |(alive, room): (&Alive, usize)| alive.core.held() >= room / 2;
        let of_it = alive.filter(|(alive, _)| alive.core.owner() == owner).map(full).next();
        of_it.unwrap_or(true) || self.adoptions_failed.contains(owner)
    }

    /// Why it ended, held against what happened to it.
    fn check_end(&mut self, id: i64, end: &End) {
        let Some(known) = self.checker.known.get(&id).filter(|known| !LaneKind::is_parts(&known.lane)).cloned() else {
            return;
        };
        let planned = self.planned.get(&id).and_then(|n| self.plan.messages.iter().find(|m| m.n == *n)).cloned();
        let poison = planned.as_ref().is_some_and(|m| m.poison);
        let by_hand = self.settled_by_hand.contains(&id);
        match end {
            _ if by_hand => {}
            End::Sent if poison => self.violation(format!("message {id} kills its worker and is called sent")),
            End::Sent if self.dedup_hits.contains(&id) => self.mark("a dedup hit"),
            End::Sent if !self.accepted.contains(&id) => {
                self.violation(format!("S10: message {id} is called sent, but nobody received it"));
            }
            End::Sent => {}
            End::Dead(code) if code == "POISON" => {
                self.mark(if poison { "a poison buried" } else { "an unlucky message buried" });
                if !poison && !self.unlucky.contains(&id) {
                    self.violation(format!("message {id} was buried, and never lost a worker of its own: {known:?}"));
                }
            }
            End::Dead(code) if code == "EXPIRED" => {
                self.mark("a message expired");
                if planned.is_some_and(|m| m.worth.is_none()) {
                    self.violation(format!("message {id} expired, and is worth delivering for ever"));
                }
            }
            End::Dead(code) if code == "HTTP_400" => {}
            End::Dead(code) => {
                let most = self.plan.lanes.iter().find(|l| l.kind.name() == known.lane).map_or(0, |l| l.max_attempts);
                let kept = known.lane == LaneKind::Begun.name() && known.row.attempts > most;
                if known.row.attempts != most && !kept {
                    self.violation(format!("message {id} died of {code} after {} of {most}", known.row.attempts));
                }
                self.mark("died of its attempts");
            }
        }
    }

    /// P10: what was sent before is a hit, and nothing else is.
    pub fn check_hits(&mut self, probes: &[(Option<String>, Sha)], hits: &[Option<Option<String>>]) {
        for ((target, sha), hit) in probes.iter().zip(hits) {
            let same = |(id, known): (&i64, &Known)| {
                let n = self.planned.get(id).copied().unwrap_or(usize::MAX);
                let content = (Some(target_of(n)), postrider::message::sha256(content(LaneKind::Dedup, n).as_bytes()));
                let told = known.lane == LaneKind::Dedup.name()
                    && known.end == Some(End::Sent)
                    && !self.dedup_hits.contains(id);
                told && content == (target.clone(), *sha)
            };
            let sent = self.checker.known.iter().any(same);
            if sent != hit.is_some() {
                self.violation(format!("P10: {target:?} got this content before: {sent}; told: {hit:?}"));
            }
        }
    }

    /// After the end of a run: everything that was answered is there, once, and went out as often as it may.
    pub fn check_ends(&mut self) {
        for batch in std::mem::take(&mut self.batches) {
            for (n, id) in &batch.answered {
                if !self.checker.known.contains_key(id) {
                    self.violation(format!(
                        "P1: the enqueue of {n} was answered with message {id}, which is not there"
                    ));
                }
            }
        }
        let mut copies: std::collections::BTreeMap<usize, Vec<i64>> = Default::default();
        for (id, _) in self.checker.known.iter().filter(|(_, known)| !LaneKind::is_parts(&known.lane)) {
            copies.entry(self.planned.get(id).copied().unwrap_or(usize::MAX)).or_default().push(*id);
        }
        for (n, ids) in copies.into_iter().filter(|(_, ids)| ids.len() != 1) {
            self.violation(format!("P8: message {n} of the plan is there as {ids:?}"));
        }
        if self.plan.is_calm() {
            let expected = |(_, k): &(&i64, &Known)| {
                k.lane != LaneKind::Dedup.name() && k.end != Some(End::Dead("EXPIRED".into()))
            };
            let ids: Vec<i64> = self.checker.known.iter().filter(expected).map(|(id, _)| *id).collect();
            for id in ids {
                let requests = self.received.get(&id).map_or(0, Vec::len);
                if requests != 1 {
                    self.violation(format!("nothing failed, and message {id} was sent {requests} times"));
                }
            }
        }
    }
}

fn told(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Sent { .. } => "sent",
        Outcome::Retry { fault, .. } | Outcome::Dead(fault) => &fault.code,
        Outcome::Defer { code, .. } => code,
    }
}

/// Messages of one content to one target are twins on a lane with dedup.
pub fn content(kind: LaneKind, n: usize) -> String {
    if kind == LaneKind::Dedup { format!("content {}", n % CONTENTS) } else { format!("content {n}") }
}

pub fn target_of(n: usize) -> String {
    format!("t{}", n % 5)
}
