//! Content digests: what a blob or manifest is called.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{self, Context};

/// How a digest was made. Everything else is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Algorithm {
    Sha256,
    Sha512,
}

impl Algorithm {
    fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    fn hex_len(self) -> usize {
        match self {
            Self::Sha256 => 64,
            Self::Sha512 => 128,
        }
    }
}

/// `sha256:…` or `sha512:…`, in lower case.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Digest {
    algorithm: Algorithm,
    hex: String,
}

/// The text is no digest that this registry can verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a digest is \"sha256:\" and 64, or \"sha512:\" and 128 lower-case hex digits")]
pub(crate) struct InvalidDigest;

impl Digest {
    /// The sha256 of `bytes`.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::made(bytes, Algorithm::Sha256)
    }

    /// The digest of `bytes` by `algorithm`.
    pub(crate) fn made(bytes: &[u8], algorithm: Algorithm) -> Self {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish()
    }

    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    pub(crate) fn algorithm_name(&self) -> &'static str {
        self.algorithm.name()
    }

    pub(crate) fn hex(&self) -> &str {
        &self.hex
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let (name, hex) = text.split_once(':').ok_or(InvalidDigest)?;
        let algorithm = [Algorithm::Sha256, Algorithm::Sha512].into_iter().find(|a| a.name() == name);
        let algorithm = algorithm.ok_or(InvalidDigest)?;
        let lower = hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if hex.len() != algorithm.hex_len() || !lower {
            return Err(InvalidDigest);
        }
        Ok(Self { algorithm, hex: hex.to_owned() })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Hashes a stream.
#[derive(Clone)]
pub(crate) struct Hasher {
    context: Context,
    algorithm: Algorithm,
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hasher({})", self.algorithm.name())
    }
}

impl Hasher {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        let how = match algorithm {
            Algorithm::Sha256 => &digest::SHA256,
            Algorithm::Sha512 => &digest::SHA512,
        };
        Self { context: Context::new(how), algorithm }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        Digest { algorithm: self.algorithm, hex: hex::encode(self.context.finish()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_table() {
        for (why, text, good) in [
            ("sha256", format!("sha256:{}", "0a".repeat(32)), true),
            ("sha512", format!("sha512:{}", "0a".repeat(64)), true),
            ("no algorithm", "0a".repeat(32), false),
            ("too short", "sha256:0a".to_owned(), false),
            ("upper case", format!("sha256:{}", "0A".repeat(32)), false),
            ("another algorithm", format!("md5:{}", "0a".repeat(16)), false),
            (
                "a path",
                "sha256:../../../../../../../../../../../../../../../../../../etc/passwd".to_owned(),
                false,
            ),
        ] {
            let parsed = text.parse::<Digest>();
            assert_eq!(parsed.is_ok(), good, "{why}");
            assert!(parsed.is_err() || parsed.unwrap().to_string() == text, "{why}");
        }
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
    }
}
