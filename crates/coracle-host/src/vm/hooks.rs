//! Hooks: programs of an image that run before and after its VM is copied, `/etc/coracle/hooks/<name>`, as root without
//! arguments. They drop the state in memory that two VMs must not share.

use std::time::Duration;

use coracle_guest_client::{GuestClient, GuestError};
use coracle_proto::guest as pb;
use coracle_proto::guest::exec_response::Message;
use tokio::time::timeout;

use crate::HostError;
use coracle_lifecycle::Hook;

/// Time limit of one hook.
const LIMIT: Duration = Duration::from_secs(30);
/// Number of last bytes of a hook's output in errors.
const WORDS: usize = 300;
/// Exit code for a missing program, and the end of the agent's message about it.
const NOT_FOUND: (i32, &str) = (127, ": not found");

/// Runs a hook in the guest of VM `vm`. An image without the hook is fine.
///
/// # Errors
/// [`HostError::Hook`] if the hook failed or took too long; [`HostError::Guest`] if the result is unknown.
pub(super) async fn run(guest: &GuestClient, vm: &str, hook: Hook) -> Result<(), HostError> {
    let failed = |why: String| HostError::Hook { name: vm.to_owned(), hook: hook.name(), why };
    match timeout(LIMIT, exec(guest, hook)).await {
        Ok(Ok((exit, words))) => check_exit(&exit, &words).map_err(failed),
        Ok(Err(source)) => Err(HostError::Guest { name: vm.to_owned(), operation: "run a hook", source }),
        Err(_) => Err(failed(format!("it did not end within {} s", LIMIT.as_secs()))),
    }
}

/// Executes the hook. Returns its exit status and the end of its output. Dropping the future sends SIGHUP to the program.
async fn exec(guest: &GuestClient, hook: Hook) -> Result<(pb::ExitStatus, Vec<u8>), GuestError> {
    let argv = vec![format!("/etc/coracle/hooks/{}", hook.name())];
    let mut replies = guest.exec(pb::Process { argv, ..Default::default() }).await?;
    let mut words = Vec::new();
    while let Some(reply) = replies.message().await? {
        match reply.message {
            Some(Message::Stdout(data) | Message::Stderr(data)) => {
                words.extend(data);
                words.drain(..words.len().saturating_sub(WORDS));
            }
            Some(Message::Exit(exit)) => return Ok((exit, words)),
            Some(Message::Started(_)) | None => {}
        }
    }
    Err(GuestError::unavailable("the session ended before the hook did"))
}

fn check_exit(exit: &pb::ExitStatus, words: &[u8]) -> Result<(), String> {
    let how = match exit {
        pb::ExitStatus { code: 0, signal: 0, .. } => return Ok(()),
        pb::ExitStatus { code, error, .. } if *code == NOT_FOUND.0 && error.ends_with(NOT_FOUND.1) => {
            return Ok(());
        }
        pb::ExitStatus { error, .. } if !error.is_empty() => error.clone(),
        pb::ExitStatus { signal: 0, code, .. } => format!("it exited with code {code}"),
        pb::ExitStatus { signal, .. } => format!("it was killed by signal {signal}"),
    };
    let said = String::from_utf8_lossy(words);
    let text = if said.trim().is_empty() { how } else { format!("{how}: {}", said.trim()) };
    // The guest is hostile: its output is cut and sanitised.
    Err(text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(2 * WORDS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hook_exit_status_table() {
        let exit = |code, signal, error: &str| pb::ExitStatus { code, signal, error: error.into() };
        for (why, exit, words, want) in [
            ("well", exit(0, 0, ""), "done", Ok(())),
            ("there is none", exit(127, 0, "/etc/coracle/hooks/x: not found"), "", Ok(())),
            ("its own 127", exit(127, 0, ""), "", Err("it exited with code 127")),
            (
                "its interpreter is missing",
                exit(127, 0, "x: No such file or directory (os error 2)"),
                "",
                Err("x: No such file or directory (os error 2)"),
            ),
            ("it says why", exit(1, 0, ""), "busy\x1b[2J\n", Err("it exited with code 1: busy [2J")),
            ("killed", exit(137, 9, ""), "", Err("it was killed by signal 9")),
        ] {
            assert_eq!(check_exit(&exit, words.as_bytes()), want.map_err(str::to_owned), "{why}");
        }
    }
}
