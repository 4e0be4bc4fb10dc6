//! Runs a campaign and prints its page: `simulate [--first N] [--seeds N] [--every N] [--seconds N] [--threads N]`. With
//! `--every N` it takes only every so many of the seeds; with `--story SEED` it shrinks that one and tells what happened. It ends with 1 if a promise was broken or a mark never reached.

use std::process::ExitCode;
use std::time::Duration;

use postrider::clock::Tick;
use simulator::{Campaign, Plan, shrink};

/// Runs spent on making a failing seed small.
const SHRINKING: usize = 600;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut numbers = std::collections::BTreeMap::new();
    for pair in words.chunks(2) {
        let value = pair.get(1).and_then(|value| value.parse::<u64>().ok());
        let known = ["--first", "--seeds", "--every", "--seconds", "--threads", "--story"].contains(&pair[0].as_str());
        let Some(value) = value.filter(|_| known) else {
            eprintln!("usage: simulate [--first N] [--seeds N] [--every N] [--seconds N] [--threads N] | --story SEED");
            return ExitCode::from(2);
        };
        numbers.insert(pair[0].clone(), value);
    }
    if let Some(seed) = numbers.get("--story") {
        return tell(*seed);
    }
    let number = |name: &str, default: u64| numbers.get(name).copied().unwrap_or(default);
    let first = number("--first", 0);
    let started = Tick::now();
    let limit = Duration::from_secs(number("--seconds", u64::MAX / 2));
    let enough = || Tick::now().since(started) >= limit;
    let (seeds, threads) = (first..first + number("--seeds", 1000), number("--threads", 2) as usize);
    let campaign = Campaign::run(seeds, number("--every", 1), threads, &enough);
    print!("{}", campaign.report(Tick::now().since(started)));
    if let Some(failure) = campaign.failures.first() {
        tell(failure.seed);
    }
    if campaign.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The seed's story, as short as it gets.
fn tell(seed: u64) -> ExitCode {
    match shrink(Plan::of(seed), SHRINKING) {
        Some(shrunk) => {
            println!("\nafter {} runs:\n{}", shrunk.runs, shrunk.story.join("\n"));
            ExitCode::FAILURE
        }
        None => {
            println!("seed {seed} breaks no promise");
            ExitCode::SUCCESS
        }
    }
}
