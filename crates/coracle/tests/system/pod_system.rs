//! A local system that runs pods, used by kubectl.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_testkit::{eventually_ok_within, tools};

use crate::support::{coracle, coracle_ok, kubectl, node_tools, root, text, until};

/// Time limit for a pod to become Running: a VM of its shape boots first, beside the VMs of other tests, which may be many on
/// two cores.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);
/// Path of the condition Ready.
pub(crate) const READY: &str = "{.status.conditions[?(@.type=='Ready')].status}";

/// Number of lines of the node's log in the report of a failed wait.
const LOG_LINES: usize = 200;
/// Number of console lines of each guest.
const CONSOLE_LINES: usize = 60;

/// System that `coracle up --with …` runs.
pub(crate) struct System {
    _dir: tempfile::TempDir,
    pub(crate) state: PathBuf,
}

impl System {
    /// Starts the system; `None` with a printed reason if a program is missing.
    pub(crate) async fn start(with: &str) -> Option<Self> {
        node_tools()?;
        tools::require(["etcd", "kube-apiserver", "kubectl", "kube-scheduler", "kube-controller-manager"])?;
        if with.contains("kubelet") {
            tools::require(["kubelet"])?;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up = coracle(&state, &["up", "--detach", "--with", with]).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));
        Some(Self { _dir: dir, state })
    }

    pub(crate) async fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        kubectl(&self.state, args).await
    }

    /// Applies a manifest, which is kept as `name`.
    pub(crate) async fn apply(&self, name: &str, manifest: &str) {
        let file = self.state.join(name);
        std::fs::write(&file, manifest).unwrap();
        self.kubectl(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    }

    /// Applies a file of `examples/`.
    pub(crate) async fn apply_example(&self, name: &str) {
        let file = root().join("examples").join(name);
        self.kubectl(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    }

    /// Waits until a field of an object has a value.
    pub(crate) async fn wait(&self, what: &[&str], path: &str, want: &str) {
        let path = format!("-o=jsonpath={path}");
        let args = [&["get"], what, &[path.as_str()]].concat();
        let shows = async || match self.kubectl(&args).await? {
            value if value == want => Ok(()),
            other => Err(other),
        };
        if let Err(error) = eventually_ok_within(LIMIT, &format!("{what:?} {want}"), shows).await {
            panic!("{error:#}\n{}", self.described(what).await);
        }
    }

    /// Returns the last console lines of each guest: for a hung task the kernel prints where it waits.
    async fn consoles(&self) -> String {
        let mut said = String::new();
        let vms = coracle(&self.state, &["ps", "-a", "-o", "name"]).await;
        for vm in text(&vms.stdout).lines().map(|name| name.trim_start_matches("vm/")) {
            let console = coracle(&self.state, &["console", "--no-follow", vm]).await;
            let console = text(&console.stdout);
            let last: Vec<_> = console.lines().rev().take(CONSOLE_LINES).collect();
            let last: Vec<_> = last.into_iter().rev().collect();
            said += &format!("\nconsole of {vm}:\n{}\n", last.join("\n"));
        }
        said
    }

    /// Describes the object and all pods, with the end of the node's log and the guests' consoles.
    async fn described(&self, what: &[&str]) -> String {
        let object = self.kubectl(&[&["describe"], what].concat()).await.unwrap_or_default();
        let pods = self.kubectl(&["describe", "pods"]).await.unwrap_or_default();
        let log = std::fs::read_to_string(self.state.join("logs/node.log")).unwrap_or_default();
        let last: Vec<_> = log.lines().rev().take(LOG_LINES).collect();
        let last: Vec<_> = last.into_iter().rev().collect();
        format!("{object}\n{pods}\n{}\n{}", last.join("\n"), self.consoles().await)
    }

    pub(crate) async fn until_no_vm(&self) {
        until("no VM is left", LIMIT, async || {
            let vms = coracle_ok(&self.state, &["ps", "-a", "-o", "name"]).await;
            if vms.trim().is_empty() { Ok(()) } else { Err(vms) }
        })
        .await;
    }

    /// Returns the path of the node's API behind the API server.
    pub(crate) async fn node_path(&self, path: &str) -> String {
        let node = self.kubectl(&["get", "nodes", "-o=jsonpath={.items[0].metadata.name}"]).await.unwrap();
        format!("/api/v1/nodes/{node}/proxy/{path}")
    }

    /// Kills a program of the system, and waits until it is restarted.
    pub(crate) async fn kill_restarted(&self, program: &str) {
        // A child between fork and exec whose parent has ended can appear as a second process.
        let old = until(&format!("one {program} runs"), LIMIT, async || {
            match processes(program, &self.state).as_slice() {
                [one] => Ok(*one),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        kill(old);
        until(&format!("{program} is started again"), LIMIT, async || {
            match processes(program, &self.state).as_slice() {
                [new] if *new != old => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }

    /// Stops the system, and checks that no process is left.
    pub(crate) async fn end(self) {
        coracle_ok(&self.state, &["down"]).await;
        let left = coracle_hypervisor_testing::instances::processes_of(&self.state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    }
}

/// Returns the process ids of a program of the system, found by its arguments.
pub(crate) fn processes(program: &str, state: &Path) -> Vec<i32> {
    let state = state.to_str().unwrap();
    let of = |entry: std::fs::DirEntry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?.replace('\0', " ");
        (line.contains(program) && line.contains(state)).then_some(pid)
    };
    let found: Vec<_> = std::fs::read_dir("/proc").unwrap().flatten().filter_map(of).collect();
    // A child between fork and exec has the arguments of its parent.
    found.iter().copied().filter(|pid| parent(*pid).is_none_or(|parent| !found.contains(&parent))).collect()
}

/// Reads `PPid` of proc_pid_status(5).
fn parent(pid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// Ends a process by SIGKILL.
pub(crate) fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
