//! Requests to containers, and their ends.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use coracle_record::{ContainerId, ContainerSpec, Exit, Resources};

/// An image of this node that a container needs.
#[derive(Clone, Debug)]
pub struct ContainerImage {
    /// Digest of its manifest.
    pub digest: String,
    /// Its root file system.
    pub rootfs: PathBuf,
}

/// What can be asked of a container.
#[derive(Debug)]
pub enum ContainerRequest {
    /// Answers when it is made.
    Create { id: ContainerId, spec: Box<ContainerSpec>, image: ContainerImage, mounted: Vec<ContainerImage> },
    /// Answers when its process runs, or could not.
    Start { id: ContainerId },
    /// Answers when it has ended and its output is in the log.
    Stop { id: ContainerId, grace: Duration },
    /// Answers when the signal is sent.
    Kill { id: ContainerId, signal: i32 },
    /// Answers when the limits are set.
    Update { id: ContainerId, resources: Resources, metadata: BTreeMap<String, String> },
    /// Answers with its last record when nothing is left of it.
    Remove { id: ContainerId },
}

/// The end of a container, cleaned of what a hostile guest could put into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerEnd {
    pub id: ContainerId,
    pub exit: Exit,
    pub oom_killed: bool,
    pub termination_message: String,
}
