//! API objects that a pod refers to: ConfigMaps, Secrets, services, storage.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, EnvFromSource, EnvVar, Pod, Secret, Service};

use crate::declared::declared;

/// Existing objects that a pod refers to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objects {
    /// ConfigMaps of the pod's namespace, by name.
    pub config_maps: BTreeMap<String, Arc<ConfigMap>>,
    /// Secrets of the pod's namespace, by name.
    pub secrets: BTreeMap<String, Arc<Secret>>,
    /// Services of the pod's namespace, and `kubernetes` of `default`.
    pub services: Vec<Arc<Service>>,
    /// Storage on this node that claims of the pod's namespace are bound to, by claim.
    pub claims: BTreeMap<String, ClaimSource>,
    /// PEM certificates of trust bundles, by name.
    pub trust_bundles: BTreeMap<String, String>,
}

/// Disk or directory of the node that a claim is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimSource {
    /// Absolute path on the node, or the name of a disk that the node keeps.
    pub source: String,
    /// The storage must not be written.
    pub read_only: bool,
}

/// Names of the objects that a pod refers to. The frontend watches exactly these.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// ConfigMaps, without duplicates, sorted.
    pub config_maps: Vec<String>,
    /// Secrets, without duplicates, sorted; pull Secrets among them.
    pub secrets: Vec<String>,
    /// Claims, without duplicates, sorted.
    pub claims: Vec<String>,
}

/// Returns the names of the objects that a pod refers to.
#[must_use]
pub fn references(pod: &Pod) -> References {
    let mut found = References::default();
    let Some(spec) = &pod.spec else { return found };
    for one in declared(pod) {
        one.container.env_from.iter().flatten().for_each(|source| found.env_from(source));
        one.container.env.iter().flatten().for_each(|variable| found.env(variable));
    }
    for volume in spec.volumes.iter().flatten() {
        found.config_maps.extend(volume.config_map.iter().map(|source| source.name.clone()));
        found.secrets.extend(volume.secret.iter().filter_map(|source| source.secret_name.clone()));
        found.claims.extend(volume.persistent_volume_claim.iter().map(|source| source.claim_name.clone()));
        for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
            found.config_maps.extend(source.config_map.iter().map(|source| source.name.clone()));
            found.secrets.extend(source.secret.iter().map(|source| source.name.clone()));
        }
    }
    found.secrets.extend(spec.image_pull_secrets.iter().flatten().map(|secret| secret.name.clone()));
    for names in [&mut found.config_maps, &mut found.secrets, &mut found.claims] {
        names.sort();
        names.dedup();
        names.retain(|name| !name.is_empty());
    }
    found
}

impl References {
    fn env_from(&mut self, source: &EnvFromSource) {
        self.config_maps.extend(source.config_map_ref.iter().map(|source| source.name.clone()));
        self.secrets.extend(source.secret_ref.iter().map(|source| source.name.clone()));
    }

    fn env(&mut self, variable: &EnvVar) {
        let Some(from) = &variable.value_from else { return };
        self.config_maps.extend(from.config_map_key_ref.iter().map(|source| source.name.clone()));
        self.secrets.extend(from.secret_key_ref.iter().map(|source| source.name.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_found_wherever_pods_have_them() {
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": {
            "initContainers": [{"name": "i", "envFrom": [{"configMapRef": {"name": "c2"}}, {"secretRef": {"name": "s1"}}]}],
            "containers": [{"name": "a", "env": [
                {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c1", "key": "k"}}},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s2", "key": "k"}}},
            ]}],
            "ephemeralContainers": [{"name": "e", "envFrom": [{"secretRef": {"name": "s3"}}]}],
            "volumes": [
                {"name": "v1", "configMap": {"name": "c1"}},
                {"name": "v2", "secret": {"secretName": "s4"}},
                {"name": "v3", "projected": {"sources": [{"configMap": {"name": "c3"}}, {"secret": {"name": "s5"}}]}},
                {"name": "v4", "persistentVolumeClaim": {"claimName": "p"}},
            ],
            "imagePullSecrets": [{"name": "s6"}],
        }}))
        .unwrap();
        let found = references(&pod);
        assert_eq!(found.config_maps, ["c1", "c2", "c3"]);
        assert_eq!(found.secrets, ["s1", "s2", "s3", "s4", "s5", "s6"]);
        assert_eq!(found.claims, ["p"]);
    }
}
