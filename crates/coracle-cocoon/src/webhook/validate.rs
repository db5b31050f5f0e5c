//! Rules for sets that the schema cannot express, and rules for Deployments whose pods are VMs. Pure.

use coracle_api::CocoonSet;
use coracle_api::cocoon::{
    CocoonHibernationSpec, CocoonSetSpec, Mode, agent_vm_name, is_valid_vm_name, keys, toolbox_pod_name,
    toolbox_vm_name,
};
use kube::ResourceExt as _;
use serde_json::Value;

use super::mutate::is_of_vm;
use crate::set::unsupported_reason;

/// Refuses a set that cannot work. An update without a change of the spec is admitted: labels and finalizers stay writable.
///
/// # Errors
/// A sentence for the user.
pub(super) fn set(new: &CocoonSet, old: Option<&CocoonSet>) -> Result<(), String> {
    if old.is_some_and(|old| old.spec == new.spec) {
        return Ok(());
    }
    let (namespace, name) = (new.namespace().unwrap_or_default(), new.name_any());
    let spec = &new.spec;
    agent(spec)?;
    let last = u32::try_from(spec.agent.replicas).unwrap_or(0);
    vm_name("metadata.name", &agent_vm_name(&namespace, &name, last))?;
    let mut seen = Vec::new();
    for (index, toolbox) in spec.toolboxes.iter().enumerate() {
        let at = |field: &str| format!("spec.toolboxes[{index}].{field}");
        let name_of = &toolbox.name;
        if !is_label(name_of) {
            return Err(format!("invalid {} {name_of:?}: must be a label of RFC 1123", at("name")));
        }
        if name_of.bytes().all(|b| b.is_ascii_digit()) {
            return Err(format!("invalid {} {name_of:?}: digits only are the name of an agent", at("name")));
        }
        if seen.contains(&name_of) {
            return Err(format!("invalid {} {name_of:?}: must be unique", at("name")));
        }
        seen.push(name_of);
        if toolbox.mode == Mode::Static {
            if toolbox.static_ip.is_empty() || toolbox.static_vm_id.is_empty() {
                return Err(format!("invalid {} \"static\": needs staticIP and staticVMID", at("mode")));
            }
            if toolbox.static_ip.parse::<std::net::IpAddr>().is_err() {
                return Err(format!(
                    "invalid {} {:?}: must be an IP address",
                    at("staticIP"),
                    toolbox.static_ip
                ));
            }
            continue;
        }
        image(&at("image"), &toolbox.image, toolbox.mode)?;
        let backend = toolbox.backend.unwrap_or(spec.agent.backend);
        if backend != spec.agent.backend {
            return Err(format!(
                "invalid {} {backend:?}: must equal spec.agent.backend {}",
                at("backend"),
                spec.agent.backend,
                backend = backend.as_str()
            ));
        }
        if let Some(why) = unsupported_reason(toolbox.os, backend, toolbox.mode, &toolbox.image) {
            return Err(format!("invalid spec.toolboxes[{index}]: {why}"));
        }
        vm_name(&at("name"), &toolbox_vm_name(&namespace, &toolbox_pod_name(&name, name_of)))?;
    }
    Ok(())
}

fn agent(spec: &CocoonSetSpec) -> Result<(), String> {
    let agent = &spec.agent;
    if agent.replicas < 0 {
        return Err(format!("invalid spec.agent.replicas \"{}\": must not be negative", agent.replicas));
    }
    if agent.mode == Mode::Static {
        return Err("invalid spec.agent.mode \"static\": must be clone or run".into());
    }
    image("spec.agent.image", &agent.image, agent.mode)?;
    match unsupported_reason(agent.os, agent.backend, agent.mode, &agent.image) {
        Some(why) => Err(format!("invalid spec.agent: {why}")),
        None => Ok(()),
    }
}

/// Checks the image of a clone, which is `repository[:tag]` of the snapshot registry: the first colon begins the tag.
fn image(field: &str, image: &str, mode: Mode) -> Result<(), String> {
    if image.is_empty() {
        return Err(format!("invalid {field} \"\": must not be empty"));
    }
    let is_plain = !image.contains('@') && image.matches(':').count() <= 1 && {
        let (_, tag) = image.split_once(':').unwrap_or((image, "latest"));
        !tag.is_empty() && !tag.contains('/')
    };
    if mode == Mode::Clone && !is_plain {
        return Err(format!(
            "invalid {field} {image:?}: mode clone takes repository[:tag], without port and digest"
        ));
    }
    Ok(())
}

fn vm_name(field: &str, vm: &str) -> Result<(), String> {
    match is_valid_vm_name(vm) {
        true => Ok(()),
        false => Err(format!("invalid {field}: the VM name {vm:?} has more than 63 characters")),
    }
}

fn is_label(name: &str) -> bool {
    let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !name.is_empty()
        && name.len() <= 63
        && name.bytes().all(is_inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Refuses a hibernation whose name is not that of its pod, so that a pod has at most one hibernation.
///
/// # Errors
/// A sentence for the user.
pub(super) fn hibernation(name: &str, spec: &CocoonHibernationSpec) -> Result<(), String> {
    match name == spec.pod_ref.name {
        true => Ok(()),
        false => Err(format!(
            "invalid metadata.name {name:?}: must equal spec.podRef.name {:?}",
            spec.pod_ref.name
        )),
    }
}

/// True when the pods of a Deployment or StatefulSet are VMs: they have the toleration, and an annotation of a VM unless
/// `every_pod` is set.
pub(super) fn runs_vms(workload: &Value, every_pod: bool) -> bool {
    let template = &workload["spec"]["template"];
    let tolerations = template["spec"]["tolerations"].as_array();
    let tolerates = tolerations.into_iter().flatten().any(|toleration| toleration["key"] == keys::TAINT_KEY);
    let annotations = template["metadata"]["annotations"].as_object();
    tolerates && (every_pod || annotations.into_iter().flatten().any(|(key, _)| is_of_vm(key)))
}

/// Refuses a reduction of replicas: Kubernetes chooses the pods to delete, and with them the VMs, without regard to their
/// workload.
///
/// # Errors
/// A sentence for the user.
pub(super) fn scale(old: &Value, new: &Value) -> Result<(), String> {
    // The API server writes 1 when the field is absent; in a Scale an absent number is 0.
    let replicas = |object: &Value| object["spec"]["replicas"].as_i64();
    match (replicas(old), replicas(new)) {
        (Some(before), after) if after.unwrap_or(0) < before => Err(format!(
            "cannot scale down from {before} to {} replicas: the pods run as VMs; suspend them, or use a CocoonSet",
            after.unwrap_or(0)
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::set::testing::set_with;

    fn error(spec: Value) -> String {
        set(&set_with(spec), None).err().unwrap_or_default()
    }

    #[test]
    fn set_table() {
        let with_tool = |tool: Value| json!({"agent": {"image": "u"}, "toolboxes": [tool]});
        for (why, spec, part) in [
            ("plain", json!({"agent": {"image": "ubuntu:24.04"}}), ""),
            ("nested repository", json!({"agent": {"image": "team/ubuntu:24.04"}}), ""),
            ("run takes any reference", json!({"agent": {"image": "h:5000/u@sha256:0", "mode": "run"}}), ""),
            ("no image", json!({"agent": {"image": ""}}), "spec.agent.image"),
            ("negative", json!({"agent": {"image": "u", "replicas": -1}}), "replicas"),
            ("static agent", json!({"agent": {"image": "u", "mode": "static"}}), "spec.agent.mode"),
            ("clone with a port", json!({"agent": {"image": "h:5000/u:1"}}), "without port"),
            ("clone with a digest", json!({"agent": {"image": "u@sha256:0"}}), "without port and digest"),
            (
                "windows on firecracker",
                json!({"agent": {"image": "u", "mode": "run", "backend": "firecracker", "os": "windows"}}),
                "cannot run os windows",
            ),
            (
                "URL on firecracker",
                json!({"agent": {"image": "https://x/d", "mode": "run", "backend": "firecracker"}}),
                "from a URL",
            ),
            (
                "clone on firecracker",
                json!({"agent": {"image": "u", "backend": "firecracker"}}),
                "mode clone",
            ),
            ("name", with_tool(json!({"name": "A", "image": "t"})), "RFC 1123"),
            ("digits", with_tool(json!({"name": "7", "image": "t"})), "digits only"),
            ("no image", with_tool(json!({"name": "a"})), "toolboxes[0].image"),
            (
                "static",
                with_tool(json!({"name": "a", "mode": "static", "staticIP": "10.0.0.1"})),
                "staticVMID",
            ),
            (
                "address",
                with_tool(json!({"name": "a", "mode": "static", "staticIP": "x", "staticVMID": "v"})),
                "IP address",
            ),
            (
                "backend",
                with_tool(json!({"name": "a", "image": "t", "backend": "firecracker"})),
                "must equal",
            ),
            ("long", with_tool(json!({"name": "a".repeat(60), "image": "t"})), "more than 63"),
            (
                "twice",
                json!({"agent": {"image": "u"}, "toolboxes": [{"name": "a", "image": "t"}, {"name": "a", "image": "t"}]}),
                "unique",
            ),
        ] {
            let got = error(spec);
            assert!(got.contains(part) && got.is_empty() == part.is_empty(), "{why}: {got}");
        }
    }

    #[test]
    fn unchanged_spec_passes() {
        let bad = set_with(json!({"agent": {"image": ""}}));
        assert_eq!(set(&bad, Some(&bad)), Ok(()));
    }

    #[test]
    fn scale_table() {
        let of = |replicas: Value| json!({"spec": {"replicas": replicas}});
        for (old, new, allowed) in
            [(3, json!(3), true), (3, json!(4), true), (3, json!(2), false), (1, json!(null), false)]
        {
            assert_eq!(scale(&of(json!(old)), &of(new.clone())).is_ok(), allowed, "{old} {new}");
        }
        let template = |key: &str, annotation: &str| {
            json!({"spec": {"template": {"metadata": {"annotations": {annotation: "x"}},
                "spec": {"tolerations": [{"key": key}]}}}})
        };
        for (key, annotation, every_pod, want) in [
            (keys::TAINT_KEY, keys::IMAGE, false, true),
            (keys::TAINT_KEY, keys::POOL_LABEL, false, false),
            (keys::TAINT_KEY, "other", true, true),
            ("other", keys::IMAGE, true, false),
        ] {
            let got = runs_vms(&template(key, annotation), every_pod);
            assert_eq!(got, want, "{key} {annotation} {every_pod}");
        }
    }

    #[test]
    fn hibernation_has_the_name_of_its_pod() {
        let spec: CocoonHibernationSpec =
            serde_json::from_value(json!({"podRef": {"name": "demo-0"}, "desire": "Wake"})).unwrap();
        assert_eq!(hibernation("demo-0", &spec), Ok(()));
        assert!(hibernation("other", &spec).is_err());
    }
}
