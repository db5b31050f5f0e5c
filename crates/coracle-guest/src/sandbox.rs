//! Sandbox: a guest whose containers are created later. Its own disk is mounted, and its names and volumes have their own
//! directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::mounts::{self, Mounted, SANDBOX};
use crate::rootfs::Root;

/// Maximum number of sysctls in a request.
const SYSCTLS_MAX: usize = 64;
/// Prefixes of permitted sysctls, those of the pod (Kubernetes, "Using sysctls in a Kubernetes Cluster").
const SYSCTLS: [&str; 5] = ["kernel.shm", "kernel.msg", "kernel.sem", "fs.mqueue.", "net."];

/// Configuration of a sandbox in addition to that of every guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    disk: PathBuf,
    /// Files below /proc/sys, and their content.
    sysctls: BTreeMap<PathBuf, String>,
}

impl Plan {
    pub(crate) fn parse(disk: &str, sysctls: BTreeMap<String, String>) -> Result<Self, Error> {
        if sysctls.len() > SYSCTLS_MAX {
            return Err(Error::invalid(format!("more than {SYSCTLS_MAX} sysctls")));
        }
        let sysctls = sysctls.into_iter().map(|(name, value)| Ok((sysctl(&name)?, value)));
        Ok(Self { disk: mounts::device(disk)?, sysctls: sysctls.collect::<Result<_, Error>>()? })
    }

    /// Mounts the disk and makes the directory of the sandbox; blocking.
    pub(crate) fn root(&self) -> Result<Root, Error> {
        mounts::prepare()?;
        let mut mounted = Mounted::default();
        mounts::mount_own_disk(&self.disk, &mut mounted)?;
        for dir in ["etc", "volumes"] {
            let dir = Path::new(SANDBOX).join(dir);
            std::fs::create_dir_all(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
        }
        let root = Root::open(Path::new(SANDBOX)).map_err(Error::io("open the sandbox"))?;
        mounted.keep();
        Ok(root)
    }

    pub(crate) fn set_sysctls(&self) -> Result<(), Error> {
        for (path, value) in &self.sysctls {
            std::fs::write(path, value).map_err(Error::io(format!("write {value} to {}", path.display())))?;
        }
        Ok(())
    }
}

/// File of a sysctl. If the name has slashes as separators, dots belong to its parts (sysctl(8)).
fn sysctl(name: &str) -> Result<PathBuf, Error> {
    let slashes = name.contains('/');
    let dotted = if slashes { name.replace('.', "\u{0}").replace('/', ".") } else { name.to_owned() };
    let plain = |part: &str| {
        !part.is_empty()
            && part != "\0"
            && part != "\0\0"
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-\0".contains(&b))
    };
    if !SYSCTLS.iter().any(|allowed| dotted.starts_with(allowed)) || !dotted.split('.').all(plain) {
        return Err(Error::invalid(format!("sysctl {name:?} cannot be set for a pod")));
    }
    let parts = dotted.split('.').map(|part| part.replace('\0', "."));
    Ok(Path::new("/proc/sys").join(parts.collect::<PathBuf>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaced_sysctl_paths_table() {
        for (name, want) in [
            ("net.ipv4.ip_forward", Some("/proc/sys/net/ipv4/ip_forward")),
            ("kernel.shm_rmid_forced", Some("/proc/sys/kernel/shm_rmid_forced")),
            ("fs.mqueue.msg_max", Some("/proc/sys/fs/mqueue/msg_max")),
            ("net/ipv4/conf/eth0.100/rp_filter", Some("/proc/sys/net/ipv4/conf/eth0.100/rp_filter")),
            ("kernel.hostname", None),
            ("vm.swappiness", None),
            ("net", None),
            ("net..ipv4", None),
            ("net/../vm/swappiness", None),
            ("net.ipv4/../../x", None),
            ("", None),
        ] {
            let got = sysctl(name).ok();
            assert_eq!(got.as_deref(), want.map(Path::new), "{name}");
        }
    }
}
