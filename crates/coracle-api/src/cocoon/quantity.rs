//! Quantities in manifests, as texts or whole numbers.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ResourceClaim, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

/// Kubernetes quantity. Manifests contain texts and whole numbers (`cpu: 2`); it is written as a text.
#[derive(Serialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct QuantityText(pub String);

impl<'de> Deserialize<'de> for QuantityText {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Text(String),
            Number(i64),
        }
        Ok(Self(match Either::deserialize(d)? {
            Either::Text(text) => text,
            Either::Number(number) => number.to_string(),
        }))
    }
}

impl JsonSchema for QuantityText {
    fn schema_name() -> Cow<'static, str> {
        "QuantityText".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
        })
    }
}

impl From<&QuantityText> for Quantity {
    fn from(amount: &QuantityText) -> Self {
        Self(amount.0.clone())
    }
}

/// Kubernetes ResourceRequirements.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
pub struct VmResources {
    /// Claims, copied to the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub claims: Vec<ResourceClaim>,
    /// Limits.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, QuantityText>,
    /// Requests.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, QuantityText>,
}

impl From<&VmResources> for ResourceRequirements {
    fn from(resources: &VmResources) -> Self {
        let list = |from: &BTreeMap<String, QuantityText>| {
            (!from.is_empty())
                .then(|| from.iter().map(|(key, amount)| (key.clone(), amount.into())).collect())
        };
        Self {
            claims: (!resources.claims.is_empty()).then(|| resources.claims.clone()),
            limits: list(&resources.limits),
            requests: list(&resources.requests),
        }
    }
}
