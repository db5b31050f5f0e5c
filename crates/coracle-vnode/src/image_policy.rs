//! Policy of the cluster for signed images, as last read. No image may be used before it was read.

use coracle_api::{ImagePolicy, keys};
use coracle_image::PublicKeys;
use coracle_pod::NamespaceKeys;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Image policy; `None`: not read yet.
pub type Known = Option<ImagePolicy>;

/// Follows the policy in `namespace` until `stop`. A deleted policy requires no signature. Cancel-safe.
pub async fn follow(client: Client, namespace: String, known: watch::Sender<Known>, stop: CancellationToken) {
    let one = watcher::Config::default().fields(&format!("metadata.name={}", keys::IMAGE_POLICY));
    let events = watcher(Api::<ConfigMap>::namespaced(client, &namespace), one).default_backoff();
    let work = async {
        let mut events = std::pin::pin!(events);
        let mut listed = ImagePolicy::default();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed = ImagePolicy::default(),
                Ok(Event::InitApply(stored)) => listed = ImagePolicy::of(&stored),
                Ok(Event::InitDone) => drop(known.send_replace(Some(listed.clone()))),
                Ok(Event::Apply(stored)) => drop(known.send_replace(Some(ImagePolicy::of(&stored)))),
                Ok(Event::Delete(_)) => drop(known.send_replace(Some(ImagePolicy::default()))),
                Err(error) => tracing::warn!(%error, namespace, "watch the policy of signed images failed"),
            }
        }
    };
    stop.run_until_cancelled(work).await;
}

/// Returns the keys of the policy. Each look-up uses its current content.
#[must_use]
pub fn keys(known: watch::Receiver<Known>) -> NamespaceKeys {
    NamespaceKeys::of(move |namespace| {
        let known = known.borrow();
        let policy = known.as_ref().ok_or_else(|| {
            format!("ConfigMap {} was not read yet: it says who must have signed images", keys::IMAGE_POLICY)
        })?;
        match policy.keys(namespace) {
            "" => Ok(None),
            pem => PublicKeys::parse(pem)
                .map(Some)
                .map_err(|error| format!("ConfigMap {}: {error}", keys::IMAGE_POLICY)),
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unread_policy_lets_no_image_be_used() {
        let (known, policy) = watch::channel(None);
        let keys = keys(policy);
        let of = |namespace| keys.of_namespace(namespace).now();
        assert!(of("team").unwrap_err().contains("was not read yet"));
        let stored = json!({"data": {"free": "", "_default": "no key"}});
        known.send_replace(Some(ImagePolicy::of(&serde_json::from_value(stored).unwrap())));
        assert_eq!(of("free").map(|keys| keys.is_none()), Ok(true));
        assert!(of("team").unwrap_err().starts_with("ConfigMap coracle-image-policy: "));
        assert_eq!(NamespaceKeys::default().of_namespace("team").now().map(|keys| keys.is_none()), Ok(true));
    }
}
