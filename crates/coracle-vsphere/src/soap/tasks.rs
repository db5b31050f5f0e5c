//! Awaited tasks, all followed by one long poll. There is no poll while no task is awaited.
//!
//! ```text
//!  ended(task) ─▶ waiting ─▶ ModifyListView (tasks that are awaited close together share a call)
//!                    ▲              │
//!                    └──── WaitForUpdatesEx ◀── vCenter
//! ```

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    collector::{changes, collector, filter, parse_created_object, wait},
    session::Session,
    xml::{Node, reference, task_fault},
};
use crate::{Fault, Object, TaskId, VsphereError};

/// Time within which newly awaited tasks are added to the list by one call.
const GATHER: Duration = Duration::from_millis(25);
/// Time within which tasks that end are reported by one poll.
const COALESCE: Duration = Duration::from_millis(75);
/// Pause before a lost watch is created again.
const AGAIN: Duration = Duration::from_secs(1);
/// `TaskInfo.descriptionId` of a creation.
const CREATE: &str = "Folder.createVm";
/// Most results of ended tasks that are kept.
const ENDED_MAX: usize = 256;
/// Properties of a task that are read.
const PATHS: [&str; 3] = ["info.state", "info.error", "info.result"];

/// Result of a task. `Ok(None)`: the task has no result, or vCenter does not know it.
type Ended = Result<Option<Node>, Fault>;

#[derive(Debug, Default)]
struct Tasks {
    waiting: HashMap<String, Vec<oneshot::Sender<Ended>>>,
    listed: HashSet<String>,
    /// Tasks to remove from the list with its next change.
    over: Vec<String>,
    /// Results of the last tasks, oldest first. A task that leaves the list and returns between two polls reports no change.
    ended: VecDeque<(String, Ended)>,
}

/// Follows the tasks of a session.
#[derive(Debug)]
pub(super) struct TaskWatch {
    session: Arc<Session>,
    tasks: Mutex<Tasks>,
    /// Notified when a task is awaited that is not on the list.
    wake: Notify,
    /// Notified when tasks were added to the list.
    listed: Notify,
    /// Notified when the long poll missed the end of a task and must be created again.
    renew: Notify,
    stop: CancellationToken,
}

impl TaskWatch {
    pub(super) fn new(session: Arc<Session>, stop: CancellationToken) -> Self {
        Self {
            session,
            tasks: Mutex::default(),
            wake: Notify::new(),
            listed: Notify::new(),
            renew: Notify::new(),
            stop,
        }
    }

    /// Waits until the task has ended and returns its result. While the long poll reports nothing, the task is read at
    /// intervals, so that a lost update blocks no caller for ever. Cancel-safe.
    ///
    /// # Errors
    /// [`VsphereError::TaskRuns`] after the time limit of a wait; the task continues.
    pub(super) async fn wait_task(&self, task: &TaskId) -> Result<Option<Node>, VsphereError> {
        let known = self.tasks.lock().ended.iter().find(|(id, _)| *id == task.0).map(|(_, end)| end.clone());
        let end = match known {
            Some(end) => end,
            None => self.wait(task).await?,
        };
        end.map_err(|fault| VsphereError::task(format!("task {}", task.0), fault))
    }

    async fn wait(&self, task: &TaskId) -> Result<Ended, VsphereError> {
        let (tell, mut told) = oneshot::channel();
        {
            let mut tasks = self.tasks.lock();
            // The task may be queued for removal, and must not be removed by the call that adds it.
            tasks.over.retain(|id| *id != task.0);
            tasks.waiting.entry(task.0.clone()).or_default().push(tell);
        }
        self.wake.notify_one();
        let (began, options) = (Instant::now(), self.session.options());
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return Err(VsphereError::Closed),
                end = &mut told => return end.map_err(|_| VsphereError::Closed),
                () = sleep(options.task_check) => {}
            }
            let waited = began.elapsed();
            match self.read(task).await {
                Ok(Seen::Ended(end)) => {
                    warn!(task = task.0, ?waited, "long poll missed the end of a task, creating it again");
                    self.notify_waiters(&task.0, &end);
                    self.renew.notify_one();
                    return Ok(end);
                }
                Ok(Seen::Runs(state)) if waited >= options.task => {
                    return Err(VsphereError::TaskRuns {
                        task: task.0.clone(),
                        seconds: waited.as_secs(),
                        state,
                    });
                }
                Ok(Seen::Runs(state)) => warn!(task = task.0, state, ?waited, "task of vCenter still runs"),
                // The long poll has the same error and reports it.
                Err(error) if waited >= options.task => return Err(error),
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    warn!(task = task.0, error, "read task of vCenter failed");
                }
            }
        }
    }

    /// Reads the present state of the task by a separate call.
    async fn read(&self, task: &TaskId) -> Result<Seen, VsphereError> {
        let object = Object::new("Task", &task.0);
        let paths = [PATHS.as_slice(), &["info.progress"]].concat();
        let Some(found) = self.session.properties(&object, &paths).await? else {
            return Ok(Seen::Ended(Ok(None)));
        };
        Ok(match found.text("info.state") {
            "success" => Seen::Ended(Ok(found.get("info.result").cloned())),
            "error" => Seen::Ended(Err(found
                .get("info.error")
                .map_or_else(|| Fault::of("RuntimeFault"), task_fault))),
            state => {
                let progress = found.text("info.progress");
                let progress = if progress.is_empty() { String::new() } else { format!(", {progress} %") };
                Seen::Runs(format!("{state}{progress}"))
            }
        })
    }

    /// Follows tasks until stopped.
    pub(super) async fn run(&self) {
        while !self.stop.is_cancelled() {
            let lost = tokio::select! {
                () = self.stop.cancelled() => return,
                lost = self.follow() => lost,
            };
            if let Err(error) = lost {
                let error: &dyn std::error::Error = &error;
                warn!(error, "list of tasks lost, creating it again");
            }
            let _stopped = self.stop.run_until_cancelled(sleep(AGAIN)).await;
        }
    }

    async fn follow(&self) -> Result<(), VsphereError> {
        // Create nothing before a task is awaited.
        if self.tasks.lock().waiting.is_empty() {
            self.wake.notified().await;
        }
        let collector = collector(&self.session).await?;
        let view_manager = &self.session.content.view_manager;
        let list =
            parse_created_object(&self.session.call("CreateListView", view_manager, "").await?, "list")?;
        let filter = filter("ListView", &list, "Task", &PATHS);
        self.session.call("CreateFilter", &collector, &filter).await?;
        self.tasks.lock().listed.clear();
        self.wake.notify_one();
        let lost = tokio::select! {
            lost = self.updates(&collector) => lost,
            lost = self.listing(&list) => lost,
            () = self.renew.notified() => Ok(()),
        };
        let _gone = self.session.call("DestroyPropertyCollector", &collector, "").await;
        lost
    }

    async fn updates(&self, collector: &Object) -> Result<(), VsphereError> {
        let longest = self.session.options().wait;
        let mut version = String::new();
        let mut infos: HashMap<String, TaskInfo> = HashMap::new();
        loop {
            if self.tasks.lock().listed.is_empty() {
                self.listed.notified().await;
            }
            let Some(set) = wait(&self.session, collector, &version, longest).await? else { continue };
            version = set.text_of("version").to_owned();
            for (object, update) in changes(&set) {
                self.apply_update(&mut infos, &object.id, update);
            }
            if set.text_of("truncated") != "true" {
                sleep(COALESCE).await;
            }
        }
    }

    /// Applies changes of a task, and notifies its waiters when it has ended.
    fn apply_update(&self, infos: &mut HashMap<String, TaskInfo>, id: &str, update: &Node) {
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
        self.notify_waiters(id, &end);
    }

    fn notify_waiters(&self, id: &str, end: &Ended) {
        let mut tasks = self.tasks.lock();
        for waiting in tasks.waiting.remove(id).unwrap_or_default() {
            // The waiter may have been cancelled.
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

    /// Keeps the list view equal to the set of awaited tasks.
    async fn listing(&self, list: &Object) -> Result<(), VsphereError> {
        loop {
            self.wake.notified().await;
            sleep(GATHER).await;
            let (add, remove) = {
                let mut tasks = self.tasks.lock();
                tasks.waiting.retain(|_, who| {
                    who.retain(|w| !w.is_closed());
                    !who.is_empty()
                });
                let add: Vec<_> =
                    tasks.waiting.keys().filter(|id| !tasks.listed.contains(*id)).cloned().collect();
                if add.is_empty() {
                    continue;
                }
                // Mark them before the call: the long poll may report the end of a task before the call has returned.
                tasks.listed.extend(add.iter().cloned());
                (add, std::mem::take(&mut tasks.over))
            };
            let arguments = refs("add", &add) + &refs("remove", &remove);
            let answer = self.session.call("ModifyListView", list, &arguments).await?;
            self.listed.notify_one();
            // vCenter keeps ended tasks for a few minutes and does not know older ones.
            for unknown in answer.all("returnval").filter_map(Node::object) {
                self.notify_waiters(&unknown.id, &Ok(None));
            }
        }
    }
}

fn refs(name: &str, ids: &[String]) -> String {
    ids.iter().map(|id| reference(name, &Object::new("Task", id))).collect()
}

/// Creations of VMs in `folder` that vCenter lists as queued or running.
pub(super) async fn creations(session: &Session, folder: &Object) -> Result<Vec<TaskId>, VsphereError> {
    let Some(manager) = &session.content.task_manager else { return Ok(Vec::new()) };
    let recent = session.properties(manager, &["recentTask"]).await?;
    let recent = recent.map(|p| p.objects("recentTask")).unwrap_or_default();
    let mut found = Vec::new();
    // Read one by one: a task that vCenter forgets meanwhile must not hide the others.
    for task in recent {
        let paths = ["info.state", "info.descriptionId", "info.entity"];
        let Some(info) = session.properties(&task, &paths).await? else { continue };
        let runs = matches!(info.text("info.state"), "queued" | "running");
        if runs
            && info.text("info.descriptionId") == CREATE
            && info.object("info.entity").as_ref() == Some(folder)
        {
            found.push(TaskId(task.id));
        }
    }
    Ok(found)
}

/// State of a task that was read.
#[derive(Debug)]
enum Seen {
    Ended(Ended),
    /// State, and progress where vCenter reports it.
    Runs(String),
}

#[derive(Debug, Default)]
struct TaskInfo {
    state: String,
    error: Option<Fault>,
    result: Option<Node>,
}
