//! Resource requests of pods, as the scheduler counts them. Pure.

use coracle_api::Amount;
use coracle_pod::declared::{ContainerKind, declared};
use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};

/// Resource requests of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Requests {
    pub(super) cpu: Amount,
    pub(super) memory: Amount,
}

/// Returns the larger one of two sums: the app containers and sidecars together, or one init container with the sidecars before
/// it. The request of the pod itself takes precedence. The overhead of the runtime class is added (Kubernetes documentation,
/// "Sidecar containers", resource sharing within containers).
pub(super) fn requests(pod: &Pod) -> Requests {
    Requests { cpu: effective_request(pod, "cpu"), memory: effective_request(pod, "memory") }
}

fn effective_request(pod: &Pod, name: &str) -> Amount {
    let request =
        |resources: Option<&ResourceRequirements>| resources?.requests.as_ref()?.get(name).map(Amount::of);
    let (mut sidecars, mut apps, mut init) = (Amount::ZERO, Amount::ZERO, Amount::ZERO);
    for one in declared(pod) {
        let amount = request(one.container.resources.as_ref()).unwrap_or_default();
        match one.kind {
            ContainerKind::Init => init = init.max(sidecars.plus(amount)),
            ContainerKind::Sidecar => {
                sidecars = sidecars.plus(amount);
                init = init.max(sidecars);
            }
            ContainerKind::App => apps = apps.plus(amount),
            ContainerKind::Ephemeral => {}
        }
    }
    let spec = pod.spec.as_ref();
    let own = request(spec.and_then(|spec| spec.resources.as_ref()));
    let overhead =
        spec.and_then(|spec| spec.overhead.as_ref()?.get(name)).map(Amount::of).unwrap_or_default();
    own.unwrap_or_else(|| init.max(apps.plus(sidecars))).plus(overhead)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn container(name: &str, cpu: &str) -> Value {
        json!({"name": name, "resources": {"requests": {"cpu": cpu}}})
    }

    #[test]
    fn requests_count_as_the_scheduler_does() {
        let sidecar = |cpu: &str| {
            let mut sidecar = container("s", cpu);
            sidecar["restartPolicy"] = json!("Always");
            sidecar
        };
        for (why, spec, want) in [
            ("nothing", json!({"containers": [{"name": "a"}]}), "0"),
            ("sum", json!({"containers": [container("a", "1"), container("b", "500m")]}), "1500m"),
            (
                "a large init container",
                json!({"initContainers": [container("i", "3")], "containers": [container("a", "1")]}),
                "3",
            ),
            (
                "sidecar before init container",
                json!({"initContainers": [sidecar("1"), container("i", "3")], "containers": [container("a", "1")]}),
                "4",
            ),
            (
                "sidecar beside the app",
                json!({"initContainers": [sidecar("1")], "containers": [container("a", "1")]}),
                "2",
            ),
            (
                "the pod's own, and overhead",
                json!({"containers": [container("a", "1")], "resources": {"requests": {"cpu": "5"}}, "overhead": {"cpu": "250m"}}),
                "5250m",
            ),
        ] {
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
            assert_eq!(requests(&pod).cpu, Amount::parse(want).unwrap(), "{why}");
        }
    }
}
