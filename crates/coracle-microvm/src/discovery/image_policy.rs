//! Keys that must have signed images, by namespace.

use std::collections::BTreeMap;

use coracle_api::keys::IMAGE_POLICY_DEFAULT;
use k8s_openapi::api::core::v1::ConfigMap;

use super::{Comparable, Fleet};

/// The policy of the cluster: PEM by namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ImagePolicy(BTreeMap<String, String>);

impl ImagePolicy {
    pub(super) fn of(stored: &ConfigMap) -> Self {
        Self(stored.data.clone().unwrap_or_default())
    }

    /// Keys of a namespace; empty: none is asked for.
    fn keys(&self, namespace: &str) -> &str {
        self.0.get(namespace).or_else(|| self.0.get(IMAGE_POLICY_DEFAULT)).map_or("", |pem| pem.trim())
    }
}

impl Comparable for ImagePolicy {
    fn same(&self, other: &Self) -> bool {
        self == other
    }
}

impl Fleet {
    /// Public keys (PEM) of which one must have signed the images of a namespace; empty: none is asked for.
    pub(crate) fn image_keys(&self, namespace: &str) -> String {
        let tables = self.lock();
        let policy = tables.image_policy.rows.values().next();
        policy.map_or_else(String::new, |policy| policy.keys(namespace).to_owned())
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
