//! Postrider's proving ground: what the tests and benchmarks need around the product, and never inside it.

pub mod browser;
#[cfg(target_os = "linux")]
pub mod clocks;
pub mod crowd;
#[cfg(target_os = "linux")]
pub mod disk;
pub mod history;
pub mod kit;
pub mod proxy;
pub mod receiver;
pub mod servers;
pub mod sweep;
pub mod watched;
