//! Observation: caches of the cluster and the market, and the snapshot that the planner reads.

pub mod bids;
pub(crate) mod cluster;
pub mod facts;
pub(crate) mod feed;
pub mod mirror;
pub(crate) mod packing;
pub(crate) mod watches;

use std::collections::BTreeMap;

use coracle_api::bidnode::BidNode;
use kube::ResourceExt as _;

use crate::{
    Context,
    ids::MarketName,
    plan::{NodeView, Observed, demand::Need},
    settings::{Settings, parse},
};
use bids::{Owner, Quote};

/// Input of one object's plan, read at one moment.
pub(crate) struct Snapshot {
    settings: Result<Settings, String>,
    pub(crate) owner: Owner,
    quotes: BTreeMap<MarketName, Quote>,
    synced: bool,
    nodes: Vec<NodeView>,
    need: Need,
    fleet_unhealthy: bool,
    now_ms: i64,
}

impl Snapshot {
    /// Reads the caches. Sends no request.
    pub(crate) fn take(cx: &Context, object: &BidNode) -> Self {
        let uid = object.uid().unwrap_or_default();
        let key = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
        Self {
            settings: parse(object, &cx.config.allowed_labels),
            synced: cx.mirror.is_synced(),
            owner: cx.mirror.owner(&uid),
            quotes: cx.mirror.quotes_of(&object.spec.instance_type),
            nodes: cx.cluster.nodes(&key),
            need: cx.cluster.need(&uid),
            fleet_unhealthy: cx.cluster.is_fleet_unhealthy(cx.now_ms(), cx.config.times.lost_ms),
            now_ms: cx.now_ms(),
        }
    }

    /// Input of the planner.
    pub(crate) fn observed<'a>(&'a self, cx: &'a Context, object: &'a BidNode) -> Observed<'a> {
        Observed {
            object,
            settings: self.settings.as_ref().map_err(String::as_str),
            owner: &self.owner,
            quotes: &self.quotes,
            synced: self.synced,
            default_region: cx.config.default_region.as_deref(),
            nodes: &self.nodes,
            need: &self.need,
            fleet_unhealthy: self.fleet_unhealthy,
            now_ms: self.now_ms,
            times: &cx.config.times,
        }
    }
}
