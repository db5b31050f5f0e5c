//! Real VMs on the networks of real CNI plugins.

use std::io::ErrorKind;
use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::Host;
use coracle_net::CniNetwork;
use coracle_testkit::{eventually_within, netns, tools};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::timeout;

use super::support::{Node, exec, page, run};

/// Directory of the Debian package `containernetworking-plugins`.
const PLUGINS: &str = "/usr/lib/cni";

/// Network behind a bridge, as an overlay makes it: a small MTU, and its own route.
fn configure(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{
        "type": "bridge", "bridge": "cni0", "isGateway": true, "mtu": 1400, "capabilities": {"mac": true, "ips": true},
        "ipam": {"type": "host-local", "dataDir": dir.join("leases"),
            "ranges": [[{"subnet": "10.22.0.0/24"}], [{"subnet": "fd22::/64"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.22.0.254"},
                {"dst": "::/0"}, {"dst": "fd23::/64", "gw": "fd22::fe"}]},
        "dns": {"nameservers": ["10.22.0.1"]},
    }]});
    std::fs::write(dir.join("10-pods.conflist"), list.to_string()).unwrap();
}

async fn open(node: &Node) -> Host {
    let conf = node.dir.path().join("cni");
    let network = CniNetwork::open(&node.state(), conf, PLUGINS.into()).unwrap();
    node.open_on(node.config(), Arc::new(network)).await
}

/// Waits until the guest opens or refuses a connection, which proves that packets pass both ways. The network takes a second or
/// two.
async fn wait_for_answer(address: Ipv6Addr) {
    let answered = eventually_within(Duration::from_secs(15), "an answer by IPv6", async || {
        match timeout(Duration::from_secs(1), TcpStream::connect((address, 80))).await {
            Ok(Err(error)) => (error.kind() == ErrorKind::ConnectionRefused).then_some(()),
            Ok(Ok(_)) => Some(()),
            Err(_) => None,
        }
    });
    answered.await.unwrap();
}

#[test]
fn vm_has_the_addresses_routes_and_mtu_of_its_cni_network() {
    if !Path::new(PLUGINS).join("bridge").is_file() {
        tools::skip("containernetworking-plugins is not installed");
        return;
    }
    netns::run_within(Duration::from_secs(120), || async {
        let Some(node) = Node::new().await else { return };
        configure(&node.dir.path().join("cni"));
        let host = open(&node).await;
        let web = run(&host, "web").await;
        let look = "ip route; ip -6 route; cat /sys/class/net/eth0/mtu";
        let (said, _) = exec(&host, "web", &["sh", "-c", look]).await;
        for line in [
            "default via 10.22.0.1 dev eth0",
            "192.168.0.0/16 via 10.22.0.254 dev eth0",
            "default via fd22::1 dev eth0",
            "fd23::/64 via fd22::fe dev eth0",
            "\n1400\n",
        ] {
            assert!(said.contains(line), "{line:?} in {said}");
        }
        assert!(page(&web).await.ends_with("hello from the guest\n"), "from the node");
        let address6 = web.address6.expect("an IPv6 address");
        wait_for_answer(address6).await;
        host.hibernate("web", None).await.unwrap();
        assert_eq!(host.start("web", None).await.unwrap().address6, Some(address6), "woken");
        wait_for_answer(address6).await;
        host.shutdown().await;
        drop(host);
        let host = open(&node).await;
        assert!(page(&web).await.ends_with("hello from the guest\n"), "after a restart of the daemon");
        host.delete("web", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
        let left = |dir: &str| std::fs::read_dir(node.dir.path().join(dir)).unwrap().flatten().count();
        assert_eq!(left("state/cni"), 0, "no network is left");
        // The plugin leaves its bridge.
        let deleted = Command::new("ip").args(["link", "del", "cni0"]).status().await.unwrap();
        assert!(deleted.success());
    });
}
