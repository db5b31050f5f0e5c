//! Publishes the authority for nodes, and issues the operator's own certificate.

use std::path::Path;
use std::time::Duration;

use coracle_api::keys::certificates::{CA_CONFIG_MAP, CA_KEY};
use coracle_files::{blocking, write_atomic};
use coracle_reconcile::WallTime as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::sleep;

use crate::authority::api_error;
use crate::{AuthorityError, Config, Holder, Leaf, NODES, authority, serving};

/// Interval between checks of the Secret: another replica may have replaced the authority.
const LOOK: Duration = Duration::from_secs(60);
/// Delay before a retry after a failure.
const RETRY: Duration = Duration::from_secs(5);
const MANAGER: &str = "coracle-authority";

/// Authority and certificate that were published last.
#[derive(Default)]
struct Kept {
    bundle: String,
    renew_after: Timestamp,
}

/// Publishes and renews repeatedly. Never returns.
pub(crate) async fn keep(client: &Client, config: &Config) {
    let mut kept = Kept::default();
    loop {
        let pause = match publish_once(client, config, &mut kept).await {
            Ok(()) => LOOK,
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "keep the authority of nodes failed"
                );
                RETRY
            }
        };
        sleep(pause).await;
    }
}

async fn publish_once(client: &Client, config: &Config, kept: &mut Kept) -> Result<(), AuthorityError> {
    let now = config.clock.timestamp();
    let authority = authority(client, &config.namespace, NODES, now, config.authority_life).await?;
    for one in &config.serving {
        serving::keep(client, config, one, &authority, now).await?;
    }
    // Nodes must trust a new authority before they see a certificate that it has signed.
    publish(client, &config.namespace, &authority.bundle()).await?;
    if authority.bundle() == kept.bundle && now < kept.renew_after {
        return Ok(());
    }
    let holder = Holder { common_name: config.client_name.clone(), names: vec![], is_client: true };
    let leaf = authority.issue(&holder, now, config.certificate_life)?;
    write(&config.client_dir, authority.bundle(), &leaf).await?;
    tracing::info!(until = %leaf.renew_after, "operator has a new certificate for nodes");
    *kept = Kept { bundle: authority.bundle(), renew_after: leaf.renew_after };
    Ok(())
}

/// Writes the ConfigMap when it is absent or differs.
async fn publish(client: &Client, namespace: &str, bundle: &str) -> Result<(), AuthorityError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let known = maps.get_opt(CA_CONFIG_MAP).await.map_err(api_error("read the authority of nodes"))?;
    if known.and_then(|map| map.data?.remove(CA_KEY)).is_some_and(|pem| pem == bundle) {
        return Ok(());
    }
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CA_CONFIG_MAP}, "data": {CA_KEY: bundle},
    });
    let params = PatchParams::apply(MANAGER).force();
    maps.patch(CA_CONFIG_MAP, &params, &Patch::Apply(&map))
        .await
        .map_err(api_error("publish the authority of nodes"))?;
    Ok(())
}

/// Writes the files, the key last: a reader that finds a new certificate beside an old key reads again.
async fn write(dir: &Path, bundle: String, leaf: &Leaf) -> Result<(), AuthorityError> {
    let files =
        [("ca.crt", bundle), ("tls.crt", leaf.certificate_pem.clone()), ("tls.key", leaf.key_pem.clone())];
    for (name, text) in files {
        let path = dir.join(name);
        let own = path.clone();
        let written = blocking(move || {
            if let Some(dir) = own.parent() {
                std::fs::create_dir_all(dir)?;
            }
            write_atomic(&own, text.as_bytes())
        });
        written.await.map_err(|source| AuthorityError::File { path, source })?;
    }
    Ok(())
}
