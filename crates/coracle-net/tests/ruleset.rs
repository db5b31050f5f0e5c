//! The whole packet filter of a node, as an administrator sees it.
#![allow(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::net::Ipv4Addr;
use std::process::Command;

use coracle_hypervisor::{Forward, Protocol};
use coracle_net::{BridgeNetwork, GuestNic, Network, Reach};
use coracle_testkit::{netns, tools};
use coracle_types::{MacAddr, VmId};

fn guest(name: &str, last: u8, reach: Reach, ports: Vec<Forward>) -> GuestNic {
    let vm = VmId::of_name(&name.parse().unwrap());
    let address = Ipv4Addr::new(10, 100, 7, last);
    GuestNic { mac: MacAddr::of(&vm), instance: vm.into(), address, reach, ports }
}

#[test]
fn golden_ruleset_of_a_node_with_two_guests() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let network = BridgeNetwork::open(dir.path(), Some("10.100.7.0/24".parse().unwrap())).await.unwrap();
        let network = network
            .with_api_server(vec!["192.0.2.1:6443".parse().unwrap()])
            .with_pod_networks(vec!["10.244.0.0/16".parse().unwrap()]);
        let port = |protocol, host_address: Ipv4Addr, host_port| Forward {
            protocol,
            host_address,
            host_port,
            guest_port: 80,
        };
        let ports = vec![
            port(Protocol::Tcp, Ipv4Addr::UNSPECIFIED, 8080),
            port(Protocol::Udp, Ipv4Addr::LOCALHOST, 5353),
        ];
        let guests = [
            guest("open", 2, Reach { guests: true, node: true }, ports),
            guest("closed", 3, Reach::default(), vec![]),
        ];
        network.prepare(&guests).await.unwrap();
        let output = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
        // The names of the bridge and the tables, and the group of the taps, contain the digits of the directory.
        let number = network.bridge().strip_prefix("cor").unwrap();
        let group = 0x0c00_0000 | u32::from_str_radix(number, 16).unwrap();
        let shown = String::from_utf8(output.stdout).unwrap();
        let shown = shown.replace(number, "NUMBER").replace(&group.to_string(), "GROUP");
        insta::assert_snapshot!("ruleset", shown);
        network.teardown().await.unwrap();
    });
}
