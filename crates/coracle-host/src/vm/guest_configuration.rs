//! Configuration that a guest gets when it starts, with the addresses of its network.

use coracle_net::{CniAddresses, CniIpv6, Route};
use coracle_proto::guest as pb;
use coracle_record::Record;

use crate::vmm_config::configuration;

/// Configuration of the guest of a VM.
pub(super) fn guest_configuration(
    node: &crate::node::Node,
    record: &Record,
    entropy: Vec<u8>,
) -> pb::ConfigureRequest {
    let mut request = configuration(&node.config, record, node.network.subnet(), entropy, node.clock.now());
    if let (Some(network), Some(made)) = (&mut request.network, node.network.guest_network(&record.id)) {
        let has_resolver = record.disk_image_vm.as_ref().is_some_and(|settings| settings.resolver.is_some());
        apply_cni_result(network, made, (!has_resolver).then_some(&node.config.nameservers));
    }
    request
}

/// Applies a CNI result to the network configuration. `nameservers`: those of the node, used if the network names none; `None`
/// for a VM with its own resolver. Pure.
fn apply_cni_result(network: &mut pb::Network, made: CniAddresses, nameservers: Option<&Vec<String>>) {
    network.address = format!("{}/{}", made.address, made.prefix);
    network.gateway = made.gateway.map(|gateway| gateway.to_string()).unwrap_or_default();
    network.ipv6 = made.ipv6.as_ref().map(ipv6);
    network.mtu = made.mtu.unwrap_or_default();
    network.routes = made.routes.iter().map(route).collect();
    if let Some(nameservers) = nameservers {
        let own = made.dns.nameservers;
        network.nameservers = if own.is_empty() { nameservers.clone() } else { own };
        (network.search_domains, network.resolver_options) = (made.dns.search, made.dns.options);
    }
}

fn ipv6(made: &CniIpv6) -> pb::Ipv6 {
    let gateway = made.gateway.map(|gateway| gateway.to_string()).unwrap_or_default();
    pb::Ipv6 { address: format!("{}/{}", made.address, made.prefix), gateway }
}

fn route(route: &Route) -> pb::Route {
    let gateway = route.gateway.map(|gateway| gateway.to_string()).unwrap_or_default();
    pb::Route { to: route.to.to_string(), gateway }
}

#[cfg(test)]
mod tests {
    use coracle_net::Dns;

    use super::*;

    #[test]
    fn addresses_of_the_network_table() {
        let made = |nameservers: &[&str]| CniAddresses {
            address: [10, 22, 0, 5].into(),
            prefix: 16,
            gateway: Some([10, 22, 0, 1].into()),
            ipv6: Some(CniIpv6 { address: "fd00::5".parse().unwrap(), prefix: 64, gateway: None }),
            routes: vec![Route { to: "192.168.0.0/16".parse().unwrap(), gateway: None }],
            mtu: Some(1450),
            dns: Dns { nameservers: nameservers.iter().map(ToString::to_string).collect(), ..Dns::default() },
        };
        let node = vec!["1.1.1.1".to_owned()];
        for (why, from, of_node, want) in [
            ("its own name servers", made(&["10.22.0.1"]), Some(&node), "10.22.0.1"),
            ("those of the node", made(&[]), Some(&node), "1.1.1.1"),
            ("a resolver of the VM stays", made(&["10.22.0.1"]), None, "9.9.9.9"),
        ] {
            let mut network = pb::Network { nameservers: vec!["9.9.9.9".into()], ..pb::Network::default() };
            apply_cni_result(&mut network, from, of_node);
            assert_eq!(network.nameservers, [want], "{why}");
            assert_eq!((network.address.as_str(), network.gateway.as_str()), ("10.22.0.5/16", "10.22.0.1"));
            let ipv6 = pb::Ipv6 { address: "fd00::5/64".into(), gateway: String::new() };
            assert_eq!(network.ipv6, Some(ipv6), "{why}");
            let lan = pb::Route { to: "192.168.0.0/16".into(), gateway: String::new() };
            assert_eq!((network.mtu, network.routes), (1450, vec![lan]), "{why}");
        }
    }
}
