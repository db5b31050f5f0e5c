//! `cargo xtask bench boot`: what our VM costs over the bare one, and the node over nothing.
//!
//! Raw and ours alternate: the same kernel, initramfs, memory and accelerator; raw
//! has none of our devices and ends at the first line that user space prints.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_host::{CreateSpec, Host, HostConfig, Owner, PullMode};
use coracle_hypervisor::Accelerator;
use coracle_image::{NoProgress, Source, Store, StoreOptions};
use coracle_net::BridgeNetwork;
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{netns, tools};
use coracle_types::Clock;

const SAMPLES: usize = 20;
const IMAGE: &str = "localhost/bench/idle:1";

fn main() {
    netns::run_within(Duration::from_secs(1800), || async {
        let boot = tools::guest_kernel().expect("a guest kernel: cargo xtask setup");
        let dir = tempfile::tempdir().expect("a temporary folder");
        let host = open(dir.path(), &boot).await;
        let (mut raw, mut ready) = (Vec::new(), Vec::new());
        for n in 0..SAMPLES {
            raw.push(raw_boot(dir.path(), &boot, n == 0));
            ready.push(our_boot(&host, n).await);
        }
        eprintln!("raw ms: {raw:.0?}\nready ms: {ready:.0?}\nsamples: {SAMPLES} each, alternating");
        let (raw, ready) = (median(raw), median(ready));
        figure("boot.raw_ms", raw, "ms");
        figure("boot.ready_ms", ready, "ms");
        figure("boot.ratio", ready / raw, "ratio");
        host.network().teardown().await.expect("remove the network");
        host.shutdown().await;
    });
}

/// One line of JSON on stdout; everything else goes to stderr.
#[expect(clippy::print_stdout, reason = "the result of a benchmark")]
fn figure(name: &str, value: f64, unit: &str) {
    println!("{{\"bench\":\"boot\",\"figure\":\"{name}\",\"value\":{value:.3},\"unit\":\"{unit}\"}}");
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn open(dir: &Path, boot: &tools::GuestKernel) -> Host {
    let state = dir.join("state");
    std::fs::create_dir(&state).expect("make the state folder");
    let images = Store::open(state.join("images"), StoreOptions::default()).expect("open the store");
    let busybox = std::fs::read(tools::tool("busybox").expect("busybox")).expect("read busybox");
    let layer = LayerTar::new().file("bin/busybox", 0o755, &busybox).symlink("bin/sleep", "busybox").finish();
    let spec = ImageSpec { cmd: vec!["/bin/sleep".into(), "100000".into()], ..ImageSpec::default() };
    write_layout(&dir.join("layout"), &[layer], &spec, "1").expect("write the image");
    let source: Source = format!("oci:{}:1", dir.join("layout").display()).parse().expect("a source");
    let name = IMAGE.parse().expect("a reference");
    images.import(&source, Some(&name), Arc::new(NoProgress)).await.expect("import the image");
    let mut config = HostConfig::new(state.clone(), boot.kernel.clone(), boot.initrd.clone());
    config.run_dir = dir.join("run");
    config.disk_mib = 256;
    let driver = Arc::new(QemuDriver::new(QemuConfig { program: qemu(), kvm: None }));
    let network = Arc::new(BridgeNetwork::open(&state, None).await.expect("open the network"));
    Host::open(config, driver, network, Arc::new(images), Clock::system()).await.expect("open the host")
}

fn qemu() -> PathBuf {
    tools::tool("qemu-system-x86_64").expect("qemu-system-x86_64: cargo xtask setup")
}

/// From spawn to the first line of user space, in milliseconds.
fn raw_boot(dir: &Path, boot: &tools::GuestKernel, show: bool) -> f64 {
    let socket = dir.join("raw.sock");
    let _absent = std::fs::remove_file(&socket);
    let recipe = coracle_hypervisor::VmRecipe {
        id: coracle_types::VmId::of_name(&"raw".parse().expect("a name")),
        vcpus: 1.try_into().expect("one CPU"),
        memory: 128.try_into().expect("128 MiB"),
        kernel: boot.kernel.clone(),
        initrd: boot.initrd.clone(),
        disks: vec![],
        nic: None,
        state_dir: dir.to_owned(),
        run_dir: dir.to_owned(),
        accelerator: Accelerator::Tcg,
    };
    let args = without_our_devices(coracle_qemu::argv_for_this_host(&recipe), &socket);
    if show {
        eprintln!("raw argv: {}", args.join(" "));
    }
    let began = Instant::now();
    let mut child = Command::new(qemu())
        .args(&args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("run QEMU");
    let mut console = loop {
        match UnixStream::connect(&socket) {
            Ok(console) => break console,
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut said = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&said).contains("coracle-guest") {
        let n = console.read(&mut buffer).expect("read the console");
        assert!(n > 0, "QEMU ended before user space: {}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&buffer[..n]);
    }
    let elapsed = began.elapsed();
    child.kill().expect("kill QEMU");
    child.wait().expect("reap QEMU");
    elapsed.as_secs_f64() * 1000.0
}

/// Machine, kernel and console stay; channel, disks, NIC, entropy device and monitor go.
fn without_our_devices(args: Vec<String>, console: &Path) -> Vec<String> {
    let mut kept = Vec::new();
    let mut args = args.into_iter().peekable();
    while let Some(flag) = args.next() {
        let takes_value = args.peek().is_some_and(|v| !v.starts_with('-'));
        let value = if takes_value { args.next() } else { None };
        match (flag.as_str(), value) {
            ("-device" | "-netdev" | "-blockdev" | "-qmp", _) => {}
            ("-chardev", Some(value)) if value.contains("id=guest") => {}
            ("-chardev", Some(_)) => {
                kept.extend([
                    flag,
                    format!("socket,id=console,path={},server=on,wait=on", console.display()),
                ]);
            }
            (_, value) => {
                kept.push(flag);
                kept.extend(value);
            }
        }
    }
    kept
}

/// From create to a workload that runs, in milliseconds; the VM is removed again.
async fn our_boot(host: &Host, n: usize) -> f64 {
    let name = format!("bench-{n}");
    let spec = CreateSpec {
        name: name.parse().expect("a name"),
        owner: Owner::default(),
        image: IMAGE.to_owned(),
        pull: PullMode::Never,
        vcpus: 1.try_into().expect("one CPU"),
        memory: 128.try_into().expect("128 MiB"),
        kernel_path: String::new(),
        address: None,
        hostname: String::new(),
        command: vec![],
        args: vec![],
        env: vec![],
        user: String::new(),
        workdir: String::new(),
        metadata: BTreeMap::new(),
        ports: vec![],
        disk_mib: None,
        idempotent: false,
    };
    let began = Instant::now();
    host.create(spec, Arc::new(NoProgress)).await.expect("create");
    host.start(&name, None).await.expect("start");
    let elapsed = began.elapsed();
    host.delete(&name, true, None).await.expect("delete");
    elapsed.as_secs_f64() * 1000.0
}
