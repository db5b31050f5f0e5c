//! Tests of the auction: invariants over random histories, and worked examples.

mod billing;
mod clearing;
mod examples;
mod history;
mod oracle;
mod supply;
mod world;

use proptest::test_runner::{Config, RngSeed};

/// At least 100 000 cases per invariant; `PROPTEST_CASES` can request more.
fn cases() -> Config {
    let more = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let seeded = if more > 0 { RngSeed::Random } else { RngSeed::Fixed(0x00c0_2ac1e) };
    Config {
        cases: more.max(100_000),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        rng_seed: seeded,
        ..Config::default()
    }
}
