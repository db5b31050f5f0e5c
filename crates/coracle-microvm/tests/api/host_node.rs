//! Controller with the real frontend and host core of a node, and fake VMMs in memory.

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
use coracle_reconcile::find;
use coracle_testkit::{
    cluster,
    oci::{ImageSpec, LayerTar, write_layout},
};
use coracle_types::{Clock, VmState};
use k8s_openapi::{
    api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::{net::TcpListener, task::JoinSet};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use crate::{
    pki::Pki,
    world::{Operator, World, eventually, message},
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
    config.volume_dirs = vec![dir.join("volumes")];
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

const KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEfWMtJ1wv5jmFygdU7SrplPjhjPXe\n\
PO722VfBduFFppHgpTQlVmcvrDRXX4YGZ91EBZKAJRiVD24J7lqBwEeKyw==\n\
-----END PUBLIC KEY-----";

#[test]
fn image_policy_of_the_namespace_is_kept_by_the_node() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let (dir, pki) = (tempfile::tempdir()?, Pki::new());
        let (host, _machines) = open_host(dir.path()).await?;
        let (address, _server) = serve(&host, &pki).await?;
        w.trust(&pki)?;
        w.announce("own", &address, 64, 64 * 1024, 600).await?;
        let policy = async |keys: &str| {
            let api: Api<ConfigMap> = Api::namespaced(w.client.clone(), &w.ns);
            let object = json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "coracle-image-policy"},
                "data": {&w.ns: keys, "_default": ""},
            });
            api.patch("coracle-image-policy", &PatchParams::apply("t").force(), &Patch::Apply(object)).await
        };
        policy(KEY).await?;
        let config = Config { deadlines: Deadlines::default(), ..w.config() };
        let operator = Operator::start(w.client.clone(), config);
        let spec = MikromVMSpec {
            image: IMAGE.into(),
            vcpu_count: 1,
            memory_mib: 128,
            agent_address: String::new(),
            ..w.spec()
        };
        w.create("web", spec).await?;
        let refused = |vm: Option<&coracle_api::MikromVM>| {
            message(vm.unwrap()).contains("is not signed as its namespace requires")
        };
        w.until("web", "refused by the node", refused).await?;
        assert!(host.list().is_empty(), "nothing was made");
        policy("").await?;
        w.until_running("web").await?;
        w.delete("web").await?;
        w.until_gone("web").await?;
        operator.stop().await?;
        host.shutdown().await;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn vm_runs_pauses_and_is_deleted_through_the_host_service() {
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

/// Binds a claim to a directory of the node `own`. No volume controller runs in this test.
async fn bind_claim(w: &World, name: &str, path: &Path) -> anyhow::Result<()> {
    let volume = format!("{}-{name}", w.ns);
    let own = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": ["own"]});
    let (size, modes) = (json!({"storage": "1Gi"}), json!(["ReadWriteOnce"]));
    let volumes: Api<PersistentVolume> = Api::all(w.client.clone());
    let of_node = json!({"metadata": {"name": volume}, "spec": {
        "capacity": size, "accessModes": modes, "local": {"path": path}, "storageClassName": "",
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [own]}]}},
    }});
    volumes.create(&Default::default(), &serde_json::from_value(of_node)?).await?;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(w.client.clone(), &w.ns);
    let claim = json!({"metadata": {"name": name}, "spec": {
        "accessModes": modes, "resources": {"requests": size}, "volumeName": volume, "storageClassName": "",
    }});
    claims.create(&Default::default(), &serde_json::from_value(claim)?).await?;
    let bound = Patch::Merge(json!({"status": {"phase": "Bound"}}));
    claims.patch_status(name, &PatchParams::default(), &bound).await?;
    Ok(())
}

/// Everything that the spec refers to reaches the node, and no value of a Secret appears where it can be read otherwise.
#[test]
fn vm_receives_the_objects_its_spec_references() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let (dir, pki) = (tempfile::tempdir()?, Pki::new());
        let (host, _machines) = open_host(dir.path()).await?;
        let (address, _server) = serve(&host, &pki).await?;
        w.trust(&pki)?;
        w.announce("own", &address, 64, 64 * 1024, 600).await?;
        // The other node has more free resources, but not the volume of the claim.
        w.announce("other", "127.0.0.1:1", 64, 640 * 1024, 600).await?;
        let claimed = dir.path().join("volumes/claimed");
        std::fs::create_dir_all(&claimed)?;
        bind_claim(&w, "data", &claimed).await?;
        let operator =
            Operator::start(w.client.clone(), Config { deadlines: Deadlines::default(), ..w.config() });
        let spec = json!({
            "image": IMAGE, "vcpuCount": 1, "memoryMB": 128,
            "args": ["-p", "$(PASSWORD)"], "hostname": "shop", "sshAuthorizedKeys": ["ssh-ed25519 AAAA me"],
            "env": [
                {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "login", "key": "password"}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "status.nodeName"}}},
            ],
            "envFrom": [{"configMapRef": {"name": "settings"}}],
            "volumes": [
                {"name": "conf", "mountPath": "/etc/app", "configMap": {"name": "settings"}},
                {"name": "pw", "secret": {"secretName": "login", "defaultMode": 256}},
                {"name": "data", "disk": {"size": "16Mi"}},
                {"name": "claimed", "persistentVolumeClaim": {"claimName": "data"}},
            ],
        });
        w.create("web", serde_json::from_value(spec)?).await?;
        let waiting = w.until_reason("web", "ConfigError").await?;
        assert_eq!(message(&waiting), "ConfigMap \"settings\" not found");
        assert!(host.list().is_empty(), "it is not created without them");
        w.until_event("web", "ConfigError").await?;
        let maps: Api<ConfigMap> = Api::namespaced(w.client.clone(), &w.ns);
        let data = [("greeting".to_owned(), "hello".to_owned())].into();
        let metadata = ObjectMeta { name: Some("settings".into()), ..ObjectMeta::default() };
        maps.create(&Default::default(), &ConfigMap { metadata, data: Some(data), ..Default::default() })
            .await?;
        w.until("web", "the next object is missed", |vm| {
            vm.is_some_and(|vm| message(vm).contains("Secret \"login\" not found"))
        })
        .await?;
        let secrets: Api<Secret> = Api::namespaced(w.client.clone(), &w.ns);
        let metadata = ObjectMeta { name: Some("login".into()), ..ObjectMeta::default() };
        let string_data = [("password".to_owned(), "hunter2".to_owned())].into();
        let secret = Secret { metadata, string_data: Some(string_data), ..Secret::default() };
        secrets.create(&Default::default(), &secret).await?;
        let running = w.until_running("web").await?;
        for part in ["Scheduled", "ImageReady", "AgentReachable"] {
            let conditions = &running.status.as_ref().unwrap().conditions;
            assert_eq!(find(conditions, part).map(|c| c.status.as_str()), Some("True"), "{part}");
        }
        let record = host.get(&w.id("web"))?.record.clone();
        assert_eq!(record.hostname, "shop");
        assert_eq!(record.workload.argv.last().map(String::as_str), Some("hunter2"));
        for variable in ["PASSWORD=hunter2", "NODE=own", "greeting=hello"] {
            assert!(
                record.workload.env.iter().any(|one| one == variable),
                "{variable}: {:?}",
                record.workload.env
            );
        }
        let source =
            |name: &str| record.volumes.iter().find(|v| v.name == name).map(|v| v.source.clone()).unwrap();
        assert_eq!(std::fs::read_to_string(source("conf").join("greeting"))?, "hello");
        assert_eq!(std::fs::read_to_string(source("pw").join("password"))?, "hunter2");
        assert_eq!(source("claimed"), claimed.canonicalize()?);
        assert!(source("data").exists() && source("ssh-keys").join("authorized_keys").exists());
        let object = serde_json::to_string(&w.vms().get("web").await?)?;
        assert!(!object.contains("hunter2"), "{object}");
        w.delete("web").await?;
        w.until_gone("web").await?;
        assert!(!source("conf").exists() && !source("data").exists());
        operator.stop().await?;
        host.shutdown().await;
        Ok::<_, anyhow::Error>(())
    });
}
