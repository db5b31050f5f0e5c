//! Saving a machine whole, memory included, and starting it again on this host or one that is alike.

use std::fmt::Debug;
use std::fs::File;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::{Cloned, DriverError, Template, VmmConfig};

/// The processor's name and features: a saved CPU state fits no other.
#[must_use]
pub fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let wanted = |line: &&str| line.starts_with("model name") || line.starts_with("flags");
    text.lines().filter(wanted).take(2).collect::<Vec<_>>().join("\n")
}

/// What must be alike where a saved machine starts again. A saved CPU or device state fits no other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Compatibility {
    /// Name of the driver.
    pub driver: String,
    /// Version of the VMM.
    pub vmm: String,
    /// How guest code is executed.
    pub accelerator: String,
    /// Name and features of the processor.
    pub cpu: String,
    /// Devices, sizes and their order, as the VMM gets them.
    pub devices: String,
}

impl Compatibility {
    /// The first field in which two machines differ, with the value that was saved and the one that is here; `None`:
    /// a state of the one runs on the other.
    #[must_use]
    pub fn difference<'a>(&'a self, here: &'a Self) -> Option<(&'static str, &'a str, &'a str)> {
        let pairs = [
            ("driver", &self.driver, &here.driver),
            ("VMM version", &self.vmm, &here.vmm),
            ("accelerator", &self.accelerator, &here.accelerator),
            ("CPU", &self.cpu, &here.cpu),
            ("devices", &self.devices, &here.devices),
        ];
        let found = pairs.into_iter().find(|(_, saved, here)| saved != here);
        found.map(|(field, saved, here)| (field, saved.as_str(), here.as_str()))
    }
}

/// Where the memory of a saved machine is.
#[derive(Clone, Copy, Debug)]
pub enum Saved<'a> {
    /// In what [`Snapshots::save`] wrote, from where the file stands.
    File(&'a File),
    /// In what [`Snapshots::materialize`] made of it, which any number of machines share.
    MemoryImages(&'a Template),
}

/// A driver's power to save machines and start them again.
#[async_trait]
pub trait Snapshots: Send + Sync + Debug {
    /// What a state of this machine depends on. Pure but for what the host and the program are.
    async fn compatibility(&self, vmm_config: &VmmConfig) -> Compatibility;

    /// Writes memory, devices and CPUs to `file` from where it stands, and leaves it at their end. The guest must be
    /// paused, and may be resumed afterwards, whether this succeeded or not.
    ///
    /// # Errors
    /// [`DriverError::Control`], when the disk is full, for one.
    async fn save(&self, vmm_config: &VmmConfig, file: &File) -> Result<(), DriverError>;

    /// Makes of what [`Snapshots::save`] wrote a memory that many machines map, each with its changes to itself.
    /// `None`: machines of this kind cannot share one. Disks are not looked at. A VMM may be needed for it; a dropped
    /// future may leave that, and `find` sees it.
    ///
    /// # Errors
    /// As [`Snapshots::restore`].
    async fn materialize(&self, vmm_config: &VmmConfig, file: &File)
    -> Result<Option<Template>, DriverError>;

    /// Starts a VMM from a saved machine; its disks are those of the VMM config. The guest is paused until
    /// [`crate::Driver::resume`]. As [`crate::Driver::start`], a dropped future may leave a VMM, which `find` sees.
    ///
    /// # Errors
    /// As [`crate::Driver::start`], and [`DriverError::Control`]; no VMM is left.
    async fn restore(&self, vmm_config: &VmmConfig, saved: Saved<'_>) -> Result<Cloned, DriverError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let saved = Compatibility { vmm: "7.2.22".into(), cpu: "a".into(), ..Compatibility::default() };
        assert_eq!(saved.difference(&saved.clone()), None);
        let here = Compatibility { vmm: "10.0.2".into(), cpu: "b".into(), ..Compatibility::default() };
        assert_eq!(saved.difference(&here), Some(("VMM version", "7.2.22", "10.0.2")));
    }
}
