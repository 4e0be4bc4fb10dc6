//! Who gets a connection: so many in all, so many per peer, and a few beside for probes, which are answered however many
//! the others have taken.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use postrider_webhooks::guard::Cidr;
use tokio::sync::Notify;

/// Connections beyond the limits in which probes are answered and all else is refused.
pub const RESERVE: usize = 256;
/// Of which one peer has at most these: a crowd at one address does not push others out of it.
const RESERVE_PER_PEER: usize = 16;

/// How many connections there may be.
#[derive(Clone, Debug)]
pub struct Rules {
    pub most: usize,
    /// 0: no limit.
    pub per_peer: usize,
    /// Whoever speaks for many is not counted.
    pub trusted: Vec<Cidr>,
}

#[derive(Default)]
struct Held {
    slots: usize,
    reserve: usize,
}

#[derive(Default)]
struct Taken {
    slots: usize,
    by_peer: HashMap<IpAddr, Held>,
    /// The oldest first.
    reserve: VecDeque<(u64, Arc<Notify>)>,
    next: u64,
}

/// The slots of one server.
pub struct Slots {
    rules: Rules,
    taken: Mutex<Taken>,
}

/// A connection's right to be there; given back when it is dropped.
pub struct Slot {
    slots: Arc<Slots>,
    /// Who it is counted for.
    peer: Option<IpAddr>,
    reserved: Option<(u64, Arc<Notify>)>,
}

impl Slots {
    pub fn new(rules: Rules) -> Arc<Slots> {
        Arc::new(Slots { rules, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot for a connection of `address`, of the reserve where there is no other; none where the peer has its share of
    /// that too. When the reserve is full the oldest there makes room: a probe takes no time.
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Slot> {
        let address = address.to_canonical();
        let peer = (!self.rules.trusted.iter().any(|range| range.contains(address))).then(|| peer_of(address));
        let mut guard = self.taken();
        let taken = &mut *guard;
        let mut alone = Held::default();
        let held = match peer {
            Some(peer) => taken.by_peer.entry(peer).or_default(),
            None => &mut alone,
        };
        let has_its_share = peer.is_some() && self.rules.per_peer > 0 && held.slots >= self.rules.per_peer;
        if taken.slots < self.rules.most && !has_its_share {
            held.slots += 1;
            taken.slots += 1;
            return Some(Slot { slots: self.clone(), peer, reserved: None });
        }
        if held.reserve >= RESERVE_PER_PEER {
            return None;
        }
        held.reserve += 1;
        if taken.reserve.len() >= RESERVE
            && let Some((_, oldest)) = taken.reserve.pop_front()
        {
            oldest.notify_one();
        }
        let reserved = (taken.next, Arc::new(Notify::new()));
        taken.next += 1;
        taken.reserve.push_back(reserved.clone());
        Some(Slot { slots: self.clone(), peer, reserved: Some(reserved) })
    }
}

impl Slot {
    /// It is of the reserve: for probes.
    pub fn is_reserved(&self) -> bool {
        self.reserved.is_some()
    }

    /// Resolves when it must make room.
    pub async fn is_wanted(&self) {
        match &self.reserved {
            Some((_, wanted)) => wanted.notified().await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut guard = self.slots.taken();
        let taken = &mut *guard;
        match &self.reserved {
            Some((id, _)) => taken.reserve.retain(|(other, _)| other != id),
            None => taken.slots -= 1,
        }
        let Some(peer) = self.peer else { return };
        if let Some(held) = taken.by_peer.get_mut(&peer) {
            match self.reserved {
                Some(_) => held.reserve -= 1,
                None => held.slots -= 1,
            }
            if held.slots == 0 && held.reserve == 0 {
                taken.by_peer.remove(&peer);
            }
        }
    }
}

/// Of IPv6 a single machine has a whole /64.
fn peer_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(most: usize, per_peer: usize, trusted: &[&str]) -> Arc<Slots> {
        let trusted = trusted.iter().map(|range| range.parse().unwrap()).collect();
        Slots::new(Rules { most, per_peer, trusted })
    }

    fn enter(slots: &Arc<Slots>, address: &str) -> Option<Slot> {
        slots.enter(address.parse().unwrap())
    }

    fn plain(slot: &Option<Slot>) -> bool {
        slot.as_ref().is_some_and(|slot| !slot.is_reserved())
    }

    #[test]
    fn one_peer_has_its_share_and_no_more() {
        let slots = slots(10, 3, &[]);
        let own: Vec<_> = (0..3).map(|_| enter(&slots, "127.0.0.2")).collect();
        assert!(own.iter().all(plain));
        let beyond = enter(&slots, "127.0.0.2");
        assert!(beyond.as_ref().is_some_and(Slot::is_reserved), "probes of the same peer are answered");
        assert!(plain(&enter(&slots, "127.0.0.1")), "others have theirs");
        drop(own);
        assert!(plain(&enter(&slots, "127.0.0.2")), "what was given back is free");
        drop(beyond);
        assert!(slots.taken().by_peer.is_empty() && slots.taken().reserve.is_empty() && slots.taken().slots == 0);
    }

    #[test]
    fn proxies_are_counted_in_all_but_not_as_a_peer() {
        let slots = slots(5, 2, &["10.0.0.0/8"]);
        let own: Vec<_> = (0..5).map(|_| enter(&slots, "::ffff:10.1.2.3")).collect();
        assert!(own.iter().all(plain));
        assert!(!plain(&enter(&slots, "10.1.2.3")), "there are no more");
    }

    #[test]
    fn a_network_is_one_peer_and_zero_is_no_limit() {
        let bounded = slots(10, 1, &[]);
        let _one = enter(&bounded, "2001:db8::1");
        assert!(!plain(&enter(&bounded, "2001:db8::2")));
        assert!(plain(&enter(&bounded, "2001:db8:0:1::1")));
        let free = slots(10, 0, &[]);
        assert!((0..10).map(|_| enter(&free, "127.0.0.2")).collect::<Vec<_>>().iter().all(plain));
    }

    #[test]
    fn the_reserve_is_shared_and_its_oldest_makes_room() {
        let slots = slots(0, 0, &[]);
        let crowd: Vec<_> = (0..RESERVE_PER_PEER).map(|_| enter(&slots, "127.0.0.2")).collect();
        assert!(crowd.iter().all(Option::is_some));
        assert!(enter(&slots, "127.0.0.2").is_none(), "a crowd at one address has its share");
        let mut others = Vec::new();
        for n in 0..(RESERVE / RESERVE_PER_PEER) as u8 {
            others.extend((0..RESERVE_PER_PEER).map(|_| enter(&slots, &format!("127.0.1.{n}"))));
        }
        assert!(others.iter().all(Option::is_some));
        assert_eq!(slots.taken().reserve.len(), RESERVE);
        let wanted = |slot: &Slot| {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            std::pin::pin!(slot.is_wanted()).poll(&mut context).is_ready()
        };
        assert!(crowd.iter().flatten().all(wanted), "the first to come are the first to go");
        assert!(!others.iter().flatten().any(wanted));
    }
}
