//! Timer of each CPU. A kernel that gets no CPU time from its host while it calibrates the APIC timer (`calibrate_APIC_clock`
//! in `arch/x86/kernel/apic/apic.c`) assumes a lower rate than the actual one, or does not use that timer at all. Then
//! everything that waits for a timer waits too long or forever, including every RCU grace period.

use std::{fs, io};

/// Counts of an emulated APIC per nanosecond, as Linux stores the rate. QEMU's APIC counts nanoseconds (`hw/intc/apic.c`),
/// which Linux divides by 16; Linux shifts the result left by 32 bits.
const COUNTS: u64 = (1 << 32) / 16;

/// Returns the fault of this kernel's timers, if there is one.
#[must_use]
pub fn fault() -> Option<String> {
    let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let is_calibrated = command_line.split_ascii_whitespace().any(|word| word == "lapic=notscdeadline");
    fault_in(&fs::read_to_string("/proc/timer_list").unwrap_or_default(), is_calibrated)
}

/// Like [`fault`], from `/proc/timer_list` (`kernel/time/timer_list.c`). The rate of a timer is known if the kernel had to
/// calibrate it. Pure.
fn fault_in(timer_list: &str, is_calibrated: bool) -> Option<String> {
    timer_list.split("Per CPU device:").skip(1).find_map(|processor| {
        let value = |name: &str| {
            processor.lines().find_map(|line| line.trim_start().strip_prefix(name)).map_or("", str::trim)
        };
        match value("Clock Event Device:") {
            "<NULL>" => Some("the kernel could not calibrate its timer and has none".to_owned()),
            "lapic" if is_calibrated => {
                let counts: u64 = value("mult:").parse().ok()?;
                let is_near = (COUNTS / 2..=COUNTS * 2).contains(&counts);
                let permille = counts.saturating_mul(1000) / COUNTS;
                (!is_near).then(|| format!("the kernel takes {permille} ‰ for the rate of its timer"))
            }
            _ => None,
        }
    })
}

/// Whether this kernel uses the interval timer of a PC (i8254) as the timer of a CPU, or of all CPUs.
///
/// # Errors
/// When `/proc/timer_list` cannot be read.
pub fn is_interval_timer_used() -> io::Result<bool> {
    Ok(uses_interval_timer(&fs::read_to_string("/proc/timer_list")?))
}

/// Like [`is_interval_timer_used`], from `/proc/timer_list` (`kernel/time/timer_list.c`). Pure.
fn uses_interval_timer(timer_list: &str) -> bool {
    timer_list.lines().any(|line| line.trim() == "Clock Event Device: pit")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "Timer List Version: v0.9\nHRTIMER_MAX_CLOCK_BASES: 8\n\nTick Device: mode:     1\n\
        Broadcast device\nClock Event Device: <NULL>\ntick_broadcast_mask: 0\n\n";

    fn processor(device: &str, mult: u64) -> String {
        format!(
            "Tick Device: mode:     1\nPer CPU device: 0\nClock Event Device: {device}\n \
             max_delta_ns:   34358913796\n min_delta_ns:   1000\n mult:           {mult}\n shift:          32\n"
        )
    }

    #[test]
    fn timer_list_fault_table() {
        let lapic = |mult| processor("lapic", mult);
        for (what, list, is_calibrated, want) in [
            ("no list", String::new(), true, None),
            ("as it should be", lapic(268_441_898), true, None),
            ("of a deadline", processor("lapic-deadline", 5), true, None),
            ("of an unknown rate", lapic(5), false, None),
            ("none", processor("<NULL>", 0), false, Some("has none")),
            ("half of what is least", lapic(COUNTS / 4), true, Some("250 ‰")),
            ("too fast", lapic(COUNTS * 3), true, Some("3000 ‰")),
            ("the second", lapic(COUNTS) + &processor("<NULL>", 0), true, Some("has none")),
        ] {
            let found = fault_in(&format!("{HEAD}{list}"), is_calibrated);
            match (&found, want) {
                (None, None) => {}
                (Some(found), Some(want)) => assert!(found.contains(want), "{what}: {found}"),
                _ => panic!("{what}: {found:?}"),
            }
        }
    }

    #[test]
    fn interval_timer_of_any_processor_is_used() {
        let broadcast = |device: &str| format!("Broadcast device\nClock Event Device: {device}\n");
        let processor =
            |device: &str| format!("Per CPU device: 0\nClock Event Device: {device}\n max_delta_ns: 1\n");
        for (list, used) in [
            (broadcast("<NULL>") + &processor("lapic"), false),
            (broadcast("pit") + &processor("lapic"), true),
            (broadcast("<NULL>") + &processor("lapic") + &processor("pit"), true),
        ] {
            assert_eq!(uses_interval_timer(&list), used, "{list}");
        }
    }
}
