//! Snapshots on Cloud Hypervisor: the files of its snapshot directory as one stream (Cloud Hypervisor,
//! <https://github.com/cloud-hypervisor/cloud-hypervisor/blob/main/docs/snapshot_restore.md>).

use std::fs::{self, File};
use std::io;
use std::path::Path;

use async_trait::async_trait;
use coracle_hypervisor::{
    Cloned, Compatibility, Driver, DriverError, JAIL_SAVED_DIR, Saved, SavedDir, Snapshots, Template,
    VmmConfig, VmmFiles, bundle, cpu_model, share_with_jail,
};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use crate::CloudHypervisorDriver;
use crate::config::{TapBy, in_jail, restored_nics, rewritten, vm_config};
use crate::driver::{put_memory, taps, unavailable};

/// Files of a snapshot directory with their maximum lengths; the memory is last.
const PARTS: [(&str, u64); 2] = [("config.json", 4 << 20), ("state.json", 64 << 20)];
const MEMORY: &str = "memory-ranges";

#[async_trait]
impl Snapshots for CloudHypervisorDriver {
    async fn compatibility(&self, vmm_config: &VmmConfig) -> Compatibility {
        Compatibility {
            driver: self.name().to_owned(),
            vmm: self.probe().await.version,
            accelerator: vmm_config.accelerator.as_str().to_owned(),
            cpu: cpu_model().to_owned(),
            devices: shape(vmm_config),
            tsc_khz: 0,
        }
    }

    async fn save(&self, vmm_config: &VmmConfig, file: &File) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("save VM {}", vmm_config.id), source };
        let saved = SavedDir::new(vmm_config.state_dir.join("saving")).map_err(io)?;
        let is_jailed = share_with_jail(vmm_config, Some(saved.path())).await.map_err(io)?;
        let body =
            json!({"destination_url": url(if is_jailed { Path::new(JAIL_SAVED_DIR) } else { saved.path() })});
        let made = put_memory(vmm_config, "vm.snapshot", &body, vec![]).await;
        if is_jailed {
            share_with_jail(vmm_config, None).await.map_err(io)?;
        }
        made?;
        let out = file.try_clone().map_err(io)?;
        let packed = spawn_blocking(move || {
            let files = VmmFiles::in_dir(saved.path())?;
            let open = |name: &str| files.open(name);
            let [config, state] = PARTS.map(|(name, _)| open(name));
            let (config, state, memory) = (config?, state?, open(MEMORY)?);
            bundle::pack(&out, &[(PARTS[0].0, &config), (PARTS[1].0, &state), (MEMORY, &memory)])
        });
        packed.await.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io)
    }

    /// Not supported: each VMM reads the memory into its own.
    async fn materialize(&self, _: &VmmConfig, _: &File) -> Result<Option<Template>, DriverError> {
        Ok(None)
    }

    /// Restores a VM. The call reads the whole directory before it ends, so the directory is removed when this returns.
    async fn restore(&self, vmm_config: &VmmConfig, saved: Saved<'_>) -> Result<Cloned, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load VM {}", vmm_config.id), source };
        let Saved::File(file) = saved else { return Err(io(io::ErrorKind::Unsupported.into())) };
        let dir = SavedDir::new(vmm_config.state_dir.join("loading")).map_err(io)?;
        let (input, place) = (file.try_clone().map_err(io)?, dir.path().to_owned());
        // Somewhat more than the guest's memory, because it includes memory ranges of devices.
        let memory = (u64::from(vmm_config.memory.get()) << 20) + (64 << 20);
        let unpacked = spawn_blocking(move || unpack(&input, &place, memory));
        let saved = unpacked.await.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io)?;
        let is_jailed = vmm_config.uid.is_some();
        let config = match is_jailed {
            true => rewritten(&saved, &in_jail(vmm_config), TapBy::Descriptor),
            false => rewritten(&saved, vmm_config, TapBy::Name),
        };
        let config = config.map_err(unavailable)?;
        fs::write(dir.path().join(PARTS[0].0), config.to_string()).map_err(io)?;
        let process = self.spawn(vmm_config, Some(dir.path())).await?;
        let loaded = load(vmm_config, dir.path(), is_jailed).await;
        self.kill_on_error(process, loaded).await?;
        Ok(Cloned { process, channel: None })
    }
}

/// Makes a new process load the VM in this directory of the host.
async fn load(vmm_config: &VmmConfig, dir: &Path, is_jailed: bool) -> Result<(), DriverError> {
    let mut body = json!({"source_url": url(dir), "prefault": false});
    let mut descriptors = vec![];
    if is_jailed {
        body["source_url"] = json!(url(Path::new(JAIL_SAVED_DIR)));
        body["net_fds"] = restored_nics(vmm_config);
        descriptors = taps(vmm_config)?;
    }
    put_memory(vmm_config, "vm.restore", &body, descriptors).await
}

/// Fills the directory, and returns the saved configuration.
fn unpack(input: &File, folder: &Path, memory: u64) -> io::Result<Value> {
    let create = |name: &str| File::options().read(true).write(true).create_new(true).open(folder.join(name));
    let [config, state] = PARTS.map(|(name, _)| create(name));
    let (config, state, ranges) = (config?, state?, create(MEMORY)?);
    let [(one, long), (two, longer)] = PARTS;
    bundle::unpack(input, &[(one, long, &config), (two, longer, &state), (MEMORY, memory, &ranges)])?;
    serde_json::from_slice(&fs::read(folder.join(one))?).map_err(io::Error::from)
}

fn url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

/// Describes a VM of this shape without the properties of a single VM.
fn shape(vmm_config: &VmmConfig) -> String {
    let mut shape = vmm_config.clone();
    (shape.kernel, shape.initrd, shape.run_dir) = ("kernel".into(), "initrd".into(), "run".into());
    // Disks belong to a single VM, and the restored configuration names them.
    shape.disks.clear();
    if let Some(nic) = &mut shape.nic {
        nic.backend = coracle_hypervisor::NicBackend::Tap { name: "tap".to_owned() };
    }
    let text = vm_config(&shape, TapBy::Name).map(|config| config.to_string()).unwrap_or_default();
    match &vmm_config.nic {
        Some(nic) => text.replace(&nic.mac.to_string(), "-"),
        None => text,
    }
}
