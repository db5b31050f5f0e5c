//! Requests about the templates of the host.

use coracle_types::{MemoryMib, SizeClass, Vcpus};

use super::Host;
use crate::vmm_config::of_shape;
use crate::{HostError, TemplateInfo, TemplateKey};

impl Host {
    /// Lists the templates of this host, by key.
    #[must_use]
    pub fn templates(&self) -> Vec<TemplateInfo> {
        self.0.shared.templates.list()
    }

    /// Whether the warm pool has a clone of this template.
    #[must_use]
    pub fn has_pooled(&self, key: &TemplateKey) -> bool {
        self.0.shared.warm_pool.has(key)
    }

    /// Returns the template of this shape's size class, and takes it first if it does not exist. The template's guest has a
    /// fresh disk of `disk_mib` mounted, for VMs whose disk has that size; `None`: the node's default. Idempotent; cancel-safe:
    /// taking a template runs to completion.
    ///
    /// # Errors
    /// [`HostError::Kernel`]; [`HostError::Template`] if the driver has no templates, they are disabled, or the boot failed.
    pub async fn warm_template(
        &self,
        vcpus: Vcpus,
        memory: MemoryMib,
        kernel_path: &str,
        disk_mib: Option<u64>,
    ) -> Result<TemplateInfo, HostError> {
        let shared = &self.0.shared;
        let mut vmm_config = of_shape(&shared.node.config, shared.node.accelerator(""));
        let class = SizeClass::of(vcpus, memory);
        (vmm_config.vcpus, vmm_config.memory) = (class.vcpus, class.memory);
        if let Some(kernel) = self.kernel(kernel_path)? {
            vmm_config.kernel = kernel;
        }
        let failed = |why: String| HostError::Template { why };
        let key = shared.templates.key(&vmm_config).await;
        let key = key.ok_or_else(|| failed("there are none on this node: see coracle doctor".to_owned()))?;
        let disk_mib = disk_mib.unwrap_or(shared.node.config.disk_mib);
        shared.templates.warm(key, vmm_config, disk_mib).await.map_err(failed)
    }

    /// Deletes a template and its files. VMs that were started from it keep running.
    ///
    /// # Errors
    /// [`HostError::NoTemplate`] if no template has this key.
    pub fn delete_template(&self, key: &str) -> Result<(), HostError> {
        let shared = &self.0.shared;
        let removed = TemplateKey::parse(key).is_some_and(|key| {
            shared.warm_pool.forget(&key);
            shared.templates.remove(&key)
        });
        removed.then_some(()).ok_or_else(|| HostError::NoTemplate { key: key.to_owned() })
    }
}
