//! What callers may ask of the host's templates.

use coracle_types::{MemoryMib, SizeClass, Vcpus};

use super::Host;
use crate::vmm_config::of_shape;
use crate::{HostError, TemplateInfo, TemplateKey};

impl Host {
    /// The templates of this host, by key.
    #[must_use]
    pub fn templates(&self) -> Vec<TemplateInfo> {
        self.0.shared.templates.list()
    }

    /// Does a clone of this template run already, for the next VM of its shape?
    #[must_use]
    pub fn has_pooled(&self, key: &TemplateKey) -> bool {
        self.0.shared.warm_pool.has(key)
    }

    /// Takes the template of the size class of this shape, or finds it; returns when it is ready. Its guest has a fresh disk of `disk_mib`
    /// mounted, for VMs that begin with one of that size; `None`: the node's default. Idempotent; cancel-safe: the taking
    /// runs to completion without the caller.
    ///
    /// # Errors
    /// [`HostError::Kernel`]; [`HostError::Template`] when the driver has none, they are switched off, or the boot
    /// failed.
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

    /// Forgets a template and its files. VMs that were started from it keep running.
    ///
    /// # Errors
    /// [`HostError::Template`] when there is none of this key.
    pub fn delete_template(&self, key: &str) -> Result<(), HostError> {
        let shared = &self.0.shared;
        let removed = TemplateKey::parse(key).is_some_and(|key| {
            shared.warm_pool.forget(&key);
            shared.templates.remove(&key)
        });
        removed.then_some(()).ok_or_else(|| HostError::NoTemplate { key: key.to_owned() })
    }
}
