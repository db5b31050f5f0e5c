//! Custom resources, and every label, annotation and finalizer that coracle reads or writes on Kubernetes
//! objects.
//!
//! Types and constants only, no I/O. Names that existing users type are unchanged, byte for byte.

pub mod agentpool;
mod amount;
pub mod bidnode;
pub mod cocoon;
mod image_policy;
pub mod keys;
mod migration;
mod mikromvm;
pub mod subresources;
mod vmpool;
mod vmsnapshot;

pub use migration::{Migration, MigrationNode, MigrationPhase, OnDrain};
pub use mikromvm::{
    Affinity, ClaimSource, ConfigMapSource, DiskSource, EnvFromSource, EnvVar, EnvVarSource, FieldSelector,
    ImagePullPolicy, KeySelector, KeyToPath, LabelSelector, LocalObjectReference, MikromVM, MikromVMSpec,
    MikromVMStatus, NodeAffinity, NodeSelector, NodeSelectorTerm, ObjectSelector, Operator, Phase,
    PortProtocol, PowerState, PreferredTerm, Requirement, RestartPolicy, SecretSource, TaintEffect,
    Toleration, TolerationOperator, UserData, UserDataSecret, VmAffinity, VmAffinityTerm, VmPort, VmVolume,
    condition, event, reason,
};

pub use agentpool::{VsphereAgent, VsphereAgentPool};
pub use amount::{Amount, InvalidQuantity};
pub use bidnode::BidNode;
pub use cocoon::{CocoonHibernation, CocoonSet};
pub use image_policy::ImagePolicy;
pub use vmpool::{
    MikromVMPool, MikromVMPoolSpec, MikromVMPoolStatus, PoolSelector, TemplateMetadata, UpdateStrategy,
    VmTemplate, pool_reason,
};
pub use vmsnapshot::{
    DeletionPolicy, RestoreIdentity, RestorePhase, SnapshotPhase, VMRestore, VMRestoreSpec, VMRestoreStatus,
    VMSnapshot, VMSnapshotSpec, VMSnapshotStatus, snapshot_reason,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;

/// Returns every custom resource definition, in the order in which to apply them. `cargo xtask codegen` writes them to
/// `deploy/`.
#[must_use]
pub fn crds() -> Vec<CustomResourceDefinition> {
    vec![
        MikromVM::crd(),
        VMSnapshot::crd(),
        VMRestore::crd(),
        MikromVMPool::crd(),
        VsphereAgentPool::crd(),
        VsphereAgent::crd(),
        BidNode::crd(),
        CocoonSet::crd(),
        CocoonHibernation::crd(),
    ]
}

/// Returns the definitions as files of `deploy/kustomize/crds`: file name and YAML.
///
/// # Errors
/// When a definition cannot be written as YAML, which would be a bug in this crate.
pub fn crd_files() -> Result<Vec<(String, String)>, serde_saphyr::ser_error::Error> {
    let file = |crd: &CustomResourceDefinition| {
        let name = format!("{}_{}.yaml", crd.spec.group, crd.spec.names.plural);
        Ok((name, serde_saphyr::to_string(crd)?))
    };
    crds().iter().map(file).collect()
}
