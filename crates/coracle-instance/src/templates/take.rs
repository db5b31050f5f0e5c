//! Taking templates: one at a time, in the background.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_guest_client::{GuestClient, NewSession};
use coracle_hypervisor::{Disk, Driver as _, MemoryFile, ProcessId, SealedFile, Template, VmmConfig};
use coracle_proto::guest as pb;
use coracle_types::MacAddr;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::{TemplateInfo, TemplateRequest, Templates, manifest};
use crate::instances::{BOOTS, InstanceOwner};
use crate::node::Node;
use crate::vmm_config::{IMAGE_SLOT, device, warm_up_slot};
use crate::{HostError, TemplateKey, disks, files};
use coracle_record::millis;

/// Prefix of the directory of a template that is being taken, followed by the key.
const PART: &str = ".taking-";

/// Returns whether the directory is that of an incomplete template.
pub(crate) fn is_part(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PART))
}

/// Removes the directories of templates that a crash left incomplete. Blocking.
pub fn sweep(templates: &Templates) {
    let parts = std::fs::read_dir(&templates.dir).into_iter().flatten().flatten().map(|e| e.path());
    for part in parts.filter(|path| is_part(path)) {
        if let Err(error) = files::remove_tree(&part) {
            tracing::warn!(dir = %part.display(), %error, "template that was cut off is not removed");
        }
    }
}

/// Serves requests until the daemon stops. A request that is cut off leaves an instance, which ends with the daemon.
///
/// `on_taken` is called with the key and the shape of each new template.
pub async fn run(
    templates: Arc<Templates>,
    mut requests: mpsc::Receiver<TemplateRequest>,
    on_taken: impl Fn(&TemplateKey, &VmmConfig),
) {
    let stop = &templates.node.stop;
    loop {
        let request = tokio::select! {
            () = stop.cancelled() => return,
            request = requests.recv() => request,
        };
        let Some(request) = request else { return };
        let found = templates.list().into_iter().find(|info| info.key == request.key);
        let outcome = match found {
            Some(info) => Ok(info),
            None => tokio::select! {
                () = stop.cancelled() => return,
                outcome = take(&templates, &request) => outcome.map_err(|error| error.chain()),
            },
        };
        match &outcome {
            Ok(info) => {
                tracing::info!(template = info.key.as_str(), took_ms = info.took_ms, "template ready")
            }
            Err(error) => tracing::warn!(template = request.key.as_str(), error, "template not taken"),
        }
        if outcome.is_ok() {
            on_taken(&request.key, &request.vmm_config);
        }
        if let Some(reply) = request.reply {
            let _caller_gone = reply.send(outcome);
        }
    }
}

async fn take(templates: &Templates, request: &TemplateRequest) -> Result<TemplateInfo, HostError> {
    let node = &templates.node;
    let place = templates.dir.join(request.key.as_str());
    let part = templates.dir.join(format!("{PART}{}", request.key));
    let io = |operation: &str| {
        let operation = format!("{operation} of template {}", request.key);
        move |source| HostError::State { operation, source }
    };
    // Taking a template does not wait for a boot permit: behind a burst of VMs it would get one only after the last VM has
    // booted. VMs that still wait start as clones once the template exists.
    let mut boots = 0;
    let (vmm_config, began, (template, save)) = loop {
        boots += 1;
        let owner = InstanceOwner::Template(request.key.clone());
        let vmm_config = node.instances.create(owner, request.vmm_config.clone()).await?;
        let vmm_config = without_a_vm(node, vmm_config);
        let began = Instant::now();
        let saved = boot_and_save(templates, request, &vmm_config).await;
        let took = began.elapsed();
        node.instances.end(&vmm_config.id, None).await?;
        match saved {
            Ok(saved) => break (vmm_config, began, saved),
            Err(error @ HostError::Boot { .. }) if boots < BOOTS && took < node.config.boot_limit => {
                tracing::warn!(template = %request.key, error = error.chain(), "boot failed, booting again");
            }
            Err(error) => return Err(error),
        }
    };
    let info = TemplateInfo {
        key: request.key.clone(),
        vcpus: vmm_config.vcpus,
        memory: vmm_config.memory,
        taken_at: node.clock.now(),
        took_ms: millis(began.elapsed()),
        save_ms: millis(save),
        ram_bytes: template.ram.resident().map_err(io("measure the memory"))?,
        disk_mib: template.disk.as_ref().map_or(0, |_| request.disk_mib),
    };
    let template = Arc::new(template);
    templates.insert(info.clone(), template.clone());
    // The copy on disk is for the next daemon; this daemon uses the one in memory.
    let stored = {
        let (part, info) = (part.clone(), info.clone());
        files::blocking(move || manifest::store(&part, &place, &info, &template)).await
    };
    if let Err(error) = stored {
        tracing::warn!(template = request.key.as_str(), %error, "template is kept in memory only");
        let _leave_nothing = files::remove_tree(&part);
    }
    Ok(info)
}

/// Returns the instance's config without what belongs to a VM, and with a disk for the guest to prepare.
fn without_a_vm(node: &Node, mut vmm_config: VmmConfig) -> VmmConfig {
    let premounts = node.driver.templates(&vmm_config).is_some_and(|templates| templates.premounts_disk());
    let disk = Disk::raw(vmm_config.slots.premounted(), vmm_config.state_dir.join("disk"), false);
    vmm_config.disks = premounts.then_some(disk).into_iter().collect();
    if let Some(nic) = &mut vmm_config.nic {
        nic.mac = MacAddr::of(&vmm_config.id);
    }
    vmm_config
}

async fn boot_and_save(
    templates: &Templates,
    request: &TemplateRequest,
    vmm_config: &VmmConfig,
) -> Result<(Template, Duration), HostError> {
    let node = &templates.node;
    if let Some(disk) = vmm_config.disk_in(vmm_config.slots.premounted()) {
        let (cache, disk) = (node.config.state_dir.join("cache"), disk.path.clone());
        let size = request.disk_mib;
        let made = files::blocking(move || disks::ensure_overlay(&cache, &disk, size)).await;
        let operation = || format!("make the disk of template {}", request.key);
        made.map_err(|source| HostError::State { operation: operation(), source })?;
    }
    let image = match templates.warmup_image().await {
        Ok(image) => Some(image.as_path()),
        Err(error) => {
            tracing::warn!(%error, "make image of the template failed: VMs start a little later");
            None
        }
    };
    save(node, vmm_config, image).await
}

/// Boots until the agent waits for its configuration, and saves there; returns the time that the save took. The guest mounts
/// its disk, and the root of `image`, in whose place a clone finds the image of its VM.
async fn save(
    node: &Node,
    vmm_config: &VmmConfig,
    image: Option<&Path>,
) -> Result<(Template, Duration), HostError> {
    let name = || vmm_config.id.to_string();
    let driver = |source| HostError::Driver { name: name(), source };
    let io = |source| HostError::State { operation: "make memory for a template".to_owned(), source };
    let templates = node.driver.templates(vmm_config).ok_or(HostError::Stopping)?;
    let ram = MemoryFile::new("template-ram", u64::from(vmm_config.memory.get()) << 20).map_err(io)?;
    let state = MemoryFile::new("template-state", 0).map_err(io)?;
    let process = templates.boot_template(vmm_config, &ram).await.map_err(driver)?;
    // The guest sees the end of the session before it is saved.
    drop(prepared_guest(node, vmm_config, process, image).await?);
    let took = templates.save_template(vmm_config, process, &ram, &state).await.map_err(driver)?;
    let disk = vmm_config.disk_in(vmm_config.slots.premounted()).map(|disk| disk.path.clone());
    let sealed = files::blocking(move || {
        let disk = disk.map(|path| SealedFile::load("template-disk", &path, |_, _| {})).transpose()?;
        Ok(Template { ram: ram.seal()?, state: state.seal()?, disk })
    })
    .await;
    let failed = |source| HostError::State { operation: "seal a template".to_owned(), source };
    Ok((sealed.map_err(failed)?, took))
}

/// Waits for the guest's agent, and has it mount its disk and the root of `image`.
async fn prepared_guest(
    node: &Node,
    vmm_config: &VmmConfig,
    process: ProcessId,
    image: Option<&Path>,
) -> Result<GuestClient, HostError> {
    let boot_limit = node.config.boot_limit;
    let session = open_session(node, vmm_config, process, None, boot_limit).await?;
    let failed = |why: String| HostError::Boot { name: vmm_config.id.to_string(), why };
    let guest = session.http2().await.map_err(|e| failed(e.to_string()))?;
    let Some(disk) = vmm_config.disk_in(vmm_config.slots.premounted()) else { return Ok(guest) };
    // Not before the guest is up: its driver would see the size of this image, and clones have others.
    let driver = |source| HostError::Driver { name: vmm_config.id.to_string(), source };
    let is_pooled = node.driver.templates(vmm_config).is_some_and(|templates| templates.can_assign());
    let mut request = pb::PrepareRequest { overlay_device: device(disk.slot), ..Default::default() };
    if let Some(image) = image {
        node.driver.attach_disk(vmm_config, &Disk::image(IMAGE_SLOT, image)).await.map_err(driver)?;
        request.image_device = device(IMAGE_SLOT);
    }
    if let Some(image) = image.filter(|_| is_pooled) {
        node.driver.attach_disk(vmm_config, &Disk::image(warm_up_slot(), image)).await.map_err(driver)?;
        request.warm_up_image_device = device(warm_up_slot());
    }
    guest.prepare(request, boot_limit).await.map_err(|e| failed(e.to_string()))?;
    Ok(guest)
}

/// Waits for the hello of an unassigned guest's agent, within `limit`.
pub async fn open_session(
    node: &Node,
    vmm_config: &VmmConfig,
    process: ProcessId,
    channel: Option<UnixStream>,
    limit: Duration,
) -> Result<NewSession, HostError> {
    let boot = |why: &str| HostError::Boot { name: vmm_config.id.to_string(), why: why.to_owned() };
    let open = NewSession::open(&node.driver, vmm_config, limit, channel);
    tokio::select! {
        opened = timeout(limit, open) => match opened {
            Ok(opened) => opened.map_err(|e| boot(&e.to_string())),
            Err(_) => Err(boot("the agent did not answer in time")),
        },
        _ = node.driver.exited(process) => Err(boot("the VMM exited")),
    }
}
