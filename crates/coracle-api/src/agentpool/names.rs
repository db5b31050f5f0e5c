//! Labels, annotations, finalizers, phases, reasons and action types. All but `coracle.dev/…` are byte for
//! byte those of the original operator.

/// Label: the pool of a VsphereAgent.
pub const POOL_LABEL: &str = "agent-forge.containeroo.ch/vsphere-agent-pool";
/// Label: origin of a VsphereAgent, `agent-machine` or `adopted`.
pub const CREATED_FOR: &str = "agent-forge.containeroo.ch/created-for";
/// Value of [`CREATED_FOR`].
pub const FOR_AGENT_MACHINE: &str = "agent-machine";
/// Value of [`CREATED_FOR`].
pub const FOR_ADOPTED: &str = "adopted";
/// Label: the AgentMachine of a VsphereAgent; on an Agent the name of its VM; in an AgentMachine's selector
/// its own name.
pub const AGENT_MACHINE: &str = "agent-forge.containeroo.ch/agent-machine";
/// Label of early objects: UID of the AgentMachine.
pub const AGENT_MACHINE_UID: &str = "agent-forge.containeroo.ch/agent-machine-uid";
/// Label: distinguishes the Agents of several pools with one InfraEnv.
pub const NODEPOOL: &str = "agent-forge.containeroo.ch/nodepool";
/// Annotation of a VsphereAgent: name of its VM.
pub const VM_NAME: &str = "agent-forge.containeroo.ch/vm-name";
/// Annotation of a pool: a new value asks for the ISO once.
pub const FORCE_ISO_REFRESH: &str = "agent-forge.containeroo.ch/force-iso-refresh";
/// Annotation of an Agent: the VM that is being destroyed under it.
pub const CLEANUP_VM: &str = "agent-forge.containeroo.ch/cleanup-vm";
/// Prefix of a VM's notes, before the UID of its VsphereAgent.
pub const OWNER_NOTE: &str = "agent-forge.containeroo.ch/vsphere-agent-uid=";
/// Finalizer of a pool.
pub const POOL_FINALIZER: &str = "agent-forge.containeroo.ch/vsphere-agent-pool";
/// Finalizer of a VsphereAgent.
pub const AGENT_FINALIZER: &str = "agent-forge.containeroo.ch/vsphere-agent";
/// The Lease: the same as the original's, so that only one of the two runs.
pub const LEASE: &str = "agent-forge-operator.containeroo.ch";

/// Label of HyperShift: role of a node.
pub const ROLE_LABEL: &str = "hypershift.openshift.io/nodepool-role";
/// Annotation of HyperShift on Machines and AgentMachines: `<namespace>/<NodePool>`.
pub const NODEPOOL_ANNOTATION: &str = "hypershift.openshift.io/nodePool";
/// Label of the Agent provider: the AgentMachine that reserved an Agent.
pub const AGENT_MACHINE_REF: &str = "agentMachineRef";
/// Label of Assisted Installer: the InfraEnv of an Agent.
pub const INFRAENV_LABEL: &str = "infraenvs.agent-install.openshift.io";

/// Annotation of a VsphereAgent: `<vCenter>/<task>/<time>`, a task that may still run.
pub const PENDING_TASK: &str = "coracle.dev/pending-task";
/// Annotation of a VsphereAgent: BIOS UUID of a VM to adopt.
pub const CLAIM_VM: &str = "coracle.dev/claim-vm";
/// Annotation of a pool: `true` gives free Agents to new AgentMachines.
pub const REUSE: &str = "coracle.dev/reuse";
/// Annotation of a pool: `observe` or `manage` existing Agents.
pub const ADOPT: &str = "coracle.dev/adopt";
/// Annotation of a pool: `true` removes its ISO images when it is deleted.
pub const DELETE_ISOS: &str = "coracle.dev/delete-isos";
/// Annotation of a pool: how long an Agent may take to appear.
pub const DISCOVERY_TIMEOUT: &str = "coracle.dev/discovery-timeout";
/// Annotation of a pool: how long an orphaned VM stays.
pub const ORPHAN_GRACE: &str = "coracle.dev/orphan-grace";
/// Annotation of a Secret: namespaces whose pools may use it, with commas, or `*`.
pub const ALLOW_NAMESPACES: &str = "coracle.dev/allow-namespaces";

/// Phases of a VM.
pub mod phase {
    /// No Agent was seen yet.
    pub const PROVISIONING: &str = "Provisioning";
    /// Its Agent is free.
    pub const AVAILABLE: &str = "Available";
    /// Its Agent is claimed.
    pub const BOUND: &str = "Bound";
    /// It was bound, or its Machine is going or gone.
    pub const RELEASED: &str = "Released";
    /// Its Agent vanished, or never came.
    pub const ORPHANED: &str = "Orphaned";
}

/// Reasons of phases.
pub mod why {
    /// The VM does not exist yet.
    pub const VM_CREATE_PENDING: &str = "VMCreatePending";
    /// The VM was created.
    pub const CREATE_REQUESTED: &str = "CreateRequested";
    /// The VM runs without an Agent.
    pub const AGENT_NOT_DISCOVERED: &str = "AgentNotDiscovered";
    /// An existing VM was adopted.
    pub const VM_ADOPTED: &str = "VMAdopted";
    /// Its Agent is free.
    pub const AGENT_AVAILABLE: &str = "AgentAvailable";
    /// Its Agent is free and prepared.
    pub const AGENT_PREPARED: &str = "AgentPrepared";
    /// Its Agent is claimed.
    pub const AGENT_BOUND: &str = "AgentBound";
    /// Its Agent was given back.
    pub const AGENT_RELEASED: &str = "AgentReleased";
    /// Its Machine is being deleted.
    pub const MACHINE_DELETING: &str = "MachineDeleting";
    /// Its Machine was deleted.
    pub const MACHINE_DELETED: &str = "MachineDeleted";
    /// Its Agent vanished.
    pub const AGENT_MISSING: &str = "AgentMissing";
    /// Its Agent never came.
    pub const AGENT_DISCOVERY_EXPIRED: &str = "AgentDiscoveryExpired";
}

/// Sources of rows.
pub mod source {
    /// A VsphereAgent.
    pub const VSPHERE_AGENT: &str = "VsphereAgent";
    /// An Agent that was there before; never destroyed.
    pub const DISCOVERED_AGENT: &str = "DiscoveredAgent";
}

/// Types of planned actions.
pub mod action {
    /// An Agent is missing.
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
