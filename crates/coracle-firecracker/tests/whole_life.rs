//! Acceptance A13 on a host of its own, on the stand-in, and on the real Firecracker if `CORACLE_FIRECRACKER_BIN` names one.
//! The single test of its process, because the open files of the process are counted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod machine;

use std::sync::Arc;

use coracle_firecracker::{FirecrackerConfig, FirecrackerDriver};
use coracle_hypervisor_testing::example;
use coracle_testkit::tools;

use machine::Machine;
use machine::whole_life::check_whole_life;

fn driver(machine: &Machine) -> FirecrackerDriver {
    FirecrackerDriver::new(FirecrackerConfig { program: machine.program.clone(), kvm: None })
}

#[test]
fn vm_lifecycle_leaves_nothing() {
    let stand_in = Machine::stand_in(example("fake-firecracker"));
    check_whole_life(&stand_in, || Arc::new(driver(&stand_in)));
    match Machine::real("CORACLE_FIRECRACKER_BIN") {
        Some(machine) => check_whole_life(&machine, || Arc::new(driver(&machine))),
        None => tools::not_to_be_had("Firecracker: CORACLE_FIRECRACKER_BIN names none"),
    }
}
