//! The port: operations that a controller needs from vSphere.

use std::{collections::HashMap, fmt::Debug, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use tokio::sync::watch;

use crate::{Credentials, VsphereError};

/// A managed object: its type and its opaque id.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Object {
    /// As `VirtualMachine`.
    pub kind: String,
    /// As `vm-42`.
    pub id: String,
}

impl Object {
    /// The object of that type and id.
    #[must_use]
    pub fn new(kind: impl Into<String>, id: impl Into<String>) -> Self {
        Self { kind: kind.into(), id: id.into() }
    }
}

/// A task of vCenter, by its id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TaskId(pub String);

/// Names of a specification, to be found in an inventory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SiteSpec {
    /// Inventory path of the datacenter.
    pub datacenter: String,
    /// A datastore cluster, or one datastore.
    pub datastore_cluster: String,
    /// Datastore of ISO images.
    pub iso_datastore: String,
    /// Relative to the host folder.
    pub resource_pool: String,
    /// Relative to the datacenter's VM folder. It is made when it is missing.
    pub folder: String,
    /// Network of the network card.
    pub network: String,
}

/// A datastore.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Store {
    /// The object.
    pub object: Object,
    /// Its name, as in `[name] path`.
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
        /// The network.
        object: Object,
        /// Its name.
        name: String,
    },
    /// A distributed port group.
    Distributed {
        /// UUID of the switch.
        switch_uuid: String,
        /// Key of the port group.
        portgroup: String,
    },
    /// A network of NSX.
    Opaque {
        /// Its id.
        id: String,
        /// Its type.
        kind: String,
    },
}

/// The inventory objects that a [`SiteSpec`] names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Requested names.
    pub spec: SiteSpec,
    /// The datacenter.
    pub datacenter: Object,
    /// Folder of VMs.
    pub folder: Object,
    /// Inventory path of that folder.
    pub folder_path: String,
    /// Resource pool of VMs.
    pub pool: Object,
    /// Datastores of their disks.
    pub storage: VmDatastores,
    /// Datastore of ISO images.
    pub iso: Store,
    /// Their network.
    pub network: Network,
}

/// Specification of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmConfigSpec {
    /// Its name in the inventory.
    pub name: String,
    /// BIOS UUID.
    pub uuid: String,
    /// vCenter's own UUID of it.
    pub instance_uuid: String,
    /// Guest operating system, as `rhel9_64Guest`.
    pub guest_id: String,
    /// Its notes, which name the owner.
    pub annotation: String,
    /// Processors.
    pub cpus: i32,
    /// Memory in MiB.
    pub memory_mib: i32,
    /// Disk in GiB.
    pub disk_gib: i32,
    /// Thick and zeroed at once instead of thin.
    pub eager_disk: bool,
    /// `efi` or `bios`.
    pub firmware: String,
    /// Disk controller, as `pvscsi`.
    pub controller: String,
    /// Network card, as `vmxnet3`.
    pub adapter: String,
    /// ISO in the CD-ROM, as `[store] path`.
    pub iso: String,
    /// Folder of the machine's files on its datastore, where its name is taken there; empty: vCenter's choice.
    pub directory: String,
    /// A host is named, because vCenter refused to choose one.
    pub names_host: bool,
}

/// Search for a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// vCenter's UUID of it; empty: not searched by.
    pub instance_uuid: String,
    /// BIOS UUIDs: the one we asked for, and the one that was recorded.
    pub uuids: Vec<String>,
    /// Name in the site's folder; empty: not searched by.
    pub name: String,
}

/// A CD-ROM drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cdrom {
    /// Its device key.
    pub key: i32,
    /// Key of its controller.
    pub controller_key: i32,
    /// Unit number on its controller.
    pub unit: i32,
    /// `[store] path` of the image; `None`: it holds none.
    pub iso: Option<String>,
    /// Connected now.
    pub connected: bool,
}

/// A question that blocks an operation of vCenter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// Id that an answer refers to.
    pub id: String,
    /// The question as people read it.
    pub text: String,
    /// Message id, as `msg.cdromdisconnect.locked`.
    pub message_ids: Vec<String>,
    /// Key and label of each choice.
    pub choices: Vec<(String, String)>,
}

/// A machine as vSphere reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// The object.
    pub object: Object,
    /// Its name.
    pub name: String,
    /// The folder it is in.
    pub folder: Option<Object>,
    /// BIOS UUID, as [`crate::bios_uuid`] spells it.
    pub uuid: String,
    /// vCenter's UUID of it.
    pub instance_uuid: String,
    /// Its notes.
    pub annotation: String,
    /// Whether it runs.
    pub powered_on: bool,
    /// MAC address of its first network card, as [`crate::mac`] spells it; empty: none yet.
    pub mac: String,
    /// Its first CD-ROM drive.
    pub cdrom: Option<Cdrom>,
    /// Open question.
    pub question: Option<Question>,
    /// Why its configuration is not known (state of its connection, or a missing right); empty: it is known. Identity and
    /// notes are empty then, or those from before.
    pub unreadable: String,
}

/// VMs of a site at one moment, by id of the object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machines {
    /// False until the inventory was read, and again after the session was lost.
    pub is_current: bool,
    /// The machines of the site's folder.
    pub vms: HashMap<String, Arc<Vm>>,
}

impl Machines {
    /// The machine with that BIOS UUID.
    #[must_use]
    pub fn by_uuid(&self, uuid: &str) -> Option<&Arc<Vm>> {
        self.vms.values().find(|vm| vm.uuid == uuid)
    }
}

/// Change of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Its notes.
    Annotation(String),
    /// The image in its CD-ROM drive, connected.
    InsertIso {
        /// The drive as it is.
        cdrom: Cdrom,
        /// `[store] path`.
        iso: String,
    },
    /// The drive is disconnected, now and at the next start.
    Disconnect(Cdrom),
    /// The drive is emptied.
    Empty(Cdrom),
}

/// A file of a datastore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its name, without folder.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Time of the last change, as RFC 3339; empty: not reported.
    pub modified: String,
}

/// The bytes of an upload.
pub type Body = BoxStream<'static, std::io::Result<Bytes>>;

/// Opens a session with a vCenter.
#[async_trait]
pub trait Connect: Debug + Send + Sync {
    /// A client for these credentials. It has logged in when this returns.
    ///
    /// # Errors
    /// [`VsphereError`]; [`crate::FaultClass::Auth`] when the user is refused.
    async fn connect(&self, credentials: &Credentials) -> Result<Arc<dyn Vsphere>, VsphereError>;
}

/// One vCenter, for one user. Methods may be called concurrently; each has a deadline. Cancelling a call never
/// cancels a task of vCenter.
#[async_trait]
pub trait Vsphere: Debug + Send + Sync {
    /// UUID of the vCenter itself; task ids mean nothing to another.
    fn instance(&self) -> String;

    /// Finds the names of `spec`, and makes the folder when it is missing. Cached until [`Self::forget`].
    ///
    /// # Errors
    /// [`VsphereError::NoSuchName`] or [`VsphereError::Ambiguous`] with the field; any error of a call.
    async fn site(&self, spec: &SiteSpec) -> Result<Arc<Site>, VsphereError>;

    /// Drops cached names.
    fn forget(&self);

    /// Follows the machines of the site's folder. Starts with the first call.
    fn machines(&self, site: &Arc<Site>) -> watch::Receiver<Arc<Machines>>;

    /// Every machine that fits any of `wanted`, read now.
    ///
    /// # Errors
    /// Any error of a call.
    async fn find(&self, site: &Site, wanted: &Wanted) -> Result<Vec<Vm>, VsphereError>;

    /// A datastore for a machine.
    ///
    /// # Errors
    /// [`crate::FaultClass::Capacity`] when there is none with room.
    async fn place(&self, site: &Site, spec: &VmConfigSpec) -> Result<Store, VsphereError>;

    /// Starts to create a machine on `store`.
    ///
    /// # Errors
    /// Any error of a call. After [`crate::FaultClass::Session`] the task may have been started.
    async fn create(&self, site: &Site, store: &Store, spec: &VmConfigSpec) -> Result<TaskId, VsphereError>;

    /// Creations of VMs in the site's folder that run now, whoever started them.
    ///
    /// # Errors
    /// Any error of a call.
    async fn creations(&self, site: &Site) -> Result<Vec<TaskId>, VsphereError>;

    /// Starts to power it on.
    ///
    /// # Errors
    /// Any error of a call; a task ends in `InvalidPowerState` when the VM runs already.
    async fn power_on(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to power it off, without a shutdown of its operating system.
    ///
    /// # Errors
    /// See [`Self::power_on`].
    async fn power_off(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to destroy it and its files.
    ///
    /// # Errors
    /// Any error of a call.
    async fn destroy(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to change it.
    ///
    /// # Errors
    /// Any error of a call.
    async fn reconfigure(&self, vm: &Object, change: &Change) -> Result<TaskId, VsphereError>;

    /// Waits until a task has ended: its result. `Ok(None)` also when vCenter does not know the task (any more).
    /// Cancel-safe.
    ///
    /// # Errors
    /// The fault that the task ended in; [`VsphereError::TaskRuns`] when it has not ended within the time limit of a wait.
    async fn ended(&self, task: &TaskId) -> Result<Option<Object>, VsphereError>;

    /// Answers the question that a machine asks.
    ///
    /// # Errors
    /// Any error of a call.
    async fn answer(&self, vm: &Object, question: &str, choice: &str) -> Result<(), VsphereError>;

    /// Attaches tags, by name or id. `Ok` for tags that are attached already.
    ///
    /// # Errors
    /// [`VsphereError::NoSuchName`], [`VsphereError::Ambiguous`]; any error of a call.
    async fn attach_tags(&self, vm: &Object, tags: &[String]) -> Result<(), VsphereError>;

    /// Files of the ISO datastore in `folder` whose name fits `pattern`; `None`: no such folder.
    ///
    /// # Errors
    /// Any error of a call.
    async fn files(
        &self,
        site: &Site,
        folder: &str,
        pattern: &str,
    ) -> Result<Option<Vec<File>>, VsphereError>;

    /// Makes a folder on the ISO datastore, and its parents. `Ok` when the folder exists.
    ///
    /// # Errors
    /// Any error of a call.
    async fn make_folder(&self, site: &Site, folder: &str) -> Result<(), VsphereError>;

    /// Writes `body` of `length` bytes to `path` of the ISO datastore. What was there is overwritten.
    ///
    /// # Errors
    /// Any error of a call. The part that was written stays.
    async fn upload(&self, site: &Site, path: &str, length: u64, body: Body) -> Result<(), VsphereError>;

    /// Renames a file of the ISO datastore. `Ok(false)`: there is one of the new name.
    ///
    /// # Errors
    /// Any error of a call.
    async fn move_file(&self, site: &Site, from: &str, to: &str) -> Result<bool, VsphereError>;

    /// SHA-256 of a file of the ISO datastore, lower-case hex, read back whole and not kept. `None`: it is held open by
    /// a machine and cannot be read now.
    ///
    /// # Errors
    /// Any error of a call.
    async fn digest(&self, site: &Site, path: &str) -> Result<Option<String>, VsphereError>;

    /// Deletes a file of the ISO datastore. Gone already is fine.
    ///
    /// # Errors
    /// Any error of a call.
    async fn delete_file(&self, site: &Site, path: &str) -> Result<(), VsphereError>;

    /// Stops watching and logs out.
    async fn close(&self);
}
