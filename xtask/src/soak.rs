//! Test scenarios with the repeat counts that the documentation promises. One JSON line each.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::progress::say;
use crate::{fuzz, package, root, run, setup};

struct Scenario {
    name: &'static str,
    test: &'static str,
    /// Prefix of the names of the scenario's tests; empty: all tests.
    filter: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const SCENARIOS: [Scenario; 11] = [
    // Market, hosts and operator under faults, on a paused clock.
    Scenario {
        name: "market_system",
        test: "api_bidnode",
        filter: "sim_system::system_keeps",
        environment: &[("CORACLE_SEEDS", "1000")],
    },
    // The operator of BidNodes is killed between bid and status.
    Scenario {
        name: "bidnode_kill",
        test: "api_bidnode",
        filter: "crash::acceptance_05",
        environment: &[("CORACLE_KILLS", "200")],
    },
    // BidNodes are idle for ten minutes of real time, with the default intervals.
    Scenario {
        name: "bidnode_quiet",
        test: "api_bidnode",
        filter: "buy::acceptance_03",
        environment: &[("CORACLE_CLOCK_TIME", "1")],
    },
    // The node daemon is killed this many times in the middle of operations on VMs, on volumes and on containers of a VM, and
    // while a clone of the warm pool is claimed.
    Scenario {
        name: "crash_node",
        test: "system",
        filter: "crash_node::",
        environment: &[("CORACLE_CRASHES", "100")],
    },
    // The controllers of pools are killed this many times at each of their calls.
    Scenario {
        name: "crash_operator",
        test: "api",
        filter: "crash::",
        environment: &[("CORACLE_ROUNDS", "20")],
    },
    // Fifty VMs at once, this many times, each time on a fresh vCenter.
    Scenario {
        name: "agentpool_burst",
        test: "api",
        filter: "burst::",
        environment: &[("CORACLE_ROUNDS", "50")],
    },
    Scenario {
        name: "registry_kill",
        test: "system",
        filter: "registry_kill::",
        // On files and on S3, at most six minutes each.
        environment: &[("CORACLE_KILLS", "200"), ("CORACLE_KILL_SECONDS", "360")],
    },
    // The node daemon is killed under this many pods while clients watch them.
    Scenario {
        name: "pods_outage",
        test: "system",
        filter: "pods_outage::",
        environment: &[("CORACLE_PODS", "20")],
    },
    // This many Pods of a kubelet, each in a VM, a few at a time.
    Scenario {
        name: "cri_churn",
        test: "vm",
        filter: "churn_of_pods",
        environment: &[("CORACLE_PODS", "1000")],
    },
    // Every process of an installation is replaced while this many guests run.
    Scenario {
        name: "upgrade",
        test: "system",
        filter: "installation::drain::",
        environment: &[("CORACLE_VMS", "20")],
    },
    // A blob of 2 GiB on an object store behind a slow connection.
    Scenario {
        name: "registry_s3",
        test: "distribution",
        filter: "slow_store::large_blob",
        environment: &[("CORACLE_BLOB_BYTES", "2147483648"), ("CORACLE_WIRE_BYTES", "67108864")],
    },
];

/// Name of [`image_build`].
const IMAGE_BUILD: &str = "image_build";
/// Netboot package of Debian's installer, for its text screens.
const INSTALLER: &str = "debian-installer-12-netboot-amd64";

/// Installs the guest agent in a Debian image through a serial login, and operates Debian's text installer on its display.
fn image_build() -> Result<()> {
    say(&format!("soak {IMAGE_BUILD}"));
    let out = root().join("target/soak-image-build");
    std::fs::create_dir_all(&out).with_context(|| format!("make {}", out.display()))?;
    run(Command::new("apt-get").args(["-qq", "download", INSTALLER]).current_dir(&out))?;
    let inside = "./usr/lib/debian-installer/images/12/amd64/text/debian-installer/amd64";
    let unpack = format!(
        "dpkg-deb --fsys-tarfile {INSTALLER}_*.deb | tar -x --strip-components=10 {inside}/linux {inside}/initrd.gz"
    );
    run(Command::new("sh").args(["-ec", &unpack]).current_dir(&out))?;
    let mut test = Command::new("cargo");
    test.args(["test", "--locked", "--workspace", "--test", "system", "--", "--nocapture", "--ignored"]);
    run(test.arg("image_build::").env("CORACLE_INSTALLER", &out))?;
    std::fs::remove_dir_all(&out).with_context(|| format!("remove {}", out.display()))
}

/// Name of [`install`].
const INSTALL: &str = "install";

/// Runs the programs of the manifests on three nodes, with the unpacked image of `cargo xtask package` as their root; then the
/// workloads themselves under a real kubelet, with that image.
fn install() -> Result<()> {
    say(&format!("soak {INSTALL}"));
    let out = root().join("target/soak-install");
    package::run(&package::Options::for_tests(&out))?;
    let (image, unpacked) = (out.join("image"), out.join("root"));
    package::image::unpack(&image, &unpacked)?;
    for (filter, variable, value) in [
        ("installation::nodes::", "CORACLE_IMAGE_ROOT", &unpacked),
        ("installation::kubelet::", "CORACLE_IMAGE_LAYOUT", &image),
    ] {
        let mut command = Command::new("cargo");
        command.args(["test", "--locked", "--workspace", "--test", "system", "--", "--nocapture"]);
        run(command.arg(filter).env(variable, value))?;
    }
    std::fs::remove_dir_all(&out).with_context(|| format!("remove {}", out.display()))
}

/// Runs the named scenarios, or all if there are no names.
pub(crate) fn run_all(names: &[String]) -> Result<()> {
    let known: Vec<_> = SCENARIOS.iter().map(|s| s.name).chain([INSTALL, IMAGE_BUILD, fuzz::NAME]).collect();
    if let Some(unknown) = names.iter().find(|n| !known.contains(&n.as_str())) {
        bail!("no scenario {unknown}; there is: {}", known.join(", "));
    }
    setup::ensure(setup::Purpose::Test)?;
    for scenario in SCENARIOS {
        if names.is_empty() || names.iter().any(|n| n == scenario.name) {
            say(&format!("soak {}", scenario.name));
            let mut command = Command::new("cargo");
            command.args(["test", "--locked", "--workspace", "--test", scenario.test]);
            run(command
                .args(["--", "--nocapture", scenario.filter])
                .envs(scenario.environment.iter().copied()))?;
        }
    }
    let is_wanted = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
    if is_wanted(INSTALL) {
        install()?;
    }
    if is_wanted(IMAGE_BUILD) {
        image_build()?;
    }
    if is_wanted(fuzz::NAME) {
        fuzz::run_all()?;
    }
    Ok(())
}
