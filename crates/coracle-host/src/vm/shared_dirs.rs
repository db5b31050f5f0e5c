//! Serves shared directories of the node to a guest: FUSE requests and replies are carried over the session.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use coracle_guest_client::{GuestClient, GuestError};
use coracle_proto::guest as pb;
use coracle_proto::guest::fuse_reply::Message;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use coracle_lifecycle::SessionId;
use coracle_share::{SharedDirServer, SharedDirSpec, Submounts};

use super::effects::lock;
use crate::Volume;
use crate::files::blocking;

/// Maximum number of concurrent requests of one shared directory.
const AT_ONCE: usize = 8;

/// Open shared directories of a VM, by volume.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedDirs(Arc<Mutex<BTreeMap<String, SharedDir>>>);

#[derive(Debug)]
struct SharedDir {
    server: Arc<SharedDirServer>,
    /// Session that served the directory last. A second stream in the same session would execute pending requests of the first
    /// one twice.
    session: Option<SessionId>,
}

impl SharedDirs {
    /// Opens the directory of a volume; `table` stores its node ids for the next daemon. Idempotent.
    pub(super) async fn open(&self, volume: &Volume, table: PathBuf) -> io::Result<()> {
        if lock(&self.0).contains_key(&volume.name) {
            return Ok(());
        }
        let (root, read_only, ids) = (volume.source.clone(), volume.read_only, volume.ids);
        let coracle_record::Submounts { private, writable } = volume.submounts;
        let submounts = Submounts { private, writable };
        let opened = blocking(move || {
            table.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            SharedDirServer::open(SharedDirSpec { root, read_only, submounts, ids, table })
        });
        let server = Arc::new(opened.await?);
        lock(&self.0).insert(volume.name.clone(), SharedDir { server, session: None });
        Ok(())
    }

    pub(super) fn close(&self, volume: &str) {
        drop(lock(&self.0).remove(volume));
    }

    /// Closes all directories. An open directory would keep its file system mounted.
    pub(super) fn close_all(&self) {
        lock(&self.0).clear();
    }

    /// Serves an open directory until the session ends or the guest unmounts it. Returns at once if it is already served in
    /// this session.
    pub(super) async fn serve(self, volume: String, session: SessionId, guest: GuestClient) {
        let server = {
            let mut open = lock(&self.0);
            let Some(dir) = open.get_mut(&volume).filter(|dir| dir.session != Some(session)) else { return };
            dir.session = Some(session);
            Arc::clone(&dir.server)
        };
        serve(guest, volume, server).await;
    }
}

async fn serve(guest: GuestClient, volume: String, server: Arc<SharedDirServer>) {
    if let Err(error) = answer_all(&guest, volume.clone(), &server).await {
        tracing::debug!(volume, %error, "shared directory is no longer served");
    }
}

async fn answer_all(
    guest: &GuestClient,
    volume: String,
    server: &Arc<SharedDirServer>,
) -> Result<(), GuestError> {
    let (replies, stream) = mpsc::channel(AT_ONCE);
    let say = |message| pb::FuseReply { message: Some(message) };
    let gone = |_: mpsc::error::SendError<_>| GuestError::unavailable("the session ended");
    replies.send(say(Message::Name(volume))).await.map_err(gone)?;
    let mut requests = guest.serve_folder(ReceiverStream::new(stream)).await?;
    let mut work = JoinSet::new();
    loop {
        tokio::select! {
            request = requests.message(), if work.len() < AT_ONCE => {
                let Some(pb::FuseRequest { request }) = request? else { return Ok(()) };
                let server = server.clone();
                work.spawn_blocking(move || server.answer(&request));
            }
            // A guest that reads no replies delays only its own requests.
            Some(answered) = work.join_next() => {
                if let Ok(Some(reply)) = answered {
                    replies.send(say(Message::Reply(reply))).await.map_err(gone)?;
                }
            }
        }
    }
}
