//! Stop and deletion of a VMM that accepts API calls and never answers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

#[path = "../../coracle-firecracker/tests/machine/mod.rs"]
mod machine;

use std::sync::Arc;

use coracle_cloud_hypervisor::{CloudHypervisorConfig, CloudHypervisorDriver};
use coracle_hypervisor_testing::example;

use machine::Machine;
use machine::hanging::{check_deletion_while_starting, check_stop_while_running};

fn driver(machine: &Machine) -> CloudHypervisorDriver {
    CloudHypervisorDriver::new(CloudHypervisorConfig { program: machine.program.clone(), kvm: None })
}

#[test]
fn vmm_that_hangs_at_its_start_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let machine =
        Machine::stand_in(example("fake-cloud-hypervisor")).with_hanging_call("vm.boot", dir.path());
    check_deletion_while_starting(&machine, || Arc::new(driver(&machine)));
}

#[test]
fn vmm_that_hangs_while_it_runs_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let machine =
        Machine::stand_in(example("fake-cloud-hypervisor")).with_hanging_call("vm.pause", dir.path());
    check_stop_while_running(&machine, || Arc::new(driver(&machine)));
}
