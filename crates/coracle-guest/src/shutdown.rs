//! Shutdown: ends the workload, unmounts the disks cleanly, and lets the host receive the last output.

use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitOptions};
use rustix::system::RebootCommand;

use crate::agent::Agent;
use crate::console::say;
use crate::mounts;
use crate::workload::WorkloadPhase;

/// Maximum grace of a request.
const GRACE_MAX: Duration = Duration::from_secs(600);
/// Time for the response to a Shutdown to reach the host before anything ends.
const ANSWER: Duration = Duration::from_millis(20);
/// Time for the host to read the exit of a command and its last output.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Time for killed processes to be reaped.
const REAP: Duration = Duration::from_secs(1);

/// Waits for a Shutdown, then ends the workload: SIGTERM, the grace, SIGKILL.
pub(crate) async fn await_shutdown(agent: &Agent) {
    let mut wanted = agent.shutdown.subscribe();
    let grace = match wanted.wait_for(Option::is_some).await.map(|r| r.map_or(0, |r| r.grace_ms)) {
        Ok(grace_ms) => Duration::from_millis(grace_ms.into()).min(GRACE_MAX),
        Err(_) => return,
    };
    tokio::time::sleep(ANSWER).await;
    agent.containers.stop_all(grace, &agent.reaper).await;
    if matches!(agent.workload.progress(), WorkloadPhase::Running(_)) {
        agent.workload.signal(&agent.reaper, Signal::TERM);
        if tokio::time::timeout(grace, agent.workload.wait_exit()).await.is_err() {
            agent.workload.signal(&agent.reaper, Signal::KILL);
            let _ = tokio::time::timeout(REAP, agent.workload.wait_exit()).await;
        }
        // The sessions are closed next.
        tokio::time::sleep(LAST_WORDS).await;
    }
}

/// Ends all processes and powers off. Must be called without a runtime, because nothing may use the root any more.
pub(crate) fn power_off(agent: &Agent) {
    crate::sys::kill_everything();
    let since = Instant::now();
    while since.elapsed() < REAP {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => {}
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => break, // no children left
        }
    }
    agent.containers.unmount_all();
    agent.volumes.unmount_all();
    mounts::unmount_all();
    rustix::fs::sync();
    say!("going off");
    end_vm();
}

/// Powers off at once.
pub(crate) fn end_vm() {
    let command = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let _ = rustix::system::reboot(end_command(&command));
}

/// Command that ends the VMM: a reboot for a VMM with `-no-reboot`, else a power-off.
fn end_command(command_line: &str) -> RebootCommand {
    let wants_off = command_line.split_ascii_whitespace().any(|word| word == "coracle.end=poweroff");
    if wants_off { RebootCommand::PowerOff } else { RebootCommand::Restart }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_command_line_selects_the_reboot_command() {
        for (line, want) in [
            ("console=ttyS0 quiet reboot=t", RebootCommand::Restart),
            ("quiet coracle.end=poweroff panic=-1\n", RebootCommand::PowerOff),
            ("coracle.end=poweroffs", RebootCommand::Restart),
            ("", RebootCommand::Restart),
        ] {
            assert_eq!(end_command(line), want, "{line}");
        }
    }
}
