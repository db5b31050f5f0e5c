//! `coracle registry serve` as a process, on a port of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::CORACLE;
use coracle_testkit::{LIMIT, eventually_blocking};

/// Running registry. Its process ends on drop, and its state directory stays.
pub(crate) struct RegistryDaemon {
    pub(crate) address: SocketAddr,
    pub(crate) state: PathBuf,
    child: Child,
}

impl RegistryDaemon {
    /// Starts a registry on a free port.
    pub(crate) fn start(state: &Path, args: &[&str]) -> Self {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        Self::start_on(free, state, args)
    }

    /// Starts a registry at the address of an earlier one.
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
        let what = format!("the registry listens; see {}", state.with_extension("log").display());
        eventually_blocking(LIMIT, &what, || TcpStream::connect(address).ok()).unwrap();
        daemon
    }

    pub(crate) fn token(&self) -> String {
        std::fs::read_to_string(self.state.join("registry/token")).unwrap().trim().to_owned()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Kills the registry by SIGKILL and returns its address.
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
