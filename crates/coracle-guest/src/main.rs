//! `/init` of the guest's initramfs, and a service of systems that come on disks.

use std::process::ExitCode;

fn main() -> ExitCode {
    let role = std::env::args().nth(1);
    match (std::process::id(), role.as_deref()) {
        (1, _) => coracle_guest::pid1::run(),
        (_, Some("service")) => return coracle_guest::system::run(),
        _ => {
            eprintln!(
                "coracle-guest is the first process of a virtual machine, or, as `coracle-guest service`, a service of one"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
