//! Stream of price changes for the readers of every API.

use std::collections::VecDeque;
use std::sync::Arc;

use coracle_proto::market as pb;
use futures_util::Stream;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use crate::prices::{Moved, frame};
use crate::service::Service;

/// Present prices of the given markets, or of all, if they are newer than `after`.
fn current_frames(
    service: &Service,
    only: &[u32],
    kind: &str,
    after: Option<u64>,
) -> VecDeque<pb::PriceFrame> {
    let all = service.markets().into_iter().filter(|no| only.is_empty() || only.contains(no));
    let frames = all.filter_map(|no| service.writer.read(no, |state| frame(state, kind)).ok());
    frames.filter(|frame| after.is_none_or(|after| frame.seq > after)).collect()
}

struct Reader {
    service: Arc<Service>,
    only: Vec<u32>,
    moves: Receiver<Arc<Moved>>,
    ready: VecDeque<pb::PriceFrame>,
}

/// Streams the present prices, then each change. With `from_seq`, prices that the reader has already are left out, and the
/// others are marked as `gap`, because changes may have been missed. The same happens when a slow reader loses changes.
pub(crate) fn stream(
    service: Arc<Service>,
    only: Vec<u32>,
    from_seq: Option<u64>,
) -> impl Stream<Item = pb::PriceFrame> + Send + 'static {
    // Subscribes before reading, so that a change in between is sent twice instead of never.
    let moves = service.writer.prices.subscribe();
    let kind = if from_seq.is_some() { "gap" } else { "price" };
    let ready = current_frames(&service, &only, kind, from_seq);
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
                    reader.ready = current_frames(&reader.service, &reader.only, "gap", None)
                }
                Err(RecvError::Closed) => return None,
            }
        }
    })
}
