//! Guest agent as a service of a system from a disk image, started by a unit in the image or by the seed that the host
//! attaches. The system's own init controls the guest, so it is asked to power off.

use std::path::Path;
use std::process::ExitCode;

use crate::agent::Agent;
use crate::console::{self, say};
use crate::pid1;
use crate::rootfs::Root;

/// Commands that make a system power off, the usual one first.
const POWER_OFF: [(&str, &[&str]); 3] =
    [("systemctl", &["poweroff"]), ("poweroff", &[]), ("busybox", &["poweroff"])];

/// Serves until a shutdown is requested, and then makes the system power off.
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
    if POWER_OFF.iter().any(|(program, args)| coracle_spawn::run_to_end(program, args).is_ok()) {
        return ExitCode::SUCCESS;
    }
    say!("nothing here switches the machine off: the host will");
    ExitCode::FAILURE
}
