//! The controller with the real frontend and host core of a node, in front of VMMs in memory.

use std::{path::Path, sync::Arc};

use coracle_api::MikromVMSpec;
use coracle_frontends::HostService;
use coracle_host::{Host, HostConfig};
use coracle_hypervisor::Drivers;
use coracle_hypervisor_testing::{
    AddressOnly,
    fake::{FakeDriver, FakeMachines},
};
use coracle_image::{Source, Store, StoreOptions};
use coracle_microvm::{Config, Deadlines};
use coracle_oci::NoProgress;
use coracle_proto::host::host_server::HostServer;
use coracle_testkit::{
    cluster,
    oci::{ImageSpec, LayerTar, write_layout},
};
use coracle_types::{Clock, VmState};
use kube::ResourceExt as _;
use serde_json::json;
use tokio::{net::TcpListener, task::JoinSet};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use crate::{
    pki::Pki,
    world::{Operator, World, eventually},
};

const IMAGE: &str = "localhost/test/empty:1";

async fn open_host(dir: &Path) -> anyhow::Result<(Host, Arc<FakeMachines>)> {
    let state = dir.join("state");
    std::fs::create_dir(&state)?;
    let images = Store::open(state.join("images"), StoreOptions::default())?;
    let layout = dir.join("layout");
    let layer = LayerTar::new().file("bin/true", 0o755, b"").finish();
    let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
    write_layout(&layout, &[layer], &spec, "1")?;
    let source: Source = format!("oci:{}:1", layout.display()).parse()?;
    images.import(&source, Some(&IMAGE.parse()?), Arc::new(NoProgress)).await?;
    let mut config = HostConfig::new(state, "/nowhere".into(), "/nowhere".into());
    config.run_dir = dir.join("run");
    config.disk_mib = 16;
    config.memory_overcommit = 100.0;
    let machines = FakeMachines::new();
    let drivers = Drivers::new(Arc::new(FakeDriver::new(machines.clone())), vec![]);
    let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse()?));
    let host = Host::open(config, drivers, network, Arc::new(images), Clock::system()).await?;
    Ok((host, machines))
}

/// Serves `host` to clients with a certificate of `pki`, until the set is dropped.
async fn serve(host: &Host, pki: &Pki) -> anyhow::Result<(String, JoinSet<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let mut server = Server::builder().tls_config(pki.server("127.0.0.1"))?;
    let routes = server.add_service(HostServer::new(HostService::new(host.clone())));
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { routes.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap() });
    Ok((address, tasks))
}

#[test]
fn vm_lives_and_ends_on_a_node_of_ours() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let (dir, pki) = (tempfile::tempdir()?, Pki::new());
        let (host, machines) = open_host(dir.path()).await?;
        let (address, _server) = serve(&host, &pki).await?;
        w.trust(&pki)?;
        w.announce("own", &address, 64, 64 * 1024, 600).await?;
        let config = Config { deadlines: Deadlines::default(), ..w.config() };
        let operator = Operator::start(w.client.clone(), config);
        let spec = MikromVMSpec {
            image: IMAGE.into(),
            vcpu_count: 1,
            memory_mib: 128,
            agent_address: String::new(),
            ..w.spec()
        };
        let made = w.create("web", spec).await?;
        let status = w.until_running("web").await?.status.unwrap();
        assert_eq!((status.node_name.as_str(), status.agent_address.as_str()), ("own", address.as_str()));
        assert_eq!(status.ip_address, "10.100.0.2");
        let owner = host.get(&w.id("web"))?.record.owner.clone();
        assert_eq!(
            (owner.uid, owner.namespace, owner.name),
            (made.uid().unwrap(), w.ns.clone(), "web".into())
        );
        for (wanted, state) in [("Paused", VmState::Paused), ("Running", VmState::Running)] {
            w.patch("web", json!({"spec": {"powerState": wanted}})).await?;
            let reached = || host.get(&w.id("web")).is_ok_and(|view| view.record.state == state);
            eventually(wanted, async || reached().then_some(())).await?;
        }
        w.until_running("web").await?;
        assert_eq!(machines.starts(), 1, "it is the same guest");
        w.delete("web").await?;
        w.until_gone("web").await?;
        assert_eq!((host.list().len(), machines.running()), (0, 0));
        operator.stop().await?;
        host.shutdown().await;
        Ok::<_, anyhow::Error>(())
    });
}
