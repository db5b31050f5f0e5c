//! Networks of real CNI plugins, and of failing ones. Guests are network namespaces behind their taps.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::collections::HashSet;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coracle_hypervisor::{Forward, Protocol};
use coracle_net::{
    Bandwidth, Cni, CniError, CniNetwork, Endpoint, NetError, Network, NetworkRequest, Reach, open_tap,
};
use coracle_testkit::wire::{GuestHost, Station};
use coracle_testkit::{netns, tools};
use coracle_types::{InstanceId, MacAddr, VmId};
use serde_json::json;

/// Directory of the Debian package `containernetworking-plugins`.
const PLUGINS: &str = "/usr/lib/cni";
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 22, 0, 1);
const PORT: u16 = 80;

fn vm(name: &str) -> VmId {
    VmId::of_name(&name.parse().unwrap())
}

fn request(id: &VmId) -> NetworkRequest {
    NetworkRequest::of(MacAddr::of(id))
}

/// Whether the plugins are installed. If not, the test is skipped; in CI it fails.
fn has_plugins() -> bool {
    let found = Path::new(PLUGINS).join("bridge").is_file();
    if !found {
        tools::skip("containernetworking-plugins is not installed");
    }
    found && tools::require(["ip", "busybox"]).is_some()
}

/// A node with its configuration, programs and state.
struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    /// Node with a bridge, addresses of 10.22.0.0/24 and fd22::/64, and the given plugins after it.
    fn new(more: &[(&str, &str)]) -> Self {
        let plugin =
            |(name, script): &(&str, &str)| (json!({"type": name}), format!("#!/bin/sh\n{script}\n"));
        Self::with(more.iter().map(plugin).collect())
    }

    /// Like [`Node::new`], with the CNI project's plugin that limits bandwidth.
    fn with_bandwidth() -> Self {
        let plugin = json!({"type": "bandwidth", "capabilities": {"bandwidth": true}});
        Self::with(vec![(plugin, format!("#!/bin/sh\nexec {PLUGINS}/bandwidth\n"))])
    }

    fn with(more: Vec<(serde_json::Value, String)>) -> Self {
        let node = Self { dir: tempfile::tempdir().unwrap() };
        let (conf, bin) = (node.path("conf"), node.path("bin"));
        fs::create_dir(&conf).unwrap();
        fs::create_dir(&bin).unwrap();
        let mut plugins = vec![json!({
            "type": "bridge", "bridge": "cni0", "isGateway": true, "mtu": 1400, "capabilities": {"mac": true, "ips": true},
            "ipam": {"type": "host-local", "dataDir": node.path("leases"),
                "ranges": [[{"subnet": "10.22.0.0/24"}], [{"subnet": "fd22::/64"}]],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]},
            "dns": {"nameservers": ["10.22.0.1"]},
        })];
        for (plugin, script) in more {
            let path = bin.join(plugin["type"].as_str().unwrap());
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            plugins.push(plugin);
        }
        for name in ["bridge", "host-local", "loopback"] {
            std::os::unix::fs::symlink(Path::new(PLUGINS).join(name), bin.join(name)).unwrap();
        }
        let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins});
        fs::write(conf.join("10-pods.conflist"), list.to_string()).unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn cni(&self) -> Cni {
        Cni::new(self.path("conf"), self.path("bin"), &self.path("state"))
            .with_deadline(Duration::from_secs(3))
    }

    /// What remains on the node: addresses, namespaces, interfaces, entries.
    fn leftovers(&self) -> Vec<String> {
        let names = |dir: &Path| {
            let files = fs::read_dir(dir).into_iter().flatten().flatten();
            files.map(|file| file.file_name().into_string().unwrap()).collect::<Vec<_>>()
        };
        let leases = names(&self.path("leases/pods"));
        let mut left: Vec<_> =
            leases.into_iter().filter(|name| name.starts_with("10.") || name.starts_with("fd22")).collect();
        left.extend(names(&self.path("state/cni")));
        let netns = self.cni().netns(&vm("any"));
        let own = netns.file_name().unwrap().to_str().unwrap().split('-').next().unwrap().to_owned();
        left.extend(names(Path::new("/run/netns")).into_iter().filter(|name| name.starts_with(&own)));
        left.extend(names(Path::new("/sys/class/net")).into_iter().filter(|name| name.starts_with("veth")));
        left
    }
}

fn ip(line: &str) {
    let status = Command::new("ip").args(line.split(' ')).status().unwrap();
    assert!(status.success(), "ip {line}");
}

/// A VM on the network of the node.
struct Guest {
    id: VmId,
    address: Ipv4Addr,
    instance: InstanceId,
    host: GuestHost,
}

impl Guest {
    async fn start(cni: &Cni, name: &'static str) -> Self {
        let id = vm(name);
        let made = cni.add(&id, &request(&id)).await.unwrap();
        assert_eq!((made.prefix, made.gateway), (24, Some(GATEWAY)));
        assert_eq!(made.dns.nameservers, ["10.22.0.1"]);
        let instance = InstanceId::from(vm(&format!("{name}-vmm")));
        ip(&format!("tuntap add {} mode tap", instance.tap_name()));
        cni.join(&id, &instance).await.unwrap();
        cni.join(&id, &instance).await.unwrap();
        let mac = MacAddr::of(&id).to_string();
        let mac: Vec<u8> = mac.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        let station = Station { mac: mac.try_into().unwrap(), address: made.address };
        let host = GuestHost::start(&instance.tap_name(), station);
        host.run(|| serve(name));
        Self { id, address: made.address, instance, host }
    }

    async fn end(self, cni: &Cni) {
        self.host.end();
        cni.disconnect(&self.instance).await.unwrap();
        cni.disconnect(&self.instance).await.unwrap();
        ip(&format!("link del {}", self.instance.tap_name()));
        cni.del(&self.id).await.unwrap();
        cni.del(&self.id).await.unwrap();
    }
}

fn serve(answer: &'static str) {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _client_gone = stream.and_then(|mut stream| stream.write_all(answer.as_bytes()));
        }
    });
}

fn ask(at: Ipv4Addr) -> Option<String> {
    let limit = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((at, PORT)), limit).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

#[test]
fn guests_of_plugins_reach_each_other_and_the_gateway() {
    if !has_plugins() {
        return;
    }
    netns::run(|| async {
        let node = Node::new(&[]);
        let cni = node.cni();
        cni.verify(None).await.unwrap();
        let web = Guest::start(&cni, "web").await;
        let client = Guest::start(&cni, "client").await;
        cni.check(&web.id).await.unwrap();
        assert_eq!(client.host.run(|| ask(web.address)).as_deref(), Some("web"));
        assert_eq!(web.host.run(|| ask(client.address)).as_deref(), Some("client"));
        serve("gateway");
        assert_eq!(web.host.run(|| ask(GATEWAY)).as_deref(), Some("gateway"));
        assert_eq!(ask(web.address).as_deref(), Some("web"), "from the node");
        let mtu = fs::read_to_string(format!("/sys/class/net/{}/mtu", web.instance.tap_name())).unwrap();
        assert_eq!(mtu.trim(), "1400");
        // A restarted daemon finds the network.
        let again = node.cni().add(&web.id, &request(&web.id)).await.unwrap();
        assert_eq!((again.address, again.mtu), (web.address, Some(1400)));
        let keep = HashSet::from([web.id.clone(), client.id.clone()]);
        assert!(node.cni().collect(&keep).await.unwrap().is_empty());
        web.end(&cni).await;
        client.end(&cni).await;
        assert_eq!(node.leftovers(), Vec::<String>::new());
        ip("link del cni0");
    });
}

#[test]
fn orphaned_network_is_collected_after_a_crash() {
    if !has_plugins() {
        return;
    }
    netns::run(|| async {
        // The daemon is killed while the second plugin runs: the first one has made its interface and leased an address.
        let node = Node::new(&[("slow", "[ $CNI_COMMAND = DEL ] || sleep 60")]);
        let id = vm("lost");
        let cni = node.cni().with_deadline(Duration::from_secs(60));
        let request = request(&id);
        let made = tokio::time::timeout(Duration::from_secs(2), cni.add(&id, &request)).await;
        assert!(made.is_err(), "it was cut off");
        assert!(!node.leftovers().is_empty());
        assert_eq!(node.cni().collect(&HashSet::new()).await.unwrap(), [id]);
        assert_eq!(node.leftovers(), Vec::<String>::new());
        assert!(node.cni().collect(&HashSet::new()).await.unwrap().is_empty());
        ip("link del cni0");
    });
}

#[test]
fn network_is_made_anew_after_a_restart_of_the_host() {
    if !has_plugins() {
        return;
    }
    netns::run(|| async {
        let node = Node::new(&[]);
        let (cni, id) = (node.cni(), vm("web"));
        cni.add(&vm("first"), &request(&vm("first"))).await.unwrap();
        let made = cni.add(&id, &request(&id)).await.unwrap();
        let netns = cni.netns(&id);
        assert!(Command::new("umount").arg(&netns).status().unwrap().success());
        let address6 = made.ipv6.as_ref().map(|ipv6| ipv6.address);
        assert!(address6.is_some());
        let request = NetworkRequest { address: Some(made.address), address6, ..request(&id) };
        assert_eq!(cni.add(&id, &request).await.unwrap(), made);
        assert_eq!(cni.collect(&HashSet::new()).await.unwrap().len(), 2);
        assert_eq!(node.leftovers(), Vec::<String>::new());
        ip("link del cni0");
    });
}

#[test]
fn bandwidth_is_limited_also_after_a_restart_of_the_host() {
    if !has_plugins() {
        return;
    }
    netns::run(|| async {
        let node = Node::with_bandwidth();
        let (cni, id) = (node.cni(), vm("web"));
        let bandwidth = Some(Bandwidth { ingress: Some(8_000_000), egress: Some(16_000_000) });
        cni.add(&id, &NetworkRequest { bandwidth, ..request(&id) }).await.unwrap();
        let limits = || {
            let shown = Command::new("tc").args(["qdisc", "show"]).output().unwrap().stdout;
            let shown = String::from_utf8(shown).unwrap();
            ["rate 8Mbit", "rate 16Mbit"].map(|rate| shown.contains(rate))
        };
        assert_eq!(limits(), [true, true]);
        assert!(Command::new("umount").arg(cni.netns(&id)).status().unwrap().success());
        cni.add(&id, &request(&id)).await.unwrap();
        assert_eq!(limits(), [true, true], "as it was asked for first");
        cni.del(&id).await.unwrap();
        assert_eq!(limits(), [false, false]);
        assert_eq!(node.leftovers(), Vec::<String>::new());
        ip("link del cni0");
    });
}

/// A process that the daemon starts has copies of its descriptors for a moment.
#[test]
fn busy_tap_is_retried() {
    if tools::require(["ip"]).is_none() {
        return;
    }
    netns::run(|| async {
        ip("tuntap add dev ctbusy mode tap");
        let held = open_tap("ctbusy").unwrap();
        let mut child = Command::new("sleep").arg("0.3").stdin(Stdio::from(held)).spawn().unwrap();
        open_tap("ctbusy").unwrap();
        child.wait().unwrap();
        let held = open_tap("ctbusy").unwrap();
        let error = open_tap("ctbusy").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ResourceBusy, "a VMM has it");
        drop(held);
        ip("link del ctbusy");
    });
}

#[test]
fn plugin_that_fails_leaves_nothing_table() {
    if !has_plugins() {
        return;
    }
    netns::run(|| async {
        for (why, script, want) in [
            (
                "an error",
                r#"cat >/dev/null; [ $CNI_COMMAND = DEL ] && exit 0; echo '{"cniVersion":"1.0.0","code":11,"msg":"try later"}'; exit 1"#,
                "CNI plugin last refused ADD: try later (code 11)",
            ),
            (
                "garbage",
                "[ $CNI_COMMAND = DEL ] && exit 0; echo nonsense; exit 0",
                "invalid answer of CNI plugin last to ADD: expected",
            ),
            (
                "an end without a word",
                "[ $CNI_COMMAND = DEL ] && exit 0; echo broken >&2; exit 3",
                "invalid answer of CNI plugin last to ADD: it failed and said \"broken\"",
            ),
            (
                "no address",
                "[ $CNI_COMMAND = DEL ] && exit 0; echo '{\"cniVersion\":\"1.0.0\"}'",
                "the result has no IPv4 address",
            ),
            (
                "it hangs, and so does its child",
                "[ $CNI_COMMAND = DEL ] && exit 0; sleep 1000",
                "CNI plugin last did not end ADD within 3 s",
            ),
        ] {
            let node = Node::new(&[("last", script)]);
            let (id, begin) = (vm("web"), Instant::now());
            let failure = node.cni().add(&id, &request(&id)).await.unwrap_err();
            assert!(failure.to_string().contains(want), "{why}: {failure}");
            assert!(begin.elapsed() < Duration::from_secs(20), "{why}");
            assert_eq!(node.leftovers(), Vec::<String>::new(), "{why}");
        }
        let node = Node::new(&[]);
        fs::remove_file(node.path("bin/bridge")).unwrap();
        let failure = node.cni().add(&vm("web"), &request(&vm("web"))).await.unwrap_err();
        assert!(matches!(failure, CniError::Run { .. }), "{failure}");
        let named = NetworkRequest { network: Some("other".into()), ..request(&vm("web")) };
        let failure = node.cni().add(&vm("other"), &named).await.unwrap_err();
        assert!(failure.to_string().starts_with("CNI network other not found in "), "{failure}");
        ip("link del cni0");
    });
}

#[test]
fn node_keeps_taps_and_networks_by_their_owners() {
    if !has_plugins() {
        return;
    }
    netns::run(|| async {
        let node = Node::new(&[]);
        let open = || CniNetwork::open(&node.path("state"), node.path("conf"), node.path("bin")).unwrap();
        let (network, id) = (open(), vm("web"));
        let request = request(&id);
        network.prepare(&[]).await.unwrap();
        assert!(network.gives_addresses() && network.lease(&id, None).is_err());
        network.setup(&id, &request).await.unwrap();
        let lease = network.lease(&id, None).unwrap();
        assert_eq!(lease.unwrap().gateway, GATEWAY);
        assert_eq!(network.guest_network(&id).unwrap().address, lease.unwrap().address);
        let other = Some(Ipv4Addr::new(10, 22, 0, 77));
        assert!(matches!(network.lease(&id, other), Err(NetError::Moved { .. })));
        // An instance of the warm pool has a tap before it has a VM.
        let instance = InstanceId::from(vm("pooled"));
        network.create_interface(&instance).await.unwrap();
        let endpoint = Endpoint { mac: request.mac, lease, reach: Reach::default(), ports: vec![] };
        network.attach(&instance, &endpoint).await.unwrap();
        let unknown = Endpoint { mac: MacAddr::of(&vm("other")), ..endpoint.clone() };
        assert!(matches!(network.attach(&instance, &unknown).await, Err(NetError::NoLease { .. })));
        network.attach(&instance, &endpoint).await.unwrap();
        drop(network);
        let network = open();
        assert!(network.sweep(&HashSet::from([instance.clone()])).await.unwrap().is_empty());
        assert_eq!(network.sweep(&HashSet::new()).await.unwrap(), [instance.tap_name()]);
        let port = Forward {
            protocol: Protocol::Tcp,
            host_address: Ipv4Addr::UNSPECIFIED,
            host_port: 8080,
            guest_port: 80,
        };
        let refused = NetworkRequest { ports: vec![port], ..self::request(&vm("other")) };
        let refused = network.setup(&vm("other"), &refused).await.unwrap_err();
        assert!(refused.is_bad_request(), "{refused}");
        network.remove(&id).await.unwrap();
        network.detach(&instance).await.unwrap();
        network.teardown().await.unwrap();
        assert_eq!(node.leftovers(), Vec::<String>::new());
        ip("link del cni0");
    });
}
