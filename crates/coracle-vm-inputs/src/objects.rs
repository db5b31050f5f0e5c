//! Objects that a spec refers to. Pure.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::{MikromVMSpec, NodeSelectorTerm, Operator, Requirement};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret};

use crate::InputError;

/// Names of the objects that a spec refers to, all in the namespace of the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Names of ConfigMaps.
    pub config_maps: BTreeSet<String>,
    /// Names of Secrets.
    pub secrets: BTreeSet<String>,
    /// Names of claims.
    pub claims: BTreeSet<String>,
}

impl References {
    /// Returns only the claims, which placement depends on.
    #[must_use]
    pub fn of_claims(self) -> Self {
        Self { claims: self.claims, ..Self::default() }
    }

    /// True when no object has to be read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns the names of the objects that a spec refers to.
#[must_use]
pub fn references(spec: &MikromVMSpec) -> References {
    let mut found = References::default();
    for source in &spec.env_from {
        found.config_maps.extend(source.config_map_ref.iter().map(|of| of.name.clone()));
        found.secrets.extend(source.secret_ref.iter().map(|of| of.name.clone()));
    }
    for from in spec.env.iter().filter_map(|variable| variable.value_from.as_ref()) {
        found.config_maps.extend(from.config_map_key_ref.iter().map(|of| of.name.clone()));
        found.secrets.extend(from.secret_key_ref.iter().map(|of| of.name.clone()));
    }
    let user_data = spec.user_data.iter().filter_map(|user_data| user_data.secret_ref.as_ref());
    found.secrets.extend(user_data.map(|of| of.name.clone()));
    for volume in &spec.volumes {
        found.config_maps.extend(volume.config_map.iter().map(|of| of.name.clone()));
        found.secrets.extend(volume.secret.iter().map(|of| of.secret_name.clone()));
        found.claims.extend(volume.persistent_volume_claim.iter().map(|of| of.claim_name.clone()));
    }
    found.secrets.extend(spec.image_pull_secrets.iter().map(|of| of.name.clone()));
    found
}

/// Objects that a spec refers to and that exist.
#[derive(Clone, Default)]
pub struct Objects {
    /// ConfigMaps by name.
    pub config_maps: BTreeMap<String, ConfigMap>,
    /// Secrets by name.
    pub secrets: BTreeMap<String, Secret>,
    /// Claims by name, with their bound volumes.
    pub claims: BTreeMap<String, Result<BoundClaim, String>>,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("claims", &self.claims).finish_non_exhaustive()
    }
}

/// Volume that a claim is bound to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BoundClaim {
    /// Path on the node.
    pub path: String,
    /// True when the volume must not be written.
    pub read_only: bool,
    /// Node selector terms, of which one must match. Empty: every node has the volume.
    pub node_terms: Vec<NodeSelectorTerm>,
}

impl Objects {
    /// Returns the text of a key of a Secret; `None` when the Secret has no such key.
    pub(crate) fn secret_key(&self, name: &str, key: &str) -> Result<Option<String>, InputError> {
        let secret =
            self.secrets.get(name).ok_or_else(|| InputError(format!("Secret {name:?} not found")))?;
        let Some(bytes) = secret.data.as_ref().and_then(|data| data.get(key)) else { return Ok(None) };
        let text = String::from_utf8(bytes.0.clone());
        text.map(Some).map_err(|_| InputError(format!("key {key:?} of Secret {name:?} is not text")))
    }

    pub(crate) fn claim(&self, name: &str) -> Result<&BoundClaim, InputError> {
        match self.claims.get(name) {
            Some(Ok(bound)) => Ok(bound),
            Some(Err(why)) => Err(InputError(why.clone())),
            None => Err(InputError(format!("PersistentVolumeClaim {name:?} not found"))),
        }
    }
}

/// Returns the name of the volume that a claim is bound to.
pub(crate) fn bound_to(claim: &PersistentVolumeClaim) -> Result<String, String> {
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    volume.filter(|volume| phase == "Bound" && !volume.is_empty()).ok_or_else(|| {
        format!("PersistentVolumeClaim {name:?} is {phase}: it must be bound to a volume first")
    })
}

/// Returns the parts of a volume that a VM can use.
pub(crate) fn to_bound_claim(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Result<BoundClaim, String> {
    let spec = volume.spec.clone().unwrap_or_default();
    let local = spec.local.as_ref().map(|local| local.path.clone());
    let path = local.or_else(|| spec.host_path.as_ref().map(|host| host.path.clone()));
    let Some(path) = path else {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        return Err(format!("PersistentVolume {name:?} is neither local nor hostPath, which VMs can use"));
    };
    let modes = claim.spec.iter().flat_map(|spec| spec.access_modes.iter().flatten());
    let read_only = modes.clone().count() > 0 && modes.into_iter().all(|mode| mode == "ReadOnlyMany");
    let required = spec.node_affinity.and_then(|affinity| affinity.required);
    let mut node_terms = Vec::new();
    for term in required.map(|required| required.node_selector_terms).unwrap_or_default() {
        let mut match_expressions = Vec::new();
        for found in term.match_expressions.unwrap_or_default() {
            let operator = match found.operator.as_str() {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                "Gt" => Operator::Gt,
                "Lt" => Operator::Lt,
                other => return Err(format!("unknown operator {other:?} in the node affinity of {path}")),
            };
            match_expressions.push(Requirement {
                key: found.key,
                operator,
                values: found.values.unwrap_or_default(),
            });
        }
        node_terms.push(NodeSelectorTerm { match_expressions });
    }
    Ok(BoundClaim { path, read_only, node_terms })
}
