//! Reservations in ConfigMaps, one ConfigMap for each pool.

use std::collections::BTreeMap;

use coracle_api::cocoon::keys;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{ListParams, ObjectMeta, PostParams},
};

use super::placement::Reservation;
use crate::error::{Error, api};

/// Label key of the ConfigMaps.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Value of [`MANAGED_BY`].
const WEBHOOK: &str = "cocoon-webhook";
/// Prefix of their names, followed by the pool.
const PREFIX: &str = "cocoon-affinity-";

/// Reservations of one pool, and the resource version at which they were read.
pub(super) struct Pool {
    pub(super) name: String,
    /// Stored ConfigMap; `None`: it does not exist yet.
    stored: Option<ConfigMap>,
    pub(super) reservations: Vec<Reservation>,
}

#[cfg(test)]
impl Pool {
    pub(super) fn of(name: &str, reservations: Vec<Reservation>) -> Self {
        Self { name: name.into(), stored: None, reservations }
    }
}

fn maps(client: &Client, namespace: &str) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), namespace)
}

/// Decodes the reservations. Values that cannot be decoded belong to other writers: they are kept, and ignored.
fn reservations(map: &ConfigMap) -> Vec<Reservation> {
    let values = map.data.iter().flatten();
    values.filter_map(|(_, text)| serde_json::from_str(text).ok()).collect()
}

/// Reads the reservations of a pool.
pub(super) async fn read(client: &Client, namespace: &str, pool: &str) -> Result<Pool, Error> {
    let name = format!("{PREFIX}{pool}");
    let stored = maps(client, namespace).get_opt(&name).await.map_err(api("read ConfigMap", &name))?;
    let reservations = stored.as_ref().map(reservations).unwrap_or_default();
    Ok(Pool { name: pool.to_owned(), stored, reservations })
}

/// Reads the reservations of every pool.
pub(super) async fn read_all(client: &Client, namespace: &str) -> Result<Vec<Pool>, Error> {
    let ours = ListParams::default().labels(&format!("{MANAGED_BY}={WEBHOOK}"));
    let found = maps(client, namespace).list(&ours).await.map_err(api("list ConfigMaps of", namespace))?;
    let pool = |map: ConfigMap| {
        let name = map.metadata.name.as_deref()?.strip_prefix(PREFIX)?.to_owned();
        let reservations = reservations(&map);
        Some(Pool { name, stored: Some(map), reservations })
    };
    Ok(found.into_iter().filter_map(pool).collect())
}

/// Stores changed (`Some`) and removes (`None`) reservations by their keys. Returns `false` when another writer was faster.
pub(super) async fn write(
    client: &Client,
    namespace: &str,
    pool: &Pool,
    changes: &BTreeMap<String, Option<Reservation>>,
) -> Result<bool, Error> {
    let name = format!("{PREFIX}{}", pool.name);
    let mut map = pool.stored.clone().unwrap_or_else(|| {
        let labels = [(MANAGED_BY, WEBHOOK), (keys::POOL_LABEL, pool.name.as_str())];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let metadata = ObjectMeta { name: Some(name.clone()), labels: Some(labels), ..ObjectMeta::default() };
        ConfigMap { metadata, ..ConfigMap::default() }
    });
    let data = map.data.get_or_insert_default();
    for (key, reservation) in changes {
        match reservation.as_ref().and_then(|reservation| serde_json::to_string(reservation).ok()) {
            Some(text) => drop(data.insert(key.clone(), text)),
            None => drop(data.remove(key)),
        }
    }
    map.metadata.managed_fields = None;
    let (maps, params) = (maps(client, namespace), PostParams::default());
    let written = match &pool.stored {
        Some(_) => maps.replace(&name, &params, &map).await,
        None => maps.create(&params, &map).await,
    };
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(api("write ConfigMap", name)(error)),
    }
}
