//! A whole `coracle up` in release mode, driven as by users: through the node's socket and the API server.
#![allow(dead_code, reason = "each benchmark uses its part")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_api::MikromVM;
use coracle_hypervisor::find_by_argument;
use coracle_hypervisor_testing::instances::{processes_of, vmms_of};
use coracle_proto::host as pb;
use coracle_testkit::figures::{Writes, api_writes, rss_mib};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::tools;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Config};
use pb::host_client::HostClient;
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

const CORACLE: &str = env!("CARGO_BIN_EXE_coracle");
pub(crate) const IMAGE: &str = "localhost/bench/idle:1";
const GROUP: &str = "mikromvms.vm.mikrom.es";
/// Idle time before the memory of a daemon is read.
pub(crate) const IDLE: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(120);

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

pub(crate) struct System {
    state: PathBuf,
    host: HostClient<Channel>,
    client: Client,
    config: Config,
}

impl System {
    /// Starts the system and imports an image whose workload sleeps.
    pub(crate) async fn up(dir: &Path, settings: &[(&str, &str)]) -> Self {
        Self::up_with(dir, &[], settings).await
    }

    /// Like [`System::up`], with additional arguments.
    pub(crate) async fn up_with(dir: &Path, args: &[&str], settings: &[(&str, &str)]) -> Self {
        let state = dir.join("state");
        coracle_with(&state, &[&["up", "--detach", "--no-demo"], args].concat(), settings).await;
        import(&state, &dir.join("layout"), IMAGE, "the image").await;
        let kubeconfig = Kubeconfig::read_from(state.join("kubeconfig")).expect("a kubeconfig");
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.expect("a configuration");
        let client = Client::try_from(config.clone()).expect("a client");
        Self { host: connect(&state).await, client, config, state }
    }

    pub(crate) async fn down(self) {
        coracle(&self.state, &["down"]).await;
    }

    /// Returns the VmRSS of the node daemon after ten idle seconds. VMMs are processes of their own and do not count.
    pub(crate) async fn node_rss_mib(&self) -> f64 {
        sleep(IDLE).await;
        let node = find_by_argument(&self.state).expect("the process table").into_iter().find(|process| {
            let line = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
            line.split(|b| *b == 0).nth(1) == Some(b"node")
        });
        rss_mib(node.expect("a node daemon").pid).expect("its memory")
    }

    /// Boots a VM and removes it. Returns the milliseconds from create to the answer that the workload runs, and the VM.
    pub(crate) async fn boot(&mut self, n: usize, start: Start) -> (f64, pb::Vm) {
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
    pub(crate) async fn remove(&mut self, name: &str) {
        let request = pb::DeleteVmRequest { vm: name.to_owned(), force: true, ..Default::default() };
        self.host.delete_vm(request).await.expect("delete");
    }

    /// Returns a client of the API server, with the rights of its administrator.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns a client of the virtual node's kubelet API, with the same rights. Does not verify the certificate.
    pub(crate) async fn kubelet(&self) -> Client {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let all = nodes.list(&ListParams::default()).await.expect("the nodes").items;
        let url = all.into_iter().find_map(|node| {
            let status = node.status?;
            let port = status.daemon_endpoints?.kubelet_endpoint?.port;
            let addresses = status.addresses.unwrap_or_default();
            let internal = addresses.into_iter().find(|address| address.type_ == "InternalIP")?;
            Some(format!("https://{}:{port}", internal.address))
        });
        let mut config = self.config.clone();
        config.cluster_url = url.and_then(|url| url.parse().ok()).expect("a node with a kubelet API");
        config.accept_invalid_certs = true;
        Client::try_from(config).expect("a client")
    }

    /// Returns a client of the node.
    pub(crate) fn host(&self) -> HostClient<Channel> {
        self.host.clone()
    }

    /// Returns the output of `coracle explain` for a VM.
    pub(crate) async fn explain(&self, vm: &str) -> String {
        let mut command = Command::new(CORACLE);
        let output = command.arg("--state").arg(&self.state).args(["explain", vm]).output().await;
        String::from_utf8_lossy(&output.expect("run coracle").stdout).into_owned()
    }

    /// Creates `count` VMs that keep running, and returns the pids of their VMMs.
    pub(crate) async fn create_many(&mut self, count: usize, start: Start) -> Vec<u32> {
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

    pub(crate) async fn writes(&self) -> Writes {
        api_writes(&self.client).await.expect("the API server's metrics")
    }

    /// Applies an object, waits and deletes it. Returns the milliseconds from apply to phase Running.
    pub(crate) async fn apply_until_running(&self, n: usize) -> f64 {
        let name = format!("apply-{n}");
        let elapsed = self.apply(&name).await;
        self.delete(&name).await;
        elapsed.as_secs_f64() * 1000.0
    }

    /// Returns the number of writes to a MikromVM on its way to Running, without the apply itself; a mean of `count`.
    pub(crate) async fn writes_of_one(&self, count: usize) -> f64 {
        let mut sum = 0.0;
        for n in 0..count {
            let name = format!("count-{n}");
            let before = self.writes().await;
            self.apply(&name).await;
            // Waits for late writes, which also count.
            sleep(Duration::from_secs(1)).await;
            let grown = self.writes().await.since(&before);
            sum += grown.objects.get(GROUP).copied().unwrap_or_default() - 1.0;
            self.delete(&name).await;
        }
        sum / to_f64(count)
    }

    async fn apply(&self, name: &str) -> Duration {
        let vms: Api<MikromVM> = Api::default_namespaced(self.client.clone());
        let object = serde_json::json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": name},
            "spec": {"image": IMAGE, "vcpuCount": 1, "memoryMB": MEMORY_MIB},
        });
        let began = Instant::now();
        vms.patch(name, &PatchParams::apply("bench"), &Patch::Apply(&object)).await.expect("apply");
        let running = await_condition(vms, name, |vm: Option<&MikromVM>| {
            let phase = vm.and_then(|vm| vm.status.as_ref()).and_then(|status| status.phase.as_ref());
            phase.is_some_and(|phase| serde_json::to_value(phase).is_ok_and(|p| p == "Running"))
        });
        timeout(LIMIT, running).await.expect("Running in time").expect("a watch");
        began.elapsed()
    }

    async fn delete(&self, name: &str) {
        let vms: Api<MikromVM> = Api::default_namespaced(self.client.clone());
        let uid = vms.get(name).await.expect("the object").metadata.uid.expect("a uid");
        vms.delete(name, &DeleteParams::default()).await.expect("delete");
        let gone = await_condition(vms, name, kube::runtime::conditions::is_deleted(&uid));
        timeout(LIMIT, gone).await.expect("gone in time").expect("a watch");
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
    coracle_with(state, args, &[]).await;
}

/// Like [`coracle`], with these environment variables.
async fn coracle_with(state: &Path, args: &[&str], settings: &[(&str, &str)]) {
    let mut command = Command::new(CORACLE);
    // One accelerator for all figures, so that they are comparable: the raw VM is emulated, too.
    command.arg("--state").arg(state).args(args).env("CORACLE_NODE_ACCELERATOR", "tcg");
    command.envs(settings.iter().copied());
    let output = command.output().await.expect("run coracle");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "coracle {args:?}: {}", output.status);
}

async fn connect(state: &Path) -> HostClient<Channel> {
    let path = state.join("host.sock");
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await;
    HostClient::new(channel.expect("the node's socket"))
}
