//! Commands in a guest whose agent is not available: SSH as root, with a password that all guests of the node share.
//!
//! The host key is not verified: each clone has a new key, which is not known in advance. Therefore anyone who can set the
//! address of a VM can obtain the password.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use coracle_streaming::{Session, SessionOutcome, Streams, TerminalSize, Writer};
use russh::client::{self, Handle};
use russh::keys::PublicKeyOrCertificate;
use russh::{Channel, ChannelMsg, ChannelReadHalf, ChannelWriteHalf};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// User in the guest.
const USER: &str = "root";
/// Port of SSH servers.
const PORT: u16 = 22;
/// Time limit for the connection, the key exchange and the login.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
/// Interval of keep-alive messages to a guest that sends nothing. The connection is closed after several without a reply.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Terminal type, and the size until the client sends its own.
const TERMINAL: (&str, u32, u32) = ("xterm", 80, 24);
/// Number of the standard error stream (RFC 4254, section 5.2).
const STDERR: u32 = 1;
/// Offset that shells add to the number of the signal that ended a command. SSH does not transmit signal numbers.
const KILLED: i32 = 128;

/// Password of the guests. Not shown in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// Wraps a password.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password")
    }
}

/// Authenticated connection to a guest. Dropping it ends the command that runs over it.
pub struct Connection {
    address: SocketAddr,
    handle: Handle<AnyKey>,
}

/// Handler that accepts every host key.
struct AnyKey;

impl client::Handler for AnyKey {
    type Error = russh::Error;

    async fn check_server_key(&mut self, _: &PublicKeyOrCertificate) -> Result<bool, russh::Error> {
        Ok(true)
    }
}

/// Connects to a guest and logs in, within 10 seconds.
///
/// # Errors
/// One line that says what failed.
pub async fn connect(address: IpAddr, password: &Password) -> Result<Connection, String> {
    connect_to(SocketAddr::new(address, PORT), password).await
}

async fn connect_to(address: SocketAddr, password: &Password) -> Result<Connection, String> {
    let failed = |why: &dyn fmt::Display| format!("cannot log in to {address} by SSH: {why}");
    let config = client::Config { keepalive_interval: Some(KEEP_ALIVE), ..client::Config::default() };
    let log_in = async {
        let mut handle = client::connect(Arc::new(config), address, AnyKey).await?;
        let is_in = handle.authenticate_password(USER, &password.0).await?.success();
        Ok::<_, russh::Error>((handle, is_in))
    };
    match timeout(DIAL_LIMIT, log_in).await {
        Ok(Ok((handle, true))) => Ok(Connection { address, handle }),
        Ok(Ok((_, false))) => Err(failed(&format_args!("{USER} is refused with this password"))),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&"the guest does not answer")),
    }
}

impl Connection {
    /// Runs a shell command line in the guest, connected to the streams of a session, until it has ended.
    pub async fn run(self, line: &str, streams: Streams, session: Session) -> SessionOutcome {
        let failed =
            |error: russh::Error| SessionOutcome::Failed(format!("SSH to {}: {error}", self.address));
        let begin = async {
            let channel = self.handle.channel_open_session().await?;
            if streams.tty {
                let (kind, columns, rows) = TERMINAL;
                channel.request_pty(false, kind, columns, rows, 0, 0, &[]).await?;
            }
            channel.exec(true, line).await?;
            Ok(channel)
        };
        match timeout(DIAL_LIMIT, begin).await {
            Ok(Ok(channel)) => follow(channel, session).await,
            Ok(Err(error)) => failed(error),
            Err(_) => SessionOutcome::Failed(format!("SSH to {}: no answer", self.address)),
        }
    }
}

async fn follow<M>(channel: Channel<M>, session: Session) -> SessionOutcome
where
    M: From<(russh::ChannelId, ChannelMsg)> + Send + Sync + 'static,
{
    let Session { stdin, stdout, stderr, resize } = session;
    let (reader, writer) = channel.split();
    let input = async {
        if let Some(stdin) = stdin {
            let _guest_gone = writer.data(stdin).await;
        }
        let _guest_gone = writer.eof().await;
        std::future::pending().await
    };
    tokio::select! {
        outcome = output(reader, stdout, stderr) => outcome,
        never = input => never,
        never = sizes(&writer, resize) => never,
    }
}

/// Copies the output of the command. The channel ends after all of it.
async fn output(
    mut reader: ChannelReadHalf,
    mut stdout: Option<Writer>,
    mut stderr: Option<Writer>,
) -> SessionOutcome {
    let mut code = None;
    while let Some(message) = reader.wait().await {
        let (to, data) = match message {
            ChannelMsg::Data { data } => (&mut stdout, data),
            ChannelMsg::ExtendedData { data, ext: STDERR } => (&mut stderr, data),
            ChannelMsg::ExitStatus { exit_status } => {
                code = Some(i32::try_from(exit_status).unwrap_or(KILLED));
                continue;
            }
            ChannelMsg::ExitSignal { .. } => {
                code = Some(KILLED);
                continue;
            }
            ChannelMsg::Failure => return SessionOutcome::Failed("the guest refuses the command".to_owned()),
            _ => continue,
        };
        if let Some(writer) = to
            && writer.write_all(&data).await.is_err()
        {
            // The client has closed this stream.
            *to = None;
        }
    }
    match code {
        Some(code) => SessionOutcome::Exited(code),
        None => SessionOutcome::Failed("the connection to the guest ended before the command".to_owned()),
    }
}

async fn sizes<M>(writer: &ChannelWriteHalf<M>, mut resize: mpsc::Receiver<TerminalSize>) -> SessionOutcome
where
    M: From<(russh::ChannelId, ChannelMsg)> + Send + Sync + 'static,
{
    while let Some(TerminalSize { columns, rows }) = resize.recv().await {
        let _guest_gone = writer.window_change(columns.into(), rows.into(), 0, 0).await;
    }
    std::future::pending().await
}

/// Returns a command as a shell command line: each argument is quoted as one word.
#[must_use]
pub fn line_of(command: &[String]) -> String {
    let quoted = command.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_preserves_each_argument() {
        let words = ["sh", "-c", "echo it's $HOME; \"x\"", "", "a\nb"].map(str::to_owned);
        let printed = std::process::Command::new("sh")
            .args(["-c", &format!("printf '<%s>' {}", line_of(&words))])
            .output()
            .unwrap();
        let want: String = words.iter().map(|word| format!("<{word}>")).collect();
        assert_eq!(String::from_utf8(printed.stdout).unwrap(), want);
    }

    #[test]
    fn password_is_not_printed() {
        assert_eq!(format!("{:?}", Password::new("swordfish")), "Password");
    }

    #[tokio::test]
    async fn closed_ssh_port_is_named_in_the_error() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let error = connect_to(address, &Password::new("x")).await.err().unwrap();
        assert!(error.starts_with(&format!("cannot log in to {address} by SSH: ")), "{error}");
    }
}
