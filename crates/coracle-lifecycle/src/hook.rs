//! Hooks: programs of an image that run before and after a copy of its VM.

/// When a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// A copy is about to be taken. A failure prevents it.
    PreSnapshot,
    /// The copy was taken or has failed, and this VM continues.
    PostSnapshot,
    /// This VM is a copy and has its own identity. A failure keeps it from running.
    PostClone,
}

impl Hook {
    /// Name of its program.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreSnapshot => "pre-snapshot",
            Self::PostSnapshot => "post-snapshot",
            Self::PostClone => "post-clone",
        }
    }
}
