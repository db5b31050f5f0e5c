//! Temporary VMs, which the node removes by itself: those of commands that leave no VM, even if they are killed.
//!
//! ```text
//! created, or found at the start of the daemon ─▶ free ─ grace ─▶ removed (with `off`: once the VM is off)
//!                                                 ▲  │ hold
//!                                         dropped ┘  ▼
//!                                                 held
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_types::VmId;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::HostError;

/// Metadata key of a VM without an owner: when the node removes the VM by itself, as [`RemoveWhen::as_str`].
pub const REMOVE_ANNOTATION: &str = "coracle.dev/remove";

/// State in which the node removes a VM that no client holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveWhen {
    /// When the VM is off.
    Off,
    /// In any state.
    Released,
}

impl RemoveWhen {
    /// Value of the annotation.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Released => "released",
        }
    }

    /// Parses the annotation. Pure.
    ///
    /// # Errors
    /// [`HostError::Invalid`] for an unknown value.
    pub(crate) fn of(metadata: &BTreeMap<String, String>) -> Result<Option<Self>, HostError> {
        let Some(word) = metadata.get(REMOVE_ANNOTATION) else { return Ok(None) };
        let found = [Self::Off, Self::Released].into_iter().find(|when| when.as_str() == word);
        let invalid = || HostError::Invalid {
            message: format!("{REMOVE_ANNOTATION}: {word:?} is neither \"off\" nor \"released\""),
        };
        found.map(Some).ok_or_else(invalid)
    }
}

/// Temporary VMs of a node.
#[derive(Debug, Default)]
pub(crate) struct Temporary {
    vms: Mutex<HashMap<VmId, Entry>>,
    /// Wakes the task that removes VMs.
    changed: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    when: RemoveWhen,
    holders: usize,
    /// Time since which no client holds the VM, or of the last check.
    free_since: Instant,
}

/// Keeps a VM from being removed by the node, until it is dropped.
#[derive(Debug)]
pub struct Hold {
    temporary: Arc<Temporary>,
    id: VmId,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(entry) = self.temporary.vms().get_mut(&self.id) {
            entry.holders = entry.holders.saturating_sub(1);
            entry.free_since = Instant::now();
        }
        self.temporary.changed.notify_one();
    }
}

/// Next step of the task.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Checks a VM that has been free for the grace period.
    Check(VmId, RemoveWhen),
    /// Waits until then; `None`: until a change.
    Wait(Option<Instant>),
}

/// Computes the next step. Pure.
fn next(vms: &HashMap<VmId, Entry>, grace: Duration, now: Instant) -> Step {
    let free = vms.iter().filter(|(_, entry)| entry.holders == 0);
    match free.min_by_key(|(_, entry)| entry.free_since) {
        Some((id, entry)) if entry.free_since + grace <= now => Step::Check(id.clone(), entry.when),
        first => Step::Wait(first.map(|(_, entry)| entry.free_since + grace)),
    }
}

impl Temporary {
    fn vms(&self) -> MutexGuard<'_, HashMap<VmId, Entry>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a VM, which no client holds yet.
    pub(crate) fn insert(&self, id: VmId, when: RemoveWhen) {
        self.vms().insert(id, Entry { when, holders: 0, free_since: Instant::now() });
        self.changed.notify_one();
    }

    /// Removes the entry of a VM that is gone. Idempotent.
    pub(crate) fn forget(&self, id: &VmId) {
        self.vms().remove(id);
    }

    /// Holds a VM. Has no effect on a VM that is not temporary.
    pub(crate) fn hold(self: &Arc<Self>, id: VmId) -> Hold {
        if let Some(entry) = self.vms().get_mut(&id) {
            entry.holders += 1;
        }
        Hold { temporary: self.clone(), id }
    }

    /// Schedules the next check of a VM after another grace period.
    fn postpone(&self, id: &VmId) {
        if let Some(entry) = self.vms().get_mut(id) {
            entry.free_since = Instant::now();
        }
    }
}

/// Calls `remove` for each VM that has been free for `grace`, one at a time. `remove` returns whether the VM is gone.
pub(crate) async fn serve(
    temporary: Arc<Temporary>,
    grace: Duration,
    remove: impl AsyncFn(&VmId, RemoveWhen) -> bool,
) {
    loop {
        let step = next(&temporary.vms(), grace, Instant::now());
        match step {
            Step::Wait(None) => temporary.changed.notified().await,
            Step::Wait(Some(until)) => tokio::select! {
                () = temporary.changed.notified() => {}
                () = sleep_until(until) => {}
            },
            Step::Check(id, when) => match remove(&id, when).await {
                true => temporary.forget(&id),
                false => temporary.postpone(&id),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(15);

    fn id(name: &str) -> VmId {
        VmId::of_name(&name.parse().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn next_step_table() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let vm = |name, holders, seconds| {
            (id(name), Entry { when: RemoveWhen::Released, holders, free_since: at(seconds) })
        };
        let look = |name| Step::Check(id(name), RemoveWhen::Released);
        for (why, vms, now, want) in [
            ("none", vec![], 99, Step::Wait(None)),
            ("just created", vec![vm("a", 0, 0)], 14, Step::Wait(Some(at(15)))),
            ("held in time by no client", vec![vm("a", 0, 0)], 15, look("a")),
            ("held", vec![vm("a", 1, 0)], 99, Step::Wait(None)),
            ("the first one", vec![vm("a", 0, 9), vm("b", 0, 3), vm("c", 2, 0)], 20, look("b")),
        ] {
            assert_eq!(next(&vms.into_iter().collect(), GRACE, at(now)), want, "{why}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn vm_is_free_once_the_last_hold_is_dropped() {
        let temporary = Arc::new(Temporary::default());
        temporary.insert(id("a"), RemoveWhen::Off);
        let holds = [temporary.hold(id("a")), temporary.hold(id("a"))];
        let step = |temporary: &Temporary| next(&temporary.vms(), GRACE, Instant::now());
        tokio::time::advance(GRACE * 2).await;
        for hold in holds {
            assert_eq!(step(&temporary), Step::Wait(None));
            drop(hold);
        }
        assert_eq!(step(&temporary), Step::Wait(Some(Instant::now() + GRACE)));
        tokio::time::advance(GRACE).await;
        assert_eq!(step(&temporary), Step::Check(id("a"), RemoveWhen::Off));
        drop(temporary.hold(id("unknown")));
        temporary.forget(&id("a"));
        assert_eq!(step(&temporary), Step::Wait(None));
    }

    #[test]
    fn annotation_table() {
        for (word, want) in [
            (None, Ok(None)),
            (Some("off"), Ok(Some(RemoveWhen::Off))),
            (Some("released"), Ok(Some(RemoveWhen::Released))),
            (Some(""), Err(())),
            (Some("true"), Err(())),
        ] {
            let metadata = word.map(|word| (REMOVE_ANNOTATION.to_owned(), word.to_owned())).into_iter();
            assert_eq!(RemoveWhen::of(&metadata.collect()).map_err(drop), want, "{word:?}");
        }
    }
}
