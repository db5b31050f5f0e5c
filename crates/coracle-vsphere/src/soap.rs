//! The client: SOAP, datastore files and tags over one connection pool.

mod files;
mod inventory;
mod machines;
mod session;
mod spec;
mod tags;
mod tasks;
mod tls;
mod watch;
mod xml;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{sync::watch as channel, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use self::{session::Session, tags::TagCache, tasks::TaskWatch, watch::SiteWatch};
use crate::{
    Body, Change, Connect, Credentials, File, Machines, Object, Site, SiteSpec, Store, TaskId, Vm, VmSpec,
    Vsphere, VsphereError, VsphereMetrics, Wanted,
};

/// Times and bounds of the client.
#[derive(Clone, Debug)]
pub struct SoapOptions {
    /// To connect and shake hands.
    pub connect: Duration,
    /// One call; calls that only wait have their own.
    pub call: Duration,
    /// A connection that is not used closes.
    pub idle: Duration,
    /// Calls at once, waiting ones apart.
    pub calls_max: usize,
    /// How long a refused user is not tried again: accounts are locked out.
    pub auth_hold: Duration,
    /// Longest wait for updates on the server.
    pub wait: Duration,
    /// Between two waits for machines: updates that come close together take one call.
    pub coalesce: Duration,
    /// A session without calls is kept from ending this often.
    pub keep_alive: Duration,
    /// An upload is given up when no byte was taken for so long.
    pub upload_idle: Duration,
}

impl Default for SoapOptions {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            call: Duration::from_secs(120),
            idle: Duration::from_secs(60),
            calls_max: 16,
            auth_hold: Duration::from_secs(300),
            wait: Duration::from_secs(60),
            coalesce: Duration::from_millis(1000),
            keep_alive: Duration::from_secs(300),
            upload_idle: Duration::from_secs(60),
        }
    }
}

/// Opens SOAP sessions.
#[derive(Clone, Debug, Default)]
pub struct SoapConnect {
    /// Times and bounds.
    pub options: SoapOptions,
    /// Where to count.
    pub metrics: VsphereMetrics,
}

#[async_trait]
impl Connect for SoapConnect {
    async fn connect(&self, credentials: &Credentials) -> Result<Arc<dyn Vsphere>, VsphereError> {
        let client = SoapVsphere::open(credentials, self.options.clone(), self.metrics.clone()).await?;
        Ok(Arc::new(client))
    }
}

/// A vCenter by SOAP.
pub struct SoapVsphere {
    session: Arc<Session>,
    sites: Mutex<HashMap<SiteSpec, Arc<Site>>>,
    watches: Mutex<HashMap<Object, Arc<SiteWatch>>>,
    ending: Arc<TaskWatch>,
    /// Names of datastores and their browsers, by id.
    stores: Mutex<HashMap<String, (String, Object)>>,
    /// Space of disks that are being created: when, where, bytes.
    promised: Mutex<Vec<(Instant, Object, u64)>>,
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
            session,
            ending,
            sites: Mutex::default(),
            watches: Mutex::default(),
            stores: Mutex::default(),
            promised: Mutex::default(),
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
                    warn!(server = session.server(), error, "session not kept alive");
                }
            }
        });
        Ok(client)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        lock(&self.tasks).spawn(task);
    }

    /// The one watch of a site's folder.
    fn watch(&self, site: &Arc<Site>) -> Arc<SiteWatch> {
        let mut watches = lock(&self.watches);
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl Vsphere for SoapVsphere {
    fn instance(&self) -> String {
        self.session.content.instance.clone()
    }

    async fn site(&self, spec: &SiteSpec) -> Result<Arc<Site>, VsphereError> {
        if let Some(found) = lock(&self.sites).get(spec) {
            return Ok(found.clone());
        }
        let site = Arc::new(inventory::resolve(&self.session, spec).await?);
        lock(&self.sites).insert(spec.clone(), site.clone());
        Ok(site)
    }

    fn forget(&self) {
        lock(&self.sites).clear();
        lock(&self.stores).clear();
        self.tags.forget();
    }

    fn machines(&self, site: &Arc<Site>) -> channel::Receiver<Arc<Machines>> {
        self.watch(site).subscribe()
    }

    async fn find(&self, site: &Site, wanted: &Wanted) -> Result<Vec<Vm>, VsphereError> {
        machines::find(&self.session, site, wanted).await
    }

    async fn place(&self, site: &Site, spec: &VmSpec) -> Result<Store, VsphereError> {
        self.choose_store(site, spec).await
    }

    async fn create(&self, site: &Site, store: &Store, spec: &VmSpec) -> Result<TaskId, VsphereError> {
        machines::create(&self.session, site, store, spec).await
    }

    async fn power_on(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        machines::start(&self.session, "PowerOnVM_Task", vm, "").await
    }

    async fn power_off(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        machines::start(&self.session, "PowerOffVM_Task", vm, "").await
    }

    async fn destroy(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        machines::start(&self.session, "Destroy_Task", vm, "").await
    }

    async fn reconfigure(&self, vm: &Object, change: &Change) -> Result<TaskId, VsphereError> {
        machines::start(&self.session, "ReconfigVM_Task", vm, &spec::change(change)).await
    }

    async fn ended(&self, task: &TaskId) -> Result<Option<Object>, VsphereError> {
        Ok(self.ending.ended(task).await?.and_then(|result| result.object()))
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
        self.search(site, folder, pattern).await
    }

    async fn make_folder(&self, site: &Site, folder: &str) -> Result<(), VsphereError> {
        files::make_folder(&self.session, site, folder).await
    }

    async fn upload(&self, site: &Site, path: &str, length: u64, body: Body) -> Result<(), VsphereError> {
        files::upload(&self.session, site, path, length, body).await
    }

    async fn move_file(&self, site: &Site, from: &str, to: &str) -> Result<bool, VsphereError> {
        self.rename(site, from, to).await
    }

    async fn digest(&self, site: &Site, path: &str) -> Result<Option<String>, VsphereError> {
        files::digest(&self.session, site, path).await
    }

    async fn delete_file(&self, site: &Site, path: &str) -> Result<(), VsphereError> {
        self.remove(site, path).await
    }

    async fn close(&self) {
        self.stop.cancel();
        let mut tasks = std::mem::take(&mut *lock(&self.tasks));
        tasks.shutdown().await;
        self.session.logout().await;
    }
}
