//! What a daemon keeps of its memory: large buffers are not part of the heap, and memory goes back to the system when a
//! burst of work is over.
//!
//! glibc keeps what was freed for the next allocation, and after a list of many objects that is a quarter of an operator's
//! memory. `malloc_trim(3)` returns it. It is called once in each pause of work, so that it costs nothing at rest and
//! nothing under load.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

/// Allocations of so many bytes and more are mappings of their own (mallopt(3), `M_MMAP_THRESHOLD`). A node has an HTTP/2
/// session with each guest, and each session a write buffer of 16 KiB, of which most touch the first page: a mapping has
/// memory for what was touched, the heap for all that was ever used. glibc's own threshold begins at 128 KiB and grows.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES: i32 = 12 << 10;

/// How often it is seen whether the process works.
const LOOK: Duration = Duration::from_secs(5);
/// CPU time within [`LOOK`] that counts as a pause.
const PAUSE: Duration = Duration::from_millis(250);

/// Keeps large buffers out of the heap from here on. For daemons: a process that works for a moment gains nothing.
#[cfg(target_env = "gnu")]
pub(crate) fn map_large_buffers() {
    #[expect(unsafe_code, reason = "no crate of ours wraps it")]
    // SAFETY: it takes numbers, and changes a parameter of malloc(3) under its lock (mallopt(3), MT-Unsafe init: before
    // there are threads).
    let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES) };
    debug_assert_eq!(is_set, 1, "a threshold that glibc takes");
}

/// Other libraries have rules of their own.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn map_large_buffers() {}

/// Watches this process until `stop`.
pub(super) async fn give_back(stop: CancellationToken) {
    let mut before = cpu();
    let mut given = false;
    while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
        let now = cpu();
        let pauses = now.saturating_sub(before) < PAUSE;
        if pauses && !given {
            trim();
        }
        (before, given) = (now, pauses);
    }
}

/// CPU time of this process.
fn cpu() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap_or_default()
}

#[cfg(target_env = "gnu")]
fn trim() {
    #[expect(unsafe_code, reason = "no crate of ours wraps it")]
    // SAFETY: it takes a number, and is safe to call from any thread (malloc_trim(3), MT-Safe).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Other libraries return memory by themselves.
#[cfg(not(target_env = "gnu"))]
fn trim() {}
