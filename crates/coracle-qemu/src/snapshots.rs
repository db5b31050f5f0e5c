//! Whole machines on QEMU: one migration stream with the RAM in it (QEMU docs/devel/migration, "Migration stream").

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

use async_trait::async_trait;
use coracle_hypervisor::{Cloned, Compatibility, Driver, DriverError, Snapshots, VmRecipe, cpu_model};
use serde_json::json;

use crate::QemuDriver;
use crate::argv::Birth;
use crate::monitor::Monitor;
use crate::templates::devices;

#[async_trait]
impl Snapshots for QemuDriver {
    async fn compatibility(&self, recipe: &VmRecipe) -> Compatibility {
        Compatibility {
            driver: self.name().to_owned(),
            vmm: self.probe().await.version,
            accelerator: recipe.accelerator.as_str().to_owned(),
            cpu: cpu_model(),
            devices: devices(recipe),
        }
    }

    async fn save(&self, recipe: &VmRecipe, file: &File) -> Result<(), DriverError> {
        let mut monitor = Monitor::open(recipe).await?;
        monitor.ignore_shared_ram(false).await?;
        monitor.save_to(file.as_fd()).await
    }

    async fn restore(&self, recipe: &VmRecipe, file: &File) -> Result<Cloned, DriverError> {
        let number = file.as_raw_fd();
        let process = self.spawn(recipe, recipe.accelerator, Birth::Restore, &[number]).await?;
        let loaded = async {
            let mut monitor = Monitor::open(recipe).await?;
            // Connected first: the guest learns of it with its first step (guest-channel.md, rule 8).
            let channel = self.connect(recipe, "guest").await?;
            monitor.run("migrate-incoming", json!({"uri": format!("fd:{number}")})).await?;
            monitor.migrated().await?;
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
