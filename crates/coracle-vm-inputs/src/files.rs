//! Volumes of a VM: files from objects, disks, and paths of the node. Pure.

use std::collections::BTreeMap;
use std::fmt;

use coracle_api::{KeyToPath, VmVolume};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};

use crate::objects::Objects;
use crate::{InputError, InputSource, InputVolume};

/// Default permission bits of files.
const MODE: i32 = 0o644;

/// File of a VM. `Debug` shows only its size.
#[derive(Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Relative path of the file.
    pub path: String,
    /// Content of the file.
    pub bytes: Vec<u8>,
    /// Permission bits of the file.
    pub mode: u32,
}

impl fmt::Debug for InputFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} bytes, mode {:o}", self.path, self.bytes.len(), self.mode)
    }
}

pub(crate) fn volume(volume: &VmVolume, objects: &Objects) -> Result<InputVolume, InputError> {
    let of_volume = |error: InputError| InputError(format!("volume {}: {error}", volume.name));
    let (source, read_only) = source(volume, objects).map_err(of_volume)?;
    Ok(InputVolume { name: volume.name.clone(), target: volume.mount_path.clone(), read_only, source })
}

fn source(volume: &VmVolume, objects: &Objects) -> Result<(InputSource, bool), InputError> {
    if let Some(disk) = &volume.disk {
        let size_mib = disk.size_mib().ok_or_else(|| InputError(format!("invalid size {:?}", disk.size)))?;
        return Ok((InputSource::Disk { size_mib, class: disk.class.clone() }, volume.read_only));
    }
    if let Some(claim) = &volume.persistent_volume_claim {
        let bound = objects.claim(&claim.claim_name)?;
        return Ok((InputSource::Path(bound.path.clone()), volume.read_only || bound.read_only));
    }
    if let Some(from) = &volume.config_map {
        let keys = objects.config_maps.get(&from.name).map(|map| config_map_keys(map));
        let wanted =
            Wanted { kind: "ConfigMap", name: &from.name, items: &from.items, optional: from.optional };
        return Ok((InputSource::Files(wanted.files(keys, from.default_mode)?), true));
    }
    if let Some(from) = &volume.secret {
        let keys = objects.secrets.get(&from.secret_name).map(|secret| secret_keys(secret));
        let name = &from.secret_name;
        let wanted = Wanted { kind: "Secret", name, items: &from.items, optional: from.optional };
        return Ok((InputSource::Files(wanted.files(keys, from.default_mode)?), true));
    }
    Err(InputError("it has no source".to_owned()))
}

fn config_map_keys(map: &ConfigMap) -> BTreeMap<&str, &[u8]> {
    let text = map.data.iter().flatten().map(|(key, value)| (key.as_str(), value.as_bytes()));
    let binary = map.binary_data.iter().flatten().map(|(key, value)| (key.as_str(), value.0.as_slice()));
    text.chain(binary).collect()
}

fn secret_keys(secret: &Secret) -> BTreeMap<&str, &[u8]> {
    secret.data.iter().flatten().map(|(key, value)| (key.as_str(), value.0.as_slice())).collect()
}

struct Wanted<'a> {
    kind: &'static str,
    name: &'a str,
    items: &'a [KeyToPath],
    optional: bool,
}

impl Wanted<'_> {
    /// Returns the files of an object's keys; `None` when the object does not exist.
    fn files(
        &self,
        keys: Option<BTreeMap<&str, &[u8]>>,
        default_mode: Option<i32>,
    ) -> Result<Vec<InputFile>, InputError> {
        let Some(keys) = keys else {
            let missing = InputError(format!("{} {:?} not found", self.kind, self.name));
            return if self.optional { Ok(vec![]) } else { Err(missing) };
        };
        let mode = |mode: Option<i32>| mode.or(default_mode).unwrap_or(MODE).unsigned_abs() & 0o777;
        if self.items.is_empty() {
            let file = |(key, bytes): (&str, &[u8])| {
                Ok(InputFile { path: check_relative(key)?, bytes: bytes.to_vec(), mode: mode(None) })
            };
            return keys.into_iter().map(file).collect();
        }
        let mut files = Vec::new();
        for item in self.items {
            match keys.get(item.key.as_str()) {
                Some(bytes) => {
                    let path = check_relative(&item.path)?;
                    files.push(InputFile { path, bytes: bytes.to_vec(), mode: mode(item.mode) });
                }
                None if self.optional => {}
                None => {
                    return Err(InputError(format!(
                        "{} {:?} has no key {:?}",
                        self.kind, self.name, item.key
                    )));
                }
            }
        }
        Ok(files)
    }
}

/// Checks that a path is relative and does not leave its directory.
fn check_relative(path: &str) -> Result<String, InputError> {
    let is_plain = path.split('/').all(|part| !matches!(part, "" | "." | "..")) && !path.contains('\0');
    if is_plain { Ok(path.to_owned()) } else { Err(InputError(format!("invalid path {path:?}"))) }
}
