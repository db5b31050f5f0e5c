//! Memory of daemons: large buffers stay outside of the heap, and freed memory is returned to the system after a burst of work.
//!
//! glibc keeps freed memory for later allocations. After a list of many objects that is a quarter of an operator's memory.
//! `malloc_trim(3)` returns it. It is called once per pause, so that it costs nothing while the daemon is idle or busy.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

/// Smallest allocation that becomes a mapping of its own (mallopt(3), `M_MMAP_THRESHOLD`). A node has an HTTP/2 session with
/// each guest, and each session has a write buffer of 16 KiB. Most sessions touch only its first page: a mapping takes memory
/// for the touched pages, while the heap keeps its largest size. glibc's default threshold begins at 128 KiB and grows.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES: i32 = 12 << 10;

/// Interval of checks whether the process is busy.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// CPU time within [`POLL_INTERVAL`] that counts as a pause.
const PAUSE: Duration = Duration::from_millis(250);

/// Keeps large buffers out of the heap from now on. For daemons: a short-lived process gains nothing.
#[cfg(target_env = "gnu")]
pub(crate) fn map_large_buffers() {
    #[expect(unsafe_code, reason = "no crate of ours wraps it")]
    // SAFETY: mallopt(3) takes numbers and changes a parameter of malloc(3) under its lock. It is MT-Unsafe init: this is
    // called before there are threads.
    let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES) };
    debug_assert_eq!(is_set, 1, "a threshold that glibc takes");
}

/// Does nothing: other libraries have their own allocation policies.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn map_large_buffers() {}

/// Returns freed memory to the system in pauses of this process, until `stop`.
pub(super) async fn trim_when_idle(stop: CancellationToken) {
    let mut before = cpu();
    let mut given = false;
    while stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
        let now = cpu();
        let pauses = now.saturating_sub(before) < PAUSE;
        if pauses && !given {
            trim();
        }
        (before, given) = (now, pauses);
    }
}

/// Returns the CPU time of this process.
fn cpu() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap_or_default()
}

#[cfg(target_env = "gnu")]
fn trim() {
    #[expect(unsafe_code, reason = "no crate of ours wraps it")]
    // SAFETY: malloc_trim(3) takes a number and is safe to call from any thread (MT-Safe).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Does nothing: other libraries return memory without being asked.
#[cfg(not(target_env = "gnu"))]
fn trim() {}
