//! Tests of the server with handmade messages that a kernel would never send.

mod hostile;
mod owners;
mod refusals;
mod resent;
mod state;
mod submounts;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;
use tempfile::TempDir;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::wire::{EntryOut, InHeader, Op, OpenIn, OpenOut, OutHeader, ROOT};
use super::{SharedDirServer, SharedDirSpec, Submounts};

/// Names in the directory that [`World::new`] makes. A device is added where the test is permitted to make one.
const NAMES: &[&str] = &["file", "dir", "dir/below", "link", "out", "fifo", "socket"];
const SECRET: &str = "not for guests";

/// Host directory with one file of each type, its server, and files outside of the directory.
struct World {
    dir: TempDir,
    server: SharedDirServer,
    unique: u64,
}

impl World {
    fn new(read_only: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join("root").join(name);
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/secret"), SECRET).unwrap();
        fs::create_dir_all(at("dir")).unwrap();
        fs::write(at("file"), "content").unwrap();
        fs::write(at("dir/below"), "deeper").unwrap();
        symlink("../outside/secret", at("link")).unwrap();
        symlink("../outside", at("out")).unwrap();
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        UnixListener::bind(at("socket")).unwrap();
        let server = SharedDirServer::open(spec(dir.path(), read_only)).unwrap();
        Self { dir, server, unique: 0 }
    }

    fn root(&self, name: &str) -> PathBuf {
        self.dir.path().join("root").join(name)
    }

    /// Replaces the server by that of a restarted daemon.
    fn restart(&mut self) {
        self.server = SharedDirServer::open(spec(self.dir.path(), self.server.read_only)).unwrap();
    }

    /// Sends a request with these arguments concatenated, as root.
    fn ask(&mut self, op: Op, node: u64, arguments: &[&[u8]]) -> Result<Vec<u8>, Errno> {
        self.unique += 2;
        self.resend(op, node, arguments)
    }

    /// Sends the request with the number of the previous one.
    fn resend(&self, op: Op, node: u64, arguments: &[&[u8]]) -> Result<Vec<u8>, Errno> {
        result(&self.server.answer(&message(op as u32, self.unique, node, arguments)).unwrap(), self.unique)
    }

    fn lookup(&mut self, parent: u64, name: &str) -> Result<EntryOut, Errno> {
        self.ask(Op::Lookup, parent, &[name.as_bytes(), b"\0"]).map(|body| parse_body(&body))
    }

    /// Node id of a path beneath the root.
    fn id(&mut self, path: &str) -> u64 {
        path.split('/').fold(ROOT, |parent, name| self.lookup(parent, name).unwrap().node)
    }

    fn open(&mut self, node: u64, flags: u32) -> Result<u64, Errno> {
        let asked = OpenIn { flags, open_flags: 0 };
        self.ask(Op::Open, node, &[asked.as_bytes()]).map(|body| parse_body::<OpenOut>(&body).fh)
    }
}

fn spec(dir: &Path, read_only: bool) -> SharedDirSpec {
    let submounts = Submounts::default();
    SharedDirSpec { root: dir.join("root"), read_only, submounts, ids: None, table: dir.join("ids.table") }
}

fn message(opcode: u32, unique: u64, node: u64, arguments: &[&[u8]]) -> Vec<u8> {
    let body = arguments.concat();
    let len = u32::try_from(size_of::<InHeader>() + body.len()).unwrap();
    let header = InHeader { len, opcode, unique, node, ..InHeader::default() };
    [header.as_bytes(), &body].concat()
}

fn result(reply: &[u8], unique: u64) -> Result<Vec<u8>, Errno> {
    let (header, body) = OutHeader::read_from_prefix(reply).unwrap();
    assert_eq!((header.len as usize, header.unique), (reply.len(), unique));
    match header.error {
        0 => Ok(body.to_vec()),
        error => {
            assert!((-4095..0).contains(&error) && body.is_empty(), "{error}");
            Err(Errno::from_raw_os_error(-error))
        }
    }
}

fn parse_body<T: FromBytes + Immutable>(body: &[u8]) -> T {
    T::read_from_prefix(body).unwrap().0
}
