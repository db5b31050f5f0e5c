//! Saving a whole VM, memory included, and restoring it on this host or a compatible one.

use std::fmt::Debug;
use std::fs::File;
use std::sync::OnceLock;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::{Cloned, DriverError, Template, VmmConfig};

/// Returns name and features of the host CPU, read once. A saved CPU state is valid only for the same CPU.
#[must_use]
pub fn cpu_model() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let wanted = |line: &&str| line.starts_with("model name") || line.starts_with("flags");
        text.lines().filter(wanted).take(2).collect::<Vec<_>>().join("\n")
    })
}

/// Properties that must match where a saved VM is restored. Saved CPU and device states are valid only for these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Compatibility {
    /// Name of the driver.
    pub driver: String,
    /// Version of the VMM.
    pub vmm: String,
    /// Accelerator.
    pub accelerator: String,
    /// Name and features of the host CPU.
    pub cpu: String,
    /// Devices, sizes and their order, as passed to the VMM.
    pub devices: String,
    /// Measured rate of the time-stamp counter that the guest uses as its clock, kHz; 0: the guest asks the VMM.
    #[serde(default)]
    pub tsc_khz: u64,
}

/// Tolerance for two measurements of one counter: they differ by less than one part in this many.
const RATE_TOLERANCE: u64 = 100;
/// Maximum number of differing lines that an error shows.
const LINES_SHOWN: usize = 3;

impl Compatibility {
    /// Returns the first field that differs, with the saved and the present value; `None`: a state of one VM can be restored as
    /// the other.
    #[must_use]
    pub fn difference(&self, here: &Self) -> Option<(&'static str, String, String)> {
        let pairs = [
            ("driver", &self.driver, &here.driver),
            ("VMM version", &self.vmm, &here.vmm),
            ("accelerator", &self.accelerator, &here.accelerator),
            ("CPU", &self.cpu, &here.cpu),
            ("devices", &self.devices, &here.devices),
        ];
        let differ = |(_, saved, here): &(_, &String, &String)| without_rate(saved) != without_rate(here);
        if let Some((field, saved, here)) = pairs.into_iter().find(differ) {
            return Some((field, lines_without(saved, here), lines_without(here, saved)));
        }
        let (saved, here) = (self.tsc_khz, here.tsc_khz);
        let is_same = saved == 0 || here == 0 || saved.abs_diff(here) < saved / RATE_TOLERANCE;
        (!is_same).then(|| ("rate of the time-stamp counter", format!("{saved} kHz"), format!("{here} kHz")))
    }
}

/// Removes the measured rate from a kernel command line. Earlier versions put it there, and a saved guest does not read the
/// command line again.
fn without_rate(text: &str) -> String {
    let words = text.split(' ').filter(|word| !word.starts_with("tsc_early_khz="));
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the lines of `text` that `other` lacks: a whole field is too long for an error.
fn lines_without(text: &str, other: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !other.lines().any(|other| other == *line)).collect();
    let shown = lines.iter().take(LINES_SHOWN).copied().collect::<Vec<_>>().join(" ");
    match lines.len().saturating_sub(LINES_SHOWN) {
        0 if lines.is_empty() => "the same in another order, or less".to_owned(),
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Location of the memory of a saved VM.
#[derive(Clone, Copy, Debug)]
pub enum Saved<'a> {
    /// File that [`Snapshots::save`] wrote, from its current offset.
    File(&'a File),
    /// Memory that [`Snapshots::materialize`] made of it, shared by any number of VMs.
    MemoryImages(&'a Template),
}

/// Operations of a driver that can save and restore VMs.
#[async_trait]
pub trait Snapshots: Send + Sync + Debug {
    /// Returns the properties on which a saved state of this VM depends. Pure but for properties of the host and the program.
    async fn compatibility(&self, vmm_config: &VmmConfig) -> Compatibility;

    /// Writes memory, device and CPU state to `file` from its current offset, and leaves the offset at their end. The guest
    /// must be paused, and may be resumed afterwards, also after a failure.
    ///
    /// # Errors
    /// [`DriverError::Control`], for example when the disk is full.
    async fn save(&self, vmm_config: &VmmConfig, file: &File) -> Result<(), DriverError>;

    /// Loads what [`Snapshots::save`] wrote into memory that many VMs map privately. `None`: VMs of this kind cannot share
    /// memory. Disks are ignored. The driver may need a VMM for it; a dropped future may leave that VMM, which `find` finds.
    ///
    /// # Errors
    /// Same as [`Snapshots::restore`].
    async fn materialize(&self, vmm_config: &VmmConfig, file: &File)
    -> Result<Option<Template>, DriverError>;

    /// Restores a saved VM in a new VMM, with the disks of the VMM config. The guest is paused until [`crate::Driver::resume`].
    /// Like [`crate::Driver::start`], a dropped future may leave a VMM, which `find` finds.
    ///
    /// # Errors
    /// Same as [`crate::Driver::start`], and [`DriverError::Control`]; no VMM is left.
    async fn restore(&self, vmm_config: &VmmConfig, saved: Saved<'_>) -> Result<Cloned, DriverError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compatibility_check_names_the_first_difference() {
        let saved = Compatibility { vmm: "7.2.22".into(), cpu: "a".into(), ..Compatibility::default() };
        assert_eq!(saved.difference(&saved.clone()), None);
        let here = Compatibility { vmm: "10.0.2".into(), cpu: "b".into(), ..Compatibility::default() };
        assert_eq!(saved.difference(&here), Some(("VMM version", "7.2.22".into(), "10.0.2".into())));
    }

    #[test]
    fn device_difference_names_only_changed_arguments() {
        let of = |devices: &str| Compatibility { devices: devices.into(), ..Compatibility::default() };
        let saved = of("-m\n128\n-device\nrng");
        assert_eq!(
            saved.difference(&of("-m\n256\n-device\nrng")),
            Some(("devices", "128".into(), "256".into()))
        );
        let many = of("-m\n128\na\nb\nc\nd\n-device\nrng");
        let said = many.difference(&of("-m\n128\n-device\nrng")).unwrap();
        assert_eq!(said.1, "a b c and 1 more");
    }

    #[test]
    fn remeasured_tsc_rate_is_compatible() {
        let of = |devices: &str, tsc_khz| Compatibility {
            devices: devices.into(),
            tsc_khz,
            ..Compatibility::default()
        };
        for (why, saved, here, same) in [
            ("another measurement", of("d", 2_596_150), of("d", 2_596_162), true),
            ("another processor", of("d", 2_596_150), of("d", 2_400_000), false),
            ("the guest asks the VMM", of("d", 0), of("d", 2_400_000), true),
            (
                "an earlier version's",
                of("quiet tsc_early_khz=2596150 tsc=reliable", 0),
                of("quiet tsc_early_khz=0 tsc=reliable", 2_596_162),
                true,
            ),
        ] {
            assert_eq!(saved.difference(&here).is_none(), same, "{why}");
        }
    }
}
