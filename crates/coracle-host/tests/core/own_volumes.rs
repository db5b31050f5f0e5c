//! Volumes that are created and deleted with their VM.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_frontends::HostService;
use coracle_host::{Host, OwnContent, OwnFile, OwnVolume, VmSpec, VolumeKind};
use coracle_hypervisor_testing::AddressOnly;
use coracle_oci::NoProgress;
use coracle_proto::host as pb;
use coracle_proto::host::host_server::Host as _;
use tonic::{Code, Request};

use super::support::{IMAGE, Node};

async fn open(node: &Node) -> Host {
    let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
    let class = class(node);
    let with_class = |config: &mut coracle_host::HostConfig| {
        config.disk_classes = [("fast".to_owned(), class)].into();
    };
    node.open_changed(network, "images", with_class).await.unwrap()
}

fn class(node: &Node) -> PathBuf {
    node.dir.path().join("fast")
}

fn own(name: &str, content: OwnContent) -> OwnVolume {
    OwnVolume { name: name.into(), target: format!("/{name}"), read_only: false, content }
}

fn spec(class: &str) -> VmSpec {
    let file = OwnFile { bytes: b"hunter2".to_vec(), mode: 0o400 };
    VmSpec {
        own_volumes: vec![
            own("conf", OwnContent::Files([("pw".to_owned(), file)].into())),
            own("disk", OwnContent::Disk { size_mib: 16, class: String::new() }),
            own("nvme", OwnContent::Disk { size_mib: 16, class: class.into() }),
        ],
        ssh_keys: vec!["ssh-ed25519 AAAA me".into()],
        ..VmSpec::of("web".parse().unwrap(), IMAGE)
    }
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

#[tokio::test(flavor = "multi_thread")]
async fn own_volumes_are_created_and_removed_with_their_vm() {
    let node = Node::new().await;
    let host = open(&node).await;
    let record = host.create(spec("fast"), Arc::new(NoProgress)).await.unwrap();
    let of = |name: &str| record.volumes.iter().find(|volume| volume.name == name).unwrap();
    let conf = of("conf");
    assert!(conf.read_only && conf.kind == VolumeKind::SharedDir);
    assert_eq!(fs::read(conf.source.join("pw")).unwrap(), b"hunter2");
    assert!(matches!(of("disk").kind, VolumeKind::Disk { .. }));
    assert!(of("nvme").source.starts_with(class(&node).canonicalize().unwrap()));
    let keys = of("ssh-keys");
    assert_eq!(keys.target, "/root/.ssh");
    assert_eq!(fs::read_to_string(keys.source.join("authorized_keys")).unwrap(), "ssh-ed25519 AAAA me\n");
    let vm = node.state().join("vms").join(record.id.as_str());
    let written = fs::read_to_string(vm.join("record.json")).unwrap();
    assert!(!written.contains("hunter2"), "the record has the files by their place");
    host.delete("web", true, None).await.unwrap();
    assert_eq!((entries(&node.state().join("vms")), entries(&class(&node))), (0, 0));
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_creation_leaves_no_own_volume() {
    let node = Node::new().await;
    let host = open(&node).await;
    let unknown = host.create(spec("slow"), Arc::new(NoProgress)).await.unwrap_err();
    assert!(unknown.to_string().contains("no disk class slow; there is: fast"), "{unknown}");
    let mut twice = spec("fast");
    twice.own_volumes.push(own("nvme", OwnContent::Disk { size_mib: 16, class: "fast".into() }));
    let twice = host.create(twice, Arc::new(NoProgress)).await.unwrap_err();
    assert!(twice.to_string().contains("has a volume nvme already"), "{twice}");
    assert_eq!((entries(&node.state().join("vms")), entries(&class(&node))), (0, 0));
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_of_a_creation_that_was_cut_off_is_swept() {
    let node = Node::new().await;
    let host = open(&node).await;
    let record = host.create(spec("fast"), Arc::new(NoProgress)).await.unwrap();
    host.shutdown().await;
    drop(host);
    let left = class(&node).join("gone-0123456789ab");
    fs::create_dir_all(&left).unwrap();
    fs::create_dir_all(class(&node).join("lost+found")).unwrap();
    let host = open(&node).await;
    assert!(!left.exists() && class(&node).join("lost+found").exists());
    assert!(class(&node).join(record.id.as_str()).join("nvme.ext4").exists());
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_carries_own_volumes_and_pull_secrets() {
    let node = Node::new().await;
    let host = open(&node).await;
    let service = HostService::new(host.clone());
    let volume = |name: &str| pb::Volume { name: name.into(), ..pb::Volume::default() };
    let file = pb::VolumeFile { path: "pw".into(), data: b"hunter2".to_vec(), mode: 0o400 };
    let request = |volumes: Vec<pb::Volume>, secret: &str| pb::CreateVmRequest {
        name: "web".into(),
        image: IMAGE.into(),
        vcpus: 1,
        memory_mib: 128,
        volumes,
        pull_secrets: vec![pb::PullSecret { docker_config: secret.into(), legacy: false }],
        ..pb::CreateVmRequest::default()
    };
    let auths = r#"{"auths":{"other.example":{"username":"u","password":"p"}}}"#;
    let sourced = pb::Volume { own: true, source: "/etc".into(), size_mib: 1, ..volume("a") };
    let broken = request(vec![], "no JSON hunter2");
    for (refused, want) in [(request(vec![sourced], auths), "has no source"), (broken, "")] {
        let status = service.create_vm(Request::new(refused)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(want) && !status.message().contains("hunter2"), "{status:?}");
    }
    let volumes = vec![
        pb::Volume { files: vec![file], ..volume("conf") },
        pb::Volume { own: true, size_mib: 16, class: "fast".into(), ..volume("nvme") },
    ];
    let made = service.create_vm(Request::new(request(volumes, auths))).await.unwrap().into_inner();
    assert_eq!(
        made.volumes.iter().map(|volume| volume.kind()).collect::<Vec<_>>(),
        [pb::volume::Kind::SharedDir, pb::volume::Kind::Disk]
    );
    assert!(made.volumes.iter().all(|volume| volume.files.is_empty()), "an answer has no content");
    host.delete("web", true, None).await.unwrap();
    host.shutdown().await;
}
