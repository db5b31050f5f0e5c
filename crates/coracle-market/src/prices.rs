//! Price changes as frames. Each frame is created once for the readers of every API.

use coracle_auction::Event;
use coracle_proto::market as pb;

use crate::convert;
use crate::state::MarketState;

/// Cause of a change of a market's published prices.
#[derive(Debug)]
pub(crate) struct Moved {
    pub(crate) market: u32,
    pub(crate) frames: Vec<pb::PriceFrame>,
}

/// Frames for the events of a group; `None`: no price changed.
pub(crate) fn price_frames(no: u32, state: &MarketState, events: &[Event]) -> Option<Moved> {
    let kinds = events.iter().filter_map(|event| match event {
        Event::Call { .. } => Some("call"),
        Event::Indicative { .. } => Some("indicative"),
        Event::Halted { .. } => Some("halt"),
        _ => None,
    });
    let frames: Vec<_> = kinds.map(|kind| frame(state, kind)).collect();
    (!frames.is_empty()).then_some(Moved { market: no, frames })
}

/// Creates a frame with the prices of a market.
pub(crate) fn frame(state: &MarketState, kind: &str) -> pb::PriceFrame {
    let price = convert::price(state);
    pb::PriceFrame { seq: price.seq, market: price.market.clone(), r#type: kind.into(), price: Some(price) }
}
