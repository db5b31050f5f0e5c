//! Areas: directories of the node that contain the volumes of a pod.

/// Directory of a pod on the node. Each area is one volume of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Area {
    /// Configuration and secrets: in the node's memory, read-only for the guest.
    Config,
    /// Directories on the node's disk that the guest writes.
    Data,
}

impl Area {
    /// Returns the name of the area's volume in the VM.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Data => "data",
        }
    }
}
