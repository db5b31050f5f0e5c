//! Presence of suppliers, and gaps in the service of the market. Pure: the caller passes the time.

use std::collections::BTreeMap;

use crate::{Command, LotState, Market, SupplierNo, Time};

/// Silence after which lots take no new allocations, in milliseconds.
const SILENT_MS: u64 = 30_000;
/// Silence after which allocations are lost, in milliseconds.
const LOST_MS: u64 = 120_000;
/// Longest gap in which the market still counts as served, in milliseconds.
const GAP_MS: u64 = 5_000;

/// Time when each supplier was last heard. Not journaled; only the consequences of silence are.
#[derive(Clone, Debug, Default)]
pub struct Presence {
    heard: BTreeMap<SupplierNo, Time>,
    /// Start from which silences are counted: before it, no supplier could be heard.
    since: Time,
}

impl Presence {
    /// Records that a supplier was heard.
    pub fn heard(&mut self, supplier: SupplierNo, now: Time) {
        self.heard.insert(supplier, now);
    }

    /// Records that the market was not served before `now`: all silences are counted from there.
    pub fn restart(&mut self, now: Time) {
        self.since = self.since.max(now);
    }

    /// Commands that bring the lots of a market into the states that follow from presence and silence. Empty if the lots are in
    /// these states, so this may be called at any time and again after a failure.
    #[must_use]
    pub fn commands(&self, market: &Market, now: Time) -> Vec<Command> {
        let mut commands = BTreeMap::new();
        for (_, lot) in market.lots() {
            let supplier = lot.supplier();
            let last = self.heard.get(&supplier).copied().unwrap_or(Time(0)).max(self.since);
            let command = match (lot.state(), now.since_ms(last)) {
                (LotState::Open | LotState::Silent, LOST_MS..) => Command::Lost { supplier },
                (LotState::Draining, LOST_MS..) if lot.is_occupied() => Command::Lost { supplier },
                (LotState::Open, SILENT_MS..) => Command::Silent { supplier },
                // Only its own report brings a supplier back, not a reset of the silence.
                (LotState::Silent | LotState::Lost, ..SILENT_MS)
                    if self.heard.get(&supplier) == Some(&last) =>
                {
                    Command::Heard { supplier }
                }
                _ => continue,
            };
            commands.insert(supplier, command);
        }
        commands.into_values().collect()
    }
}

/// Detects a standstill of the market: a full disk, a suspended process or host, a step of the clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Continuity {
    last: Option<Time>,
}

impl Continuity {
    /// Whether no command could be applied for more than 5 s before `now`. Then [`Command::Restarted`] must come first.
    #[must_use]
    pub fn has_gap(&self, now: Time) -> bool {
        self.last.is_some_and(|last| now.since_ms(last) > GAP_MS)
    }

    /// Records that commands were, or could have been, applied at `now`.
    pub fn served(&mut self, now: Time) {
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LotNo, Params, Price};

    #[test]
    fn silence_table() {
        let supplier = SupplierNo(1);
        let mut market = Market::new(Params::new(Price::micros(10), Price::micros(30)), Time(0));
        let mut out = Vec::new();
        market.apply(Time(0), &Command::PutLot { lot: LotNo(1), supplier, slots: 1, notice_ms: 1 }, &mut out);
        let mut presence = Presence::default();
        presence.heard(supplier, Time(10_000));
        let mut at = |presence: &Presence, ms, apply: bool| {
            let commands = presence.commands(&market, Time(ms));
            for command in commands.iter().filter(|_| apply) {
                market.apply(Time(ms), command, &mut out);
            }
            commands
        };
        assert_eq!(at(&presence, 39_999, true), [], "29.999 s of silence");
        assert_eq!(at(&presence, 40_000, false), [Command::Silent { supplier }]);
        assert_eq!(
            at(&presence, 40_001, true),
            [Command::Silent { supplier }],
            "again, as it was not applied"
        );
        assert_eq!(at(&presence, 129_999, true), [], "applied");
        presence.restart(Time(129_999));
        assert_eq!(at(&presence, 240_000, true), [], "counted from the restart");
        assert_eq!(at(&presence, 249_999, true), [Command::Lost { supplier }]);
        presence.heard(supplier, Time(250_000));
        assert_eq!(at(&presence, 250_000, true), [Command::Heard { supplier }], "back");
        assert_eq!(at(&presence, 250_001, true), []);
    }

    #[test]
    fn gap_of_more_than_five_seconds_is_a_restart() {
        let mut continuity = Continuity::default();
        assert!(!continuity.has_gap(Time(9_000_000)), "never served");
        continuity.served(Time(1_000));
        assert!(!continuity.has_gap(Time(6_000)));
        assert!(continuity.has_gap(Time(6_001)));
    }
}
