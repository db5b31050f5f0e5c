//! A local system that runs pods, and its user with kubectl.

use std::path::PathBuf;
use std::time::Duration;

use coracle_testkit::tools;

use crate::support::{coracle, coracle_ok, kubectl, node_tools, root, text, until};

/// A pod's way to Running: a VM of its size boots first, beside the VMs of other tests.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// Path of the condition Ready.
pub(crate) const READY: &str = "{.status.conditions[?(@.type=='Ready')].status}";

/// What `coracle up --with …` runs.
pub(crate) struct System {
    _dir: tempfile::TempDir,
    pub(crate) state: PathBuf,
}

impl System {
    /// Starts it; `None` with a printed reason where a program is missing.
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

    /// Applies a manifest, kept as `name`.
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
        until(&format!("{what:?} {want}"), LIMIT, async || match self.kubectl(&args).await? {
            value if value == want => Ok(()),
            other => {
                let described = self.kubectl(&[&["describe"], what].concat()).await.unwrap_or_default();
                Err(format!("{other:?}\n{described}"))
            }
        })
        .await;
    }

    pub(crate) async fn until_no_vm(&self) {
        until("no VM is left", LIMIT, async || {
            let vms = coracle_ok(&self.state, &["ps", "-a", "-o", "name"]).await;
            if vms.trim().is_empty() { Ok(()) } else { Err(vms) }
        })
        .await;
    }

    /// Stops it; nothing of it runs afterwards.
    pub(crate) async fn end(self) {
        coracle_ok(&self.state, &["down"]).await;
        let left = coracle_hypervisor_testing::instances::processes_of(&self.state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    }
}
