//! `coracle doctor --cluster` on an installation whose parts are broken and repaired one after the other.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{CORACLE, text, until};
use coracle_reconcile::{Clock, WallTime as _};
use coracle_testkit::netns;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::process::Command;

use super::harness::{Installed, LIMIT, end, webhook_endpoints};

/// Returns the exit code and the rows.
async fn doctor(installed: &Installed) -> (i32, Vec<Value>) {
    let mut command = Command::new(CORACLE);
    command.args(["doctor", "--cluster", "-o", "json", "--kubeconfig"]).arg(installed.cluster.kubeconfig());
    let output = command.output().await.unwrap();
    let list: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr)));
    (output.status.code().unwrap(), list["items"].as_array().unwrap().clone())
}

/// Returns the exit code and the rows that are not ok.
async fn wrong(installed: &Installed) -> (i32, Vec<String>) {
    let (code, rows) = doctor(installed).await;
    let wrong = rows.iter().filter(|row| row["result"] != "ok");
    let word = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let line = |row: &Value| {
        assert!(!word(row, "help").is_empty(), "{row}");
        format!("{} {}: {}", word(row, "check"), word(row, "result"), word(row, "detail"))
    };
    (code, wrong.map(line).collect())
}

/// Sets the status that a kubelet and the controllers of the control plane would set.
async fn is_ready(installed: &Installed) {
    let status = |what: &'static str, status: Value| async move {
        let patch = json!({"status": status}).to_string();
        let args =
            ["patch", what, "-n", "coracle-system", "--subresource=status", "--type=merge", "-p", &patch];
        installed.kubectl(&args).await.unwrap();
    };
    let ready = json!({"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, "availableReplicas": 2});
    status("deployment/coracle-operator", ready).await;
    let ready = json!({"numberReady": 1, "desiredNumberScheduled": 1, "currentNumberScheduled": 1, "numberMisscheduled": 0});
    status("daemonset/coracle-node", ready).await;
    installed.apply(webhook_endpoints("192.0.2.10")).await;
}

async fn is_sound(installed: &Installed) {
    until("a sound installation", LIMIT, || async {
        let (code, wrong) = wrong(installed).await;
        if wrong.is_empty() && code == 0 { Ok(()) } else { Err(format!("{code} {wrong:#?}")) }
    })
    .await;
}

fn lease(node: &str, address: &str, renewed: Timestamp) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {
            "name": node, "namespace": "coracle-nodes", "labels": {"coracle.dev/agent": "true"},
            "annotations": {"coracle.dev/host-address": address, "coracle.dev/tls-server-name": node},
        },
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 3600, "renewTime": format!("{renewed:.6}")},
    })
}

#[test]
fn doctor_names_each_thing_that_is_broken() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(installed) = Installed::plane().await else { return };
        let (code, rows) = wrong(&installed).await;
        assert_eq!(code, 5);
        for absent in [
            "definition mikromvms.vm.mikrom.es",
            "ClusterRole coracle-node",
            "DaemonSet coracle-node",
            "nodes",
        ] {
            let is_row = |row: &String| row.starts_with(&format!("{absent} missing: "));
            assert!(rows.iter().any(is_row), "{absent} is not in {rows:#?}");
        }
        installed.install().await;
        installed.route_webhook().await;
        let account = installed.pod_kubeconfig("coracle-node", "n1").await;
        let mut processes =
            vec![installed.start_node("n1", &account).await, installed.start_operator().await];
        installed.announced("n1").await;
        is_ready(&installed).await;
        is_sound(&installed).await;
        objects_that_are_missing(&installed).await;
        nodes_that_cannot_be_used(&installed).await;
        // A running operator would publish its authority again.
        end(&mut processes.split_off(1)).await;
        an_expired_authority(&installed).await;
        end(&mut processes).await;
    });
}

/// For each case breaks an object, runs the doctor, and repairs it by applying the manifests again.
async fn objects_that_are_missing(installed: &Installed) {
    let region = r#"[{"op":"remove","path":"/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/region"}]"#;
    let rules = r#"[{"op":"remove","path":"/rules/0"}]"#;
    let cases: [(&[&str], &str); 8] = [
        (
            &["delete", "crd", "cocoonsets.cocoonset.cocoonstack.io"],
            "definition cocoonsets.cocoonset.cocoonstack.io missing: not found",
        ),
        (
            &["patch", "crd", "bidnodes.kubebid.io", "--type=json", "-p", region],
            "definition bidnodes.kubebid.io missing: old: it lacks .spec.region",
        ),
        (&["delete", "clusterrole", "coracle-node"], "ClusterRole coracle-node missing: not found"),
        (
            &["patch", "clusterrole", "coracle-node", "--type=json", "-p", rules],
            "ClusterRole coracle-node missing: it lacks the right to get nodes",
        ),
        (
            &["delete", "rolebinding", "coracle-operator", "-n", "coracle-nodes"],
            "RoleBinding coracle-operator missing: not found",
        ),
        (
            &["delete", "validatingadmissionpolicybinding", "coracle-node-leases"],
            "ValidatingAdmissionPolicyBinding coracle-node-leases missing: not found",
        ),
        (
            &["delete", "daemonset", "coracle-node", "-n", "coracle-system"],
            "DaemonSet coracle-node missing: not found",
        ),
        (
            &["delete", "endpointslice", "coracle-webhook-1", "-n", "coracle-system"],
            "webhook coracle-mikromvm missing: Service coracle-system/coracle-webhook does not answer",
        ),
    ];
    for (breaks, want) in cases {
        installed.kubectl(breaks).await.unwrap();
        let (code, rows) = wrong(installed).await;
        assert_eq!(code, 5, "{want}");
        // Without the endpoint the extension API fails, too, as soon as the API server has checked it.
        let others = rows.iter().filter(|row| !row.starts_with("extension API missing: "));
        let others: Vec<_> = others.collect();
        assert!(matches!(&others[..], [row] if row.starts_with(want)), "{want} is not alone in {rows:#?}");
        installed.apply_again().await;
        is_ready(installed).await;
        is_sound(installed).await;
    }
}

async fn nodes_that_cannot_be_used(installed: &Installed) {
    let now = Clock::system().timestamp();
    let secret = ["get", "secret", "coracle-ca", "-n", "coracle-system", "-o", "json"];
    let secret: Value = serde_json::from_str(&installed.kubectl(&secret).await.unwrap()).unwrap();
    let expired = expired_server(installed, &secret, "n9").await;
    let hour = jiff::SignedDuration::from_hours(2);
    for (node, address, renewed, want) in [
        ("n7", "127.0.0.1:1", now - hour, "node n7 missing: its Lease was renewed"),
        ("n8", "127.0.0.1:1", now, "node n8 missing: 127.0.0.1:1 does not answer"),
        ("n9", expired.as_str(), now, "node n9 missing: "),
    ] {
        installed.apply(lease(node, address, renewed)).await;
        let (_, rows) = wrong(installed).await;
        assert!(matches!(&rows[..], [row] if row.starts_with(want)), "{want} is not alone in {rows:#?}");
        if node == "n9" {
            assert!(rows[0].contains("expired"), "{rows:?}");
        }
        installed.kubectl(&["delete", "lease", node, "-n", "coracle-nodes"]).await.unwrap();
    }
    installed
        .apply(json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "coracle-guest-subnets", "namespace": "coracle-nodes", "annotations": {
                "subnet.coracle.dev/10.9.2.0-24": "n1", "subnet.coracle.dev/10.9.0.0-16": "n2",
            }},
        }))
        .await;
    let (_, rows) = wrong(installed).await;
    let want = "networks of guests missing: 10.9.0.0/16 of n2 overlaps with 10.9.2.0/24 of n1";
    assert_eq!(rows, [want]);
    installed.kubectl(&["delete", "lease", "coracle-guest-subnets", "-n", "coracle-nodes"]).await.unwrap();
}

/// Starts a server with an expired certificate of the authority.
async fn expired_server(installed: &Installed, secret: &Value, node: &str) -> String {
    let pem = |key: &str| {
        let bytes: k8s_openapi::ByteString = serde_json::from_value(secret["data"][key].clone()).unwrap();
        String::from_utf8(bytes.0).unwrap()
    };
    let ca_key = rcgen::KeyPair::from_pem(&pem("ca.key")).unwrap();
    let issuer = rcgen::Issuer::from_ca_cert_pem(&pem("ca.crt"), ca_key).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![node.to_owned()]).unwrap();
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2020, 2, 1);
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der()).into();
    let config = config.unwrap().with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key);
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config.unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    installed.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _refused_by_the_client = acceptor.accept(stream).await;
        }
    });
    address
}

async fn an_expired_authority(installed: &Installed) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    let pem = params.self_signed(&key).unwrap().pem();
    let patch = json!({"data": {"ca.crt": pem}}).to_string();
    let args = ["patch", "configmap", "coracle-ca", "-n", "coracle-system", "--type=merge", "-p", &patch];
    installed.kubectl(&args).await.unwrap();
    let (_, rows) = wrong(installed).await;
    let expired = |row: &String| row.starts_with("authority of nodes missing: its certificate expired 2021");
    assert!(rows.iter().any(expired), "{rows:#?}");
    let unknown = |row: &String| row.starts_with("node n1 missing: ") && row.contains("UnknownIssuer");
    assert!(rows.iter().any(unknown), "{rows:#?}");
}
