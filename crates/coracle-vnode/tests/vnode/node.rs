//! Node object, its Lease and its certificate.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use coracle_testkit::cluster;
use coracle_testkit::eventually;
use coracle_vnode::CertificateSource;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::net::TcpStream;

use crate::world::World;

fn nodes(world: &World) -> Api<Node> {
    Api::all(world.client.clone())
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

async fn until_ready(world: &World) -> Result<Node> {
    eventually("the node is ready", async || {
        nodes(world).get_opt(&world.options.name).await.ok().flatten().filter(is_ready)
    })
    .await
}

async fn lease(world: &World) -> Option<Lease> {
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), "kube-node-lease");
    leases.get_opt(&world.options.name).await.ok().flatten()
}

#[test]
fn node_registers_and_reports_status() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.as_node(cluster).await?;
        world.options.labels.insert("example.org/zone".into(), "a".into());
        let daemon = world.start().await?;
        let node = until_ready(&world).await?;
        assert_eq!(node.labels()["kubernetes.io/hostname"], world.options.name);
        assert_eq!(node.labels()["example.org/zone"], "a");
        let taints = node.spec.clone().unwrap().taints.unwrap();
        let ours =
            taints.iter().find(|taint| taint.key == "virtual-kubelet.io/provider").context("no taint")?;
        assert_eq!((ours.value.as_deref(), ours.effect.as_str()), (Some("cocoon"), "NoSchedule"));
        let status = node.status.unwrap();
        let port = status.daemon_endpoints.unwrap().kubelet_endpoint.unwrap().port;
        assert!(port > 0);
        let addresses = status.addresses.unwrap();
        assert_eq!((addresses[0].type_.as_str(), addresses[0].address.as_str()), ("InternalIP", "127.0.0.1"));
        assert_eq!(status.capacity.unwrap()["pods"].0, "110");
        assert!(status.allocatable.unwrap().contains_key("ephemeral-storage"));
        assert!(status.node_info.unwrap().kubelet_version.starts_with("v1."));
        let image = status.images.unwrap().remove(0);
        assert_eq!(image.names.unwrap(), ["localhost/test/empty:1"]);
        daemon.stop().await
    });
}

#[test]
fn lease_is_renewed_and_owned_by_its_node() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        let uid = until_ready(&world).await?.uid().unwrap();
        let mut times = std::collections::BTreeSet::new();
        eventually("three renewals with an owner", async || {
            let lease = lease(&world).await?;
            let owner = lease.metadata.owner_references.iter().flatten().next()?.uid.clone();
            let spec = lease.spec?;
            assert_eq!(
                (spec.holder_identity.as_deref(), spec.lease_duration_seconds),
                (Some(&*world.options.name), Some(40))
            );
            times.insert(spec.renew_time?.0);
            (times.len() >= 3 && owner == uid).then_some(())
        })
        .await?;
        daemon.stop().await
    });
}

#[test]
fn unchanged_node_is_not_written_again() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let daemon = world.start().await?;
        let before = until_ready(&world).await?;
        // Each renewal of the Lease takes as long as two observations of the node.
        let mut times = std::collections::BTreeSet::new();
        eventually("ten renewals", async || {
            times.insert(lease(&world).await?.spec?.renew_time?.0);
            (times.len() >= 10).then_some(())
        })
        .await?;
        let after = nodes(&world).get(&world.options.name).await?;
        assert_eq!(after.resource_version(), before.resource_version(), "{:#?}", after.status);
        daemon.stop().await
    });
}

#[test]
fn node_that_was_removed_registers_again() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.options.taints.clear();
        world.options.intervals.report = std::time::Duration::from_millis(200);
        let daemon = world.start().await?;
        let first = until_ready(&world).await?;
        let taints = first.spec.clone().unwrap().taints.unwrap_or_default();
        assert!(!taints.iter().any(|taint| taint.key.starts_with("virtual-kubelet")), "{taints:?}");
        nodes(&world).delete(&world.options.name, &DeleteParams::default()).await?;
        eventually("another node of that name", async || {
            let node = nodes(&world).get_opt(&world.options.name).await.ok().flatten()?;
            (node.uid() != first.uid() && is_ready(&node)).then_some(())
        })
        .await?;
        daemon.stop().await
    });
}

#[test]
fn labels_and_taints_of_users_stay() {
    cluster::run(async |cluster| -> Result<()> {
        let world = World::new(cluster).await?;
        let theirs = json!({
            "metadata": {"name": world.options.name, "labels": {"example.org/theirs": "1"}},
            "spec": {"unschedulable": true, "taints": [{"key": "example.org/t", "effect": "NoExecute"}]},
        });
        nodes(&world).create(&PostParams::default(), &serde_json::from_value(theirs)?).await?;
        let daemon = world.start().await?;
        let node = until_ready(&world).await?;
        assert_eq!(node.labels()["example.org/theirs"], "1");
        assert_eq!(node.labels()["kubernetes.io/os"], "linux");
        let spec = node.spec.unwrap();
        let keys: Vec<_> = spec.taints.iter().flatten().map(|taint| taint.key.clone()).collect();
        assert!(
            keys.contains(&"example.org/t".to_owned())
                && keys.contains(&"virtual-kubelet.io/provider".to_owned())
        );
        assert_eq!(spec.unschedulable, Some(true), "a cordon stays");
        daemon.stop().await
    });
}

/// Returns the serving certificate of the API, DER.
async fn serving_certificate(world: &World) -> Option<Vec<u8>> {
    let node = nodes(world).get_opt(&world.options.name).await.ok().flatten()?;
    let port = node.status?.daemon_endpoints?.kubelet_endpoint?.port;
    let at = SocketAddr::from((IpAddr::from([127, 0, 0, 1]), u16::try_from(port).ok()?));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .ok()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(trust::Any(provider)))
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(at).await.ok()?;
    let stream = connector.connect(ServerName::from(at.ip()), stream).await.ok()?;
    Some(stream.get_ref().1.peer_certificates()?.first()?.to_vec())
}

#[test]
fn certificate_is_requested_shown_and_kept() {
    cluster::run(async |cluster| -> Result<()> {
        let mut world = World::new(cluster).await?;
        world.as_node(cluster).await?;
        assert_eq!(world.options.certificate, CertificateSource::Cluster);
        let daemon = world.start().await?;
        let own =
            eventually("the API shows a certificate", async || serving_certificate(&world).await).await?;
        let requests: Api<CertificateSigningRequest> = Api::all(world.client.clone());
        let request = eventually("a request", async || {
            let all = requests.list(&ListParams::default()).await.ok()?;
            all.into_iter()
                .find(|request| request.name_any().starts_with(&format!("coracle-{}-", world.options.name)))
        })
        .await?;
        assert_eq!(request.spec.signer_name, "kubernetes.io/kubelet-serving");
        assert_eq!(request.spec.usages.clone().unwrap(), ["digital signature", "server auth"]);
        let issued = authority::sign(&String::from_utf8(request.spec.request.0.clone())?)?;
        let name = request.name_any();
        let approved =
            json!({"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "Test"}]}});
        requests.patch_approval(&name, &PatchParams::default(), &Patch::Merge(&approved)).await?;
        let certificate = json!({"status": {"certificate": k8s_openapi::ByteString(issued.into_bytes())}});
        requests.patch_status(&name, &PatchParams::default(), &Patch::Merge(&certificate)).await?;
        let of_cluster = eventually("the API shows the certificate of the cluster", async || {
            serving_certificate(&world).await.filter(|shown| *shown != own)
        })
        .await?;
        daemon.stop().await?;
        let daemon = world.start().await?;
        let after =
            eventually("the API shows a certificate", async || serving_certificate(&world).await).await?;
        assert_eq!(after, of_cluster, "it is kept over a restart");
        daemon.stop().await
    });
}

/// TLS client that trusts any server, to read its certificate.
mod trust {
    use std::sync::Arc;

    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::crypto::CryptoProvider;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::{DigitallySignedStruct, Error, SignatureScheme};

    #[derive(Debug)]
    pub(super) struct Any(pub(super) Arc<CryptoProvider>);

    impl ServerCertVerifier for Any {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.0.signature_verification_algorithms.supported_schemes()
        }
    }
}

/// Signs certificate requests, like the controller manager of a cluster.
mod authority {
    use anyhow::Result;
    use rcgen::{CertificateParams, CertificateSigningRequestParams, Issuer, KeyPair};

    pub(super) fn sign(request: &str) -> Result<String> {
        let issuer = Issuer::new(CertificateParams::new(vec![])?, KeyPair::generate()?);
        let mut request = CertificateSigningRequestParams::from_pem(request)?;
        request.params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        request.params.not_after = rcgen::date_time_ymd(2200, 1, 1);
        Ok(request.signed_by(&issuer)?.pem())
    }
}
