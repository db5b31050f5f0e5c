//! Node with VMMs in memory, which a benchmark serves in a process of its own, and its guests in another process. The measured
//! node has the same work as beside real VMMs.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use coracle_host::{Host, HostConfig};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines, remote};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::NoProgress;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_types::Clock;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The only image of the node's pods, whose process runs until it is killed.
pub(crate) const IMAGE: &str = "localhost/bench/pod:1";

/// Variable of a process that serves the node's guests over its standard input.
const GUESTS: &str = "CORACLE_BENCH_GUESTS";

/// Writes the files that [`open`] needs below `dir`; another process opens them.
pub(crate) async fn prepare(dir: &Path) {
    std::fs::create_dir_all(dir.join("state")).expect("a directory");
    let layer = LayerTar::new().file("bin/true", 0o755, b"true").finish();
    let spec = ImageSpec { cmd: vec!["serve".into()], ..ImageSpec::default() };
    write_layout(&dir.join("layout"), &[layer], &spec, "1").expect("write the image");
    let source: Source = format!("oci:{}:1", dir.join("layout").display()).parse().expect("a source");
    let name = IMAGE.parse().expect("a name");
    store(dir).import(&source, Some(&name), Arc::new(NoProgress)).await.expect("import");
}

/// Opens the host core of the node: no templates, no warm pool, and addresses of `subnet`, which must be unique in the cluster.
pub(crate) async fn open(dir: &Path, subnet: &str) -> Host {
    raise_file_limit();
    let mut config = HostConfig::new(dir.join("state"), "/nowhere".into(), "/nowhere".into());
    config.run_dir = dir.join("run");
    config.disk_mib = 16;
    config.memory_overcommit = 1000.0;
    config.templates.enabled = false;
    config.warm_pool.shapes_max = 0;
    let driver = Arc::new(FakeDriver::new(machines().expect("a process of guests")));
    let network = Arc::new(AddressOnly::new(subnet.parse().expect("a subnet")));
    Host::open(config, driver, network, Arc::new(store(dir)), Clock::system()).await.expect("a host")
}

/// Returns VMMs whose guests are in a process of this program, which ends with this one.
fn machines() -> io::Result<Arc<FakeMachines>> {
    let (node, guests) = remote::pair()?;
    Command::new(std::env::current_exe()?).env(GUESTS, "1").stdin(Stdio::from(guests)).spawn()?;
    FakeMachines::with_guests_at(node)
}

/// Serves guests until their node ends. Returns false if this process does not serve guests. Call this first.
pub(crate) fn serve_guests() -> bool {
    if std::env::var_os(GUESTS).is_none() {
        return false;
    }
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let node = std::io::stdin().as_fd().try_clone_to_owned().expect("the socket of the node");
    runtime.block_on(async { remote::serve(&node) }).expect("it served");
    true
}

/// Raises the limit of open files to the maximum: a node has three for each VM, and its guests as many.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .expect("the limit that we may have");
}

fn store(dir: &Path) -> Store {
    Store::open(dir.join("images"), StoreOptions::default()).expect("a store")
}
