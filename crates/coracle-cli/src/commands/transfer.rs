//! Transfers of images to a node and to registries, with progress.

use coracle_proto::host as pb;
use pb::host_client::HostClient;
use pb::pull_image_response::Message;
use tonic::transport::Channel;

use crate::cli::{ProgressMode, Pull};
use crate::error::Failure;
use crate::output;
use crate::progress::ProgressDisplay;

/// Pushes an image of the node to a registry and prints the digest of its manifest.
pub(super) async fn push(
    client: &mut HostClient<Channel>,
    reference: String,
    target: String,
    mode: ProgressMode,
) -> Result<(), Failure> {
    let events = client.push_image(pb::PushImageRequest { reference, target }).await?.into_inner();
    follow_push(events, mode).await
}

/// Shows the progress of a push, and prints the digest of the manifest.
pub(super) async fn follow_push(
    mut events: tonic::Streaming<pb::PushResponse>,
    mode: ProgressMode,
) -> Result<(), Failure> {
    use pb::push_response::Message;
    let mut progress = ProgressDisplay::new(mode);
    while let Some(event) = events.message().await? {
        match event.message {
            Some(Message::Progress(step)) => progress.pull(&step),
            Some(Message::Report(report)) => {
                progress.done();
                let moved = output::bytes(report.moved_bytes);
                eprintln!("moved {moved} in {} of {} chunks", report.moved, report.pieces);
                return output::write(&format!("{}\n", report.digest));
            }
            None => {}
        }
    }
    Err(Failure::new("COR-RPC-015", "the node ended the push without a report"))
}

/// Pulls an image and shows the progress.
pub async fn pull(
    client: &mut HostClient<Channel>,
    reference: &str,
    when: Pull,
    progress: ProgressMode,
) -> Result<pb::Image, Failure> {
    let policy = match when {
        Pull::Missing => pb::PullPolicy::IfNotPresent,
        Pull::Always => pb::PullPolicy::Always,
        Pull::Never => pb::PullPolicy::Never,
    };
    let request = pb::PullImageRequest { reference: reference.to_owned(), policy: policy.into() };
    follow(client.pull_image(request).await?.into_inner(), progress).await
}

/// Imports an image from a directory or an archive and shows the progress.
pub async fn import(
    client: &mut HostClient<Channel>,
    source: &str,
    reference: Option<&str>,
    progress: ProgressMode,
) -> Result<pb::Image, Failure> {
    let request = pb::ImportImageRequest {
        source: absolute(source),
        reference: reference.unwrap_or_default().to_owned(),
    };
    follow(client.import_image(request).await?.into_inner(), progress).await
}

/// Makes the paths of a source absolute: the node has another working directory than the user.
fn absolute(source: &str) -> String {
    let absolute =
        |path: &str| std::path::absolute(path).map_or_else(|_| path.to_owned(), |p| p.display().to_string());
    match source.split_once(':') {
        Some((kind @ ("oci" | "docker-archive" | "disk"), path)) => format!("{kind}:{}", absolute(path)),
        _ => source.to_owned(),
    }
}

async fn follow(
    mut events: tonic::Streaming<pb::PullImageResponse>,
    mode: ProgressMode,
) -> Result<pb::Image, Failure> {
    let mut progress = ProgressDisplay::new(mode);
    while let Some(event) = events.message().await? {
        match event.message {
            Some(Message::Progress(step)) => progress.pull(&step),
            Some(Message::Image(image)) => {
                progress.done();
                return Ok(image);
            }
            None => {}
        }
    }
    Err(Failure::new("COR-RPC-015", "the node ended the pull without an image"))
}
