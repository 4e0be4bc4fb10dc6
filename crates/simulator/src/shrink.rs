//! Makes a failing plan small: drops incidents, messages, faults and processes, in ever smaller pieces, as long as it still
//! fails; then tells what is left as a story.

use std::collections::HashSet;

use crate::dice::Fate;
use crate::plan::{EventPlan, Incident, MemoryPlan, OrderPlan, Plan, Planned, What};
use crate::world::{Outcomes, go};

/// A small plan that fails, and how.
pub struct Shrunk {
    pub plan: Plan,
    pub violations: Vec<String>,
    pub runs: usize,
    pub story: Vec<String>,
}

/// Lines of a story that a person still reads.
const READABLE: usize = 150;

struct Shrinker {
    runs: usize,
    most: usize,
    /// What is told first: a smaller plan must fail in the same way.
    symptom: String,
}

/// `most`: runs that may be spent on it.
pub fn shrink(plan: Plan, most: usize) -> Option<Shrunk> {
    let first = go(plan.clone(), false);
    let symptom = symptom(&first)?;
    let mut shrinker = Shrinker { runs: 1, most, symptom };
    let mut plan = Plan { only: Some(first.injected.iter().copied().collect()), ..plan };
    loop {
        let size = size(&plan);
        plan = shrinker.fewer(plan, |p| p.incidents.clone(), |p, incidents: Vec<Incident>| p.incidents = incidents);
        plan = shrinker.fewer(plan, |p| p.messages.clone(), |p, messages: Vec<Planned>| p.messages = messages);
        plan = shrinker.fewer(plan, |p| p.events.clone(), |p, events: Vec<EventPlan>| p.events = events);
        plan = shrinker.fewer(plan, |p| p.orders.clone(), |p, orders: Vec<OrderPlan>| p.orders = orders);
        plan = shrinker.fewer(plan, |p| p.memories.clone(), |p, memories: Vec<MemoryPlan>| p.memories = memories);
        plan = shrinker.fewer(plan, faults, |p, faults: Vec<Fate>| p.only = Some(faults.into_iter().collect()));
        plan = shrinker.fewer_processes(plan);
        if self::size(&plan) == size || shrinker.runs >= shrinker.most {
            break;
        }
    }
    let told = go(plan.clone(), true);
    Some(Shrunk { violations: told.violations.clone(), story: story(&plan, told), runs: shrinker.runs, plan })
}

fn size(plan: &Plan) -> usize {
    plan.incidents.len()
        + plan.messages.len()
        + plan.events.len()
        + plan.orders.len()
        + plan.memories.len()
        + plan.only.as_ref().map_or(0, HashSet::len)
        + plan.processes.len()
}

fn faults(plan: &Plan) -> Vec<Fate> {
    let mut faults: Vec<Fate> = plan.only.iter().flatten().copied().collect();
    faults.sort_unstable();
    faults
}

/// The promise that was broken, without times and numbers.
fn symptom(outcomes: &Outcomes) -> Option<String> {
    let text = outcomes.violations.first()?.split_once(" s: ")?.1;
    let words = text.split_whitespace().filter(|word| word.chars().all(|c| c.is_alphabetic() || c == ':'));
    Some(words.take(3).collect::<Vec<_>>().join(" "))
}

impl Shrinker {
    fn fails(&mut self, plan: &Plan) -> bool {
        let nothing = plan.messages.is_empty() && plan.events.is_empty() && plan.orders.is_empty();
        if self.runs >= self.most || (nothing && plan.memories.is_empty()) {
            return false;
        }
        self.runs += 1;
        symptom(&go(plan.clone(), false)) == Some(self.symptom.clone())
    }

    /// Drops pieces of one list: halves, then quarters, down to single ones.
    fn fewer<T: Clone>(
        &mut self,
        mut plan: Plan,
        get: impl Fn(&Plan) -> Vec<T>,
        set: impl Fn(&mut Plan, Vec<T>),
    ) -> Plan {
        let mut all = get(&plan);
        let mut piece = all.len();
        while piece > 0 {
            let mut from = 0;
            while from < all.len() {
                let to = (from + piece).min(all.len());
                let rest: Vec<T> = all[..from].iter().chain(&all[to..]).cloned().collect();
                let mut smaller = plan.clone();
                set(&mut smaller, rest.clone());
                if self.fails(&smaller) {
                    (plan, all) = (smaller, rest);
                } else {
                    from = to;
                }
            }
            piece /= 2;
        }
        plan
    }

    /// The last process goes, and what happens to it.
    fn fewer_processes(&mut self, mut plan: Plan) -> Plan {
        while plan.processes.len() > 1 {
            let mut smaller = plan.clone();
            let gone = smaller.processes.len() - 1;
            smaller.processes.pop();
            smaller.incidents.retain(|incident| {
                !matches!(incident.what, What::Crash { process } | What::Stop { process } | What::Freeze { process, .. } | What::CutOff { process, .. } if process == gone)
            });
            if !self.fails(&smaller) {
                break;
            }
            plan = smaller;
        }
        plan
    }
}

/// What happened, without the walks past what others hold, if that is short enough; else its end.
fn story(plan: &Plan, told: Outcomes) -> Vec<String> {
    let mut lines: Vec<String> = told.story.into_iter().filter(|line| !line.contains(" walks past ")).collect();
    if lines.len() > READABLE {
        lines.drain(..lines.len() - READABLE);
        lines.insert(0, "(its end)".to_owned());
    }
    let kinds: Vec<&str> = plan.lanes.iter().map(|lane| lane.kind.name()).collect();
    let (messages, events, orders) = (plan.messages.len(), plan.events.len(), plan.orders.len());
    let memories = plan.memories.len();
    let processes = plan.processes.len();
    let faults = plan.only.as_ref().map_or(0, HashSet::len);
    let head = format!(
        "seed {}: {messages} messages, {events} events, {orders} orders and {memories} memories on {kinds:?}, {processes} processes, {} incidents, {faults} other faults",
        plan.seed,
        plan.incidents.len()
    );
    lines.insert(0, head);
    lines.extend(told.violations);
    lines
}
