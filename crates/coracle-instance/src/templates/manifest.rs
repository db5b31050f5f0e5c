//! Template on disk.

use std::io;
use std::path::Path;

use coracle_hypervisor::{SealedFile, Template};
use coracle_types::{MemoryMib, UnixMillis, Vcpus};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::TemplateKey;
use crate::files;

/// Version of the format. A template of another version is removed and taken anew.
const SCHEMA: u32 = 1;

/// Description of a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateInfo {
    /// Key of the shape.
    pub key: TemplateKey,
    /// CPUs of the shape.
    pub vcpus: Vcpus,
    /// Memory of the shape.
    pub memory: MemoryMib,
    /// Time of the save.
    pub taken_at: UnixMillis,
    /// Time from the start of the boot to the saved state, milliseconds.
    pub took_ms: u64,
    /// Time from the guest's halt to its complete state, milliseconds.
    #[serde(default)]
    pub save_ms: u64,
    /// Memory that the RAM takes, bytes.
    pub ram_bytes: u64,
    /// Size of the fresh disk that the guest has mounted, MiB; 0: none.
    #[serde(default)]
    pub disk_mib: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema: u32,
    #[serde(flatten)]
    info: TemplateInfo,
    /// SHA-256 over offset and bytes of each piece of RAM, then of the state, then of the disk.
    digest: String,
}

/// Reads the description of the template in `dir`.
///
/// # Errors
/// When `dir` is not a template, or one of another version.
pub(crate) fn read(dir: &Path) -> io::Result<TemplateInfo> {
    manifest(dir).map(|manifest| manifest.info)
}

fn manifest(dir: &Path) -> io::Result<Manifest> {
    let manifest: Manifest = serde_json::from_slice(&std::fs::read(dir.join("manifest.json"))?)?;
    let named = dir.file_name().and_then(|name| name.to_str()) == Some(manifest.info.key.as_str());
    if manifest.schema == SCHEMA && named {
        Ok(manifest)
    } else {
        Err(io::Error::new(io::ErrorKind::Unsupported, "a template of another version"))
    }
}

/// Writes a template to `part`, then renames that to `dir`. Blocking.
///
/// # Errors
/// For example when the disk is full; the caller removes `part`.
pub(crate) fn store(part: &Path, dir: &Path, info: &TemplateInfo, template: &Template) -> io::Result<()> {
    std::fs::create_dir_all(part)?;
    let mut digest = Sha256::new();
    template.ram.store(&part.join("ram"), pieces(&mut digest))?;
    template.state.store(&part.join("state"), pieces(&mut digest))?;
    if let Some(disk) = &template.disk {
        disk.store(&part.join("disk"), pieces(&mut digest))?;
    }
    let manifest = Manifest { schema: SCHEMA, info: info.clone(), digest: hex(digest) };
    files::write_atomic(&part.join("manifest.json"), &serde_json::to_vec_pretty(&manifest)?)?;
    files::remove_tree(dir)?;
    std::fs::rename(part, dir)?;
    files::sync_parent(dir)
}

/// Reads a template into sealed memory. Blocking.
///
/// # Errors
/// When the digest differs from the manifest's.
pub(crate) fn load(dir: &Path, info: &TemplateInfo) -> io::Result<Template> {
    let manifest = manifest(dir)?;
    let mut digest = Sha256::new();
    let ram = SealedFile::load("template-ram", &dir.join("ram"), pieces(&mut digest))?;
    let state = SealedFile::load("template-state", &dir.join("state"), pieces(&mut digest))?;
    let disk = match info.disk_mib {
        0 => None,
        _ => Some(SealedFile::load("template-disk", &dir.join("disk"), pieces(&mut digest))?),
    };
    if manifest.info != *info || hex(digest) != manifest.digest {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its content is not what was saved"));
    }
    Ok(Template { ram, state, disk })
}

fn pieces(digest: &mut Sha256) -> impl FnMut(u64, &[u8]) {
    move |offset, piece| {
        digest.update(offset.to_le_bytes());
        digest.update(piece);
    }
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use coracle_hypervisor::MemoryFile;

    use super::*;

    fn sealed_file(text: &[u8]) -> SealedFile {
        let memory = MemoryFile::new("test", 1 << 20).unwrap();
        let writer = std::fs::File::options().write(true).open(format!("/proc/self/fd/{}", memory.number()));
        writer.unwrap().write_all_at(text, 8192).unwrap();
        memory.seal().unwrap()
    }

    #[test]
    fn stored_template_loads_and_modified_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let key = TemplateKey::parse("0123456789abcdef").unwrap();
        let info = TemplateInfo {
            key,
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            taken_at: UnixMillis(5),
            took_ms: 7,
            save_ms: 2,
            ram_bytes: 4096,
            disk_mib: 1,
        };
        let template = Template {
            ram: sealed_file(b"ram"),
            state: sealed_file(b"state"),
            disk: Some(sealed_file(b"disk")),
        };
        let (part, place) = (dir.path().join("part"), dir.path().join("0123456789abcdef"));
        store(&part, &place, &info, &template).unwrap();
        assert_eq!(read(&place).unwrap(), info);
        load(&place, &info).unwrap();
        for part in ["ram", "state", "disk"] {
            let file = std::fs::File::options().read(true).write(true).open(place.join(part)).unwrap();
            let mut was = [0];
            file.read_exact_at(&mut was, 8192).unwrap();
            file.write_all_at(b"X", 8192).unwrap();
            assert_eq!(load(&place, &info).unwrap_err().kind(), io::ErrorKind::InvalidData, "{part}");
            file.write_all_at(&was, 8192).unwrap();
        }
        load(&place, &info).unwrap();
        std::fs::rename(&place, dir.path().join("fedcba9876543210")).unwrap();
        assert!(read(&dir.path().join("fedcba9876543210")).is_err(), "under another's name it is none");
    }
}
