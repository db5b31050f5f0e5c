//! The two registries, as processes with directories of their own.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use coracle_oci::{Credentials, Secret};
use coracle_testkit::registry::DebianRegistry;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Debian,
    Ours,
}

/// Running registry, which ends on drop.
pub(crate) enum Server {
    Debian(DebianRegistry),
    Ours(Ours),
}

pub(crate) struct Ours {
    child: Child,
    address: SocketAddr,
    token: String,
    data: PathBuf,
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ended_before = self.child.kill();
        let _ended_before = self.child.wait();
    }
}

impl Server {
    pub(crate) fn start(which: Which, state: &Path) -> Result<Self> {
        match which {
            Which::Debian => DebianRegistry::start().map(Self::Debian),
            Which::Ours => start_coracle(state).map(Self::Ours),
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        match self {
            Self::Debian(registry) => registry.address(),
            Self::Ours(ours) => ours.address,
        }
    }

    /// Returns the directory of the blobs.
    pub(crate) fn data(&self) -> &Path {
        match self {
            Self::Debian(registry) => registry.dir(),
            Self::Ours(ours) => &ours.data,
        }
    }

    pub(crate) fn credentials(&self) -> Credentials {
        match self {
            Self::Debian(_) => Credentials::Anonymous,
            Self::Ours(ours) => {
                Credentials::Basic { user: "token".into(), password: Secret::new(&*ours.token) }
            }
        }
    }

    /// Returns the pid of our registry.
    pub(crate) fn pid(&self) -> Option<u32> {
        match self {
            Self::Debian(_) => None,
            Self::Ours(ours) => Some(ours.child.id()),
        }
    }

    /// Returns the credentials of our registry in the form of skopeo.
    pub(crate) fn login(&self) -> Option<String> {
        match self {
            Self::Debian(_) => None,
            Self::Ours(ours) => Some(format!("token:{}", ours.token)),
        }
    }
}

fn start_coracle(state: &Path) -> Result<Ours> {
    fs::create_dir_all(state)?;
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
    command.arg("--state").arg(state).args(["registry", "serve", "--listen", &address.to_string()]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("start coracle")?;
    let mut ours = Ours { child, address, token: String::new(), data: state.join("registry") };
    let began = Instant::now();
    while TcpStream::connect(address).is_err() {
        ensure!(began.elapsed() < super::LIMIT, "our registry does not listen on {address}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    ours.token = fs::read_to_string(ours.data.join("token"))?.trim().to_owned();
    Ok(ours)
}
