//! Settles, what is given back, and renewals of all that is held meanwhile.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use super::*;

impl Core {
    pub(super) fn flush_verdicts(&mut self, index: usize, now: Tick) {
        self.flush_locked(index, now);
        while let Some(entries) = self.take_verdicts(index, now) {
            self.lanes[index].settling += 1;
            self.send_settle(index, entries, false);
        }
    }

    /// The next batch, once there is a reason to settle it.
    fn take_verdicts(&mut self, index: usize, now: Tick) -> Option<Vec<Settlement>> {
        let draining = self.phase != Phase::Running;
        let lane = &mut self.lanes[index];
        if lane.settling >= SETTLES || lane.verdicts.is_empty() || now < lane.settle_trouble.until {
            return None;
        }
        let nothing_else = lane.running == 0;
        let waited = now >= lane.verdicts_since.plus(lane.settings.settle_wait);
        if !(draining || nothing_else || waited || lane.verdicts.len() >= lane.settings.batch) {
            return None;
        }
        let n = lane.verdicts.len().min(lane.settings.batch.max(1));
        Some(lane.verdicts.drain(..n).collect())
    }

    /// What met somebody else's lock is asked for apart, so that it keeps no other outcome waiting.
    fn flush_locked(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        // Renewed first: whoever waits for a lock keeps its own row from that.
        if lane.settling_locked || lane.renewing || now < lane.settle_trouble.until {
            return;
        }
        let entries: Vec<Settlement> =
            lane.locked.extract_if(.., |(at, _)| *at <= now).take(1).map(|(_, entry)| entry).collect();
        if !entries.is_empty() {
            lane.settling_locked = true;
            self.send_settle(index, entries, true);
        }
    }

    fn send_settle(&mut self, index: usize, mut entries: Vec<Settlement>, locked: bool) {
        // Adopted meanwhile? But what may be recorded already is asked for under the token it was recorded with.
        for entry in entries.iter_mut().filter(|entry| !entry.again) {
            if let Some(held) = self.held.get(&entry.lease.id) {
                entry.lease.token = held.token;
            }
        }
        let op = self.op(Pending::Settle { lane: index, entries: entries.clone(), locked });
        self.commands.push(Command::Settle { op, lane: index, entries });
    }

    pub(super) fn settled(&mut self, op: Op, result: Result<Vec<Settled>, Error>, now: Tick) {
        let Some(Pending::Settle { lane: index, entries, locked }) = self.pending.remove(&op) else { return };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        if locked {
            lane.settling_locked = false;
        } else {
            lane.settling -= 1;
        }
        let answers = match result {
            Ok(answers) => answers,
            Err(error) => {
                lane.settle_trouble.again(now, chance);
                let trouble = if error.kind == Kind::Timeout { FlushCode::DbTimeout } else { FlushCode::DbError };
                let (name, messages) = (lane.settings.lane.as_str(), entries.len());
                tracing::warn!(%error, lane = name, messages, outcome = trouble.as_str(), "a settle failed; it will be tried again");
                self.observer.unrecorded(name, trouble, messages as u64);
                let again = error.effect == Effect::Unknown;
                for mut entry in entries {
                    entry.again |= again;
                    entry.trouble = Some(trouble);
                    lane.add_verdict(entry, now);
                }
                return;
            }
        };
        lane.settle_trouble.over();
        for (mut entry, answer) in entries.into_iter().zip(answers) {
            let id = entry.lease.id;
            let newer = self.held.get(&id).is_some_and(|held| held.token > entry.lease.token);
            match answer {
                Settled::LeaseLost if newer => {
                    // Adopted under a new token while this was under way.
                    entry.again = false;
                    lane.add_verdict(entry, now);
                    continue;
                }
                Settled::Locked => {
                    let met = self.held.get_mut(&id).map_or(0, |held| {
                        held.met_locks += 1;
                        held.met_locks
                    });
                    if met == 1 {
                        tracing::debug!(
                            outbox_id = id,
                            lane = lane.settings.lane,
                            "its row is locked by another session"
                        );
                    }
                    let wait = (LOCK_WAIT * (1 << met.min(8))).min(LONGEST_LOCK_WAIT);
                    entry.wary = true;
                    lane.renew_at = lane.renew_at.min(now);
                    lane.locked.push((now.plus(wait), entry));
                    continue;
                }
                Settled::Refused => {
                    let (name, outcome) = (lane.settings.lane.as_str(), FlushCode::DbError);
                    tracing::warn!(
                        outbox_id = id,
                        lane = name,
                        outcome = outcome.as_str(),
                        "its outcome could not be recorded; it will be tried again"
                    );
                    self.observer.unrecorded(name, outcome, 1);
                    entry.trouble = Some(outcome);
                    lane.settle_trouble.again(now, chance);
                    lane.add_verdict(entry, now);
                    continue;
                }
                _ => {}
            }
            lane.count(&entry, answer, self.held.get(&id), &*self.observer, now);
            lane.done_with(entry.lease, &mut self.held);
        }
    }

    pub(super) fn flush_give_back(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        if lane.giving_back > 0 || lane.give_back.is_empty() || now < lane.settle_trouble.until {
            return;
        }
        let mut groups: BTreeMap<GiveBack, Vec<Lease>> = BTreeMap::new();
        for (_, lease, mut how) in lane.give_back.extract_if(.., |(at, ..)| *at <= now) {
            // Whole tenths of a second, so that many share one statement.
            how.delay = Duration::from_millis(how.delay.as_millis().div_ceil(100) as u64 * 100);
            groups.entry(how).or_default().push(lease);
        }
        lane.giving_back = groups.len();
        for (how, mut leases) in groups {
            leases.sort_unstable();
            let op = self.op(Pending::Defer { lane: index, leases: leases.clone(), how: how.clone() });
            self.commands.push(Command::Defer { op, leases, how });
        }
    }

    pub(super) fn deferred(&mut self, op: Op, result: Result<Vec<LeaseState>, Error>, now: Tick) {
        let Some(Pending::Defer { lane: index, leases, how }) = self.pending.remove(&op) else { return };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        lane.giving_back -= 1;
        match result {
            Ok(answers) => {
                if how == GiveBack::now() {
                    // Due again, behind the mark or beyond it: with `once` only a claim and a walk that begin after this
                    // have seen everything.
                    lane.given_back_at = now;
                    for shard in &mut lane.shards {
                        (shard.walk.clean, shard.walk.began_dry, shard.dry) = (false, false, false);
                    }
                }
                for (lease, answer) in leases.into_iter().zip(answers) {
                    match answer {
                        LeaseState::Locked => {
                            lane.give_back.push((now.plus(LONGEST_LOCK_WAIT / 4), lease, how.clone()));
                            continue;
                        }
                        LeaseState::Held => lane.tally.deferred += 1,
                        LeaseState::Lost => {}
                    }
                    lane.done_with(lease, &mut self.held);
                }
            }
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "giving back failed; it will be tried again");
                lane.settle_trouble.again(now, chance);
                lane.give_back.extend(leases.into_iter().map(|lease| (now, lease, how.clone())));
            }
        }
    }

    pub(super) fn renew(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        if lane.renewing || now < lane.renew_at {
            return;
        }
        let (lease, mine) = (lane.settings.lease, |held: &Held| held.lane == index);
        let due = |held: &Held| held.until.since(now) <= lease * 2 / 3 + lease / 20;
        let mut leases: Vec<Lease> = self
            .held
            .iter()
            .filter(|(_, held)| mine(held) && due(held))
            .map(|(id, held)| Lease { id: *id, token: held.token })
            .collect();
        if leases.is_empty() {
            let earliest = self.held.values().filter(|h| mine(h)).map(|h| h.until.since(now)).min();
            lane.renew_at = match earliest {
                Some(left) => now.plus(left.saturating_sub(lease * 2 / 3)),
                None => Tick::from_micros(u64::MAX),
            };
            return;
        }
        leases.sort_unstable();
        lane.renewing = true;
        let op = self.op(Pending::Renew { lane: index, leases: leases.clone(), issued: now });
        self.commands.push(Command::Renew { op, leases, lease });
    }

    pub(super) fn renewed(&mut self, op: Op, result: Result<Vec<LeaseState>, Error>, now: Tick) {
        let Some(Pending::Renew { lane: index, leases, issued }) = self.pending.remove(&op) else { return };
        let lane = &mut self.lanes[index];
        lane.renewing = false;
        let answers = match result {
            Ok(answers) => answers,
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "a renewal failed");
                lane.renew_at = now.plus(lane.settings.lease / 20);
                return;
            }
        };
        let mut not_before = now;
        for (lease, state) in leases.into_iter().zip(answers) {
            // Adopted under a new token meanwhile: this answer is about the old one.
            let Some(held) = self.held.get_mut(&lease.id).filter(|held| held.token == lease.token) else { continue };
            if state == LeaseState::Held {
                held.until = issued.plus(lane.settings.lease);
            } else if state == LeaseState::Locked {
                not_before = now.plus((lane.settings.lease / 20).min(LONGEST_LOCK_WAIT));
            } else if matches!(held.state, State::Ready { .. }) {
                // Lost before it was begun: somebody else has it.
                release_twin(&mut lane.twins, held);
                self.held.remove(&lease.id);
                lane.ready.retain(|m| m.id != lease.id);
            } else {
                // Begun: its outcome will be offered once, and the database decides. Not asked for again before that.
                held.until = now.plus(lane.settings.lease);
            }
        }
        let lease = lane.settings.lease;
        let earliest = self.held.values().filter(|h| h.lane == index).map(|h| h.until.since(now)).min();
        self.lanes[index].renew_at = earliest
            .map_or(Tick::from_micros(u64::MAX), |left| now.plus(left.saturating_sub(lease * 2 / 3)).max(not_before));
    }
}

pub(super) fn release_twin(twins: &mut HashSet<Twin>, held: &Held) {
    if let Some(twin) = &held.twin
        && held.first_twin
    {
        twins.remove(twin);
    }
}

impl Lane {
    /// This lease is over. A newer one of the same message, which we got meanwhile, is given back: it is another attempt.
    fn done_with(&mut self, lease: Lease, held: &mut HashMap<i64, Held>) {
        match held.get(&lease.id) {
            Some(newer) if newer.token > lease.token => {
                self.give_back(Lease { id: lease.id, token: newer.token }, GiveBack::now());
            }
            Some(older) if older.token < lease.token => {} // what is in flight was never this lease
            Some(_) => {
                if let Some(held) = held.remove(&lease.id) {
                    release_twin(&mut self.twins, &held);
                }
            }
            None => {}
        }
    }

    pub(super) fn add_verdict(&mut self, entry: Settlement, now: Tick) {
        if self.verdicts.is_empty() {
            self.verdicts_since = now;
        }
        self.verdicts.push(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::super::kit::{at, claimed, core, delivering, once};
    use super::*;

    fn unknown() -> Error {
        Error { kind: Kind::Unreachable, effect: Effect::Unknown, message: String::new() }
    }

    #[test]
    fn a_renewal_counts_from_when_it_was_asked() {
        let mut core = delivering();
        let renewal = |commands: &[Command]| {
            let op = |command: &Command| match command {
                Command::Renew { op, .. } => Some(*op),
                _ => None,
            };
            commands.iter().find_map(op)
        };
        let op = renewal(&core.step(at(25_000))).expect("a renewal");
        core.handle(at(40_000), Event::Renewed { op, result: Ok(vec![LeaseState::Held]) });
        assert!(renewal(&core.step(at(44_000))).is_none());
        assert!(renewal(&core.step(at(46_000))).is_some(), "a third of the lease after it was asked");
    }

    #[test]
    fn an_outcome_without_an_answer_is_asked_for_again_as_such() {
        let mut core = delivering();
        core.handle(at(2), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
        let settle = |commands: &[Command]| {
            let entry = |command: &Command| match command {
                Command::Settle { op, entries, .. } => Some((*op, entries[0].again)),
                _ => None,
            };
            commands.iter().find_map(entry)
        };
        let (op, again) = settle(&core.step(at(2))).expect("a settle");
        assert!(!again);
        core.handle(at(3), Event::Settled { op, result: Err(unknown()) });
        let (_, again) = settle(&core.step(at(5_000))).expect("it is asked for again");
        assert!(again, "it may be recorded already");
    }

    /// As a database does that has nothing more.
    fn answer(core: &mut Core, now: Tick, command: &Command) {
        let nothing = || crate::store::Walked { seen: vec![], now: crate::time::Timestamp::from_micros(0) };
        let event = match command {
            Command::Walk { op, .. } => Some(Event::Walked { op: *op, result: Ok(nothing()) }),
            Command::Settle { op, entries, .. } => {
                Some(Event::Settled { op: *op, result: Ok(entries.iter().map(|_| Settled::Applied).collect()) })
            }
            command => claimed(command, &[], |_| {}),
        };
        event.into_iter().for_each(|event| core.handle(now, event));
    }

    /// One message expires while it waits behind another, and is given back at a moment when all else has been looked for.
    #[test]
    fn with_once_what_was_given_back_is_claimed_again() {
        for given_back_at in (1_000..3_000).step_by(50) {
            let mut core = once(LaneSettings { concurrency: 1, batch: 8, ..LaneSettings::new("one") });
            let expires = |message: &mut Message| {
                message.deliver_before = (message.id == 2).then(|| crate::time::Timestamp::from_micros(500_000));
            };
            for command in core.step(at(0)) {
                match claimed(&command, &[1, 2], expires) {
                    Some(both) => core.handle(at(1), both),
                    None => answer(&mut core, at(1), &command),
                }
            }
            core.step(at(1)).iter().for_each(|command| answer(&mut core, at(1), command));
            core.handle(at(600), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
            let mut given_back = None;
            for millis in (600..given_back_at).step_by(10) {
                for command in core.step(at(millis)) {
                    match command {
                        Command::Defer { op, .. } => given_back = Some(op),
                        command => answer(&mut core, at(millis), &command),
                    }
                }
            }
            let op = given_back.expect("the second has expired");
            core.handle(at(given_back_at), Event::Deferred { op, result: Ok(vec![LeaseState::Held]) });
            let mut asked = false;
            for millis in (given_back_at + 1..given_back_at + 8_000).step_by(10) {
                for command in core.step(at(millis)) {
                    asked |= matches!(command, Command::Claim { .. });
                    answer(&mut core, at(millis), &command);
                }
                assert!(asked || !core.finished(at(millis)), "it ends without having looked for what it gave back");
            }
            assert!(asked && core.finished(at(given_back_at + 8_000)), "it ends");
        }
    }

    #[test]
    fn a_claim_without_an_answer_is_looked_for() {
        let mut core = core(LaneSettings::new("one"));
        let from = |commands: &[Command]| {
            let adopts = |command: &Command| match command {
                Command::Claim { op, claim } => Some((*op, matches!(claim.from, crate::store::From::Adopt { .. }))),
                _ => None,
            };
            commands.iter().find_map(adopts)
        };
        let (op, adopts) = from(&core.step(at(0))).expect("a claim");
        assert!(!adopts);
        core.handle(at(1), Event::Claimed { op, result: Err(unknown()) });
        let (op, adopts) = from(&core.step(at(5_000))).expect("another claim");
        assert!(adopts, "what it may have brought is ours");
        let nothing = Claimed { messages: vec![], now: crate::time::Timestamp::from_micros(0), exhausted: true };
        core.handle(at(5_001), Event::Claimed { op, result: Ok(nothing) });
        assert_eq!(from(&core.step(at(10_000))).map(|(_, adopts)| adopts), Some(false), "once is enough");
    }

    /// Found by the simulator: with an outcome that met somebody's lock, a worker whose renewal had no answer yet asked for its
    /// next step at once, over and over.
    #[test]
    fn an_outcome_that_met_a_lock_waits_for_the_renewal_without_asking() {
        let mut core = core(LaneSettings::new("one"));
        let claim = core.step(at(0)).iter().find_map(|command| claimed(command, &[1], |_| {})).expect("a claim");
        core.handle(at(1), claim);
        assert!(core.step(at(1)).iter().any(|command| matches!(command, Command::Deliver { .. })));
        core.handle(at(2), Event::Delivered { id: 1, outcome: Outcome::sent(), begun: false });
        let locked = |commands: &[Command]| {
            let settle = |command: &Command| match command {
                Command::Settle { op, .. } => Some(*op),
                _ => None,
            };
            let op = commands.iter().find_map(settle).expect("a settle");
            Event::Settled { op, result: Ok(vec![Settled::Locked]) }
        };
        let answer = locked(&core.step(at(2)));
        core.handle(at(3), answer);
        // Long enough after its claim to be renewed, and the lock is still there.
        let commands = core.step(at(25_000));
        assert!(commands.iter().any(|command| matches!(command, Command::Renew { .. })));
        core.handle(at(25_001), locked(&commands));
        let much_later = at(30_000);
        let _ = core.step(much_later);
        assert!(core.step(much_later).is_empty(), "everything was asked for");
        assert!(core.next_step(much_later) > much_later, "nothing to do, and asks to be asked at once");
    }
}
