//! The kernel's integration tests, one binary. Most of them are the conformance suite: the promises P1…P12, each case
//! written once and run on SQLite, PostgreSQL and MariaDB.

// Tests wait for real servers.
#![allow(clippy::disallowed_methods)]

mod harness;

mod alerts;
mod caller_transactions;
mod callers;
mod claiming;
mod crashing;
mod differential;
mod enqueueing;
mod examples;
mod explain;
#[cfg(feature = "http")]
mod http_courier;
mod inbox;
mod looking;
mod lost_replies;
mod operating;
mod others;
mod protocol;
mod schema;
mod settling;
mod sql_docs;
mod sqlite_rollback;
mod troubles;
