//! Warm-up of a pooled clone: the calls of a VM's start, or of a Pod with a container, or both, with dummy data. Under emulation,
//! code is slow the first time that it runs in a VMM. All changes of the warm-up are undone.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_guest_client::{GuestClient, GuestError, GuestSession, NewSession};
use coracle_proto::guest as pb;
use coracle_proto::guest::guest_frame::Message;
use coracle_types::UnixMillis;
use tokio::sync::watch;
use tokio::time::timeout;

use super::ANSWER_LIMIT;
use super::kinds::WarmUps;
use crate::vmm_config::{IMAGE_SLOT, device, for_containers, warm_up_slot};

/// Slot of the container's image. That of a VM's root stays mounted.
pub(super) const CONTAINER_SLOT: usize = IMAGE_SLOT + 1;
/// Time limit of the image's program.
const PROGRAM_LIMIT: Duration = Duration::from_secs(20);
/// Program of the image: the guest agent.
const PROGRAM: [&str; 2] = ["/bin/program", pb::WARM_UP];

/// Host name of the guest and id of its container.
const NAME: &str = "pooled";
/// Addresses that no VM has: a locally administered MAC address, and two of TEST-NET-1 (RFC 5737).
const MAC: &str = "02:00:00:00:00:01";
const ADDRESS: &str = "192.0.2.2/24";
const GATEWAY: &str = "192.0.2.1";
/// Paths that containers mask, and that they make read-only, by default.
const MASKED: &str = "/proc/kcore";
const READ_ONLY: &str = "/proc/sys";

/// Warms up a guest for these starts, with the image of [`coracle_image::warmup_rootfs`] in [`warm_up_slot`] for that of a
/// workload and in [`CONTAINER_SLOT`] for that of a sandbox, and its own disk in slot `own`.
///
/// # Errors
/// [`GuestError`], also when the warm-up could not be undone: the clone is then unusable.
pub(super) async fn run(
    mut session: NewSession,
    own: usize,
    now: UnixMillis,
    starts: WarmUps,
) -> Result<GuestSession, GuestError> {
    if starts.workload {
        let request = pb::StartRequest { configure: Some(machine(own, now)), process: Some(process()) };
        let limits = (ANSWER_LIMIT, ANSWER_LIMIT, PROGRAM_LIMIT + ANSWER_LIMIT);
        session = session.warm_up(&request, limits).await.map_err(|failure| failure.source)?;
    }
    if !starts.sandbox {
        return Ok(GuestSession::New(session));
    }
    let guest = session.http2().await.map_err(|e| GuestError::unavailable(e.to_string()))?;
    sandbox(&guest, own, now).await?;
    Ok(GuestSession::Http2(guest))
}

/// Makes the guest a sandbox with a container, and undoes both.
async fn sandbox(guest: &GuestClient, own: usize, now: UnixMillis) -> Result<(), GuestError> {
    guest.configure_sandbox(for_containers(machine(own, now), own), ANSWER_LIMIT).await?;
    if let Err(error) = container(guest).await {
        // A kernel that does not support containers is warmed up without them.
        tracing::warn!(%error, "container of a warm-up failed: containers start a little later");
    }
    guest.remove_container(NAME).await?;
    guest.reset(ANSWER_LIMIT).await
}

/// Creates a container, and waits until it has ended.
async fn container(guest: &GuestClient) -> Result<(), GuestError> {
    let kept = watch::Sender::new(BTreeMap::new());
    let mut frames = guest.session(BTreeMap::new(), kept.subscribe()).await?;
    guest.create_container(container_request()).await?;
    guest.start_container(NAME).await?;
    let end = async {
        while let Some(frame) = frames.message().await? {
            if matches!(frame.message, Some(Message::Exited(_))) {
                return Ok(());
            }
        }
        Err(GuestError::unavailable("the session ended before the container"))
    };
    timeout(PROGRAM_LIMIT, end).await.map_err(|_| GuestError::timed_out(PROGRAM_LIMIT))?
}

fn machine(own: usize, now: UnixMillis) -> pb::ConfigureRequest {
    let network = pb::Network {
        mac: MAC.to_owned(),
        address: ADDRESS.to_owned(),
        gateway: GATEWAY.to_owned(),
        nameservers: vec![GATEWAY.to_owned()],
        ..pb::Network::default()
    };
    let root = pb::RootMount {
        image_device: device(warm_up_slot()),
        image_fs: "erofs".to_owned(),
        overlay_device: device(own),
        root_first: true,
    };
    let entropy: [u8; 64] = rand::random();
    pb::ConfigureRequest {
        hostname: NAME.to_owned(),
        entropy: entropy.to_vec(),
        clock_unix_ns: now.0.saturating_mul(1_000_000),
        machine_id: "0".repeat(32),
        network: Some(network),
        root: Some(root),
        ..pb::ConfigureRequest::default()
    }
}

fn container_request() -> pb::CreateContainerRequest {
    let security = pb::Security {
        masked_paths: vec![MASKED.to_owned()],
        read_only_paths: vec![READ_ONLY.to_owned()],
        ..pb::Security::default()
    };
    pb::CreateContainerRequest {
        id: NAME.to_owned(),
        image_device: device(CONTAINER_SLOT),
        image_fs: "erofs".to_owned(),
        process: Some(process()),
        security: Some(security),
        ..pb::CreateContainerRequest::default()
    }
}

fn process() -> pb::Process {
    pb::Process {
        argv: PROGRAM.map(str::to_owned).to_vec(),
        env: vec!["PATH=/bin".to_owned()],
        ..pb::Process::default()
    }
}
