//! Events of pods. Equal events are one object with a count. A rate limit prevents that a pod floods the cluster.
//!
//! Recording an event never blocks; one task sends the events, in order.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use coracle_pod::events::PodEvent;
use coracle_pod::host::PodId;
use coracle_pod::time::until;
use coracle_types::Clock;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Capacity of the queue to the API server; events beyond it are dropped.
const QUEUE: usize = 1024;
/// Most events that are remembered for counting.
const REMEMBERED: usize = 4096;
/// Time after which an equal event becomes a new object.
const SERIES_MAX: Duration = Duration::from_secs(600);
/// Burst of events of one pod, and the time after which one more is allowed (client-go, EventSourceObjectSpamFilter).
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(300);
/// Most characters of a message (API reference of Event).
const MESSAGE_MAX: usize = 1024;
/// Number of tries, time limit of each, and delay between them.
const TRIES: u32 = 5;
const LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(2);
/// Source component of the events.
const COMPONENT: &str = "coracle";

/// Event with its pod and time.
#[derive(Clone, Debug)]
struct Recorded {
    pod: PodId,
    event: PodEvent,
    at: Timestamp,
}

/// Records events. Clones share the queue.
#[derive(Clone, Debug)]
pub struct Recorder {
    queue: mpsc::Sender<Recorded>,
    clock: Clock,
}

impl Recorder {
    /// Returns a recorder for the node `node`, and the task that sends the recorded events.
    #[must_use]
    pub fn new(client: Client, node: String, clock: Clock) -> (Self, Sender) {
        let (queue, events) = mpsc::channel(QUEUE);
        let sender = Sender { client, node, events, memory: Correlator::default(), serial: 0 };
        (Self { queue, clock }, sender)
    }

    /// Records an event. Returns at once.
    pub fn take(&self, pod: &PodId, event: PodEvent) {
        let at = Timestamp::from_millisecond(self.clock.now().0).unwrap_or_default();
        let recorded = Recorded { pod: pod.clone(), event, at };
        if let Err(error) = self.queue.try_send(recorded) {
            tracing::warn!(ns = pod.namespace, name = pod.name, %error, "event of a pod dropped");
        }
    }
}

/// Task that sends recorded events.
pub struct Sender {
    client: Client,
    node: String,
    events: mpsc::Receiver<Recorded>,
    memory: Correlator,
    serial: u64,
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Sender {
    /// Sends events until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        while let Some(Some(recorded)) = stop.run_until_cancelled(self.events.recv()).await {
            let Some(step) = self.memory.next(&recorded) else { continue };
            if stop.run_until_cancelled(self.send(&recorded, step)).await.is_none() {
                return;
            }
        }
    }

    async fn send(&mut self, recorded: &Recorded, step: Step) {
        for _ in 0..TRIES {
            match timeout(LIMIT, self.try_send(recorded, &step)).await {
                Ok(Ok(name)) => return self.memory.record_sent(recorded, name),
                // A namespace that is being deleted accepts no new events.
                Ok(Err(kube::Error::Api(status))) if status.code < 500 && status.code != 429 => {
                    tracing::debug!(reason = recorded.event.reason, error = %status, "event refused");
                    return;
                }
                Ok(Err(error)) => tracing::debug!(%error, "send an event failed"),
                Err(_) => tracing::debug!("send an event timed out"),
            }
            sleep(PAUSE).await;
        }
        tracing::warn!(reason = recorded.event.reason, pod = recorded.pod.name, "event of a pod not sent");
    }

    /// Sends an event and returns the name of its object.
    async fn try_send(&mut self, recorded: &Recorded, step: &Step) -> kube::Result<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &recorded.pod.namespace);
        if let Step::Count { name, count } = step {
            let patch =
                json!({"count": count, "lastTimestamp": Time(recorded.at), "message": message(recorded)});
            match events.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
                // The API server deletes events after an hour.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                patched => return patched.map(|_| name.clone()),
            }
        }
        self.serial += 1;
        let event = object(recorded, &self.node, self.serial);
        let name = event.metadata.name.clone().unwrap_or_default();
        events.create(&PostParams::default(), &event).await.map(|_| name)
    }
}

fn message(recorded: &Recorded) -> String {
    recorded.event.message.chars().take(MESSAGE_MAX).collect()
}

fn object(recorded: &Recorded, node: &str, serial: u64) -> Event {
    let Recorded { pod, event, at } = recorded;
    let field = event.container.as_ref().map(|name| format!("spec.containers{{{name}}}"));
    let type_ = if event.is_warning { "Warning" } else { "Normal" };
    let nanos = at.as_nanosecond();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{nanos:x}{serial:x}", pod.name)),
            namespace: Some(pod.namespace.clone()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            uid: Some(pod.uid.clone()),
            field_path: field,
            resource_version: None,
        },
        reason: Some(event.reason.to_owned()),
        message: Some(message(recorded)),
        type_: Some(type_.to_owned()),
        count: Some(1),
        first_timestamp: Some(Time(*at)),
        last_timestamp: Some(Time(*at)),
        source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: Some(node.to_owned()) }),
        reporting_component: Some(COMPONENT.to_owned()),
        reporting_instance: Some(node.to_owned()),
        ..Event::default()
    }
}

/// Way of sending an event.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Create an object.
    Create,
    /// Increase the count of an earlier object.
    Count { name: String, count: i32 },
}

/// Memory of sent events. Bounded: the oldest one is evicted.
#[derive(Debug, Default)]
struct Correlator {
    series: BTreeMap<Key, Series>,
    order: VecDeque<Key>,
    allowance: BTreeMap<String, (u32, Timestamp)>,
}

type Key = (String, PodEvent);

#[derive(Debug)]
struct Series {
    name: String,
    count: i32,
    first: Timestamp,
}

fn key(recorded: &Recorded) -> Key {
    (recorded.pod.uid.clone(), recorded.event.clone())
}

impl Correlator {
    /// Returns how the event is sent; `None`: its pod exceeds the rate limit.
    fn next(&mut self, recorded: &Recorded) -> Option<Step> {
        if !self.is_allowed(recorded) {
            return None;
        }
        let known = self.series.get(&key(recorded));
        let known = known.filter(|series| until(series.first, recorded.at) < SERIES_MAX);
        Some(match known {
            Some(series) => Step::Count { name: series.name.clone(), count: series.count.saturating_add(1) },
            None => Step::Create,
        })
    }

    /// Takes one event from the pod's allowance.
    fn is_allowed(&mut self, recorded: &Recorded) -> bool {
        if self.allowance.len() >= REMEMBERED {
            // Full allowances need not be remembered.
            self.allowance.retain(|_, (left, since)| refilled_tokens(*since, recorded.at) < BURST - *left);
        }
        let fresh = (BURST, recorded.at);
        let (left, since) = self.allowance.entry(recorded.pod.uid.clone()).or_insert(fresh);
        let more = refilled_tokens(*since, recorded.at);
        if more > 0 {
            (*left, *since) = (left.saturating_add(more).min(BURST), recorded.at);
        }
        let allowed = *left > 0;
        *left = left.saturating_sub(1);
        allowed
    }

    /// Records that the event was sent as an object.
    fn record_sent(&mut self, recorded: &Recorded, name: String) {
        let key = key(recorded);
        match self.series.get_mut(&key) {
            Some(series) if series.name == name => series.count = series.count.saturating_add(1),
            Some(series) => *series = Series { name, count: 1, first: recorded.at },
            None => {
                self.series.insert(key.clone(), Series { name, count: 1, first: recorded.at });
                self.order.push_back(key);
            }
        }
        while self.order.len() > REMEMBERED {
            if let Some(oldest) = self.order.pop_front() {
                self.series.remove(&oldest);
            }
        }
    }
}

fn refilled_tokens(since: Timestamp, now: Timestamp) -> u32 {
    u32::try_from(until(since, now).as_secs() / REFILL.as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use coracle_pod::reason;

    use super::*;

    fn recorded(uid: &str, message: &str, second: i64) -> Recorded {
        let pod = PodId { namespace: "shop".into(), name: "web".into(), uid: uid.into() };
        let event = PodEvent::warning(reason::FAILED, Some("main"), message);
        Recorded { pod, event, at: Timestamp::from_second(second).unwrap() }
    }

    /// Returns `new`, the count, or `dropped`.
    fn take(memory: &mut Correlator, recorded: &Recorded) -> String {
        match memory.next(recorded) {
            Some(Step::Create) => {
                memory.record_sent(recorded, format!("{}", recorded.at));
                "new".to_owned()
            }
            Some(Step::Count { name, count }) => {
                memory.record_sent(recorded, name);
                count.to_string()
            }
            None => "dropped".to_owned(),
        }
    }

    #[test]
    fn equal_events_are_counted() {
        let mut memory = Correlator::default();
        for (why, uid, message, second, want) in [
            ("first", "a", "x", 0, "new"),
            ("again", "a", "x", 1, "2"),
            ("another message", "a", "y", 2, "new"),
            ("another pod", "b", "x", 3, "new"),
            ("once more", "a", "x", 4, "3"),
            ("after ten minutes", "a", "x", 601, "new"),
            ("again", "a", "x", 602, "2"),
        ] {
            assert_eq!(take(&mut memory, &recorded(uid, message, second)), want, "{why}");
        }
    }

    #[test]
    fn pod_cannot_flood_the_cluster() {
        let mut memory = Correlator::default();
        let sent = |memory: &mut Correlator, uid: &str, second: i64| {
            let events = (0..30).map(|_| take(memory, &recorded(uid, "x", second)));
            events.filter(|taken| taken != "dropped").count()
        };
        assert_eq!(sent(&mut memory, "a", 0), 25);
        assert_eq!(sent(&mut memory, "b", 0), 25, "another pod has its own");
        assert_eq!(sent(&mut memory, "a", 299), 0);
        assert_eq!(sent(&mut memory, "a", 600), 2);
    }

    #[test]
    fn event_object_names_its_container() {
        let event = object(&recorded("u", "x", 7), "vm-1", 1);
        assert_eq!(event.involved_object.field_path.as_deref(), Some("spec.containers{main}"));
        assert_eq!((event.type_.as_deref(), event.count), (Some("Warning"), Some(1)));
    }
}
