//! Desired files of volumes. Pure.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{
    ConfigMap, DownwardAPIVolumeFile, KeyToPath, Secret, Volume, VolumeProjection,
};

use super::tokens::Token;
use super::{FileContent, Layout, Place, VolumeContent, is_plain_path, place, volumes};
use crate::env::{FieldContext, field, resource_field};
use crate::objects::Objects;

/// Default mode of files.
const MODE: i32 = 0o644;
/// Most bytes of one volume: an API object has at most 1 MiB, a projected volume combines several.
const BYTES_MAX: usize = 16 << 20;

/// Error that prevents writing a volume for now. The write is retried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// An object or its key does not exist, or a path is invalid.
    #[error("cannot write volume {volume:?}: {why}")]
    Missing {
        /// Name of the volume.
        volume: String,
        /// Missing or invalid object, key or path.
        why: String,
    },
    /// A token has not been issued yet.
    #[error("volume {volume:?} waits for a token")]
    NoToken {
        /// Name of the volume.
        volume: String,
    },
}

/// Error of a volume, without the volume's name.
enum Problem {
    Missing(String),
    NoToken,
}

type Files = BTreeMap<String, FileContent>;

/// Returns the desired content of each volume that the node writes, in the order of the spec.
#[must_use]
pub fn desired(
    context: &FieldContext<'_>,
    objects: &Objects,
    tokens: &BTreeMap<(String, String), Token>,
) -> Vec<Result<VolumeContent, VolumeError>> {
    let written = volumes(context.pod).filter_map(|(index, volume)| match place(index, volume) {
        Place::Area(area, path) => Some((volume, area, path)),
        Place::Image(_) | Place::Attached(_) => None,
    });
    let one = |(volume, area, path): (&Volume, _, _)| {
        let name = volume.name.clone();
        let layout = match volume.empty_dir {
            Some(_) => Ok(Layout::Directory),
            None => files(volume, context, objects, tokens).and_then(validate_files).map(Layout::Files),
        };
        match layout {
            Ok(layout) => Ok(VolumeContent { name, area, path, layout }),
            Err(Problem::Missing(why)) => Err(VolumeError::Missing { volume: name, why }),
            Err(Problem::NoToken) => Err(VolumeError::NoToken { volume: name }),
        }
    };
    written.map(one).collect()
}

/// Refuses paths that leave the volume, names that the writer reserves, and volumes that are too large.
fn validate_files(files: Files) -> Result<Files, Problem> {
    let total: usize = files.values().map(|file| file.bytes.len()).sum();
    if total > BYTES_MAX {
        return Err(Problem::Missing(format!("{total} bytes are more than {BYTES_MAX}")));
    }
    match files.keys().find(|path| !is_plain_path(path) || path.starts_with("..")) {
        Some(bad) => Err(Problem::Missing(format!("invalid path {bad:?}: it leads out of the volume"))),
        None => Ok(files),
    }
}

fn files(
    volume: &Volume,
    context: &FieldContext<'_>,
    objects: &Objects,
    tokens: &BTreeMap<(String, String), Token>,
) -> Result<Files, Problem> {
    if let Some(source) = &volume.config_map {
        let items = source.items.as_deref().unwrap_or_default();
        let object = (objects.config_maps.get(&source.name).map(|map| config_map(map)), source.optional);
        return select("configmap", &source.name, object, items, source.default_mode);
    }
    if let Some(source) = &volume.secret {
        let name = source.secret_name.as_deref().unwrap_or_default();
        let items = source.items.as_deref().unwrap_or_default();
        let object = (objects.secrets.get(name).map(|secret| secret_data(secret)), source.optional);
        return select("secret", name, object, items, source.default_mode);
    }
    if let Some(source) = &volume.downward_api {
        return downward(source.items.as_deref().unwrap_or_default(), source.default_mode, context);
    }
    let Some(source) = &volume.projected else { return Ok(Files::new()) };
    let mut all = Files::new();
    for projection in source.sources.iter().flatten() {
        all.extend(projected_files(&volume.name, projection, source.default_mode, context, objects, tokens)?);
    }
    Ok(all)
}

fn projected_files(
    volume: &str,
    source: &VolumeProjection,
    default_mode: Option<i32>,
    context: &FieldContext<'_>,
    objects: &Objects,
    tokens: &BTreeMap<(String, String), Token>,
) -> Result<Files, Problem> {
    if let Some(source) = &source.config_map {
        let items = source.items.as_deref().unwrap_or_default();
        let object = (objects.config_maps.get(&source.name).map(|map| config_map(map)), source.optional);
        return select("configmap", &source.name, object, items, default_mode);
    }
    if let Some(source) = &source.secret {
        let items = source.items.as_deref().unwrap_or_default();
        let object = (objects.secrets.get(&source.name).map(|secret| secret_data(secret)), source.optional);
        return select("secret", &source.name, object, items, default_mode);
    }
    if let Some(source) = &source.downward_api {
        return downward(source.items.as_deref().unwrap_or_default(), default_mode, context);
    }
    if let Some(source) = &source.service_account_token {
        let token = tokens.get(&(volume.to_owned(), source.path.clone())).ok_or(Problem::NoToken)?;
        return Ok([(source.path.clone(), file(token.value.clone().into_bytes(), default_mode, None))].into());
    }
    let Some(source) = &source.cluster_trust_bundle else {
        return Err(Problem::Missing("its projection is not supported".to_owned()));
    };
    let name = source.name.as_deref().unwrap_or_default();
    match objects.trust_bundles.get(name) {
        Some(pem) => Ok([(source.path.clone(), file(pem.clone().into_bytes(), default_mode, None))].into()),
        None if source.optional == Some(true) => Ok(Files::new()),
        None => Err(Problem::Missing(format!("clustertrustbundle {name:?} not found"))),
    }
}

fn config_map(map: &ConfigMap) -> BTreeMap<&str, &[u8]> {
    let text = map.data.iter().flatten().map(|(key, value)| (key.as_str(), value.as_bytes()));
    let binary = map.binary_data.iter().flatten().map(|(key, ByteString(value))| (key.as_str(), &value[..]));
    text.chain(binary).collect()
}

fn secret_data(secret: &Secret) -> BTreeMap<&str, &[u8]> {
    secret.data.iter().flatten().map(|(key, ByteString(value))| (key.as_str(), &value[..])).collect()
}

/// Returns the keys of an object that a volume contains: all, or the listed ones at their paths.
fn select(
    kind: &str,
    name: &str,
    (data, optional): (Option<BTreeMap<&str, &[u8]>>, Option<bool>),
    items: &[KeyToPath],
    default_mode: Option<i32>,
) -> Result<Files, Problem> {
    let optional = optional == Some(true);
    let Some(data) = data else {
        let missing = || Problem::Missing(format!("{kind} {name:?} not found"));
        return if optional { Ok(Files::new()) } else { Err(missing()) };
    };
    if items.is_empty() {
        let all = data.into_iter();
        return Ok(all
            .map(|(key, bytes)| (key.to_owned(), file(bytes.to_vec(), default_mode, None)))
            .collect());
    }
    let mut files = Files::new();
    for item in items {
        match data.get(item.key.as_str()) {
            Some(bytes) => {
                files.insert(item.path.clone(), file(bytes.to_vec(), default_mode, item.mode));
            }
            None if optional => {}
            None => return Err(Problem::Missing(format!("key {:?} not found in {kind} {name:?}", item.key))),
        }
    }
    Ok(files)
}

fn downward(
    items: &[DownwardAPIVolumeFile],
    default_mode: Option<i32>,
    context: &FieldContext<'_>,
) -> Result<Files, Problem> {
    let mut files = Files::new();
    for item in items {
        let value = match (&item.field_ref, &item.resource_field_ref) {
            (Some(wanted), _) => field(context, &wanted.field_path),
            (None, Some(wanted)) => resource_field(context, None, wanted),
            (None, None) => continue,
        };
        let value = value.map_err(|error| Problem::Missing(error.message))?;
        files.insert(item.path.clone(), file(value.into_bytes(), default_mode, item.mode));
    }
    Ok(files)
}

fn file(bytes: Vec<u8>, default_mode: Option<i32>, mode: Option<i32>) -> FileContent {
    let mode = mode.or(default_mode).unwrap_or(MODE);
    FileContent { bytes, mode: u32::try_from(mode).unwrap_or(0o644) & 0o777 }
}
