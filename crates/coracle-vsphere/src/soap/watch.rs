//! Watch of a folder's VMs by one long poll: a property collector over a view of them. When the session is lost, the collector
//! is created again and everything is read again.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    collector::{changes, collector, filter, parse_created_object, wait},
    machines,
    session::Session,
    xml::{Node, reference, text},
};
use crate::{Object, SiteVms, VsphereError};

/// First pause before a lost watch is created again; doubled up to `AGAIN_MAX`.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(30);

/// Watch of one folder.
#[derive(Debug)]
pub(super) struct SiteWatch {
    session: Arc<Session>,
    folder: Object,
    out: watch::Sender<Arc<SiteVms>>,
    stop: CancellationToken,
    /// Whether the folder no longer exists.
    ended: AtomicBool,
}

impl SiteWatch {
    pub(super) fn new(session: Arc<Session>, folder: Object, stop: CancellationToken) -> Self {
        Self { session, folder, out: watch::Sender::new(Arc::default()), stop, ended: AtomicBool::new(false) }
    }

    /// Whether the watch has ended because the folder no longer exists.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<SiteVms>> {
        self.out.subscribe()
    }

    /// Watches until stopped.
    pub(super) async fn run(&self) {
        let mut again = AGAIN;
        while !self.stop.is_cancelled() {
            let lost = tokio::select! {
                () = self.stop.cancelled() => return,
                lost = self.follow() => lost,
            };
            if self.out.borrow().is_current {
                again = AGAIN;
                self.out.send_modify(|machines| Arc::make_mut(machines).is_current = false);
            }
            if let Err(error) = lost {
                if self.is_gone(&error).await {
                    self.ended.store(true, Ordering::Release);
                    return;
                }
                let error: &dyn std::error::Error = &error;
                warn!(folder = self.folder.id, error, "watch lost, creating it again");
            }
            let _stopped = self.stop.run_until_cancelled(sleep(again)).await;
            again = (again * 2).min(AGAIN_MAX);
        }
    }

    /// Whether the folder no longer exists. The error alone may mean that the collector is gone, together with its session.
    async fn is_gone(&self, error: &VsphereError) -> bool {
        error.fault() == Some("ManagedObjectNotFound")
            && matches!(self.session.properties(&self.folder, &["name"]).await, Ok(None))
    }

    async fn follow(&self) -> Result<(), VsphereError> {
        let content = &self.session.content;
        let collector = collector(&self.session).await?;
        let arguments =
            reference("container", &self.folder) + &text("type", "VirtualMachine") + &text("recursive", true);
        let view = self.session.call("CreateContainerView", &content.view_manager, &arguments).await?;
        let view = parse_created_object(&view, "view")?;
        let filter = filter("ContainerView", &view, "VirtualMachine", &machines::PATHS);
        self.session.call("CreateFilter", &collector, &filter).await?;
        let lost = self.updates(&collector).await;
        let _gone = self.session.call("DestroyPropertyCollector", &collector, "").await;
        let _gone = self.session.call("DestroyView", &view, "").await;
        lost
    }

    async fn updates(&self, collector: &Object) -> Result<(), VsphereError> {
        let options = self.session.options();
        let (mut version, mut vms) = (String::new(), HashMap::new());
        loop {
            let Some(set) = wait(&self.session, collector, &version, options.wait).await? else { continue };
            let is_first = version.is_empty();
            version = set.text_of("version").to_owned();
            let mut changed = is_first;
            for (object, update) in changes(&set) {
                take(&mut vms, object, update);
                changed = true;
            }
            if set.text_of("truncated") == "true" {
                continue;
            }
            if changed {
                self.out.send_replace(Arc::new(SiteVms { is_current: true, vms: vms.clone() }));
            }
            sleep(options.coalesce).await;
        }
    }
}

fn take(vms: &mut HashMap<String, Arc<crate::Vm>>, object: Object, update: &Node) {
    if update.text_of("kind") == "leave" {
        vms.remove(&object.id);
        return;
    }
    let id = object.id.clone();
    let vm = vms.entry(id).or_insert_with(|| Arc::new(machines::unknown_vm(object)));
    let vm = Arc::make_mut(vm);
    for change in update.all("changeSet") {
        machines::apply(vm, change.text_of("name"), change.get("val"));
    }
    for missing in update.all("missingSet") {
        let fault = missing.get("fault").map(super::xml::task_fault).unwrap_or_default();
        vm.unreadable = format!("{}: {fault}", missing.text_of("path"));
    }
    machines::settle(vm);
}
