//! Record of the plugin calls for each VM: written before the plugins run, completed with their result (CNI specification 1.0,
//! section 4, "Lifecycle & Ordering": a runtime keeps configuration and result until DEL).

use std::io;
use std::path::PathBuf;

use coracle_types::VmId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::conf::ConfList;
use super::error::CniError;

/// The network of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Entry {
    /// Configuration at the time of ADD: the file may have changed since.
    pub(super) conf: ConfList,
    pub(super) netns: PathBuf,
    /// Values of the plugins' capabilities (`runtimeConfig`).
    pub(super) runtime: Value,
    pub(super) mac: String,
    /// Result of the last plugin; `None` until all have answered.
    pub(super) result: Option<Value>,
    /// MTU of the interface that the plugins made, bytes.
    #[serde(default)]
    pub(super) mtu: Option<u32>,
}

/// Directory with one file per VM.
#[derive(Debug)]
pub(super) struct Cache {
    dir: PathBuf,
}

impl Cache {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    fn path(&self, id: &VmId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    pub(super) fn read(&self, id: &VmId) -> Result<Option<Entry>, CniError> {
        let path = self.path(id);
        let failed = |source| CniError::Node { operation: format!("read {}", path.display()), source };
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| failed(error.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    pub(super) fn write(&self, id: &VmId, entry: &Entry) -> Result<(), CniError> {
        let path = self.path(id);
        let written = || {
            std::fs::create_dir_all(&self.dir)?;
            coracle_files::write_atomic(&path, &serde_json::to_vec(entry)?)
        };
        written().map_err(|source| CniError::Node { operation: format!("write {}", path.display()), source })
    }

    pub(super) fn remove(&self, id: &VmId) -> Result<(), CniError> {
        let path = self.path(id);
        let removed = coracle_files::remove_file(&path);
        removed.map_err(|source| CniError::Node { operation: format!("remove {}", path.display()), source })
    }

    /// Ids of the VMs that have an entry.
    pub(super) fn ids(&self) -> Result<Vec<VmId>, CniError> {
        let files = match std::fs::read_dir(&self.dir) {
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            Err(source) => {
                return Err(CniError::Node { operation: format!("read {}", self.dir.display()), source });
            }
        };
        let id = |file: std::fs::DirEntry| file.file_name().to_str()?.strip_suffix(".json")?.parse().ok();
        Ok(files.flatten().filter_map(id).collect())
    }
}
