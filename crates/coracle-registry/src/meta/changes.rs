//! Notes of files that must follow their rows, and the lock of a repository over all replicas.

use sqlx::{Postgres, Transaction};

use super::{Meta, on};
use crate::error::{StoreError, sql};
use coracle_oci::RepositoryName;

/// Statement that notes that the file of a tag or digest must follow its row. Part of the transaction that changes the row.
pub(super) const NOTE: &str =
    "INSERT INTO file_changes (repo, reference) VALUES ($1, $2) ON CONFLICT DO NOTHING";

/// Tag or digest whose file may differ from its row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) repo: String,
    pub(crate) reference: String,
}

super::rows::from_row! {
    Change { repo, reference }
}

/// Lock of a repository, held until dropped. When a process dies, its connection ends and releases the lock.
pub(crate) struct Lock(
    #[expect(dead_code, reason = "its end is its use")] Option<Transaction<'static, Postgres>>,
);

impl Meta {
    /// Waits until no other replica changes manifests of the repository, and locks it.
    pub(crate) async fn lock(&self, repo: &RepositoryName) -> Result<Lock, StoreError> {
        const OP: &str = "lock a repository";
        let Self::Postgres(_, locks) = self else { return Ok(Lock(None)) };
        let mut tx = locks.begin().await.map_err(sql(OP))?;
        sqlx::query("SET LOCAL lock_timeout = '30s'").execute(&mut *tx).await.map_err(sql(OP))?;
        sqlx::query("SELECT pg_advisory_xact_lock(2019, hashtext($1))")
            .bind(repo.as_str())
            .execute(&mut *tx)
            .await
            .map_err(sql(OP))?;
        Ok(Lock(Some(tx)))
    }

    /// All notes.
    pub(crate) async fn changes(&self) -> Result<Vec<Change>, StoreError> {
        on!(self, pool, read => sqlx::query_as("SELECT repo, reference FROM file_changes ORDER BY repo, reference").fetch_all(pool).await)
            .map_err(sql("list changes"))
    }

    pub(crate) async fn has_change(
        &self,
        repo: &RepositoryName,
        reference: &str,
    ) -> Result<bool, StoreError> {
        let found: Option<String> =
            on!(self, pool, read => sqlx::query_scalar("SELECT repo FROM file_changes WHERE repo = $1 AND reference = $2")
                .bind(repo.as_str()).bind(reference).fetch_optional(pool).await)
            .map_err(sql("look for a change"))?;
        Ok(found.is_some())
    }

    /// Removes a note. If a power failure restores the note, the change is only checked once more.
    pub(crate) async fn end_change(&self, repo: &RepositoryName, reference: &str) -> Result<(), StoreError> {
        on!(self, pool, loose => sqlx::query("DELETE FROM file_changes WHERE repo = $1 AND reference = $2")
            .bind(repo.as_str()).bind(reference).execute(pool).await.map(drop))
        .map_err(sql("end a change"))
    }
}
