//! Ends the process at a named place, as a power cut would. For tests: release builds have none of it.
//!
//! `POSTRIDER_FAILPOINT=place` ends it when that place is reached, `place#3` the third time, `place=stop` suspends it
//! (SIGSTOP) instead. `POSTRIDER_FAILPOINTS=file` adds a line to the file for each place that is reached, once.
//!
//! Every transaction that writes has two places, named after the function it was written in:
//! `postrider::outbox::enqueue/before` its commit, when all statements have run, and `…/after` it, before anybody hears.

#[cfg(debug_assertions)]
mod armed {
    use std::collections::HashSet;
    use std::io::Write;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Mutex, OnceLock, PoisonError};

    /// What the environment asks for.
    struct Orders {
        place: Option<String>,
        time: u32,
        stop: bool,
        book: Option<std::path::PathBuf>,
    }

    static ORDERS: OnceLock<Option<Orders>> = OnceLock::new();
    static REACHED: AtomicU32 = AtomicU32::new(0);
    static WRITTEN: Mutex<Option<HashSet<String>>> = Mutex::new(None);

    fn orders() -> Option<&'static Orders> {
        let read = || {
            let wanted = std::env::var("POSTRIDER_FAILPOINT").ok();
            let book = std::env::var_os("POSTRIDER_FAILPOINTS").map(Into::into);
            if wanted.is_none() && book.is_none() {
                return None;
            }
            let wanted = wanted.unwrap_or_default();
            let (wanted, stop) = wanted.strip_suffix("=stop").map_or((wanted.as_str(), false), |place| (place, true));
            let (place, time) = wanted.split_once('#').unwrap_or((wanted, "1"));
            let place = Some(place.to_owned()).filter(|place| !place.is_empty());
            Some(Orders { place, time: time.parse().unwrap_or(1), stop, book })
        };
        ORDERS.get_or_init(read).as_ref()
    }

    pub fn armed() -> bool {
        orders().is_some()
    }

    pub fn reach(place: &str) {
        let Some(orders) = orders() else { return };
        if let Some(book) = &orders.book {
            write_down(book, place);
        }
        if orders.place.as_deref() != Some(place) || REACHED.fetch_add(1, Ordering::Relaxed) + 1 != orders.time {
            return;
        }
        if !orders.stop {
            std::process::abort();
        }
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
    }

    fn write_down(book: &std::path::Path, place: &str) {
        let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        if written.get_or_insert_default().insert(place.to_owned()) {
            let file = std::fs::OpenOptions::new().append(true).create(true).open(book);
            let _ = file.and_then(|mut file| file.write_all(format!("{place}\n").as_bytes()));
        }
    }
}

/// Does what the environment asks for at this place: usually nothing.
#[inline(always)]
pub fn reach(place: &str) {
    #[cfg(debug_assertions)]
    armed::reach(place);
    #[cfg(not(debug_assertions))]
    let _ = place;
}

/// The two places of a transaction.
#[derive(Clone)]
pub(crate) struct Commit {
    #[cfg(debug_assertions)]
    of: Option<String>,
}

impl Commit {
    /// Of the transaction that runs this closure.
    pub(crate) fn of<F>(writes: bool) -> Commit {
        #[cfg(not(debug_assertions))]
        let _ = writes;
        Commit {
            #[cfg(debug_assertions)]
            of: (writes && armed::armed()).then(|| name_of(std::any::type_name::<F>())),
        }
    }

    pub(crate) fn before(&self) {
        #[cfg(debug_assertions)]
        self.reach("before");
    }

    pub(crate) fn after(&self) {
        #[cfg(debug_assertions)]
        self.reach("after");
    }

    #[cfg(debug_assertions)]
    fn reach(&self, which: &str) {
        if let Some(of) = &self.of {
            reach(&format!("{of}/{which}"));
        }
    }
}

/// The function a closure was written in: `crate::module::function`.
#[cfg(debug_assertions)]
fn name_of(closure: &str) -> String {
    let named = closure.replace("::{{closure}}", "");
    let mut name = String::with_capacity(named.len());
    let mut depth = 0;
    for c in named.chars() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            _ if depth == 0 => name.push(c),
            _ => {}
        }
    }
    name.replace("::::", "::").trim_matches(':').to_owned()
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::name_of;

    #[test]
    fn a_place_is_named_after_its_function() {
        for (closure, name) in [
            ("postrider::outbox::Outbox::enqueue::{{closure}}::{{closure}}", "postrider::outbox::Outbox::enqueue"),
            ("part::gates::<impl part::Part>::open::{{closure}}::{{closure}}", "part::gates::open"),
            ("part::keep<alloc::string::String>::{{closure}}", "part::keep"),
        ] {
            assert_eq!(name_of(closure), name);
        }
    }
}
