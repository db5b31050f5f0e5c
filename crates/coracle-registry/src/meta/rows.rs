//! Rows of the tables. Fields are named like columns.

use crate::rights::{InvalidRights, Rights, Role};

/// Prefix of the id of a first token, and the value of its `created_by`.
pub(crate) const FIRST_ID: &str = "first-";
pub(crate) const FIRST_CREATED_BY: &str = "start";

/// Repository with sums over its content.
#[derive(Clone, Debug)]
pub(crate) struct RepositoryRow {
    pub(crate) name: String,
    pub(crate) created: i64,
    pub(crate) updated: i64,
    pub(crate) tag_count: i64,
    pub(crate) total: i64,
    pub(crate) kind: Option<String>,
    pub(crate) artifact_type: Option<String>,
}

/// Manifest.
#[derive(Clone, Debug)]
pub(crate) struct ManifestRow {
    pub(crate) digest: String,
    pub(crate) media_type: String,
    pub(crate) artifact_type: String,
    pub(crate) kind: String,
    pub(crate) annotations: String,
    pub(crate) size: i64,
    pub(crate) total: i64,
    pub(crate) layers: i64,
    pub(crate) subject: Option<String>,
}

/// Tag with its manifest.
#[derive(Clone, Debug)]
pub(crate) struct TagRow {
    pub(crate) tag: String,
    pub(crate) digest: String,
    pub(crate) artifact_type: String,
    pub(crate) kind: String,
    pub(crate) total: i64,
    pub(crate) layers: i64,
    pub(crate) pushed: i64,
}

/// Sums over all repositories.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StatsRow {
    pub(crate) repositories: i64,
    pub(crate) tags: i64,
    pub(crate) blobs: i64,
    pub(crate) bytes: i64,
}

/// Token, without its secret.
#[derive(Clone, Debug)]
pub(crate) struct TokenRow {
    pub(crate) id: String,
    pub(crate) name: String,
    /// 0 for a token that may only read. Read by releases without roles.
    pub(crate) writes: i64,
    /// Role. `None` when a release without roles created the token.
    pub(crate) role: Option<String>,
    /// Repository globs, separated by spaces.
    pub(crate) repositories: Option<String>,
    pub(crate) created_by: String,
    pub(crate) created: i64,
    pub(crate) expires: Option<i64>,
    pub(crate) last_used: Option<i64>,
}

impl TokenRow {
    /// Rights of the token. Of the tokens without a role, the first token is an administrator's. Others that could write may
    /// push and delete everywhere, as before, but manage nothing.
    pub(crate) fn rights(&self) -> Result<Rights, InvalidRights> {
        match (&self.role, self.writes, self.created_by.as_str()) {
            (Some(role), _, _) => {
                Rights::parse_stored(role, self.repositories.as_deref().unwrap_or_default())
            }
            (None, 0, _) => Ok(Rights::everywhere(Role::Read)),
            (None, _, FIRST_CREATED_BY) if self.id.starts_with(FIRST_ID) => {
                Ok(Rights::everywhere(Role::Admin))
            }
            (None, _, _) => Ok(Rights::everywhere(Role::Delete)),
        }
    }
}

/// Upload in progress.
#[derive(Clone, Debug)]
pub(crate) struct UploadRow {
    pub(crate) id: String,
    pub(crate) repo: String,
    pub(crate) updated: i64,
}

/// Implements reading a row of either database by column names. The derive macro of sqlx would compile the whole library a
/// second time.
macro_rules! from_row {
    ($($name:ident { $($field:ident),* })*) => {$(
        impl<'r, R: sqlx::Row> sqlx::FromRow<'r, R> for $name
        where
            &'static str: sqlx::ColumnIndex<R>,
            i64: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
            String: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
        {
            fn from_row(row: &'r R) -> Result<Self, sqlx::Error> {
                Ok(Self { $($field: row.try_get(stringify!($field))?),* })
            }
        }
    )*};
}
pub(super) use from_row;

from_row! {
    RepositoryRow { name, created, updated, tag_count, total, kind, artifact_type }
    ManifestRow { digest, media_type, artifact_type, kind, annotations, size, total, layers, subject }
    TagRow { tag, digest, artifact_type, kind, total, layers, pushed }
    StatsRow { repositories, tags, blobs, bytes }
    TokenRow { id, name, writes, role, repositories, created_by, created, expires, last_used }
    UploadRow { id, repo, updated }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_rights_table() {
        let row = |id: &str, writes, role: Option<&str>, repositories: Option<&str>, by: &str| TokenRow {
            id: id.to_owned(),
            name: String::new(),
            writes,
            role: role.map(str::to_owned),
            repositories: repositories.map(str::to_owned),
            created_by: by.to_owned(),
            created: 0,
            expires: None,
            last_used: None,
        };
        let everywhere = |role| Ok(Rights::everywhere(role));
        for (why, row, want) in [
            ("old, reads", row("1", 0, None, None, "first"), everywhere(Role::Read)),
            ("old, writes", row("1", 1, None, None, "first"), everywhere(Role::Delete)),
            ("old, the first", row("first-1", 1, None, None, "start"), everywhere(Role::Admin)),
            ("old, by a token named start", row("1", 1, None, None, "start"), everywhere(Role::Delete)),
            ("new", row("1", 1, Some("push"), Some("a/* b"), "x"), Rights::parse_stored("push", "a/* b")),
            ("a role of a later release", row("1", 1, Some("x"), Some("**"), "x"), Err(InvalidRights::Role)),
            ("no repositories", row("1", 1, Some("push"), None, "x"), Err(InvalidRights::Glob)),
        ] {
            assert_eq!(row.rights(), want, "{why}");
        }
    }
}
