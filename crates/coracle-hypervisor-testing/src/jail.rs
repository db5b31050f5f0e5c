//! Checks of every VMM that a driver starts with a uid, read from `/proc` (proc(5)), for real VMMs and stand-ins alike; and
//! checks of the view that a program in place of a VMM reports.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use coracle_hypervisor::launch::LOG_FILE;
use coracle_hypervisor::{Disk, Driver, Jail, Limits, ProcessId, VmmConfig, can_bound_files, remove_cgroup};
use coracle_types::InstanceId;

use crate::stand_in::view::View;

/// Paths that every jail contains, if the host has them.
const COMMON: [&str; 10] = [
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/dev/kvm",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
];
/// Directories with secrets of a node.
const SECRETS: [&str; 7] = ["/root", "/home", "/var", "/sys", "/etc/shadow", "/etc/coracle", "/run/secrets"];
const NAMESPACES: [&str; 6] = ["mnt", "pid", "net", "ipc", "uts", "user"];

/// Starts the VMM of `vmm_config`, which has a uid, checks it and ends it.
///
/// # Panics
/// When the VMM has a right or sees a file that it must not.
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
    for path in SECRETS.into_iter().chain(["/etc/passwd"]) {
        let leads_to_own = [&vmm_config.kernel, &vmm_config.initrd].iter().any(|file| file.starts_with(path));
        assert!(leads_to_own || !sees(Path::new(path)), "{path}");
    }
    let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", vmm.pid)).unwrap();
    let own = format!("/coracle/{}", vmm_config.id.short());
    for controller in ["memory", "pids", "cpu"] {
        let line = cgroups
            .lines()
            .find(|line| line.starts_with("0::/coracle/") || line.contains(&format!(":{controller}:")));
        assert!(line.is_some_and(|line| line.ends_with(&own)), "{controller}: {cgroups}");
    }
    assert_limits(vmm_config);
    let limits = fs::read_to_string(format!("/proc/{}/limits", vmm.pid)).unwrap();
    let has = |name: &str, value: &str| {
        let line = limits.lines().find(|line| line.starts_with(name)).expect("a limit of the kernel");
        assert!(line.split_whitespace().any(|word| word == value), "{line}");
    };
    has("Max open files", "4096");
    has("Max core file size", "0");
    assert_eq!(limits.contains("Max file size             unlimited"), !can_bound_files());
    driver.kill(vmm).await.unwrap();
    remove_cgroup(&vmm_config.id, None).unwrap();
    assert_eq!(driver.find(vmm_config).await.unwrap(), None);
}

/// Starts the VMMs of two VMs in the shape of `shape` with a driver whose program is that of [`crate::stand_in::view`], each
/// with a shared image and a disk of its own, and checks their reports. `extra` lists the paths that this driver's jail has
/// beside those of every jail.
///
/// # Panics
/// When a VMM has a right or sees a file that it must not.
#[expect(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]
pub async fn check_view(driver: &dyn Driver, shape: &VmmConfig, program: &Path, extra: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    // Secrets of the daemon: on disk, in its environment, and open.
    let secret = dir.path().join("tls.key");
    fs::write(&secret, "of the node").unwrap();
    let held_open = fs::File::open(&secret).unwrap();
    let image = dir.path().join("image");
    fs::write(&image, [0; 4096]).unwrap();
    let mut seen: Vec<(VmmConfig, View)> = Vec::new();
    for (name, number) in [("one", 0x0011_2233_4455), ("two", 0x0066_7788_99aa)] {
        let vmm_config = vm_of_shape(shape, dir.path(), InstanceId::new(name, number), &image);
        let vmm = driver.start(&vmm_config).await.unwrap();
        assert_limits(&vmm_config);
        let log = fs::read_to_string(vmm_config.state_dir.join(LOG_FILE)).unwrap();
        let view = serde_json::from_str(log.lines().next().unwrap_or_default());
        seen.push((vmm_config, view.unwrap_or_else(|e| panic!("{e}: {log}"))));
        driver.kill(vmm).await.unwrap();
    }
    drop(held_open);
    for (vmm_config, view) in &seen {
        assert_view(vmm_config, view, program, extra);
        remove_cgroup(&vmm_config.id, None).unwrap();
    }
    let [(_, one), (_, two)] = &seen[..] else { panic!("two VMs") };
    assert_ne!(one.status["Uid"], two.status["Uid"], "a user for each VM");
    let found = fs::metadata(&image).unwrap();
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!((found.uid(), found.nlink()), (0, 1), "the shared image is as it was");
}

/// Returns a VM of this shape in directories of its own.
#[expect(clippy::unwrap_used, reason = "a test reports by panicking")]
fn vm_of_shape(shape: &VmmConfig, dir: &Path, id: InstanceId, image: &Path) -> VmmConfig {
    let own = dir.join(id.short());
    let (state_dir, run_dir) = (own.join("state"), own.join("run"));
    for dir in [&state_dir, &run_dir] {
        fs::create_dir_all(dir).unwrap();
    }
    let disk = own.join("overlay");
    fs::write(&disk, [0; 4096]).unwrap();
    let disks = vec![Disk::raw(0, image, true), Disk::raw(usize::from(shape.slots.read_only), disk, false)];
    VmmConfig { uid: Some(Jail::uid_of(&id)), id, state_dir, run_dir, disks, ..shape.clone() }
}

#[expect(clippy::unwrap_used, reason = "a test reports by panicking")]
fn assert_view(vmm_config: &VmmConfig, view: &View, program: &Path, extra: &[&str]) {
    let uid = vmm_config.uid.unwrap().to_string();
    for field in ["Uid", "Gid"] {
        assert!(view.status[field].split(' ').all(|id| id == uid), "{field}: {}", view.status[field]);
    }
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(view.status[field], "0000000000000000", "{field}");
    }
    assert_eq!(view.status["NoNewPrivs"], "1");
    assert_eq!(view.status["Pid"], "1", "in its own pid namespace");
    for kind in NAMESPACES {
        let ours = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert_ne!(view.namespaces[kind], ours.display().to_string(), "{kind}");
    }
    assert_eq!(view.environment, Vec::<String>::new());
    let foreign = |path: &&String| path.ends_with("tls.key") || path.starts_with("/root/.");
    assert_eq!(view.descriptors.iter().find(foreign), None, "{:?}", view.descriptors);
    assert!(!view.can_write_root);
    let may_write = extra.iter().filter(|path| ["/run/slot1", "/vmm/vmm.log"].contains(path));
    assert_eq!(view.writable, may_write.map(PathBuf::from).collect::<Vec<_>>(), "its own disk and log alone");
    let bytes = 4096.max((u64::from(vmm_config.memory.get()) << 20) + (1 << 30));
    let bytes =
        if can_bound_files() { format!("{bytes} {bytes} bytes") } else { "unlimited unlimited bytes".into() };
    for (name, want) in [
        ("Max file size", bytes.as_str()),
        ("Max open files", "4096 4096 files"),
        ("Max core file size", "0 0 bytes"),
    ] {
        assert_eq!(view.limits[name], want, "{name}");
    }
    let files: BTreeSet<_> = view.files.iter().map(PathBuf::as_path).collect();
    let wanted = expected_paths(program, extra);
    assert_eq!(files, wanted.iter().map(PathBuf::as_path).collect(), "no other file is in its root");
}

/// Returns the expected paths of a root, with the directories above them.
fn expected_paths(program: &Path, extra: &[&str]) -> BTreeSet<PathBuf> {
    let common = COMMON.iter().map(Path::new).filter(|path| path.symlink_metadata().is_ok());
    let own = extra.iter().map(Path::new).chain([program, Path::new("/proc")]);
    let with_dirs = common.chain(own).flat_map(Path::ancestors);
    with_dirs.filter(|path| *path != Path::new("/")).map(Path::to_owned).collect()
}

/// Checks that the cgroup of this VM has a limit for each controller that the host has.
///
/// # Panics
/// When a limit is missing.
fn assert_limits(vmm_config: &VmmConfig) {
    let memory = ((u64::from(vmm_config.memory.get()) + 512) << 20)
        ..=((u64::from(vmm_config.memory.get()) + 1536) << 20);
    let limit = setting(&vmm_config.id, "memory.max", "memory/memory.limit_in_bytes");
    assert!(limit.parse().is_ok_and(|bytes: u64| memory.contains(&bytes)), "{limit}");
    assert_eq!(setting(&vmm_config.id, "pids.max", "pids/pids.max"), "512");
    let quota = (u64::from(vmm_config.vcpus.get()) + 1) * 100_000;
    let cpu = setting(&vmm_config.id, "cpu.max", "cpu/cpu.cfs_quota_us");
    assert!(cpu.starts_with(&quota.to_string()), "{cpu}");
    let has_io = ["coracle/io.max", "blkio/coracle"]
        .iter()
        .any(|path| Path::new("/sys/fs/cgroup").join(path).exists());
    for device in Limits::of(vmm_config).devices.iter().filter(|_| has_io) {
        let io = setting(&vmm_config.id, "io.max", "blkio/blkio.throttle.write_bps_device");
        assert!(io.contains(&device.to_string()) && io.contains("1073741824"), "{device}: {io}");
    }
}

/// Returns a setting of the VM's cgroup, in version 2 or by `<hierarchy>/<file>` in version 1.
#[expect(clippy::panic, reason = "a test reports by panicking")]
fn setting(id: &InstanceId, v2: &str, v1: &str) -> String {
    let root = Path::new("/sys/fs/cgroup");
    let (hierarchy, file) = v1.split_once('/').unwrap_or((v1, v1));
    let places = [
        root.join("coracle").join(id.short()).join(v2),
        root.join(hierarchy).join("coracle").join(id.short()).join(file),
    ];
    let read = places.iter().find_map(|place| fs::read_to_string(place).ok());
    read.unwrap_or_else(|| panic!("none of {places:?}")).trim().to_owned()
}

/// Checks that the VMM has no capability, cannot gain one, and has a user and namespaces of its own.
fn assert_rights(vmm: ProcessId, uid: u32) {
    let own = uid.to_string();
    for field in ["Uid", "Gid"] {
        assert!(status(vmm, field).split(' ').all(|id| id == own), "{field}: {}", status(vmm, field));
    }
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(vmm, field), "0000000000000000", "{field}");
    }
    assert_eq!(status(vmm, "NoNewPrivs"), "1");
    let namespace = |pid: &str, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    for kind in NAMESPACES {
        let (its, ours) = (namespace(&vmm.pid.to_string(), kind), namespace("self", kind));
        assert!(its.is_some() && its != ours, "{kind}: {its:?}");
    }
}

/// Returns a field of proc_pid_status(5).
fn status(vmm: ProcessId, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.pid)).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}
