//! Identifier of an upload.

use std::fmt;
use std::str::FromStr;

/// Text that is not the identifier of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an upload is 32 hex digits")]
pub(crate) struct InvalidUploadId;

/// Identifier of an upload: 32 random hex digits. Safe as a file name.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct UploadId(String);

impl UploadId {
    pub(crate) fn random() -> Self {
        Self(hex::encode(rand::random::<[u8; 16]>()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for UploadId {
    type Err = InvalidUploadId;

    fn from_str(text: &str) -> Result<Self, InvalidUploadId> {
        let is_hex = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if is_hex { Ok(Self(text.to_owned())) } else { Err(InvalidUploadId) }
    }
}

impl fmt::Display for UploadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for UploadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
