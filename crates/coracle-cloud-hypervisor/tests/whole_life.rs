//! Acceptance A13 on a host of its own, on the stand-in, and on the real Cloud Hypervisor if `CORACLE_CLOUD_HYPERVISOR_BIN`
//! names one. The single test of its process, because the open files of the process are counted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

#[path = "../../coracle-firecracker/tests/machine/mod.rs"]
mod machine;

use std::sync::Arc;

use coracle_cloud_hypervisor::{CloudHypervisorConfig, CloudHypervisorDriver};
use coracle_hypervisor_testing::example;
use coracle_testkit::tools;

use machine::Machine;
use machine::whole_life::check_whole_life;

fn driver(machine: &Machine) -> CloudHypervisorDriver {
    CloudHypervisorDriver::new(CloudHypervisorConfig { program: machine.program.clone(), kvm: None })
}

#[test]
fn vm_lifecycle_leaves_nothing() {
    let stand_in = Machine::stand_in(example("fake-cloud-hypervisor"));
    check_whole_life(&stand_in, || Arc::new(driver(&stand_in)));
    match Machine::real("CORACLE_CLOUD_HYPERVISOR_BIN") {
        Some(machine) => check_whole_life(&machine, || Arc::new(driver(&machine))),
        None => tools::not_to_be_had("Cloud Hypervisor: CORACLE_CLOUD_HYPERVISOR_BIN names none"),
    }
}
