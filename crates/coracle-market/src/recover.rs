//! Recovery of a market from snapshot and journal, and verification of the journal.

use coracle_auction::codec::Codec;
use coracle_auction::{Event, Journaled, Market, Params, Time};

use crate::error::StoreError;
use crate::names;
use crate::signed::saturating_i64;
use crate::store::{CallRow, ChargeRow, Projections, Store, chain_hash};

/// Number of groups that are read at once.
pub(crate) const PAGE: i64 = 16;

/// Recovered market, and the position in its journal up to which it was replayed.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) market: Market,
    /// Number of the last command.
    pub(crate) seq: i64,
    pub(crate) chain: [u8; 32],
    /// Number of commands replayed after the snapshot.
    pub(crate) replayed: u64,
    pub(crate) made: Projections,
}

/// Recovers a market from its snapshot and journal; with `whole`, replays it from the first command.
pub(crate) async fn recover(
    store: &Store,
    no: u32,
    (params, since): (Params, Time),
    whole: bool,
) -> Result<Recovered, StoreError> {
    let snapshot = if whole { None } else { store.snapshot(no).await? };
    let mut r = match snapshot {
        None => Recovered {
            market: Market::new(params, since),
            seq: 0,
            chain: [0; 32],
            replayed: 0,
            made: Projections::default(),
        },
        Some((seq, body, chain)) => {
            let market = Market::restore(&body).map_err(|source| StoreError::Malformed {
                what: "the snapshot",
                market: no,
                source,
            })?;
            Recovered { market, seq, chain, replayed: 0, made: Projections::default() }
        }
    };
    let (seq, chain, mut events) = (r.seq, r.chain, Vec::new());
    let Recovered { market, made, replayed, .. } = &mut r;
    let from = (seq, chain);
    let end = walk(store, no, from, |_, _, entry| {
        market.apply(entry.at, &entry.command, &mut events);
        *replayed += 1;
        project(no, &events, made);
        events.clear();
        true
    })
    .await?;
    (r.seq, r.chain) = end;
    Ok(r)
}

/// Passes each command of a market, with its number and tenant, to `each`, which applies it. Starts at the first command and
/// ends when `each` returns false.
pub(crate) async fn replay(
    store: &Store,
    no: u32,
    (params, since): (Params, Time),
    mut each: impl FnMut(&mut Market, i64, u32, &Journaled, &mut Vec<Event>) -> bool,
) -> Result<(), StoreError> {
    let (mut market, mut events) = (Market::new(params, since), Vec::new());
    let all = walk(store, no, (0, [0; 32]), |seq, who, entry| {
        events.clear();
        each(&mut market, seq, who, entry, &mut events)
    });
    all.await.map(drop)
}

/// Reads the journal after a command and verifies its chain. Returns the number and chain of the last command.
async fn walk(
    store: &Store,
    no: u32,
    (mut seq, mut chain): (i64, [u8; 32]),
    mut each: impl FnMut(i64, u32, &Journaled) -> bool,
) -> Result<(i64, [u8; 32]), StoreError> {
    loop {
        let groups = store.groups(no, seq + 1, PAGE).await?;
        if groups.is_empty() {
            return Ok((seq, chain));
        }
        for group in groups {
            let next = chain_hash(&chain, &group.body);
            if next != group.chain || group.seq != seq + 1 {
                return Err(StoreError::Chain { market: no, seq: group.seq });
            }
            let (mut from, mut who) = (group.body.as_slice(), group.who.as_slice());
            let mut number = group.seq;
            while !from.is_empty() {
                let entry = Journaled::get(&mut from).map_err(|source| StoreError::Malformed {
                    what: "the journal",
                    market: no,
                    source,
                })?;
                // Groups of older stores do not record the tenant.
                if !each(number, u32::get(&mut who).unwrap_or(0), &entry) {
                    return Ok((number, next));
                }
                number += 1;
            }
            (seq, chain) = (group.seq + group.count - 1, next);
        }
    }
}

/// Derives rows of the history and of charges from events.
pub(crate) fn project(no: u32, events: &[Event], made: &mut Projections) {
    for event in events {
        match event {
            Event::Call { record } => made.calls.push(CallRow {
                market: no,
                number: saturating_i64(record.number),
                at: saturating_i64(record.at.0),
                price: record.price.as_micros(),
                chain: record.chain,
            }),
            // The event has the name, because the command that charges the allocation may also remove it.
            Event::Charge { allocation, matched_at, tenant, from, to, price, reason } => {
                made.charges.push(ChargeRow {
                    allocation: names::allocation(no, *matched_at, *allocation),
                    tenant: tenant.0,
                    starts: saturating_i64(from.0),
                    ends: saturating_i64(to.0),
                    price: price.as_micros(),
                    reason: reason.as_str(),
                });
            }
            _ => {}
        }
    }
}

/// Finds the first published call that differs from its replay. Old published calls have been rolled up, so some are missing;
/// replayed ones have no gaps. Pure.
pub(crate) fn mismatch(published: &[CallRow], replayed: &[CallRow]) -> Option<String> {
    let first = replayed.first().map_or(1, |call| call.number);
    let same = |call: &CallRow| {
        let place = usize::try_from(call.number - first).ok();
        place.and_then(|place| replayed.get(place)) == Some(call)
    };
    let wrong = published.iter().filter(|call| call.number >= first).find(|call| !same(call))?;
    let last = replayed.last().map_or(0, |call| call.number);
    Some(if wrong.number > last {
        format!("call {} was published and the journal does not have it", wrong.number)
    } else {
        format!("call {} was published otherwise", wrong.number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_compared_by_their_numbers() {
        let call = |number| CallRow { market: 1, number, at: number * 30_000, price: 5, chain: [7; 32] };
        let replayed: Vec<_> = (1..=9).map(call).collect();
        let other = CallRow { price: 6, ..call(4) };
        for (why, published, from, want) in [
            ("all", (1..=9).map(call).collect(), 0, ""),
            ("the first grew old", (5..=9).map(call).collect(), 0, ""),
            ("the last is not written yet", (1..=8).map(call).collect(), 0, ""),
            ("only the tail was replayed", (1..=9).map(call).collect(), 6, ""),
            ("another price", vec![call(3), other, call(5)], 0, "call 4 was published otherwise"),
            ("too many", (9..=10).map(call).collect(), 0, "call 10 was published and the journal"),
            ("before the tail", vec![other], 5, ""),
        ] {
            let said = mismatch(&published, &replayed[from..]).unwrap_or_default();
            assert!(said.starts_with(want) && said.is_empty() == want.is_empty(), "{why}: {said}");
        }
    }
}
