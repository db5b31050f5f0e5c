//! Repositories, manifests and tags.

use super::blobs::LIVE;
use super::{ManifestRow, Meta, RepositoryRow, StatsRow, TagRow, on};
use crate::digest::Digest;
use crate::error::{StoreError, sql};
use crate::manifest::Manifest;
use crate::names::{RepositoryName, Tag};

/// Makes a repository, or notes that it changed.
pub(super) const REPOSITORY: &str = "INSERT INTO repositories (name, created, updated) VALUES ($1, $2, $2) ON CONFLICT (name) DO UPDATE SET updated = $2";
const MANIFEST: &str = "INSERT INTO manifests (repo, digest, media_type, artifact_type, kind, annotations, size, total, layers, subject, pushed) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (repo, digest) DO UPDATE SET media_type = $3, pushed = $11";
const COLUMNS: &str = "SELECT digest, media_type, artifact_type, kind, annotations, size, total, layers, subject FROM manifests WHERE repo = $1";

/// A manifest on its way into the tables.
#[derive(Debug)]
pub(crate) struct NewManifest<'a> {
    pub(crate) repo: &'a RepositoryName,
    pub(crate) digest: &'a Digest,
    pub(crate) tags: &'a [Tag],
    pub(crate) size: i64,
    pub(crate) manifest: &'a Manifest,
}

/// How it went.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Put {
    Done,
    /// These are not in the repository; nothing was written.
    Missing(Vec<Digest>),
}

impl Meta {
    /// Enters a manifest with its tags, if everything that it needs is in the repository. One transaction; what it
    /// needs is touched in it.
    pub(crate) async fn put_manifest(
        &self,
        new: &NewManifest<'_>,
        now: i64,
        lenient: bool,
    ) -> Result<Put, StoreError> {
        const OP: &str = "store a manifest";
        const TOUCH: &str = "UPDATE links SET touched = $1 WHERE repo = $2 AND digest = $3 AND EXISTS (SELECT 1 FROM blobs b WHERE b.digest = $3 AND b.state = $4)";
        const CHILD: &str = "UPDATE manifests SET pushed = $1 WHERE repo = $2 AND digest = $3";
        const REF: &str = "INSERT INTO refs (repo, parent, child) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        const TAG: &str = "INSERT INTO tags (repo, tag, digest, pushed) VALUES ($1, $2, $3, $4) ON CONFLICT (repo, tag) DO UPDATE SET digest = $3, pushed = $4";
        let (repo, m, digest) = (new.repo.as_str(), new.manifest, new.digest.to_string());
        let annotations = serde_json::to_string(&m.annotations).unwrap_or_else(|_| "{}".to_owned());
        let total = m.blobs.iter().chain(&m.manifests).fold(0i64, |sum, c| sum.saturating_add(c.size));
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let mut missing = Vec::new();
            for child in &m.blobs {
                let done = sqlx::query(TOUCH).bind(now).bind(repo).bind(child.digest.to_string()).bind(LIVE)
                    .execute(&mut *tx).await.map_err(sql(OP))?;
                if done.rows_affected() == 0 && child.required && !lenient {
                    missing.push(child.digest.clone());
                }
            }
            for child in &m.manifests {
                let done = sqlx::query(CHILD).bind(now).bind(repo).bind(child.digest.to_string())
                    .execute(&mut *tx).await.map_err(sql(OP))?;
                if done.rows_affected() == 0 && child.required && !lenient {
                    missing.push(child.digest.clone());
                }
            }
            if !missing.is_empty() {
                return Ok(Put::Missing(missing));
            }
            sqlx::query(REPOSITORY).bind(repo).bind(now).execute(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query(MANIFEST)
                .bind(repo).bind(&digest).bind(&m.media_type).bind(&m.artifact_type).bind(m.kind.as_str())
                .bind(&annotations).bind(new.size).bind(total).bind(m.layers)
                .bind(m.subject.as_ref().map(ToString::to_string)).bind(now)
                .execute(&mut *tx).await.map_err(sql(OP))?;
            for child in m.blobs.iter().chain(&m.manifests) {
                sqlx::query(REF).bind(repo).bind(&digest).bind(child.digest.to_string())
                    .execute(&mut *tx).await.map_err(sql(OP))?;
            }
            for tag in new.tags {
                sqlx::query(TAG).bind(repo).bind(tag.as_str()).bind(&digest).bind(now)
                    .execute(&mut *tx).await.map_err(sql(OP))?;
            }
            tx.commit().await.map_err(sql(OP))?;
            Ok(Put::Done)
        })
    }

    pub(crate) async fn manifest(
        &self,
        repo: &RepositoryName,
        digest: &str,
    ) -> Result<Option<ManifestRow>, StoreError> {
        let read = || sqlx::AssertSqlSafe(format!("{COLUMNS} AND digest = $2"));
        on!(self, pool, read => sqlx::query_as(read()).bind(repo.as_str()).bind(digest).fetch_optional(pool).await)
            .map_err(sql("look for a manifest"))
    }

    /// Digest behind a tag.
    pub(crate) async fn tagged(
        &self,
        repo: &RepositoryName,
        tag: &Tag,
    ) -> Result<Option<String>, StoreError> {
        on!(self, pool, read => sqlx::query_scalar("SELECT digest FROM tags WHERE repo = $1 AND tag = $2")
            .bind(repo.as_str()).bind(tag.as_str()).fetch_optional(pool).await)
        .map_err(sql("look for a tag"))
    }

    /// Tags of a manifest.
    pub(crate) async fn tags_of(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
    ) -> Result<Vec<String>, StoreError> {
        on!(self, pool, read => sqlx::query_scalar("SELECT tag FROM tags WHERE repo = $1 AND digest = $2")
            .bind(repo.as_str()).bind(digest.to_string()).fetch_all(pool).await)
        .map_err(sql("list tags"))
    }

    /// Removes a manifest with its tags. `false` when there was none.
    pub(crate) async fn remove_manifest(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        now: i64,
    ) -> Result<bool, StoreError> {
        const OP: &str = "remove a manifest";
        let (repo, digest) = (repo.as_str(), digest.to_string());
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            sqlx::query("DELETE FROM tags WHERE repo = $1 AND digest = $2").bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query("DELETE FROM refs WHERE repo = $1 AND parent = $2").bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            let done = sqlx::query("DELETE FROM manifests WHERE repo = $1 AND digest = $2").bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query("UPDATE repositories SET updated = $1 WHERE name = $2").bind(now).bind(repo).execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))?;
            Ok(done.rows_affected() == 1)
        })
    }

    /// `false` when there was none.
    pub(crate) async fn remove_tag(&self, repo: &RepositoryName, tag: &Tag) -> Result<bool, StoreError> {
        let done = on!(self, pool, write => sqlx::query("DELETE FROM tags WHERE repo = $1 AND tag = $2")
            .bind(repo.as_str()).bind(tag.as_str()).execute(pool).await.map(|d| d.rows_affected()))
        .map_err(sql("remove a tag"))?;
        Ok(done == 1)
    }

    /// Is there anything by this name?
    pub(crate) async fn knows(&self, repo: &RepositoryName) -> Result<bool, StoreError> {
        let found: Option<i64> =
            on!(self, pool, read => sqlx::query_scalar("SELECT created FROM repositories WHERE name = $1")
            .bind(repo.as_str()).fetch_optional(pool).await)
            .map_err(sql("look for a repository"))?;
        Ok(found.is_some())
    }

    /// Names of tags behind `after`, in the order that the specification wants: without regard to case.
    pub(crate) async fn tag_names(
        &self,
        repo: &RepositoryName,
        after: Option<&str>,
        most: i64,
    ) -> Result<Vec<String>, StoreError> {
        const READ: &str = "SELECT tag FROM tags WHERE repo = $1 AND (lower(tag) > lower($2) OR (lower(tag) = lower($2) AND tag > $2)) ORDER BY lower(tag), tag LIMIT $3";
        on!(self, pool, read => sqlx::query_scalar(READ)
            .bind(repo.as_str()).bind(after.unwrap_or_default()).bind(most).fetch_all(pool).await)
        .map_err(sql("list tags"))
    }

    /// Names of repositories behind `after` that have a manifest.
    pub(crate) async fn repository_names(
        &self,
        after: Option<&str>,
        most: i64,
    ) -> Result<Vec<String>, StoreError> {
        const READ: &str = "SELECT name FROM repositories r WHERE name > $1 AND EXISTS (SELECT 1 FROM manifests m WHERE m.repo = r.name) ORDER BY name LIMIT $2";
        on!(self, pool, read => sqlx::query_scalar(READ)
            .bind(after.unwrap_or_default()).bind(most).fetch_all(pool).await)
        .map_err(sql("list repositories"))
    }

    /// Manifests that name `subject`.
    pub(crate) async fn referrers(
        &self,
        repo: &RepositoryName,
        subject: &Digest,
    ) -> Result<Vec<ManifestRow>, StoreError> {
        let read = || sqlx::AssertSqlSafe(format!("{COLUMNS} AND subject = $2 ORDER BY digest"));
        on!(self, pool, read => sqlx::query_as(read()).bind(repo.as_str()).bind(subject.to_string()).fetch_all(pool).await)
            .map_err(sql("list referrers"))
    }

    /// Repositories with their sums; one of them, or all.
    pub(crate) async fn repositories(&self, only: Option<&str>) -> Result<Vec<RepositoryRow>, StoreError> {
        const READ: &str = "SELECT r.name, r.created, r.updated, (SELECT COUNT(*) FROM tags t WHERE t.repo = r.name) AS tag_count, \
            (SELECT CAST(COALESCE(SUM(b.size), 0) AS INT8) FROM links l JOIN blobs b ON b.digest = l.digest WHERE l.repo = r.name) AS total, \
            (SELECT m.kind FROM manifests m WHERE m.repo = r.name ORDER BY m.pushed DESC, m.digest LIMIT 1) AS kind, \
            (SELECT m.artifact_type FROM manifests m WHERE m.repo = r.name ORDER BY m.pushed DESC, m.digest LIMIT 1) AS artifact_type \
            FROM repositories r WHERE (r.name = $1 OR $1 = '') AND EXISTS (SELECT 1 FROM manifests m WHERE m.repo = r.name) ORDER BY r.name";
        on!(self, pool, read => sqlx::query_as(READ).bind(only.unwrap_or_default()).fetch_all(pool).await)
            .map_err(sql("list repositories"))
    }

    /// Tags with what they name; one of them, or all.
    pub(crate) async fn tags(
        &self,
        repo: &RepositoryName,
        only: Option<&Tag>,
    ) -> Result<Vec<TagRow>, StoreError> {
        const READ: &str = "SELECT t.tag, t.digest, m.artifact_type, m.kind, m.total, m.layers, t.pushed FROM tags t JOIN manifests m ON m.repo = t.repo AND m.digest = t.digest WHERE t.repo = $1 AND (t.tag = $2 OR $2 = '') ORDER BY t.tag";
        on!(self, pool, read => sqlx::query_as(READ)
            .bind(repo.as_str()).bind(only.map_or("", Tag::as_str)).fetch_all(pool).await)
        .map_err(sql("list tags"))
    }

    pub(crate) async fn stats(&self) -> Result<StatsRow, StoreError> {
        const READ: &str = "SELECT (SELECT COUNT(DISTINCT repo) FROM manifests) AS repositories, (SELECT COUNT(*) FROM tags) AS tags, \
            (SELECT COUNT(*) FROM blobs WHERE state = 1) AS blobs, (SELECT CAST(COALESCE(SUM(size), 0) AS INT8) FROM blobs WHERE state = 1) AS bytes";
        on!(self, pool, read => sqlx::query_as(READ).fetch_one(pool).await).map_err(sql("sum everything"))
    }
}
