//! Execution of a plugin: environment, standard input, a bounded answer, a time limit (CNI specification 1.0, section 2).

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::conf::Call;
use super::error::CniError;

/// Maximum size of an answer, bytes.
const ANSWER_MAX: u64 = 1 << 20;
/// Maximum length of a message in an error, characters.
const MESSAGE_MAX: usize = 300;
/// Time to wait for the exit of a plugin that was killed.
const REAP: Duration = Duration::from_secs(5);

pub(super) struct Execution<'a> {
    pub(super) plugin: &'a str,
    pub(super) dir: &'a Path,
    pub(super) call: &'a Call<'a>,
    pub(super) input: &'a Value,
    pub(super) deadline: Duration,
}

/// Error result of a plugin (section 6, "Error").
#[derive(Deserialize)]
struct Failure {
    #[serde(default)]
    code: i64,
    msg: String,
    #[serde(default)]
    details: String,
}

/// Runs a plugin. When the time limit is over, the plugin is killed together with its child processes. Cancel-safe: dropping
/// the future kills it, too.
pub(super) async fn run(execution: &Execution<'_>) -> Result<Vec<u8>, CniError> {
    let Execution { plugin, dir, call, deadline, .. } = *execution;
    let failed = |source| CniError::Run { plugin: plugin.to_owned(), dir: dir.to_owned(), source };
    let mut command = Command::new(dir.join(plugin));
    command
        .env("CNI_COMMAND", call.command)
        .env("CNI_CONTAINERID", call.id)
        .env("CNI_NETNS", call.netns)
        .env("CNI_IFNAME", call.interface)
        .env("CNI_ARGS", &call.args)
        .env("CNI_PATH", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(failed)?;
    let group = Group(child.id());
    let input = execution.input.to_string().into_bytes();
    let outcome = timeout(deadline, communicate(&mut child, input)).await;
    let Ok(outcome) = outcome else {
        drop(group);
        let _killed = timeout(REAP, child.wait()).await;
        return Err(CniError::TimedOut { plugin: plugin.to_owned(), command: call.command, limit: deadline });
    };
    // The child was reaped: its process group id may be reused by now.
    std::mem::forget(group);
    let (is_success, stdout, stderr) = outcome.map_err(failed)?;
    if !stderr.is_empty() {
        tracing::debug!(plugin, command = call.command, stderr = text(&stderr), "CNI plugin said");
    }
    if is_success { Ok(stdout) } else { Err(refusal(execution, &stdout, &stderr)) }
}

fn refusal(execution: &Execution<'_>, stdout: &[u8], stderr: &[u8]) -> CniError {
    let (plugin, command) = (execution.plugin.to_owned(), execution.call.command);
    match serde_json::from_slice::<Failure>(stdout) {
        Ok(Failure { code, msg, details }) => {
            let message = if details.is_empty() { msg } else { format!("{msg}: {details}") };
            CniError::Refused { plugin, command, message: text(message.as_bytes()), code }
        }
        Err(_) => {
            let said = if stdout.is_empty() { stderr } else { stdout };
            CniError::Answer { plugin, command, reason: format!("it failed and said {:?}", text(said)) }
        }
    }
}

async fn communicate(child: &mut Child, input: Vec<u8>) -> io::Result<(bool, Vec<u8>, Vec<u8>)> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let write = async move {
        if let Some(mut stdin) = stdin {
            // A plugin that ends before it has read its input reports the reason itself.
            let _closed = stdin.write_all(&input).await;
        }
        Ok(())
    };
    let ((), stdout, stderr) = tokio::try_join!(write, read(stdout), read(stderr))?;
    Ok((child.wait().await?.success(), stdout, stderr))
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(ANSWER_MAX).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

/// Removes control characters and limits the length.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|c| !c.is_control()).take(MESSAGE_MAX).collect()
}

/// Kills a process group when it is dropped.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        let leader = self.0.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(leader) = leader {
            let _already_gone = kill_process_group(leader, Signal::KILL);
        }
    }
}
