//! `coracle up`: a whole system on this machine, one process tree, on loopback.
//!
//! ```text
//! coracle up ─┬─ etcd ── kube-apiserver      (unless --kubeconfig names a cluster)
//!             ├─ coracle node ──▶ VMMs       (the VMMs outlive it)
//!             └─ coracle operator
//! ```
//! A child that ends is started again. ^C, SIGTERM and `coracle down` take
//! everything away but the state folder.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use coracle_hypervisor::ProcessId;
use coracle_proto::host as pb;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use miette::{IntoDiagnostic, WrapErr};
use serde_json::json;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::plane::{Ports, Program, programs, wait_ready};
use super::{default_tools, down, make_dir, pki};
use crate::cli::{Global, UpArgs};
use crate::commands::image::import;
use crate::error::Failure;
use crate::tasks::stop_signal;

/// Name of the image that `examples/mikromvm.yaml` runs.
const DEMO: &str = "localhost/coracle/demo:1";

/// From start to Ready of everything.
const READY_LIMIT: Duration = Duration::from_secs(180);

/// How long a child gets after SIGTERM.
const CHILD_GRACE: Duration = Duration::from_secs(20);

/// Starts the system; returns when it is stopped, or with `--detach` when it is Ready.
pub(crate) async fn run(global: &Global, args: UpArgs) -> miette::Result<()> {
    let state = global.state();
    make_dir(&state)?;
    if args.detach {
        return detach(&state, &args).await;
    }
    let _only_one = lock(&state)?;
    let own = ProcessId::of_pid(std::process::id()).into_diagnostic()?;
    let own = serde_json::to_vec(&own).into_diagnostic()?;
    pki::write(&state.join(down::SUPERVISOR_FILE), &own)?;
    let _absent = std::fs::remove_file(state.join("up.ready"));
    down::end_leftovers(&state).await;
    let stop = CancellationToken::new();
    let mut children = JoinSet::new();
    let outcome = tokio::select! {
        outcome = bring_up(&state, &args, &stop, &mut children) => outcome,
        () = stop_signal() => Ok(()),
    };
    if outcome.is_ok() && state.join("up.ready").exists() {
        stop_signal().await;
        eprintln!("stopping");
    }
    let _absent = std::fs::remove_file(state.join("up.ready"));
    down::stop_vms(global).await;
    stop.cancel();
    while children.join_next().await.is_some() {}
    down::remove_traces(&state).await?;
    outcome
}

/// One supervisor per state folder.
fn lock(state: &Path) -> miette::Result<File> {
    let path = state.join("up.lock");
    let file = File::options().create(true).write(true).truncate(false).open(&path).into_diagnostic()?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failure::new("COR-UP-003", format!("a system is up already in {}", state.display()))
            .help("stop it with `coracle down`, or use another --state")
            .exit(crate::error::exit::CONFLICT)
    })?;
    Ok(file)
}

/// Starts ourselves in the background and waits until it says Ready, or ends.
async fn detach(state: &Path, args: &UpArgs) -> miette::Result<()> {
    drop(lock(state)?);
    let _absent = std::fs::remove_file(state.join("up.ready"));
    let log_path = state.join("up.log");
    let log = File::create(&log_path).into_diagnostic()?;
    let own = std::env::current_exe().into_diagnostic()?;
    let mut command = Command::new(own);
    command.arg("up").arg("--supervise").arg("--state").arg(state);
    for (flag, value) in [("--kubeconfig", &args.kubeconfig), ("--tools", &args.tools)] {
        if let Some(value) = value {
            command.arg(flag).arg(value);
        }
    }
    if args.no_demo {
        command.arg("--no-demo");
    }
    command.stdin(Stdio::null()).stdout(log.try_clone().into_diagnostic()?).stderr(log).process_group(0);
    let mut child = command.spawn().into_diagnostic().wrap_err("start the background process")?;
    let mut shown = 0;
    let ended = loop {
        let text = std::fs::read_to_string(&log_path).unwrap_or_default();
        for line in text.lines().skip(shown) {
            eprintln!("{line}");
            shown += 1;
        }
        if state.join("up.ready").exists() {
            return Ok(());
        }
        tokio::select! {
            ended = child.wait() => break ended.into_diagnostic()?,
            () = stop_signal() => {
                terminate(&mut child, CHILD_GRACE).await;
                return Err(Failure::new("COR-CLI-008", "interrupted").exit(130).into());
            }
            () = sleep(Duration::from_millis(100)) => {}
        }
    };
    let help = format!("the whole story: {}, and logs/ beside it", log_path.display());
    Err(Failure::new("COR-UP-004", format!("the system did not come up ({ended})")).help(help).into())
}

async fn bring_up(
    state: &Path,
    args: &UpArgs,
    stop: &CancellationToken,
    children: &mut JoinSet<()>,
) -> miette::Result<()> {
    let began = Instant::now();
    let say = |what: &str| eprintln!("{:>6.1} s  {what}", began.elapsed().as_secs_f64());
    let ports = Ports::load_or_choose(state)?;
    let kubeconfig = args.kubeconfig.clone().unwrap_or_else(|| state.join("kubeconfig"));
    make_dir(&state.join("logs"))?;
    if args.kubeconfig.is_none() {
        for program in programs(state, args.tools.as_deref(), ports)? {
            children.spawn(supervise(state.join("logs"), program, stop.clone()));
        }
    }
    let client = wait_ready(&kubeconfig).await?;
    say("API server ready");
    install(&client).await?;
    let pki = pki::make(&state.join("pki"))?;
    let boot = boot_files(state, args.tools.as_deref())?;
    children.spawn(supervise(
        state.join("logs"),
        node(state, &kubeconfig, &boot, ports, &pki)?,
        stop.clone(),
    ));
    let mut host = wait_host(state).await?;
    let info = host.info(pb::InfoRequest {}).await.map_err(Failure::from)?.into_inner();
    let driver = info.drivers.first().cloned().unwrap_or_default();
    say(&format!(
        "node ready: {} {} with {}, guests in {}",
        driver.name,
        driver.version,
        driver.accelerator,
        or_none(&info.subnet)
    ));
    if !args.no_demo
        && let Some(demo) = demo_image(args.tools.as_deref())
    {
        let source = format!("oci:{}:1", demo.display());
        import(&mut host, &source, Some(DEMO), crate::cli::ProgressMode::None).await?;
        say(&format!("image {DEMO} imported"));
    }
    children.spawn(supervise(state.join("logs"), operator(&kubeconfig, &pki)?, stop.clone()));
    wait_leases(&client).await?;
    say("operator ready");
    pki::write(&state.join("up.ready"), format!("{}\n", std::process::id()).as_bytes())?;
    eprintln!();
    eprintln!("  export KUBECONFIG={}", kubeconfig.display());
    eprintln!("  export PATH={}:$PATH", state.join("bin").display());
    eprintln!("  kubectl apply -f examples/mikromvm.yaml && kubectl get mvm -w");
    eprintln!();
    Ok(())
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "a network of their own" } else { text }
}

/// Namespace and custom resources; applying them again changes nothing.
async fn install(client: &Client) -> miette::Result<()> {
    let params = PatchParams::apply("coracle-up").force();
    let name = coracle_api::keys::SYSTEM_NAMESPACE;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces
        .patch(name, &params, &Patch::Apply(&namespace))
        .await
        .into_diagnostic()
        .wrap_err("make the namespace")?;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for crd in coracle_api::crds() {
        let name = crd.metadata.name.clone().unwrap_or_default();
        definitions
            .patch(&name, &params, &Patch::Apply(&crd))
            .await
            .into_diagnostic()
            .wrap_err_with(|| format!("apply {name}"))?;
        let established = kube::runtime::wait::await_condition(
            definitions.clone(),
            &name,
            kube::runtime::wait::conditions::is_crd_established(),
        );
        timeout(Duration::from_secs(20), established)
            .await
            .into_diagnostic()
            .wrap_err_with(|| format!("{name} is not established"))?
            .into_diagnostic()?;
    }
    Ok(())
}

/// The kernel and initramfs of this system are its own copy: a new set-up does
/// not change what running guests were started with.
fn boot_files(state: &Path, tools: Option<&Path>) -> miette::Result<PathBuf> {
    let candidates = tools.map(Path::to_owned).into_iter().chain(default_tools());
    let Some(current) =
        candidates.map(|dir| dir.join("guest/current")).find(|dir| dir.join("vmlinuz").is_file())
    else {
        let help =
            "in a checkout: cargo xtask setup\nelsewhere: --tools DIR with guest/current/{vmlinuz,initrd}";
        return Err(Failure::new("COR-UP-005", "no guest kernel is to be found").help(help).into());
    };
    let current = current.canonicalize().into_diagnostic()?;
    let hash = current.file_name().map(PathBuf::from).unwrap_or_default();
    let own = state.join("boot").join(hash);
    if !own.join("initrd").is_file() {
        make_dir(&own)?;
        for file in ["vmlinuz", "initrd"] {
            let part = own.join(format!("{file}.part"));
            std::fs::copy(current.join(file), &part).into_diagnostic().wrap_err("copy the guest kernel")?;
            std::fs::rename(&part, own.join(file)).into_diagnostic()?;
        }
    }
    Ok(own)
}

fn demo_image(tools: Option<&Path>) -> Option<PathBuf> {
    let candidates = tools.map(Path::to_owned).into_iter().chain(default_tools());
    candidates.map(|dir| dir.join("demo/current")).find(|dir| dir.join("index.json").is_file())
}

fn node(
    state: &Path,
    kubeconfig: &Path,
    boot: &Path,
    ports: Ports,
    pki: &pki::Pki,
) -> miette::Result<Program> {
    let show = |path: &Path| path.display().to_string();
    let args = [
        ("--state", show(state)),
        ("--boot", show(boot)),
        ("--agent-listen", format!("127.0.0.1:{}", ports.agent)),
        ("--tls-cert", show(&pki.node.0)),
        ("--tls-key", show(&pki.node.1)),
        ("--tls-client-ca", show(&pki.ca)),
        ("--kubeconfig", show(kubeconfig)),
        ("--kernel-dir", show(&state.join("boot"))),
    ];
    own_program("node", &args)
}

fn operator(kubeconfig: &Path, pki: &pki::Pki) -> miette::Result<Program> {
    let show = |path: &Path| path.display().to_string();
    let args = [
        ("--kubeconfig", show(kubeconfig)),
        ("--agent-ca", show(&pki.ca)),
        ("--agent-cert", show(&pki.operator.0)),
        ("--agent-key", show(&pki.operator.1)),
    ];
    own_program("operator", &args)
}

fn own_program(name: &'static str, flags: &[(&str, String)]) -> miette::Result<Program> {
    let path = std::env::current_exe().into_diagnostic()?;
    let args = flags.iter().flat_map(|(flag, value)| [(*flag).to_owned(), value.clone()]);
    Ok(Program { name, path, args: std::iter::once(name.to_owned()).chain(args).collect() })
}

/// Runs a child until `stop`; starts it again a second after it ended.
async fn supervise(logs: PathBuf, program: Program, stop: CancellationToken) {
    while !stop.is_cancelled() {
        match spawn(&logs, &program) {
            Ok(mut child) => {
                tokio::select! {
                    ended = child.wait() => {
                        let how = ended.map_or_else(|e| e.to_string(), |status| status.to_string());
                        eprintln!("{} ended ({how}), starting it again; see logs/{}.log", program.name, program.name);
                    }
                    () = stop.cancelled() => terminate(&mut child, CHILD_GRACE).await,
                }
            }
            Err(error) => eprintln!("{} cannot be started: {error}", program.name),
        }
        stop.run_until_cancelled(sleep(Duration::from_secs(1))).await;
    }
}

fn spawn(logs: &Path, program: &Program) -> std::io::Result<Child> {
    let log = File::options().create(true).append(true).open(logs.join(format!("{}.log", program.name)))?;
    Command::new(&program.path)
        .args(&program.args)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
}

async fn terminate(child: &mut Child, grace: Duration) {
    if let Some(pid) =
        child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw)
    {
        let _already_gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    if timeout(grace, child.wait()).await.is_err() {
        let _already_gone = child.kill().await;
    }
}

async fn wait_host(state: &Path) -> miette::Result<pb::host_client::HostClient<tonic::transport::Channel>> {
    let socket = coracle_host::run_dir_of(state).join("host.sock");
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        match crate::client::open(&socket).await {
            Ok(client) => return Ok(client),
            Err(why) if Instant::now() > deadline => {
                let help = "its log is logs/node.log in the state folder";
                return Err(Failure::new("COR-UP-006", format!("the node did not become ready: {why}"))
                    .help(help)
                    .into());
            }
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Ready means: the node is announced and an operator leads.
async fn wait_leases(client: &Client) -> miette::Result<()> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), coracle_api::keys::SYSTEM_NAMESPACE);
    let held = |lease: &Lease| {
        lease.spec.as_ref().and_then(|s| s.holder_identity.as_ref()).is_some_and(|h| !h.is_empty())
    };
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        let found = leases.list(&ListParams::default()).await.into_diagnostic()?.items;
        let node = found.iter().any(|l| {
            l.metadata.labels.as_ref().is_some_and(|l| l.contains_key(coracle_api::keys::node::AGENT_LABEL))
        });
        let operator =
            found.iter().any(|l| l.metadata.name.as_deref() == Some("coracle-mikromvm") && held(l));
        if node && operator {
            return Ok(());
        }
        if Instant::now() > deadline {
            let help = "their logs are logs/node.log and logs/operator.log in the state folder";
            return Err(Failure::new("COR-UP-007", "node and operator did not become ready")
                .help(help)
                .into());
        }
        sleep(Duration::from_millis(100)).await;
    }
}
