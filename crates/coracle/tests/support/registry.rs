//! `coracle registry serve` as a process, on a port of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::support::CORACLE;

/// A running registry; it ends when this is dropped, its state folder stays.
pub(crate) struct RegistryDaemon {
    pub(crate) address: SocketAddr,
    pub(crate) state: PathBuf,
    child: Child,
}

impl RegistryDaemon {
    /// Starts one on a free port.
    pub(crate) fn start(state: &Path, args: &[&str]) -> Self {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        Self::start_on(free, state, args)
    }

    /// Starts one where another was.
    #[allow(dead_code, reason = "each test file uses its part")]
    pub(crate) fn start_on(address: SocketAddr, state: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(CORACLE);
        command
            .arg("--state")
            .arg(state)
            .args(["registry", "serve", "--listen", &address.to_string()])
            .args(args);
        let log =
            std::fs::File::options().create(true).append(true).open(state.with_extension("log")).unwrap();
        command.stdout(Stdio::null()).stderr(log);
        let daemon = Self { address, state: state.to_owned(), child: command.spawn().unwrap() };
        let end = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(address).is_err() {
            assert!(
                Instant::now() < end,
                "the registry does not listen; see {}",
                state.with_extension("log").display()
            );
            sleep(Duration::from_millis(10));
        }
        daemon
    }

    pub(crate) fn token(&self) -> String {
        std::fs::read_to_string(self.state.join("registry/token")).unwrap().trim().to_owned()
    }

    #[allow(dead_code, reason = "each test file uses its part")]
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// SIGKILL, now.
    #[allow(dead_code, reason = "each test file uses its part")]
    pub(crate) fn kill(mut self) -> SocketAddr {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.address
    }
}

impl Drop for RegistryDaemon {
    fn drop(&mut self) {
        let _ended_before = self.child.kill();
        let _ended_before = self.child.wait();
    }
}
