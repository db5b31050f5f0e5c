//! What every driver must do, run against the fake and the real ones alike.

use std::fs::File;
use std::io::{Seek, Write};
use std::time::Duration;

use coracle_types::VmId;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::{Disk, Driver, MemoryFile, Saved, Template, VmRecipe};

/// How long a cold boot may take here before the suite gives up.
const BOOT_LIMIT: Duration = Duration::from_secs(60);

/// Runs the whole suite with a driver made afresh by `driver` each time it is
/// called, as after a restart of the daemon. Panics at the first difference.
///
/// # Panics
/// When the driver does not do what [`Driver`] says.
#[expect(clippy::panic, clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check<D: Driver>(driver: impl Fn() -> D, recipe: &VmRecipe) {
    let first = driver();
    assert!(first.probe().await.accelerator.is_some(), "{} is available", first.name());
    assert_eq!(first.find(recipe).await.expect("find before start"), None, "nothing runs before start");
    assert!(first.guest_channel(recipe).await.is_err(), "no channel without a VMM");

    let process = first.start(recipe).await.expect("start");
    assert_eq!(
        first.find(recipe).await.expect("find after start"),
        Some(process),
        "find sees what start made"
    );
    expect_hello(&first, recipe).await;
    drop(first);

    let second = driver();
    assert_eq!(second.find(recipe).await.expect("find"), Some(process), "a VMM outlives its driver");
    expect_hello(&second, recipe).await;
    let exited = timeout(Duration::from_millis(200), second.exited(process)).await;
    assert!(exited.is_err(), "exited waits while the VMM lives");

    second.kill(process).await.expect("kill");
    second.exited(process).await.expect("exited after kill");
    second.kill(process).await.expect("kill again");
    assert_eq!(second.find(recipe).await.expect("find after kill"), None, "nothing is left after kill");

    let again = second.start(recipe).await.expect("start again with the same disks");
    assert_ne!(again, process, "a new process");
    expect_hello(&second, recipe).await;
    second.kill(again).await.expect("kill the second");
    match timeout(Duration::from_secs(5), second.exited(again)).await {
        Ok(done) => done.expect("exited"),
        Err(_) => panic!("exited resolves after kill"),
    }
}

/// What every driver with [`crate::Templates`] must do: a clone says hello without a boot, twice from one template,
/// and its VMM is found like any other.
///
/// # Panics
/// When the driver does not do what [`crate::Templates`] says.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check_templates<D: Driver>(driver: &D, recipe: &VmRecipe) {
    let templates = driver.templates(recipe).expect("templates");
    let same = templates.fingerprint(recipe).await;
    let mut other = recipe.clone();
    other.run_dir = recipe.run_dir.join("elsewhere");
    assert_eq!(templates.fingerprint(&other).await, same, "folders are no part of a shape");
    other.memory = (u64::from(recipe.memory) + 64).try_into().expect("more memory");
    assert_ne!(templates.fingerprint(&other).await, same, "memory is part of a shape");

    let ram = MemoryFile::new("ram", u64::from(recipe.memory.get()) << 20).expect("memory");
    let state = MemoryFile::new("state", 0).expect("memory");
    let process = templates.boot_template(recipe, &ram).await.expect("boot the template");
    expect_hello(driver, recipe).await;
    templates.save_template(recipe, process, &ram, &state).await.expect("save the template");
    assert_eq!(driver.find(recipe).await.expect("find"), None, "a saved template has no VMM");
    let (ram, state) = (ram.seal().expect("seal"), state.seal().expect("seal"));
    let template = Template { ram, state, disk: None };
    for _ in 0..2 {
        let clone = templates.start_clone(recipe, &template).await.expect("start a clone");
        assert_eq!(driver.find(recipe).await.expect("find"), Some(clone.process), "find sees a clone");
        hello_at_once(driver, recipe, clone.channel).await;
        driver.kill(clone.process).await.expect("kill");
    }
    if templates.hands_over() {
        check_standby(driver, recipe, &template).await;
    }
    assert_eq!(driver.find(recipe).await.expect("find"), None, "nothing is left");
}

/// A clone of nobody's becomes a VM's, with its sockets and disks, and is found as such.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn check_standby<D: Driver>(driver: &D, recipe: &VmRecipe, template: &Template) {
    let templates = driver.templates(recipe).expect("templates");
    let dir = tempfile::tempdir().expect("a folder");
    let mut standby = recipe.clone();
    standby.id = VmId::of_name(&"standby".parse().expect("a name"));
    (standby.run_dir, standby.state_dir) = (dir.path().join("run"), dir.path().join("state"));
    for folder in [&standby.run_dir, &standby.state_dir] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    standby.disks.clear();
    let clone = templates.start_clone(&standby, template).await.expect("start a clone of nobody's");
    hello_at_once(driver, &standby, clone.channel).await;
    tokio::time::sleep(Duration::from_millis(50)).await; // guest-visible gap between two sessions
    assert_eq!(driver.find(recipe).await.expect("find"), None, "it is not the VM's yet");
    templates.claim(&standby, recipe).await.expect("claim it");
    assert_eq!(driver.find(recipe).await.expect("find"), Some(clone.process), "a claimed clone is the VM's");
    templates.hand_over(&standby, recipe).await.expect("hand it over");
    expect_hello_again(driver, recipe).await;
    for _ in 0..2 {
        driver.pause(recipe).await.expect("pause it");
        driver.resume(recipe).await.expect("resume it");
    }
    driver.kill(clone.process).await.expect("kill");
    let process = driver.start(recipe).await.expect("start the VM anew");
    drop(dir);
    assert_eq!(driver.find(recipe).await.expect("find"), Some(process), "and find that");
    driver.kill(process).await.expect("kill");
}

/// What every driver must do about pausing, and with [`crate::Snapshots`]: a guest whose CPUs are held says nothing, a
/// saved one goes on where it was, twice from one file, and twice from one memory where the driver shares it.
///
/// # Panics
/// When the driver does not do what [`Driver`] and [`crate::Snapshots`] say.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check_snapshots<D: Driver>(driver: &D, recipe: &VmRecipe) {
    assert!(driver.pause(recipe).await.is_err(), "no pause without a VMM");
    let process = driver.start(recipe).await.expect("start");
    expect_hello(driver, recipe).await;
    for _ in 0..2 {
        driver.pause(recipe).await.expect("pause, also twice");
    }
    let snapshots = driver.snapshots(recipe).expect("snapshots");
    let machine = snapshots.compatibility(recipe).await;
    let mut fuller = recipe.clone();
    fuller.disks.push(Disk::raw(0, "/elsewhere", true));
    let difference = snapshots.compatibility(&fuller).await;
    assert_eq!(machine.difference(&difference), None, "what is in the slots is a VM's own");
    let mut file = memory();
    snapshots.save(recipe, &file).await.expect("save");
    assert!(file.stream_position().expect("position") > 0, "something was written");
    // Where the guest itself takes the connection, it cannot be had either.
    let said = timeout(Duration::from_millis(200), async {
        let mut silent = driver.guest_channel(recipe).await.expect("open the channel of a paused VM");
        silent.read_u8().await
    });
    assert!(said.await.is_err(), "a paused guest says nothing");
    for _ in 0..2 {
        driver.resume(recipe).await.expect("resume, also twice");
    }
    expect_hello_again(driver, recipe).await;
    driver.kill(process).await.expect("kill");
    for _ in 0..2 {
        file.rewind().expect("rewind");
        goes_on(driver, recipe, Saved::File(&file)).await;
    }
    file.rewind().expect("rewind");
    let unfolded = snapshots.unfold(recipe, &file).await.expect("unfold");
    assert_eq!(driver.find(recipe).await.expect("find"), None, "nothing runs after it");
    if let Some(template) = &unfolded {
        goes_on(driver, recipe, Saved::Unfolded(template)).await;
        goes_on(driver, recipe, Saved::Unfolded(template)).await;
    }
    assert_eq!(machine.difference(&snapshots.compatibility(recipe).await), None, "the same machine");
    let mut torn = memory();
    torn.write_all(b"no state of any machine").expect("write");
    torn.rewind().expect("rewind");
    let refused = snapshots.restore(recipe, Saved::File(&torn)).await;
    assert!(refused.is_err(), "what is no state is refused");
    torn.rewind().expect("rewind");
    assert!(!matches!(snapshots.unfold(recipe, &torn).await, Ok(Some(_))), "nor is it shared");
    assert_eq!(driver.find(recipe).await.expect("find"), None, "nothing is left");
}

/// A machine is restored, found, stands still, and says hello when it is resumed; then it is gone.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn goes_on<D: Driver>(driver: &D, recipe: &VmRecipe, saved: Saved<'_>) {
    let snapshots = driver.snapshots(recipe).expect("snapshots");
    let mut restored = snapshots.restore(recipe, saved).await.expect("restore");
    assert_eq!(driver.find(recipe).await.expect("find"), Some(restored.process), "find sees it");
    if let Some(channel) = &mut restored.channel {
        let said = timeout(Duration::from_millis(200), channel.read_u8()).await;
        assert!(said.is_err(), "it stands still until it is resumed");
    }
    driver.resume(recipe).await.expect("resume");
    hello_at_once(driver, recipe, restored.channel).await;
    driver.kill(restored.process).await.expect("kill");
}

/// What every driver must do about disks of a running machine: they come and go through slots of both kinds, and the
/// guest goes on.
///
/// # Panics
/// When the driver does not do what [`Driver::insert_disk`] and [`Driver::eject_disk`] say.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
pub async fn check_disks<D: Driver>(driver: &D, recipe: &VmRecipe) {
    let dir = tempfile::tempdir().expect("a folder");
    let writable = usize::from(recipe.slots.read_only);
    let disk = |slot, name: &str| Disk::raw(slot, dir.path().join(name), slot < writable);
    let disks = [disk(0, "image"), disk(writable, "data")];
    for disk in &disks {
        File::create(&disk.path).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    }
    assert!(driver.insert_disk(recipe, &disks[0]).await.is_err(), "no disk without a VMM");
    let process = driver.start(recipe).await.expect("start");
    expect_hello(driver, recipe).await;
    let absent = disk(writable, "absent");
    assert!(driver.insert_disk(recipe, &absent).await.is_err(), "no disk without a file");
    driver.kill(process).await.expect("kill");
    let process = driver.start(recipe).await.expect("start again");
    expect_hello(driver, recipe).await;
    for _ in 0..2 {
        for disk in &disks {
            driver.insert_disk(recipe, disk).await.expect("insert a disk");
        }
        for disk in &disks {
            driver.eject_disk(recipe, disk.slot).await.expect("eject a disk");
        }
    }
    expect_hello_again(driver, recipe).await;
    driver.kill(process).await.expect("kill");
}

/// The agent of a guest that was not booted says hello on the channel that came with it, or on a new one.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn hello_at_once<D: Driver>(driver: &D, recipe: &VmRecipe, channel: Option<UnixStream>) {
    let hello = async {
        let mut channel = match channel {
            Some(channel) => channel,
            None => driver.guest_channel(recipe).await.expect("open the guest channel"),
        };
        let mut hello = [0; 16];
        channel.read_exact(&mut hello).await.map(|_| hello)
    };
    let hello = timeout(Duration::from_secs(10), hello).await.expect("it goes on at once").expect("hello");
    assert_eq!(&hello[..8], b"CORACLE1", "the agent's hello");
}

/// An empty file in memory.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
fn memory() -> File {
    rustix::fs::memfd_create("state", rustix::fs::MemfdFlags::CLOEXEC).expect("memory").into()
}

/// As [`expect_hello`], of a guest that may not have seen the last session end: a second try cures that.
#[expect(clippy::panic, reason = "a test suite reports by panicking")]
async fn expect_hello_again<D: Driver>(driver: &D, recipe: &VmRecipe) {
    for _ in 0..10 {
        if let Ok(mut stream) = driver.guest_channel(recipe).await {
            let mut hello = [0; 16];
            if let Ok(Ok(_)) = timeout(Duration::from_secs(1), stream.read_exact(&mut hello)).await {
                assert_eq!(&hello[..8], b"CORACLE1", "the agent's hello");
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("no hello after a pause");
}

/// The agent speaks first, within the boot limit, also to a second connection.
#[expect(clippy::expect_used, reason = "a test suite reports by panicking")]
async fn expect_hello<D: Driver>(driver: &D, recipe: &VmRecipe) {
    let mut stream = driver.guest_channel(recipe).await.expect("open the guest channel");
    let mut hello = [0; 16];
    timeout(BOOT_LIMIT, stream.read_exact(&mut hello)).await.expect("hello in time").expect("hello");
    assert_eq!(&hello[..8], b"CORACLE1", "the agent's hello");
    drop(stream);
    tokio::time::sleep(Duration::from_millis(50)).await; // guest-visible gap between two sessions
}
