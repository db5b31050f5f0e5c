//! Mark and sweep in the database.

use std::time::Duration;

use super::blobs::DYING;
use super::changes::NOTE;
use super::{Meta, on};
use crate::error::{StoreError, sql};
use coracle_oci::{Digest, RepositoryName};

/// Unreferenced blob to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Doomed {
    pub(crate) digest: String,
    pub(crate) size: i64,
}

super::rows::from_row! {
    Doomed { digest, size }
}

/// Number of rows per statement of a mark, and the pause after it for other writers.
const BATCH_ROWS: i64 = 1000;
const BATCH_PAUSE: Duration = Duration::from_millis(2);

/// Condition on a link: no manifest refers to its blob, and no request has touched it since `$1`.
const UNNAMED: &str =
    "touched < $1 AND NOT EXISTS (SELECT 1 FROM refs r WHERE r.repo = links.repo AND r.child = links.digest)";
/// Condition on a blob: it is in no repository, and no request has touched it since `$1`.
const NOWHERE: &str = "touched < $1 AND NOT EXISTS (SELECT 1 FROM links l WHERE l.digest = blobs.digest)";
/// Condition on a manifest: it has no tag, is in no index, refers to no existing subject, and was pushed before `$1`.
const UNTAGGED: &str = "pushed < $1 \
    AND NOT EXISTS (SELECT 1 FROM tags t WHERE t.repo = manifests.repo AND t.digest = manifests.digest) \
    AND NOT EXISTS (SELECT 1 FROM refs r WHERE r.repo = manifests.repo AND r.child = manifests.digest) \
    AND NOT EXISTS (SELECT 1 FROM manifests s WHERE s.repo = manifests.repo AND s.digest = manifests.subject)";

impl Meta {
    /// Blobs that a sweep with this cutoff would remove. Reads only.
    pub(crate) async fn would_free(&self, cutoff: i64) -> Result<Vec<Doomed>, StoreError> {
        const READ: &str = "SELECT b.digest, b.size FROM blobs b WHERE b.touched < $1 AND NOT EXISTS (SELECT 1 FROM links l WHERE l.digest = b.digest \
            AND (l.touched >= $1 OR EXISTS (SELECT 1 FROM refs r WHERE r.repo = l.repo AND r.child = l.digest))) ORDER BY b.digest";
        on!(self, pool, read => sqlx::query_as(READ).bind(cutoff).fetch_all(pool).await)
            .map_err(sql("look for garbage"))
    }

    /// Marks: unlinks blobs without references, and dooms those in no repository. Returns all doomed blobs, also those of an
    /// earlier sweep. In SQLite, which has one writer, each batch of rows is a separate statement, which runs only if it
    /// changes a row: pushes never wait for the whole scan.
    pub(crate) async fn mark_garbage(&self, cutoff: i64) -> Result<Vec<Doomed>, StoreError> {
        const OP: &str = "mark garbage";
        let unlink = || sqlx::AssertSqlSafe(format!("DELETE FROM links WHERE {UNNAMED}"));
        let doom =
            || sqlx::AssertSqlSafe(format!("UPDATE blobs SET state = $2 WHERE state <> $2 AND {NOWHERE}"));
        match self {
            Self::Sqlite { .. } => {
                let unnamed = format!("{UNNAMED} AND $2 = $2");
                self.in_batches("links", &unnamed, "DELETE FROM links", cutoff).await?;
                let nowhere = format!("state <> $2 AND {NOWHERE}");
                self.in_batches("blobs", &nowhere, "UPDATE blobs SET state = $2", cutoff).await?;
            }
            Self::Postgres(pool, _) => {
                sqlx::query(unlink()).bind(cutoff).execute(pool).await.map_err(sql(OP))?;
                sqlx::query(doom()).bind(cutoff).bind(DYING).execute(pool).await.map_err(sql(OP))?;
            }
        }
        on!(self, pool, read => {
            sqlx::query_as("SELECT digest, size FROM blobs WHERE state = $1 ORDER BY digest").bind(DYING).fetch_all(pool).await.map_err(sql(OP))
        })
    }

    /// Runs `change` on the rows of an SQLite table that satisfy `condition`, batch by batch. Reads each batch first, which
    /// blocks no writer.
    async fn in_batches(
        &self,
        table: &str,
        condition: &str,
        change: &str,
        cutoff: i64,
    ) -> Result<(), StoreError> {
        const OP: &str = "mark garbage";
        let Self::Sqlite { write, read, .. } = self else { return Ok(()) };
        let end = format!(
            "SELECT MAX(rowid) FROM (SELECT rowid FROM {table} WHERE rowid > $1 ORDER BY rowid LIMIT $2)"
        );
        let batch = format!("{condition} AND rowid > $3 AND rowid <= $4");
        let look = format!("SELECT EXISTS (SELECT 1 FROM {table} WHERE {batch})");
        let change = format!("{change} WHERE {batch}");
        let mut last = i64::MIN;
        loop {
            let to: Option<i64> = sqlx::query_scalar(sqlx::AssertSqlSafe(end.clone()))
                .bind(last)
                .bind(BATCH_ROWS)
                .fetch_one(read)
                .await
                .map_err(sql(OP))?;
            let Some(to) = to else { return Ok(()) };
            let found: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(look.clone()))
                .bind(cutoff)
                .bind(DYING)
                .bind(last)
                .bind(to)
                .fetch_one(read)
                .await
                .map_err(sql(OP))?;
            if found != 0 {
                sqlx::query(sqlx::AssertSqlSafe(change.clone()))
                    .bind(cutoff)
                    .bind(DYING)
                    .bind(last)
                    .bind(to)
                    .execute(write)
                    .await
                    .map_err(sql(OP))?;
                tokio::time::sleep(BATCH_PAUSE).await;
            }
            last = to;
        }
    }

    /// Removes the row of a doomed blob after its bytes were removed.
    pub(crate) async fn delete_doomed(&self, digest: &str) -> Result<(), StoreError> {
        on!(self, pool, write => sqlx::query("DELETE FROM blobs WHERE digest = $1 AND state = $2")
            .bind(digest).bind(DYING).execute(pool).await.map(drop))
        .map_err(sql("forget a blob"))
    }

    /// Repository and digest of manifests that have no tag, are in no index, refer to no existing subject, and were pushed
    /// before `cutoff`.
    pub(crate) async fn untagged_manifests(&self, cutoff: i64) -> Result<Vec<(String, String)>, StoreError> {
        let read = || sqlx::AssertSqlSafe(format!("SELECT repo, digest FROM manifests WHERE {UNTAGGED}"));
        on!(self, pool, read => sqlx::query_as(read()).bind(cutoff).fetch_all(pool).await)
            .map_err(sql("look for garbage"))
    }

    /// Removes a manifest if the conditions of `untagged_manifests` still hold, and notes its file. Returns false if they do not.
    pub(crate) async fn remove_untagged(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        cutoff: i64,
        now: i64,
    ) -> Result<bool, StoreError> {
        const OP: &str = "remove a manifest";
        let remove = || {
            sqlx::AssertSqlSafe(format!(
                "DELETE FROM manifests WHERE {UNTAGGED} AND repo = $2 AND digest = $3"
            ))
        };
        let (repo, digest) = (repo.as_str(), digest.to_string());
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let done = sqlx::query(remove()).bind(cutoff).bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            if done.rows_affected() == 0 {
                return Ok(false);
            }
            sqlx::query("DELETE FROM refs WHERE repo = $1 AND parent = $2").bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query(NOTE).bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query("UPDATE repositories SET updated = $1 WHERE name = $2").bind(now).bind(repo).execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))?;
            Ok(true)
        })
    }

    /// Removes repositories without content.
    pub(crate) async fn forget_empty(&self, cutoff: i64) -> Result<(), StoreError> {
        const DROP: &str = "DELETE FROM repositories WHERE updated < $1 AND NOT EXISTS (SELECT 1 FROM manifests m WHERE m.repo = name) AND NOT EXISTS (SELECT 1 FROM links l WHERE l.repo = name)";
        on!(self, pool, write => sqlx::query(DROP).bind(cutoff).execute(pool).await.map(drop))
            .map_err(sql("forget repositories"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_oci::media_types::OCI_INDEX;

    use crate::manifest;
    use crate::meta::{Arrival, Entry, MetaAt, NewManifest};

    /// Stops the mark in its third batch: earlier batches are committed, so other writers can run between batches.
    #[tokio::test]
    async fn mark_commits_batch_by_batch() {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&MetaAt::Sqlite(dir.path().join("registry.db"))).await.unwrap();
        let Meta::Sqlite { write, .. } = &meta else { panic!("it is SQLite") };
        let run = async |statement: String| {
            sqlx::query(sqlx::AssertSqlSafe(statement)).execute(write).await.unwrap();
        };
        let rows = BATCH_ROWS * 3;
        let numbers =
            format!("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})");
        run(format!("{numbers} INSERT INTO links SELECT 'a', 'sha256:' || i, 1 FROM n")).await;
        run(format!("{numbers} INSERT INTO blobs SELECT 'sha256:' || i, 1, 1, 1 FROM n")).await;
        let stop = format!(
            "CREATE TRIGGER stop BEFORE DELETE ON links WHEN old.digest = 'sha256:{rows}' BEGIN SELECT RAISE(ABORT, 'stop'); END"
        );
        run(stop).await;
        assert!(meta.mark_garbage(10).await.is_err());
        let left: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM links").fetch_one(write).await.unwrap();
        assert_eq!(left, BATCH_ROWS, "the last batch alone is rolled back");
        run("DROP TRIGGER stop".to_owned()).await;
        assert_eq!(meta.mark_garbage(10).await.unwrap().len(), usize::try_from(rows).unwrap());
        let digest = Digest::of(b"new");
        assert_eq!(meta.announce(&digest, 3, 20, None).await.unwrap(), Arrival::New);
    }

    /// After the sweep listed the manifest, a push tags it, or pushes an index that contains it.
    #[tokio::test]
    async fn listed_manifest_that_is_in_use_again_stays() {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&MetaAt::Sqlite(dir.path().join("registry.db"))).await.unwrap();
        let repo = "a".parse().unwrap();
        let parsed = manifest::parse(br#"{"schemaVersion": 2, "manifests": []}"#, Some(OCI_INDEX)).unwrap();
        let put = async |name: &[u8], tags: &[coracle_oci::Tag], now| {
            let digest = Digest::of(name);
            let new = NewManifest { repo: &repo, digest: &digest, tags, size: 1, manifest: &parsed };
            meta.put_manifest(&new, now, Entry::Pushed).await.unwrap();
            digest
        };
        let (tagged, young, old) =
            (put(b"tagged", &[], 1).await, put(b"young", &[], 1).await, put(b"old", &[], 1).await);
        assert_eq!(meta.untagged_manifests(10).await.unwrap().len(), 3);
        put(b"tagged", &["latest".parse().unwrap()], 2).await;
        put(b"young", &[], 20).await;
        for (digest, gone) in [(&tagged, false), (&young, false), (&old, true), (&old, false)] {
            assert_eq!(meta.remove_untagged(&repo, digest, 10, 30).await.unwrap(), gone, "{digest}");
        }
        assert_eq!(meta.changes().await.unwrap().len(), 2, "of the tag and of the file that is to go");
    }
}
