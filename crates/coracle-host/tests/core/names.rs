//! Names that callers give to VMs.

use std::time::Duration;

use coracle_frontends::{HostService, to_status};
use coracle_host::VolumeRequest;
use coracle_proto::host as pb;
use coracle_proto::host::host_server::Host as HostRpc;
use tonic::{Code, Request};

use super::support::{IMAGE, Node};

async fn delete(service: &HostService, vm: &str) -> Result<(), Code> {
    let request = pb::DeleteVmRequest { vm: vm.to_owned(), force: true, ..Default::default() };
    service.delete_vm(Request::new(request)).await.map(drop).map_err(|status| status.code())
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_delete_does_not_remove_another_vm() {
    let node = Node::new().await;
    let (host, service) = node.with(&["web", "web-1"]).await;
    delete(&service, "web").await.unwrap();
    assert_eq!(delete(&service, "web").await, Err(Code::NotFound));
    assert_eq!(host.get("web-1").unwrap().record.name.as_str(), "web-1");
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn verbs_on_a_prefix_are_not_found() {
    let node = Node::new().await;
    let (host, service) = node.with(&["web-1"]).await;
    let id = host.get("web-1").unwrap().record.id.to_string();
    for prefix in ["web", &id[..8]] {
        let vm = || prefix.to_owned();
        let request =
            VolumeRequest { source: "data".to_owned(), size_mib: Some(16), ..VolumeRequest::default() };
        let logs = host.logs(prefix).await;
        assert!(logs.is_ok() && host.get(prefix).is_ok(), "reading takes a prefix: {logs:?}");
        for (verb, outcome) in [
            ("start", host.start(prefix, None).await.map(drop)),
            ("stop", host.stop(prefix, Duration::ZERO, None).await.map(drop)),
            ("pause", host.pause(prefix, None).await.map(drop)),
            ("resume", host.resume(prefix, None).await.map(drop)),
            ("hibernate", host.hibernate(prefix, None).await.map(drop)),
            ("snapshot", host.save_snapshot(prefix, None).await.map(drop)),
            ("fork", host.fork(prefix, 1, None).await.map(drop)),
            ("attach", host.attach_volume(prefix, request, None).await.map(drop)),
            ("detach", host.detach_volume(prefix, "data", None).await.map(drop)),
            ("commit", host.commit(prefix, &"r.example/x:1".parse().unwrap()).await.map(drop)),
            ("console", host.console(prefix).map(drop)),
            ("wait", host.wait(prefix).await.map(drop)),
            ("delete", host.delete(prefix, true, None).await),
        ] {
            let code = to_status(&outcome.unwrap_err()).code();
            assert_eq!(code, Code::NotFound, "{verb} {prefix}");
        }
        let copied = service.copy_out(Request::new(pb::CopyOutRequest { vm: vm(), path: "/".into() })).await;
        assert_eq!(copied.err().unwrap().code(), Code::NotFound, "enter the guest");
        let looked =
            |exact| service.get_vm(Request::new(pb::GetVmRequest { vm: vm(), exact, ..Default::default() }));
        assert_eq!(looked(false).await.unwrap().into_inner().name, "web-1");
        assert_eq!(looked(true).await.unwrap_err().code(), Code::NotFound);
    }
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_for_an_object_table() {
    let node = Node::new().await;
    let (host, service) = node.with(&["db"]).await;
    let owner = |name: &str, uid: &str, generation| {
        let (namespace, name, uid) = ("team".into(), name.into(), uid.into());
        Some(pb::Owner { namespace, name, uid, generation, ..Default::default() })
    };
    let spec = pb::CreateVmRequest {
        name: "web".into(),
        image: IMAGE.into(),
        vcpus: 1,
        memory_mib: 128,
        owner: owner("web", "u1", 2),
        ..Default::default()
    };
    service.create_vm(Request::new(spec)).await.unwrap();
    for (why, vm, owner, want) in [
        ("its object", "web", owner("web", "u1", 2), Ok(())),
        ("its object, changed since", "web", owner("web", "u1", 3), Ok(())),
        (
            "an older generation than the node has seen",
            "web",
            owner("web", "u1", 2),
            Err(Code::PermissionDenied),
        ),
        ("another object of the name", "web", owner("web", "u2", 9), Err(Code::NotFound)),
        ("a VM of no object", "db", owner("db", "u3", 1), Err(Code::NotFound)),
        ("no object: a VM of the node by its name", "db", None, Ok(())),
    ] {
        let request = pb::StopVmRequest { vm: vm.into(), grace_ms: Some(0), owner };
        let stopped = service.stop_vm(Request::new(request)).await.map(drop).map_err(|status| status.code());
        assert_eq!(stopped, want, "{why}");
    }
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_by_id_reports_changes_of_that_vm() {
    use tokio_stream::StreamExt;
    let node = Node::new().await;
    let (host, service) = node.with(&["web", "db"]).await;
    let vm = host.get("web").unwrap().record.id.to_string();
    let mut events = service.watch_vms(Request::new(pb::WatchVmsRequest { vm })).await.unwrap().into_inner();
    delete(&service, "db").await.unwrap();
    delete(&service, "web").await.unwrap();
    let first = events.next().await.unwrap().unwrap();
    assert_eq!(first.vm.unwrap().name, "web");
    host.shutdown().await;
}
