//! Real VMs on the networks of real CNI plugins.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::Host;
use coracle_net::CniNetwork;
use coracle_testkit::{netns, tools};
use serde_json::json;
use tokio::process::Command;

use super::support::{Node, exec, page, run};

/// Where Debian has the plugins of `containernetworking-plugins`.
const PLUGINS: &str = "/usr/lib/cni";

/// A network behind a bridge, as an overlay makes it: short packets, and a route of its own.
fn configure(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{
        "type": "bridge", "bridge": "cni0", "isGateway": true, "mtu": 1400, "capabilities": {"mac": true, "ips": true},
        "ipam": {"type": "host-local", "dataDir": dir.join("leases"), "ranges": [[{"subnet": "10.22.0.0/24"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.22.0.254"}]},
        "dns": {"nameservers": ["10.22.0.1"]},
    }]});
    std::fs::write(dir.join("10-pods.conflist"), list.to_string()).unwrap();
}

async fn open(node: &Node) -> Host {
    let conf = node.dir.path().join("cni");
    let network = CniNetwork::open(&node.state(), conf, PLUGINS.into()).unwrap();
    node.open_on(node.config(), Arc::new(network)).await
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
        let (said, _) = exec(&host, "web", &["sh", "-c", "ip route; cat /sys/class/net/eth0/mtu"]).await;
        for line in ["default via 10.22.0.1 dev eth0", "192.168.0.0/16 via 10.22.0.254 dev eth0", "\n1400\n"]
        {
            assert!(said.contains(line), "{line:?} in {said}");
        }
        assert!(page(&web).await.ends_with("hello from the guest\n"), "from the node");
        host.shutdown().await;
        drop(host);
        let host = open(&node).await;
        assert!(page(&web).await.ends_with("hello from the guest\n"), "after a restart of the daemon");
        host.delete("web", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
        let left = |dir: &str| std::fs::read_dir(node.dir.path().join(dir)).unwrap().flatten().count();
        assert_eq!(left("state/cni"), 0, "no network is left");
        // The plugin keeps its bridge.
        let deleted = Command::new("ip").args(["link", "del", "cni0"]).status().await.unwrap();
        assert!(deleted.success());
    });
}
