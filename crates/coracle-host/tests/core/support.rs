//! Node with VMMs in memory.

use std::path::PathBuf;
use std::sync::Arc;

use coracle_frontends::HostService;
use coracle_host::{Host, HostConfig, HostError, Record, VmSpec};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_net::Network;
use coracle_oci::{NoProgress, Registries};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_types::Clock;

pub(crate) const IMAGE: &str = "localhost/test/empty:1";

/// Node below one directory. Its VMMs outlive the daemon.
pub(crate) struct Node {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) machines: Arc<FakeMachines>,
    pub(crate) registries: Registries,
}

impl Node {
    pub(crate) async fn new() -> Self {
        let node = Self {
            dir: tempfile::tempdir().unwrap(),
            machines: FakeMachines::new(),
            registries: Registries::default(),
        };
        std::fs::create_dir(node.state()).unwrap();
        std::fs::write(node.dir.path().join("agent"), "an agent").unwrap();
        let layout = node.dir.path().join("layout");
        let layer = LayerTar::new().file("bin/true", 0o755, b"").finish();
        let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
        write_layout(&layout, &[layer], &spec, "1").unwrap();
        let source: Source = format!("oci:{}:1", layout.display()).parse().unwrap();
        let name = IMAGE.parse().unwrap();
        node.store("images").import(&source, Some(&name), Arc::new(NoProgress)).await.unwrap();
        node
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn store(&self, dir: &str) -> Store {
        let options = StoreOptions { registries: self.registries.clone(), ..StoreOptions::default() };
        Store::open(self.dir.path().join(dir), options).unwrap()
    }

    /// Starts the daemon.
    pub(crate) async fn open(&self) -> Host {
        let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
        self.try_open(network, "images").await.unwrap()
    }

    /// Like [`Node::open`], with the given network, and the images in that directory.
    pub(crate) async fn try_open(&self, network: Arc<dyn Network>, images: &str) -> Result<Host, HostError> {
        self.open_changed(network, images, |_| {}).await
    }

    /// Like [`Node::try_open`], with a changed configuration.
    pub(crate) async fn open_changed(
        &self,
        network: Arc<dyn Network>,
        images: &str,
        change: impl FnOnce(&mut HostConfig),
    ) -> Result<Host, HostError> {
        let mut config = HostConfig::new(self.state(), "/nowhere".into(), "/nowhere".into());
        config.run_dir = self.dir.path().join("run");
        config.agent = self.dir.path().join("agent");
        config.disk_mib = 16;
        config.memory_overcommit = 100.0;
        config.templates.enabled = false;
        config.warm_pool.shapes_max = 0;
        change(&mut config);
        let driver = Arc::new(FakeDriver::new(self.machines.clone()));
        Host::open(config, driver, network, Arc::new(self.store(images)), Clock::system()).await
    }

    /// Like [`Node::open`], with templates and a changed configuration.
    pub(crate) async fn open_with_templates(&self, change: impl FnOnce(&mut HostConfig)) -> Host {
        let kernel = self.dir.path().join("kernel");
        std::fs::write(&kernel, "kernel and initramfs").unwrap();
        let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
        let change = |config: &mut HostConfig| {
            config.templates.enabled = true;
            (config.kernel, config.initrd) = (kernel.clone(), kernel);
            change(config);
        };
        self.open_changed(network, "images", change).await.unwrap()
    }

    /// Starts a daemon with VMs of these names, which are not started.
    pub(crate) async fn with(&self, names: &[&str]) -> (Host, HostService) {
        let host = self.open().await;
        for name in names {
            create(&host, name).await;
        }
        (host.clone(), HostService::new(host))
    }
}

pub(crate) async fn create(host: &Host, name: &str) -> Record {
    let spec = VmSpec::of(name.parse().unwrap(), IMAGE);
    host.create(spec, Arc::new(NoProgress)).await.unwrap()
}
