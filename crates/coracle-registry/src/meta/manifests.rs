//! Rows of repositories, manifests and tags.

use super::blobs::LIVE;
use super::changes::NOTE;
use super::{ManifestRow, Meta, RepositoryRow, StatsRow, TagRow, on};
use crate::error::{StoreError, sql};
use crate::manifest::{Child, PushedManifest};
use coracle_oci::{Digest, RepositoryName, Tag};

/// Statement that creates a repository, or updates its time.
pub(super) const REPOSITORY: &str = "INSERT INTO repositories (name, created, updated) VALUES ($1, $2, $2) ON CONFLICT (name) DO UPDATE SET updated = $2";
const MANIFEST: &str = "INSERT INTO manifests (repo, digest, media_type, artifact_type, kind, annotations, size, total, layers, subject, pushed) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (repo, digest) DO UPDATE SET media_type = $3, pushed = $11";
const COLUMNS: &str = "SELECT digest, media_type, artifact_type, kind, annotations, size, total, layers, subject FROM manifests WHERE repo = $1";

/// Limit of a manifest's annotations in the tables, bytes, so that it fits into a list of referrers. A manifest with more is
/// listed without annotations.
const ANNOTATIONS_MAX: usize = 2 << 20;
/// The same limit as an SQL number.
const ANNOTATIONS_BOUND: i64 = 2 << 20;

/// Manifest to enter.
#[derive(Debug)]
pub(crate) struct NewManifest<'a> {
    pub(crate) repo: &'a RepositoryName,
    pub(crate) digest: &'a Digest,
    pub(crate) tags: &'a [Tag],
    pub(crate) size: i64,
    pub(crate) manifest: &'a PushedManifest,
}

/// Source of a manifest that is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Pushed by a client: the repository must have the dependencies.
    Pushed,
    /// Like `Pushed`, but manifests of an index may be missing.
    PushedSparse,
    /// Found in the storage: dependencies may be missing.
    Found,
}

/// Result of entering a manifest.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Put {
    Done,
    /// Dependencies are missing; no row was written.
    Missing(Vec<Digest>),
    /// Descriptors have a wrong size; no row was written.
    Sizes(Vec<WrongSize>),
}

/// Descriptor whose size differs from the size of the content.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WrongSize {
    pub(crate) digest: Digest,
    pub(crate) said: i64,
    pub(crate) actual: i64,
}

/// Dependencies of a manifest, compared with the repository.
#[derive(Default)]
struct Check {
    missing: Vec<Digest>,
    sizes: Vec<WrongSize>,
}

impl Check {
    fn child(&mut self, child: &Child, size: Option<i64>, needed: bool) {
        match size {
            None if needed && child.required => self.missing.push(child.digest),
            Some(actual) if actual != child.size => {
                self.sizes.push(WrongSize { digest: child.digest, said: child.size, actual });
            }
            _ => {}
        }
    }

    /// Reason to refuse the manifest. Manifests found in the storage were accepted before.
    fn refusal(self, entry: Entry) -> Option<Put> {
        match self {
            _ if entry == Entry::Found => None,
            Self { missing, .. } if !missing.is_empty() => Some(Put::Missing(missing)),
            Self { sizes, .. } if !sizes.is_empty() => Some(Put::Sizes(sizes)),
            _ => None,
        }
    }
}

impl Meta {
    /// Enters a manifest with its tags, if the repository has its dependencies. Also touches the dependencies, in the same
    /// transaction.
    pub(crate) async fn put_manifest(
        &self,
        new: &NewManifest<'_>,
        now: i64,
        entry: Entry,
    ) -> Result<Put, StoreError> {
        const OP: &str = "store a manifest";
        const TOUCH: &str = "UPDATE links SET touched = $1 WHERE repo = $2 AND digest = $3 AND EXISTS (SELECT 1 FROM blobs b WHERE b.digest = $3 AND b.state = $4) RETURNING (SELECT b.size FROM blobs b WHERE b.digest = $3)";
        const CHILD: &str = "UPDATE manifests SET pushed = $1 WHERE repo = $2 AND digest = $3 RETURNING size";
        const REF: &str = "INSERT INTO refs (repo, parent, child) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        const TAG: &str = "INSERT INTO tags (repo, tag, digest, pushed) VALUES ($1, $2, $3, $4) ON CONFLICT (repo, tag) DO UPDATE SET digest = $3, pushed = $4";
        let (repo, m, digest) = (new.repo.as_str(), new.manifest, new.digest.to_string());
        let annotations =
            serde_json::to_string(&m.annotations).ok().filter(|text| text.len() <= ANNOTATIONS_MAX);
        let annotations = annotations.unwrap_or_else(|| "{}".to_owned());
        let total = m.blobs.iter().chain(&m.manifests).fold(0i64, |sum, c| sum.saturating_add(c.size));
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let mut check = Check::default();
            for child in &m.blobs {
                let size: Option<i64> = sqlx::query_scalar(TOUCH).bind(now).bind(repo).bind(child.digest.to_string()).bind(LIVE)
                    .fetch_optional(&mut *tx).await.map_err(sql(OP))?;
                check.child(child, size, entry != Entry::Found);
            }
            for child in &m.manifests {
                let size: Option<i64> = sqlx::query_scalar(CHILD).bind(now).bind(repo).bind(child.digest.to_string())
                    .fetch_optional(&mut *tx).await.map_err(sql(OP))?;
                check.child(child, size, entry == Entry::Pushed);
            }
            if let Some(refused) = check.refusal(entry) {
                return Ok(refused);
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
                sqlx::query(NOTE).bind(repo).bind(tag.as_str()).execute(&mut *tx).await.map_err(sql(OP))?;
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

    /// Digest of a tag.
    pub(crate) async fn tag_digest(
        &self,
        repo: &RepositoryName,
        tag: &Tag,
    ) -> Result<Option<String>, StoreError> {
        on!(self, pool, read => sqlx::query_scalar("SELECT digest FROM tags WHERE repo = $1 AND tag = $2")
            .bind(repo.as_str()).bind(tag.as_str()).fetch_optional(pool).await)
        .map_err(sql("look for a tag"))
    }

    /// Enters a tag found in the storage. An existing tag is not changed.
    pub(crate) async fn insert_found_tag(
        &self,
        repo: &RepositoryName,
        tag: &Tag,
        digest: &Digest,
        now: i64,
    ) -> Result<(), StoreError> {
        const PUT: &str =
            "INSERT INTO tags (repo, tag, digest, pushed) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
        on!(self, pool, write => sqlx::query(PUT)
            .bind(repo.as_str()).bind(tag.as_str()).bind(digest.to_string()).bind(now).execute(pool).await.map(drop))
        .map_err(sql("store a tag"))
    }

    /// Removes a manifest and its tags, and notes their files. Returns the tags. `None` when the manifest did not exist.
    pub(crate) async fn remove_manifest(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        now: i64,
    ) -> Result<Option<Vec<String>>, StoreError> {
        const OP: &str = "remove a manifest";
        let (repo, digest) = (repo.as_str(), digest.to_string());
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let done = sqlx::query("DELETE FROM manifests WHERE repo = $1 AND digest = $2").bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            if done.rows_affected() == 0 {
                return Ok(None);
            }
            let tags: Vec<String> = sqlx::query_scalar("DELETE FROM tags WHERE repo = $1 AND digest = $2 RETURNING tag").bind(repo).bind(&digest).fetch_all(&mut *tx).await.map_err(sql(OP))?;
            sqlx::query("DELETE FROM refs WHERE repo = $1 AND parent = $2").bind(repo).bind(&digest).execute(&mut *tx).await.map_err(sql(OP))?;
            for reference in tags.iter().chain([&digest]) {
                sqlx::query(NOTE).bind(repo).bind(&reference[..]).execute(&mut *tx).await.map_err(sql(OP))?;
            }
            sqlx::query("UPDATE repositories SET updated = $1 WHERE name = $2").bind(now).bind(repo).execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))?;
            Ok(Some(tags))
        })
    }

    /// Removes a tag, and notes its file. Returns false when the tag did not exist.
    pub(crate) async fn remove_tag(&self, repo: &RepositoryName, tag: &Tag) -> Result<bool, StoreError> {
        const OP: &str = "remove a tag";
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let done = sqlx::query("DELETE FROM tags WHERE repo = $1 AND tag = $2").bind(repo.as_str()).bind(tag.as_str()).execute(&mut *tx).await.map_err(sql(OP))?;
            if done.rows_affected() == 0 {
                return Ok(false);
            }
            sqlx::query(NOTE).bind(repo.as_str()).bind(tag.as_str()).execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))?;
            Ok(true)
        })
    }

    /// Repository and digest of all manifests, after the given position.
    pub(crate) async fn manifest_names(
        &self,
        repo: &str,
        digest: &str,
        most: i64,
    ) -> Result<Vec<(String, String)>, StoreError> {
        const READ: &str = "SELECT repo, digest FROM manifests WHERE repo > $1 OR (repo = $1 AND digest > $2) ORDER BY repo, digest LIMIT $3";
        on!(self, pool, read => sqlx::query_as(READ).bind(repo).bind(digest).bind(most).fetch_all(pool).await)
            .map_err(sql("list manifests"))
    }

    /// Repository and name of all tags, after the given position.
    pub(crate) async fn tag_rows(
        &self,
        repo: &str,
        tag: &str,
        most: i64,
    ) -> Result<Vec<(String, String)>, StoreError> {
        const READ: &str = "SELECT repo, tag FROM tags WHERE repo > $1 OR (repo = $1 AND tag > $2) ORDER BY repo, tag LIMIT $3";
        on!(self, pool, read => sqlx::query_as(READ).bind(repo).bind(tag).bind(most).fetch_all(pool).await)
            .map_err(sql("list tags"))
    }

    /// True when the repository exists.
    pub(crate) async fn has_repository(&self, repo: &RepositoryName) -> Result<bool, StoreError> {
        let found: Option<i64> =
            on!(self, pool, read => sqlx::query_scalar("SELECT created FROM repositories WHERE name = $1")
            .bind(repo.as_str()).fetch_optional(pool).await)
            .map_err(sql("look for a repository"))?;
        Ok(found.is_some())
    }

    /// Names of tags after `after`, sorted case-insensitively as the specification demands.
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

    /// Names of repositories after `after` that have a manifest.
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

    /// Digests of the referrers of `subject` after `after`, with their size in a list. Filtered by artifact type if given.
    pub(crate) async fn referrer_sizes(
        &self,
        repo: &RepositoryName,
        subject: &Digest,
        artifact_type: Option<&str>,
        after: &str,
        most: i64,
    ) -> Result<Vec<(String, i64)>, StoreError> {
        const READ: &str = "SELECT digest, CAST(octet_length(media_type) + octet_length(artifact_type) + CASE WHEN octet_length(annotations) > $6 THEN 0 ELSE octet_length(annotations) END AS INT8) \
            FROM manifests WHERE repo = $1 AND subject = $2 AND digest > $3 AND (artifact_type = $4 OR $4 IS NULL) ORDER BY digest LIMIT $5";
        on!(self, pool, read => sqlx::query_as(READ)
            .bind(repo.as_str()).bind(subject.to_string()).bind(after).bind(artifact_type).bind(most)
            .bind(ANNOTATIONS_BOUND).fetch_all(pool).await)
        .map_err(sql("list referrers"))
    }

    /// Referrers of `subject` after `after` up to `end`. Filtered by artifact type if given.
    pub(crate) async fn referrers(
        &self,
        repo: &RepositoryName,
        subject: &Digest,
        artifact_type: Option<&str>,
        after: &str,
        end: &str,
    ) -> Result<Vec<ManifestRow>, StoreError> {
        // Rows written by earlier releases have annotations of any length.
        const READ: &str = "SELECT digest, media_type, artifact_type, kind, CASE WHEN octet_length(annotations) > $6 THEN '{}' ELSE annotations END AS annotations, size, total, layers, subject \
            FROM manifests WHERE repo = $1 AND subject = $2 AND digest > $3 AND digest <= $5 AND (artifact_type = $4 OR $4 IS NULL) ORDER BY digest";
        on!(self, pool, read => sqlx::query_as(READ)
            .bind(repo.as_str()).bind(subject.to_string()).bind(after).bind(artifact_type).bind(end)
            .bind(ANNOTATIONS_BOUND).fetch_all(pool).await)
        .map_err(sql("list referrers"))
    }

    /// One repository or all, with sums over the content.
    pub(crate) async fn repositories(&self, only: Option<&str>) -> Result<Vec<RepositoryRow>, StoreError> {
        const READ: &str = "SELECT r.name, r.created, r.updated, (SELECT COUNT(*) FROM tags t WHERE t.repo = r.name) AS tag_count, \
            (SELECT CAST(COALESCE(SUM(b.size), 0) AS INT8) FROM links l JOIN blobs b ON b.digest = l.digest WHERE l.repo = r.name) AS total, \
            (SELECT m.kind FROM manifests m WHERE m.repo = r.name ORDER BY m.pushed DESC, m.digest LIMIT 1) AS kind, \
            (SELECT m.artifact_type FROM manifests m WHERE m.repo = r.name ORDER BY m.pushed DESC, m.digest LIMIT 1) AS artifact_type \
            FROM repositories r WHERE (r.name = $1 OR $1 = '') AND EXISTS (SELECT 1 FROM manifests m WHERE m.repo = r.name) ORDER BY r.name";
        on!(self, pool, read => sqlx::query_as(READ).bind(only.unwrap_or_default()).fetch_all(pool).await)
            .map_err(sql("list repositories"))
    }

    /// One tag of a repository or all, with their manifests.
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
