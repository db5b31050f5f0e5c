//! Which blob is where.

use super::{Meta, on};
use crate::digest::Digest;
use crate::error::{StoreError, sql};
use crate::names::RepositoryName;

/// States of a blob's row.
pub(super) const ARRIVING: i64 = 0;
pub(super) const LIVE: i64 = 1;
pub(super) const DYING: i64 = 2;

/// What a blob that was verified finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Nothing: bring the bytes, then say so.
    Bring,
    /// The same bytes.
    Here,
    /// The sweep is about to remove the same bytes: wait.
    Wait,
}

impl Meta {
    /// Size of a blob of a repository. A touch older than `stale` is renewed: who asks is about to rely on it.
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
        if touched < stale && !self.link(repo, &digest, now).await? {
            return Ok(None);
        }
        Ok(Some(size))
    }

    /// Puts a blob that is in some repository into this one, and touches it. `false` when it is nowhere.
    pub(crate) async fn link(
        &self,
        repo: &RepositoryName,
        digest: &str,
        now: i64,
    ) -> Result<bool, StoreError> {
        self.enter(repo, digest, now, LIVE).await
    }

    /// The bytes of a blob are in their place: it lives, in this repository. `false` when it was swept meanwhile.
    pub(crate) async fn arrived(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        now: i64,
    ) -> Result<bool, StoreError> {
        self.enter(repo, &digest.to_string(), now, ARRIVING).await
    }

    async fn enter(
        &self,
        repo: &RepositoryName,
        digest: &str,
        now: i64,
        from: i64,
    ) -> Result<bool, StoreError> {
        const OP: &str = "link a blob";
        const TOUCH: &str =
            "UPDATE blobs SET touched = $1, state = $3 WHERE digest = $2 AND (state = $3 OR state = $4)";
        const LINK: &str = "INSERT INTO links (repo, digest, touched) VALUES ($1, $2, $3) ON CONFLICT (repo, digest) DO UPDATE SET touched = $3";
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let found = sqlx::query(TOUCH).bind(now).bind(digest).bind(LIVE).bind(from).execute(&mut *tx).await.map_err(sql(OP))?;
            if found.rows_affected() != 1 {
                return Ok(false);
            }
            sqlx::query(super::manifests::REPOSITORY).bind(repo.as_str()).bind(now).execute(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query(LINK).bind(repo.as_str()).bind(digest).bind(now).execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))?;
            Ok(true)
        })
    }

    /// Is the blob in this repository?
    pub(crate) async fn has_link(&self, repo: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let found: Option<i64> = on!(self, pool, read => sqlx::query_scalar("SELECT touched FROM links WHERE repo = $1 AND digest = $2")
            .bind(repo.as_str()).bind(digest.to_string()).fetch_optional(pool).await)
        .map_err(sql("look for a blob"))?;
        Ok(found.is_some())
    }

    /// Takes a blob out of a repository. `false` when it was not there.
    pub(crate) async fn unlink(&self, repo: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let done = on!(self, pool, write => sqlx::query("DELETE FROM links WHERE repo = $1 AND digest = $2")
            .bind(repo.as_str()).bind(digest.to_string()).execute(pool).await.map(|d| d.rows_affected()))
        .map_err(sql("unlink a blob"))?;
        Ok(done == 1)
    }

    /// A verified blob is about to get its name.
    pub(crate) async fn arrive(&self, digest: &Digest, size: i64, now: i64) -> Result<Arrival, StoreError> {
        const PUT: &str = "INSERT INTO blobs (digest, size, state, touched) VALUES ($1, $2, $3, $4) ON CONFLICT (digest) DO UPDATE SET touched = $4 WHERE blobs.state <> $5 RETURNING state";
        // The row becomes durable with the one that says that the bytes are there.
        let state: Option<i64> = on!(self, pool, loose => sqlx::query_scalar(PUT)
            .bind(digest.to_string()).bind(size).bind(ARRIVING).bind(now).bind(DYING).fetch_optional(pool).await)
        .map_err(sql("announce a blob"))?;
        Ok(match state {
            Some(LIVE) => Arrival::Here,
            Some(_) => Arrival::Bring,
            None => Arrival::Wait,
        })
    }

    /// A blob that the storage has, found while the tables are made again.
    pub(crate) async fn found_blob(&self, digest: &Digest, size: i64, now: i64) -> Result<(), StoreError> {
        const PUT: &str = "INSERT INTO blobs (digest, size, state, touched) VALUES ($1, $2, $3, $4) ON CONFLICT (digest) DO UPDATE SET state = $3, touched = $4 WHERE blobs.state = $5";
        on!(self, pool, write => sqlx::query(PUT)
            .bind(digest.to_string()).bind(size).bind(LIVE).bind(now).bind(ARRIVING).execute(pool).await.map(drop))
        .map_err(sql("store a blob"))
    }

    /// Bytes of all blobs, and of those of one repository.
    pub(crate) async fn used(&self, repo: &RepositoryName) -> Result<(i64, i64), StoreError> {
        const ALL: &str = "SELECT CAST(COALESCE(SUM(size), 0) AS INT8) FROM blobs";
        const OF: &str = "SELECT CAST(COALESCE(SUM(b.size), 0) AS INT8) FROM links l JOIN blobs b ON b.digest = l.digest WHERE l.repo = $1";
        on!(self, pool, read => {
            let all: i64 = sqlx::query_scalar(ALL).fetch_one(pool).await.map_err(sql("sum blobs"))?;
            let own: i64 = sqlx::query_scalar(OF).bind(repo.as_str()).fetch_one(pool).await.map_err(sql("sum blobs"))?;
            Ok((all, own))
        })
    }
}
