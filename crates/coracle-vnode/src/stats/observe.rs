//! Reads the samples of all pods from the host core. Never waits for a guest.

use std::path::PathBuf;

use coracle_host::{Access, ContainerState, Host};

use super::sample::{ContainerSample, PodSample};
use crate::table::{PodEntry, PodTable};

/// Pods whose VM exists, with their containers that run.
pub(crate) async fn observe(host: &Host, pods: &PodTable) -> Vec<PodSample> {
    let mut samples = Vec::new();
    let mut logs = Vec::new();
    for entry in pods.list() {
        if let Some((sample, paths)) = of_pod(host, &entry) {
            samples.push(sample);
            logs.push(paths);
        }
    }
    let sizes = coracle_files::blocking(move || {
        let size = |path: &PathBuf| std::fs::metadata(path).ok().map(|metadata| metadata.len());
        Ok(logs.iter().map(|paths| paths.iter().map(size).collect::<Vec<_>>()).collect::<Vec<_>>())
    });
    for (sample, sizes) in samples.iter_mut().zip(sizes.await.unwrap_or_default()) {
        for (container, size) in sample.containers.iter_mut().zip(sizes) {
            container.log_bytes = size;
        }
    }
    samples
}

/// A pod, and the logs of its containers in their order.
fn of_pod(host: &Host, entry: &PodEntry) -> Option<(PodSample, Vec<PathBuf>)> {
    let vm = entry.vm.as_deref()?;
    let view = host.find(vm, Access::Change).ok()?;
    let report = host.container_statistics(vm).ok().flatten();
    let of = &entry.pod.metadata;
    let mut sample = PodSample {
        namespace: of.namespace.clone().unwrap_or_default(),
        name: of.name.clone().unwrap_or_default(),
        uid: of.uid.clone().unwrap_or_default(),
        started_ms: view.record.started_at.map(|at| at.0),
        time_ms: host.clock().now().0,
        ..PodSample::default()
    };
    if let Some(report) = &report {
        sample.time_ms = report.time_unix_ns / 1_000_000;
        sample.guest = report.sandbox;
    }
    let mut logs = Vec::new();
    for (name, container) in &entry.containers {
        let Some(record) = view.containers.get(&container.id) else { continue };
        if record.state != ContainerState::Running {
            continue;
        }
        let id = record.id.to_string();
        let statistics =
            report.as_ref().and_then(|report| report.containers.iter().find(|c| c.container == id));
        sample.containers.push(ContainerSample {
            name: name.clone(),
            image: record.spec.image.clone(),
            started_ms: record.started_at.map(|at| at.0),
            memory_limit_bytes: record.spec.resources.memory_max_bytes.filter(|limit| *limit > 0),
            log_bytes: None,
            statistics: statistics.cloned(),
            id,
        });
        logs.push(container.log.clone());
    }
    Some((sample, logs))
}
