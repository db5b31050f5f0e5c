//! Options of the server.

use std::fmt;
use std::sync::Arc;

use coracle_pod::NamespaceKeys;
use coracle_pod::events::PodEvent;
use coracle_pod::host::PodId;

/// Options of the server.
#[derive(Clone, Debug)]
pub struct CriOptions {
    /// Names of handlers for pods, in addition to the empty one and one for each driver.
    pub handlers: Vec<String>,
    /// Names of handlers for pods whose container is a disk image in a VM of its own.
    pub disk_handlers: Vec<String>,
    /// Memory in MiB of a VM whose pod has no limit.
    pub memory_mib: u64,
    /// Memory in MiB of a guest's kernel and agent, in addition to the containers.
    pub overhead_mib: u64,
    /// Memory in MiB of a VMM, in addition to that of its guest.
    pub vmm_overhead_mib: u64,
    /// Number of vCPUs of a VM whose pod has no limit.
    pub vcpus: u64,
    /// Most vCPUs of a VM.
    pub vcpus_max: u64,
    /// Pods that ask for the host's network get that of the VM, and no address is reported for them.
    pub degrade_host_network: bool,
    /// References of images that the kubelet's garbage collection must keep.
    pub pinned_images: Vec<String>,
    /// The host uses systemd, whose slices contain the pods' cgroups.
    pub systemd_cgroups: bool,
    /// Keys of which one must have signed the images of a namespace's pods.
    pub image_keys: NamespaceKeys,
    /// Receiver of pod events.
    pub events: PodEvents,
}

/// Receiver of pod events that the kubelet does not know of: those of the VM of a disk pod. Receiving an event never blocks.
#[derive(Clone)]
pub struct PodEvents(Arc<TakeEvent>);

type TakeEvent = dyn Fn(&PodId, PodEvent) + Send + Sync;

impl PodEvents {
    /// Returns a receiver that calls this function.
    pub fn to(take: impl Fn(&PodId, PodEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }

    pub(crate) fn take(&self, pod: &PodId, event: PodEvent) {
        (self.0)(pod, event);
    }
}

impl Default for PodEvents {
    /// Returns a receiver that drops events, for nodes without a cluster.
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
