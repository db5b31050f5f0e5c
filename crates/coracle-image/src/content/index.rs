//! `index.json`: names of manifests. The list itself is pure; functions that read and write the file are at the end.

use std::{collections::BTreeMap, io, path::Path};

use serde::{Deserialize, Serialize};

use super::layout::Layout;
use crate::ImageError;
use coracle_oci::{Digest, Reference};

const NAME: &str = "org.opencontainers.image.ref.name";
/// Annotation: digest of the multi-platform index through which the manifest was found. That index itself is not stored.
const INDEX: &str = "dev.coracle.image.index";
/// Annotation of names that were given on this host.
const LOCAL: &str = "dev.coracle.image.local";

/// Manifest and its name, if it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size_bytes: u64,
    pub(crate) reference: Option<Reference>,
    pub(crate) index: Option<Digest>,
    pub(crate) local: bool,
}

/// All entries of `index.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) entries: Vec<Entry>,
}

impl Index {
    /// Entry of a reference. For a pinned reference also an entry of the same repository with that digest.
    pub(crate) fn find(&self, reference: &Reference) -> Option<&Entry> {
        let own = self.entries.iter().find(|e| e.reference.as_ref() == Some(reference));
        own.or_else(|| {
            let digest = reference.digest()?;
            let same = |r: &Reference| {
                r.registry() == reference.registry() && r.repository() == reference.repository()
            };
            let named = |e: &&Entry| e.reference.as_ref().is_some_and(same);
            self.entries.iter().filter(named).find(|e| e.digest == *digest || e.index == Some(*digest))
        })
    }

    pub(crate) fn by_digest(&self, digest: &Digest) -> Option<&Entry> {
        self.entries.iter().find(|e| e.digest == *digest)
    }

    pub(crate) fn references(&self, digest: &Digest) -> Vec<Reference> {
        let mut all: Vec<_> =
            self.entries.iter().filter(|e| e.digest == *digest).filter_map(|e| e.reference.clone()).collect();
        all.sort();
        all
    }

    /// Adds an entry and removes its name from other entries. A manifest that loses its only name stays as an unnamed entry.
    pub(crate) fn put(&mut self, entry: Entry) {
        match &entry.reference {
            Some(reference) => drop(self.untag(reference)),
            None if self.by_digest(&entry.digest).is_some() => return,
            None => {}
        }
        self.entries.retain(|e| e.digest != entry.digest || e.reference.is_some());
        self.entries.push(entry);
        self.entries.sort_by(|a, b| (&a.reference, &a.digest).cmp(&(&b.reference, &b.digest)));
    }

    /// Removes images with all of their names. False when none of them was present.
    pub(crate) fn remove(&mut self, digests: &[Digest]) -> bool {
        let before = self.entries.len();
        self.entries.retain(|e| !digests.contains(&e.digest));
        self.entries.len() != before
    }

    /// Removes a name. False when no entry has it.
    pub(crate) fn untag(&mut self, reference: &Reference) -> bool {
        let Some(place) = self.entries.iter().position(|e| e.reference.as_ref() == Some(reference)) else {
            return false;
        };
        let entry = self.entries.remove(place);
        if self.by_digest(&entry.digest).is_none() {
            self.entries.push(Entry { reference: None, index: None, ..entry });
        }
        true
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    schema_version: u32,
    media_type: Option<String>,
    manifests: Vec<Descriptor>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: Digest,
    size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl From<&Entry> for Descriptor {
    fn from(entry: &Entry) -> Self {
        let name = entry.reference.as_ref().map(|r| (NAME.to_owned(), r.to_string()));
        let index = entry.index.map(|d| (INDEX.to_owned(), d.to_string()));
        let local = entry.local.then(|| (LOCAL.to_owned(), "true".to_owned()));
        let annotations = name.into_iter().chain(index).chain(local).collect();
        Self {
            media_type: entry.media_type.clone(),
            digest: entry.digest,
            size: entry.size_bytes,
            annotations,
        }
    }
}

impl TryFrom<Descriptor> for Entry {
    type Error = String;

    fn try_from(d: Descriptor) -> Result<Self, String> {
        let reference = d
            .annotations
            .get(NAME)
            .map(|n| n.parse())
            .transpose()
            .map_err(|e: coracle_oci::OciError| e.to_string())?;
        let index = d
            .annotations
            .get(INDEX)
            .map(|n| n.parse())
            .transpose()
            .map_err(|e: coracle_oci::InvalidDigest| e.to_string())?;
        let local = d.annotations.contains_key(LOCAL);
        Ok(Self { media_type: d.media_type, digest: d.digest, size_bytes: d.size, reference, index, local })
    }
}

/// Reads the index. Empty when the file does not exist.
pub(crate) fn load(path: &Path) -> Result<Index, ImageError> {
    let corrupt = |reason| ImageError::Corrupt { path: path.to_owned(), reason };
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Index::default()),
        Err(e) => return Err(ImageError::io("read", path, e)),
    };
    let file: File = serde_json::from_slice(&bytes).map_err(|e| corrupt(e.to_string()))?;
    let entries =
        file.manifests.into_iter().map(Entry::try_from).collect::<Result<_, _>>().map_err(corrupt)?;
    Ok(Index { entries })
}

/// Replaces the index.
pub(crate) fn save(layout: &Layout, index: &Index) -> Result<(), ImageError> {
    let manifests = index.entries.iter().map(Descriptor::from).collect();
    let media_type = Some(coracle_oci::media_types::OCI_INDEX.to_owned());
    let file = File { schema_version: 2, media_type, manifests };
    let path = layout.index();
    let bytes = serde_json::to_vec(&file).map_err(|e| ImageError::io("encode", &path, e.into()))?;
    layout.replace(&path, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: Option<&str>, content: &[u8]) -> Entry {
        Entry {
            media_type: String::new(),
            digest: Digest::of(content),
            size_bytes: 1,
            reference: name.map(|n| n.parse().unwrap()),
            index: None,
            local: false,
        }
    }

    #[test]
    fn put_moves_a_name_and_keeps_the_manifest() {
        let mut index = Index::default();
        index.put(entry(Some("a:1"), b"x"));
        index.put(entry(Some("a:2"), b"x"));
        index.put(entry(Some("a:1"), b"y"));
        let (a1, a2): (Reference, Reference) = ("a:1".parse().unwrap(), "a:2".parse().unwrap());
        assert_eq!(index.find(&a1).unwrap().digest, Digest::of(b"y"));
        assert_eq!(index.references(&Digest::of(b"x")), std::slice::from_ref(&a2));
        assert!(index.untag(&a2));
        assert!(!index.untag(&a2));
        assert_eq!(index.references(&Digest::of(b"x")), []);
        assert!(index.by_digest(&Digest::of(b"x")).is_some(), "the image stays without a name");
        index.put(entry(Some("a:3"), b"x"));
        assert_eq!(index.entries.len(), 2, "a name replaces the nameless entry");
        index.put(entry(None, b"x"));
        assert_eq!(index.entries.len(), 2);
        assert!(index.remove(&[Digest::of(b"x")]) && !index.remove(&[Digest::of(b"x")]));
        assert_eq!(index.entries.len(), 1, "only the other one is left");
    }

    #[test]
    fn pinned_reference_finds_its_repository() {
        let mut index = Index::default();
        index.put(Entry { index: Some(Digest::of(b"list")), ..entry(Some("a:1"), b"x") });
        let a: Reference = "a".parse().unwrap();
        let b: Reference = "b".parse().unwrap();
        for (reference, want) in [
            (a.with_digest(Digest::of(b"x")), true),
            (a.with_digest(Digest::of(b"list")), true),
            (a.with_digest(Digest::of(b"z")), false),
            (b.with_digest(Digest::of(b"x")), false),
        ] {
            assert_eq!(index.find(&reference).is_some(), want, "{reference}");
        }
    }
}
