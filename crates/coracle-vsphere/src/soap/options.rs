//! Timeouts and limits of the client.

use std::time::Duration;

/// Timeouts and limits of the client.
#[derive(Clone, Debug)]
pub struct SoapOptions {
    /// Time limit for TCP connect and TLS handshake.
    pub connect: Duration,
    /// Deadline of a call; long polls have deadlines of their own.
    pub call: Duration,
    /// Time after which an awaited task is read by a separate call.
    pub task_check: Duration,
    /// Longest wait for a task. The task continues and can be awaited again.
    pub task: Duration,
    /// Time after which an unused connection is closed.
    pub idle: Duration,
    /// Most concurrent calls, not counting long polls.
    pub calls_max: usize,
    /// Pause after a refused login, because vCenter locks accounts.
    pub auth_hold: Duration,
    /// Longest time that the server waits for updates in one long poll.
    pub wait: Duration,
    /// Pause between two long polls for VMs, so that updates close together need one call.
    pub coalesce: Duration,
    /// Interval of the calls that keep an idle session open.
    pub keep_alive: Duration,
    /// Time without progress after which an upload is given up.
    pub upload_idle: Duration,
}

impl Default for SoapOptions {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            call: Duration::from_secs(120),
            task_check: Duration::from_secs(15),
            task: Duration::from_secs(120),
            idle: Duration::from_secs(60),
            calls_max: 16,
            auth_hold: Duration::from_secs(300),
            wait: Duration::from_secs(60),
            coalesce: Duration::from_millis(1000),
            keep_alive: Duration::from_secs(300),
            upload_idle: Duration::from_secs(60),
        }
    }
}
