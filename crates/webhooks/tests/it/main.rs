//! Webhooks on all three databases: real stores, real sockets.

// Tests wait for real servers.
#![allow(clippy::disallowed_methods)]

mod beside;
mod delivering;
mod explain;
mod fleet;
mod harness;
mod hostile;
mod looking;
mod orchestrating;
mod publishing;
mod receiver;
mod roles;
mod saga;
mod subscribing;
mod sweep;
