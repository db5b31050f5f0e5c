//! Cloud-init seed of a disk image VM: an ISO image labelled `CIDATA` with the guest agent and, in the NoCloud layout that
//! cloud-init reads, names and network for the first boot (cloud-init, "NoCloud" data source).
//!
//! The seed is written anew for every boot, so an image of any age runs the current agent. An image with cloud-init needs no
//! preparation: the seed's vendor data starts the agent on every boot. Any other image needs a unit that mounts the disk by its
//! label and runs `coracle-guest service`.

use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

use coracle_proto::guest as pb;
use hadris_iso::joliet::JolietLevel;
use hadris_iso::read::PathSeparator;
use hadris_iso::write::options::{CreationFeatures, IsoFormatOptions};
use hadris_iso::write::{File, InputFiles, IsoImageWriter};
use serde_json::{Value, json};

use coracle_files::sync_parent;

/// Volume label by which a seed is found.
const LABEL: &str = "CIDATA";
/// Unit of the seed's size, bytes: the disk of a VM's copy must have the same size.
const STEP: usize = 4 << 20;
/// Maximum size of the image apart from its files.
const METADATA_BYTES_MAX: usize = 256 * 1024;

/// Boothook that starts the agent early on every boot.
const START: &str = r#"#cloud-boothook
#!/bin/sh
# The host's agent: it answers for this machine to the node that runs it.
set -u
mountpoint -q /run/coracle && exit 0
mkdir -p /run/coracle
# Of its own, because nothing may be executed in /run itself.
mount -t tmpfs -o nosuid,nodev,mode=0755,size=16m coracle /run/coracle || exit 1
mkdir /run/coracle/init
mount -o ro LABEL=CIDATA /run/coracle/init || exit 1
install -m 0755 /run/coracle/init/coracle-guest /run/coracle/coracle-guest
umount /run/coracle/init
if [ -d /run/systemd/system ]; then
  exec systemd-run --quiet --no-block --unit=coracle-guest --description="Coracle guest agent" \
    --property=DefaultDependencies=no --property=Restart=on-failure --property=RestartSec=1 \
    --property=KillMode=process /run/coracle/coracle-guest service
fi
setsid /run/coracle/coracle-guest service </dev/null >/dev/null 2>&1 &
"#;

/// Content of the seed that a disk image VM reads at its first boot.
#[derive(Clone, Debug)]
pub struct CloudInitSeed<'a> {
    /// Instance id: a new one makes cloud-init set the guest up anew.
    pub instance: &'a str,
    /// Host name of the guest.
    pub hostname: &'a str,
    /// Network configuration; `None`: the image has its own settings.
    pub network: Option<&'a pb::Network>,
    /// User data as the owner wrote it; empty: none.
    pub user_data: &'a str,
    /// Public keys of the default user.
    pub ssh_keys: &'a [String],
}

impl CloudInitSeed<'_> {
    /// Returns the files of the disk, except the agent. JSON is YAML, and quotes its strings.
    fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let user_data = if self.user_data.is_empty() { "#cloud-config\n{}\n" } else { self.user_data };
        let mut meta_data = json!({"instance-id": self.instance, "local-hostname": self.hostname});
        if !self.ssh_keys.is_empty() {
            meta_data["public-keys"] = json!(self.ssh_keys);
        }
        let mut files = vec![
            ("user-data", user_data.as_bytes().to_vec()),
            ("meta-data", line(&meta_data)),
            ("vendor-data", START.as_bytes().to_vec()),
        ];
        if let Some(network) = self.network {
            files.push(("network-config", line(&network_config(network))));
        }
        files
    }

    /// Writes the disk, with the agent's binary from `agent`. Replaces an older disk atomically. Blocking, idempotent.
    ///
    /// # Errors
    /// When the agent cannot be read, or the disk cannot be written.
    pub fn write(&self, to: &Path, agent: &Path) -> io::Result<()> {
        let binary = fs::read(agent).map_err(|e| {
            let help = "set the guest's files up again (in a checkout: cargo xtask setup)";
            io::Error::new(e.kind(), format!("{}: {e}; {help}", agent.display()))
        })?;
        let mut files = self.files();
        files.push(("coracle-guest", binary));
        let image = image(files)?;
        let part = to.with_extension("part");
        fs::write(&part, image)?;
        fs::File::open(&part)?.sync_all()?;
        fs::rename(&part, to)?;
        sync_parent(to)
    }
}

/// Returns the network configuration, version 2 (cloud-init, "Networking config Version 2"). The NIC is matched by its MAC
/// address, because its name depends on the guest.
fn network_config(network: &pb::Network) -> Value {
    let mut nic = json!({
        "match": {"macaddress": network.mac},
        "addresses": [network.address],
        "nameservers": {"addresses": network.nameservers, "search": network.search_domains},
    });
    // The versions of cloud-init in stable distributions do not support `to: default`.
    let default = (!network.gateway.is_empty()).then_some(("0.0.0.0/0", network.gateway.as_str()));
    let own = network.routes.iter().map(|route| {
        (route.to.as_str(), if route.gateway.is_empty() { &network.gateway } else { &route.gateway }.as_str())
    });
    let routes: Vec<_> = default.into_iter().chain(own).filter(|(_, via)| !via.is_empty()).collect();
    if let Some(nic) = nic.as_object_mut() {
        if !routes.is_empty() {
            let routes = routes.iter().map(|(to, via)| json!({"to": to, "via": via}));
            nic.insert("routes".to_owned(), routes.collect());
        }
        if network.mtu > 0 {
            nic.insert("mtu".to_owned(), network.mtu.into());
        }
    }
    json!({"version": 2, "ethernets": {"primary": nic}})
}

fn line(value: &Value) -> Vec<u8> {
    format!("{value}\n").into_bytes()
}

fn image(files: Vec<(&'static str, Vec<u8>)>) -> io::Result<Vec<u8>> {
    let bytes: usize = files.iter().map(|(_, contents)| contents.len() + 4096).sum();
    let mut buffer = Cursor::new(vec![0; (bytes + METADATA_BYTES_MAX).next_multiple_of(STEP)]);
    let files =
        files.into_iter().map(|(name, contents)| File::File { name: Arc::new(name.to_owned()), contents });
    let files = InputFiles { path_separator: PathSeparator::ForwardSlash, files: files.collect() };
    let options = IsoFormatOptions {
        volume_name: LABEL.to_owned(),
        system_id: None,
        volume_set_id: None,
        publisher_id: None,
        preparer_id: None,
        application_id: None,
        sector_size: 2048,
        path_separator: PathSeparator::ForwardSlash,
        features: CreationFeatures { joliet: Some(JolietLevel::Level3), ..CreationFeatures::default() },
        strict_charset: false,
    };
    IsoImageWriter::create(&mut buffer, files, options).map_err(io::Error::other)?;
    Ok(buffer.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> pb::Network {
        pb::Network {
            mac: "02:00:00:00:00:01".into(),
            address: "10.100.0.2/24".into(),
            gateway: "10.100.0.1".into(),
            nameservers: vec!["9.9.9.9".into()],
            ..pb::Network::default()
        }
    }

    #[test]
    fn seed_has_names_and_network() {
        let network = network();
        let seed = CloudInitSeed {
            instance: "web-1234",
            hostname: "web",
            network: Some(&network),
            user_data: "",
            ssh_keys: &[],
        };
        let files = seed.files();
        let text = |name: &str| {
            let (_, bytes) = files.iter().find(|(known, _)| *known == name).unwrap();
            String::from_utf8(bytes.clone()).unwrap()
        };
        assert_eq!(text("meta-data"), "{\"instance-id\":\"web-1234\",\"local-hostname\":\"web\"}\n");
        assert_eq!(text("user-data"), "#cloud-config\n{}\n");
        assert!(text("vendor-data").starts_with("#cloud-boothook\n#!/bin/sh\n"));
        let network: Value = serde_json::from_str(&text("network-config")).unwrap();
        let want = json!({"version": 2, "ethernets": {"primary": {
            "match": {"macaddress": "02:00:00:00:00:01"},
            "addresses": ["10.100.0.2/24"],
            "routes": [{"to": "0.0.0.0/0", "via": "10.100.0.1"}],
            "nameservers": {"addresses": ["9.9.9.9"], "search": []},
        }}});
        assert_eq!(network, want);
    }

    #[test]
    fn user_data_is_passed_unchanged() {
        let data = "#cloud-config\nusers: [{name: me}]\n";
        let seed =
            CloudInitSeed { instance: "a", hostname: "a", network: None, user_data: data, ssh_keys: &[] };
        let files = seed.files();
        let of = |name: &str| files.iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes.clone());
        assert_eq!(of("user-data").unwrap(), data.as_bytes());
        assert_eq!(of("network-config"), None, "a machine without a network");
    }

    #[test]
    fn hostname_cannot_inject_meta_data() {
        let seed = CloudInitSeed {
            instance: "a\nb: c",
            hostname: "\"}\nx: y",
            network: None,
            user_data: "",
            ssh_keys: &[],
        };
        let (_, meta) = &seed.files()[1];
        assert_eq!(meta.iter().filter(|byte| **byte == b'\n').count(), 1);
        let back: Value = serde_json::from_slice(meta).unwrap();
        assert_eq!(back["local-hostname"], "\"}\nx: y");
    }

    #[test]
    fn seed_disk_has_label_files_and_fixed_size() {
        let dir = tempfile::tempdir().unwrap();
        let (agent, disk) = (dir.path().join("agent"), dir.path().join("init.iso"));
        fs::write(&agent, vec![7; 300_000]).unwrap();
        let seed =
            CloudInitSeed { instance: "a", hostname: "a", network: None, user_data: "", ssh_keys: &[] };
        for _ in 0..2 {
            seed.write(&disk, &agent).unwrap();
        }
        let bytes = fs::read(&disk).unwrap();
        assert_eq!(bytes.len(), STEP);
        assert!(bytes[0x8028..].starts_with(b"CIDATA "), "the primary descriptor's label");
        let joliet: Vec<u8> = "vendor-data".encode_utf16().flat_map(u16::to_be_bytes).collect();
        assert!(bytes.windows(joliet.len()).any(|window| window == joliet));
        let missing = seed.write(&disk, &dir.path().join("absent")).unwrap_err().to_string();
        assert!(missing.contains("absent") && missing.contains("xtask setup"), "{missing}");
    }

    #[test]
    fn public_keys_are_those_of_the_default_user() {
        let keys = ["ssh-ed25519 AAAA me".to_owned()];
        let seed =
            CloudInitSeed { instance: "a", hostname: "a", network: None, user_data: "", ssh_keys: &keys };
        let files = seed.files();
        let meta_data = &files.iter().find(|(name, _)| *name == "meta-data").unwrap().1;
        let meta_data: Value = serde_json::from_slice(meta_data).unwrap();
        assert_eq!(meta_data["public-keys"], json!(keys));
    }
}
