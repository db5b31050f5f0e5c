//! What must hold of every VMM that a driver starts with a uid, read from `/proc` (proc(5)): the same for a real VMM and
//! for a stand-in.

use std::path::{Path, PathBuf};

use coracle_hypervisor::{Driver, ProcessId, VmmConfig, remove_cgroup};

/// Starts the VMM of `vmm_config`, which has a uid, looks at it and ends it.
///
/// # Panics
/// When it has a right or sees a file that it must not.
#[expect(clippy::unwrap_used, clippy::expect_used, reason = "a test reports by panicking")]
pub async fn check_jail(driver: &dyn Driver, vmm_config: &VmmConfig) {
    let uid = vmm_config.uid.expect("a uid");
    assert_ne!(uid, 0);
    let vmm = driver.start(vmm_config).await.unwrap();
    assert_eq!(driver.find(vmm_config).await.unwrap(), Some(vmm));
    assert_rights(vmm, uid);
    let root = PathBuf::from(format!("/proc/{}/root", vmm.pid));
    let sees = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path)).exists();
    assert!(sees(Path::new("/usr")), "the libraries of the host");
    assert!(!sees(&vmm_config.state_dir), "{}", vmm_config.state_dir.display());
    assert!(!sees(&vmm_config.run_dir), "{}", vmm_config.run_dir.display());
    for path in
        ["/root", "/home", "/var", "/sys", "/etc/passwd", "/etc/shadow", "/etc/coracle", "/run/secrets"]
    {
        let leads_to_own = [&vmm_config.kernel, &vmm_config.initrd].iter().any(|file| file.starts_with(path));
        assert!(leads_to_own || !sees(Path::new(path)), "{path}");
    }
    let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", vmm.pid)).unwrap();
    let own = format!("/coracle/{}", vmm_config.id.short());
    for controller in ["memory", "pids", "cpu"] {
        let line = cgroups
            .lines()
            .find(|line| line.starts_with("0::/coracle/") || line.contains(&format!(":{controller}:")));
        assert!(line.is_some_and(|line| line.ends_with(&own)), "{controller}: {cgroups}");
    }
    driver.kill(vmm).await.unwrap();
    remove_cgroup(&vmm_config.id, None).unwrap();
    assert_eq!(driver.find(vmm_config).await.unwrap(), None);
}

/// No capability, no way to a new one, a user and namespaces of its own.
fn assert_rights(vmm: ProcessId, uid: u32) {
    let own = uid.to_string();
    for field in ["Uid", "Gid"] {
        assert!(status(vmm, field).split(' ').all(|id| id == own), "{field}: {}", status(vmm, field));
    }
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(vmm, field), "0000000000000000", "{field}");
    }
    assert_eq!(status(vmm, "NoNewPrivs"), "1");
    let namespace = |pid: &str, kind: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    for kind in ["mnt", "pid", "net", "ipc", "uts", "user"] {
        let (its, ours) = (namespace(&vmm.pid.to_string(), kind), namespace("self", kind));
        assert!(its.is_some() && its != ours, "{kind}: {its:?}");
    }
}

/// A field of proc_pid_status(5).
fn status(vmm: ProcessId, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", vmm.pid)).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}
