//! Specification of a VM: the part of a MikromVM that a step sends to the agent. Pure.

use std::{fmt::Write as _, sync::Arc};

use coracle_api::{ImagePullPolicy, MikromVM, keys::vm as meta};
use coracle_vm_inputs::{Inputs, has_inputs};
use kube::ResourceExt as _;
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// Length of the digest in bytes: enough to distinguish the versions of one object.
const BYTES: usize = 8;

/// Inputs of a creation, read from one version of the object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmSpec {
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// Cluster of the object; `None`: it could not be read.
    pub cluster: Option<String>,
    /// Image reference.
    pub image: String,
    /// Image pull policy; `None`: the agent's default.
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// CPUs.
    pub vcpus: i32,
    /// Memory in MiB.
    pub memory_mib: i32,
    /// Path of the kernel on the node; empty: the agent's default.
    pub kernel_path: String,
    /// Name of the snapshot to clone; empty: none.
    pub clone_from: String,
    /// Annotation that requests a cold boot.
    pub cold_start: Option<String>,
    /// Driver in the spec, or in the annotation.
    pub driver: Option<String>,
    /// Inputs of the guest.
    pub inputs: Arc<Inputs>,
    /// [`spec_hash`] of the object.
    pub hash: String,
}

impl VmSpec {
    /// Reads the object. `cluster` is the UID of the namespace `kube-system`; `inputs` are resolved from the objects that the
    /// spec refers to.
    #[must_use]
    pub fn of(vm: &MikromVM, cluster: Option<&str>, inputs: Arc<Inputs>) -> Self {
        let annotation = |key: &str| vm.annotations().get(key).cloned();
        Self {
            namespace: vm.namespace().unwrap_or_default(),
            name: vm.name_any(),
            cluster: cluster.map(str::to_owned),
            image: vm.spec.image.clone(),
            image_pull_policy: vm.spec.image_pull_policy,
            vcpus: vm.spec.vcpu_count,
            memory_mib: vm.spec.memory_mib,
            kernel_path: vm.spec.kernel_path.clone(),
            clone_from: vm.spec.clone_from.clone(),
            cold_start: annotation(meta::COLD_START),
            driver: driver(vm).map(str::to_owned),
            inputs,
            hash: spec_hash(vm),
        }
    }
}

/// Returns the name of the driver that the object requests.
fn driver(vm: &MikromVM) -> Option<&str> {
    let named = Some(vm.spec.driver.as_str()).filter(|driver| !driver.is_empty());
    named.or_else(|| vm.annotations().get(meta::DRIVER).map(String::as_str))
}

/// Returns the digest of image, size, kernel, snapshot, driver and guest inputs, in hexadecimal. Objects that the spec refers
/// to may change without a change of the digest.
#[must_use]
pub fn spec_hash(vm: &MikromVM) -> String {
    let (vcpus, memory) = (vm.spec.vcpu_count.to_string(), vm.spec.memory_mib.to_string());
    let driver = driver(vm).unwrap_or_default();
    let mut hash = Sha256::new();
    for part in [&vm.spec.image, &vcpus, &memory, &vm.spec.kernel_path, &vm.spec.clone_from, driver] {
        hash.update(part.as_bytes());
        hash.update([0]); // no string of a Kubernetes object has a zero byte
    }
    if has_inputs(&vm.spec) {
        let spec = &vm.spec;
        let given = json!([
            spec.command,
            spec.args,
            spec.env,
            spec.env_from,
            spec.user_data,
            spec.hostname,
            spec.ssh_authorized_keys,
            spec.volumes,
        ]);
        hash.update(given.to_string().as_bytes());
    }
    hash.finalize().iter().take(BYTES).fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use coracle_api::MikromVMSpec;

    use super::*;

    fn vm(change: impl FnOnce(&mut MikromVM)) -> MikromVM {
        let spec = MikromVMSpec { image: "i:1".into(), vcpu_count: 1, memory_mib: 128, ..Default::default() };
        let mut vm = MikromVM::new("web", spec);
        change(&mut vm);
        vm
    }

    #[test]
    fn spec_hash_changes_with_what_a_vm_is_made_from() {
        let first = spec_hash(&vm(|_| ()));
        assert_eq!(
            first, "569e4ace31d4ea1e",
            "another value would replace VMs that an older operator is creating"
        );
        for (why, other) in [
            ("image", vm(|vm| vm.spec.image = "i:2".into())),
            ("vCPUs", vm(|vm| vm.spec.vcpu_count = 2)),
            ("memory", vm(|vm| vm.spec.memory_mib = 256)),
            ("kernel", vm(|vm| vm.spec.kernel_path = "/k".into())),
            ("snapshot", vm(|vm| vm.spec.clone_from = "s".into())),
            ("driver field", vm(|vm| vm.spec.driver = "qemu".into())),
            ("arguments", vm(|vm| vm.spec.args = vec!["x".into()])),
            ("host name", vm(|vm| vm.spec.hostname = "x".into())),
            ("keys", vm(|vm| vm.spec.ssh_authorized_keys = vec!["x".into()])),
            ("driver", vm(|vm| drop(vm.annotations_mut().insert(meta::DRIVER.into(), "qemu".into())))),
        ] {
            assert_ne!(spec_hash(&other), first, "{why}");
        }
        let same = vm(|vm| vm.spec.node_name = "n2".into());
        assert_eq!(spec_hash(&same), first, "a VM is not made from its place");
        let field = vm(|vm| vm.spec.driver = "qemu".into());
        let annotation = vm(|vm| drop(vm.annotations_mut().insert(meta::DRIVER.into(), "qemu".into())));
        assert_eq!(spec_hash(&field), spec_hash(&annotation), "they ask for the same");
    }
}
