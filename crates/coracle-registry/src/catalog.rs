//! `catalog.json`: the catalog of a bucket in the form that epoch reads, so that epoch can serve the bucket again. Coracle
//! never reads it.

use serde_json::{Map, Value, json};

use crate::error::StoreError;
use crate::http::time;
use crate::meta::{RepositoryRow, TagRow};
use crate::registry::Registry;
use coracle_oci::RepositoryName;

/// Key of the catalog in the bucket.
const CATALOG: &str = "catalog.json";

impl Registry {
    /// Writes the catalog of a bucket if it has changed. Idempotent; replicas write equal bytes.
    pub(crate) async fn write_catalog(&self) -> Result<(), StoreError> {
        if !self.storage.is_shared() {
            return Ok(());
        }
        let mut rows = Vec::new();
        for row in self.meta.repositories(None).await? {
            let Ok(repo) = row.name.parse::<RepositoryName>() else { continue };
            rows.push((row, self.meta.tags(&repo, None).await?));
        }
        let (catalog, known) = (catalog(&rows), self.storage.get(CATALOG).await?);
        match known.is_some_and(|known| *known == *catalog.as_bytes()) {
            true => Ok(()),
            false => self.storage.put(CATALOG, catalog.into()).await,
        }
    }
}

/// Catalog as JSON. Equal names give equal bytes. Pure.
fn catalog(rows: &[(RepositoryRow, Vec<TagRow>)]) -> String {
    let entry = |(row, tags): &(RepositoryRow, Vec<TagRow>)| {
        let tags: Map<String, Value> =
            tags.iter().map(|t| (t.tag.clone(), t.digest.clone().into())).collect();
        (row.name.clone(), json!({"tags": tags, "updatedAt": time(row.updated)}))
    };
    let repositories: Map<String, Value> = rows.iter().map(entry).collect();
    let updated = rows.iter().map(|(row, _)| row.updated).max().unwrap_or(0);
    json!({"repositories": repositories, "updatedAt": time(updated)}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catalog_has_the_form_of_epoch() {
        let repository = |name: &str, updated| RepositoryRow {
            name: name.to_owned(),
            created: 0,
            updated,
            tag_count: 1,
            total: 0,
            kind: None,
            artifact_type: None,
        };
        let tag = |tag: &str| TagRow {
            tag: tag.to_owned(),
            digest: format!("sha256:{tag}"),
            artifact_type: String::new(),
            kind: String::new(),
            total: 0,
            layers: 0,
            pushed: 0,
        };
        let rows = [
            (repository("vms/web", 2000), vec![tag("hibernate"), tag("latest")]),
            (repository("b", 1000), vec![]),
        ];
        let read: Value = serde_json::from_str(&catalog(&rows)).unwrap();
        let want = json!({
            "repositories": {
                "vms/web": {
                    "tags": {"hibernate": "sha256:hibernate", "latest": "sha256:latest"},
                    "updatedAt": "1970-01-01T00:00:02Z",
                },
                "b": {"tags": {}, "updatedAt": "1970-01-01T00:00:01Z"},
            },
            "updatedAt": "1970-01-01T00:00:02Z",
        });
        assert_eq!(read, want);
    }
}
