//! Suspects: messages whose workers died more than once are delivered apart, in shrinking groups, with nothing else held.

use super::*;

/// Groups are served one after the other for this long, so that clearing is paid for once.
const SERVING: Duration = Duration::from_secs(1);

impl Core {
    pub(super) fn advance_suspects(&mut self, now: Tick) {
        if self.phase != Phase::Running {
            return;
        }
        let idle = self.held.is_empty() && self.lanes.iter().all(|lane| lane.claims == 0);
        match self.apart {
            Apart::No => {
                let Some(oldest) = self.suspects.values().map(|s| s.since).min() else { return };
                let open = self.lanes.iter().filter(|lane| lane.gate == Gate::Open);
                let quiet = idle && open.flat_map(|l| &l.shards).all(|s| s.dry);
                let patience_ended = now >= oldest.plus(SUSPECT_PATIENCE).max(self.rest_until);
                if now >= self.claims_wait_until() && (quiet || patience_ended) {
                    self.apart = Apart::Clearing { since: now };
                    self.advance_suspects(now);
                }
            }
            Apart::Clearing { since } if idle => self.claim_suspects(since, now),
            Apart::Serving { since, claimed: true } if idle => {
                if self.suspects.is_empty() || now >= since.plus(SERVING) {
                    self.rest(since, now);
                    self.advance_suspects(now);
                } else {
                    self.claim_suspects(since, now);
                }
            }
            // Something is held that does not come to its end: the others have waited long enough.
            Apart::Clearing { since } | Apart::Serving { since, .. } if now >= since.plus(self.longest_lease()) => {
                self.rest(since, now);
            }
            _ => {}
        }
    }

    /// At most a tenth of the time, while there is other work.
    fn rest(&mut self, since: Tick, now: Tick) {
        self.rest_until = now.plus(now.since(since) * 9);
        self.apart = Apart::No;
    }

    pub(super) fn longest_lease(&self) -> Duration {
        self.lanes.iter().map(|lane| lane.settings.lease).max().unwrap_or_default()
    }

    /// All lanes share one database: while it is in trouble, the trouble of one is the trouble of all.
    pub(super) fn claims_wait_until(&self) -> Tick {
        self.lanes.iter().map(|lane| lane.claim_trouble.until).max().unwrap_or_default()
    }

    fn claim_suspects(&mut self, since: Tick, now: Tick) {
        let Some((lane, shard, suspicion)) =
            self.suspects.values().min_by_key(|s| s.since).map(|s| (s.lane, s.shard, s.suspicion))
        else {
            self.apart = Apart::No;
            return;
        };
        let group = decide::suspect_group(suspicion, self.lanes[lane].settings.budgets.max_crashes).unwrap_or(1);
        let alike = |s: &Suspect| (s.lane, s.shard, s.suspicion) == (lane, shard, suspicion);
        let ids: Vec<i64> = self.suspects.iter().filter(|(_, s)| alike(s)).map(|(id, _)| *id).take(group).collect();
        self.apart = Apart::Serving { since, claimed: false };
        let limit = ids.len() as u32;
        self.send_claim(lane, shard, From::Ids(ids), limit, now);
    }
}
