//! Checks that no compiler makes: dependencies between crates, sizes of files and crates, circular imports of modules,
//! completeness of references, and banned phrases.

mod modules;
mod references;
mod waits;
mod words;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{members, root};

/// Layers, lowest first. A crate may depend on crates above it in this list or left of it in its row.
const LAYERS: [&[&str]; 6] = [
    &["coracle-types", "coracle-api", "coracle-auction"],
    &[
        "coracle-files",
        "coracle-rootfs",
        "coracle-procfs",
        "coracle-spawn",
        "coracle-proto",
        "coracle-telemetry",
        "coracle-web",
        "coracle-hypervisor",
        "coracle-oci",
        "coracle-image",
        "coracle-disk",
        "coracle-nftables",
        "coracle-net",
        "coracle-vsphere",
        "coracle-streaming",
        "coracle-access",
    ],
    &["coracle-qemu", "coracle-firecracker", "coracle-cloud-hypervisor"],
    &[
        "coracle-guest-client",
        "coracle-share",
        "coracle-logs",
        "coracle-record",
        "coracle-snapshot",
        "coracle-instance",
        "coracle-lifecycle",
        "coracle-host",
        "coracle-node-lease",
        "coracle-guest",
        "coracle-pod",
        "coracle-frontends",
        "coracle-cri",
        "coracle-vm-pod",
        "coracle-certificate",
        "coracle-vnode",
        "coracle-registry",
    ],
    &[
        "coracle-reconcile",
        "coracle-vm-inputs",
        "coracle-microvm",
        "coracle-vm-service",
        "coracle-vm-snapshot",
        "coracle-vm-pool",
        "coracle-cocoon",
        "coracle-bidnode",
        "coracle-agentpool",
        "coracle-authority",
        "coracle-admission",
        "coracle-subresources",
        "coracle-market",
    ],
    &["coracle-image-build", "coracle-cli", "coracle-cli-market", "coracle-install", "coracle"],
];

/// Crates outside of the product: they may depend on every crate, and only tests and tools depend on them.
const SUPPORT: [&str; 6] = [
    "coracle-testkit",
    "coracle-hypervisor-testing",
    "coracle-vsphere-testing",
    "coracle-fuzz",
    "coracle-protogen",
    "xtask",
];

/// Crates that do I/O, on which vocabulary crates must not depend.
const IO_CRATES: [&str; 6] = ["tokio", "reqwest", "hyper", "tonic", "axum", "rustix"];

/// Crates that serve or call gRPC, which the host core does not.
const GRPC_CRATES: [&str; 13] = [
    "coracle-proto",
    "coracle-guest-client",
    "coracle-guest",
    "coracle-frontends",
    "coracle-cri",
    "coracle-vnode",
    "coracle-microvm",
    "coracle-subresources",
    "coracle-bidnode",
    "coracle-market",
    "coracle-cli",
    "coracle-cli-market",
    "coracle",
];

/// Crates that may have programs. Programs that only tests run must be examples.
const PROGRAMS: [&str; 5] = ["coracle", "coracle-guest", "coracle-fuzz", "coracle-protogen", "xtask"];

/// Maximum number of lines of a production file.
const LINES_MAX: usize = 800;

/// Maximum number of source lines of a crate, without generated and empty lines.
const CRATE_LINES_MAX: usize = 8_000;

/// Page with a line for every metric.
const METRICS: &str = "docs/reference/metrics.md";

/// Page with a section for every error code.
const ERRORS: &str = "docs/reference/errors.md";
const ERROR_TABLE: &str = "crates/coracle/src/reference/errors.rs";

/// Runs every check, and fails with all violations.
pub(crate) fn check() -> Result<()> {
    let mut wrong = Vec::new();
    let product = product()?;
    let reference = fs::read_to_string(root().join(METRICS)).with_context(|| format!("read {METRICS}"))?;
    let mut codes = BTreeSet::new();
    for (name, manifest) in members()? {
        dependencies(&name, &manifest, &mut wrong)?;
        let dir = Path::new(&manifest).parent().context("manifest without a directory")?;
        let lines = lengths(&dir.join("src"), &mut wrong)?;
        if lines > CRATE_LINES_MAX {
            wrong.push(format!("{name} has {lines} lines of source; the limit is {CRATE_LINES_MAX}"));
        }
        references::check(dir, &mut wrong)?;
        modules::check(&name, &dir.join("src"), &mut wrong)?;
        waits::check(dir, &mut wrong)?;
        programs(&name, &manifest, &mut wrong)?;
        words::check_sources(dir, &mut wrong)?;
        if product.contains(&name) {
            metrics(&dir.join("src"), &reference, &mut wrong)?;
            error_codes(&dir.join("src"), &mut codes)?;
            fakes(&dir.join("src"), &mut wrong)?;
        }
    }
    let page = fs::read_to_string(root().join(ERRORS)).with_context(|| format!("read {ERRORS}"))?;
    let explained: BTreeSet<_> =
        page.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned).collect();
    wrong.extend(codes.difference(&explained).map(|code| format!("{code} has no section in {ERRORS}")));
    wrong.extend(
        explained.difference(&codes).map(|code| format!("{ERRORS} explains {code}, which no source has")),
    );
    words::check(&mut wrong)?;
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
        if dependency == "tonic" && !GRPC_CRATES.contains(&name) {
            wrong.push(format!("{name} is neither a frontend nor a client and must not reach tonic"));
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

/// Returns cargo's metadata of the package of one manifest.
fn package(manifest: &str) -> Result<Value> {
    let metadata = crate::metadata()?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let package = packages.find(|p| p["manifest_path"] == manifest);
    package.cloned().with_context(|| format!("no package at {manifest}"))
}

/// Returns the names of the normal dependencies of one manifest.
fn direct(manifest: &str) -> Result<Vec<String>> {
    let package = package(manifest)?;
    let normal =
        package["dependencies"].as_array().into_iter().flatten().filter(|d| d["kind"] == Value::Null);
    Ok(normal.filter_map(|d| d["name"].as_str().map(str::to_owned)).collect())
}

/// Returns the number of lines of all files, without empty ones.
fn lengths(dir: &Path, wrong: &mut Vec<String>) -> Result<usize> {
    let mut sum = 0;
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && path.file_name().is_some_and(|n| n != "generated") {
            sum += lengths(&path, wrong)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&path)?;
            let lines = text.lines().count();
            sum += text.lines().filter(|line| !line.trim().is_empty()).count();
            if lines > LINES_MAX {
                let shown = path.strip_prefix(root()).unwrap_or(&path).display();
                wrong.push(format!("{shown} has {lines} lines; the limit is {LINES_MAX}"));
            }
        }
    }
    Ok(sum)
}

/// Checks that a crate outside of [`PROGRAMS`] builds no programs.
fn programs(name: &str, manifest: &str, wrong: &mut Vec<String>) -> Result<()> {
    let package = package(manifest)?;
    let targets = package["targets"].as_array().into_iter().flatten();
    let programs =
        targets.filter(|target| target["kind"][0] == "bin").filter_map(|target| target["name"].as_str());
    if !PROGRAMS.contains(&name) {
        wrong.extend(
            programs.map(|program| format!("{name} makes the program {program}; make it an example")),
        );
    }
    Ok(())
}

/// Checks that fakes are only in crates for tests.
fn fakes(dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            fakes(&path, wrong)?;
        } else if path.extension().is_some_and(|e| e == "rs") && has_fake(&fs::read_to_string(&path)?) {
            let shown = path.strip_prefix(root()).unwrap_or(&path).display();
            wrong.push(format!("{shown} has a fake; move it to a crate for tests"));
        }
    }
    Ok(())
}

/// Returns whether the part of a source before its unit tests defines a fake. Pure.
fn has_fake(source: &str) -> bool {
    let product = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    ["mod fake", "struct Fake", "enum Fake", "trait Fake"]
        .iter()
        .any(|definition| product.contains(definition))
}

/// Returns the crates that the binary is made of. Metrics of other crates are not scraped.
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

/// Checks that every metric that a source registers has a line in the reference.
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

/// Collects the error codes of the sources, except those of the table of their explanations.
fn error_codes(dir: &Path, codes: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            error_codes(&path, codes)?;
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with(ERROR_TABLE) {
            codes.extend(codes_in(&fs::read_to_string(&path)?).map(str::to_owned));
        }
    }
    Ok(())
}

/// Returns string literals like `COR-VM-001`. Pure.
fn codes_in(source: &str) -> impl Iterator<Item = &str> {
    let literals = source.split('"').skip(1).step_by(2);
    literals.filter(|text| {
        let parts: Vec<_> = text.split('-').collect();
        matches!(parts[..], ["COR", group, number]
            if group.bytes().all(|b| b.is_ascii_uppercase()) && number.len() == 3 && number.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// Returns the names of metrics in a source that uses a metrics registry. Pure.
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
    fn fakes_are_found_outside_of_unit_tests() {
        assert!(has_fake("pub struct FakeDriver;"));
        assert!(!has_fake("struct Real;\n#[cfg(test)]\nmod tests {\n    struct FakeClock;\n}"));
    }

    #[test]
    fn metrics_are_found_by_their_names() {
        let source = r#"use prometheus_client; r.register("coracle_vm_state", "State"); f("coracle-x"); g("firecracker_a")"#;
        assert_eq!(registered(source).collect::<Vec<_>>(), ["coracle_vm_state", "firecracker_a"]);
        assert_eq!(registered(r#"nft("coracle_table")"#).count(), 0);
    }

    #[test]
    fn error_codes_are_found_in_literals() {
        let source = r#"/// COR-XX-001
            Failure::new("COR-VM-001", "x").help("COR-VM-2"), "cor-vm-003" => "COR-IMG-016""#;
        assert_eq!(codes_in(source).collect::<Vec<_>>(), ["COR-VM-001", "COR-IMG-016"]);
    }
}
