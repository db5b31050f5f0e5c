//! Nodes by kind. Bids count their units themselves, each at one instant; only what a unit cannot know, whether its Node
//! is well and whether we empty it, is taken from elsewhere.

use coracle_api::bidnode::names;

use super::{NodeView, Observed};
use crate::mirror::{Unit, UnitState};

/// Nodes of a BidNode by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Wanted.
    pub desired: u32,
    /// Ready, and staying.
    pub active: u32,
    /// Won, and not active yet.
    pub in_flight: u32,
    /// Waiting in the book.
    pub open: u32,
    /// Under notice, or being emptied.
    pub leaving: u32,
    /// What counts towards desired: active, in flight and open, of the type that is asked for.
    pub have: u32,
    /// Running units of a type or region that is no longer asked for, not leaving yet.
    pub outdated: u32,
    /// Active units whose Node is gone or not Ready for too long.
    pub unhealthy: u32,
    /// Active units in all.
    pub running: u32,
}

impl Counts {
    /// So many are unhealthy at once that something else must be wrong (the contract, §10.4).
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.unhealthy >= 2 && self.unhealthy * 5 > self.running
    }
}

/// How the Node of an active unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Ready, or not for a moment.
    Good,
    /// Not Ready for so long that it no longer counts.
    Lost,
    /// Not Ready for so long that it is given up.
    Dead,
}

/// The health of an active unit. A Node that is not there is as bad as one that never was Ready.
pub(super) fn health(o: &Observed<'_>, unit: &Unit, view: Option<&NodeView>) -> Health {
    let since = match view {
        Some(view) if view.facts.ready => return Health::Good,
        Some(view) => view.facts.since_ms.max(unit.active_ms),
        None => unit.active_ms,
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

/// The Node of a unit.
pub(super) fn view_of<'a>(o: &Observed<'a>, unit: &str) -> Option<&'a NodeView> {
    o.nodes.iter().find(|view| view.facts.allocation == unit)
}

/// Is it emptied by us?
pub(super) fn is_draining(view: &NodeView) -> bool {
    view.facts.draining_ms.is_some()
}

/// Does the Node count as active?
pub(crate) fn is_active(o: &Observed<'_>, view: &NodeView) -> bool {
    if is_draining(view) || view.facts.is_tainted(names::PREEMPTING) {
        return false;
    }
    match o.owner.units.get(&view.facts.allocation) {
        Some(unit) if unit.state == UnitState::Active => health(o, unit, Some(view)) == Health::Good,
        Some(_) => false,
        // Without the market, what the cluster shows must do.
        None => !o.synced && view.facts.ready,
    }
}

/// A unit or bid of this market is no longer asked for: another type, or another region than the one that is named.
pub(super) fn is_outdated(o: &Observed<'_>, market: &str) -> bool {
    let Ok(settings) = o.settings else { return false };
    let (kind, region) = market.split_once('/').unwrap_or((market, ""));
    kind != settings.instance_type || settings.region.as_deref().is_some_and(|r| r != region)
}

/// Counts.
pub(super) fn count(o: &Observed<'_>) -> Counts {
    let mut c = Counts::default();
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
    for (id, unit) in o.owner.units.iter().filter(|(_, u)| u.state == UnitState::Active) {
        let view = view_of(o, id);
        let draining = view.is_some_and(is_draining);
        let ill = health(o, unit, view) != Health::Good;
        c.leaving += u32::from(draining);
        c.unhealthy += u32::from(ill && !draining);
        let lost = &mut if is_outdated(o, &unit.market) { &mut gone_outdated } else { &mut gone };
        **lost += u32::from(draining || ill);
    }
    c.active = u32::try_from(o.nodes.iter().filter(|view| is_active(o, view)).count()).unwrap_or(u32::MAX);
    if c.is_degraded() {
        // Held repairs: what is ill is neither replaced nor given up.
        gone = gone.saturating_sub(c.unhealthy);
    }
    c.have = c.have.saturating_sub(gone);
    c.outdated = outdated_running.saturating_sub(gone_outdated);
    c
}
