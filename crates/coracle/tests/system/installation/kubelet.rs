//! Workloads of the manifests as Pods: a real scheduler, controller manager and kubelet, with containerd and runc.
//!
//! `CORACLE_IMAGE_LAYOUT` names the layout of `cargo xtask package`. Otherwise the image is made from the program under test
//! and the machine's own QEMU.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use crate::support::{CORACLE, text, until, write_idle_image};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{netns, tools};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::harness::{Installed, LIMIT};

/// First address of the API server's Service range.
const API_SERVICE: &str = "10.96.0.1";
/// Address of the machine. The API server does not accept one of 127.0.0.0/8.
const MACHINE: &str = "10.78.0.1";
const NODE: &str = "worker";
/// Image of the manifests, whose tag is `TAG`.
const IMAGE: &str = "localhost/coracle/coracle";
const TAG: &str = "0.1.0";
/// Programs that a node needs.
const PROGRAMS: [&str; 7] =
    ["qemu-system-x86_64", "nft", "mke2fs", "resize2fs", "busybox", "readlink", "true"];
/// Files that QEMU and mke2fs read.
const DATA: [&str; 5] = [
    "/usr/share/qemu",
    "/usr/share/seabios",
    "/usr/lib/ipxe",
    "/usr/lib/x86_64-linux-gnu/qemu",
    "/etc/mke2fs.conf",
];

async fn run(program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> String {
    let program = program.as_ref();
    let output = Command::new(program).args(args).output().await.unwrap();
    assert!(output.status.success(), "{} {args:?}: {}", program.display(), text(&output.stderr));
    text(&output.stdout)
}

/// Collects the files below a path, or the file itself.
fn files(path: &Path, found: &mut BTreeSet<PathBuf>) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            files(&entry.unwrap().path(), found);
        }
    } else if path.exists() {
        found.insert(path.to_owned());
    }
}

/// Collects the shared libraries of programs, as the dynamic linker finds them.
async fn libraries(of: &BTreeSet<PathBuf>, found: &mut BTreeSet<PathBuf>) {
    for file in of {
        let output = Command::new("ldd").arg(file).output().await.unwrap();
        let listed = text(&output.stdout);
        found.extend(listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from));
    }
}

/// Makes a layer with the programs of a node, their libraries and data, and the guest kernel.
async fn machine_layer() -> Vec<u8> {
    let programs: BTreeSet<_> = PROGRAMS.iter().map(|name| tools::tool(name).unwrap()).collect();
    let mut all = programs.clone();
    DATA.iter().for_each(|path| files(Path::new(path), &mut all));
    let modules = all.iter().filter(|file| file.extension().is_some_and(|e| e == "so")).cloned();
    let linked = programs.iter().cloned().chain(modules).chain([PathBuf::from(CORACLE)]).collect();
    libraries(&linked, &mut all).await;
    let mut layer = LayerTar::new();
    for dir in ["tmp", "run", "etc", "proc", "sys", "dev", "var/lib", "usr"] {
        layer = layer.dir(dir, 0o755);
    }
    for link in ["bin", "sbin", "lib", "lib64"] {
        layer = layer.symlink(link, &format!("usr/{link}"));
    }
    // Files keep the names by which they are looked up, in the resolved target directories of symbolic links.
    let place =
        |file: &PathBuf| file.parent().unwrap().canonicalize().unwrap().join(file.file_name().unwrap());
    for (at, file) in all.iter().map(|file| (place(file), file)).collect::<std::collections::BTreeMap<_, _>>()
    {
        let bytes = std::fs::read(file).unwrap();
        layer = layer.file(at.to_str().unwrap().trim_start_matches('/'), 0o755, &bytes);
    }
    layer = layer.file("usr/bin/coracle", 0o755, &std::fs::read(CORACLE).unwrap());
    let boot = tools::guest_kernel().unwrap().kernel.parent().unwrap().to_owned();
    for entry in std::fs::read_dir(boot).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("usr/share/coracle/boot/{}", path.file_name().unwrap().display());
        layer = layer.file(&name, 0o644, &std::fs::read(&path).unwrap());
    }
    layer.finish()
}

/// Writes the images of the node, of the pause container and of the guest, as layouts below `dir`.
async fn write_images(dir: &Path) {
    match std::env::var_os("CORACLE_IMAGE_LAYOUT") {
        Some(layout) => std::os::unix::fs::symlink(layout, dir.join("node")).unwrap(),
        None => {
            let spec = ImageSpec {
                entrypoint: vec!["/usr/bin/coracle".into()],
                env: vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".into()],
                ..ImageSpec::default()
            };
            write_layout(&dir.join("node"), &[machine_layer().await], &spec, TAG).unwrap();
        }
    }
    for name in ["pause", "guest"] {
        write_idle_image(&dir.join(name));
    }
}

/// Machine that joins the cluster: containerd and a kubelet, in the namespaces of the test.
pub(super) struct Worker {
    pub(super) installed: Installed,
    /// Name of its VM, which no other test uses.
    vm: &'static str,
    dir: PathBuf,
    cgroup: String,
    processes: Vec<Child>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        for hierarchy in hierarchies() {
            remove_cgroups(&hierarchy.join(&self.cgroup));
        }
    }
}

fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.procs").exists() {
        return vec![root.to_owned()];
    }
    let all = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|dir| dir.join("cgroup.procs").exists() && !dir.is_symlink()).collect()
}

fn remove_cgroups(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroups(&entry.path());
        }
    }
    let _in_use = std::fs::remove_dir(dir);
}

impl Worker {
    pub(super) async fn start(installed: Installed, vm: &'static str) -> Option<Self> {
        let programs = ["containerd", "containerd-shim-runc-v2", "ctr", "runc", "kubelet"];
        let [containerd, shim, ctr, runc, kubelet] = tools::require(programs)?;
        let [scheduler] = tools::require(["kube-scheduler"])?;
        let dir = installed.dir.path().join(NODE);
        for name in ["images", "manifests", "cni", "root"] {
            std::fs::create_dir_all(dir.join(name)).unwrap();
        }
        // Resources that each machine has: directories for host paths, mounts that propagate to containers, addresses.
        run("mount", &["--make-rshared", "/"]).await;
        for at in ["/var/lib", "/run"] {
            run("mount", &["-t", "tmpfs", "none", at]).await;
        }
        run("ip", &["link", "add", "machine", "type", "bridge"]).await;
        for address in [MACHINE, API_SERVICE] {
            run("ip", &["addr", "add", &format!("{address}/32"), "dev", "machine"]).await;
        }
        run("ip", &["link", "set", "machine", "up"]).await;
        // Serves the API server at the address of its Service, as kube-proxy does.
        installed.serve_api(API_SERVICE).await;
        write_images(&dir.join("images")).await;
        // The cgroup is unique: a kubelet ends unknown processes that it finds in its cgroup.
        let cgroup = format!("coracle-test-{}-{vm}", std::process::id());
        for hierarchy in hierarchies() {
            std::fs::create_dir_all(hierarchy.join(&cgroup)).unwrap();
        }
        let socket = dir.join("containerd.sock");
        let path = format!(
            "{}:{}:/usr/sbin:/usr/bin:/sbin:/bin",
            shim.parent().unwrap().display(),
            runc.parent().unwrap().display()
        );
        let write = |name: &str, text: String| {
            let file = dir.join(name);
            std::fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        let config = write("containerd.toml", containerd_config(&dir));
        write("cni/10-bridge.conflist", cni_config(&dir).to_string());
        let spawn = |name: &str, program: &Path, args: &[String]| {
            let log = std::fs::File::create(dir.join(format!("{name}.log"))).unwrap();
            let mut command = Command::new(program);
            command.args(args).env("PATH", &path).stdin(Stdio::null());
            command.stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true).spawn().unwrap()
        };
        let mut processes = vec![spawn("containerd", &containerd, &[format!("--config={config}")])];
        let listens = || async { if socket.exists() { Ok(()) } else { Err("no socket".to_owned()) } };
        until("containerd", LIMIT, listens).await;
        for (name, base) in [("node", IMAGE), ("pause", "localhost/pause")] {
            let layout = dir.join("images").join(name);
            let tar = dir.join(format!("{name}.tar"));
            run("tar", &["-C", layout.to_str().unwrap(), "-chf", tar.to_str().unwrap(), "."]).await;
            let args =
                ["-a", socket.to_str().unwrap(), "-n", "k8s.io", "images", "import", "--base-name", base];
            run(&ctr, &[&args[..], &[tar.to_str().unwrap()]].concat()).await;
        }
        let kubeconfig = format!("--kubeconfig={}", installed.cluster.kubeconfig().display());
        processes.push(installed.start_controller_manager(&[]).await?);
        let alone = ["--leader-elect=false", "--secure-port=0"].map(str::to_owned);
        let args: Vec<_> = alone.into_iter().chain([kubeconfig.clone()]).collect();
        processes.push(spawn("scheduler", &scheduler, &args));
        let config = write("kubelet.json", kubelet_config(&dir, &socket, &cgroup).to_string());
        processes.push(spawn(
            "kubelet",
            &kubelet,
            &[
                format!("--config={config}"),
                kubeconfig,
                format!("--root-dir={}", dir.join("root").display()),
                format!("--cert-dir={}", dir.join("pki").display()),
                format!("--hostname-override={NODE}"),
                format!("--node-ip={MACHINE}"),
            ],
        ));
        Some(Self { installed, vm, dir, cgroup, processes })
    }

    /// Ends the workloads, and removes the state that a machine would keep.
    pub(super) async fn end(mut self) {
        let objects = ["delete", "daemonset,deployment", "--all", "-n", "coracle-system", "--timeout=60s"];
        self.kubectl(&objects).await.unwrap();
        until("the end of the Pods", LIMIT, || async {
            let pods = self.kubectl(&["get", "pods", "-n", "coracle-system", "-o=name"]).await?;
            if pods.is_empty() { Ok(()) } else { Err(pods) }
        })
        .await;
        for process in &mut self.processes {
            process.kill().await.unwrap();
        }
        for mount in ["/var/lib", "/run"] {
            run("umount", &["--recursive", "--lazy", mount]).await;
        }
        let links = run("ip", &["-o", "link", "show", "type", "bridge"]).await;
        for name in links.lines().filter_map(|line| line.split(": ").nth(1)) {
            run("ip", &["link", "del", name]).await;
        }
        run("nft", &["flush", "ruleset"]).await;
    }

    pub(super) async fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        self.installed.kubectl(args).await
    }

    /// Waits for a rollout; on failure prints the description of the Pods.
    pub(super) async fn rolled_out(&self, workload: &str) {
        let args = ["rollout", "status", workload, "-n", "coracle-system", "--timeout=120s"];
        if let Err(error) = self.kubectl(&args).await {
            let pods = self.kubectl(&["describe", "pods", "-n", "coracle-system"]).await.unwrap_or_default();
            let logs = ["logs", workload, "-n", "coracle-system", "--tail=40", "--all-containers"];
            let logs = self.kubectl(&logs).await.unwrap_or_else(|e| e);
            panic!("{workload}: {error}\n{pods}\n{logs}");
        }
    }
}

/// Returns containerd's configuration. The test may lack the permission to lower OOM scores.
fn containerd_config(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"version = 3
root = "{dir}/containerd"
state = "{dir}/containerd-run"
[grpc]
  address = "{dir}/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "{dir}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
"#
    )
}

fn cni_config(dir: &Path) -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "pods",
        "plugins": [{
            "type": "bridge", "bridge": "pods0", "isGateway": true,
            "ipam": {
                "type": "host-local", "dataDir": dir.join("leases"),
                "ranges": [[{"subnet": "10.79.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    })
}

/// Returns a kubelet configuration for a test machine: without evictions and iptables.
fn kubelet_config(dir: &Path, socket: &Path, cgroup: &str) -> Value {
    let never = [
        "memory.available",
        "nodefs.available",
        "nodefs.inodesFree",
        "imagefs.available",
        "imagefs.inodesFree",
    ];
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": MACHINE, "port": 10250, "healthzPort": 0, "readOnlyPort": 0,
        "failCgroupV1": false, "failSwapOn": false, "cgroupDriver": "cgroupfs", "cgroupsPerQOS": true,
        "cgroupRoot": format!("/{cgroup}"), "enforceNodeAllocatable": [], "makeIPTablesUtilChains": false,
        "evictionHard": never.map(|signal| (signal, "0%")).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "imageGCHighThresholdPercent": 100, "resolvConf": "/etc/resolv.conf",
        "staticPodPath": dir.join("manifests"), "podLogsDir": dir.join("podlogs"),
        "volumePluginDir": dir.join("plugins"), "shutdownGracePeriod": "0s",
    })
}

/// Returns the process ids of the VM's VMM.
pub(super) async fn vmms(worker: &Worker) -> Vec<String> {
    let all = run("ps", &["-eo", "pid=,args="]).await;
    let name = format!("-name coracle-default-{}-", worker.vm);
    let ours = all.lines().filter(|line| line.contains(&name));
    ours.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
}

async fn node_pod(worker: &Worker) -> Result<String, String> {
    let all = ["get", "pods", "-n", "coracle-system", "-l=app.kubernetes.io/component=node"];
    let name = worker.kubectl(&[&all[..], &["-o=jsonpath={.items[*].metadata.name}"]].concat()).await?;
    if name.is_empty() || name.contains(' ') { Err(name) } else { Ok(name) }
}

/// Checks that the filters and profiles of a container runtime leave the node the permissions that it needs.
async fn has_what_it_needs(worker: &Worker) {
    let pod = node_pod(worker).await.unwrap();
    let log = worker.kubectl(&["logs", "-n", "coracle-system", &pod]).await.unwrap();
    assert!(!log.contains("VMMs have the rights of the node"), "{log}");
    if Path::new("/dev/kvm").exists() && std::fs::File::open("/dev/kvm").is_ok() {
        assert!(
            !log.contains("/dev/kvm: Operation not permitted"),
            "its devices are those of the machine: {log}"
        );
    }
    assert!(log.contains("\"accelerator\""), "{log}");
}

pub(super) async fn runs_a_vm(worker: &Worker) {
    let layout = worker.dir.join("images/guest");
    run("cp", &["-r", layout.to_str().unwrap(), "/run/coracle/layout"]).await;
    let pod = node_pod(worker).await.unwrap();
    let exec = ["exec", "-n", "coracle-system", &pod, "--", "coracle", "--state=/var/lib/coracle"];
    let import = ["image", "import", "oci:/run/coracle/layout:1", "localhost/idle:1"];
    worker.kubectl(&[&exec[..], &import[..]].concat()).await.unwrap();
    let vm = json!({
        "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": worker.vm},
        "spec": {"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128},
    });
    worker.installed.apply(vm).await;
    is_running(worker).await;
}

pub(super) async fn is_running(worker: &Worker) {
    until("a running VM", LIMIT * 2, || async {
        let vm = ["get", "mikromvm", worker.vm, "-o=jsonpath={.status.phase} on {.status.nodeName}"];
        let vm = worker.kubectl(&vm).await?;
        if vm == format!("Running on {NODE}") { Ok(()) } else { Err(vm) }
    })
    .await;
}

fn quota() -> Value {
    let hard = json!({"pods": "5", "vm.mikrom.es/cpu": "4", "vm.mikrom.es/memory": "1Gi"});
    json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "vms"}, "spec": {"hard": hard}})
}

/// Checks that amounts of the operator and of Kubernetes' quota controller are in one status: neither removes those of the
/// other.
async fn quota_shows(worker: &Worker, cpus: &str, memory: &str) {
    let want = json!({"pods": "0", "vm.mikrom.es/cpu": cpus, "vm.mikrom.es/memory": memory});
    until("the used amounts", LIMIT, || async {
        let used = worker.kubectl(&["get", "quota", "vms", "-o=jsonpath={.status.used}"]).await?;
        if serde_json::from_str(&used).is_ok_and(|used: Value| used == want) { Ok(()) } else { Err(used) }
    })
    .await;
}

/// Checks that a guest survives the replacement of the node's Pod, as by an upgrade; VMMs are not its children.
async fn guest_outlives_its_node(worker: &Worker) {
    let (before, pod) = (vmms(worker).await, node_pod(worker).await.unwrap());
    assert_eq!(before.len(), 1, "{before:?}");
    worker.kubectl(&["delete", "pod", "-n", "coracle-system", &pod, "--timeout=60s"]).await.unwrap();
    assert_eq!(vmms(worker).await, before, "without a node");
    until("another Pod", LIMIT, || async {
        let other = node_pod(worker).await?;
        if other == pod { Err(other) } else { Ok(()) }
    })
    .await;
    worker.rolled_out("daemonset/coracle-node").await;
    is_running(worker).await;
    assert_eq!(vmms(worker).await, before, "with the next one");
}

#[test]
fn daemonset_runs_below_a_real_kubelet() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some(installed) = Installed::plane_for_pods().await else { return };
        let Some(worker) = Worker::start(installed, "kubelet-one").await else { return };
        worker.installed.install_default().await;
        worker.rolled_out("daemonset/coracle-node").await;
        worker.rolled_out("deployment/coracle-operator").await;
        has_what_it_needs(&worker).await;
        worker.installed.apply(quota()).await;
        quota_shows(&worker, "0", "0").await;
        runs_a_vm(&worker).await;
        quota_shows(&worker, "1", "128Mi").await;
        guest_outlives_its_node(&worker).await;
        worker.kubectl(&["delete", "mikromvm", "kubelet-one", "--timeout=60s"]).await.unwrap();
        assert_eq!(vmms(&worker).await, Vec::<String>::new());
        worker.end().await;
    });
}
