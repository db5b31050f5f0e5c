//! Copies files into and out of the container's root, as tar streams. Each copy has a thread for the blocking tar work. A short
//! queue of chunks between thread and client bounds the memory in both directions.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use coracle_proto::guest::copy_in_request::Message as In;
use coracle_proto::guest::{CopyInRequest, CopyInResponse, CopyOutChunk};
use futures_util::{Stream, StreamExt};
use tokio::sync::mpsc;
use tonic::Status;

use crate::error::Error;
use crate::pipe::CHUNK;
use crate::rootfs::pack;
use crate::rootfs::unpack::Unpacked;
use crate::rootfs::{self, PATH_MAX, Root};
use crate::task_stream::{Outbox, TaskStream};

/// Maximum number of chunks from the client that are queued for the disk.
const QUEUED: usize = 2;

/// Unpacks the tar stream of `input` below the directory `path`, which is made if it is missing. Entries keep mode, owner and
/// modification time. An existing file is replaced, an existing directory is kept.
pub(crate) async fn unpack<S>(root: Arc<Root>, path: &str, mut input: S) -> Result<CopyInResponse, Error>
where
    S: Stream<Item = Result<CopyInRequest, Status>> + Send + Unpin,
{
    check(path)?;
    let (chunks, inbox) = mpsc::channel(QUEUED);
    let path = path.to_owned();
    let work = tokio::task::spawn_blocking(move || {
        let mut source = Source { inbox, chunk: Vec::new(), at: 0 };
        let done = rootfs::unpack::unpack(&root, Path::new(&path), &mut source);
        if done.is_ok() {
            // Reads the rest, because some writers pad the end: the call of a client that is still sending must not be reset.
            let _ = io::copy(&mut source, &mut io::sink());
        }
        let Unpacked { entries, bytes } = done.map_err(|error| Error::io(error.what)(error.source))?;
        Ok(CopyInResponse { entries, bytes })
    });
    loop {
        let chunk = match input.next().await {
            Some(Ok(CopyInRequest { message: Some(In::Data(data)) })) => Ok(data),
            Some(Ok(_)) => continue,
            Some(Err(_)) => Err(io::Error::from(io::ErrorKind::ConnectionAborted)),
            None => break,
        };
        let last = chunk.is_err();
        if chunks.send(chunk).await.is_err() || last {
            break; // the reader or the client has failed: see the result below
        }
    }
    drop(chunks);
    work.await.map_err(|_| Error::TimedOut("unpacking"))?
}

/// Packs `path` as a tar stream. A link is sent as a link; directories of other file systems (proc, sys) are sent empty.
pub(crate) fn pack(root: Arc<Root>, path: String) -> Result<TaskStream<CopyOutChunk>, Error> {
    check(&path)?;
    let top = pack::open(&root, Path::new(&path)).map_err(Error::io(format!("open {path}")))?;
    Ok(TaskStream::new(|outbox, tasks| {
        tasks.spawn_blocking(move || {
            let mut sink = Sink { outbox: outbox.clone(), chunk: Vec::with_capacity(CHUNK) };
            let done = pack::pack(&top, &mut sink).and_then(|()| sink.flush());
            if let Err(e) = done {
                let error = Error::io(format!("copy {path} out of the guest"))(e);
                let _ = outbox.blocking_send(Err(error.into())); // fails if the client has gone
            }
        });
    }))
}

/// Packs the overlay's upper directory as a tar stream, with hard links and extended attributes.
pub(crate) fn changes(upper: Root) -> TaskStream<CopyOutChunk> {
    TaskStream::new(|outbox, tasks| {
        tasks.spawn_blocking(move || {
            let mut sink = Sink { outbox: outbox.clone(), chunk: Vec::with_capacity(CHUNK) };
            if let Err(e) = pack::pack_changes(&upper, &mut sink).and_then(|()| sink.flush()) {
                let error = Error::io("copy the changes out of the guest")(e);
                let _ = outbox.blocking_send(Err(error.into())); // fails if the client has gone
            }
        });
    })
}

fn check(path: &str) -> Result<(), Error> {
    let plain = path.starts_with('/') && path.len() <= PATH_MAX && !path.contains('\0');
    if plain { Ok(()) } else { Err(Error::invalid(format!("invalid path {path:?}: not absolute"))) }
}

/// Blocking reader of the client's chunks.
struct Source {
    inbox: mpsc::Receiver<io::Result<Vec<u8>>>,
    chunk: Vec<u8>,
    at: usize,
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at >= self.chunk.len() {
            match self.inbox.blocking_recv() {
                Some(chunk) => (self.chunk, self.at) = (chunk?, 0),
                None => return Ok(0),
            }
        }
        let n = self.chunk.get(self.at..).unwrap_or_default().read(buffer)?;
        self.at = self.at.saturating_add(n);
        Ok(n)
    }
}

/// Blocking writer of chunks to the client; waits while the client does not read.
struct Sink {
    outbox: Outbox<CopyOutChunk>,
    chunk: Vec<u8>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let part = bytes.get(..bytes.len().min(CHUNK.saturating_sub(self.chunk.len()))).unwrap_or_default();
        self.chunk.extend_from_slice(part);
        if self.chunk.len() >= CHUNK {
            self.flush()?;
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let data = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK));
        self.outbox.blocking_send(Ok(CopyOutChunk { data })).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}
