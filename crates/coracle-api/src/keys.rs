//! Keys and values on Kubernetes objects, and metadata keys of the agent service.

/// Namespace of the operator, its Secrets, and leader election.
pub const SYSTEM_NAMESPACE: &str = "coracle-system";

/// Namespace of the Leases of nodes, where each node may write only its own Lease.
pub const NODE_NAMESPACE: &str = "coracle-nodes";

/// ConfigMap in [`SYSTEM_NAMESPACE`] with public keys (PEM) by namespace. One key of the namespace must have signed the images
/// of its VMs.
pub const IMAGE_POLICY: &str = "coracle-image-policy";

/// Key of [`IMAGE_POLICY`] for namespaces without an entry of their own. An empty value requires no signature.
pub const IMAGE_POLICY_DEFAULT: &str = "_default";

/// Finalizer of a MikromVM: its VM may exist on a node until the finalizer is removed.
pub const MIKROMVM_FINALIZER: &str = "vm.mikrom.es/finalizer";

/// Field manager of the MikromVM controller.
pub const MIKROMVM_MANAGER: &str = "coracle-mikromvm";

/// Field manager of the Services and EndpointSlices of VMs.
pub const VM_SERVICE_MANAGER: &str = "coracle-vm-service";

/// Finalizer of a MikromVMPool: its VMs may exist until the finalizer is removed.
pub const POOL_FINALIZER: &str = "coracle.dev/pool";

/// Field manager of the MikromVMPool controller in server-side apply.
pub const POOL_MANAGER: &str = "coracle-mikromvmpool";

/// Label of the VMs of a pool: name of the pool.
pub const POOL_LABEL: &str = "coracle.dev/pool";

/// Label of the VMs of a pool: digest of the template that the VM was created from.
pub const POOL_TEMPLATE_LABEL: &str = "coracle.dev/pool-template";

/// Finalizer of a VMSnapshot: its node may have the snapshot until the finalizer is removed.
pub const SNAPSHOT_FINALIZER: &str = "coracle.dev/snapshot";

/// Field manager of the controllers of VMSnapshots and VMRestores in server-side apply.
pub const SNAPSHOT_MANAGER: &str = "coracle-vmsnapshot";

/// Annotation of a MikromVM: UID of the VMRestore that created it.
pub const RESTORED_BY: &str = "coracle.dev/restored-by";

/// Annotation `true` on a MikromVM that is being deleted: remove the finalizer even when the VM could not be deleted.
pub const ABANDON: &str = "coracle.dev/abandon";

/// Certificates of nodes, which the operator signs on request.
pub mod certificates {
    /// Signer of the serving certificates of nodes (`spec.signerName` of a CertificateSigningRequest).
    pub const NODE_SIGNER: &str = "coracle.dev/node";
    /// ServiceAccount of nodes in [`SYSTEM_NAMESPACE`](super::SYSTEM_NAMESPACE).
    pub const NODE_ACCOUNT: &str = "coracle-node";
    /// ConfigMap in [`SYSTEM_NAMESPACE`](super::SYSTEM_NAMESPACE) with the certificate authority, which nodes read.
    pub const CA_CONFIG_MAP: &str = "coracle-ca";
    /// Key of that ConfigMap for the certificates of the authority, PEM.
    pub const CA_KEY: &str = "ca.crt";

    /// Returns the common name of a node's certificate.
    #[must_use]
    pub fn node_common_name(node: &str) -> String {
        format!("coracle.dev:node:{node}")
    }
}

/// Keys by which a node announces itself on its Lease in [`NODE_NAMESPACE`] (and optionally on its agent Pod).
///
/// The name of the Lease is free. Its `renewTime` and `leaseDurationSeconds` tell whether the node is alive. The node renews
/// the Lease about every third of its duration, writes nothing else while nothing changes, and deletes the Lease when it stops.
/// The operator removes a Lease that was not renewed for a day.
pub mod node {
    /// Label `true`: this Lease, or this Pod, belongs to an agent service.
    pub const AGENT_LABEL: &str = "coracle.dev/agent";
    /// Label with the name of a node, on objects that belong to the node or select it.
    pub const NODE_LABEL: &str = "coracle.dev/node";
    /// Annotation: `host:port` of the agent service. Default on a Pod: the Pod's host IP and [`AGENT_PORT`].
    pub const AGENT_ADDRESS: &str = "coracle.dev/agent-address";
    /// Annotation: name of the node, as in `spec.nodeName`. Absent: the Lease's name, or the Pod's `spec.nodeName`.
    pub const NODE: &str = "coracle.dev/node";
    /// Annotation: server name in the agent's certificate. Absent: the host part of the address.
    pub const TLS_SERVER_NAME: &str = "coracle.dev/tls-server-name";
    /// Annotation: CPUs of the host that guests may use, before overcommit.
    pub const CAPACITY_VCPUS: &str = "coracle.dev/capacity-vcpus";
    /// Annotation: memory for guests in MiB, before overcommit.
    pub const CAPACITY_MEMORY_MIB: &str = "coracle.dev/capacity-memory-mib";
    /// Annotation: default driver (`qemu`, `firecracker`, …). Informational.
    pub const DRIVER: &str = "coracle.dev/driver";
    /// Annotation: `kvm` or `tcg`. Informational; also a label of the Node.
    pub const ACCELERATOR: &str = "coracle.dev/accelerator";
    /// Annotation: `host:port` of `coracle.host.v1`, for the operator and the command line. Absent: the node does not serve it.
    pub const HOST_ADDRESS: &str = "coracle.dev/host-address";
    /// Annotation: network of the guests' addresses, like `10.100.3.0/24`. The operator places no VM on a node whose network
    /// overlaps with that of an older node.
    pub const GUEST_SUBNET: &str = "coracle.dev/guest-subnet";
    /// Lease in the same namespace with the networks that nodes have leased. Each annotation has the key
    /// [`GUEST_SUBNETS_PREFIX`] and a network (`10.100.3.0-24`), and the name of the network's node as value. This Lease is not
    /// renewed.
    pub const GUEST_SUBNETS: &str = "coracle-guest-subnets";
    /// Prefix of the annotations of [`GUEST_SUBNETS`].
    pub const GUEST_SUBNETS_PREFIX: &str = "subnet.coracle.dev/";
    /// Default port of the agent service.
    pub const AGENT_PORT: u16 = 50051;

    /// Port of the host service of nodes that run as Pods.
    pub const HOST_PORT: u16 = 50052;
}

/// Keys of `CreateVMRequest.metadata`, returned in `VMInfo.metadata`.
pub mod vm {
    /// UID of the MikromVM. A VM with another UID is never adopted.
    pub const UID: &str = "coracle.dev/uid";
    /// `true`: a repeated creation with the same id, UID and parameters is not an error.
    pub const IDEMPOTENT: &str = "coracle.dev/idempotent";
    /// `true`: boot the VM at every start, even when a template could be cloned.
    pub const COLD_START: &str = "coracle.dev/cold-start";
    /// Name of the driver that runs the VM: `qemu`, `firecracker`, `cloud-hypervisor`.
    pub const DRIVER: &str = "coracle.dev/driver";
    /// Action for the VM when its node is cordoned: hibernate, move or stop. Absent: the VM keeps running.
    pub const ON_DRAIN: &str = "coracle.dev/on-drain";
    /// Number of VMs with the same controller that may be down at the same time: a drain waits for the others.
    pub const MAX_UNAVAILABLE: &str = "coracle.dev/max-unavailable";
    /// Namespace of the MikromVM.
    pub const NAMESPACE: &str = "coracle.dev/namespace";
    /// Name of the MikromVM.
    pub const NAME: &str = "coracle.dev/name";
    /// `NAMESPACE/NAME` of the MikromVM that may adopt this VM. Set it on a VM that is created by hand; a VM with neither this
    /// key nor a UID is never adopted, stopped or deleted for an object.
    pub const ADOPT: &str = "coracle.dev/adopt";
    /// Set by the node: id under which the VM was created, when another VM had the name.
    pub const VM_ID: &str = "coracle.dev/vm-id";
    /// Cluster of the MikromVM: UID of its namespace `kube-system`.
    pub const CLUSTER: &str = "coracle.dev/cluster";
    /// Digest of the part of the spec that a VM is created from. A VM that was never confirmed and has another digest is
    /// replaced. A creation with another digest is a different creation.
    pub const SPEC: &str = "coracle.dev/spec";
    /// `imagePullPolicy` of the MikromVM, when it is set.
    pub const IMAGE_PULL_POLICY: &str = "coracle.dev/image-pull-policy";
    /// Set by the node in its replies: digest of the running image.
    pub const IMAGE_DIGEST: &str = "coracle.dev/image-digest";
    /// Snapshot on the node that the VM is cloned from.
    pub const CLONE_FROM: &str = "coracle.dev/clone-from";
    /// Set by the node in its replies: Running, Paused, Stopped or Hibernated.
    pub const POWER_STATE: &str = "coracle.dev/power-state";
}

/// gRPC metadata of every call about one VM, to both services of a node. The node looks up the VM of that object, and no other
/// VM with the same id.
pub mod fence {
    /// UID of the object that the call is made for.
    pub const UID: &str = "coracle-uid";
    /// `namespace/name` of the object.
    pub const OBJECT: &str = "coracle-object";
    /// `metadata.generation` of the object; a node refuses a generation older than one that it has seen.
    pub const GENERATION: &str = "coracle-generation";
}

/// gRPC metadata of StopVM: `Paused` or `Hibernated`, when the VM should not be powered off; of CreateVM: `Stopped`, when the
/// VM should not be booted.
pub const POWER: &str = "coracle-power";
