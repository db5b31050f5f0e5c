//! Counts of nodes by kind. Bids count their own units consistently; the health of a Node and its drain come from the cluster.

use coracle_api::bidnode::names;
use coracle_auction::AllocationState;

use super::input::{NodeView, Observed};
use crate::{
    ids::{AllocationName, MarketName},
    observe::bids::Allocation,
};

/// Nodes of a BidNode by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Desired nodes.
    pub desired: u32,
    /// Ready nodes that are not leaving.
    pub active: u32,
    /// Matched or provisioning allocations.
    pub in_flight: u32,
    /// Units waiting in the order book.
    pub open: u32,
    /// Allocations under notice or being drained.
    pub leaving: u32,
    /// Nodes that count towards desired: active, in flight and open ones of the requested type.
    pub have: u32,
    /// Running allocations of a type or region that is no longer requested and that are not leaving yet.
    pub outdated: u32,
    /// Active allocations whose Node is missing, or has not been Ready for too long.
    pub unhealthy: u32,
    /// All active allocations.
    pub running: u32,
    /// Whether many Nodes of all BidNodes are not Ready.
    pub fleet_unhealthy: bool,
}

impl Counts {
    /// Whether so many nodes are unhealthy that the cause is probably outside of them.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.fleet_unhealthy && self.unhealthy > 0 || self.unhealthy >= 2 && self.unhealthy * 5 > self.running
    }
}

/// Health of the Node of an active allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The Node is Ready, or has not been Ready for a short time only.
    Good,
    /// The Node has not been Ready for so long that it no longer counts.
    Lost,
    /// The Node has not been Ready for so long that its allocation is released.
    Dead,
}

/// Health of an active allocation. A missing Node counts as a Node that never was Ready.
pub(super) fn health(o: &Observed<'_>, allocation: &Allocation, view: Option<&NodeView>) -> Health {
    let since = match view {
        Some(view) if view.facts.ready => return Health::Good,
        Some(view) => view.facts.since_ms.max(allocation.active_ms),
        None => allocation.active_ms,
    };
    let ill = o.now_ms - since;
    if ill >= o.times.unhealthy_ms {
        Health::Dead
    } else if ill >= o.times.lost_ms {
        Health::Lost
    } else {
        Health::Good
    }
}

/// Returns the Node of an allocation.
pub(super) fn view_of<'a>(o: &Observed<'a>, allocation: &AllocationName) -> Option<&'a NodeView> {
    o.nodes.iter().find(|view| view.facts.allocation == *allocation)
}

/// Whether the controller drains the Node.
pub(super) fn is_draining(view: &NodeView) -> bool {
    view.facts.draining_ms.is_some()
}

/// Whether the Node counts as active.
pub(crate) fn is_active(o: &Observed<'_>, view: &NodeView) -> bool {
    if is_draining(view) || view.facts.deleting || view.facts.is_tainted(names::PREEMPTING) {
        return false;
    }
    match o.owner.allocations.get(&view.facts.allocation) {
        Some(allocation) if allocation.state == AllocationState::Active => {
            health(o, allocation, Some(view)) == Health::Good
        }
        Some(_) => false,
        // While the market is unreachable, the cluster's view decides.
        None => !o.synced && view.facts.ready,
    }
}

/// Whether the specification now names another type or region than those of the market.
pub(super) fn is_outdated(o: &Observed<'_>, market: &MarketName) -> bool {
    let Ok(settings) = o.settings else { return false };
    let (kind, region) = market.parts();
    kind != settings.instance_type || settings.region.as_deref().is_some_and(|r| r != region)
}

/// Counts the nodes of a BidNode.
pub(super) fn count(o: &Observed<'_>) -> Counts {
    let mut c = Counts { fleet_unhealthy: o.fleet_unhealthy, ..Counts::default() };
    let mut outdated_running = 0u32;
    for bid in o.owner.bids.values() {
        c.open += bid.open;
        c.in_flight += bid.matched + bid.provisioning;
        c.leaving += bid.preempting;
        c.running += bid.active;
        if is_outdated(o, &bid.market) {
            outdated_running += bid.active;
        } else {
            c.have += bid.open + bid.live();
        }
    }
    let (mut gone, mut gone_outdated) = (0u32, 0u32);
    for (id, allocation) in o.owner.allocations.iter().filter(|(_, u)| u.state == AllocationState::Active) {
        let view = view_of(o, id);
        let draining = view.is_some_and(is_draining);
        let ill = health(o, allocation, view) != Health::Good;
        c.leaving += u32::from(draining);
        c.unhealthy += u32::from(ill && !draining);
        let lost = &mut if is_outdated(o, &allocation.market) { &mut gone_outdated } else { &mut gone };
        **lost += u32::from(draining || ill);
    }
    c.active = u32::try_from(o.nodes.iter().filter(|view| is_active(o, view)).count()).unwrap_or(u32::MAX);
    if c.is_degraded() {
        // Repairs are suspended: unhealthy nodes are neither replaced nor released.
        gone = gone.saturating_sub(c.unhealthy);
    }
    c.have = c.have.saturating_sub(gone);
    c.outdated = outdated_running.saturating_sub(gone_outdated);
    c
}
