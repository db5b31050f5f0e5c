//! Every test, a suite per crate, with the seconds of each.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::{members, run, step};

/// Runs the suites; `only` narrows to crates. Goes on after a failing suite and fails at the end.
pub(crate) fn run_all(only: &[String]) -> Result<()> {
    let mut report = Vec::new();
    let mut failed = Vec::new();
    for (name, _) in members()? {
        if !only.is_empty() && !only.contains(&name) {
            continue;
        }
        step(&format!("testing {name}"));
        let began = Instant::now();
        if let Err(error) = run(Command::new("cargo").args(["test", "--locked", "--package", &name])) {
            eprintln!("{error:#}");
            failed.push(name.clone());
        }
        report.push((name, began.elapsed().as_secs_f64()));
    }
    eprintln!("\n{:>8}  suite", "seconds");
    for (name, seconds) in &report {
        let mark = if failed.contains(name) { "  FAILED" } else { "" };
        eprintln!("{seconds:>8.1}  {name}{mark}");
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}
