//! Choice of the market.

use super::{counts, input::Observed};
use crate::{ids::MarketName, settings::Settings};

/// Chooses the market. A region in the specification always wins. Otherwise, in this order: the market where an open bid waits,
/// unless it has waited too long; the default region; the market with free slots, then the cheapest, then the first by name.
pub(super) fn choose(o: &Observed<'_>, settings: &Settings) -> Option<MarketName> {
    let of = |region: &str| MarketName::new(&settings.instance_type, region);
    if let Some(region) = &settings.region {
        return Some(of(region));
    }
    let waits = o.owner.bids.values().filter(|b| b.open > 0 && !counts::is_outdated(o, &b.market));
    let oldest = waits.min_by_key(|b| b.placed_ms);
    if let Some(bid) = oldest.filter(|b| o.now_ms - b.placed_ms < o.times.region_ms) {
        return Some(bid.market.clone());
    }
    if let Some(region) = o.default_region.filter(|r| o.quotes.contains_key(&of(r))) {
        return Some(of(region));
    }
    let best = o.quotes.iter().min_by_key(|(name, q)| (q.free == 0, q.quote, (*name).clone()));
    let Some((best, quote)) = best else {
        // Without prices, keep the region of the status.
        return o.object.status.as_ref()?.region.as_deref().map(of);
    };
    // Moving an open bid helps only if the other market has free slots.
    match oldest {
        Some(bid) if quote.free == 0 => Some(bid.market.clone()),
        _ => Some(best.clone()),
    }
}
