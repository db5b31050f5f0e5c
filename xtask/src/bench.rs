//! Benchmarks: release profile, JSON lines on stdout, everything else on stderr.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{run, setup, step};

/// The bench targets of the workspace.
const BENCHES: [&str; 6] = ["agentpool", "bidnode", "boot", "clone", "market", "registry"];

/// Runs the named benchmarks, or all.
pub(crate) fn run_all(names: &[String]) -> Result<()> {
    if let Some(unknown) = names.iter().find(|n| !BENCHES.contains(&n.as_str())) {
        bail!("no benchmark {unknown}; there is: {}", BENCHES.join(", "));
    }
    setup::ensure()?;
    for name in BENCHES {
        if names.is_empty() || names.iter().any(|n| n == name) {
            step(&format!("bench {name}"));
            // The whole workspace: one crate alone has other features of shared dependencies, and would build them anew.
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
