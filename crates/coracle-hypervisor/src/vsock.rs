//! Guest vsock as a Unix socket of the host, by the protocol of Firecracker, which Cloud Hypervisor also speaks (Firecracker,
//! <https://github.com/firecracker-microvm/firecracker/blob/main/docs/vsock.md>, "Host-Initiated Connections").

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::sleep;

/// Port of the guest agent.
pub const GUEST_PORT: u32 = 1024;
/// Maximum length of an answer: the longest is `OK 4294967295`.
const ANSWER_BYTES_MAX: usize = 32;
/// Interval between attempts while the guest does not listen.
const RETRY: Duration = Duration::from_millis(20);

/// Connects to a port of the guest behind the socket that `open` connects to. A booting guest does not listen yet and closes
/// the connection; the attempt is then repeated, so the caller sets the time limit. Cancel-safe.
///
/// # Errors
/// When the VMM that listened at the socket has ended.
pub async fn connect<F>(open: impl Fn() -> F, port: u32) -> io::Result<UnixStream>
where
    F: Future<Output = io::Result<UnixStream>>,
{
    loop {
        let mut stream = open().await?;
        if stream.write_all(format!("CONNECT {port}\n").as_bytes()).await.is_ok()
            && read_answer(&mut stream).await?
        {
            return Ok(stream);
        }
        sleep(RETRY).await;
    }
}

/// Reads the answer byte by byte, because the bytes behind it come from the guest.
async fn read_answer(stream: &mut UnixStream) -> io::Result<bool> {
    let mut answer = Vec::with_capacity(ANSWER_BYTES_MAX);
    while answer.len() < ANSWER_BYTES_MAX {
        match stream.read_u8().await {
            Ok(b'\n') => break,
            Ok(byte) => answer.push(byte),
            // The guest refused, or its VMM is ending: the next connect tells which.
            Err(_) => return Ok(false),
        }
    }
    match answer.strip_prefix(b"OK ") {
        Some(_) => Ok(true),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "the VMM did not answer OK to CONNECT")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, BufReader};
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn connect_retries_until_the_guest_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.sock");
        assert!(connect(|| UnixStream::connect(&path), GUEST_PORT).await.is_err(), "no listener");
        let listener = UnixListener::bind(&path).unwrap();
        let vmm = async {
            for turn in 0..3 {
                let (stream, _) = listener.accept().await.unwrap();
                let mut lines = BufReader::new(stream);
                let mut line = String::new();
                lines.read_line(&mut line).await.unwrap();
                assert_eq!(line, "CONNECT 1024\n");
                if turn == 2 {
                    lines.get_mut().write_all(b"OK 1073741824\nCORACLE1").await.unwrap();
                    return;
                }
            }
        };
        let (stream, ()) = tokio::join!(connect(|| UnixStream::connect(&path), GUEST_PORT), vmm);
        let mut hello = [0; 8];
        stream.unwrap().read_exact(&mut hello).await.unwrap();
        assert_eq!(&hello, b"CORACLE1");
    }

    #[tokio::test]
    async fn invalid_vsock_reply_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let vmm = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&[b'x'; 64]).await.unwrap();
            stream
        };
        let (stream, _open) = tokio::join!(connect(|| UnixStream::connect(&path), GUEST_PORT), vmm);
        assert_eq!(stream.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
