//! Images built from literals: layers as tar bytes in an OCI layout, for tests and the demo image.
//!
//! ```
//! # use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
//! # let dir = tempfile::tempdir().unwrap();
//! let layer = LayerTar::new().dir("etc", 0o755).file("etc/motd", 0o644, b"hello\n").symlink("etc/m", "motd").finish();
//! let spec = ImageSpec { cmd: vec!["/bin/sh".into()], ..ImageSpec::default() };
//! write_layout(dir.path(), &[layer], &spec, "localhost/coracle/demo:1").unwrap();
//! ```

use std::{fs, path::Path};

use anyhow::Context as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

/// Builder of a layer. Its bytes depend on the calls only, not on clock, user or host.
pub struct LayerTar {
    tar: tar::Builder<Vec<u8>>,
    owner: (u64, u64),
}

impl Default for LayerTar {
    fn default() -> Self {
        Self::new()
    }
}

impl LayerTar {
    /// Creates an empty layer, whose entries belong to root.
    #[must_use]
    pub fn new() -> Self {
        Self { tar: tar::Builder::new(Vec::new()), owner: (0, 0) }
    }

    /// Sets the owner of the following entries.
    #[must_use]
    pub fn owner(mut self, uid: u32, gid: u32) -> Self {
        self.owner = (uid.into(), gid.into());
        self
    }

    /// Adds a directory.
    #[must_use]
    pub fn dir(self, path: &str, mode: u32) -> Self {
        self.entry(EntryType::Directory, path, mode, "", &[])
    }

    /// Adds a regular file. `mode` may include bits such as setuid.
    #[must_use]
    pub fn file(self, path: &str, mode: u32, data: &[u8]) -> Self {
        self.entry(EntryType::Regular, path, mode, "", data)
    }

    /// Adds a symbolic link from `path` to `target`.
    #[must_use]
    pub fn symlink(self, path: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, path, 0o777, target, &[])
    }

    /// Adds a hard link at `path` to the earlier entry `target`.
    #[must_use]
    pub fn hardlink(self, path: &str, target: &str) -> Self {
        self.entry(EntryType::Link, path, 0o644, target, &[])
    }

    /// Adds any entry, with unchecked names for hostile archives (`../x`, `/etc/x`, links out).
    ///
    /// # Panics
    /// When a name with `..` or a leading `/` is longer than the 100 bytes of a plain header.
    #[must_use]
    pub fn entry(mut self, kind: EntryType, path: &str, mode: u32, target: &str, data: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(self.owner.0);
        header.set_gid(self.owner.1);
        header.set_mtime(0);
        header.set_size(data.len() as u64);
        let written = if path.len() <= 100 && target.len() <= 100 {
            let old = header.as_old_mut();
            old.name[..path.len()].copy_from_slice(path.as_bytes());
            old.linkname[..target.len()].copy_from_slice(target.as_bytes());
            header.set_cksum();
            self.tar.append(&header, data)
        } else if target.is_empty() {
            self.tar.append_data(&mut header, path, data)
        } else {
            self.tar.append_link(&mut header, path, target)
        };
        written.expect("a vector takes every byte, and long names are ordinary ones");
        self
    }

    /// Returns the tar archive.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.tar.into_inner().expect("a vector takes every byte")
    }
}

/// Image configuration. Empty fields are left out.
#[derive(Clone, Debug)]
pub struct ImageSpec {
    /// `Entrypoint`.
    pub entrypoint: Vec<String>,
    /// `Cmd`.
    pub cmd: Vec<String>,
    /// `Env`, as `NAME=value`.
    pub env: Vec<String>,
    /// `User`, as `uid[:gid]` or a name.
    pub user: String,
    /// `WorkingDir`.
    pub workdir: String,
    /// Architecture in Go's spelling: `amd64`, `arm64`.
    pub architecture: String,
}

impl Default for ImageSpec {
    fn default() -> Self {
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        Self {
            entrypoint: Vec::new(),
            cmd: Vec::new(),
            env: Vec::new(),
            user: String::new(),
            workdir: String::new(),
            architecture: architecture.into(),
        }
    }
}

/// Writes an image of `layers` (tars, lowest first) into the OCI layout at `dir` under the name `tag`, and returns the digest
/// of the manifest. An existing layout keeps its other images, and the name is replaced.
///
/// # Errors
/// When a file cannot be written, or `dir` contains something other than a layout.
pub fn write_layout(dir: &Path, layers: &[Vec<u8>], spec: &ImageSpec, tag: &str) -> anyhow::Result<String> {
    fs::create_dir_all(dir.join("blobs/sha256"))?;
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let diff_ids: Vec<String> = layers.iter().map(|layer| digest(layer)).collect();
    let config = put_json(dir, &config(spec, &diff_ids), "application/vnd.oci.image.config.v1+json")?;
    let layers: anyhow::Result<Vec<Value>> =
        layers.iter().map(|layer| put(dir, layer, "application/vnd.oci.image.layer.v1.tar")).collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": layers?,
    });
    let mut entry = put_json(dir, &manifest, "application/vnd.oci.image.manifest.v1+json")?;
    entry["platform"] = json!({"os": "linux", "architecture": spec.architecture});
    entry["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
    let digest = entry["digest"].as_str().unwrap_or_default().to_owned();
    append(&dir.join("index.json"), entry, tag)?;
    Ok(digest)
}

fn config(spec: &ImageSpec, diff_ids: &[String]) -> Value {
    let mut run = serde_json::Map::new();
    let mut set = |name: &str, value: Value| {
        if value.as_array().is_none_or(|a| !a.is_empty()) && value.as_str() != Some("") {
            run.insert(name.into(), value);
        }
    };
    set("Entrypoint", json!(spec.entrypoint));
    set("Cmd", json!(spec.cmd));
    set("Env", json!(spec.env));
    set("User", json!(spec.user));
    set("WorkingDir", json!(spec.workdir));
    json!({
        "architecture": spec.architecture,
        "os": "linux",
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    })
}

fn append(index: &Path, entry: Value, tag: &str) -> anyhow::Result<()> {
    let mut all: Vec<Value> = match fs::read(index) {
        Ok(bytes) => {
            let stored: Value =
                serde_json::from_slice(&bytes).with_context(|| format!("parse {}", index.display()))?;
            stored["manifests"].as_array().cloned().unwrap_or_default()
        }
        Err(_) => Vec::new(),
    };
    all.retain(|m| m["annotations"]["org.opencontainers.image.ref.name"] != tag);
    all.push(entry);
    let text =
        json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": all});
    Ok(fs::write(index, serde_json::to_vec_pretty(&text)?)?)
}

fn put_json(dir: &Path, value: &Value, media_type: &str) -> anyhow::Result<Value> {
    put(dir, &serde_json::to_vec(value)?, media_type)
}

fn put(dir: &Path, bytes: &[u8], media_type: &str) -> anyhow::Result<Value> {
    let digest = digest(bytes);
    fs::write(dir.join("blobs/sha256").join(digest.trim_start_matches("sha256:")), bytes)?;
    Ok(json!({"mediaType": media_type, "digest": digest, "size": bytes.len()}))
}

/// `sha256:` and the hex digest of `bytes`.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_adds_a_second_image_and_replaces_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let layer = LayerTar::new()
            .dir("a", 0o755)
            .owner(7, 8)
            .file("a/b", 0o4755, b"x")
            .symlink("l", "a/b")
            .finish();
        let spec = ImageSpec { cmd: vec!["/a/b".into()], ..ImageSpec::default() };
        let one = write_layout(dir.path(), std::slice::from_ref(&layer), &spec, "x:1").unwrap();
        write_layout(dir.path(), std::slice::from_ref(&layer), &spec, "x:2").unwrap();
        let again = write_layout(dir.path(), std::slice::from_ref(&layer), &spec, "x:1").unwrap();
        assert_eq!(one, again, "the same content has the same digest");
        let index: Value = serde_json::from_slice(&fs::read(dir.path().join("index.json")).unwrap()).unwrap();
        assert_eq!(index["manifests"].as_array().unwrap().len(), 2);
        let mut tar = tar::Archive::new(layer.as_slice());
        let entry = tar.entries().unwrap().nth(1).unwrap().unwrap();
        assert_eq!((entry.header().uid().unwrap(), entry.header().mode().unwrap()), (7, 0o4755));
    }
}
