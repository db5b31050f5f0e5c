//! Input of the planner: one BidNode and everything that its plan depends on, at one moment.

use std::collections::BTreeMap;

use coracle_api::bidnode::BidNode;

use super::demand::Need;
use crate::{
    ids::MarketName,
    observe::{
        bids::{Owner, Quote},
        facts::{NodeFacts, PodFacts},
    },
    settings::Settings,
    times::Times,
};

/// Node of the BidNode, with its pods.
#[derive(Clone, Debug, Default)]
pub struct NodeView {
    /// Observed fields of the Node.
    pub facts: NodeFacts,
    /// Pods on the Node.
    pub pods: Vec<PodFacts>,
    /// Time since when the Node has no workload, in milliseconds since 1970; `None` while it has some.
    pub idle_ms: Option<i64>,
}

/// One BidNode and everything that its plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// BidNode object.
    pub object: &'a BidNode,
    /// Parsed specification, or why it is invalid.
    pub settings: Result<&'a Settings, &'a str>,
    /// Bids and allocations of the BidNode.
    pub owner: &'a Owner,
    /// Prices in the markets of the instance type.
    pub quotes: &'a BTreeMap<MarketName, Quote>,
    /// Whether both streams of the market are open and complete; otherwise the market data may be out of date.
    pub synced: bool,
    /// Region of BidNodes without one.
    pub default_region: Option<&'a str>,
    /// Nodes of the BidNode.
    pub nodes: &'a [NodeView],
    /// Nodes that waiting pods need from this BidNode.
    pub need: &'a Need,
    /// Whether so many Nodes of all BidNodes are not Ready that the cause is probably outside of them.
    pub fleet_unhealthy: bool,
    /// Current time in milliseconds since 1970.
    pub now_ms: i64,
    /// Intervals and time limits.
    pub times: &'a Times,
}
