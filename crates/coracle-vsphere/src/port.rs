//! The port: operations that a controller needs from vSphere.

use std::{collections::HashMap, fmt::Debug, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use tokio::sync::watch;

use crate::{Credentials, VsphereError};

/// Managed object: its type and its opaque id.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Object {
    /// Type, such as `VirtualMachine`.
    pub kind: String,
    /// Id, such as `vm-42`.
    pub id: String,
}

impl Object {
    /// Creates a reference to the object of type `kind` and id `id`.
    #[must_use]
    pub fn new(kind: impl Into<String>, id: impl Into<String>) -> Self {
        Self { kind: kind.into(), id: id.into() }
    }
}

/// Id of a vCenter task.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TaskId(pub String);

/// Names of inventory objects that make up a site.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SiteSpec {
    /// Inventory path of the datacenter.
    pub datacenter: String,
    /// Name or path of a datastore cluster, or of one datastore.
    pub datastore_cluster: String,
    /// Name or path of the datastore for ISO images.
    pub iso_datastore: String,
    /// Path of the resource pool, relative to the host folder.
    pub resource_pool: String,
    /// Path of the VM folder, relative to the datacenter's VM folder. A missing folder is created.
    pub folder: String,
    /// Network of the VMs' network card.
    pub network: String,
}

/// A datastore.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Store {
    /// Datastore or datastore cluster in the inventory.
    pub object: Object,
    /// Name, as in `[name] path`.
    pub name: String,
}

/// Datastores for VMs of a site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmDatastores {
    /// A datastore cluster: vCenter recommends one of its members.
    Pod(Store),
    /// One datastore.
    Single(Store),
}

/// Network of a network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Network {
    /// A standard port group.
    Standard {
        /// Network object in the inventory.
        object: Object,
        /// Name of the network.
        name: String,
    },
    /// A distributed port group.
    Distributed {
        /// UUID of the distributed switch.
        switch_uuid: String,
        /// Key of the port group.
        portgroup: String,
    },
    /// An opaque network of NSX.
    Opaque {
        /// Opaque network id.
        id: String,
        /// Opaque network type.
        kind: String,
    },
}

/// Inventory objects that a [`SiteSpec`] names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Names that were resolved.
    pub spec: SiteSpec,
    /// Datacenter.
    pub datacenter: Object,
    /// Folder of the VMs.
    pub folder: Object,
    /// Inventory path of the VM folder.
    pub folder_path: String,
    /// Resource pool of the VMs.
    pub pool: Object,
    /// Datastores of the VMs' disks.
    pub storage: VmDatastores,
    /// Datastore of ISO images.
    pub iso: Store,
    /// Network of the VMs.
    pub network: Network,
}

/// Specification of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmConfigSpec {
    /// Name in the inventory.
    pub name: String,
    /// BIOS UUID.
    pub uuid: String,
    /// vCenter's own UUID of the VM.
    pub instance_uuid: String,
    /// Guest operating system, such as `rhel9_64Guest`.
    pub guest_id: String,
    /// Notes of the VM, which name the owner.
    pub annotation: String,
    /// Number of vCPUs.
    pub cpus: i32,
    /// Memory in MiB.
    pub memory_mib: i32,
    /// Disk size in GiB.
    pub disk_gib: i32,
    /// Eager-zeroed thick disk instead of a thin one.
    pub eager_disk: bool,
    /// `efi` or `bios`.
    pub firmware: String,
    /// Disk controller, such as `pvscsi`.
    pub controller: String,
    /// Network card, such as `vmxnet3`.
    pub adapter: String,
    /// ISO in the CD-ROM drive, as `[store] path`.
    pub iso: String,
    /// Directory of the VM's files, for when a directory of the VM's name exists on the datastore; empty: vCenter chooses it.
    pub directory: String,
    /// Name a host in the request, because vCenter refused to choose one.
    pub names_host: bool,
}

/// Search for VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// vCenter's UUID of the VM; empty: do not search by it.
    pub instance_uuid: String,
    /// BIOS UUIDs: the requested one and the recorded one.
    pub uuids: Vec<String>,
    /// Name in the site's folder; empty: do not search by it.
    pub name: String,
}

/// A CD-ROM drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cdrom {
    /// Device key.
    pub key: i32,
    /// Device key of the controller.
    pub controller_key: i32,
    /// Unit number on the controller.
    pub unit: i32,
    /// `[store] path` of the image; `None`: the drive is empty.
    pub iso: Option<String>,
    /// Whether the drive is connected now.
    pub connected: bool,
}

/// Question of a VM that blocks an operation of vCenter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// Id that the answer must name.
    pub id: String,
    /// Text of the question.
    pub text: String,
    /// Message ids, such as `msg.cdromdisconnect.locked`.
    pub message_ids: Vec<String>,
    /// Key and label of each choice.
    pub choices: Vec<(String, String)>,
}

/// VM as vSphere reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// VM object in the inventory.
    pub object: Object,
    /// Name in the inventory.
    pub name: String,
    /// Folder of the VM.
    pub folder: Option<Object>,
    /// BIOS UUID in the format of [`crate::bios_uuid`].
    pub uuid: String,
    /// vCenter's UUID of the VM.
    pub instance_uuid: String,
    /// Notes of the VM.
    pub annotation: String,
    /// Whether the VM is powered on.
    pub powered_on: bool,
    /// MAC address of the first network card in the format of [`crate::mac`]; empty: none yet.
    pub mac: String,
    /// First CD-ROM drive.
    pub cdrom: Option<Cdrom>,
    /// Open question of the VM.
    pub question: Option<Question>,
    /// Why the VM's configuration is not known: state of its connection, or a missing right. Empty: the configuration is known.
    /// Otherwise identity and notes are empty or out of date.
    pub unreadable: String,
}

/// VMs of a site at one moment, by object id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SiteVms {
    /// False until the inventory was read for the first time, and again after the session was lost.
    pub is_current: bool,
    /// VMs of the site's folder.
    pub vms: HashMap<String, Arc<Vm>>,
}

impl SiteVms {
    /// Returns the VM with the BIOS UUID `uuid`.
    #[must_use]
    pub fn by_uuid(&self, uuid: &str) -> Option<&Arc<Vm>> {
        self.vms.values().find(|vm| vm.uuid == uuid)
    }
}

/// Change of a VM's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Set the notes.
    Annotation(String),
    /// Insert an image into the CD-ROM drive and connect it.
    InsertIso {
        /// Present state of the drive.
        cdrom: Cdrom,
        /// `[store] path` of the image.
        iso: String,
    },
    /// Disconnect the drive, now and at the next start.
    Disconnect(Cdrom),
    /// Remove the image from the drive.
    Empty(Cdrom),
}

/// File on a datastore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Name, without folder.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Time of the last modification in RFC 3339; empty: not reported.
    pub modified: String,
}

/// Content of an upload.
pub type Body = BoxStream<'static, std::io::Result<Bytes>>;

/// Opens sessions with vCenters.
#[async_trait]
pub trait Connect: Debug + Send + Sync {
    /// Returns a client for these credentials, after it has logged in.
    ///
    /// # Errors
    /// [`VsphereError`]; of [`crate::FaultClass::Auth`] when the user is refused.
    async fn connect(&self, credentials: &Credentials) -> Result<Arc<dyn Vsphere>, VsphereError>;
}

/// Client of one vCenter, for one user. Methods may be called concurrently; each has a deadline. Cancelling a call never
/// cancels a task of vCenter.
#[async_trait]
pub trait Vsphere: Debug + Send + Sync {
    /// UUID of the vCenter. Task ids are valid in this vCenter only.
    fn instance(&self) -> String;

    /// Resolves the names of `spec`, and creates the folder if it is missing. The result is cached until [`Self::forget`].
    ///
    /// # Errors
    /// [`VsphereError::NoSuchName`] or [`VsphereError::Ambiguous`] with the field; any error of a call.
    async fn site(&self, spec: &SiteSpec) -> Result<Arc<Site>, VsphereError>;

    /// Drops cached names.
    fn forget(&self);

    /// Watches the VMs of the site's folder. The watch starts with the first call.
    fn machines(&self, site: &Arc<Site>) -> watch::Receiver<Arc<SiteVms>>;

    /// Reads every VM that matches any criterion of `wanted`, without a cache.
    ///
    /// # Errors
    /// Any error of a call.
    async fn find(&self, site: &Site, wanted: &Wanted) -> Result<Vec<Vm>, VsphereError>;

    /// Chooses a datastore for a VM.
    ///
    /// # Errors
    /// [`crate::FaultClass::Capacity`] when no datastore has enough space.
    async fn place(&self, site: &Site, spec: &VmConfigSpec) -> Result<Store, VsphereError>;

    /// Starts to create a VM on `store`.
    ///
    /// # Errors
    /// Any error of a call. After [`crate::FaultClass::Session`] the task may have been started.
    async fn create(&self, site: &Site, store: &Store, spec: &VmConfigSpec) -> Result<TaskId, VsphereError>;

    /// Creations of VMs in the site's folder that run now, regardless of which client started them.
    ///
    /// # Errors
    /// Any error of a call.
    async fn creations(&self, site: &Site) -> Result<Vec<TaskId>, VsphereError>;

    /// Starts to power on a VM.
    ///
    /// # Errors
    /// Any error of a call. The task ends in `InvalidPowerState` if the VM already runs.
    async fn power_on(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to power off a VM without a shutdown of its guest.
    ///
    /// # Errors
    /// See [`Self::power_on`].
    async fn power_off(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to destroy a VM and its files.
    ///
    /// # Errors
    /// Any error of a call.
    async fn destroy(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to reconfigure a VM.
    ///
    /// # Errors
    /// Any error of a call.
    async fn reconfigure(&self, vm: &Object, change: &Change) -> Result<TaskId, VsphereError>;

    /// Waits until a task has ended and returns its result. Returns `Ok(None)` also when vCenter does not know the task, or no
    /// longer. Cancel-safe.
    ///
    /// # Errors
    /// The fault of the task; [`VsphereError::TaskRuns`] when the task has not ended within the time limit of a wait.
    async fn wait_task(&self, task: &TaskId) -> Result<Option<Object>, VsphereError>;

    /// Answers a question of a VM.
    ///
    /// # Errors
    /// Any error of a call.
    async fn answer(&self, vm: &Object, question: &str, choice: &str) -> Result<(), VsphereError>;

    /// Attaches tags, by name or id. Returns `Ok` for tags that are already attached.
    ///
    /// # Errors
    /// [`VsphereError::NoSuchName`], [`VsphereError::Ambiguous`]; any error of a call.
    async fn attach_tags(&self, vm: &Object, tags: &[String]) -> Result<(), VsphereError>;

    /// Lists the files in `folder` of the ISO datastore whose names match `pattern`. `None`: the folder does not exist.
    ///
    /// # Errors
    /// Any error of a call.
    async fn files(
        &self,
        site: &Site,
        folder: &str,
        pattern: &str,
    ) -> Result<Option<Vec<File>>, VsphereError>;

    /// Creates a folder and its parents on the ISO datastore. Returns `Ok` if the folder exists.
    ///
    /// # Errors
    /// Any error of a call.
    async fn make_folder(&self, site: &Site, folder: &str) -> Result<(), VsphereError>;

    /// Writes `body` of `length` bytes to `path` of the ISO datastore. An existing file is overwritten.
    ///
    /// # Errors
    /// Any error of a call. After an error, the part that was written stays.
    async fn upload(&self, site: &Site, path: &str, length: u64, body: Body) -> Result<(), VsphereError>;

    /// Renames a file of the ISO datastore. `Ok(false)`: a file of the new name exists.
    ///
    /// # Errors
    /// Any error of a call.
    async fn move_file(&self, site: &Site, from: &str, to: &str) -> Result<bool, VsphereError>;

    /// Reads a file of the ISO datastore and returns its SHA-256 in lower-case hex; the content is not kept. `None`: a VM holds
    /// the file open, so it cannot be read now.
    ///
    /// # Errors
    /// Any error of a call.
    async fn digest(&self, site: &Site, path: &str) -> Result<Option<String>, VsphereError>;

    /// Deletes a file of the ISO datastore. Returns `Ok` if the file does not exist.
    ///
    /// # Errors
    /// Any error of a call.
    async fn delete_file(&self, site: &Site, path: &str) -> Result<(), VsphereError>;

    /// Stops watching and logs out.
    async fn close(&self);
}
