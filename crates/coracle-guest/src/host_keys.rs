//! The keys that a system's SSH server is known by: a copy must not answer with those of what it was copied from.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::process::{Pid, Signal};

use crate::console::say;
use crate::root::Root;

/// Where they are.
const DIR: &str = "/etc/ssh";
/// What their names begin with.
const PREFIX: &str = "ssh_host_";
/// Kinds that are made anew: the others take seconds, and no client of today needs them.
const KINDS: [&str; 2] = ["ed25519", "ecdsa"];
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Removes the keys, where there are any, stops the server that has them in memory where it stands, and has new ones made,
/// after which the server is started anew. Making them takes longer than a copy may take to become itself: until they
/// are there nobody is answered. What fails is said; old keys never stay.
pub(crate) fn renew(root: &Root) {
    match root.dir(Path::new(DIR)) {
        Ok(dir) if remove(&dir) => {}
        _ => return,
    }
    for pid in servers() {
        if let Err(e) = rustix::process::kill_process(pid, Signal::STOP) {
            say!("hold the SSH server: {e}");
        }
    }
    let make = KINDS.map(|kind| format!("ssh-keygen -q -t {kind} -N '' -f {DIR}/{PREFIX}{kind}_key;"));
    let script = format!("{} systemctl --no-block try-restart ssh.service sshd.service", make.concat());
    run("setsid", &["--fork", "sh", "-c", &script]);
}

/// Processes that wait for SSH connections: those of the name that the system itself has started.
fn servers() -> impl Iterator<Item = Pid> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|process| {
        let number = process.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(process.path().join("stat")).ok()?;
        is_server(&stat).then(|| Pid::from_raw(number))?
    })
}

/// By `/proc/<pid>/stat`: number, name in parentheses, state, parent (proc(5)).
fn is_server(stat: &str) -> bool {
    let Some((head, tail)) = stat.rsplit_once(')') else { return false };
    head.ends_with("(sshd") && tail.split_ascii_whitespace().nth(1) == Some("1")
}

/// Removes the keys of a folder. Were there any?
fn remove(dir: &OwnedFd) -> bool {
    // Opened anew: what was opened only as a place cannot be listed.
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
    let mut command = Command::new(program);
    command.args(args).env("PATH", PATH).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => say!("{program}: {status}"),
        Err(e) => say!("{program}: {e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_known_by_name_and_parent() {
        for (stat, want) in [
            ("417 (sshd) S 1 417 417 0", true),
            ("900 (sshd) S 417 900 900 0", false),
            ("9 (bash) S 1 9 9", false),
            ("", false),
        ] {
            assert_eq!(is_server(stat), want, "{stat}");
        }
    }

    #[test]
    fn old_keys_never_stay_and_other_files_do() {
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
