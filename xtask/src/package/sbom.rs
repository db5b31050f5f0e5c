//! Software bill of materials of the packages, as SPDX 2.3 (ISO/IEC 5962) in JSON.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Parts;
use super::lock::DebianPackage;
use crate::workspace::root;

/// Returns names and versions of the crates in `coracle`, without dependencies of builds and tests.
pub(super) fn crates() -> Result<Vec<(String, String)>> {
    let mut tree = Command::new("cargo");
    tree.args([
        "tree",
        "--locked",
        "--package",
        "coracle",
        "--edges",
        "normal",
        "--prefix",
        "none",
        "--no-dedupe",
    ]);
    let output = tree.current_dir(root()).output().context("run cargo tree")?;
    let text = String::from_utf8(output.stdout).context("read cargo tree")?;
    let lines: BTreeSet<_> = text.lines().filter_map(line).collect();
    Ok(lines.into_iter().collect())
}

/// Parses `name v1.2.3 (...)`.
fn line(text: &str) -> Option<(String, String)> {
    let mut words = text.split_whitespace();
    let (name, version) = (words.next()?, words.next()?);
    Some((name.to_owned(), version.strip_prefix('v')?.to_owned()))
}

/// Writes the document and returns its path. `packages` are the Debian packages.
pub(super) fn write(path: &Path, parts: &Parts, packages: &[DebianPackage]) -> Result<PathBuf> {
    let document = document(&parts.version, &created()?, &parts.crates, packages);
    let text = serde_json::to_string_pretty(&document)?;
    fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(path.to_owned())
}

/// Returns the time of the commit, so that the same tree gives the same document.
fn created() -> Result<String> {
    let mut log = Command::new("git");
    log.args(["log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ"]).env("TZ", "UTC");
    let output = log.current_dir(root()).output().context("run git log")?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn document(version: &str, created: &str, crates: &[(String, String)], packages: &[DebianPackage]) -> Value {
    let package = |kind: &str, name: &str, version: &str| {
        let id: String = format!("{kind}-{name}-{version}")
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        json!({
            "SPDXID": format!("SPDXRef-{id}"), "name": name, "versionInfo": version,
            "downloadLocation": "NOASSERTION", "filesAnalyzed": false,
            "externalRefs": [{
                "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                "referenceLocator": format!("pkg:{kind}/{name}@{version}"),
            }],
        })
    };
    let debian = |one: &DebianPackage| {
        let mut part = package("deb/debian", &one.name, &one.version);
        part["checksums"] = json!([{"algorithm": "SHA256", "checksumValue": one.sha256}]);
        part
    };
    let root = package("generic", "coracle", version);
    let parts: Vec<Value> = crates
        .iter()
        .map(|(name, version)| package("cargo", name, version))
        .chain(packages.iter().map(debian))
        .collect();
    let contains = |part: &Value| json!({"spdxElementId": root["SPDXID"], "relationshipType": "CONTAINS", "relatedSpdxElement": part["SPDXID"]});
    let described = json!({
        "spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": root["SPDXID"],
    });
    let relationships: Vec<Value> = std::iter::once(described).chain(parts.iter().map(contains)).collect();
    json!({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("coracle-{version}"),
        "documentNamespace": format!("https://coracle.dev/spdx/{version}"),
        "creationInfo": {"created": created, "creators": ["Tool: cargo xtask package"]},
        "packages": std::iter::once(root.clone()).chain(parts).collect::<Vec<_>>(),
        "relationships": relationships,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_tree_line_table() {
        for (text, want) in [
            ("serde v1.0.228 (proc-macro)", Some(("serde", "1.0.228"))),
            ("coracle v0.1.0 (/src/coracle)", Some(("coracle", "0.1.0"))),
            ("", None),
            ("[build-dependencies]", None),
        ] {
            let want = want.map(|(name, version): (&str, &str)| (name.to_owned(), version.to_owned()));
            assert_eq!(line(text), want, "{text}");
        }
    }

    #[test]
    fn document_relates_each_part() {
        let pair = |name: &str, version: &str| (name.to_owned(), version.to_owned());
        let document = document(
            "0.1.0",
            "2026-11-25T00:00:00Z",
            &[pair("serde", "1.0.228")],
            &[DebianPackage {
                name: "libc6".into(),
                version: "2.36-9+deb12u10".into(),
                sha256: "ab".repeat(32),
            }],
        );
        let ids: BTreeSet<_> = document["packages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["SPDXID"].as_str().unwrap())
            .collect();
        assert_eq!(ids.len(), 3, "{ids:?}");
        assert_eq!(document["packages"][2]["checksums"][0]["checksumValue"], "ab".repeat(32));
        for one in document["relationships"].as_array().unwrap() {
            assert!(ids.contains(one["relatedSpdxElement"].as_str().unwrap()), "{one}");
        }
    }
}
