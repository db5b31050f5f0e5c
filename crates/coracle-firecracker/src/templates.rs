//! Templates on Firecracker: its memory file and its state file are memory files of the daemon.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use coracle_hypervisor::launch::own_file;
use coracle_hypervisor::{
    Cloned, Driver, DriverError, MemoryFile, ProcessId, Template, Templates, VmmConfig, cpu_model,
};

use crate::FirecrackerDriver;
use crate::calls::load_calls;
use crate::driver::unavailable;

#[async_trait]
impl Templates for FirecrackerDriver {
    async fn fingerprint(&self, vmm_config: &VmmConfig) -> String {
        format!("{}\n{}\n{}", self.probe().await.version, cpu_model(), crate::snapshots::devices(vmm_config))
    }

    /// Boots a VM with RAM of its own; `ram`, which the process inherits, is filled when the template is saved.
    async fn boot_template(
        &self,
        vmm_config: &VmmConfig,
        ram: &MemoryFile,
    ) -> Result<ProcessId, DriverError> {
        self.boot(vmm_config, false, &[ram.number()]).await
    }

    async fn save_template(
        &self,
        vmm_config: &VmmConfig,
        process: ProcessId,
        ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<Duration, DriverError> {
        let began = Instant::now();
        let saved = match self.pause(vmm_config).await {
            Ok(()) => self.save_template_to(vmm_config, ram, state).await,
            Err(error) => Err(error),
        };
        let took = began.elapsed();
        self.kill(process).await?;
        saved.map(|()| took)
    }

    async fn start_clone(&self, vmm_config: &VmmConfig, template: &Template) -> Result<Cloned, DriverError> {
        let (state, memory) = (template.state.number(), template.ram.number());
        let names = [state, memory].map(|number| own_file(number).display().to_string());
        let calls = load_calls(vmm_config, &names[0], &names[1], true).map_err(unavailable)?;
        let process = self.spawn(vmm_config, true, &[state, memory]).await?;
        self.call_or_kill(vmm_config, process, &calls).await?;
        if let Err(error) = self.resume(vmm_config).await {
            self.kill(process).await?;
            return Err(error);
        }
        Ok(Cloned { process, channel: None })
    }
}
