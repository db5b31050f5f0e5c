//! `runtime.v1.RuntimeService`.

use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_proto::cri::*;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use super::{Replies, Reply, Service, chunked, reply};
use crate::metrics;
use crate::refusal::Refusal;

/// Version of the kubelet's API, the only one that it accepts.
const KUBELET_API: &str = "0.1.0";

#[tonic::async_trait]
impl RuntimeService for Service {
    async fn version(&self, _: Request<VersionRequest>) -> Reply<VersionResponse> {
        reply(VersionResponse {
            version: KUBELET_API.to_owned(),
            runtime_name: "coracle".to_owned(),
            runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime_api_version: "v1".to_owned(),
        })
    }

    async fn status(&self, request: Request<StatusRequest>) -> Reply<StatusResponse> {
        reply(self.0.runtime_status(request.into_inner().verbose))
    }

    async fn runtime_config(&self, _: Request<RuntimeConfigRequest>) -> Reply<RuntimeConfigResponse> {
        let driver = match self.0.0.options.systemd_cgroups {
            true => CgroupDriver::Systemd,
            false => CgroupDriver::Cgroupfs,
        };
        let linux = Some(LinuxRuntimeConfiguration { cgroup_driver: driver.into() });
        reply(RuntimeConfigResponse { linux })
    }

    async fn update_runtime_config(
        &self,
        request: Request<UpdateRuntimeConfigRequest>,
    ) -> Reply<UpdateRuntimeConfigResponse> {
        let config = request.into_inner().runtime_config.and_then(|config| config.network_config);
        let cidr = config.unwrap_or_default().pod_cidr;
        let is_net = |part: &str| part.trim().parse::<ipnet::IpNet>().is_ok();
        if !cidr.is_empty() && !cidr.split(',').all(is_net) {
            return Err(Refusal::invalid("pod CIDR", format!("\"{cidr}\"")).into());
        }
        self.0.set_pod_cidr(cidr).await;
        reply(UpdateRuntimeConfigResponse {})
    }

    async fn run_pod_sandbox(&self, request: Request<RunPodSandboxRequest>) -> Reply<RunPodSandboxResponse> {
        let pod_sandbox_id = self.0.run_pod_sandbox(request.into_inner()).await?;
        reply(RunPodSandboxResponse { pod_sandbox_id })
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<StopPodSandboxRequest>,
    ) -> Reply<StopPodSandboxResponse> {
        self.0.stop_pod_sandbox(&request.into_inner().pod_sandbox_id).await?;
        reply(StopPodSandboxResponse {})
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<RemovePodSandboxRequest>,
    ) -> Reply<RemovePodSandboxResponse> {
        self.0.remove_pod_sandbox(&request.into_inner().pod_sandbox_id).await?;
        reply(RemovePodSandboxResponse {})
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<PodSandboxStatusRequest>,
    ) -> Reply<PodSandboxStatusResponse> {
        let PodSandboxStatusRequest { pod_sandbox_id, verbose } = request.into_inner();
        reply(self.0.pod_sandbox_status(&pod_sandbox_id, verbose)?)
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<ListPodSandboxRequest>,
    ) -> Reply<ListPodSandboxResponse> {
        let filter = request.into_inner().filter;
        reply(ListPodSandboxResponse { items: self.0.pod_sandboxes(filter.as_ref()) })
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Reply<CreateContainerResponse> {
        let container_id = self.0.create_container(request.into_inner()).await?;
        reply(CreateContainerResponse { container_id })
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> Reply<StartContainerResponse> {
        self.0.start_container(&request.into_inner().container_id).await?;
        reply(StartContainerResponse {})
    }

    async fn stop_container(&self, request: Request<StopContainerRequest>) -> Reply<StopContainerResponse> {
        let StopContainerRequest { container_id, timeout } = request.into_inner();
        self.0.stop_container(&container_id, timeout).await?;
        reply(StopContainerResponse {})
    }

    async fn remove_container(
        &self,
        request: Request<RemoveContainerRequest>,
    ) -> Reply<RemoveContainerResponse> {
        self.0.remove_container(&request.into_inner().container_id).await?;
        reply(RemoveContainerResponse {})
    }

    async fn list_containers(
        &self,
        request: Request<ListContainersRequest>,
    ) -> Reply<ListContainersResponse> {
        let filter = request.into_inner().filter;
        reply(ListContainersResponse { containers: self.0.container_list(filter.as_ref()) })
    }

    async fn container_status(
        &self,
        request: Request<ContainerStatusRequest>,
    ) -> Reply<ContainerStatusResponse> {
        let ContainerStatusRequest { container_id, verbose } = request.into_inner();
        reply(self.0.container_status(&container_id, verbose)?)
    }

    async fn update_container_resources(
        &self,
        request: Request<UpdateContainerResourcesRequest>,
    ) -> Reply<UpdateContainerResourcesResponse> {
        self.0.update_container(request.into_inner()).await?;
        reply(UpdateContainerResourcesResponse {})
    }

    async fn reopen_container_log(
        &self,
        request: Request<ReopenContainerLogRequest>,
    ) -> Reply<ReopenContainerLogResponse> {
        self.0.reopen_container_log(&request.into_inner().container_id).await?;
        reply(ReopenContainerLogResponse {})
    }

    async fn exec_sync(&self, request: Request<ExecSyncRequest>) -> Reply<ExecSyncResponse> {
        reply(self.0.exec_sync(request.into_inner()).await?)
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Reply<ExecResponse> {
        reply(ExecResponse { url: self.0.exec_url(request.into_inner()).await? })
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Reply<AttachResponse> {
        reply(AttachResponse { url: self.0.attach_url(request.into_inner())? })
    }

    async fn port_forward(&self, request: Request<PortForwardRequest>) -> Reply<PortForwardResponse> {
        reply(PortForwardResponse { url: self.0.port_forward_url(request.into_inner())? })
    }

    async fn container_stats(
        &self,
        request: Request<ContainerStatsRequest>,
    ) -> Reply<ContainerStatsResponse> {
        let stats = self.0.container_stats(&request.into_inner().container_id)?;
        reply(ContainerStatsResponse { stats: Some(stats) })
    }

    async fn list_container_stats(
        &self,
        request: Request<ListContainerStatsRequest>,
    ) -> Reply<ListContainerStatsResponse> {
        let filter = request.into_inner().filter;
        reply(ListContainerStatsResponse { stats: self.0.list_container_stats(filter.as_ref()) })
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<PodSandboxStatsRequest>,
    ) -> Reply<PodSandboxStatsResponse> {
        let stats = self.0.pod_sandbox_stats(&request.into_inner().pod_sandbox_id)?;
        reply(PodSandboxStatsResponse { stats: Some(stats) })
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<ListPodSandboxStatsRequest>,
    ) -> Reply<ListPodSandboxStatsResponse> {
        let filter = request.into_inner().filter;
        reply(ListPodSandboxStatsResponse { stats: self.0.list_pod_sandbox_stats(filter.as_ref()) })
    }

    async fn checkpoint_container(
        &self,
        _: Request<CheckpointContainerRequest>,
    ) -> Reply<CheckpointContainerResponse> {
        Err(Status::unimplemented("a container of a VM is saved with its VM"))
    }

    async fn list_metric_descriptors(
        &self,
        _: Request<ListMetricDescriptorsRequest>,
    ) -> Reply<ListMetricDescriptorsResponse> {
        reply(ListMetricDescriptorsResponse { descriptors: metrics::descriptors() })
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _: Request<ListPodSandboxMetricsRequest>,
    ) -> Reply<ListPodSandboxMetricsResponse> {
        reply(ListPodSandboxMetricsResponse { pod_metrics: self.0.pod_sandbox_metrics() })
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<UpdatePodSandboxResourcesRequest>,
    ) -> Reply<UpdatePodSandboxResourcesResponse> {
        self.0.update_pod_sandbox(&request.into_inner())?;
        reply(UpdatePodSandboxResourcesResponse {})
    }

    type GetContainerEventsStream = Replies<ContainerEventResponse>;

    async fn get_container_events(
        &self,
        _: Request<GetEventsRequest>,
    ) -> Reply<Self::GetContainerEventsStream> {
        reply(Box::pin(ReceiverStream::new(self.0.container_events())))
    }

    type StreamPodSandboxesStream = Replies<StreamPodSandboxesResponse>;

    async fn stream_pod_sandboxes(
        &self,
        request: Request<StreamPodSandboxesRequest>,
    ) -> Reply<Self::StreamPodSandboxesStream> {
        let filter = request.into_inner().filter;
        let pod_sandboxes = self.0.pod_sandboxes(filter.as_ref());
        chunked(pod_sandboxes, |pod_sandboxes| StreamPodSandboxesResponse { pod_sandboxes })
    }

    type StreamContainersStream = Replies<StreamContainersResponse>;

    async fn stream_containers(
        &self,
        request: Request<StreamContainersRequest>,
    ) -> Reply<Self::StreamContainersStream> {
        let filter = request.into_inner().filter;
        chunked(self.0.container_list(filter.as_ref()), |containers| StreamContainersResponse { containers })
    }

    type StreamContainerStatsStream = Replies<StreamContainerStatsResponse>;

    async fn stream_container_stats(
        &self,
        request: Request<StreamContainerStatsRequest>,
    ) -> Reply<Self::StreamContainerStatsStream> {
        let filter = request.into_inner().filter;
        let stats = self.0.list_container_stats(filter.as_ref());
        chunked(stats, |container_stats| StreamContainerStatsResponse { container_stats })
    }

    type StreamPodSandboxStatsStream = Replies<StreamPodSandboxStatsResponse>;

    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<StreamPodSandboxStatsRequest>,
    ) -> Reply<Self::StreamPodSandboxStatsStream> {
        let filter = request.into_inner().filter;
        let stats = self.0.list_pod_sandbox_stats(filter.as_ref());
        chunked(stats, |pod_sandbox_stats| StreamPodSandboxStatsResponse { pod_sandbox_stats })
    }

    type StreamPodSandboxMetricsStream = Replies<StreamPodSandboxMetricsResponse>;

    async fn stream_pod_sandbox_metrics(
        &self,
        _: Request<StreamPodSandboxMetricsRequest>,
    ) -> Reply<Self::StreamPodSandboxMetricsStream> {
        let metrics = self.0.pod_sandbox_metrics();
        chunked(metrics, |pod_sandbox_metrics| StreamPodSandboxMetricsResponse { pod_sandbox_metrics })
    }
}
