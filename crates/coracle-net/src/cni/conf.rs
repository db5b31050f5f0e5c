//! Configurations of networks, and what a plugin is given. Pure but for reading the files.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use coracle_hypervisor::Forward;
use coracle_types::{MacAddr, VmId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::CniError;

/// Interface in the namespace of a VM.
pub(super) const INTERFACE: &str = "eth0";

/// Capability of plugins that limit the traffic of a VM.
pub(super) const BANDWIDTH: &str = "bandwidth";

/// Versions of the specification whose results are understood.
const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// Bits at once; the plugin of the CNI project counts bytes in 32 bits.
const BURST: u64 = u32::MAX as u64;

/// Bytes of a configuration.
const BYTES_MAX: usize = 1 << 20;

/// What a VM wishes of its network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Name of the network; `None`: that of the first file of the directory.
    pub network: Option<String>,
    /// MAC of its NIC.
    pub mac: MacAddr,
    /// Address that it had before, or wants.
    pub address: Option<Ipv4Addr>,
    /// Its IPv6 address, likewise.
    pub address6: Option<Ipv6Addr>,
    /// Ports of the node that lead to it.
    pub ports: Vec<Forward>,
    /// Limits of its traffic; `None`: those that it has.
    pub bandwidth: Option<Bandwidth>,
}

impl Wishes {
    /// Any address of the network that it has or gets, without ports.
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
    /// Value of the capability `bandwidth`. A burst of as much as the plugin takes: the rate is what a pod asks for.
    fn capability(self) -> Value {
        let directions = [("ingress", self.ingress), ("egress", self.egress)];
        let limits = directions.into_iter().filter_map(|(name, rate)| Some((name, rate?)));
        let values = limits.flat_map(|(name, rate)| {
            [(format!("{name}Rate"), json!(rate)), (format!("{name}Burst"), json!(BURST))]
        });
        Value::Object(values.collect())
    }
}

/// A list of plugins, as its file says.
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

/// One call of a plugin.
pub(super) struct Call<'a> {
    pub(super) command: &'static str,
    pub(super) id: &'a str,
    pub(super) netns: &'a str,
    pub(super) interface: &'a str,
    pub(super) args: String,
}

impl ConfList {
    /// The network of that name, or the first one by the names of the files.
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
        // A type is the name of a program: never a path.
        let is_name = |name: &str| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        match conf.plugins.iter().find(|plugin| !is_name(type_of(plugin))) {
            Some(plugin) => Err(format!("invalid type of a plugin: {}", plugin["type"])),
            None => Ok(conf),
        }
    }

    fn has(&self, capability: &str) -> bool {
        self.plugins.iter().any(|plugin| plugin["capabilities"][capability] == json!(true))
    }

    /// Values of the capabilities that a VM uses. Ports without a plugin for them are refused; an address and a MAC are offered
    /// by `CNI_ARGS` as well.
    pub(super) fn runtime(&self, wishes: &Wishes) -> Result<Value, CniError> {
        if !wishes.ports.is_empty() && !self.has("portMappings") {
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
        let mut runtime = json!({"mac": wishes.mac.to_string()});
        let addresses = [wishes.address.map(IpAddr::from), wishes.address6.map(IpAddr::from)];
        let addresses: Vec<_> = addresses.into_iter().flatten().collect();
        if !addresses.is_empty() {
            runtime["ips"] = json!(addresses);
        }
        if !wishes.ports.is_empty() {
            runtime["portMappings"] = wishes.ports.iter().map(mapping).collect();
        }
        if let Some(bandwidth) = wishes.bandwidth {
            runtime[BANDWIDTH] = bandwidth.capability();
        }
        Ok(runtime)
    }

    /// What a plugin reads (section 5, "Deriving execution configuration from plugin configuration").
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

    /// GC came with version 1.1.
    pub(super) fn has_gc(&self) -> bool {
        self.version == "1.1.0"
    }

    pub(super) fn gc(&self, plugin: &Value, valid: &[Value]) -> Value {
        let mut input = self.of(plugin);
        input["cni.dev/valid-attachments"] = valid.into();
        input
    }
}

/// Name of a plugin's program.
pub(super) fn type_of(plugin: &Value) -> &str {
    plugin["type"].as_str().unwrap_or_default()
}

/// Of a VM, for GC.
pub(super) fn attachment(id: &VmId) -> Value {
    json!({"containerID": id.as_str(), "ifname": INTERFACE})
}

/// `CNI_ARGS`: for plugins without capabilities.
pub(super) fn args(mac: &str, runtime: &Value) -> String {
    // One address: plugins take no list there.
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

    fn wishes(ports: Vec<Forward>) -> Wishes {
        let vm = VmId::of_name(&"a".parse().unwrap());
        Wishes {
            network: None,
            mac: coracle_types::MacAddr::of(&vm),
            address: Some([10, 0, 0, 9].into()),
            address6: "fd00::9".parse().ok(),
            ports,
            bandwidth: Some(Bandwidth { ingress: Some(1_000_000), egress: None }),
        }
    }

    #[test]
    fn plugin_is_given_what_it_declares() {
        let port = Forward {
            protocol: Protocol::Tcp,
            host_address: [127, 0, 0, 1].into(),
            host_port: 8080,
            guest_port: 80,
        };
        let (list, wishes) = (list(), wishes(vec![port]));
        let runtime = list.runtime(&wishes).unwrap();
        let previous = json!({"ips": []});
        let mac = wishes.mac.to_string();
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
        let refused = list.runtime(&wishes(vec![port])).unwrap_err();
        assert_eq!(refused.to_string(), "CNI network net has no plugin with the capability portMappings");
        list.runtime(&wishes(vec![])).unwrap();
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
