//! Memory and CPUs of VMs.

use serde::{Deserialize, Serialize};

/// Guest memory in MiB, 128 to 1 TiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct MemoryMib(u32);

/// Error for a memory size outside the allowed range.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidMemory {
    /// Less than 128 MiB, with which guests do not boot.
    #[error("memory_mb must be at least 128")]
    TooSmall,
    /// More than 1 TiB.
    #[error("memory_mb must be at most 1048576")]
    TooLarge,
}

impl MemoryMib {
    /// Smallest memory that guests boot with.
    pub const MIN: Self = Self(128);

    /// Returns the number of MiB.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.0) << 20
    }
}

impl TryFrom<u64> for MemoryMib {
    type Error = InvalidMemory;

    fn try_from(mib: u64) -> Result<Self, Self::Error> {
        match u32::try_from(mib) {
            Ok(mib) if mib < 128 => Err(InvalidMemory::TooSmall),
            Ok(mib) if mib <= 1 << 20 => Ok(Self(mib)),
            _ => Err(InvalidMemory::TooLarge),
        }
    }
}

impl From<MemoryMib> for u64 {
    fn from(memory: MemoryMib) -> Self {
        memory.0.into()
    }
}

/// Number of virtual CPUs, 1 to 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Vcpus(u8);

/// Error for a number of CPUs outside the allowed range.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("vcpu_count must be between 1 and 32")]
pub struct InvalidVcpus;

impl Vcpus {
    /// Smallest number of CPUs.
    pub const MIN: Self = Self(1);

    /// Returns the number of CPUs.
    #[must_use]
    pub fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u32> for Vcpus {
    type Error = InvalidVcpus;

    fn try_from(count: u32) -> Result<Self, Self::Error> {
        match u8::try_from(count) {
            Ok(count @ 1..=32) => Ok(Self(count)),
            _ => Err(InvalidVcpus),
        }
    }
}

impl From<Vcpus> for u32 {
    fn from(vcpus: Vcpus) -> Self {
        vcpus.0.into()
    }
}

/// CPUs and memory that a VMM is launched with: the smallest class that fits the request of a VM. VMs of one class share
/// templates and pooled clones; the guest limits each VM to its own size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SizeClass {
    /// Number of vCPUs: 1, 2, 4, 8, 16 or 32.
    pub vcpus: Vcpus,
    /// Memory: 128, 192, 256, 384, 512, 768, … MiB.
    pub memory: MemoryMib,
}

impl SizeClass {
    /// Returns the class of a size.
    #[must_use]
    pub fn of(vcpus: Vcpus, memory: MemoryMib) -> Self {
        let powers = (0..=20).map(|power| 128_u64 << power);
        let classes = powers.flat_map(|base| [base, base + base / 2]);
        let fitting = classes.filter_map(|mib| MemoryMib::try_from(mib).ok()).find(|class| *class >= memory);
        let count = u32::from(vcpus).next_power_of_two();
        Self { vcpus: Vcpus::try_from(count).unwrap_or(vcpus), memory: fitting.unwrap_or(memory) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_class_is_rounded_up() {
        for (vcpus, mib, want) in [
            (1_u32, 128_u64, (1, 128)),
            (1, 129, (1, 192)),
            (2, 200, (2, 256)),
            (3, 257, (4, 384)),
            (5, 1025, (8, 1536)),
            (17, 3000, (32, 3072)),
            (32, 1 << 20, (32, 1 << 20)),
            (9, 800_000, (16, 1 << 20)),
        ] {
            let class = SizeClass::of(vcpus.try_into().unwrap(), mib.try_into().unwrap());
            assert_eq!((class.vcpus.get(), class.memory.get()), want, "{vcpus} CPUs, {mib} MiB");
        }
    }

    #[test]
    fn limits_match_the_api() {
        assert_eq!(MemoryMib::try_from(127), Err(InvalidMemory::TooSmall));
        assert_eq!(MemoryMib::try_from(128).unwrap().bytes(), 128 << 20);
        assert_eq!(MemoryMib::try_from(u64::MAX), Err(InvalidMemory::TooLarge));
        assert_eq!(Vcpus::try_from(0), Err(InvalidVcpus));
        assert_eq!(Vcpus::try_from(33), Err(InvalidVcpus));
        assert_eq!(Vcpus::try_from(32).unwrap().get(), 32);
    }
}
