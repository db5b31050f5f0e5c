//! Complete life of a VM, after which nothing of it is left: acceptance A13, on a host of its own.

use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Host, HostConfig, RestoreSpec, VmSpec};
use coracle_hypervisor::{Driver, Drivers};
use coracle_image::{Source, Store, StoreOptions};
use coracle_net::BridgeNetwork;
use coracle_oci::NoProgress;
use coracle_testkit::leaks::{Inventory, open_files};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{netns, tools};
use coracle_types::{Clock, VmState};

use super::Machine;

pub(super) const IMAGE: &str = "localhost/test/sleeper:1";

/// Runs create → boot → pause → resume → snapshot → kill → restore → graceful stop → delete, twice: the node creates its own
/// files the first time.
pub(crate) fn check_whole_life(machine: &Machine, driver: impl Fn() -> Arc<dyn Driver> + Send + Sync) {
    if tools::require(["mke2fs", "nft", "busybox"]).is_none() {
        return;
    }
    netns::run_within(Duration::from_secs(300), || async {
        let dir = tempfile::tempdir().unwrap();
        let host = open(machine, driver(), dir.path()).await;
        run_life(&host).await;
        let (before, open) = (Inventory::take(dir.path()), open_files());
        run_life(&host).await;
        assert_eq!(before.leaked(&Inventory::take(dir.path())), "");
        assert_eq!(open_files(), open, "files, sockets and process handles of the daemon");
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

pub(super) async fn open(machine: &Machine, driver: Arc<dyn Driver>, dir: &std::path::Path) -> Host {
    let state = dir.join("state");
    std::fs::create_dir_all(&state).unwrap();
    let mut config = HostConfig::new(state.clone(), machine.kernel.clone(), machine.initrd.clone());
    config.run_dir = dir.join("run");
    config.disk_mib = 64;
    config.templates.enabled = false;
    let images = Store::open(state.join("images"), StoreOptions::default()).unwrap();
    let layout = tempfile::tempdir_in(dir).unwrap();
    let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
    let layer = LayerTar::new().dir("bin", 0o755).file("bin/sleep", 0o755, &busybox).finish();
    let cmd = ["/bin/sleep", "1000000"].map(str::to_owned).to_vec();
    write_layout(layout.path(), &[layer], &ImageSpec { cmd, ..ImageSpec::default() }, "1").unwrap();
    let source: Source = format!("oci:{}:1", layout.path().display()).parse().unwrap();
    images.import(&source, Some(&IMAGE.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    let network = Arc::new(BridgeNetwork::open(&state, None).await.unwrap());
    let driver = Drivers::new(driver, vec![]);
    Host::open(config, driver, network, Arc::new(images), Clock::system()).await.unwrap()
}

async fn run_life(host: &Host) {
    let spec = VmSpec::of("web".parse().unwrap(), IMAGE);
    host.create(spec, Arc::new(NoProgress)).await.unwrap();
    let web = host.start("web", None).await.unwrap();
    assert_eq!(web.state, VmState::Running);
    assert_eq!(host.pause("web", None).await.unwrap().state, VmState::Paused);
    assert_eq!(host.resume("web", None).await.unwrap().state, VmState::Running);
    host.save_snapshot("web", Some("life".parse().unwrap())).await.unwrap();

    let vmm = rustix::process::Pid::from_raw(web.process.unwrap().pid.cast_signed()).unwrap();
    rustix::process::kill_process(vmm, rustix::process::Signal::KILL).unwrap();
    let mut view = host.observe("web").unwrap();
    let failed = view.wait_for(|view| view.record.state == VmState::Failed);
    tokio::time::timeout(Duration::from_secs(20), failed).await.expect("its end is noticed").unwrap();
    drop(view);
    host.delete("web", false, None).await.unwrap();

    let again = host.restore("life", RestoreSpec::default()).await.unwrap();
    assert_eq!((again.name.as_str(), again.address, again.state), ("web", web.address, VmState::Running));
    let off = host.stop("web", Duration::from_secs(10), None).await.unwrap();
    assert_eq!((off.state, off.process, off.message.as_str()), (VmState::Stopped, None, ""));
    host.delete("web", false, None).await.unwrap();
    host.delete_snapshot("life").await.unwrap();
}
