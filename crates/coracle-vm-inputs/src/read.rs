//! Reads the objects that a spec refers to. The objects are neither watched nor cached: the operator holds no Secrets.

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use crate::objects::{BoundClaim, Objects, References, bound_to, to_bound_claim};

/// Number of concurrent reads.
const AT_ONCE: usize = 8;

/// A read that the API server refused or did not answer.
#[derive(Debug, thiserror::Error)]
#[error("read {kind} {name}")]
pub struct ReadError {
    /// Kind of the object.
    pub kind: &'static str,
    /// Name of the object.
    pub name: String,
    /// Error of the API server.
    pub source: Box<kube::Error>,
}

/// Reads the objects; objects that do not exist are left out. Cancel-safe.
///
/// # Errors
/// [`ReadError`] of the first read that failed.
pub async fn read(client: &Client, namespace: &str, wanted: &References) -> Result<Objects, ReadError> {
    let config_maps = read_all::<ConfigMap>(client, namespace, "ConfigMap", &wanted.config_maps).await?;
    let secrets = read_all::<Secret>(client, namespace, "Secret", &wanted.secrets).await?;
    let claims =
        read_all::<PersistentVolumeClaim>(client, namespace, "PersistentVolumeClaim", &wanted.claims).await?;
    let mut objects = Objects {
        config_maps: config_maps.into_iter().collect(),
        secrets: secrets.into_iter().collect(),
        ..Objects::default()
    };
    for (name, claim) in claims {
        objects.claims.insert(name, read_bound_claim(client, &claim).await?);
    }
    Ok(objects)
}

async fn read_bound_claim(
    client: &Client,
    claim: &PersistentVolumeClaim,
) -> Result<Result<BoundClaim, String>, ReadError> {
    let name = match bound_to(claim) {
        Ok(name) => name,
        Err(why) => return Ok(Err(why)),
    };
    let found = Api::<PersistentVolume>::all(client.clone()).get_opt(&name).await;
    let failed =
        |source| ReadError { kind: "PersistentVolume", name: name.clone(), source: Box::new(source) };
    Ok(match found.map_err(failed)? {
        Some(volume) => to_bound_claim(claim, &volume),
        None => Err(format!("PersistentVolume {name:?} not found")),
    })
}

async fn read_all<K>(
    client: &Client,
    namespace: &str,
    kind: &'static str,
    names: &std::collections::BTreeSet<String>,
) -> Result<Vec<(String, K)>, ReadError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let one = |name: String| {
        let api = api.clone();
        async move {
            let found = api.get_opt(&name).await;
            let failed = |source| ReadError { kind, name: name.clone(), source: Box::new(source) };
            Ok(found.map_err(failed)?.map(|object| (name, object)))
        }
    };
    let found: Vec<Option<(String, K)>> =
        stream::iter(names.iter().cloned().map(one)).buffered(AT_ONCE).try_collect().await?;
    Ok(found.into_iter().flatten().collect())
}
