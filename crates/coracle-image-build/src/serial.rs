//! Serial console of a VM: waits for printed text, and types text.

use tokio::sync::mpsc;

/// Limit of printed text that is kept unread, bytes.
const UNREAD_MAX: usize = 64 << 10;

/// Both directions of a serial console.
#[derive(Debug)]
pub struct Serial {
    printed: mpsc::Receiver<Vec<u8>>,
    typed: mpsc::Sender<Vec<u8>>,
    /// Output after the last text that was found.
    unread: Vec<u8>,
}

impl Serial {
    /// Console from the channels of the VM's output (`printed`) and input (`typed`).
    #[must_use]
    pub fn new(printed: mpsc::Receiver<Vec<u8>>, typed: mpsc::Sender<Vec<u8>>) -> Self {
        Self { printed, typed, unread: Vec::new() }
    }

    /// Waits for a text. The next wait starts after it. Cancel-safe.
    ///
    /// # Errors
    /// When the output of the VM has ended.
    pub(crate) async fn wait_for(&mut self, text: &str) -> Result<(), &'static str> {
        let wanted = text.as_bytes();
        loop {
            if let Some(at) = self.unread.windows(wanted.len()).position(|window| window == wanted) {
                self.unread.drain(..at + wanted.len());
                return Ok(());
            }
            let chunk = self.printed.recv().await.ok_or("the serial console has ended")?;
            self.unread.extend_from_slice(&chunk);
            self.unread.drain(..self.unread.len().saturating_sub(UNREAD_MAX));
        }
    }

    /// Types a text.
    ///
    /// # Errors
    /// When the console has ended.
    pub(crate) async fn enter(&self, text: &str) -> Result<(), &'static str> {
        self.typed.send(text.as_bytes().to_vec()).await.map_err(|_| "the serial console has ended")
    }

    /// End of the unread output, for an error: one line without control characters.
    pub(crate) fn tail(&self, letters: usize) -> String {
        let text = String::from_utf8_lossy(&self.unread);
        let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let skipped = clean.chars().count().saturating_sub(letters);
        clean.chars().skip(skipped).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn wait_starts_after_previous_match() {
        let (machine, printed) = mpsc::channel(8);
        let (typed, _keys) = mpsc::channel(8);
        let mut serial = Serial::new(printed, typed);
        for chunk in ["debian log", "in: root\r\nlogin: "] {
            machine.send(chunk.into()).await.unwrap();
        }
        serial.wait_for("login: ").await.unwrap();
        serial.wait_for("login: ").await.unwrap();
        drop(machine);
        assert!(serial.wait_for("login: ").await.is_err());
        assert_eq!(serial.tail(9), "");
    }

    #[tokio::test]
    async fn unread_text_is_bounded() {
        let (machine, printed) = mpsc::channel(64);
        let (typed, _keys) = mpsc::channel(1);
        let mut serial = Serial::new(printed, typed);
        for _ in 0..20 {
            machine.send(vec![b'x'; 10_000]).await.unwrap();
        }
        machine.send(b"end".to_vec()).await.unwrap();
        serial.wait_for("end").await.unwrap();
        assert!(serial.unread.is_empty() && serial.unread.capacity() < 4 * UNREAD_MAX);
    }
}
