//! Helpers of the tests of the binary: the binary, kubectl, and waits with a deadline.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{eventually_ok_within, tools};
use tokio::process::Command;

/// The binary under test.
pub(crate) const CORACLE: &str = env!("CARGO_BIN_EXE_coracle");

/// Checks for the programs that a node needs; `None` with a printed reason if one is missing.
pub(crate) fn node_tools() -> Option<()> {
    tools::require(["qemu-system-x86_64", "mke2fs", "nft", "busybox"])?;
    if tools::guest_kernel().is_none() {
        tools::skip("no guest kernel; `cargo xtask setup` makes it");
        return None;
    }
    Some(())
}

/// Runs `coracle` with the state directory and returns its output.
pub(crate) async fn coracle(state: &Path, args: &[&str]) -> Output {
    Command::new(CORACLE).arg("--state").arg(state).args(args).output().await.unwrap()
}

/// Like [`coracle`]; fails the test unless the exit code is 0, and returns stdout.
pub(crate) async fn coracle_ok(state: &Path, args: &[&str]) -> String {
    let output = coracle(state, args).await;
    assert!(output.status.success(), "coracle {args:?}: {}\n{}", output.status, text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Calls `ask` until it returns a value; fails after `limit` with the last error.
pub(crate) async fn until<T>(what: &str, limit: Duration, ask: impl AsyncFnMut() -> Result<T, String>) -> T {
    eventually_ok_within(limit, what, ask).await.unwrap()
}

/// Writes an image whose process sleeps, as the layout `dir` with the tag `1`.
pub(crate) fn write_idle_image(dir: &Path) {
    let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
    let layer = LayerTar::new().file("bin/busybox", 0o755, &busybox).symlink("bin/sleep", "busybox").finish();
    let spec = ImageSpec { cmd: vec!["/bin/sleep".into(), "100000".into()], ..ImageSpec::default() };
    write_layout(dir, &[layer], &spec, "1").unwrap();
}

/// Runs the system's own kubectl; returns stdout, or stderr as the error.
pub(crate) async fn kubectl(state: &Path, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(state.join("bin/kubectl"));
    let output = command.arg("--kubeconfig").arg(state.join("kubeconfig")).args(args).output().await.unwrap();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Fetches the page that a guest serves.
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

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Writes a registry configuration that names registries: VMs of the cluster reach no others on loopback.
pub(crate) fn registry_config(dir: &Path, registries: &[&str]) -> String {
    let config = dir.join("certs.d");
    for registry in registries {
        std::fs::create_dir_all(config.join(registry)).unwrap();
    }
    config.to_str().unwrap().to_owned()
}
