//! Webhooks over HTTP, a file per thing there is. Wire types live here.

pub mod dead_letters;
pub mod events;
pub mod replays;
pub mod sagas;
pub mod subscriptions;
