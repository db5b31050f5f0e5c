//! `kubebid.io/v1`: BidNode, with the names that existing manifests use.

#![expect(unreachable_pub, reason = "KubeSchema repeats the struct inside a function")]
#![expect(clippy::duplicated_attributes, reason = "columns of a table have types, and some the same")]

pub mod names;

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, CustomResourceExt as _, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Nodes bought at auction.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "kubebid.io",
    version = "v1",
    kind = "BidNode",
    plural = "bidnodes",
    singular = "bidnode",
    shortname = "bn",
    namespaced,
    status = "BidNodeStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "Nodes bought at auction.",
    printcolumn(name = "Instance", type_ = "string", json_path = ".spec.instanceType"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.activeNodes"),
    printcolumn(name = "Price", type_ = "number", json_path = ".status.averagePrice"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredNodes", priority = 1),
    printcolumn(name = "Bids", type_ = "integer", json_path = ".status.pendingBids", priority = 1),
    printcolumn(name = "Bid", type_ = "number", json_path = ".status.bidPrice", priority = 1),
    printcolumn(name = "Market", type_ = "number", json_path = ".status.marketPrice", priority = 1),
    printcolumn(name = "Strategy", type_ = "string", json_path = ".spec.bidStrategy", priority = 1),
    printcolumn(name = "Region", type_ = "string", json_path = ".status.region", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.minNodes <= self.maxNodes").message("minNodes must not exceed maxNodes"))]
pub struct BidNodeSpec {
    /// Type of the nodes.
    #[schemars(extend("enum" = ["h100-8x", "h100-4x", "a100-8x", "a100-4x", "l40s-4x"]))]
    pub instance_type: String,
    /// Region of the market; empty: the market's default, or the region with free slots and the lowest price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Highest price of a node, in US$ per hour.
    #[schemars(range(min = 0.01))]
    pub max_bid: f64,
    /// Smallest number of nodes.
    #[serde(default = "min_nodes")]
    #[schemars(range(min = 0))]
    pub min_nodes: i32,
    /// Largest number of nodes.
    #[serde(default = "max_nodes")]
    #[schemars(range(min = 1))]
    pub max_nodes: i32,
    /// Bid relative to the market's price.
    #[serde(default)]
    pub bid_strategy: BidStrategy,
    /// Labels of the nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints of the nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<NodeTaint>,
}

fn min_nodes() -> i32 {
    1
}

fn max_nodes() -> i32 {
    10
}

/// Bid relative to the market's price.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[serde(rename_all = "kebab-case")]
pub enum BidStrategy {
    /// 65 %: waits for a low price, and loses nodes early.
    CostOptimized,
    /// 90 %.
    #[default]
    Balanced,
    /// 120 %: wins early, and keeps nodes.
    AvailabilityOptimized,
}

impl BidStrategy {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CostOptimized => "cost-optimized",
            Self::Balanced => "balanced",
            Self::AvailabilityOptimized => "availability-optimized",
        }
    }

    /// Returns the bid in percent of the market's price.
    #[must_use]
    pub fn percent(self) -> i64 {
        match self {
            Self::CostOptimized => 65,
            Self::Balanced => 90,
            Self::AvailabilityOptimized => 120,
        }
    }
}

/// A taint of the nodes.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeTaint {
    /// Key of the taint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Value of the taint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Effect on pods that do not tolerate the taint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["NoSchedule", "PreferNoSchedule", "NoExecute"]))]
    pub effect: Option<String>,
}

/// Observed state of a BidNode.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BidNodeStatus {
    /// Running, Bidding or Pending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Nodes that are Ready and not being removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_nodes: Option<i32>,
    /// Requested nodes that are not active yet: open, matched and booting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_bids: Option<i32>,
    /// Average price of the active nodes, in US$ per node-hour. Absent without active nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub average_price: Option<f64>,
    /// Time when the market last accepted a bid or a changed bid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_bid_time: Option<Time>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// `metadata.generation` that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of nodes that are wanted now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_nodes: Option<i32>,
    /// Nodes that were won and are not active yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioning_nodes: Option<i32>,
    /// Nodes that are being removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preempting_nodes: Option<i32>,
    /// The market's price, in US$ per node-hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub market_price: Option<f64>,
    /// Bid at the market's price, in US$ per node-hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bid_price: Option<f64>,
    /// Present cost of all nodes, in US$ per hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hourly_cost: Option<f64>,
    /// Region of the market where the bids are placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Limit prices of bids before they were raised to keep running nodes, in US$ per node-hour. A raise is reverted when the
    /// nodes have been safe for long enough.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub raised_from: BTreeMap<String, f64>,
}

/// Returns the definition with additional instance types in its enumeration, for other catalogues.
#[must_use]
pub fn crd_with(instance_types: &[String]) -> CustomResourceDefinition {
    let mut crd = BidNode::crd();
    for version in &mut crd.spec.versions {
        let schema = version.schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut());
        let spec = schema.and_then(|s| s.properties.as_mut()).and_then(|p| p.get_mut("spec"));
        let kind = spec.and_then(|s| s.properties.as_mut()).and_then(|p| p.get_mut("instanceType"));
        if let Some(known) = kind.and_then(|k| k.enum_.as_mut()) {
            for name in instance_types {
                let more = k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSON(
                    serde_json::Value::from(name.as_str()),
                );
                if !known.contains(&more) {
                    known.push(more);
                }
            }
        }
    }
    crd
}

/// Converts a JSON number of dollars to whole micro-dollars, by its decimal text and without arithmetic on it.
///
/// # Errors
/// The text of the number, when it has more than 6 decimals, is negative, or is above a million.
pub fn micros(dollars: f64) -> Result<i64, String> {
    // The shortest text that parses to the same number is what the user wrote, except for trailing zeros.
    let text = format!("{dollars}");
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let is_plain = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !is_plain(whole) || !is_plain(fraction) || fraction.len() > 6 || whole.len() > 7 {
        return Err(text);
    }
    let value = format!("{whole}{fraction:0<6}").parse::<i64>().map_err(|_| text.clone())?;
    if value > 1_000_000_000_000 { Err(text) } else { Ok(value) }
}

/// Converts micro-dollars to a JSON number of dollars, exact to 6 decimals.
#[must_use]
pub fn dollars(micros: i64) -> f64 {
    let (whole, part) = (micros / 1_000_000, (micros % 1_000_000).abs());
    let sign = if micros < 0 && whole == 0 { "-" } else { "" };
    // The conversion parses a text, so that the number is printed with the same digits.
    format!("{sign}{whole}.{part:06}").parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_are_parsed_by_their_text() {
        for (number, want) in [
            (4.5, Ok(4_500_000)),
            (0.01, Ok(10_000)),
            (2.08, Ok(2_080_000)),
            (5.0, Ok(5_000_000)),
            (1.000_001, Ok(1_000_001)),
            (1_000_000.0, Ok(1_000_000_000_000)),
            (1_000_000.5, Err("1000000.5".to_owned())),
            (1.000_000_1, Err("1.0000001".to_owned())),
            (-1.0, Err("-1".to_owned())),
            (f64::NAN, Err("NaN".to_owned())),
            (1e300, Err(format!("{}", 1e300))),
        ] {
            assert_eq!(micros(number), want, "{number}");
        }
        for value in [0, 1, 10_000, 2_080_000, 3_600_000, 123_456_789, 999_999_999_999, -500_000] {
            let back = dollars(value);
            assert_eq!(format!("{back}"), format!("{}", dollars(value)));
            if value >= 0 {
                assert_eq!(micros(back), Ok(value));
            }
        }
    }
}
