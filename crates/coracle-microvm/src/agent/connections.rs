//! One connection to each node, shared by the reconciles and the event stream.
//!
//! A connection stays open while it has users, and closes when the last of them drops its client. The event stream of a node is
//! a user for as long as the node is known. A broken connection is replaced at the next use. A failed attempt is not repeated
//! at once: its error is returned for as long as the attempt took, so that the VMs of an unresponsive node do not each wait for
//! a timeout.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared, WeakShared},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    address::AgentAddress,
    client::NodeClient,
    dialer::{Connection, Dialer},
    error::AgentError,
};

type ClientOrError = Result<Arc<dyn NodeClient>, AgentError>;
type Attempt = BoxFuture<'static, Result<Connection, AgentError>>;

/// Connections by address. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Connections {
    dialer: Arc<Dialer>,
    slots: Arc<Mutex<HashMap<AgentAddress, Slot>>>,
}

/// Connection to one node. Its users own the connection; the slot holds only weak references.
#[derive(Debug, Default)]
struct Slot {
    /// Attempt to connect that is under way, shared by its waiters.
    attempt: Option<WeakShared<Attempt>>,
    open: Option<(Weak<dyn NodeClient>, CancellationToken)>,
    /// Error of the last attempt, and the time until which it is returned.
    failed: Option<(AgentError, Instant)>,
}

impl Slot {
    fn open(&self) -> Option<Arc<dyn NodeClient>> {
        let (client, closed) = self.open.as_ref()?;
        client.upgrade().filter(|_| !closed.is_cancelled())
    }

    /// Returns the attempt that is under way, or has just succeeded.
    fn attempt(&self) -> Option<Shared<Attempt>> {
        let attempt = self.attempt.as_ref()?.upgrade()?;
        let is_usable = match attempt.peek() {
            None => true,
            Some(Ok(connection)) => !connection.closed.is_cancelled(),
            Some(Err(_)) => false,
        };
        is_usable.then_some(attempt)
    }

    fn failure(&self) -> Option<AgentError> {
        let (error, until) = self.failed.as_ref()?;
        (Instant::now() < *until).then(|| error.clone())
    }

    fn is_used(&self) -> bool {
        self.open().is_some() || self.attempt().is_some() || self.failure().is_some()
    }
}

impl Connections {
    pub(crate) fn new(dialer: Dialer) -> Self {
        Self { dialer: Arc::new(dialer), slots: Arc::default() }
    }

    /// Returns the open connection to a node, or a new one. Concurrent callers wait for one attempt and share its result.
    /// Cancel-safe.
    ///
    /// # Errors
    /// Errors of [`Dialer::dial`].
    pub(crate) async fn get(&self, to: &AgentAddress) -> Result<Arc<dyn NodeClient>, AgentError> {
        let (began, attempt) = match self.open_or_dial(to) {
            Ok(answer) => return answer,
            Err(attempt) => (Instant::now(), attempt),
        };
        let answer = attempt.await;
        let mut slots = self.slots();
        let slot = slots.entry(to.clone()).or_default();
        match answer {
            Ok(Connection { client, closed }) => {
                slot.failed = None;
                slot.open = Some((Arc::downgrade(&client), closed));
                Ok(client)
            }
            Err(error) => {
                // A caller that joined the attempt late has waited for less time.
                let until = Instant::now() + began.elapsed();
                let longest = slot.failed.take().map_or(until, |(_, other)| other.max(until));
                slot.failed = Some((error.clone(), longest));
                Err(error)
            }
        }
    }

    /// Returns the open connection or the error of a recent attempt; otherwise the attempt to wait for.
    fn open_or_dial(&self, to: &AgentAddress) -> Result<ClientOrError, Shared<Attempt>> {
        let mut slots = self.slots();
        if !slots.contains_key(to) {
            slots.retain(|_, slot| slot.is_used());
        }
        let slot = slots.entry(to.clone()).or_default();
        if let Some(client) = slot.open() {
            return Ok(Ok(client));
        }
        if let Some(error) = slot.failure() {
            return Ok(Err(error));
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

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use coracle_reconcile::ControllerMetrics;

    use super::*;
    use crate::agent::{
        call::Deadlines,
        stream::{ByteStream, Connect},
    };

    /// Node that is switched off.
    #[derive(Debug, Default)]
    struct Silent {
        dialed: AtomicUsize,
    }

    impl Connect for Silent {
        fn connect<'a>(&'a self, _: &'a str) -> BoxFuture<'a, io::Result<Box<dyn ByteStream>>> {
            self.dialed.fetch_add(1, Ordering::SeqCst);
            std::future::pending().boxed()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_dial_is_cached_for_its_own_duration() {
        let (silent, deadlines) = (Arc::new(Silent::default()), Deadlines::default());
        let dialer = Dialer::new(silent.clone(), None, deadlines, ControllerMetrics::default());
        let connections = Connections::new(dialer);
        let node = AgentAddress { address: "10.0.0.5:50051".into(), ..AgentAddress::default() };
        let ask = async || {
            let began = Instant::now();
            connections.get(&node).await.expect_err("it is silent");
            (began.elapsed(), silent.dialed.load(Ordering::SeqCst))
        };
        let connect = deadlines.connect;
        let late = async {
            tokio::time::sleep(connect - Duration::from_secs(1)).await;
            ask().await.0
        };
        let (first, late) = tokio::join!(ask(), late);
        assert_eq!((first, late), ((connect, 1), Duration::from_secs(1)), "one attempt for both");
        tokio::time::sleep(connect - Duration::from_millis(1)).await;
        assert_eq!(ask().await, (Duration::ZERO, 1), "answered by the first attempt");
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(ask().await, (connect, 2), "tried again");
    }
}
