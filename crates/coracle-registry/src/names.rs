//! Names in requests: parsed once, so that nothing behind them can be a path.

use std::fmt;
use std::str::FromStr;

use crate::digest::Digest;

/// Longest repository name, in bytes. The specification warns of clients that allow 255 with the host's name.
const NAME_MAX: usize = 255;
/// Longest tag, in bytes.
const TAG_MAX: usize = 128;

/// The text is no name of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct InvalidName(&'static str);

/// A repository: components of lower-case letters and digits, joined by `.`, `_`, `__` or dashes; `/` between.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RepositoryName(String);

impl RepositoryName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RepositoryName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if text.is_empty() || text.len() > NAME_MAX {
            return Err(InvalidName("a repository name has 1 to 255 characters"));
        }
        if text.split('/').all(is_component) {
            return Ok(Self(text.to_owned()));
        }
        Err(InvalidName("a repository name is lower-case letters and digits with single separators between"))
    }
}

fn is_component(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let ends = text.bytes().next().is_some_and(plain) && text.bytes().last().is_some_and(plain);
    let separators = text.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    ends && separators
        .filter(|s| !s.is_empty())
        .all(|s| matches!(s, "." | "_" | "__") || s.bytes().all(|b| b == b'-'))
}

/// A tag: up to 128 letters, digits, `_`, `.`, `-`, beginning with none of the last two.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Tag(String);

impl Tag {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Tag {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let first = text.bytes().next().is_some_and(word);
        if first && text.len() <= TAG_MAX && text.bytes().all(|b| word(b) || matches!(b, b'.' | b'-')) {
            return Ok(Self(text.to_owned()));
        }
        Err(InvalidName("a tag is up to 128 letters, digits, underscores, dots and dashes"))
    }
}

/// What stands behind `manifests/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reference {
    Tag(Tag),
    Digest(Digest),
}

impl FromStr for Reference {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if text.contains(':') {
            let digest = text.parse().map_err(|_| InvalidName("the reference is no digest and no tag"))?;
            return Ok(Self::Digest(digest));
        }
        text.parse().map(Self::Tag)
    }
}

/// An upload: 32 hex digits of randomness.
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
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let hex = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if hex { Ok(Self(text.to_owned())) } else { Err(InvalidName("an upload is 32 hex digits")) }
    }
}

macro_rules! shown {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

shown!(RepositoryName, Tag, UploadId);

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => tag.fmt(f),
            Self::Digest(digest) => digest.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_table() {
        for (text, good) in [
            ("a", true),
            ("library/ubuntu", true),
            ("a/b/c/d", true),
            ("a.b", true),
            ("a__b", true),
            ("a---b", true),
            ("a_b-c.d/0", true),
            ("", false),
            ("/a", false),
            ("a/", false),
            ("a//b", false),
            ("A", false),
            ("a/../b", false),
            ("..", false),
            (".a", false),
            ("a..b", false),
            ("a___b", false),
            ("a-", false),
            ("_catalog", false),
            ("a\\b", false),
            ("a b", false),
            ("a%2fb", false),
            ("a\0b", false),
            ("ä", false),
        ] {
            assert_eq!(text.parse::<RepositoryName>().is_ok(), good, "{text:?}");
        }
        assert!("a".repeat(255).parse::<RepositoryName>().is_ok());
        assert!("a".repeat(256).parse::<RepositoryName>().is_err());
    }

    #[test]
    fn reference_table() {
        for (text, good) in [
            ("latest", true),
            ("V1.0-rc_1", true),
            ("_x", true),
            (".x", false),
            ("-x", false),
            ("", false),
            ("a/b", false),
            ("..", false),
            ("sha256:00", false),
        ] {
            assert_eq!(text.parse::<Reference>().is_ok(), good, "{text:?}");
        }
        assert!("t".repeat(129).parse::<Reference>().is_err());
    }
}
