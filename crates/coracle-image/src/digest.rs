//! Content digests. Only sha256: it is the identity of everything on the wire and in the store.

use std::{
    fmt,
    io::{self, Write},
    str::FromStr,
};

use aws_lc_rs::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

/// A sha256 content digest, written `sha256:<64 hex digits>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 32]);

/// The text is no digest that this crate can verify.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDigest {
    /// Another algorithm than sha256.
    #[error("digest algorithm {0:?} is not supported, only sha256 is")]
    Algorithm(String),
    /// Not 64 lower-case hex digits behind `sha256:`.
    #[error("a digest is \"sha256:\" and 64 lower-case hex digits")]
    Format,
}

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The 64 hex digits without the algorithm, as used in file names.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// The raw 32 bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads the 64 hex digits of a file name.
    pub(crate) fn from_hex(text: &str) -> Result<Self, InvalidDigest> {
        let lower = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let mut raw = [0; 32];
        match hex::decode_to_slice(text, &mut raw) {
            Ok(()) if lower => Ok(Self(raw)),
            _ => Err(InvalidDigest::Format),
        }
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        match text.split_once(':') {
            Some(("sha256", hex)) => Self::from_hex(hex),
            Some((other, _)) if !other.is_empty() => Err(InvalidDigest::Algorithm(other.to_owned())),
            _ => Err(InvalidDigest::Format),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Counts and hashes a stream.
#[derive(Clone)]
pub(crate) struct Hasher {
    sha: Context,
    pub(crate) bytes: u64,
}

impl Default for Hasher {
    fn default() -> Self {
        Self { sha: Context::new(&SHA256), bytes: 0 }
    }
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.sha.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    pub(crate) fn finish(self) -> Digest {
        let mut digest = [0; 32];
        digest.copy_from_slice(self.sha.finish().as_ref());
        Digest(digest)
    }
}

impl Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Hashes what passes through.
pub(crate) struct Hashed<W> {
    pub(crate) to: W,
    pub(crate) hasher: Hasher,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.to.write(bytes)?;
        self.hasher.update(bytes.get(..n).unwrap_or_default());
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_table() {
        let good = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(good.parse::<Digest>().unwrap().to_string(), good);
        for (why, text) in [
            ("no algorithm", "0a".repeat(32)),
            ("too short", "sha256:0a".to_owned()),
            ("upper case", format!("sha256:{}", "0A".repeat(32))),
            ("another algorithm", format!("sha512:{}", "0a".repeat(64))),
            ("a path", "sha256:../../etc/passwd".to_owned()),
        ] {
            assert!(text.parse::<Digest>().is_err(), "{why}");
        }
    }
}
