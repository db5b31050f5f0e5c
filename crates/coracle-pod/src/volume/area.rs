//! Directories of the node that volumes of a pod lie in.

/// A directory that the node keeps for a pod, each one volume of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Area {
    /// Configuration and secrets: in the node's memory, the guest only reads it.
    Config,
    /// Directories on the node's disk that the guest writes.
    Data,
}

impl Area {
    /// Name of its volume in the VM.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Data => "data",
        }
    }
}
