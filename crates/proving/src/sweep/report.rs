//! What a sweep did, on one page.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use super::judge::Answer;

#[derive(Default)]
pub struct Report(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    /// Per operation: messages to the server, to the client, faults injected.
    operations: BTreeMap<String, [usize; 3]>,
    kinds: BTreeMap<&'static str, usize>,
    answers: BTreeMap<&'static str, usize>,
    unreached: usize,
    slow: usize,
    violations: Vec<String>,
}

impl Report {
    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn counted(&self, operation: &str, messages: [usize; 2]) {
        self.counts().operations.insert(operation.to_owned(), [messages[0], messages[1], 0]);
    }

    pub(super) fn injected(&self, operation: &str, kind: &'static str, answer: &Answer) {
        let mut counts = self.counts();
        counts.operations.entry(operation.to_owned()).or_default()[2] += 1;
        *counts.kinds.entry(kind).or_default() += 1;
        *counts.answers.entry(answer.class()).or_default() += 1;
    }

    pub(super) fn not_reached(&self) {
        self.counts().unreached += 1;
    }

    /// The machine was too slow to tell: asked again.
    pub(super) fn slow(&self) {
        self.counts().slow += 1;
    }

    pub(super) fn violated(&self, case: &str, what: &str) {
        self.counts().violations.push(format!("{case}\n    {what}"));
    }

    pub fn violations(&self) -> usize {
        self.counts().violations.len()
    }

    pub fn faults(&self) -> usize {
        self.counts().kinds.values().sum()
    }

    pub fn unreached(&self) -> usize {
        self.counts().unreached
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.counts();
        let messages: usize = counts.operations.values().map(|n| n[0] + n[1]).sum();
        let faults: usize = counts.kinds.values().sum();
        writeln!(f, "{:3} operations, {messages} messages, {faults} faults injected", counts.operations.len())?;
        for (operation, [up, down, faults]) in &counts.operations {
            writeln!(f, "    {operation:34} {up:3} to the server, {down:3} to the client, {faults:4} faults")?;
        }
        let list = |counts: &BTreeMap<&str, usize>| {
            counts.iter().map(|(name, n)| format!("{n} {name}")).collect::<Vec<_>>().join(", ")
        };
        writeln!(f, "  faults:  {}; {} not reached", list(&counts.kinds), counts.unreached)?;
        writeln!(f, "  answers: {}; {} asked again for slowness", list(&counts.answers), counts.slow)?;
        writeln!(f, "  violations: {}", counts.violations.len())?;
        counts.violations.iter().take(40).try_for_each(|violation| writeln!(f, "  - {violation}"))
    }
}
