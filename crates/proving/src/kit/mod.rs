//! The test kit, one for all crates: cases that run on every database, scratch databases, sessions of strangers, fleets of
//! real processes, readers without pause, and waiting for a condition.

// Real servers and processes take real time.
#![allow(clippy::disallowed_methods)]

pub mod fleet;
pub mod http;
pub mod scratch;
pub mod session;

use std::time::{Duration, Instant};

pub use fleet::Fleet;
pub use http::Pager;
pub use scratch::Scratch;
pub use session::{Session, mysql};

/// Nothing here takes this long unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The doctor reports what has stood for longer than a lease and a poll: for those at the end of a test, a second.
pub const SHORT_LEASE: [(&str, &str); 2] = [("OUTBOX_LOCK_LEASE_SEC", "1"), ("OUTBOX_POLL_INTERVAL_SEC", "0.1")];
/// What is there when the doctor is first asked has stood for long enough to be seen by then.
const SEEN_BY: Duration = Duration::from_millis(1500);

/// The last step of a test with several processes: a doctor with a [`SHORT_LEASE`] is asked until it finds nothing of what
/// was there at first. `ask` answers whether it did, and what it said.
pub fn is_healthy(mut ask: impl FnMut() -> (bool, String)) {
    let begun = Instant::now();
    loop {
        let asked = begun.elapsed();
        let (well, report) = ask();
        if well && asked > SEEN_BY {
            return;
        }
        assert!(asked < PATIENCE, "the doctor: {report}");
        std::thread::sleep(Duration::from_millis(if well { 200 } else { 20 }));
    }
}

/// Writes one `#[tokio::test]` per case and database: `sqlite::case`, `postgres::case`, `mysql::case`. The crate's
/// `harness` has a function for each database that makes what a case gets, and `case`, which runs one.
#[macro_export]
#[allow(clippy::crate_in_macro_def)] // the harness of the crate that uses it
macro_rules! on_every_store {
    ($($case:ident),* $(,)?) => {
        $crate::on_every_store!(@store sqlite $($case)*);
        $crate::on_every_store!(@store postgres $($case)*);
        $crate::on_every_store!(@store mysql $($case)*);
    };
    (@store $store:ident $($case:ident)*) => {
        mod $store {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                crate::harness::case(crate::harness::$store().await, super::$case).await
            })*
        }
    };
}

/// Waits until the condition holds.
pub async fn until(what: &str, holds: impl AsyncFnMut() -> bool) {
    until_within(PATIENCE, what, holds).await;
}

/// The same, for what may take longer.
pub async fn until_within(longest: Duration, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < longest, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The same for tests without a runtime.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
