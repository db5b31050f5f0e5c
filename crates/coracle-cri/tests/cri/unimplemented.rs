//! All calls that return Unimplemented.

use coracle_proto::cri::*;
use tonic::Code;

use crate::support::Node;

#[tokio::test(flavor = "multi_thread")]
async fn golden_unimplemented_calls() {
    let node = Node::new().await;
    let daemon = node.open().await;
    let (runtime, images) = (daemon.kubelet.runtime.clone(), daemon.kubelet.images.clone());
    let mut refused = Vec::new();
    macro_rules! ask {
        ($client:ident: $($call:ident($request:ident),)*) => { $(
            let answer = $client.clone().$call($request::default()).await;
            if answer.is_err_and(|status| status.code() == Code::Unimplemented) {
                refused.push(stringify!($call));
            }
        )* };
    }
    ask!(runtime:
        version(VersionRequest), run_pod_sandbox(RunPodSandboxRequest), stop_pod_sandbox(StopPodSandboxRequest),
        remove_pod_sandbox(RemovePodSandboxRequest), pod_sandbox_status(PodSandboxStatusRequest),
        list_pod_sandbox(ListPodSandboxRequest), create_container(CreateContainerRequest),
        start_container(StartContainerRequest), stop_container(StopContainerRequest),
        remove_container(RemoveContainerRequest), list_containers(ListContainersRequest),
        container_status(ContainerStatusRequest), update_container_resources(UpdateContainerResourcesRequest),
        reopen_container_log(ReopenContainerLogRequest), exec_sync(ExecSyncRequest), exec(ExecRequest),
        attach(AttachRequest), port_forward(PortForwardRequest), container_stats(ContainerStatsRequest),
        list_container_stats(ListContainerStatsRequest), pod_sandbox_stats(PodSandboxStatsRequest),
        list_pod_sandbox_stats(ListPodSandboxStatsRequest), update_runtime_config(UpdateRuntimeConfigRequest),
        status(StatusRequest), checkpoint_container(CheckpointContainerRequest),
        get_container_events(GetEventsRequest), list_metric_descriptors(ListMetricDescriptorsRequest),
        list_pod_sandbox_metrics(ListPodSandboxMetricsRequest), runtime_config(RuntimeConfigRequest),
        update_pod_sandbox_resources(UpdatePodSandboxResourcesRequest),
        stream_pod_sandboxes(StreamPodSandboxesRequest), stream_containers(StreamContainersRequest),
        stream_container_stats(StreamContainerStatsRequest),
        stream_pod_sandbox_stats(StreamPodSandboxStatsRequest),
        stream_pod_sandbox_metrics(StreamPodSandboxMetricsRequest),
    );
    ask!(images:
        list_images(ListImagesRequest), image_status(ImageStatusRequest), pull_image(PullImageRequest),
        remove_image(RemoveImageRequest), image_fs_info(ImageFsInfoRequest), stream_images(StreamImagesRequest),
    );
    insta::assert_snapshot!(refused.join("\n"), @r"
    checkpoint_container
    ");
    daemon.end().await;
}
