//! The order protocol between the market and its suppliers, translated from events as the service does it.

use std::collections::BTreeMap;

use coracle_auction::{Allocation, AllocationId, AllocationState, Event, Market as Engine, SupplierNo, Time};

/// Order to one supplier.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    Launch { allocation: AllocationId, slot: u32, labels: BTreeMap<String, String> },
    Reclaim { allocation: AllocationId, deadline: Time },
    Spare { allocation: AllocationId },
}

fn labels(engine: &Engine, row: &Allocation) -> BTreeMap<String, String> {
    let bid = engine.bid(engine.bid_of(row));
    let labels = bid.map(|bid| bid.labels().to_vec()).unwrap_or_default();
    labels.into_iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

fn is_of(engine: &Engine, row: &Allocation, supplier: SupplierNo) -> bool {
    engine.lots().any(|(no, lot)| no == row.slot().0 && lot.supplier() == supplier)
}

/// Orders that are not done.
pub(crate) fn outstanding(engine: &Engine, supplier: SupplierNo) -> Vec<Order> {
    let own = engine.allocations().filter(|(_, row)| is_of(engine, row, supplier));
    own.filter_map(|(allocation, row)| match row.state() {
        AllocationState::Provisioning => {
            Some(Order::Launch { allocation, slot: row.slot().1, labels: labels(engine, row) })
        }
        AllocationState::Preempting => {
            Some(Order::Reclaim { allocation, deadline: row.preempt_at().unwrap_or(Time(0)) })
        }
        _ => None,
    })
    .collect()
}

/// Orders in what just happened. Read after the commands were applied: what is gone by then is not named.
pub(crate) fn in_events(engine: &Engine, events: &[Event], supplier: SupplierNo) -> Vec<Order> {
    let found =
        |allocation: AllocationId| engine.allocation(allocation).filter(|row| is_of(engine, row, supplier));
    events
        .iter()
        .filter_map(|event| match event {
            Event::Launch { allocation, .. } => found(*allocation).map(|row| Order::Launch {
                allocation: *allocation,
                slot: row.slot().1,
                labels: labels(engine, row),
            }),
            Event::Reclaim { allocation, deadline, .. } => {
                found(*allocation).map(|_| Order::Reclaim { allocation: *allocation, deadline: *deadline })
            }
            Event::Spare { allocation, .. } => {
                found(*allocation).map(|_| Order::Spare { allocation: *allocation })
            }
            _ => None,
        })
        .collect()
}
