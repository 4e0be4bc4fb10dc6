//! Postrider's kernel: a transactional outbox with fenced leases on SQLite, PostgreSQL and MySQL/MariaDB.
//!
//! An application writes a message in the transaction that changes its own data ([`Outbox::enqueue_in`]); a [`Worker`]
//! delivers it through a [`Courier`] at least once and records exactly one outcome. Read [`store`] and [`lease`] to know
//! the protocol.

// A build with one store, or with none (then it only enqueues, through sqlx), leaves some helpers unused.
#![cfg_attr(not(all(feature = "sqlite", feature = "postgres", feature = "mysql")), allow(dead_code))]

mod active_keys;
pub mod alerts;
pub mod backoff;
pub mod bulk;
pub mod clock;
pub mod couriers;
pub mod decide;
pub mod doctor;
pub mod enqueue;
pub mod error;
#[doc(hidden)]
pub mod failpoint;
pub mod inbox;
pub mod lanes;
pub mod lease;
pub mod message;
pub mod observe;
pub mod outcome;
pub mod paging;
pub mod permit;
pub mod pulse;
pub mod store;
pub mod stores;
pub mod time;
pub mod tx;
pub mod worker;

mod audit;
mod cold;
mod courier;
mod depths;
mod examine;
mod looking;
mod migrate;
mod outbox;
mod requeue;
mod settle;

pub use courier::{Begin, Courier, FnCourier, courier};
pub use depths::{Age, Counting, Depth};
pub use error::{Error, Result};
pub use inbox::Inbox;
pub use lanes::{LaneRules, Lanes, OnSettled, Winner};
pub use message::{Enqueued, Entry, Message, NewMessage};
pub use migrate::{Migration, Schema, kernel_migrations};
pub use outbox::{OPERATOR, Outbox, Receipt};
pub use outcome::Outcome;
pub use requeue::Died;
pub use stores::{Options, open};
pub use time::Timestamp;
pub use worker::Worker;
