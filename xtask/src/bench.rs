//! Benchmarks: release profile, JSON lines on stdout, everything else on stderr.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{run, setup, step};

/// Name → crate and bench target.
const BENCHES: [(&str, &str); 1] = [("boot", "coracle-host")];

/// Runs the named benchmarks, or all.
pub(crate) fn run_all(names: &[String]) -> Result<()> {
    if let Some(unknown) = names.iter().find(|n| !BENCHES.iter().any(|(name, _)| name == n)) {
        bail!("no benchmark {unknown}; there is: {}", BENCHES.map(|(name, _)| name).join(", "));
    }
    setup::ensure()?;
    for (name, package) in BENCHES {
        if names.is_empty() || names.iter().any(|n| n == name) {
            step(&format!("bench {name}"));
            run(Command::new("cargo").args([
                "bench",
                "--locked",
                "--quiet",
                "--package",
                package,
                "--bench",
                name,
            ]))?;
        }
    }
    Ok(())
}
