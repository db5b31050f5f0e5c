//! Configurations of networks, and the input of plugins. Pure, except for reading the files.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use coracle_hypervisor::Forward;
use coracle_types::{MacAddr, VmId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::CniError;

/// Name of the interface in the namespace of a VM.
pub(super) const INTERFACE: &str = "eth0";

/// Capability of plugins that limit the traffic of a VM.
pub(super) const BANDWIDTH: &str = "bandwidth";

/// Versions of the specification whose results are supported.
const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// Burst of a traffic limit, bits. The plugin of the CNI project counts bytes in 32 bits.
const BURST: u64 = u32::MAX as u64;

/// Maximum size of a configuration, bytes.
const BYTES_MAX: usize = 1 << 20;

/// Network configuration that a VM requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkRequest {
    /// Name of the network; `None`: that of the first file of the directory.
    pub network: Option<String>,
    /// MAC of the VM's NIC.
    pub mac: MacAddr,
    /// IPv4 address that the VM had before, or requests.
    pub address: Option<Ipv4Addr>,
    /// IPv6 address that the VM had before, or requests.
    pub address6: Option<Ipv6Addr>,
    /// Ports of the node that are forwarded to the VM.
    pub ports: Vec<Forward>,
    /// Traffic limits of the VM; `None`: the recorded ones stay.
    pub bandwidth: Option<Bandwidth>,
}

impl NetworkRequest {
    /// Requests any address, or the one that the VM has, on the default network without ports.
    #[must_use]
    pub fn of(mac: MacAddr) -> Self {
        Self { network: None, mac, address: None, address6: None, ports: vec![], bandwidth: None }
    }
}

/// Limits of the traffic of a VM, bits per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bandwidth {
    /// To the VM; `None`: no limit.
    pub ingress: Option<u64>,
    /// From the VM; `None`: no limit.
    pub egress: Option<u64>,
}

impl Bandwidth {
    /// Value of the capability `bandwidth`. The burst is the plugin's maximum, because a pod limits the rate only.
    fn capability(self) -> Value {
        let directions = [("ingress", self.ingress), ("egress", self.egress)];
        let limits = directions.into_iter().filter_map(|(name, rate)| Some((name, rate?)));
        let values = limits.flat_map(|(name, rate)| {
            [(format!("{name}Rate"), json!(rate)), (format!("{name}Burst"), json!(BURST))]
        });
        Value::Object(values.collect())
    }
}

/// List of plugins, as its configuration file has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ConfList {
    #[serde(rename = "cniVersion")]
    pub(super) version: String,
    pub(super) name: String,
    #[serde(default)]
    pub(super) disable_check: bool,
    pub(super) plugins: Vec<Value>,
}

/// Arguments of one plugin call.
pub(super) struct Call<'a> {
    pub(super) command: &'static str,
    pub(super) id: &'a str,
    pub(super) netns: &'a str,
    pub(super) interface: &'a str,
    pub(super) args: String,
}

impl ConfList {
    /// Loads the network of this name, or the first one in the order of the file names.
    pub(super) fn load(dir: &Path, name: Option<&str>) -> Result<Self, CniError> {
        let not_found =
            || CniError::NotFound { name: name.unwrap_or("(any)").to_owned(), dir: dir.to_owned() };
        let files = std::fs::read_dir(dir).map_err(|_| not_found())?.flatten().map(|file| file.path());
        let mut files: Vec<_> =
            files.filter(|path| path.extension().is_some_and(|end| end == "conflist")).collect();
        files.sort();
        let mut invalid = None;
        for path in files {
            let failed = |reason: String| CniError::Configuration { path: path.clone(), reason };
            let read = std::fs::read(&path).map_err(|error| failed(error.to_string()));
            match read.and_then(|bytes| Self::parse(&bytes).map_err(failed)) {
                Ok(conf) if name.is_none_or(|name| name == conf.name) => return Ok(conf),
                Ok(_) => {}
                Err(error) if name.is_none() => return Err(error),
                Err(error) => invalid = Some(error),
            }
        }
        Err(invalid.unwrap_or_else(not_found))
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > BYTES_MAX {
            return Err(format!("more than {BYTES_MAX} bytes"));
        }
        let conf: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if !VERSIONS.contains(&conf.version.as_str()) {
            return Err(format!("unknown cniVersion {:?}: one of {}", conf.version, VERSIONS.join(", ")));
        }
        if conf.plugins.is_empty() {
            return Err("no plugins".to_owned());
        }
        // The type is the name of a program in the plugin directory, never a path.
        let is_name = |name: &str| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        match conf.plugins.iter().find(|plugin| !is_name(type_of(plugin))) {
            Some(plugin) => Err(format!("invalid type of a plugin: {}", plugin["type"])),
            None => Ok(conf),
        }
    }

    fn has(&self, capability: &str) -> bool {
        self.plugins.iter().any(|plugin| plugin["capabilities"][capability] == json!(true))
    }

    /// Values of the capabilities that a VM uses. Fails if the VM has ports and no plugin has the capability for them. Address
    /// and MAC are passed in `CNI_ARGS` as well.
    pub(super) fn runtime(&self, request: &NetworkRequest) -> Result<Value, CniError> {
        if !request.ports.is_empty() && !self.has("portMappings") {
            return Err(CniError::Capability { network: self.name.clone(), capability: "portMappings" });
        }
        let mapping = |port: &Forward| {
            let mut mapping = json!({"hostPort": port.host_port, "containerPort": port.guest_port,
                "protocol": port.protocol.as_str()});
            if !port.host_address.is_unspecified() {
                mapping["hostIP"] = port.host_address.to_string().into();
            }
            mapping
        };
        let mut runtime = json!({"mac": request.mac.to_string()});
        let addresses = [request.address.map(IpAddr::from), request.address6.map(IpAddr::from)];
        let addresses: Vec<_> = addresses.into_iter().flatten().collect();
        if !addresses.is_empty() {
            runtime["ips"] = json!(addresses);
        }
        if !request.ports.is_empty() {
            runtime["portMappings"] = request.ports.iter().map(mapping).collect();
        }
        if let Some(bandwidth) = request.bandwidth {
            runtime[BANDWIDTH] = bandwidth.capability();
        }
        Ok(runtime)
    }

    /// Standard input of a plugin (section 5, "Deriving execution configuration from plugin configuration").
    pub(super) fn input(&self, plugin: &Value, runtime: &Value, previous: Option<&Value>) -> Value {
        let mut input = self.of(plugin);
        let wanted = plugin["capabilities"].as_object();
        let values = wanted.into_iter().flatten().filter(|(_, is_wanted)| **is_wanted == json!(true));
        let values = values.filter_map(|(name, _)| Some((name.clone(), runtime.get(name)?.clone())));
        let values: serde_json::Map<_, _> = values.collect();
        if !values.is_empty() {
            input["runtimeConfig"] = values.into();
        }
        if let Some(previous) = previous {
            input["prevResult"] = previous.clone();
        }
        input
    }

    fn of(&self, plugin: &Value) -> Value {
        let mut input = plugin.clone();
        if let Some(fields) = input.as_object_mut() {
            fields.remove("capabilities");
        }
        input["cniVersion"] = self.version.as_str().into();
        input["name"] = self.name.as_str().into();
        input
    }

    /// Whether the version of the configuration has GC, which came with 1.1.
    pub(super) fn has_gc(&self) -> bool {
        self.version == "1.1.0"
    }

    pub(super) fn gc(&self, plugin: &Value, valid: &[Value]) -> Value {
        let mut input = self.of(plugin);
        input["cni.dev/valid-attachments"] = valid.into();
        input
    }
}

/// Name of a plugin's program, its `type`.
pub(super) fn type_of(plugin: &Value) -> &str {
    plugin["type"].as_str().unwrap_or_default()
}

/// Valid attachment of a VM, for GC.
pub(super) fn attachment(id: &VmId) -> Value {
    json!({"containerID": id.as_str(), "ifname": INTERFACE})
}

/// Value of `CNI_ARGS`, for plugins without capabilities.
pub(super) fn args(mac: &str, runtime: &Value) -> String {
    // Plugins accept no list of addresses here.
    let address = runtime["ips"][0].as_str().map(|address| format!(";IP={address}"));
    format!("IgnoreUnknown=1;MAC={mac}{}", address.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use coracle_hypervisor::Protocol;

    use super::*;

    fn list() -> ConfList {
        let text = json!({"cniVersion": "1.0.0", "name": "net", "plugins": [
            {"type": "bridge", "capabilities": {"mac": true, "ips": true}},
            {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true},
            {"type": "bandwidth", "capabilities": {"bandwidth": true}},
        ]});
        ConfList::parse(text.to_string().as_bytes()).unwrap()
    }

    fn request(ports: Vec<Forward>) -> NetworkRequest {
        let vm = VmId::of_name(&"a".parse().unwrap());
        NetworkRequest {
            network: None,
            mac: coracle_types::MacAddr::of(&vm),
            address: Some([10, 0, 0, 9].into()),
            address6: "fd00::9".parse().ok(),
            ports,
            bandwidth: Some(Bandwidth { ingress: Some(1_000_000), egress: None }),
        }
    }

    #[test]
    fn plugin_receives_only_declared_capabilities() {
        let port = Forward {
            protocol: Protocol::Tcp,
            host_address: [127, 0, 0, 1].into(),
            host_port: 8080,
            guest_port: 80,
        };
        let (list, request) = (list(), request(vec![port]));
        let runtime = list.runtime(&request).unwrap();
        let previous = json!({"ips": []});
        let mac = request.mac.to_string();
        assert_eq!(
            list.input(&list.plugins[0], &runtime, None),
            json!({"cniVersion": "1.0.0", "name": "net", "type": "bridge",
                "runtimeConfig": {"mac": mac, "ips": ["10.0.0.9", "fd00::9"]}})
        );
        assert_eq!(
            list.input(&list.plugins[1], &runtime, Some(&previous)),
            json!({"cniVersion": "1.0.0", "name": "net", "type": "portmap", "snat": true, "prevResult": {"ips": []},
                "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp",
                    "hostIP": "127.0.0.1"}]}})
        );
        assert_eq!(
            list.input(&list.plugins[2], &runtime, None)["runtimeConfig"],
            json!({"bandwidth": {"ingressRate": 1_000_000, "ingressBurst": BURST}})
        );
        assert_eq!(args(&mac, &runtime), format!("IgnoreUnknown=1;MAC={mac};IP=10.0.0.9"));
    }

    #[test]
    fn ports_without_a_plugin_for_them_are_refused() {
        let mut list = list();
        list.plugins.truncate(1);
        let port =
            Forward { protocol: Protocol::Udp, host_address: [0; 4].into(), host_port: 53, guest_port: 53 };
        let refused = list.runtime(&request(vec![port])).unwrap_err();
        assert_eq!(refused.to_string(), "CNI network net has no plugin with the capability portMappings");
        list.runtime(&request(vec![])).unwrap();
    }

    #[test]
    fn invalid_lists_are_refused_table() {
        for (text, want) in [
            ("{", "EOF"),
            (r#"{"cniVersion":"9.0.0","name":"n","plugins":[{"type":"x"}]}"#, "unknown cniVersion"),
            (r#"{"cniVersion":"1.0.0","name":"n","plugins":[]}"#, "no plugins"),
            (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"../sh"}]}"#, "invalid type"),
            (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{}]}"#, "invalid type"),
        ] {
            let refused = ConfList::parse(text.as_bytes()).unwrap_err();
            assert!(refused.contains(want), "{text}: {refused}");
        }
    }
}
