//! Stops a client after one of its calls.

use std::{
    future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

/// Counts finished calls of one client, whichever peer they went to, and holds back the answer of one of
/// them: the work is done, the client never learns it. Clones are the same fuse.
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
    /// A fuse that blows after call number `call`, counted from zero; `None`: it only counts.
    #[must_use]
    pub fn new(call: Option<usize>) -> Self {
        let fuse = Self::default();
        fuse.state().blows_after = call;
        fuse
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Peers call this when the work of `call` is done and before they answer. Never returns once the fuse
    /// has blown.
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

    /// Waits until the fuse has blown. For one waiter.
    pub async fn blown(&self) {
        self.0.blown.notified().await;
    }

    /// From now on every call is answered and none is counted.
    pub fn disarm(&self) {
        self.state().blows_after = None;
    }

    /// The calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }
}
