//! Serves a shared directory of the node to a guest: FUSE requests come over the session, replies return over it.

use std::sync::Arc;

use coracle_guest_client::{GuestClient, GuestError};
use coracle_proto::guest as pb;
use coracle_proto::guest::folder_answer::Message;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use coracle_share::SharedDirServer;

/// Requests of one shared directory that are handled at once.
const AT_ONCE: usize = 8;

/// Serves the directory until the session ends or the guest unmounts it.
pub(super) async fn serve(guest: GuestClient, volume: String, server: Arc<SharedDirServer>) {
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
