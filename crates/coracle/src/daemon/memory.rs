//! Memory goes back to the system when a burst of work is over.
//!
//! glibc keeps what was freed for the next allocation, and after a list of many objects that is a quarter of an operator's
//! memory. `malloc_trim(3)` returns it. It is called once in each pause of work, so that it costs nothing at rest and
//! nothing under load.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

/// How often it is seen whether the process works.
const LOOK: Duration = Duration::from_secs(5);
/// CPU time within [`LOOK`] that counts as a pause.
const PAUSE: Duration = Duration::from_millis(250);

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
