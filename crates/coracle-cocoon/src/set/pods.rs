//! Pods that a set wants.

use std::collections::BTreeMap;

use coracle_api::CocoonSet;
use coracle_api::cocoon::{
    Backend, Mode, Os, QuantityText, Role, SnapshotPolicy, ToolboxSpec, VmResources, VmRuntimeAnnotations,
    VmSpecAnnotations, agent_pod_name, agent_vm_name, is_valid_vm_name, keys, toolbox_pod_name,
    toolbox_vm_name,
};
use k8s_openapi::api::core::v1::{
    Affinity, Container, EnvFromSource, NodeAffinity, NodeSelector, NodeSelectorRequirement,
    NodeSelectorTerm, Pod, PodSpec, PreferredSchedulingTerm, ResourceRequirements, Toleration,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource as _, ResourceExt as _};

/// Label of nodes with their host name.
const HOSTNAME: &str = "kubernetes.io/hostname";
/// Weight of the preference for the node on which a VM was hibernated.
const HINT_WEIGHT: i32 = 100;

/// Main agent that sub-agents are forked from, and its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForkSource {
    pub(crate) vm: String,
    pub(crate) node: Option<String>,
}

/// Restore of the main agent from its saved state, with the node that has a copy of it, if that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Restore {
    pub(crate) node: Option<String>,
}

/// Returns the pod of slot 0.
pub(crate) fn main_pod(set: &CocoonSet, restore: Option<&Restore>) -> Result<Pod, String> {
    let mut pod = agent_pod(set, 0, None)?;
    if restore.is_some() {
        pod.annotations_mut().insert(keys::RESTORE_FROM_HIBERNATE.into(), "true".into());
    }
    let pinned = Some(set.spec.node_name.clone()).filter(|name| !name.is_empty());
    let affinity = match (pinned, restore.and_then(|restore| restore.node.clone())) {
        (Some(node), _) => Some(required_affinity(node)),
        (None, Some(node)) => Some(preferred_affinity(node)),
        (None, None) => None,
    };
    if let Some(spec) = &mut pod.spec {
        spec.affinity = affinity.map(|node| Affinity { node_affinity: Some(node), ..Affinity::default() });
    }
    Ok(pod)
}

/// Returns the pod of a slot above 0, on the node of the main agent.
pub(crate) fn sub_agent_pod(set: &CocoonSet, slot: u32, source: &ForkSource) -> Result<Pod, String> {
    let mut pod = agent_pod(set, slot, Some(source))?;
    if let Some(spec) = &mut pod.spec {
        spec.node_name.clone_from(&source.node);
    }
    Ok(pod)
}

fn agent_pod(set: &CocoonSet, slot: u32, source: Option<&ForkSource>) -> Result<Pod, String> {
    let (namespace, name) = (set.namespace().unwrap_or_default(), set.name_any());
    let agent = &set.spec.agent;
    let vm = VmSpecAnnotations {
        vm_name: agent_vm_name(&namespace, &name, slot),
        // A fork is a clone of the main VM, even when that VM was created from an image.
        mode: if source.is_some() { Mode::Clone } else { agent.mode },
        image: agent.image.clone(),
        storage: agent.storage.clone().unwrap_or_default().0,
        managed: true,
        os: agent.os,
        snapshot_policy: set.spec.snapshot_policy,
        network: agent.network.clone(),
        fork_from: source.map(|source| source.vm.clone()).unwrap_or_default(),
        force_pull: agent.force_pull,
        conn_type: agent.conn_type,
        backend: agent.backend,
        no_direct_io: agent.no_direct_io,
        probe_port: port(agent.probe_port),
        generation: set.metadata.generation,
        ..VmSpecAnnotations::default()
    };
    let role = if slot == 0 { Role::Main } else { Role::SubAgent };
    let shape = Shape {
        resources: agent.resources.as_ref(),
        storage: agent.storage.as_ref(),
        env_from: &agent.env_from,
        service_account: &agent.service_account_name,
    };
    pod(set, &agent_pod_name(&name, slot), role, &slot.to_string(), &vm, None, &shape)
}

/// Returns the pod of a toolbox.
pub(crate) fn toolbox_pod(set: &CocoonSet, toolbox: &ToolboxSpec) -> Result<Pod, String> {
    let (namespace, name) = (set.namespace().unwrap_or_default(), set.name_any());
    let pod_name = toolbox_pod_name(&name, &toolbox.name);
    let is_static = toolbox.mode == Mode::Static;
    let vm = VmSpecAnnotations {
        vm_name: toolbox_vm_name(&namespace, &pod_name),
        mode: toolbox.mode,
        image: toolbox.image.clone(),
        storage: toolbox.storage.clone().unwrap_or_default().0,
        managed: !is_static,
        os: toolbox.os,
        snapshot_policy: set.spec.snapshot_policy,
        network: toolbox.network.clone(),
        force_pull: toolbox.force_pull,
        conn_type: toolbox.conn_type,
        backend: toolbox.backend.unwrap_or(set.spec.agent.backend),
        no_direct_io: toolbox.no_direct_io,
        probe_port: port(toolbox.probe_port),
        generation: set.metadata.generation,
        ..VmSpecAnnotations::default()
    };
    let runtime = is_static.then(|| VmRuntimeAnnotations {
        id: toolbox.static_vm_id.clone(),
        ip: toolbox.static_ip.clone(),
        vnc_port: port(toolbox.vnc_port),
        ..VmRuntimeAnnotations::default()
    });
    let shape = Shape {
        resources: toolbox.resources.as_ref(),
        storage: toolbox.storage.as_ref(),
        env_from: &[],
        service_account: "",
    };
    pod(set, &pod_name, Role::Toolbox, &toolbox.name, &vm, runtime.as_ref(), &shape)
}

/// Properties of a VM's pod besides annotations.
struct Shape<'a> {
    resources: Option<&'a VmResources>,
    storage: Option<&'a QuantityText>,
    env_from: &'a [EnvFromSource],
    service_account: &'a str,
}

fn pod(
    set: &CocoonSet,
    name: &str,
    role: Role,
    slot: &str,
    vm: &VmSpecAnnotations,
    runtime: Option<&VmRuntimeAnnotations>,
    shape: &Shape<'_>,
) -> Result<Pod, String> {
    if !is_valid_vm_name(&vm.vm_name) {
        return Err(format!(
            "invalid VM name {:?}: must have at most {} characters; use a shorter name",
            vm.vm_name,
            coracle_api::cocoon::VM_NAME_MAX
        ));
    }
    let set_name = set.name_any();
    let labels = [
        (keys::SET_NAME_LABEL, set_name.as_str()),
        (keys::SET_ROLE_LABEL, role.as_str()),
        (keys::SET_SLOT_LABEL, slot),
        (keys::APP_NAME_LABEL, set_name.as_str()),
        (keys::POOL_LABEL, set.spec.node_pool.as_str()),
    ];
    let mut annotations = vm.annotations();
    annotations.extend(runtime.map(VmRuntimeAnnotations::annotations).unwrap_or_default());
    let container = Container {
        name: keys::CONTAINER_NAME.into(),
        image: Some(keys::CONTAINER_IMAGE.into()),
        env_from: (!shape.env_from.is_empty()).then(|| shape.env_from.to_vec()),
        resources: resources(shape),
        ..Container::default()
    };
    Ok(Pod {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: set.namespace(),
            labels: Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
            annotations: Some(annotations),
            owner_references: set.controller_owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            containers: vec![container],
            node_selector: Some(node_selector(set)),
            service_account_name: Some(shape.service_account.to_owned()).filter(|name| !name.is_empty()),
            termination_grace_period_seconds: Some(1),
            tolerations: Some(tolerations()),
            ..PodSpec::default()
        }),
        status: None,
    })
}

fn node_selector(set: &CocoonSet) -> BTreeMap<String, String> {
    let mut selector = BTreeMap::from([(keys::POOL_LABEL.to_owned(), set.spec.node_pool.clone())]);
    let class = &set.spec.snapshot_compatibility_class;
    if !class.is_empty() {
        selector.insert(keys::CPU_CLASS_LABEL.to_owned(), class.clone());
    }
    selector
}

/// Returns tolerations of the node's taint, and of the taints by which Kubernetes would evict a VM from an unreachable node.
fn tolerations() -> Vec<Toleration> {
    let exists = |key: &str, effect: Option<&str>| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: effect.map(str::to_owned),
        ..Toleration::default()
    };
    vec![
        exists(keys::TAINT_KEY, None),
        exists("node.kubernetes.io/not-ready", Some("NoExecute")),
        exists("node.kubernetes.io/unreachable", Some("NoExecute")),
    ]
}

/// Returns the requested resources, and the size of the disk as ephemeral storage.
fn resources(shape: &Shape<'_>) -> Option<ResourceRequirements> {
    let mut all = shape.resources.map(ResourceRequirements::from);
    if let Some(storage) = shape.storage.filter(|storage| !storage.0.is_empty()) {
        let all = all.get_or_insert_default();
        for list in [&mut all.requests, &mut all.limits] {
            let list = list.get_or_insert_default();
            list.entry("ephemeral-storage".to_owned()).or_insert_with(|| storage.into());
        }
    }
    all
}

fn hostname_term(node: String) -> NodeSelectorTerm {
    let term = NodeSelectorRequirement {
        key: HOSTNAME.to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node]),
    };
    NodeSelectorTerm { match_expressions: Some(vec![term]), match_fields: None }
}

fn required_affinity(node: String) -> NodeAffinity {
    let terms = NodeSelector { node_selector_terms: vec![hostname_term(node)] };
    NodeAffinity {
        required_during_scheduling_ignored_during_execution: Some(terms),
        ..NodeAffinity::default()
    }
}

fn preferred_affinity(node: String) -> NodeAffinity {
    let term = PreferredSchedulingTerm { preference: hostname_term(node), weight: HINT_WEIGHT };
    NodeAffinity {
        preferred_during_scheduling_ignored_during_execution: Some(vec![term]),
        ..NodeAffinity::default()
    }
}

fn port(port: i32) -> Option<u16> {
    u16::try_from(port).ok().filter(|port| *port > 0)
}

/// Returns why no node can run a combination, with the field that causes it. `None`: nodes can run it.
pub(crate) fn unsupported_reason(os: Os, backend: Backend, mode: Mode, image: &str) -> Option<&'static str> {
    let is_url = image.starts_with("http://") || image.starts_with("https://");
    match backend {
        Backend::CloudHypervisor => None,
        Backend::Firecracker if os == Os::Windows => Some("backend firecracker cannot run os windows"),
        Backend::Firecracker if is_url => Some("backend firecracker cannot boot a disk image from a URL"),
        Backend::Firecracker if mode == Mode::Clone => {
            Some("backend firecracker cannot run mode clone: use mode run")
        }
        Backend::Firecracker => None,
    }
}

/// True when a node saves the VM of a set when its pod is deleted.
pub(crate) fn is_saved(policy: SnapshotPolicy, namespace: &str, set: &str, vm: &str) -> bool {
    let is_main = vm == agent_vm_name(namespace, set, 0);
    policy.saves(if is_main { Some(0) } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::set::testing::{set, set_with};

    fn json(pod: &Pod) -> serde_json::Value {
        serde_json::to_value(pod).unwrap()
    }

    #[test]
    fn main_pod_has_the_shape_of_the_contract() {
        let set = set_with(serde_json::json!({
            "agent": {"image": "ubuntu:24.04", "storage": "20Gi", "serviceAccountName": "sa", "connType": "vnc",
                "resources": {"requests": {"cpu": 2}}, "envFrom": [{"secretRef": {"name": "s"}}], "probePort": 22},
            "nodeName": "n1", "snapshotCompatibilityClass": "icelake", "snapshotPolicy": "main-only",
        }));
        let pod = json(&main_pod(&set, None).unwrap());
        let container = &pod["spec"]["containers"][0];
        assert_eq!(
            (&container["name"], &container["envFrom"][0]["secretRef"]["name"]),
            (&"agent".into(), &"s".into())
        );
        assert_eq!(container["resources"]["requests"]["cpu"], "2");
        assert_eq!(container["resources"]["limits"]["ephemeral-storage"], "20Gi");
        assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 1);
        assert_eq!(pod["spec"]["serviceAccountName"], "sa");
        assert_eq!(
            pod["spec"]["nodeSelector"],
            serde_json::json!({keys::POOL_LABEL: "default", keys::CPU_CLASS_LABEL: "icelake"})
        );
        let term =
            "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0";
        assert_eq!(pod.pointer(term).unwrap()["matchExpressions"][0]["values"][0], "n1");
        assert_eq!(pod["metadata"]["ownerReferences"][0]["controller"], true);
        assert_eq!(pod["metadata"]["labels"][keys::SET_ROLE_LABEL], "main");
        assert_eq!(pod["metadata"]["labels"][keys::SET_SLOT_LABEL], "0");
        let annotations = &pod["metadata"]["annotations"];
        for (key, want) in [
            (keys::VM_NAME, "vk-prod-demo-0"),
            (keys::MODE, "clone"),
            (keys::IMAGE, "ubuntu:24.04"),
            (keys::MANAGED, "true"),
            (keys::SNAPSHOT_POLICY, "main-only"),
            (keys::CONN_TYPE, "vnc"),
            (keys::PROBE_PORT, "22"),
            (keys::GENERATION, "1"),
        ] {
            assert_eq!(annotations[key], want, "{key}");
        }
        assert!(annotations.get(keys::HIBERNATE).is_none() && annotations.get(keys::FORK_FROM).is_none());
    }

    #[test]
    fn sub_agent_is_a_fork_on_the_node_of_the_main_agent() {
        let set = set_with(serde_json::json!({"agent": {"image": "ubuntu", "mode": "run", "replicas": 2}}));
        let source = ForkSource { vm: "vk-prod-demo-0".into(), node: Some("n1".into()) };
        let pod = sub_agent_pod(&set, 2, &source).unwrap();
        let vm = VmSpecAnnotations::from_pod(&pod);
        assert_eq!((vm.mode, vm.fork_from.as_str()), (Mode::Clone, "vk-prod-demo-0"));
        assert_eq!(pod.spec.unwrap().node_name.as_deref(), Some("n1"));
    }

    #[test]
    fn static_toolbox_is_not_managed_and_carries_its_id() {
        let toolbox = serde_json::json!({"name": "win", "mode": "static", "staticIP": "10.0.0.9", "staticVMID": "vm-9",
            "vncPort": 5900});
        let set = set_with(serde_json::json!({"agent": {"image": "u"}, "toolboxes": [toolbox]}));
        let pod = toolbox_pod(&set, &set.spec.toolboxes[0]).unwrap();
        let (vm, runtime) = (VmSpecAnnotations::from_pod(&pod), VmRuntimeAnnotations::from_pod(&pod));
        assert_eq!((vm.managed, vm.vm_name.as_str()), (false, "vk-prod-demo-win"));
        assert_eq!(
            (runtime.id.as_str(), runtime.ip.as_str(), runtime.vnc_port),
            ("vm-9", "10.0.0.9", Some(5900))
        );
    }

    #[test]
    fn long_vm_name_is_refused_early() {
        let mut set = set();
        set.metadata.name = Some("x".repeat(60));
        let error = main_pod(&set, None).unwrap_err();
        assert!(error.contains("at most 63 characters"), "{error}");
    }
}
