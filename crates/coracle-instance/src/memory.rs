//! Memory of the host (proc_meminfo(5)).

/// Returns total and available memory of the host, MiB.
pub fn memory_mib() -> (u64, u64) {
    meminfo(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

/// Parses total and available memory, MiB.
fn meminfo(text: &str) -> (u64, u64) {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .map_or(0, |kib| kib / 1024)
    };
    (field("MemTotal:"), field("MemAvailable:"))
}
