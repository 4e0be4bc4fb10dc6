//! Each model looked through whole, and each of its broken variants until it is seen to be broken.

use models::{Looked, gates, lease, look_through, memories};

fn holds(name: &str, looked: &Looked) {
    println!("{name}: {} states", looked.states);
    let violated: Vec<String> = looked.violated.iter().map(|(name, way)| format!("`{name}`:\n{way}")).collect();
    assert!(violated.is_empty(), "{name}: these do not hold: {}", violated.join("\n"));
    assert!(looked.never.is_empty(), "{name}: these are never reached: {:?}", looked.never);
    assert!(looked.states > 100, "{name}: {} states are no look at anything", looked.states);
}

fn breaks(name: &str, looked: &Looked) {
    let seen: Vec<&str> = looked.violated.iter().map(|(property, _)| *property).collect();
    println!("{name}: seen after {} states by {seen:?}", looked.states);
    assert!(!seen.is_empty(), "{name}: nothing of it is seen in {} states", looked.states);
}

/// `make models` looks one tick further: 62 million states instead of these.
fn leases() -> lease::Leases {
    let until = if std::env::var_os("POSTRIDER_MODELS").is_some() { 5 } else { 4 };
    lease::Leases { until, losses: 1, crashes: 1, broken: None }
}

#[test]
fn the_lease_holds_in_every_order() {
    holds("lease", &look_through(leases(), false));
}

#[test]
fn every_rule_of_the_lease_is_needed() {
    use lease::Broken::*;
    for broken in [
        NoFence,
        IgnoresLeases,
        SameToken,
        AdoptsInFlight,
        CountsFromAnswer,
        NoLookBeforeSending,
        RenewsAnything,
        ForgetsDoubt,
    ] {
        breaks(&format!("{broken:?}"), &look_through(lease::Leases { broken: Some(broken), ..leases() }, true));
    }
}

#[test]
fn what_is_parked_is_found_again_in_every_order() {
    for sweeps in [true, false] {
        let looked = look_through(gates::Gates { sweeps, broken: None }, false);
        holds(if sweeps { "gates" } else { "gates without a sweep" }, &looked);
    }
}

#[test]
fn every_rule_of_the_gates_is_needed() {
    use gates::Broken::*;
    for broken in [ParksWithoutLock, DeletesGateBeside, LooksBeforeLocking] {
        breaks(&format!("{broken:?}"), &look_through(gates::Gates { sweeps: false, broken: Some(broken) }, true));
    }
    // And the sweep finds what any of them leaves behind.
    for broken in [ParksWithoutLock, DeletesGateBeside, LooksBeforeLocking] {
        let looked = look_through(gates::Gates { sweeps: true, broken: Some(broken) }, false);
        let vain: Vec<_> =
            looked.violated.iter().filter(|(name, _)| *name == "what is parked is found again").collect();
        assert!(vain.is_empty(), "{broken:?} with a sweep: {vain:?}");
    }
}

#[test]
fn a_memory_is_in_one_place_in_every_order() {
    holds("memories", &look_through(memories::Halves { crashes: 1, broken: None }, false));
}

#[test]
fn every_rule_of_the_two_halves_is_needed() {
    use memories::Broken::*;
    for broken in
        [NoDoubt, NoLookUp, QueuesInTwo, TakesOverBlindly, WritesBeside, LeavesBehindBlindly, ForgetsLeftBehind]
    {
        let model = memories::Halves { crashes: 1, broken: Some(broken) };
        breaks(&format!("{broken:?}"), &look_through(model, true));
    }
}
