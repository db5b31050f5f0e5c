//! The workload's output: a ring that keeps the newest bytes, never blocks
//! the writer, and shows by a gap in the offsets what a reader has missed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_proto::guest::{LogChunk, Stream};
use futures_util::stream::{self, Stream as Flow};
use tokio::sync::watch;
use tonic::Status;

/// Bytes of output kept.
pub(crate) const RING_BYTES: usize = 256 * 1024;
/// Chunks kept: bounds the bookkeeping when the output comes byte by byte.
pub(crate) const RING_CHUNKS: usize = 4096;

/// The ring alone; pure.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    chunks: VecDeque<LogChunk>,
    bytes: usize,
    next: u64,
}

impl Ring {
    /// Appends output; drops the oldest when the ring is full.
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

    /// The first chunk at or after `offset`, cut to begin there; none when there is nothing yet.
    pub(crate) fn read(&self, offset: u64) -> Option<LogChunk> {
        let at = self.chunks.partition_point(|c| c.offset.saturating_add(len(&c.data)) <= offset);
        let mut chunk = self.chunks.get(at)?.clone();
        let skip = offset.saturating_sub(chunk.offset);
        if skip > 0 {
            chunk.data.drain(..usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.data.len()));
            chunk.offset = offset;
        }
        Some(chunk)
    }

    /// Offset of the byte that comes next.
    pub(crate) fn end(&self) -> u64 {
        self.next
    }
}

fn len(data: &[u8]) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

/// The ring, shared by its writer and any number of followers.
#[derive(Debug)]
pub(crate) struct Logs {
    ring: Mutex<Ring>,
    /// True once nothing more can come. Sent anew at each append.
    complete: watch::Sender<bool>,
}

impl Logs {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { ring: Mutex::default(), complete: watch::Sender::new(false) })
    }

    pub(crate) fn push(&self, stream: Stream, data: &[u8], time_unix_ns: i64) {
        self.ring().push(stream, data, time_unix_ns);
        self.complete.send_modify(|_| {});
    }

    /// Offset behind the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.ring().end()
    }

    /// Nothing more will come: followers end when they have read all.
    pub(crate) fn complete(&self) {
        self.complete.send_replace(true);
    }

    /// Output from `offset`, then as it comes.
    ///
    /// # Errors
    /// OUT_OF_RANGE when `offset` lies in the future: it stems from another life of this VM.
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
    fn reads_from_any_offset() {
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
    fn the_oldest_goes_and_the_gap_shows() {
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

    #[tokio::test]
    async fn a_follower_gets_what_comes_and_then_the_end() {
        let logs = Logs::new();
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
