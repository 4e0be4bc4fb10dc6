//! The protocols as models: every order in which messages, losses, pauses and crashes can follow each other is looked
//! through, within bounds that each model tells. The lease's rules are the product's own functions; what is a transaction
//! there is a step, or several, here. Each model takes a [`Broken`](lease::Broken) variant of itself: the checker must see it.

pub mod gates;
pub mod lease;
pub mod memories;

use stateright::{Checker, HasDiscoveries, Model};

/// What looking through a model brought.
#[derive(Debug)]
pub struct Looked {
    /// Different states that were seen.
    pub states: usize,
    /// The properties that do not hold, each with the way there.
    pub violated: Vec<(&'static str, String)>,
    /// What never happened, although it should be possible.
    pub never: Vec<&'static str>,
}

/// Looks through all of a model; one that is known to be broken only until something is found.
pub fn look_through<M>(model: M, is_broken: bool) -> Looked
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + PartialEq + Send + Sync,
    M::Action: Clone + std::fmt::Debug + PartialEq + Send + Sync,
{
    let properties = model.properties();
    // The shortest way to a fault is a story; all there is fits into memory only depth first.
    let builder = model.checker().threads(2);
    let (states, found) = if is_broken {
        let checker = builder.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
        (checker.unique_state_count(), checker.discoveries())
    } else {
        let checker = builder.finish_when(HasDiscoveries::All).spawn_dfs().join();
        (checker.unique_state_count(), checker.discoveries())
    };
    let (mut violated, mut never) = (vec![], vec![]);
    for property in properties {
        let path = found.get(property.name);
        match property.expectation {
            stateright::Expectation::Sometimes if path.is_none() => never.push(property.name),
            stateright::Expectation::Sometimes => {}
            _ => violated.extend(path.map(|path| {
                let steps: Vec<String> = path.clone().into_actions().iter().map(|step| format!("{step:?}")).collect();
                (property.name, steps.join("\n"))
            })),
        }
    }
    Looked { states, violated, never }
}
