//! The parts of the product that live in the world beside the worker: their real decisions and their real SQL.

pub mod memories;
pub mod openmemory;
pub mod orders;
pub mod sagas;
pub mod webhooks;
