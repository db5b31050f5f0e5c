//! Program in place of a VMM, of any driver, that reports what it sees and may do in the first line of its log.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::{FromRawFd as _, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::server;

/// Directories that are reported without their entries: those of the host's programs, and of the kernel.
const NOT_LISTED: [&str; 6] = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/proc"];
/// Maximum number of entries in a report.
const FILES_MAX: usize = 1000;
/// Maximum length of a request body.
const BODY_BYTES_MAX: usize = 1 << 20;

/// View of a program in place of a VMM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct View {
    /// Fields of proc_pid_status(5).
    pub status: BTreeMap<String, String>,
    /// Namespaces, by kind.
    pub namespaces: BTreeMap<String, String>,
    /// Soft and hard limits, by name (proc_pid_limits(5)).
    pub limits: BTreeMap<String, String>,
    /// Environment variables.
    pub environment: Vec<String>,
    /// Targets of open descriptors.
    pub descriptors: Vec<String>,
    /// Every path below the root, except those in [`NOT_LISTED`].
    pub files: Vec<PathBuf>,
    /// Those of `files` that could be opened for writing.
    pub writable: Vec<PathBuf>,
    /// Whether a file could be created in the root.
    pub can_write_root: bool,
}

impl View {
    fn take() -> io::Result<Self> {
        let mut files = Vec::new();
        list(Path::new("/"), &mut files)?;
        files.sort();
        let open = |path: &&PathBuf| path.is_file() && fs::File::options().write(true).open(path).is_ok();
        Ok(Self {
            status: fields(&fs::read_to_string("/proc/self/status")?, ":"),
            namespaces: links("/proc/self/ns")?.into_iter().collect(),
            limits: fields(&fs::read_to_string("/proc/self/limits")?, "  "),
            environment: std::env::vars().map(|(name, value)| format!("{name}={value}")).collect(),
            descriptors: links("/proc/self/fd")?.into_iter().map(|(_, target)| target).collect(),
            writable: files.iter().filter(open).cloned().collect(),
            can_write_root: fs::write("/new", "").is_ok(),
            files,
        })
    }
}

fn list(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    // An unreadable directory counts as empty.
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry?.path();
        if files.len() >= FILES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        files.push(path.clone());
        let is_listed = !NOT_LISTED.iter().any(|name| path == Path::new(name));
        if is_listed && fs::symlink_metadata(&path)?.is_dir() {
            list(&path, files)?;
        }
    }
    Ok(())
}

/// Parses lines of a kernel table: the first column, and the others separated by single spaces.
fn fields(text: &str, separator: &str) -> BTreeMap<String, String> {
    let field = |line: &str| {
        let (name, value) = line.split_once(separator)?;
        Some((name.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
    };
    text.lines().filter_map(field).collect()
}

fn links(dir: &str) -> io::Result<Vec<(String, String)>> {
    let link = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        Some((entry.file_name().to_string_lossy().into_owned(), target.display().to_string()))
    };
    Ok(fs::read_dir(dir)?.flatten().filter_map(link).collect())
}

/// Prints the report, and serves the control socket that the arguments name: QEMU's monitor, or the API of Firecracker or Cloud
/// Hypervisor. Every call succeeds.
#[expect(clippy::print_stderr, clippy::print_stdout, reason = "it is a program")]
#[must_use]
pub fn main() -> ExitCode {
    let args: Vec<_> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| arg == "--version") {
        println!("Firecracker v1.16.0");
        return ExitCode::SUCCESS;
    }
    match View::take().map(|view| json!(view)) {
        Ok(view) => eprintln!("{view}"),
        Err(error) => eprintln!("cannot report: {error}"),
    }
    let after = |name: &str| args.iter().skip_while(|arg| *arg != name).nth(1);
    let socket = after("--api-sock").or(after("--api-socket"));
    if let Some(socket) = socket {
        let socket = PathBuf::from(socket.trim_start_matches("path="));
        return server::run(&socket, BODY_BYTES_MAX, || Arc::new(|_: &str, _: &str, _: &[u8]| (204, None)));
    }
    let number = args.iter().find_map(|arg| arg.strip_prefix("socket,id=qmp,fd=")?.split(',').next());
    match number.and_then(|number| number.parse().ok()).map(serve_monitor) {
        Some(Ok(())) => ExitCode::SUCCESS,
        outcome => {
            eprintln!("no control socket: {outcome:?}");
            ExitCode::FAILURE
        }
    }
}

/// Answers every command of QEMU's monitor protocol on the listener of this number.
fn serve_monitor(number: RawFd) -> io::Result<()> {
    // SAFETY: the caller has opened it for this process, which takes it once.
    #[allow(unsafe_code, reason = "the number comes as an argument")]
    let listener = unsafe { UnixListener::from_raw_fd(number) };
    loop {
        let _client_gone = answer_all(listener.accept()?.0);
    }
}

fn answer_all(mut client: UnixStream) -> io::Result<()> {
    let greeting =
        json!({"QMP": {"version": {"qemu": {"major": 9, "minor": 0, "micro": 0}}, "capabilities": []}});
    writeln!(client, "{greeting}")?;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?)?;
        writeln!(client, "{}", json!({"return": {}, "id": command.get("id")}))?;
    }
    Ok(())
}
