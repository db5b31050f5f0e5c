//! Calls of the agent service.

use std::sync::Arc;
use std::time::Duration;

use coracle_api::keys::{POWER, vm};
use coracle_host::{EventKind, Host, HostError, View};
use coracle_proto::firecracker as pb;
use coracle_proto::firecracker::firecracker_agent_server::FirecrackerAgent;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::convert::{self, ErrorStyle, PAGE_MAX};
use super::metrics::Metrics;
use super::{AgentMetrics, LegacyConfig};
use crate::objects::{self, Creation, Known};
use crate::status::{OrStatus as _, to_status};

/// Default time for a guest to power off.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// Options of the agent service.
#[derive(Clone, Debug, Default)]
pub struct AgentOptions {
    /// Form in which failures are reported.
    pub error_style: ErrorStyle,
    /// Default image of requests.
    pub default_image: String,
    /// Default kernel of requests; empty: the node's.
    pub default_kernel: String,
}

impl From<&LegacyConfig> for AgentOptions {
    fn from(config: &LegacyConfig) -> Self {
        Self {
            error_style: ErrorStyle::default(),
            default_image: config.firecracker.rootfs_path.clone(),
            default_kernel: config.firecracker.kernel_path.clone(),
        }
    }
}

/// Agent service. Clones share the host core.
#[derive(Clone, Debug)]
pub struct AgentService {
    host: Host,
    options: Arc<AgentOptions>,
    metrics: Metrics,
    started: Instant,
}

type Reply<T> = Result<Response<T>, Status>;

/// Server reflection of this service, which clients use for ad-hoc calls.
///
/// # Errors
/// Never in practice: the descriptors are compiled in.
pub fn reflection() -> Result<
    tonic_reflection::server::v1::ServerReflectionServer<impl tonic_reflection::server::v1::ServerReflection>,
    tonic_reflection::server::Error,
> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(pb::DESCRIPTORS)
        .build_v1()
}

impl AgentService {
    /// Makes a service for `host`.
    #[must_use]
    pub fn new(host: Host, options: AgentOptions, metrics: AgentMetrics) -> Self {
        Self { host, options: Arc::new(options), metrics: Arc::new(metrics), started: Instant::now() }
    }

    /// Runs one call and counts it. `ok` says whether a reply is a success, as a reply may carry an error.
    async fn count_call<T>(
        &self,
        method: &'static str,
        call: impl Future<Output = Result<T, Status>>,
        ok: impl FnOnce(&T) -> bool,
    ) -> Reply<T> {
        let began = Instant::now();
        let result = call.await;
        let good = result.as_ref().is_ok_and(ok);
        self.metrics.call(method, good, began.elapsed().as_secs_f64());
        result.map(Response::new)
    }

    /// Converts a failure to a reply in the in-band style, except for errors that were a status in all versions.
    fn failure<T>(&self, error: &HostError, inband: impl FnOnce(String) -> T) -> Result<T, Status> {
        let invalid = matches!(error, HostError::Invalid { .. });
        match self.options.error_style {
            ErrorStyle::Inband if !invalid => Ok(inband(error.chain())),
            ErrorStyle::Inband | ErrorStyle::Status => Err(to_status(error)),
        }
    }

    /// Finds the VM of a call.
    fn find_vm(&self, vm_id: &str, caller: &MetadataMap) -> Result<Arc<View>, HostError> {
        objects::find_vm(&self.host, vm_id, &objects::caller_of(caller))
    }

    async fn create(
        &self,
        request: pb::CreateVmRequest,
        caller: &MetadataMap,
    ) -> Result<Arc<View>, HostError> {
        let options = &self.options;
        let snapshot = request.metadata.get(vm::CLONE_FROM).filter(|name| !name.is_empty()).cloned();
        // The image of a snapshot is known.
        let image = snapshot.as_ref().unwrap_or(&options.default_image);
        let spec = convert::vm_spec(request, caller, image, &options.default_kernel)?;
        let (caller_object, fence) = (objects::caller_of(caller), objects::fence_of(caller));
        let stays_off = caller.get(POWER).is_some_and(|p| p == "Stopped");
        let creation = Creation { spec, snapshot, stays_off, caller: caller_object, fence };
        objects::create(&self.host, creation, || self.metrics.record_creation()).await
    }

    async fn stop(
        &self,
        request: &pb::StopVmRequest,
        caller: &MetadataMap,
    ) -> Result<pb::VmState, HostError> {
        let view = self.find_vm(&request.vm_id, caller)?;
        let grace = if request.force { Duration::ZERO } else { DEFAULT_GRACE };
        let (id, fence) = (view.record.id.as_str(), objects::fence_of(caller));
        let record = match caller.get(POWER).map(|v| v.to_str().unwrap_or_default()) {
            None => self.host.stop(id, grace, fence).await?,
            Some("Paused") => self.host.pause(id, fence).await?,
            Some("Hibernated") => self.host.hibernate(id, fence).await?,
            Some(other) => {
                let message = format!("{POWER} is {other:?}: it is Paused, Hibernated or absent");
                return Err(HostError::Invalid { message });
            }
        };
        Ok(convert::state(&record, ErrorStyle::Inband))
    }

    fn info(&self, view: &View) -> pb::VmInfo {
        let sockets = self.host.config().run_dir.display().to_string();
        convert::info(view, &sockets, self.options.error_style)
    }
}

#[tonic::async_trait]
impl FirecrackerAgent for AgentService {
    async fn create_vm(&self, request: Request<pb::CreateVmRequest>) -> Reply<pb::CreateVmResponse> {
        let (caller, _, request) = request.into_parts();
        let vm_id = request.vm_id.clone();
        let call = async {
            match self.create(request, &caller).await {
                Ok(view) => {
                    let info = self.info(&view);
                    Ok(pb::CreateVmResponse {
                        vm_id: info.vm_id,
                        state: info.state,
                        socket_path: info.socket_path,
                        created_at: info.created_at,
                        error_message: String::new(),
                    })
                }
                Err(error) => self.failure(&error, |error_message| pb::CreateVmResponse {
                    vm_id,
                    state: pb::VmState::Error.into(),
                    error_message,
                    ..Default::default()
                }),
            }
        };
        // Boxed, because the future of an image pull is large.
        self.count_call("/firecracker.v1.FirecrackerAgent/CreateVM", Box::pin(call), |r| {
            r.error_message.is_empty()
        })
        .await
    }

    async fn start_vm(&self, request: Request<pb::StartVmRequest>) -> Reply<pb::StartVmResponse> {
        let (caller, _, request) = request.into_parts();
        let (fence, vm_id) = (objects::fence_of(&caller), request.vm_id);
        let call = async {
            let started = match self.find_vm(&vm_id, &caller) {
                Ok(view) => self.host.start(view.record.id.as_str(), fence).await,
                Err(error) => Err(error),
            };
            let reply = |state: pb::VmState, error_message| pb::StartVmResponse {
                vm_id: vm_id.clone(),
                state: state.into(),
                error_message,
            };
            match started {
                Ok(_) => Ok(reply(pb::VmState::Running, String::new())),
                Err(error) => self.failure(&error, |text| reply(pb::VmState::Error, text)),
            }
        };
        self.count_call("/firecracker.v1.FirecrackerAgent/StartVM", call, |r| r.error_message.is_empty())
            .await
    }

    async fn stop_vm(&self, request: Request<pb::StopVmRequest>) -> Reply<pb::StopVmResponse> {
        let (caller, _, request) = request.into_parts();
        let call = async {
            let reply = |state: pb::VmState, error_message| pb::StopVmResponse {
                vm_id: request.vm_id.clone(),
                state: state.into(),
                error_message,
            };
            match self.stop(&request, &caller).await {
                Ok(state) => Ok(reply(state, String::new())),
                Err(error) => self.failure(&error, |text| reply(pb::VmState::Error, text)),
            }
        };
        self.count_call("/firecracker.v1.FirecrackerAgent/StopVM", call, |r| r.error_message.is_empty()).await
    }

    async fn delete_vm(&self, request: Request<pb::DeleteVmRequest>) -> Reply<pb::DeleteVmResponse> {
        let (caller, _, request) = request.into_parts();
        let (fence, vm_id) = (objects::fence_of(&caller), request.vm_id);
        let call = async {
            let deleted = match self.find_vm(&vm_id, &caller) {
                Ok(view) => self.host.delete(view.record.id.as_str(), true, fence).await,
                Err(error) => Err(error),
            };
            let reply = |success, error_message| pb::DeleteVmResponse {
                vm_id: vm_id.clone(),
                success,
                error_message,
            };
            match deleted {
                Ok(()) => Ok(reply(true, String::new())),
                Err(error) => self.failure(&error, |text| reply(false, text)),
            }
        };
        self.count_call("/firecracker.v1.FirecrackerAgent/DeleteVM", call, |r| r.success).await
    }

    async fn get_vm(&self, request: Request<pb::GetVmRequest>) -> Reply<pb::GetVmResponse> {
        let (caller, _, request) = request.into_parts();
        let call = async {
            // An unknown id was a status in both generations of clients.
            let view = self.find_vm(&request.vm_id, &caller).or_status()?;
            Ok(pb::GetVmResponse { vm: Some(self.info(&view)) })
        };
        self.count_call("/firecracker.v1.FirecrackerAgent/GetVM", call, |_| true).await
    }

    async fn list_v_ms(&self, request: Request<pb::ListVMsRequest>) -> Reply<pb::ListVMsResponse> {
        let request = request.into_inner();
        let call = async {
            let all = self.host.list(); // sorted by name
            let total = all.len();
            let mut rest =
                all.iter().filter(|v| v.record.name.as_str() > request.page_token.as_str()).peekable();
            let size = usize::try_from(request.page_size).unwrap_or(0);
            let size = if size == 0 { usize::MAX } else { size.min(PAGE_MAX) };
            let page: Vec<_> = rest.by_ref().take(size).collect();
            let next_page_token = match (rest.peek(), page.last()) {
                (Some(_), Some(last)) => last.record.name.to_string(),
                _ => String::new(),
            };
            let vms = page.into_iter().map(|v| self.info(v)).collect();
            let total_count = i32::try_from(total).unwrap_or(i32::MAX);
            Ok(pb::ListVMsResponse { vms, next_page_token, total_count })
        };
        self.count_call("/firecracker.v1.FirecrackerAgent/ListVMs", call, |_| true).await
    }

    type WatchVMEventsStream = BoxStream<'static, Result<pb::VmEvent, Status>>;

    /// Streams events from now on. A slow reader gets DATA_LOSS and must list the VMs again.
    async fn watch_vm_events(
        &self,
        request: Request<pb::WatchVmEventsRequest>,
    ) -> Reply<Self::WatchVMEventsStream> {
        let wanted = request.into_inner().vm_id;
        let style = self.options.error_style;
        let stop = self.host.stopping();
        let call = async {
            let events = futures_util::stream::unfold(Some(self.host.events()), move |events| {
                let (stop, wanted) = (stop.clone(), wanted.clone());
                async move {
                    let mut events = events?;
                    loop {
                        match stop.run_until_cancelled(events.recv()).await? {
                            Ok(e) if wanted.is_empty() || Known::from(&*e.record).wire_id() == wanted => {
                                let Some(kind) = convert::event_type(e.kind) else { continue };
                                let state = match e.kind {
                                    EventKind::Deleted => pb::VmState::Deleting,
                                    _ => convert::state(&e.record, style),
                                };
                                let event = pb::VmEvent {
                                    vm_id: Known::from(&*e.record).wire_id().to_owned(),
                                    state: state.into(),
                                    message: e.record.message.clone(),
                                    timestamp: e.time.seconds(),
                                    r#type: kind.into(),
                                };
                                return Some((Ok(event), Some(events)));
                            }
                            Ok(_) => {}
                            Err(RecvError::Lagged(n)) => {
                                let lost = Status::data_loss(format!("{n} events lost: list again"));
                                return Some((Err(lost), None));
                            }
                            Err(RecvError::Closed) => return None,
                        }
                    }
                }
            });
            Ok(events.boxed())
        };
        self.count_call("/firecracker.v1.FirecrackerAgent/WatchVMEvents", call, |_| true).await
    }

    async fn get_host_info(&self, _: Request<pb::GetHostInfoRequest>) -> Reply<pb::GetHostInfoResponse> {
        let call = async {
            let before = cpu_times();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let cpu_usage = usage(before, cpu_times());
            let capacity = self.host.capacity();
            Ok(pb::GetHostInfoResponse {
                hostname: hostname(),
                total_cpus: i32::try_from(capacity.cpus).unwrap_or(i32::MAX),
                total_memory_mb: i64::try_from(capacity.memory_mib).unwrap_or(i64::MAX),
                available_memory_mb: i64::try_from(capacity.memory_available_mib).unwrap_or(i64::MAX),
                running_vms: i32::try_from(capacity.vms).unwrap_or(i32::MAX),
                cpu_usage,
                version: env!("CARGO_PKG_VERSION").to_owned(),
            })
        };
        self.count_call("/firecracker.v1.FirecrackerAgent/GetHostInfo", call, |_| true).await
    }

    async fn health_check(&self, _: Request<pb::HealthCheckRequest>) -> Reply<pb::HealthCheckResponse> {
        let uptime_seconds = i64::try_from(self.started.elapsed().as_secs()).unwrap_or(i64::MAX);
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let call = async { Ok(pb::HealthCheckResponse { healthy: true, version, uptime_seconds }) };
        self.count_call("/firecracker.v1.FirecrackerAgent/HealthCheck", call, |_| true).await
    }
}

/// Busy and total ticks of all CPUs (`/proc/stat`, proc(5)).
fn cpu_times() -> (u64, u64) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|t| t.parse().ok())
        .collect();
    let total: u64 = ticks.iter().take(8).sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    (total.saturating_sub(idle), total)
}

/// CPU usage between two readings, percent.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a percentage for people")]
fn usage(before: (u64, u64), after: (u64, u64)) -> f32 {
    let (busy, total) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
    if total == 0 { 0.0 } else { (busy as f64 * 100.0 / total as f64) as f32 }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}
