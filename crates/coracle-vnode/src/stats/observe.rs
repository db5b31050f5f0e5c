//! Reads the samples of all pods from the host core, without waiting for a guest.

use std::path::PathBuf;

use coracle_host::{Access, ContainerState, Host, View};
use coracle_record::ContainerRecord;

use super::sample::{ContainerSample, PodSample};
use crate::table::{ContainerEntry, PodEntry, PodTable};

/// Returns samples of the pods whose VM exists, with their running containers.
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

/// Returns the sample of a pod, and the logs of its containers in the same order.
fn of_pod(host: &Host, entry: &PodEntry) -> Option<(PodSample, Vec<PathBuf>)> {
    let vm = entry.vm.as_deref()?;
    let view = host.find(vm, Access::Change).ok()?;
    let report = match entry.is_vm {
        true => entry.statistics.clone(),
        false => host.container_statistics(vm).ok().flatten(),
    };
    let of = &entry.pod.metadata;
    let mut sample = PodSample {
        namespace: of.namespace.clone().unwrap_or_default(),
        name: of.name.clone().unwrap_or_default(),
        uid: of.uid.clone().unwrap_or_default(),
        started_ms: view.record.started_at.map(|at| at.0),
        time_ms: host.clock().now().0,
        probes: entry.probes.iter().map(|(of, count)| (of.clone(), *count)).collect(),
        ..PodSample::default()
    };
    if let Some(report) = &report {
        sample.time_ms = report.time_unix_ns / 1_000_000;
        sample.guest = report.sandbox;
    }
    let mut logs = Vec::new();
    for container in &entry.containers {
        let found = match entry.is_vm {
            true => the_vm(&view, container),
            false => view.containers.get(&container.id).and_then(|record| of_container(record)),
        };
        let Some(found) = found else { continue };
        let reported = report.iter().flat_map(|report| &report.containers);
        let statistics = reported.into_iter().find(|one| one.container == found.id).cloned();
        sample.containers.push(ContainerSample { name: container.name.clone(), statistics, ..found });
        logs.push(container.log.clone());
    }
    Some((sample, logs))
}

/// Returns the sample of a container that runs in the VM of its pod.
fn of_container(record: &ContainerRecord) -> Option<ContainerSample> {
    (record.state == ContainerState::Running).then(|| ContainerSample {
        id: record.id.to_string(),
        image: record.spec.image.clone(),
        started_ms: record.started_at.map(|at| at.0),
        memory_limit_bytes: record.spec.resources.memory_max_bytes.filter(|limit| *limit > 0),
        ..ContainerSample::default()
    })
}

/// Returns the sample of a container that is a VM itself.
fn the_vm(view: &View, container: &ContainerEntry) -> Option<ContainerSample> {
    (container.state == ContainerState::Running).then(|| ContainerSample {
        id: view.record.id.to_string(),
        image: view.record.image.clone(),
        started_ms: view.record.started_at.map(|at| at.0),
        memory_limit_bytes: Some(u64::from(view.record.memory.get()) << 20),
        ..ContainerSample::default()
    })
}
