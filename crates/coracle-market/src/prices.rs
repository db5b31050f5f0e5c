//! Prices as they change, for readers of every door. One frame is made for all of them.

use std::collections::VecDeque;
use std::sync::Arc;

use coracle_auction::Event;
use coracle_proto::market as pb;
use futures_util::Stream;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use crate::convert;
use crate::service::Service;
use crate::writer::Slot;

/// What changed a market's published prices.
#[derive(Debug)]
pub(crate) struct Moved {
    pub(crate) market: u32,
    pub(crate) frames: Vec<pb::PriceFrame>,
}

/// The frames of a group's events. None: no price moved.
pub(crate) fn moved(no: u32, slot: &Slot, events: &[Event]) -> Option<Moved> {
    let kinds = events.iter().filter_map(|event| match event {
        Event::Call { .. } => Some("call"),
        Event::Indicative { .. } => Some("indicative"),
        Event::Halted { .. } => Some("halt"),
        _ => None,
    });
    let frames: Vec<_> = kinds.map(|kind| frame(slot, kind)).collect();
    (!frames.is_empty()).then_some(Moved { market: no, frames })
}

fn frame(slot: &Slot, kind: &str) -> pb::PriceFrame {
    let price = convert::price(slot);
    pb::PriceFrame { seq: price.seq, market: price.market.clone(), r#type: kind.into(), price: Some(price) }
}

/// The present prices of the markets named, or of all, that are newer than `after`.
fn present(service: &Service, only: &[u32], kind: &str, after: Option<u64>) -> VecDeque<pb::PriceFrame> {
    let all = service.markets().into_iter().filter(|no| only.is_empty() || only.contains(no));
    let frames = all.filter_map(|no| service.writer.read(no, |slot| frame(slot, kind)).ok());
    frames.filter(|frame| after.is_none_or(|after| frame.seq > after)).collect()
}

struct Reader {
    service: Arc<Service>,
    only: Vec<u32>,
    moves: Receiver<Arc<Moved>>,
    ready: VecDeque<pb::PriceFrame>,
}

/// The present prices, then each change. With `from_seq`, what a reader has already is left out and the rest is a
/// `gap`: something may have been missed. So is what comes after more changes than are kept for a slow reader.
pub(crate) fn stream(
    service: Arc<Service>,
    only: Vec<u32>,
    from_seq: Option<u64>,
) -> impl Stream<Item = pb::PriceFrame> + Send + 'static {
    // First the ear, then the look: what happens between the two is told twice, not never.
    let moves = service.writer.prices.subscribe();
    let kind = if from_seq.is_some() { "gap" } else { "price" };
    let ready = present(&service, &only, kind, from_seq);
    futures_util::stream::unfold(Reader { service, only, moves, ready }, |mut reader| async move {
        loop {
            if let Some(frame) = reader.ready.pop_front() {
                return Some((frame, reader));
            }
            match reader.moves.recv().await {
                Ok(moved) if reader.only.is_empty() || reader.only.contains(&moved.market) => {
                    reader.ready.extend(moved.frames.iter().cloned());
                }
                Ok(_) => {}
                Err(RecvError::Lagged(_)) => {
                    reader.ready = present(&reader.service, &reader.only, "gap", None)
                }
                Err(RecvError::Closed) => return None,
            }
        }
    })
}
