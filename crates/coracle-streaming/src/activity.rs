//! Server-side reasons to end a session: idleness, and the stop of the server.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::limits;

/// Reason to end a session before its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// No frame was sent or received for this time.
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

/// Time of the last frame of a connection. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Activity {
    /// Time of the last frame.
    last: Arc<Mutex<Instant>>,
    idle: Duration,
    stop: CancellationToken,
}

impl Activity {
    /// Returns the activity of a connection that is interrupted after `idle` without a frame, and at `stop`.
    pub(crate) fn new(idle: Duration, stop: CancellationToken) -> Self {
        Self { last: Arc::new(Mutex::new(Instant::now())), idle, stop }
    }

    /// Records that a frame was read or written.
    pub(crate) fn touch(&self) {
        *self.last.lock() = Instant::now();
    }

    /// Returns when the session must end. Cancel-safe.
    pub(crate) async fn wait_for_interruption(&self) -> Interruption {
        tokio::select! {
            () = self.wait_for_quiet(self.idle) => Interruption::Idle(self.idle),
            () = self.stop.cancelled() => Interruption::Stop,
        }
    }

    /// Returns after `linger` without a frame, `linger` after a stop, or after the idle time at the latest. Cancel-safe.
    pub(crate) async fn linger_until_quiet(&self, linger: Duration) {
        tokio::select! {
            () = self.wait_for_quiet(linger) => {}
            () = sleep(self.idle) => {}
            () = async { self.stop.cancelled().await; sleep(linger).await } => {}
        }
    }

    async fn wait_for_quiet(&self, time: Duration) {
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
            interruption = activity.wait_for_interruption() => interruption,
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
        assert_eq!(activity.wait_for_interruption().await, Interruption::Stop);
        let (start, linger) = (Instant::now(), Duration::from_secs(3));
        activity.linger_until_quiet(linger).await;
        assert_eq!(start.elapsed(), linger);
    }
}
