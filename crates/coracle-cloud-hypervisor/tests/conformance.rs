//! Conformance suite of drivers, on the stand-in, and on the real Cloud Hypervisor if `CORACLE_CLOUD_HYPERVISOR_BIN` names one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

#[path = "../../coracle-firecracker/tests/machine/mod.rs"]
mod machine;

use std::io::{Seek as _, Write as _};

use coracle_cloud_hypervisor::{CloudHypervisorConfig, CloudHypervisorDriver, events};
use coracle_hypervisor::{Driver as _, DriverError, Saved, Slots, VmmConfig, bundle, remove_cgroup};
use coracle_hypervisor_testing::{check_jail, check_view, conformance, example};
use coracle_testkit::tools;
use serde_json::json;
use tokio::io::AsyncReadExt as _;

use machine::{Machine, check_refusals, jailed};

fn stand_in() -> Machine {
    Machine::stand_in(example("fake-cloud-hypervisor"))
}

fn driver(machine: &Machine) -> CloudHypervisorDriver {
    CloudHypervisorDriver::new(CloudHypervisorConfig { program: machine.program.clone(), kvm: None })
}

async fn check_conformance(machine: &Machine) {
    let dir = tempfile::tempdir().unwrap();
    let vmm_config = machine.vmm_config("conformance", dir.path());
    for vmm_config in [jailed(vmm_config.clone()), vmm_config] {
        conformance::check(|| driver(machine), &vmm_config).await;
        conformance::check_snapshots(&driver(machine), &vmm_config).await;
        conformance::check_disks(&driver(machine), &vmm_config).await;
        remove_cgroup(&vmm_config.id, None).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn driver_conforms_on_the_stand_in() {
    check_conformance(&stand_in()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn driver_conforms_on_cloud_hypervisor() {
    match Machine::real("CORACLE_CLOUD_HYPERVISOR_BIN") {
        Some(machine) => check_conformance(&machine).await,
        None => tools::not_to_be_had("Cloud Hypervisor: CORACLE_CLOUD_HYPERVISOR_BIN names none"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_boot_ends_the_vmm_and_reports_the_reason() {
    let machine = stand_in();
    let dir = tempfile::tempdir().unwrap();
    check_refusals(
        &driver(&machine),
        machine.vmm_config("refused", dir.path()),
        ["vm.boot", "Cannot open kernel file"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn console_is_the_serial_line_and_events_are_reported() {
    let machine = stand_in();
    let dir = tempfile::tempdir().unwrap();
    let vmm_config = machine.vmm_config("console", dir.path());
    let driver = driver(&machine);
    let process = driver.start(&vmm_config).await.unwrap();
    let mut console = driver.console(&vmm_config).await.unwrap();
    let mut said = [0; 13];
    console.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"coracle-guest");
    driver.pause(&vmm_config).await.unwrap();
    driver.resume(&vmm_config).await.unwrap();
    driver.kill(process).await.unwrap();
    let told: Vec<_> = events(dir.path()).unwrap().into_iter().map(|e| e.event).collect();
    assert_eq!(told, ["booting", "booted", "paused", "resumed"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn saved_config_with_a_host_device_is_refused() {
    let machine = stand_in();
    let dir = tempfile::tempdir().unwrap();
    let vmm_config = machine.vmm_config("hostile", dir.path());
    let driver = driver(&machine);
    let config =
        json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/sys/bus/pci/devices/0000:00:02.0"}]});
    let part = |text: String| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    };
    let parts = [part(config.to_string()), part("{}".into()), part(String::new())];
    let mut bundled = tempfile::tempfile().unwrap();
    let names = ["config.json", "state.json", "memory-ranges"];
    let named: Vec<_> = names.iter().zip(&parts).map(|(name, file)| (*name, file)).collect();
    bundle::pack(&bundled, &named).unwrap();
    bundled.rewind().unwrap();
    match driver.snapshots(&vmm_config).unwrap().restore(&vmm_config, Saved::File(&bundled)).await {
        Err(DriverError::Unavailable { reason, .. }) => assert!(reason.contains("devices"), "{reason}"),
        other => panic!("it should have been refused: {other:?}"),
    }
    assert_eq!(driver.find(&vmm_config).await.unwrap(), None, "no process was started for it");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn jailed_vmm_sees_the_files_of_its_vm_alone() {
    let machine = Machine::stand_in(example("view-of-cloud-hypervisor"));
    let dir = tempfile::tempdir().unwrap();
    let shape =
        VmmConfig { slots: Slots { read_only: 1, writable: 1 }, ..machine.vmm_config("shape", dir.path()) };
    let files = ["/run/saved", "/run/slot0", "/run/slot1", "/vmm/kernel", "/vmm/initrd"];
    check_view(&driver(&machine), &shape, &machine.program, &files).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cloud_hypervisor_runs_in_a_jail() {
    let machine = stand_in();
    let dir = tempfile::tempdir().unwrap();
    check_jail(&driver(&machine), &jailed(machine.vmm_config("jailed", dir.path()))).await;
}
