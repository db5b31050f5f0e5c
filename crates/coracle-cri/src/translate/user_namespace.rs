//! User namespaces of pods. Pure.

use coracle_proto::cri::{IdMapping as Wire, Mount, NamespaceMode, NamespaceOption};
use coracle_types::IdMapping;

use crate::refusal::Refusal;

/// Kernel parameters of a pod in a user namespace, unless it sets others. Its root has no privileges over the guest's network,
/// and must not need them to serve port 80 or to ping.
pub(crate) const SYSCTLS: [(&str, &str); 2] =
    [("net.ipv4.ip_unprivileged_port_start", "0"), ("net.ipv4.ping_group_range", "0 2147483647")];

/// Returns the ids of the requested user namespace; `None`: none is requested.
///
/// # Errors
/// A namespace that is not the pod's, or ids other than one range from 0 that is the same for users and groups, as kubelets
/// send it.
pub(crate) fn ids(namespaces: &NamespaceOption) -> Result<Option<IdMapping>, Refusal> {
    let Some(asked) = &namespaces.userns_options else { return Ok(None) };
    match asked.mode() {
        NamespaceMode::Node => Ok(None),
        NamespaceMode::Pod => range(&asked.uids, &asked.gids).map(Some),
        NamespaceMode::Container | NamespaceMode::Target => {
            let (what, why) = ("a user namespace of one container", "a pod has one");
            Err(Refusal::Unsupported { what, why })
        }
    }
}

/// Returns the ids of a mount's owners; `None`: they are those of the node.
///
/// # Errors
/// When the ids are not those of the pod.
pub(crate) fn ids_of_mount(mount: &Mount, pod: Option<IdMapping>) -> Result<Option<IdMapping>, Refusal> {
    if mount.uid_mappings.is_empty() && mount.gid_mappings.is_empty() {
        return Ok(None);
    }
    match range(&mount.uid_mappings, &mount.gid_mappings)? {
        ids if Some(ids) == pod => Ok(Some(ids)),
        _ => Err(Refusal::invalid("mount", format!("the ids of {} are not the pod's", mount.container_path))),
    }
}

fn range(uids: &[Wire], gids: &[Wire]) -> Result<IdMapping, Refusal> {
    let invalid = |why: String| Refusal::invalid("user namespace", why);
    match (uids, gids) {
        ([uids], [gids]) if uids == gids && uids.container_id == 0 => {
            IdMapping::new(uids.host_id, uids.length).map_err(|error| invalid(error.to_string()))
        }
        _ => Err(invalid("users and groups are not one range from 0, the same for both".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::UserNamespace;

    use super::*;

    fn wire(container_id: u32, host_id: u32, length: u32) -> Wire {
        Wire { host_id, container_id, length }
    }

    fn namespace_option(mode: NamespaceMode, uids: Vec<Wire>, gids: Vec<Wire>) -> NamespaceOption {
        let userns_options = Some(UserNamespace { mode: mode.into(), uids, gids });
        NamespaceOption { userns_options, ..NamespaceOption::default() }
    }

    #[test]
    fn requests_table() {
        let range = || vec![wire(0, 65_536, 65_536)];
        let ids_of = IdMapping::new(65_536, 65_536).unwrap();
        for (why, namespaces, want) in [
            ("nothing asked", NamespaceOption::default(), Ok(None)),
            ("that of the node", namespace_option(NamespaceMode::Node, vec![], vec![]), Ok(None)),
            ("one range", namespace_option(NamespaceMode::Pod, range(), range()), Ok(Some(ids_of))),
            ("no range", namespace_option(NamespaceMode::Pod, vec![], vec![]), Err(())),
            ("no groups", namespace_option(NamespaceMode::Pod, range(), vec![]), Err(())),
            (
                "other groups",
                namespace_option(NamespaceMode::Pod, range(), vec![wire(0, 1, 65_536)]),
                Err(()),
            ),
            (
                "root not mapped",
                namespace_option(NamespaceMode::Pod, vec![wire(1, 9, 9)], vec![wire(1, 9, 9)]),
                Err(()),
            ),
            (
                "the node's root",
                namespace_option(NamespaceMode::Pod, vec![wire(0, 0, 9)], vec![wire(0, 0, 9)]),
                Err(()),
            ),
            (
                "two ranges",
                namespace_option(NamespaceMode::Pod, [range(), range()].concat(), range()),
                Err(()),
            ),
            ("a container's", namespace_option(NamespaceMode::Container, range(), range()), Err(())),
        ] {
            assert_eq!(ids(&namespaces).map_err(drop), want, "{why}");
        }
    }

    #[test]
    fn mount_id_mappings_must_match_the_pod() {
        let pod = IdMapping::new(100, 10).ok();
        let mount =
            |uids: Vec<Wire>| Mount { gid_mappings: uids.clone(), uid_mappings: uids, ..Mount::default() };
        for (why, uids, pod, want) in [
            ("none", vec![], pod, Ok(None)),
            ("the pod's", vec![wire(0, 100, 10)], pod, Ok(pod)),
            ("others", vec![wire(0, 200, 10)], pod, Err(())),
            ("a pod without a namespace", vec![wire(0, 100, 10)], None, Err(())),
        ] {
            assert_eq!(ids_of_mount(&mount(uids), pod).map_err(drop), want, "{why}");
        }
    }
}
