//! Watches: the history after a revision, then changes as they happen.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use serde_json::{Value, json};
use tokio::{
    sync::watch as latest,
    time::{Instant, sleep_until},
};

use super::{
    ApiServer,
    failure::Failure,
    kinds::Kind,
    request::Url,
    respond::{Reply, failure, json_response, partial_metadata},
    select::Selector,
    store::{Change, Store},
};

/// Interval between bookmarks.
const BOOKMARKS: Duration = Duration::from_secs(60);
/// Duration of a watch when the client specifies no timeout.
const TIMEOUT: Duration = Duration::from_secs(1800);

struct Watch {
    server: ApiServer,
    kind: Kind,
    api_version: String,
    namespace: String,
    selector: Selector,
    metadata_only: bool,
    bookmarks: bool,
    /// Last revision up to which everything was sent.
    seen: u64,
    /// Position in the history at which the search for changes starts.
    position: usize,
    ready: VecDeque<Value>,
    changed: latest::Receiver<u64>,
    next_bookmark: Instant,
    end: Instant,
}

/// Response to a watch request: a stream of events, one JSON document per line.
pub(super) fn open(
    server: &ApiServer,
    kind: &Kind,
    url: &Url,
    selector: Selector,
    metadata_only: bool,
) -> Response<Reply> {
    let changed = server.0.revision.subscribe();
    let store = server.store();
    let from = url.text("resourceVersion").parse::<u64>().unwrap_or(0);
    let now = Instant::now();
    let timeout = url.text("timeoutSeconds").parse().map_or(TIMEOUT, Duration::from_secs);
    let mut watch = Watch {
        server: server.clone(),
        kind: kind.clone(),
        api_version: kind.api_version(&url.target.version),
        namespace: url.target.namespace.clone(),
        selector,
        metadata_only,
        bookmarks: url.is_true("allowWatchBookmarks"),
        seen: from,
        position: 0,
        ready: VecDeque::new(),
        changed,
        next_bookmark: now + BOOKMARKS,
        end: now + timeout,
    };
    if from == 0 {
        watch.list(&store, url.is_true("sendInitialEvents"));
    } else if from < store.compacted {
        return failure(&Failure::expired());
    }
    watch.position = store.history.partition_point(|change| change.revision <= watch.seen);
    drop(store);
    let events = stream::unfold(watch, |mut watch| async move {
        let event = watch.next().await?;
        let line = Bytes::from(format!("{event}\n"));
        Some((Ok::<_, Infallible>(Frame::data(line)), watch))
    });
    json_response(StatusCode::OK, StreamBody::new(events).boxed_unsync())
}

impl Watch {
    /// Queues all objects, with which a watch without a revision begins.
    fn list(&mut self, store: &Store, marks_end: bool) {
        for (key, stored) in &store.objects {
            if self.is_of_kind(key) && self.selector.matches(&stored.object) {
                self.ready.push_back(self.event("ADDED", &stored.object));
            }
        }
        self.seen = store.revision;
        if marks_end {
            let annotations = json!({"k8s.io/initial-events-end": "true"});
            self.ready.push_back(self.bookmark(&annotations));
        }
    }

    fn is_of_kind(&self, (group, plural, namespace, _): &super::store::Key) -> bool {
        *group == self.kind.group
            && *plural == self.kind.plural
            && (self.namespace.is_empty() || *namespace == self.namespace)
    }

    /// Next event. `None` when the watch has timed out.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            self.read_history();
            if !self.ready.is_empty() {
                continue;
            }
            tokio::select! {
                changed = self.changed.changed() => changed.ok()?,
                () = sleep_until(self.end) => return None,
                () = sleep_until(self.next_bookmark), if self.bookmarks => {
                    self.next_bookmark += BOOKMARKS;
                    return Some(self.bookmark(&json!({})));
                }
            }
        }
    }

    fn read_history(&mut self) {
        let server = self.server.clone();
        let store = server.store();
        for change in store.history.iter().skip(self.position) {
            if self.is_of_kind(&change.key) {
                let kind = self.kind_of(change);
                let event = kind.map(|kind| self.event(kind, &change.object));
                self.ready.extend(event);
            }
        }
        self.position = store.history.len();
        self.seen = store.revision;
    }

    /// Event type of a change. An object that begins or ceases to match the selector appears or disappears for the watch.
    fn kind_of(&self, change: &Change) -> Option<&'static str> {
        let before = change.before.as_ref().is_some_and(|object| self.selector.matches(object));
        let after = !change.deleted && self.selector.matches(&change.object);
        match (before, after) {
            (false, true) => Some("ADDED"),
            (true, true) => Some("MODIFIED"),
            (true, false) => Some("DELETED"),
            (false, false) => None,
        }
    }

    fn event(&self, kind: &str, object: &Value) -> Value {
        let object = if self.metadata_only { partial_metadata(object) } else { object.clone() };
        json!({"type": kind, "object": object})
    }

    fn bookmark(&self, annotations: &Value) -> Value {
        let metadata = json!({"resourceVersion": self.seen.to_string(), "annotations": annotations});
        let object = json!({"kind": self.kind.kind, "apiVersion": self.api_version, "metadata": metadata});
        json!({"type": "BOOKMARK", "object": object})
    }
}
