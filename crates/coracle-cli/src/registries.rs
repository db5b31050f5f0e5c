//! Registry configuration of the node, and of transfers without a node.

use std::path::Path;

use coracle_oci::Registries;

use crate::cli::RegistryFlags;
use crate::commands::disk;
use crate::error::Failure;

/// Directory that is used if it exists and the flags name no other.
const DEFAULT: &str = "/etc/coracle/certs.d";
/// Variables that name a registry of the original client.
const SERVERS: [&str; 2] = ["EPOCH_SERVER", "EPOCH_URL"];

/// Reads the configuration that the flags name. `warn` receives the warnings about keys without effect.
pub fn load(flags: &RegistryFlags, warn: impl Fn(&str)) -> Result<Registries, Failure> {
    let dir = match &flags.registry_config {
        Some(dir) => Some(dir.as_path()),
        None => Some(Path::new(DEFAULT)).filter(|dir| dir.is_dir()),
    };
    let mut registries = Registries::default();
    if let Some(dir) = dir {
        let (read, warnings) = Registries::load(dir).map_err(disk::failure)?;
        warnings.iter().for_each(|warning| warn(warning));
        registries = read;
    }
    let named = SERVERS.iter().filter_map(|name| std::env::var(name).ok()).filter(|url| !url.is_empty());
    Ok(named.fold(registries, |registries, url| registries.with_url(&url)))
}

/// Like [`load`], with warnings on stderr.
pub fn load_with_warnings(flags: &RegistryFlags) -> Result<Registries, Failure> {
    load(flags, |warning| eprintln!("warning: {warning}"))
}
