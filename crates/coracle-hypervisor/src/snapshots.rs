//! Saving a machine whole, memory included, and starting it again on this host or one that is alike.

use std::fmt::Debug;
use std::fs::File;
use std::sync::OnceLock;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::{Cloned, DriverError, Template, VmmConfig};

/// The processor's name and features, read once: a saved CPU state fits no other.
#[must_use]
pub fn cpu_model() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let wanted = |line: &&str| line.starts_with("model name") || line.starts_with("flags");
        text.lines().filter(wanted).take(2).collect::<Vec<_>>().join("\n")
    })
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
    /// Rate of the time-stamp counter that the guest counts time by, in kHz, as it was measured; 0: it asks the VMM.
    #[serde(default)]
    pub tsc_khz: u64,
}

/// Two measurements of one counter differ by less than one in this many.
const RATE_TOLERANCE: u64 = 100;
/// Lines of a difference that an error shows.
const LINES_SHOWN: usize = 3;

impl Compatibility {
    /// The first field in which two machines differ, with what was saved and what is here of it; `None`: a state of the one
    /// runs on the other.
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

/// Earlier versions had a measured rate in the kernel's command line, which a saved guest does not read again.
fn without_rate(text: &str) -> String {
    let words = text.split(' ').filter(|word| !word.starts_with("tsc_early_khz="));
    words.collect::<Vec<_>>().join(" ")
}

/// The lines of `text` that `other` does not have: all of a field is too much for an error.
fn lines_without(text: &str, other: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !other.lines().any(|other| other == *line)).collect();
    let shown = lines.iter().take(LINES_SHOWN).copied().collect::<Vec<_>>().join(" ");
    match lines.len().saturating_sub(LINES_SHOWN) {
        0 if lines.is_empty() => "the same in another order, or less".to_owned(),
        0 => shown,
        more => format!("{shown} and {more} more"),
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
        assert_eq!(saved.difference(&here), Some(("VMM version", "7.2.22".into(), "10.0.2".into())));
    }

    #[test]
    fn of_devices_only_what_differs_is_said() {
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
    fn rate_that_was_measured_again_is_the_same() {
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
