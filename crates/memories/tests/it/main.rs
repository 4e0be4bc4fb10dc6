//! Memories on all three databases: real stores, a real socket to an OpenMemory that behaves as it is told.

// Tests wait for real servers.
#![allow(clippy::disallowed_methods)]

mod examining;
mod flushing;
mod harness;
mod openmemory;
mod recognising;
mod storing;
mod sweep;
