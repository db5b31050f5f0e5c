//! Templates on QEMU: RAM in a memory file, device state by migration, disks by swapping the nodes of slots.
//!
//! With `x-ignore-shared` a migration leaves out RAM that is mapped shared, so the state of a machine is some
//! 140 KB; a clone maps the same file privately and loads the state in milliseconds (microvm.md §7.3).

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use async_trait::async_trait;
use coracle_hypervisor::launch;
use coracle_hypervisor::{
    Cloned, Driver, DriverError, MemoryFile, ProcessId, Template, Templates, VmRecipe, cpu_model,
};
use serde_json::json;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use crate::argv::{Birth, argv};
use crate::monitor::Monitor;
use crate::{QemuDriver, tsc};

/// The guest sees that the host has left the channel only when it stays away for a moment.
const CHANNEL_GAP: Duration = Duration::from_millis(50);

#[async_trait]
impl Templates for QemuDriver {
    async fn fingerprint(&self, recipe: &VmRecipe) -> String {
        format!("{}\n{}\n{}", self.probe().await.version, cpu_model(), devices(recipe))
    }

    fn prepares_disk(&self) -> bool {
        true
    }

    async fn boot_template(&self, recipe: &VmRecipe, ram: &MemoryFile) -> Result<ProcessId, DriverError> {
        let birth = Birth::Template { ram: ram.number() };
        let spawned = self.spawn(recipe, recipe.accelerator, birth, &[ram.number()]).await;
        spawned.map(|(process, _)| process)
    }

    async fn save_template(
        &self,
        recipe: &VmRecipe,
        process: ProcessId,
        _ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<Duration, DriverError> {
        sleep(CHANNEL_GAP).await;
        let began = Instant::now();
        let saved = save(recipe, state).await;
        let took = began.elapsed();
        self.kill(process).await?;
        saved.map(|()| took)
    }

    async fn start_clone(&self, recipe: &VmRecipe, template: &Template) -> Result<Cloned, DriverError> {
        // Reopened: each clone reads the state from its start.
        let state = template.state.reopen().map_err(|source| DriverError::Io {
            operation: format!("open the template of VM {}", recipe.id),
            source,
        })?;
        let number = state.as_raw_fd();
        let birth = Birth::Clone { ram: template.ram.number() };
        let inherited = [template.ram.number(), number];
        let (process, monitor) = self.spawn(recipe, recipe.accelerator, birth, &inherited).await?;
        match self.load(recipe, monitor, number).await {
            Ok(channel) => Ok(Cloned { process, channel: Some(channel) }),
            Err(error) => {
                self.kill(process).await?;
                Err(error)
            }
        }
    }

    fn hands_over(&self) -> bool {
        true
    }

    async fn claim(&self, from: &VmRecipe, to: &VmRecipe) -> Result<(), DriverError> {
        let operation = || format!("claim {} for VM {}", from.id, to.id);
        launch::started_in(to, from).map_err(|source| DriverError::Io { operation: operation(), source })
    }

    async fn hand_over(&self, from: &VmRecipe, to: &VmRecipe) -> Result<(), DriverError> {
        let operation = || format!("give the files of {} to VM {}", from.id, to.id);
        Self::move_files(from, to).map_err(|source| DriverError::Io { operation: operation(), source })?;
        fill(&mut Monitor::open(to).await?, to).await
    }
}

impl QemuDriver {
    /// Everything between a waiting VMM and a running guest. The agent's channel is connected first: the VMM tells the
    /// guest of it when the state is loaded, and the agent says hello (guest-channel.md §3, rule 8).
    async fn load(
        &self,
        recipe: &VmRecipe,
        mut monitor: Monitor<'_>,
        state: RawFd,
    ) -> Result<UnixStream, DriverError> {
        let channel = self.connect(recipe, "guest").await?;
        monitor.ignore_shared_ram(true).await?;
        monitor.load_from(state).await?;
        fill(&mut monitor, recipe).await?;
        monitor.run("cont", json!({})).await?;
        Ok(channel)
    }
}

/// Puts the disks of a clone into its slots, but the one that was there before.
async fn fill(monitor: &mut Monitor<'_>, recipe: &VmRecipe) -> Result<(), DriverError> {
    for disk in recipe.disks.iter().filter(|disk| disk.slot != recipe.slots.prepared()) {
        monitor.insert(recipe, disk).await?;
    }
    Ok(())
}

async fn save(recipe: &VmRecipe, state: &MemoryFile) -> Result<(), DriverError> {
    let mut monitor = Monitor::open(recipe).await?;
    monitor.run("stop", json!({})).await?;
    monitor.ignore_shared_ram(true).await?;
    monitor.save_to(state.as_fd()).await
}

/// The command line of a machine of this shape without what is a VM's own: names, folders, disks, files to boot.
pub(crate) fn devices(recipe: &VmRecipe) -> String {
    let mut shape = recipe.clone();
    (shape.kernel, shape.initrd) = ("kernel".into(), "initrd".into());
    shape.disks.clear();
    let mac = coracle_types::MacAddr::of(&shape.id);
    if let Some(nic) = &mut shape.nic {
        nic.mac = mac;
    }
    let arguments = argv(&shape, shape.accelerator, tsc::khz(), Birth::Template { ram: 0 }).join("\n");
    let own = [recipe.id.to_string(), recipe.run_dir.display().to_string(), mac.to_string()];
    own.iter().fold(arguments, |text, own| text.replace(own, "-"))
}
