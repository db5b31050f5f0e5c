//! Detects the panic of a guest's kernel on its console: the kernel of a disk image hangs after a panic, while its VMM keeps
//! running.

use tokio::sync::broadcast::error::RecvError;

use crate::ConsoleHandle;

/// Text that Linux prints before the reason (kernel/panic.c).
const PANIC: &str = "Kernel panic - not syncing: ";

/// Maximum length of an inspected line, bytes: the guest may print without end.
const LINE_MAX: usize = 400;

/// Waits until the kernel reports a panic, and returns its reason. Earlier console output is ignored, because it is from an
/// earlier boot. Cancel-safe.
pub(super) async fn kernel_panic(console: &ConsoleHandle) -> String {
    let Ok((_, mut said)) = console.attach() else { return std::future::pending().await };
    let mut line = Line::default();
    loop {
        match said.recv().await {
            Ok(bytes) => {
                if let Some(reason) = bytes.iter().find_map(|byte| line.push(*byte)) {
                    return reason;
                }
            }
            Err(RecvError::Lagged(_)) => line = Line::default(),
            Err(RecvError::Closed) => return std::future::pending().await,
        }
    }
}

/// Current line of the console.
#[derive(Default)]
struct Line(Vec<u8>);

impl Line {
    /// Adds a byte. Returns the reason of a panic at the end of its line.
    fn push(&mut self, byte: u8) -> Option<String> {
        if byte != b'\n' {
            if self.0.len() < LINE_MAX {
                self.0.push(byte);
            }
            return None;
        }
        let line = std::mem::take(&mut self.0);
        let line = String::from_utf8_lossy(&line);
        let (_, reason) = line.split_once(PANIC)?;
        Some(reason.chars().filter(|c| !c.is_control()).collect::<String>().trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_panic_reason_is_parsed_from_the_console() {
        let endless = format!("{}{PANIC}late\n", "x".repeat(LINE_MAX));
        for (said, reason) in [
            ("[    0.03] Kernel panic - not syncing: VFS: no root\r\nCPU: 0", Some("VFS: no root")),
            ("[    1.20] Run /sbin/init\n\u{1b}[1mKernel panic - not syncing: a\u{7}b\n", Some("ab")),
            ("Kernel panic - not syncing: its line has no end", None),
            ("a test prints: no Kernel panic\n", None),
            (endless.as_str(), None),
        ] {
            let mut line = Line::default();
            let found = said.bytes().find_map(|byte| line.push(byte));
            assert_eq!(found.as_deref(), reason, "{said:?}");
        }
    }
}
