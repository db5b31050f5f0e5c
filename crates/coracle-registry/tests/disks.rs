//! VM disks in windows, against our registry and against Debian's: what comes back is byte for byte what went in,
//! little moves twice, and wrong bytes are refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use coracle_image::{
    Credentials, DiskOptions, DiskProgress, ImageError, Reference, Secret, pull_disk, push_disk,
};
use coracle_registry::{Config, Metrics, serve};
use coracle_testkit::registry::DebianRegistry;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const MIB: u64 = 1 << 20;

struct Ours {
    address: std::net::SocketAddr,
    token: String,
    dir: tempfile::TempDir,
    stop: CancellationToken,
    _task: TaskTracker,
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn ours() -> Ours {
    let dir = tempfile::tempdir().unwrap();
    let config = Config::new(dir.path().to_owned(), "127.0.0.1:0".parse().unwrap());
    let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
    let (stop, task, (send, ready)) = (CancellationToken::new(), TaskTracker::new(), oneshot::channel());
    let until = stop.clone();
    task.spawn(async move {
        serve(config, metrics, until, move |r| send.send(r.address).unwrap()).await.unwrap()
    });
    let address = ready.await.unwrap();
    let token = fs::read_to_string(dir.path().join("token")).unwrap().trim().to_owned();
    Ours { address, token, dir, stop, _task: task }
}

fn options(token: Option<&str>) -> DiskOptions {
    let credentials = match token {
        Some(token) => Credentials::Basic { user: "token".into(), password: Secret::new(token) },
        None => Credentials::Anonymous,
    };
    DiskOptions { window_bytes: Some(MIB), credentials, ..DiskOptions::default() }
}

fn quiet() -> DiskProgress {
    Arc::new(|_, _| {})
}

/// A disk of 20.5 MiB with noise in MiB 0, 3, 4 and the last half one; the rest are holes.
fn disk(path: &Path) {
    let file = File::create(path).unwrap();
    file.set_len(20 * MIB + MIB / 2).unwrap();
    for (at, len) in [(0, MIB), (3 * MIB, 2 * MIB), (20 * MIB, MIB / 2)] {
        file.write_all_at(&noise(at, len), at).unwrap();
    }
}

fn noise(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| byte()).collect()
}

fn reference(address: std::net::SocketAddr, name: &str) -> Reference {
    format!("{address}/{name}").parse().unwrap()
}

async fn round_trip(address: std::net::SocketAddr, options: &DiskOptions) {
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    disk(&source);
    let name = reference(address, "vms/disk:1");
    let first = push_disk(&source, &name, options, quiet()).await.unwrap();
    assert_eq!((first.disk_bytes, first.windows, first.moved), (20 * MIB + MIB / 2, 4, 4));
    let again = push_disk(&source, &name, options, quiet()).await.unwrap();
    assert_eq!((again.moved, again.digest), (0, first.digest), "the same disk moves nothing");
    let pulled = pull_disk(&name, &target, options, quiet()).await.unwrap();
    assert_eq!((pulled.digest, pulled.moved), (first.digest, 4));
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap(), "byte for byte");
    assert!(fs::metadata(&target).unwrap().blocks() * 512 < 5 * MIB, "what is zero stays a hole");
    let file = File::options().write(true).open(&source).unwrap();
    file.write_all_at(b"changed", 4 * MIB + 5).unwrap();
    file.write_all_at(&vec![0; 1 << 20], 0).unwrap();
    let change = push_disk(&source, &name, options, quiet()).await.unwrap();
    assert_eq!((change.windows, change.moved), (3, 1), "one window changed, one became zero");
    pull_disk(&name, &target, options, quiet()).await.unwrap();
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn round_trip_through_ours() {
    let ours = ours().await;
    round_trip(ours.address, &options(Some(&ours.token))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn round_trip_through_debians() {
    let Some(_) = coracle_testkit::tools::require(["docker-registry"]) else { return };
    let debian = DebianRegistry::start().unwrap();
    round_trip(debian.address(), &options(None)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pull_that_was_cut_goes_on_with_what_is_right() {
    let ours = ours().await;
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    disk(&source);
    let (name, options) = (reference(ours.address, "vms/disk:1"), options(Some(&ours.token)));
    push_disk(&source, &name, &options, quiet()).await.unwrap();
    let partial = File::create(dir.path().join("back.raw.partial")).unwrap();
    partial.set_len(20 * MIB + MIB / 2).unwrap();
    partial.write_all_at(&noise(0, MIB), 0).unwrap();
    partial.write_all_at(b"half a window", 3 * MIB).unwrap();
    partial.write_all_at(b"of another disk", 10 * MIB).unwrap();
    let pulled = pull_disk(&name, &target, &options, quiet()).await.unwrap();
    assert_eq!((pulled.windows, pulled.moved), (4, 3), "the first window was there");
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
    assert!(!dir.path().join("back.raw.partial").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_and_zero_disks_come_back() {
    let ours = ours().await;
    let dir = tempfile::tempdir().unwrap();
    for (n, bytes) in [(0, 0), (1, 1), (2, 3 * MIB)] {
        let (source, target) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
        File::create(&source).unwrap().set_len(bytes).unwrap();
        let (name, options) = (reference(ours.address, &format!("vms/zero:{n}")), options(Some(&ours.token)));
        let pushed = push_disk(&source, &name, &options, quiet()).await.unwrap();
        assert_eq!((pushed.windows, pushed.disk_bytes), (0, bytes));
        pull_disk(&name, &target, &options, quiet()).await.unwrap();
        assert_eq!(fs::metadata(&target).unwrap().len(), bytes);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_window_and_what_is_no_disk_are_refused() {
    let ours = ours().await;
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    disk(&source);
    let (name, mut options) = (reference(ours.address, "vms/disk:1"), options(Some(&ours.token)));
    options.retries = 0;
    push_disk(&source, &name, &options, quiet()).await.unwrap();
    let blobs = fs::read_dir(ours.dir.path().join("blobs/sha256")).unwrap().map(|e| e.unwrap().path());
    let window = blobs.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    File::options().write(true).open(&window).unwrap().write_all_at(b"damage", 100).unwrap();
    let refused = pull_disk(&name, &target, &options, quiet()).await.unwrap_err();
    assert!(matches!(refused, ImageError::DigestMismatch { .. }), "{refused}");
    assert!(!target.exists());
    let absent =
        pull_disk(&reference(ours.address, "vms/none:1"), &target, &options, quiet()).await.unwrap_err();
    assert!(matches!(absent, ImageError::NotFound { .. }), "{absent}");
    let anonymous = DiskOptions { credentials: Credentials::Anonymous, ..options };
    let denied = push_disk(&source, &name, &anonymous, quiet()).await.unwrap_err();
    assert!(matches!(denied, ImageError::Unauthorized { .. }), "{denied}");
}
