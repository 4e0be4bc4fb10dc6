//! Store operations on their way: refused, answered, lost before or after they took effect, or slow beyond a lease.

use postrider::Message;
use postrider::error::Error;
use postrider::outcome::{Settled, Verdict};
use postrider::store::{Claim, Claimed, From, Store, Walked};
use postrider::worker::core::{Command, Event};

use crate::checker::Step;
use crate::dice::{Fate, dice};
use crate::plan::{LEASE, LaneKind, SECOND};
use crate::processes::AFTERMATH;
use crate::store::{Reply, lost, refused};
use crate::world::{Action, World};

impl World {
    pub fn carry_out(&mut self, process: usize, life: u64, command: Command) {
        match command {
            Command::Deliver { lane, message } => self.send_out(process, life, lane, message),
            Command::Abort { id } => {
                if let Some(under_way) = self.under_way.get_mut(&(process, life)) {
                    under_way.remove(&id);
                }
                self.abort_memory(process, life, id);
            }
            command => self.ask_store(process, life, command),
        }
    }

    fn ask_store(&mut self, process: usize, life: u64, command: Command) {
        let Some(alive) = self.alive(process, life) else { return };
        alive.operations += 1;
        let (owner, operation) = (alive.core.owner().to_owned(), alive.operations);
        let fate = self.fate("operation", [((process as u64) << 32) | life, operation, 0]);
        let reply = self.reply(fate, "a store operation");
        let there = self.now + self.latency(process, fate);
        let era = self.era;
        self.at(there, Action::Execute { process, life, owner, command, reply, era, fate });
    }

    /// What becomes of an operation, by its fate.
    pub fn reply(&mut self, fate: Fate, what: &'static str) -> Reply {
        let Some(mut rng) = self.goes_wrong(fate) else { return Reply::Good };
        let (reply, kind) = match (rng.u8(0..3), what) {
            (0, "send begun") => (Reply::Refused, "send begun: refused"),
            (1, "send begun") => (Reply::LostBefore, "send begun: answer lost, not applied"),
            (_, "send begun") => (Reply::LostAfter, "send begun: answer lost, applied"),
            (0, _) => (Reply::Refused, "a store operation refused"),
            (1, _) => (Reply::LostBefore, "an answer lost, not applied"),
            _ => (Reply::LostAfter, "an answer lost, applied"),
        };
        self.fault(kind, Some(fate), self.now + 10 * SECOND);
        reply
    }

    /// How long one way takes.
    pub fn latency(&mut self, process: usize, fate: Fate) -> u64 {
        let slow = fate ^ 0x51_0e;
        if let Some(mut rng) = self.goes_wrong(slow)
            && rng.u8(0..10) == 0
        {
            let stall = rng.u64(5 * SECOND..40 * SECOND);
            self.fault("a stall", Some(slow), self.now + stall);
            self.strike(process, self.now + stall + AFTERMATH);
            return stall;
        }
        let mut rng = dice(fate ^ 0x1a7e);
        if self.plan.uneven && rng.u8(0..4) == 0 { rng.u64(20_000..600_000) } else { rng.u64(50..5_000) }
    }

    #[allow(clippy::too_many_arguments)]
    pub async fn reach_database(
        &mut self,
        process: usize,
        life: u64,
        owner: String,
        command: Command,
        reply: Reply,
        era: u64,
        fate: Fate,
    ) {
        self.excuse(&owner, &command, reply);
        let (event, wait) = if era != self.era {
            self.mark("the database restarted under way");
            (failed(&command, &lost()), 0)
        } else if !self.is_connected(process) || reply == Reply::Refused {
            (failed(&command, &refused()), 0)
        } else if reply == Reply::LostBefore {
            (failed(&command, &lost()), SECOND)
        } else {
            let applied = self.execute(process, life, &owner, command).await;
            if let (Reply::LostAfter, Event::Claimed { result: Ok(claimed), .. }) = (reply, &applied) {
                self.lost_claims.extend(claimed.messages.iter().map(|message| (message.id, owner.clone())));
            }
            // That an answer is lost shows only when the deadline has passed.
            match reply {
                Reply::LostAfter => (without_answer(applied), dice(fate ^ 0xdead).u64(0..10 * SECOND)),
                _ => (applied, 0),
            }
        };
        let back = self.now + self.latency(process, fate ^ 0xbac4) + wait;
        let era = Some(self.era);
        self.at(back, Action::Hear { process, life, event, era });
    }

    /// A lease may be lost whose renewals failed until shortly before its end, and a claim whose answer was lost if the one that
    /// looks for it fails, too.
    fn excuse(&mut self, owner: &str, command: &Command, reply: Reply) {
        let adopts = |claim: &Claim| matches!(claim.from, From::Adopt { .. } | From::Ids(_));
        if matches!(command, Command::Claim { claim, .. } if adopts(claim)) && reply != Reply::Good {
            self.adoptions_failed.insert(owner.to_owned());
        }
        if let (Command::Renew { leases, .. }, Reply::Refused | Reply::LostBefore) = (command, reply) {
            let until = self.now + LEASE.as_micros() as u64 / 2;
            for lease in leases {
                self.struck_rows.entry(lease.id).and_modify(|was| *was = until.max(*was)).or_insert(until);
            }
        }
    }

    /// Runs a store operation now, as the connection of a worker that may be dead by the time of the answer.
    async fn execute(&mut self, process: usize, life: u64, owner: &str, command: Command) -> Event {
        let store = self.processes[process].store_of(life);
        let lane_of = |world: &World, lane: usize| world.processes[process].plan.lanes[lane];
        match command {
            Command::Claim { op, claim } => {
                let result = store.claim(&claim).await;
                // A poll that brought nothing: had it changed anything, that would be out of place in the next step.
                if let Ok(got) = &result
                    && !got.messages.is_empty()
                {
                    for message in &got.messages {
                        self.claims.insert(message.lease(), owner.to_owned());
                    }
                    self.checked(Step::Claim { claim: &claim, got }).await;
                    self.note(format_args!("{owner} claims {}", messages(got)));
                }
                self.unless_failed(&result);
                Event::Claimed { op, result }
            }
            Command::Walk { op, lane, shard, after, limit } => {
                let result = store.walk(lane_of(self, lane).name(), shard, after, limit).await;
                if let Ok(walked) = &result
                    && !walked.seen.is_empty()
                {
                    self.note(format_args!("{owner} walks past {}", entries(walked)));
                }
                self.unless_failed(&result);
                Event::Walked { op, result }
            }
            Command::Dedup { op, lane, probes } => {
                let outbox = self.processes[process].outbox.clone();
                let result = outbox.check_dedup(lane_of(self, lane).name(), probes.clone()).await;
                if let (Ok(hits), LaneKind::Dedup) = (&result, lane_of(self, lane)) {
                    self.check_hits(&probes, hits);
                }
                self.unless_failed(&result);
                Event::Deduped { op, result }
            }
            Command::Settle { op, lane, entries } => {
                let kind = lane_of(self, lane);
                for entry in &entries {
                    self.check_kept(kind, &entry.verdict, entry.lease.id);
                }
                let result = store.settle(kind.name(), owner, &entries).await;
                self.unless_failed(&result);
                if let Ok(answers) = &result {
                    for (entry, _) in entries.iter().zip(answers).filter(|(_, answer)| **answer == Settled::Applied) {
                        if let Verdict::Sent { dedup_hit: true, .. } = entry.verdict {
                            self.dedup_hits.insert(entry.lease.id);
                        }
                    }
                    let told = |(e, a): (&postrider::outcome::Settlement, &Settled)| {
                        format!("{}@{} {} {a:?}", e.lease.id, e.lease.token, verdict(&e.verdict))
                    };
                    let told: Vec<String> = entries.iter().zip(answers).map(told).collect();
                    self.note(format_args!("{owner} settles {}", told.join(", ")));
                    self.checked(Step::Settle { lane: kind.name(), owner, entries: &entries, answers }).await;
                }
                Event::Settled { op, result }
            }
            Command::Defer { op, leases, how } => {
                let result = store.defer(owner, &leases, &how).await;
                self.unless_failed(&result);
                if let Ok(answers) = &result {
                    self.note(format_args!("{owner} gives back {leases:?} {:?} {answers:?}", how.code));
                    self.checked(Step::Defer { owner, leases: &leases, how: &how, answers }).await;
                }
                Event::Deferred { op, result }
            }
            Command::Renew { op, leases, lease } => {
                let result = store.renew(owner, &leases, lease).await;
                self.unless_failed(&result);
                if let Ok(answers) = &result {
                    self.note(format_args!("{owner} renews {leases:?} {answers:?}"));
                    self.checked(Step::Renew { owner, leases: &leases, lease, answers }).await;
                }
                Event::Renewed { op, result }
            }
            Command::Deliver { .. } | Command::Abort { .. } => unreachable!("not a store operation"),
        }
    }

    /// The database in memory never fails by itself.
    fn unless_failed<R>(&mut self, result: &Result<R, Error>) {
        if let Err(error) = result {
            self.violation(format!("the store failed: {error}"));
        }
    }

    /// What may have been sent is kept on a lane that says so.
    fn check_kept(&mut self, kind: LaneKind, verdict: &Verdict, id: i64) {
        let Some(known) = self.checker.known.get(&id) else { return };
        let spent = known.row.attempts + 1 >= self.plan.lane(kind).max_attempts;
        if kind.keeps_unresolved() && matches!(verdict, Verdict::Retry { .. }) && spent {
            self.mark("kept although its attempts are over");
        }
    }
}

/// Identity and order are what must repeat, and what a reader looks for; payloads are noise.
fn messages(claimed: &Claimed) -> String {
    let one = |m: &Message| {
        let from = m.taken_over_from.as_ref().map(|from| if from.starts_with('o') { "an operator" } else { from });
        let from = from.map(|from| format!(" from {from}")).unwrap_or_default();
        let crashes = if m.crashes > 0 { format!(" crashes {}", m.crashes) } else { String::new() };
        format!("{}@{}{crashes}{from}", m.id, m.lease_token)
    };
    claimed.messages.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn entries(walked: &Walked) -> String {
    let one = |s: &postrider::store::Seen| {
        let holder = s.hold.locked_by.as_deref().map_or("", |by| if by.starts_with('o') { " operator" } else { by });
        format!("{}@{}{}{holder}", s.mark.id, s.hold.token, if holder.is_empty() { "" } else { " " })
    };
    let shown: Vec<String> = walked.seen.iter().take(12).map(one).collect();
    let more = if walked.seen.len() > 12 { format!(", and {} more", walked.seen.len() - 12) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

fn verdict(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Sent { dedup_hit: true, .. } => "dedup".to_owned(),
        Verdict::Sent { .. } => "sent".to_owned(),
        Verdict::Retry { code, delay, .. } => format!("retry {code} in {:.1} s", delay.as_secs_f64()),
        Verdict::Dead { code, .. } => format!("dead {code}"),
    }
}

/// The answer of this operation is lost.
pub fn without_answer(event: Event) -> Event {
    match event {
        Event::Claimed { op, .. } => Event::Claimed { op, result: Err(lost()) },
        Event::Walked { op, .. } => Event::Walked { op, result: Err(lost()) },
        Event::Deduped { op, .. } => Event::Deduped { op, result: Err(lost()) },
        Event::Settled { op, .. } => Event::Settled { op, result: Err(lost()) },
        Event::Deferred { op, .. } => Event::Deferred { op, result: Err(lost()) },
        Event::Renewed { op, .. } => Event::Renewed { op, result: Err(lost()) },
        // A refusal is known, whatever happens afterwards.
        other => other,
    }
}

fn failed(command: &Command, error: &Error) -> Event {
    let error = error.clone();
    match command {
        Command::Claim { op, .. } => Event::Claimed { op: *op, result: Err(error) },
        Command::Walk { op, .. } => Event::Walked { op: *op, result: Err(error) },
        Command::Dedup { op, .. } => Event::Deduped { op: *op, result: Err(error) },
        Command::Settle { op, .. } => Event::Settled { op: *op, result: Err(error) },
        Command::Defer { op, .. } => Event::Deferred { op: *op, result: Err(error) },
        Command::Renew { op, .. } => Event::Renewed { op: *op, result: Err(error) },
        Command::Deliver { .. } | Command::Abort { .. } => Event::Wake,
    }
}
