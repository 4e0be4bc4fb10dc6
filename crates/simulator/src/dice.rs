//! Chances that depend on what they are for, not on how many were drawn before: a plan that lost one event keeps the fate of
//! all others, so that a failing plan can be made smaller.

/// One chance of a run: whose it is, and which.
pub type Fate = u64;

/// Names a chance by the seed, its topic and up to three numbers (SplitMix64 over each).
pub fn fate(seed: u64, topic: &str, of: [u64; 3]) -> Fate {
    let mut hash = mix(seed ^ 0x5eed);
    for byte in topic.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    of.into_iter().fold(hash, |hash, part| mix(hash ^ part))
}

/// The dice of one chance.
pub fn dice(fate: Fate) -> fastrand::Rng {
    fastrand::Rng::with_seed(mix(fate))
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
