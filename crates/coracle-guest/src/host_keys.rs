//! Host keys of a system's SSH server: a copied VM must not use those of the original.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::process::{Pid, Signal};

use crate::console::say;
use crate::rootfs::Root;

/// Directory of the keys.
const DIR: &str = "/etc/ssh";
/// Pid file of the listening server (sshd_config(5), `PidFile`), and the maximum that is read of it, bytes.
const SERVER: &str = "/run/sshd.pid";
const PID_MAX: usize = 32;
/// Prefix of the file names of keys.
const PREFIX: &str = "ssh_host_";
/// Types of the new keys. Other types take seconds to generate, and current clients do not need them.
const KINDS: [&str; 2] = ["ed25519", "ecdsa"];

/// Removes the keys, if there are any, stops the server that has them in memory (SIGSTOP), and has new keys generated, after
/// which the server is restarted. Generating keys takes longer than a copy has to get its identity: until then the server stays
/// stopped. Failures are logged; old keys never stay.
pub(crate) fn renew(root: &Root) {
    match root.dir(Path::new(DIR)) {
        Ok(dir) if remove(&dir) => {}
        _ => return,
    }
    let server = root.read(Path::new(SERVER), PID_MAX).ok().and_then(|text| number(&text));
    if let Some(Err(e)) = server.map(|pid| rustix::process::kill_process(pid, Signal::STOP)) {
        say!("hold the SSH server: {e}");
    }
    // Ends within seconds; meanwhile the copy has its new identity.
    std::thread::spawn(|| {
        for kind in KINDS {
            let file = format!("{DIR}/{PREFIX}{kind}_key");
            run("ssh-keygen", &["-q", "-t", kind, "-N", "", "-f", &file]);
        }
        run("systemctl", &["--no-block", "try-restart", "ssh.service", "sshd.service"]);
    });
}

/// Process id in a pid file. Process 1 is never an SSH server.
fn number(text: &[u8]) -> Option<Pid> {
    let number: i32 = std::str::from_utf8(text).ok()?.trim().parse().ok()?;
    if number > 1 { Pid::from_raw(number) } else { None }
}

/// Removes the keys of a directory. Returns whether there were any.
fn remove(dir: &OwnedFd) -> bool {
    // Opened again, because a descriptor opened with O_PATH cannot be listed.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let entries = match rustix::fs::openat(dir, c".", flags, Mode::empty()).and_then(Dir::new) {
        Ok(entries) => entries,
        Err(e) => {
            say!("host keys are not found: {e}");
            return false;
        }
    };
    let names = entries.flatten().map(|entry| entry.file_name().to_owned());
    let keys: Vec<_> = names.filter(|name| name.to_bytes().starts_with(PREFIX.as_bytes())).collect();
    for name in &keys {
        if let Err(e) = rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
            say!("host key {}: {e}", name.to_string_lossy());
        }
    }
    !keys.is_empty()
}

fn run(program: &str, args: &[&str]) {
    if let Err(e) = coracle_spawn::run_to_end(program, args) {
        say!("host keys: {program}: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pid_file_parses_only_valid_pids() {
        let raw = |text: &str| number(text.as_bytes()).map(|pid| pid.as_raw_nonzero().get());
        assert_eq!(raw("417\n"), Some(417));
        for bad in ["", "0", "1\n", "-417", "4x", "99999999999"] {
            assert_eq!(raw(bad), None, "{bad}");
        }
    }

    #[test]
    fn old_host_keys_are_removed_and_other_files_kept() {
        let dir = tempfile::tempdir().unwrap();
        let ssh = dir.path().join("etc/ssh");
        std::fs::create_dir_all(&ssh).unwrap();
        for name in ["ssh_host_rsa_key", "ssh_host_rsa_key.pub", "sshd_config", "moduli"] {
            std::fs::write(ssh.join(name), "old").unwrap();
        }
        let root = Root::open(dir.path()).unwrap();
        let folder = root.dir(Path::new(DIR)).unwrap();
        assert!(remove(&folder));
        assert!(!remove(&folder), "none is left");
        let mut left: Vec<_> = std::fs::read_dir(&ssh).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["moduli", "sshd_config"]);
    }
}
