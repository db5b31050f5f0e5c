//! `coracle doctor`: what this machine can do, and what to do about the rest.

use std::path::Path;

use coracle_hypervisor::Driver;
use coracle_qemu::{QemuConfig, QemuDriver};
use serde_json::json;

use crate::cli::{DoctorArgs, Format, Global};
use crate::daemon::{find_tool, kvm_probe_of};
use crate::error::Failure;
use crate::output::{self, Columns};

struct Check {
    name: &'static str,
    verdict: Verdict,
    detail: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Good,
    /// Works, but not as well as it could.
    Limited,
    Missing,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

/// One line a check; fails when something that is needed is missing.
pub(crate) async fn run(global: &Global, args: DoctorArgs) -> miette::Result<u8> {
    let mut checks = vec![driver().await];
    checks.extend(programs());
    checks.push(network());
    checks.push(node(global).await);
    match args.output {
        Format::Json | Format::Yaml => {
            let items = checks
                .iter()
                .map(|c| json!({"check": c.name, "result": c.verdict.word(), "detail": c.detail}));
            output::list(args.output, "Check", items.collect())?;
        }
        Format::Table | Format::Name => {
            let mut columns = Columns::new(&["CHECK", "RESULT", "DETAIL"]);
            for check in &checks {
                columns.row(&[check.name.to_owned(), check.verdict.word().to_owned(), check.detail.clone()]);
            }
            columns.print()?;
        }
    }
    let broken = checks.iter().any(|c| c.verdict == Verdict::Missing);
    Ok(if broken { crate::error::exit::UNSUPPORTED } else { 0 })
}

async fn driver() -> Check {
    let config = QemuConfig { program: "qemu-system-x86_64".into(), kvm: Some(kvm_probe_of()) };
    let probe = QemuDriver::new(config).probe().await;
    let (verdict, detail) = match probe.accelerator {
        None => (Verdict::Missing, probe.reason),
        Some(accelerator) => {
            let verdict = if accelerator.as_str() == "kvm" { Verdict::Good } else { Verdict::Limited };
            (verdict, format!("QEMU {} with {}: {}", probe.version, accelerator.as_str(), probe.reason))
        }
    };
    Check { name: "hypervisor", verdict, detail }
}

fn programs() -> Vec<Check> {
    let check = |name, needed, install: &str| match find_tool(name, None) {
        Some(path) => Check { name, verdict: Verdict::Good, detail: path.display().to_string() },
        None => {
            let verdict = if needed { Verdict::Missing } else { Verdict::Limited };
            Check { name, verdict, detail: format!("not found; {install}") }
        }
    };
    vec![
        check("mke2fs", true, "install Debian's e2fsprogs"),
        check("nft", rustix::process::geteuid().is_root(), "install Debian's nftables"),
        check("etcd", false, "needed by `coracle up` only: cargo xtask setup"),
        check("kube-apiserver", false, "needed by `coracle up` only: cargo xtask setup"),
    ]
}

fn network() -> Check {
    let root = rustix::process::geteuid().is_root();
    let tun = Path::new("/dev/net/tun").exists();
    let (verdict, detail) = match (root, tun) {
        (true, true) => (Verdict::Good, "bridge: every guest has an address of the host's".to_owned()),
        (true, false) => (Verdict::Missing, "/dev/net/tun does not exist: load the tun module".to_owned()),
        (false, _) => (
            Verdict::Limited,
            "user: without root guests have no address; use -p and port-forward".to_owned(),
        ),
    };
    Check { name: "network", verdict, detail }
}

async fn node(global: &Global) -> Check {
    let socket = global.socket();
    let (verdict, detail) = match crate::client::open(&socket).await {
        Err(_) => (Verdict::Limited, format!("none runs at {}; start one: coracle up", socket.display())),
        Ok(mut client) => match client.info(coracle_proto::host::InfoRequest {}).await {
            Ok(info) => {
                let info = info.into_inner();
                (
                    Verdict::Good,
                    format!(
                        "{} with {} of {} VMs running, {}",
                        info.hostname, info.vms_running, info.vms, info.subnet
                    ),
                )
            }
            Err(status) => (Verdict::Missing, Failure::from(status).message),
        },
    };
    Check { name: "node", verdict, detail }
}

/// Runs the KVM payload in this process, which the caller kills when it hangs.
pub(crate) fn kvm_probe(device: &Path) -> miette::Result<u8> {
    let works = coracle_qemu::run_kvm_payload(device, &mut std::io::stdout())
        .map_err(|e| Failure::new("COR-CLI-003", e.to_string()))?;
    Ok(u8::from(!works))
}
