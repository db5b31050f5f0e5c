//! Keys and values on Kubernetes objects, and metadata keys of the agent service.

/// Namespace of the operator, its Secrets, and leader election.
pub const SYSTEM_NAMESPACE: &str = "coracle-system";

/// Namespace of the Leases of nodes, where each node may write its own alone.
pub const NODE_NAMESPACE: &str = "coracle-nodes";

/// ConfigMap in [`SYSTEM_NAMESPACE`]: public keys (PEM) by namespace, of which one must have signed the images of its VMs.
pub const IMAGE_POLICY: &str = "coracle-image-policy";

/// Key of [`IMAGE_POLICY`] for the namespaces that it does not name. An empty value asks for no signature.
pub const IMAGE_POLICY_DEFAULT: &str = "_default";

/// Finalizer of a MikromVM: its VM may exist on a node until this is gone.
pub const MIKROMVM_FINALIZER: &str = "vm.mikrom.es/finalizer";

/// Field manager of what the MikromVM controller writes.
pub const MIKROMVM_MANAGER: &str = "coracle-mikromvm";

/// Owner of the Services and EndpointSlices of VMs.
pub const VM_SERVICE_MANAGER: &str = "coracle-vm-service";

/// Finalizer of a MikromVMPool: its VMs may exist until this is gone.
pub const POOL_FINALIZER: &str = "coracle.dev/pool";

/// Server-side apply owner of what the controller of MikromVMPools writes.
pub const POOL_MANAGER: &str = "coracle-mikromvmpool";

/// Label of the VMs of a pool: its name.
pub const POOL_LABEL: &str = "coracle.dev/pool";

/// Label of the VMs of a pool: digest of the template that they were made from.
pub const POOL_TEMPLATE_LABEL: &str = "coracle.dev/pool-template";

/// Finalizer of a VMSnapshot: its node may have the snapshot until this is gone.
pub const SNAPSHOT_FINALIZER: &str = "coracle.dev/snapshot";

/// Server-side apply owner of what the controllers of VMSnapshots and VMRestores write.
pub const SNAPSHOT_MANAGER: &str = "coracle-vmsnapshot";

/// Annotation of a MikromVM: UID of the VMRestore that made it.
pub const RESTORED_BY: &str = "coracle.dev/restored-by";

/// Annotation `true` on a MikromVM that is being deleted: remove the finalizer although the VM could not be
/// deleted.
pub const ABANDON: &str = "coracle.dev/abandon";

/// Certificates of nodes, which the operator signs on request.
pub mod certificates {
    /// Signer of the certificates that nodes show (`spec.signerName` of a CertificateSigningRequest).
    pub const NODE_SIGNER: &str = "coracle.dev/node";
    /// ServiceAccount of nodes in [`SYSTEM_NAMESPACE`](super::SYSTEM_NAMESPACE).
    pub const NODE_ACCOUNT: &str = "coracle-node";
    /// ConfigMap in [`SYSTEM_NAMESPACE`](super::SYSTEM_NAMESPACE) with the authority, which nodes read.
    pub const CA_CONFIG_MAP: &str = "coracle-ca";
    /// Its key in that ConfigMap: certificates, PEM.
    pub const CA_KEY: &str = "ca.crt";

    /// Common name of a node's certificate.
    #[must_use]
    pub fn node_common_name(node: &str) -> String {
        format!("coracle.dev:node:{node}")
    }
}

/// Keys by which a node announces itself on its Lease in [`NODE_NAMESPACE`] (and optionally on its agent
/// Pod).
///
/// The Lease's name is free; its `renewTime` and `leaseDurationSeconds` tell whether the node lives. The node
/// renews it about every third of its duration, writes nothing else while nothing changes, and deletes it
/// when it stops. The operator removes a Lease that was not renewed for a day.
pub mod node {
    /// Label `true`: this Lease, or this Pod, belongs to an agent service.
    pub const AGENT_LABEL: &str = "coracle.dev/agent";
    /// Label with the name of a node, on objects that belong to it or select it.
    pub const NODE_LABEL: &str = "coracle.dev/node";
    /// Annotation: the agent's `host:port`. On a Pod without it: the Pod's host IP and [`AGENT_PORT`].
    pub const AGENT_ADDRESS: &str = "coracle.dev/agent-address";
    /// Annotation: the node's name, as `spec.nodeName` says it. Absent: the Lease's name, or the Pod's
    /// `spec.nodeName`.
    pub const NODE: &str = "coracle.dev/node";
    /// Annotation: the name in the agent's certificate. Absent: the host part of the address.
    pub const TLS_SERVER_NAME: &str = "coracle.dev/tls-server-name";
    /// Annotation: CPUs of the host that guests may use, before overcommit.
    pub const CAPACITY_VCPUS: &str = "coracle.dev/capacity-vcpus";
    /// Annotation: memory for guests in MiB, before overcommit.
    pub const CAPACITY_MEMORY_MIB: &str = "coracle.dev/capacity-memory-mib";
    /// Annotation: default driver (`qemu`, `firecracker`, …). Informational.
    pub const DRIVER: &str = "coracle.dev/driver";
    /// Annotation: `kvm` or `tcg`. Informational; also a label of the Node.
    pub const ACCELERATOR: &str = "coracle.dev/accelerator";
    /// Annotation: `coracle.host.v1` at `host:port`, for the operator and the command line. Absent: not served.
    pub const HOST_ADDRESS: &str = "coracle.dev/host-address";
    /// Annotation: network of the guests' addresses, like `10.100.3.0/24`. The operator places no VM on a node whose network
    /// overlaps with that of an older one.
    pub const GUEST_SUBNET: &str = "coracle.dev/guest-subnet";
    /// Lease in the same namespace with the networks that nodes have leased: annotations [`GUEST_SUBNETS_PREFIX`] and a
    /// network (`10.100.3.0-24`), each with the name of its node. It is not renewed.
    pub const GUEST_SUBNETS: &str = "coracle-guest-subnets";
    /// Prefix of the annotations of [`GUEST_SUBNETS`].
    pub const GUEST_SUBNETS_PREFIX: &str = "subnet.coracle.dev/";
    /// Default port of the agent.
    pub const AGENT_PORT: u16 = 50051;

    /// Port of the host service of nodes that run as Pods.
    pub const HOST_PORT: u16 = 50052;
}

/// Keys of `CreateVMRequest.metadata`, returned in `VMInfo.metadata`.
pub mod vm {
    /// UID of the MikromVM. A VM with another one is never adopted.
    pub const UID: &str = "coracle.dev/uid";
    /// `true`: creating again with the same id, uid and parameters is not an error.
    pub const IDEMPOTENT: &str = "coracle.dev/idempotent";
    /// `true`: boot the VM every time, even where a template could be cloned.
    pub const COLD_START: &str = "coracle.dev/cold-start";
    /// Name of the driver that runs the VM: `qemu`, `firecracker`, `cloud-hypervisor`.
    pub const DRIVER: &str = "coracle.dev/driver";
    /// What happens to the VM when its node is cordoned: hibernate, move or stop. Without it the VM keeps running.
    pub const ON_DRAIN: &str = "coracle.dev/on-drain";
    /// How many VMs with the same controller may be down at once: a drain waits for the others.
    pub const MAX_UNAVAILABLE: &str = "coracle.dev/max-unavailable";
    /// Namespace of the MikromVM.
    pub const NAMESPACE: &str = "coracle.dev/namespace";
    /// Name of the MikromVM.
    pub const NAME: &str = "coracle.dev/name";
    /// `NAMESPACE/NAME` of the MikromVM that may adopt this VM. Set it on a VM that is created by hand;
    /// without it a VM without a UID is never adopted, stopped or deleted for an object.
    pub const ADOPT: &str = "coracle.dev/adopt";
    /// Set by the node: the id that a VM was created under, where another VM had the name.
    pub const VM_ID: &str = "coracle.dev/vm-id";
    /// The cluster of the MikromVM: the UID of its namespace `kube-system`.
    pub const CLUSTER: &str = "coracle.dev/cluster";
    /// Digest of the part of the spec that a VM is made from. A VM that was never confirmed and has another
    /// one is replaced; a creation with another one is not the same creation.
    pub const SPEC: &str = "coracle.dev/spec";
    /// `imagePullPolicy` of the MikromVM, when it has one.
    pub const IMAGE_PULL_POLICY: &str = "coracle.dev/image-pull-policy";
    /// Set by the node in its replies: digest of the image that runs.
    pub const IMAGE_DIGEST: &str = "coracle.dev/image-digest";
    /// Snapshot on the node that the VM is cloned from.
    pub const CLONE_FROM: &str = "coracle.dev/clone-from";
    /// Set by the node in its replies: Running, Paused, Stopped or Hibernated.
    pub const POWER_STATE: &str = "coracle.dev/power-state";
}

/// gRPC metadata of every call about one VM, to both services of a node. A node finds the VM of that object, and
/// no other of the same id.
pub mod fence {
    /// UID of the object on whose behalf the call is made.
    pub const UID: &str = "coracle-uid";
    /// Its `namespace/name`.
    pub const OBJECT: &str = "coracle-object";
    /// Its `metadata.generation`; a node refuses an older one than it has seen.
    pub const GENERATION: &str = "coracle-generation";
}

/// gRPC metadata of StopVM: `Paused` or `Hibernated`, when the VM is not to be powered off; of CreateVM:
/// `Stopped`, when it is not to be booted.
pub const POWER: &str = "coracle-power";
