//! Progress of drains, and whether pods were deleted for them. Used for metrics only.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};

use crate::ids::AllocationName;

/// Allocations whose Nodes are being drained. An entry exists from the first deleted pod, or else from the end of the drain,
/// until the Node is deleted.
#[derive(Debug, Default)]
pub(crate) struct Drains(Mutex<HashMap<AllocationName, Drain>>);

#[derive(Clone, Copy, Debug, Default)]
struct Drain {
    forced: bool,
    reported: bool,
}

impl Drains {
    fn state(&self) -> MutexGuard<'_, HashMap<AllocationName, Drain>> {
        self.0.lock()
    }

    /// Records that a pod was deleted instead of evicted.
    pub(crate) fn mark_forced(&self, allocation: &AllocationName) {
        self.state().entry(allocation.clone()).or_default().forced = true;
    }

    /// Records that the drain is complete. Returns whether a pod was deleted for it; `None` if that was returned before.
    pub(crate) fn complete_drain(&self, allocation: &AllocationName) -> Option<bool> {
        let mut state = self.state();
        let drain = state.entry(allocation.clone()).or_default();
        (!std::mem::replace(&mut drain.reported, true)).then_some(drain.forced)
    }

    /// Records that the Node is deleted. Returns true if its drain was not complete, because the deadline came first.
    pub(crate) fn end_drain(&self, allocation: &AllocationName) -> bool {
        self.state().remove(allocation).is_none_or(|drain| !drain.reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drain_is_reported_once() {
        let drains = Drains::default();
        assert_eq!(drains.complete_drain(&"a".into()), Some(false));
        assert_eq!(drains.complete_drain(&"a".into()), None, "released twice");
        assert!(!drains.end_drain(&"a".into()), "it was empty before");
        drains.mark_forced(&"b".into());
        assert_eq!(drains.complete_drain(&"b".into()), Some(true));
        drains.mark_forced(&"c".into());
        assert!(drains.end_drain(&"c".into()), "the deadline came first");
        assert!(drains.state().len() == 1, "what is gone is forgotten");
    }
}
