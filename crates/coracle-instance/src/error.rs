//! What can go wrong in the host core, and what a caller may do about it.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::files;
use coracle_guest_client::{GuestError, GuestErrorKind};
use coracle_hypervisor::DriverError;
use coracle_image::ImageError;
use coracle_net::NetError;
use coracle_oci::OciError;
use coracle_types::{Refused, VmId};

/// An operation on a VM that did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// Nothing of that name is here.
    #[error("VM {name} not found")]
    NotFound {
        /// What was asked for.
        name: String,
    },
    /// A prefix that fits several VMs.
    #[error("{name} is ambiguous: {}", .matches.join(", "))]
    Ambiguous {
        /// What was asked for.
        name: String,
        /// The names that fit.
        matches: Vec<String>,
    },
    /// The name is taken.
    #[error("VM {name} already exists")]
    AlreadyExists {
        /// The name.
        name: String,
        /// Uid of the object that has it; empty for a local VM.
        uid: String,
    },
    /// The image came here with credentials of another caller, and the registry may not be asked about these.
    #[error("image {reference} is here by the credentials of another, and its pull policy is Never")]
    PrivateImage {
        /// Its name.
        reference: String,
    },
    /// The image is not known to be signed by a key that it must be signed by.
    #[error("image {reference} is not signed as its namespace requires: {reason}")]
    Unsigned {
        /// Its name.
        reference: String,
        /// What was found.
        reason: String,
    },
    /// A value that cannot be used.
    #[error("{message}")]
    Invalid {
        /// What and why.
        message: String,
    },
    /// The state of the VM does not allow it.
    #[error("VM {name}")]
    Refused {
        /// Which VM.
        name: String,
        /// Its state, and what to do.
        source: Refused,
    },
    /// A caller that knows an older generation, or another object, than the record.
    #[error("VM {name} belongs to {holder}, and the caller speaks for {caller}")]
    Fenced {
        /// Which VM.
        name: String,
        /// Uid and generation on record.
        holder: String,
        /// Uid and generation of the caller.
        caller: String,
    },
    /// The host has no room.
    #[error("no capacity for {wanted} MiB: {declared} of {total} MiB are declared by other VMs")]
    NoCapacity {
        /// Memory that was asked for.
        wanted: u64,
        /// Memory that is declared already.
        declared: u64,
        /// What may be declared in all.
        total: u64,
    },
    /// More CPUs than the host has.
    #[error("vcpu_count {wanted} exceeds the {total} CPUs of this host")]
    TooManyVcpus {
        /// What was asked for.
        wanted: u8,
        /// What there is.
        total: usize,
    },
    /// The kernel named by the caller cannot be used.
    #[error("kernel {path}: {why}")]
    Kernel {
        /// What was asked for.
        path: String,
        /// Why not.
        why: String,
    },
    /// The image cannot be had or used.
    #[error("image {reference}")]
    Image {
        /// As written by the caller.
        reference: String,
        /// Why not.
        source: ImageError,
    },
    /// The network refused.
    #[error("network of VM {name}")]
    Network {
        /// Which VM.
        name: String,
        /// Why.
        source: NetError,
    },
    /// What all VMs share of the network could not be made.
    #[error("cannot set up the network of the node")]
    NodeNetwork {
        /// Why.
        source: NetError,
    },
    /// The VMM refused.
    #[error("VM {name}")]
    Driver {
        /// Which VM.
        name: String,
        /// Why.
        source: DriverError,
    },
    /// The guest did not do what it should.
    #[error("VM {name}: guest {operation}")]
    Guest {
        /// Which VM.
        name: String,
        /// What was asked.
        operation: &'static str,
        /// Its answer, or why there is none.
        source: GuestError,
    },
    /// A hook of the image failed.
    #[error("VM {name}: hook {hook}: {why}")]
    Hook {
        /// Which VM.
        name: String,
        /// Name of the hook.
        hook: &'static str,
        /// How it failed, with the end of what it printed.
        why: String,
    },
    /// The guest did not come up in time, or the VMM went away before.
    #[error("VM {name} did not boot: {why}")]
    Boot {
        /// Which VM.
        name: String,
        /// What happened, with the last console lines.
        why: String,
    },
    /// A guest acknowledged another address than it was given.
    #[error("VM {name}: the guest has no address {address} after its configuration")]
    Address {
        /// Which VM.
        name: String,
        /// What it was given.
        address: IpAddr,
    },
    /// A template could not be taken.
    #[error("template: {why}")]
    Template {
        /// Why not.
        why: String,
    },
    /// No template of that key is here.
    #[error("template {key} not found")]
    NoTemplate {
        /// What was asked for.
        key: String,
    },
    /// No snapshot of that name is here.
    #[error("snapshot {name} not found")]
    NoSnapshot {
        /// What was asked for.
        name: String,
    },
    /// The VM has no volume of that name.
    #[error("VM {vm} has no volume {name}")]
    NoVolume {
        /// Which VM.
        vm: String,
        /// What was asked for.
        name: String,
    },
    /// The VM has no container of that id.
    #[error("VM {vm} has no container {id}")]
    NoContainer {
        /// Which VM.
        vm: String,
        /// What was asked for.
        id: String,
    },
    /// A container of the VM has this id and is another one.
    #[error("VM {vm} has a container {id} already")]
    ContainerExists {
        /// Which VM.
        vm: String,
        /// Its id.
        id: String,
    },
    /// The container is not in a state for this.
    #[error("cannot {operation} container {id} of VM {vm}: {why}")]
    ContainerState {
        /// Which VM.
        vm: String,
        /// Which container.
        id: String,
        /// What was asked for.
        operation: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// More than one VM has this id, and the caller does not say whose it means.
    #[error("more than one VM has the id {name}")]
    SharedName {
        /// The id.
        name: String,
    },
    /// The snapshot belongs to others.
    #[error("snapshot {name} is not shared with namespace {namespace}")]
    SnapshotNotShared {
        /// Its name.
        name: String,
        /// Who wanted to use it.
        namespace: String,
    },
    /// The name is taken by another snapshot.
    #[error("snapshot {name} already exists")]
    SnapshotExists {
        /// The name.
        name: String,
    },
    /// The image that a snapshot's disk lies over cannot be had.
    #[error("the snapshot needs image {image} as {digest}, which is not here")]
    NoSnapshotImage {
        /// Its reference.
        image: String,
        /// Digest that it had.
        digest: String,
    },
    /// An archive that is not one of a snapshot, or not whole.
    #[error("the archive is refused")]
    Archive {
        /// What is wrong with it.
        source: io::Error,
    },
    /// The hypervisor cannot do it.
    #[error("VM {name}: the driver {driver} cannot {what}")]
    Unsupported {
        /// Which VM.
        name: String,
        /// Which driver.
        driver: &'static str,
        /// What was wanted.
        what: &'static str,
    },
    /// Memory that was saved on a machine that is not like this one.
    #[error(
        "VM {name} was saved with {field} {saved:?}, and this node has {here:?}: its memory cannot be loaded"
    )]
    Incompatible {
        /// Which VM.
        name: String,
        /// What differs.
        field: &'static str,
        /// Its value when it was saved.
        saved: String,
        /// Its value here.
        here: String,
    },
    /// The host is going down.
    #[error("the node is stopping")]
    Stopping,
    /// A file of the VM cannot be read or written.
    #[error("{operation} of VM {id}")]
    Files {
        /// What was tried.
        operation: &'static str,
        /// Which VM.
        id: VmId,
        /// Why not.
        source: io::Error,
    },
    /// A directory that must be this user's alone is not.
    #[error("cannot use directory {}", .dir.display())]
    Directory {
        /// Which one.
        dir: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The state directory cannot be used.
    #[error("{operation}")]
    State {
        /// What was tried, with the path.
        operation: String,
        /// Why not.
        source: io::Error,
    },
}

/// Kinds of failure that frontends distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No such VM or image.
    NotFound,
    /// The name is taken.
    AlreadyExists,
    /// The request itself is wrong.
    Invalid,
    /// The host has no room.
    Exhausted,
    /// The state of the VM, the image or the host forbids it.
    Precondition,
    /// The same request may succeed soon.
    Unavailable,
    /// It took too long.
    TimedOut,
    /// The caller may not.
    Denied,
    /// Anything else.
    Internal,
}

impl HostError {
    /// What kind of failure this is. Pure.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::NotFound { .. }
            | Self::NoTemplate { .. }
            | Self::NoSnapshot { .. }
            | Self::NoContainer { .. }
            | Self::NoVolume { .. } => Fault::NotFound,
            Self::ContainerExists { .. } => Fault::AlreadyExists,
            Self::ContainerState { .. } => Fault::Precondition,
            Self::SnapshotExists { .. } => Fault::AlreadyExists,
            Self::Archive { source } if files::is_out_of_space(source) => Fault::Exhausted,
            Self::Archive { .. } => Fault::Invalid,
            Self::NoSnapshotImage { .. }
            | Self::SharedName { .. }
            | Self::Template { .. }
            | Self::Unsupported { .. }
            | Self::Incompatible { .. } => Fault::Precondition,
            Self::AlreadyExists { .. } => Fault::AlreadyExists,
            Self::Ambiguous { .. } | Self::Invalid { .. } | Self::TooManyVcpus { .. } => Fault::Invalid,
            Self::NoCapacity { .. } => Fault::Exhausted,
            Self::Refused { source, .. } if source.transient => Fault::Unavailable,
            Self::Refused { .. } | Self::Kernel { .. } => Fault::Precondition,
            Self::Fenced { .. }
            | Self::SnapshotNotShared { .. }
            | Self::PrivateImage { .. }
            | Self::Unsigned { .. } => Fault::Denied,
            Self::Image { source, .. } => image_fault(source),
            Self::Network { source, .. } => match source {
                NetError::Exhausted { .. } => Fault::Exhausted,
                NetError::Taken { .. } => Fault::Precondition,
                source if source.is_bad_request() => Fault::Invalid,
                _ => Fault::Internal,
            },
            Self::Driver { source: DriverError::Unavailable { .. }, .. } => Fault::Precondition,
            Self::Driver { source, .. } if source.is_transient() => Fault::Unavailable,
            Self::Driver { .. } | Self::Boot { .. } | Self::Address { .. } => Fault::Internal,
            Self::Guest { source, .. } => guest_fault(source.kind()),
            Self::Hook { .. } => Fault::Precondition,
            Self::Stopping => Fault::Unavailable,
            Self::Files { source, .. } | Self::State { source, .. } if files::is_out_of_space(source) => {
                Fault::Exhausted
            }
            Self::Files { .. } | Self::State { .. } | Self::NodeNetwork { .. } | Self::Directory { .. } => {
                Fault::Internal
            }
        }
    }

    /// The failure and its causes in one line, for a reply or a condition.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let words = error.to_string();
            if !text.ends_with(&words) {
                text += ": ";
                text += &words;
            }
            cause = error.source();
        }
        text
    }

    /// A stable code for people and their search engines.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "COR-VM-001",
            Self::Ambiguous { .. } => "COR-VM-002",
            Self::AlreadyExists { .. } => "COR-VM-003",
            Self::Invalid { .. } => "COR-VM-004",
            Self::Refused { .. } => "COR-VM-005",
            Self::Fenced { .. } => "COR-VM-006",
            Self::NoCapacity { .. } => "COR-VM-007",
            Self::TooManyVcpus { .. } => "COR-VM-008",
            Self::Kernel { .. } => "COR-VM-009",
            Self::Image { source, .. } => source.code(),
            Self::PrivateImage { .. } => "COR-IMG-019",
            Self::Unsigned { .. } => "COR-IMG-020",
            Self::Network { .. } => "COR-NET-001",
            Self::NodeNetwork { .. } => "COR-NET-002",
            Self::Driver { .. } => "COR-DRV-001",
            Self::Guest { .. } => "COR-GST-001",
            Self::Boot { .. } => "COR-GST-002",
            Self::Address { .. } => "COR-GST-003",
            Self::Hook { .. } => "COR-GST-005",
            Self::Stopping => "COR-VM-010",
            Self::Files { .. } => "COR-VM-011",
            Self::State { .. } => "COR-VM-012",
            Self::Directory { .. } => "COR-CFG-002",
            Self::Template { .. } => "COR-TPL-001",
            Self::NoTemplate { .. } => "COR-TPL-002",
            Self::Unsupported { .. } => "COR-DRV-002",
            Self::Incompatible { .. } => "COR-VM-013",
            Self::NoVolume { .. } => "COR-VOL-001",
            Self::NoContainer { .. } => "COR-CTR-001",
            Self::ContainerExists { .. } => "COR-CTR-002",
            Self::ContainerState { .. } => "COR-CTR-003",
            Self::NoSnapshot { .. } => "COR-SNP-001",
            Self::SnapshotExists { .. } => "COR-SNP-002",
            Self::NoSnapshotImage { .. } => "COR-SNP-003",
            Self::Archive { .. } => "COR-SNP-004",
            Self::SnapshotNotShared { .. } => "COR-SNP-005",
            Self::SharedName { .. } => "COR-VM-020",
        }
    }

    /// What the person at the terminal can do; `None` when nothing is known.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Incompatible { name, .. } => Some(format!(
                "start the node with the VMM that saved it; or give its memory up: coracle rm {name}"
            )),
            Self::NotFound { .. } => Some("list what there is: coracle ps -a".to_owned()),
            Self::NoVolume { vm, .. } => Some(format!("list what there is: coracle volume ls {vm}")),
            Self::NoSnapshot { .. } => Some("list what there is: coracle snapshot ls".to_owned()),
            Self::SharedName { .. } => {
                Some("send the UID of the object as gRPC metadata coracle-uid".to_owned())
            }
            Self::SnapshotNotShared { name, namespace } => Some(format!(
                "have its owner share it on the node: coracle snapshot share {name} --namespace {namespace}"
            )),
            Self::SnapshotExists { name } => {
                Some(format!("choose another --name, or remove it: coracle snapshot rm {name}"))
            }
            Self::NoSnapshotImage { image, .. } => Some(format!(
                "bring that very image here first: coracle image pull {image}, or coracle image import"
            )),
            Self::NoTemplate { .. } => Some("list what there is: coracle template ls".to_owned()),
            Self::AlreadyExists { name, .. } => {
                Some(format!("choose another --name, or remove it: coracle rm {name}"))
            }
            Self::Refused { source, .. } => Some(source.why.to_owned()),
            Self::NoCapacity { .. } => {
                Some("remove VMs, ask for less memory, or raise --memory-overcommit".to_owned())
            }
            Self::Directory { dir, .. } => Some(format!(
                "see whose it is: ls -ld {dir}; then give it to this user (chown), remove it, or name another with --state",
                dir = dir.display()
            )),
            Self::NodeNetwork { .. } => Some("`--network user` needs no privilege".to_owned()),
            Self::Kernel { .. } => Some("leave kernelPath empty to use the node's default kernel".to_owned()),
            Self::Image { source, .. } => source.help(),
            Self::Unsigned { .. } => Some(
                "sign it with one of the keys of ConfigMap coracle-image-policy: cosign sign --key"
                    .to_owned(),
            ),
            Self::PrivateImage { .. } => Some(
                "use imagePullPolicy IfNotPresent with imagePullSecrets that its registry accepts".to_owned(),
            ),
            Self::Boot { name, .. } => {
                Some(format!("look at its console: coracle console {name} --no-follow"))
            }
            _ => None,
        }
    }
}

fn image_fault(error: &ImageError) -> Fault {
    match error {
        ImageError::Oci(OciError::InvalidReference { .. }) => Fault::Invalid,
        ImageError::Oci(OciError::StorageFull { .. }) => Fault::Exhausted,
        error if error.is_transient() => Fault::Unavailable,
        _ => Fault::Precondition,
    }
}

fn guest_fault(kind: GuestErrorKind) -> Fault {
    match kind {
        GuestErrorKind::NotFound => Fault::NotFound,
        GuestErrorKind::Invalid => Fault::Invalid,
        GuestErrorKind::TimedOut => Fault::TimedOut,
        GuestErrorKind::Unavailable => Fault::Unavailable,
        GuestErrorKind::Precondition => Fault::Precondition,
        GuestErrorKind::Exhausted => Fault::Exhausted,
        GuestErrorKind::OutOfRange => Fault::Precondition,
        GuestErrorKind::Internal => Fault::Internal,
    }
}
