//! Calls on images.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use coracle_host::{CommittedImage, DiskImage, Host, HostError, LocalUser, NodeImage, PullPolicy, View};
use coracle_image::{Image, ImageError, PushOptions, Source};
use coracle_oci::{Digest, Progress, ProgressEvent, PullOrigin, Reference, Step};
use coracle_proto::host as pb;
use tokio::sync::mpsc;
use tonic::{Response, Status};

use super::messages::MessageWriter;
use super::streams::drive_stream;
use super::{Replies, Reply};
use crate::status::{OrStatus as _, to_status};

/// Maximum number of queued progress events. While the caller is slow, further events are dropped.
const PROGRESS_QUEUE: usize = 64;
/// Prefix of the source of a disk image.
const DISK_FILE: &str = "disk:";
/// Maximum number of queued messages of an archive.
const ARCHIVE_QUEUE: usize = 4;

pub(super) fn image_error<E: Into<ImageError>>(reference: &str) -> impl FnOnce(E) -> Status {
    move |source| to_status(&HostError::Image { reference: reference.to_owned(), source: source.into() })
}

pub(super) fn reference(text: &str) -> Result<Reference, Status> {
    text.parse().map_err(image_error(text))
}

/// Sends progress to a caller, converted to the message type of the call. Never blocks.
struct ProgressSender<T>(mpsc::Sender<Result<T, Status>>, fn(pb::PullProgress) -> T);

impl<T: Send> Progress for ProgressSender<T> {
    fn event(&self, event: ProgressEvent) {
        let step = match event.step {
            Step::Resolve => "resolve",
            Step::Download => "download",
            Step::Unpack => "unpack",
            Step::Upload => "upload",
        };
        let progress = pb::PullProgress {
            step: step.to_owned(),
            item: event.item.map(|d| d.to_string()).unwrap_or_default(),
            done_bytes: event.done_bytes,
            total_bytes: event.total_bytes,
        };
        let _slow_caller = self.0.try_send(Ok((self.1)(progress)));
    }
}

pub(super) fn pull(
    host: &Host,
    request: pb::PullImageRequest,
    origin: PullOrigin,
) -> Replies<pb::PullImageResponse> {
    let mode = match request.policy() {
        pb::PullPolicy::Unspecified | pb::PullPolicy::Always => PullPolicy::Always,
        pb::PullPolicy::IfNotPresent => PullPolicy::IfNotPresent,
        pb::PullPolicy::Never => PullPolicy::Never,
    };
    let name = request.reference;
    let reference: Reference = name.parse().map_err(image_error(&name))?;
    let host = host.clone();
    with_progress(host.clone(), move |progress| async move {
        let found = host.ensure_image(&reference, (mode, origin), progress).await.or_status()?;
        if let NodeImage::Container(image) = &found {
            host.images().rootfs(image).await.map_err(image_error(&name))?;
        }
        Ok(found)
    })
}

pub(super) fn import(
    host: &Host,
    request: pb::ImportImageRequest,
    user: LocalUser,
) -> Replies<pb::PullImageResponse> {
    let text = request.source;
    let name = match request.reference.as_str() {
        "" => None,
        text => Some(text.parse::<Reference>().map_err(image_error(text))?),
    };
    let host = host.clone();
    if let Some(file) = text.strip_prefix(DISK_FILE) {
        let file = PathBuf::from(file);
        return with_progress(host.clone(), move |progress| async move {
            let file = host.granted_path(&file, user).await.or_status()?;
            Ok(NodeImage::Disk(host.import_disk(&file, name, progress).await.or_status()?))
        });
    }
    let source: Source = text.parse().map_err(image_error(&text))?;
    with_progress(host.clone(), move |progress| async move {
        if let Source::OciDir { dir: path, .. } | Source::DockerArchive(path) = &source {
            host.granted_path(path, user).await.or_status()?;
        }
        let image =
            host.images().import(&source, name.as_ref(), progress).await.map_err(image_error(&text))?;
        host.images().rootfs(&image).await.map_err(image_error(&text))?;
        Ok(NodeImage::Container(Box::new(image)))
    })
}

fn with_progress<F>(
    host: Host,
    work: impl FnOnce(Arc<dyn Progress>) -> F + Send + 'static,
) -> Replies<pb::PullImageResponse>
where
    F: Future<Output = Result<NodeImage, Status>> + Send,
{
    use pb::pull_image_response::Message;
    let to_message = |progress| pb::PullImageResponse { message: Some(Message::Progress(progress)) };
    run_with_progress(to_message, move |progress| async move {
        let found = work(progress).await?;
        let users = Users::of(&host).await?;
        let image = match &found {
            NodeImage::Container(image) => image_message(&host, &users, image),
            NodeImage::Disk(image) => disk_image_message(&host, &users, image),
        };
        Ok(pb::PullImageResponse { message: Some(Message::Image(image)) })
    })
}

/// Runs `work` for as long as the caller listens: streams progress converted by `to_message`, then the result.
pub(super) fn run_with_progress<T: Send + 'static, F>(
    to_message: fn(pb::PullProgress) -> T,
    work: impl FnOnce(Arc<dyn Progress>) -> F + Send + 'static,
) -> Replies<T>
where
    F: Future<Output = Result<T, Status>> + Send,
{
    let (to_caller, replies) = mpsc::channel(PROGRESS_QUEUE);
    let run = async move {
        let outcome = work(Arc::new(ProgressSender(to_caller.clone(), to_message))).await;
        let _caller_gone = to_caller.send(outcome).await;
    };
    Ok(Response::new(Box::pin(drive_stream(run, replies))))
}

/// Like [`run_with_progress`], for a push to a registry.
pub(super) fn run_push<F>(
    work: impl FnOnce(Arc<dyn Progress>) -> F + Send + 'static,
) -> Replies<pb::PushResponse>
where
    F: Future<Output = Result<pb::PushReport, Status>> + Send,
{
    use pb::push_response::Message;
    let to_message = |progress| pb::PushResponse { message: Some(Message::Progress(progress)) };
    run_with_progress(to_message, move |progress| async move {
        Ok(pb::PushResponse { message: Some(Message::Report(work(progress).await?)) })
    })
}

pub(super) fn push(
    host: &Host,
    request: pb::PushImageRequest,
    origin: PullOrigin,
) -> Replies<pb::PushResponse> {
    let source = reference(&request.reference)?;
    let target = match request.target.as_str() {
        "" => source.clone(),
        text => reference(text)?,
    };
    let host = host.clone();
    run_push(move |progress| async move {
        let options = PushOptions { origin, ..PushOptions::default() };
        let pushed = host.images().push(&source, &target, &options, progress).await;
        let report = pushed.map_err(image_error(&request.reference))?;
        Ok(pb::PushReport {
            digest: report.digest.to_string(),
            pieces: u32::try_from(report.blobs).unwrap_or(u32::MAX),
            moved: u32::try_from(report.moved).unwrap_or(u32::MAX),
            moved_bytes: report.moved_bytes,
        })
    })
}

pub(super) async fn tag(host: &Host, request: pb::TagImageRequest) -> Reply<pb::Image> {
    let image = find(host, &request.reference).await?;
    let name = reference(&request.name)?;
    let image = host.images().tag(&image.digest, &name).await.map_err(image_error(&request.name))?;
    Ok(Response::new(image_message(host, &Users::of(host).await?, &image)))
}

pub(super) async fn export(host: &Host, wanted: String) -> Replies<pb::ExportImageResponse> {
    find(host, &wanted).await?;
    let source = reference(&wanted)?;
    let (to_caller, replies) = mpsc::channel(ARCHIVE_QUEUE);
    let out = MessageWriter::new(to_caller.clone(), |data| pb::ExportImageResponse { data });
    let host = host.clone();
    let work = async move {
        if let Err(error) = host.images().export(&source, out).await.map_err(image_error(&wanted)) {
            let _caller_gone = to_caller.send(Err(error)).await;
        }
    };
    Ok(Response::new(Box::pin(drive_stream(work, replies))))
}

pub(super) async fn commit(host: &Host, request: pb::CommitVmRequest) -> Reply<pb::Image> {
    let name = reference(&request.reference)?;
    let image = host.commit(&request.vm, &name).await.or_status()?;
    let users = Users::of(host).await?;
    Ok(Response::new(match image {
        CommittedImage::Container(image) => image_message(host, &users, &image),
        CommittedImage::Disk(image) => disk_image_message(host, &users, &image),
    }))
}

pub(super) async fn list(host: &Host) -> Reply<pb::ListImagesResponse> {
    let images = host.images().list().await.map_err(image_error("list"))?;
    let users = Users::of(host).await?;
    let disks = host.disk_images().list();
    let containers = images.iter().map(|image| image_message(host, &users, image));
    let images =
        containers.chain(disks.iter().map(|image| disk_image_message(host, &users, image))).collect();
    Ok(Response::new(pb::ListImagesResponse { images }))
}

pub(super) async fn get(host: &Host, name: &str) -> Reply<pb::Image> {
    let users = Users::of(host).await?;
    if let Some(image) = host.disk_images().named(&reference(name)?) {
        return Ok(Response::new(disk_image_message(host, &users, &image)));
    }
    Ok(Response::new(image_message(host, &users, &find(host, name).await?)))
}

async fn find(host: &Host, name: &str) -> Result<Image, Status> {
    let reference: Reference = name.parse().map_err(image_error(name))?;
    match host.images().get(&reference).await.map_err(image_error(name))? {
        Some(image) => Ok(image),
        None => Err(Status::not_found(format!("image {name} is not on this node"))),
    }
}

pub(super) async fn remove(host: &Host, request: pb::RemoveImageRequest) -> Reply<pb::RemoveImageResponse> {
    let name = reference(&request.reference)?;
    let disk = host.disk_images().named(&name);
    let digest = match &disk {
        Some(image) => image.digest.clone(),
        None => find(host, &request.reference).await?.digest.to_string(),
    };
    let users = Users::of(host).await?.of_digest(&digest);
    if !users.is_empty() && !request.force {
        let why = format!(
            "image {} is used by {}; remove them first, or force",
            request.reference,
            users.join(", ")
        );
        return Err(Status::failed_precondition(why));
    }
    match disk {
        // The next prune removes the file, because a VM that is being created may use it.
        Some(_) => host.disk_images().untag(&name).map_err(|source| {
            to_status(&HostError::State { operation: format!("remove {}", request.reference), source })
        })?,
        None => {
            host.images().remove(&name).await.map_err(image_error(&request.reference))?;
        }
    }
    Ok(Response::new(pb::RemoveImageResponse { digest }))
}

pub(super) async fn prune(host: &Host, dry_run: bool) -> Reply<pb::PruneImagesResponse> {
    let users = Users::of(host).await?;
    let in_use: HashSet<Digest> = users.0.iter().filter_map(|(used, _)| used.parse().ok()).collect();
    let report = host.images().prune(&in_use, dry_run).await.map_err(image_error("prune"))?;
    let disks =
        host.prune_disk_images(&users.0.into_iter().map(|(used, _)| used).collect(), dry_run).or_status()?;
    let freed: u64 = disks.iter().map(|(_, bytes)| bytes).sum();
    let paths = report.removed.iter().map(|r| &r.path).chain(disks.iter().map(|(path, _)| path));
    Ok(Response::new(pb::PruneImagesResponse {
        removed: paths.map(|path| path.display().to_string()).collect(),
        freed_bytes: report.freed_bytes + freed,
    }))
}

/// Users of images: digest, and name of the VM or snapshot. The disk of a snapshot is an overlay on its image's root, so a
/// restore needs the image.
struct Users(Vec<(String, String)>);

impl Users {
    async fn of(host: &Host) -> Result<Self, Status> {
        let vms = host.list();
        let of_containers = |v: &Arc<View>| {
            let name = v.record.name.to_string();
            v.record.images.iter().map(|i| (i.digest.clone(), name.clone())).collect::<Vec<_>>()
        };
        let containers: Vec<_> = vms.iter().flat_map(of_containers).collect();
        let vms = vms.iter().map(|v| (v.record.image_digest.clone(), v.record.name.to_string()));
        let snapshots = host.snapshots().await.or_status()?;
        let snapshots = snapshots.iter().map(|s| (s.image_digest.clone(), format!("snapshot {}", s.name)));
        Ok(Self(vms.chain(containers).chain(snapshots).collect()))
    }

    fn of_digest(&self, digest: &str) -> Vec<String> {
        self.0.iter().filter(|(used, _)| used == digest).map(|(_, user)| user.clone()).collect()
    }
}

fn image_message(host: &Host, users: &Users, image: &Image) -> pb::Image {
    pb::Image {
        digest: image.digest.to_string(),
        references: image.references.iter().map(Reference::familiar).collect(),
        architecture: image.architecture.clone(),
        os: image.os.clone(),
        size_bytes: image.size_bytes,
        rootfs_bytes: host.images().rootfs_bytes(image),
        created_at_ms: image.created.map_or(0, |t| t.as_millisecond()),
        entrypoint: image.config.entrypoint.clone(),
        cmd: image.config.cmd.clone(),
        env: image.config.env.clone(),
        user: image.config.user.clone(),
        workdir: image.config.workdir.clone(),
        disk_bytes: 0,
        layers: u32::try_from(image.layers.len()).unwrap_or(u32::MAX),
        used_by: users.of_digest(&image.digest.to_string()),
    }
}

/// Image message of a disk image, which has neither architecture nor operating system.
fn disk_image_message(host: &Host, users: &Users, image: &DiskImage) -> pb::Image {
    pb::Image {
        digest: image.digest.clone(),
        references: image
            .names
            .iter()
            .filter_map(|n| n.parse::<Reference>().ok())
            .map(|n| n.familiar())
            .collect(),
        os: "disk".to_owned(),
        size_bytes: host.disk_images().allocated_bytes(image),
        disk_bytes: image.disk_bytes,
        created_at_ms: image.created_ms,
        used_by: users.of_digest(&image.digest),
        ..Default::default()
    }
}
