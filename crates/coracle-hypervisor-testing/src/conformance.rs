//! Conformance suite of drivers, for the fake and the real ones alike.

use std::fs::File;
use std::io::{Seek, Write};
use std::time::Duration;

use coracle_hypervisor::{Disk, Driver, MemoryFile, Saved, Template, VmmConfig, remove_cgroup};
use coracle_types::InstanceId;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Prefix of the agent's hello, followed by its session, 8 bytes.
const HELLO: &[u8; 8] = b"CORACLE1";
/// Time limit of a cold boot, generous enough for an emulated CPU on the slowest host.
const BOOT_LIMIT: Duration = Duration::from_secs(180);

/// Runs the whole suite. Each call of `driver` creates a new driver, as after a restart of the daemon. Panics at the first
/// failure.
///
/// # Panics
/// When the driver does not do what [`Driver`] says.
#[expect(clippy::panic, clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check<D: Driver>(driver: impl Fn() -> D, vmm_config: &VmmConfig) {
    let first = driver();
    assert!(first.probe().await.accelerator.is_some(), "{} is available", first.name());
    assert_eq!(first.find(vmm_config).await.expect("find before start"), None, "nothing runs before start");
    assert!(first.guest_channel(vmm_config).await.is_err(), "no channel without a VMM");

    let process = first.start(vmm_config).await.expect("start");
    assert_eq!(
        first.find(vmm_config).await.expect("find after start"),
        Some(process),
        "find sees what start made"
    );
    expect_hello(&first, vmm_config).await;
    check_console(&first, vmm_config).await;
    drop(first);

    let second = driver();
    assert_eq!(second.find(vmm_config).await.expect("find"), Some(process), "a VMM outlives its driver");
    expect_hello(&second, vmm_config).await;
    let exited = timeout(Duration::from_millis(200), second.exited(process)).await;
    assert!(exited.is_err(), "exited waits while the VMM lives");

    second.kill(process).await.expect("kill");
    second.exited(process).await.expect("exited after kill");
    second.kill(process).await.expect("kill again");
    assert_eq!(second.find(vmm_config).await.expect("find after kill"), None, "nothing is left after kill");

    let again = second.start(vmm_config).await.expect("start again with the same disks");
    assert_ne!(again, process, "a new process");
    expect_hello(&second, vmm_config).await;
    second.kill(again).await.expect("kill the second");
    match timeout(Duration::from_secs(5), second.exited(again)).await {
        Ok(done) => done.expect("exited"),
        Err(_) => panic!("exited resolves after kill"),
    }
}

/// Checks a driver with [`coracle_hypervisor::Templates`]: a clone says hello without a boot, twice from one template, and its
/// VMM is found like any other.
///
/// # Panics
/// When the driver does not do what [`coracle_hypervisor::Templates`] says.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check_templates<D: Driver>(driver: &D, vmm_config: &VmmConfig) {
    let templates = driver.templates(vmm_config).expect("templates");
    let same = templates.fingerprint(vmm_config).await;
    let mut other = vmm_config.clone();
    other.run_dir = vmm_config.run_dir.join("elsewhere");
    assert_eq!(templates.fingerprint(&other).await, same, "directories do not belong to the shape");
    other.memory = (u64::from(vmm_config.memory) + 64).try_into().expect("more memory");
    assert_ne!(templates.fingerprint(&other).await, same, "memory is part of a shape");

    let ram = MemoryFile::new("ram", u64::from(vmm_config.memory.get()) << 20).expect("memory");
    let state = MemoryFile::new("state", 0).expect("memory");
    let process = templates.boot_template(vmm_config, &ram).await.expect("boot the template");
    expect_hello(driver, vmm_config).await;
    templates.save_template(vmm_config, process, &ram, &state).await.expect("save the template");
    assert_eq!(driver.find(vmm_config).await.expect("find"), None, "a saved template has no VMM");
    let (ram, state) = (ram.seal().expect("seal"), state.seal().expect("seal"));
    let template = Template { ram, state, disk: None };
    for _ in 0..2 {
        let clone = templates.start_clone(vmm_config, &template).await.expect("start a clone");
        assert_eq!(driver.find(vmm_config).await.expect("find"), Some(clone.process), "find sees a clone");
        check_hello(driver, vmm_config, clone.channel).await;
        driver.kill(clone.process).await.expect("kill");
    }
    if templates.can_assign() {
        check_warm_pool(driver, vmm_config, &template).await;
    }
    assert_eq!(driver.find(vmm_config).await.expect("find"), None, "nothing is left");
}

/// Checks that an unassigned clone gets the disks of a VM, and keeps its sockets and directories.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn check_warm_pool<D: Driver>(driver: &D, vmm_config: &VmmConfig, template: &Template) {
    let templates = driver.templates(vmm_config).expect("templates");
    let dir = tempfile::tempdir().expect("a directory");
    let mut pooled = vmm_config.clone();
    pooled.id = InstanceId::new("pooled", 1);
    (pooled.run_dir, pooled.state_dir) = (dir.path().join("run"), dir.path().join("state"));
    for folder in [&pooled.run_dir, &pooled.state_dir] {
        std::fs::create_dir_all(folder).expect("a directory");
    }
    pooled.disks.clear();
    let clone = templates.start_clone(&pooled, template).await.expect("start an unassigned clone");
    check_hello(driver, &pooled, clone.channel).await;
    tokio::time::sleep(Duration::from_millis(50)).await; // guest-visible gap between two sessions
    let assigned = VmmConfig { disks: vmm_config.disks.clone(), ..pooled };
    driver.pause(&assigned).await.expect("pause it");
    templates.fill(&assigned, true).await.expect("fill its slots");
    expect_hello_again(driver, &assigned).await;
    for _ in 0..2 {
        driver.pause(&assigned).await.expect("pause it");
        driver.resume(&assigned).await.expect("resume it");
    }
    driver.kill(clone.process).await.expect("kill");
    assert_eq!(driver.find(&assigned).await.expect("find"), None, "it is gone");
    remove_cgroup(&assigned.id, None).expect("remove its cgroup");
    drop(dir);
}

/// Checks pausing, and a driver with [`coracle_hypervisor::Snapshots`]: a paused guest is silent; a saved guest continues from
/// its state, twice from one file, and twice from one memory if the driver shares it.
///
/// # Panics
/// When the driver does not do what [`Driver`] and [`coracle_hypervisor::Snapshots`] say.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check_snapshots<D: Driver>(driver: &D, vmm_config: &VmmConfig) {
    assert!(driver.pause(vmm_config).await.is_err(), "no pause without a VMM");
    let process = driver.start(vmm_config).await.expect("start");
    expect_hello(driver, vmm_config).await;
    for _ in 0..2 {
        driver.pause(vmm_config).await.expect("pause, also twice");
    }
    let snapshots = driver.snapshots(vmm_config).expect("snapshots");
    let machine = snapshots.compatibility(vmm_config).await;
    let mut fuller = vmm_config.clone();
    fuller.disks.push(Disk::raw(0, "/elsewhere", true));
    let difference = snapshots.compatibility(&fuller).await;
    assert_eq!(machine.difference(&difference), None, "what is in the slots is a VM's own");
    let mut file = memory();
    snapshots.save(vmm_config, &file).await.expect("save");
    assert!(file.stream_position().expect("position") > 0, "something was written");
    // If the guest itself accepts the connection, opening the channel times out as well.
    let said = timeout(Duration::from_millis(200), async {
        let mut silent = driver.guest_channel(vmm_config).await.expect("open the channel of a paused VM");
        silent.read_u8().await
    });
    assert!(said.await.is_err(), "a paused guest says nothing");
    for _ in 0..2 {
        driver.resume(vmm_config).await.expect("resume, also twice");
    }
    expect_hello_again(driver, vmm_config).await;
    driver.kill(process).await.expect("kill");
    for _ in 0..2 {
        file.rewind().expect("rewind");
        check_restored_guest(driver, vmm_config, Saved::File(&file)).await;
    }
    file.rewind().expect("rewind");
    let memory_images = snapshots.materialize(vmm_config, &file).await.expect("materialize");
    assert_eq!(driver.find(vmm_config).await.expect("find"), None, "nothing runs after it");
    if let Some(template) = &memory_images {
        check_restored_guest(driver, vmm_config, Saved::MemoryImages(template)).await;
        check_restored_guest(driver, vmm_config, Saved::MemoryImages(template)).await;
    }
    assert_eq!(machine.difference(&snapshots.compatibility(vmm_config).await), None, "the same machine");
    let mut torn = memory();
    torn.write_all(b"no state of any machine").expect("write");
    torn.rewind().expect("rewind");
    let refused = snapshots.restore(vmm_config, Saved::File(&torn)).await;
    assert!(refused.is_err(), "a file without a state is refused");
    torn.rewind().expect("rewind");
    assert!(!matches!(snapshots.materialize(vmm_config, &torn).await, Ok(Some(_))), "nor is it shared");
    assert_eq!(driver.find(vmm_config).await.expect("find"), None, "nothing is left");
}

/// Checks that a VMM is restored and found, that its guest is paused and says hello when it is resumed; then ends the VMM.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn check_restored_guest<D: Driver>(driver: &D, vmm_config: &VmmConfig, saved: Saved<'_>) {
    let snapshots = driver.snapshots(vmm_config).expect("snapshots");
    let mut restored = snapshots.restore(vmm_config, saved).await.expect("restore");
    assert_eq!(driver.find(vmm_config).await.expect("find"), Some(restored.process), "find sees it");
    if let Some(channel) = &mut restored.channel {
        let said = timeout(Duration::from_millis(200), channel.read_u8()).await;
        assert!(said.is_err(), "it is paused until it is resumed");
    }
    driver.resume(vmm_config).await.expect("resume");
    check_hello(driver, vmm_config, restored.channel).await;
    driver.kill(restored.process).await.expect("kill");
}

/// Checks disks of a running VM: they are attached and detached in slots of both kinds while the guest runs.
///
/// # Panics
/// When the driver does not do what [`Driver::attach_disk`] and [`Driver::detach_disk`] say.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check_disks<D: Driver>(driver: &D, vmm_config: &VmmConfig) {
    let dir = tempfile::tempdir().expect("a directory");
    let writable = usize::from(vmm_config.slots.read_only);
    let disk = |slot, name: &str| Disk::raw(slot, dir.path().join(name), slot < writable);
    let image = Disk::image(1, dir.path().join("image"));
    let disks = [disk(0, "read-only"), image, disk(writable, "data")];
    for disk in &disks {
        File::create(&disk.path).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    }
    assert!(driver.attach_disk(vmm_config, &disks[0]).await.is_err(), "no disk without a VMM");
    let process = driver.start(vmm_config).await.expect("start");
    expect_hello(driver, vmm_config).await;
    let absent = disk(writable, "absent");
    assert!(driver.attach_disk(vmm_config, &absent).await.is_err(), "no disk without a file");
    driver.kill(process).await.expect("kill");
    let process = driver.start(vmm_config).await.expect("start again");
    expect_hello(driver, vmm_config).await;
    for _ in 0..2 {
        for disk in &disks {
            driver.attach_disk(vmm_config, disk).await.expect("insert a disk");
        }
        for disk in &disks {
            driver.detach_disk(vmm_config, disk.slot).await.expect("eject a disk");
        }
    }
    expect_hello_again(driver, vmm_config).await;
    driver.kill(process).await.expect("kill");
}

/// Checks that a client of the console stays connected while the guest is silent.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn check_console<D: Driver>(driver: &D, vmm_config: &VmmConfig) {
    let mut console = driver.console(vmm_config).await.expect("the console");
    let to_its_end = async {
        let mut said = [0; 256];
        while console.read(&mut said).await.is_ok_and(|length| length > 0) {}
    };
    assert!(
        timeout(Duration::from_millis(500), to_its_end).await.is_err(),
        "the console of a live VMM ended"
    );
}

/// Checks that the agent of a restored guest says hello on the channel that was returned with it, or on a new one.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn check_hello<D: Driver>(driver: &D, vmm_config: &VmmConfig, channel: Option<UnixStream>) {
    let hello = async {
        let mut channel = match channel {
            Some(channel) => channel,
            None => driver.guest_channel(vmm_config).await.expect("open the guest channel"),
        };
        read_hello(&mut channel).await
    };
    let said = timeout(Duration::from_secs(10), hello).await.expect("it runs at once");
    let alive = driver.find(vmm_config).await;
    let log = std::fs::read_to_string(vmm_config.state_dir.join("vmm.log")).unwrap_or_default();
    assert!(said.is_ok(), "hello: {said:?}; the VMM: {alive:?}; its log: {log}");
}

/// Returns an empty file in memory.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
fn memory() -> File {
    rustix::fs::memfd_create("state", rustix::fs::MemfdFlags::CLOEXEC).expect("memory").into()
}

/// Like [`expect_hello`], with repeated attempts, because the guest may not have seen the last session end.
#[expect(clippy::panic, reason = "a test suite reports by panicking")]
async fn expect_hello_again<D: Driver>(driver: &D, vmm_config: &VmmConfig) {
    for _ in 0..10 {
        if let Ok(mut stream) = driver.guest_channel(vmm_config).await
            && let Ok(Ok(())) = timeout(Duration::from_secs(1), read_hello(&mut stream)).await
        {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("no hello after a pause");
}

/// Checks that the agent speaks first, within the boot limit, also on a second connection.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn expect_hello<D: Driver>(driver: &D, vmm_config: &VmmConfig) {
    let mut stream = driver.guest_channel(vmm_config).await.expect("open the guest channel");
    timeout(BOOT_LIMIT, read_hello(&mut stream)).await.expect("hello in time").expect("hello");
    drop(stream);
    tokio::time::sleep(Duration::from_millis(50)).await; // guest-visible gap between two sessions
}

/// Reads up to the end of the agent's hello. Output of the guest for the last session may precede it.
async fn read_hello(channel: &mut UnixStream) -> std::io::Result<()> {
    let mut last = [0; HELLO.len()];
    while last != *HELLO {
        last.rotate_left(1);
        last[HELLO.len() - 1] = channel.read_u8().await?;
    }
    channel.read_u64().await.map(drop)
}
