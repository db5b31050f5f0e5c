//! Stops a client after one of its calls.

use std::{
    future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

/// Counts the finished calls of one client to all of its peers, and withholds the answer of one call: the work is done, but the
/// client never learns of it. Clones share the fuse.
#[derive(Clone, Debug, Default)]
pub struct Fuse(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    blown: Notify,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<String>,
    blows_after: Option<usize>,
}

impl Fuse {
    /// Creates a fuse that blows after call number `call`, counted from zero. With `None`, it only counts.
    #[must_use]
    pub fn new(call: Option<usize>) -> Self {
        let fuse = Self::default();
        fuse.state().blows_after = call;
        fuse
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `call`. Peers call this when the work of the call is done, before they answer. Never returns once the fuse has
    /// blown.
    pub async fn after_call(&self, call: &str) {
        let blows = {
            let mut state = self.state();
            let number = state.calls.len();
            state.calls.push(call.to_owned());
            state.blows_after.is_some_and(|after| number >= after)
        };
        if blows {
            self.0.blown.notify_one();
            future::pending::<()>().await;
        }
    }

    /// Waits until the fuse has blown. Supports one waiter.
    pub async fn blown(&self) {
        self.0.blown.notified().await;
    }

    /// Keeps the fuse from blowing: from now on every call is answered.
    pub fn disarm(&self) {
        self.state().blows_after = None;
    }

    /// Calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }
}
