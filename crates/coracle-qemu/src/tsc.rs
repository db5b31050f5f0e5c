//! Rate of the host's time-stamp counter, measured once.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Number of readings, of which the best is taken.
#[cfg(target_arch = "x86_64")]
const READINGS: usize = 16;

/// Returns the rate in kHz. The first call takes 20 ms, later ones are immediate.
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
    // A thread may lose its CPU between reading the two clocks, so the reading with the smallest gap is taken.
    let reading = || {
        let read = || {
            let (before, time, after) = (counter(), Instant::now(), counter());
            (after.wrapping_sub(before), time, before)
        };
        let tightest = (0..READINGS).map(|_| read()).min_by_key(|(width, ..)| *width);
        tightest.map_or_else(|| (Instant::now(), counter()), |(_, time, count)| (time, count))
    };
    let (began, from) = reading();
    std::thread::sleep(over);
    let (ended, to) = reading();
    let ticks = u128::from(to.wrapping_sub(from));
    u64::try_from(ticks * 1_000_000 / ended.duration_since(began).as_nanos().max(1)).unwrap_or(0)
}

#[cfg(not(target_arch = "x86_64"))]
fn measure(_over: Duration) -> u64 {
    0
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn tsc_measurements_agree_within_one_percent() {
        let measure = || super::measure(std::time::Duration::from_millis(20));
        let (a, b) = (measure(), measure());
        assert!(a.abs_diff(b) < a / 100, "{a} and {b} kHz differ by more than 1 %");
    }
}
