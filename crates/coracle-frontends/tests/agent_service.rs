//! Both services over a real gRPC connection, in front of VMMs in memory.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::sync::Arc;
use std::time::Duration;

use coracle_frontends::{AgentMetrics, AgentOptions, AgentService, ErrorStyle, HostService};
use coracle_host::{Host, HostConfig};
use coracle_hypervisor::Drivers;
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::NoProgress;
use coracle_proto::firecracker as pb;
use coracle_proto::host::{self as own, host_client::HostClient, host_server::HostServer};
use coracle_testkit::elapse;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_types::Clock;
use pb::firecracker_agent_client::FirecrackerAgentClient;
use pb::firecracker_agent_server::FirecrackerAgentServer;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request};

const IMAGE: &str = "localhost/test/empty:1";

struct Node {
    host: Host,
    client: FirecrackerAgentClient<Channel>,
    /// Client of the same node's host service.
    own: HostClient<Channel>,
    machines: Arc<FakeMachines>,
    /// VMMs of the driver that is not the default.
    others: Arc<FakeMachines>,
    registry: Registry,
    _server: JoinSet<()>,
    _dir: tempfile::TempDir,
}

async fn node(error_style: ErrorStyle) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let images = Store::open(state.join("images"), StoreOptions::default()).unwrap();
    let layout = dir.path().join("layout");
    let layer = LayerTar::new().file("bin/true", 0o755, b"").finish();
    let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
    write_layout(&layout, &[layer], &spec, "1").unwrap();
    let source: Source = format!("oci:{}:1", layout.display()).parse().unwrap();
    images.import(&source, Some(&IMAGE.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    let mut config = HostConfig::new(state, "/nowhere".into(), "/nowhere".into());
    config.run_dir = dir.path().join("run");
    config.disk_mib = 16;
    config.memory_overcommit = 100.0;
    config.boots_at_once = 100;
    let machines = FakeMachines::new();
    let others = FakeMachines::new();
    let other = FakeDriver::named(others.clone(), "other");
    let drivers = Drivers::new(Arc::new(FakeDriver::new(machines.clone())), vec![Arc::new(other)]);
    let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
    let host = Host::open(config, drivers, network, Arc::new(images), Clock::system()).await.unwrap();
    let mut registry = Registry::default();
    let metrics = AgentMetrics::new(&mut registry, &host);
    let service =
        AgentService::new(host.clone(), AgentOptions { error_style, ..Default::default() }, metrics);
    let host_service = HostServer::new(HostService::new(host.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let mut server = JoinSet::new();
    server.spawn(async move {
        let routes = Server::builder()
            .add_service(FirecrackerAgentServer::new(service))
            .add_service(host_service)
            .add_service(coracle_frontends::reflection().unwrap());
        routes.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    });
    let channel = tonic::transport::Endpoint::new(format!("http://{at}")).unwrap().connect().await.unwrap();
    let (client, own) = (FirecrackerAgentClient::new(channel.clone()), HostClient::new(channel));
    Node { host, client, own, machines, others, registry, _server: server, _dir: dir }
}

fn create(vm_id: &str) -> pb::CreateVmRequest {
    pb::CreateVmRequest {
        vm_id: vm_id.into(),
        vcpu_count: 1,
        memory_mb: 128,
        image_ref: IMAGE.into(),
        ..Default::default()
    }
}

fn id(vm_id: &str) -> String {
    vm_id.to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_lifecycle_over_agent_service_emits_events() {
    let node = node(ErrorStyle::Status).await;
    let (mut client, machines) = (node.client.clone(), node.machines.clone());
    let mut events = client.watch_vm_events(pb::WatchVmEventsRequest::default()).await.unwrap().into_inner();

    let created = client.create_vm(create("default-web")).await.unwrap().into_inner();
    assert_eq!((created.vm_id.as_str(), created.state()), ("default-web", pb::VmState::Running));
    assert!(created.created_at > 1_700_000_000 && created.socket_path.ends_with("/qmp.sock"));
    let started =
        client.start_vm(pb::StartVmRequest { vm_id: id("default-web") }).await.unwrap().into_inner();
    assert_eq!(
        (started.state(), machines.starts()),
        (pb::VmState::Running, 1),
        "starting again starts nothing"
    );
    let vm =
        client.get_vm(pb::GetVmRequest { vm_id: id("default-web") }).await.unwrap().into_inner().vm.unwrap();
    assert_eq!(
        (vm.state(), vm.ip_address.as_str(), vm.vcpu_count, vm.memory_mb),
        (pb::VmState::Running, "10.100.0.2", 1, 128)
    );

    let again = client.create_vm(create("default-web")).await.unwrap_err();
    assert_eq!((again.code(), again.message()), (Code::AlreadyExists, "VM default-web already exists"));
    let mut idempotent = create("default-web");
    idempotent.metadata.insert("coracle.dev/idempotent".into(), "true".into());
    assert_eq!(client.create_vm(idempotent).await.unwrap().into_inner().state(), pb::VmState::Running);

    let stop = |force| pb::StopVmRequest { vm_id: id("default-web"), force };
    assert_eq!(client.stop_vm(stop(false)).await.unwrap().into_inner().state(), pb::VmState::Stopped);
    assert_eq!(client.stop_vm(stop(true)).await.unwrap().into_inner().state(), pb::VmState::Stopped, "again");
    client.start_vm(pb::StartVmRequest { vm_id: id("default-web") }).await.unwrap();
    assert!(
        client
            .delete_vm(pb::DeleteVmRequest { vm_id: id("default-web") })
            .await
            .unwrap()
            .into_inner()
            .success
    );
    assert_eq!(machines.running(), 0);

    let mut seen = Vec::new();
    while seen.last() != Some(&pb::EventType::Deleted) {
        seen.push(events.message().await.unwrap().unwrap().r#type());
    }
    use pb::EventType::{Created, Deleted, Started, Stopped};
    assert_eq!(seen, [Created, Started, Stopped, Started, Deleted]);
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_created_stopped_does_not_boot() {
    let node = node(ErrorStyle::Status).await;
    let (mut client, machines) = (node.client.clone(), node.machines.clone());
    let mut request = tonic::Request::new(create("default-web"));
    request.metadata_mut().insert("coracle-power", "Stopped".parse().unwrap());
    let created = client.create_vm(request).await.unwrap().into_inner();
    assert_eq!((created.state(), machines.starts()), (pb::VmState::Stopped, 0));
    client.start_vm(pb::StartVmRequest { vm_id: id("default-web") }).await.unwrap();
    assert_eq!(machines.running(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_calls_follow_the_error_style_of_the_node() {
    let (status_node, inband_node) = (node(ErrorStyle::Status).await, node(ErrorStyle::Inband).await);
    let (mut status, mut inband) = (status_node.client.clone(), inband_node.client.clone());
    let unknown = |s: tonic::Status| (s.code(), s.message().to_owned());
    let not_found = (Code::NotFound, "VM nope not found".to_owned());
    assert_eq!(unknown(status.get_vm(pb::GetVmRequest { vm_id: id("nope") }).await.unwrap_err()), not_found);
    assert_eq!(
        unknown(status.start_vm(pb::StartVmRequest { vm_id: id("nope") }).await.unwrap_err()),
        not_found
    );
    assert_eq!(
        unknown(status.stop_vm(pb::StopVmRequest { vm_id: id("nope"), force: true }).await.unwrap_err()),
        not_found
    );
    assert_eq!(
        unknown(status.delete_vm(pb::DeleteVmRequest { vm_id: id("nope") }).await.unwrap_err()),
        not_found
    );

    let started = inband.start_vm(pb::StartVmRequest { vm_id: id("nope") }).await.unwrap().into_inner();
    assert_eq!((started.state(), started.error_message.as_str()), (pb::VmState::Error, "VM nope not found"));
    let deleted = inband.delete_vm(pb::DeleteVmRequest { vm_id: id("nope") }).await.unwrap().into_inner();
    assert_eq!((deleted.success, deleted.error_message.as_str()), (false, "VM nope not found"));
    let got = inband.get_vm(pb::GetVmRequest { vm_id: id("nope") }).await.unwrap_err();
    assert_eq!(got.code(), Code::NotFound, "GetVM always used the status");
    inband.create_vm(create("a")).await.unwrap();
    let twice = inband.create_vm(create("a")).await.unwrap().into_inner();
    assert_eq!((twice.state(), twice.error_message.as_str()), (pb::VmState::Error, "VM a already exists"));

    for client in [&mut status, &mut inband] {
        let mut bad = create("b");
        bad.vcpu_count = 64;
        let refused = client.create_vm(bad).await.unwrap_err();
        assert_eq!(
            unknown(refused),
            (Code::InvalidArgument, "vcpu_count must be between 1 and 32".to_owned())
        );
        let refused = client.get_vm(pb::GetVmRequest::default()).await.unwrap_err();
        assert_eq!(unknown(refused), (Code::InvalidArgument, "vm_id is required".to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_create_reports_the_cause_and_leaves_no_vm() {
    let node = node(ErrorStyle::Status).await;
    let (mut client, machines) = (node.client.clone(), node.machines.clone());
    let mut missing = create("a");
    missing.image_ref = "localhost:1/none:1".into();
    missing.metadata.insert("coracle.dev/image-pull-policy".into(), "Never".into());
    assert_eq!(client.create_vm(missing).await.unwrap_err().code(), Code::FailedPrecondition);
    machines.fail_starts(Some("no such kernel"));
    let failed = client.create_vm(create("a")).await.unwrap_err();
    assert_eq!(failed.code(), Code::Internal);
    assert!(failed.message().contains("no such kernel"), "{}", failed.message());
    let list = client.list_v_ms(pb::ListVMsRequest::default()).await.unwrap().into_inner();
    assert_eq!(list.total_count, 0, "a failed creation is undone");
    machines.fail_starts(None);
    client.create_vm(create("a")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_creations_do_not_block_readers() {
    let node = node(ErrorStyle::Status).await;
    let (client, machines) = (node.client.clone(), node.machines.clone());
    let boot_time = Duration::from_millis(500);
    machines.set_boot_time(boot_time);
    client.clone().create_vm(create("first")).await.unwrap();
    let mut creations = JoinSet::new();
    for n in 0..100 {
        let mut client = client.clone();
        creations.spawn(async move { client.create_vm(create(&format!("vm-{n}"))).await.unwrap() });
    }
    let mut reads = Vec::new();
    let mut reader = client.clone();
    while !creations.is_empty() {
        let began = Instant::now();
        reader.get_vm(pb::GetVmRequest { vm_id: id("first") }).await.unwrap();
        reads.push(began.elapsed());
        while creations.try_join_next().is_some() {}
        elapse(Duration::from_millis(5)).await;
    }
    reads.sort();
    let median = reads[reads.len() / 2];
    println!("{} reads, median {median:?}, slowest {:?}", reads.len(), reads.last().unwrap());
    // A reader behind a lock waits for a whole boot. Half of that leaves a margin on a busy host.
    assert!(median < boot_time / 2, "median {median:?}");
    assert_eq!(machines.running(), 101);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_sorted_and_paged() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.client.clone();
    for name in ["c", "a", "b"] {
        client.create_vm(create(name)).await.unwrap();
    }
    let page = |page_size, page_token: &str| pb::ListVMsRequest { page_size, page_token: page_token.into() };
    let names = |r: &pb::ListVMsResponse| r.vms.iter().map(|v| v.vm_id.clone()).collect::<Vec<_>>();
    let all = client.list_v_ms(page(0, "")).await.unwrap().into_inner();
    assert_eq!(
        (names(&all), all.total_count, all.next_page_token.as_str()),
        (vec![id("a"), id("b"), id("c")], 3, "")
    );
    let first = client.list_v_ms(page(2, "")).await.unwrap().into_inner();
    assert_eq!((names(&first), first.next_page_token.as_str()), (vec![id("a"), id("b")], "b"));
    let rest = client.list_v_ms(page(2, &first.next_page_token)).await.unwrap().into_inner();
    assert_eq!((names(&rest), rest.next_page_token.as_str()), (vec![id("c")], ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_or_foreign_caller_is_refused() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.client.clone();
    let fenced = |generation: &'static str, uid: &'static str| {
        let mut request = Request::new(pb::StopVmRequest { vm_id: id("default-web"), force: true });
        request.metadata_mut().insert("coracle-uid", uid.parse().unwrap());
        request.metadata_mut().insert("coracle-generation", generation.parse().unwrap());
        request
    };
    let mut owned = create("default-web");
    owned.metadata.insert("coracle.dev/uid".into(), "u1".into());
    let mut request = Request::new(owned);
    request.metadata_mut().insert("coracle-uid", "u1".parse().unwrap());
    request.metadata_mut().insert("coracle-generation", "5".parse().unwrap());
    client.create_vm(request).await.unwrap();
    assert_eq!(client.stop_vm(fenced("4", "u1")).await.unwrap_err().code(), Code::PermissionDenied);
    let foreign = client.stop_vm(fenced("9", "u2")).await.unwrap_err();
    assert_eq!(foreign.code(), Code::NotFound, "that object has no VM");
    client.stop_vm(fenced("5", "u1")).await.unwrap();
    // A client without fences is an old one.
    client.delete_vm(pb::DeleteVmRequest { vm_id: id("default-web") }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_keep_firecracker_names_and_count_running_vms() {
    let node = node(ErrorStyle::Status).await;
    let (mut client, machines, registry) = (node.client.clone(), node.machines.clone(), &node.registry);
    let running = |registry: &Registry| {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        let line = text.lines().find(|l| l.starts_with("firecracker_vms_running ")).unwrap().to_owned();
        (line, text)
    };
    for name in ["a", "b", "c"] {
        client.create_vm(create(name)).await.unwrap();
    }
    client.stop_vm(pb::StopVmRequest { vm_id: id("a"), force: true }).await.unwrap();
    client.delete_vm(pb::DeleteVmRequest { vm_id: id("a") }).await.unwrap();
    client.get_vm(pb::GetVmRequest { vm_id: id("nope") }).await.unwrap_err();
    let (gauge, text) = running(registry);
    assert_eq!(gauge, "firecracker_vms_running 2", "stop and delete of one VM count once");
    assert_eq!(machines.running(), 2);
    for wanted in [
        "firecracker_vms_created_total 3",
        "firecracker_grpc_requests_total{method=\"/firecracker.v1.FirecrackerAgent/CreateVM\",status=\"ok\"} 3",
        "firecracker_grpc_requests_total{method=\"/firecracker.v1.FirecrackerAgent/GetVM\",status=\"error\"} 1",
        "firecracker_vm_operation_duration_seconds_count{operation=\"/firecracker.v1.FirecrackerAgent/StopVM\"} 1",
        "# TYPE firecracker_vm_operation_duration_seconds histogram",
        "# TYPE firecracker_vms_running gauge",
    ] {
        assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_driver_is_refused_with_the_known_ones() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.client.clone();
    let with = |vm_id: &str, driver: &str| {
        let metadata = [("coracle.dev/driver".to_owned(), driver.to_owned())].into();
        pb::CreateVmRequest { metadata, ..create(vm_id) }
    };
    client.create_vm(with("mine", "other")).await.unwrap();
    client.create_vm(create("plain")).await.unwrap();
    assert_eq!((node.machines.running(), node.others.running()), (1, 1));
    let refused = client.create_vm(with("lost", "absent")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("fake, other"), "{}", refused.message());
    client.delete_vm(pb::DeleteVmRequest { vm_id: id("mine") }).await.unwrap();
    assert_eq!((node.machines.running(), node.others.running()), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotent_create_with_another_spec_is_refused() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.client.clone();
    let request = |spec: &str| {
        let words =
            [("coracle.dev/uid", "u-1"), ("coracle.dev/idempotent", "true"), ("coracle.dev/spec", spec)];
        let metadata = words.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        pb::CreateVmRequest { metadata, ..create("default-web") }
    };
    client.create_vm(request("a")).await.unwrap();
    client.create_vm(request("a")).await.unwrap();
    assert_eq!(client.create_vm(request("b")).await.unwrap_err().code(), Code::AlreadyExists);
}

#[tokio::test(flavor = "multi_thread")]
async fn clone_of_another_namespace_needs_a_grant() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.client.clone();
    let of = |namespace: &str, name: &str, from: &str| {
        let words = [
            ("coracle.dev/uid", format!("u-{namespace}-{name}")),
            ("coracle.dev/namespace", namespace.to_owned()),
            ("coracle.dev/name", name.to_owned()),
            ("coracle.dev/clone-from", from.to_owned()),
        ];
        let metadata = words.map(|(key, value)| (key.to_owned(), value)).into();
        pb::CreateVmRequest { metadata, ..create(&format!("{namespace}-{name}")) }
    };
    client.create_vm(of("team", "web", "")).await.unwrap();
    client.create_vm(create("local")).await.unwrap();
    node.host.save_snapshot("team-web", Some("of-team".parse().unwrap())).await.unwrap();
    node.host.save_snapshot("local", Some("of-local".parse().unwrap())).await.unwrap();

    client.create_vm(of("team", "twin", "of-team")).await.unwrap();
    for snapshot in ["of-team", "of-local"] {
        let refused = client.create_vm(of("else", snapshot, snapshot)).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{snapshot}: {refused}");
        assert_eq!(refused.metadata().get("coracle-code").unwrap(), "COR-SNP-005");
        node.host.share_snapshot(snapshot, "else", true).await.unwrap();
        client.create_vm(of("else", snapshot, snapshot)).await.unwrap();
    }
}

/// Request on behalf of an object, as the operator sends it.
fn request_of_object<T>(message: T, uid: &str, object: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("coracle-uid", uid.parse().unwrap());
    request.metadata_mut().insert("coracle-object", object.parse().unwrap());
    request.metadata_mut().insert("coracle-generation", "1".parse().unwrap());
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_with_the_same_vm_id_get_separate_vms() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.client.clone();
    let of = |namespace: &str, name: &str, uid: &str| {
        let words = [
            ("coracle.dev/uid", uid),
            ("coracle.dev/namespace", namespace),
            ("coracle.dev/name", name),
            ("coracle.dev/idempotent", "true"),
        ];
        let metadata = words.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let request = pb::CreateVmRequest { metadata, ..create("a-b-c") };
        request_of_object(request, uid, &format!("{namespace}/{name}"))
    };
    client.create_vm(create("a-b-c")).await.unwrap(); // created by a user
    for _ in 0..2 {
        let first = client.create_vm(of("a-b", "c", "u-1")).await.unwrap().into_inner();
        let second = client.create_vm(of("a", "b-c", "u-2")).await.unwrap().into_inner();
        assert_eq!((first.vm_id.as_str(), second.vm_id.as_str()), ("a-b-c", "a-b-c"));
    }
    let vms = client.list_v_ms(pb::ListVMsRequest::default()).await.unwrap().into_inner().vms;
    assert_eq!(vms.len(), 3, "the same creation again makes no other");
    assert!(vms.iter().all(|vm| vm.vm_id == "a-b-c"), "{vms:?}");

    let get = || pb::GetVmRequest { vm_id: id("a-b-c") };
    let unclear = client.get_vm(get()).await.unwrap_err();
    assert_eq!(unclear.code(), Code::FailedPrecondition, "by the id alone");
    for (uid, object) in [("u-1", "a-b/c"), ("u-2", "a/b-c")] {
        let vm = client.get_vm(request_of_object(get(), uid, object)).await.unwrap().into_inner().vm.unwrap();
        assert_eq!(vm.metadata["coracle.dev/uid"], uid);
        client
            .delete_vm(request_of_object(pb::DeleteVmRequest { vm_id: id("a-b-c") }, uid, object))
            .await
            .unwrap();
        let gone = client.get_vm(request_of_object(get(), uid, object)).await.unwrap_err();
        assert_eq!(gone.code(), Code::NotFound);
    }
    let stop = request_of_object(pb::StopVmRequest { vm_id: id("a-b-c"), force: true }, "u-1", "a-b/c");
    assert_eq!(client.stop_vm(stop).await.unwrap_err().code(), Code::NotFound, "not the one made by hand");
    let left = client.get_vm(get()).await.unwrap().into_inner().vm.unwrap();
    assert_eq!((left.state(), left.metadata.get("coracle.dev/uid")), (pb::VmState::Running, None));
}

/// VMs of the operator reach no registry on the node itself; users of the node do.
#[tokio::test(flavor = "multi_thread")]
async fn image_on_loopback_is_refused_to_a_cluster() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.client.clone();
    for registry in ["127.0.0.1:1", "localhost:1", "169.254.169.254"] {
        let image_ref = format!("{registry}/team/app:1");
        let refused =
            client.create_vm(pb::CreateVmRequest { image_ref, ..create("inward") }).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{registry}: {refused}");
        assert!(refused.message().contains(registry.split(':').next().unwrap()), "{registry}: {refused}");
        assert!(refused.message().contains("cannot reach"), "{registry}: {refused}");
    }
    client.create_vm(create("default-web")).await.unwrap();
    let record = &node.host.get("default-web").unwrap().record;
    assert_eq!(record.origin, coracle_host::PullOrigin::Cluster, "a later push is restricted, too");
}

/// Creation on behalf of an object, as the operator sends it to the host service.
fn own_create(namespace: &str, name: &str, uid: &str) -> own::CreateVmRequest {
    own::CreateVmRequest {
        name: format!("{namespace}-{name}"),
        image: IMAGE.into(),
        vcpus: 1,
        memory_mib: 128,
        owner: own_owner(namespace, name, uid, 1),
        idempotent: true,
        power_state: own::PowerState::Running.into(),
        spec_hash: "a".into(),
        ..Default::default()
    }
}

fn own_owner(namespace: &str, name: &str, uid: &str, generation: i64) -> Option<own::Owner> {
    let (namespace, name, uid) = (namespace.into(), name.into(), uid.into());
    Some(own::Owner { namespace, name, uid, generation, ..Default::default() })
}

#[tokio::test(flavor = "multi_thread")]
async fn host_service_finds_the_vm_of_the_object() {
    let node = node(ErrorStyle::Status).await;
    let mut client = node.own.clone();
    for _ in 0..2 {
        let first = client.create_vm(own_create("a-b", "c", "u-1")).await.unwrap().into_inner();
        let second = client.create_vm(own_create("a", "b-c", "u-2")).await.unwrap().into_inner();
        assert_eq!((first.state(), second.state()), (own::VmState::Running, own::VmState::Running));
        assert_eq!((first.name.as_str(), first.requested_name.as_str()), ("a-b-c", ""));
        assert_eq!((second.name.as_str(), second.requested_name.as_str()), ("a-b-c-u2", "a-b-c"));
        assert_eq!(second.spec_hash, "a");
    }
    assert_eq!(node.machines.starts(), 2, "the same creation again starts nothing");
    // The agent service finds the same VMs.
    let mut agent = node.client.clone();
    let get = pb::GetVmRequest { vm_id: id("a-b-c") };
    let vm = agent.get_vm(request_of_object(get, "u-2", "a/b-c")).await.unwrap().into_inner().vm.unwrap();
    assert_eq!(
        (vm.metadata["coracle.dev/uid"].as_str(), vm.metadata["coracle.dev/spec"].as_str()),
        ("u-2", "a")
    );

    let target = || id("a-b-c");
    let get = |owner| own::GetVmRequest { vm: target(), exact: true, owner };
    let delete = |owner| own::DeleteVmRequest { vm: target(), force: true, owner };
    let (first, second) = (|| own_owner("a-b", "c", "u-1", 1), || own_owner("a", "b-c", "u-2", 1));
    let stop = own::StopVmRequest { vm: target(), grace_ms: Some(0), owner: second() };
    let stopped = client.stop_vm(stop).await.unwrap().into_inner();
    assert_eq!((stopped.name.as_str(), stopped.state()), ("a-b-c-u2", own::VmState::Stopped));
    let other = client.get_vm(get(first())).await.unwrap().into_inner();
    assert_eq!(other.state(), own::VmState::Running, "of another object");
    client.start_vm(own::StartVmRequest { vm: target(), owner: second() }).await.unwrap();
    let pause = own::PauseVmRequest { vm: target(), owner: second() };
    let paused = client.pause_vm(pause).await.unwrap().into_inner();
    assert_eq!((paused.name.as_str(), paused.state()), ("a-b-c-u2", own::VmState::Paused));
    for owner in [first(), second()] {
        client.delete_vm(delete(owner.clone())).await.unwrap();
        assert_eq!(client.get_vm(get(owner.clone())).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(client.delete_vm(delete(owner)).await.unwrap_err().code(), Code::NotFound);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn host_service_creates_vm_in_the_requested_power_state() {
    let node = node(ErrorStyle::Status).await;
    let (mut client, machines) = (node.own.clone(), node.machines.clone());
    let with = |change: fn(&mut own::CreateVmRequest)| {
        let mut request = own_create("team", "web", "u-1");
        change(&mut request);
        request
    };
    machines.fail_starts(Some("no such kernel"));
    client.create_vm(with(|_| ())).await.unwrap_err();
    assert_eq!(node.host.list().len(), 0, "a failed creation is undone");
    machines.fail_starts(None);
    let stopped = with(|request| request.set_power_state(own::PowerState::Stopped));
    let stopped = client.create_vm(stopped).await.unwrap().into_inner();
    assert_eq!((stopped.state(), machines.running()), (own::VmState::Stopped, 0));
    let edited = client.create_vm(with(|request| request.spec_hash = "b".into())).await.unwrap_err();
    assert_eq!(edited.code(), Code::AlreadyExists, "made from another spec");
    let clone = with(|request| {
        request.clone_from = "s".into();
        request.set_power_state(own::PowerState::Unspecified);
    });
    assert_eq!(client.create_vm(clone).await.unwrap_err().code(), Code::InvalidArgument);
    let owner = own_owner("team", "web", "u-1", 0);
    let stale = own::StopVmRequest { vm: id("team-web"), grace_ms: Some(0), owner };
    let refused = client.stop_vm(stale).await.unwrap_err();
    assert_eq!(refused.metadata().get("coracle-code").unwrap(), "COR-VM-006");
}
