//! Debian's docker-registry on loopback, filled by skopeo.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

/// Credentials of the only user of a registry with a password.
pub const LOGIN: &str = "user:secret";
/// Entry of [`LOGIN`] with the bcrypt hash of its password.
const HTPASSWD: &str = "user:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";
/// Time limit from start to listening.
const START: Duration = Duration::from_secs(10);

/// Running registry. Dropping it ends the process and removes its data.
#[derive(Debug)]
pub struct DebianRegistry {
    child: Child,
    address: SocketAddr,
    dir: tempfile::TempDir,
}

impl DebianRegistry {
    /// Starts a registry with anonymous reads and writes.
    ///
    /// # Errors
    /// When the program is missing or does not listen in time.
    pub fn start() -> anyhow::Result<Self> {
        Self::launch(false)
    }

    /// Starts a registry that requires [`LOGIN`] for every request.
    ///
    /// # Errors
    /// Like [`DebianRegistry::start`].
    pub fn start_with_password() -> anyhow::Result<Self> {
        Self::launch(true)
    }

    fn launch(password: bool) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let root = dir.path().display();
        let mut config = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {root}/data\n  delete:\n    enabled: true\n\
             http:\n  addr: {address}\n"
        );
        if password {
            fs::write(dir.path().join("htpasswd"), HTPASSWD)?;
            config += &format!("auth:\n  htpasswd:\n    realm: test\n    path: {root}/htpasswd\n");
        }
        let path = dir.path().join("config.yml");
        fs::write(&path, config)?;
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(path).stdout(Stdio::null()).stderr(Stdio::null());
        let registry = Self { child: command.spawn().context("start docker-registry")?, address, dir };
        let end = Instant::now() + START;
        while TcpStream::connect(address).is_err() {
            ensure!(Instant::now() < end, "docker-registry does not listen on {address}");
            thread::sleep(Duration::from_millis(25));
        }
        Ok(registry)
    }

    /// Listening address: `127.0.0.1:PORT`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Directory that exists as long as the registry.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Copies the image of an OCI layout (its only tag is `tag`) to `name` with skopeo, keeping digests. Returns the whole
    /// reference.
    ///
    /// # Errors
    /// When skopeo fails. The message contains its output.
    pub fn push(&self, layout: &Path, tag: &str, name: &str, login: Option<&str>) -> anyhow::Result<String> {
        let reference = format!("{}/{name}", self.address);
        let mut command = Command::new("skopeo");
        command.args(["copy", "--preserve-digests", "--dest-tls-verify=false"]);
        command.args(login.map(|login| format!("--dest-creds={login}")));
        command.args([format!("oci:{}:{tag}", layout.display()), format!("docker://{reference}")]);
        let output = command.output().context("run skopeo")?;
        ensure!(output.status.success(), "skopeo: {}", String::from_utf8_lossy(&output.stderr));
        Ok(reference)
    }
}

impl Drop for DebianRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
