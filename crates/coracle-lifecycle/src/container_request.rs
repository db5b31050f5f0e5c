//! Requests to containers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use coracle_record::{ContainerId, ContainerSpec, Exit, Resources};

/// Image on this node that a container needs.
#[derive(Clone, Debug)]
pub struct ContainerImage {
    /// Manifest digest of the image.
    pub digest: String,
    /// Root file system of the image.
    pub rootfs: PathBuf,
}

/// Request to a container.
#[derive(Debug)]
pub enum ContainerRequest {
    /// Answered when the container is created.
    Create { id: ContainerId, spec: Box<ContainerSpec>, image: ContainerImage, mounted: Vec<ContainerImage> },
    /// Answered when the process runs, or could not be started.
    Start { id: ContainerId },
    /// Answered when the process has ended and its output is in the log.
    Stop { id: ContainerId, grace: Duration },
    /// Answered when the signal is sent.
    Kill { id: ContainerId, signal: i32 },
    /// Answered when the limits are set.
    Update { id: ContainerId, resources: Resources, metadata: BTreeMap<String, String> },
    /// Answered with the last record when the container is removed.
    Remove { id: ContainerId },
}

/// Exit of a container, sanitised of what a hostile guest could put into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerEnd {
    pub id: ContainerId,
    pub exit: Exit,
    pub oom_killed: bool,
    pub termination_message: String,
}
