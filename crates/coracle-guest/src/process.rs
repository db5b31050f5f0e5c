//! Starts the process of a request: validation, user, program, descriptors, and the steps between fork and exec.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_proto::guest::{GroupsPolicy as WirePolicy, Process};
use coracle_types::IdMapping;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::Pid;
use rustix::pty::OpenptFlags;
use rustix::thread::{Gid, ThreadNameSpaceType, Uid, UnshareFlags};
use tokio::io::Interest;
use tokio::sync::oneshot;

use crate::error::Error;
use crate::pipe::{Pipe, size};
use crate::rootfs::users::{self, GroupsPolicy, ProcessUser};
use crate::rootfs::{PATH_MAX, Root};
use coracle_spawn::MakesFiles;
use coracle_spawn::{self as spawn, Exit, Memory, Program, Reaper, Spawned, Streams, TERMINALS, Thread};

/// Maximum number of arguments, and of environment entries, of one process.
const STRINGS_MAX: usize = 4096;
/// Maximum that is read of /etc/passwd or /etc/group, bytes.
const ACCOUNTS_MAX: usize = 1024 * 1024;
/// Default `PATH`.
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Stack size of a thread that forks, bytes.
const FORK_STACK_BYTES: usize = 128 * 1024;

const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

/// Reason why a process was not started.
#[derive(Debug)]
pub(crate) enum SpawnError {
    /// The request is invalid, or cannot be served now.
    Request(Error),
    /// The image cannot run the process: the client gets an exit status.
    Cannot(Exit),
}

impl From<Error> for SpawnError {
    fn from(error: Error) -> Self {
        Self::Request(error)
    }
}

/// Started process, with the agent's ends of its descriptors.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) pid: Pid,
    pub(crate) exit: oneshot::Receiver<Exit>,
    pub(crate) io: Io,
}

#[derive(Debug)]
pub(crate) enum Io {
    Pipes { stdin: Option<Pipe>, stdout: Pipe, stderr: Pipe },
    Terminal { master: Pipe, stdin: bool },
}

/// PID namespace of a process, other than the agent's.
#[derive(Debug)]
pub(crate) enum PidNamespace {
    /// New namespace, with the process as its first one.
    New,
    /// Namespace of the process with this pidfd.
    Of(Arc<OwnedFd>),
}

/// Isolation of a process. Both hooks run between fork and exec: only system calls.
pub(crate) trait Isolation: Send + Sync {
    /// PID namespace of the process; `None`: the agent's.
    fn pid_namespace(&self) -> Option<PidNamespace>;
    /// Memory of the child until it executes the program.
    fn memory(&self) -> Memory {
        Memory::Copied
    }
    /// Id mapping of the user namespace, whose root owns the files made for the process; `None`: the guest's.
    fn ids(&self) -> Option<IdMapping>;
    /// Enters namespaces and root, and applies limits; the first step.
    fn enter(&self) -> io::Result<()>;
    /// Drops privileges after the user is set; the last step.
    fn restrict(&self) -> io::Result<()>;
}

/// Isolation by root and cgroup only, for the workload of a guest without containers.
struct Chroot {
    root: Option<OwnedFd>,
    cgroup: Option<OwnedFd>,
}

impl Isolation for Chroot {
    /// Nothing keeps the workload from the agent's memory in the first place.
    fn memory(&self) -> Memory {
        Memory::Shared
    }

    fn pid_namespace(&self) -> Option<PidNamespace> {
        None
    }

    fn ids(&self) -> Option<IdMapping> {
        None
    }

    fn enter(&self) -> io::Result<()> {
        if let Some(cgroup) = &self.cgroup {
            rustix::io::write(cgroup, b"0")?;
        }
        if let Some(dir) = &self.root {
            rustix::process::fchdir(dir.as_fd())?;
            rustix::process::chroot(c".")?;
        }
        Ok(())
    }

    fn restrict(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs `work`, which starts a process, on this thread.
///
/// # Errors
/// When the work panicked.
pub(crate) async fn run_start<T: Send + 'static>(
    thread: Thread,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    thread.run(work).await.map_err(|_| Error::State("the start of a process failed".into()))
}

/// Starts `process` inside `root`, in its own session. `make_cwd`: a missing working directory is made. The process joins the
/// cgroup whose `cgroup.procs` is `cgroup`.
pub(crate) fn start(
    reaper: &Reaper,
    root: &Root,
    process: &Process,
    make_cwd: bool,
    cgroup: Option<OwnedFd>,
) -> Result<Running, SpawnError> {
    let chroot = Chroot { root: root.chroot_dir().map_err(Error::io("copy the root's handle"))?, cgroup };
    start_isolated(reaper, root, process, make_cwd, Box::new(chroot))
}

/// Like [`start`], with the isolation of the caller. Program and user are looked up in `root`.
pub(crate) fn start_isolated(
    reaper: &Reaper,
    root: &Root,
    process: &Process,
    make_cwd: bool,
    isolation: Box<dyn Isolation>,
) -> Result<Running, SpawnError> {
    let makes_files = isolation.ids().map(MakesFiles::as_root_of).transpose();
    let makes_files = makes_files.map_err(Error::io("become the container's root"))?;
    let launch = Launch::prepare(root, process, make_cwd)?;
    let terminal = if process.tty {
        Some(Terminal::open(root, process).map_err(Error::io("open a terminal"))?)
    } else {
        None
    };
    drop(makes_files);
    let pid_namespace = isolation.pid_namespace();
    let user = isolation.ids().map_or(Some(launch.identity.uid), |ids| ids.outside(launch.identity.uid));
    let unknown =
        || start_failure(NOT_EXECUTABLE, format!("the user namespace has no user {}", launch.identity.uid));
    let streams = Streams {
        user: Uid::from_raw(user.ok_or_else(unknown)?),
        group: isolation.ids().and_then(|ids| ids.outside(TERMINALS)).map(Gid::from_raw),
        has_stdin: process.stdin,
        terminal: terminal.as_ref().map(|t| t.name.clone()),
    };
    let program = launch.program(isolation, streams).map_err(|e| exec_failure(&launch.argv0, &e))?;
    let (io, streams) = match terminal {
        Some(terminal) => terminal.split(process.stdin),
        None => pipes(process.stdin),
    }
    .map_err(Error::io("connect a process"))?;
    let spawned = match pid_namespace {
        None => reaper.spawn(&program, streams),
        Some(namespace) => spawn_in(namespace, reaper, &program, streams),
    };
    let spawned = spawned.map_err(|e| exec_failure(&launch.argv0, &e))?;
    Ok(Running { pid: spawned.pid, exit: spawned.exit, io })
}

/// Makes the pipes of a process: the agent's ends, and those of the process.
fn pipes(has_stdin: bool) -> io::Result<(Io, [OwnedFd; 3])> {
    let (stdin, input) = match has_stdin {
        true => {
            let (read, write) = spawn::pipe()?;
            (read, Some(Pipe::new(write, Interest::WRITABLE)?))
        }
        false => (spawn::no_input()?, None),
    };
    let ((stdout, writes), (stderr, writes_errors)) = (spawn::pipe()?, spawn::pipe()?);
    let (stdout, stderr) = (Pipe::new(stdout, Interest::READABLE)?, Pipe::new(stderr, Interest::READABLE)?);
    Ok((Io::Pipes { stdin: input, stdout, stderr }, [stdin, writes, writes_errors]))
}

/// Forks into a PID namespace. The namespace for children is a property of the forking thread (setns(2), unshare(2)), so a
/// separate thread forks and ends at once.
fn spawn_in(
    namespace: PidNamespace,
    reaper: &Reaper,
    program: &Program,
    streams: [OwnedFd; 3],
) -> io::Result<Spawned> {
    let enter = move || match namespace {
        PidNamespace::New => crate::sys::unshare(UnshareFlags::NEWPID),
        PidNamespace::Of(process) => Ok(rustix::thread::move_into_thread_name_spaces(
            process.as_fd(),
            ThreadNameSpaceType::PROCESS_ID,
        )?),
    };
    std::thread::scope(|scope| {
        let forked = std::thread::Builder::new()
            .stack_size(FORK_STACK_BYTES)
            .spawn_scoped(scope, move || enter().and_then(|()| reaper.spawn(program, streams)))?;
        forked.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

fn exec_failure(program: &str, e: &io::Error) -> SpawnError {
    let code = if e.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
    start_failure(code, format!("{program}: {e}"))
}

fn start_failure(code: i32, error: String) -> SpawnError {
    SpawnError::Cannot(Exit { code, signal: 0, error })
}

/// Pty of the container's own devpts, so that `tty` prints its name inside.
struct Terminal {
    master: OwnedFd,
    slave: OwnedFd,
    /// Path of the terminal inside the container.
    name: CString,
}

impl Terminal {
    fn open(root: &Root, process: &Process) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK;
        let master = root.resolve(Path::new("/dev/pts/ptmx"), flags).or_else(|_| {
            rustix::fs::open("/dev/ptmx", flags | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from)
        })?;
        rustix::pty::unlockpt(&master)?;
        let slave = rustix::pty::ioctl_tiocgptpeer(
            &master,
            OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC,
        )?;
        let (rows, cols) = dimensions(process.rows, process.cols);
        rustix::termios::tcsetwinsize(&master, size(rows, cols))?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        Ok(Self { master, slave, name })
    }

    /// Returns the agent's end, and the standard streams of the process.
    fn split(self, stdin: bool) -> io::Result<(Io, [OwnedFd; 3])> {
        let streams = [self.slave.try_clone()?, self.slave.try_clone()?, self.slave];
        let master = Pipe::new(self.master, Interest::READABLE | Interest::WRITABLE)?;
        Ok((Io::Terminal { master, stdin }, streams))
    }
}

/// Rows and columns for the kernel; 0 means the default of 24 × 80.
pub(crate) fn dimensions(rows: u32, cols: u32) -> (u16, u16) {
    let clamp = |n: u32, usual: u16| if n == 0 { usual } else { u16::try_from(n).unwrap_or(u16::MAX) };
    (clamp(rows, 24), clamp(cols, 80))
}

/// Validated process, ready to be started.
#[derive(Debug)]
struct Launch {
    program: PathBuf,
    argv0: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
    cwd: CString,
    identity: ProcessUser,
}

impl Launch {
    fn prepare(root: &Root, process: &Process, make_cwd: bool) -> Result<Self, SpawnError> {
        let identity = identity(root, process)?;
        let env = environment(process, &identity)?;
        let (argv0, args) = arguments(process)?;
        let cwd = if process.cwd.is_empty() { "/" } else { process.cwd.as_str() };
        if !cwd.starts_with('/') || cwd.len() > PATH_MAX {
            return Err(
                Error::invalid(format!("invalid working directory {cwd:?}: not an absolute path")).into()
            );
        }
        let opened = if make_cwd {
            root.ensure_dir(Path::new(cwd), Mode::from_raw_mode(0o755))
        } else {
            root.dir(Path::new(cwd))
        };
        opened.map_err(|e| start_failure(NOT_EXECUTABLE, format!("working directory {cwd}: {e}")))?;
        let program = find(root, &argv0, cwd, search_path(&env))?;
        let cwd = CString::new(cwd).map_err(|_| Error::invalid("working directory contains a NUL byte"))?;
        Ok(Self { program, argv0, args, env, cwd, identity })
    }

    /// Returns the program, with the steps of the child between fork and exec: only system calls.
    fn program(&self, isolation: Box<dyn Isolation>, streams: Streams) -> io::Result<Program> {
        let argv = [&self.argv0].into_iter().chain(&self.args).map(String::as_str);
        let env = self.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let program = Program::new(&self.program, argv, env)?;
        let cwd = self.cwd.clone();
        let (uid, gid) = (Uid::from_raw(self.identity.uid), Gid::from_raw(self.identity.gid));
        let groups: Vec<Gid> = self.identity.groups.iter().copied().map(Gid::from_raw).collect();
        Ok(program.with_setup(isolation.memory(), move || {
            rustix::process::setsid()?;
            if streams.terminal.is_some() {
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
            }
            streams.give();
            isolation.enter()?;
            streams.name_terminal();
            rustix::process::chdir(cwd.as_c_str())?;
            rustix::process::umask(Mode::from_raw_mode(0o022));
            rustix::thread::set_thread_groups(&groups)?;
            rustix::thread::set_thread_gid(gid)?;
            rustix::thread::set_thread_uid(uid)?;
            isolation.restrict()
        }))
    }
}

/// User of a process in this root.
pub(crate) fn identity(root: &Root, process: &Process) -> Result<ProcessUser, SpawnError> {
    let text = |path: &str| {
        root.read(Path::new(path), ACCOUNTS_MAX).map(|t| String::from_utf8_lossy(&t).into_owned())
    };
    let (passwd, group) = (text("/etc/passwd").unwrap_or_default(), text("/etc/group").unwrap_or_default());
    let policy = match process.groups_policy() {
        WirePolicy::Unspecified => GroupsPolicy::OfUser,
        WirePolicy::Merge => GroupsPolicy::Merge,
        WirePolicy::Strict => GroupsPolicy::Strict,
    };
    let wanted = (process.user.as_str(), policy, process.groups.as_slice());
    users::resolve_with_groups(wanted, &passwd, &group).map_err(|e| start_failure(NOT_EXECUTABLE, e))
}

fn arguments(process: &Process) -> Result<(String, Vec<String>), Error> {
    if process.argv.len() > STRINGS_MAX || process.argv.iter().any(|a| a.contains('\0')) {
        return Err(Error::invalid(format!("more than {STRINGS_MAX} arguments, or a NUL byte in one")));
    }
    match process.argv.split_first() {
        Some((first, rest)) if !first.is_empty() => Ok((first.clone(), rest.to_vec())),
        _ => Err(Error::invalid("no command")),
    }
}

/// Environment of the request, with defaults for HOME, PATH and (on a terminal) TERM. The last of equal names wins.
fn environment(process: &Process, identity: &ProcessUser) -> Result<Vec<(String, String)>, Error> {
    if process.env.len() > STRINGS_MAX {
        return Err(Error::invalid(format!("more than {STRINGS_MAX} environment entries")));
    }
    let mut env = Vec::with_capacity(process.env.len().saturating_add(3));
    for entry in &process.env {
        match entry.split_once('=') {
            Some((name, value)) if !name.is_empty() && !entry.contains('\0') => {
                env.push((name.to_owned(), value.to_owned()))
            }
            _ => return Err(Error::invalid(format!("environment entry {entry:?} is not NAME=value"))),
        }
    }
    let term = if process.tty { Some(("TERM", "xterm")) } else { None };
    for (name, value) in [("HOME", identity.home.as_str()), ("PATH", PATH_DEFAULT)].into_iter().chain(term) {
        if !env.iter().any(|(n, _)| n == name) {
            env.push((name.to_owned(), value.to_owned()));
        }
    }
    Ok(env)
}

fn search_path(env: &[(String, String)]) -> &str {
    env.iter().rev().find(|(n, _)| n == "PATH").map_or(PATH_DEFAULT, |(_, v)| v.as_str())
}

/// Program that `execvp` would run, looked up inside the root.
fn find(root: &Root, argv0: &str, cwd: &str, search: &str) -> Result<PathBuf, SpawnError> {
    let candidates: Vec<PathBuf> = if argv0.contains('/') {
        vec![Path::new(cwd).join(argv0)]
    } else {
        search.split(':').take(STRINGS_MAX).map(|dir| Path::new(cwd).join(dir).join(argv0)).collect()
    };
    let mut forbidden = false;
    for path in candidates {
        match root.resolve(&path, OFlags::PATH).and_then(|fd| Ok(rustix::fs::fstat(&fd)?)) {
            Ok(stat)
                if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                    && stat.st_mode & 0o111 != 0 =>
            {
                return Ok(path);
            }
            Ok(_) => forbidden = true,
            Err(e) => forbidden |= e.kind() == io::ErrorKind::PermissionDenied,
        }
    }
    let shown = OsString::from(argv0);
    Err(if forbidden {
        start_failure(NOT_EXECUTABLE, format!("{}: not executable", shown.display()))
    } else {
        start_failure(NOT_FOUND, format!("{}: not found", shown.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(argv: &[&str], env: &[&str]) -> Process {
        let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        Process { argv: own(argv), env: own(env), ..Process::default() }
    }

    fn image() -> (tempfile::TempDir, Root) {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        for (path, mode) in [("bin/tool", 0o755), ("bin/data", 0o644), ("opt/tool", 0o755)] {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        }
        symlink("/bin/tool", dir.path().join("bin/link")).unwrap();
        symlink("/etc/hostname", dir.path().join("bin/dangling")).unwrap();
        let root = Root::open(dir.path()).unwrap();
        (dir, root)
    }

    #[test]
    fn lookup_table() {
        let (_dir, root) = image();
        for (why, argv0, cwd, search, want) in [
            ("in PATH", "tool", "/", "/sbin:/bin", Ok("/bin/tool")),
            ("first of two", "tool", "/", "/opt:/bin", Ok("/opt/tool")),
            ("absolute", "/bin/tool", "/", "", Ok("/bin/tool")),
            ("relative to the working directory", "./tool", "/opt", "", Ok("/opt/./tool")),
            ("relative PATH entry", "tool", "/", "opt", Ok("/opt/tool")),
            ("a link is followed inside", "link", "/", "/bin", Ok("/bin/link")),
            ("not there", "nope", "/", "/bin", Err(127)),
            ("a link that would lead out", "dangling", "/", "/bin", Err(127)),
            ("not executable", "data", "/", "/bin", Err(126)),
            ("a directory", "/bin", "/", "", Err(126)),
        ] {
            let got = find(&root, argv0, cwd, search);
            match (got, want) {
                (Ok(path), Ok(want)) => assert_eq!(path.as_os_str(), want, "{why}"),
                (Err(SpawnError::Cannot(exit)), Err(code)) => assert_eq!(exit.code, code, "{why}"),
                (got, want) => panic!("{why}: {got:?}, want {want:?}"),
            }
        }
    }

    #[test]
    fn environment_has_defaults_only_where_absent() {
        let identity = users::resolve("", "", "").unwrap();
        let names = |p: &Process| {
            environment(p, &identity)
                .unwrap()
                .into_iter()
                .map(|(k, v)| format!("{k}={v}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&process(&[], &[])), ["HOME=/".to_owned(), format!("PATH={PATH_DEFAULT}")]);
        assert_eq!(names(&process(&[], &["PATH=", "HOME=/x", "A=b=c"])), ["PATH=", "HOME=/x", "A=b=c"]);
        let tty = Process { tty: true, ..process(&[], &["HOME=/", "PATH=/"]) };
        assert_eq!(names(&tty), ["HOME=/", "PATH=/", "TERM=xterm"]);
        for bad in ["novalue", "=x", "A=\0"] {
            assert!(environment(&process(&[], &[bad]), &identity).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn arguments_are_bounded() {
        assert!(arguments(&process(&[], &[])).is_err());
        assert!(arguments(&process(&[""], &[])).is_err());
        assert!(arguments(&process(&["a\0"], &[])).is_err());
        assert!(arguments(&process(&["x"; STRINGS_MAX + 1], &[])).is_err());
        assert!(arguments(&process(&["x"; STRINGS_MAX], &[])).is_ok());
    }

    #[test]
    fn terminal_sizes_are_clamped() {
        assert_eq!(dimensions(0, 0), (24, 80));
        assert_eq!(dimensions(50, 70_000), (50, u16::MAX));
    }
}
