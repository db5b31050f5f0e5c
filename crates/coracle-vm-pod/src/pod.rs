//! Converts a pod's object into the input of plans. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use coracle_api::Amount;
use coracle_api::cocoon::{
    Backend, Mode, VmRuntimeAnnotations, VmSpecAnnotations, bare_pod_vm_name, invalid_annotations, keys,
    slot_of_pod,
};
use coracle_types::{MemoryMib, Vcpus, VmName};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::facts::{Noted, PodFacts, Restart, Source, Wanted};
use crate::plan::ADOPTED;

/// Annotations that only pods of this kind have. One of them is sufficient.
const MARKS: [&str; 5] = [keys::VM_NAME, keys::MODE, keys::IMAGE, keys::FORK_FROM, keys::MANAGED];

/// Returns whether the container of the pod is a VM; otherwise its containers run inside a VM.
#[must_use]
pub fn is_vm_pod(pod: &Pod) -> bool {
    pod.metadata.annotations.iter().flatten().any(|(key, _)| MARKS.contains(&key.as_str()))
}

/// Returns the annotations that make a pod with a disk image a VM pod. `None`: the pod has more than one container, which is
/// not possible for a VM pod.
#[must_use]
pub fn annotations_of_disk(pod: &Pod) -> Option<Vec<(&'static str, String)>> {
    let spec = pod.spec.as_ref()?;
    let [only] = &spec.containers[..] else { return None };
    let is_alone = spec.init_containers.iter().all(Vec::is_empty);
    let image = only.image.clone().filter(|_| is_alone)?;
    let (namespace, name) = (pod.metadata.namespace.as_deref()?, pod.metadata.name.as_deref()?);
    Some(vec![
        (keys::VM_NAME, bare_pod_vm_name(namespace, name)),
        (keys::MODE, Mode::Run.as_str().to_owned()),
        (keys::IMAGE, image),
    ])
}

/// Returns whether two versions of an object request the same. Annotations that this node writes do not count.
#[must_use]
pub fn asks_the_same(one: &Pod, other: &Pod) -> bool {
    let own = VmRuntimeAnnotations::default().patch();
    let annotations = |pod: &Pod| -> BTreeMap<String, String> {
        let all = pod.metadata.annotations.clone().unwrap_or_default();
        all.into_iter().filter(|(key, _)| !own.contains_key(key)).collect()
    };
    one.spec == other.spec
        && one.metadata.labels == other.metadata.labels
        && annotations(one) == annotations(other)
}

/// Reads the object. `forced`: the object is gone.
#[must_use]
pub fn read(pod: &Pod, forced: bool) -> PodFacts {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    PodFacts {
        wanted: wanted(pod),
        ending: forced || pod.metadata.deletion_timestamp.is_some(),
        ended,
        begun: status.is_some_and(|status| status.start_time.is_some()),
        noted: read_noted(pod),
        restart: match pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()) {
            Some("Never") => Restart::Never,
            Some("OnFailure") => Restart::OnFailure,
            _ => Restart::Always,
        },
        refused: None,
    }
}

fn read_noted(pod: &Pod) -> Noted {
    let noted = VmRuntimeAnnotations::from_pod(pod);
    let text = |text: String| Some(text).filter(|text| !text.is_empty());
    Noted {
        id: text(noted.id),
        ip: text(noted.ip),
        state: noted.lifecycle_state,
        generation: noted.lifecycle_observed_generation,
        message: text(noted.lifecycle_state_message),
    }
}

fn wanted(pod: &Pod) -> Result<Wanted, String> {
    let spec = VmSpecAnnotations::from_pod(pod);
    let none = BTreeMap::new();
    let all = pod.metadata.annotations.as_ref().unwrap_or(&none);
    if spec.vm_name.is_empty() {
        return Err(format!("annotation {} is missing: it names the VM", keys::VM_NAME));
    }
    if let Some(invalid) = invalid_annotations(all).into_iter().next() {
        return Err(invalid.to_string());
    }
    let vm: VmName = spec.vm_name.parse().map_err(|error| format!("invalid VM name: {error}"))?;
    let noted = read_noted(pod);
    // An existing VM that the pod names is adopted and left unchanged, unless the pod asks to manage its lifecycle.
    let brings_one = noted.id.is_some() && noted.ip.is_some();
    let is_adopted = brings_one && (noted.state.is_none() || noted.message.as_deref() == Some(ADOPTED));
    Ok(Wanted {
        source: source(pod, &spec, &noted)?,
        is_managed: spec.managed || !is_adopted,
        saves_on_delete: spec.snapshot_policy.saves(slot_of_pod(pod)),
        keeps_local_copy: spec.keep_snapshot_on_delete,
        hibernate: spec.hibernate,
        restore: spec.restore_from_hibernate,
        probe_port: spec.probe_port,
        generation: spec.generation,
        vm,
    })
}

fn source(pod: &Pod, spec: &VmSpecAnnotations, noted: &Noted) -> Result<Source, String> {
    if spec.mode == Mode::Static {
        let (Some(id), Some(ip)) = (&noted.id, &noted.ip) else {
            return Err(format!("mode static needs {} and {}", keys::VM_ID, keys::VM_IP));
        };
        let ip: IpAddr = ip.parse().map_err(|_| format!("invalid {} {ip:?}: not an address", keys::VM_IP))?;
        return Ok(Source::Static { id: id.clone(), ip });
    }
    if !spec.fork_from.is_empty() {
        let from = spec.fork_from.parse().map_err(|error| format!("invalid {}: {error}", keys::FORK_FROM))?;
        return Ok(Source::Fork { from });
    }
    if !spec.clone_from_dir.is_empty() && spec.mode == Mode::Clone {
        return Ok(Source::Exported { dir: PathBuf::from(&spec.clone_from_dir) });
    }
    let of_container = || container(pod).and_then(|container| container.image.clone());
    let image = Some(spec.image.clone()).filter(|image| !image.is_empty()).or_else(of_container);
    let image = image.filter(|image| !image.is_empty() && image != keys::CONTAINER_IMAGE);
    let image =
        image.ok_or_else(|| format!("annotation {} is missing: the VM is made from it", keys::IMAGE))?;
    Ok(match spec.mode {
        Mode::Run => Source::Run { image },
        Mode::Clone | Mode::Static => Source::Clone { snapshot: image },
    })
}

/// Returns the container that represents the VM.
#[must_use]
pub fn container(pod: &Pod) -> Option<&Container> {
    pod.spec.as_ref().and_then(|spec| spec.containers.first())
}

/// Requested resources of a new VM.
#[derive(Clone, Debug, PartialEq)]
pub struct VmRequest {
    /// Number of CPUs, rounded up.
    pub vcpus: Vcpus,
    /// Memory size; `None`: the node's default.
    pub memory: Option<MemoryMib>,
    /// Disk size; `None`: the node's default.
    pub disk_mib: Option<u64>,
    /// Requested hypervisor, if any.
    pub backend: Option<Backend>,
    /// Name of the CNI network; `None`: the node's first one.
    pub network: Option<String>,
    /// Whether the registry is asked for the image even if the image is on the node.
    pub pulls_always: bool,
}

/// Returns the resources that a pod requests: the requests of its first container, else its limits.
///
/// # Errors
/// When a quantity is invalid, or more than a VM can have.
pub fn vm_request(pod: &Pod) -> Result<VmRequest, String> {
    let spec = VmSpecAnnotations::from_pod(pod);
    let resources = container(pod).and_then(|container| container.resources.clone()).unwrap_or_default();
    let asked = |name: &str| -> Option<Quantity> {
        let of = |map: &Option<BTreeMap<String, Quantity>>| map.as_ref()?.get(name).cloned();
        of(&resources.requests).or_else(|| of(&resources.limits))
    };
    let vcpus = match asked("cpu") {
        Some(cpus) => {
            let whole = u32::try_from(Amount::of(&cpus).units().max(1)).unwrap_or(u32::MAX);
            Vcpus::try_from(whole).map_err(|_| format!("invalid cpu {:?}: a VM has at most 255", cpus.0))?
        }
        None => Vcpus::MIN,
    };
    let mib = |quantity: &Quantity| Amount::of(quantity).units().div_ceil(1 << 20);
    let memory = match asked("memory") {
        Some(memory) => Some(
            MemoryMib::try_from(mib(&memory))
                .map_err(|error| format!("invalid memory {:?}: {error}", memory.0))?,
        ),
        None => None,
    };
    let disk_mib = match spec.storage.as_str() {
        "" => None,
        text => {
            let amount =
                Amount::parse(text).map_err(|error| format!("invalid {}: {error}", keys::STORAGE))?;
            Some(amount.units().div_ceil(1 << 20))
        }
    };
    let names_backend = pod.metadata.annotations.iter().flatten().any(|(key, _)| key == keys::BACKEND);
    Ok(VmRequest {
        vcpus,
        memory,
        disk_mib,
        backend: names_backend.then_some(spec.backend),
        network: Some(spec.network).filter(|name| !name.is_empty()),
        pulls_always: spec.force_pull,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(annotations: Value, rest: Value) -> Pod {
        let mut pod = json!({
            "metadata": {"name": "demo-0", "namespace": "prod", "uid": "u1", "annotations": annotations},
            "spec": {"containers": [{"name": "agent", "image": "registry.example/vm:1"}]},
        });
        pod.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn pod_of_a_disk_has_one_container() {
        let of = |rest: Value| annotations_of_disk(&pod(json!({}), rest));
        let all = BTreeMap::from_iter(of(json!({})).unwrap());
        assert_eq!(all[keys::VM_NAME], "vk-prod-demo-0");
        assert_eq!((all[keys::MODE].as_str(), all[keys::IMAGE].as_str()), ("run", "registry.example/vm:1"));
        let named = pod(serde_json::to_value(&all).unwrap(), json!({}));
        assert!(is_vm_pod(&named) && read(&named, false).wanted.is_ok());
        let one = || json!({"name": "c", "image": "i"});
        assert_eq!(of(json!({"spec": {"containers": [one(), one()]}})), None);
        assert_eq!(of(json!({"spec": {"containers": [one()], "initContainers": [one()]}})), None);
    }

    #[test]
    fn source_table() {
        let vm = (keys::VM_NAME, "vk-prod-demo-0");
        let id = (keys::VM_ID, "v1");
        let ip = (keys::VM_IP, "10.0.0.5");
        let image = (keys::IMAGE, "base:v2");
        let dir = (keys::CLONE_FROM_DIR, "/srv/exported/base");
        let clone = |snapshot: &str| Ok(Source::Clone { snapshot: snapshot.into() });
        for (why, annotations, want) in [
            ("clone is the default", vec![vm, image], clone("base:v2")),
            ("image of the container", vec![vm], clone("registry.example/vm:1")),
            (
                "a directory wins over a snapshot",
                vec![vm, image, dir],
                Ok(Source::Exported { dir: "/srv/exported/base".into() }),
            ),
            (
                "a directory is for clones",
                vec![vm, image, dir, (keys::MODE, "run")],
                Ok(Source::Run { image: "base:v2".into() }),
            ),
            (
                "fork wins over a directory",
                vec![vm, dir, (keys::FORK_FROM, "vk-prod-demo-9")],
                Ok(Source::Fork { from: "vk-prod-demo-9".parse().unwrap() }),
            ),
            ("run", vec![vm, image, (keys::MODE, "RUN")], Ok(Source::Run { image: "base:v2".into() })),
            (
                "fork wins over clone and run",
                vec![vm, image, (keys::FORK_FROM, "vk-prod-demo-9"), (keys::MODE, "run")],
                Ok(Source::Fork { from: "vk-prod-demo-9".parse().unwrap() }),
            ),
            (
                "static",
                vec![vm, (keys::MODE, "static"), id, ip],
                Ok(Source::Static { id: "v1".into(), ip: "10.0.0.5".parse().unwrap() }),
            ),
            ("static without an address", vec![vm, (keys::MODE, "static"), id], Err("mode static needs")),
            ("no name", vec![image], Err("is missing: it names the VM")),
            (
                "a name that is none",
                vec![(keys::VM_NAME, "a b"), image],
                Err("invalid vm.cocoonstack.io/name"),
            ),
            ("a mode that is none", vec![vm, (keys::MODE, "cloen")], Err("must be clone, run or static")),
        ] {
            let annotations: BTreeMap<_, _> = annotations.into_iter().collect();
            match (read(&pod(json!(annotations), json!({})), false).wanted, want) {
                (Ok(wanted), Ok(source)) => assert_eq!(wanted.source, source, "{why}"),
                (Err(message), Err(want)) => assert!(message.contains(want), "{why}: {message}"),
                (got, want) => panic!("{why}: {got:?}, not {want:?}"),
            }
        }
    }

    #[test]
    fn vm_that_a_pod_brings_along_is_not_managed() {
        let of = |more: Value| {
            let mut all = json!({keys::VM_NAME: "a", keys::IMAGE: "b"});
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read(&pod(all, json!({})), false).wanted.unwrap().is_managed
        };
        let brought = json!({keys::VM_ID: "v", keys::VM_IP: "10.0.0.1"});
        let with = |key: &str, value: &str| {
            let mut all = brought.clone();
            all[key] = json!(value);
            all
        };
        for (why, annotations, want) in [
            ("it has none", json!({}), true),
            ("it brings one", brought.clone(), false),
            ("it brings one, to be managed", with(keys::MANAGED, "true"), true),
            ("the one that this node made", with(keys::LIFECYCLE_STATE, "ready"), true),
        ] {
            assert_eq!(of(annotations), want, "{why}");
        }
        let mut adopted = with(keys::LIFECYCLE_STATE, "ready");
        adopted[keys::LIFECYCLE_STATE_MESSAGE] = json!(ADOPTED);
        assert!(!of(adopted), "the one that was adopted before");
    }

    #[test]
    fn vm_request_table() {
        let of = |resources: Value, annotations: Value| {
            let container = json!({"name": "agent", "resources": resources});
            vm_request(&pod(annotations, json!({"spec": {"containers": [container]}})))
        };
        let small = of(json!({}), json!({})).unwrap();
        assert_eq!((small.vcpus.get(), small.memory, small.disk_mib), (1, None, None));
        assert_eq!(small.network, None);
        assert_eq!(of(json!({}), json!({keys::NETWORK: "lan"})).unwrap().network.unwrap(), "lan");
        let both =
            json!({"requests": {"cpu": "1500m", "memory": "600Mi"}, "limits": {"cpu": "4", "memory": "2Gi"}});
        let both = of(both, json!({keys::STORAGE: "20Gi", keys::BACKEND: "firecracker"})).unwrap();
        assert_eq!((both.vcpus.get(), both.memory.unwrap().get(), both.disk_mib), (2, 600, Some(20480)));
        assert_eq!(both.backend, Some(Backend::Firecracker));
        let limits = of(json!({"limits": {"cpu": "4", "memory": "2Gi"}}), json!({})).unwrap();
        assert_eq!((limits.vcpus.get(), limits.memory.unwrap().get()), (4, 2048));
        assert!(of(json!({"limits": {"cpu": "4000"}}), json!({})).is_err());
        assert!(of(json!({}), json!({keys::STORAGE: "much"})).is_err());
    }

    #[test]
    fn own_annotations_do_not_change_the_desired_state() {
        let named = json!({keys::VM_NAME: "a"});
        let noted = json!({keys::VM_NAME: "a", keys::VM_ID: "v", keys::LIFECYCLE_STATE: "ready"});
        let asleep = json!({keys::VM_NAME: "a", keys::HIBERNATE: "true"});
        let of = |annotations: &Value| pod(annotations.clone(), json!({}));
        assert!(asks_the_same(&of(&named), &of(&noted)));
        assert!(!asks_the_same(&of(&named), &of(&asleep)));
    }

    #[test]
    fn vm_pods_are_known_by_one_annotation() {
        assert!(!is_vm_pod(&pod(json!({"team": "ml"}), json!({}))));
        assert!(is_vm_pod(&pod(json!({keys::IMAGE: "base"}), json!({}))));
    }
}
