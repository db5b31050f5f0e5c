//! Objects that register the extension API with the API server.

use coracle_admission::{Endpoint, Reach, SERVICE};
use coracle_api::subresources::{API_SERVICE, GROUP, VERSION};
use serde_json::{Value, json};

/// Returns the APIService and, when the operator has no Service, a Service in the namespace `system` that names the host.
/// Returns no objects when a Service cannot name the host: an IPv6 address.
#[must_use]
pub fn objects(at: &Endpoint, system: &str) -> Vec<Value> {
    let labels = json!({
        "app.kubernetes.io/name": "coracle", "app.kubernetes.io/part-of": "coracle",
        "app.kubernetes.io/component": "subresources", "app.kubernetes.io/managed-by": "coracle-operator",
    });
    let (service, own) = match &at.reach {
        Reach::Service { namespace, name, port } => {
            (json!({"namespace": namespace, "name": name, "port": port}), None)
        }
        Reach::Url { host } => {
            let Some(host) = external_name(host) else { return Vec::new() };
            let metadata = json!({"namespace": system, "name": SERVICE, "labels": labels});
            let spec = json!({
                "type": "ExternalName", "externalName": host,
                "ports": [{"name": "https", "port": at.port, "protocol": "TCP"}],
            });
            let own = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec});
            (json!({"namespace": system, "name": SERVICE, "port": at.port}), Some(own))
        }
    };
    let api = json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
        "metadata": {"name": API_SERVICE, "labels": labels},
        "spec": {
            "group": GROUP, "version": VERSION, "service": service, "caBundle": at.ca_bundle,
            "groupPriorityMinimum": 1000, "versionPriority": 15,
        },
    });
    own.into_iter().chain([api]).collect()
}

/// Returns the host as a DNS name. An IPv4 address has the form of one.
fn external_name(host: &str) -> Option<String> {
    match host.trim_matches(['[', ']']) {
        "::1" => Some("localhost".to_owned()),
        host if host.contains(':') => None,
        host => Some(host.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    fn endpoint_at(reach: Reach) -> Endpoint {
        Endpoint { reach, port: 9443, ca_bundle: ByteString(b"ca".to_vec()) }
    }

    #[test]
    fn api_service_refers_to_service_or_external_name() {
        let service = Reach::Service { namespace: "coracle-system".into(), name: "w".into(), port: 443 };
        let found = objects(&endpoint_at(service), "coracle-system");
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0]["spec"]["service"],
            json!({"namespace": "coracle-system", "name": "w", "port": 443})
        );
        for (host, want) in
            [("127.0.0.1", "127.0.0.1"), ("[::1]", "localhost"), ("host.example", "host.example")]
        {
            let found = objects(&endpoint_at(Reach::Url { host: host.into() }), "coracle-system");
            assert_eq!(found[0]["spec"]["externalName"], want);
            assert_eq!(found[1]["spec"]["service"]["port"], 9443);
        }
        assert!(
            objects(&endpoint_at(Reach::Url { host: "2001:db8::1".into() }), "coracle-system").is_empty()
        );
    }
}
