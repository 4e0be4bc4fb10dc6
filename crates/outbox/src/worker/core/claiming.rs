//! Claims from the mark, by id and by adoption, and the walk from the head that finds what lies behind the mark.

use std::time::Duration;

use super::*;

/// Outcomes of a lane that may wait for locks of others, each with a lease that is renewed.
const MOST_LOCKED: usize = 10_000;

impl Core {
    /// How many more messages the lane may hold.
    pub(super) fn capacity(&self, lane: &Lane) -> usize {
        let s = &lane.settings;
        // Outcomes the database is slow to take hold claims back; those that wait for somebody else's lock do not, or one
        // session could stop the lane.
        let slow = lane.verdicts.len() + lane.settling * s.batch > 3 * s.batch.max(s.concurrency);
        if slow || lane.locked.len() >= MOST_LOCKED {
            return 0;
        }
        (s.concurrency + s.prefetch()).saturating_sub(lane.running + lane.ready.len() + lane.coming).min(s.batch)
    }

    pub(super) fn may_claim(&self, index: usize) -> bool {
        let lane = &self.lanes[index];
        let capacity = self.capacity(lane);
        // One row at a time would cost a transaction each: wait until a fair part is free.
        let enough = lane.settings.prefetch().div_ceil(2).min(lane.settings.batch);
        self.phase == Phase::Running
            && lane.gate == Gate::Open
            && !self.apart.of(index)
            && lane.claims < if lane.must_claim_alone() { 1 } else { CLAIMS }
            && capacity > 0
            && (capacity >= enough || lane.running + lane.claims == 0)
    }

    /// In a drain or a pause nothing is claimed, but what may be ours without our knowing is looked for, to be given back.
    pub(super) fn must_adopt(&self, lane: &Lane) -> bool {
        let held_up = self.phase != Phase::Running || lane.gate == Gate::Paused;
        held_up && lane.claims == 0 && lane.shards.iter().any(|s| s.lost.is_some())
    }

    pub(super) fn claim(&mut self, index: usize, now: Tick) {
        while self.claim_once(index, now) {}
    }

    pub(super) fn claim_once(&mut self, index: usize, now: Tick) -> bool {
        // What the walk saw unclaimed may have been on its way to us: by now all earlier answers are in.
        if self.lanes[index].claims == 0 {
            for shard in &mut self.lanes[index].shards {
                shard.found.retain(|id| !self.held.contains_key(id));
            }
        }
        let lane = &self.lanes[index];
        let only_lost = self.must_adopt(lane);
        if !(only_lost || self.may_claim(index)) || now < lane.claim_trouble.until {
            return false;
        }
        let capacity = if only_lost { lane.settings.batch } else { self.capacity(lane) };
        let poll_due = now >= lane.next_poll;
        let shards = lane.shards.len();
        let wants = |s: &Shard| s.lost.is_some() || (!only_lost && (s.hungry || poll_due || !s.found.is_empty()));
        let Some(turn) = (0..shards).map(|n| (lane.turn + n) % shards).find(|&n| wants(&lane.shards[n])) else {
            return false;
        };
        let chance = self.rng.f64();
        let mut known: Vec<i64> =
            if lane.shards[turn].lost.is_some() { self.held.keys().copied().collect() } else { vec![] };
        known.sort_unstable(); // the same seed gives the same trace
        let lane = &mut self.lanes[index];
        if poll_due {
            // A poll looks at every shard once.
            lane.shards.iter_mut().for_each(|s| s.hungry = true);
            lane.next_poll = now.plus(lane.settings.poll.mul_f64(0.8 + 0.4 * chance));
        }
        lane.turn = turn + 1;
        let shard = &mut lane.shards[turn];
        // Where the last claim came back full, the next one goes out before this one's answer.
        shard.hungry = shard.deep && shard.lost.is_none() && lane.claims == 0;
        let from = if let Some(mark) = shard.lost {
            From::Adopt { mark, known }
        } else if !shard.found.is_empty() {
            let n = shard.found.len().min(capacity);
            From::Ids(shard.found.drain(..n).collect())
        } else {
            From::Mark(shard.mark)
        };
        self.send_claim(index, turn, from, capacity as u32, now);
        true
    }

    pub(super) fn send_claim(&mut self, index: usize, shard: usize, from: From, limit: u32, now: Tick) {
        let lane = &mut self.lanes[index];
        lane.claims += 1;
        lane.coming += limit as usize;
        lane.claims_by_id = matches!(from, From::Ids(_));
        let claim = Claim {
            lane: lane.settings.lane.clone(),
            shard: lane.shards[shard].id,
            limit,
            lease: lane.settings.lease,
            owner: self.owner.clone(),
            max_crashes: lane.settings.budgets.max_crashes,
            send_begun: lane.settings.send_begun,
            from,
        };
        let from = match &claim.from {
            From::Mark(mark) => Start::Mark(*mark),
            From::Adopt { mark, .. } => Start::Adopt(*mark),
            From::Ids(ids) => Start::Ids(ids.clone()),
        };
        let op = self.op(Pending::Claim { lane: index, shard, issued: now, limit, from });
        self.commands.push(Command::Claim { op, claim });
    }

    pub(super) fn claimed(&mut self, op: Op, result: Result<Claimed, Error>, now: Tick) {
        let Some(Pending::Claim { lane: index, shard, issued, limit, from }) = self.pending.remove(&op) else {
            return;
        };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        lane.claims -= 1;
        lane.coming -= limit as usize;
        lane.claims_by_id &= !matches!(from, Start::Ids(_));
        let claimed = match result {
            Ok(claimed) => claimed,
            Err(error) => {
                let place = &mut lane.shards[shard];
                match from {
                    Start::Mark(mark) | Start::Adopt(mark) => {
                        if error.effect == Effect::Unknown {
                            place.lost = Some(place.lost.map_or(mark, |lost| lost.min(mark)));
                        }
                        // The other claim under way may have passed over what this one had locked.
                        place.mark = place.mark.min(mark);
                        place.hungry = true;
                    }
                    // Asked for again, they are adopted if they became ours. Suspects are still in their list.
                    Start::Ids(_) if matches!(self.apart, Apart::Serving { lane, .. } if lane == index) => {
                        self.apart = Apart::No;
                    }
                    Start::Ids(ids) => place.found.extend(ids),
                }
                lane.claim_trouble.again(now, chance);
                tracing::warn!(%error, lane = lane.settings.lane, "a claim failed");
                return;
            }
        };
        lane.claim_trouble.over();
        let place = &mut lane.shards[shard];
        if let Start::Adopt(_) = from {
            // Only a look from the place that was lost, to its end, says that nothing more of it is ours.
            let next = claimed.messages.last().map(|last| Mark { due_at: last.due_at, id: last.id + 1 });
            place.lost = if claimed.exhausted { None } else { next.map(Some).or(place.lost) };
        }
        if let Start::Mark(_) = from {
            let lag = Mark { due_at: claimed.now.minus(MARK_LAG), id: 0 };
            let reached = match claimed.messages.last() {
                _ if claimed.exhausted => Some(lag),
                Some(last) => Some(Mark { due_at: last.due_at, id: last.id + 1 }.min(lag)),
                None => place.mark,
            };
            place.mark = place.mark.max(reached);
            place.deep = !claimed.exhausted;
            place.hungry |= place.deep;
            place.dry = claimed.messages.is_empty() && claimed.exhausted && issued >= lane.given_back_at;
            if place.dry && self.once && !place.walk.clean {
                place.walk.next_at = now;
            }
        }
        place.walk.clean &= claimed.messages.is_empty();
        let (got, taken_over) = (
            claimed.messages.len() as u64,
            claimed.messages.iter().filter(|m| m.taken_over_from.is_some()).count() as u64,
        );
        lane.tally.claimed += got;
        lane.tally.takeovers += taken_over;
        self.observer.claimed(&lane.settings.lane, got, taken_over);
        if let (Apart::Serving { lane: served, claimed, .. }, Start::Ids(asked)) = (&mut self.apart, &from)
            && *served == index
        {
            *claimed = true;
            self.suspects.retain(|id, _| !asked.contains(id));
        }
        lane.renew_at = lane.renew_at.min(issued.plus(lane.settings.lease / 3));
        // Suspects may have lost another worker since they were seen: the most suspicious one decides how many go together.
        let max_crashes = lane.settings.budgets.max_crashes;
        let group = |m: &Message| decide::suspect_group(m.crashes, max_crashes).filter(|_| m.crashes < max_crashes);
        let serving = matches!(self.apart, Apart::Serving { lane, .. } if lane == index);
        let together = match claimed.messages.iter().filter_map(group).min() {
            None => usize::MAX,
            Some(group) if serving => group,
            // The answer was long under way, and the lane goes on: they are asked for again, apart.
            Some(_) => 0,
        };
        for (n, message) in claimed.messages.into_iter().enumerate() {
            let lease = message.lease();
            self.take(index, message, issued, claimed.now, now);
            let lane = &mut self.lanes[index];
            if n >= together && lane.ready.pop_back_if(|last| last.id == lease.id).is_some() {
                lane.give_back(lease, GiveBack::now());
                if let Some(held) = self.held.get_mut(&lease.id) {
                    held.state = State::Settling;
                }
            }
        }
    }

    pub(super) fn take(
        &mut self,
        index: usize,
        message: Message,
        issued: Tick,
        db_now: crate::time::Timestamp,
        now: Tick,
    ) {
        let lane = &mut self.lanes[index];
        let until = issued.plus(lane.settings.lease);
        if let Some(held) = self.held.get_mut(&message.id) {
            // Our own row, in flight. If nobody had it in between and nothing was recorded, it takes the new token and
            // goes on. Else what is in flight has lost its lease, and the new one is for another attempt.
            let unchanged = message.taken_over_from.is_none()
                && message.lease_token == held.token + 1
                && message.attempts == held.attempts;
            if unchanged {
                (held.token, held.until) = (message.lease_token, until);
                for ready in lane.ready.iter_mut().filter(|ready| ready.id == message.id) {
                    ready.lease_token = message.lease_token;
                }
            } else if message.lease_token > held.token {
                lane.give_back(message.lease(), GiveBack::now());
            }
            return;
        }
        let dedup = lane.settings.dedup;
        let mut held = Held {
            lane: index,
            token: message.lease_token,
            attempts: message.attempts,
            maybe_sent: message.maybe_sent,
            until,
            state: State::Ready { checked: !dedup },
            target: message.target.clone(),
            twin: dedup.then(|| (message.target.clone(), message.sha())),
            first_twin: false,
            began: now,
            // The database read its clock after the claim was issued: this is that moment or a little before it.
            expires: (message.deliver_before.filter(|_| !message.maybe_sent))
                .map(|limit| issued.plus(limit.since(db_now))),
            met_locks: 0,
            key: message.active_key.clone().filter(|_| lane.settings.keyed),
        };
        if let Some(verdict) = decide::burial(&message, &lane.settings.budgets, db_now) {
            held.state = State::Settling;
            lane.add_verdict(Settlement::new(message.lease(), verdict), now);
        } else if matches!(self.phase, Phase::Draining { .. }) || lane.gate == Gate::Paused {
            lane.give_back(message.lease(), GiveBack::now());
            held.state = State::Settling;
        } else {
            lane.ready.push_back(Box::new(message));
            self.held.insert(lane.ready[lane.ready.len() - 1].id, held);
            return;
        }
        self.held.insert(message.id, held);
    }

    pub(super) fn walk(&mut self, index: usize, now: Tick) {
        let lane = &self.lanes[index];
        if self.phase != Phase::Running || lane.gate != Gate::Open || now < lane.claim_trouble.until {
            return;
        }
        for shard in 0..self.lanes[index].shards.len() {
            let place = &self.lanes[index].shards[shard];
            if !place.may_walk() || now < place.walk.next_at {
                continue;
            }
            let (id, after, dry) = (place.id, place.walk.cursor, place.dry);
            let walk = &mut self.lanes[index].shards[shard].walk;
            walk.busy = true;
            walk.began_dry = dry && (after.is_none() || walk.began_dry);
            let op = self.op(Pending::Walk { lane: index, shard });
            self.commands.push(Command::Walk { op, lane: index, shard: id, after, limit: WALK_STEP });
        }
    }

    pub(super) fn walked(&mut self, op: Op, result: Result<Walked, Error>, now: Tick) {
        let Some(Pending::Walk { lane: index, shard }) = self.pending.remove(&op) else { return };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        let (max_crashes, lease) = (lane.settings.budgets.max_crashes, lane.settings.lease);
        let place = &mut lane.shards[shard];
        place.walk.busy = false;
        let walked = match result {
            Ok(walked) => walked,
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "the walk from the head failed");
                place.walk.next_at = now.plus(Duration::from_secs(1));
                return;
            }
        };
        let open = lane.gate == Gate::Open;
        for seen in walked.seen.iter().filter(|_| open) {
            if Some(seen.mark) >= place.mark || self.held.contains_key(&seen.mark.id) {
                continue;
            }
            // Ours without our knowing, and not renewed for longer than a claim takes: its answer was lost.
            let ours = seen.hold.locked_by.as_ref() == Some(&self.owner);
            let forgotten = ours && seen.hold.lease_until.is_some_and(|until| until < walked.now.plus(lease * 2 / 3));
            if !forgotten && !seen.hold.claimable(seen.mark.due_at, walked.now) {
                if !ours {
                    self.suspects.remove(&seen.mark.id);
                }
                continue;
            }
            let suspicion = seen.hold.suspicion(&self.owner);
            if suspicion >= max_crashes || decide::suspect_group(suspicion, max_crashes).is_none() {
                place.found.push(seen.mark.id);
            } else {
                let suspect = Suspect { lane: index, shard, suspicion, since: now };
                self.suspects.entry(seen.mark.id).or_insert(suspect).suspicion = suspicion;
            }
        }
        let entries = walked.seen.len() as u64;
        place.walk.entries += entries;
        match walked.seen.last() {
            Some(last) if entries == u64::from(WALK_STEP) && Some(last.mark) < place.mark => {
                place.walk.cursor = Some(last.mark);
                place.walk.next_at = now.plus(Duration::from_micros(entries * 1_000_000 / WALK_PER_SECOND));
            }
            _ => {
                place.walk.cursor = None;
                place.walk.clean = place.walk.began_dry;
                place.walk.next_at = now.plus(WALK_PAUSE.mul_f64(0.5 + 0.5 * chance));
                (place.walk.last_entries, place.walk.entries) = (place.walk.entries, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kit::{at, claimed, delivering};
    use super::*;

    /// A lease that came beside what is in flight, and that somebody has locked when it is given back: the drain waits for it.
    #[test]
    fn a_drain_ends_when_all_is_given_back() {
        let mut core = delivering();
        let anew = |message: &mut Message| message.lease_token = 3;
        let commands = core.step(at(1000));
        let claim = commands.iter().find_map(|command| claimed(command, &[1], anew)).expect("another claim");
        core.handle(at(1001), Event::Shutdown);
        core.handle(at(1001), claim);
        core.handle(at(1002), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
        let mut left = core.step(at(1002));
        left.extend(core.step(at(1003)));
        for command in left {
            match command {
                Command::Defer { op, .. } => {
                    core.handle(at(1004), Event::Deferred { op, result: Ok(vec![LeaseState::Locked]) });
                }
                Command::Settle { op, .. } => {
                    core.handle(at(1005), Event::Settled { op, result: Ok(vec![Settled::LeaseLost]) });
                }
                _ => {}
            }
        }
        assert_eq!(core.held(), 0);
        core.pending.clear(); // walks and claims, which bring nothing
        assert!(!core.finished(at(1006)), "it would stay leased");
        let op = core.step(at(1500)).iter().find_map(|command| match command {
            Command::Defer { op, .. } => Some(*op),
            _ => None,
        });
        core.handle(at(1501), Event::Deferred { op: op.expect("once more"), result: Ok(vec![LeaseState::Held]) });
        assert!(core.finished(at(1502)));
    }

    /// Our own row in flight: adopted it goes on under its new token; if somebody had it in between, or recorded something,
    /// what is in flight has lost its lease, and the new one is for another attempt.
    #[test]
    fn what_somebody_had_in_between_does_not_go_on() {
        for (token, attempts, goes_on) in [(2, 0, true), (3, 0, false), (2, 1, false)] {
            let mut core = delivering();
            let anew = |message: &mut Message| (message.lease_token, message.attempts) = (token, attempts);
            let commands = core.step(at(1000));
            let claim = commands.iter().find_map(|command| claimed(command, &[1], anew)).expect("another claim");
            core.handle(at(1001), claim);
            core.handle(at(1002), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
            let commands = core.step(at(1002));
            let settled = commands.iter().find_map(|command| match command {
                Command::Settle { entries, .. } => Some(entries[0].lease.token),
                _ => None,
            });
            let back = commands
                .iter()
                .any(|command| matches!(command, Command::Defer { leases, .. } if *leases == [Lease { id: 1, token }]));
            assert_eq!((settled, back), (Some(if goes_on { token } else { 1 }), !goes_on), "{token} {attempts}");
        }
    }
}
