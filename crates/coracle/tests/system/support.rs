//! What the tests of the binary share: the binary, a kubectl, and patience with a deadline.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{eventually_ok_within, tools};
use tokio::process::Command;

/// The binary under test.
pub(crate) const CORACLE: &str = env!("CARGO_BIN_EXE_coracle");

/// Programs that a node needs; `None` with a printed reason when one is missing.
pub(crate) fn node_tools() -> Option<()> {
    tools::require(["qemu-system-x86_64", "mke2fs", "nft", "busybox"])?;
    if tools::guest_kernel().is_none() {
        tools::skip("no guest kernel; `cargo xtask setup` makes it");
        return None;
    }
    Some(())
}

/// Runs `coracle` with the state directory and returns what it printed.
pub(crate) async fn coracle(state: &Path, args: &[&str]) -> Output {
    Command::new(CORACLE).arg("--state").arg(state).args(args).output().await.unwrap()
}

/// As [`coracle`]; fails the test unless it exits with 0.
pub(crate) async fn coracle_ok(state: &Path, args: &[&str]) -> String {
    let output = coracle(state, args).await;
    assert!(output.status.success(), "coracle {args:?}: {}\n{}", output.status, text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asks until the answer is there, and fails with the last one when it takes too long.
pub(crate) async fn until<T>(what: &str, limit: Duration, ask: impl AsyncFnMut() -> Result<T, String>) -> T {
    eventually_ok_within(limit, what, ask).await.unwrap()
}

/// Writes an image that sleeps, as the layout `dir` with the tag `1`.
pub(crate) fn write_idle_image(dir: &Path) {
    let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
    let layer = LayerTar::new().file("bin/busybox", 0o755, &busybox).symlink("bin/sleep", "busybox").finish();
    let spec = ImageSpec { cmd: vec!["/bin/sleep".into(), "100000".into()], ..ImageSpec::default() };
    write_layout(dir, &[layer], &spec, "1").unwrap();
}

/// The system's own kubectl; what it printed, or what it said when it failed.
pub(crate) async fn kubectl(state: &Path, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(state.join("bin/kubectl"));
    let output = command.arg("--kubeconfig").arg(state.join("kubeconfig")).args(args).output().await.unwrap();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// The page that a guest serves.
pub(crate) async fn fetch(address: String) -> Result<String, String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let fetch = async {
        let mut stream = tokio::net::TcpStream::connect(address).await?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok::<_, std::io::Error>(text)
    };
    match tokio::time::timeout(Duration::from_secs(20), fetch).await {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("no answer".to_owned()),
    }
}

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A registry configuration directory that names registries: VMs of the cluster reach no others on loopback.
pub(crate) fn registry_config(dir: &Path, registries: &[&str]) -> String {
    let config = dir.join("certs.d");
    for registry in registries {
        std::fs::create_dir_all(config.join(registry)).unwrap();
    }
    config.to_str().unwrap().to_owned()
}
