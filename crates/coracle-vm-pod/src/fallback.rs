//! Access to guests whose agent is not available: SSH, or a text for the user. Pure.

use std::net::IpAddr;

use coracle_api::cocoon::{Os, VmRuntimeAnnotations, VmSpecAnnotations};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

/// Number of journal lines when the client sets none.
const LINES: u64 = 200;

/// Access to a guest without an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// SSH to this address.
    Ssh(IpAddr),
    /// Not available from kubectl; this text tells the user how to connect.
    Help(String),
}

/// Returns the access to the guest of a pod's VM without its agent; `None`: its operating system is not supported, its address
/// is unknown, or the address is one of the node itself. `has_password`: this node has the password of its guests.
#[must_use]
pub fn of(pod: &Pod, has_password: bool) -> Option<Fallback> {
    let noted = VmRuntimeAnnotations::from_pod(pod).ip;
    let address = noted.parse::<IpAddr>().ok().filter(is_of_a_guest)?;
    match VmSpecAnnotations::from_pod(pod).os {
        Os::Windows => Some(Fallback::Help(rdp_help(address))),
        Os::Linux if has_password => Some(Fallback::Ssh(address)),
        _ => None,
    }
}

/// Returns false for addresses that refer to the node itself or to services of its cloud. Pods can name any address.
fn is_of_a_guest(address: &IpAddr) -> bool {
    let is_local = match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let address = address.to_canonical();
    !(is_local || address.is_loopback() || address.is_unspecified() || address.is_multicast())
}

fn rdp_help(address: IpAddr) -> String {
    format!(
        "This VM runs Windows: kubectl has neither exec nor logs for it. Connect to it by RDP:\n  \
         address: {address}:3389\n  Windows: mstsc /v:{address}:3389\n  Linux:   xfreerdp /v:{address}:3389\n"
    )
}

/// Options of reading a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Journal {
    /// Number of last lines; `None`: 200, or all lines if `since` is set.
    pub lines: Option<u64>,
    /// Time of the earliest line.
    pub since: Option<Timestamp>,
    /// Whether each line has its timestamp.
    pub timestamps: bool,
    /// Whether the journal is followed.
    pub follow: bool,
}

impl Journal {
    /// Returns the command that prints the journal in a guest with systemd.
    #[must_use]
    pub fn command(&self) -> String {
        let lines = match (self.lines, self.since) {
            (Some(lines), _) => format!(" --lines={lines}"),
            (None, Some(_)) => " --lines=all".to_owned(),
            (None, None) => format!(" --lines={LINES}"),
        };
        let since = self.since.map(|since| format!(" --since=@{}", since.as_second()));
        let output = if self.timestamps { " --output=short-iso-precise" } else { "" };
        let follow = if self.follow { " --follow" } else { "" };
        format!("journalctl --no-pager --quiet{lines}{}{output}{follow}", since.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use coracle_api::cocoon::keys;
    use serde_json::json;

    use super::*;

    #[test]
    fn fallback_table() {
        let pod = |os: &str, ip: &str| -> Pod {
            let annotations = json!({keys::VM_NAME: "a", keys::OS: os, keys::VM_IP: ip});
            serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap()
        };
        let ssh = |ip: &str| Some(Fallback::Ssh(ip.parse().unwrap()));
        for (why, os, ip, has_password, want) in [
            ("linux", "linux", "10.0.0.5", true, ssh("10.0.0.5")),
            ("linux is the default", "", "10.0.0.5", true, ssh("10.0.0.5")),
            ("no password", "linux", "10.0.0.5", false, None),
            ("no address", "linux", "", true, None),
            ("the node itself", "linux", "127.0.0.1", true, None),
            ("the node itself, written otherwise", "linux", "::ffff:127.0.0.1", true, None),
            ("metadata of a cloud", "linux", "169.254.169.254", true, None),
            ("android has no SSH", "android", "10.0.0.5", true, None),
        ] {
            assert_eq!(of(&pod(os, ip), has_password), want, "{why}");
        }
        let Some(Fallback::Help(text)) = of(&pod("windows", "10.0.0.5"), true) else { panic!("help") };
        assert!(text.contains("RDP") && text.contains("10.0.0.5:3389"), "{text}");
    }

    #[test]
    fn journal_table() {
        let since = Some(Timestamp::from_second(7).unwrap());
        for (journal, want) in [
            (Journal::default(), "--lines=200"),
            (Journal { lines: Some(0), ..Journal::default() }, "--lines=0"),
            (Journal { since, ..Journal::default() }, "--lines=all --since=@7"),
            (
                Journal { lines: Some(5), since, timestamps: true, follow: true },
                "--lines=5 --since=@7 --output=short-iso-precise --follow",
            ),
        ] {
            assert_eq!(journal.command(), format!("journalctl --no-pager --quiet {want}"));
        }
    }
}
