//! Labels, annotations, taints, finalizers and registry tags. All but `coracle.dev/…` are byte for byte those of existing
//! manifests.

/// Key of the taint of nodes that run VMs behind pods, and of the toleration by which a pod is recognised as one with a VM.
pub const TAINT_KEY: &str = "virtual-kubelet.io/provider";
/// Value of the taint.
pub const TAINT_VALUE: &str = "cocoon";
/// Effect of the taint.
pub const TAINT_EFFECT: &str = "NoSchedule";
/// Label of nodes and pods: the pool.
pub const POOL_LABEL: &str = "cocoonstack.io/pool";
/// Pool of nodes and pods that name no pool.
pub const DEFAULT_POOL: &str = "default";
/// Label of nodes that run VMs; its value is empty.
pub const ROLE_LABEL: &str = "node-role.kubernetes.io/cocoon-vm";
/// Label of nodes: CPU class. Snapshots can be restored on nodes of the same class.
pub const CPU_CLASS_LABEL: &str = "cocoonstack.io/snapshot-cpu-class";

/// Label of a set's pods: name of the set.
pub const SET_NAME_LABEL: &str = "cocoonset.cocoonstack.io/name";
/// Label of a set's pods: main, sub-agent or toolbox.
pub const SET_ROLE_LABEL: &str = "cocoonset.cocoonstack.io/role";
/// Label of a set's pods: number of the slot of an agent, or name of a toolbox.
pub const SET_SLOT_LABEL: &str = "cocoonset.cocoonstack.io/slot";
/// Label of a set's pods: name of the set.
pub const APP_NAME_LABEL: &str = "app.kubernetes.io/name";

/// Annotation: name of the VM, and repository of its snapshots. Required.
pub const VM_NAME: &str = "vm.cocoonstack.io/name";
/// Annotation: clone, run or static.
pub const MODE: &str = "cocoonset.cocoonstack.io/mode";
/// Annotation: snapshot, image or URL that the VM is created from.
pub const IMAGE: &str = "cocoonset.cocoonstack.io/image";
/// Annotation: size of the root disk.
pub const STORAGE: &str = "cocoonset.cocoonstack.io/storage";
/// Annotation `true`: the node owns the lifecycle of the VM.
pub const MANAGED: &str = "cocoonset.cocoonstack.io/managed";
/// Annotation: linux, windows, android or macos.
pub const OS: &str = "cocoonset.cocoonstack.io/os";
/// Annotation: always, main-only or never.
pub const SNAPSHOT_POLICY: &str = "cocoonset.cocoonstack.io/snapshot-policy";
/// Annotation: name of the CNI network.
pub const NETWORK: &str = "cocoonset.cocoonstack.io/network";
/// Annotation: name of the VM on the node to fork.
pub const FORK_FROM: &str = "vm.cocoonstack.io/fork-from";
/// Annotation `true`: the VM should be hibernated.
pub const HIBERNATE: &str = "vm.cocoonstack.io/hibernate";
/// Annotation `true`: pull the image even when the node has it.
pub const FORCE_PULL: &str = "cocoonset.cocoonstack.io/force-pull";
/// Annotation: ssh, rdp, vnc or adb.
pub const CONN_TYPE: &str = "vm.cocoonstack.io/conn-type";
/// Annotation: cloud-hypervisor or firecracker.
pub const BACKEND: &str = "vm.cocoonstack.io/backend";
/// Annotation `true`: buffer writes of disks.
pub const NO_DIRECT_IO: &str = "vm.cocoonstack.io/no-direct-io";
/// Annotation: TCP port that accepts connections when the VM is ready.
pub const PROBE_PORT: &str = "vm.cocoonstack.io/probe-port";
/// Annotation: directory on the node of an exported snapshot.
pub const CLONE_FROM_DIR: &str = "vm.cocoonstack.io/clone-from-dir";
/// Annotation `true`: a new pod restores the tag `hibernate` instead of its image.
pub const RESTORE_FROM_HIBERNATE: &str = "vm.cocoonstack.io/restore-from-hibernate";
/// Annotation `true`: the node keeps its snapshot of the VM when the pod is deleted.
pub const KEEP_SNAPSHOT_ON_DELETE: &str = "vm.cocoonstack.io/keep-snapshot-on-delete";
/// Annotation: generation of the set for which the pod was last written.
pub const GENERATION: &str = "cocoonset.cocoonstack.io/generation";

/// Annotation of the node: id of the VM; absent while it is hibernated.
pub const VM_ID: &str = "vm.cocoonstack.io/id";
/// Annotation of the node: IPv4 address of the guest; absent while it is hibernated.
pub const VM_IP: &str = "vm.cocoonstack.io/ip";
/// Annotation of the node: VNC port.
pub const VNC_PORT: &str = "vm.cocoonstack.io/vnc-port";
/// Annotation of the node: script in base64 that the guest's owner should run after a clone.
pub const POST_CLONE_HINT: &str = "vm.cocoonstack.io/post-clone-hint";
/// Annotation of the node: creating, ready, hibernating, hibernated or failed.
pub const LIFECYCLE_STATE: &str = "vm.cocoonstack.io/lifecycle-state";
/// Annotation of the node: [`GENERATION`] when the VM reached that state.
pub const LIFECYCLE_OBSERVED_GENERATION: &str = "vm.cocoonstack.io/lifecycle-observed-generation";
/// Annotation of the node: message about that state.
pub const LIFECYCLE_STATE_MESSAGE: &str = "vm.cocoonstack.io/lifecycle-state-message";

/// Annotation of a set: node that the main VM ran on before the set released its place.
pub const HIBERNATED_ON_NODE: &str = "cocoonset.cocoonstack.io/hibernated-on-node";
/// Annotation of a set: JSON map of slots to `{"count": …, "lastDeleted": …}`.
pub const REBUILD_HISTORY: &str = "cocoonset.cocoonstack.io/rebuild-history";
/// Annotation of a set that is being deleted: comma-separated names of its VMs.
pub const DELETE_VM_NAMES: &str = "cocoonset.cocoonstack.io/delete-vm-names";
/// Annotation of a pod that was rebuilt too often.
pub const DEAD_LETTER: &str = "cocoonset.cocoonstack.io/dead-letter";

/// Finalizer of a CocoonSet.
pub const SET_FINALIZER: &str = "cocoonset.cocoonstack.io/finalizer";
/// Finalizer of a CocoonHibernation.
pub const HIBERNATION_FINALIZER: &str = "cocoonhibernation.cocoonset.cocoonstack.io/finalizer";
/// Name of the Lease of the operator's leader election. The original operator uses the same name, so that only one of the two
/// runs.
pub const LEASE: &str = "cocoon-operator.cocoonset.cocoonstack.io";
/// Namespace of the operator, the webhook and the reservations of sticky scheduling.
pub const SYSTEM_NAMESPACE: &str = "cocoon-system";

/// Registry tag of the state that was saved when the pod was deleted, and of an image without a tag.
pub const TAG_LATEST: &str = "latest";
/// Registry tag of the saved state of a hibernated VM.
pub const TAG_HIBERNATE: &str = "hibernate";

/// Name of the container of a set's pods.
pub const CONTAINER_NAME: &str = "agent";
/// Image of the container of a set's pods. Never pulled: the VM's image is in [`IMAGE`].
pub const CONTAINER_IMAGE: &str = "registry.k8s.io/pause:3.10";
