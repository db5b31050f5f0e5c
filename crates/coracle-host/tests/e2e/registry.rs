//! Snapshots and images between real VMs and an ordinary registry: Debian's docker-registry.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Node, counter, exec, last_number, run, wait_until_counted};
use coracle_frontends::HostService;
use coracle_host::{COMMIT_ANNOTATION, Host, HostError, Record, RestoreSpec, SnapshotName, VmSpec};
use coracle_image::{PullOptions, PullPolicy, PushOptions};
use coracle_oci::{NoProgress, Reference};
use coracle_proto::host as pb;
use coracle_proto::host::host_server::Host as _;
use coracle_testkit::gate::Gate;
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::{netns, tools};
use coracle_types::VmState;
use tonic::Request;

fn no_progress() -> coracle_disk::DiskProgress {
    Arc::new(|_, _| {})
}

fn registry() -> Option<DebianRegistry> {
    tools::require(["docker-registry"])?;
    Some(DebianRegistry::start().unwrap())
}

fn named(name: &str) -> SnapshotName {
    name.parse().unwrap()
}

/// Names in the snapshots' directory, including hidden ones.
fn snapshot_entries(node: &Node) -> Vec<String> {
    let entries = fs::read_dir(node.state().join("snapshots")).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

async fn end(host: Host) {
    for view in host.list() {
        host.delete(view.record.id.as_str(), true, None).await.unwrap();
    }
    host.network().teardown().await.unwrap();
    host.shutdown().await;
}

/// Files of blobs, the largest first.
fn blobs(dir: &Path) -> Vec<PathBuf> {
    let mut open = vec![dir.to_owned()];
    let mut found = Vec::new();
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.ends_with("data") {
                found.push(path);
            }
        }
    }
    found.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).unwrap().len()));
    found
}

/// The image below a snapshot's disk cannot be removed without force.
async fn image_of_a_snapshot_stays(host: &Host) {
    let service = HostService::new(host.clone());
    let remove = async |force| {
        let request = pb::RemoveImageRequest { reference: crate::support::IMAGE.to_owned(), force };
        service.remove_image(Request::new(request)).await.map(|_| ())
    };
    let refused = remove(false).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("used by snapshot moving;"), "{refused}");
    let listed = service.list_images(Request::new(pb::ListImagesRequest {})).await.unwrap().into_inner();
    assert_eq!(listed.images[0].used_by, ["snapshot moving"]);
    assert!(listed.images[0].rootfs_bytes > 0, "a VM ran from its root file system");
    let kept = service.prune_images(Request::new(pb::PruneImagesRequest { dry_run: true })).await.unwrap();
    assert_eq!(kept.into_inner().removed, Vec::<String>::new());
    remove(true).await.unwrap();
}

/// The registry becomes unavailable in the middle of a pull, and the daemon restarts: only the rest is transferred.
async fn interrupted_pull_resumes(node: &Node, registry: &DebianRegistry, whole: u64) -> Host {
    let gate = Gate::start(registry.address(), whole / 2).unwrap();
    let place: Reference = format!("{}/vms/web:moving", gate.address()).parse().unwrap();
    let host = node.open().await;
    let cut = host.pull_snapshot(&place, named("cut"), no_progress()).await.unwrap_err();
    assert!(matches!(&cut, HostError::Image { source, .. } if source.is_transient()), "{}", cut.chain());
    assert_eq!(snapshot_entries(node), [".pull-cut"]);
    assert_eq!(host.snapshots().await.unwrap(), [], "it is not visible yet");
    host.shutdown().await;
    drop(host);

    let host = node.open().await;
    gate.open();
    let before = gate.sent();
    host.pull_snapshot(&place, named("cut"), no_progress()).await.unwrap();
    let again = gate.sent() - before;
    // Half was present, except for the chunks in flight. The manifest and the response headers are transferred again.
    assert!(again < whole * 3 / 4, "{again} bytes of {whole} were moved after {before}");
    assert_eq!(snapshot_entries(node), ["cut"]);
    host.delete_snapshot("cut").await.unwrap();
    host
}

#[test]
fn snapshot_moves_to_another_node_through_a_registry() {
    netns::run_within(Duration::from_secs(300), || async {
        let (Some(node), Some(registry)) = (Node::new().await, registry()) else { return };
        let host = node.open().await;
        let web = counter(&host, "web").await;
        wait_until_counted(&host, "web", 5).await;
        host.hibernate("web", None).await.unwrap();
        let still = last_number(&host, "web").await;
        host.save_snapshot("web", Some(named("moving"))).await.unwrap();
        let place: Reference = format!("{}/vms/web:moving", registry.address()).parse().unwrap();
        let first = host.push_snapshot("moving", &place, no_progress()).await.unwrap();
        assert!(first.moved > 0 && first.moved == first.chunks, "{first:?}");
        let again = host.push_snapshot("moving", &place, no_progress()).await.unwrap();
        assert_eq!((again.moved, again.digest), (0, first.digest), "the same snapshot moves nothing");
        let absent = host.push_snapshot("none", &place, no_progress()).await.unwrap_err();
        assert_eq!(absent.code(), "COR-SNP-001");
        host.delete("web", true, None).await.unwrap();
        image_of_a_snapshot_stays(&host).await;
        end(host).await;

        let other = Node::new().await.unwrap();
        let host = interrupted_pull_resumes(&other, &registry, first.moved_bytes).await;
        let pulled = host.pull_snapshot(&place, named("arrived"), no_progress()).await.unwrap();
        assert_eq!((pulled.name.as_str(), pulled.vm.as_str()), ("arrived", "web"));
        assert_eq!(pulled.agent, env!("CARGO_PKG_VERSION"), "the agent in its memory");
        let taken = host.pull_snapshot(&place, named("arrived"), no_progress()).await.unwrap_err();
        assert_eq!(taken.code(), "COR-SNP-002");
        let moved = host.restore("arrived", RestoreSpec::default()).await.unwrap();
        assert_eq!((moved.id, moved.address), (web.id, web.address), "the same machine");
        wait_until_counted(&host, "web", still + 5).await;

        // Content that was changed in the registry is refused and leaves nothing.
        let window = blobs(registry.dir()).swap_remove(0);
        File::options().write(true).open(&window).unwrap().write_all_at(b"damage", 1000).unwrap();
        let refused = host.pull_snapshot(&place, named("damaged"), no_progress()).await.unwrap_err();
        assert_eq!(refused.code(), "COR-IMG-007", "{}", refused.chain());
        assert_eq!(snapshot_entries(&other), ["arrived"]);
        end(host).await;
    });
}

async fn image_of(host: &Host, reference: &Reference) -> coracle_image::Image {
    host.images().get(reference).await.unwrap().unwrap()
}

/// Runs a command whose VM is committed as `image`, and waits until the VM is off.
async fn run_and_commit(host: &Host, name: &str, image: &str, script: &str) -> Record {
    let metadata = [(COMMIT_ANNOTATION.to_owned(), image.to_owned())].into();
    let command = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    host.create(VmSpec { metadata, command, ..crate::support::spec(name) }, Arc::new(NoProgress))
        .await
        .unwrap();
    host.start(name, None).await.unwrap();
    let mut view = host.observe(name).unwrap();
    let off = view.wait_for(|view| view.record.state == VmState::Stopped);
    tokio::time::timeout(Duration::from_secs(60), off)
        .await
        .expect("off in time")
        .unwrap()
        .record
        .as_ref()
        .clone()
}

/// The image is pushed if the command exited with 0, and only then; the record gives the result and the reason.
#[test]
fn successful_command_pushes_the_requested_image() {
    netns::run_within(Duration::from_secs(300), || async {
        let (Some(node), Some(registry)) = (Node::new().await, registry()) else { return };
        let host = node.open().await;
        let place = |tag: &str| format!("{}/build/finished:{tag}", registry.address());
        let script = "echo made > /www/made.html; echo last words";
        let good = run_and_commit(&host, "good", &place("good"), script).await;
        assert_eq!(good.message, format!("the workload exited with code 0; pushed as {}", place("good")));
        let said: Vec<u8> = host.logs("good").await.unwrap().0.into_iter().flat_map(|e| e.data).collect();
        assert_eq!(String::from_utf8(said).unwrap(), "last words\n", "its output is complete");
        let bad = run_and_commit(&host, "bad", &place("bad"), "echo half > /www/made.html; exit 3").await;
        assert_eq!((bad.message.as_str(), bad.committed), ("the workload exited with code 3", None));
        let nowhere = run_and_commit(&host, "nowhere", "127.0.0.1:1/build/x:1", "true").await;
        let why = "the workload exited with code 0; no image was pushed as 127.0.0.1:1/build/x:1: ";
        assert!(nowhere.message.starts_with(why), "{}", nowhere.message);
        assert_eq!((nowhere.committed, nowhere.exit.map(|exit| exit.code)), (None, Some(0)));
        let wrong = [(COMMIT_ANNOTATION.to_owned(), "Not A Reference".to_owned())].into();
        let spec = VmSpec { metadata: wrong, ..crate::support::spec("wrong") };
        let refused = host.create(spec, Arc::new(NoProgress)).await.unwrap_err();
        assert!(matches!(refused, HostError::Invalid { .. }), "{}", refused.chain());
        end(host).await;

        let other = Node::new().await.unwrap();
        let host = other.open().await;
        let options = PullOptions { policy: PullPolicy::Always, ..PullOptions::default() };
        let pull = async |tag: &str| {
            let reference: Reference = place(tag).parse().unwrap();
            host.images().pull(&reference, &options, Arc::new(NoProgress)).await
        };
        assert_eq!(
            pull("bad").await.unwrap_err().code(),
            "COR-IMG-004",
            "a command that failed leaves no image"
        );
        let pulled = pull("good").await.unwrap();
        assert_eq!(good.committed, Some(pulled.digest.to_string()));
        let spec = VmSpec { image: place("good"), ..crate::support::spec("runner") };
        host.create(spec, Arc::new(NoProgress)).await.unwrap();
        host.start("runner", None).await.unwrap();
        let (said, code) = exec(&host, "runner", &["cat", "/www/made.html"]).await;
        assert_eq!((said.as_str(), code), ("made\n", 0));
        end(host).await;
    });
}

#[test]
fn committed_vm_runs_as_an_image_on_another_node() {
    netns::run_within(Duration::from_secs(300), || async {
        let (Some(node), Some(registry)) = (Node::new().await, registry()) else { return };
        let host = node.open().await;
        run(&host, "builder").await;
        // After the server is in its directory: a directory replaces that of the image, and a file has the same size and time.
        let script = "until busybox cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | busybox grep -q ':0050 '; do sleep 0.1; done; \
                      busybox rm -r /www; busybox mkdir /www; \
                      busybox sed s/x/y/ /etc/passwd > /etc/p; touch -r /etc/passwd /etc/p; busybox mv /etc/p /etc/passwd; \
                      echo built > /www/new.html; busybox mkdir -p /opt/tool; echo x > /opt/tool/x; touch /bin/grep2; \
                      busybox rm /bin/date; busybox chmod 700 /opt/tool; busybox ln -s new.html /www/link";
        assert_eq!(exec(&host, "builder", &["sh", "-c", script]).await, (String::new(), 0));
        let service = HostService::new(host.clone());
        let name = format!("{}/build/result:1", registry.address());
        let request = pb::CommitVmRequest { vm: "builder".into(), reference: name.clone() };
        let image = service.commit_vm(Request::new(request)).await.unwrap().into_inner();
        assert_eq!(image.layers, 2, "the layers of the base, and one with what differs");
        let reference: Reference = name.parse().unwrap();
        let base: Reference = crate::support::IMAGE.parse().unwrap();
        let grown = image_of(&host, &reference).await.size_bytes - image_of(&host, &base).await.size_bytes;
        assert!(grown < 8192, "{grown} bytes more: what did not change is not in the layer");

        let push = async || {
            let options = PushOptions::default();
            host.images().push(&reference, &reference, &options, Arc::new(NoProgress)).await.unwrap().moved
        };
        assert_eq!(push().await, 3, "two layers and the configuration");
        assert_eq!(push().await, 0);
        end(host).await;

        let other = Node::new().await.unwrap();
        let host = other.open().await;
        let options = PullOptions { policy: PullPolicy::Always, ..PullOptions::default() };
        host.images().pull(&reference, &options, Arc::new(NoProgress)).await.unwrap();
        let spec = VmSpec { image: name, ..crate::support::spec("runner") };
        host.create(spec, Arc::new(NoProgress)).await.unwrap();
        host.start("runner", None).await.unwrap();
        let look = "cat /www/link /opt/tool/x; ls /bin/grep2; ls -ld /opt/tool | busybox cut -c1-10; ls /www; \
                    test -e /bin/date || echo gone; cat /etc/passwd; hostname";
        let (said, code) = exec(&host, "runner", &["sh", "-c", look]).await;
        let want = "built\nx\n/bin/grep2\ndrwx------\nlink\nnew.html\ngone\nroot:y:0:0::/:/bin/sh\nrunner\n";
        assert_eq!((said.as_str(), code), (want, 0));
        end(host).await;
    });
}
