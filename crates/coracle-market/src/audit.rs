//! Audit: the journal has each command and its tenant, and a replay shows the effect.

use std::ops::Range;

use coracle_auction::{
    AllocationId, BidId, Command, Journaled, Market, Params, Price, Rejection, Reply, Time,
};

use crate::error::StoreError;
use crate::names;
use crate::recover::replay;
use crate::store::Store;

/// Command and its effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) seq: i64,
    pub(crate) at: Time,
    /// Tenant of the token that sent the command; 0: the market itself.
    pub(crate) who: u32,
    pub(crate) what: &'static str,
    pub(crate) subject: String,
    pub(crate) before: String,
    pub(crate) after: String,
    pub(crate) refused: Option<Rejection>,
}

enum Subject {
    Bid(BidId),
    Allocation(AllocationId),
    /// The object did not exist before.
    New,
    Market,
}

/// Describes the commands `seqs` of a market. Reads the journal from its beginning.
pub(crate) async fn audit(
    store: &Store,
    no: u32,
    start: (Params, Time),
    seqs: Range<i64>,
) -> Result<Vec<Told>, StoreError> {
    let mut told = Vec::new();
    replay(store, no, start, |market, seq, who, entry, events| {
        if seqs.contains(&seq) {
            told.push(audit_entry(no, market, seq, who, entry, events));
        } else {
            market.apply(entry.at, &entry.command, events);
        }
        seq + 1 < seqs.end
    })
    .await?;
    Ok(told)
}

/// Applies one command and describes its effect.
fn audit_entry(
    no: u32,
    market: &mut Market,
    seq: i64,
    who: u32,
    entry: &Journaled,
    events: &mut Vec<coracle_auction::Event>,
) -> Told {
    let (what, subject) = command_subject(&entry.command);
    let before = subject_state(market, &subject);
    let reply = market.apply(entry.at, &entry.command, events);
    let subject = match (subject, reply) {
        (Subject::New, Reply::Bid { bid, .. }) => Subject::Bid(bid),
        (subject, _) => subject,
    };
    let refused = if let Reply::Refused(refusal) = reply { Some(refusal) } else { None };
    let (at, after) = (market.now(), subject_state(market, &subject));
    Told { seq, at, who, what, subject: name(no, market, &subject), before, after, refused }
}

fn command_subject(command: &Command) -> (&'static str, Subject) {
    match command {
        Command::Tick => ("tick", Subject::Market),
        Command::Restarted => ("restarted", Subject::Market),
        Command::Configure { .. } => ("configure", Subject::Market),
        Command::Halt => ("halt", Subject::Market),
        Command::Resume => ("resume", Subject::Market),
        Command::Budget { .. } => ("budget", Subject::Market),
        Command::Place { .. } => ("place", Subject::New),
        Command::Amend { amendment } => ("amend", Subject::Bid(amendment.bid)),
        Command::Cancel { bid, .. } => ("cancel", Subject::Bid(*bid)),
        Command::Release { allocation, .. } => ("release", Subject::Allocation(*allocation)),
        Command::Substitute { victim, .. } => ("substitute", Subject::Allocation(*victim)),
        Command::Renew { .. } => ("renew", Subject::Market),
        Command::PutLot { .. } => ("put-lot", Subject::Market),
        Command::DrainLot { .. } => ("drain-lot", Subject::Market),
        Command::Heard { .. } => ("supplier-heard", Subject::Market),
        Command::Silent { .. } => ("supplier-silent", Subject::Market),
        Command::Lost { .. } => ("supplier-lost", Subject::Market),
        Command::Gone { allocation, .. } => ("gone", Subject::Allocation(*allocation)),
        Command::Report { allocation, .. } => ("report", Subject::Allocation(*allocation)),
    }
}

fn name(no: u32, market: &Market, subject: &Subject) -> String {
    match subject {
        Subject::Bid(id) => market.bid(*id).map_or_else(String::new, |b| names::bid(no, b.placed_at(), *id)),
        Subject::Allocation(id) => {
            market.allocation(*id).map_or_else(String::new, |a| names::allocation(no, a.matched_at(), *id))
        }
        Subject::New | Subject::Market => String::new(),
    }
}

fn subject_state(market: &Market, subject: &Subject) -> String {
    match subject {
        Subject::Bid(id) => market.bid(*id).map_or_else(String::new, |bid| {
            let u = bid.units();
            format!(
                "{} units at {}, {}: {} open, {} live",
                u.total(),
                bid.limit(),
                bid.state().as_str(),
                u.open,
                u.live()
            )
        }),
        Subject::Allocation(id) => market.allocation(*id).map_or_else(String::new, |row| {
            let price = market.price(*id).unwrap_or(Price::ZERO);
            format!("{} at {price}, limit {}", row.state().as_str(), row.limit())
        }),
        Subject::New => String::new(),
        Subject::Market => {
            let q = market.quotes();
            let state = if q.halted { "halted" } else { "open" };
            format!("{state}, reserve {}, cap {}, clearing {}, {} free", q.reserve, q.cap, q.clearing, q.free)
        }
    }
}
