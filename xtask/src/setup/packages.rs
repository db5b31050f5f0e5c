//! Debian packages.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use super::{Purpose, find, log_file};
use crate::progress::{logged, step};

/// Debian package, a program that shows that it is installed, and the purpose that needs it.
const PACKAGES: [(&str, &str, Purpose); 21] = [
    ("qemu-system-x86", "qemu-system-x86_64", Purpose::Up),
    ("e2fsprogs", "mke2fs", Purpose::Up),
    ("iproute2", "ip", Purpose::Up),
    ("busybox-static", "busybox", Purpose::Up),
    ("lz4", "lz4", Purpose::Up),
    ("xz-utils", "xz", Purpose::Up),
    ("qemu-utils", "qemu-img", Purpose::Test),
    // Firmware has no program: a file shows that it is installed.
    ("ovmf", "/usr/share/OVMF/OVMF_CODE_4M.fd", Purpose::Test),
    // The plugins are not in PATH.
    ("containernetworking-plugins", "/usr/lib/cni/bridge", Purpose::Test),
    // Tests read the packet filter with nft.
    ("nftables", "nft", Purpose::Test),
    ("fdisk", "sfdisk", Purpose::Test),
    ("mtools", "mcopy", Purpose::Test),
    ("dosfstools", "mkfs.vfat", Purpose::Test),
    ("erofs-utils", "mkfs.erofs", Purpose::Test),
    ("skopeo", "skopeo", Purpose::Test),
    ("docker-registry", "docker-registry", Purpose::Test),
    ("mmdebstrap", "mmdebstrap", Purpose::Test),
    ("umoci", "umoci", Purpose::Test),
    ("runc", "runc", Purpose::Test),
    // sshd is not in every PATH.
    ("openssh-server", "/usr/sbin/sshd", Purpose::Test),
    ("chromium", "chromium", Purpose::Test),
];

/// Installs the missing packages of `purpose`.
pub(super) fn ensure(tools: &Path, purpose: Purpose) -> Result<()> {
    let missing: Vec<_> = PACKAGES
        .iter()
        .filter(|(_, program, needs)| *needs <= purpose && find(program).is_none())
        .map(|(package, ..)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
    if !is_root || find("apt-get").is_none() {
        bail!("these Debian packages are missing; as root: apt-get install --no-install-recommends {list}");
    }
    step(&format!("installing {list}"), Some(Duration::from_secs(60)), |_| {
        let log = log_file(tools, "packages");
        logged(Command::new("apt-get").args(["-qq", "update"]), &log)?;
        let mut install = Command::new("apt-get");
        install.env("DEBIAN_FRONTEND", "noninteractive");
        // Keeps services from starting: tests start those that they need, on ports of their own.
        install.env("RUNLEVEL", "1");
        logged(install.args(["-qq", "install", "-y", "--no-install-recommends"]).args(&missing), &log)
    })
}
