//! Shared by the tests with real VMs: a node below one directory, and ways to talk to its guests.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Host, HostConfig, Record, VmSpec};
use coracle_image::{Source, Store, StoreOptions};
use coracle_net::{BridgeNetwork, Network};
use coracle_oci::NoProgress;
use coracle_proto::guest as pb;
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{eventually, tools};
use coracle_types::Clock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub(crate) const IMAGE: &str = "localhost/test/busybox:1";

/// Node with all its files below one directory.
pub(crate) struct Node {
    pub(crate) dir: tempfile::TempDir,
    boot: tools::GuestKernel,
}

impl Node {
    pub(crate) async fn new() -> Option<Self> {
        tools::require(["qemu-system-x86_64", "mke2fs", "nft", "busybox"])?;
        let Some(boot) = tools::guest_kernel() else {
            tools::skip("no guest kernel; `cargo xtask setup` makes it");
            return None;
        };
        let node = Self { dir: tempfile::tempdir().unwrap(), boot };
        node.import(IMAGE, LayerTar::new()).await;
        Some(node)
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn config(&self) -> HostConfig {
        let mut config = HostConfig::new(self.state(), self.boot.kernel.clone(), self.boot.initrd.clone());
        config.run_dir = self.run();
        config.disk_mib = 256;
        config.templates.enabled = false;
        config.warm_pool.shapes_max = 0;
        // The time to give a clone its identity is measured by the benchmark; a busy host gets more.
        config.identity_limit = Duration::from_secs(20);
        config
    }

    pub(crate) fn store(&self) -> Store {
        Store::open(self.state().join("images"), StoreOptions::default()).unwrap()
    }

    /// Imports an image of busybox and the content of `layer`.
    pub(crate) async fn import(&self, name: &str, layer: LayerTar) {
        std::fs::create_dir_all(self.state()).unwrap();
        let layout = tempfile::tempdir_in(self.dir.path()).unwrap();
        let layout = layout.path();
        let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
        let mut layer = layer.dir("bin", 0o755).file("bin/busybox", 0o755, &busybox);
        for applet in [
            "sh", "echo", "cat", "httpd", "sleep", "hostname", "ip", "touch", "ls", "mknod", "dd", "md5sum",
            "grep", "date", "kill", "rm", "[",
        ] {
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
        write_layout(layout, &[layer], &spec, "1").unwrap();
        let source: Source = format!("oci:{}:1", layout.display()).parse().unwrap();
        self.store().import(&source, Some(&name.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    }

    /// Starts the daemon.
    pub(crate) async fn open(&self) -> Host {
        self.open_with(|_| ()).await
    }

    /// Like [`Node::open`], with other settings. Templates and the warm pool are off unless enabled here.
    pub(crate) async fn open_with(&self, change: impl FnOnce(&mut HostConfig)) -> Host {
        let mut config = self.config();
        change(&mut config);
        self.open_on(config, Arc::new(BridgeNetwork::open(&self.state(), None).await.unwrap())).await
    }

    /// Like [`Node::open`], with VMs on another network.
    pub(crate) async fn open_on(&self, config: HostConfig, network: Arc<dyn Network>) -> Host {
        let program = tools::tool("qemu-system-x86_64").unwrap();
        let driver = Arc::new(QemuDriver::new(QemuConfig { program, kvm: None }));
        Host::open(config, driver, network, Arc::new(self.store()), Clock::system()).await.unwrap()
    }
}

pub(crate) fn spec(name: &str) -> VmSpec {
    VmSpec::of(name.parse().unwrap(), IMAGE)
}

pub(crate) async fn run(host: &Host, name: &str) -> Record {
    host.create(spec(name), Arc::new(NoProgress)).await.unwrap();
    host.start(name, None).await.unwrap_or_else(|e| panic!("start {name}: {e:?}"))
}

/// Waits for a guest session, which after a restart of the daemon takes a moment.
pub(crate) async fn guest(host: &Host, name: &str) -> coracle_host::GuestClient {
    let mut view = host.observe(name).unwrap();
    let view = tokio::time::timeout(Duration::from_secs(60), view.wait_for(|v| v.guest.is_some())).await;
    view.expect("a session in time").unwrap().guest.clone().unwrap()
}

pub(crate) async fn exec(host: &Host, name: &str, argv: &[&str]) -> (String, i32) {
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

/// Page that the guest serves, fetched over the bridge.
pub(crate) async fn page(record: &Record) -> String {
    let address = (record.reachable_address().expect("an acknowledged address"), 80);
    let page = eventually("the guest serves its page", async || {
        let fetch = async {
            let mut stream = tokio::net::TcpStream::connect(address).await.ok()?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.ok()?;
            text.contains("200 OK").then_some(text)
        };
        tokio::time::timeout(Duration::from_secs(20), fetch).await.ok()?
    });
    page.await.unwrap()
}

pub(crate) fn vmms(dir: &Path) -> usize {
    coracle_hypervisor_testing::instances::processes_of(dir).len()
}

/// Removes every VM, and checks that nothing is left.
pub(crate) async fn close(node: &Node, host: Host) {
    for view in host.list() {
        host.delete(view.record.id.as_str(), true, None).await.unwrap();
    }
    assert_eq!(vmms(node.dir.path()), 0, "no VMM is left");
    assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0, "no file is left");
    host.network().teardown().await.unwrap();
    host.shutdown().await;
}

/// Time of the host, Unix seconds.
pub(crate) fn now() -> i64 {
    Clock::system().now().seconds()
}

/// Checks that the guest's clock, printed by `date +%s` between `before` and now, is at most two seconds off.
pub(crate) fn assert_clock_between(before: i64, printed: &str) {
    let (clock, after): (i64, _) = (printed.trim().parse().unwrap(), now());
    assert!((before - 2..=after + 2).contains(&clock), "the guest's clock is {clock}, the host's {after}");
}

/// Shell loop that counts and prints each number.
const COUNT: &str = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done";

pub(crate) async fn counter(host: &Host, name: &str) -> Record {
    let mut spec = spec(name);
    spec.command = ["sh", "-c", COUNT].map(str::to_owned).to_vec();
    host.create(spec, Arc::new(NoProgress)).await.unwrap();
    host.start(name, None).await.unwrap_or_else(|e| panic!("start {name}: {e:?}"))
}

/// Returns how far the workload has counted; checks that the numbers begin at one and have no gap or repetition.
pub(crate) async fn last_number(host: &Host, name: &str) -> usize {
    let (log, _) = host.logs(name).await.unwrap();
    let text: Vec<u8> = log.into_iter().flat_map(|entry| entry.data).collect();
    let numbers: Vec<usize> =
        String::from_utf8(text).unwrap().lines().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(numbers, (1..=numbers.len()).collect::<Vec<_>>(), "{name} counts on");
    numbers.len()
}

pub(crate) async fn wait_until_counted(host: &Host, name: &str, least: usize) {
    let what = format!("{name} reaches {least}");
    eventually(&what, async || (last_number(host, name).await >= least).then_some(())).await.unwrap();
}
