//! Settings of the server.

use std::fmt;
use std::sync::Arc;

use coracle_pod::NamespaceKeys;
use coracle_pod::events::PodEvent;
use coracle_pod::host::PodId;

/// Settings of the server.
#[derive(Clone, Debug)]
pub struct CriOptions {
    /// Names of the handlers that pods may ask for, beside the empty one and one for each driver.
    pub handlers: Vec<String>,
    /// Names of the handlers of pods whose container is a disk image in a VM of its own.
    pub disk_handlers: Vec<String>,
    /// Memory of a VM whose pod has no limit, MiB.
    pub memory_mib: u64,
    /// What a guest's kernel and agent need beside the containers, MiB.
    pub overhead_mib: u64,
    /// What a VMM needs beside the memory of its guest, MiB.
    pub vmm_overhead_mib: u64,
    /// Virtual CPUs of a VM whose pod has no limit.
    pub vcpus: u64,
    /// Most of them that a VM gets.
    pub vcpus_max: u64,
    /// Pods that ask for the host's network get the VM's, and no address is reported for them.
    pub degrade_host_network: bool,
    /// References of images that the kubelet's garbage collection leaves alone.
    pub pinned_images: Vec<String>,
    /// The host is run by systemd, whose slices hold the pods' cgroups.
    pub systemd_cgroups: bool,
    /// Keys of which one must have signed the images of a namespace's pods.
    pub image_keys: NamespaceKeys,
    /// Takes events of pods.
    pub events: PodEvents,
}

/// Where events of pods go that a kubelet does not know of: those of the VM of a disk pod. Taking one never waits.
#[derive(Clone)]
pub struct PodEvents(Arc<TakeEvent>);

type TakeEvent = dyn Fn(&PodId, PodEvent) + Send + Sync;

impl PodEvents {
    /// To this function.
    pub fn to(take: impl Fn(&PodId, PodEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }

    pub(crate) fn take(&self, pod: &PodId, event: PodEvent) {
        (self.0)(pod, event);
    }
}

impl Default for PodEvents {
    /// Nowhere: without a cluster.
    fn default() -> Self {
        Self::to(|_, _| {})
    }
}

impl fmt::Debug for PodEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PodEvents")
    }
}

impl Default for CriOptions {
    fn default() -> Self {
        Self {
            handlers: vec!["coracle".to_owned()],
            disk_handlers: ["coracle-disk", "macvm"].map(str::to_owned).to_vec(),
            memory_mib: 512,
            overhead_mib: 64,
            vmm_overhead_mib: 512,
            vcpus: 2,
            vcpus_max: 32,
            degrade_host_network: false,
            pinned_images: vec![],
            systemd_cgroups: false,
            image_keys: NamespaceKeys::default(),
            events: PodEvents::default(),
        }
    }
}
