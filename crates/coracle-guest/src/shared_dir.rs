//! Shared directory: passes FUSE requests of the kernel to the stream that serves the directory, and the replies back.
//!
//! The mount outlives a stream. A request without a reply when its stream ends is sent again on the next stream, so no
//! operation of the workload is lost.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_proto::guest::fuse_reply::Message;
use coracle_proto::guest::{FuseReply, FuseRequest};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tonic::{Status, Streaming};

use crate::error::Error;
use crate::task_stream::{Outbox, TaskStream};

/// Buffer for the largest request: a write of 128 KiB with its headers (linux/fuse.h; the kernel requires at least this size).
const REQUEST_MAX: usize = (128 << 10) + 4096;
/// Offsets of the operation and of the number in a request; a reply has the number at the same offset.
const OPERATION: usize = 4;
const NUMBER: usize = 8;
/// Operations without a reply: FORGET, INTERRUPT, BATCH_FORGET.
const FORGET: u32 = 2;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// Mounted shared directory.
#[derive(Debug)]
pub(crate) struct SharedDir {
    device: Arc<OwnedFd>,
    /// Requests without a reply that were sent to the host, by number.
    unanswered: Mutex<BTreeMap<u64, Vec<u8>>>,
    /// Incremented by each new stream, which makes the earlier ones stop.
    turn: watch::Sender<u64>,
}

impl SharedDir {
    /// Makes a shared directory that is not mounted yet, and returns the device to mount it with.
    pub(crate) fn open() -> io::Result<(Self, Arc<OwnedFd>)> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let device = Arc::new(rustix::fs::open("/dev/fuse", flags, Mode::empty())?);
        let shared_dir =
            Self { device: Arc::clone(&device), unanswered: Mutex::default(), turn: watch::Sender::new(0) };
        Ok((shared_dir, device))
    }

    /// Sends requests to a client and passes its replies to the kernel, until the client has gone, another stream replaces it
    /// or the directory is unmounted.
    pub(crate) fn serve(
        self: &Arc<Self>,
        replies: Streaming<FuseReply>,
    ) -> Result<TaskStream<FuseRequest>, Error> {
        let device = self.device.try_clone().and_then(|device| crate::sys::watch(device, Interest::READABLE));
        let device = device.map_err(Error::io("watch /dev/fuse"))?;
        let mut turn = self.turn.subscribe();
        self.turn.send_modify(|turn| *turn = turn.wrapping_add(1));
        turn.mark_unchanged();
        let shared_dir = Arc::clone(self);
        Ok(TaskStream::new(|outbox, tasks| {
            tasks.spawn(async move {
                // Checks first for a newer stream: a request that is read after that would have no receiver.
                let over = tokio::select! {
                    biased;
                    _ = turn.changed() => Err(Status::aborted("another stream serves the directory now")),
                    over = shared_dir.send_requests(&device, &outbox) => over,
                    over = shared_dir.receive_replies(replies) => over,
                };
                if let Err(status) = over {
                    let _ = outbox.send(Err(status)).await; // fails if the client has gone
                }
            });
        }))
    }

    /// Sends the requests without a reply first, then each new one.
    async fn send_requests(
        &self,
        device: &AsyncFd<OwnedFd>,
        outbox: &Outbox<FuseRequest>,
    ) -> Result<(), Status> {
        let left: Vec<_> = self.unanswered().values().cloned().collect();
        for request in left {
            send(outbox, request).await?;
        }
        let mut buffer = vec![0; REQUEST_MAX];
        loop {
            let mut ready = device.readable().await.map_err(|e| Status::internal(e.to_string()))?;
            match rustix::io::read(device, &mut *buffer) {
                Ok(length) => {
                    let request = buffer.get(..length).unwrap_or_default().to_vec();
                    match operation(&request) {
                        INTERRUPT => {} // the interrupted request gets its reply anyway
                        FORGET | BATCH_FORGET => send(outbox, request).await?,
                        _ => {
                            self.unanswered().insert(number(&request), request.clone());
                            send(outbox, request).await?;
                        }
                    }
                }
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::NODEV) => return Ok(()),   // unmounted
                Err(Errno::INTR | Errno::NOENT) => {} // the request was withdrawn
                Err(e) => return Err(Status::internal(format!("read /dev/fuse: {e}"))),
            }
        }
    }

    async fn receive_replies(&self, mut replies: Streaming<FuseReply>) -> Result<(), Status> {
        while let Some(reply) = replies.message().await? {
            let Some(Message::Reply(reply)) = reply.message else {
                return Err(Status::invalid_argument("only the first message is a name"));
            };
            if self.unanswered().remove(&number(&reply)).is_none() {
                continue; // answered on an earlier stream
            }
            match rustix::io::write(&*self.device, &reply) {
                Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {} // the caller does not wait any more
                Err(e) => return Err(Status::invalid_argument(format!("the kernel refuses an answer: {e}"))),
            }
        }
        Ok(())
    }

    fn unanswered(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<u8>>> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn send(outbox: &Outbox<FuseRequest>, request: Vec<u8>) -> Result<(), Status> {
    outbox.send(Ok(FuseRequest { request })).await.map_err(|_| Status::cancelled("the stream ended"))
}

fn operation(request: &[u8]) -> u32 {
    let bytes = request.get(OPERATION..OPERATION + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u32::from_ne_bytes)
}

/// Number of a request or of a reply.
fn number(message: &[u8]) -> u64 {
    let bytes = message.get(NUMBER..NUMBER + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u64::from_ne_bytes)
}
