//! Names in the API of a registry: repositories and tags. Parsed once, so that no name can be used as a path.

use std::{fmt, str::FromStr};

use crate::Digest;

/// Longest repository name, in bytes. Some clients allow 255 bytes for host and repository together.
const NAME_BYTES_MAX: usize = 255;
/// Longest tag, in bytes.
const TAG_BYTES_MAX: usize = 128;

/// Text that breaks the grammar of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidName(&'static str);

/// Repository: components of lower-case letters and digits, joined by `.`, `_`, `__` or dashes, with `/` between.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepositoryName(String);

impl RepositoryName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RepositoryName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if text.is_empty() || text.len() > NAME_BYTES_MAX {
            return Err(InvalidName("a repository name has 1 to 255 characters"));
        }
        if text.split('/').all(is_component) {
            return Ok(Self(text.to_owned()));
        }
        Err(InvalidName("a repository name is lower-case letters and digits with single separators between"))
    }
}

/// True for a valid component of a repository name.
pub(crate) fn is_component(text: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    let has_plain_ends =
        bytes.first().is_some_and(|b| is_plain(*b)) && bytes.last().is_some_and(|b| is_plain(*b));
    has_plain_ends
        && bytes.split(|b| is_plain(*b)).all(|separator| {
            matches!(separator, b"" | b"." | b"_" | b"__") || separator.iter().all(|b| *b == b'-')
        })
}

/// Tag: up to 128 letters, digits, `_`, `.` and `-`; the first is neither `.` nor `-`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(String);

impl Tag {
    /// The tag as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Tag {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if is_tag(text) {
            return Ok(Self(text.to_owned()));
        }
        Err(InvalidName("a tag is up to 128 letters, digits, underscores, dots and dashes"))
    }
}

/// True for a valid tag.
pub(crate) fn is_tag(text: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.bytes().next().is_some_and(is_word)
        && text.len() <= TAG_BYTES_MAX
        && text.bytes().all(|b| is_word(b) || matches!(b, b'.' | b'-'))
}

/// Name of a manifest within a repository, `<reference>` in the OCI distribution specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagOrDigest {
    /// Tag.
    Tag(Tag),
    /// Digest.
    Digest(Digest),
}

impl FromStr for TagOrDigest {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if text.contains(':') {
            let digest =
                text.parse().map_err(|_| InvalidName("the reference is neither a digest nor a tag"))?;
            return Ok(Self::Digest(digest));
        }
        text.parse().map(Self::Tag)
    }
}

macro_rules! show_text {
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

show_text!(RepositoryName, Tag);

impl fmt::Display for TagOrDigest {
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
    fn tag_or_digest_table() {
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
            assert_eq!(text.parse::<TagOrDigest>().is_ok(), good, "{text:?}");
        }
        assert!("t".repeat(129).parse::<TagOrDigest>().is_err());
    }
}
