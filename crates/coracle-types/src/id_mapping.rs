//! Mapping of users and groups in a user namespace.

use serde::{Deserialize, Serialize};

/// Id that user and group ids without a mapping are shown as (proc_sys_kernel(5), overflowuid).
const OVERFLOW: u32 = 65_534;

/// Mapping of the ids 0 to `length - 1` in a user namespace to `first` and the following ids outside, for users and groups
/// alike (user_namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct IdMapping {
    first: u32,
    length: u32,
}

/// Error for a mapping that is empty or exceeds the range of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid id mapping: {length} ids from {first}: not a range from 1 to 4294967294")]
pub struct InvalidIdMapping {
    first: u32,
    length: u32,
}

#[derive(Serialize, Deserialize)]
struct Wire {
    first: u32,
    length: u32,
}

impl IdMapping {
    /// Returns a mapping of at least one id. Neither the root outside nor the invalid id may be mapped.
    ///
    /// # Errors
    /// When the mapping violates this.
    pub fn new(first: u32, length: u32) -> Result<Self, InvalidIdMapping> {
        let within = first.checked_add(length).is_some_and(|end| end < u32::MAX);
        if first > 0 && length > 0 && within {
            Ok(Self { first, length })
        } else {
            Err(InvalidIdMapping { first, length })
        }
    }

    /// Returns the id outside that is 0 inside.
    #[must_use]
    pub fn first(self) -> u32 {
        self.first
    }

    /// Returns the number of mapped ids.
    #[must_use]
    pub fn length(self) -> u32 {
        self.length
    }

    /// Returns the id outside of an id in the namespace; `None`: not mapped.
    #[must_use]
    pub fn outside(self, inside: u32) -> Option<u32> {
        (inside < self.length).then(|| self.first.saturating_add(inside))
    }

    /// Returns the id in the namespace of an id outside; `None`: not mapped.
    #[must_use]
    pub fn inside(self, outside: u32) -> Option<u32> {
        outside.checked_sub(self.first).filter(|inside| *inside < self.length)
    }

    /// Like [`IdMapping::outside`], with the overflow id for an id without a mapping.
    #[must_use]
    pub fn outside_or_overflow(self, inside: u32) -> u32 {
        self.outside(inside).unwrap_or(OVERFLOW)
    }
}

impl TryFrom<Wire> for IdMapping {
    type Error = InvalidIdMapping;

    fn try_from(wire: Wire) -> Result<Self, Self::Error> {
        Self::new(wire.first, wire.length)
    }
}

impl From<IdMapping> for Wire {
    fn from(mapping: IdMapping) -> Self {
        Self { first: mapping.first, length: mapping.length }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_both_ways() {
        let mapping = IdMapping::new(65_536, 1000).unwrap();
        for (inside, outside) in [(0, 65_536), (1, 65_537), (999, 66_535)] {
            assert_eq!((mapping.outside(inside), mapping.inside(outside)), (Some(outside), Some(inside)));
        }
        assert_eq!((mapping.outside(1000), mapping.outside_or_overflow(1000)), (None, OVERFLOW));
        for none in [0, 65_535, 66_536, u32::MAX] {
            assert_eq!(mapping.inside(none), None, "{none}");
        }
    }

    #[test]
    fn invalid_id_mappings_are_refused() {
        for (first, length) in [(0, 1), (1, 0), (u32::MAX, 1), (1, u32::MAX), (u32::MAX - 1, 1)] {
            assert!(IdMapping::new(first, length).is_err(), "{first} {length}");
        }
        assert!(IdMapping::new(1, u32::MAX - 2).is_ok());
        assert!(serde_json::from_str::<IdMapping>(r#"{"first":0,"length":1}"#).is_err());
        let text = serde_json::to_string(&IdMapping::new(7, 3).unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<IdMapping>(&text).unwrap(), IdMapping::new(7, 3).unwrap());
    }
}
