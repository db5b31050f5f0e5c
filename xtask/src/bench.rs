//! Benchmarks: release profile, JSON lines on stdout, everything else on stderr.

mod cold;

use std::process::Command;

use anyhow::{Result, bail};

use crate::progress::say;
use crate::setup::Purpose;
use crate::{run, setup};

pub(crate) use cold::Cold;

/// Bench targets of the workspace.
const BENCHES: [&str; 10] =
    ["agentpool", "bidnode", "boot", "clone", "cri", "fleet", "market", "noisy", "registry", "vnode"];

/// Runs the named benchmarks, or all but [`cold::NAME`].
pub(crate) fn run_all(names: &[String], cold: Cold) -> Result<()> {
    let known: Vec<_> = BENCHES.into_iter().chain([cold::NAME]).collect();
    if let Some(unknown) = names.iter().find(|n| !known.contains(&n.as_str())) {
        bail!("benchmark \"{unknown}\" not found; there is: {}", known.join(", "));
    }
    if names.iter().any(|n| n == cold::NAME) {
        cold::run(cold)?;
    }
    if names.iter().all(|n| n == cold::NAME) && !names.is_empty() {
        return Ok(());
    }
    setup::ensure(Purpose::Test)?;
    for name in BENCHES {
        if names.is_empty() || names.iter().any(|n| n == name) {
            say(&format!("bench {name}"));
            // Selects the whole workspace: one crate alone has other features of shared dependencies, and cargo would build
            // them again.
            run(Command::new("cargo").args([
                "bench",
                "--locked",
                "--quiet",
                "--workspace",
                "--bench",
                name,
            ]))?;
        }
    }
    Ok(())
}
