//! `cargo xtask bench market`: the engine alone, then the service over its network API from this
//! other process. One line of JSON a figure on stdout, everything else on stderr.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark reports by panicking")]

mod engine;
mod service;

use std::io::Write;

/// Prints one figure. Without a value, `why`.
fn figure(name: &str, value: Option<f64>, unit: &str, why: &str) {
    let value = value.map_or_else(|| format!("null,\"why\":\"{why}\""), |value| format!("{value:.3}"));
    let line =
        format!("{{\"bench\":\"market\",\"figure\":\"{name}\",\"value\":{value},\"unit\":\"{unit}\"}}");
    writeln!(std::io::stdout().lock(), "{line}").unwrap();
}

fn main() {
    // `cargo test` and `cargo bench` pass flags of their own.
    let short = std::env::args().any(|arg| arg == "--test");
    let (open, calls, rounds) = if short { (10_000, 20, 20) } else { (1_000_000, 10_000, 200) };
    // `--calls=N` for a short look; the goal is over 10 000.
    let asked = std::env::args().find_map(|arg| arg.strip_prefix("--calls=").and_then(|n| n.parse().ok()));
    let calls = asked.unwrap_or(calls);
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    eprintln!("market: {cores} cores, load {}", load.trim());

    eprintln!("calls in the engine, goal: p99 at most 2 ms with at most 1000 displaced");
    let (p99, most) = engine::call_p99(open, calls);
    figure("market.call_p99_ms", (most <= 1000).then_some(p99), "ms", "a call displaced more than 1000");

    eprintln!("replay of a journal, goal: at least 1000000 a second");
    figure("market.replay_per_s", engine::replay(open, rounds), "1/s", "the replay led to another state");

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let seconds = if short { 1 } else { 10 };
    let outcome = runtime.block_on(service::run(open, seconds));
    let why = outcome.why.as_str();
    eprintln!("goals: at least 20000 a second single, 150000 in batches of 512, at most 300 MiB");
    figure("market.intake_single_per_s", outcome.single, "1/s", why);
    figure("market.intake_batch_per_s", outcome.batched, "1/s", why);
    figure("market.open_1m_rss_mib", outcome.rss_mib, "MiB", why);
}
