//! What the tables hold. A field has its column's name.

/// A repository with its sums.
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

/// A manifest.
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

/// A tag with what it names.
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

/// Sums over everything.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StatsRow {
    pub(crate) repositories: i64,
    pub(crate) tags: i64,
    pub(crate) blobs: i64,
    pub(crate) bytes: i64,
}

/// A token without its secret.
#[derive(Clone, Debug)]
pub(crate) struct TokenRow {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) writes: i64,
    pub(crate) created_by: String,
    pub(crate) created: i64,
    pub(crate) expires: Option<i64>,
    pub(crate) last_used: Option<i64>,
}

/// An upload that was begun.
#[derive(Clone, Debug)]
pub(crate) struct UploadRow {
    pub(crate) id: String,
    pub(crate) repo: String,
    pub(crate) updated: i64,
}

/// Reads a row by the names of its columns, from either database. The library's own macro would build a second copy of
/// all of the library for the compiler.
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
    TokenRow { id, name, writes, created_by, created, expires, last_used }
    UploadRow { id, repo, updated }
}
