//! Rendered manifests in a real API server, and the processes that they start, with the arguments of the manifests: two nodes
//! get certificates of the operator's authority, and each may only act for itself.

mod doctor;
mod drain;
mod harness;
mod helm;
mod kubelet;
mod nodes;
mod removal;
mod sessions;
mod tenants;
mod traces;
mod upgrade;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::crash_node::import;
use crate::support::{coracle_ok, until};
use coracle_testkit::netns;
use serde_json::{Value, json};

use harness::{Installed, LIMIT, end};

#[test]
fn rendered_manifests_run_with_rights_limited_to_own_node() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(installed) = Installed::plane().await else { return };
        installed.install().await;
        let accounts = [
            installed.pod_kubeconfig("coracle-node", "n1").await,
            installed.pod_kubeconfig("coracle-node", "n2").await,
        ];
        let mut processes = vec![
            installed.start_node("n1", &accounts[0]).await,
            installed.start_node("n2", &accounts[1]).await,
            installed.start_operator().await,
        ];
        let lease = installed.announced("n1").await;
        let said = &lease["metadata"]["annotations"];
        assert_eq!(said["coracle.dev/tls-server-name"], "n1", "the name in its certificate");
        installed.announced("n2").await;

        runs_a_vm(&installed).await;
        own_lease_alone(&installed, &accounts[0]).await;
        own_certificate_alone(&installed, &accounts[0]).await;
        key_of_a_node_opens_no_other(&installed).await;

        serving_certificates_are_of_the_authority(&installed).await;
        end(&mut processes).await;
    });
}

/// Checks that the operator installed its webhook with the bundle of the authority, and removes it.
async fn without_admission(installed: &Installed) {
    let hook = ["get", "validatingwebhookconfigurations", "coracle-mikromvm", "-o", "json"];
    let hook = until("admission", LIMIT, || installed.kubectl(&hook)).await;
    let hook: Value = serde_json::from_str(&hook).unwrap();
    let bundle = hook["webhooks"][0]["clientConfig"]["caBundle"].clone();
    let bundle: k8s_openapi::ByteString = serde_json::from_value(bundle).unwrap();
    let published = ["get", "configmap", "coracle-ca", "-n", "coracle-system", "-o", "json"];
    let published: Value = serde_json::from_str(&installed.kubectl(&published).await.unwrap()).unwrap();
    assert_eq!(published["data"]["ca.crt"].as_str().unwrap().as_bytes(), bundle.0);
    let hooks = ["delete", "validatingwebhookconfigurations", "coracle-mikromvm"];
    installed.kubectl(&hooks).await.unwrap();
}

/// Checks that the operator reaches the node by mutual TLS.
async fn runs_a_vm(installed: &Installed) {
    let state = installed.state("n1");
    until("the node's socket", LIMIT, || async {
        state.join("host.sock").exists().then_some(()).ok_or_else(|| "no socket".to_owned())
    })
    .await;
    import(&state, &installed.dir.path().join("layout")).await;
    let vm = json!({
        "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": "one"},
        "spec": {"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128, "nodeName": "n1"},
    });
    // This API server cannot reach the admission webhook: the Service has no endpoints here.
    without_admission(installed).await;
    installed.apply(vm).await;
    installed.until_running("one").await;
    installed.kubectl(&["delete", "mikromvm", "one", "--timeout=60s"]).await.unwrap();
    assert_eq!(coracle_ok(&state, &["ps", "-a", "-o", "name"]).await, "");
}

async fn own_lease_alone(installed: &Installed, n1: &Path) {
    let annotate = |lease: &'static str, what: &'static str| async move {
        let args = ["annotate", "lease", lease, "-n", "coracle-nodes", "--overwrite", what];
        installed.kubectl_as(n1, &args).await
    };
    // Nodes with a bridge create this Lease.
    installed
        .apply(json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": "coracle-guest-subnets", "namespace": "coracle-nodes",
                "annotations": {"subnet.coracle.dev/10.9.2.0-24": "n2"},
            },
        }))
        .await;
    annotate("n1", "coracle.dev/driver=qemu").await.unwrap();
    annotate("coracle-guest-subnets", "subnet.coracle.dev/10.9.1.0-24=n1").await.unwrap();
    for (lease, what, why) in [
        ("n2", "coracle.dev/agent-address=192.0.2.1:1", "its own Lease alone"),
        ("n1", "coracle.dev/node=n2", "its own name alone"),
        ("n1", "coracle.dev/tls-server-name=n2", "its own name alone"),
        ("coracle-guest-subnets", "subnet.coracle.dev/10.9.3.0-24=n2", "its own networks alone"),
        ("coracle-guest-subnets", "subnet.coracle.dev/10.9.2.0-24=n1", "its own networks alone"),
        ("coracle-guest-subnets", "subnet.coracle.dev/10.9.2.0-24-", "its own networks alone"),
    ] {
        let refused = annotate(lease, what).await.unwrap_err();
        assert!(refused.contains(why), "{lease} {what}: {refused}");
    }
    let election = ["get", "lease", "coracle-mikromvm", "-n", "coracle-system"];
    let refused = installed.kubectl_as(n1, &election).await.unwrap_err();
    assert!(refused.contains("forbidden"), "{refused}");
}

async fn own_certificate_alone(installed: &Installed, n1: &Path) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["n2".to_owned()]).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, "coracle.dev:node:n2");
    let pem = params.serialize_request(&key).unwrap().pem().unwrap();
    let object = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": "stolen"},
        "spec": {
            "signerName": "coracle.dev/node", "usages": ["digital signature", "server auth"],
            "request": k8s_openapi::ByteString(pem.into_bytes()),
        },
    });
    let file = installed.dir.path().join("csr.json");
    std::fs::write(&file, object.to_string()).unwrap();
    installed.kubectl_as(n1, &["create", "-f", file.to_str().unwrap()]).await.unwrap();
    let status = until("the answer", LIMIT, || async {
        let csr = installed.kubectl(&["get", "csr", "stolen", "-o=jsonpath={.status}"]).await?;
        if csr.contains("conditions") { Ok(csr) } else { Err(csr) }
    })
    .await;
    assert!(
        status.contains("Denied") && status.contains("n1") && !status.contains("\"certificate\""),
        "{status}"
    );
}

/// Checks that a node's certificate is a server certificate, which no server accepts from a client.
async fn key_of_a_node_opens_no_other(installed: &Installed) {
    use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
    let lease = installed.announced("n2").await;
    let address = lease["metadata"]["annotations"]["coracle.dev/host-address"].as_str().unwrap().to_owned();
    let read = |path: PathBuf| std::fs::read(path).unwrap();
    let authority = installed.dir.path().join("authority");
    let stolen = read(installed.state("n1").join("certificates/node.pem"));
    let of_operator = (read(authority.join("tls.crt")), read(authority.join("tls.key")));
    let ca = Certificate::from_pem(read(authority.join("ca.crt")));
    for (who, certificate, key, opens) in
        [("the operator", of_operator.0, of_operator.1, true), ("node n1", stolen.clone(), stolen, false)]
    {
        let identity = Identity::from_pem(certificate, key);
        let tls = ClientTlsConfig::new().ca_certificate(ca.clone()).identity(identity).domain_name("n2");
        let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
        let asked = async {
            let mut host = coracle_proto::host::host_client::HostClient::new(endpoint.connect().await.ok()?);
            host.info(coracle_proto::host::InfoRequest {}).await.ok()
        };
        assert_eq!(asked.await.is_some(), opens, "{who}");
    }
}

/// Checks that the operator keeps the market's certificate, and the bundle of its webhook, up to date with the authority that
/// it publishes.
async fn serving_certificates_are_of_the_authority(installed: &Installed) {
    let published = ["get", "configmap", "coracle-ca", "-n", "coracle-system", "-o", "json"];
    let published: Value = serde_json::from_str(&installed.kubectl(&published).await.unwrap()).unwrap();
    let ca = published["data"]["ca.crt"].as_str().unwrap();
    let secret = ["get", "secret", "coracle-market-tls", "-n", "coracle-system", "-o", "json"];
    let secret: Value =
        serde_json::from_str(&until("the market's Secret", LIMIT, || installed.kubectl(&secret)).await)
            .unwrap();
    let bytes =
        |key: &str| serde_json::from_value::<k8s_openapi::ByteString>(secret["data"][key].clone()).unwrap().0;
    assert_eq!(bytes("ca.crt"), ca.as_bytes());
    let served = accepts("coracle-market.coracle-system.svc", &bytes("tls.crt"), &bytes("tls.key"), ca).await;
    assert!(served.is_ok(), "{served:?}");
    let served =
        accepts("coracle-webhook.coracle-system.svc", &bytes("tls.crt"), &bytes("tls.key"), ca).await;
    assert!(served.is_err(), "another server's name");
}

/// Returns an error unless a client that trusts `ca` accepts a server with this certificate as `name`.
async fn accepts(name: &str, certificate: &[u8], key: &[u8], ca: &str) -> Result<(), String> {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let chain = vec![CertificateDer::from_pem_slice(certificate).unwrap()];
    let server = rustls::ServerConfig::builder_with_provider(provider.clone());
    let server = server.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let server = server.with_single_cert(chain, PrivateKeyDer::from_pem_slice(key).unwrap()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        roots.add(root.unwrap()).unwrap();
    }
    let client = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let client = client.unwrap().with_root_certificates(roots).with_no_client_auth();
    let (near, far) = tokio::io::duplex(1 << 16);
    let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(server));
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(client));
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let (_served, connected) = tokio::join!(acceptor.accept(far), connector.connect(name, near));
    connected.map(drop).map_err(|error| error.to_string())
}
