//! For the core's own tests: a core of one lane that is open, and answers to its claims.

use super::*;
use crate::time::Timestamp;

pub fn at(millis: u64) -> Tick {
    Tick::default().plus(Duration::from_millis(1000 + millis))
}

pub fn core(lane: LaneSettings) -> Core {
    core_of(lane, false)
}

/// One that ends when nothing is due.
pub fn once(lane: LaneSettings) -> Core {
    core_of(lane, true)
}

fn core_of(lane: LaneSettings, once: bool) -> Core {
    let lane = LaneSettings { shards: vec![0], ..lane };
    let settings = Settings { owner: "w".to_owned(), lanes: vec![lane], drain: Duration::from_secs(5), once, seed: 7 };
    let mut core = Core::new(settings, at(0));
    core.handle(at(0), Event::Paused { lanes: vec![] });
    core
}

/// The answer to a claim, if this is one: these messages, each changed at will. The database's clock stands at 0.
pub fn claimed(command: &Command, ids: &[i64], change: impl Fn(&mut Message)) -> Option<Event> {
    let Command::Claim { op, claim } = command else { return None };
    let message = |id: &i64| {
        let mut message = Message {
            id: *id,
            lane: claim.lane.clone(),
            shard_id: 0,
            due_at: Timestamp::from_micros(0),
            lease_until: Timestamp::from_micros(60_000_000),
            lease_token: 1,
            attempts: 0,
            crashes: 0,
            maybe_sent: false,
            target: None,
            active_key: None,
            payload: bytes::Bytes::new(),
            content_type: None,
            headers: vec![],
            payload_sha: None,
            correlation_id: None,
            created_at: Timestamp::from_micros(0),
            deliver_before: None,
            taken_over_from: None,
        };
        change(&mut message);
        message
    };
    let messages = ids.iter().map(message).collect();
    let claimed = Claimed { messages, now: Timestamp::from_micros(0), exhausted: true };
    Some(Event::Claimed { op: *op, result: Ok(claimed) })
}

/// A core that has claimed message 1 at 0 and begun its delivery.
pub fn delivering() -> Core {
    let mut core = core(LaneSettings::new("one"));
    let commands = core.step(at(0));
    let claim = commands.iter().find_map(|command| claimed(command, &[1], |_| {})).expect("a claim");
    core.handle(at(1), claim);
    assert!(core.step(at(1)).iter().any(|command| matches!(command, Command::Deliver { .. })));
    core
}
