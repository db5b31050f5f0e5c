//! Terminal of the user: raw mode that always ends, size, keys.

use std::io::{IsTerminal, Read};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

/// Raw mode of stdin for the lifetime of this value.
pub struct RawMode(Option<Termios>);

impl RawMode {
    /// Enters raw mode. Does nothing unless stdin is a terminal.
    pub fn enter() -> Self {
        let stdin = rustix::stdio::stdin();
        let Ok(before) = tcgetattr(stdin) else { return Self(None) };
        let mut raw = before.clone();
        raw.make_raw();
        match tcsetattr(stdin, OptionalActions::Now, &raw) {
            Ok(()) => Self(Some(before)),
            Err(_) => Self(None),
        }
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _terminal_gone = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Returns the rows and columns of the terminal.
pub fn size() -> Option<(u32, u32)> {
    let size = tcgetwinsize(rustix::stdio::stdout()).ok()?;
    (size.ws_row > 0).then_some((size.ws_row.into(), size.ws_col.into()))
}

/// Returns whether stdin is a terminal.
pub fn stdin_is_terminal() -> bool {
    std::io::stdin().is_terminal()
}

/// Reads stdin on a thread of its own, which ends with the process: a blocking read cannot be interrupted. The channel closes
/// at the end of input.
pub fn stdin_chunks() -> mpsc::Receiver<Vec<u8>> {
    let (chunks, receiver) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 32 * 1024];
        let mut stdin = std::io::stdin().lock();
        while let Ok(n @ 1..) = stdin.read(&mut buffer) {
            if chunks.blocking_send(buffer.get(..n).unwrap_or_default().to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}
