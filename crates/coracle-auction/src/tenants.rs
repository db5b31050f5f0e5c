//! Allocations, bids and cap of a tenant in one market.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Price, TenantNo};

/// Tenant of a market.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tenant {
    pub(crate) no: TenantNo,
    pub(crate) cap: Option<Price>,
    /// Number of all unfinished units.
    pub(crate) units: u64,
    /// Bids held back by the cap, oldest first: `(seq, place)`.
    pub(crate) held: BTreeSet<(u64, u32)>,
    /// Bids with unfinished units, for a tenant with a cap; rebuilt when a snapshot is restored.
    #[serde(skip)]
    pub(crate) unfinished: BTreeSet<u32>,
}

/// Tenants by a dense index.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tenants {
    pub(crate) rows: Vec<Tenant>,
    index: BTreeMap<TenantNo, u32>,
}

impl Tenants {
    pub(crate) fn index(&self, no: TenantNo) -> Option<u32> {
        self.index.get(&no).copied()
    }

    /// Index of a tenant; adds an unknown tenant.
    pub(crate) fn ensure(&mut self, no: TenantNo) -> u32 {
        if let Some(index) = self.index(no) {
            return index;
        }
        let index = u32::try_from(self.rows.len()).unwrap_or(u32::MAX);
        self.rows.push(Tenant {
            no,
            cap: None,
            units: 0,
            held: BTreeSet::new(),
            unfinished: BTreeSet::new(),
        });
        self.index.insert(no, index);
        index
    }

    pub(crate) fn at(&self, index: u32) -> &Tenant {
        &self.rows[index as usize]
    }

    pub(crate) fn at_mut(&mut self, index: u32) -> &mut Tenant {
        &mut self.rows[index as usize]
    }

    pub(crate) fn from_rows(rows: Vec<Tenant>) -> Self {
        let index = (0u32..).zip(&rows).map(|(index, tenant)| (tenant.no, index)).collect();
        Self { rows, index }
    }
}
