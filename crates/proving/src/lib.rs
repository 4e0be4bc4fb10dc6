//! Postrider's proving ground: what the tests and benchmarks need around the product, and never inside it.

pub mod browser;
pub mod crowd;
pub mod history;
pub mod kit;
pub mod proxy;
pub mod receiver;
pub mod servers;
pub mod sweep;
pub mod watched;
