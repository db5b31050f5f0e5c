//! Containers that a pod declares, in starting order, and what follows their exit.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, EphemeralContainer, Pod, PodSpec};

/// Role of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Init container: runs to completion before the next one starts.
    Init,
    /// Init container that keeps running: the next one starts when this one has started.
    Sidecar,
    /// Regular container: runs in parallel with the other regular containers.
    App,
    /// Ephemeral container: added to a running pod for debugging. Never restarted.
    Ephemeral,
}

/// A container of a pod's spec.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredContainer<'a> {
    /// Role of the container.
    pub kind: ContainerKind,
    /// Spec of the container.
    pub container: Cow<'a, Container>,
    /// Container whose processes an ephemeral container sees.
    pub target: Option<&'a str>,
}

/// Restart policy of a pod or container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Restart after each exit.
    #[default]
    Always,
    /// Restart after an exit code other than 0.
    OnFailure,
    /// Never restart.
    Never,
}

/// What follows the exit of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterExit {
    /// Nothing: the container has ended for good.
    Stay,
    /// The container is restarted.
    Restart,
    /// All containers of the pod are restarted, from the first init container.
    RestartAll,
}

impl RestartPolicy {
    /// Parses the spelling of the API; any other text is the default, `Always`.
    #[must_use]
    pub fn parse(text: Option<&str>) -> Self {
        match text {
            Some("OnFailure") => Self::OnFailure,
            Some("Never") => Self::Never,
            _ => Self::Always,
        }
    }

    fn after_exit(self, code: i32) -> AfterExit {
        match self {
            Self::Always => AfterExit::Restart,
            Self::OnFailure if code != 0 => AfterExit::Restart,
            Self::OnFailure | Self::Never => AfterExit::Stay,
        }
    }
}

/// Returns all containers of a pod: init containers and sidecars, then regular containers, then ephemeral ones.
#[must_use]
pub fn declared(pod: &Pod) -> Vec<DeclaredContainer<'_>> {
    let Some(spec) = &pod.spec else { return vec![] };
    let init = spec.init_containers.iter().flatten().map(|container| {
        let is_sidecar = container.restart_policy.as_deref() == Some("Always");
        let kind = if is_sidecar { ContainerKind::Sidecar } else { ContainerKind::Init };
        DeclaredContainer { kind, container: Cow::Borrowed(container), target: None }
    });
    let app = spec.containers.iter().map(|container| DeclaredContainer {
        kind: ContainerKind::App,
        container: Cow::Borrowed(container),
        target: None,
    });
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| DeclaredContainer {
        kind: ContainerKind::Ephemeral,
        container: Cow::Owned(as_container(container)),
        target: container.target_container_name.as_deref().filter(|name| !name.is_empty()),
    });
    init.chain(app).chain(ephemeral).collect()
}

/// Returns the restart policy of a pod.
#[must_use]
pub fn pod_policy(spec: Option<&PodSpec>) -> RestartPolicy {
    RestartPolicy::parse(spec.and_then(|spec| spec.restart_policy.as_deref()))
}

impl DeclaredContainer<'_> {
    /// Returns the name of the container, unique in the pod.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.container.name
    }

    /// Returns what follows an exit with `code`, in a pod with this restart policy. The first restart rule that matches
    /// decides, then the container's own policy, then that of the pod.
    #[must_use]
    pub fn after_exit(&self, pod: RestartPolicy, code: i32) -> AfterExit {
        match self.kind {
            ContainerKind::Ephemeral => return AfterExit::Stay,
            ContainerKind::Sidecar => return AfterExit::Restart,
            ContainerKind::Init | ContainerKind::App => {}
        }
        let rules = self.container.restart_policy_rules.iter().flatten();
        if let Some(rule) = rules.into_iter().find(|rule| rule_fits(rule, code)) {
            let all = rule.action == "RestartAllContainers";
            return if all { AfterExit::RestartAll } else { AfterExit::Restart };
        }
        let own = self.container.restart_policy.as_deref();
        let policy = own.map_or(pod, |own| RestartPolicy::parse(Some(own)));
        match (self.kind, policy.after_exit(code)) {
            // An init container that succeeded is done, also in a pod with the policy Always.
            (ContainerKind::Init, _) if code == 0 => AfterExit::Stay,
            (_, after) => after,
        }
    }
}

fn rule_fits(rule: &ContainerRestartRule, code: i32) -> bool {
    let Some(on) = &rule.exit_codes else { return false };
    let listed = on.values.iter().flatten().any(|value| *value == code);
    match on.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        _ => false,
    }
}

fn as_container(e: &EphemeralContainer) -> Container {
    Container {
        args: e.args.clone(),
        command: e.command.clone(),
        env: e.env.clone(),
        env_from: e.env_from.clone(),
        image: e.image.clone(),
        image_pull_policy: e.image_pull_policy.clone(),
        name: e.name.clone(),
        security_context: e.security_context.clone(),
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path.clone(),
        termination_message_policy: e.termination_message_policy.clone(),
        tty: e.tty,
        volume_devices: e.volume_devices.clone(),
        volume_mounts: e.volume_mounts.clone(),
        working_dir: e.working_dir.clone(),
        ..Container::default()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ContainerRestartRuleOnExitCodes;

    use super::*;

    fn one(
        kind: ContainerKind,
        policy: Option<&str>,
        rules: &[(&str, &str, i32)],
    ) -> DeclaredContainer<'static> {
        let rules = rules.iter().map(|(action, operator, code)| ContainerRestartRule {
            action: (*action).to_owned(),
            exit_codes: Some(ContainerRestartRuleOnExitCodes {
                operator: (*operator).to_owned(),
                values: Some(vec![*code]),
            }),
        });
        let container = Container {
            name: "web".to_owned(),
            restart_policy: policy.map(str::to_owned),
            restart_policy_rules: Some(rules.collect()),
            ..Container::default()
        };
        DeclaredContainer { kind, container: Cow::Owned(container), target: None }
    }

    #[test]
    fn exit_code_restart_decision_table() {
        use AfterExit::{Restart, RestartAll, Stay};
        use ContainerKind::{App, Ephemeral, Init, Sidecar};
        use RestartPolicy::{Always, Never, OnFailure};
        for (why, kind, pod, own, rules, code, want) in [
            ("always", App, Always, None, &[][..], 0, Restart),
            ("on failure, after success", App, OnFailure, None, &[], 0, Stay),
            ("on failure, after failure", App, OnFailure, None, &[], 1, Restart),
            ("never", App, Never, None, &[], 1, Stay),
            ("own policy before the pod's", App, Never, Some("OnFailure"), &[], 3, Restart),
            ("a rule before both", App, Never, Some("Never"), &[("Restart", "In", 42)], 42, Restart),
            ("a rule that does not fit", App, Never, Some("Never"), &[("Restart", "In", 42)], 1, Stay),
            ("not in", App, Never, Some("Never"), &[("Restart", "NotIn", 42)], 1, Restart),
            (
                "all of the pod",
                App,
                Always,
                Some("Never"),
                &[("RestartAllContainers", "In", 7)],
                7,
                RestartAll,
            ),
            ("init is done", Init, Always, None, &[], 0, Stay),
            ("init failed", Init, Always, None, &[], 1, Restart),
            ("init failed for good", Init, Never, None, &[], 1, Stay),
            ("sidecar", Sidecar, Never, Some("Always"), &[], 0, Restart),
            ("ephemeral", Ephemeral, Always, None, &[], 1, Stay),
        ] {
            assert_eq!(one(kind, own, rules).after_exit(pod, code), want, "{why}");
        }
    }

    #[test]
    fn containers_are_listed_in_starting_order() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "spec": {
                "initContainers": [{"name": "a"}, {"name": "b", "restartPolicy": "Always"}],
                "containers": [{"name": "c"}],
                "ephemeralContainers": [{"name": "d", "targetContainerName": "c"}],
            }
        }))
        .unwrap();
        let listed: Vec<_> = declared(&pod).iter().map(|d| (d.kind, d.name().to_owned(), d.target)).collect();
        assert_eq!(
            listed,
            [
                (ContainerKind::Init, "a".to_owned(), None),
                (ContainerKind::Sidecar, "b".to_owned(), None),
                (ContainerKind::App, "c".to_owned(), None),
                (ContainerKind::Ephemeral, "d".to_owned(), Some("c")),
            ]
        );
    }
}
