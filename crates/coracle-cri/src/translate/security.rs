//! Privileges and users of containers. Pure.

use coracle_host::{GroupsPolicy, PidNamespace, Security};
use coracle_pod::container_spec::CAPABILITIES;
use coracle_proto::cri::{
    Capability, Int64Value, LinuxContainerResources, LinuxContainerSecurityContext, NamespaceMode,
    SecurityProfile, SupplementalGroupsPolicy, security_profile::ProfileType,
};

use crate::refusal::Refusal;

/// All capabilities.
const ALL: u64 = (1 << CAPABILITIES.len()) - 1;
/// Capabilities that the OCI runtimes grant by default.
const DEFAULT: u64 = 0xa804_25fb;

/// User and groups of a container's process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunAs {
    /// User in the form of OCI images; empty: that of the image.
    pub(crate) user: String,
    pub(crate) policy: GroupsPolicy,
    pub(crate) groups: Vec<u32>,
}

/// Returns the user and groups of a container.
///
/// # Errors
/// A group without a user, or a number that is not an id.
pub(crate) fn run_as(security: &LinuxContainerSecurityContext) -> Result<RunAs, Refusal> {
    let user = match (&security.run_as_user, security.run_as_username.as_str()) {
        (Some(user), _) => id(user)?.to_string(),
        (None, name) => name.to_owned(),
    };
    let user = match &security.run_as_group {
        None => user,
        Some(_) if user.is_empty() => {
            return Err(Refusal::invalid("security context", "a group is given without a user"));
        }
        Some(group) => format!("{user}:{}", id(group)?),
    };
    let policy = match security.supplemental_groups_policy() {
        SupplementalGroupsPolicy::Merge => GroupsPolicy::Merge,
        SupplementalGroupsPolicy::Strict => GroupsPolicy::Strict,
    };
    let group = |group: &i64| id(&Int64Value { value: *group });
    let groups = security.supplemental_groups.iter().map(group).collect::<Result<_, _>>()?;
    Ok(RunAs { user, policy, groups })
}

fn id(value: &Int64Value) -> Result<u32, Refusal> {
    let invalid = |_| Refusal::invalid("security context", format!("{} is not a user or group", value.value));
    u32::try_from(value.value).map_err(invalid)
}

/// Returns the privileges of a container's processes; `seccomp` is the filter of its profile.
///
/// # Errors
/// An unknown capability.
pub(crate) fn security(
    context: &LinuxContainerSecurityContext,
    resources: &LinuxContainerResources,
    seccomp: Vec<u8>,
) -> Result<Security, Refusal> {
    let privileged = context.privileged;
    let capabilities = match (privileged, &context.capabilities) {
        (true, _) => ALL,
        (false, None) => DEFAULT,
        (false, Some(given)) => capabilities(given)?,
    };
    let paths = |paths: &Vec<String>| if privileged { vec![] } else { paths.clone() };
    Ok(Security {
        capabilities: Some(capabilities),
        no_new_privileges: context.no_new_privs,
        masked_paths: paths(&context.masked_paths),
        read_only_paths: paths(&context.readonly_paths),
        rlimits: vec![],
        oom_score_adj: i32::try_from(resources.oom_score_adj.clamp(-1000, 1000)).unwrap_or(0),
        seccomp,
        privileged,
        user_namespace: None,
    })
}

/// Returns the set of capabilities. `ALL` applies first, then single names: `drop ALL, add KILL` leaves `KILL`.
fn capabilities(given: &Capability) -> Result<u64, Refusal> {
    let is_all = |name: &String| name.eq_ignore_ascii_case("ALL");
    let mut set = DEFAULT;
    if given.add_capabilities.iter().any(is_all) {
        set = ALL;
    }
    if given.drop_capabilities.iter().any(is_all) {
        set = 0;
    }
    for name in given.add_capabilities.iter().filter(|name| !is_all(name)) {
        set |= capability(name)?;
    }
    for name in given.drop_capabilities.iter().filter(|name| !is_all(name)) {
        set &= !capability(name)?;
    }
    Ok(set)
}

/// Returns the bit of a capability by name, with or without `CAP_`.
fn capability(name: &str) -> Result<u64, Refusal> {
    let upper = name.to_ascii_uppercase();
    let plain = upper.strip_prefix("CAP_").unwrap_or(&upper);
    let number = CAPABILITIES.iter().position(|known| *known == plain);
    number
        .map(|number| 1 << number)
        .ok_or_else(|| Refusal::invalid("capability", format!("\"{name}\" is unknown")))
}

/// Returns whether a set contains a capability, by name without `CAP_`.
pub(crate) fn has_capability(set: u64, name: &str) -> bool {
    CAPABILITIES.iter().position(|known| *known == name).is_some_and(|number| set & (1 << number) != 0)
}

/// Returns the PID namespace of a container. The host's namespace stands for that of the guest.
pub(crate) fn pid_namespace(context: &LinuxContainerSecurityContext) -> Result<PidNamespace, Refusal> {
    let namespaces = context.namespace_options.clone().unwrap_or_default();
    Ok(match namespaces.pid() {
        NamespaceMode::Pod | NamespaceMode::Node => PidNamespace::Pod,
        NamespaceMode::Container => PidNamespace::Container,
        NamespaceMode::Target => {
            let id = namespaces.target_id;
            let invalid = |_| Refusal::NotFound { what: "target container", id: id.clone() };
            PidNamespace::Target(id.parse().map_err(invalid)?)
        }
    })
}

/// Source of a container's seccomp filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SeccompSource {
    Unconfined,
    RuntimeDefault,
    /// A file on the host.
    Localhost(String),
}

/// Returns the seccomp profile of a container. A privileged container has none.
///
/// # Errors
/// A profile of an unknown form.
pub(crate) fn seccomp_source(context: &LinuxContainerSecurityContext) -> Result<SeccompSource, Refusal> {
    if context.privileged {
        return Ok(SeccompSource::Unconfined);
    }
    let Some(profile) = &context.seccomp else {
        #[expect(deprecated, reason = "older kubelets send it")]
        return deprecated_seccomp(&context.seccomp_profile_path);
    };
    Ok(match profile.profile_type() {
        ProfileType::RuntimeDefault => SeccompSource::RuntimeDefault,
        ProfileType::Unconfined => SeccompSource::Unconfined,
        ProfileType::Localhost => SeccompSource::Localhost(profile.localhost_ref.clone()),
    })
}

fn deprecated_seccomp(path: &str) -> Result<SeccompSource, Refusal> {
    match path {
        "" | "unconfined" => Ok(SeccompSource::Unconfined),
        "runtime/default" | "docker/default" => Ok(SeccompSource::RuntimeDefault),
        other => match other.strip_prefix("localhost/") {
            Some(file) => Ok(SeccompSource::Localhost(file.to_owned())),
            None => Err(Refusal::invalid("seccomp profile", format!("\"{other}\""))),
        },
    }
}

/// Refuses labels that only the host's kernel knows.
pub(crate) fn refuse_host_labels(
    apparmor: Option<&SecurityProfile>,
    deprecated_apparmor: &str,
) -> Result<(), Refusal> {
    let localhost = apparmor.is_some_and(|profile| profile.profile_type() == ProfileType::Localhost);
    if localhost || deprecated_apparmor.starts_with("localhost/") {
        let (what, why) = ("an AppArmor profile of the host", "a VM has a kernel of its own");
        return Err(Refusal::Unsupported { what, why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn capabilities_table() {
        let bit = |name| capability(name).unwrap();
        for (why, add, drop, want) in [
            ("nothing said", &[][..], &[][..], DEFAULT),
            ("one more", &["NET_ADMIN"], &[], DEFAULT | bit("NET_ADMIN")),
            ("one less", &[], &["CAP_CHOWN"], DEFAULT & !bit("CHOWN")),
            ("all", &["ALL"], &[], ALL),
            ("none", &[], &["all"], 0),
            ("one alone", &["kill"], &["ALL"], bit("KILL")),
            ("all but one", &["ALL"], &["SYS_ADMIN"], ALL & !bit("SYS_ADMIN")),
        ] {
            let given = Capability {
                add_capabilities: names(add),
                drop_capabilities: names(drop),
                ..Capability::default()
            };
            assert_eq!(capabilities(&given).unwrap(), want, "{why}");
        }
        assert!(capability("CAP_NOPE").is_err());
        assert_eq!(ALL, 0x1ff_ffff_ffff);
        assert!(has_capability(ALL, "CHECKPOINT_RESTORE") && !has_capability(DEFAULT, "SYS_ADMIN"));
    }

    #[test]
    fn users_table() {
        let value = |value| Some(Int64Value { value });
        for (why, user, name, group, want) in [
            ("the image's", None, "", None, Ok("")),
            ("number", value(1000), "", None, Ok("1000")),
            ("name", None, "www-data", None, Ok("www-data")),
            ("number before name", value(5), "www-data", None, Ok("5")),
            ("with a group", value(5), "", value(7), Ok("5:7")),
            ("name with a group", None, "web", value(7), Ok("web:7")),
            ("group alone", None, "", value(7), Err(())),
            ("negative", value(-1), "", None, Err(())),
        ] {
            let context = LinuxContainerSecurityContext {
                run_as_user: user,
                run_as_username: name.into(),
                run_as_group: group,
                ..LinuxContainerSecurityContext::default()
            };
            let got = run_as(&context);
            assert_eq!(got.as_ref().map(|got| got.user.as_str()).map_err(|_| ()), want, "{why}");
        }
    }

    #[test]
    fn privileged_container_has_all_capabilities_and_no_masks() {
        let context = LinuxContainerSecurityContext {
            privileged: true,
            masked_paths: names(&["/proc/kcore"]),
            ..LinuxContainerSecurityContext::default()
        };
        let security = security(&context, &LinuxContainerResources::default(), vec![]).unwrap();
        assert_eq!((security.capabilities, security.masked_paths.len()), (Some(ALL), 0));
        let seccomp =
            SecurityProfile { profile_type: ProfileType::RuntimeDefault.into(), ..Default::default() };
        let context = LinuxContainerSecurityContext { seccomp: Some(seccomp), ..context };
        assert_eq!(seccomp_source(&context), Ok(SeccompSource::Unconfined));
    }

    #[test]
    fn seccomp_sources_table() {
        let of = |profile_type: ProfileType, file: &str| LinuxContainerSecurityContext {
            seccomp: Some(SecurityProfile { profile_type: profile_type.into(), localhost_ref: file.into() }),
            ..LinuxContainerSecurityContext::default()
        };
        #[expect(deprecated, reason = "older kubelets send it")]
        let old = |path: &str| LinuxContainerSecurityContext {
            seccomp_profile_path: path.into(),
            ..LinuxContainerSecurityContext::default()
        };
        let local = || Ok(SeccompSource::Localhost("/p.json".into()));
        for (context, want) in [
            (LinuxContainerSecurityContext::default(), Ok(SeccompSource::Unconfined)),
            (of(ProfileType::RuntimeDefault, ""), Ok(SeccompSource::RuntimeDefault)),
            (of(ProfileType::Unconfined, ""), Ok(SeccompSource::Unconfined)),
            (of(ProfileType::Localhost, "/p.json"), local()),
            (old("runtime/default"), Ok(SeccompSource::RuntimeDefault)),
            (old("localhost//p.json"), local()),
        ] {
            assert_eq!(seccomp_source(&context), want);
        }
        assert!(seccomp_source(&old("nope")).is_err());
    }
}
