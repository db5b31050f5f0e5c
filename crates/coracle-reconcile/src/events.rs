//! Kubernetes Events (`events.k8s.io/v1`): one per state change, none for retries.

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{self, EventType, Recorder, Reporter},
};
use tokio::time::Instant;
use tracing::warn;

/// Time within which an equal Event is not sent again.
const REPEAT: Duration = Duration::from_secs(300);
/// Largest number of remembered Events. Beyond it the oldest are forgotten, and may be sent again.
const REMEMBERED_MAX: usize = 4096;
/// Size limit of the API server for notes.
const NOTE_BYTES_MAX: usize = 1000;

/// Severity of an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An expected change.
    Normal,
    /// A failure that may need action.
    Warning,
}

/// Event about an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Severity of an Event.
    pub kind: Kind,
    /// Reason, a CamelCase constant.
    pub reason: &'static str,
    /// Verb of the controller's action.
    pub action: &'static str,
    /// Details.
    pub note: String,
}

/// Sends Events, best effort: a failure is logged and never fails a reconcile.
pub struct EventRecorder {
    client: Client,
    reporter: Reporter,
    sent: Mutex<HashMap<u64, Instant>>,
}

impl fmt::Debug for EventRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventRecorder").finish_non_exhaustive()
    }
}

impl EventRecorder {
    /// Creates a recorder that reports as `coracle.dev/<component>`.
    #[must_use]
    pub fn new(client: Client, component: &str, instance: &str) -> Self {
        Self::reporting_as(client, &format!("coracle.dev/{component}"), instance)
    }

    /// Creates a recorder that reports under a full controller name that users know from another project.
    #[must_use]
    pub fn reporting_as(client: Client, controller: &str, instance: &str) -> Self {
        let reporter = Reporter { controller: controller.to_owned(), instance: Some(instance.to_owned()) };
        Self { client, reporter, sent: Mutex::default() }
    }

    /// Sends `event` about `object`, unless an equal Event was sent recently.
    pub async fn publish(&self, event: &Event, object: &ObjectReference) {
        if !self.is_new(event, object) {
            return;
        }
        let kind = match event.kind {
            Kind::Normal => EventType::Normal,
            Kind::Warning => EventType::Warning,
        };
        let event = events::Event {
            type_: kind,
            reason: event.reason.to_owned(),
            action: event.action.to_owned(),
            note: Some(truncate_note(&event.note)),
            secondary: None,
        };
        // A recorder that is kept alive holds each Event for minutes and scans all of them for every new one. Repeated Events
        // are filtered here, so a new recorder per Event suffices.
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        if let Err(error) = recorder.publish(&event, object).await {
            let error: &dyn std::error::Error = &error;
            warn!(reason = event.reason, error, "send Event failed");
        }
    }

    fn is_new(&self, event: &Event, object: &ObjectReference) -> bool {
        let key = key(event, object);
        let now = Instant::now();
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        if sent.len() >= REMEMBERED_MAX {
            sent.retain(|_, at| now.duration_since(*at) < REPEAT);
            if sent.len() >= REMEMBERED_MAX {
                sent.clear();
            }
        }
        match sent.get(&key) {
            Some(at) if now.duration_since(*at) < REPEAT => false,
            _ => sent.insert(key, now).is_none_or(|_| true),
        }
    }
}

fn key(event: &Event, object: &ObjectReference) -> u64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    (event.kind, event.reason, &event.note, &object.uid, &object.namespace, &object.name).hash(&mut hasher);
    hasher.finish()
}

fn truncate_note(note: &str) -> String {
    match note.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= NOTE_BYTES_MAX).last()
    {
        Some(end) if end < note.len() => format!("{}…", &note[..end]),
        _ => note.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_cut_at_a_character() {
        assert_eq!(truncate_note("short"), "short");
        let cut = truncate_note(&"é".repeat(600));
        assert!(cut.len() <= 1003 && cut.ends_with('…'));
    }
}
