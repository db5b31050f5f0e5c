//! In-memory saved states.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use coracle_cocoon::{RegistryError, SnapshotTags};
use coracle_testkit::sim::Sim;

/// Saved states as `repository:tag`. Clones are the same registry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tags(Arc<State>);

#[derive(Default)]
struct State {
    tags: Mutex<BTreeSet<String>>,
    /// Deleted tags so far.
    deleted: Mutex<Vec<String>>,
    /// True when deletions fail.
    broken: Mutex<bool>,
    sim: Mutex<Option<Sim>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

impl Tags {
    pub(crate) fn simulated(sim: &Sim) -> Self {
        let tags = Self::default();
        *tags.0.sim.lock().unwrap() = Some(sim.clone());
        tags
    }

    pub(crate) fn push(&self, repository: &str, tag: &str) {
        self.0.tags.lock().unwrap().insert(format!("{repository}:{tag}"));
    }

    pub(crate) fn remove(&self, repository: &str, tag: &str) {
        self.0.tags.lock().unwrap().remove(&format!("{repository}:{tag}"));
    }

    pub(crate) fn all(&self) -> Vec<String> {
        self.0.tags.lock().unwrap().iter().cloned().collect()
    }

    pub(crate) fn contains(&self, repository: &str, tag: &str) -> bool {
        self.0.tags.lock().unwrap().contains(&format!("{repository}:{tag}"))
    }

    pub(crate) fn set_broken(&self, broken: bool) {
        *self.0.broken.lock().unwrap() = broken;
    }

    async fn after_call(&self, call: &str) {
        let sim = self.0.sim.lock().unwrap().clone();
        if let Some(sim) = sim {
            sim.after_call(call).await;
        }
    }
}

#[async_trait]
impl SnapshotTags for Tags {
    async fn has(&self, repository: &str, tag: &str) -> Result<bool, RegistryError> {
        let has = self.contains(repository, tag);
        self.after_call("HasTag").await;
        Ok(has)
    }

    async fn delete(&self, repository: &str, tag: &str) -> Result<(), RegistryError> {
        if *self.0.broken.lock().unwrap() {
            return Err(RegistryError::new("delete", repository, tag, "the registry is broken"));
        }
        self.remove(repository, tag);
        self.0.deleted.lock().unwrap().push(format!("{repository}:{tag}"));
        self.after_call("DeleteTag").await;
        Ok(())
    }
}
