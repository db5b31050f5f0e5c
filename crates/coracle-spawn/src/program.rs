//! Starts a program in a child of the agent. The child may share the agent's memory until it executes the program, as vfork(2)
//! does: a copy of the memory map, which fork(2) makes, would only be dropped again.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::AtomicI32;

use rustix::pipe::PipeFlags;
use rustix::process::{Pid, WaitOptions};

use crate::child;

/// Program with everything that its child needs: nothing is allocated after the child exists.
pub struct Program {
    path: CString,
    /// Arguments, with the name of the program as the first one.
    argv: Vec<CString>,
    /// Environment, `NAME=value`.
    env: Vec<CString>,
    /// Steps of the child before it executes the program: only system calls.
    setup: Box<dyn Fn() -> io::Result<()> + Send + Sync>,
    memory: Memory,
}

/// Memory of a child until it executes its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A copy of the agent's: for a child that enters a container, whose processes may attach to it.
    Copied,
    /// The agent's.
    Shared,
}

impl Program {
    /// Describes a program with its arguments, of which the first is its name, and its whole environment. Its child has a copy
    /// of the agent's memory and no steps of its own.
    ///
    /// # Errors
    /// `InvalidInput` when a string contains a NUL byte.
    pub fn new<'s>(
        path: &Path,
        argv: impl IntoIterator<Item = &'s str>,
        env: impl IntoIterator<Item = (&'s str, &'s str)>,
    ) -> io::Result<Self> {
        let plain = |text: &OsStr| CString::new(text.as_bytes()).map_err(io::Error::from);
        Ok(Self {
            path: plain(path.as_os_str())?,
            argv: argv.into_iter().map(|text| plain(text.as_ref())).collect::<io::Result<_>>()?,
            env: env
                .into_iter()
                .map(|(name, value)| plain(format!("{name}={value}").as_ref()))
                .collect::<io::Result<_>>()?,
            setup: Box::new(|| Ok(())),
            memory: Memory::Copied,
        })
    }

    /// Sets the memory of the child, and its steps before it executes the program. `setup` must only make system calls: it may
    /// run in the agent's memory, while the calling thread waits and other threads run.
    pub fn with_setup(
        self,
        memory: Memory,
        setup: impl Fn() -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { setup: Box::new(setup), memory, ..self }
    }

    /// Starts the program with these standard streams, all signals unblocked and SIGPIPE at its default. Blocks until the child
    /// has executed the program.
    ///
    /// # Errors
    /// When no child can be made, a step of it fails, or the program cannot be executed; no child is left then.
    pub fn spawn(&self, streams: [OwnedFd; 3]) -> io::Result<Pid> {
        // The child moves them to 0, 1 and 2 one after the other.
        let streams = streams.map(move_above_stdio).into_iter().collect::<io::Result<Vec<_>>>()?;
        let (failed, reports) = match self.memory {
            Memory::Copied => pipe().map(|(read, write)| (Some(read), Some(write)))?,
            Memory::Shared => (None, None),
        };
        let error = AtomicI32::new(0);
        let child = child::Child {
            path: &self.path,
            argv: &self.argv,
            env: &self.env,
            streams: &streams,
            setup: &*self.setup,
            error: &error,
            reports,
        };
        let pid = child::spawn(&child)?;
        // Closes the writing end, without which the read would not end.
        drop(child);
        let error = match failed {
            None => error.into_inner(),
            Some(failed) => {
                let mut error = [0; 4];
                rustix::io::read(&failed, &mut error)?;
                i32::from_ne_bytes(error)
            }
        };
        if error == 0 {
            return Ok(pid);
        }
        let _ended = rustix::process::waitpid(Some(pid), WaitOptions::empty());
        Err(io::Error::from_raw_os_error(error))
    }
}

fn move_above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    if fd.as_raw_fd() > 2 { Ok(fd) } else { Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?) }
}

/// Pipe whose ends are closed when a program is executed: its reading end, and its writing end.
///
/// # Errors
/// When the limit of descriptors is reached.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?)
}

/// Empty standard input.
///
/// # Errors
/// When `/dev/null` cannot be opened.
pub fn no_input() -> io::Result<OwnedFd> {
    File::open("/dev/null").map(OwnedFd::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::waitpid;
    use std::io::Read;

    const BOTH: [Memory; 2] = [Memory::Copied, Memory::Shared];

    /// Output of a shell script, and its exit code.
    fn output(
        script: &str,
        memory: Memory,
        setup: impl Fn() -> io::Result<()> + Send + Sync + 'static,
    ) -> (String, i32) {
        let (read, write) = pipe().unwrap();
        let program = Program::new(Path::new("/bin/sh"), ["name", "-c", script], [("A", "b c")]).unwrap();
        let errors = write.try_clone().unwrap();
        let pid = program.with_setup(memory, setup).spawn([no_input().unwrap(), write, errors]).unwrap();
        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
        (text, status.exit_status().unwrap())
    }

    #[test]
    fn program_has_its_arguments_environment_and_streams() {
        for memory in BOTH {
            let (text, code) = output("cat; echo $0 $A; echo error >&2; exit 3", memory, || Ok(()));
            assert_eq!((text.as_str(), code), ("name b c\nerror\n", 3));
        }
    }

    #[test]
    fn program_starts_without_the_signal_settings_of_the_agent() {
        for memory in BOTH {
            let (text, _) = output("grep -E 'SigBlk|SigIgn' /proc/self/status", memory, || Ok(()));
            let mask = |name: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                u64::from_str_radix(line.trim(), 16).unwrap()
            };
            assert_eq!((mask("SigBlk:"), mask("SigIgn:") >> (libc::SIGPIPE - 1) & 1), (0, 0), "{text}");
        }
    }

    #[test]
    fn setup_changes_the_child_alone() {
        for memory in BOTH {
            let (text, _) = output("pwd; umask", memory, || {
                rustix::process::chdir(c"/usr")?;
                rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o027));
                Ok(())
            });
            assert_eq!(text, "/usr\n0027\n");
        }
        assert_ne!(std::env::current_dir().unwrap(), Path::new("/usr"));
    }

    #[test]
    fn failures_are_reported_and_leave_no_child() {
        let streams = || [no_input().unwrap(), no_input().unwrap(), no_input().unwrap()];
        let missing = Program::new(Path::new("/no/such"), ["x"], []).unwrap();
        assert_eq!(missing.spawn(streams()).unwrap_err().kind(), io::ErrorKind::NotFound);
        for memory in BOTH {
            let program = Program::new(Path::new("/bin/sh"), ["x"], []).unwrap();
            let refused = program.with_setup(memory, || Err(io::Error::from_raw_os_error(libc::EPERM)));
            assert_eq!(refused.spawn(streams()).unwrap_err().raw_os_error(), Some(libc::EPERM));
        }
        assert!(Program::new(Path::new("/bin/sh"), ["a\0b"], []).is_err());
    }

    #[test]
    fn concurrent_spawns_do_not_mix_output() {
        std::thread::scope(|scope| {
            for n in 0..8 {
                scope.spawn(move || {
                    for _ in 0..20 {
                        assert_eq!(
                            output(&format!("echo {n}"), Memory::Shared, || Ok(())),
                            (format!("{n}\n"), 0)
                        );
                    }
                });
            }
        });
    }
}
