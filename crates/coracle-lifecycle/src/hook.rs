//! Hooks: programs in an image that run before and after its VM is copied.

/// Time at which a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Before a copy is taken. A failure prevents the copy.
    PreSnapshot,
    /// After a copy was taken or has failed, in the original VM.
    PostSnapshot,
    /// In a copy that has its own identity. A failure keeps the copy from running.
    PostClone,
}

impl Hook {
    /// Returns the name of the hook's program.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreSnapshot => "pre-snapshot",
            Self::PostSnapshot => "post-snapshot",
            Self::PostClone => "post-clone",
        }
    }
}
