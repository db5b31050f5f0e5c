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

/// A Node of the BidNode and its pods.
#[derive(Clone, Debug, Default)]
pub struct NodeView {
    /// The Node.
    pub facts: NodeFacts,
    /// Pods on the Node.
    pub pods: Vec<PodFacts>,
    /// Time since when it has no workload, in milliseconds since 1970; `None` while it has some.
    pub idle_ms: Option<i64>,
}

/// One BidNode and everything that its plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// The object.
    pub object: &'a BidNode,
    /// Its parsed specification, or why that is invalid.
    pub settings: Result<&'a Settings, &'a str>,
    /// Its bids and allocations.
    pub owner: &'a Owner,
    /// Markets of its type.
    pub quotes: &'a BTreeMap<MarketName, Quote>,
    /// Whether both streams of the market live; without them the market data may be old.
    pub synced: bool,
    /// Region of BidNodes without one.
    pub default_region: Option<&'a str>,
    /// Its Nodes.
    pub nodes: &'a [NodeView],
    /// Nodes that waiting pods need from it.
    pub need: &'a Need,
    /// Whether so many Nodes of all BidNodes are not Ready that a cause outside of them is likely.
    pub fleet_ill: bool,
    /// Now, in milliseconds since 1970.
    pub now_ms: i64,
    /// Intervals and limits of time.
    pub times: &'a Times,
}
