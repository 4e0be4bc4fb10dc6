//! Suspects: messages whose workers died more than once are delivered apart, in shrinking groups, one lane at a time and
//! with nothing else of that lane held. What other lanes have under way goes on: should a suspect kill the process, that
//! costs each of them one takeover, and suspects of several lanes are never under way together.

use super::*;

/// Groups are served one after the other for this long, so that clearing is paid for once.
const SERVING: Duration = Duration::from_secs(1);

impl Core {
    pub(super) fn advance_suspects(&mut self, now: Tick) {
        if self.phase != Phase::Running {
            return;
        }
        match self.apart {
            Apart::No => {
                let Some(oldest) = self.suspects.values().min_by_key(|s| s.since) else { return };
                let (lane, since) = (oldest.lane, oldest.since);
                let quiet = self.is_idle(lane) && self.lanes[lane].shards.iter().all(|s| s.dry);
                let patience_ended = now >= since.plus(SUSPECT_PATIENCE).max(self.rest_until);
                if now >= self.lanes[lane].claim_trouble.until && (quiet || patience_ended) {
                    self.apart = Apart::Clearing { lane, since: now };
                    self.advance_suspects(now);
                }
            }
            Apart::Clearing { lane, since }
                if self.lanes[lane].claims == 0 && (self.is_idle(lane) || now >= since.plus(CLEARING)) =>
            {
                self.claim_suspects(lane, since, now);
            }
            Apart::Serving { lane, since, claimed: true } if self.is_idle(lane) => {
                if self.suspects.values().all(|s| s.lane != lane) || now >= since.plus(SERVING) {
                    self.rest(since, now);
                    self.advance_suspects(now);
                } else {
                    self.claim_suspects(lane, since, now);
                }
            }
            // Something is held that does not come to its end: the others of the lane have waited long enough.
            Apart::Serving { lane, since, .. } if now >= since.plus(self.lanes[lane].settings.lease) => {
                self.rest(since, now);
            }
            _ => {}
        }
    }

    /// What is delivered, and only waits for somebody's lock to be recorded, kills nobody any more.
    fn is_idle(&self, lane: usize) -> bool {
        let waits_for_a_lock = |id: &i64| self.lanes[lane].locked.iter().any(|(_, entry)| entry.lease.id == *id);
        self.lanes[lane].claims == 0 && self.held.iter().all(|(id, held)| held.lane != lane || waits_for_a_lock(id))
    }

    /// At most a tenth of the time, while there is other work.
    fn rest(&mut self, since: Tick, now: Tick) {
        self.rest_until = now.plus(now.since(since) * 9);
        self.apart = Apart::No;
    }

    fn claim_suspects(&mut self, lane: usize, since: Tick, now: Tick) {
        let of_lane = self.suspects.values().filter(|s| s.lane == lane);
        let Some((shard, suspicion)) = of_lane.min_by_key(|s| s.since).map(|s| (s.shard, s.suspicion)) else {
            // Its lane was paused meanwhile: those of another may be served at once.
            self.apart = Apart::No;
            return self.advance_suspects(now);
        };
        let group = decide::suspect_group(suspicion, self.lanes[lane].settings.budgets.max_crashes).unwrap_or(1);
        let alike = |s: &Suspect| (s.lane, s.shard, s.suspicion) == (lane, shard, suspicion);
        let ids: Vec<i64> = self.suspects.iter().filter(|(_, s)| alike(s)).map(|(id, _)| *id).take(group).collect();
        self.apart = Apart::Serving { lane, since, claimed: false };
        let limit = ids.len() as u32;
        self.send_claim(lane, shard, From::Ids(ids), limit, now);
    }
}
