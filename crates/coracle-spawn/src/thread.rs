//! Choice of the thread for operations that block.

use tokio::task::JoinError;

/// Thread for operations that block, such as the start of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// One of its own: a path may be in a shared directory, which the thread of the runtime serves.
    OfFiles,
    /// That of the runtime, while it serves nothing: a clone need not run the code that changes threads.
    OfRuntime,
}

impl Thread {
    /// Runs `work` on this thread. On that of the runtime it is done at once, without a time limit.
    ///
    /// # Errors
    /// When the work panicked on a thread of its own.
    pub async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        match self {
            Self::OfFiles => tokio::task::spawn_blocking(work).await,
            Self::OfRuntime => Ok(work()),
        }
    }
}
