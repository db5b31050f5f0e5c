//! Names of snapshots.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum length of a name, bytes.
const MAX: usize = 128;

/// Name of a snapshot and of its directory: letters, digits, `.`, `_` and `-`, starting with a letter or a digit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotName(String);

/// Error for a text that is not a snapshot name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "snapshot name {0:?}: letters, digits, dots, underscores and dashes, a letter or digit first, at most {MAX}"
)]
pub struct InvalidSnapshotName(String);

impl SnapshotName {
    /// Returns the name as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Generates a name for an unnamed snapshot of `vm`; `suffix` makes it unique.
    #[must_use]
    pub fn made_of(vm: &str, suffix: &str) -> Self {
        let usable = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let vm: String = vm.chars().map(|c| if usable(c) { c } else { '-' }).take(64).collect();
        Self(
            format!("{}-{suffix}", vm.trim_start_matches(['.', '_', '-'])).trim_start_matches('-').to_owned(),
        )
    }
}

impl FromStr for SnapshotName {
    type Err = InvalidSnapshotName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = (1..=MAX).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if fits {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidSnapshotName(text.chars().take(MAX).collect()))
        }
    }
}

impl TryFrom<String> for SnapshotName {
    type Error = InvalidSnapshotName;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<SnapshotName> for String {
    fn from(name: SnapshotName) -> Self {
        name.0
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_name_is_never_a_path() {
        for good in ["a", "web-1", "Web_1.2", &"a".repeat(MAX)] {
            assert_eq!(good.parse::<SnapshotName>().unwrap().as_str(), good);
        }
        for bad in ["", ".", "..", ".part-a", "a/b", "../a", "a b", "ä", "-a", &"a".repeat(MAX + 1)] {
            assert!(bad.parse::<SnapshotName>().is_err(), "{bad:?}");
        }
        for vm in ["web", "..", "a/b c", "ü", &"x".repeat(253)] {
            let made = SnapshotName::made_of(vm, "1f");
            assert_eq!(made.as_str().parse::<SnapshotName>().as_ref(), Ok(&made), "{vm}");
        }
    }
}
