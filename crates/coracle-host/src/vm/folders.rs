//! A folder of this node for a guest: its kernel's questions come over the session, and are answered here.

use std::sync::Arc;

use coracle_proto::guest as pb;
use coracle_proto::guest::folder_answer::Message;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use crate::GuestClient;
use crate::folders::FolderServer;

/// Questions of one folder that are worked on at once.
const AT_ONCE: usize = 8;

/// Serves the folder until the session ends, or the guest unmounts it.
pub(super) async fn serve(guest: GuestClient, volume: String, server: Arc<FolderServer>) {
    if let Err(status) = answer_all(&guest, volume.clone(), &server).await {
        tracing::debug!(volume, error = status.message(), "folder is served no more");
    }
}

async fn answer_all(
    guest: &GuestClient,
    volume: String,
    server: &Arc<FolderServer>,
) -> Result<(), tonic::Status> {
    let (answers, stream) = mpsc::channel(AT_ONCE);
    let say = |message| pb::FolderAnswer { message: Some(message) };
    let gone = |_: mpsc::error::SendError<_>| tonic::Status::cancelled("the session ended");
    answers.send(say(Message::Name(volume))).await.map_err(gone)?;
    let mut questions = guest.rpc().serve_folder(ReceiverStream::new(stream)).await?.into_inner();
    let mut work = JoinSet::new();
    loop {
        tokio::select! {
            question = questions.message(), if work.len() < AT_ONCE => {
                let Some(pb::FolderQuestion { question }) = question? else { return Ok(()) };
                let server = server.clone();
                work.spawn_blocking(move || server.answer(&question));
            }
            // A guest that takes no answers holds nothing but these few.
            Some(answered) = work.join_next() => {
                if let Ok(Some(answer)) = answered {
                    answers.send(say(Message::Answer(answer))).await.map_err(gone)?;
                }
            }
        }
    }
}
