//! `cargo xtask bench market`: measures the engine alone, then the service over its network API from this other process. Prints
//! one line of JSON per figure on stdout, and everything else on stderr.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark reports by panicking")]

mod engine;
#[path = "../../tests/server/mod.rs"]
mod process;
mod server;
mod service;
mod streams;

use std::io::Write;

/// Prints one figure, or `why` if there is no value.
fn figure(name: &str, value: Option<f64>, unit: &str, why: &str) {
    let value = value.map_or_else(|| format!("null,\"why\":\"{why}\""), |value| format!("{value:.3}"));
    let line =
        format!("{{\"bench\":\"market\",\"figure\":\"{name}\",\"value\":{value},\"unit\":\"{unit}\"}}");
    writeln!(std::io::stdout().lock(), "{line}").unwrap();
}

fn main() {
    // This process is the child of `server::Served`.
    if process::serve_if_asked() {
        return;
    }
    // `cargo test` and `cargo bench` pass their own flags.
    let short = std::env::args().any(|arg| arg == "--test");
    // `--part=engine`, `service` or `streams` measures only that part.
    let asked = std::env::args().find_map(|arg| arg.strip_prefix("--part=").map(str::to_owned));
    let part = |name: &str| asked.as_deref().is_none_or(|asked| asked == name);
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    eprintln!("market: {cores} cores, load {}", load.trim());
    if part("engine") {
        measure_engine(short);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let published = if short { 2 } else { 20 };
    if part("service") {
        runtime.block_on(measure_service(short, published));
    }
    if part("streams") {
        runtime.block_on(measure_streams(short, published));
    }
}

/// Measures the engine in this process.
fn measure_engine(short: bool) {
    let (open, calls, rounds) = if short { (10_000, 20, 20) } else { (1_000_000, 10_000, 200) };
    // `--calls=N` for a short run; the goal applies to 10 000 calls.
    let asked = std::env::args().find_map(|arg| arg.strip_prefix("--calls=").and_then(|n| n.parse().ok()));
    let calls = asked.unwrap_or(calls);
    eprintln!("calls in the engine, goal: p99 at most 2 ms with at most 1000 preempted");
    let held = engine::calls(open, calls);
    let fair = held.preempted <= 1000;
    figure("market.call_p99_ms", fair.then_some(held.wall_ms), "ms", "a call preempted more than 1000");
    figure("market.call_p99_core_ms", fair.then_some(held.cpu_ms), "ms", "a call preempted more than 1000");
    let (markets, bids) = if short { (10, 100) } else { (1_000, 1_000) };
    eprintln!("a round of calls over {markets} markets of {bids} bids, goal: at most 250 ms");
    figure("market.round_ms", Some(engine::round_of_markets(markets, bids)), "ms", "");

    eprintln!("replay of a journal, goal: at least 1000000 a second");
    let replayed = engine::replay(open, rounds);
    let why = "the replay led to another state";
    figure("market.replay_per_s", replayed.as_ref().map(|r| r.wall), "1/s", why);
    figure("market.replay_per_core_s", replayed.as_ref().map(|r| r.cpu), "1/s", why);
}

/// Measures the service from another process.
async fn measure_service(short: bool, published: usize) {
    let (open, seconds) = if short { (10_000, 1) } else { (1_000_000, 10) };
    eprintln!(
        "goals: at least 20000 a second single, 150000 in batches of 512, p99 at half load at most 10 ms;"
    );
    eprintln!("at most 300 MiB; a call at its readers within 20 ms; a restart within 5 s");
    let outcome = service::run(open, seconds, published).await;
    let why = outcome.why.as_str();
    figure("market.intake_single_per_s", outcome.single, "1/s", why);
    figure("market.intake_half_p99_ms", outcome.half_p99_ms, "ms", "no call");
    figure("market.intake_batch_per_s", outcome.batched, "1/s", why);
    figure("market.open_1m_rss_mib", Some(outcome.full.rss_mib), "MiB", "");
    figure("market.call_published_p99_ms", outcome.full.published_p99_ms, "ms", "no call");
    figure("market.restart_s", Some(outcome.full.restart_s), "s", "");
}

/// Measures the readers of streams.
async fn measure_streams(short: bool, published: usize) {
    eprintln!("from a bid to its match with free units, goal: p99 at most 5 ms");
    let bids = if short { 50 } else { 5_000 };
    figure("market.match_p99_ms", streams::matches(bids).await, "ms", "no match");
    let readers = if short { 100 } else { 10_000 };
    eprintln!("prices to {readers} readers, goal on 4 cores: p99 at most 250 ms");
    figure("market.stream_p99_ms", streams::many_readers(readers, published).await, "ms", "no price");
}
