//! Real control plane: etcd and kube-apiserver as child processes on loopback.
//!
//! A control plane takes about three seconds to start, so the tests of one binary share one. [`run`] gives each test body the
//! same [`Cluster`], in the one network namespace of that control plane, on a thread and a runtime of the test's own. Each test
//! works in its own [`Cluster::namespace`]. Cluster-wide objects (custom resource definitions, webhooks, nodes) are shared:
//! apply them idempotently, or give them unique names.
//!
//! A test that changes the control plane itself starts its own with [`Cluster::start`] inside `netns::run`.
//!
//! The processes die with the thread that started them (`PR_SET_PDEATHSIG`), however the test binary ends. The directory with
//! data and logs is removed at exit. After a failed test it is kept, and its path is printed.

#![expect(unsafe_code, reason = "PR_SET_PDEATHSIG before exec, and atexit")]

use std::{
    fs::{self, File},
    net::{Ipv4Addr, TcpListener},
    os::unix::process::CommandExt as _,
    panic,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client, api::PostParams, config::Kubeconfig};

use crate::{TestResult, front_proxy, netns::Netns, tools};

/// Deadline of one test body.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Time limit for etcd and the API server to answer `/readyz`.
const START: Duration = Duration::from_secs(60);
/// Token of the administrator. It is used on loopback in the tests' own network namespace only.
const TOKEN: &str = "coracle-test-admin";
/// Key that signs ServiceAccount tokens of test clusters; protects no data.
const SERVICE_ACCOUNT_KEY: &str = "-----BEGIN EC PRIVATE KEY-----
MHcCAQEEID5fEiE20ktF7na7JP3YbVUYHiTjk75nWs3SQZTjkv8boAoGCCqGSM49
AwEHoUQDQgAEx7yLC/BpWL9lWyTKyUQfOQtBQo6nEw0CAx3nmipqFjOBlgxhpA7R
T+7wsatv7/qRmY5OAiCKlhOUHHCxG/qyJA==
-----END EC PRIVATE KEY-----
";

/// Runs `body` with the control plane shared by the test binary. Without root or the programs, skips the test and prints the
/// reason.
pub fn run<F, Fut>(body: F)
where
    F: FnOnce(&'static Cluster) -> Fut + Send,
    Fut: Future<Output: TestResult>,
{
    run_within(DEADLINE, body);
}

/// Like [`run`], with a deadline other than [`DEADLINE`].
pub fn run_within<F, Fut>(deadline: Duration, body: F)
where
    F: FnOnce(&'static Cluster) -> Fut + Send,
    Fut: Future<Output: TestResult>,
{
    let Some(shared) = shared_control_plane() else { return };
    let result = panic::catch_unwind(panic::AssertUnwindSafe(|| {
        shared.netns.enter(deadline, || body(&shared.cluster))
    }));
    if let Err(cause) = result {
        shared.cluster.keep_logs();
        panic::resume_unwind(cause);
    }
}

struct Shared {
    netns: Netns,
    cluster: Cluster,
}

static SHARED: OnceLock<Option<Shared>> = OnceLock::new();

/// Control plane of this process, started on first use.
fn shared_control_plane() -> Option<&'static Shared> {
    let start = || {
        tools::require(["etcd", "kube-apiserver"])?;
        let netns = Netns::new_or_skip()?;
        let cluster = netns
            .sync(|| Cluster::start_blocking(&[NO_ACCOUNTS]))
            .expect("etcd and kube-apiserver start on a free loopback");
        // SAFETY: `clean_up` takes no argument, does not unwind and reads only statics.
        unsafe { libc::atexit(clean_up) };
        Some(Shared { netns, cluster })
    };
    SHARED.get_or_init(start).as_ref()
}

/// Stops the shared cluster at exit: statics are never dropped.
extern "C" fn clean_up() {
    if let Some(Some(shared)) = SHARED.get() {
        shared.cluster.stop();
    }
}

/// Running etcd and kube-apiserver, stopped on drop.
#[derive(Debug)]
pub struct Cluster {
    dir: PathBuf,
    server: String,
    kubeconfig: PathBuf,
    children: Mutex<Vec<Child>>,
    keep: AtomicBool,
    /// Keeps the thread that owns the children alive. Dropped with the cluster.
    _owner: mpsc::Sender<()>,
}

const ROUTED: &str = "--enable-aggregator-routing=true";
/// Turns off ServiceAccount admission: without a controller manager namespaces have no accounts, and it would refuse every Pod.
const NO_ACCOUNTS: &str = "--disable-admission-plugins=ServiceAccount";

impl Cluster {
    /// Starts a control plane in the calling thread's network namespace and waits until `/readyz` answers.
    ///
    /// # Errors
    /// When a program is missing, ends early or is not ready in time. The message names the logs.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(&[NO_ACCOUNTS]).await
    }

    /// Like [`Cluster::start`], with an API server that sends requests for Services to their endpoints, because no kube-proxy
    /// does so here. Services of the type ExternalName do not work then.
    ///
    /// # Errors
    /// Like [`Cluster::start`].
    pub async fn start_routed() -> anyhow::Result<Self> {
        Self::start_with(&[ROUTED, NO_ACCOUNTS]).await
    }

    /// Like [`Cluster::start_routed`], for Pods that a kubelet runs. The Pods get tokens of their ServiceAccounts, which a
    /// controller manager has to create.
    ///
    /// # Errors
    /// Like [`Cluster::start`].
    pub async fn start_for_pods() -> anyhow::Result<Self> {
        Self::start_with(&[ROUTED]).await
    }

    async fn start_with(flags: &'static [&'static str]) -> anyhow::Result<Self> {
        tokio::task::block_in_place(|| Self::start_blocking(flags))
    }

    /// Starts the children on a thread of their own, because they die with the *thread* that started them, and the workers of a
    /// runtime come and go.
    fn start_blocking(flags: &'static [&'static str]) -> anyhow::Result<Self> {
        let (owner, owned) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let _ = tell.send(Self::start_on_this_thread(owner, flags));
            let _ = owned.recv();
        });
        told.recv()?
    }

    fn start_on_this_thread(owner: mpsc::Sender<()>, flags: &[&str]) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("coracle-cluster-").tempdir()?.keep();
        let [etcd, api] = ["etcd", "kube-apiserver"].map(tools::tool);
        let (etcd, api) = (etcd.context("no etcd")?, api.context("no kube-apiserver")?);
        let [client, peer, secure] = free_ports()?;
        let cluster = Self {
            server: format!("https://127.0.0.1:{secure}"),
            kubeconfig: dir.join("kubeconfig"),
            children: Mutex::default(),
            keep: AtomicBool::new(false),
            dir,
            _owner: owner,
        };
        cluster.write_files()?;
        cluster.spawn("etcd", &etcd, &etcd_args(&cluster.dir, client, peer))?;
        let more = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let args = [api_args(&cluster.dir, client, secure), front_proxy::flags(&cluster.dir)?, more].concat();
        cluster.spawn("kube-apiserver", &api, &args)?;
        cluster.wait_ready().inspect_err(|_| cluster.keep_logs())?;
        Ok(cluster)
    }

    fn write_files(&self) -> anyhow::Result<()> {
        fs::write(self.dir.join("sa.key"), SERVICE_ACCOUNT_KEY)?;
        fs::write(self.dir.join("tokens.csv"), format!("{TOKEN},admin,admin,system:masters\n"))?;
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.server, "insecure-skip-tls-verify": true}}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
        });
        Ok(fs::write(&self.kubeconfig, serde_json::to_vec_pretty(&config)?)?)
    }

    fn spawn(&self, name: &str, program: &Path, args: &[String]) -> anyhow::Result<()> {
        let log = File::create(self.dir.join(format!("{name}.log")))?;
        let mut command = Command::new(program);
        command.args(args).env_clear().stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // SAFETY: one async-signal-safe system call between fork and exec.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        self.children().push(child);
        Ok(())
    }

    fn children(&self) -> MutexGuard<'_, Vec<Child>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls `/readyz`. Creates a small runtime, which is possible because it is called on a plain thread.
    fn wait_ready(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ready = async {
            let client = self.client();
            let end = Instant::now() + START;
            loop {
                let request = http::Request::get("/readyz").body(Vec::new())?;
                if client.request_text(request).await.is_ok_and(|text| text == "ok") {
                    return Ok(());
                }
                for child in self.children().iter_mut() {
                    if let Some(status) = child.try_wait()? {
                        bail!("the control plane ended early ({status})");
                    }
                }
                if Instant::now() > end {
                    bail!("/readyz did not answer within {START:?}");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        runtime.block_on(ready).with_context(|| format!("logs are in {}", self.dir.display()))
    }

    /// Kubeconfig with the rights of an administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// URL of the API server: `https://127.0.0.1:PORT`.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Directory with data and logs.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Creates a client on the calling runtime. Tests cannot share clients, because connections belong to a runtime.
    ///
    /// # Panics
    /// When the generated kubeconfig is invalid.
    #[must_use]
    pub fn client(&self) -> Client {
        let mut config = kube::Config::new(self.server.parse().expect("a URL of our own making"));
        config.accept_invalid_certs = true;
        config.auth_info.token = Some(TOKEN.to_owned().into());
        Client::try_from(config).expect("a client needs nothing but a TLS provider")
    }

    /// Kubeconfig as kube parses it, for tests that build their own client.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn config(&self) -> anyhow::Result<Kubeconfig> {
        Ok(Kubeconfig::read_from(&self.kubeconfig)?)
    }

    /// Creates a Kubernetes namespace for one test, and returns its unique name.
    ///
    /// # Errors
    /// When the API server refuses it.
    pub async fn namespace(&self) -> anyhow::Result<String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some(name.clone());
        Api::all(self.client()).create(&PostParams::default(), &namespace).await?;
        Ok(name)
    }

    /// Keeps the directory with logs and data, and prints its path.
    #[expect(clippy::print_stdout, reason = "part of the output of a failed test")]
    pub fn keep_logs(&self) {
        if !self.keep.swap(true, Ordering::Relaxed) {
            println!("logs of etcd and kube-apiserver are kept in {}", self.dir.display());
        }
    }

    /// Kills the processes and removes the directory, unless it is to be kept.
    pub fn stop(&self) {
        for mut child in self.children().drain(..).rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if !self.keep.load(Ordering::Relaxed) {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if thread::panicking() {
            self.keep_logs();
        }
        self.stop();
    }
}

fn etcd_args(dir: &Path, client: u16, peer: u16) -> Vec<String> {
    vec![
        format!("--data-dir={}", dir.join("etcd").display()),
        "--unsafe-no-fsync".into(),
        format!("--listen-client-urls=http://127.0.0.1:{client}"),
        format!("--advertise-client-urls=http://127.0.0.1:{client}"),
        format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
    ]
}

/// Flags of kube-apiserver.
fn api_args(dir: &Path, client: u16, secure: u16) -> Vec<String> {
    let file = |name: &str| dir.join(name).display().to_string();
    vec![
        format!("--etcd-servers=http://127.0.0.1:{client}"),
        "--bind-address=127.0.0.1".into(),
        // The network namespace has no default route to take an address from.
        "--advertise-address=127.0.0.1".into(),
        "--endpoint-reconciler-type=none".into(),
        format!("--secure-port={secure}"),
        format!("--cert-dir={}", file("certs")),
        format!("--token-auth-file={}", file("tokens.csv")),
        "--authorization-mode=Node,RBAC".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={}", file("sa.key")),
        format!("--service-account-signing-key-file={}", file("sa.key")),
        "--service-cluster-ip-range=10.96.0.0/16".into(),
        "--allow-privileged=true".into(),
        // DNS has no names of nodes here.
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--profiling=false".into(),
    ]
}

/// Distinct ports that were free a moment ago.
fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    let held: Vec<_> =
        (0..N).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&held) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}
