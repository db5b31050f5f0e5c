//! The host core with real VMs: QEMU, our guest agent, a bridge in a network
//! namespace of the test's own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{CreateSpec, Fence, Host, HostConfig, Owner, PullMode, Record};
use coracle_image::{NoProgress, Source, Store, StoreOptions};
use coracle_net::BridgeNetwork;
use coracle_proto::guest as pb;
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{netns, tools};
use coracle_types::{Clock, VmState};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const IMAGE: &str = "localhost/test/busybox:1";
/// What console, log and record of a VM may take together: 256 KiB, twice 4 MiB and an entry, and some room.
const FLOOD_BOUND: u64 = 10 << 20;

/// Everything that a node needs, below one folder.
struct Node {
    dir: tempfile::TempDir,
    boot: tools::GuestKernel,
}

impl Node {
    async fn new() -> Option<Self> {
        tools::require(["qemu-system-x86_64", "mke2fs", "nft", "busybox"])?;
        let Some(boot) = tools::guest_kernel() else {
            tools::skip("no guest kernel; `cargo xtask setup` makes it");
            return None;
        };
        let node = Self { dir: tempfile::tempdir().unwrap(), boot };
        node.import_busybox().await;
        Some(node)
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn config(&self) -> HostConfig {
        let mut config = HostConfig::new(self.state(), self.boot.kernel.clone(), self.boot.initrd.clone());
        config.run_dir = self.dir.path().join("run");
        config.disk_mib = 256;
        config
    }

    fn store(&self) -> Store {
        Store::open(self.state().join("images"), StoreOptions::default()).unwrap()
    }

    async fn import_busybox(&self) {
        std::fs::create_dir_all(self.state()).unwrap();
        let layout = self.dir.path().join("layout");
        let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
        let mut layer = LayerTar::new().dir("bin", 0o755).file("bin/busybox", 0o755, &busybox);
        for applet in ["sh", "echo", "cat", "httpd", "sleep", "hostname", "ip", "touch", "ls", "mknod"] {
            layer = layer.symlink(&format!("bin/{applet}"), "busybox");
        }
        let layer = layer
            .dir("www", 0o755)
            .file("www/index.html", 0o644, b"hello from the guest\n")
            .file("etc/passwd", 0o644, b"root:x:0:0::/:/bin/sh\n")
            .finish();
        let spec = ImageSpec {
            cmd: ["sh", "-c", "echo started $(hostname); exec httpd -f -h /www"].map(str::to_owned).to_vec(),
            env: vec!["PATH=/bin".to_owned()],
            ..ImageSpec::default()
        };
        write_layout(&layout, &[layer], &spec, "1").unwrap();
        let source: Source = format!("oci:{}:1", layout.display()).parse().unwrap();
        self.store().import(&source, Some(&IMAGE.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    }

    /// The daemon, as after a start of its process.
    async fn open(&self) -> Host {
        let program = tools::tool("qemu-system-x86_64").unwrap();
        let driver = Arc::new(QemuDriver::new(QemuConfig { program, kvm: None }));
        let network = Arc::new(BridgeNetwork::open(&self.state(), None).await.unwrap());
        Host::open(self.config(), driver, network, Arc::new(self.store()), Clock::system()).await.unwrap()
    }
}

fn spec(name: &str) -> CreateSpec {
    CreateSpec {
        name: name.parse().unwrap(),
        owner: Owner::default(),
        image: IMAGE.to_owned(),
        pull: PullMode::Never,
        vcpus: 1.try_into().unwrap(),
        memory: 128.try_into().unwrap(),
        kernel_path: String::new(),
        address: None,
        hostname: String::new(),
        command: vec![],
        args: vec![],
        env: vec![],
        user: String::new(),
        workdir: String::new(),
        metadata: Default::default(),
        ports: vec![],
        disk_mib: None,
        idempotent: false,
    }
}

async fn run(host: &Host, name: &str) -> Record {
    host.create(spec(name), Arc::new(NoProgress)).await.unwrap();
    host.start(name, None).await.unwrap_or_else(|e| panic!("start {name}: {e:?}"))
}

/// Waits for a guest session, which after a restart of the daemon takes a moment.
async fn guest(host: &Host, name: &str) -> coracle_host::GuestClient {
    let mut view = host.observe(name).unwrap();
    let view = tokio::time::timeout(Duration::from_secs(20), view.wait_for(|v| v.guest.is_some())).await;
    view.expect("a session in time").unwrap().guest.clone().unwrap()
}

async fn exec(host: &Host, name: &str, argv: &[&str]) -> (String, i32) {
    use pb::exec_response::Message;
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    let env = vec!["PATH=/bin".to_owned()];
    let start = pb::exec_request::Message::Start(pb::Process { argv, env, ..Default::default() });
    let requests = tokio_stream::once(pb::ExecRequest { message: Some(start) });
    let mut replies = guest(host, name).await.rpc().exec(requests).await.unwrap().into_inner();
    let (mut out, mut code) = (Vec::new(), -1);
    while let Some(reply) = replies.message().await.unwrap() {
        match reply.message {
            Some(Message::Stdout(data)) => out.extend(data),
            Some(Message::Exit(exit)) => code = exit.code,
            _ => {}
        }
    }
    (String::from_utf8(out).unwrap(), code)
}

/// The page that the guest serves, fetched over the bridge.
async fn page(record: &Record) -> String {
    let address = (record.reachable_address().expect("an acknowledged address"), 80);
    let fetch = async {
        loop {
            if let Ok(mut stream) = tokio::net::TcpStream::connect(address).await {
                stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
                let mut text = String::new();
                if stream.read_to_string(&mut text).await.is_ok() && text.contains("200 OK") {
                    return text;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), fetch).await.expect("the guest serves its page")
}

fn vmms(dir: &Path) -> usize {
    coracle_hypervisor::find_by_argument(&dir.join("run")).unwrap().len()
}

#[test]
fn a_vm_runs_survives_the_daemon_stops_starts_and_leaves_nothing() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let record = run(&host, "web").await;
        assert_eq!(record.state, VmState::Running);
        assert!(page(&record).await.contains("hello from the guest"));
        let vmm = record.process.unwrap();
        let exe = std::fs::read_link(format!("/proc/{}/exe", vmm.pid)).unwrap();
        assert!(exe.ends_with("qemu-system-x86_64"), "{}", exe.display());
        assert_eq!(exec(&host, "web", &["hostname"]).await, ("web\n".to_owned(), 0));
        assert_eq!(exec(&host, "web", &["sh", "-c", "exit 7"]).await.1, 7);
        assert_eq!(exec(&host, "web", &["sh", "-c", "echo kept > /kept"]).await.1, 0);

        // The daemon goes without a word to anybody, and another takes its place.
        host.shutdown().await;
        drop(host);
        let host = node.open().await;
        assert_eq!(host.get("web").unwrap().record.process, Some(vmm), "the same VMM");
        assert_eq!(exec(&host, "web", &["cat", "/kept"]).await.0, "kept\n");
        let (log, _) = host.logs("web").await.unwrap();
        let log: Vec<u8> = log.into_iter().flat_map(|e| e.data).collect();
        assert_eq!(String::from_utf8(log).unwrap(), "started web\n");

        let stopped = host.stop("web", Duration::from_secs(10), None).await.unwrap();
        assert_eq!((stopped.state, vmms(node.dir.path())), (VmState::Stopped, 0));
        let again = host.start("web", None).await.unwrap();
        assert_eq!(again.address, record.address, "the address is kept");
        assert_eq!(exec(&host, "web", &["cat", "/kept"]).await.0, "kept\n", "the disk is kept");

        assert!(host.delete("web", false, None).await.is_err(), "a running VM is not removed without force");
        host.delete("web", true, None).await.unwrap();
        assert_eq!(vmms(node.dir.path()), 0);
        assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0, "no file is left");
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn two_vms_of_one_namespace_both_have_network_and_a_finished_workload_tells_its_code() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let (a, b) = tokio::join!(run(&host, "default-a"), run(&host, "default-b"));
        assert_ne!(a.mac, b.mac);
        assert!(page(&a).await.contains("hello") && page(&b).await.contains("hello"));

        let mut job = spec("job");
        job.command = ["sh", "-c", "echo out; echo err >&2; exit 3"].map(str::to_owned).to_vec();
        host.create(job, Arc::new(NoProgress)).await.unwrap();
        host.start("job", None).await.unwrap();
        let end = tokio::time::timeout(Duration::from_secs(20), host.wait("job")).await.unwrap().unwrap();
        assert_eq!((end.record.state, end.record.exit.as_ref().map(|e| e.code)), (VmState::Stopped, Some(3)));
        let (log, _) = host.logs("job").await.unwrap();
        let mut lines: Vec<_> = log.into_iter().map(|e| String::from_utf8(e.data).unwrap()).collect();
        lines.sort();
        assert_eq!(lines.concat(), "err\nout\n");

        for name in ["default-a", "default-b", "job"] {
            host.delete(name, true, None).await.unwrap();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn a_stale_caller_cannot_move_a_vm() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let mut owned = spec("default-web");
        owned.owner = Owner { uid: "u1".to_owned(), generation: 5, ..Owner::default() };
        host.create(owned.clone(), Arc::new(NoProgress)).await.unwrap();
        let fence = |uid: &str, generation| Some(Fence { uid: uid.to_owned(), generation });
        assert!(host.stop("default-web", Duration::ZERO, fence("u1", 4)).await.is_err(), "older generation");
        assert!(host.delete("default-web", true, fence("u2", 9)).await.is_err(), "another object");
        assert!(host.create(owned, Arc::new(NoProgress)).await.is_err(), "the name is taken");
        host.delete("default-web", true, fence("u1", 6)).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

/// Bytes that the VM's folder takes on the host's disk, its own writable disk left out.
fn kept_bytes(node: &Node, record: &Record) -> u64 {
    let dir = node.state().join("vms").join(record.id.as_str());
    let files = std::fs::read_dir(dir).unwrap().flatten().filter(|e| e.file_type().unwrap().is_file());
    files.map(|e| e.metadata().unwrap().len()).sum()
}

#[test]
fn a_guest_that_floods_its_console_and_its_log_stays_within_the_rings() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let mut flood = spec("flood");
        // Both at full speed: the serial port, and the workload's output through the agent.
        let script = "mknod /dev/ttyS0 c 4 64; (while :; do cat /bin/busybox > /dev/ttyS0; done) & while :; do cat /bin/busybox; done";
        flood.command = ["sh", "-c", script].map(str::to_owned).to_vec();
        host.create(flood, Arc::new(NoProgress)).await.unwrap();
        let record = host.start("flood", None).await.unwrap();
        // More has come than may be kept, so both have gone round.
        let flooded = async {
            loop {
                let (entries, _) = host.logs("flood").await.unwrap();
                if entries.last().is_some_and(|e| e.offset > 2 * FLOOD_BOUND) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), flooded).await.expect("the flood arrives");
        let (console, _) = host.console("flood").unwrap().attach().unwrap();
        assert!(console.len() >= 256 << 10, "{} bytes of console: its ring is full", console.len());
        let kept = kept_bytes(&node, &record);
        assert!(kept <= FLOOD_BOUND, "{kept} bytes are kept of a flood");
        assert_eq!(exec(&host, "flood", &["echo", "alive"]).await, ("alive\n".to_owned(), 0));
        host.delete("flood", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn eight_vms_created_at_once_all_run() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let names: Vec<_> = (0..8).map(|n| format!("default-vm-{n}")).collect();
        let mut boots = tokio::task::JoinSet::new();
        for name in names.clone() {
            let host = host.clone();
            boots.spawn(async move { run(&host, &name).await });
        }
        let records = boots.join_all().await;
        let distinct = |key: fn(&Record) -> String| {
            records.iter().map(key).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(distinct(|r| r.mac.to_string()), 8, "every MAC is its own");
        assert_eq!(distinct(|r| r.address.unwrap().to_string()), 8, "every address is its own");
        assert_eq!(vmms(node.dir.path()), 8);
        for record in &records {
            assert!(page(record).await.contains("hello from the guest"), "{}", record.name);
        }
        for name in names {
            host.delete(&name, true, None).await.unwrap();
        }
        assert_eq!(vmms(node.dir.path()), 0);
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}
