//! Configuration file of the original agent, which is accepted under its original name.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::Deserialize;

/// Configuration with the keys and defaults of the original agent. Keys without a meaning here (jailer, uid, gid) are accepted,
/// so that existing files work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LegacyConfig {
    /// Listen address.
    pub server: Server,
    /// VMM programs and defaults of VMs.
    pub firecracker: Firecracker,
    /// Bridge network.
    pub network: Network,
    /// Directory of VMs.
    pub storage: StorageSection,
    /// Metrics endpoint.
    pub monitoring: Monitoring,
    /// Logging.
    pub log: Log,
}

/// Section `server`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Address to listen on.
    pub host: Ipv4Addr,
    /// Port to listen on.
    pub port: u16,
}

/// Section `firecracker`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Firecracker {
    /// Accepted, unused: the driver finds its program itself.
    pub binary_path: PathBuf,
    /// Accepted, unused.
    pub jailer_path: PathBuf,
    /// Default kernel of requests.
    pub kernel_path: String,
    /// Default image of requests.
    pub rootfs_path: String,
    /// Accepted, unused.
    pub use_jailer: bool,
    /// Accepted, unused.
    pub jail_uid: u32,
    /// Accepted, unused.
    pub jail_gid: u32,
}

/// Section `network`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// Accepted, unused: the bridge is named after the state directory, so that the names of two nodes do not collide.
    pub bridge_name: String,
    /// Accepted, unused: taps are named after the whole id, so that the names of two VMs do not collide.
    pub tap_prefix: String,
    /// Address and prefix of the bridge, which define the subnet of the guests.
    pub bridge_ip: String,
}

/// Section `storage`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StorageSection {
    /// State directory.
    pub vms_dir: PathBuf,
    /// Accepted, unused: every VM has an overlay.
    pub use_overlay: bool,
}

/// Section `monitoring`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Monitoring {
    /// Whether metrics are served.
    pub enabled: bool,
    /// Port of the metrics endpoint.
    pub metrics_port: u16,
}

/// Section `log`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Log level: debug, info, warn or error.
    pub level: String,
    /// Log format: json or text.
    pub format: String,
}

impl Default for Server {
    fn default() -> Self {
        Self { host: Ipv4Addr::UNSPECIFIED, port: 50051 }
    }
}

impl Default for Firecracker {
    fn default() -> Self {
        Self {
            binary_path: PathBuf::new(),
            jailer_path: PathBuf::new(),
            kernel_path: String::new(),
            rootfs_path: String::new(),
            use_jailer: true,
            jail_uid: 1000,
            jail_gid: 1000,
        }
    }
}

impl Default for Network {
    fn default() -> Self {
        Self { bridge_name: "br0".into(), tap_prefix: "vmtap".into(), bridge_ip: "172.16.0.1/24".into() }
    }
}

impl Default for StorageSection {
    fn default() -> Self {
        Self { vms_dir: "/srv/firecracker/vms".into(), use_overlay: false }
    }
}

impl Default for Monitoring {
    fn default() -> Self {
        Self { enabled: false, metrics_port: 9090 }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".into(), format: "json".into() }
    }
}

/// Error of a configuration file, with the place.
#[derive(Debug, thiserror::Error)]
#[error("configuration: {0}")]
pub struct InvalidLegacyConfig(String);

impl LegacyConfig {
    /// Parses the YAML text of a configuration file. An empty file has all defaults.
    ///
    /// # Errors
    /// [`InvalidLegacyConfig`] naming the key or line.
    pub fn parse(text: &str) -> Result<Self, InvalidLegacyConfig> {
        if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(text).map_err(|e| InvalidLegacyConfig(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_sample_config_is_accepted() {
        let sample = "
server: {host: 0.0.0.0, port: 50051}
firecracker:
  binary_path: /usr/bin/firecracker
  jailer_path: /usr/bin/jailer
  kernel_path: /var/lib/firecracker/vmlinux
  rootfs_path: /var/lib/firecracker/rootfs.ext4
  use_jailer: true
  jail_uid: 101
  jail_gid: 104
network: {bridge_name: fcbr0, tap_prefix: fctap, bridge_ip: 172.16.0.1/24}
storage: {vms_dir: /var/lib/firecracker/vms, use_overlay: true}
monitoring: {enabled: true, metrics_port: 9090}
log: {level: info, format: json}
";
        let config = LegacyConfig::parse(sample).unwrap();
        assert_eq!(config.network.bridge_name, "fcbr0");
        assert_eq!(config.storage.vms_dir, PathBuf::from("/var/lib/firecracker/vms"));
        assert!(config.monitoring.enabled);
    }

    #[test]
    fn empty_config_has_the_original_defaults() {
        let config = LegacyConfig::parse("# empty\n").unwrap();
        assert_eq!((config.server.port, config.monitoring.metrics_port), (50051, 9090));
        assert_eq!(config.network.bridge_ip, "172.16.0.1/24");
        assert!(config.firecracker.use_jailer && !config.monitoring.enabled);
    }

    #[test]
    fn unknown_key_is_named_in_the_error() {
        let error = LegacyConfig::parse("server: {porrt: 1}").unwrap_err().to_string();
        assert!(error.contains("porrt"), "{error}");
    }
}
