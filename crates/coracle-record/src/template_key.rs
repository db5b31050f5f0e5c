//! Key of a template: equal for VMs of the same shape.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Key of 16 hex digits over kernel, guest agent, devices, sizes, CPU and VMM build: everything that a saved state depends on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TemplateKey(String);

impl TemplateKey {
    /// Computes the key from the driver's fingerprint of a VM shape and the SHA-256 digests of its kernel and guest agent.
    #[must_use]
    pub fn of(fingerprint: &str, digests: &[[u8; 32]]) -> Self {
        let mut hash = Sha256::new();
        hash.update(fingerprint.as_bytes());
        for digest in digests {
            hash.update(digest);
        }
        Self(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
    }

    /// Parses a key; `None` when it is invalid.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.len() == 16 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        hex.then(|| Self(text.to_owned()))
    }

    /// Returns the digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TemplateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_key_changes_with_fingerprint_and_kernel() {
        let key = |fingerprint: &str, kernel: u8| TemplateKey::of(fingerprint, &[[kernel; 32], [2; 32]]);
        assert_eq!(key("-smp 1", 1), key("-smp 1", 1));
        assert_ne!(key("-smp 1", 1), key("-smp 2", 1));
        assert_ne!(key("-smp 1", 1), key("-smp 1", 3));
        assert_eq!(TemplateKey::parse(key("x", 1).as_str()), Some(key("x", 1)));
        assert_eq!(TemplateKey::parse("../../../../etc/"), None);
    }
}
