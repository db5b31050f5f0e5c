//! Stop and deletion of a VMM that accepts API calls and never answers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod machine;

use std::sync::Arc;

use coracle_firecracker::{FirecrackerConfig, FirecrackerDriver};
use coracle_hypervisor_testing::example;

use machine::Machine;
use machine::hanging::{check_deletion_while_starting, check_stop_while_running};

fn driver(machine: &Machine) -> FirecrackerDriver {
    FirecrackerDriver::new(FirecrackerConfig { program: machine.program.clone(), kvm: None })
}

#[test]
fn vmm_that_hangs_at_its_start_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let machine = Machine::stand_in(example("fake-firecracker")).with_hanging_call("actions", dir.path());
    check_deletion_while_starting(&machine, || Arc::new(driver(&machine)));
}

#[test]
fn vmm_that_hangs_while_it_runs_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let machine = Machine::stand_in(example("fake-firecracker")).with_hanging_call("vm", dir.path());
    check_stop_while_running(&machine, || Arc::new(driver(&machine)));
}
