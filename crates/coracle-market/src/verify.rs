//! Verification of a market's store: replays the journal and compares all derived data: calls, charges, and the snapshot with
//! its allocations. Memory is bounded by one page of the journal.

use std::time::Duration;

use coracle_auction::codec::Codec;
use coracle_auction::{Journaled, Market, Params, Time};

use crate::error::StoreError;
use crate::recover::{PAGE, project};
use crate::store::{ChargeRow, JournalVerification, Projections, Store, chain_hash};

/// Longest delay of derived rows after the journal.
const LAG: Duration = Duration::from_secs(1);

/// A replay under way.
struct Replay<'a> {
    store: &'a Store,
    no: u32,
    market: Market,
    seq: i64,
    chain: [u8; 32],
    snapshot: Option<(i64, Vec<u8>, [u8; 32])>,
    /// Calls before this time are rolled up into bars.
    rolled_to: i64,
    charges: i64,
    calls: i64,
}

/// Compares a store with the replay of its journal. `applied`: number of the last command that the running market has applied;
/// the journal must not end before it.
///
/// # Errors
/// The store does not answer. Differences of its contents are in the result.
pub(crate) async fn verify(
    store: &Store,
    no: u32,
    (params, since): (Params, Time),
    applied: i64,
) -> Result<JournalVerification, StoreError> {
    let mut replay = Replay {
        store,
        no,
        market: Market::new(params, since),
        seq: 0,
        chain: [0; 32],
        snapshot: store.snapshot(no).await?,
        rolled_to: store.rolled_to(no).await?,
        charges: 0,
        calls: 0,
    };
    let wrong = match replay.compare(applied).await {
        Err(e @ (StoreError::Chain { .. } | StoreError::Malformed { .. })) => Some(e.to_string()),
        Err(e) => return Err(e),
        Ok(wrong) => wrong,
    };
    let commands = u64::try_from(replay.seq).unwrap_or(0);
    Ok(JournalVerification { commands, sound: wrong.is_none(), detail: wrong.unwrap_or_default() })
}

impl Replay<'_> {
    /// Returns the first difference.
    async fn compare(&mut self, applied: i64) -> Result<Option<String>, StoreError> {
        if let Some(wrong) = self.catch_up().await? {
            return Ok(Some(wrong));
        }
        if self.seq < applied {
            let seq = self.seq;
            return Ok(Some(format!("the journal ends at command {seq}, and {applied} were applied")));
        }
        if let Some((at, ..)) = self.snapshot.take() {
            return Ok(Some(format!("the snapshot is of command {at}, which the journal does not have")));
        }
        // Wait for rows that are being written.
        tokio::time::sleep(LAG).await;
        // More charges may be written between the two counts.
        let least = self.charges;
        let stored = self.store.charges_of(self.no).await?;
        let published = self.store.last_call(self.no).await?;
        if let Some(wrong) = self.catch_up().await? {
            return Ok(Some(wrong));
        }
        if !(least..=self.charges).contains(&stored) {
            let made = self.charges;
            return Ok(Some(format!("{stored} charges are stored, and the journal makes {made}")));
        }
        if published > self.calls {
            return Ok(Some(format!("call {published} was published and the journal does not have it")));
        }
        Ok(None)
    }

    /// Replays to the end of the journal, and compares each page.
    async fn catch_up(&mut self) -> Result<Option<String>, StoreError> {
        loop {
            let groups = self.store.groups(self.no, self.seq + 1, PAGE).await?;
            if groups.is_empty() {
                return Ok(None);
            }
            let (mut made, mut events) = (Projections::default(), Vec::new());
            for group in groups {
                let next = chain_hash(&self.chain, &group.body);
                if next != group.chain || group.seq != self.seq + 1 {
                    return Err(StoreError::Chain { market: self.no, seq: group.seq });
                }
                let mut from = group.body.as_slice();
                while !from.is_empty() {
                    let entry = Journaled::get(&mut from).map_err(|source| StoreError::Malformed {
                        what: "the journal",
                        market: self.no,
                        source,
                    })?;
                    self.market.apply(entry.at, &entry.command, &mut events);
                    self.seq += 1;
                    project(self.no, &events, &mut made);
                    events.clear();
                }
                self.chain = next;
                if let Some((_, body, chain)) = self.snapshot.take_if(|(at, ..)| *at == self.seq)
                    && (body != self.market.snapshot() || chain != self.chain)
                {
                    return Ok(Some(format!("the snapshot of command {} is not the market then", self.seq)));
                }
            }
            if let Some(wrong) = self.page(&made).await? {
                return Ok(Some(wrong));
            }
        }
    }

    async fn page(&mut self, made: &Projections) -> Result<Option<String>, StoreError> {
        for call in &made.calls {
            self.calls = call.number;
            let stored = self.store.call(self.no, call.number).await?;
            let wrong = match stored {
                Some(stored) => stored != *call,
                // The call has been rolled up, or is not written yet.
                None => call.at >= self.rolled_to && self.store.last_call(self.no).await? > call.number,
            };
            if wrong && self.store.rolled_to(self.no).await? <= call.at {
                return Ok(Some(format!("call {} was published otherwise", call.number)));
            }
        }
        let mut late = Vec::new();
        for row in &made.charges {
            self.charges += 1;
            match self.charge(row).await? {
                Charge::Same => {}
                Charge::Other => return Ok(Some(charge_difference(row, "another one"))),
                Charge::Missing => late.push(row),
            }
        }
        if late.is_empty() {
            return Ok(None);
        }
        // Wait for missing charges here and not at the end: until then there could be as many as in the whole journal.
        tokio::time::sleep(LAG).await;
        for row in late {
            match self.charge(row).await? {
                Charge::Same => {}
                Charge::Other => return Ok(Some(charge_difference(row, "another one"))),
                Charge::Missing => return Ok(Some(charge_difference(row, "missing"))),
            }
        }
        Ok(None)
    }

    async fn charge(&self, row: &ChargeRow) -> Result<Charge, StoreError> {
        Ok(match self.store.charge(row).await? {
            Some(stored) if stored == (row.ends, row.tenant, row.price) => Charge::Same,
            Some(_) => Charge::Other,
            None => Charge::Missing,
        })
    }
}

/// Comparison of a stored charge with the replayed one.
enum Charge {
    Same,
    Other,
    Missing,
}

fn charge_difference(row: &ChargeRow, how: &str) -> String {
    format!("the charge of {} from {} is {how}", row.allocation, row.starts)
}
