//! Registry configuration directories with real registries.

use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::{Child, Command, Stdio},
};

use coracle_disk::{DiskOptions, pull_disk, push_disk};
use coracle_image::{ImageError, PullOptions, PushOptions, StoreOptions};
use coracle_oci::{Credentials, Digest, OciError, Reference, Registries, Timeouts};
use coracle_testkit::{LIMIT, eventually_blocking, registry::DebianRegistry};

use crate::common::{Bench, Layer, Parts, Stored, has_programs, noise, options, progress, push};

fn parts() -> Parts {
    Parts::new(vec![Stored::gzip(&Layer::new().file("f", "content").tar())])
}

fn anonymous() -> PullOptions {
    PullOptions { credentials: Credentials::Anonymous, ..PullOptions::default() }
}

/// Loads a configuration directory with these files.
fn load_registries(files: &[(&str, String)]) -> Registries {
    let dir = tempfile::tempdir().unwrap();
    for (registry, text) in files {
        fs::create_dir(dir.path().join(registry)).unwrap();
        fs::write(dir.path().join(registry).join("hosts.toml"), text).unwrap();
    }
    let (registries, warnings) = Registries::load(dir.path()).unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    registries
}

fn bench(registries: Registries) -> Bench {
    let timeouts = Timeouts::default();
    Bench::with(StoreOptions { registries, retries: 0, timeouts, ..options() })
}

/// Address on which no process listens.
fn closed_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn mirror_answers_for_an_unreachable_registry() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let (mirror, empty) = (DebianRegistry::start().unwrap(), DebianRegistry::start().unwrap());
    let parts = parts();
    push(&mirror, &parts, "team/thing:1", None);
    let dead = closed_address();
    let text = format!(
        "server = 'http://{dead}'\n[host.'http://{}']\ncapabilities = ['pull', 'resolve']\n\
         [host.'http://{}']\ncapabilities = ['pull', 'resolve']\n",
        empty.address(),
        mirror.address()
    );
    for directory in ["registry.test", "_default"] {
        let bench = bench(load_registries(&[(directory, text.clone())]));
        let name = "registry.test/team/thing:1".parse().unwrap();
        let image = bench.store.pull(&name, &anonymous(), progress()).await.unwrap();
        assert_eq!(image.digest, Digest::of(&parts.manifest), "the empty mirror is passed over");
        assert_eq!(image.references[0].to_string(), "registry.test/team/thing:1");
    }
}

#[tokio::test]
async fn mirror_without_resolve_is_asked_by_digest() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let (origin, mirror) = (DebianRegistry::start().unwrap(), DebianRegistry::start().unwrap());
    let (right, stale) = (parts(), Parts::new(vec![]));
    push(&origin, &right, "thing:1", None);
    push(&mirror, &stale, "thing:1", None);
    push(&mirror, &right, "thing:2", None);
    let config = |capabilities: &str| {
        let (origin, mirror) = (origin.address(), mirror.address());
        let text =
            format!("server = 'http://{origin}'\n[host.'http://{mirror}']\ncapabilities = {capabilities}");
        load_registries(&[("registry.test", text)])
    };
    let name = "registry.test/thing:1".parse().unwrap();
    for (capabilities, want) in [("['pull', 'resolve']", &stale), ("['pull']", &right)] {
        let bench = bench(config(capabilities));
        let image = bench.store.pull(&name, &anonymous(), progress()).await.unwrap();
        assert_eq!(image.digest, Digest::of(&want.manifest), "{capabilities}");
    }
}

#[tokio::test]
async fn push_skips_mirrors_without_the_capability() {
    if !has_programs(&["docker-registry", "skopeo"]) {
        return;
    }
    let (origin, mirror) = (DebianRegistry::start().unwrap(), DebianRegistry::start().unwrap());
    let text = format!(
        "server = 'http://{}'\n[host.'http://{}']\ncapabilities = ['pull', 'resolve']\n",
        origin.address(),
        mirror.address()
    );
    let registries = load_registries(&[("registry.test", text)]);
    let bench = bench(registries.clone());
    let image = bench.import(&parts()).await.unwrap();
    let target: Reference = "registry.test/pushed:1".parse().unwrap();
    let push_options = PushOptions { credentials: Credentials::Anonymous, ..PushOptions::default() };
    bench
        .store
        .push(&"localhost/test/image:1".parse().unwrap(), &target, &push_options, progress())
        .await
        .unwrap();
    let at = |registry: &DebianRegistry| format!("{}/pushed:1", registry.address()).parse().unwrap();
    let fresh = Bench::new();
    let pulled = fresh.store.pull(&at(&origin), &anonymous(), progress()).await.unwrap();
    assert_eq!(pulled.digest, image.digest);
    let absent = fresh.store.pull(&at(&mirror), &anonymous(), progress()).await.unwrap_err();
    assert!(matches!(absent, ImageError::Oci(OciError::NotFound { .. })), "{absent}");

    // Disks use the same servers, and come from the first one that has them.
    let dir = tempfile::tempdir().unwrap();
    let (disk, copy) = (dir.path().join("disk.raw"), dir.path().join("copy.raw"));
    fs::write(&disk, noise(1 << 20, 99)).unwrap();
    let options = DiskOptions { credentials: Credentials::Anonymous, registries, ..DiskOptions::default() };
    let quiet: coracle_disk::DiskProgress = std::sync::Arc::new(|_, _| {});
    let name = "registry.test/disk:1".parse().unwrap();
    push_disk(&disk, &name, &options, quiet.clone()).await.unwrap();
    pull_disk(&name, &copy, &options, quiet).await.unwrap();
    assert!(fs::read(&copy).unwrap() == fs::read(&disk).unwrap());
}

/// Address of this host that is not loopback, found without sending a packet.
fn external_address() -> Option<std::net::IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback())
}

/// docker-registry with a configuration of the test.
struct Raw(Child);

impl Raw {
    fn start(dir: &Path, address: SocketAddr, more: &str) -> Self {
        let text = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}/data\n\
             http:\n  addr: {address}\n{more}",
            dir.display()
        );
        fs::write(dir.join("config.yml"), text).unwrap();
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(dir.join("config.yml")).stdout(Stdio::null()).stderr(Stdio::null());
        let raw = Self(command.spawn().unwrap());
        let what = format!("docker-registry listens on {address}");
        eventually_blocking(LIMIT, &what, || TcpStream::connect(address).ok()).unwrap();
        raw
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pushes an image and pulls it into another store, both with `registries`.
async fn push_and_pull(registry: &str, registries: Registries) -> Result<(), ImageError> {
    let bench = bench(registries.clone());
    let image = bench.import(&parts()).await?;
    let target: Reference = format!("{registry}/round/trip:1").parse()?;
    let push_options = PushOptions { credentials: Credentials::Anonymous, ..PushOptions::default() };
    let source = "localhost/test/image:1".parse()?;
    bench.store.push(&source, &target, &push_options, progress()).await?;
    let pulled = self::bench(registries).store.pull(&target, &anonymous(), progress()).await?;
    assert_eq!(pulled.digest, image.digest);
    Ok(())
}

#[tokio::test]
async fn plain_http_registry_needs_configuration() {
    let Some(ip) = external_address().filter(|_| has_programs(&["docker-registry"])) else { return };
    let dir = tempfile::tempdir().unwrap();
    let address = TcpListener::bind((ip, 0)).unwrap().local_addr().unwrap();
    let _registry = Raw::start(dir.path(), address, "");
    let name = address.to_string();
    let refused = push_and_pull(&name, Registries::default()).await.unwrap_err();
    assert!(matches!(refused, ImageError::Oci(OciError::Network { .. })), "TLS is spoken: {refused}");
    let text = format!("server = 'http://{address}'\n");
    push_and_pull(&name, load_registries(&[(&name, text)])).await.unwrap();
}

#[tokio::test]
async fn private_authority_is_trusted_by_configuration() {
    if !has_programs(&["docker-registry"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    fs::write(&certificate, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let tls = format!("  tls:\n    certificate: {}\n    key: {}\n", certificate.display(), key.display());
    let _registry = Raw::start(dir.path(), address, &tls);
    let name = format!("localhost:{}", address.port());
    let config = |line: &str| load_registries(&[(&name, format!("server = 'https://{name}'\n{line}\n"))]);
    let refused = push_and_pull(&name, config("")).await.unwrap_err();
    assert!(matches!(refused, ImageError::Oci(OciError::Network { .. })), "an unknown authority: {refused}");
    push_and_pull(&name, config(&format!("ca = '{}'", certificate.display()))).await.unwrap();
    push_and_pull(&name, config("skip_verify = true")).await.unwrap();
    // Without a hosts.toml, as for docker: the file of the certificate authority is in the directory.
    let docker = tempfile::tempdir().unwrap();
    fs::create_dir(docker.path().join(&name)).unwrap();
    fs::copy(&certificate, docker.path().join(&name).join("ca.crt")).unwrap();
    push_and_pull(&name, Registries::load(docker.path()).unwrap().0).await.unwrap();
}
