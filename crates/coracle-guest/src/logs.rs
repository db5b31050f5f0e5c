//! Output of the workload: a ring that keeps the newest bytes. Gaps in the offsets show a reader what it has missed.
//!
//! The writer of a container's output waits while the ring is full of bytes that the host has not stored, like a process that
//! writes to a full pipe. The workload of a VM never waits.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_proto::guest::{LogChunk, Stream};
use futures_util::stream::{self, Stream as Flow};
use tokio::sync::watch;
use tonic::Status;

/// Size of the ring, bytes.
pub(crate) const RING_BYTES: usize = 256 * 1024;
/// Maximum number of chunks, which bounds the bookkeeping for output byte by byte.
pub(crate) const RING_CHUNKS: usize = 4096;

/// Size of a read from a process, bytes.
pub(crate) const READ: usize = 16 * 1024;
/// Number of readers: both streams of a process may have read when there is space for one.
const READERS: usize = 2;

/// Ring of output; pure.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    chunks: VecDeque<LogChunk>,
    bytes: usize,
    next: u64,
    /// Offset before which the host has stored the output; `None` if it does not report that.
    received: Option<u64>,
}

impl Ring {
    /// Appends output and drops the oldest when the ring is full.
    pub(crate) fn push(&mut self, stream: Stream, data: &[u8], time_unix_ns: i64) {
        for part in data.chunks(RING_BYTES / 4) {
            self.bytes = self.bytes.saturating_add(part.len());
            self.chunks.push_back(LogChunk {
                offset: self.next,
                stream: stream.into(),
                data: part.to_vec(),
                time_unix_ns,
            });
            self.next = self.next.saturating_add(len(part));
        }
        while self.bytes > RING_BYTES || self.chunks.len() > RING_CHUNKS {
            let Some(oldest) = self.chunks.pop_front() else { break };
            self.bytes = self.bytes.saturating_sub(oldest.data.len());
        }
    }

    /// First chunk at or after `offset`, cut to begin there; `None` if there is nothing yet.
    pub(crate) fn read(&self, offset: u64) -> Option<LogChunk> {
        let mut chunk = self.chunks.get(self.first_after(offset))?.clone();
        let skip = offset.saturating_sub(chunk.offset);
        if skip > 0 {
            chunk.data.drain(..usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.data.len()));
            chunk.offset = offset;
        }
        Some(chunk)
    }

    /// Whether output can be appended without dropping bytes that the host has not stored.
    pub(crate) fn has_room(&self) -> bool {
        let Some(received) = self.received else { return true };
        let ahead = usize::try_from(self.next.saturating_sub(received)).unwrap_or(usize::MAX);
        let chunks = self.chunks.len() - self.first_after(received);
        ahead <= RING_BYTES - READERS * READ && chunks <= RING_CHUNKS - READERS
    }

    /// Index of the first chunk that ends after `offset`.
    fn first_after(&self, offset: u64) -> usize {
        self.chunks.partition_point(|c| c.offset.saturating_add(len(&c.data)) <= offset)
    }

    /// Offset of the next byte.
    pub(crate) fn end(&self) -> u64 {
        self.next
    }
}

fn len(data: &[u8]) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

/// Ring shared by its writer and any number of followers.
#[derive(Debug)]
pub(crate) struct Logs {
    ring: Mutex<Ring>,
    /// True when the output is complete. Also sent at each append, and when the host has stored more.
    complete: watch::Sender<bool>,
}

impl Logs {
    /// Makes an empty ring. `received` is as in [`Logs::set_received`].
    pub(crate) fn new(received: Option<u64>) -> Arc<Self> {
        let ring = Mutex::new(Ring { received, ..Ring::default() });
        Arc::new(Self { ring, complete: watch::Sender::new(false) })
    }

    /// Sets the offset before which the host has stored the output. `None`: the host does not report it, and the writer never
    /// waits.
    pub(crate) fn set_received(&self, offset: Option<u64>) {
        let mut ring = self.ring();
        ring.received = offset.map(|offset| offset.min(ring.next));
        drop(ring);
        self.complete.send_modify(|_| {});
    }

    /// Waits for space for a piece of output. Cancel-safe.
    pub(crate) async fn room(&self) {
        let mut changed = self.complete.subscribe();
        while !self.ring().has_room() {
            let _sender_is_ours = changed.changed().await;
        }
    }

    pub(crate) fn push(&self, stream: Stream, data: &[u8], time_unix_ns: i64) {
        self.ring().push(stream, data, time_unix_ns);
        self.complete.send_modify(|_| {});
    }

    /// Offset behind the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.ring().end()
    }

    /// Marks the output as complete: followers end when they have read all of it.
    pub(crate) fn complete(&self) {
        self.complete.send_replace(true);
    }

    pub(crate) fn is_complete(&self) -> bool {
        *self.complete.borrow()
    }

    /// Empties the ring.
    pub(crate) fn reset(&self) {
        *self.ring() = Ring::default();
        self.complete.send_replace(false);
    }

    /// Streams the output from `offset`, and then new output.
    ///
    /// # Errors
    /// OUT_OF_RANGE if `offset` is beyond the end, because it is from an earlier boot of this VM.
    pub(crate) fn follow(
        self: &Arc<Self>,
        offset: u64,
    ) -> Result<impl Flow<Item = Result<LogChunk, Status>> + Send + use<>, Status> {
        let end = self.ring().end();
        if offset > end {
            return Err(Status::out_of_range(format!("offset {offset} of logs that end at {end}")));
        }
        let (logs, seen) = (Arc::clone(self), self.complete.subscribe());
        Ok(stream::unfold((logs, seen, offset), |(logs, mut seen, offset)| async move {
            loop {
                let complete = *seen.borrow_and_update();
                let chunk = logs.ring().read(offset);
                if let Some(chunk) = chunk {
                    let next = chunk.offset.saturating_add(len(&chunk.data));
                    return Some((Ok(chunk), (logs, seen, next)));
                }
                if complete {
                    return None;
                }
                seen.changed().await.ok()?;
            }
        }))
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt;

    #[test]
    fn ring_is_read_from_any_offset() {
        let mut ring = Ring::default();
        assert!(ring.read(0).is_none());
        ring.push(Stream::Stdout, b"hello", 1);
        ring.push(Stream::Stderr, b"world", 2);
        let at =
            |o: u64| ring.read(o).map(|c| (c.offset, String::from_utf8(c.data).unwrap(), c.time_unix_ns));
        assert_eq!(at(0), Some((0, "hello".into(), 1)));
        assert_eq!(at(3), Some((3, "lo".into(), 1)));
        assert_eq!(at(5), Some((5, "world".into(), 2)));
        assert_eq!(at(9), Some((9, "d".into(), 2)));
        assert_eq!(at(10), None);
        assert_eq!(at(u64::MAX), None);
    }

    #[test]
    fn full_ring_drops_oldest_output_and_keeps_offsets() {
        let mut ring = Ring::default();
        for n in 0..100u8 {
            ring.push(Stream::Stdout, &[n; 8192], 0);
        }
        let first = ring.read(0).unwrap();
        assert_eq!(first.offset, 100 * 8192 - 256 * 1024);
        assert_eq!(ring.bytes, RING_BYTES);
    }

    #[test]
    fn single_bytes_and_huge_writes_are_bounded() {
        let mut ring = Ring::default();
        for _ in 0..10 * RING_CHUNKS {
            ring.push(Stream::Stdout, b"x", 0);
        }
        assert_eq!(ring.chunks.len(), RING_CHUNKS);
        ring.push(Stream::Stdout, &vec![0; 10 * RING_BYTES], 0);
        assert!(ring.bytes <= RING_BYTES);
        assert_eq!(ring.end(), 10 * RING_CHUNKS as u64 + 10 * RING_BYTES as u64);
    }

    #[test]
    fn unreceived_output_fills_the_ring_table() {
        let fill = |received, count: usize, bytes: usize| {
            let mut ring = Ring { received, ..Ring::default() };
            for _ in 0..count {
                ring.push(Stream::Stdout, &vec![0; bytes], 0);
            }
            ring.has_room()
        };
        for (received, count, bytes, want) in [
            (None, 100, READ, true),
            (Some(0), 14, READ, true),
            (Some(0), 15, READ, false),
            (Some(READ as u64), 15, READ, true),
            (Some(0), RING_CHUNKS - 2, 1, true),
            (Some(0), RING_CHUNKS - 1, 1, false),
            (Some(1), RING_CHUNKS - 1, 1, true),
            (Some(100), 100, READ, false),
        ] {
            assert_eq!(fill(received, count, bytes), want, "{count} of {bytes} bytes, {received:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn writer_waits_for_the_host() {
        let logs = Logs::new(Some(0));
        for _ in 0..15 {
            logs.push(Stream::Stdout, &[0; READ], 0);
        }
        let waits =
            async || tokio::time::timeout(std::time::Duration::from_secs(1), logs.room()).await.is_err();
        assert!(waits().await);
        let (room, ()) = tokio::join!(logs.room(), async { logs.set_received(Some(READ as u64)) });
        assert_eq!(room, ());
        logs.set_received(Some(0));
        assert!(waits().await, "a new session has less");
        logs.set_received(None);
        assert!(!waits().await);
    }

    #[tokio::test]
    async fn log_follower_gets_new_entries_then_end_of_stream() {
        let logs = Logs::new(None);
        logs.push(Stream::Stdout, b"one", 0);
        let mut follower = Box::pin(logs.follow(1).unwrap());
        assert_eq!(follower.next().await.unwrap().unwrap().data, b"ne");
        logs.push(Stream::Stderr, b"two", 0);
        logs.complete();
        assert_eq!(follower.next().await.unwrap().unwrap().data, b"two");
        assert!(follower.next().await.is_none());
        assert!(logs.follow(6).is_ok() && logs.follow(7).is_err());
    }
}
