//! What every driver must do, run against the fake and the real ones alike.

use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use crate::{Driver, VmRecipe};

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
