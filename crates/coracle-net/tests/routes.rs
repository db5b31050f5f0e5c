//! Pods of two nodes on one link reach each other by their own addresses: each node, and each Pod, is a network namespace.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use coracle_net::{BridgeNetwork, Endpoint, Network as _, PodRoute, PodRoutes, Reach, RouteChange};
use coracle_testkit::netns::{self, Netns};
use coracle_testkit::tools;
use coracle_testkit::wire::{GuestHost, Station};
use coracle_types::{InstanceId, MacAddr, VmId};

/// Time after which a connection counts as dropped.
const LIMIT: Duration = Duration::from_millis(700);
const PORT: u16 = 80;
/// Subnet and address of the node with VMs, and of another node with a Pod.
const GUESTS: &str = "10.244.7.0/24";
const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const PODS: &str = "10.244.2.0/24";
const OTHER_NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 5);

fn ip(line: &str) -> String {
    let output = Command::new("ip").args(line.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Joins this namespace with another one by a veth pair.
fn join(near: &str, to: &Netns, far: &str) {
    // Keeps the namespace open by a pid, which `ip` accepts.
    let mut holder = to.sync(|| Command::new("sleep").arg("60").spawn().unwrap());
    ip(&format!("link add {near} type veth peer name {far} netns {}", holder.id()));
    holder.kill().unwrap();
    holder.wait().unwrap();
}

/// Replies to every connection with the address that it came from.
fn mirror(at: Ipv4Addr) {
    let listener = TcpListener::bind((at, PORT)).unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, from)) = listener.accept() {
            let _client_gone = stream.write_all(from.ip().to_string().as_bytes());
        }
    });
}

/// Source address of this host as the server at `at` sees it; `None` if the server is unreachable.
fn source_address_at(at: Ipv4Addr) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::new(IpAddr::V4(at), PORT), LIMIT).ok()?;
    stream.set_read_timeout(Some(LIMIT)).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// A node without VMs, with one Pod.
fn other_node() -> (Netns, Netns) {
    let (node, pod) = (Netns::new().unwrap(), Netns::new().unwrap());
    join("lan", &node, "lan");
    ip(&format!("addr add {NODE}/24 dev lan"));
    ip("link set lan up");
    node.sync(|| {
        ip(&format!("addr add {OTHER_NODE}/24 dev lan"));
        ip("link set lan up");
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        join("pods", &pod, "eth0");
        ip("addr add 10.244.2.1/24 dev pods");
        ip("link set pods up");
        mirror(OTHER_NODE);
    });
    pod.sync(|| {
        ip(&format!("addr add {POD}/24 dev eth0"));
        ip("link set eth0 up");
        ip("route add default via 10.244.2.1");
        mirror(POD);
    });
    (node, pod)
}

async fn guest(network: &BridgeNetwork, name: &str, reach: Reach) -> (InstanceId, Ipv4Addr, GuestHost) {
    let vm = VmId::of_name(&name.parse().unwrap());
    let lease = network.lease(&vm, None).unwrap();
    let (mac, instance) = (MacAddr::of(&vm), InstanceId::from(vm));
    network.attach(&instance, &Endpoint { mac, lease, reach, ports: vec![] }).await.unwrap();
    let bytes: Vec<u8> =
        mac.to_string().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    let address = lease.unwrap().address;
    let host = GuestHost::start(&instance.tap_name(), Station { mac: bytes.try_into().unwrap(), address });
    host.run(|| mirror(Ipv4Addr::UNSPECIFIED));
    (instance, address, host)
}

fn route(destination: &str, gateway: Ipv4Addr) -> PodRoute {
    PodRoute { destination: destination.parse().unwrap(), gateway }
}

#[test]
fn pods_of_two_nodes_reach_each_other_without_masquerading() {
    if tools::require(["nft", "busybox", "ip"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let network = BridgeNetwork::open(dir.path(), Some(GUESTS.parse().unwrap())).await.unwrap();
        let network = network.with_pod_networks(vec!["10.244.0.0/16".parse().unwrap()]);
        network.prepare(&[]).await.unwrap();
        let (node, pod) = other_node();
        let (open, open_at, open_host) = guest(&network, "pod", Reach { guests: true, node: true }).await;
        let (alone, alone_at, alone_host) = guest(&network, "alone", Reach::default()).await;
        assert_eq!(open_host.run(|| source_address_at(POD)), None, "no route yet");

        let routes = PodRoutes::open().unwrap();
        let to_pods = route(PODS, OTHER_NODE);
        assert_eq!(routes.reconcile(&[to_pods]).await.unwrap(), [RouteChange::Set(to_pods)]);
        assert_eq!(routes.reconcile(&[to_pods]).await.unwrap(), [], "it is there");
        node.enter(Duration::from_secs(20), || async {
            PodRoutes::open().unwrap().reconcile(&[route(GUESTS, NODE)]).await.unwrap();
        });

        // Each sees the other by its own address, in both directions. Servers elsewhere see the node's address.
        assert_eq!(open_host.run(|| source_address_at(POD)), Some(open_at.to_string()));
        assert_eq!(pod.sync(|| source_address_at(open_at)), Some(POD.to_string()));
        assert_eq!(open_host.run(|| source_address_at(OTHER_NODE)), Some(NODE.to_string()));
        // A guest without permission to reach other guests does not reach those of other nodes, and they do not reach it.
        assert_eq!(alone_host.run(|| source_address_at(POD)), None);
        assert_eq!(pod.sync(|| source_address_at(alone_at)), None);
        assert_eq!(alone_host.run(|| source_address_at(OTHER_NODE)), Some(NODE.to_string()));

        // Routes of other programs stay. A route that cannot be made does not prevent the others.
        ip(&format!("route add 10.250.0.0/16 via {OTHER_NODE}"));
        ip(&format!("route add 10.244.9.0/24 via {OTHER_NODE} proto bird"));
        let far = route("10.244.3.0/24", Ipv4Addr::new(203, 0, 113, 1));
        let (theirs, near) = (route("10.244.9.0/24", OTHER_NODE), route("10.244.4.0/24", OTHER_NODE));
        let error = routes.reconcile(&[far, theirs, near]).await.unwrap_err();
        assert!(error.to_string().contains("10.244.3.0/24 by 203.0.113.1"), "{error}");
        let shown = ip("route show");
        assert!(shown.contains("10.244.4.0/24") && shown.contains("10.250.0.0/16"), "{shown}");
        assert!(shown.contains("10.244.9.0/24 via 192.0.2.2 dev lan proto bird"), "{shown}");
        assert!(!shown.contains(PODS), "its node has gone: {shown}");
        assert_eq!(routes.reconcile(&[]).await.unwrap(), [RouteChange::Removed(near.destination)]);
        assert!(ip("route show").contains("10.244.9.0/24"), "not made here");

        for (instance, host) in [(open, open_host), (alone, alone_host)] {
            host.end();
            network.detach(&instance).await.unwrap();
        }
        ip("link del lan");
        network.teardown().await.unwrap();
    });
}
