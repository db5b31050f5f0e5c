//! PostgreSQL server on loopback for one test.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    os::unix::fs::chown,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

use crate::tools;

/// Time limit from start to listening.
const START: Duration = Duration::from_secs(20);

/// Running server. Dropping it ends the server and removes its data.
#[derive(Debug)]
pub struct Postgres {
    server: Child,
    dir: tempfile::TempDir,
    port: u16,
}

/// Command that runs as the user `postgres`: `initdb` and the server refuse root.
fn as_postgres(program: &str) -> Command {
    let mut command = Command::new("runuser");
    command.args(["-u", "postgres", "--", program]).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn id(which: &str) -> anyhow::Result<u32> {
    let output = Command::new("id").args([which, "postgres"]).output().context("run id")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}

impl Postgres {
    /// Starts a server. `None` when PostgreSQL is not installed, which fails in CI.
    ///
    /// # Errors
    /// When the server does not start.
    pub fn start() -> anyhow::Result<Option<Self>> {
        if !Command::new("initdb").arg("--version").output().is_ok_and(|o| o.status.success()) {
            tools::skip("no initdb");
            return Ok(None);
        }
        let dir = tempfile::tempdir()?;
        let data = dir.path().join("data");
        fs::create_dir(&data)?;
        let (user, group) = (id("-u")?, id("-g")?);
        chown(dir.path(), Some(user), Some(group))?;
        chown(&data, Some(user), Some(group))?;
        let mut initdb = as_postgres("initdb");
        initdb.args(["-A", "trust", "-U", "coracle", "--no-sync", "-D"]).arg(&data);
        ensure!(initdb.status()?.success(), "initdb failed");
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut server = as_postgres("postgres");
        server.args(["-h", "127.0.0.1", "-p", &port.to_string(), "-k"]).arg(dir.path()).arg("-D").arg(&data);
        let postgres = Self { server: server.spawn()?, dir, port };
        let end = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            ensure!(Instant::now() < end, "PostgreSQL does not listen");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(Some(postgres))
    }

    /// Connection URL of the database.
    #[must_use]
    pub fn dsn(&self) -> String {
        format!("postgres://coracle@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Uses the pid of the server itself, because `runuser` does not forward signals.
        if let Ok(text) = fs::read_to_string(self.dir.path().join("data/postmaster.pid"))
            && let Some(pid) = text.lines().next()
        {
            let _ended_before = Command::new("kill").args(["-INT", pid]).status();
        }
        let _ended_before = self.server.wait();
    }
}
