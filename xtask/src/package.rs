//! `cargo xtask package`: packages for users, built without a container engine: an OCI image, a Debian package, the kubectl
//! plugin. Adds a list of their contents (SPDX) and checksums.

mod debian;
pub(crate) mod image;
mod lock;
mod plugin;
mod sbom;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coracle_testkit::tools::tools_dir;
use sha2::{Digest as _, Sha256};

use crate::build::{self, Profile};
use crate::progress::{logged, say, step};
use crate::setup::{self, Purpose};
use crate::workspace::root;

/// Path of the binary below the root of an installation.
pub(crate) const PROGRAM: &str = "usr/bin/coracle";
/// Directory with kernel and initramfs of guests, below that root.
pub(crate) const BOOT: &str = "usr/share/coracle/boot";

/// Name of this machine's architecture in Debian, Go and Kubernetes.
pub(crate) const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };

/// Contents that all packages share.
pub(crate) struct Parts {
    /// Version of the workspace.
    pub(crate) version: String,
    /// The binary, without debug information.
    pub(crate) program: Vec<u8>,
    /// Kernel and initramfs of guests, by file name.
    pub(crate) boot: Vec<(&'static str, Vec<u8>)>,
    /// Names and versions of the crates in the binary.
    pub(crate) crates: Vec<(String, String)>,
}

/// Options of `cargo xtask package`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Output directory, which is emptied first.
    #[arg(long, value_name = "DIR", default_value = "target/package")]
    pub(crate) out: PathBuf,
    /// Build profile of the program: `dev` is fast to build and slow to run.
    #[arg(long, value_enum, default_value = "release")]
    pub(crate) profile: Profile,
    /// Push the image to this reference; credentials are docker's.
    #[arg(long, value_name = "REFERENCE")]
    pub(crate) push: Option<String>,
    /// Use the newest Debian packages, and pin the image to them.
    #[arg(long)]
    pub(crate) update_lock: bool,
    /// Mirrors of the image's Debian packages, instead of this machine's: URLs, or lines of `sources.list(5)`.
    #[arg(long, value_name = "URL")]
    pub(crate) debian_mirror: Vec<String>,
}

impl Options {
    /// Returns options for tests: packages with a program that builds fast, in `out`.
    pub(crate) fn for_tests(out: &Path) -> Self {
        let (out, profile) = (out.to_owned(), Profile::Dev);
        Self { out, profile, push: None, update_lock: false, debian_mirror: vec![] }
    }
}

/// Makes all packages, and pushes the image if requested.
pub(crate) fn run(options: &Options) -> Result<()> {
    let out = &root().join(&options.out);
    for program in ["mmdebstrap", "dpkg-deb", "strip"] {
        ensure!(
            setup::find(program).is_some(),
            "{program} is missing: apt-get install mmdebstrap dpkg binutils"
        );
    }
    let program = setup::ensure_and(Purpose::Up, || build::packaged(options.profile))?;
    if out.exists() {
        fs::remove_dir_all(out).with_context(|| format!("empty {}", out.display()))?;
    }
    let work = out.join("work");
    fs::create_dir_all(&work).with_context(|| format!("create {}", work.display()))?;
    let parts = parts(&program, &work)?;

    let debian = image::Debian { mirrors: &options.debian_mirror, update_lock: options.update_lock };
    let packages = image::make(&parts, &debian, &work, &out.join("image"))?;
    let mut files = vec![
        sbom::write(&out.join("coracle-image.spdx.json"), &parts, &packages)?,
        debian::make(&parts, &program, &work, out)?,
        plugin::make(&parts, &work, out)?,
    ];
    files.push(sbom::write(&out.join("coracle.spdx.json"), &parts, &[])?);
    fs::remove_dir_all(&work)?;
    checksums(out, files)?;
    if let Some(reference) = &options.push {
        step("pushing the image", None, |_| {
            let mut client = Command::new(&program);
            crate::run(client.arg("push-layout").arg(out.join("image")).arg(reference))
        })?;
    }
    say(&format!("packages are in {}", out.display()));
    Ok(())
}

fn parts(program: &Path, work: &Path) -> Result<Parts> {
    let stripped = work.join("coracle");
    step("removing debug information", Some(Duration::from_secs(5)), |_| {
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(&stripped).arg(program);
        logged(&mut strip, &work.join("strip.log"))
    })?;
    let boot = tools_dir().join("guest/current");
    let read = |path: PathBuf| fs::read(&path).with_context(|| format!("read {}", path.display()));
    // Firecracker boots the unpacked kernel, and so does QEMU without KVM.
    let boot = ["vmlinuz", "vmlinux", "initrd"].map(|name| Ok((name, read(boot.join(name))?)));
    Ok(Parts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        program: read(stripped)?,
        boot: boot.into_iter().collect::<Result<_>>()?,
        crates: sbom::crates()?,
    })
}

/// Writes `SHA256SUMS` in the format of `sha256sum --check`. Of the image it covers the index, which names the rest by digest.
fn checksums(out: &Path, mut files: Vec<PathBuf>) -> Result<()> {
    files.push(out.join("image/index.json"));
    let mut text = String::new();
    for file in files {
        let name = file.strip_prefix(out).unwrap_or(&file).display();
        writeln!(text, "{}  {name}", hex::encode(Sha256::digest(fs::read(&file)?)))?;
    }
    fs::write(out.join("SHA256SUMS"), text).context("write SHA256SUMS")
}
