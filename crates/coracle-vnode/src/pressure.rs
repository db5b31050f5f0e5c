//! Thresholds of available memory and disk space below which a node reports pressure.

use std::fmt;
use std::str::FromStr;

use coracle_api::Amount;

/// Eviction signals of a kubelet (Kubernetes documentation, "Node-pressure Eviction").
const MEMORY: &str = "memory.available";
const DISK: &str = "nodefs.available";
/// Text for no thresholds.
const NONE: &str = "none";

/// Thresholds below which a node reports the conditions MemoryPressure and DiskPressure. The text format is that of a kubelet's
/// `--eviction-hard`: `memory.available<100Mi,nodefs.available<5%`, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PressureThresholds {
    memory: Option<Threshold>,
    disk: Option<Threshold>,
}

/// Threshold of an available amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Threshold {
    Bytes(Amount),
    /// Percentage of the capacity, at most 100.
    Percent(u8),
}

/// Invalid thresholds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid threshold {0:?}: not memory.available<AMOUNT or nodefs.available<AMOUNT with an amount as 100Mi or 5%"
)]
pub struct InvalidPressureThresholds(String);

impl PressureThresholds {
    /// No thresholds.
    pub const NONE: Self = Self { memory: None, disk: None };

    pub(crate) fn memory_is_low(self, available: u64, total: u64) -> bool {
        self.memory.is_some_and(|threshold| threshold.is_above(available, total))
    }

    /// Returns whether disk space is low. A disk of unknown size is never low.
    pub(crate) fn disk_is_low(self, available: u64, total: u64) -> bool {
        total > 0 && self.disk.is_some_and(|threshold| threshold.is_above(available, total))
    }

    pub(crate) fn memory_text(self) -> String {
        self.memory.map(|threshold| threshold.to_string()).unwrap_or_default()
    }

    pub(crate) fn disk_text(self) -> String {
        self.disk.map(|threshold| threshold.to_string()).unwrap_or_default()
    }
}

impl Default for PressureThresholds {
    /// The memory threshold is that of a kubelet. The disk threshold is lower: disks contain images of VMs, and 10 % can be a
    /// terabyte.
    fn default() -> Self {
        Self {
            memory: Some(Threshold::Bytes(Amount::of_units(100 << 20))),
            disk: Some(Threshold::Percent(5)),
        }
    }
}

impl Threshold {
    fn is_above(self, available: u64, total: u64) -> bool {
        match self {
            Self::Bytes(amount) => available < amount.units(),
            Self::Percent(percent) => u128::from(available) * 100 < u128::from(total) * u128::from(percent),
        }
    }
}

impl FromStr for Threshold {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text.strip_suffix('%') {
            Some(percent) => {
                let percent = percent.parse().ok().filter(|percent| *percent <= 100);
                percent.map(Self::Percent).ok_or(())
            }
            None => Amount::parse(text).map(Self::Bytes).map_err(drop),
        }
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(amount) if amount.units().trailing_zeros() >= 20 => {
                write!(f, "{} MiB", amount.units() >> 20)
            }
            Self::Bytes(amount) => write!(f, "{} bytes", amount.units()),
            Self::Percent(percent) => write!(f, "{percent} %"),
        }
    }
}

impl FromStr for PressureThresholds {
    type Err = InvalidPressureThresholds;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut thresholds = Self::NONE;
        if text == NONE {
            return Ok(thresholds);
        }
        for one in text.split(',') {
            let invalid = || InvalidPressureThresholds(one.to_owned());
            let (signal, amount) = one.split_once('<').ok_or_else(invalid)?;
            let threshold = amount.parse().map_err(|()| invalid())?;
            match signal {
                MEMORY => thresholds.memory = Some(threshold),
                DISK => thresholds.disk = Some(threshold),
                _ => return Err(invalid()),
            }
        }
        Ok(thresholds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_thresholds_equal_the_parsed_text() {
        assert_eq!("memory.available<100Mi,nodefs.available<5%".parse(), Ok(PressureThresholds::default()));
        assert_eq!("none".parse(), Ok(PressureThresholds::NONE));
    }

    #[test]
    fn malformed_thresholds_are_refused_by_name() {
        let none = ["", "5%", "memory.available", "imagefs.available<5%"];
        for text in none.into_iter().chain(["nodefs.available<101%", "memory.available<lots"]) {
            let error = text.parse::<PressureThresholds>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn threshold_table() {
        for (text, available, total, memory, disk) in [
            ("none", 0, 100, false, false),
            ("memory.available<10", 9, 100, true, false),
            ("memory.available<10", 10, 100, false, false),
            ("nodefs.available<10%", 9, 100, false, true),
            ("nodefs.available<10%", 10, 100, false, false),
            ("nodefs.available<0%", 0, 100, false, false),
            ("nodefs.available<100%", u64::MAX - 1, u64::MAX, false, true),
            ("memory.available<5%,nodefs.available<1", 0, 0, false, false),
        ] {
            let thresholds: PressureThresholds = text.parse().unwrap();
            let got = (thresholds.memory_is_low(available, total), thresholds.disk_is_low(available, total));
            assert_eq!(got, (memory, disk), "{text} of {available}");
        }
    }
}
