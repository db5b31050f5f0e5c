use crate::support::node;
use std::sync::Arc;

use coracle_host::{ContainerMount, ContainerMountSource};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use coracle_pod::env::FieldContext;
use coracle_pod::objects::{ClaimSource, Objects};
use coracle_pod::volume::Area;
use coracle_pod::volume::SandboxVolumeSource;
use coracle_pod::volume::Token;
use coracle_pod::volume::*;

fn objects() -> Objects {
    let map =
        serde_json::from_value(json!({"data": {"a": "1", "b": "2"}, "binaryData": {"c": "Aw=="}})).unwrap();
    let secret = serde_json::from_value(json!({"data": {"key": "c2VjcmV0"}})).unwrap();
    Objects {
        config_maps: [("m".to_owned(), Arc::new(map))].into(),
        secrets: [("s".to_owned(), Arc::new(secret))].into(),
        claims: [("p".to_owned(), ClaimSource { source: "/disks/p".into(), read_only: false })].into(),
        ..Objects::default()
    }
}

fn pod(volumes: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "labels": {"app": "x"}},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}], "volumes": volumes},
    }))
    .unwrap()
}

/// Returns the files of one volume as `path=content:mode`, or the error.
fn files_of(mut volume: Value) -> String {
    volume["name"] = json!("v");
    let (pod, node) = (pod(json!([volume])), node());
    let context = FieldContext { pod: &pod, node: &node, addresses: &[] };
    let (issued_at, expires_at) = (Timestamp::UNIX_EPOCH, Timestamp::MAX);
    let token = Token { value: "token!".into(), issued_at, expires_at };
    let tokens = [(("v".to_owned(), "t".to_owned()), token)].into();
    match desired(&context, &objects(), &tokens).remove(0) {
        Ok(VolumeContent { layout: Layout::Files(files), .. }) => files
            .iter()
            .map(|(path, file)| format!("{path}={}:{:o}", file.bytes.escape_ascii(), file.mode))
            .collect::<Vec<_>>()
            .join(" "),
        Ok(other) => format!("{other:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn volume_files_follow_their_sources() {
    let downward = |item: Value| json!({"downwardAPI": {"items": [item]}});
    for (volume, want) in [
        (json!({"configMap": {"name": "m"}}), "a=1:644 b=2:644 c=\\x03:644"),
        (
            json!({"configMap": {"name": "m", "defaultMode": 0o400, "items": [{"key": "a", "path": "x/y"}]}}),
            "x/y=1:400",
        ),
        (json!({"configMap": {"name": "m", "items": [{"key": "a", "path": "x", "mode": 0o777}]}}), "x=1:777"),
        (json!({"configMap": {"name": "m", "items": [{"key": "no", "path": "x"}], "optional": true}}), ""),
        (
            json!({"configMap": {"name": "m", "items": [{"key": "no", "path": "x"}]}}),
            "cannot write volume \"v\": key \"no\" not found in configmap \"m\"",
        ),
        (json!({"configMap": {"name": "no", "optional": true}}), ""),
        (json!({"configMap": {"name": "no"}}), "cannot write volume \"v\": configmap \"no\" not found"),
        (json!({"secret": {"secretName": "s"}}), "key=secret:644"),
        (json!({"secret": {"secretName": "no"}}), "cannot write volume \"v\": secret \"no\" not found"),
        (
            json!({"configMap": {"name": "m", "items": [{"key": "a", "path": "../x"}]}}),
            "cannot write volume \"v\": invalid path \"../x\": it leads out of the volume",
        ),
        (downward(json!({"path": "n", "fieldRef": {"fieldPath": "metadata.name"}})), "n=web:644"),
        (
            downward(json!({"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}, "mode": 0o440})),
            "l=app=\\\"x\\\":440",
        ),
        (
            downward(
                json!({"path": "c", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}}),
            ),
            "c=2:644",
        ),
        (
            json!({"projected": {"defaultMode": 0o600, "sources": [
                {"configMap": {"name": "m", "items": [{"key": "a", "path": "a"}]}},
                {"secret": {"name": "s"}},
                {"serviceAccountToken": {"path": "t"}},
            ]}}),
            "a=1:600 key=secret:600 t=token!:600",
        ),
        (
            json!({"projected": {"sources": [{"serviceAccountToken": {"path": "other"}}]}}),
            "volume \"v\" waits for a token",
        ),
        (
            json!({"projected": {"sources": [{"clusterTrustBundle": {"name": "x", "path": "p"}}]}}),
            "cannot write volume \"v\": clustertrustbundle \"x\" not found",
        ),
    ] {
        assert_eq!(files_of(volume.clone()), want, "{volume}");
    }
}

#[test]
fn sandbox_gets_the_directories_that_its_volumes_need() {
    let names = |volumes: Value| -> Vec<String> {
        let all = sandbox_volumes(&pod(volumes), &objects()).unwrap();
        all.into_iter().map(|v| if v.read_only { format!("{}:ro", v.name) } else { v.name }).collect()
    };
    assert!(names(json!([])).is_empty(), "a plain pod needs no directory of the node");
    assert_eq!(
        names(json!([
            {"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {"medium": "Memory"}},
            {"name": "c", "secret": {"secretName": "s"}}, {"name": "d", "hostPath": {"path": "/srv"}},
            {"name": "e", "persistentVolumeClaim": {"claimName": "p", "readOnly": true}},
            {"name": "f", "image": {"reference": "reg/tools:1"}},
        ])),
        ["config:ro", "data", "v1", "v3", "v4:ro"]
    );
    let unbound = pod(json!([{"name": "e", "persistentVolumeClaim": {"claimName": "no"}}]));
    let error = sandbox_volumes(&unbound, &objects()).unwrap_err();
    assert_eq!(error.to_string(), "cannot write volume \"e\": claim \"no\" is not bound on this node");
    let all =
        sandbox_volumes(&pod(json!([{"name": "d", "hostPath": {"path": "/srv"}}])), &objects()).unwrap();
    assert_eq!(all[0].source, SandboxVolumeSource::HostPath { path: "/srv".into(), create: false });
    for (limit, size_bytes) in [(json!("64Mi"), 64 << 20), (json!(null), 0)] {
        let empty = json!({"medium": "Memory", "sizeLimit": limit});
        let all = sandbox_volumes(&pod(json!([{"name": "m", "emptyDir": empty}])), &objects()).unwrap();
        assert_eq!(all[0].source, SandboxVolumeSource::Memory { size_bytes }, "{limit}");
    }
}

#[test]
fn mounts_point_into_volumes() {
    let volumes = json!([
        {"name": "cfg", "configMap": {"name": "m"}}, {"name": "tmp", "emptyDir": {}},
        {"name": "host", "hostPath": {"path": "/srv"}}, {"name": "tools", "image": {"reference": "reg/tools:1"}},
        {"name": "ram", "emptyDir": {"medium": "Memory"}},
    ]);
    let pod = pod(volumes);
    let mounts = |list: Value| {
        let container = serde_json::from_value(json!({"name": "c", "volumeMounts": list})).unwrap();
        let known = |name: &str| (name == "POD").then_some("web-0");
        let mounts = container_mounts(&pod, &container, known);
        mounts.map_err(|error| error.to_string()).map(|mounts| {
            let show = |mount: &ContainerMount| {
                let (name, sub_path) = match &mount.source {
                    ContainerMountSource::Volume { name, sub_path } => (name.as_str(), sub_path),
                    ContainerMountSource::Image { digest, sub_path } => (digest.as_str(), sub_path),
                    ContainerMountSource::Tmpfs { .. } => unreachable!("no memory is mounted"),
                };
                format!("{name}/{sub_path}>{}{}", mount.target, if mount.read_only { ":ro" } else { "" })
            };
            mounts.iter().map(show).collect::<Vec<_>>()
        })
    };
    assert!(mounts(json!([])).unwrap().is_empty());
    for (mount, want) in [
        (json!({"name": "cfg", "mountPath": "/c"}), Ok("config/volumes/cfg>/c:ro")),
        (json!({"name": "cfg", "mountPath": "/c", "subPath": "a"}), Ok("config/volumes/cfg/a>/c:ro")),
        (
            json!({"name": "tmp", "mountPath": "/t", "subPathExpr": "$(POD)/x"}),
            Ok("data/volumes/tmp/web-0/x>/t"),
        ),
        (json!({"name": "tmp", "mountPath": "/t", "readOnly": true}), Ok("data/volumes/tmp>/t:ro")),
        (json!({"name": "host", "mountPath": "/h"}), Ok("v2/>/h")),
        (json!({"name": "ram", "mountPath": "/m", "subPath": "a"}), Ok("v4/a>/m")),
        (json!({"name": "host", "mountPath": "/h", "subPath": "a/b/"}), Ok("v2/a/b>/h")),
        (json!({"name": "tools", "mountPath": "/t", "subPath": "bin"}), Ok("reg/tools:1/bin>/t:ro")),
        (json!({"name": "no", "mountPath": "/h"}), Err("invalid mount \"/h\": the pod has no volume \"no\"")),
        (
            json!({"name": "tmp", "mountPath": "/t", "subPath": "../x"}),
            Err("invalid mount \"/t\": invalid subPath \"../x\": it leads out of the volume"),
        ),
        (
            json!({"name": "tmp", "mountPath": "/t", "subPathExpr": "$(NO)"}),
            Err("invalid mount \"/t\": subPathExpr \"$(NO)\" names an unknown variable"),
        ),
        (
            json!({"name": "tmp", "mountPath": "/t", "mountPropagation": "Bidirectional"}),
            Err("invalid mount \"/t\": mounts of a guest do not reach the node"),
        ),
    ] {
        let got = mounts(json!([mount])).map(|mounts| mounts[0].clone());
        assert_eq!(got.as_deref().map_err(String::as_str), want, "{mount}");
    }
}

#[test]
fn digest_depends_on_paths_modes_and_bytes() {
    let content = |path: &str, bytes: &str, mode| VolumeContent {
        name: "v".into(),
        area: Area::Config,
        path: "volumes/v".into(),
        layout: Layout::Files([(path.to_owned(), FileContent { bytes: bytes.into(), mode })].into()),
    };
    let all = [content("a", "b", 1), content("ab", "", 1), content("a", "c", 1), content("a", "b", 2)];
    let digests: std::collections::BTreeSet<_> = all.iter().map(VolumeContent::digest).collect();
    assert_eq!(digests.len(), all.len());
    assert!(!format!("{:?}", content("a", "secret", 1)).contains("secret"));
}
