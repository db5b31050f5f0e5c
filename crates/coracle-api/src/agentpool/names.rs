//! Labels, annotations, finalizers, phases, reasons and action types. All but `coracle.dev/…` are byte for byte those of the
//! original operator.

/// Label of a VsphereAgent: name of its pool.
pub const POOL_LABEL: &str = "agent-forge.containeroo.ch/vsphere-agent-pool";
/// Label of a VsphereAgent: its origin, `agent-machine` or `adopted`.
pub const CREATED_FOR: &str = "agent-forge.containeroo.ch/created-for";
/// Value of [`CREATED_FOR`] for a VsphereAgent that was created for an AgentMachine.
pub const FOR_AGENT_MACHINE: &str = "agent-machine";
/// Value of [`CREATED_FOR`] for a VsphereAgent that adopts an existing VM.
pub const FOR_ADOPTED: &str = "adopted";
/// Label of a VsphereAgent: name of its AgentMachine. On an Agent: name of its VM. In an AgentMachine's selector: the
/// AgentMachine's own name.
pub const AGENT_MACHINE: &str = "agent-forge.containeroo.ch/agent-machine";
/// Label of objects of early versions: UID of the AgentMachine.
pub const AGENT_MACHINE_UID: &str = "agent-forge.containeroo.ch/agent-machine-uid";
/// Label that distinguishes the Agents of several pools with one InfraEnv.
pub const NODEPOOL: &str = "agent-forge.containeroo.ch/nodepool";
/// Annotation of a VsphereAgent: name of its VM.
pub const VM_NAME: &str = "agent-forge.containeroo.ch/vm-name";
/// Annotation of a pool: a new value requests the ISO once.
pub const FORCE_ISO_REFRESH: &str = "agent-forge.containeroo.ch/force-iso-refresh";
/// Annotation of an Agent: name of its VM, which is being destroyed.
pub const CLEANUP_VM: &str = "agent-forge.containeroo.ch/cleanup-vm";
/// Prefix of a VM's notes, followed by the UID of its VsphereAgent.
pub const OWNER_NOTE: &str = "agent-forge.containeroo.ch/vsphere-agent-uid=";
/// Finalizer of a pool.
pub const POOL_FINALIZER: &str = "agent-forge.containeroo.ch/vsphere-agent-pool";
/// Finalizer of a VsphereAgent.
pub const AGENT_FINALIZER: &str = "agent-forge.containeroo.ch/vsphere-agent";
/// Name of the Lease of the leader election. The original operator uses the same name, so that only one of the two runs.
pub const LEASE: &str = "agent-forge-operator.containeroo.ch";

/// Label of HyperShift: role of a node.
pub const ROLE_LABEL: &str = "hypershift.openshift.io/nodepool-role";
/// Annotation of HyperShift on Machines and AgentMachines: `<namespace>/<NodePool>`.
pub const NODEPOOL_ANNOTATION: &str = "hypershift.openshift.io/nodePool";
/// Label of the Agent provider: the AgentMachine that reserved an Agent.
pub const AGENT_MACHINE_REF: &str = "agentMachineRef";
/// Label of Assisted Installer: the InfraEnv of an Agent.
pub const INFRAENV_LABEL: &str = "infraenvs.agent-install.openshift.io";

/// Annotation of a VsphereAgent: vSphere task that may still run, as `<vCenter>/<task>/<time>`.
pub const PENDING_TASK: &str = "coracle.dev/pending-task";
/// Annotation of a VsphereAgent: BIOS UUID of a VM to adopt.
pub const CLAIM_VM: &str = "coracle.dev/claim-vm";
/// Annotation of a pool: `true` gives free Agents to new AgentMachines.
pub const REUSE: &str = "coracle.dev/reuse";
/// Annotation of a pool: `observe` or `manage` existing Agents.
pub const ADOPT: &str = "coracle.dev/adopt";
/// Annotation of a pool: `true` removes its ISO images when it is deleted.
pub const DELETE_ISOS: &str = "coracle.dev/delete-isos";
/// Annotation of a pool: time that an Agent may take to appear.
pub const DISCOVERY_TIMEOUT: &str = "coracle.dev/discovery-timeout";
/// Annotation of a pool: time that an orphaned VM is kept.
pub const ORPHAN_GRACE: &str = "coracle.dev/orphan-grace";
/// Annotation of a Secret: comma-separated namespaces whose pools may use it, or `*`.
pub const ALLOW_NAMESPACES: &str = "coracle.dev/allow-namespaces";

/// Phases of a VM.
pub mod phase {
    /// The VM's Agent has not been seen yet.
    pub const PROVISIONING: &str = "Provisioning";
    /// The VM's Agent is free.
    pub const AVAILABLE: &str = "Available";
    /// The VM's Agent is claimed.
    pub const BOUND: &str = "Bound";
    /// The VM's Agent was released, or its Machine is being deleted or was deleted.
    pub const RELEASED: &str = "Released";
    /// The VM's Agent vanished, or never appeared.
    pub const ORPHANED: &str = "Orphaned";
}

/// Reasons of VM phases.
pub mod phase_reason {
    /// The VM does not exist yet.
    pub const VM_CREATE_PENDING: &str = "VMCreatePending";
    /// The VM was created.
    pub const CREATE_REQUESTED: &str = "CreateRequested";
    /// The VM runs without an Agent.
    pub const AGENT_NOT_DISCOVERED: &str = "AgentNotDiscovered";
    /// An existing VM was adopted.
    pub const VM_ADOPTED: &str = "VMAdopted";
    /// The VM's Agent is free.
    pub const AGENT_AVAILABLE: &str = "AgentAvailable";
    /// The VM's Agent is free and prepared.
    pub const AGENT_PREPARED: &str = "AgentPrepared";
    /// The VM's Agent is claimed.
    pub const AGENT_BOUND: &str = "AgentBound";
    /// The VM's Agent was released.
    pub const AGENT_RELEASED: &str = "AgentReleased";
    /// The Machine of the VM is being deleted.
    pub const MACHINE_DELETING: &str = "MachineDeleting";
    /// The Machine of the VM was deleted.
    pub const MACHINE_DELETED: &str = "MachineDeleted";
    /// The VM's Agent vanished.
    pub const AGENT_MISSING: &str = "AgentMissing";
    /// The VM's Agent did not appear in time.
    pub const AGENT_DISCOVERY_EXPIRED: &str = "AgentDiscoveryExpired";
}

/// Origins of the VM entries in a pool's status.
pub mod source {
    /// The VM belongs to a VsphereAgent.
    pub const VSPHERE_AGENT: &str = "VsphereAgent";
    /// The Agent existed before the pool; its VM is never destroyed.
    pub const DISCOVERED_AGENT: &str = "DiscoveredAgent";
}

/// Types of planned actions.
pub mod action {
    /// An Agent is missing for the demand.
    pub const DEMAND_DEFICIT: &str = "DemandDeficit";
    /// An Agent is prepared.
    pub const PATCH_AGENT: &str = "PatchAgent";
    /// A VM is destroyed.
    pub const DELETE_VM: &str = "DeleteVM";
    /// An Agent is deleted.
    pub const DELETE_AGENT: &str = "DeleteAgent";
    /// No action is needed.
    pub const NOOP: &str = "Noop";
}
