//! Orders on all three databases: real stores, a broker that does as it is told.

// Tests wait for real servers.
#![allow(clippy::disallowed_methods)]

mod brokers;
mod doubting;
mod examining;
mod guarding;
mod harness;
mod looking;
#[path = "../../../outbox/tests/it/scratch.rs"]
mod scratch;
mod taking;
mod working;
