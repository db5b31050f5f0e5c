//! The workspace: its root, its crates, and programs that run in its root.

use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Runs a program in the repository's root and fails if it fails.
pub(crate) fn run(command: &mut Process) -> Result<()> {
    if command.get_current_dir().is_none() {
        command.current_dir(root());
    }
    let shown = format!("{} {}", command.get_program().display(), arguments(command));
    let status = command.status().with_context(|| format!("run {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

fn arguments(command: &Process) -> String {
    let words: Vec<_> = command.get_args().map(|a| a.display().to_string()).collect();
    words.join(" ")
}

/// Returns cargo's metadata of the workspace, without dependencies.
pub(crate) fn metadata() -> Result<Value> {
    let output = Process::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root())
        .output()
        .context("run cargo metadata")?;
    serde_json::from_slice(&output.stdout).context("read cargo metadata")
}

/// Returns the name and manifest of each crate of the workspace.
pub(crate) fn members() -> Result<Vec<(String, String)>> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("packages")?;
    let text = |p: &Value, key: &str| p[key].as_str().unwrap_or_default().to_owned();
    Ok(packages.iter().map(|p| (text(p, "name"), text(p, "manifest_path"))).collect())
}

/// Returns the repository's root, independent of the working directory. The path comes from cargo at run time: two checkouts
/// may share one target directory, and so one program.
pub(crate) fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let manifest =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        Path::new(&manifest).parent().expect("xtask/ lies below the root").to_owned()
    });
    &ROOT
}
