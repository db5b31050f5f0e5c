//! Content digests: the identity of blobs and manifests.

use std::{
    fmt,
    io::{self, Write},
    str::FromStr,
};

use aws_lc_rs::digest::{self, Context};
use serde::{Deserialize, Serialize};

/// Length of the longest digest, bytes.
const BYTES_MAX: usize = 64;

/// Hash function of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// SHA-256, the default of the OCI specifications.
    Sha256,
    /// SHA-512.
    Sha512,
}

impl Algorithm {
    /// Every supported algorithm.
    pub const ALL: [Self; 2] = [Self::Sha256, Self::Sha512];

    /// Name before the colon, and directory name in an OCI layout.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Length of a digest, bytes.
    fn len(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}

/// Content digest, written `sha256:<64 hex digits>` or `sha512:<128 hex digits>` in lower case.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest {
    algorithm: Algorithm,
    /// Digest, padded with zeros.
    bytes: [u8; BYTES_MAX],
}

/// Text that is not a supported digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDigest {
    /// Neither sha256 nor sha512.
    #[error("digest algorithm {0:?} is not supported, only sha256 and sha512 are")]
    Algorithm(String),
    /// Wrong number of digits, or something other than lower-case hex digits.
    #[error("a digest is \"sha256:\" and 64, or \"sha512:\" and 128 lower-case hex digits")]
    Format,
}

impl Digest {
    /// SHA-256 of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self::with(Algorithm::Sha256, bytes)
    }

    /// Digest of `bytes` by `algorithm`.
    #[must_use]
    pub fn with(algorithm: Algorithm, bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish()
    }

    /// Hash function.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Hex digits without the algorithm, as used in file names.
    #[must_use]
    pub fn hex(&self) -> String {
        hex::encode(self.bytes())
    }

    /// Raw digest, 32 or 64 bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.algorithm.len()]
    }

    /// Hasher of the same algorithm, to verify a stream against this digest.
    #[must_use]
    pub fn hasher(&self) -> Hasher {
        Hasher::new(self.algorithm)
    }

    /// Parses the hex digits of a file name. Their number determines the algorithm.
    ///
    /// # Errors
    /// [`InvalidDigest::Format`]
    pub fn from_hex(text: &str) -> Result<Self, InvalidDigest> {
        let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.len() * 2 == text.len());
        decode(algorithm.ok_or(InvalidDigest::Format)?, text)
    }
}

fn decode(algorithm: Algorithm, text: &str) -> Result<Digest, InvalidDigest> {
    let is_lower = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let mut bytes = [0; BYTES_MAX];
    match hex::decode_to_slice(text, &mut bytes[..algorithm.len()]) {
        Ok(()) if is_lower => Ok(Digest { algorithm, bytes }),
        _ => Err(InvalidDigest::Format),
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let (name, hex) = text.split_once(':').ok_or(InvalidDigest::Format)?;
        match Algorithm::of_name(name) {
            Some(algorithm) => decode(algorithm, hex),
            None if name.is_empty() => Err(InvalidDigest::Format),
            None => Err(InvalidDigest::Algorithm(name.to_owned())),
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
        write!(f, "{}:{}", self.algorithm.name(), self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Hashes a stream and counts its bytes. The default is SHA-256.
#[derive(Clone)]
pub struct Hasher {
    context: Context,
    algorithm: Algorithm,
    bytes: u64,
}

impl Default for Hasher {
    fn default() -> Self {
        Self::new(Algorithm::Sha256)
    }
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hasher({}, {} bytes)", self.algorithm.name(), self.bytes)
    }
}

impl Hasher {
    /// Hasher of an empty stream.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Self {
        let function = match algorithm {
            Algorithm::Sha256 => &digest::SHA256,
            Algorithm::Sha512 => &digest::SHA512,
        };
        Self { context: Context::new(function), algorithm, bytes: 0 }
    }

    /// Adds the next bytes of the stream.
    pub fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// Bytes hashed so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Digest of the stream.
    #[must_use]
    pub fn finish(self) -> Digest {
        let mut bytes = [0; BYTES_MAX];
        bytes[..self.algorithm.len()].copy_from_slice(self.context.finish().as_ref());
        Digest { algorithm: self.algorithm, bytes }
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

/// Writer that hashes everything written through it.
#[derive(Debug)]
pub struct HashingWriter<W> {
    /// Destination of the bytes.
    pub to: W,
    /// Hash of the bytes that `to` accepted.
    pub hasher: Hasher,
}

impl<W: Write> HashingWriter<W> {
    /// Wraps `to`; the hash is SHA-256.
    pub fn new(to: W) -> Self {
        Self { to, hasher: Hasher::default() }
    }
}

impl<W: Write> Write for HashingWriter<W> {
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
        for (why, text, is_valid) in [
            ("sha256", format!("sha256:{}", "0a".repeat(32)), true),
            ("sha512", format!("sha512:{}", "0a".repeat(64)), true),
            ("no algorithm", "0a".repeat(32), false),
            ("too short", "sha256:0a".to_owned(), false),
            ("length of the other algorithm", format!("sha512:{}", "0a".repeat(32)), false),
            ("upper case", format!("sha256:{}", "0A".repeat(32)), false),
            ("another algorithm", format!("md5:{}", "0a".repeat(16)), false),
            ("a path", format!("sha256:{}etc/passwd", "../".repeat(18)), false),
        ] {
            let parsed = text.parse::<Digest>();
            assert_eq!(parsed.is_ok(), is_valid, "{why}");
            assert!(parsed.is_err() || parsed.unwrap().to_string() == text, "{why}");
        }
    }

    #[test]
    fn digest_of_empty_content_is_known() {
        let sha256 = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), sha256);
        let sha512 = Digest::with(Algorithm::Sha512, b"");
        assert!(sha512.to_string().starts_with("sha512:cf83e1357eefb8bdf1542850d66d8007"), "{sha512}");
        assert_eq!(Digest::from_hex(&sha512.hex()), Ok(sha512));
    }

    #[test]
    fn hasher_follows_the_digest_algorithm() {
        for algorithm in Algorithm::ALL {
            let want = Digest::with(algorithm, b"abc");
            let mut hasher = want.hasher();
            hasher.update(b"ab");
            hasher.update(b"c");
            assert_eq!((hasher.bytes(), hasher.finish()), (3, want));
        }
    }
}
