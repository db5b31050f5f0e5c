//! Caches of VMs, Services and EndpointSlices, and reads from the API server.

use std::sync::Arc;

use coracle_api::{MikromVM, MikromVMSpec, MikromVMStatus, condition};
use coracle_reconcile::{EventRecorder, Seen, WorkQueue, follow, object, watch_config};
use futures_util::{Stream, StreamExt as _};
use k8s_openapi::{
    api::{core::v1::Service, discovery::v1::EndpointSlice},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Client, Resource, ResourceExt as _,
    runtime::{
        reflector::{self, ObjectRef, Store, store::Writer},
        watcher,
    },
};
use tokio::sync::mpsc;

use crate::{
    config::{CONTROLLER, Config},
    plan::VM_LABEL,
};

/// Deleted VM of an object: namespace, name and UID.
pub(crate) struct GoneVm {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

/// State that all reconciles share.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) vms: Store<MikromVM>,
    pub(crate) services: Store<Service>,
    pub(crate) slices: Store<EndpointSlice>,
    pub(crate) queue: WorkQueue<MikromVM>,
    pub(crate) events: EventRecorder,
    pub(crate) gone: tokio::sync::Mutex<mpsc::UnboundedReceiver<GoneVm>>,
    tell_gone: mpsc::UnboundedSender<GoneVm>,
    namespace: Option<String>,
}

/// Write ends of the caches.
pub(crate) struct Writers {
    vms: Writer<MikromVM>,
    services: Writer<Service>,
    slices: Writer<EndpointSlice>,
}

impl Context {
    pub(crate) fn new(client: Client, config: &Config) -> (Self, Writers) {
        let ((vms, vms_writer), (services, services_writer)) = (reflector::store(), reflector::store());
        let (slices, slices_writer) = reflector::store();
        let (tell_gone, gone) = mpsc::unbounded_channel();
        let cx = Self {
            events: EventRecorder::new(client.clone(), CONTROLLER, &config.identity),
            client,
            vms,
            services,
            slices,
            queue: WorkQueue::default(),
            gone: tokio::sync::Mutex::new(gone),
            tell_gone,
            namespace: config.common.namespace.clone(),
        };
        (cx, Writers { vms: vms_writer, services: services_writer, slices: slices_writer })
    }

    /// Waits until every kind was listed once.
    pub(crate) async fn ready(&self) {
        // `wait_until_ready` fails only without a writer, and `watch` holds the writers.
        let _ = self.vms.wait_until_ready().await;
        let _ = self.services.wait_until_ready().await;
        let _ = self.slices.wait_until_ready().await;
    }

    /// Keeps the caches up to date. Never returns.
    pub(crate) async fn watch(&self, writers: Writers) {
        let namespace = self.namespace.as_deref();
        let own = watch_config().labels(VM_LABEL);
        let vms =
            coracle_reconcile::watch(object::scoped::<MikromVM>(&self.client, namespace), watch_config());
        let vms = self.follow_vms(vms, writers.vms);
        let services = follow(
            object::scoped::<Service>(&self.client, namespace),
            own.clone(),
            writers.services,
            |seen| self.queue_vm(seen),
        );
        let slices =
            follow(object::scoped::<EndpointSlice>(&self.client, namespace), own, writers.slices, |seen| {
                self.queue_vm(seen)
            });
        tokio::join!(vms, services, slices);
    }

    async fn follow_vms(
        &self,
        events: impl Stream<Item = watcher::Event<MikromVM>> + Send,
        mut writer: Writer<MikromVM>,
    ) {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            let event = strip_unread_fields(event);
            writer.apply_watcher_event(&event);
            match &event {
                watcher::Event::Apply(vm) => self.queue.add(ObjectRef::from_obj(vm)),
                watcher::Event::Delete(vm) => self.forget(vm),
                watcher::Event::InitDone => {
                    self.vms.state().iter().for_each(|vm| self.queue.add(ObjectRef::from_obj(vm.as_ref())));
                }
                watcher::Event::Init | watcher::Event::InitApply(_) => {}
            }
        }
    }

    fn forget(&self, vm: &MikromVM) {
        let gone = GoneVm {
            namespace: vm.namespace().unwrap_or_default(),
            name: vm.name_any(),
            uid: vm.uid().unwrap_or_default(),
        };
        let _not_after_the_end = self.tell_gone.send(gone);
    }

    /// Queues the VM of a changed Service or EndpointSlice of this controller.
    fn queue_vm<K: Resource<DynamicType = ()>>(&self, seen: Seen<'_, K>) {
        let object = seen.object();
        if let Some(name) = object.labels().get(VM_LABEL) {
            self.queue.add(ObjectRef::new(name).within(&object.namespace().unwrap_or_default()));
        }
    }
}

/// Removes the fields of a VM that this controller does not read.
fn strip_unread_fields(event: watcher::Event<MikromVM>) -> watcher::Event<MikromVM> {
    let slim = |vm: MikromVM| {
        let metadata = ObjectMeta {
            name: vm.metadata.name,
            namespace: vm.metadata.namespace,
            uid: vm.metadata.uid,
            resource_version: vm.metadata.resource_version,
            deletion_timestamp: vm.metadata.deletion_timestamp,
            ..ObjectMeta::default()
        };
        let status = vm.status.map(|mut status| {
            status.conditions.retain(|one| one.type_ == condition::READY);
            MikromVMStatus {
                ip_address: status.ip_address,
                node_name: status.node_name,
                conditions: status.conditions,
                ..MikromVMStatus::default()
            }
        });
        let spec = MikromVMSpec { ports: vm.spec.ports, ..MikromVMSpec::default() };
        MikromVM { metadata, spec, status }
    };
    match event {
        watcher::Event::Apply(vm) => watcher::Event::Apply(slim(vm)),
        watcher::Event::InitApply(vm) => watcher::Event::InitApply(slim(vm)),
        watcher::Event::Delete(vm) => watcher::Event::Delete(slim(vm)),
        watcher::Event::Init => watcher::Event::Init,
        watcher::Event::InitDone => watcher::Event::InitDone,
    }
}

impl Context {
    /// Returns the cached objects with a VM's name.
    pub(crate) fn cached(&self, vm: &MikromVM) -> (Option<Arc<Service>>, Option<Arc<EndpointSlice>>) {
        let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
        let service = self.services.get(&ObjectRef::new(&name).within(&namespace));
        let slice = self.slices.get(&ObjectRef::new(&name).within(&namespace));
        (service, slice)
    }
}
