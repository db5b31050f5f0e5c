//! `coracle up`: a whole system on this machine, as one process tree on loopback.
//!
//! ```text
//! coracle up ─┬─ etcd ── kube-apiserver      (unless --kubeconfig names a cluster)
//!             ├─ kube-scheduler, kube-controller-manager, kubelet      (--with)
//!             ├─ coracle node ──▶ VMMs       (the VMMs outlive it)
//!             └─ coracle operator ── admission webhook
//! ```
//! A child that ends is restarted, unless it keeps ending shortly after its start. ^C, SIGTERM and `coracle down` remove
//! everything except the state directory.

use std::fs::File;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use coracle_hypervisor::{ELF_KERNEL, ProcessId};
use coracle_net::Subnet;
use coracle_proto::host as pb;
use miette::{IntoDiagnostic, WrapErr};
use tokio::process::Command;
use tokio::time::{Instant, sleep};

use super::cluster::{self, READY_LIMIT};
use super::plane::{self, Ports, Program, With};
use super::saved_states::SavedStates;
use super::supervise::{CHILD_GRACE, Supervisor, terminate};
use super::{default_tools, down, kubelet, make_dir, pki};
use coracle_cli::cli::{Global, UpArgs};
use coracle_cli::commands::transfer::import;
use coracle_cli::error::{Failure, of_host};
use coracle_cli::tasks::stop_signal;

/// Name of the image that `examples/mikromvm.yaml` runs.
const DEMO: &str = "localhost/coracle/demo:1";
/// Time limit for the API server of a foreign cluster to reach the extension API.
const FOREIGN_API_LIMIT: Duration = Duration::from_secs(20);
/// Files of guests that a node needs (`cargo xtask guest-image`).
const BOOT_FILES: [&str; 4] = ["vmlinuz", ELF_KERNEL, "initrd", "agent"];

/// Starts the system. Returns when it is stopped, or with `--detach` when it is Ready.
pub(crate) async fn run(global: &Global, mut args: UpArgs) -> miette::Result<()> {
    let with = With::of(&args.with);
    if let Some(kubeconfig) = &args.kubeconfig {
        args.kubeconfig = Some(check_kubeconfig(kubeconfig)?);
        if !args.with.is_empty() {
            let message = "--with adds to a local control plane, and --kubeconfig names another";
            return Err(Failure::usage(message).into());
        }
    }
    let state = global.state();
    coracle_host::ensure_state_dir(&state).map_err(of_host)?;
    if args.detach {
        return detach(&state, &args).await;
    }
    let _only_one = lock(&state)?;
    let own = ProcessId::of_pid(std::process::id()).into_diagnostic()?;
    let own = serde_json::to_vec(&own).into_diagnostic()?;
    pki::write(&state.join(down::SUPERVISOR_FILE), &own)?;
    let _absent = std::fs::remove_file(state.join("up.ready"));
    down::end_leftovers(&state).await;
    make_dir(&state.join("logs"))?;
    let (mut children, mut gave_up) = Supervisor::new(state.join("logs"));
    let mut outcome = tokio::select! {
        outcome = bring_up(&state, &args, with, &mut children) => outcome,
        Some(failure) = gave_up.recv() => Err(failure.into()),
        () = stop_signal() => Ok(()),
    };
    if outcome.is_ok() && state.join("up.ready").exists() {
        tokio::select! {
            () = stop_signal() => eprintln!("stopping"),
            Some(failure) = gave_up.recv() => outcome = Err(failure.into()),
        }
    }
    let _absent = std::fs::remove_file(state.join("up.ready"));
    children.stop_kubelet().await;
    down::stop_vms(global).await;
    children.stop().await;
    cluster::withdraw(&state).await;
    down::remove_traces(&state).await?;
    outcome
}

/// Returns the absolute path of a kubeconfig after checking that it can be read.
fn check_kubeconfig(kubeconfig: &Path) -> miette::Result<PathBuf> {
    let path = std::path::absolute(kubeconfig).into_diagnostic()?;
    match File::open(&path) {
        Ok(_) => Ok(path),
        Err(error) => Err(Failure::usage(format!("read the kubeconfig {}: {error}", path.display()))
            .help("leave --kubeconfig out to start a control plane of this machine's own")
            .into()),
    }
}

/// Takes the lock of the state directory, so that it has only one supervisor.
fn lock(state: &Path) -> miette::Result<File> {
    let path = state.join("up.lock");
    let file = File::options().create(true).write(true).truncate(false).open(&path).into_diagnostic()?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failure::new("COR-UP-003", format!("a system is up already in {}", state.display()))
            .help("stop it with `coracle down`, or use another --state")
            .exit(coracle_cli::error::exit::CONFLICT)
    })?;
    Ok(file)
}

/// Starts this program in the background and waits until it is Ready or ends.
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
    if args.registry_deny_private {
        command.arg("--registry-deny-private");
    }
    if let Some(dir) = &args.registries.registry_config {
        command.arg("--registry-config").arg(std::path::absolute(dir).into_diagnostic()?);
    }
    for part in &args.with {
        command.arg("--with").arg(part.as_str());
    }
    if let Some(host) = &args.webhook_url_host {
        command.arg("--webhook-url-host").arg(host);
    }
    command.stdin(Stdio::null()).stdout(log.try_clone().into_diagnostic()?).stderr(log).process_group(0);
    let mut child = command.spawn().into_diagnostic().wrap_err("start the background process")?;
    let mut shown = 0;
    let ended = loop {
        shown += show(&log_path, shown);
        if state.join("up.ready").exists() {
            show(&log_path, shown);
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
    show(&log_path, shown);
    let help = format!("the whole story: {}, and logs/ beside it", log_path.display());
    Err(Failure::new("COR-UP-004", format!("the system did not come up ({ended})")).help(help).into())
}

/// Prints the complete lines of a log after the first `shown`, and returns their number.
fn show(log: &Path, shown: usize) -> usize {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let complete = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    complete.skip(shown).inspect(|line| eprint!("{line}")).count()
}

async fn bring_up(state: &Path, args: &UpArgs, with: With, children: &mut Supervisor) -> miette::Result<()> {
    let (began, began_at) = (Instant::now(), cluster::this_second()?);
    let say = |what: &str| eprintln!("{:>6.1} s  {what}", began.elapsed().as_secs_f64());
    let ports = Ports::load_or_choose(state)?;
    let own = args.kubeconfig.is_none();
    let kubeconfig = args.kubeconfig.clone().unwrap_or_else(|| state.join("kubeconfig"));
    cluster::note_foreign(state, args.kubeconfig.as_deref())?;
    if own {
        for program in plane::programs(state, args.tools.as_deref(), ports, with)? {
            children.start(program);
        }
    }
    let client = plane::wait_ready(&kubeconfig, own).await?;
    say("API server ready");
    for program in plane::controller_programs(state, args.tools.as_deref(), ports, with)? {
        children.start(program);
    }
    cluster::install(&client).await?;
    let pki = pki::make(&state.join("pki"))?;
    cluster::remove_client(&client).await?;
    let boot = boot_files(state, args.tools.as_deref())?;
    let saved = match with.virtual_node {
        true => Some(SavedStates::start(state, children).await?),
        false => None,
    };
    let mut node = node(state, args, (&kubeconfig, &boot), ports, &pki, with)?;
    if let Some(saved) = &saved {
        saved.configure_node(&mut node);
    }
    children.start(node);
    let mut host = wait_host(state).await?;
    let info = host.info(pb::InfoRequest {}).await.map_err(Failure::from)?.into_inner();
    let driver = info.drivers.first().cloned().unwrap_or_default();
    say(&format!(
        "node ready: {} {} with {}, guests in {}",
        driver.name,
        driver.version,
        driver.accelerator,
        subnet_text(&info.subnet)
    ));
    if !args.no_demo
        && let Some(demo) = demo_image(args.tools.as_deref())
    {
        let source = format!("oci:{}:1", demo.display());
        import(&mut host, &source, Some(DEMO), coracle_cli::cli::ProgressMode::None).await?;
        say(&format!("image {DEMO} imported"));
    }
    // A foreign API server reaches this machine by a name that only the user knows.
    let webhook = args.webhook_url_host.clone().or_else(|| own.then(|| "127.0.0.1".to_owned()));
    let webhook_client_ca = own.then(|| plane::authority_file(state));
    let mut operator =
        operator(state, &kubeconfig, ports, webhook.as_deref(), webhook_client_ca.as_deref(), &pki)?;
    if let Some(saved) = &saved {
        saved.configure_operator(&mut operator);
    }
    children.start(operator);
    cluster::wait_leases(&client).await?;
    if webhook.is_some() {
        cluster::wait_admission(&client).await?;
        let api = cluster::wait_api(&client, if own { READY_LIMIT } else { FOREIGN_API_LIMIT }).await;
        match api {
            // The extension API may fail in a cluster with unusual settings; the rest of the system still works.
            Err(error) if !own => say(&format!("{error}; exec and logs through the cluster do not work")),
            api => api?,
        }
    }
    say(if webhook.is_some() { "operator ready, admission answers" } else { "operator ready" });
    wait_controllers(&client, ports, with).await?;
    if with.kubelet {
        let subnet: Subnet = info.subnet.parse().map_err(|_| {
            Failure::new("COR-UP-009", "a kubelet needs a network of the node").help("start it as root")
        })?;
        children.start(kubelet::program(state, args.tools.as_deref(), subnet.gateway())?);
        cluster::wait_node(&client, &kubelet::node_name(), began_at).await?;
        say("kubelet ready: pods run as VMs");
    }
    if with.virtual_node {
        cluster::wait_node(&client, &kubelet::virtual_node_name(), began_at).await?;
        say("virtual node ready: pods that tolerate its taint run as VMs");
    }
    eprintln!();
    eprintln!("  export KUBECONFIG={}", kubeconfig.display());
    if own {
        eprintln!("  export PATH={}:$PATH", state.join("bin").display());
    }
    eprintln!("  kubectl apply -f examples/mikromvm.yaml && kubectl get mvm -w");
    eprintln!();
    // Written after the last line: `up --detach` prints the rest of the log when this file appears.
    pki::write(&state.join("up.ready"), format!("{}\n", std::process::id()).as_bytes())?;
    Ok(())
}

async fn wait_controllers(client: &kube::Client, ports: Ports, with: With) -> miette::Result<()> {
    if with.scheduler {
        plane::wait_listening("kube-scheduler", ports.scheduler).await?;
    }
    if with.controller_manager {
        plane::wait_listening("kube-controller-manager", ports.controller_manager).await?;
        cluster::wait_service_account(client).await?;
    }
    Ok(())
}

fn subnet_text(text: &str) -> &str {
    if text.is_empty() { "a network of their own" } else { text }
}

/// Copies the files of guests into the state directory: a new setup must not change the files of running guests.
fn boot_files(state: &Path, tools: Option<&Path>) -> miette::Result<PathBuf> {
    let candidates = tools.map(Path::to_owned).into_iter().chain(default_tools());
    let Some(current) =
        candidates.map(|dir| dir.join("guest/current")).find(|dir| dir.join("vmlinuz").is_file())
    else {
        let help = "in a checkout: cargo xtask setup\nelsewhere: --tools DIR with guest/current/{vmlinuz,initrd,agent}";
        return Err(Failure::new("COR-UP-005", "guest kernel not found").help(help).into());
    };
    let current = current.canonicalize().into_diagnostic()?;
    let hash = current.file_name().map(PathBuf::from).unwrap_or_default();
    let own = state.join("boot").join(hash);
    make_dir(&own)?;
    for file in BOOT_FILES.into_iter().filter(|file| !own.join(file).is_file()) {
        let part = own.join(format!("{file}.part"));
        match std::fs::copy(current.join(file), &part) {
            // A kernel that was built elsewhere may have no unpacked form.
            Err(e) if e.kind() == ErrorKind::NotFound && file == ELF_KERNEL => continue,
            copied => copied.into_diagnostic().wrap_err_with(|| format!("copy {file} of the guest"))?,
        };
        std::fs::rename(&part, own.join(file)).into_diagnostic()?;
    }
    Ok(own)
}

fn demo_image(tools: Option<&Path>) -> Option<PathBuf> {
    let candidates = tools.map(Path::to_owned).into_iter().chain(default_tools());
    candidates.map(|dir| dir.join("demo/current")).find(|dir| dir.join("index.json").is_file())
}

fn node(
    state: &Path,
    up: &UpArgs,
    (kubeconfig, boot): (&Path, &Path),
    ports: Ports,
    pki: &pki::Pki,
    with: With,
) -> miette::Result<Program> {
    let show = |path: &Path| path.display().to_string();
    let mut args = vec![
        ("--state", show(state)),
        ("--boot", show(boot)),
        ("--agent-listen", format!("127.0.0.1:{}", ports.agent)),
        ("--host-listen", format!("127.0.0.1:{}", ports.host)),
        ("--tls-cert", show(&pki.node.0)),
        ("--tls-key", show(&pki.node.1)),
        ("--tls-client-ca", show(&pki.ca)),
        ("--kubeconfig", show(kubeconfig)),
        ("--kernel-dir", show(&state.join("boot"))),
    ];
    if with.kubelet {
        args.push(("--cri-listen", show(&kubelet::cri_socket(state))));
    }
    if with.virtual_node {
        // Any free port will do: the node publishes it in its Node object.
        let [port] = plane::free_ports([Ipv4Addr::UNSPECIFIED])?;
        args.push(("--virtual-node", kubelet::virtual_node_name()));
        args.push(("--virtual-node-address", "bridge".to_owned()));
        // The disk of a laptop is often fuller than the default thresholds allow. The real kubelet has none either.
        args.push(("--virtual-node-eviction-hard", "none".to_owned()));
        args.push(("--virtual-node-listen", format!("0.0.0.0:{port}")));
    }
    if let Some(dir) = &up.registries.registry_config {
        args.push(("--registry-config", show(&std::path::absolute(dir).into_diagnostic()?)));
    }
    let mut program = own_program("node", &args)?;
    if up.registry_deny_private {
        program.args.push("--registry-deny-private".to_owned());
    }
    Ok(program)
}

/// Returns the operator with all controllers and an embedded market, so that every kind of `examples/` works.
fn operator(
    state: &Path,
    kubeconfig: &Path,
    ports: Ports,
    webhook: Option<&str>,
    webhook_client_ca: Option<&Path>,
    pki: &pki::Pki,
) -> miette::Result<Program> {
    let show = |path: &Path| path.display().to_string();
    let mut args = vec![
        ("--kubeconfig", show(kubeconfig)),
        ("--controllers", "mikromvm,bidnode,agentpool,cocoonset".to_owned()),
        ("--market", coracle_cli::cli::EMBEDDED.to_owned()),
        ("--market-store", format!("sqlite:{}", state.join("market.db").display())),
        ("--market-listen", "127.0.0.1:0".to_owned()),
        ("--agent-ca", show(&pki.ca)),
        ("--agent-cert", show(&pki.operator.0)),
        ("--agent-key", show(&pki.operator.1)),
    ];
    if let Some(host) = webhook {
        let address = if host == "127.0.0.1" { "127.0.0.1" } else { "0.0.0.0" };
        args.push(("--webhook-listen", format!("{address}:{}", ports.webhook)));
        args.push(("--webhook-url-host", host.to_owned()));
    }
    if let Some(ca) = webhook_client_ca {
        args.push(("--webhook-client-ca", show(ca)));
    }
    own_program("operator", &args)
}

fn own_program(name: &'static str, flags: &[(&str, String)]) -> miette::Result<Program> {
    let path = std::env::current_exe().into_diagnostic()?;
    let args = flags.iter().flat_map(|(flag, value)| [(*flag).to_owned(), value.clone()]);
    Ok(Program { name, path, args: std::iter::once(name.to_owned()).chain(args).collect(), env: vec![] })
}

async fn wait_host(state: &Path) -> miette::Result<pb::host_client::HostClient<tonic::transport::Channel>> {
    let socket = coracle_host::run_dir_of(state).join("host.sock");
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        match coracle_cli::client::open(&socket).await {
            Ok(client) => return Ok(client),
            Err(why) if Instant::now() > deadline => {
                let help = "its log is logs/node.log in the state directory";
                return Err(Failure::new("COR-UP-006", format!("the node did not become ready: {why}"))
                    .help(help)
                    .into());
            }
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_guest_boot_files_are_copied_to_the_state_dir() {
        let dir = tempfile::tempdir().unwrap();
        let (tools, state) = (dir.path().join("tools"), dir.path().join("state"));
        let current = tools.join("guest/current");
        std::fs::create_dir_all(&current).unwrap();
        for file in ["vmlinuz", "initrd", "agent"] {
            std::fs::write(current.join(file), file).unwrap();
        }
        let read = |own: &Path, file| std::fs::read_to_string(own.join(file)).unwrap_or_default();
        let own = boot_files(&state, Some(&tools)).unwrap();
        assert_eq!(BOOT_FILES.map(|file| read(&own, file)), ["vmlinuz", "", "initrd", "agent"]);

        // A state directory of a version that copied fewer files.
        std::fs::write(current.join("vmlinux"), "vmlinux").unwrap();
        std::fs::write(current.join("initrd"), "changed").unwrap();
        let own = boot_files(&state, Some(&tools)).unwrap();
        assert_eq!(BOOT_FILES.map(|file| read(&own, file)), ["vmlinuz", "vmlinux", "initrd", "agent"]);

        std::fs::remove_file(current.join("agent")).unwrap();
        let failed = boot_files(&dir.path().join("other"), Some(&tools)).unwrap_err();
        assert_eq!(failed.to_string(), "copy agent of the guest");
    }
}
