//! Postrider's proving ground: what the tests and benchmarks need around the product, and never inside it.

pub mod browser;
pub mod crowd;
pub mod kit;
pub mod receiver;
pub mod servers;
pub mod simulator;
pub mod watched;
