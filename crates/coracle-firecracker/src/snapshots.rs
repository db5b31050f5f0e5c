//! Whole machines on Firecracker: its two files as one stream (docs/snapshotting).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use coracle_hypervisor::launch::own_file;
use coracle_hypervisor::{
    Cloned, Compatibility, Driver, DriverError, MemoryFile, Saved, Snapshots, Template, VmmConfig, bundle,
    cpu_model,
};
use serde_json::json;
use tokio::task::spawn_blocking;

use crate::FirecrackerDriver;
use crate::calls::{Call, Places, boot_calls, load_calls};
use crate::driver::refused;

/// What the two files are called, in the directory of the process and in the stream.
const STATE: &str = "saved.state";
const MEMORY: &str = "saved.memory";
/// Far more than the state of any machine; what is longer is none.
const STATE_BYTES_MAX: u64 = 64 << 20;

impl FirecrackerDriver {
    /// Writes a paused machine to two files, as Firecracker names them.
    pub(crate) async fn save_to(
        &self,
        vmm_config: &VmmConfig,
        state: &Path,
        memory: &Path,
    ) -> Result<(), DriverError> {
        let body = json!({"snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory});
        let call = Call { method: hyper::Method::PUT, path: "/snapshot/create".to_owned(), body };
        self.call(vmm_config, &[call]).await
    }
}

#[async_trait]
impl Snapshots for FirecrackerDriver {
    async fn compatibility(&self, vmm_config: &VmmConfig) -> Compatibility {
        Compatibility {
            driver: self.name().to_owned(),
            vmm: self.probe().await.version,
            accelerator: vmm_config.accelerator.as_str().to_owned(),
            cpu: cpu_model(),
            devices: devices(vmm_config),
        }
    }

    /// Firecracker writes its files into the directory of the process, from where they are moved into the stream.
    async fn save(&self, vmm_config: &VmmConfig, file: &File) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("save VM {}", vmm_config.id), source };
        let files = Own([STATE, MEMORY].map(|name| self.folder(vmm_config).join(name)));
        self.save_to(vmm_config, Path::new(STATE), Path::new(MEMORY)).await?;
        let out = file.try_clone().map_err(io)?;
        let packed = spawn_blocking(move || {
            let [state, memory] = &files.0;
            let (state, memory) = (File::open(state)?, File::open(memory)?);
            bundle::pack(&out, &[(STATE, &state), (MEMORY, &memory)])
        });
        packed.await.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io)
    }

    /// The parts become memory files of ours, which processes map privately for as long as they live. The jailer closes
    /// what it inherits.
    async fn materialize(
        &self,
        vmm_config: &VmmConfig,
        file: &File,
    ) -> Result<Option<Template>, DriverError> {
        if self.jailed() {
            return Ok(None);
        }
        self.unpack(vmm_config, file).await.map(Some)
    }

    async fn restore(&self, vmm_config: &VmmConfig, saved: Saved<'_>) -> Result<Cloned, DriverError> {
        match saved {
            Saved::MemoryImages(template) => self.load(vmm_config, template).await,
            Saved::File(file) if self.jailed() => {
                self.load_in_jail(vmm_config, self.unpack(vmm_config, file).await?).await
            }
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
        let calls = load_calls(vmm_config, &names[0], &names[1], false).map_err(refused)?;
        let process = self.spawn(vmm_config, true, &numbers).await?;
        self.call_or_kill(vmm_config, process, &calls).await?;
        Ok(Cloned { process, channel: None })
    }

    /// As [`Self::load`], from files of the jail.
    async fn load_in_jail(&self, vmm_config: &VmmConfig, saved: Template) -> Result<Cloned, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load VM {}", vmm_config.id), source };
        let calls = load_calls(vmm_config, STATE, MEMORY, false).map_err(refused)?;
        let process = self.spawn(vmm_config, true, &[]).await?;
        let folder = self.folder(vmm_config);
        let stored = spawn_blocking(move || {
            saved.state.store(&folder.join(STATE), |_, _| ())?;
            saved.ram.store(&folder.join(MEMORY), |_, _| ())
        });
        let stored = stored.await.unwrap_or_else(|e| Err(io::Error::other(e)));
        if let Err(error) = stored {
            self.kill(process).await?;
            return Err(io(error));
        }
        self.call_or_kill(vmm_config, process, &calls).await?;
        Ok(Cloned { process, channel: None })
    }
}

/// Files that are gone when this is.
struct Own([PathBuf; 2]);

impl Drop for Own {
    fn drop(&mut self) {
        for file in &self.0 {
            let _absent = std::fs::remove_file(file);
        }
    }
}

/// A machine of this shape without what is a VM's own.
pub(crate) fn devices(vmm_config: &VmmConfig) -> String {
    let mut shape = vmm_config.clone();
    let places = Places { kernel: "kernel".to_owned(), initrd: "initrd".to_owned() };
    if let Some(nic) = &mut shape.nic {
        nic.backend = coracle_hypervisor::NicBackend::Tap { name: "tap".to_owned() };
    }
    let mac = shape.nic.as_ref().map(|nic| nic.mac.to_string()).unwrap_or_default();
    let calls = boot_calls(&shape, &places).unwrap_or_default();
    let lines: Vec<_> = calls.iter().map(|c| format!("{} {}", c.path, c.body)).collect();
    if mac.is_empty() { lines.join("\n") } else { lines.join("\n").replace(&mac, "-") }
}
