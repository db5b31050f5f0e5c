//! Values of `fieldRef` and `resourceFieldRef`: fields of the pod and amounts of resources.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};

use super::ConfigError;
use crate::declared::declared;
use crate::node::NodeFacts;
use coracle_api::Amount;

/// Source of field values.
#[derive(Clone, Copy, Debug)]
pub struct FieldContext<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Node of the pod.
    pub node: &'a NodeFacts,
    /// Addresses of the pod.
    pub addresses: &'a [IpAddr],
}

/// Returns the value of a field of the pod.
///
/// # Errors
/// [`ConfigError`] for a field that is not supported, or whose value is not known yet.
pub fn field(context: &FieldContext<'_>, path: &str) -> Result<String, ConfigError> {
    let meta = &context.pod.metadata;
    let spec = context.pod.spec.as_ref();
    let text = |value: Option<&String>| value.cloned().unwrap_or_default();
    if let Some((map, key)) = subscript(path) {
        let pairs = match map {
            "metadata.labels" => meta.labels.as_ref(),
            "metadata.annotations" => meta.annotations.as_ref(),
            _ => return Err(unknown(path)),
        };
        return Ok(pairs.and_then(|pairs| pairs.get(key)).cloned().unwrap_or_default());
    }
    Ok(match path {
        "metadata.name" => text(meta.name.as_ref()),
        "metadata.namespace" => text(meta.namespace.as_ref()),
        "metadata.uid" => text(meta.uid.as_ref()),
        "metadata.labels" => lines(meta.labels.as_ref()),
        "metadata.annotations" => lines(meta.annotations.as_ref()),
        "spec.nodeName" => context.node.name.clone(),
        "spec.serviceAccountName" => {
            spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default()
        }
        "status.hostIP" => context.node.addresses.first().map(IpAddr::to_string).unwrap_or_default(),
        "status.hostIPs" => join(&context.node.addresses),
        "status.podIP" | "status.podIPs" if context.addresses.is_empty() => {
            return Err(ConfigError::new(format!("field {path} is not known yet: the pod has no address")));
        }
        "status.podIP" => join(&context.addresses[..1]),
        "status.podIPs" => join(context.addresses),
        _ => return Err(unknown(path)),
    })
}

fn unknown(path: &str) -> ConfigError {
    ConfigError::new(format!("invalid field path {path:?}: pods have no such field"))
}

/// Splits `metadata.labels['key']` into map and key.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, key) = path.strip_suffix("']")?.split_once("['")?;
    Some((map, key))
}

fn join(addresses: &[IpAddr]) -> String {
    addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",")
}

/// Returns one line `key="value"` for each pair, quoted like strings of Go (strconv.Quote), as the downward API writes them.
fn lines(pairs: Option<&BTreeMap<String, String>>) -> String {
    let pairs = pairs.into_iter().flatten();
    pairs.map(|(key, value)| format!("{key}={}", quote(value))).collect::<Vec<_>>().join("\n")
}

fn quote(value: &str) -> String {
    let mut quoted = String::from("\"");
    for c in value.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Returns the amount of a container's resource in units of the divisor. A limit that is not set is the allocatable amount of
/// the node.
///
/// # Errors
/// [`ConfigError`] for an unknown resource, or for a container that the pod does not have.
pub fn resource_field(
    context: &FieldContext<'_>,
    own: Option<&Container>,
    wanted: &ResourceFieldSelector,
) -> Result<String, ConfigError> {
    let invalid =
        |why: &str| ConfigError::new(format!("invalid resource field {:?}: {why}", wanted.resource));
    let all = declared(context.pod);
    let named = wanted.container_name.as_deref().filter(|name| !name.is_empty());
    let container = match named {
        Some(name) => all.iter().find(|one| one.name() == name).map(|one| one.container.as_ref()),
        None => own,
    };
    let container = container.ok_or_else(|| invalid("its container is not in the pod"))?;
    let (list, resource) =
        wanted.resource.split_once('.').ok_or_else(|| invalid("not a list and a resource"))?;
    let resources = container.resources.as_ref();
    let amount_in = |list: &str| {
        let map = match list {
            "limits" => resources.and_then(|r| r.limits.as_ref()),
            _ => resources.and_then(|r| r.requests.as_ref()),
        };
        map.and_then(|map| map.get(resource)).map(Amount::of)
    };
    let node = || match resource {
        "cpu" => Some(Amount::of_units(context.node.allocatable_cpus.into())),
        "memory" => Some(Amount::of_units(context.node.allocatable_memory.bytes())),
        _ => None,
    };
    if !matches!(resource, "cpu" | "memory" | "ephemeral-storage") && !resource.starts_with("hugepages-") {
        return Err(invalid("only cpu, memory, ephemeral-storage and hugepages"));
    }
    let amount = match list {
        "limits" => amount_in("limits").or_else(node),
        "requests" => amount_in("requests"),
        _ => return Err(invalid("neither limits nor requests")),
    };
    let divisor = wanted.divisor.as_ref().map(Amount::of).unwrap_or_default();
    Ok(amount.unwrap_or_default().in_parts_of(divisor).to_string())
}
