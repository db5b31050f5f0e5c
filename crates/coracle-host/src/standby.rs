//! Clones that run before anybody asks for them: one for each of the shapes that were started last.
//!
//! ```text
//! a start of a shape ends ─▶ want ─▶ the task makes a clone: <state>/standbys/<id>/{disk, vmm.log}
//! the next one begins     ─▶ claim ─▶ hand_over: its VMM, tap and disk become the VM's
//! cut off, failed, idle   ─────────▶ the task ends it
//! ```
//! Like a template its guest was never configured, and holds no secret: to become a VM's it takes the same steps as a
//! clone that was just started.

mod plan;
mod task;

use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_hypervisor::{Driver as _, ProcessId, VmRecipe};
use coracle_image::stand_in;
use coracle_net::Plug;
use tokio::sync::{Notify, OnceCell, oneshot};
use tokio::time::{Instant, timeout};

use self::plan::{Step, next};
pub(crate) use self::task::{run as serve, sweep};
use crate::vm::Shared;
use crate::{GuestClient, HostConfig, TemplateKey, files};

/// How long a start waits for a clone that is just being made for its shape: it began earlier than the start's own could.
const NEARLY_THERE: Duration = Duration::from_secs(2);

/// What bounds the clones that stand by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandbyPolicy {
    /// Shapes that have one, those started last; 0: none has.
    pub count_max: usize,
    /// A shape that nobody starts for so long has none.
    pub idle_max: Duration,
}

impl Default for StandbyPolicy {
    fn default() -> Self {
        Self { count_max: 2, idle_max: Duration::from_secs(10 * 60) }
    }
}

/// A clone that waits for a VM, its session open.
#[derive(Clone, Debug)]
pub(crate) struct Standby {
    pub(crate) key: TemplateKey,
    /// It by its own names, with the prepared disk if it has one.
    pub(crate) recipe: VmRecipe,
    pub(crate) vmm: ProcessId,
    guest: GuestClient,
    pub(crate) plug: Plug,
    /// Size of the prepared disk.
    pub(crate) disk_mib: u64,
}

impl Standby {
    /// The disk that its guest has mounted.
    pub(crate) fn disk(&self) -> Option<&Path> {
        self.recipe.disk_in(self.recipe.slots.prepared()).map(|disk| disk.path.as_path())
    }
}

/// All of a host.
#[derive(Debug)]
pub(crate) struct Standbys {
    dir: PathBuf,
    policy: StandbyPolicy,
    state: Mutex<State>,
    /// Wakes the task.
    changed: Notify,
    /// An image for guests to rehearse with.
    stand_in: OnceCell<PathBuf>,
}

#[derive(Debug, Default)]
struct State {
    /// What was started, the latest first.
    shapes: Vec<Shape>,
    ready: Vec<Standby>,
    making: Option<Making>,
    /// Claimed, and not kept: to be ended.
    spent: Vec<VmRecipe>,
}

/// Machines of this shape are started.
#[derive(Clone, Debug)]
struct Shape {
    key: TemplateKey,
    /// The latest of them.
    recipe: VmRecipe,
    started: Instant,
}

/// One that is on its way, and the start that waits for it.
#[derive(Debug)]
struct Making {
    key: TemplateKey,
    first: Option<oneshot::Sender<Claim>>,
}

impl Standbys {
    /// None yet. What an earlier daemon left in `<state>/standbys` is for [`sweep`].
    pub(crate) fn new(state_dir: &Path, policy: StandbyPolicy) -> Self {
        let dir = state_dir.join("standbys");
        Self { dir, policy, state: Mutex::default(), changed: Notify::new(), stand_in: OnceCell::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The template is gone, and what was cloned from it for nobody goes, too.
    pub(crate) fn forget(&self, key: &TemplateKey) {
        self.state().shapes.retain(|shape| shape.key != *key);
        self.changed.notify_one();
    }

    /// Does one of this shape stand by?
    pub(crate) fn has(&self, key: &TemplateKey) -> bool {
        self.state().ready.iter().any(|standby| standby.key == *key)
    }

    fn take(&self, key: &TemplateKey) -> Option<Standby> {
        let mut state = self.state();
        let at = state.ready.iter().position(|standby| standby.key == *key)?;
        Some(state.ready.swap_remove(at))
    }

    /// The image that guests rehearse with; its program is the agent's, which knows when it is not wanted.
    async fn stand_in(&self, config: &HostConfig) -> io::Result<&PathBuf> {
        let make = || async {
            let dir = config.state_dir.join("cache");
            let (agent, image) = (config.agent.clone(), dir.join("stand-in.erofs"));
            let to = image.clone();
            let made = move || std::fs::create_dir_all(&dir).and_then(|()| stand_in(&agent, &to));
            files::blocking(made).await.map(|()| image)
        };
        self.stand_in.get_or_try_init(make).await
    }

    /// What is to be done now.
    fn next(&self, now: Instant) -> Step {
        let state = self.state();
        let shapes: Vec<_> = state.shapes.iter().map(|shape| (&shape.key, shape.started)).collect();
        let ready: Vec<_> = state.ready.iter().map(|standby| &standby.key).collect();
        next(&shapes, &ready, self.policy.idle_max, now)
    }
}

/// A VM of this shape was started, or will be: there may be another. Never waits.
pub(crate) fn want(shared: &Shared, key: TemplateKey, recipe: &VmRecipe) {
    let Standbys { policy, .. } = shared.standbys;
    let able = shared.driver.templates(recipe).is_some_and(|templates| templates.hands_over());
    if policy.count_max == 0 || !able {
        return;
    }
    let mut state = shared.standbys.state();
    state.shapes.retain(|shape| shape.key != key);
    state.shapes.insert(0, Shape { key, recipe: recipe.clone(), started: Instant::now() });
    state.shapes.truncate(policy.count_max);
    drop(state);
    shared.standbys.changed.notify_one();
}

/// The clone of this shape that stands by, or will in a moment, if the VM can use it. Cancel-safe.
pub(crate) async fn claim(
    shared: &Arc<Shared>,
    key: &TemplateKey,
    fits: impl Fn(&Standby) -> bool,
) -> Option<Claim> {
    let coming = {
        let mut state = shared.standbys.state();
        if let Some(at) = state.ready.iter().position(|standby| standby.key == *key) {
            let standby = fits(&state.ready[at]).then(|| state.ready.swap_remove(at))?;
            drop(state);
            return Claim::of(shared, standby).alive();
        }
        let making = state.making.as_mut().filter(|making| making.key == *key && making.first.is_none())?;
        let (first, coming) = oneshot::channel();
        making.first = Some(first);
        coming
    };
    let claim = timeout(NEARLY_THERE, coming).await.ok()?.ok()?;
    if fits(&claim) { claim.alive() } else { None }
}

/// One that a start has taken. Dropped before it is kept, it is ended, also when it is the VM's by half.
#[derive(Debug)]
pub(crate) struct Claim {
    shared: Arc<Shared>,
    standby: Standby,
    kept: bool,
}

impl Claim {
    fn of(shared: &Arc<Shared>, standby: Standby) -> Self {
        Self { shared: shared.clone(), standby, kept: false }
    }

    /// It, unless it died while nobody looked.
    fn alive(self) -> Option<Self> {
        self.standby.vmm.is_alive().is_ok_and(|alive| alive).then_some(self)
    }

    /// Nothing of it is in its own folders any more: from here on it is as good as its new owner.
    pub(crate) fn keep(mut self) -> GuestClient {
        self.kept = true;
        self.standby.guest.clone()
    }
}

impl Deref for Claim {
    type Target = Standby;

    fn deref(&self) -> &Standby {
        &self.standby
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.kept {
            let standbys = &self.shared.standbys;
            standbys.state().spent.push(self.standby.recipe.clone());
            standbys.changed.notify_one();
        }
    }
}
