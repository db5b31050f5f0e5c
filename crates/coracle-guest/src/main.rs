//! `/init` of the guest's initramfs, its `/sbin/modprobe`, and a service of disk image VMs.

use std::process::ExitCode;

use dlmalloc::GlobalDlmalloc;

/// Allocator that keeps free memory. The C library's returns it at once, and a clone would get it back page by page, by kernel
/// code that nothing else in its start needs.
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
