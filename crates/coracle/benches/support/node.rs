//! A node in release mode, driven through its socket.
#![allow(dead_code, reason = "each benchmark uses its part")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_hypervisor::find_by_argument;
use coracle_hypervisor_testing::instances::{processes_of, vmms_of};
use coracle_proto::host as pb;
use coracle_testkit::figures::rss_mib;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::tools;
use hyper_util::rt::TokioIo;
use pb::host_client::HostClient;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint};

const CORACLE: &str = env!("CARGO_BIN_EXE_coracle");
pub(crate) const IMAGE: &str = "localhost/bench/idle:1";
/// Idle time before the memory of a daemon is read.
pub(crate) const IDLE: Duration = Duration::from_secs(10);
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Memory of every VM.
pub(crate) const MEMORY_MIB: u64 = 128;
/// Size of a VM's own disk, if the VM is created and not applied.
pub(crate) const DISK_MIB: u64 = 256;

/// Way in which a VM starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Cold,
    Clone,
}

/// A node that runs until [`Node::down`].
pub(crate) struct Node {
    state: PathBuf,
    host: HostClient<Channel>,
    /// Daemon of a node without a control plane.
    daemon: Option<Child>,
}

impl Node {
    /// Starts a node without a control plane, and imports an image whose workload sleeps.
    pub(crate) async fn start(dir: &Path) -> Self {
        let state = dir.join("state");
        let daemon = command(&state, &["node"]).kill_on_drop(true).spawn().expect("run the node daemon");
        let began = Instant::now();
        while UnixStream::connect(socket(&state)).await.is_err() {
            assert!(began.elapsed() < LIMIT, "the node's socket");
            sleep(Duration::from_millis(100)).await;
        }
        Self { daemon: Some(daemon), ..Self::of(dir, state).await }
    }

    /// Returns a node that runs with this state directory, and imports an image whose workload sleeps.
    pub(crate) async fn of(dir: &Path, state: PathBuf) -> Self {
        import(&state, &dir.join("layout"), IMAGE, "the image").await;
        Self { host: connect(&state).await, state, daemon: None }
    }

    /// Ends the daemon and all that runs with it, and removes the node's network.
    pub(crate) async fn down(self) {
        if let Some(mut daemon) = self.daemon {
            daemon.kill().await.expect("kill the node daemon");
        }
        coracle(&self.state, &["down"]).await;
    }

    /// Returns the VmRSS of the node daemon after ten idle seconds. VMMs are processes of their own and do not count.
    pub(crate) async fn rss_mib(&self) -> f64 {
        sleep(IDLE).await;
        let node = find_by_argument(&self.state).expect("the process table").into_iter().find(|process| {
            let line = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
            line.split(|b| *b == 0).nth(1) == Some(b"node")
        });
        rss_mib(node.expect("a node daemon").pid).expect("its memory")
    }

    /// Boots a VM and removes it. Returns the milliseconds from create to the answer that the workload runs, and the VM.
    pub(crate) async fn boot(&self, n: usize, start: Start) -> (f64, pb::Vm) {
        let name = format!("bench-{n}");
        let (elapsed, vm) = self.create(&name, IMAGE, start).await;
        if n == 0 {
            self.show_argv(&name);
        }
        self.remove(&name).await;
        (elapsed, vm)
    }

    /// Waits until a clone is pooled and returns the milliseconds.
    pub(crate) async fn wait_until_pooled(&self) -> f64 {
        let began = Instant::now();
        let mut host = self.host();
        loop {
            let templates = host.list_templates(pb::ListTemplatesRequest {}).await.expect("the templates");
            if templates.into_inner().templates.iter().any(|template| template.pooled) {
                return began.elapsed().as_secs_f64() * 1000.0;
            }
            assert!(began.elapsed() < LIMIT, "no clone is pooled");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until `count` clones are pooled.
    pub(crate) async fn until_pooled(&self, count: usize) {
        let began = Instant::now();
        while vmms_of(&self.state, &coracle_host::run_dir_of(&self.state), "pool").len() < count {
            assert!(began.elapsed() < LIMIT, "{count} clones are not pooled");
            sleep(Duration::from_millis(100)).await;
        }
        // The last clone is not paused yet.
        sleep(IDLE).await;
    }

    /// Returns the pid of the pooled VMM, which is not one of `vmms`.
    pub(crate) fn pooled_vmm(&self, vmms: &[u32]) -> u32 {
        let found = vmms_of(&self.state, &coracle_host::run_dir_of(&self.state), "pool");
        found.iter().map(|process| process.pid).find(|pid| !vmms.contains(pid)).expect("a VMM")
    }

    /// Removes a VM in any state.
    pub(crate) async fn remove(&self, name: &str) {
        let request = pb::DeleteVmRequest { vm: name.to_owned(), force: true, ..Default::default() };
        self.host().delete_vm(request).await.expect("delete");
    }

    /// Returns a client of the node.
    pub(crate) fn host(&self) -> HostClient<Channel> {
        self.host.clone()
    }

    /// Returns the output of `coracle explain` for a VM.
    pub(crate) async fn explain(&self, vm: &str) -> String {
        let output = command(&self.state, &["explain", vm]).output().await;
        String::from_utf8_lossy(&output.expect("run coracle").stdout).into_owned()
    }

    /// Creates `count` VMs that keep running, and returns the pids of their VMMs.
    pub(crate) async fn create_many(&self, count: usize, start: Start) -> Vec<u32> {
        let mut vmms = Vec::new();
        for n in 0..count {
            vmms.push(self.create(&format!("many-{n}"), IMAGE, start).await.1.vmm_pid);
        }
        vmms
    }

    /// Creates a VM. Returns the milliseconds from create to the answer that the workload runs, and the VM.
    pub(crate) async fn create(&self, name: &str, image: &str, start: Start) -> (f64, pb::Vm) {
        let mut host = self.host();
        let began = Instant::now();
        let request = pb::CreateVmRequest {
            name: name.to_owned(),
            image: image.to_owned(),
            vcpus: 1,
            memory_mib: MEMORY_MIB,
            disk_mib: DISK_MIB,
            cold: start == Start::Cold,
            ..Default::default()
        };
        host.create_vm(request).await.expect("create");
        let vm = host
            .start_vm(pb::StartVmRequest { vm: name.to_owned(), ..Default::default() })
            .await
            .expect("start")
            .into_inner();
        let elapsed = began.elapsed().as_secs_f64() * 1000.0;
        assert_eq!(vm.template.is_empty(), start == Start::Cold, "{name} starts as it should");
        (elapsed, vm)
    }

    /// Imports an image that no VM has run and that shares no layer, and returns its name.
    pub(crate) async fn import_fresh(&self, dir: &Path, n: usize) -> String {
        let name = format!("localhost/bench/fresh-{n}:1");
        import(&self.state, &dir.join(format!("fresh-{n}")), &name, &format!("image {n}")).await;
        name
    }

    fn show_argv(&self, name: &str) {
        for process in processes_of(&self.state) {
            let line = std::fs::read_to_string(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
            if line.contains("qemu-system") && line.contains(name) {
                eprintln!("ours argv: {}", line.replace('\0', " "));
            }
        }
    }
}

/// Imports an image whose workload sleeps; `words` make it different from others.
async fn import(state: &Path, layout: &Path, name: &str, words: &str) {
    let busybox = std::fs::read(tools::tool("busybox").expect("busybox")).expect("read busybox");
    let layer = LayerTar::new()
        .file("bin/busybox", 0o755, &busybox)
        .symlink("bin/sleep", "busybox")
        .file("words", 0o644, words.as_bytes())
        .finish();
    let spec = ImageSpec { cmd: vec!["/bin/sleep".into(), "100000".into()], ..ImageSpec::default() };
    write_layout(layout, &[layer], &spec, "1").expect("write the image");
    coracle(state, &["image", "import", &format!("oci:{}:1", layout.display()), name]).await;
}

/// Converts a small count.
pub(crate) fn to_f64(n: usize) -> f64 {
    f64::from(u32::try_from(n).expect("a small count"))
}

/// Runs the program and shows its output.
async fn coracle(state: &Path, args: &[&str]) {
    run(command(state, args)).await;
}

/// Runs a command of the program and shows its output.
pub(crate) async fn run(mut command: Command) {
    let output = command.output().await.expect("run coracle");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{:?}: {}", command.as_std().get_args(), output.status);
}

/// Returns a command of the program with these arguments, for this state directory.
pub(crate) fn command(state: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(CORACLE);
    // One accelerator for all figures, so that they are comparable: the raw VM is emulated, too.
    command.arg("--state").arg(state).args(args).env("CORACLE_NODE_ACCELERATOR", "tcg");
    command
}

async fn connect(state: &Path) -> HostClient<Channel> {
    let path = socket(state);
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await;
    HostClient::new(channel.expect("the node's socket"))
}

fn socket(state: &Path) -> PathBuf {
    state.join("host.sock")
}
