//! Tasks that someone waits for, all by one long poll and none while nobody waits.
//!
//! ```text
//!  ended(task) ─▶ waiting ─▶ ModifyListView (those that came close together, in one call)
//!                    ▲              │
//!                    └──── WaitForUpdatesEx ◀── vCenter
//! ```

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{Notify, oneshot},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{
    lock,
    session::Session,
    watch::{changes, collector, filter, made, wait},
    xml::{Node, reference, task_fault},
};
use crate::{Fault, Object, TaskId, VsphereError};

/// Tasks that come this close together are listed by one call.
const GATHER: Duration = Duration::from_millis(25);
/// Ends that come this close together take one poll.
const COALESCE: Duration = Duration::from_millis(75);
/// Until a lost watch is made anew.
const AGAIN: Duration = Duration::from_secs(1);
/// How many ended tasks are remembered.
const ENDED_MAX: usize = 256;
/// What is read of a task.
const PATHS: [&str; 3] = ["info.state", "info.error", "info.result"];

/// How a task ended. `Ok(None)`: without a result, or unknown to vCenter.
type Ended = Result<Option<Node>, Fault>;

#[derive(Debug, Default)]
struct Tasks {
    waiting: HashMap<String, Vec<oneshot::Sender<Ended>>>,
    listed: HashSet<String>,
    /// To be taken off the list when it is changed next.
    over: Vec<String>,
    /// How the last tasks ended, oldest first: one that leaves the list and comes back between two polls is no change.
    ended: VecDeque<(String, Ended)>,
}

/// Follows the tasks of a session.
#[derive(Debug)]
pub(super) struct TaskWatch {
    session: Arc<Session>,
    tasks: Mutex<Tasks>,
    /// Somebody waits for a task that is not on the list.
    wake: Notify,
    /// The list is not empty any more.
    listed: Notify,
    stop: CancellationToken,
}

impl TaskWatch {
    pub(super) fn new(session: Arc<Session>, stop: CancellationToken) -> Self {
        Self { session, tasks: Mutex::default(), wake: Notify::new(), listed: Notify::new(), stop }
    }

    /// Waits until the task has ended: its result. Cancel-safe.
    pub(super) async fn ended(&self, task: &TaskId) -> Result<Option<Node>, VsphereError> {
        let known = lock(&self.tasks).ended.iter().find(|(id, _)| *id == task.0).map(|(_, end)| end.clone());
        let end = match known {
            Some(end) => end,
            None => self.wait(task).await?,
        };
        end.map_err(|fault| VsphereError::task(format!("task {}", task.0), fault))
    }

    async fn wait(&self, task: &TaskId) -> Result<Ended, VsphereError> {
        let (tell, told) = oneshot::channel();
        lock(&self.tasks).waiting.entry(task.0.clone()).or_default().push(tell);
        self.wake.notify_one();
        tokio::select! {
            () = self.stop.cancelled() => Err(VsphereError::Closed),
            end = told => end.map_err(|_| VsphereError::Closed),
        }
    }

    /// Follows until stopped.
    pub(super) async fn run(&self) {
        while !self.stop.is_cancelled() {
            let lost = tokio::select! {
                () = self.stop.cancelled() => return,
                lost = self.follow() => lost,
            };
            if let Err(error) = lost {
                let error: &dyn std::error::Error = &error;
                debug!(error, "list of tasks lost; it is made anew");
            }
            let _stopped = self.stop.run_until_cancelled(sleep(AGAIN)).await;
        }
    }

    async fn follow(&self) -> Result<(), VsphereError> {
        // Nothing is made before somebody waits.
        if lock(&self.tasks).waiting.is_empty() {
            self.wake.notified().await;
        }
        let collector = collector(&self.session).await?;
        let view_manager = &self.session.content.view_manager;
        let list = made(&self.session.call("CreateListView", view_manager, "").await?, "list")?;
        let filter = filter("ListView", &list, "Task", &PATHS);
        self.session.call("CreateFilter", &collector, &filter).await?;
        lock(&self.tasks).listed.clear();
        self.wake.notify_one();
        let lost = tokio::select! {
            lost = self.updates(&collector) => lost,
            lost = self.listing(&list) => lost,
        };
        let _gone = self.session.call("DestroyPropertyCollector", &collector, "").await;
        lost
    }

    async fn updates(&self, collector: &Object) -> Result<(), VsphereError> {
        let longest = self.session.options().wait;
        let mut version = String::new();
        let mut infos: HashMap<String, TaskInfo> = HashMap::new();
        loop {
            if lock(&self.tasks).listed.is_empty() {
                self.listed.notified().await;
            }
            let Some(set) = wait(&self.session, collector, &version, longest).await? else { continue };
            version = set.text_of("version").to_owned();
            for (object, update) in changes(&set) {
                self.take(&mut infos, &object.id, update);
            }
            if set.text_of("truncated") != "true" {
                sleep(COALESCE).await;
            }
        }
    }

    /// Takes over what changed of a task, and tells those who wait when it has ended.
    fn take(&self, infos: &mut HashMap<String, TaskInfo>, id: &str, update: &Node) {
        let info = infos.entry(id.to_owned()).or_default();
        for change in update.all("changeSet") {
            let value = change.get("val");
            match change.text_of("name") {
                "info.state" => info.state = value.map_or_else(String::new, |v| v.text.clone()),
                "info.error" => info.error = value.map(task_fault),
                "info.result" => info.result = value.cloned(),
                _ => {}
            }
        }
        let end = match info.state.as_str() {
            "success" => Ok(info.result.clone()),
            "error" => Err(info.error.clone().unwrap_or_else(|| Fault::of("RuntimeFault"))),
            _ => return,
        };
        infos.remove(id);
        self.tell(id, &end);
    }

    fn tell(&self, id: &str, end: &Ended) {
        let mut tasks = lock(&self.tasks);
        for waiting in tasks.waiting.remove(id).unwrap_or_default() {
            // Whoever waited may have gone.
            let _ = waiting.send(end.clone());
        }
        if tasks.listed.remove(id) {
            tasks.over.push(id.to_owned());
        }
        if tasks.ended.len() >= ENDED_MAX {
            tasks.ended.pop_front();
        }
        tasks.ended.push_back((id.to_owned(), end.clone()));
    }

    /// Keeps the list of tasks that are waited for.
    async fn listing(&self, list: &Object) -> Result<(), VsphereError> {
        loop {
            self.wake.notified().await;
            sleep(GATHER).await;
            let (add, remove) = {
                let mut tasks = lock(&self.tasks);
                tasks.waiting.retain(|_, who| {
                    who.retain(|w| !w.is_closed());
                    !who.is_empty()
                });
                let add: Vec<_> =
                    tasks.waiting.keys().filter(|id| !tasks.listed.contains(*id)).cloned().collect();
                if add.is_empty() {
                    continue;
                }
                (add, std::mem::take(&mut tasks.over))
            };
            let arguments = refs("add", &add) + &refs("remove", &remove);
            let answer = self.session.call("ModifyListView", list, &arguments).await?;
            lock(&self.tasks).listed.extend(add);
            self.listed.notify_one();
            // vCenter keeps ended tasks for a few minutes; of older ones it knows nothing.
            for unknown in answer.all("returnval").filter_map(Node::object) {
                self.tell(&unknown.id, &Ok(None));
            }
        }
    }
}

fn refs(name: &str, ids: &[String]) -> String {
    ids.iter().map(|id| reference(name, &Object::new("Task", id))).collect()
}

#[derive(Debug, Default)]
struct TaskInfo {
    state: String,
    error: Option<Fault>,
    result: Option<Node>,
}
