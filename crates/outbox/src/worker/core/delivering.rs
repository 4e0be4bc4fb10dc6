//! Deliveries: what is begun when, what becomes of outcomes, and the dedup check before.

use std::collections::VecDeque;

use super::*;

impl Core {
    pub(super) fn start_deliveries(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        let settings = &lane.settings;
        let (third, per_target) = (settings.lease / 3, settings.per_target());
        let mut passed_over: VecDeque<Box<Message>> = VecDeque::new();
        let mut expired: Vec<Lease> = Vec::new();
        let (mut crowded, mut twins): (usize, usize) = (0, 0);
        // The target that was full last: it stays so in this step, and the next message is often its, too.
        let mut full: Option<String> = None;
        while lane.running < settings.concurrency {
            let Some(message) = lane.ready.pop_front() else { break };
            let Some(held) = self.held.get_mut(&message.id) else { continue };
            if held.expires.is_some_and(|at| at < now) {
                // By our clock, which only suspects it: the next claim decides by the database's.
                held.state = State::Settling;
                expired.push(Lease { id: message.id, token: held.token });
                continue;
            }
            // Right before the first byte at least a third of the lease must be left; `renew` sees to the others.
            let fresh = held.until.since(now) >= third;
            let is_full = held.target.is_some() && held.target == full;
            let fills = |target: &&String| lane.by_target.get(*target).is_some_and(|n| *n >= per_target);
            if !is_full && let Some(target) = held.target.as_ref().filter(fills) {
                lane.crowds.entry(target.clone()).or_insert_with(|| Crowd::new(now));
                full = Some(target.clone());
            }
            let is_full = held.target.is_some() && held.target == full;
            crowded += usize::from(is_full);
            if held.twin.as_ref().is_some_and(|twin| !held.first_twin && lane.twins.contains(twin)) {
                twins += 1;
            }
            if !fresh || held.state != (State::Ready { checked: true }) || is_full {
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
        for lease in expired {
            lane.give_back(lease, GiveBack::now());
        }
        // With `once` it would be gone for this run, though it was due.
        let some = lane.settings.prefetch();
        if !self.once {
            self.thin_out(index, crowded.saturating_sub(some), now);
            self.thin_out_twins(index, twins.saturating_sub(some), now);
        }
    }

    /// Twins wait for the first of them. More than a few would keep the others out: gives so many back, the last first.
    fn thin_out_twins(&mut self, index: usize, mut excess: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        if excess == 0 {
            lane.twin_crowd = lane.twin_crowd.take().filter(|crowd| crowd.horizon > now);
            return;
        }
        let mut kept = VecDeque::with_capacity(lane.ready.len());
        while let Some(message) = lane.ready.pop_back() {
            let waits =
                |held: &&mut Held| held.twin.as_ref().is_some_and(|twin| !held.first_twin && lane.twins.contains(twin));
            let Some(held) = self.held.get_mut(&message.id).filter(|_| excess > 0).filter(waits) else {
                kept.push_front(message);
                continue;
            };
            excess -= 1;
            held.state = State::Settling;
            let crowd = lane.twin_crowd.get_or_insert_with(|| Crowd::new(now));
            let how = GiveBack::after(crowd.next_turn(now, self.rng.f64()), "TWIN_BUSY");
            lane.give_back.push((now, Lease { id: message.id, token: held.token }, how));
        }
        lane.ready = kept;
    }

    /// More of one target than will fit soon would keep the others out: gives so many back, the last first, unless their
    /// crowd moves and is soon gone.
    fn thin_out(&mut self, index: usize, mut excess: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        lane.crowded = None;
        if excess == 0 {
            return;
        }
        // While every crowd moves, all stay.
        let patience = lane.crowds.values().map(|crowd| crowd.moved.plus(CROWD_PATIENCE)).min();
        if lane.crowds.len() <= MOST_CROWDS && patience.is_some_and(|patience| now < patience) {
            lane.crowded = patience;
            return;
        }
        let mut kept = VecDeque::with_capacity(lane.ready.len());
        while let Some(message) = lane.ready.pop_back() {
            let held = self.held.get_mut(&message.id);
            let crowd = message.target.as_ref().and_then(|target| lane.crowds.get_mut(target));
            let (Some(held), Some(crowd), true) = (held, crowd, excess > 0) else {
                kept.push_front(message);
                continue;
            };
            let patience = crowd.moved.plus(CROWD_PATIENCE);
            if now < patience {
                lane.crowded = Some(lane.crowded.map_or(patience, |at| at.min(patience)));
                kept.push_front(message);
                continue;
            }
            excess -= 1;
            held.state = State::Settling;
            let delay = crowd.next_turn(now, self.rng.f64());
            let lease = Lease { id: message.id, token: held.token };
            lane.give_back.push((now, lease, GiveBack::after(delay, "TARGET_BUSY")));
        }
        lane.ready = kept;
        if lane.crowds.len() > MOST_CROWDS {
            let Lane { crowds, by_target, .. } = lane;
            crowds.retain(|target, crowd| crowd.horizon > now || by_target.contains_key(target));
        }
    }

    pub(super) fn delivered(&mut self, id: i64, outcome: Outcome, begun: bool, now: Tick) {
        let chance = self.rng.f64();
        let Some(held) = self.held.get_mut(&id).filter(|h| h.state == State::Running) else { return };
        let lane = &mut self.lanes[held.lane];
        lane.ended(held.target.as_deref(), now);
        held.state = State::Settling;
        let lease = Lease { id, token: held.token };
        let (attempts, maybe_sent) = (held.attempts, held.maybe_sent);
        let before = Before { attempts, maybe_sent, begun_now: begun && !maybe_sent };
        match decide::after_delivery(outcome, before, &lane.settings.budgets, chance) {
            Decision::Settle(verdict) => {
                let took = Some(now.since(held.began));
                lane.add_verdict(Settlement { took, ..Settlement::new(lease, verdict) }, now)
            }
            Decision::Defer { delay, code } => lane.give_back(lease, GiveBack::after(delay, code)),
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
                    // Lost and claimed again meanwhile, it no longer stands for its twins: it is asked about once more.
                    let asked = |held: &&mut Held| held.first_twin && matches!(held.state, State::Ready { .. });
                    let Some(held) = self.held.get_mut(&id).filter(asked) else { continue };
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
                    let ready = |held: &&mut Held| matches!(held.state, State::Ready { .. });
                    let Some(held) = self.held.get_mut(&id).filter(ready) else { continue };
                    held.state = State::Settling;
                    lane.ready.retain(|m| m.id != id);
                    lane.give_back(Lease { id, token: held.token }, GiveBack::now());
                }
            }
        }
    }
}

impl Lane {
    /// A delivery to this target is over: its slot is free.
    pub(super) fn ended(&mut self, target: Option<&str>, now: Tick) {
        self.running -= 1;
        let Some(target) = target else { return };
        let Some(count) = self.by_target.get_mut(target) else { return };
        if let Some(crowd) = self.crowds.get_mut(target) {
            crowd.moved = now;
            crowd.ended += 1;
        }
        *count -= 1;
        if *count == 0 {
            self.by_target.remove(target);
            if self.crowds.get(target).is_some_and(|crowd| crowd.horizon <= now) {
                self.crowds.remove(target);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kit::{at, claimed, core};
    use super::*;
    use crate::time::Timestamp;

    fn delivers(commands: &[Command]) -> Vec<i64> {
        let id = |command: &Command| match command {
            Command::Deliver { message, .. } => Some(message.id),
            _ => None,
        };
        commands.iter().filter_map(id).collect()
    }

    /// Found by the simulator (seed 10178): the claim's answer was on its way for longer than the message was worth
    /// delivering, which was counted from when the answer came.
    #[test]
    fn what_expired_while_its_claim_was_under_way_is_left_to_the_next_claim() {
        for (answered, begins) in [(400, true), (600, false)] {
            let mut core = core(LaneSettings::new("one"));
            let until = |message: &mut Message| message.deliver_before = Some(Timestamp::from_micros(500_000));
            let claim = core.step(at(0)).iter().find_map(|command| claimed(command, &[1], until)).expect("a claim");
            core.handle(at(answered), claim);
            let commands = core.step(at(answered));
            assert_eq!(delivers(&commands), if begins { vec![1] } else { vec![] });
            let back = |command: &Command| matches!(command, Command::Defer { how, .. } if *how == GiveBack::now());
            assert_eq!(commands.iter().any(back), !begins);
            assert!(!commands.iter().any(|command| matches!(command, Command::Settle { .. })), "the database decides");
        }
    }

    /// Found by the simulator (seed 10719): the first of two twins lost its lease and was claimed again while it was being
    /// checked; the answer let it go, and the other one was let go as the first.
    #[test]
    fn a_check_answered_after_its_message_was_claimed_anew_lets_nobody_go() {
        let mut core = core(LaneSettings { dedup: true, ..LaneSettings::new("one") });
        let commands = core.step(at(0));
        let claim = commands.iter().find_map(|command| claimed(command, &[1, 2], |_| {})).expect("a claim");
        core.handle(at(1), claim);
        let check = |commands: &[Command]| {
            let op = |command: &Command| match command {
                Command::Dedup { op, probes, .. } => Some((*op, probes.len())),
                _ => None,
            };
            commands.iter().find_map(op)
        };
        let (op, probes) = check(&core.step(at(1))).expect("a check");
        assert_eq!(probes, 1, "one for both twins");
        // Its renewal and the next claim go out together; the first of the twins has lost its lease.
        let commands = core.step(at(25_000));
        let renewal = |command: &Command| {
            let Command::Renew { op, leases, .. } = command else { return None };
            let states = leases.iter().map(|lease| if lease.id == 1 { LeaseState::Lost } else { LeaseState::Held });
            Some(Event::Renewed { op: *op, result: Ok(states.collect()) })
        };
        let renewed = commands.iter().find_map(renewal).expect("a renewal");
        core.handle(at(25_001), renewed);
        let anew = |message: &mut Message| message.lease_token = 3;
        let claim = commands.iter().find_map(|command| claimed(command, &[1], anew)).expect("another claim");
        core.handle(at(26_001), claim);
        core.handle(at(26_002), Event::Deduped { op, result: Ok(vec![None]) });
        let commands = core.step(at(26_003));
        assert!(delivers(&commands).is_empty(), "neither of them stands for both yet");
        let (op, probes) = check(&commands).or_else(|| check(&core.step(at(26_003)))).expect("one more check");
        assert_eq!(probes, 1);
        core.handle(at(26_004), Event::Deduped { op, result: Ok(vec![None]) });
        assert_eq!(delivers(&core.step(at(26_005))).len(), 1, "one of the twins");
    }
}
