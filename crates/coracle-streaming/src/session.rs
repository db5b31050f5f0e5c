//! Types of an exec or attach session.

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

/// Streams that a caller asks for.
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

/// Terminal size in characters; neither value is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Width.
    pub columns: u16,
    /// Height.
    pub rows: u16,
}

/// Input of a session. It ends when the client closes it or disconnects.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;

/// Output of a session. Writes wait for a slow client, and fail with `BrokenPipe` when the client disconnected or reset the
/// stream. Shutting it down or dropping it sends its end.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Streams of one exec or attach session. Streams that were not asked for are `None`. Dropping a writer sends its end. Dropping
/// `stdin` discards further input of the client.
pub struct Session {
    /// Standard input of the process. While its buffer is full, the connection is not read, and terminal sizes do not arrive
    /// either.
    pub stdin: Option<Reader>,
    /// Standard output of the process.
    pub stdout: Option<Writer>,
    /// Standard error of the process.
    pub stderr: Option<Writer>,
    /// Terminal sizes; a slow reader gets the newest one. Closed without a terminal.
    pub resize: mpsc::Receiver<TerminalSize>,
}

/// Result of a session, which becomes the status on the error stream.
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
    /// Runs the process. Called once, after all streams exist. The future is dropped when the client disconnects; the
    /// implementer decides what happens to the process then. Output that is written before the return reaches the client before
    /// the outcome.
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome;
}
