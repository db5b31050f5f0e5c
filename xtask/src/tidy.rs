//! What no compiler checks: which crate may depend on which, and how long a file may be.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{members, root};

/// The layers, lowest first. A crate may depend on those above it in this list or
/// left of it in its row.
const LAYERS: [&[&str]; 6] = [
    &["coracle-types", "coracle-api", "coracle-auction"],
    &[
        "coracle-proto",
        "coracle-telemetry",
        "coracle-web",
        "coracle-hypervisor",
        "coracle-image",
        "coracle-net",
        "coracle-vsphere",
        "coracle-streaming",
    ],
    &["coracle-qemu", "coracle-firecracker", "coracle-cloud-hypervisor"],
    &[
        "coracle-host",
        "coracle-guest",
        "coracle-pod",
        "coracle-agent",
        "coracle-cri",
        "coracle-vnode",
        "coracle-registry",
    ],
    &[
        "coracle-reconcile",
        "coracle-microvm",
        "coracle-cocoon",
        "coracle-bidnode",
        "coracle-agentpool",
        "coracle-admission",
        "coracle-market",
    ],
    &["coracle"],
];

/// Not part of the product: may see everything, and only tests and tools see them.
const SUPPORT: [&str; 3] = ["coracle-testkit", "coracle-fuzz", "xtask"];

/// Crates that do I/O, which the vocabulary must not see.
const IO_CRATES: [&str; 6] = ["tokio", "reqwest", "hyper", "tonic", "axum", "rustix"];

/// Longest production file.
const LINES_MAX: usize = 800;

/// Where every metric has a line.
const METRICS: &str = "docs/reference/metrics.md";

/// Fails with every violation at once.
pub(crate) fn check() -> Result<()> {
    let mut wrong = Vec::new();
    let product = product()?;
    let reference = fs::read_to_string(root().join(METRICS)).with_context(|| format!("read {METRICS}"))?;
    for (name, manifest) in members()? {
        dependencies(&name, &manifest, &mut wrong)?;
        let dir = Path::new(&manifest).parent().context("manifest without a folder")?;
        lengths(&dir.join("src"), &mut wrong)?;
        if product.contains(&name) {
            metrics(&dir.join("src"), &reference, &mut wrong)?;
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("tidy:\n  {}", wrong.join("\n  "));
}

fn place(name: &str) -> Option<(usize, usize)> {
    LAYERS.iter().enumerate().find_map(|(row, names)| Some((row, names.iter().position(|n| *n == name)?)))
}

fn dependencies(name: &str, manifest: &str, wrong: &mut Vec<String>) -> Result<()> {
    if SUPPORT.contains(&name) {
        return Ok(());
    }
    let Some((row, column)) = place(name) else {
        wrong.push(format!("{name} has no place in the layers of ARCHITECTURE.md"));
        return Ok(());
    };
    for dependency in direct(manifest)? {
        if row == 0 && IO_CRATES.contains(&dependency.as_str()) {
            wrong.push(format!("{name} is vocabulary and does no I/O, but depends on {dependency}"));
        }
        if SUPPORT.contains(&dependency.as_str()) {
            wrong.push(format!("{name} depends on {dependency} outside its tests"));
        }
        let Some((other_row, other_column)) = place(&dependency) else { continue };
        if (other_row, other_column) >= (row, column) {
            wrong.push(format!("{name} depends on {dependency}, which is not below it"));
        }
        if row == 4 && (other_row == 2 || dependency == "coracle-hypervisor" || dependency == "coracle-host")
        {
            wrong.push(format!("{name} is a controller and must not reach {dependency}"));
        }
    }
    Ok(())
}

/// Names of the normal dependencies of one manifest.
fn direct(manifest: &str) -> Result<Vec<String>> {
    let metadata = crate::metadata()?;
    let package = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|p| p["manifest_path"] == manifest)
        .with_context(|| format!("no package at {manifest}"))?;
    let normal =
        package["dependencies"].as_array().into_iter().flatten().filter(|d| d["kind"] == Value::Null);
    Ok(normal.filter_map(|d| d["name"].as_str().map(str::to_owned)).collect())
}

fn lengths(dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && path.file_name().is_some_and(|n| n != "generated") {
            lengths(&path, wrong)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let lines = fs::read_to_string(&path)?.lines().count();
            if lines > LINES_MAX {
                let shown = path.strip_prefix(root()).unwrap_or(&path).display();
                wrong.push(format!("{shown} has {lines} lines; the limit is {LINES_MAX}"));
            }
        }
    }
    Ok(())
}

/// The crates that the binary is made of: nobody scrapes the metrics of the others yet.
fn product() -> Result<BTreeSet<String>> {
    let members = members()?;
    let mut found = BTreeSet::from(["coracle".to_owned()]);
    let mut open = vec!["coracle".to_owned()];
    while let Some(name) = open.pop() {
        let Some((_, manifest)) = members.iter().find(|(member, _)| *member == name) else { continue };
        open.extend(direct(manifest)?.into_iter().filter(|dependency| found.insert(dependency.clone())));
    }
    Ok(found)
}

/// Every metric that a source registers has a line in the reference.
fn metrics(dir: &Path, reference: &str, wrong: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            metrics(&path, reference, wrong)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let source = fs::read_to_string(&path)?;
            let missing = registered(&source).filter(|name| !reference.contains(&format!("`{name}")));
            let shown = path.strip_prefix(root()).unwrap_or(&path).display();
            wrong.extend(missing.map(|name| format!("{shown}: the metric {name} has no line in {METRICS}")));
        }
    }
    Ok(())
}

/// Names of metrics in a source that has to do with a registry. Pure.
fn registered(source: &str) -> impl Iterator<Item = &str> {
    let literals = source.split('"').skip(1).step_by(2);
    let plain = |name: &&str| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let ours = |name: &&str| name.starts_with("coracle_") || name.starts_with("firecracker_");
    literals.filter(move |_| source.contains("prometheus_client")).filter(plain).filter(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_found_by_their_names() {
        let source = r#"use prometheus_client; r.register("coracle_vm_state", "State"); f("coracle-x"); g("firecracker_a")"#;
        assert_eq!(registered(source).collect::<Vec<_>>(), ["coracle_vm_state", "firecracker_a"]);
        assert_eq!(registered(r#"nft("coracle_table")"#).count(), 0);
    }
}
