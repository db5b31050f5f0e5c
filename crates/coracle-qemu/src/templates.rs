//! Templates on QEMU: RAM in a memory file, device state by migration, disks by replacing the block nodes of slots.
//!
//! With `x-ignore-shared` a migration leaves out RAM that is mapped shared, so the state of a VM takes some 140 KB. A clone
//! maps the same file privately and loads the state in milliseconds (QEMU, docs/devel/migration).

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use async_trait::async_trait;
use coracle_hypervisor::{
    Cloned, Driver, DriverError, MemoryFile, ProcessId, Template, Templates, VmmConfig, cpu_model,
};
use serde_json::json;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use crate::QemuDriver;
use crate::argv::{Descriptors, StartMode, argv};
use crate::monitor::Monitor;

/// Gap between two sessions: the guest notices that the host has closed the channel only if it stays closed for a moment.
const CHANNEL_GAP: Duration = Duration::from_millis(50);

#[async_trait]
impl Templates for QemuDriver {
    async fn fingerprint(&self, vmm_config: &VmmConfig) -> String {
        format!("{}\n{}\n{}", self.probe().await.version, cpu_model(), devices(vmm_config))
    }

    fn premounts_disk(&self) -> bool {
        true
    }

    async fn boot_template(
        &self,
        vmm_config: &VmmConfig,
        ram: &MemoryFile,
    ) -> Result<ProcessId, DriverError> {
        let mode = StartMode::Template { ram: ram.number() };
        let spawned = self.spawn(vmm_config, vmm_config.accelerator, mode, &[ram.number()]).await;
        spawned.map(|(process, _)| process)
    }

    async fn save_template(
        &self,
        vmm_config: &VmmConfig,
        process: ProcessId,
        _ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<Duration, DriverError> {
        sleep(CHANNEL_GAP).await;
        let began = Instant::now();
        let saved = save(vmm_config, state).await;
        let took = began.elapsed();
        self.kill(process).await?;
        saved.map(|()| took)
    }

    async fn start_clone(&self, vmm_config: &VmmConfig, template: &Template) -> Result<Cloned, DriverError> {
        // Reopened, because each clone reads the state from its start.
        let state = template.state.reopen().map_err(|source| DriverError::Io {
            operation: format!("open the template of VMM {}", vmm_config.id),
            source,
        })?;
        let number = state.as_raw_fd();
        let mode = StartMode::Clone { ram: template.ram.number() };
        let inherited = [template.ram.number(), number];
        let (process, monitor) = self.spawn(vmm_config, vmm_config.accelerator, mode, &inherited).await?;
        match self.load(vmm_config, monitor, number).await {
            Ok(channel) => Ok(Cloned { process, channel: Some(channel) }),
            Err(error) => {
                self.kill(process).await?;
                Err(error)
            }
        }
    }

    fn can_assign(&self) -> bool {
        true
    }

    /// Uses one monitor, because opening another takes four iterations of the VMM's main loop.
    async fn fill(&self, clone: &VmmConfig, paused: bool) -> Result<(), DriverError> {
        let mut monitor = Monitor::open(clone).await?;
        fill(&mut monitor, clone).await?;
        if paused {
            monitor.run("cont", json!({})).await?;
        }
        Ok(())
    }
}

impl QemuDriver {
    /// Loads the state into a waiting VMM, resumes the guest and attaches its disks. The guest channel is connected first: the
    /// VMM reports it to the guest when the state is loaded, and the agent says hello (docs/reference/guest-channel.md, rule
    /// 8). The guest resumes before it has its disks, because it uses none before it is configured.
    async fn load(
        &self,
        vmm_config: &VmmConfig,
        mut monitor: Monitor<'_>,
        state: RawFd,
    ) -> Result<UnixStream, DriverError> {
        let channel = self.connect(vmm_config, "guest").await?;
        monitor.ignore_shared_ram(true).await?;
        monitor.load_from(state).await?;
        monitor.run("cont", json!({})).await?;
        fill(&mut monitor, vmm_config).await?;
        Ok(channel)
    }
}

/// Attaches the disks of a clone to its slots, except the premounted one.
async fn fill(monitor: &mut Monitor<'_>, vmm_config: &VmmConfig) -> Result<(), DriverError> {
    for disk in vmm_config.disks.iter().filter(|disk| disk.slot != vmm_config.slots.premounted()) {
        monitor.attach_slot(vmm_config, disk).await?;
    }
    Ok(())
}

async fn save(vmm_config: &VmmConfig, state: &MemoryFile) -> Result<(), DriverError> {
    let mut monitor = Monitor::open(vmm_config).await?;
    monitor.run("stop", json!({})).await?;
    monitor.ignore_shared_ram(true).await?;
    monitor.save_to(state.as_fd()).await
}

/// Returns the command line of a VM of this shape without the properties of a single VM (names, directories, disks, boot
/// files), and without the rate of the time-stamp counter, which each daemon measures anew.
pub(crate) fn devices(vmm_config: &VmmConfig) -> String {
    let mut shape = vmm_config.clone();
    (shape.kernel, shape.initrd) = ("kernel".into(), "initrd".into());
    shape.disks.clear();
    let mac = coracle_types::MacAddr::of(&shape.id);
    if let Some(nic) = &mut shape.nic {
        nic.mac = mac;
    }
    let arguments =
        argv(&shape, shape.accelerator, 0, StartMode::Template { ram: 0 }, &Descriptors::default())
            .join("\n");
    let own = [vmm_config.id.to_string(), vmm_config.run_dir.display().to_string(), mac.to_string()];
    own.iter().fold(arguments, |text, own| text.replace(own, "-"))
}
