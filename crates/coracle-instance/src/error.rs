//! Errors of the host core, with remedies for the caller.

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

/// Failure of an operation on a VM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// No VM has this name.
    #[error("VM {name} not found")]
    NotFound {
        /// Requested name.
        name: String,
    },
    /// Prefix that matches several VMs.
    #[error("{name} is ambiguous: {}", .matches.join(", "))]
    Ambiguous {
        /// Requested prefix.
        name: String,
        /// Matching names.
        matches: Vec<String>,
    },
    /// The name is taken.
    #[error("VM {name} already exists")]
    AlreadyExists {
        /// Requested name.
        name: String,
        /// Uid of the object that has it; empty for a local VM.
        uid: String,
    },
    /// The image was pulled with credentials of another caller, and the pull policy forbids checking these with the registry.
    #[error("image {reference} is here by the credentials of another, and its pull policy is Never")]
    PrivateImage {
        /// Image reference.
        reference: String,
    },
    /// The image has no known signature by a key that it requires.
    #[error("image {reference} is not signed as its namespace requires: {reason}")]
    Unsigned {
        /// Image reference.
        reference: String,
        /// Result of the verification.
        reason: String,
    },
    /// Invalid value.
    #[error("{message}")]
    Invalid {
        /// Value and reason.
        message: String,
    },
    /// The state of the VM does not allow the operation.
    #[error("VM {name}")]
    Refused {
        /// Name of the VM.
        name: String,
        /// State of the VM, and remedy.
        source: Refused,
    },
    /// The caller knows an older generation, or another object, than the record.
    #[error("VM {name} belongs to {holder}, and the caller speaks for {caller}")]
    Fenced {
        /// Name of the VM.
        name: String,
        /// Uid and generation in the record.
        holder: String,
        /// Uid and generation of the caller.
        caller: String,
    },
    /// The host lacks memory.
    #[error("no capacity for {wanted} MiB: {declared} of {total} MiB are declared by other VMs")]
    NoCapacity {
        /// Requested memory, MiB.
        wanted: u64,
        /// Memory declared by other VMs, MiB.
        declared: u64,
        /// Memory that VMs may declare in total, MiB.
        total: u64,
    },
    /// The VM has more vCPUs than the host has CPUs.
    #[error("vcpu_count {wanted} exceeds the {total} CPUs of this host")]
    TooManyVcpus {
        /// Requested number of vCPUs.
        wanted: u8,
        /// Number of CPUs of the host.
        total: usize,
    },
    /// The kernel that the caller named cannot be used.
    #[error("kernel {path}: {why}")]
    Kernel {
        /// Requested path.
        path: String,
        /// Reason.
        why: String,
    },
    /// The image cannot be obtained or used.
    #[error("image {reference}")]
    Image {
        /// Image reference as written by the caller.
        reference: String,
        /// Cause.
        source: ImageError,
    },
    /// A network operation failed.
    #[error("network of VM {name}")]
    Network {
        /// Name of the VM.
        name: String,
        /// Cause.
        source: NetError,
    },
    /// The network that all VMs share could not be set up.
    #[error("cannot set up the network of the node")]
    NodeNetwork {
        /// Cause.
        source: NetError,
    },
    /// The VMM refused an operation.
    #[error("VM {name}")]
    Driver {
        /// Name of the VM.
        name: String,
        /// Cause.
        source: DriverError,
    },
    /// The guest did not carry out a request.
    #[error("VM {name}: guest {operation}")]
    Guest {
        /// Name of the VM.
        name: String,
        /// Requested operation.
        operation: &'static str,
        /// Error of the guest, or reason for a missing answer.
        source: GuestError,
    },
    /// A hook of the image failed.
    #[error("VM {name}: hook {hook}: {why}")]
    Hook {
        /// Name of the VM.
        name: String,
        /// Name of the hook.
        hook: &'static str,
        /// Failure, with the end of the hook's output.
        why: String,
    },
    /// The guest did not boot in time, or the VMM ended before.
    #[error("VM {name} did not boot: {why}")]
    Boot {
        /// Name of the VM.
        name: String,
        /// Failure, with the last lines of the console.
        why: String,
    },
    /// The guest acknowledged an address other than its own.
    #[error("VM {name}: the guest has no address {address} after its configuration")]
    Address {
        /// Name of the VM.
        name: String,
        /// Address that the guest was given.
        address: IpAddr,
    },
    /// A template could not be taken.
    #[error("template: {why}")]
    Template {
        /// Reason.
        why: String,
    },
    /// The node has no template of this key.
    #[error("template {key} not found")]
    NoTemplate {
        /// Requested key.
        key: String,
    },
    /// The node has no snapshot of this name.
    #[error("snapshot {name} not found")]
    NoSnapshot {
        /// Requested name.
        name: String,
    },
    /// The VM has no volume of this name.
    #[error("VM {vm} has no volume {name}")]
    NoVolume {
        /// Name of the VM.
        vm: String,
        /// Requested volume.
        name: String,
    },
    /// The VM has no container of this id.
    #[error("VM {vm} has no container {id}")]
    NoContainer {
        /// Name of the VM.
        vm: String,
        /// Requested container id.
        id: String,
    },
    /// The VM has another container of this id.
    #[error("VM {vm} has a container {id} already")]
    ContainerExists {
        /// Name of the VM.
        vm: String,
        /// Container id.
        id: String,
    },
    /// The state of the container does not allow the operation.
    #[error("cannot {operation} container {id} of VM {vm}: {why}")]
    ContainerState {
        /// Name of the VM.
        vm: String,
        /// Container id.
        id: String,
        /// Requested operation.
        operation: &'static str,
        /// Reason.
        why: &'static str,
    },
    /// Several VMs have this id, and the caller does not say whose VM it means.
    #[error("more than one VM has the id {name}")]
    SharedName {
        /// Requested id.
        name: String,
    },
    /// The snapshot belongs to another namespace and is not shared.
    #[error("snapshot {name} is not shared with namespace {namespace}")]
    SnapshotNotShared {
        /// Name of the snapshot.
        name: String,
        /// Namespace of the caller.
        namespace: String,
    },
    /// Another snapshot has the name.
    #[error("snapshot {name} already exists")]
    SnapshotExists {
        /// Name of the snapshot.
        name: String,
    },
    /// The base image of a snapshot's disk is not available.
    #[error("the snapshot needs image {image} as {digest}, which is not here")]
    NoSnapshotImage {
        /// Image reference.
        image: String,
        /// Manifest digest that the reference had.
        digest: String,
    },
    /// The archive is not one of a snapshot, or is incomplete.
    #[error("the archive is refused")]
    Archive {
        /// Cause.
        source: io::Error,
    },
    /// The hypervisor does not support the operation.
    #[error("VM {name}: the driver {driver} cannot {what}")]
    Unsupported {
        /// Name of the VM.
        name: String,
        /// Name of the driver.
        driver: &'static str,
        /// Unsupported operation.
        what: &'static str,
    },
    /// The memory was saved on an incompatible host.
    #[error(
        "VM {name} was saved with {field} {saved:?}, and this node has {here:?}: its memory cannot be loaded"
    )]
    Incompatible {
        /// Name of the VM.
        name: String,
        /// Property that differs.
        field: &'static str,
        /// Value when the memory was saved.
        saved: String,
        /// Value on this host.
        here: String,
    },
    /// The node daemon is stopping.
    #[error("the node is stopping")]
    Stopping,
    /// A file of the VM cannot be read or written.
    #[error("{operation} of VM {id}")]
    Files {
        /// Operation that failed.
        operation: &'static str,
        /// Id of the VM.
        id: VmId,
        /// Cause.
        source: io::Error,
    },
    /// A directory is not private to the daemon's user.
    #[error("cannot use directory {}", .dir.display())]
    Directory {
        /// Path of the directory.
        dir: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The state directory cannot be used.
    #[error("{operation}")]
    State {
        /// Operation that failed, with the path.
        operation: String,
        /// Cause.
        source: io::Error,
    },
}

/// Kind of failure, as frontends distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The VM or image does not exist.
    NotFound,
    /// The name is taken.
    AlreadyExists,
    /// The request itself is invalid.
    Invalid,
    /// The host lacks resources.
    Exhausted,
    /// The state of the VM, the image or the host does not allow the operation.
    Precondition,
    /// The same request may succeed soon.
    Unavailable,
    /// The operation took too long.
    TimedOut,
    /// The caller lacks permission.
    Denied,
    /// Any other failure.
    Internal,
}

impl HostError {
    /// Returns the kind of this failure. Pure.
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

    /// Returns the failure and its causes in one line, for a reply or a condition.
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

    /// Returns a stable code, for users and search engines.
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

    /// Returns a remedy for the user; `None` when there is none.
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
