//! kubectl plugin, with the manifest by which krew installs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};

use super::{ARCHITECTURE, Parts};
use crate::progress::{logged, step};

/// Builds the archive and returns its path. The manifest beside it has the checksum of the archive; the publisher adds the
/// download address.
pub(super) fn make(parts: &Parts, work: &Path, out: &Path) -> Result<PathBuf> {
    let (platform, dir) = (format!("linux-{ARCHITECTURE}"), work.join("plugin"));
    fs::create_dir_all(&dir)?;
    let plugin = dir.join("kubectl-coracle");
    fs::copy(work.join("coracle"), &plugin).context("copy the program")?;
    let archive = out.join(format!("kubectl-coracle_{}_{platform}.tar.gz", parts.version));
    step("making the plugin of kubectl", Some(Duration::from_secs(10)), |_| {
        let mut tar = Command::new("tar");
        tar.args(["--sort=name", "--owner=0", "--group=0", "--mtime=@0", "-czf"]).arg(&archive);
        tar.arg("-C").arg(&dir).arg("kubectl-coracle");
        logged(&mut tar, &work.join("plugin.log"))
    })?;
    let sum = hex::encode(Sha256::digest(fs::read(&archive)?));
    let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
    fs::write(out.join("kubectl-coracle.yaml"), manifest(&parts.version, &name, &sum))?;
    Ok(archive)
}

fn manifest(version: &str, archive: &str, sum: &str) -> String {
    format!(
        "apiVersion: krew.googlecontainertools.github.com/v1alpha2\nkind: Plugin\nmetadata:\n  name: coracle\nspec:\n  \
         version: v{version}\n  shortDescription: Use VMs of a cluster\n  description: |\n    \
         Commands, logs, consoles, files and ports of MikromVMs.\n  platforms:\n  \
         - selector:\n      matchLabels: {{os: linux, arch: {ARCHITECTURE}}}\n    \
         uri: https://example.invalid/{archive}\n    sha256: {sum}\n    bin: kubectl-coracle\n"
    )
}
