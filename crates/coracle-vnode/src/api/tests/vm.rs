//! API of a pod in a real VM.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Host, HostConfig};
use coracle_image::{Source, Store, StoreOptions};
use coracle_net::BridgeNetwork;
use coracle_oci::NoProgress;
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::tools::{self, GuestKernel};
use coracle_testkit::{cluster, eventually_within};
use coracle_types::Clock;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

use super::clients::{Proxy, finish, request, send, streaming_client};
use super::world::{DEADLINE, IMAGE, MASTERS, World};

/// Time limit of a test: VMs are slow without KVM.
const SLOW: Duration = Duration::from_secs(240);
const APPLETS: [&str; 8] = ["sh", "echo", "cat", "sleep", "ps", "stty", "httpd", "mkdir"];

/// Opens a host core with QEMU and an image of busybox.
async fn open(dir: &Path, boot: GuestKernel) -> Host {
    let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
    let mut layer = LayerTar::new().dir("bin", 0o755).file("bin/busybox", 0o755, &busybox);
    for applet in APPLETS {
        layer = layer.symlink(&format!("bin/{applet}"), "busybox");
    }
    let layer = layer.dir("www", 0o755).file("www/index.html", 0o644, b"hello\n").finish();
    let spec = ImageSpec { cmd: vec!["sh".into()], env: vec!["PATH=/bin".into()], ..ImageSpec::default() };
    write_layout(&dir.join("layout"), &[layer], &spec, "1").unwrap();
    let store = Store::open(dir.join("images"), StoreOptions::default()).unwrap();
    let source: Source = format!("oci:{}:1", dir.join("layout").display()).parse().unwrap();
    store.import(&source, Some(&IMAGE.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    std::fs::create_dir(dir.join("state")).unwrap();
    let mut config = HostConfig::new(dir.join("state"), boot.kernel, boot.initrd);
    config.run_dir = dir.join("run");
    config.disk_mib = 64;
    config.templates.enabled = false;
    config.warm_pool.shapes_max = 0;
    let program = tools::tool("qemu-system-x86_64").unwrap();
    let driver = Arc::new(QemuDriver::new(QemuConfig { program, kvm: None }));
    let network = Arc::new(BridgeNetwork::open(&dir.join("state"), None).await.unwrap());
    Host::open(config, driver, network, Arc::new(store), Clock::system()).await.unwrap()
}

#[test]
fn pod_in_a_vm_is_entered_and_measured() {
    cluster::run_within(SLOW, async |cluster| {
        let programs = ["qemu-system-x86_64", "mke2fs", "nft", "busybox", "streaming-client"];
        if tools::require(programs).is_none() {
            return Ok(());
        }
        let Some(boot) = tools::guest_kernel() else {
            tools::skip("no guest kernel; `cargo xtask setup` makes it");
            return Ok(());
        };
        let dir = tempfile::tempdir()?;
        let host = open(dir.path(), boot).await;
        let world = World::of(host, dir, cluster.client(), "vm-node", false).await;
        let line = "echo begun; httpd -p 127.0.0.1:8080 -h /www; read line; echo got $line; sleep 1000";
        world.run("shop", "web", &["sh", "-c", line], true).await;
        let proxy = Proxy::new(&world, "admin", MASTERS).await;
        for via in ["spdy", "websocket"] {
            commands_run(&proxy, via).await;
            command_of_a_lost_client_ends(&world, &proxy, via).await?;
            port_of_the_loopback_is_reached(&proxy, via).await?;
        }
        let attach = proxy.url("/attach/shop/web/main?input=1");
        let flags = ["exec", "-stdin", "-stdout=false", "-stderr=false", &attach];
        let mut attached = streaming_client(&flags).unwrap();
        attached.stdin.as_mut().unwrap().write_all(b"input\n").await?;
        let get = async |path: &str| {
            send(&world, Some(world.ca.leaf("admin", MASTERS)), request("GET", path)).await.1
        };
        let log = async || {
            Some(get("/containerLogs/shop/web/main").await).filter(|log| log == "begun\ngot input\n")
        };
        eventually_within(DEADLINE, "the log has the output", log).await?;
        attached.kill().await?;
        let run = request("POST", "/run/shop/web/main?cmd=cat+/none");
        let (status, body) = send(&world, Some(world.ca.leaf("admin", MASTERS)), run).await;
        assert!(status == 500 && body.contains("exit code 1") && body.contains("/none"), "{status} {body}");
        let measured = async || {
            let summary: Value = serde_json::from_str(&get("/stats/summary").await).ok()?;
            let container = &summary["pods"][0]["containers"][0];
            let cpu = container["cpu"]["usageCoreNanoSeconds"].as_u64()?;
            let memory = container["memory"]["workingSetBytes"].as_u64()?;
            (cpu > 0 && memory > 0).then_some(())
        };
        eventually_within(DEADLINE, "the container is measured", measured).await?;
        let metrics = get("/metrics/resource").await;
        assert!(
            metrics.contains("container_cpu_usage_seconds_total{container=\"main\",pod=\"web\""),
            "{metrics}"
        );
        world.host.delete("web", true, None).await?;
        world.end().await;
        anyhow::Ok(())
    });
}

async fn exec(
    proxy: &Proxy,
    via: &str,
    flags: &[&str],
    query: &str,
    input: &[u8],
) -> (Option<i32>, String, String) {
    let url = proxy.url(&format!("/exec/shop/web/main?{query}"));
    let args = [&["exec", "-via", via], flags, &[url.as_str()]].concat();
    finish(streaming_client(&args).unwrap(), input).await
}

async fn commands_run(proxy: &Proxy, via: &str) {
    let query =
        "output=1&error=1&command=sh&command=-c&command=echo%20out;%20echo%20err%20%3E%262;%20exit%207";
    let want = (Some(7), "out\n".to_owned(), "err\n".to_owned());
    assert_eq!(exec(proxy, via, &[], query, b"").await, want, "{via}");
    let query = "input=1&output=1&command=cat";
    let (code, stdout, stderr) = exec(proxy, via, &["-stdin", "-stderr=false"], query, b"to the end").await;
    assert_eq!((code, stdout.as_str()), (Some(0), "to the end"), "{via}: {stderr}");
    // The terminal size arrives after the start of the process.
    let query = "input=1&output=1&error=1&tty=1&command=sh&command=-c&command=sleep%201;%20stty%20size";
    let flags = ["-stdin", "-tty", "-sizes", "90x33"];
    let (code, stdout, stderr) = exec(proxy, via, &flags, query, b"").await;
    assert_eq!((code, stdout.trim_end()), (Some(0), "33 90"), "{via}: {stderr}");
}

async fn command_of_a_lost_client_ends(world: &World, proxy: &Proxy, via: &str) -> anyhow::Result<()> {
    let line = "trap%20%22%22%20HUP;%20echo%20begun;%20exec%20sleep%204242";
    let url = proxy.url(&format!("/exec/shop/web/main?output=1&command=sh&command=-c&command={line}"));
    let mut client = streaming_client(&["exec", "-via", via, "-stderr=false", &url]).unwrap();
    let mut lines = BufReader::new(client.stdout.as_mut().unwrap()).lines();
    assert_eq!(timeout(DEADLINE, lines.next_line()).await??.as_deref(), Some("begun"), "{via}");
    let processes = async || {
        let run = request("POST", "/run/shop/web/main?cmd=ps");
        send(world, Some(world.ca.leaf("admin", MASTERS)), run).await.1
    };
    let before = processes().await;
    assert!(before.contains("sleep 4242"), "{via}: {before}");
    client.kill().await?;
    let ended = async || (!processes().await.contains("sleep 4242")).then_some(());
    eventually_within(DEADLINE, "the command is ended though it ignores SIGHUP", ended).await
}

async fn port_of_the_loopback_is_reached(proxy: &Proxy, via: &str) -> anyhow::Result<()> {
    let url = proxy.url("/portForward/shop/web");
    let mut client = streaming_client(&["forward", "-via", via, &url, ":8080"]).unwrap();
    let mut lines = BufReader::new(client.stdout.as_mut().unwrap()).lines();
    let line = timeout(DEADLINE, lines.next_line()).await??.unwrap_or_default();
    let port = line.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(' ').next());
    let port: u16 = port.unwrap_or_else(|| panic!("{via}: {line}")).parse()?;
    let mut connection = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    connection.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
    let mut answer = String::new();
    timeout(DEADLINE, connection.read_to_string(&mut answer)).await??;
    assert!(answer.ends_with("\r\n\r\nhello\n"), "{via}: {answer}");
    client.kill().await?;
    Ok(())
}
