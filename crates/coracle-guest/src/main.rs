//! `/init` of the guest's initramfs, its `/sbin/modprobe`, and a service of systems that come on disks.

use std::process::ExitCode;

use dlmalloc::GlobalDlmalloc;

/// Keeps memory that is free. The C library's gives it back at once, and a clone would be given it anew, page by page, by
/// code of its kernel that nothing else in its start needs.
#[global_allocator]
static ALLOCATOR: GlobalDlmalloc = GlobalDlmalloc;

fn main() -> ExitCode {
    let program = std::env::args().next().unwrap_or_default();
    if program.ends_with("/modprobe") {
        return coracle_guest::modprobe(&std::env::args().next_back().unwrap_or_default());
    }
    let role = std::env::args().nth(1);
    match (std::process::id(), role.as_deref()) {
        (_, Some(coracle_proto::guest::WARM_UP)) => {}
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
