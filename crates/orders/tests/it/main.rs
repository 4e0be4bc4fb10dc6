//! Orders on all three databases: real stores, a broker that does as it is told.

// Tests wait for real servers.
#![allow(clippy::disallowed_methods)]

mod brokers;
mod doubting;
mod examining;
mod guarding;
mod harness;
mod looking;
mod sweep;
mod taking;
mod working;
