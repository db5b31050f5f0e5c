//! Interval timer of a PC (i8254). A kernel with better timers leaves it in its reset state.

use std::io;

use crate::sys;

/// Stops the timer if the kernel does not use it, because its 36 edges per second wake up the VMM. Later versions of Linux stop
/// it themselves (`clockevent_i8253_disable` in `drivers/clocksource/i8253.c`). Idempotent.
///
/// # Errors
/// When the kernel refuses access to the ports.
pub(crate) fn stop_unused() -> io::Result<()> {
    if coracle_procfs::timer::is_interval_timer_used()? { Ok(()) } else { sys::stop_interval_timer() }
}
