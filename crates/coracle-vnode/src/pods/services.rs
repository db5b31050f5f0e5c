//! Services of the cluster, for the environment variables of pods.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Service;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::known::{self, Revision};

/// Namespace and name of the API server's service.
const API_SERVER: (&str, &str) = ("default", "kubernetes");

/// All services, by namespace and name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Services(BTreeMap<(String, String), Arc<Service>>);

impl Services {
    /// Returns the services that pods of a namespace get variables for.
    pub(super) fn of_namespace(&self, namespace: &str) -> Vec<Arc<Service>> {
        let sees =
            |(of, name): &(String, String)| of == namespace || (of.as_str(), name.as_str()) == API_SERVER;
        self.0.iter().filter(|(key, _)| sees(key)).map(|(_, service)| service.clone()).collect()
    }

    fn put(&mut self, mut service: Service) {
        service.metadata.managed_fields = None;
        service.status = None;
        self.0.insert(key(&service), Arc::new(service));
    }
}

fn key(service: &Service) -> (String, String) {
    let metadata = &service.metadata;
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}

/// Follows all services until `stop`.
pub(super) async fn follow(
    client: Client,
    known: watch::Sender<Option<Services>>,
    revision: Revision,
    stop: CancellationToken,
) {
    let mut events =
        std::pin::pin!(watcher(Api::<Service>::all(client), watcher::Config::default()).default_backoff());
    let mut listed = Services::default();
    while let Some(Some(event)) = stop.run_until_cancelled(events.next()).await {
        let now = known.borrow().clone();
        let next = match event {
            Ok(Event::Init) => {
                listed = Services::default();
                continue;
            }
            Ok(Event::InitApply(service)) => {
                listed.put(service);
                continue;
            }
            Ok(Event::InitDone) => std::mem::take(&mut listed),
            Ok(Event::Apply(service)) => {
                let mut next = now.clone().unwrap_or_default();
                next.put(service);
                next
            }
            Ok(Event::Delete(service)) => {
                let mut next = now.clone().unwrap_or_default();
                next.0.remove(&key(&service));
                next
            }
            Err(error) => {
                tracing::warn!(%error, "watch services failed");
                continue;
            }
        };
        if now.as_ref() != Some(&next) {
            known.send_replace(Some(next));
            known::count(&revision);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_see_services_of_their_namespace_and_the_api_server() {
        let mut services = Services::default();
        for (namespace, name) in [("default", "kubernetes"), ("default", "web"), ("shop", "db")] {
            let service = serde_json::json!({"metadata": {"namespace": namespace, "name": name}});
            services.put(serde_json::from_value(service).unwrap());
        }
        let names = |namespace: &str| -> Vec<String> {
            services.of_namespace(namespace).iter().map(|one| one.metadata.name.clone().unwrap()).collect()
        };
        assert_eq!(names("shop"), ["kubernetes", "db"]);
        assert_eq!(names("default"), ["kubernetes", "web"]);
        assert_eq!(names("other"), ["kubernetes"]);
    }
}
