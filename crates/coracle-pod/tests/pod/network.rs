use crate::support::node;
use serde_json::{Value, json};

use coracle_pod::network::*;
use k8s_openapi::api::core::v1::Pod;

fn pod(spec: Value) -> Pod {
    let mut pod: Pod =
        serde_json::from_value(json!({"metadata": {"name": "web-0", "namespace": "shop"}, "spec": spec}))
            .unwrap();
    pod.spec.get_or_insert_default();
    pod
}

#[test]
fn hostname_follows_the_spec() {
    let node = node();
    let long = format!("{}-x", "n".repeat(62));
    for (spec, want) in [
        (json!({"containers": []}), Ok("web-0".to_owned())),
        (json!({"containers": [], "hostname": "db"}), Ok("db".to_owned())),
        (json!({"containers": [], "subdomain": "s"}), Ok("web-0".to_owned())),
        (
            json!({"containers": [], "subdomain": "s", "setHostnameAsFQDN": true}),
            Ok("web-0.s.shop.svc.cluster.local".to_owned()),
        ),
        (
            json!({"containers": [], "hostname": "n".repeat(50), "subdomain": "s", "setHostnameAsFQDN": true}),
            Err(format!(
                "invalid host name \"{}.s.shop.svc.cluster.local\": more than 64 bytes",
                "n".repeat(50)
            )),
        ),
        (json!({"containers": [], "hostnameOverride": "a.b.c"}), Ok("a.b.c".to_owned())),
    ] {
        assert_eq!(hostname(&pod(spec.clone()), &node).map_err(|error| error.to_string()), want, "{spec}");
    }
    let mut named = pod(json!({"containers": []}));
    named.metadata.name = Some(long);
    assert_eq!(hostname(&named, &node).unwrap(), "n".repeat(62));
}

#[test]
fn hosts_file_lists_the_pod_and_its_aliases() {
    let addresses = ["10.1.0.9".parse().unwrap()];
    let spec = json!({"containers": [], "subdomain": "s", "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["a", "b"]}]});
    let text = hosts_file(&pod(spec), &node()).text(&addresses);
    let tail =
        "10.1.0.9\tweb-0.s.shop.svc.cluster.local\tweb-0\n\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n";
    assert!(text.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"), "{text}");
    assert!(text.ends_with(tail), "{text}");
    let plain = hosts_file(&pod(json!({"containers": []})), &node()).text(&addresses);
    assert!(plain.ends_with("10.1.0.9\tweb-0\n"), "{plain}");
}

#[test]
fn resolver_follows_policy_and_own_configuration() {
    let node = node();
    let show = |spec: Value| {
        let config = resolver(&pod(spec), &node);
        [config.nameservers.join(" "), config.searches.join(" "), config.options.join(" ")].join(" | ")
    };
    let own = json!({"nameservers": ["9.9.9.9"], "searches": ["own"], "options": [
        {"name": "ndots", "value": "1"}, {"name": "rotate"}]});
    for (spec, want) in [
        (
            json!({"containers": []}),
            "10.0.0.10 | shop.svc.cluster.local svc.cluster.local cluster.local example.org | ndots:5",
        ),
        (json!({"containers": [], "dnsPolicy": "Default"}), "192.0.2.53 | example.org | "),
        (json!({"containers": [], "dnsPolicy": "None", "dnsConfig": own}), "9.9.9.9 | own | ndots:1 rotate"),
        (
            json!({"containers": [], "dnsConfig": own}),
            "10.0.0.10 9.9.9.9 | shop.svc.cluster.local svc.cluster.local cluster.local example.org own | ndots:1 rotate",
        ),
    ] {
        assert_eq!(show(spec.clone()), want, "{spec}");
    }
    let many: Vec<_> = (0..9).map(|n| format!("10.0.0.{n}")).collect();
    let config = json!({"containers": [], "dnsPolicy": "None", "dnsConfig": {"nameservers": many}});
    assert_eq!(show(config), "10.0.0.0 10.0.0.1 10.0.0.2 |  | ");
}
