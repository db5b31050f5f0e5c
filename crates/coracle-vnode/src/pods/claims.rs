//! Claims of pods: the disk or directory of the node that each claim is bound to.
//!
//! Nodes are allowed to get claims and volumes, but not to watch them. Therefore claims are read at an interval.

use std::sync::Arc;
use std::time::Duration;

use coracle_pod::objects::ClaimSource;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::known::{self, Known, Revision};

/// Interval between reads, before and after the claim is bound.
const UNBOUND: Duration = Duration::from_secs(5);
const BOUND: Duration = Duration::from_secs(60);
/// Time limit of a read.
const LIMIT: Duration = Duration::from_secs(20);

/// Claim that is bound to storage of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) source: ClaimSource,
}

/// Follows one claim until the future is dropped.
pub(super) async fn follow(
    client: Client,
    namespace: String,
    name: String,
    known: watch::Sender<Known<Claim>>,
    revision: Revision,
) {
    loop {
        let mut pause = UNBOUND;
        match timeout(LIMIT, read(&client, &namespace, &name)).await {
            Ok(Ok(found)) => {
                if found.is_some() {
                    pause = BOUND;
                }
                let changed = match (&*known.borrow(), &found) {
                    (Known::Present(old), Some(new)) => **old != *new,
                    (Known::Absent, None) => false,
                    _ => true,
                };
                if changed {
                    known.send_replace(found.map_or(Known::Absent, |claim| Known::Present(Arc::new(claim))));
                    known::count(&revision);
                }
            }
            Ok(Err(error)) => tracing::warn!(ns = namespace, name, %error, "read a claim failed"),
            Err(_) => tracing::warn!(ns = namespace, name, "read a claim timed out"),
        }
        sleep(pause).await;
    }
}

async fn read(client: &Client, namespace: &str, name: &str) -> kube::Result<Option<Claim>> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let Some(claim) = claims.get_opt(name).await? else { return Ok(None) };
    let bound = claim.status.and_then(|status| status.phase).as_deref() == Some("Bound");
    let volume = claim.spec.and_then(|spec| spec.volume_name).filter(|_| bound);
    let Some(volume) = volume else { return Ok(None) };
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let volume = volumes.get_opt(&volume).await?.and_then(|volume| volume.spec);
    Ok(volume.as_ref().and_then(source).map(|source| Claim { source }))
}

/// Returns the source of a volume on this node; `None` for kinds that cannot be attached.
fn source(volume: &PersistentVolumeSpec) -> Option<ClaimSource> {
    let local = volume.local.as_ref().map(|local| local.path.clone());
    let path = local.or_else(|| volume.host_path.as_ref().map(|host| host.path.clone()))?;
    let modes: Vec<_> = volume.access_modes.iter().flatten().map(String::as_str).collect();
    Some(ClaimSource {
        source: path,
        read_only: !modes.is_empty() && modes.iter().all(|mode| *mode == "ReadOnlyMany"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn volumes_of_the_node_become_sources() {
        let bound = |source: &str, read_only| Some(ClaimSource { source: source.into(), read_only });
        for (spec, want) in [
            (json!({"local": {"path": "/d"}, "accessModes": ["ReadWriteOnce"]}), bound("/d", false)),
            (json!({"hostPath": {"path": "/h"}, "accessModes": ["ReadOnlyMany"]}), bound("/h", true)),
            (
                json!({"hostPath": {"path": "/h"}, "accessModes": ["ReadOnlyMany", "ReadWriteMany"]}),
                bound("/h", false),
            ),
            (json!({"nfs": {"server": "s", "path": "/"}}), None),
        ] {
            assert_eq!(source(&serde_json::from_value(spec.clone()).unwrap()), want, "{spec}");
        }
    }
}
