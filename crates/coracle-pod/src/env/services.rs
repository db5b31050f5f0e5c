//! Environment variables of services, in the two forms that containers get (Kubernetes documentation, "Discovering services").

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, Service, ServicePort};

/// Returns the variables of the services of the pod's namespace, and of `kubernetes`, which pods without service links get too.
#[must_use]
pub fn service_variables(pod: &Pod, services: &[Arc<Service>]) -> BTreeMap<String, String> {
    let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links).unwrap_or(true);
    let own = pod.metadata.namespace.as_deref().unwrap_or("default");
    let mut variables = BTreeMap::new();
    for service in services {
        let namespace = service.metadata.namespace.as_deref().unwrap_or("default");
        let name = service.metadata.name.as_deref().unwrap_or_default();
        let is_api_server = namespace == "default" && name == "kubernetes";
        if !(is_api_server || links && namespace == own) {
            continue;
        }
        let mut add = |key: String, value: String| match is_api_server {
            // A service of the same name in the pod's own namespace takes precedence.
            true => drop(variables.entry(key).or_insert(value)),
            false => drop(variables.insert(key, value)),
        };
        add_service(name, service, &mut add);
    }
    variables
}

fn add_service(name: &str, service: &Service, add: &mut dyn FnMut(String, String)) {
    let Some(spec) = &service.spec else { return };
    let address = spec.cluster_ip.as_deref().filter(|ip| !ip.is_empty() && *ip != "None");
    let (Some(address), Some(first)) = (address, spec.ports.iter().flatten().next()) else { return };
    let prefix = env_var_name(name);
    add(format!("{prefix}_SERVICE_HOST"), address.to_owned());
    add(format!("{prefix}_SERVICE_PORT"), first.port.to_string());
    add(format!("{prefix}_PORT"), url(first, address));
    for port in spec.ports.iter().flatten() {
        if let Some(port_name) = port.name.as_deref().filter(|name| !name.is_empty()) {
            add(format!("{prefix}_SERVICE_PORT_{}", env_var_name(port_name)), port.port.to_string());
        }
        let protocol = protocol(port);
        let link = format!("{prefix}_PORT_{}_{}", port.port, protocol.to_uppercase());
        add(link.clone(), url(port, address));
        add(format!("{link}_PROTO"), protocol);
        add(format!("{link}_PORT"), port.port.to_string());
        add(format!("{link}_ADDR"), address.to_owned());
    }
}

fn protocol(port: &ServicePort) -> String {
    port.protocol.as_deref().unwrap_or("TCP").to_lowercase()
}

fn url(port: &ServicePort, address: &str) -> String {
    let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    format!("{}://{host}:{}", protocol(port), port.port)
}

fn env_var_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}
