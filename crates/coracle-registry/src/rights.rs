//! Rights of a token: its role and its repositories. Pure.

use coracle_oci::RepositoryName;
use std::fmt;
use std::str::FromStr;

/// Limit of globs per token.
const GLOBS_MAX: usize = 64;
/// Longest glob, bytes: as long as a repository name.
const GLOB_MAX: usize = 255;

/// Role of a token. Each role includes the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// Pull manifests and blobs, list tags and referrers.
    Read,
    /// Push blobs and manifests, set and move tags.
    Push,
    /// Delete tags, manifests and blobs.
    Delete,
    /// Manage tokens, sweep, and synchronise the tables with the storage. Always for all repositories.
    Admin,
}

impl Role {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Push => "push",
            Self::Delete => "delete",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Text that does not describe rights.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidRights {
    #[error("invalid role: it is not read, push, delete or admin")]
    Role,
    #[error("invalid repository glob: it has 1 to {GLOB_MAX} of a-z 0-9 . _ - / and *")]
    Glob,
    #[error("invalid repositories: a token has 1 to {GLOBS_MAX} globs")]
    Count,
    #[error("invalid repositories: an admin token is for all of them")]
    ScopedAdmin,
}

impl FromStr for Role {
    type Err = InvalidRights;

    fn from_str(text: &str) -> Result<Self, InvalidRights> {
        [Self::Read, Self::Push, Self::Delete, Self::Admin]
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or(InvalidRights::Role)
    }
}

/// Pattern of repository names: `*` matches characters within one component, `**` matches any characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepositoryGlob(String);

impl RepositoryGlob {
    const ALL: &str = "**";

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Matches in time proportional to the product of both lengths, for any number of stars.
    fn matches(&self, name: &str) -> bool {
        if self.0 == Self::ALL {
            return true;
        }
        let name = name.as_bytes();
        // `reached[n]`: the glob so far matches the first `n` bytes of the name.
        let mut reached = vec![false; name.len() + 1];
        reached[0] = true;
        let mut rest = self.0.as_bytes();
        while let Some(&first) = rest.first() {
            let any = rest.starts_with(b"**");
            rest = &rest[if any { 2 } else { 1 }..];
            if first == b'*' {
                for n in 0..name.len() {
                    reached[n + 1] |= reached[n] && (any || name[n] != b'/');
                }
            } else {
                for n in (0..name.len()).rev() {
                    reached[n + 1] = reached[n] && name[n] == first;
                }
                reached[0] = false;
            }
        }
        reached[name.len()]
    }
}

impl FromStr for RepositoryGlob {
    type Err = InvalidRights;

    fn from_str(text: &str) -> Result<Self, InvalidRights> {
        let known = |b: u8| {
            b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-' | b'/' | b'*')
        };
        match (1..=GLOB_MAX).contains(&text.len()) && text.bytes().all(known) {
            true => Ok(Self(text.to_owned())),
            false => Err(InvalidRights::Glob),
        }
    }
}

/// Role of a caller, and the repositories to which it applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    role: Role,
    globs: Vec<RepositoryGlob>,
}

impl Rights {
    /// Role in all repositories.
    pub(crate) fn everywhere(role: Role) -> Self {
        Self { role, globs: vec![RepositoryGlob(RepositoryGlob::ALL.to_owned())] }
    }

    /// Role in some repositories.
    pub(crate) fn new(role: Role, globs: Vec<RepositoryGlob>) -> Result<Self, InvalidRights> {
        if !(1..=GLOBS_MAX).contains(&globs.len()) {
            return Err(InvalidRights::Count);
        }
        let rights = Self { role, globs };
        match role == Role::Admin && !rights.is_everywhere() {
            true => Err(InvalidRights::ScopedAdmin),
            false => Ok(rights),
        }
    }

    /// Parses rights as the tables store them: a role, and globs separated by spaces.
    pub(crate) fn parse_stored(role: &str, globs: &str) -> Result<Self, InvalidRights> {
        Self::new(role.parse()?, globs.split(' ').map(str::parse).collect::<Result<_, _>>()?)
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    pub(crate) fn globs(&self) -> Vec<&str> {
        self.globs.iter().map(RepositoryGlob::as_str).collect()
    }

    pub(crate) fn is_everywhere(&self) -> bool {
        self.globs.iter().any(|glob| glob.0 == RepositoryGlob::ALL)
    }

    /// True when the rights apply to the repository.
    pub(crate) fn covers(&self, repo: &str) -> bool {
        self.globs.iter().any(|glob| glob.matches(repo))
    }

    /// True when the rights include `role` for `target`.
    pub(crate) fn allow(&self, role: Role, target: &Target<'_>) -> bool {
        let covered = match target {
            Target::Listed => true,
            Target::Registry => self.is_everywhere(),
            Target::Repository(repo) => self.covers(repo.as_str()),
        };
        self.role >= role && covered
    }
}

/// Object that a request concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target<'a> {
    /// Registry as a whole.
    Registry,
    /// List of repositories, filtered by the rights of the caller.
    Listed,
    /// One repository.
    Repository(&'a RepositoryName),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glob_match_table() {
        for (glob, name, want) in [
            ("**", "a", true),
            ("**", "a/b/c", true),
            ("*", "a", true),
            ("*", "a/b", false),
            ("team/*", "team/app", true),
            ("team/*", "team/app/x", false),
            ("team/*", "team", false),
            ("team/**", "team/app/x", true),
            ("team/**", "teams/app", false),
            ("team", "team", true),
            ("team", "team/app", false),
            ("**/cache", "a/b/cache", true),
            ("**/cache", "a/b/cached", false),
            ("a*c/x", "abbc/x", true),
            ("a*c/x", "ab/c/x", false),
            ("***", "a/b", true),
        ] {
            assert_eq!(glob.parse::<RepositoryGlob>().unwrap().matches(name), want, "{glob} {name}");
        }
        let stars = "**a".repeat(80).parse::<RepositoryGlob>().unwrap();
        assert!(!stars.matches(&"a".repeat(79)), "and in no time");
    }

    #[test]
    fn rights_allow_table() {
        let (app, other) = ("team/app".parse().unwrap(), "other/app".parse().unwrap());
        let team = |role: &str| Rights::parse_stored(role, "team/* lib").unwrap();
        let (app, other) = (Target::Repository(&app), Target::Repository(&other));
        for (rights, role, target, want) in [
            (team("read"), Role::Read, app, true),
            (team("read"), Role::Push, app, false),
            (team("push"), Role::Push, app, true),
            (team("push"), Role::Delete, app, false),
            (team("push"), Role::Push, other, false),
            (team("push"), Role::Read, other, false),
            (team("delete"), Role::Delete, app, true),
            (team("delete"), Role::Read, Target::Registry, false),
            (team("delete"), Role::Read, Target::Listed, true),
            (Rights::everywhere(Role::Delete), Role::Delete, other, true),
            (Rights::everywhere(Role::Delete), Role::Admin, Target::Registry, false),
            (Rights::everywhere(Role::Admin), Role::Admin, Target::Registry, true),
        ] {
            assert_eq!(rights.allow(role, &target), want, "{rights:?} {role} {target:?}");
        }
    }

    #[test]
    fn stored_rights_table() {
        for (role, globs, want) in [
            ("read", "**", Ok(())),
            ("push", "a/* b", Ok(())),
            ("admin", "**", Ok(())),
            ("admin", "a/*", Err(InvalidRights::ScopedAdmin)),
            ("root", "**", Err(InvalidRights::Role)),
            ("read", "", Err(InvalidRights::Glob)),
            ("read", "A", Err(InvalidRights::Glob)),
            ("read", &"a ".repeat(65)[..129], Err(InvalidRights::Count)),
        ] {
            assert_eq!(Rights::parse_stored(role, globs).map(drop), want, "{role} {globs}");
        }
    }
}
