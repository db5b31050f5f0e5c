//! Conformance suite of drivers, on real QEMU with the project's guest.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use coracle_hypervisor::{Accelerator, Driver as _, Firmware, Jail, MachineType, VmmConfig, remove_cgroup};
use coracle_hypervisor_testing::{check_jail, check_view, conformance, example, sample_vmm_config};
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_testkit::tools;
use coracle_types::VmId;

fn vmm_config(dir: &std::path::Path, boot: &tools::GuestKernel) -> VmmConfig {
    // The umask of daemons: the files of a jail must be readable nevertheless.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let purpose = dir.file_name().unwrap().to_string_lossy().to_lowercase();
    let id = VmId::of_name(&format!("t{}", purpose.trim_matches(['.', '_'])).parse().unwrap()).into();
    VmmConfig {
        uid: Jail::is_possible().then(|| Jail::uid_of(&id)),
        id,
        vcpus: 1.try_into().unwrap(),
        memory: 128.try_into().unwrap(),
        kernel: boot.kernel.clone(),
        initrd: boot.initrd.clone(),
        disks: vec![],
        slots: Default::default(),
        machine_type: Default::default(),
        nic: None,
        display: None,
        state_dir: dir.to_owned(),
        run_dir: dir.to_owned(),
        accelerator: Accelerator::Tcg,
        driver: String::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_conforms() {
    let Some([program]) = tools::require(["qemu-system-x86_64"]) else { return };
    let Some(boot) = tools::guest_kernel() else {
        tools::skip("no guest kernel; `cargo xtask setup` makes it");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let driver = || QemuDriver::new(QemuConfig { program: program.clone(), kvm: None });
    conformance::check(driver, &vmm_config(dir.path(), &boot)).await;
    conformance::check_templates(&driver(), &vmm_config(dir.path(), &boot)).await;
    conformance::check_snapshots(&driver(), &vmm_config(dir.path(), &boot)).await;
    conformance::check_disks(&driver(), &vmm_config(dir.path(), &boot)).await;
    remove_cgroup(&vmm_config(dir.path(), &boot).id, None).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_runs_in_a_jail() {
    let Some([program]) = tools::require(["qemu-system-x86_64"]) else { return };
    let Some(boot) = tools::guest_kernel() else {
        tools::skip("no guest kernel; `cargo xtask setup` makes it");
        return;
    };
    if !Jail::is_possible() {
        tools::skip("only root makes jails");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    check_jail(&QemuDriver::new(QemuConfig { program, kvm: None }), &vmm_config(dir.path(), &boot)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn q35_conforms() {
    let Some([program]) = tools::require(["qemu-system-x86_64"]) else { return };
    let Some(boot) = tools::guest_kernel() else {
        tools::skip("no guest kernel; `cargo xtask setup` makes it");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let driver = || QemuDriver::new(QemuConfig { program: program.clone(), kvm: None });
    let pc = VmmConfig { machine_type: MachineType::Q35(Firmware::Kernel), ..vmm_config(dir.path(), &boot) };
    conformance::check(driver, &pc).await;
    conformance::check_snapshots(&driver(), &pc).await;
    conformance::check_disks(&driver(), &pc).await;
    remove_cgroup(&pc.id, None).unwrap();
    assert!(driver().templates(&pc).is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_kernel_ends_the_vmm_with_a_reason() {
    use coracle_hypervisor::DriverError;
    let Some([program]) = tools::require(["qemu-system-x86_64"]) else { return };
    let Some(boot) = tools::guest_kernel() else {
        tools::skip("no guest kernel; `cargo xtask setup` makes it");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let mut vmm_config = vmm_config(dir.path(), &boot);
    vmm_config.kernel = dir.path().join("absent");
    // In a jail the VMM would fail earlier.
    vmm_config.uid = None;
    let driver = QemuDriver::new(QemuConfig { program, kvm: None });
    match driver.start(&vmm_config).await {
        Err(DriverError::Exited { last_words, .. }) => assert!(last_words.contains("absent"), "{last_words}"),
        other => panic!("the VMM should have exited: {other:?}"),
    }
    assert_eq!(driver.find(&vmm_config).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn jailed_vmm_sees_the_files_of_its_vm_alone() {
    let program = example("view-of-qemu");
    let dir = tempfile::tempdir().unwrap();
    let [kernel, initrd] = ["kernel", "initrd"].map(|name| dir.path().join(name));
    for file in [&kernel, &initrd] {
        std::fs::write(file, "").unwrap();
    }
    let shape = VmmConfig { kernel: kernel.clone(), initrd: initrd.clone(), ..sample_vmm_config("shape") };
    let driver = QemuDriver::new(QemuConfig { program: program.clone(), kvm: None });
    let files = [kernel.to_str().unwrap(), initrd.to_str().unwrap()];
    check_view(&driver, &shape, &program, &files).await;
}
