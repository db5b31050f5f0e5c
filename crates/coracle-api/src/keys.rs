//! Keys and values on Kubernetes objects, and the metadata keys of the agent's wire.

/// Where nodes announce themselves and the operator keeps its leader-election Leases.
pub const SYSTEM_NAMESPACE: &str = "coracle-system";

/// Secret in [`SYSTEM_NAMESPACE`] (`ca.crt`, `tls.crt`, `tls.key`) that the command line shows to nodes when it comes
/// through the cluster. Whoever may read it may use every VM.
pub const CLIENT_SECRET: &str = "coracle-client";

/// Finalizer of a MikromVM: its VM may exist on a node until this is gone.
pub const MIKROMVM_FINALIZER: &str = "vm.mikrom.es/finalizer";

/// Server-side apply owner of what the MikromVM controller writes.
pub const MIKROMVM_MANAGER: &str = "coracle-mikromvm";

/// Annotation `true` on a MikromVM that is being deleted: let the object go although its VM could not be removed.
pub const ABANDON: &str = "coracle.dev/abandon";

/// What a node says of itself on its Lease in [`SYSTEM_NAMESPACE`] (and may say on its agent Pod).
///
/// The Lease's name is free; its `renewTime` and `leaseDurationSeconds` tell whether the node lives. The node renews it
/// about every third of its duration, and writes nothing else while nothing changes.
pub mod node {
    /// Label `true`: this Lease, or this Pod, is that of a FirecrackerAgent.
    pub const AGENT_LABEL: &str = "coracle.dev/agent";
    /// Label on what belongs to one node, and on objects that name it in selectors.
    pub const NODE_LABEL: &str = "coracle.dev/node";
    /// Annotation: the agent's `host:port`. On a Pod without it: the Pod's host IP and [`AGENT_PORT`].
    pub const AGENT_ADDRESS: &str = "coracle.dev/agent-address";
    /// Annotation: the node's name, as `spec.nodeName` says it. Absent: the Lease's name, or the Pod's `spec.nodeName`.
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
    /// Annotation: `coracle.host.v1` at `host:port`, for the command line. Absent: not served.
    pub const HOST_ADDRESS: &str = "coracle.dev/host-address";
    /// Port of the agent where nothing names one.
    pub const AGENT_PORT: u16 = 50051;
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
    /// Namespace of the MikromVM.
    pub const NAMESPACE: &str = "coracle.dev/namespace";
    /// Name of the MikromVM.
    pub const NAME: &str = "coracle.dev/name";
    /// `imagePullPolicy` of the MikromVM, when it has one.
    pub const IMAGE_PULL_POLICY: &str = "coracle.dev/image-pull-policy";
    /// Set by the node in its replies: digest of the image that runs.
    pub const IMAGE_DIGEST: &str = "coracle.dev/image-digest";
    /// Snapshot on the node that the VM goes on from.
    pub const CLONE_FROM: &str = "coracle.dev/clone-from";
    /// Set by the node in its replies: Running, Paused, Stopped or Hibernated.
    pub const POWER_STATE: &str = "coracle.dev/power-state";
}

/// gRPC metadata of every mutating call.
pub mod fence {
    /// UID of the object on whose behalf the call is made.
    pub const UID: &str = "coracle-uid";
    /// Its `metadata.generation`; a node refuses an older one than it has seen.
    pub const GENERATION: &str = "coracle-generation";
}

/// gRPC metadata of StopVM: `Paused` or `Hibernated`, when the VM is not to be powered off; of CreateVM: `Stopped`, when it
/// is not to be booted.
pub const POWER: &str = "coracle-power";
