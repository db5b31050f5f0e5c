//! Groups of commands: encoded for the journal, then applied and answered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use coracle_auction::codec::Codec;
use coracle_auction::{AllocationId, Command, Event, Journaled, Price, Time};

use super::{Answer, Applied, Batch, MARKET_ITSELF, WriterTask, next_tick};
use crate::error::RequestError;
use crate::prices::price_frames;
use crate::recover::project;
use crate::store::{Group, chain_hash};

/// Commands of one market on their way into one group.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    pub(super) commands: Vec<Command>,
    /// Tenant of each command, in the form of the journal.
    pub(super) who: Vec<u8>,
    pub(super) answers: Vec<(Answer, usize)>,
}

impl Waiting {
    /// Puts a command of the market itself before all others.
    pub(super) fn put_first(&mut self, command: Command) {
        self.commands.insert(0, command);
        let mut who = Vec::new();
        MARKET_ITSELF.put(&mut who);
        who.append(&mut self.who);
        self.who = who;
    }
}

/// Part of a group that concerns one market, from encoding to answers.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) market: u32,
    at: Time,
    pub(super) waiting: Waiting,
    /// Number of the last command.
    seq: i64,
    pub(super) chain: [u8; 32],
}

impl WriterTask {
    pub(super) fn encode(&self, at: Time, waiting: BTreeMap<u32, Waiting>) -> (Vec<Group>, Vec<Entry>) {
        let markets = self.writer.markets.read();
        let (mut groups, mut entries) = (Vec::new(), Vec::new());
        for (market, mut waiting) in waiting {
            let Some(state) = markets.get(&market) else {
                for (answer, _) in waiting.answers {
                    answer.send(Err(RequestError::not_found())).unwrap_or_default();
                }
                continue;
            };
            let before = self.journaled.iter().find(|entry| entry.market == market);
            let (seq, chain) = before.map_or((state.seq, &state.chain), |entry| (entry.seq, &entry.chain));
            let mut body = Vec::with_capacity(waiting.commands.len() * 64);
            for command in &waiting.commands {
                at.put(&mut body);
                command.put(&mut body);
            }
            let chain = chain_hash(chain, &body);
            let count = i64::try_from(waiting.commands.len()).unwrap_or(i64::MAX);
            let who = std::mem::take(&mut waiting.who);
            groups.push(Group { market, seq: seq + 1, count, body, who, chain });
            entries.push(Entry { market, at, waiting, seq: seq + count, chain });
        }
        (groups, entries)
    }

    /// Applies and answers the groups that are in the journal.
    pub(super) fn perform_journaled(&mut self) {
        for entry in std::mem::take(&mut self.journaled) {
            self.perform(entry);
        }
    }

    /// Applies a journaled group, publishes its events and answers its callers.
    fn perform(&mut self, entry: Entry) {
        let Entry { market: no, at, waiting, seq, chain } = entry;
        let mut replies = Vec::with_capacity(waiting.commands.len());
        let mut events = Vec::new();
        let metrics = &self.health.metrics;
        let mut markets = self.writer.markets.write();
        let Some(state) = markets.get_mut(&no) else { return };
        for command in &waiting.commands {
            let before = events.len();
            let called = (state.market.next_call() <= at).then(Instant::now);
            let reply = state.market.apply(at, command, &mut events);
            if let Some(started) = called
                && events[before..].iter().any(|event| matches!(event, Event::Call { .. }))
            {
                metrics.observe_call(started.elapsed());
            }
            metrics.count(command, &reply);
            replies.push(reply);
            project(no, &events[before..], &mut self.made);
            note_risk(&mut state.at_risk, &events[before..]);
        }
        metrics.observe(&state.name, &state.market, &events);
        (state.seq, state.chain) = (seq, chain);
        state.since_snapshot += waiting.commands.len() as u64;
        self.wake = self.wake.min(next_tick(state));
        let moved =
            if self.writer.prices.receiver_count() > 0 { price_frames(no, state, &events) } else { None };
        drop(markets);
        let batch = Batch { market: no, seq: u64::try_from(seq).unwrap_or(0), events };
        // The send fails if there are no readers.
        self.writer.events.send(Arc::new(batch)).map(drop).unwrap_or_default();
        if let Some(moved) = moved {
            self.writer.prices.send(Arc::new(moved)).map(drop).unwrap_or_default();
        }
        let mut replies = replies.into_iter();
        let ticks = waiting.commands.len() - waiting.answers.iter().map(|(_, count)| count).sum::<usize>();
        replies.by_ref().take(ticks).for_each(drop);
        for (answer, count) in waiting.answers {
            let applied = Applied { replies: replies.by_ref().take(count).collect(), at };
            // A caller that has gone can repeat its request with its idempotency key.
            answer.send(Ok(applied)).map(drop).unwrap_or_default();
        }
    }

    /// Applies a group that was stored although its callers received an error.
    pub(super) fn perform_late(&mut self, group: &Group) {
        let (mut from, mut commands, mut at) = (group.body.as_slice(), Vec::new(), self.last);
        while let Ok(entry) = Journaled::get(&mut from) {
            at = entry.at;
            commands.push(entry.command);
        }
        let seq = group.seq + group.count - 1;
        let waiting = Waiting { commands, ..Waiting::default() };
        self.perform(Entry { market: group.market, at, waiting, seq, chain: group.chain });
    }
}

fn note_risk(at_risk: &mut BTreeMap<AllocationId, Price>, events: &[Event]) {
    for event in events {
        match event {
            Event::AtRisk { allocation, price_to_keep, .. } => {
                at_risk.insert(*allocation, *price_to_keep);
            }
            Event::RiskOver { allocation } => drop(at_risk.remove(allocation)),
            Event::Call { .. } => at_risk.clear(),
            _ => {}
        }
    }
}
