//! A campaign: many seeds, on several threads, and one page that tells what they met.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::marks::{Marks, RARE, SOMETIMES};
use crate::plan::Plan;
use crate::world::{Outcomes, run};

/// Every so many seeds one is run again: it must tell the same story.
const AGAIN: u64 = 50;
/// A campaign of this many seeds must reach everything in [`SOMETIMES`], and one of that many what is [`RARE`], too.
const ENOUGH: u64 = 150;
const ENOUGH_FOR_RARE: u64 = 1000;

/// A seed that broke a promise.
#[derive(Debug)]
pub struct Failure {
    pub seed: u64,
    pub violations: Vec<String>,
}

#[derive(Debug, Default)]
pub struct Campaign {
    pub seeds: u64,
    pub steps: u64,
    pub events: u64,
    pub messages: u64,
    pub requests: u64,
    pub virtual_seconds: u64,
    pub faults: BTreeMap<&'static str, u64>,
    pub marks: Marks,
    pub failures: Vec<Failure>,
    /// Seeds that were run twice.
    pub repeated: u64,
    /// The longest that everything took to end, as a part of what the configuration allows, and its seed.
    pub longest: (f64, u64),
}

impl Campaign {
    /// Runs these seeds, or of them every so many; stops early once so many have failed, or (between seeds) when `enough` says so.
    pub fn run(
        seeds: std::ops::Range<u64>,
        every: u64,
        threads: usize,
        enough: &(dyn Fn() -> bool + Sync),
    ) -> Campaign {
        let next = AtomicU64::new(seeds.start);
        let campaign = Mutex::new(Campaign::default());
        std::thread::scope(|scope| {
            for _ in 0..threads.max(1) {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(every.max(1), Ordering::SeqCst);
                        let failed = campaign.lock().expect("no panic").failures.len();
                        if seed >= seeds.end || failed >= 5 || enough() {
                            return;
                        }
                        let outcomes = run(Plan::of(seed));
                        let again = (seed % AGAIN == 7).then(|| run(Plan::of(seed)));
                        campaign.lock().expect("no panic").add(seed, outcomes, again);
                    }
                });
            }
        });
        campaign.into_inner().expect("no panic")
    }

    fn add(&mut self, seed: u64, outcomes: Outcomes, again: Option<Outcomes>) {
        let mut violations = outcomes.violations;
        if let Some(again) = again {
            self.repeated += 1;
            if (again.trace, again.events) != (outcomes.trace, outcomes.events) {
                violations.push("M3: the same seed told two stories".to_owned());
            }
        }
        self.seeds += 1;
        self.steps += outcomes.steps;
        self.events += outcomes.events;
        self.messages += outcomes.messages;
        self.requests += outcomes.requests;
        self.virtual_seconds += outcomes.virtual_seconds;
        self.marks.add(&outcomes.marks);
        for (kind, times) in outcomes.faults {
            *self.faults.entry(kind).or_default() += times;
        }
        if outcomes.patience_used > self.longest.0 {
            self.longest = (outcomes.patience_used, seed);
        }
        if !violations.is_empty() {
            self.failures.push(Failure { seed, violations });
        }
    }

    pub fn fault_count(&self) -> u64 {
        self.faults.values().sum()
    }

    /// What a campaign of this size should have reached, and has not.
    pub fn unreached(&self) -> Vec<&'static str> {
        let wanted = |marks: &'static [&'static str], enough| if self.seeds < enough { &[] } else { marks };
        let wanted = wanted(SOMETIMES, ENOUGH).iter().chain(wanted(RARE, ENOUGH_FOR_RARE));
        wanted.filter(|mark| !self.marks.0.contains_key(**mark)).copied().collect()
    }

    pub fn is_good(&self) -> bool {
        self.failures.is_empty() && self.unreached().is_empty()
    }

    /// One page.
    pub fn report(&self, took: Duration) -> String {
        let mut page = String::new();
        let mut line = |text: String| writeln!(page, "{text}").expect("memory");
        line(format!(
            "{} seeds, {} of them twice; {} messages, {} requests, {} virtual hours, {:.0} s of wall time",
            self.seeds,
            self.repeated,
            self.messages,
            self.requests,
            self.virtual_seconds / 3600,
            took.as_secs_f64()
        ));
        line(format!("{} events, {} checked steps, {} faults injected", self.events, self.steps, self.fault_count()));
        line(format!(
            "longest end after the last fault: {:.0} % of what is allowed (seed {})",
            self.longest.0 * 100.0,
            self.longest.1
        ));
        line("\nfaults".to_owned());
        for (kind, times) in &self.faults {
            line(format!("  {times:>10}  {kind}"));
        }
        line("\nreached".to_owned());
        for (mark, times) in &self.marks.0 {
            line(format!("  {times:>10}  {mark}"));
        }
        if self.seeds < ENOUGH {
            line(format!("what should be reached is judged from {ENOUGH} seeds on"));
        }
        for mark in self.unreached() {
            line(format!("NEVER REACHED  {mark}"));
        }
        line(format!("\n{} seeds broke a promise", self.failures.len()));
        for failure in &self.failures {
            line(format!("  seed {}: {}", failure.seed, failure.violations.first().map_or("", String::as_str)));
        }
        page
    }
}
