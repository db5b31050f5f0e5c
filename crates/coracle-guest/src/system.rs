//! The agent as a service of a system that a disk image brought, be it started by a unit in the image or by the seed that
//! the host attaches. The system's own first process is the machine's master: to switch it off it is asked.

use std::path::Path;
use std::process::ExitCode;

use crate::agent::Agent;
use crate::console::{self, say};
use crate::rootfs::Root;
use crate::{pid1, program};

/// Ways to ask a system to switch its machine off, the usual one first.
const POWER_OFF: [(&str, &[&str]); 3] =
    [("systemctl", &["poweroff"]), ("poweroff", &[]), ("busybox", &["poweroff"])];

/// Serves until the machine shall go off, and has the system switch it off.
pub fn run() -> ExitCode {
    console::open();
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let root = match Root::open(Path::new("/")) {
        Ok(root) => root,
        Err(e) => {
            say!("open the root: {e}");
            return ExitCode::FAILURE;
        }
    };
    say!("version {} serves this system", env!("CARGO_PKG_VERSION"));
    let agent = Agent::of_system(root);
    if let Err(e) = pid1::serve(&agent) {
        say!("cannot serve: {e}");
        return ExitCode::FAILURE;
    }
    if POWER_OFF.iter().any(|(program, args)| program::run(program, args).is_ok()) {
        return ExitCode::SUCCESS;
    }
    say!("nothing here switches the machine off: the host will");
    ExitCode::FAILURE
}
