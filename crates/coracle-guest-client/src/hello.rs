//! Hello message with which a guest agent begins a session. The stream has no boundaries, so bytes of an earlier session may
//! precede it.

use std::io;

use rustix::net::RecvFlags;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;

/// First bytes of a hello; a session number of eight bytes, big endian, follows.
const HELLO_MAGIC: &[u8; 8] = b"CORACLE1";

/// Failure function of the search for [`HELLO_MAGIC`] (Knuth, Morris, Pratt): number of bytes that still match the beginning of
/// the magic after a mismatch at index `n`. The last byte of `CORAC` may begin another hello.
const HELLO_FALLBACK: [usize; 8] = [0, 0, 0, 0, 0, 1, 0, 0];

/// Size of a read, bytes.
const HELLO_BLOCK: usize = 64 * 1024;

/// Maximum number of bytes of an earlier session that may precede the hello.
const STALE_BYTES_MAX: usize = 4 << 20;

/// Skips the remains of an earlier session, up to and including a hello, and returns its session number. Reads nothing behind
/// the hello, where data of the agent may follow. Not cancel-safe.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] after 4 MiB without a hello; [`io::ErrorKind::UnexpectedEof`].
pub async fn read_hello(stream: &mut UnixStream) -> io::Result<u64> {
    let (mut matched, mut left) = (0, STALE_BYTES_MAX);
    let mut block = vec![0; HELLO_BLOCK];
    while left > 0 {
        let length = left.min(block.len());
        let seen = peek(stream, &mut block[..length]).await?;
        let taken = scan(&block[..seen], &mut matched);
        stream.read_exact(&mut block[..taken]).await?;
        if matched == HELLO_MAGIC.len() {
            return stream.read_u64().await;
        }
        left -= taken;
        // Yields, because a stream that is always readable would keep other tasks from running.
        tokio::task::yield_now().await;
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the guest sends data without a hello"))
}

/// Number of bytes up to the end of the magic, or all bytes; `matched` counts the matching bytes of the magic so far.
fn scan(bytes: &[u8], matched: &mut usize) -> usize {
    for (at, byte) in bytes.iter().enumerate() {
        while *matched > 0 && HELLO_MAGIC[*matched] != *byte {
            *matched = HELLO_FALLBACK[*matched];
        }
        *matched += usize::from(HELLO_MAGIC[*matched] == *byte);
        if *matched == HELLO_MAGIC.len() {
            return at + 1;
        }
    }
    bytes.len()
}

/// Copies the bytes that are readable, without consuming them.
async fn peek(stream: &UnixStream, block: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        let peeked = stream
            .try_io(Interest::READABLE, || Ok(rustix::net::recv(stream, &mut *block, RecvFlags::PEEK)?.0));
        match peeked {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            peeked => return peeked,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn hello_is_found_behind_stale_bytes() {
        let (mut host, mut guest) = UnixStream::pair().unwrap();
        for remains in [&b"\0\0\x12CORAC"[..], b"", b"C", b"CORA", b"CORACORA", b"CORACLE"] {
            guest.write_all(&[remains, HELLO_MAGIC].concat()).await.unwrap();
            guest.write_u64(42).await.unwrap();
            assert_eq!(read_hello(&mut host).await.unwrap(), 42, "{remains:?}");
        }
    }

    #[tokio::test]
    async fn hello_leaves_the_bytes_that_follow() {
        let (mut host, mut guest) = UnixStream::pair().unwrap();
        let stale = vec![b'C'; HELLO_BLOCK + 5];
        let send = async {
            guest.write_all(&[&stale[..], HELLO_MAGIC].concat()).await.unwrap();
            guest.write_u64(42).await.unwrap();
            guest.write_all(b"more").await.unwrap();
        };
        let receive = async {
            assert_eq!(read_hello(&mut host).await.unwrap(), 42);
            let mut rest = [0; 4];
            host.read_exact(&mut rest).await.unwrap();
            assert_eq!(&rest, b"more");
        };
        tokio::join!(send, receive);
    }

    #[test]
    fn scan_takes_a_whole_block_at_once() {
        let (mut matched, block) = (0, [b'x'; 4096]);
        assert_eq!((scan(&block, &mut matched), matched), (4096, 0));
        assert_eq!((scan(b"CORACLE", &mut matched), matched), (7, 7));
        assert_eq!((scan(b"1rest", &mut matched), matched), (1, 8));
    }

    #[tokio::test]
    async fn guest_without_hello_is_given_up() {
        let (mut host, mut guest) = UnixStream::pair().unwrap();
        let flood = async {
            let chunk = vec![b'x'; 1 << 16];
            while guest.write_all(&chunk).await.is_ok() {}
        };
        let outcome = tokio::select! {
            () = flood => unreachable!("the flood ends only with the host"),
            outcome = read_hello(&mut host) => outcome,
        };
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
