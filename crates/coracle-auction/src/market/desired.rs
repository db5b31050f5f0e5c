//! Desired sets of suppliers, and the commands that follow from suppliers' observations. Both only read the market.
//!
//! ```text
//!   market ── complete set, changes ──▶ supplier        a machine that is not in the set must not run
//!      ▲                                   │
//!      └──── every machine, and the version of the set that the supplier knows ──┘
//! ```

use std::collections::BTreeMap;

use super::Market;
use crate::allocation::{AllocationState, Stage};
use crate::observed::{Desired, Machine, MachineState};
use crate::{AllocationId, Command, Fault, LotNo, SupplierNo, SupplierReport};

impl Market {
    /// Complete desired set of a supplier.
    pub fn desired(&self, supplier: SupplierNo) -> impl Iterator<Item = Desired> + '_ {
        let own = self.by_supplier.range((supplier, LotNo(0))..=(supplier, LotNo(u32::MAX)));
        own.flat_map(move |(_, no)| {
            let slots = self.lots.get(no).map_or(&[][..], |lot| &lot.slots);
            (0u32..)
                .zip(slots)
                .filter_map(move |(slot_no, slot)| self.desired_in(*no, slot_no, slot.occupant?))
        })
    }

    fn desired_in(&self, lot: LotNo, slot: u32, occupant: u32) -> Option<Desired> {
        let row = self.allocations.at(occupant)?;
        let allocation = self.allocation_id(occupant);
        Some(Desired { lot, slot, allocation, until: row.preempt_at(), reason: row.reason })
    }

    /// Entry of an allocation in the desired set; `None`: its machine must not run.
    #[must_use]
    pub fn desired_at(&self, lot: LotNo, slot: u32, allocation: AllocationId) -> Option<Desired> {
        let occupant = self.lots.get(&lot)?.slots.get(slot as usize)?.occupant?;
        self.desired_in(lot, slot, occupant).filter(|desired| desired.allocation == allocation)
    }

    /// Version of the desired sets, which rises with each change of any of them.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Commands that follow from the machines of a supplier that knows version `epoch` of the desired set. Empty if the market
    /// knows all of it already. A missing machine counts as gone only if the supplier knew that it must not run; otherwise the
    /// supplier may be about to start it.
    #[must_use]
    pub fn observed(&self, supplier: SupplierNo, epoch: u64, machines: &[Machine]) -> Vec<Command> {
        let mut commands = Vec::new();
        let mut there = BTreeMap::new();
        for machine in machines {
            let own = self.lots.get(&machine.lot).is_some_and(|lot| lot.supplier == supplier);
            if own {
                there.insert(machine.allocation, machine);
                let allocation = machine.allocation;
                let news = self.new_reports(machine).into_iter();
                commands.extend(news.map(|report| Command::Report { allocation, report }));
            }
        }
        for (_, no) in self.by_supplier.range((supplier, LotNo(0))..=(supplier, LotNo(u32::MAX))) {
            for (slot_no, slot) in (0u32..).zip(self.lots.get(no).map_or(&[][..], |lot| &lot.slots)) {
                let leaving = slot.leaving.filter(|l| l.epoch <= epoch && !there.contains_key(&l.allocation));
                commands.extend(leaving.map(|l| Command::Gone {
                    lot: *no,
                    slot: slot_no,
                    allocation: l.allocation,
                }));
            }
        }
        commands
    }

    /// Reports that follow from the state of a machine and are new for its allocation.
    fn new_reports(&self, machine: &Machine) -> Vec<SupplierReport> {
        let row = self.allocation(machine.allocation).filter(|row| row.slot() == (machine.lot, machine.slot));
        let Some(row) = row else { return Vec::new() };
        let starts = row.state == AllocationState::Provisioning;
        let runs = matches!(row.state, AllocationState::Active | AllocationState::Preempting);
        let registered = |node: &str| {
            (row.stage != Stage::Registered).then(|| SupplierReport::Registered { node: node.into() })
        };
        match &machine.state {
            MachineState::Running if starts && row.stage == Stage::Ordered => vec![SupplierReport::Launched],
            MachineState::Registered { node } if starts => registered(node).into_iter().collect(),
            MachineState::Ready { node } if starts => {
                registered(node).into_iter().chain([SupplierReport::Ready]).collect()
            }
            MachineState::Failed if starts => vec![SupplierReport::Failed],
            MachineState::Died { by } if starts || runs => vec![SupplierReport::Died { by: *by }],
            // A machine that ran is being started again: the host lost it.
            MachineState::Starting if runs => vec![SupplierReport::Died { by: Fault::Host }],
            _ => Vec::new(),
        }
    }
}
