//! Conformance suite of drivers, on the stand-in, and on the real Firecracker if `CORACLE_FIRECRACKER_BIN` names one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod machine;

use coracle_firecracker::{FirecrackerConfig, FirecrackerDriver};
use coracle_hypervisor::{Driver as _, Slots, VmmConfig, remove_cgroup};
use coracle_hypervisor_testing::{check_jail, check_view, conformance, example};
use coracle_testkit::tools;
use tokio::io::AsyncReadExt as _;

use machine::{Machine, check_refusals, jailed};

fn stand_in() -> Machine {
    Machine::stand_in(example("fake-firecracker"))
}

fn driver(machine: &Machine) -> FirecrackerDriver {
    FirecrackerDriver::new(FirecrackerConfig { program: machine.program.clone(), kvm: None })
}

async fn check_conformance(machine: &Machine) {
    let dir = tempfile::tempdir().unwrap();
    let vmm_config = machine.vmm_config("conformance", dir.path());
    for vmm_config in [jailed(vmm_config.clone()), vmm_config] {
        conformance::check(|| driver(machine), &vmm_config).await;
        conformance::check_templates(&driver(machine), &vmm_config).await;
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
async fn driver_conforms_on_firecracker() {
    match Machine::real("CORACLE_FIRECRACKER_BIN") {
        Some(machine) => check_conformance(&machine).await,
        None => tools::not_to_be_had("Firecracker: CORACLE_FIRECRACKER_BIN names none"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_boot_ends_the_vmm_and_reports_the_reason() {
    let machine = stand_in();
    let dir = tempfile::tempdir().unwrap();
    check_refusals(
        &driver(&machine),
        machine.vmm_config("refused", dir.path()),
        ["/actions", "Kernel file cannot be opened"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn console_survives_reconnecting_readers() {
    let machine = stand_in();
    let dir = tempfile::tempdir().unwrap();
    let vmm_config = machine.vmm_config("console", dir.path());
    let driver = driver(&machine);
    let process = driver.start(&vmm_config).await.unwrap();
    let mut console = driver.console(&vmm_config).await.unwrap();
    let mut said = [0; 13];
    console.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"coracle-guest");
    drop(console);
    let mut again = driver.console(&vmm_config).await.unwrap();
    driver.kill(process).await.unwrap();
    let mut rest = Vec::new();
    again.read_to_end(&mut rest).await.unwrap();
    assert!(process.is_alive().is_ok_and(|alive| !alive), "the stream ended with the process");
}

#[tokio::test(flavor = "multi_thread")]
async fn jailed_vmm_sees_the_files_of_its_vm_alone() {
    let machine = Machine::stand_in(example("view-of-firecracker"));
    let dir = tempfile::tempdir().unwrap();
    let shape =
        VmmConfig { slots: Slots { read_only: 1, writable: 1 }, ..machine.vmm_config("shape", dir.path()) };
    let files = ["/run/saved", "/run/slot0", "/run/slot1", "/vmm/kernel", "/vmm/initrd", "/vmm/vmm.log"];
    check_view(&driver(&machine), &shape, &machine.program, &files).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn firecracker_runs_in_a_jail() {
    let machine = stand_in();
    let dir = tempfile::tempdir().unwrap();
    check_jail(&driver(&machine), &jailed(machine.vmm_config("jailed", dir.path()))).await;
}
