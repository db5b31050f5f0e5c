//! QEMU's monitor protocol: one JSON object per line over a Unix socket.
//!
//! Replies are matched by id; events in between are dropped. Unknown events and fields are tolerated (QMP reference).

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Interest, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// Maximum length of a line from a VMM; the guest influences its messages.
const LINE_MAX: usize = 1 << 20;
/// Time limit for the greeting. A monitor greets at once, but later on a loaded host.
const GREETING_LIMIT: Duration = Duration::from_secs(20);
/// Time limit from sending commands to the last of their answers. A command takes milliseconds, but `stop` waits for pending
/// writes (QEMU, `vm_stop`): without a limit a disk that hangs would block its caller forever.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Maximum number of stale lines before the greeting.
const STALE_MAX: usize = 64;

/// Failure of a monitor command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The socket failed or was closed.
    #[error("talk to the monitor")]
    Io(#[from] io::Error),
    /// The VMM refused a command.
    #[error("{command}: {class}: {description}")]
    Refused {
        /// Name of the command.
        command: &'static str,
        /// QMP error class.
        class: String,
        /// Description of the VMM.
        description: String,
    },
    /// The line is not QMP.
    #[error("the monitor said something that is not QMP")]
    Protocol,
}

/// Open monitor with negotiated capabilities.
#[derive(Debug)]
pub struct Qmp {
    lines: Lines<BufReader<tokio::io::Take<OwnedReadHalf>>>,
    write: OwnedWriteHalf,
    next_id: u64,
    version: String,
}

impl Qmp {
    /// Connects and negotiates capabilities. Not cancel-safe: the socket is dropped with the future.
    ///
    /// # Errors
    /// [`QmpError::Io`] while the VMM does not listen; [`QmpError::Protocol`].
    pub async fn connect(path: &Path) -> Result<Self, QmpError> {
        use tokio::io::AsyncReadExt;
        let (read, write) = UnixStream::connect(path).await?.into_split();
        let lines = BufReader::new(read.take(LINE_MAX as u64)).lines();
        let mut qmp = Self { lines, write, next_id: 0, version: String::new() };
        let version = tokio::time::timeout(GREETING_LIMIT, qmp.greeting()).await;
        let version = version.map_err(|_| io::ErrorKind::TimedOut)??;
        let part = |name| version.get(name).and_then(Value::as_u64).unwrap_or(0);
        qmp.version = format!("{}.{}.{}", part("major"), part("minor"), part("micro"));
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Reads the greeting. Lines for a previous client may precede it, the first of them truncated.
    async fn greeting(&mut self) -> Result<Value, QmpError> {
        for _ in 0..STALE_MAX {
            let line = match self.line().await {
                Err(QmpError::Protocol) => continue,
                line => line?,
            };
            if let Some(version) = line.pointer("/QMP/version/qemu") {
                return Ok(version.clone());
            }
        }
        Err(QmpError::Protocol)
    }

    /// Returns the version of the VMM, for example `7.2.22`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Runs one command and returns its result, within 20 s. Not cancel-safe.
    ///
    /// # Errors
    /// [`QmpError::Refused`] with the description of the VMM; [`QmpError::Io`] also when it does not answer in time.
    pub async fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        let line = self.command(command, arguments);
        let run = async {
            self.write.write_all(line.as_bytes()).await?;
            self.reply(command, self.next_id).await
        };
        with_time_limit(run).await
    }

    /// Runs commands in order, and sends each without waiting for the answer to the one before, because each round trip costs
    /// an iteration of the VMM's main loop. Commands after a refused one are still run. The limit of 20 s is for all of them.
    /// Not cancel-safe.
    ///
    /// # Errors
    /// The first refusal, as described at [`Qmp::execute`].
    pub async fn execute_all(&mut self, commands: Vec<(&'static str, Value)>) -> Result<(), QmpError> {
        let (mut lines, mut sent) = (String::new(), Vec::new());
        for (command, arguments) in commands {
            lines += &self.command(command, arguments);
            sent.push((command, self.next_id));
        }
        let run = async {
            self.write.write_all(lines.as_bytes()).await?;
            let mut outcome = Ok(());
            for (command, id) in sent {
                match self.reply(command, id).await {
                    Err(refused @ QmpError::Refused { .. }) => outcome = outcome.and(Err(refused)),
                    other => drop(other?),
                }
            }
            outcome
        };
        with_time_limit(run).await
    }

    /// Runs a command that takes an open file: `getfd`, after which commands refer to it as `fd:NAME`, or `add-fd`. The limit
    /// is 20 s. Not cancel-safe.
    ///
    /// # Errors
    /// Same as [`Qmp::execute`].
    pub async fn pass_file(
        &mut self,
        command: &'static str,
        arguments: Value,
        file: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        let line = self.command(command, arguments);
        let run = async {
            let sent = self.send_with_file(line.as_bytes(), file).await?;
            // The file is sent with the first byte; the rest of the line is sent normally.
            self.write.write_all(line.as_bytes().get(sent..).unwrap_or_default()).await?;
            self.reply(command, self.next_id).await
        };
        with_time_limit(run).await
    }

    /// Sends the beginning of `bytes`, at least one byte, with the file; returns the number of bytes sent.
    async fn send_with_file(&self, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
        let socket: &UnixStream = self.write.as_ref();
        loop {
            socket.writable().await?;
            match socket.try_io(Interest::WRITABLE, || send_with_file(socket, bytes, file)) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    fn command(&mut self, command: &'static str, arguments: Value) -> String {
        self.next_id += 1;
        let mut line = json!({"execute": command, "arguments": arguments, "id": self.next_id}).to_string();
        line.push('\n');
        line
    }

    async fn reply(&mut self, command: &'static str, id: u64) -> Result<Value, QmpError> {
        loop {
            let mut reply = self.line().await?;
            if reply.get("id").and_then(Value::as_u64) != Some(id) {
                continue; // an event, or the answer to an earlier command that timed out
            }
            if let Some(error) = reply.get("error") {
                let text = |name| error.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
                return Err(QmpError::Refused { command, class: text("class"), description: text("desc") });
            }
            return reply.get_mut("return").map(Value::take).ok_or(QmpError::Protocol);
        }
    }

    async fn line(&mut self) -> Result<Value, QmpError> {
        self.lines.get_mut().get_mut().set_limit(LINE_MAX as u64);
        let line = self.lines.next_line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        serde_json::from_str(&line).map_err(|_| QmpError::Protocol)
    }
}

/// Runs `run` with the time limit of an answer.
async fn with_time_limit<T>(run: impl Future<Output = Result<T, QmpError>>) -> Result<T, QmpError> {
    let late =
        || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", ANSWER_LIMIT.as_secs()));
    tokio::time::timeout(ANSWER_LIMIT, run).await.unwrap_or_else(|_| Err(late().into()))
}

/// Calls sendmsg(2) with one file (unix(7), SCM_RIGHTS).
fn send_with_file(socket: &UnixStream, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    if !rights.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut rights, SendFlags::NOSIGNAL)?)
}

impl From<io::ErrorKind> for QmpError {
    fn from(kind: io::ErrorKind) -> Self {
        Self::Io(kind.into())
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// Serves a monitor that sends these lines, the first before any command. A monitor that greets lives as long as the
    /// returned guard.
    async fn monitor(lines: &'static [&'static str]) -> (impl Sized, Result<Qmp, QmpError>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let serve = async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (read, mut write) = stream.into_split();
            let mut asked = BufReader::new(read).lines();
            for line in lines {
                write.write_all(format!("{line}\n").as_bytes()).await.unwrap();
                if line.contains("QMP") {
                    let _ = asked.next_line().await;
                }
            }
            lines.iter().any(|line| line.contains("QMP")).then_some((asked, write))
        };
        let (stays, qmp) = tokio::join!(serve, Qmp::connect(&path));
        ((dir, stays), qmp)
    }

    #[tokio::test]
    async fn stale_lines_before_greeting_are_skipped() {
        let greeting = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":22}},"capabilities":[]}}"#;
        let lines: &'static [_] = Box::leak(Box::new([
            r#"rn":{},"id":6}"#,
            r#"{"return":{},"id":7}"#,
            greeting,
            r#"{"return":{},"id":1}"#,
        ]));
        let (_dir, qmp) = monitor(lines).await;
        assert_eq!(qmp.unwrap().version(), "7.2.22");
    }

    #[tokio::test]
    async fn events_between_command_and_reply_are_skipped() {
        let greeting = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":22}},"capabilities":[]}}"#;
        let event = r#"{"event":"NEW_THING","data":{},"timestamp":{"seconds":1,"microseconds":2}}"#;
        let lines: &'static [_] = Box::leak(Box::new([greeting, event, r#"{"return":{},"id":1}"#]));
        let (_dir, qmp) = monitor(lines).await;
        assert_eq!(qmp.unwrap().version(), "7.2.22");
    }

    #[tokio::test]
    async fn batch_returns_first_refusal_and_reads_all_answers() {
        let greeting = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":22}},"capabilities":[]}}"#;
        let refusal = |id: u32| format!(r#"{{"error":{{"class":"No","desc":"{id}"}},"id":{id}}}"#);
        let answers = [r#"{"return":{},"id":1}"#.to_owned(), r#"{"return":{},"id":2}"#.to_owned()];
        let after = [refusal(3), refusal(4), r#"{"return":5,"id":5}"#.to_owned()];
        let lines = [greeting.to_owned()].into_iter().chain(answers).chain(after);
        let lines: Vec<&'static str> = lines.map(|line| &*line.leak()).collect();
        let (_dir, qmp) = monitor(lines.leak()).await;
        let mut qmp = qmp.unwrap();
        let many = ["a", "b", "c"].map(|command| (command, json!({}))).to_vec();
        match qmp.execute_all(many).await {
            Err(QmpError::Refused { command, description, .. }) => {
                assert_eq!((command, description.as_str()), ("b", "3"));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(qmp.execute("d", json!({})).await.unwrap(), json!(5));
    }

    #[tokio::test]
    async fn monitor_without_a_greeting_is_refused() {
        let (_dir, qmp) = monitor(&["hello"]).await;
        assert!(matches!(qmp, Err(QmpError::Io(_))), "it went away");
        let (_dir, qmp) = monitor(&["hello"; STALE_MAX]).await;
        assert!(matches!(qmp, Err(QmpError::Protocol)), "an endless line is refused");
    }

    /// Simulates a VM whose disk hangs, for which `stop` waits.
    #[tokio::test(start_paused = true)]
    async fn commands_of_a_hung_vmm_are_given_up() {
        let greeting = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":22}},"capabilities":[]}}"#;
        let lines: &'static [_] = Box::leak(Box::new([greeting, r#"{"return":{},"id":1}"#]));
        let (_stays, qmp) = monitor(lines).await;
        let mut qmp = qmp.unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let outcomes = [
            qmp.execute("stop", json!({})).await.map(drop),
            qmp.execute_all(vec![("stop", json!({}))]).await,
            qmp.pass_file("add-fd", json!({}), std::os::fd::AsFd::as_fd(&file)).await.map(drop),
        ];
        for outcome in outcomes {
            let refused = outcome.unwrap_err();
            assert!(
                matches!(&refused, QmpError::Io(e) if e.kind() == io::ErrorKind::TimedOut),
                "{refused:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_qmp_server_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp.sock");
        let _silent = UnixListener::bind(&path).unwrap();
        let refused = Qmp::connect(&path).await.unwrap_err();
        assert!(matches!(&refused, QmpError::Io(e) if e.kind() == io::ErrorKind::TimedOut), "{refused:?}");
    }
}
