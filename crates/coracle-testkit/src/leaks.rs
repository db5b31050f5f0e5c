//! Inventory of everything that a test could leave behind on a host.
//!
//! Interfaces, nft tables and mounts are those of the calling thread's namespaces. Processes, loop devices and files count when
//! they name one of the given directories. Cgroups have no such name: they count when their path contains `coracle` and they have
//! had no process for a second, because those of concurrent tests have a VMM. A VMM that is left counts as a process. So
//! concurrent tests do not affect each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    time::Duration,
};

use crate::tools;

/// Limit of the depth to which directories and cgroup trees are walked.
const DEPTH_MAX: usize = 16;

/// Inventory at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory(BTreeMap<&'static str, BTreeSet<String>>);

impl Inventory {
    /// Takes the inventory of everything that names `dir`, and of everything below it.
    #[must_use]
    pub fn take(dir: impl AsRef<Path>) -> Self {
        Self::take_all(&[dir.as_ref()])
    }

    /// Takes the inventory of everything that names any of `dirs`, and of everything below them.
    #[must_use]
    pub fn take_all(dirs: &[&Path]) -> Self {
        let names: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        let named = |text: &str| names.iter().any(|name| text.contains(name.as_str()));
        let mut all = BTreeMap::new();
        all.insert("process", processes(&named));
        all.insert("interface", interfaces());
        all.insert("nft table", nft_tables());
        all.insert("mount", mount_points().into_iter().collect());
        all.insert("loop device", loop_devices(&named));
        all.insert("cgroup", cgroups());
        for dir in dirs {
            walk(dir, 0, &mut |path, kind| {
                all.entry(kind).or_default().insert(path.display().to_string());
            });
        }
        Self(all)
    }

    /// Differences to `after` in both directions, one per line. Empty when there are none.
    #[must_use]
    pub fn diff(&self, after: &Self) -> String {
        let kinds: BTreeSet<_> = self.0.keys().chain(after.0.keys()).collect();
        let none = BTreeSet::new();
        let mut text = String::new();
        for kind in kinds {
            let (was, is) = (self.0.get(kind).unwrap_or(&none), after.0.get(kind).unwrap_or(&none));
            for new in is.difference(was) {
                let _ = writeln!(text, "+ {kind} {new}");
            }
            for gone in was.difference(is) {
                let _ = writeln!(text, "- {kind} {gone}");
            }
        }
        text
    }

    /// Entries that are only in `after`: the leaks.
    #[must_use]
    pub fn leaked(&self, after: &Self) -> String {
        self.diff(after)
            .lines()
            .filter(|line| line.starts_with('+'))
            .fold(String::new(), |all, line| all + line + "\n")
    }
}

/// Open files of this process by target, with counts. Sockets and pipes have no names, so they are only counted.
#[must_use]
pub fn open_files() -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for fd in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let Ok(to) = fs::read_link(fd.path()) else { continue };
        let kind = to
            .to_string_lossy()
            .split_once(":[")
            .map_or(to.display().to_string(), |(kind, _)| kind.to_owned());
        *found.entry(kind).or_default() += 1;
    }
    found
}

/// All interfaces of the calling thread's network namespace, including bridges and taps.
#[must_use]
pub fn interfaces() -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
    table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

/// nft tables of the calling thread's network namespace, as `family name`. Empty without the program `nft`.
#[must_use]
pub fn nft_tables() -> BTreeSet<String> {
    let Some(nft) = tools::tool("nft") else { return BTreeSet::new() };
    let listed = Command::new(nft).args(["-j", "list", "tables"]).stdin(Stdio::null()).output();
    let reply: serde_json::Value =
        listed.ok().and_then(|o| serde_json::from_slice(&o.stdout).ok()).unwrap_or_default();
    let tables = reply["nftables"].as_array().cloned().unwrap_or_default();
    let text = |v: &serde_json::Value| v.as_str().unwrap_or("?").to_owned();
    tables
        .iter()
        .filter_map(|e| e.get("table"))
        .map(|t| text(&t["family"]) + " " + &text(&t["name"]))
        .collect()
}

/// Mount points of the calling thread's mount namespace.
#[must_use]
pub fn mount_points() -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    // proc_pid_mountinfo(5): id parent major:minor root point options … - type source options
    let point = |line: &str| Some(line.split(' ').nth(4)?.to_owned());
    table.lines().filter_map(point).collect()
}

fn processes(named: &dyn Fn(&str) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if pid == process::id() {
            continue;
        }
        let read = |name: &str| {
            String::from_utf8_lossy(&fs::read(entry.path().join(name)).unwrap_or_default()).into_owned()
        };
        let link =
            |name: &str| fs::read_link(entry.path().join(name)).is_ok_and(|to| named(&to.to_string_lossy()));
        let holds = || {
            let fds = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
            fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|to| named(&to.to_string_lossy()))
        };
        if named(&read("cmdline")) || link("cwd") || link("exe") || holds() {
            found.insert(format!("{pid} {}", read("cmdline").replace('\0', " ")));
        }
    }
    found
}

fn loop_devices(named: &dyn Fn(&str) -> bool) -> BTreeSet<String> {
    let backing = |dir: PathBuf| fs::read_to_string(dir.join("loop/backing_file")).ok();
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    devices
        .filter_map(|d| backing(d.path()))
        .map(|file| file.trim().to_owned())
        .filter(|file| named(file))
        .collect()
}

/// Cgroups that had no process at the beginning and at the end of a second.
fn cgroups() -> BTreeSet<String> {
    let found = empty_cgroups();
    std::thread::sleep(Duration::from_secs(1));
    found.intersection(&empty_cgroups()).cloned().collect()
}

fn empty_cgroups() -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    let trees =
        table.lines().filter(|line| line.contains(" - cgroup")).filter_map(|line| line.split(' ').nth(4));
    let mut found = BTreeSet::new();
    for tree in trees {
        walk(Path::new(tree), 0, &mut |path, kind| {
            let processes = || fs::read_to_string(path.join("cgroup.procs"));
            let is_ours = kind == "folder" && path.to_string_lossy().contains("coracle");
            if is_ours && processes().is_ok_and(|processes| processes.is_empty()) {
                found.insert(path.display().to_string());
            }
        });
    }
    found
}

/// Visits every path below `dir` without following links.
fn walk(dir: &Path, depth: usize, visit: &mut dyn FnMut(&Path, &'static str)) {
    if depth > DEPTH_MAX {
        return;
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        let path = entry.path();
        let name = if kind.is_dir() {
            "folder"
        } else if kind.is_socket() {
            "socket"
        } else {
            "file"
        };
        visit(&path, name);
        if kind.is_dir() {
            walk(&path, depth + 1, visit);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixListener, process::Command};

    use super::Inventory;

    #[test]
    fn inventory_diff_shows_files_sockets_and_processes() {
        let dir = tempfile::tempdir().unwrap();
        let before = Inventory::take(dir.path());
        fs::write(dir.path().join("left"), "x").unwrap();
        let _socket = UnixListener::bind(dir.path().join("s")).unwrap();
        let mut child = Command::new("sleep").arg("60").current_dir(dir.path()).spawn().unwrap();
        // A process exists for a moment before its arguments do.
        let line = format!("/proc/{}/cmdline", child.id());
        while fs::read(&line).unwrap().is_empty() {
            std::thread::yield_now();
        }
        let diff = before.diff(&Inventory::take(dir.path()));
        child.kill().unwrap();
        child.wait().unwrap();
        for part in ["+ file", "/left", "+ socket", "+ process", "sleep 60"] {
            assert!(diff.contains(part), "{part} is not in\n{diff}");
        }
    }
}
