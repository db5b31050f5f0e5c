//! Mark and sweep, as the tables see it.

use super::blobs::DYING;
use super::{Meta, on};
use crate::error::{StoreError, sql};

/// A blob that is to go: nobody needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Doomed {
    pub(crate) digest: String,
    pub(crate) size: i64,
}

super::rows::from_row! {
    Doomed { digest, size }
}

/// Nobody names the blob `l` of a repository, and nobody asked for it since `$1`.
const UNNAMED: &str =
    "touched < $1 AND NOT EXISTS (SELECT 1 FROM refs r WHERE r.repo = links.repo AND r.child = links.digest)";
/// The blob is in no repository, and nobody asked for it since `$1`.
const NOWHERE: &str = "touched < $1 AND NOT EXISTS (SELECT 1 FROM links l WHERE l.digest = blobs.digest)";

impl Meta {
    /// What a sweep with this cutoff would free. Reads only.
    pub(crate) async fn would_free(&self, cutoff: i64) -> Result<Vec<Doomed>, StoreError> {
        const READ: &str = "SELECT b.digest, b.size FROM blobs b WHERE b.touched < $1 AND NOT EXISTS (SELECT 1 FROM links l WHERE l.digest = b.digest \
            AND (l.touched >= $1 OR EXISTS (SELECT 1 FROM refs r WHERE r.repo = l.repo AND r.child = l.digest))) ORDER BY b.digest";
        on!(self, pool, read => sqlx::query_as(READ).bind(cutoff).fetch_all(pool).await)
            .map_err(sql("look for garbage"))
    }

    /// Marks: unlinks blobs that no manifest names, and dooms those in no repository. Returns all doomed ones, also
    /// those that an earlier sweep did not get to.
    pub(crate) async fn doom(&self, cutoff: i64) -> Result<Vec<Doomed>, StoreError> {
        const OP: &str = "mark garbage";
        let unlink = || sqlx::AssertSqlSafe(format!("DELETE FROM links WHERE {UNNAMED}"));
        let doom =
            || sqlx::AssertSqlSafe(format!("UPDATE blobs SET state = $2 WHERE state <> $2 AND {NOWHERE}"));
        on!(self, pool, write => {
            sqlx::query(unlink()).bind(cutoff).execute(pool).await.map_err(sql(OP))?;
            sqlx::query(doom()).bind(cutoff).bind(DYING).execute(pool).await.map_err(sql(OP))?;
            sqlx::query_as("SELECT digest, size FROM blobs WHERE state = $1 ORDER BY digest").bind(DYING).fetch_all(pool).await.map_err(sql(OP))
        })
    }

    /// The bytes of a doomed blob are gone.
    pub(crate) async fn bury(&self, digest: &str) -> Result<(), StoreError> {
        on!(self, pool, write => sqlx::query("DELETE FROM blobs WHERE digest = $1 AND state = $2")
            .bind(digest).bind(DYING).execute(pool).await.map(drop))
        .map_err(sql("forget a blob"))
    }

    /// Manifests that have no tag, are part of no index, say nothing about a manifest that is here, and were pushed
    /// before `cutoff`: repository and digest.
    pub(crate) async fn untagged(&self, cutoff: i64) -> Result<Vec<(String, String)>, StoreError> {
        const READ: &str = "SELECT m.repo, m.digest FROM manifests m WHERE m.pushed < $1 \
            AND NOT EXISTS (SELECT 1 FROM tags t WHERE t.repo = m.repo AND t.digest = m.digest) \
            AND NOT EXISTS (SELECT 1 FROM refs r WHERE r.repo = m.repo AND r.child = m.digest) \
            AND NOT EXISTS (SELECT 1 FROM manifests s WHERE s.repo = m.repo AND s.digest = m.subject)";
        on!(self, pool, read => sqlx::query_as(READ).bind(cutoff).fetch_all(pool).await)
            .map_err(sql("look for garbage"))
    }

    /// Forgets repositories that hold nothing.
    pub(crate) async fn forget_empty(&self, cutoff: i64) -> Result<(), StoreError> {
        const DROP: &str = "DELETE FROM repositories WHERE updated < $1 AND NOT EXISTS (SELECT 1 FROM manifests m WHERE m.repo = name) AND NOT EXISTS (SELECT 1 FROM links l WHERE l.repo = name)";
        on!(self, pool, write => sqlx::query(DROP).bind(cutoff).execute(pool).await.map(drop))
            .map_err(sql("forget repositories"))
    }
}
