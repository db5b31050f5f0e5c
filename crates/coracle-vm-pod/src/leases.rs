//! Leases of a DHCP server of the node: the address of each MAC address.
//!
//! dnsmasq writes one line for each lease: expiry time, MAC address, address, name, client id (`dnsmasq(8)`,
//! `--dhcp-leasefile`). Other servers write JSON: objects with `mac` and `ip`, in a list or in `leases`. The format is detected
//! from the content.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::path::Path;

use serde_json::Value;

/// Most bytes of the file that are read.
const FILE_MAX: u64 = 4 << 20;

/// Leases, by MAC address in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leases(BTreeMap<String, IpAddr>);

impl Leases {
    /// Returns the address of a MAC address, in upper or lower case.
    #[must_use]
    pub fn address_of(&self, mac: &str) -> Option<IpAddr> {
        self.0.get(&mac.to_ascii_lowercase()).copied()
    }

    /// Parses either format. Invalid lines and objects are skipped. Pure.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match serde_json::from_str::<Value>(text) {
            Ok(value) => Self(of_json(&value)),
            Err(_) => Self(text.lines().filter_map(of_line).collect()),
        }
    }
}

/// Reads a lease file. Blocking.
///
/// # Errors
/// When the file cannot be read.
pub fn read(path: &Path) -> io::Result<Leases> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(FILE_MAX).read_to_string(&mut text)?;
    Ok(Leases::parse(&text))
}

fn of_line(line: &str) -> Option<(String, IpAddr)> {
    let mut words = line.split_whitespace();
    let (_end, mac, address) = (words.next()?, words.next()?, words.next()?);
    Some((mac.to_ascii_lowercase(), address.parse().ok()?))
}

fn of_json(value: &Value) -> BTreeMap<String, IpAddr> {
    let inner = value.get("leases").unwrap_or(value);
    let listed: Vec<&Value> = match inner {
        Value::Array(all) => all.iter().collect(),
        Value::Object(all) => all.values().collect(),
        _ => vec![],
    };
    let one = |lease: &Value| {
        let text = |key: &str| lease.get(key)?.as_str().map(str::to_owned);
        Some((text("mac")?.to_ascii_lowercase(), text("ip")?.parse().ok()?))
    };
    listed.into_iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_file_formats_are_parsed() {
        let lines =
            "1700000000 52:54:00:AA:bb:01 10.0.0.5 web *\nnonsense\n0 52:54:00:aa:bb:02 10.0.0.6 * 01:52\n";
        let list = r#"[{"mac": "52:54:00:aa:bb:01", "ip": "10.0.0.5"}, {"ip": "10.0.0.7"}]"#;
        let below = r#"{"leases": {"a": {"mac": "52:54:00:AA:BB:01", "ip": "10.0.0.5"}}}"#;
        for text in [lines, list, below] {
            let leases = Leases::parse(text);
            assert_eq!(leases.address_of("52:54:00:aa:BB:01"), Some("10.0.0.5".parse().unwrap()), "{text}");
            assert_eq!(leases.address_of("52:54:00:aa:bb:09"), None);
        }
        assert_eq!(Leases::parse("").address_of("x"), None);
    }
}
