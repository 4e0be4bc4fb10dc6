//! A seeded simulator: the real worker core and the real SQLite store (in memory) under a scheduler that owns time.
//!
//! A [`Plan`] follows from its seed: processes, lanes, messages, and what goes wrong when. The [world](world) runs it; after
//! every step the [checker](checker) compares what the database changed, told by triggers, with its own record of what may
//! change. From some moment on nothing goes wrong any more, and everything must come to its end within a time that follows
//! from the configuration. The same seed gives the same trace. A plan that fails is [shrunk](shrink) to a story that a person
//! can read.

mod campaign;
mod carrying;
mod checker;
mod delivering;
mod dice;
mod journal;
mod marks;
mod operators;
mod parts;
mod plan;
mod processes;
mod producers;
mod shrink;
mod store;
mod world;

pub use campaign::{Campaign, Failure};
pub use marks::SOMETIMES;
pub use plan::{EventPlan, Incident, LaneKind, LanePlan, Plan, Planned, SubscriptionPlan, What};
pub use shrink::{Shrunk, shrink};
pub use world::{Outcomes, run};
