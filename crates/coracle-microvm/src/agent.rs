//! The wire to a node's agent: one connection a reconcile, a deadline on each call, both generations' errors in one type.

use std::{
    fmt,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use coracle_api::{
    PowerState,
    keys::{POWER, fence, vm as meta},
};
use coracle_proto::firecracker as wire;
use coracle_reconcile::{ControllerMetrics, Outcome};
use tokio::time::Instant;
use tonic::{
    Code, Request, Response, Status,
    metadata::{AsciiMetadataValue, MetadataMap},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};
use wire::firecracker_agent_client::FirecrackerAgentClient;

pub use wire::VmState as State;

/// Certificates are read again after this time, so that rotated ones are taken up.
const RELOAD: Duration = Duration::from_secs(10);
/// What was done instead of a call.
const WAIT: &str = "wait for a call";
/// Between two signs of life on a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Most of an agent's error text that goes into conditions and events.
const MESSAGE_CHARS_MAX: usize = 512;

/// How agents are spoken to.
#[derive(Clone, Debug, Default)]
pub struct AgentTls {
    /// PEM of the authority that signed the nodes' certificates.
    pub ca: PathBuf,
    /// PEM certificate and key that we show. `None`: no client certificate.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Deadlines of calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deadlines {
    /// Until the connection stands.
    pub connect: Duration,
    /// CreateVM and StartVM: our agents answer when the guest has acknowledged its configuration.
    pub boot: Duration,
    /// Every other call.
    pub call: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { connect: seconds(5), boot: seconds(150), call: seconds(10) }
    }
}

/// Where an agent listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentAddress {
    /// `host:port`.
    pub address: String,
    /// The name in its certificate, when it is not the host.
    pub server_name: Option<String>,
}

/// What an agent says of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its state; a number that we do not know is `Unspecified`.
    pub state: State,
    /// The guest's address, empty until it is known.
    pub ip: String,
    /// UID of the object that it was made for. Old agents and old operators leave it out.
    pub uid: Option<String>,
    /// Digest of the running image, when the agent says it.
    pub image_digest: String,
    /// Unix seconds; 0 when unknown.
    pub created_at: i64,
    /// What it does, from agents that have more words for it than the state; `None` from others.
    pub power: Option<PowerState>,
}

impl From<wire::VmInfo> for Machine {
    fn from(mut info: wire::VmInfo) -> Self {
        Self {
            state: info.state(),
            ip: info.ip_address,
            uid: info.metadata.remove(meta::UID).filter(|uid| !uid.is_empty()),
            image_digest: info.metadata.remove(meta::IMAGE_DIGEST).unwrap_or_default(),
            created_at: info.created_at,
            power: info.metadata.remove(meta::POWER_STATE).as_deref().and_then(PowerState::parse),
        }
    }
}

/// On whose behalf a mutating call is made; the agent refuses an older generation than it has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The object's UID.
    pub uid: String,
    /// Its generation.
    pub generation: i64,
}

/// A call that an agent did not do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{operation} at agent {address}: {message}")]
pub struct AgentError {
    /// The RPC.
    pub operation: &'static str,
    /// The agent.
    pub address: String,
    /// How to take it.
    pub code: Code,
    /// The agent's words, or the transport's.
    pub message: String,
    /// The stable code of the failure (`COR-IMG-004`), which agents of ours send; empty from others.
    pub failure: String,
}

impl AgentError {
    /// True when the same call may succeed later with nothing changed (`microvm.md` §2.1).
    #[must_use]
    pub fn is_transient(&self) -> bool {
        use Code::{Aborted, DeadlineExceeded, Internal, ResourceExhausted, Unavailable};
        matches!(self.code, Unavailable | Internal | DeadlineExceeded | Aborted | ResourceExhausted)
    }

    /// Too many of our own calls to that agent are under way: nothing is known of the agent.
    #[must_use]
    pub fn busy(address: &str) -> Self {
        let message = "too many calls to it are under way".into();
        Self {
            operation: WAIT,
            address: address.to_owned(),
            code: Code::ResourceExhausted,
            message,
            failure: String::new(),
        }
    }

    /// True for [`Self::busy`].
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.operation == WAIT
    }

    /// True when nobody answered.
    #[must_use]
    pub fn is_silence(&self) -> bool {
        self.failure.is_empty() && matches!(self.code, Code::Unavailable | Code::DeadlineExceeded)
    }

    /// True when the agent says what is wrong, in a way that a person can do something about.
    #[must_use]
    pub fn is_explained(&self) -> bool {
        let telling = ["COR-IMG-", "COR-GST-", "COR-DRV-"];
        let full = self.code == Code::ResourceExhausted && !self.failure.is_empty();
        full || telling.iter().any(|prefix| self.failure.starts_with(prefix))
    }

    /// True when a stopped VM cannot be started again by this agent: it must be deleted and made anew.
    #[must_use]
    pub fn must_recreate(&self) -> bool {
        self.code == Code::FailedPrecondition && self.message.contains("must be recreated")
    }
}

/// Makes connections.
pub struct Dialer {
    tls: Option<AgentTls>,
    deadlines: Deadlines,
    metrics: ControllerMetrics,
    loaded: Mutex<Option<(Instant, ClientTlsConfig)>>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer")
            .field("tls", &self.tls)
            .field("deadlines", &self.deadlines)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    /// Speaks TLS, or plaintext when `tls` is `None`.
    #[must_use]
    pub fn new(tls: Option<AgentTls>, deadlines: Deadlines, metrics: ControllerMetrics) -> Self {
        Self { tls, deadlines, metrics, loaded: Mutex::default() }
    }

    /// Connects. The connection closes when the returned [`Agent`] is dropped.
    ///
    /// # Errors
    /// UNAVAILABLE when nobody listens, FAILED_PRECONDITION when our own certificates cannot be used.
    pub async fn dial(&self, to: &AgentAddress) -> Result<Agent, AgentError> {
        let error = |code, message: String| AgentError {
            operation: "connect",
            address: to.address.clone(),
            code,
            message,
            failure: String::new(),
        };
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{}", to.address))
            .map_err(|_| error(Code::InvalidArgument, "the address is not host:port".into()))?
            .connect_timeout(self.deadlines.connect)
            // A host that lost power closes nothing: an event stream would wait for ever.
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(self.deadlines.call)
            .keep_alive_while_idle(true);
        let endpoint = match self.tls_config().await.map_err(|e| error(Code::FailedPrecondition, e))? {
            None => endpoint,
            Some(tls) => {
                let host = to.address.rsplit_once(':').map_or(to.address.as_str(), |(host, _)| host);
                let name = to.server_name.as_deref().unwrap_or(host).trim_matches(['[', ']']).to_owned();
                endpoint
                    .tls_config(tls.domain_name(name))
                    .map_err(|e| error(Code::FailedPrecondition, chain(&e)))?
            }
        };
        let connected = tokio::time::timeout(self.deadlines.connect, endpoint.connect()).await;
        let channel = match connected {
            Ok(Ok(channel)) => channel,
            Ok(Err(e)) => return Err(error(Code::Unavailable, chain(&e))),
            Err(_) => {
                return Err(error(
                    Code::Unavailable,
                    format!("no connection within {:?}", self.deadlines.connect),
                ));
            }
        };
        let (address, deadlines, metrics) = (to.address.clone(), self.deadlines, self.metrics.clone());
        Ok(Agent { client: FirecrackerAgentClient::new(channel), address, deadlines, metrics })
    }

    async fn tls_config(&self) -> Result<Option<ClientTlsConfig>, String> {
        let Some(tls) = &self.tls else { return Ok(None) };
        let fresh =
            |(at, config): &(Instant, ClientTlsConfig)| (at.elapsed() < RELOAD).then(|| config.clone());
        let cached = self.loaded.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(fresh);
        if cached.is_some() {
            return Ok(cached);
        }
        let read = async |path: &PathBuf| {
            tokio::fs::read(path).await.map_err(|e| format!("read {}: {e}", path.display()))
        };
        let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&tls.ca).await?));
        if let Some((certificate, key)) = &tls.identity {
            config = config.identity(Identity::from_pem(read(certificate).await?, read(key).await?));
        }
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), config.clone()));
        Ok(Some(config))
    }
}

/// One connection to one agent.
#[derive(Debug)]
pub struct Agent {
    client: FirecrackerAgentClient<Channel>,
    address: String,
    deadlines: Deadlines,
    metrics: ControllerMetrics,
}

impl Agent {
    /// The VM with that id. `None`: the agent knows no such VM.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn get(&mut self, id: &str) -> Result<Option<Machine>, AgentError> {
        let request = Request::new(wire::GetVmRequest { vm_id: id.to_owned() });
        match self.call("GetVM", self.deadlines.call, async |c| c.get_vm(request).await).await {
            Ok(reply) => Ok(reply.vm.map(Machine::from)),
            Err(error) if error.code == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates the VM; our agents boot it too.
    ///
    /// # Errors
    /// [`AgentError`]; ALREADY_EXISTS when there is one with that id.
    pub async fn create(&mut self, request: wire::CreateVmRequest, fence: &Fence) -> Result<(), AgentError> {
        self.make(fenced(request, fence)).await
    }

    /// As [`Agent::create`], but our agents leave it powered off.
    ///
    /// # Errors
    /// As there.
    pub async fn lay(&mut self, request: wire::CreateVmRequest, fence: &Fence) -> Result<(), AgentError> {
        let mut request = fenced(request, fence);
        let off = AsciiMetadataValue::from_static(PowerState::Stopped.as_str());
        request.metadata_mut().insert(POWER, off);
        self.make(request).await
    }

    async fn make(&mut self, request: Request<wire::CreateVmRequest>) -> Result<(), AgentError> {
        let reply = self.call("CreateVM", self.deadlines.boot, async |c| c.create_vm(request).await).await?;
        self.in_band("CreateVM", &reply.error_message, reply.state == State::Error as i32)
    }

    /// Starts the VM. Idempotent.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn start(&mut self, id: &str, fence: &Fence) -> Result<(), AgentError> {
        let request = fenced(wire::StartVmRequest { vm_id: id.to_owned() }, fence);
        let reply = self.call("StartVM", self.deadlines.boot, async |c| c.start_vm(request).await).await?;
        self.in_band("StartVM", &reply.error_message, reply.state == State::Error as i32)
    }

    /// Pauses, hibernates or powers off the VM, which gets its time; or starts it.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn power(&mut self, id: &str, fence: &Fence, to: PowerState) -> Result<(), AgentError> {
        if to == PowerState::Running {
            return self.start(id, fence).await;
        }
        let mut request = fenced(wire::StopVmRequest { vm_id: id.to_owned(), force: false }, fence);
        if to != PowerState::Stopped {
            request.metadata_mut().insert(POWER, AsciiMetadataValue::from_static(to.as_str()));
        }
        let reply = self.call("StopVM", self.deadlines.boot, async |c| c.stop_vm(request).await).await?;
        self.in_band("StopVM", &reply.error_message, reply.state == State::Error as i32)
    }

    /// Stops the VM by force. An unknown one is `Ok`.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn stop(&mut self, id: &str, fence: &Fence) -> Result<(), AgentError> {
        let request = fenced(wire::StopVmRequest { vm_id: id.to_owned(), force: true }, fence);
        let called = self.call("StopVM", self.deadlines.call, async |c| c.stop_vm(request).await).await;
        absent_is_ok(
            called.and_then(|r| self.in_band("StopVM", &r.error_message, r.state == State::Error as i32)),
        )
    }

    /// Deletes the VM. An unknown one is `Ok`.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn delete(&mut self, id: &str, fence: &Fence) -> Result<(), AgentError> {
        let request = fenced(wire::DeleteVmRequest { vm_id: id.to_owned() }, fence);
        let called = self.call("DeleteVM", self.deadlines.call, async |c| c.delete_vm(request).await).await;
        absent_is_ok(called.and_then(|r| self.in_band("DeleteVM", &r.error_message, !r.success)))
    }

    /// Size of the host. Old agents take a second for it.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn host_info(&mut self) -> Result<wire::GetHostInfoResponse, AgentError> {
        let request = Request::new(wire::GetHostInfoRequest {});
        self.call("GetHostInfo", self.deadlines.call, async |c| c.get_host_info(request).await).await
    }

    /// Every VM of the agent, over all pages.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn list(&mut self) -> Result<Vec<(String, Machine)>, AgentError> {
        let mut all = Vec::new();
        let mut page_token = String::new();
        loop {
            let request =
                Request::new(wire::ListVMsRequest { page_size: 500, page_token: page_token.clone() });
            let page =
                self.call("ListVMs", self.deadlines.call, async |c| c.list_v_ms(request).await).await?;
            all.extend(page.vms.into_iter().map(|vm| (vm.vm_id.clone(), Machine::from(vm))));
            // An agent that repeats its token would keep us here.
            if page.next_page_token.is_empty() || page.next_page_token == page_token {
                return Ok(all);
            }
            page_token = page.next_page_token;
        }
    }

    /// Future events of all VMs. The stream has no deadline; dropping it ends it.
    ///
    /// # Errors
    /// [`AgentError`] when the agent does not open it.
    pub async fn watch(&mut self) -> Result<tonic::Streaming<wire::VmEvent>, AgentError> {
        let request = Request::new(wire::WatchVmEventsRequest { vm_id: String::new() });
        self.call("WatchVMEvents", self.deadlines.call, async |c| c.watch_vm_events(request).await).await
    }

    async fn call<T>(
        &mut self,
        operation: &'static str,
        deadline: Duration,
        call: impl AsyncFnOnce(&mut FirecrackerAgentClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, AgentError> {
        let began = Instant::now();
        let error = |code, message| AgentError {
            operation,
            address: self.address.clone(),
            code,
            message,
            failure: String::new(),
        };
        let result = match tokio::time::timeout(deadline, call(&mut self.client)).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => {
                let failure = failure(&status);
                Err(AgentError { failure, ..error(code(&status), explained(&status)) })
            }
            Err(_) => Err(error(Code::DeadlineExceeded, format!("no answer within {deadline:?}"))),
        };
        let outcome = if result.is_ok() { Outcome::Ok } else { Outcome::Error };
        self.metrics.called(operation, outcome, began.elapsed());
        result
    }

    /// The first generation answers OK and says in the message that it failed (`microvm.md` §1.5).
    fn in_band(&self, operation: &'static str, message: &str, failed: bool) -> Result<(), AgentError> {
        if message.is_empty() && !failed {
            return Ok(());
        }
        let code = classify(message);
        let message = shortened(message);
        Err(AgentError { operation, address: self.address.clone(), code, message, failure: String::new() })
    }
}

/// The code of an error that came as text.
fn classify(message: &str) -> Code {
    if message.contains("not found") {
        Code::NotFound
    } else if message.contains("already exists") {
        Code::AlreadyExists
    } else if message.contains("must be recreated") {
        Code::FailedPrecondition
    } else {
        Code::Internal
    }
}

/// The stable code that agents of ours send along. What does not look like one is not shown to anybody.
fn failure(status: &Status) -> String {
    let code = status.metadata().get("coracle-code").and_then(|v| v.to_str().ok()).unwrap_or_default();
    let plain = code.len() <= 16 && code.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if plain { code.to_owned() } else { String::new() }
}

/// The agent's words, with its code and its advice where it gives them.
fn explained(status: &Status) -> String {
    let help = status.metadata().get_bin("coracle-help-bin").and_then(|v| v.to_bytes().ok());
    let help = help.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    match (failure(status).as_str(), help.as_str()) {
        ("", _) => shortened(status.message()),
        (code, "") => shortened(&format!("{} ({code})", status.message())),
        (code, help) => shortened(&format!("{} ({code}; {help})", status.message())),
    }
}

/// A connection that broke shows as UNKNOWN or CANCELLED with a cause; for us nobody answered.
fn code(status: &Status) -> Code {
    let broke = std::error::Error::source(status).is_some();
    match status.code() {
        Code::Unknown | Code::Cancelled if broke => Code::Unavailable,
        code => code,
    }
}

fn absent_is_ok(result: Result<(), AgentError>) -> Result<(), AgentError> {
    match result {
        Err(error) if error.code == Code::NotFound => Ok(()),
        result => result,
    }
}

fn fenced<T>(message: T, fence: &Fence) -> Request<T> {
    let mut request = Request::new(message);
    insert(request.metadata_mut(), fence::UID, &fence.uid);
    insert(request.metadata_mut(), fence::GENERATION, &fence.generation.to_string());
    request
}

fn insert(metadata: &mut MetadataMap, key: &'static str, value: &str) {
    // UIDs and numbers are ASCII; anything else would not be the API server's.
    if let Ok(value) = AsciiMetadataValue::try_from(value) {
        metadata.insert(key, value);
    }
}

/// Agents are not trusted to be brief, nor to send only printable text.
fn shortened(message: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut text: String = message.chars().take(MESSAGE_CHARS_MAX).map(clean).collect();
    if text.trim().is_empty() {
        text = "the agent gave no reason".into();
    }
    text
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    shortened(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_first_generation() {
        for (message, want) in [
            ("VM default-web not found", Code::NotFound),
            ("VM default-web already exists", Code::AlreadyExists),
            ("VM default-web is stopped and must be recreated", Code::FailedPrecondition),
            ("jailer: exit status 1", Code::Internal),
        ] {
            assert_eq!(classify(message), want, "{message}");
        }
    }

    #[test]
    fn errors_that_pass_by_themselves() {
        let error = |code| AgentError {
            operation: "CreateVM",
            address: "a:1".into(),
            code,
            message: "x".into(),
            failure: String::new(),
        };
        for (code, want) in [
            (Code::Unavailable, true),
            (Code::Internal, true),
            (Code::DeadlineExceeded, true),
            (Code::Aborted, true),
            (Code::ResourceExhausted, true),
            (Code::InvalidArgument, false),
            (Code::FailedPrecondition, false),
            (Code::PermissionDenied, false),
            (Code::Unimplemented, false),
        ] {
            assert_eq!(error(code).is_transient(), want, "{code}");
        }
    }

    #[test]
    fn an_agent_of_ours_explains_itself() {
        let mut status = Status::unavailable("image r/x: get manifest from registry r");
        assert_eq!(failure(&status), "");
        assert_eq!(explained(&status), "image r/x: get manifest from registry r");
        status.metadata_mut().insert("coracle-code", "COR-IMG-011".parse().unwrap());
        let help = tonic::metadata::MetadataValue::from_bytes(b"check that r can be reached");
        status.metadata_mut().insert_bin("coracle-help-bin", help);
        assert_eq!(
            explained(&status),
            "image r/x: get manifest from registry r (COR-IMG-011; check that r can be reached)"
        );
        let error = AgentError {
            operation: "CreateVM",
            address: "a:1".into(),
            code: Code::Unavailable,
            message: explained(&status),
            failure: failure(&status),
        };
        assert!(error.is_transient() && error.is_explained() && !error.is_silence());
        status.metadata_mut().insert("coracle-code", "not a code!".parse().unwrap());
        assert_eq!(failure(&status), "");
    }
}
