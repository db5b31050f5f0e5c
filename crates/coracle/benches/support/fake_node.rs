//! A node on VMMs in memory, which a benchmark serves in a process of its own.

use std::path::Path;
use std::sync::Arc;

use coracle_host::{Host, HostConfig};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::NoProgress;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_types::Clock;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The one image of its pods, whose process serves until it is ended.
pub(crate) const IMAGE: &str = "localhost/bench/pod:1";

/// Writes what [`open`] needs below `dir`; another process opens it.
pub(crate) async fn prepare(dir: &Path) {
    std::fs::create_dir_all(dir.join("state")).expect("a directory");
    let layer = LayerTar::new().file("bin/true", 0o755, b"true").finish();
    let spec = ImageSpec { cmd: vec!["serve".into()], ..ImageSpec::default() };
    write_layout(&dir.join("layout"), &[layer], &spec, "1").expect("write the image");
    let source: Source = format!("oci:{}:1", dir.join("layout").display()).parse().expect("a source");
    let name = IMAGE.parse().expect("a name");
    store(dir).import(&source, Some(&name), Arc::new(NoProgress)).await.expect("import");
}

/// The host core of the node: no templates, no warm pool, addresses of `subnet`, which no other node of a cluster has.
pub(crate) async fn open(dir: &Path, subnet: &str) -> Host {
    raise_file_limit();
    let mut config = HostConfig::new(dir.join("state"), "/nowhere".into(), "/nowhere".into());
    config.run_dir = dir.join("run");
    config.disk_mib = 16;
    config.memory_overcommit = 1000.0;
    config.templates.enabled = false;
    config.warm_pool.shapes_max = 0;
    let driver = Arc::new(FakeDriver::new(FakeMachines::new()));
    let network = Arc::new(AddressOnly::new(subnet.parse().expect("a subnet")));
    Host::open(config, driver, network, Arc::new(store(dir)), Clock::system()).await.expect("a host")
}

/// As many open files as we may have: both ends of what is between a node and its fake guests are in this process, seven files for
/// each VM.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .expect("the limit that we may have");
}

fn store(dir: &Path) -> Store {
    Store::open(dir.join("images"), StoreOptions::default()).expect("a store")
}
