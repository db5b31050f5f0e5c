//! `coracle doctor`: what this machine supports, or what a cluster lacks, and how to fix it.

mod cluster;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use coracle_cloud_hypervisor::{CloudHypervisorConfig, CloudHypervisorDriver};
use coracle_firecracker::{FirecrackerConfig, FirecrackerDriver};
use coracle_hypervisor::{Accelerator, Driver, JailPart, Probe, jail_parts};
use coracle_net::BridgeNetwork;
use coracle_qemu::{QemuConfig, QemuDriver};
use serde::Serialize;

use crate::daemon::{default_tools, find_tool, kvm_probe_of};
use coracle_cli::cli::{DoctorArgs, Format, Global};
use coracle_cli::error::Failure;
use coracle_cli::output::{self, Columns};

/// Minimum memory in MiB for a node and a small VM.
const MEMORY_MIN_MIB: u64 = 512;

/// Result of one check.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Check {
    check: Cow<'static, str>,
    result: CheckResult,
    /// Description of what was found.
    detail: String,
    /// What to do about it; empty if nothing must be done.
    help: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckResult {
    #[serde(rename = "ok")]
    Good,
    /// Works, but with limitations.
    Limited,
    Missing,
}

impl CheckResult {
    fn word(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

impl Check {
    fn new(
        check: impl Into<Cow<'static, str>>,
        result: CheckResult,
        detail: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        Self { check: check.into(), result, detail: detail.into(), help: help.into() }
    }
}

/// Prints one line per check; the exit code shows whether a requirement is missing.
pub(crate) async fn run(global: &Global, args: DoctorArgs) -> miette::Result<u8> {
    if args.cluster {
        return report(&args.output, &cluster::checks(global).await?);
    }
    if global.is_remote() {
        return Err(coracle_cli::client::local_only("coracle doctor").into());
    }
    let config = QemuConfig { program: "qemu-system-x86_64".into(), kvm: Some(kvm_probe_of(None)) };
    let probe = QemuDriver::new(config).probe().await;
    let mut checks = vec![hypervisor(&probe), accelerator(&probe)];
    checks.extend(optional_hypervisors().await);
    checks.push(memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()));
    checks.extend(programs());
    checks.push(guest_kernel());
    checks.push(uefi(coracle_host::uefi().map(|(code, _)| code)));
    checks.push(network_of_host().await);
    checks.extend(jail_parts(&jail_probe(&global.state())).into_iter().map(jail));
    checks.push(node(global).await);
    report(&args.output, &checks)
}

/// Prints the checks and returns an error code if a requirement is missing.
fn report(format: &Format, checks: &[Check]) -> miette::Result<u8> {
    print(format, checks)?;
    let broken = checks.iter().any(|c| c.result == CheckResult::Missing);
    Ok(if broken { coracle_cli::error::exit::UNSUPPORTED } else { 0 })
}

fn print(format: &Format, checks: &[Check]) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Wide => table(checks).print(),
        Format::Name => output::write(&checks.iter().map(|c| format!("{}\n", c.check)).collect::<String>()),
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            let items: Result<Vec<_>, _> = checks.iter().map(serde_json::to_value).collect();
            output::list(format, "Check", items.map_err(|e| Failure::new("COR-CLI-004", e.to_string()))?)
        }
    }
}

/// Returns a table with the help below each failed check.
fn table(checks: &[Check]) -> Columns {
    let mut columns = Columns::new(&["CHECK", "RESULT", "DETAIL"]);
    for check in checks {
        columns.row(&[
            check.check.clone().into_owned(),
            check.result.word().to_owned(),
            check.detail.clone(),
        ]);
        if !check.help.is_empty() {
            columns.row(&[String::new(), String::new(), format!("→ {}", check.help)]);
        }
    }
    columns
}

fn hypervisor(probe: &Probe) -> Check {
    let name = "hypervisor";
    match probe.accelerator {
        Some(_) => {
            Check::new(name, CheckResult::Good, format!("QEMU {}, machine microvm", probe.version), "")
        }
        None => {
            Check::new(name, CheckResult::Missing, probe.reason.clone(), "install Debian's qemu-system-x86")
        }
    }
}

/// Checks the hypervisors that a VM may ask for by name. They are optional.
async fn optional_hypervisors() -> Vec<Check> {
    let program =
        |variable: &str, name: &str| std::env::var_os(variable).map_or_else(|| name.into(), PathBuf::from);
    let firecracker = FirecrackerConfig {
        program: program("CORACLE_FIRECRACKER_BIN", "firecracker"),
        kvm: Some(kvm_probe_of(None)),
    };
    let cloud_hypervisor = CloudHypervisorConfig {
        program: program("CORACLE_CLOUD_HYPERVISOR_BIN", "cloud-hypervisor"),
        kvm: Some(kvm_probe_of(None)),
    };
    let check = |name: &'static str, probe: Probe| match probe.accelerator {
        Some(_) => {
            Check::new(name, CheckResult::Good, format!("version {}: {}", probe.version, probe.reason), "")
        }
        None => {
            Check::new(name, CheckResult::Limited, probe.reason, "needed only by VMs that name this driver")
        }
    };
    vec![
        check("firecracker", FirecrackerDriver::new(firecracker).probe().await),
        check("cloud-hypervisor", CloudHypervisorDriver::new(cloud_hypervisor).probe().await),
    ]
}

/// Returns a directory to test a jail in: on the file system of the node, because not every file system supports idmapped
/// mounts.
fn jail_probe(state: &Path) -> PathBuf {
    let temporary = std::env::temp_dir();
    let dir = if state.is_dir() { state } else { &temporary };
    dir.join(format!("jail-probe-{}", std::process::id()))
}

/// Returns whether VMMs have this part of their jail.
fn jail(part: JailPart) -> Check {
    match part.missing {
        None => Check::new(part.name, CheckResult::Good, part.what, ""),
        Some(reason) => Check::new(part.name, CheckResult::Limited, reason, part.help),
    }
}

/// Returns what the node reports about itself; its jail may lack parts that this command's process would have.
fn node_detail(found: String, jail_missing: &[String]) -> Check {
    match jail_missing {
        [] => Check::new("node", CheckResult::Good, found, ""),
        parts => Check::new(
            "node",
            CheckResult::Limited,
            format!("{found}; not in its jails: {}", parts.join("; ")),
            "see the rows of the jail",
        ),
    }
}

/// Returns which accelerator VMs get, and why.
fn accelerator(probe: &Probe) -> Check {
    let name = "accelerator";
    match probe.accelerator {
        Some(Accelerator::Kvm) => Check::new(name, CheckResult::Good, format!("kvm: {}", probe.reason), ""),
        Some(Accelerator::Tcg) => Check::new(
            name,
            CheckResult::Limited,
            format!("tcg (translation; everything works, more slowly): {}", probe.reason),
            "for KVM: switch virtualization on in the firmware, or nested virtualization of this VM; then load \
             kvm_intel or kvm_amd, and let this user open /dev/kvm",
        ),
        None => Check::new(
            name,
            CheckResult::Missing,
            "no hypervisor could be asked",
            "install a hypervisor first",
        ),
    }
}

/// Checks the memory in `/proc/meminfo`. Pure.
fn memory(meminfo: &str) -> Check {
    let field = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find(|l| l.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
    };
    let (total, free) = (field("MemTotal:").unwrap_or(0), field("MemAvailable:").unwrap_or(0));
    let detail = format!("{free} of {total} MiB are available");
    if free >= MEMORY_MIN_MIB {
        Check::new("memory", CheckResult::Good, detail, "")
    } else {
        let help = format!("a small VM and its node need {MEMORY_MIN_MIB} MiB");
        Check::new("memory", CheckResult::Limited, detail, help)
    }
}

fn programs() -> Vec<Check> {
    let setup = "only `coracle up` needs it; in a checkout: cargo xtask setup; elsewhere: --tools DIR, or --kubeconfig FILE";
    [
        ("mke2fs", true, "install Debian's e2fsprogs"),
        ("etcd", false, setup),
        ("kube-apiserver", false, setup),
        ("kubectl", false, setup),
        (
            "kube-scheduler",
            false,
            "only `coracle up --with scheduler` needs it; in a checkout: cargo xtask setup",
        ),
        (
            "kube-controller-manager",
            false,
            "only `coracle up --with controller-manager` needs it; in a checkout: cargo xtask setup",
        ),
    ]
    .into_iter()
    .map(|(name, needed, help)| match find_tool(name, None) {
        Some(path) => Check::new(name, CheckResult::Good, path.display().to_string(), ""),
        None => {
            let result = if needed { CheckResult::Missing } else { CheckResult::Limited };
            Check::new(name, result, "not found", help)
        }
    })
    .collect()
}

fn guest_kernel() -> Check {
    let dir = default_tools().unwrap_or_default().join("guest/current");
    if dir.join("vmlinuz").is_file() && dir.join("initrd").is_file() {
        return Check::new("guest kernel", CheckResult::Good, dir.display().to_string(), "");
    }
    let help = "in a checkout: cargo xtask setup; elsewhere: coracle node --boot DIR with vmlinuz and initrd";
    Check::new("guest kernel", CheckResult::Limited, format!("none in {}", dir.display()), help)
}

/// Checks for UEFI firmware. Pure.
fn uefi(code: Option<PathBuf>) -> Check {
    let name = "uefi";
    match code {
        Some(code) => Check::new(name, CheckResult::Good, code.display().to_string(), ""),
        None => {
            let help = "only disk images that no BIOS can start need it: install Debian's ovmf";
            Check::new(name, CheckResult::Limited, "no firmware found", help)
        }
    }
}

async fn network_of_host() -> Check {
    let filter = BridgeNetwork::probe().await.map_err(|error| {
        let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        causes.last().map(ToString::to_string).unwrap_or_default()
    });
    network(rustix::process::geteuid().is_root(), Path::new("/dev/net/tun").exists(), filter)
}

/// Checks the network; `filter` is an error if packets cannot be filtered. Pure.
fn network(root: bool, tun: bool, filter: Result<(), String>) -> Check {
    let name = "network";
    match (root, tun) {
        (true, true) => match filter {
            Ok(()) => {
                Check::new(name, CheckResult::Good, "bridge: every guest has an address of the host's", "")
            }
            Err(why) => Check::new(
                name,
                CheckResult::Missing,
                format!("packets cannot be filtered: {why}"),
                "load the nf_tables module: modprobe nf_tables; or start the node with --network user",
            ),
        },
        (true, false) => Check::new(
            name,
            CheckResult::Missing,
            "/dev/net/tun does not exist",
            "load the tun module: modprobe tun; or start the node with --network user",
        ),
        (false, _) => Check::new(
            name,
            CheckResult::Limited,
            "user: guests have no address that the host reaches",
            "use -p and port-forward, or start the node as root",
        ),
    }
}

async fn node(global: &Global) -> Check {
    let (name, socket) = ("node", global.socket());
    let Ok(mut client) = coracle_cli::client::open(&socket).await else {
        let detail = format!("none runs at {}", socket.display());
        return Check::new(name, CheckResult::Limited, detail, "start one: coracle up --detach");
    };
    match client.info(coracle_proto::host::InfoRequest {}).await {
        Ok(info) => {
            let info = info.into_inner();
            let chosen = info.drivers.first().map(|d| format!("{} with {}", d.name, d.accelerator));
            let detail = format!(
                "{}: {}, {} of {} VMs run, guests in {}",
                info.hostname,
                chosen.unwrap_or_default(),
                info.vms_running,
                info.vms,
                if info.subnet.is_empty() { "networks of their own" } else { &info.subnet }
            );
            node_detail(detail, &info.jail_missing)
        }
        Err(status) => {
            let failure = Failure::from(status);
            Check::new(name, CheckResult::Missing, failure.message, failure.help.unwrap_or_default())
        }
    }
}

/// Runs the KVM payload in this process, which the caller kills if it hangs.
pub(crate) fn kvm_probe(device: &Path) -> miette::Result<u8> {
    let works = coracle_hypervisor::run_kvm_payload(device, &mut std::io::stdout())
        .map_err(|e| Failure::new("COR-CLI-003", e.to_string()))?;
    Ok(u8::from(!works))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(accelerator: Option<Accelerator>, reason: &str) -> Probe {
        Probe { accelerator, version: "7.2.22".into(), reason: reason.into() }
    }

    fn part(missing: Option<String>) -> JailPart {
        JailPart { name: "jail file length", what: "bounded", missing, help: "give it" }
    }

    #[test]
    fn golden_table_of_a_host_with_hanging_kvm() {
        let hangs = probe(Some(Accelerator::Tcg), "/dev/kvm opens, but a guest in long mode hangs");
        let checks = [
            hypervisor(&hangs),
            accelerator(&hangs),
            memory("MemTotal: 2048000 kB\nMemAvailable: 204800 kB\n"),
            network(false, true, Ok(())),
        ];
        insta::assert_snapshot!("doctor_table", table(&checks).text());
        insta::assert_json_snapshot!("doctor_json", checks);
    }

    #[test]
    fn check_has_help_unless_result_is_good() {
        let none = probe(None, "qemu-system-x86_64 is not to be found");
        let tcg = probe(Some(Accelerator::Tcg), "/dev/kvm does not exist");
        let kvm = probe(Some(Accelerator::Kvm), "the payload answered in 3 ms");
        let all = [
            hypervisor(&none),
            accelerator(&none),
            accelerator(&tcg),
            accelerator(&kvm),
            memory(""),
            network(true, true, Ok(())),
            network(true, true, Err("Operation not permitted (os error 1)".to_owned())),
            network(true, false, Ok(())),
            network(false, false, Ok(())),
            uefi(None),
            uefi(Some("/usr/share/OVMF/OVMF_CODE.fd".into())),
            jail(part(None)),
            jail(part(Some("no CAP_SYS_RESOURCE".into()))),
            node_detail("here".into(), &[]),
            node_detail("here".into(), &["jail cgroup: read-only".into()]),
        ];
        for check in all {
            assert_eq!(check.help.is_empty(), check.result == CheckResult::Good, "{check:?}");
        }
        assert_eq!(accelerator(&kvm).detail, "kvm: the payload answered in 3 ms");
    }
}
