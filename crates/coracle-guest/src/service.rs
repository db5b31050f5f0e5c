//! Calls of the guest service: parse the request, call the module that executes it, build the response.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::guest::attach_request::Message as Attach;
use coracle_proto::guest::copy_in_request::Message as CopyIn;
use coracle_proto::guest::exec_request::Message as Exec;
use coracle_proto::guest::fuse_reply::Message as ServeFolder;
use coracle_proto::guest::guest_server::Guest;
use coracle_proto::guest::port_forward_request::Message as PortForward;
use coracle_proto::guest::*;
use futures_util::Stream;
use rustix::process::Signal;
use tonic::{Request, Response, Status, Streaming};

use crate::agent::Agent;
use crate::containers::attach_workload;
use crate::error::Error;
use crate::exit::exit_status;
use crate::task_stream::TaskStream;
use crate::workload::WorkloadPhase;
use crate::{copy, exec, forward, metrics, net, process, volumes};
use coracle_spawn::Thread;

/// Time limit for the first message of a stream.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Guest for Agent {
    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusResponse> {
        Ok(Response::new(Self::status(self)))
    }

    async fn prepare(&self, request: Request<PrepareRequest>) -> Answer<PrepareResponse> {
        Self::prepare(self, &request.into_inner()).await?;
        Ok(Response::new(PrepareResponse {}))
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Answer<ResetResponse> {
        Self::reset(self, Thread::OfFiles).await?;
        Ok(Response::new(ResetResponse {}))
    }

    async fn configure(&self, request: Request<ConfigureRequest>) -> Answer<ConfigureResponse> {
        let configured = Self::configure(self, request.into_inner(), Thread::OfFiles).await?;
        net::announce();
        Ok(Response::new(configured))
    }

    async fn start_workload(&self, request: Request<StartWorkloadRequest>) -> Answer<StartWorkloadResponse> {
        let process = request.into_inner().process.ok_or_else(|| Error::invalid("no process"))?;
        Ok(Response::new(Self::start_workload(self, process, Thread::OfFiles).await?))
    }

    async fn signal_workload(
        &self,
        request: Request<SignalWorkloadRequest>,
    ) -> Answer<SignalWorkloadResponse> {
        let number = request.into_inner().signal;
        let signal = Signal::from_named_raw(number)
            .ok_or_else(|| Error::invalid(format!("invalid signal {number}")))?;
        if !self.workload.signal(&self.reaper, signal) {
            return Err(Error::State("the workload is not running".into()).into());
        }
        Ok(Response::new(SignalWorkloadResponse {}))
    }

    async fn wait_workload(&self, _: Request<WaitWorkloadRequest>) -> Answer<WaitWorkloadResponse> {
        if self.is_system() {
            let exit = tokio::select! {
                exit = self.system_exit() => Some(exit),
                () = self.closed() => self.workload.progress().exit(),
            };
            return Ok(Response::new(WaitWorkloadResponse {
                exit: exit.map(exit_status),
                oom_killed: false,
            }));
        }
        if self.workload.progress() == WorkloadPhase::NotStarted {
            return Err(Error::State("the workload was not started".into()).into());
        }
        Ok(Response::new(self.workload_exit().await))
    }

    type LogsStream = Pin<Box<dyn Stream<Item = Result<LogChunk, Status>> + Send>>;

    async fn logs(&self, request: Request<LogsRequest>) -> Answer<Self::LogsStream> {
        let follower = self.workload.logs().follow(request.into_inner().from_offset)?;
        Ok(Response::new(Box::pin(follower)))
    }

    type ExecStream = TaskStream<ExecResponse>;

    async fn exec(&self, request: Request<Streaming<ExecRequest>>) -> Answer<Self::ExecStream> {
        let mut input = request.into_inner();
        let Some(Exec::Start(process)) = first(&mut input).await?.message else {
            return Err(Status::invalid_argument("the first message is not `start`"));
        };
        Ok(Response::new(exec::exec(self, process, input).await?))
    }

    async fn copy_in(&self, request: Request<Streaming<CopyInRequest>>) -> Answer<CopyInResponse> {
        let mut input = request.into_inner();
        let Some(CopyIn::Header(header)) = first(&mut input).await?.message else {
            return Err(Status::invalid_argument("the first message is not `header`"));
        };
        Ok(Response::new(copy::unpack(self.root_of(&header.container)?, &header.path, input).await?))
    }

    type CopyOutStream = TaskStream<CopyOutChunk>;

    async fn copy_out(&self, request: Request<CopyOutRequest>) -> Answer<Self::CopyOutStream> {
        let request = request.into_inner();
        Ok(Response::new(copy::pack(self.root_of(&request.container)?, request.path)?))
    }

    type ChangesStream = TaskStream<CopyOutChunk>;

    async fn changes(&self, _: Request<ChangesRequest>) -> Answer<Self::ChangesStream> {
        let Some(upper) = self.upper()? else {
            return Err(Status::unimplemented("the root of this agent is not an overlay of its own"));
        };
        Ok(Response::new(copy::changes(upper)))
    }

    type PortForwardStream = TaskStream<PortForwardChunk>;

    async fn port_forward(
        &self,
        request: Request<Streaming<PortForwardRequest>>,
    ) -> Answer<Self::PortForwardStream> {
        let mut input = request.into_inner();
        let Some(PortForward::Header(header)) = first(&mut input).await?.message else {
            return Err(Status::invalid_argument("the first message is not `header`"));
        };
        Ok(Response::new(forward::forward(&header, input).await?))
    }

    async fn mount(&self, request: Request<MountRequest>) -> Answer<MountResponse> {
        self.mount_volume(volumes::Plan::parse(&request.into_inner())?).await?;
        Ok(Response::new(MountResponse {}))
    }

    async fn unmount(&self, request: Request<UnmountRequest>) -> Answer<UnmountResponse> {
        self.unmount_volume(request.into_inner().name).await?;
        Ok(Response::new(UnmountResponse {}))
    }

    type ServeFolderStream = TaskStream<FuseRequest>;

    async fn serve_folder(&self, request: Request<Streaming<FuseReply>>) -> Answer<Self::ServeFolderStream> {
        let mut input = request.into_inner();
        let Some(ServeFolder::Name(name)) = first(&mut input).await?.message else {
            return Err(Status::invalid_argument("the first message is not `name`"));
        };
        Ok(Response::new(self.shared_dir(name).await?.serve(input)?))
    }

    async fn configure_sandbox(
        &self,
        request: Request<ConfigureSandboxRequest>,
    ) -> Answer<ConfigureResponse> {
        let configured = Self::configure_sandbox(self, request.into_inner()).await?;
        net::announce();
        Ok(Response::new(configured))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Answer<CreateContainerResponse> {
        if !self.is_sandbox() {
            return Err(Error::State("configure the sandbox first".into()).into());
        }
        let user = self.containers.create(request.into_inner()).await?;
        Ok(Response::new(CreateContainerResponse { user }))
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> Answer<StartContainerResponse> {
        let (containers, reaper) = (Arc::clone(&self.containers), Arc::clone(&self.reaper));
        let id = request.into_inner().id;
        let (pid, exit) =
            process::run_start(Thread::OfFiles, move || containers.start(&id, &reaper)).await??;
        Ok(Response::new(StartContainerResponse { pid, exit: exit.map(exit_status) }))
    }

    async fn stop_container(&self, request: Request<StopContainerRequest>) -> Answer<StopContainerResponse> {
        let request = request.into_inner();
        let grace = Duration::from_millis(request.grace_ms.into());
        let exit = self.containers.stop(&request.id, grace, &self.reaper).await?;
        Ok(Response::new(StopContainerResponse { exit: Some(exit_status(exit)) }))
    }

    async fn kill_container(&self, request: Request<KillContainerRequest>) -> Answer<KillContainerResponse> {
        let request = request.into_inner();
        self.containers.kill(&request.id, request.signal, &self.reaper)?;
        Ok(Response::new(KillContainerResponse {}))
    }

    async fn remove_container(
        &self,
        request: Request<RemoveContainerRequest>,
    ) -> Answer<RemoveContainerResponse> {
        self.containers.remove(&request.into_inner().id).await?;
        Ok(Response::new(RemoveContainerResponse {}))
    }

    async fn update_container(
        &self,
        request: Request<UpdateContainerRequest>,
    ) -> Answer<UpdateContainerResponse> {
        let request = request.into_inner();
        self.containers.update(&request.id, &request.cgroup.unwrap_or_default())?;
        Ok(Response::new(UpdateContainerResponse {}))
    }

    async fn list_containers(&self, _: Request<ListContainersRequest>) -> Answer<ListContainersResponse> {
        Ok(Response::new(ListContainersResponse { containers: self.containers.list() }))
    }

    type AttachStream = TaskStream<ExecResponse>;

    async fn attach(&self, request: Request<Streaming<AttachRequest>>) -> Answer<Self::AttachStream> {
        let mut input = request.into_inner();
        let Some(Attach::Start(start)) = first(&mut input).await?.message else {
            return Err(Status::invalid_argument("the first message is not `start`"));
        };
        if start.container.is_empty() && self.is_system() {
            return Ok(Response::new(attach_workload(&self.workload, input)?));
        }
        Ok(Response::new(self.containers.attach(&start, input)?))
    }

    type SessionStream = TaskStream<GuestFrame>;

    async fn session(&self, request: Request<Streaming<HostFrame>>) -> Answer<Self::SessionStream> {
        let mut input = request.into_inner();
        let first_frame = first(&mut input).await?.message;
        let writable = self.writable();
        let metrics = move || metrics::collect(writable);
        Ok(Response::new(self.containers.session(first_frame, input, metrics)?))
    }

    async fn metrics(&self, _: Request<MetricsRequest>) -> Answer<MetricsResponse> {
        Ok(Response::new(Self::metrics(self)))
    }

    async fn shutdown(&self, request: Request<ShutdownRequest>) -> Answer<ShutdownResponse> {
        let request = request.into_inner();
        // Only the first request counts: a second one cannot extend the grace.
        self.shutdown.send_if_modified(|wanted| {
            let first = wanted.is_none();
            wanted.get_or_insert(request);
            first
        });
        Ok(Response::new(ShutdownResponse {}))
    }
}

async fn first<T>(input: &mut Streaming<T>) -> Result<T, Status> {
    let message = tokio::time::timeout(FIRST_MESSAGE, input.message()).await;
    message
        .map_err(|_| Error::TimedOut("the first message"))??
        .ok_or_else(|| Status::invalid_argument("no first message"))
}
