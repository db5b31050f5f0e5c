//! Public keys that must have signed images, by namespace, from the ConfigMap [`crate::keys::IMAGE_POLICY`]. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;

use crate::keys::IMAGE_POLICY_DEFAULT;

/// Image policy of the cluster: public keys (PEM) by namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagePolicy(BTreeMap<String, String>);

impl ImagePolicy {
    /// Reads the policy from its ConfigMap.
    #[must_use]
    pub fn of(stored: &ConfigMap) -> Self {
        Self(stored.data.clone().unwrap_or_default())
    }

    /// Returns the public keys (PEM) of a namespace; empty when no signature is required.
    #[must_use]
    pub fn keys(&self, namespace: &str) -> &str {
        self.0.get(namespace).or_else(|| self.0.get(IMAGE_POLICY_DEFAULT)).map_or("", |pem| pem.trim())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn namespace_has_its_own_keys_or_the_default() {
        let stored = json!({"data": {"team": "A\n", "free": "", "_default": "B"}});
        let policy = ImagePolicy::of(&serde_json::from_value(stored).unwrap());
        assert_eq!((policy.keys("team"), policy.keys("free"), policy.keys("other")), ("A", "", "B"));
        assert_eq!(ImagePolicy::default().keys("team"), "");
    }
}
