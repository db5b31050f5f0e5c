//! Small images built in code, and real programs that check them.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::Write,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
    time::Duration,
};

use coracle_image::{Image, ImageError, Rootfs, Source, Store, StoreOptions};
use coracle_oci::{Algorithm, Digest, NoProgress, Platform, Progress, Reference, Timeouts};
use coracle_testkit::registry::DebianRegistry;
use tempfile::TempDir;

/// True when all programs are installed. In CI a missing program is a failure.
pub(crate) fn has_programs(programs: &[&str]) -> bool {
    let missing: Vec<_> = programs.iter().filter(|p| !in_path(p)).collect();
    if missing.is_empty() {
        return true;
    }
    assert!(std::env::var_os("CI").is_none_or(|v| v != "true"), "CI has no {missing:?}");
    eprintln!("skipped: no {missing:?} on this host");
    false
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// Runs a program and asserts that it succeeds.
pub(crate) fn run(program: &str, args: &[&str]) -> Output {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {args:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

pub(crate) fn progress() -> Arc<dyn Progress> {
    Arc::new(NoProgress)
}

pub(crate) fn options() -> StoreOptions {
    StoreOptions {
        platform: Platform { os: "linux".into(), architecture: "amd64".into() },
        timeouts: Timeouts {
            connect: Duration::from_secs(2),
            read_idle: Duration::from_secs(2),
            request: Duration::from_secs(5),
        },
        ..StoreOptions::default()
    }
}

/// Bytes that do not compress.
pub(crate) fn noise(bytes: u32, seed: u32) -> Vec<u8> {
    (0..bytes).map(|n| (n.wrapping_mul(seed) >> 13).to_le_bytes()[0]).collect()
}

/// All paths of a tree except its root.
pub(crate) fn names(tree: &Tree) -> String {
    tree.keys().filter(|k| !k.is_empty()).cloned().collect::<Vec<_>>().join(" ")
}

/// Builder of a layer's archive.
pub(crate) struct Layer(tar::Builder<Vec<u8>>);

impl Layer {
    pub(crate) fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    pub(crate) fn header(kind: u8, size: u64, mode: u32) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(size);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_600_000_000);
        header
    }

    /// Adds a member of any kind. The path is written unchanged, `..` included.
    pub(crate) fn raw(mut self, path: &[u8], mut header: tar::Header, data: &[u8]) -> Self {
        if path.len() > 100 {
            let mut long = Self::header(b'L', path.len() as u64, 0);
            long.as_mut_bytes()[..13].copy_from_slice(b"././@LongLink");
            long.set_cksum();
            self.0.append(&long, path).unwrap();
        }
        let head = path.len().min(100);
        header.as_mut_bytes()[..head].copy_from_slice(&path[..head]);
        header.set_cksum();
        self.0.append(&header, data).unwrap();
        self
    }

    pub(crate) fn file(self, path: &str, data: impl AsRef<[u8]>) -> Self {
        self.file_as(path, data, 0o644, 0, 0)
    }

    pub(crate) fn file_as(self, path: &str, data: impl AsRef<[u8]>, mode: u32, uid: u64, gid: u64) -> Self {
        let data = data.as_ref();
        let mut header = Self::header(b'0', data.len() as u64, mode);
        header.set_uid(uid);
        header.set_gid(gid);
        self.raw(path.as_bytes(), header, data)
    }

    pub(crate) fn dir(self, path: &str, mode: u32) -> Self {
        self.raw(format!("{path}/").as_bytes(), Self::header(b'5', 0, mode), b"")
    }

    pub(crate) fn link(self, kind: u8, path: &str, target: &[u8]) -> Self {
        let mut header = Self::header(kind, 0, 0o777);
        header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target);
        self.raw(path.as_bytes(), header, b"")
    }

    pub(crate) fn symlink(self, path: &str, target: &str) -> Self {
        self.link(b'2', path, target.as_bytes())
    }

    pub(crate) fn hard_link(self, path: &str, target: &str) -> Self {
        self.link(b'1', path, target.as_bytes())
    }

    pub(crate) fn device(self, kind: u8, path: &str, major: u32, minor: u32) -> Self {
        let mut header = Self::header(kind, 0, 0o640);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        self.raw(path.as_bytes(), header, b"")
    }

    pub(crate) fn whiteout(self, path: &str) -> Self {
        self.file(path, b"")
    }

    /// Adds PAX records for the next entry.
    pub(crate) fn pax(mut self, records: &[(&str, &[u8])]) -> Self {
        self.0.append_pax_extensions(records.iter().copied()).unwrap();
        self
    }

    pub(crate) fn tar(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Layer as stored: bytes, media type, diff id.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) bytes: Vec<u8>,
    pub(crate) media_type: String,
    pub(crate) diff_id: Digest,
}

impl Stored {
    pub(crate) fn gzip(tar: &[u8]) -> Self {
        Self { bytes: gzip(tar), media_type: oci("tar+gzip"), diff_id: Digest::of(tar) }
    }

    pub(crate) fn plain(tar: &[u8]) -> Self {
        Self { bytes: tar.to_vec(), media_type: oci("tar"), diff_id: Digest::of(tar) }
    }

    pub(crate) fn zstd(tar: &[u8]) -> Self {
        Self {
            bytes: zstd::encode_all(tar, 1).unwrap(),
            media_type: oci("tar+zstd"),
            diff_id: Digest::of(tar),
        }
    }
}

fn oci(kind: &str) -> String {
    format!("application/vnd.oci.image.layer.v1.{kind}")
}

/// Image as blobs in memory.
pub(crate) struct Parts {
    pub(crate) layers: Vec<Stored>,
    pub(crate) config: Vec<u8>,
    pub(crate) manifest: Vec<u8>,
    algorithm: Algorithm,
}

pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

impl Parts {
    pub(crate) fn new(layers: Vec<Stored>) -> Self {
        Self::for_architecture(layers, "amd64")
    }

    pub(crate) fn for_architecture(layers: Vec<Stored>, architecture: &str) -> Self {
        let diff_ids: Vec<_> = layers.iter().map(|l| l.diff_id).collect();
        let config = serde_json::json!({
            "architecture": architecture, "os": "linux", "created": "2024-05-06T07:08:09Z",
            "config": {"Cmd": ["/bin/sh"], "Env": ["A=b"], "WorkingDir": "/w", "User": "1:2", "ExposedPorts": {"80/tcp": {}},
                       "Labels": {"k": "v"}, "StopSignal": "SIGINT", "Entrypoint": ["/entry"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = config.to_string().into_bytes();
        let algorithm = Algorithm::Sha256;
        let manifest = Self::compose(&config, &layers, algorithm);
        Self { layers, config, manifest, algorithm }
    }

    /// The same image with digests of another algorithm. Diff ids stay.
    pub(crate) fn with_digests(self, algorithm: Algorithm) -> Self {
        let manifest = Self::compose(&self.config, &self.layers, algorithm);
        Self { manifest, algorithm, ..self }
    }

    fn compose(config: &[u8], layers: &[Stored], algorithm: Algorithm) -> Vec<u8> {
        let digest = |bytes: &[u8]| Digest::with(algorithm, bytes);
        let descriptor = |media_type: &str, bytes: &[u8]| serde_json::json!({"mediaType": media_type, "digest": digest(bytes), "size": bytes.len()});
        serde_json::json!({
            "schemaVersion": 2, "mediaType": MANIFEST_TYPE,
            "config": descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": layers.iter().map(|l| descriptor(&l.media_type, &l.bytes)).collect::<Vec<_>>(),
        })
        .to_string()
        .into_bytes()
    }

    pub(crate) fn blobs(&self) -> BTreeMap<Digest, Vec<u8>> {
        let all = self.layers.iter().map(|l| &l.bytes).chain([&self.config, &self.manifest]);
        all.map(|bytes| (Digest::with(self.algorithm, bytes), bytes.clone())).collect()
    }

    /// Writes an OCI layout whose only image is `tag`.
    pub(crate) fn write(&self, dir: &Path, tag: &str) {
        std::fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
        for (digest, bytes) in self.blobs() {
            std::fs::write(dir.join("blobs/sha256").join(digest.hex()), bytes).unwrap();
        }
        let index = serde_json::json!({
            "schemaVersion": 2,
            "manifests": [{"mediaType": MANIFEST_TYPE, "digest": Digest::of(&self.manifest), "size": self.manifest.len(),
                           "annotations": {"org.opencontainers.image.ref.name": tag}}],
        });
        std::fs::write(dir.join("index.json"), index.to_string()).unwrap();
        std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    }
}

/// Store in a temporary directory.
pub(crate) struct Bench {
    pub(crate) dir: TempDir,
    pub(crate) store: Store,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with(options())
    }

    pub(crate) fn with(options: StoreOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path().join("images"), options).unwrap();
        Self { dir, store }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("images")
    }

    pub(crate) async fn import(&self, parts: &Parts) -> Result<Image, ImageError> {
        let source = tempfile::tempdir().unwrap();
        parts.write(source.path(), "t");
        let name = "localhost/test/image:1".parse().unwrap();
        self.store
            .import(&Source::OciDir { dir: source.path().into(), tag: None }, Some(&name), progress())
            .await
    }

    pub(crate) async fn rootfs(&self, layers: Vec<Vec<u8>>) -> Result<Rootfs, ImageError> {
        let image = self.import(&Parts::new(layers.iter().map(|l| Stored::gzip(l)).collect())).await?;
        self.store.rootfs(&image).await
    }

    /// Every file of the store with its size, sorted.
    pub(crate) fn listing(&self) -> Vec<(PathBuf, u64)> {
        let mut found = Vec::new();
        let mut dirs = vec![self.path()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let entry = entry.unwrap();
                match entry.file_type().unwrap().is_dir() {
                    true => dirs.push(entry.path()),
                    false => found.push((entry.path(), entry.metadata().unwrap().len())),
                }
            }
        }
        found.sort();
        found
    }
}

/// Tree as path → kind, mode, owner, size or target or device, content, time.
pub(crate) type Tree = BTreeMap<String, String>;

/// Reads a directory tree of this host.
pub(crate) fn read_tree(root: &Path) -> Tree {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let mut tree = Tree::new();
    let mut paths = vec![root.to_owned()];
    while let Some(path) = paths.pop() {
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let kind = meta.file_type();
        let what = if kind.is_dir() {
            paths.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            "dir".to_owned()
        } else if kind.is_symlink() {
            format!("-> {}", std::fs::read_link(&path).unwrap().display())
        } else if kind.is_char_device() || kind.is_block_device() {
            let rdev = meta.rdev();
            let (major, minor) = ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xfff00));
            format!("{} {major}:{minor}", if kind.is_char_device() { "char" } else { "block" })
        } else if kind.is_fifo() {
            "fifo".to_owned()
        } else {
            let bytes = std::fs::read(&path).unwrap();
            format!("file {} {}", bytes.len(), &Digest::of(&bytes).hex()[..12])
        };
        let mode = if kind.is_symlink() { 0o777 } else { meta.mode() & 0o7777 };
        let name = path.strip_prefix(root).unwrap().display().to_string();
        tree.insert(name, format!("{what} {mode:o} {}:{}", meta.uid(), meta.gid()));
    }
    tree
}

/// Checks an image with fsck.erofs and extracts it.
pub(crate) fn extract(rootfs: &Rootfs) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    let image = rootfs.path.to_str().unwrap();
    run("fsck.erofs", &[image]);
    let target = to.path().join("root");
    run("fsck.erofs", &[&format!("--extract={}", target.display()), "--preserve", image]);
    to
}

pub(crate) fn describe(data: impl AsRef<[u8]>, mode: u32, owner: &str) -> String {
    let data = data.as_ref();
    format!("file {} {} {mode:o} {owner}", data.len(), &Digest::of(data).hex()[..12])
}

/// Image mounted by the kernel, where this host permits it.
pub(crate) struct Mounted(TempDir);

impl Mounted {
    pub(crate) fn new(rootfs: &Rootfs) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let args = [
            OsStr::new("-t"),
            OsStr::new("erofs"),
            OsStr::new("-o"),
            OsStr::new("loop,ro"),
            rootfs.path.as_os_str(),
            dir.path().as_os_str(),
        ];
        let output = Command::new("mount").args(args).output().ok()?;
        if !output.status.success() {
            eprintln!("no kernel mount here: {}", String::from_utf8_lossy(&output.stderr).trim());
            return None;
        }
        Some(Self(dir))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn xattr(&self, path: &str, name: &str) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 65536];
        let size = rustix::fs::lgetxattr(
            self.path().join(OsStr::from_bytes(path.as_bytes())),
            name,
            &mut buffer[..],
        )
        .ok()?;
        buffer.truncate(size);
        Some(buffer)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

/// Pushes with skopeo and returns the reference.
pub(crate) fn push(registry: &DebianRegistry, parts: &Parts, name: &str, login: Option<&str>) -> Reference {
    let layout = registry.dir().join("layout");
    let _ = std::fs::remove_dir_all(&layout);
    parts.write(&layout, "t");
    registry.push(&layout, "t", name, login).unwrap().parse().unwrap()
}
