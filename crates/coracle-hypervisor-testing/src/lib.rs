//! Test doubles of a VM host, and the conformance suite that they and all drivers pass. No product crate links this.
//!
//! [`fake`] is a driver whose VMMs live in memory, each with a guest that speaks the real guest protocol;
//! [`conformance`] is the suite; [`AddressOnly`] is a network without devices;
//! [`stand_in`] has the common parts of programs that stand in for VMMs; [`instances`] reads the VMM instances of a node.

pub mod conformance;
pub mod fake;
pub mod instances;
mod jail;
mod network;
pub mod stand_in;

use std::path::PathBuf;

use coracle_hypervisor::{Accelerator, VmmConfig};
use coracle_types::VmId;

pub use self::jail::{check_jail, check_view};
pub use self::network::AddressOnly;

/// Smallest VMM config of a VM called `name`: one vCPU, 128 MiB, TCG, no disk and no NIC. Its paths do not exist.
///
/// # Panics
/// When `name` is not a VM name.
#[expect(clippy::expect_used, reason = "values of a test")]
#[must_use]
pub fn sample_vmm_config(name: &str) -> VmmConfig {
    VmmConfig {
        id: VmId::of_name(&name.parse().expect("a VM name")).into(),
        vcpus: 1.try_into().expect("a number of vCPUs"),
        memory: 128.try_into().expect("a memory size"),
        kernel: "/nowhere/kernel".into(),
        initrd: "/nowhere/initrd".into(),
        disks: vec![],
        slots: Default::default(),
        machine_type: Default::default(),
        nic: None,
        display: None,
        state_dir: "/nowhere/state".into(),
        run_dir: "/nowhere/run".into(),
        accelerator: Accelerator::Tcg,
        driver: String::new(),
        uid: None,
    }
}

/// Path of the example program `name`, which Cargo builds with the tests: stand-ins for VMM programs.
///
/// # Panics
/// When the program was not built, with the command that builds it.
#[expect(clippy::expect_used, reason = "a test reports by panicking")]
#[must_use]
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("path of this test program");
    let profile = test.ancestors().nth(2).expect("<target>/<profile>/deps/<test>");
    let program = profile.join("examples").join(name);
    assert!(program.is_file(), "{} not found: run cargo build --examples", program.display());
    program
}
