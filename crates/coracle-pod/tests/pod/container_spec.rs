use crate::support::node;
use serde_json::{Value, json};

use coracle_host::{GroupsPolicy, PidNamespace};
use coracle_pod::container_spec::*;
use coracle_pod::declared::declared;
use coracle_pod::env::FieldContext;
use coracle_pod::objects::Objects;
use k8s_openapi::api::core::v1::Pod;

fn build_from_pod_spec(spec: Value) -> Result<NewContainer, String> {
    let pod: Pod = serde_json::from_value(
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}),
    )
    .unwrap();
    let node = node();
    let context = FieldContext { pod: &pod, node: &node, addresses: &[] };
    let all = declared(&pod);
    let one = all.last().unwrap();
    let target = one.target.map(|target| container_id("u", target, 0));
    let attempt = Attempt { number: 2, streak: 1, target };
    let memory = 512.try_into().unwrap();
    container_spec(one, &attempt, &context, &Objects::default(), memory)
        .map(|(made, _)| made)
        .map_err(|error| error.to_string())
}

fn build_from_container(container: Value) -> Result<NewContainer, String> {
    build_from_pod_spec(json!({"containers": [container]}))
}

#[test]
fn ids_are_stable_unique_and_plain() {
    let id = container_id("u", "web", 0);
    assert_eq!(id, container_id("u", "web", 0));
    assert_eq!(id.as_str().len(), 64);
    for other in [container_id("u", "web", 1), container_id("v", "web", 0), container_id("uw", "eb", 0)] {
        assert_ne!(id, other);
    }
}

#[test]
fn command_and_args_override_the_image() {
    let entrypoint = ["/entry".to_owned()];
    let argv = |container: Value| {
        build_from_container(container).unwrap().of_image(&entrypoint, "").unwrap().process.argv
    };
    let env = json!([{"name": "A", "value": "1"}]);
    for (container, want) in [
        (json!({"name": "c"}), &[][..]),
        (json!({"name": "c", "command": ["x"]}), &["x"]),
        (json!({"name": "c", "args": ["y"]}), &["/entry", "y"]),
        (json!({"name": "c", "command": ["x"], "args": ["y"]}), &["x", "y"]),
        (json!({"name": "c", "command": ["$(A)", "$$(A)", "$(B)"], "env": env}), &["1", "$(A)", "$(B)"]),
    ] {
        assert_eq!(argv(container.clone()), want, "{container}");
    }
}

#[test]
fn container_user_precedes_pod_and_image() {
    let user = |pod: Value, own: Value, image: &str| {
        let container = json!({"name": "c", "securityContext": own});
        let made = build_from_pod_spec(json!({"containers": [container], "securityContext": pod}))?;
        made.of_image(&[], image).map(|spec| spec.process.user)
    };
    let root = "the container must not run as root (runAsNonRoot), and its image does";
    for (pod, own, image, want) in [
        (json!({}), json!({}), "web", Ok("")),
        (json!({"runAsUser": 1}), json!({}), "", Ok("1")),
        (json!({"runAsUser": 1, "runAsGroup": 2}), json!({"runAsUser": 3}), "", Ok("3:2")),
        (json!({"runAsGroup": 2}), json!({}), "", Ok("0:2")),
        (json!({"runAsNonRoot": true}), json!({}), "1000:1000", Ok("")),
        (json!({"runAsNonRoot": true}), json!({"runAsUser": 5}), "", Ok("5")),
        (json!({"runAsNonRoot": true}), json!({"runAsNonRoot": false}), "", Ok("")),
        (json!({"runAsNonRoot": true}), json!({}), "", Err(root)),
        (json!({"runAsNonRoot": true}), json!({}), "0", Err(root)),
        (
            json!({"runAsNonRoot": true}),
            json!({}),
            "web",
            Err(
                "the container must not run as root (runAsNonRoot), and its image names user \"web\": set runAsUser",
            ),
        ),
        (
            json!({"runAsNonRoot": true}),
            json!({"runAsUser": 0}),
            "",
            Err("invalid runAsUser 0: the container must not run as root (runAsNonRoot)"),
        ),
    ] {
        let got = user(pod.clone(), own.clone(), image);
        assert_eq!(got.as_deref().map_err(String::as_str), want, "{pod} {own} {image:?}");
    }
}

#[test]
fn capabilities_are_added_to_and_dropped_from_the_default() {
    let set = |wanted: Value| {
        build_from_container(json!({"name": "c", "securityContext": {"capabilities": wanted}}))
            .map(|made| made.spec.security.capabilities)
    };
    let default = 0xa804_25fb;
    for (wanted, want) in [
        (json!({}), default),
        (json!({"add": ["NET_ADMIN"]}), default | 1 << 12),
        (json!({"add": ["CAP_SYS_TIME"]}), default | 1 << 25),
        (json!({"drop": ["ALL"]}), 0),
        (json!({"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}), 1 << 10),
        (json!({"drop": ["CHOWN"]}), default & !1),
        (json!({"add": ["ALL"]}), (1 << 41) - 1),
        (json!({"add": ["ALL"], "drop": ["SYS_ADMIN"]}), ((1 << 41) - 1) & !(1 << 21)),
    ] {
        assert_eq!(set(wanted.clone()).unwrap(), Some(want), "{wanted}");
    }
    assert_eq!(set(json!({"add": ["FLY"]})).unwrap_err(), "invalid capability \"FLY\"");
    assert_eq!(build_from_container(json!({"name": "c"})).unwrap().spec.security.capabilities, None);
}

#[test]
fn security_context_reaches_the_container() {
    let own = json!({"readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false});
    let of_pod = json!({"fsGroup": 7, "supplementalGroups": [8], "supplementalGroupsPolicy": "Strict"});
    let spec = json!({"containers": [{"name": "c", "securityContext": own, "tty": true, "stdin": true}],
        "securityContext": of_pod, "shareProcessNamespace": true});
    let spec = build_from_pod_spec(spec).unwrap().spec;
    assert!(spec.read_only_root && spec.security.no_new_privileges && spec.tty && spec.stdin);
    assert_eq!((spec.groups_policy, spec.groups.as_slice()), (GroupsPolicy::Strict, &[8, 7][..]));
    assert_eq!(spec.pid_namespace, PidNamespace::Pod);
    assert!(spec.security.masked_paths.contains(&"/proc/kcore".to_owned()));
    let privileged = build_from_container(json!({"name": "c", "securityContext": {"privileged": true}}))
        .unwrap()
        .spec
        .security;
    assert!(privileged.privileged && privileged.masked_paths.is_empty());
}

#[test]
fn debugger_sees_the_processes_of_its_target() {
    let spec = json!({"containers": [{"name": "web"}],
        "ephemeralContainers": [{"name": "debug", "targetContainerName": "web"}]});
    let namespace = build_from_pod_spec(spec).unwrap().spec.pid_namespace;
    assert_eq!(namespace, PidNamespace::Target(container_id("u", "web", 0)));
}

#[test]
fn stop_signals_have_numbers() {
    let signal = |name: &str| {
        build_from_container(json!({"name": "c", "lifecycle": {"stopSignal": name}}))
            .map(|made| made.spec.stop_signal)
    };
    for (name, want) in [
        ("", 0),
        ("SIGTERM", 15),
        ("SIGQUIT", 3),
        ("SIGUSR1", 10),
        ("SIGRTMIN", 34),
        ("SIGRTMIN+3", 37),
        ("SIGRTMAX-1", 63),
    ] {
        assert_eq!(signal(name).unwrap(), want, "{name}");
    }
    for bad in ["TERM", "SIGNO", "SIGRTMIN+40", "SIGRTMAX+1x"] {
        assert!(signal(bad).is_err(), "{bad}");
    }
}

#[test]
fn container_metadata_carries_name_streak_and_attempt() {
    let made = build_from_container(json!({"name": "c", "terminationMessagePath": "/tmp/end"})).unwrap();
    let get = |key: &str| made.spec.metadata.get(key).map(String::as_str);
    assert_eq!((get(key::NAME), get(key::STREAK)), (Some("c"), Some("1")));
    assert_eq!((made.spec.attempt, made.spec.termination_message_path.as_str()), (2, "/tmp/end"));
    let plain = build_from_container(json!({"name": "c"})).unwrap();
    assert_eq!(plain.spec.termination_message_path, "/dev/termination-log");
}
