//! What an exec or attach session is made of.

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

/// Streams that a caller asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error; never with a terminal.
    pub stderr: bool,
    /// The process has a terminal.
    pub tty: bool,
}

/// Size of a terminal, in characters; neither is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Width.
    pub columns: u16,
    /// Height.
    pub rows: u16,
}

/// Input of a session. Its end: the client closed it, or is gone.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;

/// Output of a session. It waits for a slow client, and fails with `BrokenPipe` when the client is gone or reset the
/// stream. Shutting it down and dropping it send its end.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// The streams of one exec or attach session. Streams that were not asked for are `None`. Dropping a writer sends its end.
/// Dropping `stdin` discards what the client still sends.
pub struct Session {
    /// Standard input of the process. While it is full, the connection is not read, and sizes do not arrive either.
    pub stdin: Option<Reader>,
    /// Standard output of the process.
    pub stdout: Option<Writer>,
    /// Standard error of the process.
    pub stderr: Option<Writer>,
    /// Sizes of the terminal; a slow reader sees the newest. Closed when there is none.
    pub resize: mpsc::Receiver<TerminalSize>,
}

/// How a session ended; becomes the status on the error stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionOutcome {
    /// The process ended with this code: success with 0, else reason `NonZeroExitCode`.
    Exited(i32),
    /// The process could not be run or followed: reason `InternalError`, code 500, this message.
    Failed(String),
}

/// Runs the process of an exec or attach session.
#[async_trait]
pub trait RunSession: Send + 'static {
    /// Called once, after all the streams exist. The future is dropped when the client is gone; the implementer decides
    /// what becomes of the process then. What is written before it returns reaches the client before the outcome.
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome;
}
