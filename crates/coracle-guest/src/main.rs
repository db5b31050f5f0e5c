//! `/init` of the guest's initramfs.

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("coracle-guest is the first process of a virtual machine; it has no other use");
        return ExitCode::from(2);
    }
    coracle_guest::pid1::run();
    ExitCode::SUCCESS
}
