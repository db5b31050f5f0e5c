//! State of a VM that a node reports, and the object on whose behalf a call is made.

use coracle_api::{MikromVM, PowerState};
use kube::ResourceExt as _;

pub use coracle_proto::firecracker::VmState as State;

/// Report of an agent about one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmInfo {
    /// State of the VM; an unknown number becomes `Unspecified`.
    pub state: State,
    /// Address of the guest; empty until it is known.
    pub ip: String,
    /// UID of the object that the VM was created for. Absent with old agents and old operators.
    pub uid: Option<String>,
    /// Namespace and name of that object.
    pub object: Option<(String, String)>,
    /// Cluster of that object.
    pub cluster: Option<String>,
    /// `namespace/name` of the object that may adopt a VM created by hand.
    pub adopt: Option<String>,
    /// Digest of the spec that the VM was created from ([`crate::vm_spec`]), if the agent keeps it.
    pub spec: Option<String>,
    /// Digest of the running image, if the agent reports it.
    pub image_digest: String,
    /// Creation time in Unix seconds; 0 when unknown.
    pub created_at: i64,
    /// Power state of the VM; `None` from agents that report only the state.
    pub power: Option<PowerState>,
}

/// Object on whose behalf a call is made. The agent refuses a generation older than one that it has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// UID of the object.
    pub uid: String,
    /// `namespace/name` of the object.
    pub object: String,
    /// Generation of the object.
    pub generation: i64,
}

impl Fence {
    /// Returns the fence of an object.
    #[must_use]
    pub fn of(vm: &MikromVM) -> Self {
        Self {
            uid: vm.uid().unwrap_or_default(),
            object: vm.object_name(),
            generation: vm.metadata.generation.unwrap_or(0),
        }
    }
}
