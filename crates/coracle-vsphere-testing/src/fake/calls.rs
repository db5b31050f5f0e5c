//! Calls of the in-memory vCenter.

use std::sync::Arc;

use async_trait::async_trait;
use coracle_vsphere::{
    Body, Change, Fault, File, Object, Site, SiteSpec, SiteVms, Store, TaskId, Vm, VmConfigSpec, Vsphere,
    VsphereError, Wanted,
};
use futures_util::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{FakeVsphere, TASK, Task, effects::Effect, site_of};

#[async_trait]
impl Vsphere for FakeVsphere {
    fn instance(&self) -> String {
        "fake-vcenter".into()
    }

    async fn site(&self, spec: &SiteSpec) -> Result<Arc<Site>, VsphereError> {
        if self.lock().halted {
            return std::future::pending().await;
        }
        site_of(&mut self.lock(), spec)
    }

    fn forget(&self) {
        self.lock().sites.clear();
    }

    fn machines(&self, _site: &Arc<Site>) -> watch::Receiver<Arc<SiteVms>> {
        self.machines.subscribe()
    }

    async fn find(&self, site: &Site, wanted: &Wanted) -> Result<Vec<Vm>, VsphereError> {
        let call = self.begin("Find").await?;
        let fits = |vm: &&Vm| {
            (!wanted.instance_uuid.is_empty() && vm.instance_uuid == wanted.instance_uuid)
                || wanted.uuids.iter().any(|u| !u.is_empty() && *u == vm.uuid)
                || (!wanted.name.is_empty()
                    && vm.name == wanted.name
                    && vm.folder.as_ref() == Some(&site.folder))
        };
        let found = {
            let state = self.lock();
            state.vms.values().filter(fits).cloned().collect()
        };
        self.finish(&call, found).await
    }

    async fn place(&self, _site: &Site, _spec: &VmConfigSpec) -> Result<Store, VsphereError> {
        let call = self.begin("RecommendDatastores").await?;
        let store = Store { object: Object::new("Datastore", "ds-1"), name: "ds-1".into() };
        self.finish(&call, store).await
    }

    async fn create(&self, site: &Site, _store: &Store, spec: &VmConfigSpec) -> Result<TaskId, VsphereError> {
        self.start("CreateVM_Task", Effect::Create(Box::new(spec.clone()), site.folder.clone())).await
    }

    async fn creations(&self, site: &Site) -> Result<Vec<TaskId>, VsphereError> {
        self.settle();
        let state = self.lock();
        let creates =
            |task: &Task| matches!(&task.effect, Some(Effect::Create(_, folder)) if *folder == site.folder);
        Ok(state.tasks.iter().filter(|(_, task)| creates(task)).map(|(id, _)| TaskId(id.clone())).collect())
    }

    async fn power_on(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        self.start("PowerOnVM_Task", Effect::Power(vm.id.clone(), true)).await
    }

    async fn power_off(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        self.start("PowerOffVM_Task", Effect::Power(vm.id.clone(), false)).await
    }

    async fn destroy(&self, vm: &Object) -> Result<TaskId, VsphereError> {
        self.start("Destroy_Task", Effect::Destroy(vm.id.clone())).await
    }

    async fn reconfigure(&self, vm: &Object, change: &Change) -> Result<TaskId, VsphereError> {
        self.start("ReconfigVM_Task", Effect::Change(vm.id.clone(), change.clone())).await
    }

    async fn wait_task(&self, task: &TaskId) -> Result<Option<Object>, VsphereError> {
        let began = Instant::now();
        let limit = self.lock().task_limit.unwrap_or(TASK);
        let mut changed = self.machines.subscribe();
        loop {
            self.settle();
            let now = self.lock().tasks.get(&task.0).map(|t| (t.due, t.end.clone()));
            let Some((due, end)) = now else { return Ok(None) };
            if let Some(end) = end {
                return end.map_err(|fault| VsphereError::task(format!("task {}", task.0), fault));
            }
            if began.elapsed() >= limit {
                let (task, seconds) = (task.0.clone(), began.elapsed().as_secs());
                return Err(VsphereError::TaskRuns { task, seconds, state: "running".into() });
            }
            tokio::select! {
                () = sleep_until(due.min(began + limit)) => {}
                // An answer to a question makes a task continue.
                _ = changed.changed() => {}
            }
        }
    }

    async fn answer(&self, vm: &Object, _question: &str, choice: &str) -> Result<(), VsphereError> {
        let call = self.begin("AnswerVM").await?;
        {
            let mut state = self.lock();
            state.answers.push(choice.to_owned());
            if let Some(task) = state.asking.remove(&vm.id) {
                state.asks = None;
                if let Some(vm) = state.vms.get_mut(&vm.id) {
                    vm.question = None;
                }
                if let Some(task) = state.tasks.get_mut(&task) {
                    task.due = Instant::now();
                }
            }
        }
        if let Some(vm) = self.lock().vms.get_mut(&vm.id).filter(|vm| vm.question.is_some()) {
            vm.question = None;
            if let Some(drive) = vm.cdrom.as_mut() {
                drive.connected = false;
            }
        }
        self.publish();
        self.finish(&call, ()).await
    }

    async fn attach_tags(&self, vm: &Object, tags: &[String]) -> Result<(), VsphereError> {
        if tags.is_empty() {
            return Ok(());
        }
        let call = self.begin("AttachTags").await?;
        self.lock().tags.entry(vm.id.clone()).or_default().extend(tags.iter().cloned());
        self.finish(&call, ()).await
    }

    async fn files(
        &self,
        _site: &Site,
        folder: &str,
        pattern: &str,
    ) -> Result<Option<Vec<File>>, VsphereError> {
        let call = self.begin("SearchDatastore_Task").await?;
        let found = {
            let state = self.lock();
            state.folders.contains(folder).then(|| {
                let inside = state.files.iter().filter_map(|(path, size)| {
                    let name = path.strip_prefix(folder)?.strip_prefix('/')?;
                    let fits = pattern.strip_prefix('*').map_or(name == pattern, |end| name.ends_with(end));
                    (fits && !name.contains('/')).then(|| (name.to_owned(), *size))
                });
                inside.map(|(name, size)| File { name, size, modified: String::new() }).collect()
            })
        };
        self.finish(&call, found).await
    }

    async fn make_folder(&self, _site: &Site, folder: &str) -> Result<(), VsphereError> {
        let call = self.begin("MakeDirectory").await?;
        self.lock().folders.insert(folder.to_owned());
        self.finish(&call, ()).await
    }

    async fn upload(
        &self,
        _site: &Site,
        path: &str,
        length: u64,
        mut body: Body,
    ) -> Result<(), VsphereError> {
        let call = self.begin("PUT").await?;
        let (mut bytes, mut sum) = (0, Sha256::new());
        while let Some(chunk) = body.next().await {
            let Ok(chunk) = chunk else { break };
            bytes += u64::try_from(chunk.len()).unwrap_or(0);
            sum.update(&chunk);
            self.lock().files.insert(path.to_owned(), bytes);
        }
        if bytes != length {
            return Err(VsphereError::Protocol {
                operation: format!("upload to {path}"),
                what: format!("{bytes} bytes came of {length}"),
            });
        }
        self.lock().digests.insert(path.to_owned(), hex::encode(sum.finalize()));
        self.finish(&call, ()).await
    }

    async fn digest(&self, _site: &Site, path: &str) -> Result<Option<String>, VsphereError> {
        let call = self.begin("GET").await?;
        let found = {
            let state = self.lock();
            let digest = state.digests.get(path).cloned();
            digest.map(|digest| (!state.locked.contains(path)).then_some(digest))
        };
        let Some(digest) = found else {
            return Err(VsphereError::Status { operation: format!("read {path}"), status: 404 });
        };
        self.finish(&call, digest).await
    }

    async fn move_file(&self, _site: &Site, from: &str, to: &str) -> Result<bool, VsphereError> {
        let call = self.begin("MoveDatastoreFile_Task").await?;
        let moved = {
            let mut state = self.lock();
            if state.files.contains_key(to) {
                Some(false)
            } else {
                let size = state.files.remove(from);
                if let Some(digest) = state.digests.remove(from) {
                    state.digests.insert(to.to_owned(), digest);
                }
                size.map(|size| state.files.insert(to.to_owned(), size).is_none())
            }
        };
        let Some(moved) = moved else {
            return Err(VsphereError::task(format!("move {from}"), Fault::of("FileNotFound")));
        };
        self.finish(&call, moved).await
    }

    async fn delete_file(&self, _site: &Site, path: &str) -> Result<(), VsphereError> {
        let call = self.begin("DeleteDatastoreFile_Task").await?;
        self.lock().files.remove(path);
        self.finish(&call, ()).await
    }

    async fn close(&self) {}
}
