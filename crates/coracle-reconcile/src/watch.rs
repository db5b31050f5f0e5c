//! Watches that resume after errors, and caches that follow them.

use std::{collections::HashSet, fmt::Debug, hash::Hash, pin::pin};

use futures_util::{Stream, StreamExt as _};
use kube::{
    Api, Resource, ResourceExt,
    runtime::{WatchStreamExt as _, reflector::store::Writer, watcher},
};
use serde::de::DeserializeOwned;
use tracing::warn;

/// Largest number of objects in one page of an initial list.
const PAGE: u32 = 250;
/// Annotation of `kubectl apply` with a copy of the object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Returns a watch configuration with a page size that bounds memory on both sides.
#[must_use]
pub fn watch_config() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

/// Streams the events of all objects that `config` selects. The stream never ends: it resumes after every error, with backoff,
/// and logs it. Objects have neither managed fields nor the annotation of `kubectl apply`.
pub fn watch<K>(api: Api<K>, config: watcher::Config) -> impl Stream<Item = watcher::Event<K>> + Send + use<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    watcher(api, config).default_backoff().modify(strip).filter_map(|event| async {
        event
            .inspect_err(|error| {
                let error: &dyn std::error::Error = error;
                warn!(object = std::any::type_name::<K>(), error, "watch interrupted");
            })
            .ok()
    })
}

/// Removes the metadata that no controller reads.
pub(crate) fn strip<K: Resource>(object: &mut K) {
    object.managed_fields_mut().clear();
    object.annotations_mut().remove(LAST_APPLIED);
}

/// Change of an object.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Seen<'a, K> {
    /// The object was created or changed.
    Applied(&'a K),
    /// The object was deleted.
    Gone(&'a K),
}

impl<'a, K> Seen<'a, K> {
    /// Returns the object.
    #[must_use]
    pub fn object(self) -> &'a K {
        match self {
            Self::Applied(object) | Self::Gone(object) => object,
        }
    }
}

/// Keeps `cache` equal to the objects that `config` selects. Calls `seen` for each change after the cache was updated, also for
/// objects that were deleted while the watch was interrupted. Never returns.
pub async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    cache: Writer<K>,
    mut seen: impl FnMut(Seen<'_, K>) + Send,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone + Send + Sync,
{
    let mut cache = Cache { writer: cache, listed: Vec::new() };
    let mut events = pin!(watch(api, config));
    while let Some(event) = events.next().await {
        cache.apply(event, &mut seen);
    }
}

/// A cache, and the list that will replace its content.
struct Cache<K>
where
    K: Resource + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    writer: Writer<K>,
    listed: Vec<K>,
}

impl<K> Cache<K>
where
    K: Resource + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    fn apply(&mut self, event: watcher::Event<K>, seen: &mut impl FnMut(Seen<'_, K>)) {
        let before = match &event {
            watcher::Event::InitDone => self.writer.as_reader().state(),
            _ => Vec::new(),
        };
        self.writer.apply_watcher_event(&event);
        match event {
            watcher::Event::Apply(object) => seen(Seen::Applied(&object)),
            watcher::Event::Delete(object) => seen(Seen::Gone(&object)),
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(object) => self.listed.push(object),
            // Only now does the cache contain the listed objects.
            watcher::Event::InitDone => {
                let uids: HashSet<_> = self.listed.iter().map(ResourceExt::uid).collect();
                before.iter().filter(|old| !uids.contains(&old.uid())).for_each(|old| seen(Seen::Gone(old)));
                self.listed.drain(..).for_each(|object| seen(Seen::Applied(&object)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::runtime::watcher::Event;

    use super::*;

    fn object(name: &str) -> ConfigMap {
        let mut object = ConfigMap::default();
        (object.metadata.name, object.metadata.uid) = (Some(name.to_owned()), Some(format!("uid-{name}")));
        object
    }

    #[test]
    fn object_missing_after_relist_is_reported_gone() {
        let mut cache = Cache { writer: Writer::new(()), listed: Vec::new() };
        let list = |names: &[&str]| {
            let objects = names.iter().map(|name| Event::InitApply(object(name)));
            [Event::Init].into_iter().chain(objects).chain([Event::InitDone]).collect::<Vec<_>>()
        };
        for (why, events, want) in [
            ("the first list", list(&["a", "b"]), "+a +b"),
            ("a change", vec![Event::Apply(object("c"))], "+c"),
            ("a deletion", vec![Event::Delete(object("a"))], "-a"),
            ("a list that was interrupted", list(&["c"])[..2].to_vec(), ""),
            ("the next list", list(&["c"]), "-b +c"),
        ] {
            let mut seen = Vec::new();
            for event in events {
                cache.apply(event, &mut |s| {
                    let sign = if matches!(s, Seen::Gone(_)) { "-" } else { "+" };
                    seen.push(format!("{sign}{}", s.object().name_any()));
                });
            }
            assert_eq!(seen.join(" "), want, "{why}");
        }
    }
}
