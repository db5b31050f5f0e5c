//! Setup for builds, tests and `coracle up`, on a machine that has Rust, git, Python and apt. Idempotent. Each step prints what
//! it does and, if it fails, what to install.
//!
//! Three lanes run in parallel, because each waits for something else: packages and images for the network and the disk, Go
//! programs and Rust programs for the processor.

mod go;
mod images;
mod packages;
mod system_image;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};

use anyhow::{Context, Result};
use coracle_testkit::tools::tools_dir;
use sha2::{Digest, Sha256};

use crate::guest_image;

/// Purpose of the setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// `coracle up` and its demo.
    Up,
    /// Every test, benchmark and soak scenario.
    Test,
}

/// Runs every step that `purpose` needs.
pub(crate) fn ensure(purpose: Purpose) -> Result<()> {
    ensure_and(purpose, || Ok(()))
}

/// Runs every step that `purpose` needs, and `build` in the lane of Rust programs. All lanes end before the error of one is
/// returned.
pub(crate) fn ensure_and<T>(purpose: Purpose, build: impl FnOnce() -> Result<T> + Send) -> Result<T>
where
    T: Send,
{
    let tools = tools_dir();
    let tools = tools.as_path();
    fs::create_dir_all(tools.join("bin")).with_context(|| format!("create {}", tools.display()))?;
    thread::scope(|scope| {
        let packages = scope.spawn(move || packages::ensure(tools, purpose));
        let programs = scope.spawn(move || go::ensure(tools, purpose));
        let rust = scope.spawn(|| Ok((guest_image::build_agent()?, build()?)));
        let images = join(packages).and_then(|()| {
            images::demo(tools).context("build the demo image")?;
            if purpose == Purpose::Test {
                images::web(tools).context("build the web server's image")?;
                system_image::ensure(tools).context("build the disk image")?;
            }
            Ok(())
        });
        let rust = join(rust);
        let programs = join(programs);
        images?;
        programs?;
        let (agent, built) = rust?;
        guest_image::ensure(tools, &agent).context("build the guest's kernel and initramfs")?;
        Ok(built)
    })
}

fn join<T>(lane: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    lane.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause))
}

/// Finds `name` in PATH or in the directories of system administration programs.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// Returns this machine's apt sources, which also work for a root file system that is built on it.
pub(crate) fn apt_sources() -> Vec<PathBuf> {
    let files = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|e| e.path());
    let known = |file: &PathBuf| {
        file.file_name().and_then(|n| n.to_str()).is_some_and(|n| n == "debian.sources" || n == "debian.list")
    };
    let list = PathBuf::from("/etc/apt/sources.list");
    files.filter(known).chain(list.is_file().then_some(list)).collect()
}

/// File for the output of the programs of a step.
fn log_file(tools: &Path, step: &str) -> PathBuf {
    tools.join("log").join(format!("{step}.log"))
}

/// Replaces a symbolic link.
fn link(target: &Path, link: &Path) -> Result<()> {
    let part = link.with_extension("link");
    let _absent = fs::remove_file(&part);
    std::os::unix::fs::symlink(target, &part)?;
    fs::rename(&part, link).with_context(|| format!("link {}", link.display()))
}

/// Returns 16 hex digits of the hash over the inputs of an artifact.
fn hash(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    let mut hex = hex::encode(hash.finalize());
    hex.truncate(16);
    hex
}
