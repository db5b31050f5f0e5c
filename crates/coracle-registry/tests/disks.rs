//! VM disks in chunks, against our registry and Debian's: a pulled disk equals the pushed one byte for byte, little is
//! transferred twice, and wrong bytes are refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use coracle_disk::{
    CocoonVersion, DiskFormat, DiskImages, DiskOptions, DiskProgress, DiskReport, SnapshotBase, SnapshotFile,
    pull_cocoon, pull_disk, push_cocoon, push_disk, push_snapshot, take_raw,
};
use coracle_image::ImageError;
use coracle_oci::{Credentials, Descriptor, Digest, OciError, Reference, Secret};
use coracle_registry::{Config, Metrics, serve};
use coracle_testkit::registry::DebianRegistry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
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

async fn start_registry() -> Ours {
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
    DiskOptions { chunk_bytes: Some(MIB), credentials, ..DiskOptions::default() }
}

fn no_progress() -> DiskProgress {
    Arc::new(|_, _| {})
}

/// Writes a disk of 20.5 MiB with noise in MiB 0, 3, 4 and the last half MiB. All other ranges are holes.
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
    let first = push_disk(&source, &name, options, no_progress()).await.unwrap();
    assert_eq!((first.disk_bytes, first.chunks, first.moved), (20 * MIB + MIB / 2, 4, 4));
    let again = push_disk(&source, &name, options, no_progress()).await.unwrap();
    assert_eq!((again.moved, again.digest), (0, first.digest), "the same disk moves nothing");
    let pulled = pull_disk(&name, &target, options, no_progress()).await.unwrap();
    assert_eq!((pulled.digest, pulled.moved), (first.digest, 4));
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap(), "byte for byte");
    assert!(fs::metadata(&target).unwrap().blocks() * 512 < 5 * MIB, "what is zero stays a hole");
    let file = File::options().write(true).open(&source).unwrap();
    file.write_all_at(b"changed", 4 * MIB + 5).unwrap();
    file.write_all_at(&vec![0; 1 << 20], 0).unwrap();
    let change = push_disk(&source, &name, options, no_progress()).await.unwrap();
    assert_eq!((change.chunks, change.moved), (3, 1), "one chunk changed, one became zero");
    let again = pull_disk(&name, &target, options, no_progress()).await.unwrap();
    assert_eq!((again.chunks, again.moved), (3, 1), "the others were in the file that it replaces");
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
    assert!(fs::metadata(&target).unwrap().blocks() * 512 < 5 * MIB, "what became zero is a hole");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_round_trips_through_own_registry() {
    let ours = start_registry().await;
    round_trip(ours.address, &options(Some(&ours.token))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_round_trips_through_debian_registry() {
    let Some(_) = coracle_testkit::tools::require(["docker-registry"]) else { return };
    let debian = DebianRegistry::start().unwrap();
    round_trip(debian.address(), &options(None)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_pull_keeps_valid_chunks() {
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    disk(&source);
    let (name, options) = (reference(ours.address, "vms/disk:1"), options(Some(&ours.token)));
    push_disk(&source, &name, &options, no_progress()).await.unwrap();
    let partial = File::create(dir.path().join("back.raw.partial")).unwrap();
    partial.set_len(20 * MIB + MIB / 2).unwrap();
    partial.write_all_at(&noise(0, MIB), 0).unwrap();
    partial.write_all_at(b"half a chunk", 3 * MIB).unwrap();
    partial.write_all_at(b"of another disk", 10 * MIB).unwrap();
    let pulled = pull_disk(&name, &target, &options, no_progress()).await.unwrap();
    assert_eq!((pulled.chunks, pulled.moved), (4, 3), "the first chunk was present");
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
    assert!(!dir.path().join("back.raw.partial").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_and_zero_disks_round_trip() {
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    for (n, bytes) in [(0, 0), (1, 1), (2, 3 * MIB)] {
        let (source, target) = (dir.path().join("a.raw"), dir.path().join("b.raw"));
        File::create(&source).unwrap().set_len(bytes).unwrap();
        let (name, options) = (reference(ours.address, &format!("vms/zero:{n}")), options(Some(&ours.token)));
        let pushed = push_disk(&source, &name, &options, no_progress()).await.unwrap();
        assert_eq!((pushed.chunks, pushed.disk_bytes), (0, bytes));
        pull_disk(&name, &target, &options, no_progress()).await.unwrap();
        assert_eq!(fs::metadata(&target).unwrap().len(), bytes);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_chunk_and_other_artifact_are_refused() {
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    disk(&source);
    let (name, mut options) = (reference(ours.address, "vms/disk:1"), options(Some(&ours.token)));
    options.retries = 0;
    push_disk(&source, &name, &options, no_progress()).await.unwrap();
    let blobs = fs::read_dir(ours.dir.path().join("blobs/sha256")).unwrap().map(|e| e.unwrap().path());
    let chunk = blobs.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    File::options().write(true).open(&chunk).unwrap().write_all_at(b"damage", 100).unwrap();
    let refused = pull_disk(&name, &target, &options, no_progress()).await.unwrap_err();
    assert!(matches!(refused, ImageError::Oci(OciError::DigestMismatch { .. })), "{refused}");
    assert!(!target.exists());
    let absent = pull_disk(&reference(ours.address, "vms/none:1"), &target, &options, no_progress())
        .await
        .unwrap_err();
    assert!(matches!(absent, ImageError::Oci(OciError::NotFound { .. })), "{absent}");
    let anonymous = DiskOptions { credentials: Credentials::Anonymous, ..options };
    let denied = push_disk(&source, &name, &anonymous, no_progress()).await.unwrap_err();
    assert!(matches!(denied, ImageError::Oci(OciError::Unauthorized { .. })), "{denied}");
}

/// Disks in every foreign format are pulled from our registry and from Debian's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_in_foreign_formats_round_trip() {
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    disk(&source);
    for format in [DiskFormat::ContainerDisk, DiskFormat::CloudImage, DiskFormat::Tart] {
        let options = DiskOptions { format, ..options(Some(&ours.token)) };
        let name = reference(ours.address, &format!("vms/{}:latest", format!("{format:?}").to_lowercase()));
        let pushed = push_disk(&source, &name, &options, no_progress()).await.unwrap();
        assert_eq!((pushed.moved, pushed.disk_bytes), (1, 20 * MIB + MIB / 2), "{format:?}");
        let again = push_disk(&source, &name, &options, no_progress()).await.unwrap();
        assert_eq!((again.moved, again.digest), (0, pushed.digest), "{format:?}: the same bytes");
        let pulled = pull_disk(&name, &target, &options, no_progress()).await.unwrap();
        assert_eq!((pulled.digest, pulled.disk_bytes), (pushed.digest, pushed.disk_bytes));
        assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap(), "{format:?}");
        assert!(fs::metadata(&target).unwrap().blocks() * 512 < 5 * MIB, "what is zero stays a hole");
        fs::remove_file(&target).unwrap();
    }
    let file = reqwest::get(format!("http://{}/dl/vms/cloudimage", ours.address)).await.unwrap();
    assert!(file.bytes().await.unwrap() == fs::read(&source).unwrap(), "as one file, too");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["disk.raw"], "no temporary file is left");
}

/// Uploads blobs and a manifest without a client library. Returns the location of the manifest.
async fn push_raw(ours: &Ours, name: &str, blobs: &[&[u8]], manifest: &serde_json::Value) {
    let http = reqwest::Client::new();
    let (repo, tag) = name.split_once(':').unwrap();
    for blob in blobs {
        let named = coracle_testkit::oci::digest(blob);
        let url = format!("http://{}/v2/{repo}/blobs/uploads/?digest={named}", ours.address);
        let put = http.post(url).bearer_auth(&ours.token).body(blob.to_vec()).send().await.unwrap();
        assert_eq!(put.status(), 201);
    }
    let url = format!("http://{}/v2/{repo}/manifests/{tag}", ours.address);
    let put = http
        .put(url)
        .bearer_auth(&ours.token)
        .header("content-type", "application/vnd.oci.image.manifest.v1+json");
    assert_eq!(put.body(manifest.to_string()).send().await.unwrap().status(), 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tart_and_chunked_disks_are_pulled_and_verified() {
    use serde_json::json;
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("back.raw");
    let options = options(Some(&ours.token));
    let digest = coracle_testkit::oci::digest;
    let (a, b) = (noise(1, 100_000), vec![0; 200_000]);
    let (packed_a, packed_b) = (lz4_stored(&a), lz4_stored(&b));
    let layer = |kind: &str, blob: &[u8], notes| json!({"mediaType": kind, "digest": digest(blob), "size": blob.len(), "annotations": notes});
    let tart = |raw: &[u8], said: &[u8], blob: &[u8]| {
        layer(
            "application/vnd.cirruslabs.tart.disk.v2",
            blob,
            json!({
                "org.cirruslabs.tart.uncompressed-size": raw.len().to_string(),
                "org.cirruslabs.tart.uncompressed-content-digest": digest(said),
            }),
        )
    };
    let config =
        json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(b"{}"), "size": 2});
    let manifest = |layers: Vec<serde_json::Value>| json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": layers});
    let blobs: [&[u8]; 3] = [b"{}", &packed_a, &packed_b];
    push_raw(&ours, "tart:1", &blobs, &manifest(vec![tart(&a, &a, &packed_a), tart(&b, &b, &packed_b)]))
        .await;
    pull_disk(&reference(ours.address, "tart:1"), &target, &options, no_progress()).await.unwrap();
    assert!(fs::read(&target).unwrap() == [a.clone(), b.clone()].concat());
    fs::remove_file(&target).unwrap();
    push_raw(&ours, "tart:2", &blobs, &manifest(vec![tart(&a, &b, &packed_a)])).await;
    let lie =
        pull_disk(&reference(ours.address, "tart:2"), &target, &options, no_progress()).await.unwrap_err();
    assert!(matches!(lie, ImageError::Oci(OciError::DigestMismatch { .. })), "{lie}");
    push_raw(&ours, "tart:3", &blobs, &manifest(vec![tart(&b, &a, &packed_a)])).await;
    let lie =
        pull_disk(&reference(ours.address, "tart:3"), &target, &options, no_progress()).await.unwrap_err();
    assert!(matches!(lie, ImageError::Oci(OciError::Hostile { .. })), "{lie}");
    let asif = br#"{"config":{"Labels":{"org.cirruslabs.tart.disk.format":"asif"}}}"#;
    let mut other = manifest(vec![tart(&a, &a, &packed_a)]);
    other["config"]["digest"] = digest(asif).into();
    other["config"]["size"] = asif.len().into();
    push_raw(&ours, "tart:4", &[asif, &packed_a], &other).await;
    let asif =
        pull_disk(&reference(ours.address, "tart:4"), &target, &options, no_progress()).await.unwrap_err();
    assert!(matches!(asif, ImageError::Oci(OciError::Unsupported { .. })), "{asif}");

    let chunks: Vec<Vec<u8>> =
        [&a, &b].into_iter().map(|raw| zstd::encode_all(raw.as_slice(), 1).unwrap()).collect();
    let chunk = |n: usize| {
        layer(
            "application/vnd.cocoonstack.disk.raw+zstd",
            &chunks[n],
            json!({
                "org.opencontainers.image.title": "disk.raw",
                "cocoonstack.chunk.index": n.to_string(), "cocoonstack.chunk.count": "2",
            }),
        )
    };
    let cloud = |layers| {
        let mut all = manifest(layers);
        all["artifactType"] = "application/vnd.cocoonstack.os-image.v1+json".into();
        all
    };
    let blobs: [&[u8]; 3] = [b"{}", &chunks[0], &chunks[1]];
    push_raw(&ours, "cloud:1", &blobs, &cloud(vec![chunk(1), chunk(0)])).await;
    pull_disk(&reference(ours.address, "cloud:1"), &target, &options, no_progress()).await.unwrap();
    assert!(fs::read(&target).unwrap() == [a, b].concat());
    fs::remove_file(&target).unwrap();
    push_raw(&ours, "cloud:2", &blobs, &cloud(vec![chunk(1)])).await;
    let gap =
        pull_disk(&reference(ours.address, "cloud:2"), &target, &options, no_progress()).await.unwrap_err();
    assert!(matches!(gap, ImageError::Oci(OciError::Hostile { .. })), "{gap}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left of what was refused");
}

/// Proxy that forwards to `to`, but cuts the first connection that has sent `after` bytes. Counts the bytes that clients send.
async fn cutting_proxy(to: std::net::SocketAddr, after: u64) -> (std::net::SocketAddr, Arc<AtomicU64>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, sent) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
    let (counted, cut) = (Arc::clone(&sent), Arc::new(AtomicBool::new(false)));
    let pass = async move {
        let mut open = tokio::task::JoinSet::new();
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let (counted, cut) = (Arc::clone(&counted), Arc::clone(&cut));
            open.spawn(async move {
                let mut server = tokio::net::TcpStream::connect(to).await.unwrap();
                let (mut from_client, mut to_client) = client.split();
                let (mut from_server, mut to_server) = server.split();
                let up = async {
                    let (mut own, mut buffer) = (0, vec![0; 64 << 10]);
                    while let Ok(n @ 1..) = from_client.read(&mut buffer).await {
                        own += n as u64;
                        counted.fetch_add(n as u64, Relaxed);
                        if to_server.write_all(&buffer[..n]).await.is_err() {
                            return;
                        }
                        if own > after && !cut.swap(true, Relaxed) {
                            return;
                        }
                    }
                };
                tokio::select! {
                    () = up => {}
                    _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
                }
            });
        }
    };
    let task = TaskTracker::new();
    task.spawn(pass);
    (address, sent)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_push_resumes() {
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    let bytes = noise(5, 16 * MIB);
    fs::write(&source, &bytes).unwrap();
    let (proxy, sent) = cutting_proxy(ours.address, 8 * MIB).await;
    let options = DiskOptions { chunk_bytes: Some(16 * MIB), ..options(Some(&ours.token)) };
    let pushed = push_disk(&source, &reference(proxy, "vms/cut:1"), &options, no_progress()).await.unwrap();
    assert_eq!((pushed.chunks, pushed.moved), (1, 1));
    let sent = sent.load(Relaxed);
    assert!(sent > 16 * MIB && sent < 20 * MIB, "{sent} bytes were sent, not all of them twice");
    pull_disk(&reference(ours.address, "vms/cut:1"), &target, &options, no_progress()).await.unwrap();
    assert!(fs::read(&target).unwrap() == bytes);
}

fn lz4_stored(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
    [b"bv4-", &length[..], bytes, b"bv4$"].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, bytes).unwrap();
    packed.finish().unwrap()
}

fn piece(kind: &str, blob: &[u8], notes: serde_json::Value) -> serde_json::Value {
    let digest = coracle_testkit::oci::digest(blob);
    serde_json::json!({"mediaType": kind, "digest": digest, "size": blob.len(), "annotations": notes})
}

fn image_of(layers: Vec<serde_json::Value>) -> serde_json::Value {
    let config = piece("application/vnd.oci.image.config.v1+json", b"{}", serde_json::json!({}));
    serde_json::json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": layers})
}

fn tart_piece(raw: &[u8], blob: &[u8]) -> serde_json::Value {
    let notes = serde_json::json!({
        "org.cirruslabs.tart.uncompressed-size": raw.len().to_string(),
        "org.cirruslabs.tart.uncompressed-content-digest": coracle_testkit::oci::digest(raw),
    });
    piece("application/vnd.cirruslabs.tart.disk.v2", blob, notes)
}

impl Ours {
    /// File of a blob in the registry.
    fn blob(&self, bytes: &[u8]) -> std::path::PathBuf {
        let digest = coracle_testkit::oci::digest(bytes);
        self.dir.path().join("blobs/sha256").join(digest.trim_start_matches("sha256:"))
    }

    /// Damages the first bytes of a blob: only a client that does not request them gets correct bytes.
    fn damage(&self, bytes: &[u8]) {
        let file = File::options().write(true).open(self.blob(bytes)).unwrap();
        file.write_all_at(b"damaged", 0).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lume_and_macos_vz_disks_are_pulled() {
    use serde_json::json;
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("back.raw");
    let options = options(Some(&ours.token));
    let (a, b) = ([noise(1, 50_000), vec![0; 150_000]].concat(), noise(2, 70_000));
    let chunk = |n: usize, at: usize, raw: &[u8], blob: &[u8]| {
        let notes = json!({
            "org.trycua.lume.part.number": n.to_string(), "org.trycua.lume.part.offset": at.to_string(),
            "org.trycua.lume.content.uncompressed-size": raw.len().to_string(),
        });
        piece("application/vnd.trycua.lume.disk.v1", blob, notes)
    };
    let part = |n: usize, blob: &[u8]| {
        let kind = format!("application/vnd.oci.image.layer.v1.tar;part.number={n};part.total=2");
        piece(&kind, blob, json!({}))
    };
    let first = |blob: &[u8]| piece("application/octet-stream+lz4", blob, json!({}));
    let vz = |raw: &[u8], blob: &[u8]| {
        let notes = json!({
            "com.agoda.macosvz.content.uncompressed-size": raw.len().to_string(),
            "com.agoda.macosvz.content.uncompressed-digest": coracle_testkit::oci::digest(raw),
        });
        piece("application/vnd.agoda.macosvz.disk.image.v1", blob, notes)
    };
    let (packed_a, packed_b, lz_a, lz_b) = (gzip(&a), gzip(&b), lz4_stored(&a), lz4_stored(&b));
    let whole = [a.clone(), b.clone()].concat();
    let packed = gzip(&whole);
    for (name, blobs, layers) in [
        (
            "lume:chunks",
            vec![&packed_a, &packed_b],
            vec![chunk(2, a.len(), &b, &packed_b), chunk(1, 0, &a, &packed_a)],
        ),
        ("lume:parts", vec![&a, &b], vec![part(2, &b), part(1, &a)]),
        ("lume:first", vec![&lz_a, &lz_b], vec![first(&lz_a), first(&lz_b)]),
        ("vz:1", vec![&packed], vec![vz(&whole, &packed)]),
    ] {
        let blobs: Vec<&[u8]> = blobs.into_iter().map(Vec::as_slice).chain([b"{}".as_slice()]).collect();
        push_raw(&ours, name, &blobs, &image_of(layers)).await;
        pull_disk(&reference(ours.address, name), &target, &options, no_progress()).await.unwrap();
        assert!(fs::read(&target).unwrap() == whole, "{name}");
        fs::remove_file(&target).unwrap();
    }
    push_raw(&ours, "vz:lie", &[b"{}", &packed_a], &image_of(vec![vz(&b, &packed_a)])).await;
    let lie =
        pull_disk(&reference(ours.address, "vz:lie"), &target, &options, no_progress()).await.unwrap_err();
    assert!(matches!(lie, ImageError::Oci(OciError::Hostile { .. })), "{lie}");
    push_raw(&ours, "vz:torn", &[b"{}", b"no gzip"], &image_of(vec![vz(&b, b"no gzip")])).await;
    let torn =
        pull_disk(&reference(ours.address, "vz:torn"), &target, &options, no_progress()).await.unwrap_err();
    assert!(matches!(torn, ImageError::Oci(OciError::Hostile { .. })), "{torn}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left of what was refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_pull_of_a_foreign_disk_resumes() {
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let (target, partial, parts) =
        (dir.path().join("d.raw"), dir.path().join("d.raw.partial"), dir.path().join("d.raw.parts"));
    let options = options(Some(&ours.token));
    let (a, b, c) = (noise(1, 100_000), [vec![0; 70_000], noise(2, 70_000)].concat(), noise(3, 50_000));
    let blobs = [lz4_stored(&a), lz4_stored(&b), lz4_stored(&c)];
    let layers = vec![tart_piece(&a, &blobs[0]), tart_piece(&b, &blobs[1]), tart_piece(&c, &blobs[2])];
    let all: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).chain([b"{}".as_slice()]).collect();
    push_raw(&ours, "tart:1", &all, &image_of(layers)).await;
    // State of an interrupted pull: the first part is in its place, the second one half written, the blob of the last one half
    // downloaded. The registry has none of these bytes any more.
    fs::write(&partial, [a.clone(), vec![7; 140_000]].concat()).unwrap();
    fs::create_dir(&parts).unwrap();
    let name = coracle_testkit::oci::digest(&blobs[2]);
    fs::write(parts.join(name.trim_start_matches("sha256:")), &blobs[2][..25_000]).unwrap();
    ours.damage(&blobs[0]);
    ours.damage(&blobs[2]);
    let name = reference(ours.address, "tart:1");
    let pulled = pull_disk(&name, &target, &options, no_progress()).await.unwrap();
    assert_eq!((pulled.chunks, pulled.moved), (3, 2), "the first piece was there");
    assert!(fs::read(&target).unwrap() == [a, b, c].concat(), "no byte of the earlier try shows through");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["d.raw"]);
    fs::remove_file(&target).unwrap();
    let damaged = pull_disk(&name, &target, &options, no_progress()).await.unwrap_err();
    assert!(
        matches!(damaged, ImageError::Oci(OciError::DigestMismatch { .. })),
        "from the beginning it is wrong: {damaged}"
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_of_another_platform_is_found_in_an_index() {
    use serde_json::json;
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("back.raw");
    let raw = noise(4, 10_000);
    let blob = lz4_stored(&raw);
    let image = image_of(vec![tart_piece(&raw, &blob)]);
    push_raw(&ours, "mac:arm", &[b"{}", &blob], &image).await;
    let of = |architecture: &str| {
        json!({"mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": coracle_testkit::oci::digest(image.to_string().as_bytes()), "size": image.to_string().len(),
            "platform": {"os": "darwin", "architecture": architecture}})
    };
    let kind = "application/vnd.oci.image.index.v1+json";
    let index = json!({"schemaVersion": 2, "mediaType": kind, "manifests": [of("unknown"), of("arm64")]});
    let url = format!("http://{}/v2/mac/manifests/1", ours.address);
    let put = reqwest::Client::new().put(url).bearer_auth(&ours.token).header("content-type", kind);
    assert_eq!(put.body(index.to_string()).send().await.unwrap().status(), 201);
    let options = options(Some(&ours.token));
    pull_disk(&reference(ours.address, "mac:1"), &target, &options, no_progress()).await.unwrap();
    assert!(fs::read(&target).unwrap() == raw);
}

/// Program that accepts no input.
struct Broken;

impl std::io::Write for Broken {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_pull_of_a_cocoon_snapshot_resumes() {
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let (spool, out) = (dir.path().join("pulls/web"), dir.path().join("web.tar"));
    let options = options(Some(&ours.token));
    let mut archive = tar::Builder::new(Vec::new());
    let memory = noise(1, 3 * MIB);
    let head = br#"{"version":1,"config":{"id":"s1","image":"ubuntu"}}"#.as_slice();
    for (name, bytes) in [("snapshot.json", head), ("config.json", b"{}"), ("memory-ranges", &memory)] {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o640);
        archive.append_data(&mut header, name, bytes).unwrap();
    }
    let archive = archive.into_inner().unwrap();
    for (n, version) in [CocoonVersion::V1, CocoonVersion::V2].into_iter().enumerate() {
        let name = reference(ours.address, &format!("vms/web{n}:1"));
        push_cocoon(std::io::Cursor::new(archive.clone()), version, &name, &options).await.unwrap();
        let refused = pull_cocoon(&name, "web", &options, &spool, Broken).await.unwrap_err();
        assert!(matches!(refused, ImageError::Oci(OciError::Io { .. })), "{refused}");
        let mut kept: Vec<_> = fs::read_dir(&spool).unwrap().map(|e| e.unwrap().path()).collect();
        kept.sort_by_key(|path| fs::metadata(path).unwrap().len());
        assert_eq!(kept.len(), 2, "all of it");
        // Half of the large file is here. The other half is in the registry only.
        let large = fs::read(&kept[1]).unwrap();
        fs::write(&kept[1], &large[..large.len() / 2]).unwrap();
        fs::write(spool.join("stale"), "x").unwrap();
        ours.damage(&large);
        let to = File::create(&out).unwrap();
        pull_cocoon(&name, "web", &options, &spool, to).await.unwrap();
        assert!(!spool.exists(), "nothing is left");
        let mut back = tar::Archive::new(File::open(&out).unwrap());
        let (mut entry, mut bytes) = (back.entries().unwrap().nth(2).unwrap().unwrap(), Vec::new());
        std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
        assert!(bytes == memory, "{version:?}");
        let to = File::create(&out).unwrap();
        let wrong = pull_cocoon(&name, "web", &options, &spool, to).await.unwrap_err();
        assert!(matches!(wrong, ImageError::Oci(OciError::DigestMismatch { .. })), "{wrong}");
        assert!(!spool.exists(), "what can come to nothing is not kept");
    }
}

/// Pushes a small snapshot of an image, distinguished by its memory.
async fn snapshot(name: &Reference, base: &SnapshotBase, memory: &[u8], options: &DiskOptions) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memory");
    fs::write(&path, memory).unwrap();
    let files = [SnapshotFile { name: "memory".to_owned(), path }];
    let about = serde_json::json!({"vm": "web"});
    push_snapshot(&files, &about, base, name, options, no_progress()).await.unwrap().digest.to_string()
}

/// Asserts that snapshots are found from their image: in the registry's list of referrers, or without such a list by the
/// referrers tag. Each snapshot is listed once, however often it is pushed.
async fn assert_referrers_listed(address: std::net::SocketAddr, options: &DiskOptions, list: &str) {
    let digest = Digest::of(b"the image that they were made from");
    let media_type = "application/vnd.oci.image.manifest.v1+json".to_owned();
    let manifest = Some(Descriptor { media_type, digest, size_bytes: 34 });
    let base = SnapshotBase { name: "web:1".to_owned(), digest: digest.to_string(), manifest };
    let (one, two) = (reference(address, "vms/web:before"), reference(address, "vms/web:after"));
    let before = snapshot(&one, &base, b"before", options).await;
    assert_eq!(snapshot(&one, &base, b"before", options).await, before, "the same again");
    let after = snapshot(&two, &base, b"after", options).await;
    let url = format!("http://{address}/v2/vms/web/{list}").replace("DIGEST", &digest.to_string());
    let accept = "application/vnd.oci.image.index.v1+json";
    let answer = reqwest::Client::new().get(url).header("accept", accept).send().await.unwrap();
    let index: serde_json::Value = answer.json().await.unwrap();
    let entries = index["manifests"].as_array().unwrap();
    let mut listed: Vec<_> = entries.iter().map(|e| e["digest"].as_str().unwrap().to_owned()).collect();
    listed.sort();
    let mut want = vec![before, after];
    want.sort();
    assert_eq!(listed, want, "{index}");
    let kind = "application/vnd.coracle.snapshot.v1+json";
    assert!(entries.iter().all(|entry| entry["artifactType"] == kind), "{index}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_is_a_referrer_by_api() {
    let ours = start_registry().await;
    assert_referrers_listed(ours.address, &options(Some(&ours.token)), "referrers/DIGEST").await;
    let tag = format!("http://{}/v2/vms/web/tags/list", ours.address);
    let tags: serde_json::Value = reqwest::get(tag).await.unwrap().json().await.unwrap();
    assert_eq!(
        tags["tags"],
        serde_json::json!(["after", "before"]),
        "no tag stands for a list that there is"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_is_a_referrer_by_tag_schema() {
    let Some(_) = coracle_testkit::tools::require(["docker-registry"]) else { return };
    let debian = DebianRegistry::start().unwrap();
    let tag = format!(
        "manifests/{}",
        Digest::of(b"the image that they were made from").to_string().replace(':', "-")
    );
    assert_referrers_listed(debian.address(), &options(None), &tag).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_other_disks_of_the_host_are_not_fetched() {
    use serde_json::json;
    let ours = start_registry().await;
    let dir = tempfile::tempdir().unwrap();
    let images = DiskImages::open(dir.path()).unwrap();
    images.prepare().unwrap();
    let (source, target) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    disk(&source);
    let options = options(Some(&ours.token));
    let pull = async |name: &str| {
        let options = DiskOptions { local: Arc::new(images.local_parts()), ..options.clone() };
        pull_disk(&reference(ours.address, name), &target, &options, no_progress()).await.unwrap()
    };
    let keep = |name: &str, report: &DiskReport| {
        let digest = report.digest.to_string();
        let (bytes, is_raw) = take_raw(&target, &images.path(&digest), &|_, _| {}).unwrap();
        assert!(is_raw && bytes == report.disk_bytes);
        images.keep_parts(&digest, &report.parts).unwrap();
        images.tag(&digest, &reference(ours.address, name), bytes, 0).unwrap();
    };
    push_disk(&source, &reference(ours.address, "vms/base:1"), &options, no_progress()).await.unwrap();
    let base = pull("vms/base:1").await;
    assert_eq!((base.moved, base.parts.len()), (4, 4));
    keep("vms/base:1", &base);

    // An image derived from the base has one different chunk.
    let file = File::options().write(true).open(&source).unwrap();
    file.write_all_at(b"derived", 4 * MIB + 5).unwrap();
    push_disk(&source, &reference(ours.address, "vms/derived:1"), &options, no_progress()).await.unwrap();
    let derived = pull("vms/derived:1").await;
    assert_eq!((derived.chunks, derived.moved), (4, 1));
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
    assert!(fs::metadata(&target).unwrap().blocks() * 512 < 5 * MIB, "what is zero stays a hole");
    fs::remove_file(&target).unwrap();

    // Parts of a disk of tart, at another place.
    let digest = coracle_testkit::oci::digest;
    let (a, b, c) = (noise(1, 100_352), noise(2, 200_192), vec![0; 51_200]);
    let layer = |raw: &[u8]| {
        let blob = lz4_stored(raw);
        json!({"mediaType": "application/vnd.cirruslabs.tart.disk.v2", "digest": digest(&blob), "size": blob.len(), "annotations": {
            "org.cirruslabs.tart.uncompressed-size": raw.len().to_string(),
            "org.cirruslabs.tart.uncompressed-content-digest": digest(raw),
        }})
    };
    let manifest = |parts: &[&[u8]]| {
        let layers: Vec<_> = parts.iter().map(|raw| layer(raw)).collect();
        json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": layers,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(b"{}"), "size": 2}})
    };
    let blobs = [b"{}".to_vec(), lz4_stored(&a), lz4_stored(&b), lz4_stored(&c)];
    let blobs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
    push_raw(&ours, "tart:base", &blobs, &manifest(&[&a, &b])).await;
    let base = pull("tart:base").await;
    assert_eq!(base.moved, 2);
    keep("tart:base", &base);
    push_raw(&ours, "tart:derived", &blobs, &manifest(&[&c, &a, &b])).await;
    let derived = pull("tart:derived").await;
    assert_eq!((derived.chunks, derived.moved), (3, 1), "the one that is new");
    assert!(fs::read(&target).unwrap() == [c, a, b].concat());

    // A disk that was damaged on this host is not used as a source.
    let damaged = images.path(&base.digest.to_string());
    File::options().write(true).open(damaged).unwrap().write_all_at(b"!", 7).unwrap();
    fs::remove_file(&target).unwrap();
    assert_eq!(pull("tart:derived").await.moved, 2, "and the part of it that is damaged");
    images.untag(&reference(ours.address, "tart:base")).unwrap();
    images.prune(&std::collections::HashSet::new(), false).unwrap();
    assert_eq!(
        fs::read_dir(dir.path().join("images/disks")).unwrap().count(),
        3,
        "of one disk, whose name stays"
    );
}
