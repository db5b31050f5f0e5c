//! Parts of a jail that this process can make on this host, as reported by the node and by `coracle doctor`.

use std::io;
use std::path::Path;

use coracle_types::InstanceId;

use super::owned::Owners;
use super::{FIRST_UID, Jail, can_bound_files};
use crate::cgroup::{self, Limits};

/// Part of the jail of VMMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JailPart {
    /// Name in reports.
    pub name: &'static str,
    /// Effect on VMMs.
    pub what: &'static str,
    /// Reason why the part is unavailable on this host; `None`: available.
    pub missing: Option<String>,
    /// Remedy.
    pub help: &'static str,
}

/// Findings on this host.
#[derive(Clone, Debug)]
struct Facts {
    /// Whether a process that entered a jail had a user namespace of its own there.
    entered: Result<bool, String>,
    /// Whether the owner of a file in the state directory could be mapped.
    owners: Result<(), String>,
    /// Controllers that were missing when a cgroup with limits was created.
    cgroup: Result<Vec<&'static str>, String>,
    can_bound_files: bool,
}

/// Tries every part of a jail once; `root` is a directory in the file system of the node's state, which is created and removed.
/// The first part is the jail itself, to which all others belong. Blocking.
#[must_use]
pub fn jail_parts(root: &Path) -> Vec<JailPart> {
    let text = |error: io::Error| error.to_string();
    derive_parts(Facts {
        entered: Jail::probe(root).map_err(text),
        owners: probe_owners(root).map_err(text),
        cgroup: probe_cgroup().map_err(text),
        can_bound_files: can_bound_files(),
    })
}

fn probe_owners(root: &Path) -> io::Result<()> {
    std::fs::create_dir_all(root)?;
    let mapped = Owners::of(FIRST_UID).mount(root, false);
    std::fs::remove_dir(root)?;
    mapped.map(drop)
}

fn probe_cgroup() -> io::Result<Vec<&'static str>> {
    let id = InstanceId::new("probe", u64::from(std::process::id()));
    let made = cgroup::create(&id, &Limits { memory_bytes: 1 << 30, cpus: 1, devices: vec![] });
    let removed = cgroup::remove_cgroup(&id, None);
    made.and(removed)?;
    cgroup::missing_controllers()
}

/// Derives the parts from the findings. Pure.
fn derive_parts(facts: Facts) -> Vec<JailPart> {
    let part = |name, what, missing, help| JailPart { name, what, missing, help };
    let (jail, user_namespace) = match facts.entered {
        Ok(true) => (None, None),
        Ok(false) => (None, Some("the host forbids user namespaces to VMMs; the user stays".to_owned())),
        Err(why) => {
            (Some(format!("VMMs have the rights of the node: {why}")), Some("without a jail".to_owned()))
        }
    };
    let without = |why: String| if jail.is_some() { "without a jail".to_owned() } else { why };
    let owners = facts
        .owners
        .err()
        .map(|why| without(format!("no Firecracker and no Cloud Hypervisor in a jail: {why}")));
    let cgroup = match facts.cgroup {
        Ok(absent) if absent.is_empty() => None,
        Ok(absent) => Some(format!("the host has no controller {}", absent.join(", "))),
        Err(why) => Some(format!("VMMs are not limited: {why}")),
    };
    let file_length = (!facts.can_bound_files).then(|| {
        "without CAP_SYS_RESOURCE the limit could not be raised for disks that come later".to_owned()
    });
    let [cgroup, file_length] = [cgroup, file_length].map(|missing| missing.map(without));
    vec![
        part(
            "jail",
            "each VMM has a user, namespaces and a root of its own",
            jail.clone(),
            "run the node as root of the host; in a container, with CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID",
        ),
        part(
            "jail user namespace",
            "each VMM has a user namespace of its own",
            user_namespace,
            "allow them: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, \
             kernel.apparmor_restrict_unprivileged_userns",
        ),
        part(
            "jail disks",
            "disks are shown as files of the VMM's user",
            owners,
            "Linux 5.12 or newer, and a state directory on ext4, XFS or Btrfs",
        ),
        part(
            "jail cgroup",
            "memory, CPU time, threads and I/O of each VMM are limited",
            cgroup,
            "let the node write /sys/fs/cgroup, and delegate memory, pids, cpu and io to it",
        ),
        part(
            "jail file length",
            "no VMM writes a file longer than its disks and its memory",
            file_length,
            "give the node CAP_SYS_RESOURCE",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_table() {
        let good = Facts { entered: Ok(true), owners: Ok(()), cgroup: Ok(vec![]), can_bound_files: true };
        for (why, facts, missing) in [
            ("all is there", good.clone(), vec![]),
            (
                "no root",
                Facts { entered: Err("not root".into()), ..good.clone() },
                vec!["jail", "jail user namespace"],
            ),
            ("no user namespaces", Facts { entered: Ok(false), ..good.clone() }, vec!["jail user namespace"]),
            ("an overlay", Facts { owners: Err("EINVAL".into()), ..good.clone() }, vec!["jail disks"]),
            ("no io", Facts { cgroup: Ok(vec!["io"]), ..good.clone() }, vec!["jail cgroup"]),
            ("read-only cgroups", Facts { cgroup: Err("EROFS".into()), ..good.clone() }, vec!["jail cgroup"]),
            ("no capability", Facts { can_bound_files: false, ..good.clone() }, vec!["jail file length"]),
        ] {
            let parts = derive_parts(facts);
            let found: Vec<_> =
                parts.iter().filter(|part| part.missing.is_some()).map(|part| part.name).collect();
            assert_eq!(found, missing, "{why}");
        }
    }

    #[test]
    fn jail_with_disks_is_possible_for_host_root() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        let dir = tempfile::tempdir().unwrap();
        let parts = jail_parts(&dir.path().join("probe"));
        for name in ["jail", "jail user namespace", "jail disks"] {
            let part = parts.iter().find(|part| part.name == name).unwrap();
            assert_eq!(part.missing, None, "{name}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }
}
