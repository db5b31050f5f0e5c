//! Cgroups of the processes that the agent starts (kernel, Documentation/admin-guide/cgroup-v2.rst).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coracle_proto::guest::{CgroupLimits, ContainerStatistics};
use rustix::fs::{Mode, OFlags};

use crate::error::Error;

const HIERARCHY: &str = "/sys/fs/cgroup";
/// Cgroup of the workload in a guest without containers, and parent of all containers in a sandbox.
pub(crate) const WORKLOAD: &str = "workload";
pub(crate) const CONTAINERS: &str = "containers";
const CONTROLLERS: [&str; 4] = ["+cpu", "+memory", "+pids", "+io"];
/// Maximum number of processes of a container whose file descriptors are counted.
const INSPECTED_MAX: u64 = 256;
/// Prefixes of files that a request may set in addition to the limits.
const UNIFIED: [&str; 4] = ["cpu.", "memory.", "pids.", "io."];
/// Time for killed processes to leave their cgroup.
const EMPTY_WAIT: Duration = Duration::from_secs(2);
const EMPTY_POLL: Duration = Duration::from_millis(2);
/// Period of CPU quotas, microseconds.
const PERIOD_US: u64 = 100_000;

/// Whether the OOM killer has killed any process since the kernel booted, in a cgroup or not.
pub(crate) fn was_out_of_memory() -> bool {
    field(&fs::read_to_string("/proc/vmstat").unwrap_or_default(), "oom_kill") > 0
}

/// Cgroup, by its directory.
#[derive(Debug)]
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes the cgroup with its limits, and its parents. Idempotent.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn create(path: impl AsRef<Path>, limits: &CgroupLimits) -> Result<Self, Error> {
        let path = Path::new(HIERARCHY).join(path);
        fs::create_dir_all(&path).map_err(Error::io(format!("make {}", path.display())))?;
        let above: Vec<_> = path.ancestors().skip(1).take_while(|dir| dir.starts_with(HIERARCHY)).collect();
        for dir in above.into_iter().rev() {
            for controller in CONTROLLERS {
                let _not_in_every_kernel = fs::write(dir.join("cgroup.subtree_control"), controller);
            }
        }
        let cgroup = Self(path);
        cgroup.update(limits)?;
        Ok(cgroup)
    }

    /// Refers to a cgroup that may not exist.
    pub(crate) fn at(path: impl AsRef<Path>) -> Self {
        Self(Path::new(HIERARCHY).join(path))
    }

    /// Sets the given limits.
    pub(crate) fn update(&self, limits: &CgroupLimits) -> Result<(), Error> {
        for (file, value) in settings(limits)? {
            let path = self.0.join(file);
            fs::write(&path, &value).map_err(Error::io(format!("write {value} to {}", path.display())))?;
        }
        Ok(())
    }

    /// Opens `cgroup.procs`: a process that writes to it joins the cgroup.
    pub(crate) fn procs(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(self.0.join("cgroup.procs"), flags, Mode::empty())?)
    }

    /// Sends SIGKILL to every process in the cgroup.
    pub(crate) fn kill(&self) {
        let _gone = fs::write(self.0.join("cgroup.kill"), "1");
    }

    /// Whether the OOM killer has killed a process of the cgroup.
    pub(crate) fn oom_killed(&self) -> bool {
        field(&self.read("memory.events"), "oom_kill") > 0
    }

    /// Makes a child cgroup without limits of its own, for a process that joins the container.
    pub(crate) fn join(&self) -> io::Result<Joined> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let path = self.0.join(format!("exec-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&path)?;
        Ok(Joined(Self(path)))
    }

    /// Removes the cgroup, once its killed processes have ended; blocking. Idempotent.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let since = Instant::now();
        loop {
            match self.try_remove() {
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy && since.elapsed() < EMPTY_WAIT => {
                    std::thread::sleep(EMPTY_POLL);
                }
                removed => return removed,
            }
        }
    }

    /// Removes the cgroup and disables the controllers of its parent; blocking. Idempotent.
    pub(crate) fn remove_all(self) -> io::Result<()> {
        self.remove()?;
        let parent = self.0.parent().unwrap_or(Path::new(HIERARCHY));
        for controller in CONTROLLERS {
            let off = controller.replace('+', "-");
            let _not_in_every_kernel = fs::write(parent.join("cgroup.subtree_control"), off);
        }
        Ok(())
    }

    fn try_remove(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let _ = fs::remove_dir(entry.path());
            }
        }
        match fs::remove_dir(&self.0) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    pub(crate) fn statistics(&self) -> ContainerStatistics {
        let (cpu, memory, events) =
            (self.read("cpu.stat"), self.read("memory.stat"), self.read("memory.events"));
        let number = |file: &str| self.read(file).trim().parse().unwrap_or(0);
        let usage: u64 = number("memory.current");
        let micro = |name| field(&cpu, name).saturating_mul(1000);
        ContainerStatistics {
            cpu_usage_ns: micro("usage_usec"),
            cpu_user_ns: micro("user_usec"),
            cpu_system_ns: micro("system_usec"),
            cpu_throttled_ns: micro("throttled_usec"),
            cpu_periods: field(&cpu, "nr_periods"),
            cpu_throttled_periods: field(&cpu, "nr_throttled"),
            memory_usage_bytes: usage,
            memory_working_set_bytes: usage.saturating_sub(field(&memory, "inactive_file")),
            memory_peak_bytes: number("memory.peak"),
            memory_kernel_bytes: field(&memory, "kernel"),
            memory_mapped_file_bytes: field(&memory, "file_mapped"),
            memory_swap_bytes: number("memory.swap.current"),
            memory_limit_hits: field(&events, "max"),
            oom_kills: field(&events, "oom_kill"),
            threads: number("pids.current"),
            memory_rss_bytes: field(&memory, "anon"),
            memory_cache_bytes: field(&memory, "file"),
            page_faults: field(&memory, "pgfault"),
            major_page_faults: field(&memory, "pgmajfault"),
            ..self.processes()
        }
    }

    /// Counts processes and their open files. A process that ends meanwhile is not counted.
    fn processes(&self) -> ContainerStatistics {
        let mut counted = ContainerStatistics::default();
        let below = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path());
        for dir in std::iter::once(self.0.clone()).chain(below.filter(|path| path.is_dir())) {
            let members = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            for pid in members.lines() {
                counted.processes = counted.processes.saturating_add(1);
                if counted.processes > INSPECTED_MAX {
                    continue;
                }
                let open = fs::read_dir(Path::new("/proc").join(pid).join("fd"));
                for entry in open.into_iter().flatten().flatten() {
                    let target = fs::read_link(entry.path()).unwrap_or_default();
                    let is_socket = target.as_os_str().as_encoded_bytes().starts_with(b"socket:");
                    counted.file_descriptors = counted.file_descriptors.saturating_add(1);
                    counted.sockets = counted.sockets.saturating_add(u64::from(is_socket));
                }
            }
        }
        counted
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap_or_default()
    }
}

/// Cgroup of a process that joined a container. It is removed when dropped, if the process has ended.
#[derive(Debug)]
pub(crate) struct Joined(Cgroup);

impl Joined {
    /// Opens `cgroup.procs`: a process that writes to it joins the cgroup.
    pub(crate) fn procs(&self) -> io::Result<OwnedFd> {
        self.0.procs()
    }

    /// Sends SIGKILL to the process and its descendants.
    pub(crate) fn kill(&self) {
        self.0.kill();
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let _removed_with_the_container = fs::remove_dir(&self.0.0);
    }
}

/// Files of the limits, and the values to write.
fn settings(limits: &CgroupLimits) -> Result<Vec<(&str, String)>, Error> {
    let or_max = |value: u64| if value == 0 { "max".to_owned() } else { value.to_string() };
    let all = [
        ("cpu.max", limits.cpu_quota_us.map(|quota| format!("{} {PERIOD_US}", or_max(quota)))),
        ("cpu.weight", limits.cpu_weight.filter(|weight| *weight > 0).map(|w| w.to_string())),
        ("memory.max", limits.memory_max_bytes.map(or_max)),
        ("pids.max", limits.pids_max.map(or_max)),
    ];
    let plain = |file: &str| {
        file.len() <= 64
            && file.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._".contains(&b))
            && UNIFIED.iter().any(|controller| file.starts_with(controller))
    };
    if let Some(file) = limits.unified.keys().find(|file| !plain(file)) {
        return Err(Error::invalid(format!("invalid cgroup file {file:?}")));
    }
    let unified = limits.unified.iter().map(|(file, value)| (file.as_str(), value.clone()));
    Ok(all.into_iter().filter_map(|(file, value)| Some((file, value?))).chain(unified).collect())
}

/// Value of a name in a flat-keyed file.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_limits_map_to_interface_files() {
        let limits = CgroupLimits {
            cpu_quota_us: Some(50_000),
            cpu_weight: Some(0),
            memory_max_bytes: Some(1 << 20),
            pids_max: Some(0),
            unified: [("memory.oom.group".to_owned(), "1".to_owned())].into(),
        };
        let want = [
            ("cpu.max", "50000 100000"),
            ("memory.max", "1048576"),
            ("pids.max", "max"),
            ("memory.oom.group", "1"),
        ];
        let got = settings(&limits).unwrap();
        assert_eq!(got.iter().map(|(file, value)| (*file, value.as_str())).collect::<Vec<_>>(), want);
        assert!(settings(&CgroupLimits::default()).unwrap().is_empty());
        for bad in ["cgroup.procs", "memory.max/../x", "../x", ""] {
            let unified = [(bad.to_owned(), "1".to_owned())].into();
            assert!(settings(&CgroupLimits { unified, ..CgroupLimits::default() }).is_err(), "{bad}");
        }
    }

    #[test]
    fn fields_are_found_by_whole_name() {
        let text = "oom 3\noom_kill 2\nbad x\n";
        assert_eq!((field(text, "oom"), field(text, "oom_kill")), (3, 2));
        assert_eq!((field(text, "bad"), field(text, "absent")), (0, 0));
    }
}
