//! Disk images of a node: raw, read-only, shared by all disk image VMs whose disks are overlays on them.
//!
//! ```text
//! <state>/images/disks/<digest>.raw    the disk; <digest> is that of the file or manifest that it came from
//! <state>/images/disks/<digest>.parts  digests of its parts, if it came from a registry
//! <state>/images/disks/<digest>.json   its names; written last
//! ```

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use coracle_oci::{Digest, Reference};
use serde::{Deserialize, Serialize};

use coracle_files as files;

use crate::local::{DiskPart, LocalParts};

/// Version of the JSON format. A newer version is refused.
const SCHEMA: u32 = 1;

/// Disk image of the node, stored as `<digest>.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskImage {
    schema: u32,
    /// Digest of the file or manifest that the image came from.
    pub digest: String,
    /// Names of the image on this node.
    pub names: Vec<String>,
    /// Size of the disk, bytes.
    pub disk_bytes: u64,
    /// Time at which the image was added, Unix milliseconds.
    pub created_ms: i64,
}

/// Disk images of a node.
#[derive(Debug)]
pub struct DiskImages {
    dir: PathBuf,
    /// Lock held while names change.
    names: Mutex<()>,
}

impl DiskImages {
    /// Opens the directory and removes incomplete images of a crash. Blocking.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn open(state_dir: &Path) -> io::Result<Self> {
        let dir = state_dir.join("images").join("disks");
        if let Ok(entries) = std::fs::read_dir(&dir) {
            for entry in entries {
                let path = entry?.path();
                let is = |end: &str| path.as_os_str().as_encoded_bytes().ends_with(end.as_bytes());
                // An interrupted pull is resumed from its partial file. An interrupted local copy starts again.
                let cut_off = is(".raw.partial") || is(".tmp");
                let of_disk = is(".raw") || is(".parts");
                if cut_off || (of_disk && !path.with_extension("json").exists()) {
                    files::remove_file(&path)?;
                }
            }
        }
        Ok(Self { dir, names: Mutex::new(()) })
    }

    /// Path of the disk with this digest. The disk need not exist.
    pub fn path(&self, digest: &str) -> PathBuf {
        let hex = digest.rsplit(':').next().unwrap_or_default();
        self.dir.join(format!("{hex}.raw"))
    }

    /// Path for a disk whose digest is not known yet. A disk left there is removed by the next [`Self::open`].
    #[must_use]
    pub fn temporary_path(&self) -> PathBuf {
        static LATEST: AtomicU64 = AtomicU64::new(0);
        self.dir.join(format!("commit-{}.raw", LATEST.fetch_add(1, Ordering::Relaxed)))
    }

    /// Bytes that the image occupies on the node.
    #[must_use]
    pub fn allocated_bytes(&self, image: &DiskImage) -> u64 {
        files::allocated_bytes(&self.path(&image.digest))
    }

    /// Creates the directory for a disk that is to be written to [`Self::path`].
    pub fn prepare(&self) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)
    }

    /// All images, sorted by names. Images that cannot be read are skipped.
    pub fn list(&self) -> Vec<DiskImage> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let paths =
            entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "json"));
        let mut found: Vec<_> = paths.filter_map(|path| read(&path)).collect();
        found.sort_by(|a, b| (&a.names, &a.digest).cmp(&(&b.names, &b.digest)));
        found
    }

    /// Image with this name.
    pub fn named(&self, name: &Reference) -> Option<DiskImage> {
        let name = name.to_string();
        self.list().into_iter().find(|image| image.names.contains(&name))
    }

    /// Image with this digest.
    pub fn of_digest(&self, digest: &str) -> Option<DiskImage> {
        read(&self.path(digest).with_extension("json")).filter(|image| image.digest == digest)
    }

    /// Stores the parts of the disk with this digest, so that pulls of other disks find them.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn keep_parts(&self, digest: &str, parts: &[DiskPart]) -> io::Result<()> {
        files::write_atomic(&self.path(digest).with_extension("parts"), &serde_json::to_vec(parts)?)
    }

    /// Parts of all disks, as far as they are known. Files that cannot be read are skipped.
    #[must_use]
    pub fn local_parts(&self) -> LocalParts {
        let mut all = LocalParts::default();
        for image in self.list() {
            let disk = self.path(&image.digest);
            let parts = std::fs::read(disk.with_extension("parts")).ok();
            all.add(&disk, parts.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default());
        }
        all
    }

    /// Gives a tag to the disk with this digest, which is at [`Self::path`]. Removes the name from any other disk. Idempotent.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn tag(&self, digest: &str, name: &Reference, disk_bytes: u64, now_ms: i64) -> io::Result<DiskImage> {
        let _alone = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = name.to_string();
        for mut other in self.list().into_iter().filter(|image| image.digest != digest) {
            if other.names.contains(&name) {
                other.names.retain(|known| *known != name);
                self.write(&other)?;
            }
        }
        let new = || DiskImage {
            schema: SCHEMA,
            digest: digest.to_owned(),
            names: vec![],
            disk_bytes,
            created_ms: now_ms,
        };
        let mut image = self.of_digest(digest).unwrap_or_else(new);
        if !image.names.contains(&name) {
            image.names.push(name);
        }
        self.write(&image)?;
        Ok(image)
    }

    /// Removes a name. A disk without names stays while VMs use it, and is removed by the next [`Self::prune`].
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn untag(&self, name: &Reference) -> io::Result<()> {
        let _alone = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut image) = self.named(name) else { return Ok(()) };
        image.names.retain(|known| *known != name.to_string());
        self.write(&image)
    }

    /// Removes disks that have no names and are not in `in_use`. With `dry`, only lists them. Returns their paths and bytes.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub fn prune(&self, in_use: &HashSet<String>, dry: bool) -> io::Result<Vec<(PathBuf, u64)>> {
        let _alone = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let mut removed = Vec::new();
        for image in self.list() {
            if !image.names.is_empty() || in_use.contains(&image.digest) {
                continue;
            }
            let path = self.path(&image.digest);
            let bytes = files::allocated_bytes(&path);
            if !dry {
                files::remove_file(&path.with_extension("json"))?;
                files::remove_file(&path.with_extension("parts"))?;
                files::remove_file(&path)?;
            }
            removed.push((path, bytes));
        }
        Ok(removed)
    }

    fn write(&self, image: &DiskImage) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(image)?;
        files::write_atomic(&self.path(&image.digest).with_extension("json"), &text)
    }
}

fn read(path: &Path) -> Option<DiskImage> {
    let image: DiskImage = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    // The digest is validated because it becomes a path.
    let sound = image.schema == SCHEMA && image.digest.parse::<Digest>().is_ok();
    sound.then_some(image)
}

/// Digest of a file. Blocking.
///
/// # Errors
/// When the file cannot be read.
pub fn digest_of(path: &Path) -> io::Result<String> {
    let hex: String = files::sha256(path)?.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("sha256:{hex}"))
}

/// Default name of an image from a file: `localhost/` and the stem of the file name.
pub fn name_of(path: &Path) -> Option<Reference> {
    let stem = path.file_name()?.to_str()?.split('.').next()?;
    let clean = stem
        .to_ascii_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect::<String>();
    format!("localhost/{}:latest", clean.trim_matches('-')).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(text: &str) -> String {
        Digest::of(text.as_bytes()).to_string()
    }

    #[test]
    fn retagged_name_moves_and_untagged_disk_is_pruned() {
        let state = tempfile::tempdir().unwrap();
        let images = DiskImages::open(state.path()).unwrap();
        images.prepare().unwrap();
        let (old, new) = (digest("old"), digest("new"));
        let name: Reference = "localhost/debian:12".parse().unwrap();
        for disk in [&old, &new] {
            std::fs::write(images.path(disk), b"disk").unwrap();
            images.tag(disk, &name, 4, 7).unwrap();
        }
        assert_eq!(images.named(&name).unwrap().digest, new);
        assert_eq!(images.of_digest(&old).unwrap().names, Vec::<String>::new());
        let in_use = HashSet::from([old.clone()]);
        assert_eq!(images.prune(&in_use, false).unwrap(), [], "its users keep it");
        assert_eq!(images.prune(&HashSet::new(), true).unwrap().len(), 1);
        assert!(images.of_digest(&old).is_some(), "a dry run removes nothing");
        assert_eq!(images.prune(&HashSet::new(), false).unwrap().len(), 1);
        assert_eq!(std::fs::read_dir(state.path().join("images/disks")).unwrap().count(), 2);
        images.untag(&name).unwrap();
        assert_eq!(images.prune(&HashSet::new(), false).unwrap().len(), 1);
        assert_eq!(images.list(), []);
    }

    #[test]
    fn open_removes_incomplete_images_and_skips_foreign_files() {
        let state = tempfile::tempdir().unwrap();
        let images = DiskImages::open(state.path()).unwrap();
        images.prepare().unwrap();
        let good = digest("good");
        std::fs::write(images.path(&good), b"disk").unwrap();
        images.tag(&good, &"localhost/a:1".parse().unwrap(), 4, 0).unwrap();
        std::fs::write(images.path(&digest("bare")), b"no names yet").unwrap();
        let copy = images.path(&digest("copy")).with_extension("raw.partial");
        std::fs::write(&copy, b"not whole").unwrap();
        let foreign = r#"{"schema":1,"digest":"../../etc/passwd","names":[],"diskBytes":1,"createdMs":0}"#;
        std::fs::write(state.path().join("images/disks/x.json"), foreign).unwrap();
        let images = DiskImages::open(state.path()).unwrap();
        assert_eq!(images.list().len(), 1);
        assert!(!images.path(&digest("bare")).exists() && !copy.exists());
        assert!(images.path(&good).exists());
    }

    #[test]
    fn image_name_is_derived_from_the_file_name() {
        for (path, want) in [
            ("/a/Debian-12.qcow2", "localhost/debian-12:latest"),
            ("noble_server.img", "localhost/noble-server:latest"),
            ("/a/disk", "localhost/disk:latest"),
        ] {
            assert_eq!(name_of(Path::new(path)).unwrap().to_string(), want);
        }
        assert!(name_of(Path::new("/")).is_none() && name_of(Path::new("/a/...")).is_none());
    }
}
