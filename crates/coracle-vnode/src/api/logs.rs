//! `/containerLogs`: output of a container, and further output while it runs.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::response::Response;
use bytes::Bytes;
use coracle_host::{ContainerId, ContainerState};
use coracle_logs::{CriLogFollower, CriLogReader};
use coracle_vm_pod::fallback::Fallback;
use futures_util::stream;
use http::{HeaderValue, header};
use k8s_openapi::api::core::v1::ContainerStatus;

use super::context::Context;
use super::guests;
use super::http_failure::HttpFailure;
use super::query::{LogOptions, pairs};
use super::target::ContainerTarget;
use crate::table::{ContainerEntry, PodEntry};

/// Time limit for opening a log.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// Handles a request for a log. The headers are sent at once, the output as it is written, chunked. Following ends with the
/// instance of the container, when the client disconnects, and when the server stops.
pub(super) async fn read(
    State(context): State<Context>,
    Path(target): Path<ContainerTarget>,
    RawQuery(query): RawQuery,
) -> Result<Response, HttpFailure> {
    let options = LogOptions::parse(&pairs(query.as_deref()), context.now())?;
    let entry = target.find_pod(&context.pods)?;
    match guests::fallback(&context, &entry) {
        Some(Fallback::Help(help)) => return Ok(text(Body::from(help))),
        Some(Fallback::Ssh(address)) => {
            return guests::journal(&context, address, &options).await.map(text);
        }
        None => {}
    }
    let Instance { id, log } = choose(&entry, &target.container, options.previous)?;
    let (vm, query) = (entry.vm.clone().unwrap_or_default(), options.query);
    let opening = coracle_files::blocking(move || CriLogReader::open(&log, query));
    let reader = match tokio::time::timeout(OPEN_LIMIT, opening).await {
        Ok(Ok(reader)) => reader,
        // A container without output may have no log yet, and a removed container has none any more.
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(text(Body::empty())),
        Ok(Err(error)) => return Err(HttpFailure::internal(format!("cannot open the log: {error}"))),
        Err(_) => return Err(HttpFailure::internal("cannot open the log: the file system does not answer")),
    };
    let ended = async move {
        if options.follow {
            // The removal of an instance ends it, too.
            let end = async {
                match entry.is_vm {
                    true => drop(context.host.wait(&vm).await),
                    false => drop(context.host.wait_container(&vm, &id).await),
                }
            };
            let _ended_or_stopped = context.stop.run_until_cancelled(end).await;
        }
    };
    let follower = CriLogFollower::new(reader, ended);
    let output = stream::try_unfold(follower, async |mut follower| {
        let next = follower.next().await?;
        Ok::<_, io::Error>(next.map(|output| (Bytes::from(output), follower)))
    });
    Ok(text(Body::from_stream(output)))
}

fn text(body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}

/// One attempt of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Instance {
    id: ContainerId,
    log: PathBuf,
}

/// Returns the instance whose log is requested. Pure.
///
/// # Errors
/// 400: the container has not started yet; `previous`: no earlier instance has ended.
fn choose(entry: &PodEntry, name: &str, previous: bool) -> Result<Instance, HttpFailure> {
    let pod = entry.pod.metadata.name.as_deref().unwrap_or_default();
    let status = status(entry, name);
    let waits = status.and_then(|status| status.state.as_ref()?.waiting.as_ref());
    let container = entry.container(name);
    let newest =
        |container: &ContainerEntry| Instance { id: container.id.clone(), log: container.log.clone() };
    let before = container.and_then(|container| container.previous.clone());
    let before = before.map(|(id, log)| Instance { id, log });
    let chosen = match container {
        // An ended container that waits for its next attempt is itself the previous instance, as `lastState` says.
        Some(container) if previous && waits.is_some() && container.state == ContainerState::Exited => {
            Some(newest(container))
        }
        _ if previous => before,
        Some(container) if container.state != ContainerState::Created => Some(newest(container)),
        _ => before,
    };
    chosen.ok_or_else(|| match previous {
        true => HttpFailure::bad_request(format!(
            "previous terminated container \"{name}\" in pod \"{pod}\" not found"
        )),
        false => {
            let reason = waits.and_then(|waiting| waiting.reason.as_deref());
            let reason = match reason.unwrap_or("ContainerCreating") {
                "ErrImagePull" => "image can't be pulled",
                "ImagePullBackOff" => "trying and failing to pull image",
                reason => reason,
            };
            let message = format!("container \"{name}\" in pod \"{pod}\" is waiting to start: {reason}");
            HttpFailure::bad_request(message)
        }
    })
}

/// Returns the reported status of a container.
fn status<'a>(entry: &'a PodEntry, name: &str) -> Option<&'a ContainerStatus> {
    let status = entry.status()?;
    let kinds =
        [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
    kinds.into_iter().flatten().flatten().find(|status| status.name == name)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod;
    use serde_json::{Value, json};

    use super::*;

    fn entry(container: Option<(ContainerState, bool)>, state: Value) -> PodEntry {
        let pod = json!({
            "metadata": {"name": "web"},
            "status": {"containerStatuses": [{
                "name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
            }]},
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let container = container.map(|(state, has_previous)| ContainerEntry {
            name: "main".to_owned(),
            id: "new".parse().unwrap(),
            state,
            log: "/new.log".into(),
            previous: has_previous.then(|| ("old".parse().unwrap(), "/old.log".into())),
        });
        let containers = container.into_iter().collect();
        PodEntry { vm: Some("vm".into()), containers, ..PodEntry::new(Arc::new(pod)) }
    }

    #[test]
    fn instance_table() {
        use ContainerState::{Created, Exited, Running};
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        let (runs, ended) = (json!({"running": {}}), json!({"terminated": {"exitCode": 0}}));
        for (why, container, state, previous, want) in [
            ("it runs", Some((Running, false)), runs.clone(), false, "new"),
            ("it has ended", Some((Exited, true)), ended.clone(), false, "new"),
            ("it is restarting", Some((Exited, true)), waiting("CrashLoopBackOff"), false, "new"),
            (
                "its next attempt is being made",
                Some((Created, true)),
                waiting("PodInitializing"),
                false,
                "old",
            ),
            (
                "nothing exists",
                None,
                waiting("ContainerCreating"),
                false,
                "waiting to start: ContainerCreating",
            ),
            ("its image cannot be pulled", None, waiting("ErrImagePull"), false, "image can't be pulled"),
            ("made, not started", Some((Created, false)), waiting("x"), false, "waiting to start: x"),
            ("the one before", Some((Running, true)), runs.clone(), true, "old"),
            ("none before", Some((Running, false)), runs, true, "previous terminated container \"main\""),
            ("the one before the last", Some((Exited, true)), ended, true, "old"),
            ("the last while restarting", Some((Exited, true)), waiting("CrashLoopBackOff"), true, "new"),
            ("none yet", None, waiting("x"), true, "previous terminated container \"main\""),
        ] {
            match choose(&entry(container, state), "main", previous) {
                Ok(instance) => assert_eq!(instance.id.as_str(), want, "{why}"),
                Err(failure) => {
                    assert_eq!(failure.status, 400, "{why}");
                    assert!(failure.message.contains(want), "{why}: {}", failure.message);
                }
            }
        }
    }
}
