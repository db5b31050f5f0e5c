//! Certificate that the operator signs for the services of a node, as files that their servers reload.

use std::path::{Path, PathBuf};

use coracle_api::keys::certificates::{CA_CONFIG_MAP, CA_KEY};
use coracle_files::{blocking, write_atomic};
use coracle_types::Clock;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::pair::{CertificateError, Signer, Subject};
use crate::{CertificateSource, Certificates, pair_file};

const CA_FILE: &str = "ca.pem";

/// Keeps the files with the certificate of a node and with the authority of its clients up to date.
pub struct NodeCertificate {
    certificates: Certificates,
    client: Client,
    namespace: String,
    pair: PathBuf,
    ca: PathBuf,
}

impl std::fmt::Debug for NodeCertificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeCertificate").field("pair", &self.pair).finish_non_exhaustive()
    }
}

impl NodeCertificate {
    /// Starts with the files in `dir` from an earlier run, if they are still valid. `namespace` is that of the operator.
    ///
    /// # Errors
    /// [`CertificateError`] when a key cannot be generated.
    pub async fn open(
        client: Client,
        namespace: String,
        node: String,
        dir: PathBuf,
        clock: Clock,
    ) -> Result<Self, CertificateError> {
        let address = std::net::Ipv4Addr::LOCALHOST.into();
        let subject = Subject { signer: Signer::Node, hostname: node.clone(), node, address };
        let (pair, ca) = (pair_file(&dir, &subject), dir.join(CA_FILE));
        let certificates =
            Certificates::open(client.clone(), CertificateSource::Cluster, subject, dir, clock).await?;
        Ok(Self { certificates, client, namespace, pair, ca })
    }

    /// Returns the file with certificate and key, PEM.
    #[must_use]
    pub fn pair(&self) -> &Path {
        &self.pair
    }

    /// Returns the file with the authority of clients, PEM.
    #[must_use]
    pub fn ca(&self) -> &Path {
        &self.ca
    }

    /// Keeps the files up to date until `stop`. `ready` becomes true when both files exist.
    pub async fn run(self, ready: watch::Sender<bool>, stop: CancellationToken) {
        let Self { certificates, client, namespace, ca, .. } = self;
        let mut issued = certificates.issued();
        let (has_ca, mut ca_seen) = watch::channel(ca.exists());
        let both = async {
            // Neither sender is dropped before `stop`.
            let _ended = issued.wait_for(|is| *is).await.map(drop);
            let _ended = ca_seen.wait_for(|has| *has).await.map(drop);
            ready.send_replace(true);
        };
        let authority = stop.run_until_cancelled(follow_ca(&client, &namespace, &ca, &has_ca));
        tokio::join!(certificates.run(stop.clone()), authority, stop.run_until_cancelled(both));
    }
}

/// Writes the authority whenever it changes. Never returns.
async fn follow_ca(client: &Client, namespace: &str, file: &Path, has_ca: &watch::Sender<bool>) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let mut seen = std::pin::pin!(watch_object(maps, CA_CONFIG_MAP).default_backoff());
    while let Some(map) = seen.next().await {
        let pem = match map {
            Ok(Some(map)) => map.data.and_then(|mut data| data.remove(CA_KEY)),
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%error, "watch the authority of nodes failed");
                continue;
            }
        };
        // The last authority stays when the ConfigMap is removed.
        let Some(pem) = pem.filter(|pem| !pem.is_empty()) else { continue };
        let own = file.to_owned();
        let written = blocking(move || {
            if let Some(dir) = own.parent() {
                std::fs::create_dir_all(dir)?;
            }
            match std::fs::read(&own) {
                Ok(known) if known == pem.as_bytes() => Ok(()),
                _ => write_atomic(&own, pem.as_bytes()),
            }
        });
        match written.await {
            Ok(()) => {
                has_ca.send_replace(true);
            }
            Err(error) => {
                tracing::warn!(path = %file.display(), %error, "write the authority of clients failed")
            }
        }
    }
}
