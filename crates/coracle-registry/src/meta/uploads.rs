//! Rows of uploads in progress. Commits are not synced: a crash of the process loses no row, a power failure may lose the last
//! ones.

use super::{Meta, UploadRow, on};
use crate::error::{StoreError, sql};
use crate::upload_id::UploadId;
use coracle_oci::RepositoryName;

impl Meta {
    pub(crate) async fn begin_upload(
        &self,
        id: &UploadId,
        repo: &RepositoryName,
        now: i64,
    ) -> Result<(), StoreError> {
        on!(self, pool, loose => sqlx::query("INSERT INTO uploads (id, repo, started, updated) VALUES ($1, $2, $3, $3)")
            .bind(id.as_str()).bind(repo.as_str()).bind(now).execute(pool).await.map(drop))
        .map_err(sql("begin an upload"))
    }

    /// Row of an upload.
    pub(crate) async fn upload(&self, id: &UploadId) -> Result<Option<UploadRow>, StoreError> {
        on!(self, pool, read => sqlx::query_as("SELECT id, repo, updated FROM uploads WHERE id = $1")
            .bind(id.as_str()).fetch_optional(pool).await)
        .map_err(sql("look for an upload"))
    }

    /// Updates the time of an upload. Returns false when the upload does not exist.
    pub(crate) async fn touch_upload(&self, id: &UploadId, now: i64) -> Result<bool, StoreError> {
        let done = on!(self, pool, loose => sqlx::query("UPDATE uploads SET updated = $1 WHERE id = $2")
            .bind(now).bind(id.as_str()).execute(pool).await.map(|d| d.rows_affected()))
        .map_err(sql("touch an upload"))?;
        Ok(done == 1)
    }

    /// Removes an upload that was not touched since `cutoff`. Returns false when it was touched.
    pub(crate) async fn expire_upload(&self, id: &UploadId, cutoff: i64) -> Result<bool, StoreError> {
        let done = on!(self, pool, loose => sqlx::query("DELETE FROM uploads WHERE id = $1 AND updated < $2")
            .bind(id.as_str()).bind(cutoff).execute(pool).await.map(|d| d.rows_affected()))
        .map_err(sql("expire an upload"))?;
        Ok(done == 1)
    }

    pub(crate) async fn end_upload(&self, id: &UploadId) -> Result<(), StoreError> {
        on!(self, pool, loose => sqlx::query("DELETE FROM uploads WHERE id = $1")
            .bind(id.as_str()).execute(pool).await.map(drop))
        .map_err(sql("end an upload"))
    }

    /// All uploads.
    pub(crate) async fn uploads(&self) -> Result<Vec<UploadRow>, StoreError> {
        on!(self, pool, read => sqlx::query_as("SELECT id, repo, updated FROM uploads ORDER BY id").fetch_all(pool).await)
            .map_err(sql("list uploads"))
    }
}
