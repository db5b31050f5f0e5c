//! What ends a session from our side: idleness, and the end of the daemon.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::limits;

/// Why a session is ended before its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// Nothing was sent or received for so long.
    Idle(Duration),
    /// The server stops.
    Stop,
}

impl fmt::Display for Interruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle(time) => write!(f, "session ended: connection was idle for {} s", time.as_secs()),
            Self::Stop => f.write_str("session ended: server is stopping"),
        }
    }
}

/// When a frame was last read or written on a connection. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Activity {
    /// Time of the last frame.
    last: Arc<Mutex<Instant>>,
    idle: Duration,
    stop: CancellationToken,
}

impl Activity {
    /// A connection that is interrupted when it was idle for `idle`, and at `stop`.
    pub(crate) fn new(idle: Duration, stop: CancellationToken) -> Self {
        Self { last: Arc::new(Mutex::new(Instant::now())), idle, stop }
    }

    /// A frame was read or written.
    pub(crate) fn touch(&self) {
        *self.last.lock() = Instant::now();
    }

    /// Returns when the session must end. Cancel-safe.
    pub(crate) async fn interrupted(&self) -> Interruption {
        tokio::select! {
            () = self.quiet(self.idle) => Interruption::Idle(self.idle),
            () = self.stop.cancelled() => Interruption::Stop,
        }
    }

    /// Returns when there was no frame for `linger`; that time after a stop, and that of `idle` in all cases. Cancel-safe.
    pub(crate) async fn lingered(&self, linger: Duration) {
        tokio::select! {
            () = self.quiet(linger) => {}
            () = sleep(self.idle) => {}
            () = async { self.stop.cancelled().await; sleep(linger).await } => {}
        }
    }

    async fn quiet(&self, time: Duration) {
        loop {
            let end = limits::end(*self.last.lock(), time);
            if end <= Instant::now() {
                return;
            }
            sleep_until(end).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn idle_timer_restarts_with_each_frame() {
        let (idle, start) = (Duration::from_secs(10), Instant::now());
        let activity = Activity::new(idle, CancellationToken::new());
        let frames = async {
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                activity.touch();
            }
            std::future::pending::<Interruption>().await
        };
        let interruption = tokio::select! {
            interruption = activity.interrupted() => interruption,
            interruption = frames => interruption,
        };
        assert_eq!((interruption, start.elapsed().as_secs()), (Interruption::Idle(idle), 37));
        assert_eq!(interruption.to_string(), "session ended: connection was idle for 10 s");
    }

    #[tokio::test(start_paused = true)]
    async fn stop_interrupts_at_once() {
        let stop = CancellationToken::new();
        let activity = Activity::new(Duration::from_secs(10), stop.clone());
        stop.cancel();
        assert_eq!(activity.interrupted().await, Interruption::Stop);
        let (start, linger) = (Instant::now(), Duration::from_secs(3));
        activity.lingered(linger).await;
        assert_eq!(start.elapsed(), linger);
    }
}
