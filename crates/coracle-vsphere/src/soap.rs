//! vCenter client: SOAP, datastore files and tags over one connection pool.

mod collector;
mod datastores;
mod files;
mod inventory;
mod machines;
mod options;
mod session;
mod spec;
mod tags;
mod tasks;
mod tls;
mod upload;
mod watch;
mod xml;

use std::{collections::HashMap, fmt, sync::Arc};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{sync::watch as channel, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use self::options::SoapOptions;
use self::{datastores::Datastores, session::Session, tags::TagCache, tasks::TaskWatch, watch::SiteWatch};
use crate::{
    Body, Change, Connect, Credentials, File, Object, Site, SiteSpec, SiteVms, Store, TaskId, Vm,
    VmConfigSpec, Vsphere, VsphereError, VsphereMetrics, Wanted,
};

/// Opens SOAP sessions.
#[derive(Clone, Debug, Default)]
pub struct SoapConnect {
    /// Timeouts and limits of the client.
    pub options: SoapOptions,
    /// Metrics of the calls.
    pub metrics: VsphereMetrics,
}

#[async_trait]
impl Connect for SoapConnect {
    async fn connect(&self, credentials: &Credentials) -> Result<Arc<dyn Vsphere>, VsphereError> {
        let client = SoapVsphere::open(credentials, self.options.clone(), self.metrics.clone()).await?;
        Ok(Arc::new(client))
    }
}

/// vCenter client that uses SOAP.
pub struct SoapVsphere {
    session: Arc<Session>,
    sites: Mutex<HashMap<SiteSpec, Arc<Site>>>,
    watches: Mutex<HashMap<Object, Arc<SiteWatch>>>,
    ending: Arc<TaskWatch>,
    datastores: Datastores,
    tags: TagCache,
    tasks: Mutex<JoinSet<()>>,
    stop: CancellationToken,
}

impl fmt::Debug for SoapVsphere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoapVsphere").field("session", &self.session).finish_non_exhaustive()
    }
}

impl SoapVsphere {
    /// Connects and logs in.
    ///
    /// # Errors
    /// [`VsphereError`].
    pub async fn open(
        credentials: &Credentials,
        options: SoapOptions,
        metrics: VsphereMetrics,
    ) -> Result<Self, VsphereError> {
        let session = Arc::new(Session::open(credentials, options, metrics).await?);
        let stop = CancellationToken::new();
        let ending = Arc::new(TaskWatch::new(session.clone(), stop.clone()));
        let client = Self {
            datastores: Datastores::new(session.clone()),
            session,
            ending,
            sites: Mutex::default(),
            watches: Mutex::default(),
            tags: TagCache::default(),
            tasks: Mutex::default(),
            stop,
        };
        let ending = client.ending.clone();
        client.spawn(async move { ending.run().await });
        let (session, stop) = (client.session.clone(), client.stop.clone());
        client.spawn(async move {
            let mut tick = tokio::time::interval(session.options().keep_alive);
            tick.tick().await;
            while stop.run_until_cancelled(tick.tick()).await.is_some() {
                if let Err(error) = session.keep_alive().await {
                    let error: &dyn std::error::Error = &error;
                    warn!(server = session.server(), error, "keep session alive failed");
                }
            }
        });
        Ok(client)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().spawn(task);
    }

    /// Returns the watch of a site's folder. There is one for each folder.
    fn watch(&self, site: &Arc<Site>) -> Arc<SiteWatch> {
        let mut watches = self.watches.lock();
        watches.retain(|_, watch| !watch.has_ended());
        if let Some(found) = watches.get(&site.folder) {
            return found.clone();
        }
        let watch =
            Arc::new(SiteWatch::new(self.session.clone(), site.folder.clone(), self.stop.child_token()));
        watches.insert(site.folder.clone(), watch.clone());
        let run = watch.clone();
        self.spawn(async move { run.run().await });
        watch
    }
}

#[async_trait]
impl Vsphere for SoapVsphere {
    fn instance(&self) -> String {
        self.session.content.instance.clone()
    }

    async fn site(&self, spec: &SiteSpec) -> Result<Arc<Site>, VsphereError> {
        if let Some(found) = self.sites.lock().get(spec) {
            return Ok(found.clone());
        }
        let site = Arc::new(inventory::resolve(&self.session, spec).await?);
        self.sites.lock().insert(spec.clone(), site.clone());
        Ok(site)
    }

    fn forget(&self) {
        self.sites.lock().clear();
        self.datastores.forget();
        self.tags.forget();
    }

    fn machines(&self, site: &Arc<Site>) -> channel::Receiver<Arc<SiteVms>> {
        self.watch(site).subscribe()
    }

    async fn find(&self, site: &Site, wanted: &Wanted) -> Result<Vec<Vm>, VsphereError> {
        machines::find(&self.session, site, wanted).await
    }

    async fn place(&self, site: &Site, spec: &VmConfigSpec) -> Result<Store, VsphereError> {
        self.datastores.choose(site, spec).await
    }

    async fn create(&self, site: &Site, store: &Store, spec: &VmConfigSpec) -> Result<TaskId, VsphereError> {
        machines::create(&self.session, site, store, spec).await
    }

    async fn creations(&self, site: &Site) -> Result<Vec<TaskId>, VsphereError> {
        tasks::creations(&self.session, &site.folder).await
    }

    async fn power_on(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        self.session.start_task("PowerOnVM_Task", vm, "").await
    }

    async fn power_off(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        self.session.start_task("PowerOffVM_Task", vm, "").await
    }

    async fn destroy(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        self.session.start_task("Destroy_Task", vm, "").await
    }

    async fn reconfigure(&self, vm: &Object, change: &Change) -> Result<TaskId, VsphereError> {
        self.session.start_task("ReconfigVM_Task", vm, &spec::change(change)).await
    }

    async fn wait_task(&self, task: &TaskId) -> Result<Option<Object>, VsphereError> {
        Ok(self.ending.wait_task(task).await?.and_then(|result| result.object()))
    }

    async fn answer(&self, vm: &Object, question: &str, choice: &str) -> Result<(), VsphereError> {
        let arguments = xml::text("questionId", question) + &xml::text("answerChoice", choice);
        self.session.call("AnswerVM", vm, &arguments).await.map(drop)
    }

    async fn attach_tags(&self, vm: &Object, tags: &[String]) -> Result<(), VsphereError> {
        self.tags.attach(&self.session, vm, tags).await
    }

    async fn files(
        &self,
        site: &Site,
        folder: &str,
        pattern: &str,
    ) -> Result<Option<Vec<File>>, VsphereError> {
        let browser = self.datastores.browser(&site.iso.object).await?;
        files::search(&self.session, &self.ending, &browser, site, folder, pattern).await
    }

    async fn make_folder(&self, site: &Site, folder: &str) -> Result<(), VsphereError> {
        files::make_folder(&self.session, site, folder).await
    }

    async fn upload(&self, site: &Site, path: &str, length: u64, body: Body) -> Result<(), VsphereError> {
        upload::upload(&self.session, site, path, length, body).await
    }

    async fn move_file(&self, site: &Site, from: &str, to: &str) -> Result<bool, VsphereError> {
        files::rename(&self.session, &self.ending, site, from, to).await
    }

    async fn digest(&self, site: &Site, path: &str) -> Result<Option<String>, VsphereError> {
        files::digest(&self.session, site, path).await
    }

    async fn delete_file(&self, site: &Site, path: &str) -> Result<(), VsphereError> {
        files::remove(&self.session, &self.ending, site, path).await
    }

    async fn close(&self) {
        self.stop.cancel();
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
        self.session.logout().await;
    }
}
