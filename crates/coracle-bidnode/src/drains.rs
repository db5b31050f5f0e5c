//! How long it took to empty nodes, and whether pods had to be ended for it. For the metrics alone.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Units whose nodes are emptied. One is here from the first pod that is ended, or from its being told, until its Node
/// is gone.
#[derive(Debug, Default)]
pub(crate) struct Drains(Mutex<HashMap<String, Drain>>);

#[derive(Clone, Copy, Debug, Default)]
struct Drain {
    forced: bool,
    told: bool,
}

impl Drains {
    fn state(&self) -> MutexGuard<'_, HashMap<String, Drain>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pod on it was ended and not evicted.
    pub(crate) fn forced(&self, unit: &str) {
        self.state().entry(unit.to_owned()).or_default().forced = true;
    }

    /// It is empty: was a pod ended for it? `None`: that was told before.
    pub(crate) fn emptied(&self, unit: &str) -> Option<bool> {
        let mut state = self.state();
        let drain = state.entry(unit.to_owned()).or_default();
        (!std::mem::replace(&mut drain.told, true)).then_some(drain.forced)
    }

    /// Its Node goes. True when that comes before it was empty: the deadline took it.
    pub(crate) fn gone(&self, unit: &str) -> bool {
        self.state().remove(unit).is_none_or(|drain| !drain.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_drain_is_told_once() {
        let drains = Drains::default();
        assert_eq!(drains.emptied("a"), Some(false));
        assert_eq!(drains.emptied("a"), None, "released twice");
        assert!(!drains.gone("a"), "it was empty before");
        drains.forced("b");
        assert_eq!(drains.emptied("b"), Some(true));
        drains.forced("c");
        assert!(drains.gone("c"), "the deadline came first");
        assert!(drains.state().len() == 1, "what is gone is forgotten");
    }
}
