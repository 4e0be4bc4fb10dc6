//! Deliveries: what is begun when, what becomes of outcomes, and the dedup check before.

use std::collections::VecDeque;
use std::time::Duration;

use super::*;

impl Core {
    pub(super) fn start_deliveries(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        let settings = &lane.settings;
        let (third, per_target) = (settings.lease / 3, settings.per_target());
        let mut passed_over: VecDeque<Box<Message>> = VecDeque::new();
        let mut crowded = 0;
        while lane.running < settings.concurrency {
            let Some(message) = lane.ready.pop_front() else { break };
            let Some(held) = self.held.get_mut(&message.id) else { continue };
            // Right before the first byte at least a third of the lease must be left; `renew` sees to the others.
            let fresh = held.until.since(now) >= third;
            let crowd = held.target.as_ref().is_some_and(|t| lane.by_target.get(t).copied().unwrap_or(0) >= per_target);
            if !fresh || held.state != (State::Ready { checked: true }) || crowd {
                crowded += usize::from(crowd);
                passed_over.push_back(message);
                continue;
            }
            held.state = State::Running;
            held.began = now;
            lane.running += 1;
            if let Some(target) = &held.target {
                *lane.by_target.entry(target.clone()).or_default() += 1;
            }
            self.commands.push(Command::Deliver { lane: index, message });
        }
        passed_over.append(&mut lane.ready);
        lane.ready = passed_over;
        // More of one target than will fit soon would keep the others out: give the rest back for a moment.
        // With `once` it would be gone for this run, though it was due.
        let excess = if self.once { 0 } else { crowded.saturating_sub(settings.prefetch()) };
        // But a crowd that moves is soon gone.
        lane.crowded = excess > 0 && now.since(lane.crowd_moved) < CROWD_PATIENCE;
        let excess = if lane.crowded { 0 } else { excess };
        for _ in 0..excess {
            let Some(message) = lane.ready.pop_back() else { break };
            let Some(held) = self.held.get_mut(&message.id) else { continue };
            held.state = State::Settling;
            let delay = Duration::from_millis(500 + self.rng.u64(0..1000));
            lane.give_back.push((Lease { id: message.id, token: held.token }, delay, Some("TARGET_BUSY".to_owned())));
        }
    }

    pub(super) fn delivered(&mut self, id: i64, outcome: Outcome, begun: bool, now: Tick) {
        let chance = self.rng.f64();
        let Some(held) = self.held.get_mut(&id).filter(|h| h.state == State::Running) else { return };
        let lane = &mut self.lanes[held.lane];
        lane.running -= 1;
        if let Some(target) = &held.target
            && let Some(count) = lane.by_target.get_mut(target)
        {
            if *count >= lane.settings.per_target() {
                lane.crowd_moved = now;
            }
            *count -= 1;
            if *count == 0 {
                lane.by_target.remove(target);
            }
        }
        held.state = State::Settling;
        let lease = Lease { id, token: held.token };
        let before = Before { attempts: held.attempts, begun_now: begun && !held.maybe_sent };
        match decide::after_delivery(outcome, before, &lane.settings.budgets, chance) {
            Decision::Settle(verdict) => {
                let took = Some(now.since(held.began));
                lane.add_verdict(Settlement { took, ..Settlement::new(lease, verdict) }, now)
            }
            Decision::Defer { delay, code } => lane.give_back.push((lease, delay, Some(code))),
        }
    }

    pub(super) fn check_dedup(&mut self, index: usize) {
        let lane = &mut self.lanes[index];
        if !lane.settings.dedup || lane.deduping {
            return;
        }
        let mut ids = Vec::new();
        let mut probes = Vec::new();
        for message in &lane.ready {
            let Some(held) = self.held.get_mut(&message.id) else { continue };
            let Some(twin) = &held.twin else { continue };
            // A twin that is being checked or delivered comes first; its outcome decides about this one.
            if held.state == (State::Ready { checked: false }) && !lane.twins.contains(twin) {
                lane.twins.insert(twin.clone());
                probes.push(twin.clone());
                ids.push(message.id);
                held.first_twin = true;
            }
        }
        if !ids.is_empty() {
            lane.deduping = true;
            let op = self.op(Pending::Dedup { lane: index, ids });
            self.commands.push(Command::Dedup { op, lane: index, probes });
        }
    }

    pub(super) fn deduped(&mut self, op: Op, result: Result<Vec<Option<Option<String>>>, Error>, now: Tick) {
        let Some(Pending::Dedup { lane: index, ids }) = self.pending.remove(&op) else { return };
        let lane = &mut self.lanes[index];
        lane.deduping = false;
        match result {
            Ok(hits) => {
                for (id, hit) in ids.into_iter().zip(hits) {
                    let Some(held) = self.held.get_mut(&id) else { continue };
                    if !matches!(held.state, State::Ready { .. }) {
                        continue;
                    }
                    let Some(result_ref) = hit else {
                        held.state = State::Ready { checked: true };
                        continue;
                    };
                    held.state = State::Settling;
                    lane.ready.retain(|m| m.id != id);
                    let verdict = Verdict::Sent { result_ref, dedup_hit: true };
                    lane.add_verdict(Settlement::new(Lease { id, token: held.token }, verdict), now);
                }
            }
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "the dedup check failed");
                for id in ids {
                    // Given back rather than asked again at once: the database is in trouble.
                    let Some(held) = self.held.get_mut(&id) else { continue };
                    if !matches!(held.state, State::Ready { .. }) {
                        continue;
                    }
                    held.state = State::Settling;
                    lane.ready.retain(|m| m.id != id);
                    lane.give_back.push((Lease { id, token: held.token }, Duration::ZERO, None));
                }
            }
        }
    }
}
