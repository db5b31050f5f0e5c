//! Lists and their filters. Pure, except for the table.

use std::collections::BTreeMap;

use bytes::Bytes;
use coracle_proto::cri::{
    Container, ContainerFilter, ContainerStatsFilter, PodSandbox, PodSandboxFilter, PodSandboxStatsFilter,
};

use crate::server::CriServer;

impl CriServer {
    /// Returns sandboxes as encoded messages.
    pub(crate) fn pod_sandboxes(&self, filter: Option<&PodSandboxFilter>) -> Vec<Bytes> {
        let pods = self.0.table.pods(&self.0.host);
        let fits = |entry: &PodSandbox| filter.is_none_or(|filter| fits_sandbox(entry, filter));
        pods.iter().filter(|pod| fits(&pod.entry)).map(|pod| pod.encoded.clone()).collect()
    }

    /// Returns containers as encoded messages.
    pub(crate) fn container_list(&self, filter: Option<&ContainerFilter>) -> Vec<Bytes> {
        let pods = self.0.table.pods(&self.0.host);
        let fits = |entry: &Container| filter.is_none_or(|filter| fits_container(entry, filter));
        let containers = pods.iter().flat_map(|pod| pod.containers.iter());
        containers.filter(|one| fits(&one.entry)).map(|one| one.encoded.clone()).collect()
    }
}

fn fits_sandbox(entry: &PodSandbox, filter: &PodSandboxFilter) -> bool {
    is_or_any(&filter.id, &entry.id)
        && filter.state.is_none_or(|wanted| wanted.state == entry.state)
        && has_labels(&entry.labels, &filter.label_selector)
}

fn fits_container(entry: &Container, filter: &ContainerFilter) -> bool {
    is_or_any(&filter.id, &entry.id)
        && is_or_any(&filter.pod_sandbox_id, &entry.pod_sandbox_id)
        && filter.state.is_none_or(|wanted| wanted.state == entry.state)
        && has_labels(&entry.labels, &filter.label_selector)
}

pub(crate) fn fits_container_stats(entry: &Container, filter: &ContainerStatsFilter) -> bool {
    is_or_any(&filter.id, &entry.id)
        && is_or_any(&filter.pod_sandbox_id, &entry.pod_sandbox_id)
        && has_labels(&entry.labels, &filter.label_selector)
}

pub(crate) fn fits_sandbox_stats(entry: &PodSandbox, filter: &PodSandboxStatsFilter) -> bool {
    is_or_any(&filter.id, &entry.id) && has_labels(&entry.labels, &filter.label_selector)
}

fn is_or_any(wanted: &str, id: &str) -> bool {
    wanted.is_empty() || wanted == id
}

fn has_labels(labels: &Map, wanted: &Map) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

type Map = BTreeMap<String, String>;

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{ContainerState, ContainerStateValue};

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Map {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn filter_matches_only_if_all_conditions_hold() {
        let entry = Container {
            id: "c".into(),
            pod_sandbox_id: "s".into(),
            state: ContainerState::ContainerRunning.into(),
            labels: labels(&[("a", "1"), ("b", "2")]),
            ..Container::default()
        };
        let state = |state: ContainerState| Some(ContainerStateValue { state: state.into() });
        let filter = |id: &str, sandbox: &str, wanted, pairs: &[(&str, &str)]| ContainerFilter {
            id: id.into(),
            pod_sandbox_id: sandbox.into(),
            state: wanted,
            label_selector: labels(pairs),
        };
        for (why, filter, want) in [
            ("nothing asked", filter("", "", None, &[]), true),
            ("all of it", filter("c", "s", state(ContainerState::ContainerRunning), &[("a", "1")]), true),
            ("another id", filter("x", "", None, &[]), false),
            ("another sandbox", filter("c", "x", None, &[]), false),
            ("another state", filter("", "", state(ContainerState::ContainerExited), &[]), false),
            ("one label of two", filter("", "", None, &[("a", "1"), ("b", "1")]), false),
            ("a label that it lacks", filter("", "", None, &[("c", "")]), false),
        ] {
            assert_eq!(fits_container(&entry, &filter), want, "{why}");
        }
    }
}
