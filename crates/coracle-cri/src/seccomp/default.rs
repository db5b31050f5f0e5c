//! Filter of `RuntimeDefault`. Denies system calls that containers do not need and that have been used in attacks, unless the
//! container has the corresponding capability. Pure.

use super::SeccompError;
use super::bpf::{Action, Condition, Rule, Test, assemble};
use super::profile::number;
use crate::translate::security::has_capability;

const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
/// Flags of clone(2) that create namespaces.
const NAMESPACES: u64 = 0x7e02_0000;
/// Address families that no container needs: AF_ALG has a long history of vulnerabilities, and AF_VSOCK reaches the host.
const FAMILIES: [u64; 2] = [38, 40];

/// System calls that are denied without the capability (man pages of the calls, "CAP_…").
const DENIED: [(&str, &[&str]); 12] = [
    (
        "SYS_ADMIN",
        &[
            "fsconfig",
            "fsmount",
            "fsopen",
            "fspick",
            "lookup_dcookie",
            "mount",
            "mount_setattr",
            "move_mount",
            "open_tree",
            "pivot_root",
            "quotactl",
            "quotactl_fd",
            "setdomainname",
            "sethostname",
            "setns",
            "swapoff",
            "swapon",
            "umount2",
            "unshare",
        ],
    ),
    ("SYS_MODULE", &["delete_module", "finit_module", "init_module", "create_module", "query_module"]),
    ("SYS_BOOT", &["kexec_file_load", "kexec_load", "reboot"]),
    ("SYS_TIME", &["clock_adjtime", "clock_settime", "settimeofday", "adjtimex"]),
    ("SYS_RAWIO", &["ioperm", "iopl"]),
    ("SYS_PACCT", &["acct"]),
    ("SYS_PTRACE", &["kcmp", "process_madvise", "process_vm_readv", "process_vm_writev", "pidfd_getfd"]),
    ("SYS_NICE", &["get_mempolicy", "mbind", "migrate_pages", "move_pages", "set_mempolicy"]),
    ("SYS_TTY_CONFIG", &["vhangup"]),
    ("DAC_READ_SEARCH", &["open_by_handle_at"]),
    ("SYSLOG", &["syslog"]),
    ("BPF", &["bpf"]),
];
/// System calls that are always denied.
const NEVER: [&str; 19] = [
    "add_key",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "keyctl",
    "nfsservctl",
    "perf_event_open",
    "request_key",
    "sysfs",
    "_sysctl",
    "uselib",
    "userfaultfd",
    "ustat",
    "vmsplice",
    "afs_syscall",
    "getpmsg",
    "putpmsg",
    "security",
    "tuxcall",
];

/// Returns the filter for a container with these capabilities.
///
/// # Errors
/// None for the lists above.
pub(crate) fn runtime_default(capabilities: u64) -> Result<Vec<u8>, SeccompError> {
    let mut rules = Vec::new();
    let mut deny = |name: &str, conditions: Vec<Condition>, errno| {
        if let Some(number) = number(name) {
            rules.push(Rule { number, conditions, action: Action::errno(errno) });
        }
    };
    for (capability, names) in DENIED {
        if !has_capability(capabilities, capability) {
            names.iter().for_each(|name| deny(name, vec![], EPERM));
        }
    }
    NEVER.iter().for_each(|name| deny(name, vec![], EPERM));
    if !has_capability(capabilities, "SYS_ADMIN") {
        for bit in (0..64).map(|bit| 1 << bit).filter(|bit| NAMESPACES & bit != 0) {
            let test = Test::Masked { mask: bit, value: bit };
            deny("clone", vec![Condition { argument: 0, test }], EPERM);
        }
        // The flags of clone3 are in memory, which a filter cannot read. With ENOSYS, libraries fall back to clone(2).
        deny("clone3", vec![], ENOSYS);
    }
    for family in FAMILIES {
        deny("socket", vec![Condition { argument: 0, test: Test::Equal(family) }], EPERM);
    }
    assemble(&rules, Action::ALLOW)
}

#[cfg(test)]
mod tests {
    use super::super::bpf::tests::run;
    use super::*;

    const ALLOW: u32 = 0x7fff_0000;
    const DEFAULT: u64 = 0xa804_25fb;

    #[test]
    fn default_filter_table() {
        let plain = runtime_default(DEFAULT).unwrap();
        let admin = runtime_default(DEFAULT | 1 << 21).unwrap();
        let (denied, missing) = (0x0005_0001, 0x0005_0026);
        for (why, name, first, of_plain, of_admin) in [
            ("files", "openat", 0, ALLOW, ALLOW),
            ("mounts", "mount", 0, denied, ALLOW),
            ("names", "sethostname", 0, denied, ALLOW),
            ("a process", "clone", 0x11, ALLOW, ALLOW),
            ("a user namespace", "clone", 0x1000_0011, denied, ALLOW),
            ("clone3", "clone3", 0, missing, ALLOW),
            ("a module", "init_module", 0, denied, denied),
            ("a network socket", "socket", 2, ALLOW, ALLOW),
            ("a socket to the host", "socket", 40, denied, denied),
            ("keys", "keyctl", 0, denied, denied),
        ] {
            let number = number(name).unwrap();
            let arguments = [first, 0, 0, 0, 0, 0];
            assert_eq!(run(&plain, number, arguments), of_plain, "{why}");
            assert_eq!(run(&admin, number, arguments), of_admin, "{why}, with CAP_SYS_ADMIN");
        }
    }
}
