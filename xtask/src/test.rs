//! Every test, built once for the whole workspace, run a suite at a time, with
//! the seconds of each.
//!
//! Not `cargo test --package X` in turn: each package alone has other features
//! of the shared dependencies, and would build them all again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{root, run, step};

/// One test program and where it runs.
struct Suite {
    package: String,
    target: String,
    program: PathBuf,
    folder: PathBuf,
}

/// Runs the suites; `only` narrows to crates. Goes on after a failing suite and fails at the end.
pub(crate) fn run_all(only: &[String]) -> Result<()> {
    step("building every test");
    run(Command::new("cargo").args(["test", "--locked", "--workspace", "--no-run"]))?;
    let mut report = Vec::new();
    let mut failed = false;
    for suite in suites()?.iter().filter(|s| only.is_empty() || only.contains(&s.package)) {
        let name = format!("{} {}", suite.package, suite.target);
        step(&format!("testing {name}"));
        let began = Instant::now();
        let mut command = Command::new(&suite.program);
        let outcome = run(command.current_dir(&suite.folder).env("CARGO_MANIFEST_DIR", &suite.folder));
        if let Err(error) = &outcome {
            eprintln!("{error:#}");
        }
        failed |= outcome.is_err();
        let mark = if outcome.is_err() { "  FAILED" } else { "" };
        report.push(format!("{:>8.1}  {name}{mark}", began.elapsed().as_secs_f64()));
    }
    if report.is_empty() {
        bail!("no crate of that name has tests");
    }
    eprintln!("\n{:>8}  suite\n{}", "seconds", report.join("\n"));
    if failed { bail!("a suite failed") } else { Ok(()) }
}

/// The product as the tests use it: built if it is not.
pub(crate) fn product() -> Result<PathBuf> {
    let is_product = |m: &Value| {
        m["target"]["name"] == "coracle" && m["target"]["kind"][0] == "bin" && m["profile"]["test"] == false
    };
    let built = artifacts()?;
    let found = built.iter().filter(|m| is_product(m)).find_map(|m| m["executable"].as_str());
    found.map(PathBuf::from).context("cargo did not report the binary coracle")
}

/// Everything that cargo has built for the tests, in the order of its report.
fn artifacts() -> Result<Vec<Value>> {
    let output = Command::new("cargo")
        .args(["test", "--locked", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"])
        .current_dir(root())
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("run cargo test --no-run")?;
    if !output.status.success() {
        bail!("the tests do not build");
    }
    let text = String::from_utf8(output.stdout)?;
    text.lines().map(|line| serde_json::from_str(line).context("read a message of cargo")).collect()
}

/// The test programs among them.
fn suites() -> Result<Vec<Suite>> {
    let mut suites = Vec::new();
    for message in artifacts()? {
        let Some(program) = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)
        else {
            continue;
        };
        let manifest = message["manifest_path"].as_str().context("artifact without a manifest")?;
        let folder = Path::new(manifest).parent().context("manifest without a folder")?;
        suites.push(Suite {
            package: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            target: message["target"]["name"].as_str().unwrap_or_default().to_owned(),
            program: program.into(),
            folder: folder.to_owned(),
        });
    }
    suites.sort_by(|a, b| (&a.package, &a.target).cmp(&(&b.package, &b.target)));
    Ok(suites)
}
