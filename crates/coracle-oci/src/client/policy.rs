//! Request settings of a transfer: operation, time limits, retries.

use std::time::Duration;

/// Purpose of a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reading.
    Pull,
    /// Reading and writing.
    Push,
}

/// Time limits of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Limit for opening a connection. Default 10 s.
    pub connect: Duration,
    /// Limit between two reads. Default 30 s.
    pub read_idle: Duration,
    /// Limit for a whole request of a manifest or token. Default 60 s.
    pub request: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            read_idle: Duration::from_secs(30),
            request: Duration::from_secs(60),
        }
    }
}

/// Time limits and retries of a session.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    /// Time limits of each request.
    pub timeouts: Timeouts,
    /// Number of retries after a transient failure.
    pub retries: usize,
}
