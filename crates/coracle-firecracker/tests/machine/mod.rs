//! Common parts of the tests of this driver and of Cloud Hypervisor's: a program, its boot files, its refusals.

#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod hanging;
pub(crate) mod whole_life;

use std::path::{Path, PathBuf};

use coracle_hypervisor::{Accelerator, Driver, DriverError, Jail, Nic, NicBackend, VmmConfig};
use coracle_testkit::tools;
use coracle_types::{MacAddr, VmId};

/// VMM program and its boot files.
pub(crate) struct Machine {
    pub(crate) program: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
}

impl Machine {
    /// Returns a stand-in, which only checks that its kernel exists.
    pub(crate) fn stand_in(program: PathBuf) -> Self {
        Self { kernel: program.clone(), initrd: program.clone(), program }
    }

    /// Returns a stand-in that never answers calls of this name.
    pub(crate) fn with_hanging_call(self, call: &str, dir: &Path) -> Self {
        let program = dir.join(format!("hangs-at-{call}"));
        std::os::unix::fs::symlink(&self.program, &program).unwrap();
        Self { program, ..self }
    }

    /// Returns the real program, if the environment names one.
    pub(crate) fn real(variable: &str) -> Option<Self> {
        let program = PathBuf::from(std::env::var_os(variable)?);
        let boot = tools::guest_kernel().expect("a guest kernel: cargo xtask setup makes it");
        Some(Self { program, kernel: boot.kernel, initrd: boot.initrd })
    }

    /// Returns the config of a VM that has the rights of the daemon.
    pub(crate) fn vmm_config(&self, name: &str, dir: &Path) -> VmmConfig {
        // The umask of daemons: the files of a jail must be readable nevertheless.
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        VmmConfig {
            id: VmId::of_name(&name.parse().unwrap()).into(),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            disks: vec![],
            slots: Default::default(),
            machine_type: Default::default(),
            nic: None,
            display: None,
            state_dir: dir.to_owned(),
            run_dir: dir.to_owned(),
            accelerator: Accelerator::Kvm,
            driver: String::new(),
            uid: None,
        }
    }
}

/// Returns the same VM in a jail.
pub(crate) fn jailed(vmm_config: VmmConfig) -> VmmConfig {
    assert!(Jail::is_possible(), "this test runs as root of the host");
    VmmConfig { uid: Some(Jail::uid_of(&vmm_config.id)), ..vmm_config }
}

/// Checks that a missing kernel ends the process, with `words` in the reason, and that a network without a tap starts none.
pub(crate) async fn check_refusals<D: Driver>(driver: &D, mut vmm_config: VmmConfig, words: [&str; 2]) {
    vmm_config.kernel = vmm_config.run_dir.join("absent");
    match driver.start(&vmm_config).await {
        Err(error @ DriverError::Control { .. }) => {
            let why = std::error::Error::source(&error).unwrap().to_string();
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        }
        other => panic!("it should have been refused: {other:?}"),
    }
    assert_eq!(driver.find(&vmm_config).await.unwrap(), None, "nothing is left");
    let backend = NicBackend::User { forwards: vec![], isolated: true };
    vmm_config.nic = Some(Nic { mac: MacAddr::of(&vmm_config.id), backend });
    match driver.start(&vmm_config).await {
        Err(DriverError::Unavailable { reason, .. }) => assert!(reason.contains("qemu driver"), "{reason}"),
        other => panic!("it should have been refused: {other:?}"),
    }
}
