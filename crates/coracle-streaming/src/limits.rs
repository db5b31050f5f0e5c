//! Limits of a connection.

use std::time::Duration;

use tokio::time::Instant;

/// A time limit that is longer is none; the sum of the clock and a duration has a limit of its own.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The end of a time limit that begins at `start`.
pub(crate) fn end(start: Instant, time: Duration) -> Instant {
    start + time.min(LONGEST)
}

/// Limits and time limits of one connection. `Default` has the kubelet's where it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A connection without a frame in either direction for so long is closed: 4 hours, as
    /// `streamingConnectionIdleTimeout` of the kubelet.
    pub idle: Duration,
    /// From the upgrade until all streams of a session exist, and from the first stream of a forwarded connection to its
    /// second: 30 seconds.
    pub stream_creation: Duration,
    /// For what is still to be sent when the server ends a session (stop, idle, protocol error), and for the end of the
    /// connection: 10 seconds. What a process has written before it ended has the time of `idle` instead.
    pub last_message: Duration,
    /// The connection is open until the client closes it, as long as the client sends something so often: 10 seconds.
    /// Clients ping every 5 seconds. Closing before that could destroy what the client has not read yet.
    pub linger: Duration,
    /// Between unrequested pongs to a WebSocket client whose input is blocked, so that its pings, which nothing reads
    /// then, do not run into its limit of 60 seconds: 15 seconds.
    pub pong: Duration,
    /// SPDY streams that may be open at a time; a forwarded connection has two. Further ones are refused.
    pub streams_max: usize,
    /// Bytes of input that are buffered for each stream. When they are full, the connection is not read.
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
