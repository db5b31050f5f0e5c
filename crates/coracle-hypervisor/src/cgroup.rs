//! Cgroup of a VMM: limits on its use of host memory, CPUs, process ids and block devices.
//!
//! The cgroup is `<hierarchy>/coracle/<12 hex of the instance>`, outside of the daemon's own cgroup, so that a VMM survives the
//! end of the daemon's unit or container. The VMM of a pod moves below the cgroup of its pod, `<hierarchy>/<of the pod>/<12
//! hex>`, where the kubelet accounts for its pods. Supported are the hierarchies of the host: one of version 2 (Linux,
//! Documentation/admin-guide/cgroup-v2.rst), or one for each controller of version 1 (cgroups(7)).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_types::InstanceId;

pub use self::devices::DeviceNumber;

use crate::{Accelerator, VmmConfig};

mod devices;

/// Parent of the VMM cgroups in each hierarchy.
const PARENT: &str = "coracle";
/// Controllers that limit a VMM.
const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", IO];
/// Controller of block devices, by its name in version 2 and in version 1.
const IO: &str = "io";
const IO_OF_V1: &str = "blkio";
/// Limit on the bytes per second that a VMM reads from a device, and on those that it writes. The limit exceeds the rate of
/// most hosts' disks, and so bounds only disks that serve many VMs.
const IO_BYTES_PER_SECOND: u64 = 1 << 30;
/// Limit on read operations per second, and on write operations.
const IO_OPERATIONS_PER_SECOND: u64 = 50_000;
/// File of version 1 that moves a single thread (Linux, Documentation/admin-guide/cgroup-v1/cgroups.rst).
const TASKS: &str = "tasks";
/// Controllers of version 1 that only account.
const ACCOUNTING: [&str; 1] = ["cpuacct"];
/// Maximum number of threads of a VMM, disk workers included.
const PIDS_MAX: u64 = 512;
/// Period of the CPU quota, microseconds: the kernel's default.
const PERIOD_US: u64 = 100_000;
/// Time that the last process may take to leave its cgroup after its exit.
const EMPTY_WITHIN: Duration = Duration::from_secs(2);

/// Resource limits of a VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory of the guest and the VMM, bytes.
    pub memory_bytes: u64,
    /// CPU time, as a number of CPUs.
    pub cpus: u64,
    /// Block devices of the VM's disks. The VMM uses each up to fixed rates.
    pub devices: Vec<DeviceNumber>,
}

impl Limits {
    /// Returns limits that suffice for a VMM: beside guest memory, memory for devices, and under TCG for translated code, whose
    /// buffer QEMU limits to 1 GiB; beside the vCPUs, one CPU. Looks up the devices of the disks that exist.
    #[must_use]
    pub fn of(vmm_config: &VmmConfig) -> Self {
        let overhead_mib = match vmm_config.accelerator {
            Accelerator::Kvm => 512,
            Accelerator::Tcg => 512 + 1024,
        };
        Self {
            memory_bytes: (u64::from(vmm_config.memory.get()) + overhead_mib) << 20,
            cpus: u64::from(vmm_config.vcpus.get()) + 1,
            devices: devices::of_disks(vmm_config.disks.iter().map(|disk| disk.path.as_path())),
        }
    }
}

/// CPU weight of every VMM, the kernel's default: file and value of version 2, of version 1.
const WEIGHT: [(&str, &str); 2] = [("cpu.weight", "100"), ("cpu.shares", "1024")];
/// CPU weight of a VMM in the background: a tenth of [`WEIGHT`].
const BACKGROUND_WEIGHT: [(&str, &str); 2] = [("cpu.weight", "10"), ("cpu.shares", "102")];

/// Cgroup hierarchy: version, root, and those of [`CONTROLLERS`] that it has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    root: PathBuf,
    is_v2: bool,
    controllers: Vec<&'static str>,
}

impl Hierarchy {
    /// Creates the cgroup of an instance. Idempotent.
    fn create(&self, id: &InstanceId) -> io::Result<PathBuf> {
        if self.is_v2 {
            // A child cgroup has only the controllers that its ancestors enable in `cgroup.subtree_control`.
            for dir in [self.root.clone(), self.root.join(PARENT)] {
                fs::create_dir_all(&dir)?;
                let passed: Vec<_> = self.controllers.iter().map(|name| format!("+{name}")).collect();
                write(&dir.join("cgroup.subtree_control"), &passed.join(" "))?;
            }
        }
        let dir = self.dir(id);
        fs::create_dir_all(&dir)?;
        Ok(dir)
    }

    fn dir(&self, id: &InstanceId) -> PathBuf {
        self.root.join(PARENT).join(id.short())
    }
}

/// Files and cgroups through which a process enters its cgroup without waiting. A process that moves by `cgroup.procs` waits
/// some milliseconds for an RCU grace period, because its threads must neither be created nor exit (Linux,
/// kernel/cgroup/cgroup.c, `cgroup_procs_write_start`).
#[derive(Debug, Default)]
pub(crate) struct Entrances {
    /// `tasks` files of version 1: a process of one thread that writes `0` moves itself into the cgroup.
    pub(crate) tasks: Vec<File>,
    /// Cgroup of version 2, in which the child is created (clone(2), `CLONE_INTO_CGROUP`).
    pub(crate) v2: Option<File>,
}

/// Creates the cgroup of an instance with these limits. Idempotent.
///
/// # Errors
/// With the file that cannot be written. In a container, for example, cgroups may be read-only.
pub(crate) fn create(id: &InstanceId, limits: &Limits) -> io::Result<Entrances> {
    let mut entrances = Entrances::default();
    for hierarchy in hierarchies()? {
        let dir = hierarchy.create(id)?;
        set(&dir, &hierarchy, limits)?;
        if hierarchy.is_v2 {
            entrances.v2 = Some(File::open(&dir).map_err(|e| with_path(e, &dir))?);
        } else {
            let tasks = dir.join(TASKS);
            entrances.tasks.push(File::options().write(true).open(&tasks).map_err(|e| with_path(e, &tasks))?);
        }
    }
    Ok(entrances)
}

/// Creates the cgroup of an instance whose VMM has not started, with the background CPU weight: the VMM yields the CPUs to
/// those of VMs until [`to_foreground`]. Idempotent. Blocking, briefly.
///
/// # Errors
/// With the file that cannot be written.
pub fn create_in_background(id: &InstanceId) -> io::Result<()> {
    for hierarchy in hierarchies_with_cpu()? {
        let dir = hierarchy.create(id)?;
        set_weight(&dir, &hierarchy, BACKGROUND_WEIGHT)?;
    }
    Ok(())
}

/// Gives the VMM of an instance the default CPU weight of VMs. Idempotent; does nothing when the cgroup does not exist.
/// Blocking, briefly.
///
/// # Errors
/// With the file that cannot be written.
pub fn to_foreground(id: &InstanceId) -> io::Result<()> {
    for hierarchy in hierarchies_with_cpu()? {
        match set_weight(&hierarchy.dir(id), &hierarchy, WEIGHT) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            set => set?,
        }
    }
    Ok(())
}

fn hierarchies_with_cpu() -> io::Result<impl Iterator<Item = Hierarchy>> {
    Ok(hierarchies()?.into_iter().filter(|hierarchy| hierarchy.controllers.contains(&"cpu")))
}

fn set_weight(dir: &Path, hierarchy: &Hierarchy, [v2, v1]: [(&str, &str); 2]) -> io::Result<()> {
    let (file, value) = if hierarchy.is_v2 { v2 } else { v1 };
    write(&dir.join(file), value)
}

/// Returns files by which a process leaves the daemon's cgroup in the hierarchies that do not limit a VMM. The manager that
/// ends a unit or a container of version 1 kills all processes in its cgroup of one of these hierarchies (`devices`, `freezer`,
/// systemd's). Files that cannot be opened are left out, and so is a hierarchy of version 2 in whose root the daemon is.
pub(crate) fn open_exit_files() -> io::Result<Vec<File>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let roots = unlimited_roots(&mounts, &hierarchies()?);
    let in_root = fs::read_to_string("/proc/self/cgroup")?.lines().any(|line| line == "0::/");
    let open = |root: PathBuf| {
        let write = |name| File::options().write(true).open(root.join(name));
        write(TASKS).ok().or_else(|| if in_root { None } else { write("cgroup.procs").ok() })
    };
    Ok(roots.into_iter().filter_map(open).collect())
}

/// Returns the roots of the hierarchies that limit no VMM. Pure.
fn unlimited_roots(mounts: &str, limiting: &[Hierarchy]) -> BTreeSet<PathBuf> {
    let all = mounts.lines().filter_map(cgroup_mount).map(|(root, ..)| root);
    all.filter(|root| limiting.iter().all(|other| other.root != *root)).collect()
}

/// Moves the VMM of an instance to a cgroup of its own below `parent`, which another program created: a path from the roots of
/// the hierarchies, without `..`. In a hierarchy without `parent` the VMM stays where it is. Idempotent. Blocking.
///
/// # Errors
/// With the file that cannot be written; the VMM may be in the new cgroups of some hierarchies.
pub fn move_to_cgroup(id: &InstanceId, vmm: u32, parent: &str, limits: &Limits) -> io::Result<()> {
    let Some(parent) = below_root(parent) else {
        let why = format!("invalid cgroup \"{parent}\": not a path below the root");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    };
    for hierarchy in all_hierarchies()? {
        let parent = hierarchy.root.join(&parent);
        if !parent.is_dir() {
            continue;
        }
        if hierarchy.is_v2 {
            let passed: Vec<_> = hierarchy.controllers.iter().map(|name| format!("+{name}")).collect();
            write(&parent.join("cgroup.subtree_control"), &passed.join(" "))?;
        }
        let dir = parent.join(id.short());
        fs::create_dir_all(&dir)?;
        set(&dir, &hierarchy, limits)?;
        write(&dir.join("cgroup.procs"), &vmm.to_string())?;
    }
    Ok(())
}

/// Converts the path of a cgroup, as kubelets write it, to a path relative to the root of a hierarchy. A systemd slice is below
/// the slices that its name contains (systemd.slice(5)). Pure.
fn below_root(parent: &str) -> Option<PathBuf> {
    if let Some(name) = parent.strip_suffix(".slice").filter(|name| !name.contains('/')) {
        let parts: Vec<_> = name.split('-').collect();
        let slices = (1..=parts.len()).map(|count| format!("{}.slice", parts[..count].join("-")));
        return (!parts.contains(&"")).then(|| slices.collect());
    }
    let relative = Path::new(parent.trim_start_matches('/'));
    let is_plain = relative.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    (is_plain && !relative.as_os_str().is_empty()).then(|| relative.to_owned())
}

/// Removes the cgroup of an instance whose processes have ended, and its cgroup below `parent`, if the VMM was moved there.
/// Idempotent. Blocking, briefly.
///
/// # Errors
/// When a process is still in the cgroup.
pub fn remove_cgroup(id: &InstanceId, parent: Option<&str>) -> io::Result<()> {
    let deadline = Instant::now() + EMPTY_WITHIN;
    let moved = parent.and_then(below_root);
    let parents = [Some(PathBuf::from(PARENT)), moved].into_iter().flatten();
    let dirs = all_hierarchies()?.into_iter().map(|hierarchy| hierarchy.root);
    let dirs: Vec<_> = dirs.collect();
    for dir in parents.flat_map(|parent| dirs.iter().map(move |root| root.join(&parent).join(id.short()))) {
        loop {
            match fs::remove_dir(&dir) {
                Ok(()) => break,
                Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(e) => return Err(with_path(e, &dir)),
            }
        }
    }
    Ok(())
}

/// Returns those of [`CONTROLLERS`] that this host lacks, by their names in version 2.
pub(crate) fn missing_controllers() -> io::Result<Vec<&'static str>> {
    let hierarchies = hierarchies()?;
    let is_there = |name: &&str| hierarchies.iter().any(|one| one.controllers.contains(name));
    Ok(CONTROLLERS.into_iter().filter(|name| !is_there(name)).collect())
}

/// Returns the hierarchies of this host with any of [`CONTROLLERS`]; version 2 alone if it has them all.
fn hierarchies() -> io::Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let controllers = |root: &Path| fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    Ok(choose(&mounts, controllers))
}

/// Like [`hierarchies`], with the accounting hierarchies of version 1.
fn all_hierarchies() -> io::Result<Vec<Hierarchy>> {
    let mut all = hierarchies()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    all.extend(accounting_hierarchies(&mounts, &all));
    Ok(all)
}

/// Returns the hierarchies of version 1 with one of [`ACCOUNTING`] and none of [`CONTROLLERS`]. Pure.
fn accounting_hierarchies(mounts: &str, limiting: &[Hierarchy]) -> Vec<Hierarchy> {
    let counts = |(root, kind, options): (PathBuf, &str, &str)| {
        let counts = kind == "cgroup" && options.split(',').any(|name| ACCOUNTING.contains(&name.trim()));
        let is_new = limiting.iter().all(|other| other.root != root);
        (counts && is_new).then(|| Hierarchy { root, is_v2: false, controllers: vec![] })
    };
    mounts.lines().filter_map(cgroup_mount).filter_map(counts).collect()
}

/// Chooses the hierarchies from `mounts`. Pure but for `v2_controllers`, which returns `cgroup.controllers` of a root.
fn choose(mounts: &str, v2_controllers: impl Fn(&Path) -> String) -> Vec<Hierarchy> {
    let mut chosen: Vec<Hierarchy> = Vec::new();
    for (root, kind, options) in mounts.lines().filter_map(cgroup_mount) {
        let has =
            |list: &str, separator: char, name: &str| list.split(separator).any(|one| one.trim() == name);
        let is_v2 = kind == "cgroup2";
        let known = |name: &str| match is_v2 {
            true => has(&v2_controllers(&root), ' ', name),
            false => has(options, ',', if name == IO { IO_OF_V1 } else { name }),
        };
        let taken = |name: &&str| chosen.iter().any(|other| other.controllers.contains(name));
        let controllers: Vec<_> =
            CONTROLLERS.into_iter().filter(|name| known(name)).filter(|name| !taken(name)).collect();
        if !controllers.is_empty() {
            chosen.push(Hierarchy { root, is_v2, controllers });
        }
    }
    chosen
}

/// Returns mount point, file system and options of a line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)) that is a cgroup
/// mount.
fn cgroup_mount(line: &str) -> Option<(PathBuf, &str, &str)> {
    let (mount, rest) = line.split_once(" - ")?;
    let root = mount.split(' ').nth(4)?;
    let mut fields = rest.split(' ');
    let kind = fields.next().filter(|kind| matches!(*kind, "cgroup" | "cgroup2"))?;
    Some((root.into(), kind, fields.nth(1)?))
}

/// Returns the files of the cgroup with the values to write. Pure.
fn settings(hierarchy: &Hierarchy, limits: &Limits) -> Vec<(&'static str, String)> {
    let quota = limits.cpus * PERIOD_US;
    let setting = |controller: &&str| match (*controller, hierarchy.is_v2) {
        ("memory", true) => vec![("memory.max", limits.memory_bytes.to_string())],
        ("memory", false) => vec![("memory.limit_in_bytes", limits.memory_bytes.to_string())],
        ("cpu", true) => vec![("cpu.max", format!("{quota} {PERIOD_US}"))],
        ("cpu", false) => {
            vec![("cpu.cfs_period_us", PERIOD_US.to_string()), ("cpu.cfs_quota_us", quota.to_string())]
        }
        (IO, is_v2) => limits.devices.iter().flat_map(|device| io_settings(*device, is_v2)).collect(),
        _ => vec![("pids.max", PIDS_MAX.to_string())],
    };
    hierarchy.controllers.iter().flat_map(setting).collect()
}

/// Returns the limits of a VMM on one block device.
fn io_settings(device: DeviceNumber, is_v2: bool) -> Vec<(&'static str, String)> {
    let (bytes, operations) = (IO_BYTES_PER_SECOND, IO_OPERATIONS_PER_SECOND);
    if is_v2 {
        let rates = format!("{device} rbps={bytes} wbps={bytes} riops={operations} wiops={operations}");
        return vec![("io.max", rates)];
    }
    [
        ("blkio.throttle.read_bps_device", bytes),
        ("blkio.throttle.write_bps_device", bytes),
        ("blkio.throttle.read_iops_device", operations),
        ("blkio.throttle.write_iops_device", operations),
    ]
    .map(|(file, rate)| (file, format!("{device} {rate}")))
    .to_vec()
}

/// Writes the limits of a cgroup. A device that cannot be limited, because it has no queue, is skipped.
fn set(dir: &Path, hierarchy: &Hierarchy, limits: &Limits) -> io::Result<()> {
    for (file, value) in settings(hierarchy, limits) {
        match write(&dir.join(file), &value) {
            Err(error) if file.contains("throttle") || file == "io.max" => {
                tracing::debug!(file, value, %error, "device not limited");
            }
            written => written?,
        }
    }
    Ok(())
}

fn write(file: &Path, value: &str) -> io::Result<()> {
    fs::write(file, value).map_err(|e| with_path(e, file))
}

fn with_path(error: io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
40 25 0:35 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 25 0:36 / /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory
42 25 0:37 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
46 25 0:41 / /sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio
43 25 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
44 25 0:39 / /proc rw,relatime - proc proc rw
";
    const V2: &str = "30 25 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn pod_cgroup_parent_path_table() {
        for (parent, want) in [
            ("/kubepods/burstable/pod1", Some("kubepods/burstable/pod1")),
            (
                "kubepods-besteffort-pod1_2.slice",
                Some("kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice"),
            ),
            ("/../etc", None),
            ("a/../../b", None),
            ("/", None),
            ("", None),
            ("-.slice", None),
        ] {
            assert_eq!(below_root(parent), want.map(PathBuf::from), "{parent}");
        }
    }

    #[test]
    fn accounting_hierarchy_follows_the_limits() {
        let mounts =
            format!("{V1}45 25 0:40 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct\n");
        let limiting = choose(&mounts, |_| String::new());
        let found = accounting_hierarchies(&mounts, &limiting);
        assert_eq!(
            found.iter().map(|h| h.root.as_path()).collect::<Vec<_>>(),
            [Path::new("/sys/fs/cgroup/cpuacct")]
        );
        let together = V1.replace("rw,cpu\n", "rw,cpu,cpuacct\n");
        assert!(
            accounting_hierarchies(&together, &choose(&together, |_| String::new())).is_empty(),
            "one hierarchy for both"
        );
    }

    #[test]
    fn vmm_leaves_hierarchies_without_limits() {
        let mounts = format!("{V1}47 25 0:42 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n");
        let left = |mounts: &str, v2: &str| {
            unlimited_roots(mounts, &choose(mounts, |_| v2.to_owned())).into_iter().collect::<Vec<_>>()
        };
        let at = |name: &str| Path::new("/sys/fs/cgroup").join(name);
        assert_eq!(left(&mounts, ""), [at("freezer"), at("unified")]);
        assert_eq!(left(V2, "cpu io memory pids"), Vec::<PathBuf>::new());
    }

    #[test]
    fn hierarchies_table() {
        let v1 = |name, controller| Hierarchy {
            root: Path::new("/sys/fs/cgroup").join(name),
            is_v2: false,
            controllers: vec![controller],
        };
        for (why, mounts, v2, want) in [
            (
                "version 1",
                V1,
                "",
                vec![v1("cpu", "cpu"), v1("memory", "memory"), v1("pids", "pids"), v1("blkio", "io")],
            ),
            (
                "version 2",
                V2,
                "cpuset cpu io memory pids\n",
                vec![Hierarchy {
                    root: "/sys/fs/cgroup".into(),
                    is_v2: true,
                    controllers: vec!["memory", "pids", "cpu", "io"],
                }],
            ),
            ("version 2 without controllers", V2, "", vec![]),
            ("none", "", "", vec![]),
        ] {
            assert_eq!(choose(mounts, |_| v2.to_owned()), want, "{why}");
        }
    }

    #[test]
    fn settings_table() {
        let devices = vec![DeviceNumber { major: 254, minor: 0 }];
        let limits = Limits { memory_bytes: 1 << 30, cpus: 3, devices };
        let of = |is_v2| {
            let hierarchy = Hierarchy { root: "/".into(), is_v2, controllers: CONTROLLERS.to_vec() };
            let lines =
                settings(&hierarchy, &limits).into_iter().map(|(file, value)| format!("{file}={value}"));
            lines.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            of(true),
            "memory.max=1073741824 pids.max=512 cpu.max=300000 100000 \
             io.max=254:0 rbps=1073741824 wbps=1073741824 riops=50000 wiops=50000"
        );
        assert_eq!(
            of(false),
            "memory.limit_in_bytes=1073741824 pids.max=512 cpu.cfs_period_us=100000 cpu.cfs_quota_us=300000 \
             blkio.throttle.read_bps_device=254:0 1073741824 blkio.throttle.write_bps_device=254:0 1073741824 \
             blkio.throttle.read_iops_device=254:0 50000 blkio.throttle.write_iops_device=254:0 50000"
        );
    }

    #[test]
    fn process_moves_itself_into_a_cgroup_that_is_removed_after_it() {
        use std::os::unix::process::CommandExt;
        let id = InstanceId::new("test", 0x00c6_0bad_c0de);
        let limits = Limits { memory_bytes: 64 << 20, cpus: 1, devices: vec![] };
        for _ in 0..2 {
            let entrances = create(&id, &limits).unwrap();
            assert!(!entrances.tasks.is_empty() || entrances.v2.is_some(), "the host has cgroups");
            let mut command = std::process::Command::new("cat");
            command.arg("/proc/self/cgroup");
            // SAFETY: as in `launch::prepare_child`, only system calls that take no memory and touch only the child.
            #[allow(unsafe_code, reason = "pre_exec has no safe form")]
            unsafe {
                command.pre_exec(move || crate::jail::fork_in(&entrances));
            }
            let cgroups = String::from_utf8(command.output().unwrap().stdout).unwrap();
            assert!(
                cgroups.contains("memory:/coracle/00c60badc0de")
                    || cgroups.contains("::/coracle/00c60badc0de"),
                "{cgroups}"
            );
            remove_cgroup(&id, None).unwrap();
            remove_cgroup(&id, None).unwrap();
        }
    }
}
