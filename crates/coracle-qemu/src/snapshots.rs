//! Snapshots on QEMU: one migration stream with the RAM in it (QEMU docs/devel/migration, "Migration stream").

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use async_trait::async_trait;
use coracle_hypervisor::{
    Accelerator, Cloned, Compatibility, Driver, DriverError, MachineType, MemoryFile, Saved, Snapshots,
    Template, VmmConfig, cpu_model,
};
use tokio::task::spawn_blocking;

use crate::argv::StartMode;
use crate::monitor::Monitor;
use crate::templates::devices;
use crate::{QemuDriver, tsc};

#[async_trait]
impl Snapshots for QemuDriver {
    async fn compatibility(&self, vmm_config: &VmmConfig) -> Compatibility {
        Compatibility {
            driver: self.name().to_owned(),
            vmm: self.probe().await.version,
            accelerator: vmm_config.accelerator.as_str().to_owned(),
            cpu: cpu_model().to_owned(),
            devices: devices(vmm_config),
            tsc_khz: if vmm_config.accelerator == Accelerator::Tcg { tsc::khz() } else { 0 },
        }
    }

    async fn save(&self, vmm_config: &VmmConfig, file: &File) -> Result<(), DriverError> {
        let mut monitor = Monitor::open(vmm_config).await?;
        monitor.ignore_shared_ram(false).await?;
        monitor.save_to(file.as_fd()).await
    }

    /// Loads the stream into a memory file with a VMM that never runs, and then saves the rest of the state. Not supported for
    /// a PC, whose devices in the state depend on its disks.
    async fn materialize(
        &self,
        vmm_config: &VmmConfig,
        file: &File,
    ) -> Result<Option<Template>, DriverError> {
        if vmm_config.machine_type != MachineType::Microvm {
            return Ok(None);
        }
        let io = |source| DriverError::Io {
            operation: format!("materialize the memory of VMM {}", vmm_config.id),
            source,
        };
        let bytes = u64::from(vmm_config.memory.get()) << 20;
        let ram = MemoryFile::new("shared-ram", bytes).map_err(io)?;
        let state = MemoryFile::new("shared-state", 0).map_err(io)?;
        let inherited = [ram.number(), file.as_raw_fd()];
        let mode = StartMode::Materialize { ram: ram.number() };
        let (process, mut monitor) = self.spawn(vmm_config, vmm_config.accelerator, mode, &inherited).await?;
        let memory_images = async {
            monitor.load_from(file.as_raw_fd()).await?;
            monitor.ignore_shared_ram(true).await?;
            monitor.save_to(state.as_fd()).await
        };
        let memory_images = memory_images.await;
        self.kill(process).await?;
        memory_images?;
        let sealed =
            spawn_blocking(move || Ok(Template { ram: ram.seal()?, state: state.seal()?, disk: None }));
        sealed.await.unwrap_or_else(|e| Err(io::Error::other(e))).map(Some).map_err(io)
    }

    async fn restore(&self, vmm_config: &VmmConfig, saved: Saved<'_>) -> Result<Cloned, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load VM {}", vmm_config.id), source };
        let (mode, state, ram) = match saved {
            Saved::File(file) => (StartMode::Restore, file.try_clone().map_err(io)?, None),
            // Reopened, because each VMM reads the state from its start.
            Saved::MemoryImages(Template { ram, state, .. }) => {
                (StartMode::Fork { ram: ram.number() }, state.reopen().map_err(io)?, Some(ram.number()))
            }
        };
        let number = state.as_raw_fd();
        let inherited: Vec<_> = ram.into_iter().chain([number]).collect();
        let (process, mut monitor) = self.spawn(vmm_config, vmm_config.accelerator, mode, &inherited).await?;
        let loaded = async {
            // Connected first: the guest sees the connection when it resumes (docs/reference/guest-channel.md, rule 8).
            let channel = self.connect(vmm_config, "guest").await?;
            monitor.ignore_shared_ram(ram.is_some()).await?;
            monitor.load_from(number).await?;
            Ok(channel)
        };
        match loaded.await {
            Ok(channel) => Ok(Cloned { process, channel: Some(channel) }),
            Err(error) => {
                self.kill(process).await?;
                Err(error)
            }
        }
    }
}
