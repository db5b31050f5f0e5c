//! `coracle console`.

use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;
use pb::console_request::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::terminal::{self, RawMode};
use crate::cli::{ConsoleArgs, Global};
use crate::client::{NameMatch, reach};
use crate::error::Failure;
use crate::output::write_bytes;

/// Prints the history, then live output. `~.` at the beginning of a line leaves, as in ssh.
pub async fn run(global: &Global, args: ConsoleArgs) -> miette::Result<u8> {
    let mut reached = reach(global, &args.vm, NameMatch::Exact, Subresource::Console).await?;
    let follow = !args.no_follow;
    let (requests, stream) = mpsc::channel(8);
    let send = async |message| requests.send(pb::ConsoleRequest { message: Some(message) }).await.is_ok();
    send(Message::Start(pb::ConsoleStart { vm: reached.vm, follow })).await;
    let mut said =
        reached.node.console(ReceiverStream::new(stream)).await.map_err(Failure::from)?.into_inner();
    let raw = follow.then(RawMode::enter);
    if follow && terminal::stdin_is_terminal() {
        eprint!("console attached; ~. leaves\r\n");
    }
    let mut keys = follow.then(terminal::stdin_chunks);
    let mut escape = Escape::default();
    loop {
        tokio::select! {
            chunk = said.message() => match chunk.map_err(Failure::from)? {
                Some(chunk) => write_bytes(&chunk.data)?,
                None => break,
            },
            typed = async { keys.as_mut()?.recv().await }, if keys.is_some() => match typed {
                Some(data) if escape.detect_escape(&data) => break,
                Some(data) => { send(Message::Data(data)).await; }
                None => keys = None,
            },
        }
    }
    drop(raw);
    Ok(0)
}

/// Finds `~.` after the beginning of a line, even when the input is split between the two characters.
#[derive(Default)]
struct Escape {
    seen: Seen,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Seen {
    #[default]
    LineBegin,
    Tilde,
    Other,
}

impl Escape {
    fn detect_escape(&mut self, typed: &[u8]) -> bool {
        for byte in typed {
            self.seen = match (self.seen, byte) {
                (Seen::Tilde, b'.') => return true,
                (_, b'\r' | b'\n') => Seen::LineBegin,
                (Seen::LineBegin, b'~') => Seen::Tilde,
                _ => Seen::Other,
            };
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tilde_dot_at_line_start_detaches_the_console() {
        for (pieces, want) in [
            (vec!["~."], true),
            (vec!["ls\r", "~", "."], true),
            (vec!["a~."], false),
            (vec!["~x."], false),
            (vec!["~\r~."], true),
        ] {
            let mut escape = Escape::default();
            assert_eq!(pieces.iter().any(|p| escape.detect_escape(p.as_bytes())), want, "{pieces:?}");
        }
    }
}
