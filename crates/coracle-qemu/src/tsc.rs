//! The rate of the host's time-stamp counter, measured once.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Rate in kHz. The first call takes 20 ms, later ones nothing.
pub(crate) fn khz() -> u64 {
    static RATE: OnceLock<u64> = OnceLock::new();
    *RATE.get_or_init(|| measure(Duration::from_millis(20)))
}

#[cfg(target_arch = "x86_64")]
fn measure(over: Duration) -> u64 {
    let counter = || {
        // SAFETY: RDTSC has no operands and no effect; Linux leaves it enabled for user space.
        #[allow(unsafe_code, reason = "one instruction that has no safe wrapper")]
        unsafe {
            std::arch::x86_64::_rdtsc()
        }
    };
    let (time, from) = (Instant::now(), counter());
    std::thread::sleep(over);
    let (elapsed, to) = (time.elapsed(), counter());
    let ticks = u128::from(to.wrapping_sub(from));
    u64::try_from(ticks * 1_000_000 / elapsed.as_nanos().max(1)).unwrap_or(0)
}

#[cfg(not(target_arch = "x86_64"))]
fn measure(_over: Duration) -> u64 {
    0
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn two_measurements_agree() {
        let measure = || super::measure(std::time::Duration::from_millis(20));
        let (a, b) = (measure(), measure());
        assert!(a.abs_diff(b) < a / 100, "{a} and {b} kHz differ by more than 1 %");
    }
}
