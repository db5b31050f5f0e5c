//! Description of a start that does not complete, read from /proc for a host that cannot look into the guest.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Maximum length of the description, bytes.
const TEXT_MAX: usize = 1500;

/// Describes the agent's threads, and its children that have not executed their program: state, and location in the kernel.
#[must_use]
pub fn describe() -> String {
    let mut text = format!("timer interrupts {}", timer_interrupts());
    let own = fs::read_link("/proc/self/exe").ok();
    let has_ours = |of: &Path| fs::read_link(of.join("exe")).ok() == own;
    let me = std::process::id().to_string();
    let threads = entries("/proc/self/task").into_iter();
    let children = entries("/proc").into_iter().filter(|of| has_ours(of) && !of.ends_with(&me));
    for of in threads.chain(children) {
        let read = |name: &str| fs::read_to_string(of.join(name)).unwrap_or_default();
        let status = read("status");
        let state = status.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or_default().trim();
        let frames = read("stack").lines().map(frame).collect::<Vec<_>>().join("<");
        let pid = of.file_name().unwrap_or_default().display().to_string();
        let _ = write!(text, "; {pid} {} {state} {frames}", read("comm").trim());
    }
    text.truncate(text.floor_char_boundary(TEXT_MAX));
    text
}

/// Returns the function of a line like `[<0>] do_wait+0x60/0x110`.
fn frame(line: &str) -> &str {
    line.split_whitespace().last().unwrap_or_default().split('+').next().unwrap_or_default()
}

/// Returns the number of local timer interrupts of each CPU: two descriptions with the same numbers show a dead timer.
fn timer_interrupts() -> String {
    let all = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let line = all.lines().find_map(|line| line.trim_start().strip_prefix("LOC:")).unwrap_or_default();
    line.split_whitespace().take_while(|word| word.parse::<u64>().is_ok()).collect::<Vec<_>>().join(",")
}

/// Returns the entries of a directory of /proc that are numbers.
fn entries(dir: &str) -> Vec<std::path::PathBuf> {
    let is_number =
        |path: &Path| path.file_name().is_some_and(|n| n.to_string_lossy().parse::<u32>().is_ok());
    let all = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    all.filter(|path| is_number(path)).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn threads_are_described_with_their_state() {
        let text = super::describe();
        assert!(text.contains(&format!("; {} ", rustix::thread::gettid().as_raw_nonzero())), "{text}");
        assert!(text.contains(" S (sleeping)") || text.contains(" R (running)"), "{text}");
        assert_eq!(super::frame("[<0>] do_wait+0x60/0x110"), "do_wait");
    }
}
