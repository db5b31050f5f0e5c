//! Wall clock of the process in the type that Kubernetes objects use.

use coracle_types::Clock;
use jiff::Timestamp;

/// [`Clock`] as a [`Timestamp`]. Timers use tokio's clock instead, which tests pause.
pub trait WallTime {
    /// Reads the clock, with a resolution of one millisecond.
    fn timestamp(&self) -> Timestamp;
}

impl WallTime for Clock {
    fn timestamp(&self) -> Timestamp {
        Timestamp::from_millisecond(self.now().0).unwrap_or(Timestamp::UNIX_EPOCH)
    }
}
