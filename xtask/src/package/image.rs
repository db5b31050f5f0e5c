//! OCI image: a small Debian with QEMU, and a layer with the program and the kernel of guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use serde_json::Value;

use super::lock::{self, DebianPackage};
use super::{BOOT, PROGRAM, Parts};
use crate::progress::{logged, step};
use crate::setup::apt_sources;

/// File with the Debian release of this machine. The image uses the same release, because the program needs its C library.
const RELEASE: &str = "/etc/os-release";
/// Packages that a node needs: the VMM and its firmware, file systems of blank disks, certificate authorities of registries.
const PACKAGES: [&str; 4] = ["qemu-system-x86", "ovmf", "e2fsprogs", "ca-certificates"];
/// Directories below `/usr/share` that only people read.
const LEFT_OUT: [&str; 4] = ["doc", "man", "locale", "info"];

/// Source of the Debian packages, and handling of their lock.
pub(super) struct Debian<'a> {
    /// Mirrors to use instead of those of this machine.
    pub(super) mirrors: &'a [String],
    /// Whether to install the newest packages and rewrite the lock.
    pub(super) update_lock: bool,
}

/// Writes the layout to `target` and returns its Debian packages, which equal those of the lock.
pub(super) fn make(
    parts: &Parts,
    debian: &Debian<'_>,
    work: &Path,
    target: &Path,
) -> Result<Vec<DebianPackage>> {
    let suite = suite()?;
    let locked = if debian.update_lock { vec![] } else { lock::read(&suite)? };
    let base = work.join("base.tar");
    let packages = root_file_system(debian, (&suite, &locked), work, &base)?;
    match debian.update_lock {
        true => lock::write(&suite, &packages)?,
        false => lock::verify(&locked, &packages)?,
    }
    let mut layer =
        LayerTar::new().file(PROGRAM, 0o755, &parts.program).dir("usr/share/coracle", 0o755).dir(BOOT, 0o755);
    for (name, bytes) in &parts.boot {
        layer = layer.file(&format!("{BOOT}/{name}"), 0o644, bytes);
    }
    let spec = ImageSpec {
        entrypoint: vec![format!("/{PROGRAM}")],
        env: vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
        ..ImageSpec::default()
    };
    step("writing the layers of the image", Some(Duration::from_secs(20)), |_| {
        let base = fs::read(&base).context("read the root file system")?;
        write_layout(target, &[base, layer.finish()], &spec, &parts.version)
    })?;
    Ok(packages)
}

/// Writes the archive of a small Debian to `base` and returns its packages.
fn root_file_system(
    debian: &Debian<'_>,
    (suite, locked): (&str, &[DebianPackage]),
    work: &Path,
    base: &Path,
) -> Result<Vec<DebianPackage>> {
    let (pins, shown) = (work.join("preferences"), work.join("packages"));
    fs::write(&pins, lock::preferences(locked))?;
    let pin = format!("cp {} \"$1/etc/apt/preferences.d/lock\"", pins.display());
    let show = format!(
        "dpkg-query --admindir=\"$1/var/lib/dpkg\" -W -f '${{Package}}=${{Version}}\\n' \
         | xargs chroot \"$1\" apt-cache show > {}",
        shown.display()
    );
    step("making the root file system of the image", Some(Duration::from_secs(90)), |_| {
        let mut build = Command::new("mmdebstrap");
        build.args(["--quiet", "--variant=minbase"]).arg(format!("--include={}", PACKAGES.join(",")));
        build.args(LEFT_OUT.map(|dir| format!("--dpkgopt=path-exclude=/usr/share/{dir}/*")));
        build.args(["--setup-hook", &pin, "--customize-hook", &show]);
        build.args(["--customize-hook", "rm -rf \"$1/etc/apt/preferences.d/lock\""]);
        build.args(["--customize-hook", "rm -rf \"$1\"/var/lib/apt/lists/* \"$1\"/var/cache/*"]);
        build.arg(suite).arg(base);
        match debian.mirrors {
            [] => build.args(apt_sources()),
            // Package lists of a snapshot have expired.
            mirrors => build.arg("--aptopt=Acquire::Check-Valid-Until \"false\"").args(mirrors),
        };
        logged(&mut build, &work.join("image.log"))
    })?;
    lock::shown(&fs::read_to_string(&shown).context("read the packages of the image")?)
}

/// Unpacks the layers of a layout that [`make`] wrote into `root`, which is created. Whiteouts are not handled: no layer
/// removes files of another one.
pub(crate) fn unpack(layout: &Path, root: &Path) -> Result<()> {
    let read = |path: &Path| -> Result<Value> {
        let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("parse {}", path.display()))
    };
    let blob = |descriptor: &Value| -> Result<PathBuf> {
        let digest = descriptor["digest"].as_str().context("a descriptor without a digest")?;
        Ok(layout.join("blobs").join(digest.replace(':', "/")))
    };
    let manifest = read(&blob(&read(&layout.join("index.json"))?["manifests"][0])?)?;
    fs::create_dir_all(root).with_context(|| format!("create {}", root.display()))?;
    for layer in manifest["layers"].as_array().context("a manifest without layers")? {
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--numeric-owner", "--file"]).arg(blob(layer)?).arg("--directory").arg(root);
        crate::run(&mut tar)?;
    }
    Ok(())
}

fn suite() -> Result<String> {
    let text = fs::read_to_string(RELEASE).context("read the release of this machine")?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(name.context("this machine is not a release of Debian")?.trim_matches('"').to_owned())
}
