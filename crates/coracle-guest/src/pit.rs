//! Interval timer of a PC (i8254). A kernel with better timers leaves it in its reset state.

use std::fs;
use std::io;

use crate::sys;

/// Stops the timer if the kernel does not use it, because its 36 edges per second wake up the VMM. Later versions of Linux stop
/// it themselves (`clockevent_i8253_disable` in `drivers/clocksource/i8253.c`). Idempotent.
///
/// # Errors
/// When the kernel refuses access to the ports.
pub(crate) fn stop_unused() -> io::Result<()> {
    match is_used(&fs::read_to_string("/proc/timer_list")?) {
        true => Ok(()),
        false => sys::stop_interval_timer(),
    }
}

/// Whether `/proc/timer_list` (`kernel/time/timer_list.c`) has it as the timer of a CPU, or of all CPUs. Pure.
fn is_used(timer_list: &str) -> bool {
    timer_list.lines().any(|line| line.trim() == "Clock Event Device: pit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timer_of_any_processor_is_used() {
        let broadcast = |device: &str| format!("Broadcast device\nClock Event Device: {device}\n");
        let processor =
            |device: &str| format!("Per CPU device: 0\nClock Event Device: {device}\n max_delta_ns: 1\n");
        for (list, used) in [
            (broadcast("<NULL>") + &processor("lapic"), false),
            (broadcast("pit") + &processor("lapic"), true),
            (broadcast("<NULL>") + &processor("lapic") + &processor("pit"), true),
        ] {
            assert_eq!(is_used(&list), used, "{list}");
        }
    }
}
