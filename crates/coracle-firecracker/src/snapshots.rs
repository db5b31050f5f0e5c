//! Snapshots on Firecracker: its two files as one stream (docs/snapshotting).

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use async_trait::async_trait;
use coracle_hypervisor::launch::own_file;
use coracle_hypervisor::{
    Cloned, Compatibility, Driver, DriverError, JAIL_SAVED_DIR, MemoryFile, Saved, SavedDir, Snapshots,
    Template, VmmConfig, VmmFiles, bundle, cpu_model, share_with_jail,
};
use tokio::task::spawn_blocking;

use crate::FirecrackerDriver;
use crate::calls::{BootPaths, boot_calls, load_calls, save_call};
use crate::driver::unavailable;

/// Names of the two files, in the working directory of the process and in the stream.
const STATE: &str = "saved.state";
const MEMORY: &str = "saved.memory";
/// Maximum size of a state, far above that of any VM; a larger one is refused.
const STATE_BYTES_MAX: u64 = 64 << 20;

impl FirecrackerDriver {
    /// Saves a paused VM to memory files; its process has inherited that of the RAM.
    pub(crate) async fn save_template_to(
        &self,
        vmm_config: &VmmConfig,
        ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("save template {}", vmm_config.id), source };
        let ram = own_file(ram.number()).display().to_string();
        self.call(vmm_config, &[save_call(STATE, &ram)]).await?;
        let saved = VmmFiles::of(&vmm_config.run_dir).and_then(|files| files.open(STATE)).map_err(io)?;
        let mut to = state.file().try_clone().map_err(io)?;
        let copied = spawn_blocking(move || io::copy(&mut saved.take(STATE_BYTES_MAX), &mut to).map(drop));
        copied.await.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io)
    }
}

#[async_trait]
impl Snapshots for FirecrackerDriver {
    async fn compatibility(&self, vmm_config: &VmmConfig) -> Compatibility {
        Compatibility {
            driver: self.name().to_owned(),
            vmm: self.probe().await.version,
            accelerator: vmm_config.accelerator.as_str().to_owned(),
            cpu: cpu_model().to_owned(),
            devices: devices(vmm_config),
            tsc_khz: 0,
        }
    }

    /// Saves a VM. Firecracker writes its files into a directory of the host, from where they are moved into the stream.
    async fn save(&self, vmm_config: &VmmConfig, file: &File) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("save VM {}", vmm_config.id), source };
        let saved = SavedDir::new(vmm_config.state_dir.join("saving")).map_err(io)?;
        let is_jailed = share_with_jail(vmm_config, Some(saved.path())).await.map_err(io)?;
        let dir = if is_jailed { Path::new(JAIL_SAVED_DIR) } else { saved.path() };
        let [state, memory] = [STATE, MEMORY].map(|name| dir.join(name).display().to_string());
        let made = self.call(vmm_config, &[save_call(&state, &memory)]).await;
        if is_jailed {
            share_with_jail(vmm_config, None).await.map_err(io)?;
        }
        made?;
        let out = file.try_clone().map_err(io)?;
        let packed = spawn_blocking(move || {
            let files = VmmFiles::in_dir(saved.path())?;
            let (state, memory) = (files.open(STATE)?, files.open(MEMORY)?);
            bundle::pack(&out, &[(STATE, &state), (MEMORY, &memory)])
        });
        packed.await.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io)
    }

    /// Unpacks the parts into memory files of the daemon, which VMMs map privately for as long as they live.
    async fn materialize(
        &self,
        vmm_config: &VmmConfig,
        file: &File,
    ) -> Result<Option<Template>, DriverError> {
        self.unpack(vmm_config, file).await.map(Some)
    }

    async fn restore(&self, vmm_config: &VmmConfig, saved: Saved<'_>) -> Result<Cloned, DriverError> {
        match saved {
            Saved::MemoryImages(template) => self.load(vmm_config, template).await,
            Saved::File(file) => self.load(vmm_config, &self.unpack(vmm_config, file).await?).await,
        }
    }
}

impl FirecrackerDriver {
    async fn unpack(&self, vmm_config: &VmmConfig, file: &File) -> Result<Template, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load VM {}", vmm_config.id), source };
        let input = file.try_clone().map_err(io)?;
        let bytes = u64::from(vmm_config.memory.get()) << 20;
        let unpacked = spawn_blocking(move || {
            let (state, memory) = (MemoryFile::new(STATE, 0)?, MemoryFile::new(MEMORY, 0)?);
            let parts = [(STATE, STATE_BYTES_MAX, state.file()), (MEMORY, bytes, memory.file())];
            bundle::unpack(&input, &parts)?;
            Ok(Template { ram: memory.seal()?, state: state.seal()?, disk: None })
        });
        unpacked.await.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io)
    }

    async fn load(&self, vmm_config: &VmmConfig, saved: &Template) -> Result<Cloned, DriverError> {
        let numbers = [saved.state.number(), saved.ram.number()];
        let names = numbers.map(|number| own_file(number).display().to_string());
        let calls = load_calls(vmm_config, &names[0], &names[1], false).map_err(unavailable)?;
        let process = self.spawn(vmm_config, true, &numbers).await?;
        self.call_or_kill(vmm_config, process, &calls).await?;
        Ok(Cloned { process, channel: None })
    }
}

/// Describes a VM of this shape without the properties of a single VM.
pub(crate) fn devices(vmm_config: &VmmConfig) -> String {
    let mut shape = vmm_config.clone();
    let paths = BootPaths { kernel: "kernel".to_owned(), initrd: "initrd".to_owned() };
    if let Some(nic) = &mut shape.nic {
        nic.backend = coracle_hypervisor::NicBackend::Tap { name: "tap".to_owned() };
    }
    let mac = shape.nic.as_ref().map(|nic| nic.mac.to_string()).unwrap_or_default();
    let calls = boot_calls(&shape, &paths).unwrap_or_default();
    let lines: Vec<_> = calls.iter().map(|c| format!("{} {}", c.path, c.body)).collect();
    if mac.is_empty() { lines.join("\n") } else { lines.join("\n").replace(&mac, "-") }
}
