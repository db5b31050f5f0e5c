//! Wall-clock time as a value that is passed in.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970, UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub i64);

impl UnixMillis {
    /// Returns the time from `earlier` to `self`; zero when it is not earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// Returns whole seconds since 1970.
    #[must_use]
    pub fn seconds(self) -> i64 {
        self.0.div_euclid(1000)
    }
}

/// Wall clock of a process: the system's, or one that a test controls. Clones show the same time.
#[derive(Clone)]
pub struct Clock(Source);

#[derive(Clone)]
enum Source {
    System,
    Fixed(Arc<AtomicI64>),
    Derived(Arc<dyn Fn() -> UnixMillis + Send + Sync>),
}

impl Clock {
    /// Returns the clock of the host.
    #[must_use]
    pub fn system() -> Self {
        Self(Source::System)
    }

    /// Returns a clock that shows `at` until [`Clock::advance`] moves it.
    #[must_use]
    pub fn fixed(at: UnixMillis) -> Self {
        Self(Source::Fixed(Arc::new(AtomicI64::new(at.0))))
    }

    /// Returns a clock that calls `read` for the time. Simulations derive it from the clock of their timers.
    #[must_use]
    pub fn derived(read: impl Fn() -> UnixMillis + Send + Sync + 'static) -> Self {
        Self(Source::Derived(Arc::new(read)))
    }

    /// Reads the clock.
    #[must_use]
    pub fn now(&self) -> UnixMillis {
        match &self.0 {
            #[expect(clippy::disallowed_methods, reason = "the only place that reads the wall clock")]
            Source::System => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                UnixMillis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
            }
            Source::Fixed(at) => UnixMillis(at.load(Ordering::Relaxed)),
            Source::Derived(read) => read(),
        }
    }

    /// Moves a fixed clock forward; has no effect on others.
    pub fn advance(&self, by: Duration) {
        if let Source::Fixed(at) = &self.0 {
            at.fetch_add(i64::try_from(by.as_millis()).unwrap_or(i64::MAX), Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Source::System => "Clock(system)",
            Source::Fixed(_) => "Clock(fixed)",
            Source::Derived(_) => "Clock(derived)",
        })
    }
}
