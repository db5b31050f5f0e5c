//! Serves a shared directory of the node to a guest: FUSE requests come over the session, replies return over it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use coracle_guest_client::{GuestClient, GuestError};
use coracle_proto::guest as pb;
use coracle_proto::guest::folder_answer::Message;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use coracle_lifecycle::SessionId;
use coracle_share::{SharedDirServer, SharedDirSpec, Submounts};

use super::effects::lock;
use crate::Volume;
use crate::files::blocking;

/// Requests of one shared directory that are handled at once.
const AT_ONCE: usize = 8;

/// The shared directories of a VM that are open, by volume.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedDirs(Arc<Mutex<BTreeMap<String, SharedDir>>>);

#[derive(Debug)]
struct SharedDir {
    server: Arc<SharedDirServer>,
    /// The session that it was served over last. A second stream in one session would have requests that the first is at
    /// carried out twice.
    session: Option<SessionId>,
}

impl SharedDirs {
    /// Opens the directory of a volume; `table` keeps its nodes for the next daemon. Idempotent.
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

    /// A directory that is open keeps its file system mounted.
    pub(super) fn close_all(&self) {
        lock(&self.0).clear();
    }

    /// Serves a directory that is open until the session ends or the guest unmounts it. Returns at once when this session
    /// has it served already.
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
    let (answers, stream) = mpsc::channel(AT_ONCE);
    let say = |message| pb::FolderAnswer { message: Some(message) };
    let gone = |_: mpsc::error::SendError<_>| GuestError::unavailable("the session ended");
    answers.send(say(Message::Name(volume))).await.map_err(gone)?;
    let mut questions = guest.serve_folder(ReceiverStream::new(stream)).await?;
    let mut work = JoinSet::new();
    loop {
        tokio::select! {
            question = questions.message(), if work.len() < AT_ONCE => {
                let Some(pb::FolderQuestion { question }) = question? else { return Ok(()) };
                let server = server.clone();
                work.spawn_blocking(move || server.answer(&question));
            }
            // A guest that reads no replies delays only these requests.
            Some(answered) = work.join_next() => {
                if let Ok(Some(answer)) = answered {
                    answers.send(say(Message::Answer(answer))).await.map_err(gone)?;
                }
            }
        }
    }
}
