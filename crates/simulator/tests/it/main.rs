//! The simulator's own tests: a short campaign, and seeds that once told of a bug.

mod simulation;
