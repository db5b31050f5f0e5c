//! Messages on the guest's console, bounded in length and rate. They never block: a host that does not read the serial port
//! must not stop PID 1.

use std::fmt::Arguments;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, OnceLock};

use rustix::fs::{Mode, OFlags};

/// Maximum length of a message, bytes; the rest is cut.
const LINE_MAX: usize = 400;
/// Maximum burst of messages.
const BURST: u32 = 64;
/// Time after which one more message is allowed, milliseconds.
const REFILL_MS: u64 = 250;

static CONSOLE: OnceLock<Console> = OnceLock::new();

struct Console {
    fd: OwnedFd,
    budget: Mutex<Budget>,
}

/// Opens the console. Before that, and on a host, messages are dropped.
pub(crate) fn open() {
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::open("/dev/console", flags, Mode::empty()) {
        let _ = CONSOLE.set(Console { fd, budget: Mutex::new(Budget { left: BURST, refilled_ms: 0 }) });
    }
}

/// Writes one line, if the rate limit permits.
pub(crate) fn log(message: Arguments<'_>) {
    let Some(console) = CONSOLE.get() else { return };
    let allowed = console.budget.lock().is_ok_and(|mut budget| budget.take(crate::sys::uptime_ms()));
    if allowed {
        let _ = rustix::io::write(&console.fd, &line(&message.to_string()));
    }
}

macro_rules! say {
    ($($arg:tt)*) => { $crate::console::log(format_args!($($arg)*)) };
}
pub(crate) use say;

/// Sanitises a line: names and paths that processes of the guest chose must not control the reader's terminal.
fn line(message: &str) -> Vec<u8> {
    let mut line = b"coracle-guest: ".to_vec();
    line.extend(message.bytes().take(LINE_MAX).map(|b| if (b' '..=b'~').contains(&b) { b } else { b'?' }));
    line.extend(b"\r\n");
    line
}

struct Budget {
    left: u32,
    refilled_ms: u64,
}

impl Budget {
    fn take(&mut self, now_ms: u64) -> bool {
        let due = now_ms.saturating_sub(self.refilled_ms) / REFILL_MS;
        if due > 0 {
            self.left = self.left.saturating_add(u32::try_from(due).unwrap_or(BURST)).min(BURST);
            self.refilled_ms = now_ms;
        }
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn console_budget_allows_a_burst_then_a_rate() {
        let mut budget = Budget { left: BURST, refilled_ms: 0 };
        assert_eq!((0..1000).filter(|_| budget.take(1)).count(), BURST as usize);
        assert_eq!((0..1000).filter(|_| budget.take(1 + 4 * REFILL_MS)).count(), 4);
    }

    #[test]
    fn console_line_is_bounded_and_printable() {
        let line = line(&format!("\x1b[2J{}", "x".repeat(10_000)));
        assert!(line.len() < LINE_MAX + 32);
        assert!(!line.contains(&0x1b));
    }
}
