//! What a controller asks of vSphere.

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
    /// Where ISO images lie.
    pub iso_datastore: String,
    /// Relative to the host folder.
    pub resource_pool: String,
    /// Relative to the datacenter's VM folder. It is made when it is missing.
    pub folder: String,
    /// What the network card is on.
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

/// Where machines of a site may be put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A datastore cluster: vCenter recommends one of its members.
    Pod(Store),
    /// One datastore.
    Single(Store),
}

/// What a network card is connected to.
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

/// The names of a [`SiteSpec`], found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// What was asked for.
    pub spec: SiteSpec,
    /// The datacenter.
    pub datacenter: Object,
    /// Where machines are filed.
    pub folder: Object,
    /// Inventory path of that folder.
    pub folder_path: String,
    /// Where machines run.
    pub pool: Object,
    /// Where their disks go.
    pub storage: Storage,
    /// Where ISO images lie.
    pub iso: Store,
    /// What they are connected to.
    pub network: Network,
}

/// One machine that is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSpec {
    /// Its name in the inventory.
    pub name: String,
    /// BIOS UUID.
    pub uuid: String,
    /// vCenter's own UUID of it.
    pub instance_uuid: String,
    /// Guest operating system, as `rhel9_64Guest`.
    pub guest_id: String,
    /// Its notes: whose it is.
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
    /// What is in the CD-ROM, as `[store] path`.
    pub iso: String,
    /// Folder of the machine's files on its datastore, where its name is taken there; empty: vCenter's choice.
    pub directory: String,
}

/// How a machine is found again.
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
    /// Its place there.
    pub unit: i32,
    /// `[store] path` of the image; `None`: it holds none.
    pub iso: Option<String>,
    /// Connected now.
    pub connected: bool,
}

/// A question that vCenter asks before it goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// To be named in the answer.
    pub id: String,
    /// What it is about, as `msg.cdromdisconnect.locked`.
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
    /// It runs.
    pub powered_on: bool,
    /// MAC address of its first network card, as [`crate::mac`] spells it; empty: none yet.
    pub mac: String,
    /// Its first CD-ROM drive.
    pub cdrom: Option<Cdrom>,
    /// What it waits for an answer to.
    pub question: Option<Question>,
}

/// What a site's machines were at one moment, by id of the object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machines {
    /// False until the inventory was read, and again after the session was lost.
    pub is_current: bool,
    /// The machines of the site's folder.
    pub vms: HashMap<String, Arc<Vm>>,
}

impl Machines {
    /// The one with that BIOS UUID.
    #[must_use]
    pub fn by_uuid(&self, uuid: &str) -> Option<&Arc<Vm>> {
        self.vms.values().find(|vm| vm.uuid == uuid)
    }
}

/// What is to be changed of a machine.
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
    /// When it was changed, as RFC 3339; empty: not told.
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

/// One vCenter, for one user. All methods may be called at once by many; each has a deadline. Cancelling one never
/// cancels a task of vCenter.
#[async_trait]
pub trait Vsphere: Debug + Send + Sync {
    /// UUID of the vCenter itself; task ids mean nothing to another.
    fn instance(&self) -> String;

    /// Finds the names of `spec`, and makes the folder when it is missing. Remembered until something of it is gone.
    ///
    /// # Errors
    /// [`VsphereError::NoSuchName`] or [`VsphereError::Ambiguous`] with the field; what calls may return.
    async fn site(&self, spec: &SiteSpec) -> Result<Arc<Site>, VsphereError>;

    /// Forgets what was remembered of names.
    fn forget(&self);

    /// Follows the machines of the site's folder. Starts with the first call.
    fn machines(&self, site: &Arc<Site>) -> watch::Receiver<Arc<Machines>>;

    /// Every machine that fits any of `wanted`, read now.
    ///
    /// # Errors
    /// What calls may return.
    async fn find(&self, site: &Site, wanted: &Wanted) -> Result<Vec<Vm>, VsphereError>;

    /// A datastore for a machine.
    ///
    /// # Errors
    /// [`crate::FaultClass::Capacity`] when there is none with room.
    async fn place(&self, site: &Site, spec: &VmSpec) -> Result<Store, VsphereError>;

    /// Starts to create a machine on `store`.
    ///
    /// # Errors
    /// What calls may return. After [`crate::FaultClass::Session`] it may have been started all the same.
    async fn create(&self, site: &Site, store: &Store, spec: &VmSpec) -> Result<TaskId, VsphereError>;

    /// Starts to power it on.
    ///
    /// # Errors
    /// What calls may return; a task ends in `InvalidPowerState` when it runs already.
    async fn power_on(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to power it off, hard.
    ///
    /// # Errors
    /// As [`Self::power_on`].
    async fn power_off(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to destroy it and its files.
    ///
    /// # Errors
    /// What calls may return.
    async fn destroy(&self, vm: &Object) -> Result<TaskId, VsphereError>;

    /// Starts to change it.
    ///
    /// # Errors
    /// What calls may return.
    async fn reconfigure(&self, vm: &Object, change: &Change) -> Result<TaskId, VsphereError>;

    /// Waits until a task has ended: its result. `Ok(None)` also when vCenter does not know the task (any more).
    /// Unbounded; cancel-safe.
    ///
    /// # Errors
    /// The fault that the task ended in.
    async fn ended(&self, task: &TaskId) -> Result<Option<Object>, VsphereError>;

    /// Answers the question that a machine asks.
    ///
    /// # Errors
    /// What calls may return.
    async fn answer(&self, vm: &Object, question: &str, choice: &str) -> Result<(), VsphereError>;

    /// Attaches tags, by name or id. Attached already is fine.
    ///
    /// # Errors
    /// [`VsphereError::NoSuchName`], [`VsphereError::Ambiguous`]; what calls may return.
    async fn attach_tags(&self, vm: &Object, tags: &[String]) -> Result<(), VsphereError>;

    /// Files of the ISO datastore in `folder` whose name fits `pattern`; `None`: no such folder.
    ///
    /// # Errors
    /// What calls may return.
    async fn files(
        &self,
        site: &Site,
        folder: &str,
        pattern: &str,
    ) -> Result<Option<Vec<File>>, VsphereError>;

    /// Makes a folder on the ISO datastore, and its parents. There already is fine.
    ///
    /// # Errors
    /// What calls may return.
    async fn make_folder(&self, site: &Site, folder: &str) -> Result<(), VsphereError>;

    /// Writes `body` of `length` bytes to `path` of the ISO datastore. What was there is overwritten.
    ///
    /// # Errors
    /// What calls may return. What was written by then stays.
    async fn upload(&self, site: &Site, path: &str, length: u64, body: Body) -> Result<(), VsphereError>;

    /// Renames a file of the ISO datastore. `Ok(false)`: there is one of the new name.
    ///
    /// # Errors
    /// What calls may return.
    async fn move_file(&self, site: &Site, from: &str, to: &str) -> Result<bool, VsphereError>;

    /// SHA-256 of a file of the ISO datastore, lower-case hex, read back whole and not kept. `None`: it is held open by
    /// a machine and cannot be read now.
    ///
    /// # Errors
    /// What calls may return.
    async fn digest(&self, site: &Site, path: &str) -> Result<Option<String>, VsphereError>;

    /// Deletes a file of the ISO datastore. Gone already is fine.
    ///
    /// # Errors
    /// What calls may return.
    async fn delete_file(&self, site: &Site, path: &str) -> Result<(), VsphereError>;

    /// Stops watching and logs out.
    async fn close(&self);
}
