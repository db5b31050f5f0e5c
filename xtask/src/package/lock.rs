//! Pinned Debian packages of the image: the lock has version and SHA-256 of each, and an image with other packages is refused.
//!
//! Debian's mirrors keep only the newest version of a package. Older versions are on snapshot.debian.org, which
//! `--debian-mirror` can name.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::ARCHITECTURE;
use crate::workspace::root;

const HEADER: &str = "# Debian packages of the image: name, version, SHA-256 of the file.\n\
                      # Written by `cargo xtask package --update-lock`.\n";

/// Debian package of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DebianPackage {
    pub(super) name: String,
    pub(super) version: String,
    /// SHA-256 of the `.deb`, in hexadecimal digits.
    pub(super) sha256: String,
}

/// Path of the lock for a Debian release and this machine's architecture.
fn path(suite: &str) -> PathBuf {
    root().join(format!("tools/image/{suite}-{ARCHITECTURE}.lock"))
}

/// Reads the locked packages.
pub(super) fn read(suite: &str) -> Result<Vec<DebianPackage>> {
    let path = path(suite);
    let text = fs::read_to_string(&path)
        .with_context(|| format!("read {} (--update-lock writes it)", path.display()))?;
    parse(&text).with_context(|| format!("parse {}", path.display()))
}

fn parse(text: &str) -> Result<Vec<DebianPackage>> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let package = |line: &str| match line.split(' ').collect::<Vec<_>>()[..] {
        [name, version, sha256] => {
            Ok(DebianPackage { name: name.into(), version: version.into(), sha256: sha256.into() })
        }
        _ => bail!("{line:?} is not a name, a version and a digest"),
    };
    lines.map(package).collect()
}

/// Writes `packages` to the lock.
pub(super) fn write(suite: &str, packages: &[DebianPackage]) -> Result<()> {
    let mut text = HEADER.to_owned();
    for DebianPackage { name, version, sha256 } in packages {
        writeln!(text, "{name} {version} {sha256}")?;
    }
    let path = path(suite);
    fs::create_dir_all(path.parent().context("a directory")?)?;
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}

/// Returns preferences that make apt install the locked versions (`apt_preferences(5)`); priority 1001 allows downgrades.
pub(super) fn preferences(locked: &[DebianPackage]) -> String {
    let pin = |DebianPackage { name, version, .. }: &DebianPackage| {
        format!("Package: {name}\nPin: version {version}\nPin-Priority: 1001\n")
    };
    locked.iter().map(pin).collect::<Vec<_>>().join("\n")
}

/// Parses the output of `apt-cache show`, sorted by name.
pub(super) fn shown(text: &str) -> Result<Vec<DebianPackage>> {
    let mut packages = BTreeMap::new();
    for paragraph in text.split("\n\n").filter(|one| !one.trim().is_empty()) {
        let field = |name: &str| paragraph.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let name = field("Package:").context("a paragraph of apt-cache without a name")?;
        let version = field("Version:").with_context(|| format!("{name} has no version"))?;
        // apt prints a paragraph without a digest for an installed package without a source.
        let Some(sha256) = field("SHA256:") else { continue };
        let package = DebianPackage { name: name.into(), version: version.into(), sha256: sha256.into() };
        packages.insert(name.to_owned(), package);
    }
    Ok(packages.into_values().collect())
}

/// Checks that exactly the locked packages are installed.
///
/// # Errors
/// The error lists the differences and says what to do.
pub(super) fn verify(locked: &[DebianPackage], installed: &[DebianPackage]) -> Result<()> {
    let differences = differences(locked, installed);
    if differences.is_empty() {
        return Ok(());
    }
    bail!(
        "the image has other Debian packages than its lock:\n  {}\n\
         Debian replaced them, or the mirror is not the one that it was. Read what changed, then `cargo xtask package \
         --update-lock`; or take the locked ones from mirrors of snapshot.debian.org (`--debian-mirror`)",
        differences.join("\n  ")
    )
}

fn differences(locked: &[DebianPackage], installed: &[DebianPackage]) -> Vec<String> {
    let by_name = |all: &[DebianPackage]| -> BTreeMap<String, DebianPackage> {
        all.iter().map(|one| (one.name.clone(), one.clone())).collect()
    };
    let (locked, installed) = (by_name(locked), by_name(installed));
    let mut found = vec![];
    for (name, was) in &locked {
        match installed.get(name) {
            None => found.push(format!("{name} {} is not installed", was.version)),
            Some(is) if is.version != was.version => {
                found.push(format!("{name} is {}, locked {}", is.version, was.version));
            }
            Some(is) if is.sha256 != was.sha256 => {
                found.push(format!(
                    "{name} {} has the digest {}, locked {}",
                    was.version, is.sha256, was.sha256
                ));
            }
            Some(_) => {}
        }
    }
    let new = installed.values().filter(|one| !locked.contains_key(&one.name));
    found.extend(new.map(|one| format!("{} {} is not locked", one.name, one.version)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, version: &str, sha256: &str) -> DebianPackage {
        DebianPackage { name: name.into(), version: version.into(), sha256: sha256.into() }
    }

    #[test]
    fn differences_are_named() {
        let locked = [package("libc6", "2.36-9", "aa"), package("ovmf", "2022.11-6", "bb")];
        for (installed, want) in [
            (locked.to_vec(), vec![]),
            (
                vec![package("libc6", "2.36-10", "cc"), locked[1].clone()],
                vec!["libc6 is 2.36-10, locked 2.36-9"],
            ),
            (
                vec![locked[0].clone(), package("ovmf", "2022.11-6", "dd")],
                vec!["ovmf 2022.11-6 has the digest dd, locked bb"],
            ),
            (
                vec![locked[0].clone(), package("perl", "5.36", "ee")],
                vec!["ovmf 2022.11-6 is not installed", "perl 5.36 is not locked"],
            ),
        ] {
            assert_eq!(differences(&locked, &installed), want);
        }
    }

    #[test]
    fn answers_of_apt_cache_are_read() {
        let text = "Package: ovmf\nVersion: 2022.11-6\nSHA256: bb\nDescription: firmware\n long\n\n\
                    Package: libc6\nVersion: 2.36-9\nSHA256: aa\n\nPackage: libc6\nVersion: 2.36-9\nStatus: installed\n";
        assert_eq!(
            shown(text).unwrap(),
            [package("libc6", "2.36-9", "aa"), package("ovmf", "2022.11-6", "bb")]
        );
        assert!(shown("Version: 1\n").is_err());
    }

    #[test]
    fn lock_is_read_as_written() {
        assert_eq!(parse("# a comment\nlibc6 2.36-9 aa\n").unwrap(), [package("libc6", "2.36-9", "aa")]);
        assert!(parse("libc6 2.36-9\n").is_err());
        assert_eq!(
            preferences(&[package("libc6", "2.36-9", "aa")]),
            "Package: libc6\nPin: version 2.36-9\nPin-Priority: 1001\n"
        );
    }
}
