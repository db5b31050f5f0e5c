//! Limits of a connection.

use std::time::Duration;

use tokio::time::Instant;

/// Longest time limit. Longer ones count as none, because the sum of an instant and a duration may overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Returns the end of a time limit that begins at `start`.
pub(crate) fn end(start: Instant, time: Duration) -> Instant {
    start + time.min(LONGEST)
}

/// Limits of one connection. `Default` returns those of the kubelet where it has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A connection without a frame in either direction for this time is closed: 4 hours, as `streamingConnectionIdleTimeout`
    /// of the kubelet.
    pub idle: Duration,
    /// Time from the upgrade until all streams of a session exist, and from the first stream of a forwarded connection to the
    /// second: 30 seconds.
    pub stream_creation: Duration,
    /// Time for sending the remaining messages when the server ends a session (stop, idle, protocol error), and for closing the
    /// connection: 10 seconds. Output that a process wrote before its exit has the time of `idle` instead.
    pub last_message: Duration,
    /// Time without a frame from the client after which the server closes a connection whose session has ended: 10 seconds.
    /// Clients ping every 5 seconds. Closing earlier could destroy data that the client has not read yet.
    pub linger: Duration,
    /// Interval of unsolicited pongs to a WebSocket client whose input is blocked: 15 seconds. Its pings are not read
    /// meanwhile, and without a pong it would time out after 60 seconds.
    pub pong: Duration,
    /// Most SPDY streams that are open at the same time; a forwarded connection has two. Further ones are refused.
    pub streams_max: usize,
    /// Most bytes of input that are buffered for each stream. While the buffer is full, the connection is not read.
    pub input_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(4 * 60 * 60),
            stream_creation: Duration::from_secs(30),
            last_message: Duration::from_secs(10),
            linger: Duration::from_secs(10),
            pong: Duration::from_secs(15),
            streams_max: 512,
            input_max: 64 << 10,
        }
    }
}
