//! Real vCenter API for tests: govmomi's simulator as a child process on loopback, behind our proxy that counts calls on the
//! server's side and fails them on request (`tools/vcsim`).
//!
//! Start it inside `netns::run` or `cluster::run`: it listens in the calling thread's network namespace. The process ends when
//! its standard input closes, so it outlives neither the [`Vcsim`] nor the test process.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::tools;

/// Time limit of the control port.
const CONTROL: Duration = Duration::from_secs(5);

/// Running simulator with a datacenter `DC0`, a cluster `DC0_C0`, a storage pod `DC0_POD0` with the datastores `LocalDS_1` to
/// `LocalDS_3`, and a datastore `LocalDS_0` outside of the pod.
#[derive(Debug)]
pub struct Vcsim {
    child: Child,
    url: String,
    thumbprint: String,
    control: String,
}

/// Rule by which calls of one method fail: after `skip` calls, `count` calls fail (0: all).
#[derive(Clone, Debug, Default)]
pub struct Rule {
    /// SOAP method; `PUT`, `HEAD` or `GET` for datastore files; or `*`.
    pub method: String,
    /// Number of calls that succeed first.
    pub skip: u32,
    /// Number of calls that fail. 0: all following ones.
    pub count: u32,
    /// How the calls fail.
    pub act: Act,
}

/// How a call fails.
#[derive(Clone, Debug, Default)]
pub enum Act {
    /// The call is carried out without a failure.
    #[default]
    Nothing,
    /// The call is delayed.
    Delay(Duration),
    /// The connection closes before the call is carried out.
    Cut,
    /// The call is carried out, and its answer is lost.
    CutAfter,
    /// The server answers with this HTTP status.
    Status(u16),
    /// The server answers with a fault of this type, with XML children.
    Fault(String, String),
}

impl Rule {
    /// Rule for all calls of `method` from now on.
    #[must_use]
    pub fn always(method: &str, act: Act) -> Self {
        Self { method: method.into(), act, ..Self::default() }
    }

    /// Rule for the next `count` calls of `method`.
    #[must_use]
    pub fn next(method: &str, count: u32, act: Act) -> Self {
        Self { count, ..Self::always(method, act) }
    }

    fn json(&self) -> Value {
        let mut rule = json!({"method": self.method, "skip": self.skip, "count": self.count});
        match &self.act {
            Act::Nothing => rule["do"] = "delay".into(),
            Act::Delay(by) => {
                rule["do"] = "delay".into();
                rule["delay_ms"] = u64::try_from(by.as_millis()).unwrap_or(u64::MAX).into();
            }
            Act::Cut => rule["do"] = "cut".into(),
            Act::CutAfter => rule["do"] = "cut-after".into(),
            Act::Status(code) => {
                rule["do"] = "status".into();
                rule["status"] = (*code).into();
            }
            Act::Fault(kind, detail) => {
                rule["do"] = "fault".into();
                rule["fault"] = kind.as_str().into();
                rule["detail"] = detail.as_str().into();
            }
        }
        rule
    }
}

impl Vcsim {
    /// Starts a simulator with additional `args`. When the program is missing, prints the reason and skips the test, or fails
    /// it in CI.
    ///
    /// # Errors
    /// When the simulator does not start.
    pub fn start_or_skip(args: &[&str]) -> anyhow::Result<Option<Self>> {
        let program = match std::env::var_os("VCSIM_BIN") {
            Some(program) => program.into(),
            None => match tools::require(["vcsim"]) {
                Some([program]) => program,
                None => return Ok(None),
            },
        };
        let mut child = Command::new(&program)
            .args(["-ds", "4", "-pod-ds", "3"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        stdout.read_line(&mut line)?;
        let said: Value = serde_json::from_str(&line).context("vcsim printed no address")?;
        let field = |name: &str| said[name].as_str().unwrap_or_default().to_owned();
        let (url, thumbprint, control) = (field("url"), field("thumbprint"), field("control"));
        Ok(Some(Self { child, url, thumbprint, control }))
    }

    /// URL of the API: `https://127.0.0.1:PORT/sdk`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// SHA-256 of the simulator's certificate, in lower-case hex.
    #[must_use]
    pub fn thumbprint(&self) -> &str {
        &self.thumbprint
    }

    /// Process id of the simulator.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Number of calls by method since the last [`Self::reset`], counted on the server's side.
    ///
    /// # Errors
    /// When the control port does not answer.
    pub fn calls(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        Ok(serde_json::from_str(&self.ask("GET", "/calls", "")?)?)
    }

    /// Resets the numbers of calls.
    ///
    /// # Errors
    /// Like [`Self::calls`].
    pub fn reset(&self) -> anyhow::Result<()> {
        self.ask("POST", "/reset", "").map(drop)
    }

    /// Replaces the rules. An empty slice removes all rules.
    ///
    /// # Errors
    /// Like [`Self::calls`].
    pub fn rules(&self, rules: &[Rule]) -> anyhow::Result<()> {
        let list: Vec<_> = rules.iter().map(Rule::json).collect();
        self.ask("POST", "/fault", &Value::from(list).to_string()).map(drop)
    }

    /// Ends all current sessions.
    ///
    /// # Errors
    /// Like [`Self::calls`].
    pub fn expire_sessions(&self) -> anyhow::Result<()> {
        self.ask("POST", "/expire", "").map(drop)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(&self.control)?;
        stream.set_read_timeout(Some(CONTROL))?;
        let length = body.len();
        write!(stream, "{method} {path} HTTP/1.0\r\nHost: vcsim\r\nContent-Length: {length}\r\n\r\n{body}")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, text) = answer.split_once("\r\n\r\n").context("vcsim's control port sent no body")?;
        ensure!(head.starts_with("HTTP/1.0 200"), "{method} {path}: {head}");
        Ok(text.to_owned())
    }
}

impl Drop for Vcsim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
