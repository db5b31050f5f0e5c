//! One connection to each node, shared by the reconciles and the event stream.
//!
//! Its users keep a connection open: it closes when the last of them drops its client. The event stream of a
//! node is a user for as long as the node is known. A connection that broke is replaced at the next use.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared, WeakShared},
};
use tokio_util::sync::CancellationToken;

use super::{
    address::AgentAddress,
    client::NodeClient,
    dialer::{Connection, Dialer},
    error::AgentError,
};

type Attempt = BoxFuture<'static, Result<Connection, AgentError>>;

/// Connections by address. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Connections {
    dialer: Arc<Dialer>,
    slots: Arc<Mutex<HashMap<AgentAddress, Slot>>>,
}

/// The connection to one node. It belongs to its users, so nothing here keeps it open.
#[derive(Debug, Default)]
struct Slot {
    /// An attempt to connect, and those who wait for it.
    attempt: Option<WeakShared<Attempt>>,
    open: Option<(Weak<dyn NodeClient>, CancellationToken)>,
}

impl Slot {
    fn open(&self) -> Option<Arc<dyn NodeClient>> {
        let (client, closed) = self.open.as_ref()?;
        client.upgrade().filter(|_| !closed.is_cancelled())
    }

    /// The attempt that is under way, or that has just succeeded.
    fn attempt(&self) -> Option<Shared<Attempt>> {
        let attempt = self.attempt.as_ref()?.upgrade()?;
        let is_usable = match attempt.peek() {
            None => true,
            Some(Ok(connection)) => !connection.closed.is_cancelled(),
            Some(Err(_)) => false,
        };
        is_usable.then_some(attempt)
    }

    fn is_used(&self) -> bool {
        self.open().is_some() || self.attempt().is_some()
    }
}

impl Connections {
    pub(crate) fn new(dialer: Dialer) -> Self {
        Self { dialer: Arc::new(dialer), slots: Arc::default() }
    }

    /// The open connection to a node, or a new one. Concurrent callers wait for one attempt and share its
    /// result. Cancel-safe.
    ///
    /// # Errors
    /// Those of [`Dialer::dial`].
    pub(crate) async fn get(&self, to: &AgentAddress) -> Result<Arc<dyn NodeClient>, AgentError> {
        let attempt = match self.open_or_dial(to) {
            Ok(client) => return Ok(client),
            Err(attempt) => attempt,
        };
        let Connection { client, closed } = attempt.await?;
        self.slots().entry(to.clone()).or_default().open = Some((Arc::downgrade(&client), closed));
        Ok(client)
    }

    /// The open connection; without one, the attempt to wait for.
    fn open_or_dial(&self, to: &AgentAddress) -> Result<Arc<dyn NodeClient>, Shared<Attempt>> {
        let mut slots = self.slots();
        if !slots.contains_key(to) {
            slots.retain(|_, slot| slot.is_used());
        }
        let slot = slots.entry(to.clone()).or_default();
        if let Some(client) = slot.open() {
            return Ok(client);
        }
        Err(slot.attempt().unwrap_or_else(|| {
            let (dialer, to) = (self.dialer.clone(), to.clone());
            let attempt = async move { dialer.dial(&to).await }.boxed().shared();
            slot.attempt = attempt.downgrade();
            attempt
        }))
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<AgentAddress, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
