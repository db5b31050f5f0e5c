//! Calls that need no guest.

use coracle_proto::cri::*;
use coracle_testkit::eventually;
use tonic::Code;

use crate::support::{IMAGE, Node, container, labels, sandbox};

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_return_version_info() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let version = |version: &str| VersionRequest { version: version.into() };
    for asked in ["", "0.1.0"] {
        let said = daemon.kubelet.runtime.version(version(asked)).await.unwrap().into_inner();
        assert_eq!((said.version.as_str(), said.runtime_name.as_str()), ("0.1.0", "coracle"));
        assert_eq!((said.runtime_api_version.as_str(), said.runtime_version.is_empty()), ("v1", false));
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_return_runtime_conditions() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let status = kubelet.runtime.status(StatusRequest { verbose: false }).await.unwrap().into_inner();
    let conditions = status.status.unwrap().conditions;
    let types: Vec<_> = conditions.iter().map(|c| (c.r#type.as_str(), c.status)).collect();
    let missing = daemon.host.jail_missing().join("; ");
    assert_eq!(conditions[2].message, missing);
    assert_eq!(types, [("RuntimeReady", true), ("NetworkReady", true), ("VMMsJailed", missing.is_empty())]);
    let handlers: Vec<_> = status.runtime_handlers.iter().map(|handler| handler.name.as_str()).collect();
    assert_eq!(handlers, ["", "coracle", "coracle-disk", "macvm", "coracle-fake"]);
    assert!(status.info.is_empty() && status.features.unwrap().supplemental_groups_policy);
    let config = kubelet.runtime.runtime_config(RuntimeConfigRequest {}).await.unwrap().into_inner();
    assert_eq!(config.linux.unwrap().cgroup_driver(), CgroupDriver::Cgroupfs);
    let update = |cidr: &str| {
        let network_config = Some(NetworkConfig { pod_cidr: cidr.into() });
        UpdateRuntimeConfigRequest { runtime_config: Some(RuntimeConfig { network_config }) }
    };
    kubelet.runtime.update_runtime_config(update("10.244.1.0/24,fd00::/64")).await.unwrap();
    let refused = kubelet.runtime.update_runtime_config(update("10.244")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let verbose = kubelet.runtime.status(StatusRequest { verbose: true }).await.unwrap().into_inner();
    assert!(verbose.info["node"].contains("10.244.1.0/24"), "{:?}", verbose.info);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_pods_get_addresses_from_the_first_pod_cidr() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let update = |cidr: &str| {
        let network_config = Some(NetworkConfig { pod_cidr: cidr.into() });
        UpdateRuntimeConfigRequest { runtime_config: Some(RuntimeConfig { network_config }) }
    };
    kubelet.runtime.update_runtime_config(update("fd00::/64,10.244.1.0/24")).await.unwrap();
    let id = kubelet.run_sandbox(sandbox("a")).await.unwrap();
    let address = |status: PodSandboxStatus| status.network.unwrap().ip;
    assert_eq!(address(kubelet.sandbox_status(&id).await.unwrap()), "10.244.1.2");
    // A pod keeps its address; later pods get addresses of the same network.
    kubelet.runtime.update_runtime_config(update("10.244.2.0/24")).await.unwrap();
    assert_eq!(address(kubelet.sandbox_status(&id).await.unwrap()), "10.244.1.2");
    let other = kubelet.run_sandbox(sandbox("b")).await.unwrap();
    assert_eq!(address(kubelet.sandbox_status(&other).await.unwrap()), "10.244.1.3");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_support_running_pod_sandbox() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let config = sandbox("web");
    let id = kubelet.run_sandbox(config.clone()).await.unwrap();
    assert!(id.len() <= 64 && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()), "{id}");
    let status = kubelet.sandbox_status(&id).await.unwrap();
    assert_eq!(status.state(), PodSandboxState::SandboxReady);
    assert!(status.network.unwrap().ip.starts_with("10.100.0."));
    assert!(status.created_at > 1_600_000_000_000_000_000, "nanoseconds");
    assert_eq!(kubelet.run_sandbox(config).await.unwrap(), id, "the same request again makes no second one");
    assert_eq!(kubelet.sandboxes().await.len(), 1);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_support_stopping_pod_sandbox() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    kubelet.start(&main).await.unwrap();
    kubelet.stop_sandbox(&id).await.unwrap();
    let status = kubelet.sandbox_status(&id).await.unwrap();
    assert_eq!((status.state(), status.network), (PodSandboxState::SandboxNotready, None));
    assert_eq!(kubelet.status(&main).await.unwrap().state(), ContainerState::ContainerExited);
    let refused = kubelet.create(&id, container("x", IMAGE, &["serve"]), sandbox("web")).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let exists = kubelet.run_sandbox(sandbox("web")).await.unwrap_err();
    assert_eq!(exists.code(), Code::AlreadyExists, "a new attempt has another number");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_support_removing_pod_sandbox() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    kubelet.remove_sandbox(&id).await.unwrap();
    assert_eq!(kubelet.sandbox_status(&id).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(kubelet.status(&main).await.unwrap_err().code(), Code::NotFound);
    assert!(kubelet.sandboxes().await.is_empty() && kubelet.containers().await.is_empty());
    assert!(daemon.host.list().is_empty(), "nothing is left of the VM");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_preserve_sandbox_attributes() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let config = sandbox("web");
    let request =
        RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: "coracle".to_owned() };
    let id = kubelet.runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
    let other = RunPodSandboxRequest { config: Some(sandbox("x")), runtime_handler: "runc".to_owned() };
    let refused = kubelet.runtime.run_pod_sandbox(other).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "an unknown handler is refused");
    let (status, listed) = (kubelet.sandbox_status(&id).await.unwrap(), kubelet.sandboxes().await.remove(0));
    assert_eq!((&status.labels, &listed.labels), (&config.labels, &config.labels));
    assert_eq!((&status.annotations, &listed.annotations), (&config.annotations, &config.annotations));
    assert_eq!((status.metadata, listed.metadata), (config.metadata.clone(), config.metadata));
    assert_eq!((status.runtime_handler.as_str(), listed.runtime_handler.as_str()), ("coracle", "coracle"));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_preserve_container_attributes() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let logs = PodSandboxConfig { log_directory: node.dir.path().display().to_string(), ..sandbox("web") };
    let id = kubelet.run_sandbox(logs.clone()).await.unwrap();
    let image = kubelet.image_status(IMAGE).await.unwrap();
    let config = ContainerConfig {
        annotations: labels(&[("io.kubernetes.container.restartCount", "0")]),
        log_path: "main/0.log".into(),
        image: Some(ImageSpec {
            image: image.id.clone(),
            user_specified_image: "test/empty".into(),
            ..ImageSpec::default()
        }),
        ..container("main", "", &["echo", "hello"])
    };
    let main = kubelet.create(&id, config.clone(), logs).await.unwrap();
    let status = kubelet.status(&main).await.unwrap();
    assert_eq!((status.state(), status.started_at), (ContainerState::ContainerCreated, 0));
    assert_eq!((&status.labels, &status.annotations), (&config.labels, &config.annotations));
    assert_eq!((&status.metadata, status.image_id.as_str()), (&config.metadata, image.id.as_str()));
    assert_eq!(status.image.unwrap().image, "test/empty", "what the user wrote");
    assert!(status.image_ref.contains("@sha256:"), "{}", status.image_ref);
    assert_eq!(status.log_path, node.dir.path().join("main/0.log").display().to_string());
    kubelet.start(&main).await.unwrap();
    let ended = eventually("it ends", async || {
        let status = kubelet.clone().status(&main).await.ok()?;
        (status.state() == ContainerState::ContainerExited).then_some(status)
    });
    let ended = ended.await.unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_str()), (0, "Completed"));
    assert!(ended.created_at <= ended.started_at && ended.started_at <= ended.finished_at);
    let log = std::fs::read_to_string(node.dir.path().join("main/0.log")).unwrap();
    assert!(log.ends_with(" stdout F hello\n"), "{log}");
    kubelet.remove(&main).await.unwrap();
    assert!(node.dir.path().join("main/0.log").exists(), "the kubelet removes the log");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn container_that_cannot_start_says_why() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["missing"]), sandbox("web")).await.unwrap();
    let refused = kubelet.start(&main).await.unwrap_err();
    assert!(refused.message().contains("missing: not found"), "{refused}");
    let status = kubelet.status(&main).await.unwrap();
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 128));
    assert_eq!((status.reason.as_str(), status.message.as_str()), ("StartError", "missing: not found"));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn container_name_and_attempt_are_unique_in_a_sandbox() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    let again = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap_err();
    assert_eq!(again.code(), Code::AlreadyExists);
    let mut next = container("main", IMAGE, &["serve"]);
    next.metadata = Some(ContainerMetadata { name: "main".into(), attempt: 1 });
    kubelet.create(&id, next, sandbox("web")).await.unwrap();
    assert_eq!(kubelet.containers().await.len(), 2);
    let missing = kubelet.create(&id, container("x", "localhost/no:1", &["x"]), sandbox("web")).await;
    assert_eq!(missing.unwrap_err().code(), Code::NotFound);
    let nowhere = kubelet.create("nowhere", container("x", IMAGE, &["x"]), sandbox("web")).await;
    assert_eq!(nowhere.unwrap_err().code(), Code::NotFound);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_should_support_listing_container_stats() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    let list = |filter| ListContainerStatsRequest { filter };
    let stats = kubelet.runtime.list_container_stats(list(None)).await.unwrap().into_inner().stats;
    assert!(stats.is_empty(), "only containers that run");
    kubelet.start(&main).await.unwrap();
    let stats = kubelet.runtime.list_container_stats(list(None)).await.unwrap().into_inner().stats;
    let one = &stats[0];
    assert_eq!(one.attributes.as_ref().unwrap().id, main);
    assert!(one.attributes.as_ref().unwrap().metadata.is_some());
    assert!(one.cpu.as_ref().unwrap().timestamp > 0 && one.memory.as_ref().unwrap().timestamp > 0);
    let other = ContainerStatsFilter { label_selector: labels(&[("no", "one")]), ..Default::default() };
    let none = kubelet.runtime.list_container_stats(list(Some(other))).await.unwrap().into_inner().stats;
    assert!(none.is_empty());
    let pods = ListPodSandboxStatsRequest::default();
    let pods = kubelet.runtime.list_pod_sandbox_stats(pods).await.unwrap().into_inner().stats;
    assert_eq!(pods[0].linux.as_ref().unwrap().containers.len(), 1);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_pods_have_the_labels_of_their_descriptors() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    kubelet.start(&main).await.unwrap();
    let runtime = &mut kubelet.runtime;
    let descriptors =
        runtime.list_metric_descriptors(ListMetricDescriptorsRequest {}).await.unwrap().into_inner();
    let pods = runtime.list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).await.unwrap().into_inner();
    let pod = &pods.pod_metrics[0];
    let samples: Vec<_> = pod.metrics.iter().chain(&pod.container_metrics[0].metrics).collect();
    assert_eq!(samples.len(), 40);
    for sample in samples {
        let descriptor = descriptors.descriptors.iter().find(|d| d.name == sample.name).expect("announced");
        assert_eq!(descriptor.label_keys.len(), sample.label_values.len(), "{}", sample.name);
        assert!(sample.value.is_some() && sample.timestamp > 0, "{}", sample.name);
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_lists_have_each_object_once() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    kubelet.start(&main).await.unwrap();
    let mut pods = kubelet
        .runtime
        .stream_pod_sandboxes(StreamPodSandboxesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(pods.message().await.unwrap().unwrap().pod_sandboxes.len(), 1);
    assert!(pods.message().await.unwrap().is_none(), "the stream ends");
    let mut all =
        kubelet.runtime.stream_containers(StreamContainersRequest::default()).await.unwrap().into_inner();
    assert_eq!(all.message().await.unwrap().unwrap().decode_containers().unwrap()[0].id, main);
    let mut stats = kubelet
        .runtime
        .stream_container_stats(StreamContainerStatsRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(stats.message().await.unwrap().unwrap().container_stats.len(), 1);
    let mut images = kubelet.images.stream_images(StreamImagesRequest::default()).await.unwrap().into_inner();
    assert_eq!(images.message().await.unwrap().unwrap().images.len(), 1);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_follow_a_container_from_creation_to_removal() {
    use ContainerEventType as Kind;
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let mut events = kubelet.runtime.get_container_events(GetEventsRequest {}).await.unwrap().into_inner();
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    kubelet.start(&main).await.unwrap();
    kubelet.stop(&main, 2).await.unwrap();
    kubelet.remove(&main).await.unwrap();
    kubelet.remove_sandbox(&id).await.unwrap();
    let (mut of_main, mut of_sandbox) = (vec![], vec![]);
    while of_sandbox.last() != Some(&Kind::ContainerDeletedEvent) {
        let event = events.message().await.unwrap().unwrap();
        assert!(event.created_at > 0 && event.pod_sandbox_status.as_ref().unwrap().metadata.is_some());
        let list = if event.container_id == main { &mut of_main } else { &mut of_sandbox };
        list.push(event.container_event_type());
    }
    let whole = [
        Kind::ContainerCreatedEvent,
        Kind::ContainerStartedEvent,
        Kind::ContainerStoppedEvent,
        Kind::ContainerDeletedEvent,
    ];
    assert_eq!(of_main, whole);
    assert_eq!(of_sandbox.first(), Some(&Kind::ContainerCreatedEvent));
    daemon.end().await;
}
