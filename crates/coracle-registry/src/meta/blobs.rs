//! Rows of blobs, and the repositories that have them.

use super::{Meta, on};
use crate::error::{StoreError, sql};
use coracle_oci::{Digest, RepositoryName};

/// States of a blob's row.
pub(super) const ARRIVING: i64 = 0;
pub(super) const LIVE: i64 = 1;
pub(super) const DYING: i64 = 2;

/// Result of announcing a verified blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// The blob is new: store the bytes, then confirm.
    New,
    /// The blob exists already.
    Exists,
    /// The sweep is removing the blob: wait and retry.
    Wait,
    /// The blob exceeds the quota of all blobs.
    Full,
}

/// Result of linking a blob into a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linked {
    Done,
    /// The blob does not exist.
    Absent,
    /// The blob exceeds the quota of the repository.
    Full,
}

impl Meta {
    /// Size of a blob of a repository. Renews a touch older than `stale`, because the client is about to rely on the blob.
    pub(crate) async fn blob(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        now: i64,
        stale: i64,
    ) -> Result<Option<i64>, StoreError> {
        const READ: &str = "SELECT b.size, l.touched FROM links l JOIN blobs b ON b.digest = l.digest WHERE l.repo = $1 AND l.digest = $2 AND b.state = $3";
        let digest = digest.to_string();
        let row: Option<(i64, i64)> = on!(self, pool, read => sqlx::query_as(READ)
            .bind(repo.as_str()).bind(&digest).bind(LIVE).fetch_optional(pool).await)
        .map_err(sql("look for a blob"))?;
        let Some((size, touched)) = row else { return Ok(None) };
        if touched < stale {
            match self.link(repo, &digest, now).await {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                // Reads stay possible. A push that relies on the blob asks again.
                Err(error) if error.is_full() => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "touch blob failed");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(size))
    }

    /// Links a blob of any repository into this one, and touches it. Returns false when the blob does not exist.
    pub(crate) async fn link(
        &self,
        repo: &RepositoryName,
        digest: &str,
        now: i64,
    ) -> Result<bool, StoreError> {
        Ok(self.enter(repo, digest, now, LIVE, None).await? == Linked::Done)
    }

    /// Like `link`, on behalf of a client: checks the quota of the repository.
    pub(crate) async fn mount(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        now: i64,
        quota: Option<u64>,
    ) -> Result<Linked, StoreError> {
        self.enter(repo, &digest.to_string(), now, LIVE, quota).await
    }

    /// Marks the bytes of a blob as stored: the blob is live, and in this repository. `Absent` when a sweep removed it
    /// meanwhile.
    pub(crate) async fn confirm(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        now: i64,
        quota: Option<u64>,
    ) -> Result<Linked, StoreError> {
        self.enter(repo, &digest.to_string(), now, ARRIVING, quota).await
    }

    async fn enter(
        &self,
        repo: &RepositoryName,
        digest: &str,
        now: i64,
        from: i64,
        quota: Option<u64>,
    ) -> Result<Linked, StoreError> {
        const OP: &str = "link a blob";
        const TOUCH: &str =
            "UPDATE blobs SET touched = $1, state = $3 WHERE digest = $2 AND (state = $3 OR state = $4)";
        const LINK: &str = "INSERT INTO links (repo, digest, touched) VALUES ($1, $2, $3) ON CONFLICT (repo, digest) DO UPDATE SET touched = $3";
        // Bytes of the repository, including the new blob.
        const AFTER: &str = "SELECT CAST(COALESCE(SUM(b.size), 0) AS INT8) FROM blobs b WHERE (b.digest = $2 OR b.digest IN (SELECT l.digest FROM links l WHERE l.repo = $1)) \
            AND NOT EXISTS (SELECT 1 FROM links k WHERE k.repo = $1 AND k.digest = $2)";
        let lock = match (self, quota) {
            (Self::Postgres(..), Some(_)) => "SELECT pg_advisory_xact_lock(2020, hashtext($1))",
            _ => "SELECT $1",
        };
        let quota = quota.map_or(i64::MAX, |quota| i64::try_from(quota).unwrap_or(i64::MAX));
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let found = sqlx::query(TOUCH).bind(now).bind(digest).bind(LIVE).bind(from).execute(&mut *tx).await.map_err(sql(OP))?;
            if found.rows_affected() != 1 {
                return Ok(Linked::Absent);
            }
            if quota != i64::MAX {
                sqlx::query(lock).bind(repo.as_str()).execute(&mut *tx).await.map_err(sql(OP))?;
                let after: i64 = sqlx::query_scalar(AFTER).bind(repo.as_str()).bind(digest).fetch_one(&mut *tx).await.map_err(sql(OP))?;
                if after > quota {
                    return Ok(Linked::Full);
                }
            }
            sqlx::query(super::manifests::REPOSITORY).bind(repo.as_str()).bind(now).execute(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query(LINK).bind(repo.as_str()).bind(digest).bind(now).execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))?;
            Ok(Linked::Done)
        })
    }

    /// True when the repository has the blob.
    pub(crate) async fn has_link(&self, repo: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let found: Option<i64> = on!(self, pool, read => sqlx::query_scalar("SELECT touched FROM links WHERE repo = $1 AND digest = $2")
            .bind(repo.as_str()).bind(digest.to_string()).fetch_optional(pool).await)
        .map_err(sql("look for a blob"))?;
        Ok(found.is_some())
    }

    /// Repositories that have the blob.
    pub(crate) async fn links_of(&self, digest: &Digest) -> Result<Vec<String>, StoreError> {
        on!(self, pool, read => sqlx::query_scalar("SELECT repo FROM links WHERE digest = $1 ORDER BY repo")
            .bind(digest.to_string()).fetch_all(pool).await)
        .map_err(sql("look for a blob"))
    }

    /// Removes a blob from a repository. Returns false when the repository did not have it.
    pub(crate) async fn unlink(&self, repo: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let done = on!(self, pool, write => sqlx::query("DELETE FROM links WHERE repo = $1 AND digest = $2")
            .bind(repo.as_str()).bind(digest.to_string()).execute(pool).await.map(|d| d.rows_affected()))
        .map_err(sql("unlink a blob"))?;
        Ok(done == 1)
    }

    /// Announces a verified blob before it gets its name in the storage. From now on its row counts for the quota.
    pub(crate) async fn announce(
        &self,
        digest: &Digest,
        size: i64,
        now: i64,
        quota: Option<u64>,
    ) -> Result<Arrival, StoreError> {
        const OP: &str = "announce a blob";
        const PUT: &str = "INSERT INTO blobs (digest, size, state, touched) SELECT $1, $2, $3, $4 \
            WHERE $6 < 0 OR EXISTS (SELECT 1 FROM blobs b WHERE b.digest = $1) OR (SELECT CAST(COALESCE(SUM(b.size), 0) AS INT8) FROM blobs b) + $2 <= $6 \
            ON CONFLICT (digest) DO UPDATE SET touched = $4 WHERE blobs.state <> $5 RETURNING state";
        let lock = match (self, quota) {
            (Self::Postgres(..), Some(_)) => "SELECT pg_advisory_xact_lock(2020)",
            _ => "SELECT 1",
        };
        let digest = digest.to_string();
        let quota = quota.map_or(-1, |quota| i64::try_from(quota).unwrap_or(i64::MAX));
        // The row becomes durable together with the commit that marks the bytes as stored.
        let (put, known): (Option<i64>, Option<i64>) = on!(self, pool, loose => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            sqlx::query(lock).execute(&mut *tx).await.map_err(sql(OP))?;
            let put = sqlx::query_scalar(PUT).bind(&digest).bind(size).bind(ARRIVING).bind(now).bind(DYING).bind(quota)
                .fetch_optional(&mut *tx).await.map_err(sql(OP))?;
            let known = match put {
                Some(_) => None,
                None => sqlx::query_scalar("SELECT state FROM blobs WHERE digest = $1").bind(&digest)
                    .fetch_optional(&mut *tx).await.map_err(sql(OP))?,
            };
            tx.commit().await.map_err(sql(OP))?;
            (put, known)
        });
        Ok(match (put, known) {
            (Some(LIVE), _) => Arrival::Exists,
            (Some(_), _) => Arrival::New,
            (None, None) if quota >= 0 => Arrival::Full,
            // The next attempt finds the blob removed.
            (None, _) => Arrival::Wait,
        })
    }

    /// Marks the bytes of an announced blob as stored: the blob is live, but in no repository yet.
    pub(crate) async fn mark_blob_stored(&self, digest: &Digest, now: i64) -> Result<(), StoreError> {
        const LIVES: &str = "UPDATE blobs SET state = $3, touched = $2 WHERE digest = $1 AND state = $4";
        on!(self, pool, write => sqlx::query(LIVES)
            .bind(digest.to_string()).bind(now).bind(LIVE).bind(ARRIVING).execute(pool).await.map(drop))
        .map_err(sql("store a blob"))
    }

    /// True when the blob has a row, in any state.
    pub(crate) async fn has_blob(&self, digest: &Digest) -> Result<bool, StoreError> {
        let found: Option<i64> =
            on!(self, pool, read => sqlx::query_scalar("SELECT state FROM blobs WHERE digest = $1")
            .bind(digest.to_string()).fetch_optional(pool).await)
            .map_err(sql("look for a blob"))?;
        Ok(found.is_some())
    }

    /// Sum of the sizes of all blobs, bytes.
    pub(crate) async fn used(&self) -> Result<i64, StoreError> {
        const ALL: &str = "SELECT CAST(COALESCE(SUM(size), 0) AS INT8) FROM blobs";
        on!(self, pool, read => sqlx::query_scalar(ALL).fetch_one(pool).await).map_err(sql("sum blobs"))
    }

    /// Sum of the sizes of a repository's blobs, bytes.
    pub(crate) async fn used_by(&self, repo: &RepositoryName) -> Result<i64, StoreError> {
        const OF: &str = "SELECT CAST(COALESCE(SUM(b.size), 0) AS INT8) FROM links l JOIN blobs b ON b.digest = l.digest WHERE l.repo = $1";
        on!(self, pool, read => sqlx::query_scalar(OF).bind(repo.as_str()).fetch_one(pool).await)
            .map_err(sql("sum blobs"))
    }
}
