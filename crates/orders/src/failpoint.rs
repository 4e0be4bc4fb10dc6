//! Ends the process at a named place, as a power cut would, when `POSTRIDER_FAILPOINT` names it. For tests: release builds
//! have none of it.

#[cfg(debug_assertions)]
pub(crate) fn reach(place: &str) {
    use std::sync::OnceLock;
    static WANTED: OnceLock<Option<String>> = OnceLock::new();
    if WANTED.get_or_init(|| std::env::var("POSTRIDER_FAILPOINT").ok()).as_deref() == Some(place) {
        std::process::abort();
    }
}

#[cfg(not(debug_assertions))]
pub(crate) fn reach(_place: &str) {}
