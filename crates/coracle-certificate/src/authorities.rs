//! Authorities of client certificates.

use std::path::Path;
use std::time::Duration;

use coracle_files::blocking;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::time::{sleep, timeout};

use crate::CertificateError;

/// ConfigMap in which the API server publishes the authorities.
const NAMESPACE: &str = "kube-system";
const CONFIG_MAP: &str = "extension-apiserver-authentication";
const KEY: &str = "client-ca-file";
/// Time limit of a read.
const LIMIT: Duration = Duration::from_secs(20);
/// Delay before a failed read is repeated.
const RETRY: Duration = Duration::from_secs(5);

/// Returns the authorities of the file, else those that the cluster publishes; waits until the API server answers. `None`, with
/// a warning, when the cluster publishes none, or this node may not read them. Cancel-safe.
///
/// # Errors
/// [`CertificateError::File`].
pub async fn client_ca(client: &Client, file: Option<&Path>) -> Result<Option<Vec<u8>>, CertificateError> {
    if let Some(path) = file {
        let own = path.to_owned();
        let failed = |source| CertificateError::File { operation: "read", path: path.to_owned(), source };
        return blocking(move || std::fs::read(own)).await.map(Some).map_err(failed);
    }
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let found = loop {
        match timeout(LIMIT, maps.get_opt(CONFIG_MAP)).await {
            Ok(Ok(map)) => break map.and_then(|map| map.data?.remove(KEY)).filter(|pem| !pem.is_empty()),
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => break None,
            Ok(Err(error)) => tracing::warn!(%error, "read the authorities of clients failed"),
            Err(_) => tracing::warn!("read the authorities of clients timed out"),
        }
        sleep(RETRY).await;
    };
    if found.is_none() {
        tracing::warn!(
            "the cluster names no authority of client certificates: clients of the API need tokens"
        );
    }
    Ok(found.map(String::into_bytes))
}
