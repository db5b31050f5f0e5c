//! The nine calls.

use std::sync::Arc;
use std::time::Duration;

use coracle_api::keys::{POWER, vm};
use coracle_host::{CreateSpec, EventKind, Host, HostError, RestoreSpec, View};
use coracle_image::NoProgress;
use coracle_proto::firecracker as pb;
use coracle_proto::firecracker::firecracker_agent_server::FirecrackerAgent;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::convert::{self, ErrorStyle, PAGE_MAX};
use crate::metrics::Metrics;
use crate::{AgentMetrics, LegacyConfig};

/// A guest that is asked to power off and has said nothing else gets this long.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// How the door behaves.
#[derive(Clone, Debug, Default)]
pub struct AgentOptions {
    /// How failures are told.
    pub error_style: ErrorStyle,
    /// Image of requests that name none.
    pub default_image: String,
    /// Kernel of requests that name none; empty is the node's.
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

/// The service; clones share the host.
#[derive(Clone, Debug)]
pub struct AgentService {
    host: Host,
    options: Arc<AgentOptions>,
    metrics: Metrics,
    started: Instant,
}

type Reply<T> = Result<Response<T>, Status>;

/// Server reflection for this service, which clients use for ad-hoc calls.
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
    /// Serves `host`.
    #[must_use]
    pub fn new(host: Host, options: AgentOptions, metrics: AgentMetrics) -> Self {
        Self { host, options: Arc::new(options), metrics: Arc::new(metrics), started: Instant::now() }
    }

    /// Runs one call and counts it; `ok` says whether an in-band reply is a success.
    async fn counted<T>(
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

    /// In-band style turns a failure into a reply, but for what always was a status.
    fn failure<T>(&self, error: &HostError, inband: impl FnOnce(String) -> T) -> Result<T, Status> {
        let invalid = matches!(error, HostError::Invalid { .. });
        match self.options.error_style {
            ErrorStyle::Inband if !invalid => Ok(inband(error.chain())),
            ErrorStyle::Inband | ErrorStyle::Status => Err(error.status()),
        }
    }

    /// The VM with exactly this name: prefixes are for people.
    fn exact(&self, vm_id: &str) -> Result<Arc<View>, HostError> {
        let name = convert::vm_name(vm_id)?;
        self.host
            .get(name.as_str())
            .ok()
            .filter(|view| view.record.name == name)
            .ok_or_else(|| HostError::NotFound { name: vm_id.to_owned() })
    }

    async fn create(
        &self,
        request: pb::CreateVmRequest,
        caller: &MetadataMap,
    ) -> Result<Arc<View>, HostError> {
        let options = &self.options;
        let snapshot = request.metadata.get(vm::CLONE_FROM).filter(|name| !name.is_empty()).cloned();
        // A snapshot has an image already.
        let image = snapshot.as_ref().unwrap_or(&options.default_image);
        let spec = convert::create_spec(request, caller, image, &options.default_kernel)?;
        if let Some(snapshot) = snapshot {
            return self.restore(&snapshot, spec).await;
        }
        let record = self.host.create(spec, Arc::new(NoProgress)).await?;
        self.metrics.created();
        let id = record.id.to_string();
        let (stays_off, fence) =
            (caller.get(POWER).is_some_and(|p| p == "Stopped"), convert::fence_of(caller));
        let powered = match stays_off {
            true => self.host.stop(&id, Duration::ZERO, fence).await,
            false => self.host.start(&id, fence).await,
        };
        if let Err(error) = powered {
            // A creation that fails undoes everything; one that others already run stays, and so does one that they speak
            // for by now.
            if record.boots == 0
                && !matches!(error, HostError::Fenced { .. })
                && let Err(undo) = self.host.delete(&id, true, None).await
            {
                tracing::warn!(vm = id, error = %undo, "failed creation not undone");
            }
            return Err(error);
        }
        self.host.get(&id)
    }

    /// A VM that is there already is what an earlier try made.
    async fn restore(&self, snapshot: &str, spec: CreateSpec) -> Result<Arc<View>, HostError> {
        if let Ok(view) = self.exact(spec.name.as_str())
            && spec.idempotent
            && view.record.owner.uid == spec.owner.uid
        {
            return Ok(view);
        }
        let wanted = RestoreSpec {
            name: Some(spec.name),
            owner: spec.owner,
            shape: Some((spec.vcpus, spec.memory)),
            metadata: spec.metadata,
        };
        let record = self.host.restore(snapshot, wanted).await?;
        self.metrics.created();
        self.host.get(record.id.as_str())
    }

    async fn stop(
        &self,
        request: &pb::StopVmRequest,
        caller: &MetadataMap,
    ) -> Result<pb::VmState, HostError> {
        let view = self.exact(&request.vm_id)?;
        let grace = if request.force { Duration::ZERO } else { DEFAULT_GRACE };
        let (id, fence) = (view.record.id.as_str(), convert::fence_of(caller));
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
        self.counted("/firecracker.v1.FirecrackerAgent/CreateVM", call, |r| r.error_message.is_empty()).await
    }

    async fn start_vm(&self, request: Request<pb::StartVmRequest>) -> Reply<pb::StartVmResponse> {
        let fence = convert::fence_of(request.metadata());
        let vm_id = request.into_inner().vm_id;
        let call = async {
            let started = match self.exact(&vm_id) {
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
        self.counted("/firecracker.v1.FirecrackerAgent/StartVM", call, |r| r.error_message.is_empty()).await
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
        self.counted("/firecracker.v1.FirecrackerAgent/StopVM", call, |r| r.error_message.is_empty()).await
    }

    async fn delete_vm(&self, request: Request<pb::DeleteVmRequest>) -> Reply<pb::DeleteVmResponse> {
        let fence = convert::fence_of(request.metadata());
        let vm_id = request.into_inner().vm_id;
        let call = async {
            let deleted = match self.exact(&vm_id) {
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
        self.counted("/firecracker.v1.FirecrackerAgent/DeleteVM", call, |r| r.success).await
    }

    async fn get_vm(&self, request: Request<pb::GetVmRequest>) -> Reply<pb::GetVmResponse> {
        let call = async {
            // An unknown id was a status in both generations.
            let view = self.exact(&request.into_inner().vm_id)?;
            Ok(pb::GetVmResponse { vm: Some(self.info(&view)) })
        };
        self.counted("/firecracker.v1.FirecrackerAgent/GetVM", call, |_| true).await
    }

    async fn list_v_ms(&self, request: Request<pb::ListVMsRequest>) -> Reply<pb::ListVMsResponse> {
        let request = request.into_inner();
        let call = async {
            let all = self.host.list(); // sorted by name
            let total = all.len();
            let mut rest = all.into_iter().filter(|v| v.record.name.as_str() > request.page_token.as_str());
            let size = usize::try_from(request.page_size).unwrap_or(0);
            let size = if size == 0 { usize::MAX } else { size.min(PAGE_MAX) };
            let vms: Vec<_> = rest.by_ref().take(size).map(|v| self.info(&v)).collect();
            let next_page_token = match (rest.next(), vms.last()) {
                (Some(_), Some(last)) => last.vm_id.clone(),
                _ => String::new(),
            };
            let total_count = i32::try_from(total).unwrap_or(i32::MAX);
            Ok(pb::ListVMsResponse { vms, next_page_token, total_count })
        };
        self.counted("/firecracker.v1.FirecrackerAgent/ListVMs", call, |_| true).await
    }

    type WatchVMEventsStream = BoxStream<'static, Result<pb::VmEvent, Status>>;

    /// Events from now on. A reader that is too slow gets DATA_LOSS and lists again.
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
                            Ok(e) if wanted.is_empty() || e.record.name.as_str() == wanted => {
                                let Some(kind) = convert::event_type(e.kind) else { continue };
                                let state = match e.kind {
                                    EventKind::Deleted => pb::VmState::Deleting,
                                    _ => convert::state(&e.record, style),
                                };
                                let event = pb::VmEvent {
                                    vm_id: e.record.name.to_string(),
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
        self.counted("/firecracker.v1.FirecrackerAgent/WatchVMEvents", call, |_| true).await
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
        self.counted("/firecracker.v1.FirecrackerAgent/GetHostInfo", call, |_| true).await
    }

    async fn health_check(&self, _: Request<pb::HealthCheckRequest>) -> Reply<pb::HealthCheckResponse> {
        let uptime_seconds = i64::try_from(self.started.elapsed().as_secs()).unwrap_or(i64::MAX);
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let call = async { Ok(pb::HealthCheckResponse { healthy: true, version, uptime_seconds }) };
        self.counted("/firecracker.v1.FirecrackerAgent/HealthCheck", call, |_| true).await
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

/// Percent of CPU between two readings.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a percentage for people")]
fn usage(before: (u64, u64), after: (u64, u64)) -> f32 {
    let (busy, total) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
    if total == 0 { 0.0 } else { (busy as f64 * 100.0 / total as f64) as f32 }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}
