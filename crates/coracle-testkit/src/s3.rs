//! An S3 server on loopback, in memory, that checks signatures: `tools/s3`, made by `cargo xtask setup`.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};

use crate::tools;

/// Name of the bucket, which exists.
pub const BUCKET: &str = "registry";
/// Its access key.
pub const ACCESS_KEY: &str = "access";
/// The secret of [`ACCESS_KEY`].
pub const SECRET_KEY: &str = "secret";

/// A running server. It ends, and its objects are removed, when this is dropped.
#[derive(Debug)]
pub struct S3Server {
    child: Child,
    url: String,
}

impl S3Server {
    /// Starts one. `None` where the program is missing, which fails in CI.
    ///
    /// # Errors
    /// When it does not start.
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

    /// `http://127.0.0.1:PORT`.
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
