//! The only place that reads the world: the host's clocks and its entropy.
//!
//! Everything else takes time and chance as arguments. The database's clock decides what is due; the host's clock here
//! only measures how long ago something was asked for, and on SQLite the host *is* the database.
#![allow(clippy::disallowed_methods)]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::time::Timestamp;

/// Wall-clock time of this host. Used as database time by SQLite only.
pub fn wall() -> Timestamp {
    #[cfg(feature = "simulation")]
    if let Some(clock) = simulated::current() {
        return clock.wall();
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_micros(since.as_micros() as i64)
}

/// A point on the host's boot-time clock, which keeps running while the machine is suspended: a lease that ran out during
/// a suspend is seen to have run out. (`std::time::Instant` stops on Linux.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tick(u64);

impl Tick {
    #[cfg(unix)]
    pub fn now() -> Tick {
        #[cfg(feature = "simulation")]
        if let Some(clock) = simulated::current() {
            return clock.tick();
        }
        #[cfg(any(target_os = "linux", target_os = "android", target_os = "fuchsia", target_os = "openbsd"))]
        let clock = rustix::time::ClockId::Boottime;
        // macOS counts the time asleep in its monotonic clock; the others have no better one.
        #[cfg(not(any(target_os = "linux", target_os = "android", target_os = "fuchsia", target_os = "openbsd")))]
        let clock = rustix::time::ClockId::Monotonic;
        let t = rustix::time::clock_gettime(clock);
        Tick(t.tv_sec as u64 * 1_000_000 + t.tv_nsec as u64 / 1000)
    }

    /// Windows counts the time asleep in `Instant`.
    #[cfg(not(unix))]
    pub fn now() -> Tick {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        let start = START.get_or_init(std::time::Instant::now);
        Tick::default().plus(Duration::from_secs(1) + start.elapsed())
    }

    pub const fn from_micros(micros: u64) -> Tick {
        Tick(micros)
    }

    pub const fn micros(self) -> u64 {
        self.0
    }

    pub fn plus(self, duration: Duration) -> Tick {
        Tick(self.0.saturating_add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)))
    }

    /// Time from `earlier` until this tick; zero when it lies before.
    pub fn since(self, earlier: Tick) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// Longest name before the incarnation, in bytes: `locked_by` takes 255 in all.
const MAX_NAME_BYTES: usize = 200;

/// A name no other worker process ever has: `hostname:pid:incarnation`. The incarnation is random, because a restarted
/// process may get the same pid.
pub fn incarnation(name: Option<&str>) -> String {
    #[cfg(unix)]
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let host = std::env::var("COMPUTERNAME").unwrap_or_else(|_| "host".to_owned());
    let name =
        name.map_or_else(|| format!("{host}:{}", std::process::id()), |id| format!("{id}:{}", std::process::id()));
    let mut short: String = name.chars().filter(|c| !c.is_control()).take(100).collect();
    while short.len() > MAX_NAME_BYTES {
        short.pop();
    }
    short.push_str(&format!(":{:012x}", fastrand::u64(..) & 0xffff_ffff_ffff));
    short
}

/// A seed for a worker's chances.
pub fn seed() -> u64 {
    #[cfg(feature = "simulation")]
    if let Some(clock) = simulated::current() {
        return clock.seed();
    }
    fastrand::u64(..)
}

/// Waits. In a simulation it is the simulator who says when that is over.
pub async fn sleep(duration: Duration) {
    #[cfg(feature = "simulation")]
    if let Some(clock) = simulated::current() {
        return clock.sleep(duration).await;
    }
    tokio::time::sleep(duration).await;
}

/// A chance in `0.0..1.0`, where nobody needs to repeat it.
pub fn chance() -> f64 {
    #[cfg(feature = "simulation")]
    if let Some(clock) = simulated::current() {
        return clock.chance();
    }
    fastrand::f64()
}

/// For simulators: a thread that entered a clock of theirs lives by it, and by its chances, until it leaves.
#[cfg(feature = "simulation")]
pub mod simulated {
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    use std::sync::{Mutex, PoisonError};
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::{Tick, Timestamp};

    thread_local! {
        static CLOCK: RefCell<Option<Arc<Clock>>> = const { RefCell::new(None) };
    }

    /// Moves only when it is told to.
    #[derive(Debug)]
    pub struct Clock {
        tick: AtomicU64,
        wall: AtomicI64,
        chances: Mutex<fastrand::Rng>,
        sleepers: Mutex<Vec<Sleeper>>,
    }

    /// Somebody who waits until the simulator says that it is over; forever, if it never does.
    #[derive(Debug)]
    pub struct Sleeper {
        pub lasts: Duration,
        pub wake: oneshot::Sender<()>,
    }

    impl Clock {
        pub fn new(seed: u64) -> Arc<Self> {
            let chances = fastrand::Rng::with_seed(seed).into();
            Arc::new(Clock { tick: AtomicU64::new(0), wall: AtomicI64::new(0), chances, sleepers: Mutex::default() })
        }

        pub fn set(&self, tick: Tick, wall: Timestamp) {
            self.tick.store(tick.micros(), Ordering::SeqCst);
            self.wall.store(wall.micros(), Ordering::SeqCst);
        }

        /// This thread lives by it from now on.
        pub fn enter(self: &Arc<Self>) {
            CLOCK.set(Some(self.clone()));
        }

        pub(super) fn tick(&self) -> Tick {
            Tick::from_micros(self.tick.load(Ordering::SeqCst))
        }

        pub(super) fn wall(&self) -> Timestamp {
            Timestamp::from_micros(self.wall.load(Ordering::SeqCst))
        }

        pub(super) fn chance(&self) -> f64 {
            self.chances.lock().unwrap_or_else(PoisonError::into_inner).f64()
        }

        pub(super) fn seed(&self) -> u64 {
            self.chances.lock().unwrap_or_else(PoisonError::into_inner).u64(..)
        }

        pub(super) async fn sleep(&self, lasts: Duration) {
            let (wake, woken) = oneshot::channel();
            self.sleepers.lock().unwrap_or_else(PoisonError::into_inner).push(Sleeper { lasts, wake });
            if woken.await.is_err() {
                std::future::pending::<()>().await;
            }
        }

        /// Who has begun to wait since this was last asked.
        pub fn sleepers(&self) -> Vec<Sleeper> {
            std::mem::take(&mut *self.sleepers.lock().unwrap_or_else(PoisonError::into_inner))
        }
    }

    /// This thread lives by the host's clock again.
    pub fn leave() {
        CLOCK.set(None);
    }

    pub(super) fn current() -> Option<Arc<Clock>> {
        CLOCK.with_borrow(Clone::clone)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::Tick;

    /// Seen from below a machine that has slept for a month since its boot: this test, started there, tells its tick.
    #[test]
    fn a_tick_counts_the_time_asleep() {
        const TELLS: &str = "POSTRIDER_TELLS_ITS_TICK";
        if std::env::var_os(TELLS).is_some() {
            println!("tick {};", Tick::now().micros());
            return;
        }
        let told_below = |words: &[&str]| -> u64 {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).arg(std::env::current_exe().unwrap()).env(TELLS, "1");
            command.args(["--exact", "clock::tests::a_tick_counts_the_time_asleep", "--nocapture"]);
            let told = command.output().unwrap();
            let text = String::from_utf8_lossy(&told.stdout);
            let tick = text.split("tick ").nth(1).and_then(|rest| rest.split(';').next());
            tick.unwrap_or_else(|| panic!("nothing told: {told:?}")).parse().unwrap()
        };
        let asleep = 30 * 24 * 3600;
        let there = told_below(&["unshare", "--time", "--boottime", &asleep.to_string()]);
        let more = (there - told_below(&["env"])) / 1_000_000;
        assert!(more.abs_diff(asleep) < 60, "{more} s more than here");
    }
}
