//! The narrow trait between the host core and a hypervisor.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;

use async_trait::async_trait;
use coracle_types::VmId;
use tokio::net::UnixStream;

use crate::{Accelerator, Disk, Machine, ProcessId, Snapshots, Templates, VmRecipe};

/// What a driver can do on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Version that the program reports; empty when it is not there.
    pub version: String,
    /// The accelerator that was proven to work; none: the driver is not available.
    pub accelerator: Option<Accelerator>,
    /// Why this accelerator, or why none. One line for a person.
    pub reason: String,
}

/// One kind of hypervisor. Every method may be called again after a crash of
/// the caller at any point; all are cancel-safe but [`Driver::start`].
#[async_trait]
pub trait Driver: Send + Sync + Debug {
    /// A short constant name: `qemu`, `fake`.
    fn name(&self) -> &'static str;

    /// Looks at the host, once; later calls return the same.
    async fn probe(&self) -> Probe;

    /// Starts a VMM that runs the guest. Returns when its control socket answers.
    /// The caller has made sure by [`Driver::find`] that there is none yet. When
    /// the future is dropped midway a VMM may be left, which `find` sees.
    ///
    /// # Errors
    /// [`DriverError::Spawn`], [`DriverError::Exited`] with the VMM's last words.
    async fn start(&self, recipe: &VmRecipe) -> Result<ProcessId, DriverError>;

    /// The living VMM of this VM, read from the process table, whoever started it.
    ///
    /// # Errors
    /// [`DriverError::Io`] when the process table cannot be read.
    async fn find(&self, recipe: &VmRecipe) -> Result<Option<ProcessId>, DriverError>;

    /// Resolves when the process is gone; at once when it already is.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    async fn exited(&self, process: ProcessId) -> Result<(), DriverError>;

    /// Ends the process without telling the guest and waits until it is gone.
    /// `Ok` when it already is.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    async fn kill(&self, process: ProcessId) -> Result<(), DriverError>;

    /// Opens the byte stream to the guest agent. One user at a time.
    ///
    /// # Errors
    /// [`DriverError::Channel`] while there is no VMM or somebody else is connected.
    async fn guest_channel(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError>;

    /// Opens the serial console. One user at a time.
    ///
    /// # Errors
    /// As [`Driver::guest_channel`].
    async fn console(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError>;

    /// Holds the guest's CPUs; `Ok` when they are held already.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn pause(&self, recipe: &VmRecipe) -> Result<(), DriverError>;

    /// Lets the guest's CPUs go on; `Ok` when they run.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn resume(&self, recipe: &VmRecipe) -> Result<(), DriverError>;

    /// Puts a disk into its slot, which is empty, of a running machine; the guest learns of it. Repeated after a crash, it may be
    /// refused because the disk is there: [`Driver::eject_disk`] first.
    ///
    /// # Errors
    /// [`DriverError::Control`], [`DriverError::Io`] when the file is not there.
    async fn insert_disk(&self, recipe: &VmRecipe, disk: &Disk) -> Result<(), DriverError>;

    /// Empties a slot of a running machine. The guest has let go of its disk, or loses it.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn eject_disk(&self, recipe: &VmRecipe, slot: usize) -> Result<(), DriverError>;

    /// Removes what the driver keeps of a VM outside the folders of its recipe. Its VMM is gone. Idempotent.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    async fn forget(&self, _recipe: &VmRecipe) -> Result<(), DriverError> {
        Ok(())
    }

    /// It has machines of this recipe's kind. Every driver has the smallest.
    fn has_machine(&self, recipe: &VmRecipe) -> bool {
        matches!(recipe.machine, Machine::Micro)
    }

    /// It can give a machine a network inside the VMM, without a tap device of the host.
    fn has_user_network(&self, recipe: &VmRecipe) -> bool;

    /// Saving a machine whole and starting it again; `None` where the hypervisor cannot.
    fn snapshots(&self, _recipe: &VmRecipe) -> Option<&dyn Snapshots> {
        None
    }

    /// Starting from a saved machine instead of booting; `None` where the hypervisor cannot.
    fn templates(&self, _recipe: &VmRecipe) -> Option<&dyn Templates> {
        None
    }
}

/// What can go wrong between the host core and a VMM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver cannot be used on this host.
    #[error("driver {driver} is not available: {reason}")]
    Unavailable {
        /// Which one.
        driver: &'static str,
        /// Why, and what to install.
        reason: String,
    },
    /// No driver of that name is on this node.
    #[error("no driver {name} on this node")]
    Unknown {
        /// As the machine names it.
        name: String,
    },
    /// The program could not be run.
    #[error("start VM {id}: run {}", .program.display())]
    Spawn {
        /// Which VM.
        id: VmId,
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The VMM ended before it was ready.
    #[error("start VM {id}: the VMM exited: {last_words}")]
    Exited {
        /// Which VM.
        id: VmId,
        /// The end of its log.
        last_words: String,
    },
    /// The VMM did not become ready in time.
    #[error("start VM {id}: no answer on the control socket within {seconds} s")]
    NotReady {
        /// Which VM.
        id: VmId,
        /// The limit.
        seconds: u64,
    },
    /// A socket of the VMM could not be opened.
    #[error("open the {channel} channel of VM {id}")]
    Channel {
        /// Which VM.
        id: VmId,
        /// guest or console.
        channel: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The VMM refused a command, or did not answer.
    #[error("{operation} VM {id}")]
    Control {
        /// Which VM.
        id: VmId,
        /// The VMM's word for it.
        operation: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Anything else that the operating system refused.
    #[error("{operation}")]
    Io {
        /// What was tried.
        operation: String,
        /// Why not.
        source: io::Error,
    },
}

impl DriverError {
    /// True when the same call may succeed later with nothing changed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Channel { .. } | Self::NotReady { .. } => true,
            Self::Spawn { source, .. } | Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ),
            Self::Unavailable { .. } | Self::Unknown { .. } | Self::Exited { .. } | Self::Control { .. } => {
                false
            }
        }
    }
}
