//! Reports from the jobs of a run to the VM's task, and numbers of guest sessions.

use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use super::effects::lock;
use crate::GuestClient;
use coracle_lifecycle::{Input, RunEvent, SessionId};

/// Latest session with a guest and its number: inputs contain only numbers.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<Latest>);

#[derive(Debug, Default)]
struct Latest {
    number: u64,
    client: Option<GuestClient>,
}

impl Sessions {
    /// Returns the number of this session: a new one, unless the session is the latest.
    fn number(&self, client: &GuestClient) -> SessionId {
        let mut latest = lock(&self.0);
        if !latest.client.as_ref().is_some_and(|known| known.is_same_session(client)) {
            latest.number += 1;
            latest.client = Some(client.clone());
        }
        SessionId(latest.number)
    }

    /// Returns the session with this number, if it is the latest.
    pub(super) fn get(&self, id: SessionId) -> Option<GuestClient> {
        let latest = lock(&self.0);
        latest.client.clone().filter(|_| SessionId(latest.number) == id)
    }

    /// Takes the latest session, unless it is newer than this one.
    pub(super) fn take(&self, up_to: Option<SessionId>) -> Option<GuestClient> {
        let mut latest = lock(&self.0);
        let newer = up_to.is_some_and(|id| SessionId(latest.number) > id);
        if newer { None } else { latest.client.take() }
    }
}

/// Sender of the reports of one run.
#[derive(Clone, Debug)]
pub(super) struct Reports {
    pub(super) run: u64,
    pub(super) inputs: mpsc::Sender<Box<Input>>,
    pub(super) sessions: Arc<Sessions>,
}

impl Reports {
    /// Sends a report, and waits while the queue of the task is full: so a guest that causes many reports slows itself down.
    /// Boxed, because most jobs wait for hours before they report, and need no memory for this until then.
    pub(super) fn send(&self, event: RunEvent) -> BoxFuture<'_, ()> {
        let input = Box::new(Input::Run(self.run, event));
        Box::pin(async { _ = self.inputs.send(input).await })
    }

    /// Number of a session that the task may use.
    pub(super) fn session(&self, client: &GuestClient) -> SessionId {
        self.sessions.number(client)
    }
}
