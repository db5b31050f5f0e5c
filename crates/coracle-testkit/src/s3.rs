//! In-memory S3 server on loopback that checks signatures: `tools/s3`, built by `cargo xtask setup`.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};

use crate::tools;

/// Name of the existing bucket.
pub const BUCKET: &str = "registry";
/// Access key of the bucket.
pub const ACCESS_KEY: &str = "access";
/// Secret key of [`ACCESS_KEY`].
pub const SECRET_KEY: &str = "secret";

/// Running server. Dropping it ends the server and removes its objects.
#[derive(Debug)]
pub struct S3Server {
    child: Child,
    url: String,
}

impl S3Server {
    /// Starts a server. `None` when the program is missing, which fails in CI.
    ///
    /// # Errors
    /// When the server does not start.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let Some([program]) = tools::require(["s3-server"]) else { return Ok(None) };
        let mut child = Command::new(program).stdout(Stdio::piped()).spawn().context("start s3-server")?;
        let output = child.stdout.take().context("its output")?;
        let mut server = Self { child, url: String::new() };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(!line.trim().is_empty(), "s3-server does not listen");
        server.url = format!("http://{}", line.trim());
        Ok(Some(server))
    }

    /// URL of the server: `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
