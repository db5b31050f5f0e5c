//! Shared directories of VMs that are off.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Sandbox, VmSpec, VolumeRequest};
use coracle_oci::NoProgress;
use coracle_testkit::eventually;

use super::support::Node;

/// Whether this process has the directory, or a file in it, open.
fn is_open(dir: &Path) -> bool {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    files.filter_map(|file| std::fs::read_link(file.path()).ok()).any(|target| target.starts_with(dir))
}

/// A kubelet unmounts the volumes of a pod once its sandbox is off, long before it removes the sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn stopped_vm_leaves_its_shared_directories() {
    let node = Node::new().await;
    let dir = node.dir.path().join("volume");
    std::fs::create_dir(&dir).unwrap();
    let host = node.open().await;
    let source = dir.to_str().unwrap().to_owned();
    let local_user = Some(rustix::process::geteuid().as_raw());
    let volume = VolumeRequest { name: "data".into(), source, local_user, ..VolumeRequest::default() };
    let spec = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of("pod".parse().unwrap(), "") };
    host.create(spec, Arc::new(NoProgress)).await.unwrap();
    host.start("pod", None).await.unwrap();
    host.attach_volume("pod", volume, None).await.unwrap();
    assert!(is_open(&dir), "its guest may ask for files");
    host.stop("pod", Duration::ZERO, None).await.unwrap();
    eventually("nothing of it is open", async || (!is_open(&dir)).then_some(())).await.unwrap();
    host.start("pod", None).await.unwrap();
    eventually("it is served again", async || is_open(&dir).then_some(())).await.unwrap();
    host.delete("pod", true, None).await.unwrap();
    host.shutdown().await;
}
