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
const RESERVE_PER_PEER: usize = 64;

/// How many connections there may be.
#[derive(Clone, Debug)]
pub struct Rules {
    pub most: usize,
    /// 0: no limit.
    pub per_peer: usize,
    /// Whoever speaks for many is not counted.
    pub trusted: Vec<Cidr>,
    /// Beyond `most`, for probes.
    pub reserve: usize,
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
    reserve: VecDeque<Reserved>,
    next: u64,
}

struct Reserved {
    id: u64,
    peer: Option<IpAddr>,
    wanted: Arc<Notify>,
}

impl Taken {
    /// Gives back what a peer has, and forgets who has nothing.
    fn give_back(&mut self, peer: Option<IpAddr>, one: impl Fn(&mut Held) -> &mut usize) {
        let Some(peer) = peer else { return };
        if let Some(held) = self.by_peer.get_mut(&peer) {
            *one(held) -= 1;
            if held.slots == 0 && held.reserve == 0 {
                self.by_peer.remove(&peer);
            }
        }
    }

    /// Takes the first of the reserve that this holds for out of it, and tells it to go.
    fn make_room(&mut self, which: impl Fn(&Reserved) -> bool) {
        let found = self.reserve.iter().position(which);
        if let Some(gone) = found.and_then(|at| self.reserve.remove(at)) {
            gone.wanted.notify_one();
            self.give_back(gone.peer, |held| &mut held.reserve);
        }
    }
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

    /// A slot for a connection of `address`, of the reserve where there is no other. Where that is full, too, or the peer has
    /// its share of it, the oldest makes room: a probe takes no time, and whoever takes longer is none.
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> Slot {
        let address = address.to_canonical();
        let peer = (!self.rules.trusted.iter().any(|range| range.contains(address))).then(|| peer_of(address));
        let mut guard = self.taken();
        let taken = &mut *guard;
        let (slots, reserve) = peer.and_then(|peer| taken.by_peer.get(&peer)).map_or((0, 0), |h| (h.slots, h.reserve));
        let has_its_share = self.rules.per_peer > 0 && slots >= self.rules.per_peer;
        if taken.slots < self.rules.most && !has_its_share {
            taken.slots += 1;
            if let Some(peer) = peer {
                taken.by_peer.entry(peer).or_default().slots += 1;
            }
            return Slot { slots: self.clone(), peer, reserved: None };
        }
        if reserve >= RESERVE_PER_PEER.min(self.rules.reserve.div_ceil(4)) {
            taken.make_room(|other| other.peer == peer);
        } else if taken.reserve.len() >= self.rules.reserve {
            taken.make_room(|_| true);
        }
        if let Some(peer) = peer {
            taken.by_peer.entry(peer).or_default().reserve += 1;
        }
        let (id, wanted) = (taken.next, Arc::new(Notify::new()));
        taken.next += 1;
        taken.reserve.push_back(Reserved { id, peer, wanted: wanted.clone() });
        Slot { slots: self.clone(), peer, reserved: Some((id, wanted)) }
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
        let mut taken = self.slots.taken();
        match &self.reserved {
            // Unless it has made room already.
            Some((id, _)) => {
                if let Some(at) = taken.reserve.iter().position(|other| other.id == *id) {
                    taken.reserve.remove(at);
                    taken.give_back(self.peer, |held| &mut held.reserve);
                }
            }
            None => {
                taken.slots -= 1;
                taken.give_back(self.peer, |held| &mut held.slots);
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
        Slots::new(Rules { most, per_peer, trusted, reserve: RESERVE })
    }

    fn enter(slots: &Arc<Slots>, address: &str) -> Slot {
        slots.enter(address.parse().unwrap())
    }

    fn plain(slot: &Slot) -> bool {
        !slot.is_reserved()
    }

    fn must_go(slot: &Slot) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(slot.is_wanted()).poll(&mut context).is_ready()
    }

    #[test]
    fn one_peer_has_its_share_and_no_more() {
        let slots = slots(10, 3, &[]);
        let own: Vec<_> = (0..3).map(|_| enter(&slots, "127.0.0.2")).collect();
        assert!(own.iter().all(plain));
        let beyond = enter(&slots, "127.0.0.2");
        assert!(beyond.is_reserved(), "probes of the same peer are answered");
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
    fn a_crowd_in_the_reserve_makes_room_among_itself() {
        let slots = slots(0, 0, &[]);
        let other = enter(&slots, "127.0.0.1");
        let crowd: Vec<_> = (0..RESERVE_PER_PEER + 5).map(|_| enter(&slots, "127.0.0.2")).collect();
        assert_eq!(slots.taken().reserve.len(), RESERVE_PER_PEER + 1);
        assert!(crowd[..5].iter().all(must_go), "the first to come are the first to go");
        assert!(!crowd[5..].iter().any(must_go) && !must_go(&other), "the last to come is heard, and so are others");
        drop((crowd, other));
        assert!(slots.taken().by_peer.is_empty() && slots.taken().reserve.is_empty());
    }

    #[test]
    fn in_a_full_reserve_the_oldest_makes_room() {
        let slots = slots(0, 0, &[]);
        let all: Vec<_> = (0..RESERVE + 3).map(|n| enter(&slots, &format!("127.0.{}.1", n % 250))).collect();
        assert_eq!(slots.taken().reserve.len(), RESERVE);
        assert!(all[..3].iter().all(must_go) && !all[3..].iter().any(must_go));
        drop(all);
        assert!(slots.taken().by_peer.is_empty() && slots.taken().reserve.is_empty());
    }
}
