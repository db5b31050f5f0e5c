//! `coracle cp`: files as a tar stream, in both directions.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::cli::{CpArgs, Global};
use crate::client::{NameMatch, reach};
use crate::error::Failure;

/// Bytes of the tar stream in one message.
const CHUNK: usize = 64 * 1024;

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Here(PathBuf),
    Vm { name: String, path: String },
}

/// Parses `VM:PATH`, or a path of this machine.
fn parse_end(text: &str) -> End {
    match text.split_once(':') {
        Some((name, path)) if !name.is_empty() && !name.contains('/') && !name.starts_with('.') => {
            End::Vm { name: name.to_owned(), path: path.to_owned() }
        }
        _ => End::Here(text.into()),
    }
}

pub async fn run(global: &Global, args: CpArgs) -> miette::Result<u8> {
    match (parse_end(&args.from), parse_end(&args.to)) {
        (End::Here(from), End::Vm { name, path }) => copy_in(global, from, name, path).await?,
        (End::Vm { name, path }, End::Here(to)) => copy_out(global, name, path, to).await?,
        _ => {
            return Err(Failure::usage(
                "one end of a copy is a VM: coracle cp FILE VM:PATH, or VM:PATH FILE",
            )
            .into());
        }
    }
    Ok(0)
}

fn local(what: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let message = format!("{what} {}", path.display());
    move |e| Failure::new("COR-CLI-005", format!("{message}: {e}"))
}

/// Copies into the guest: `VM:dir/` keeps the name, `VM:dir/name` gives a new one.
async fn copy_in(global: &Global, from: PathBuf, vm: String, path: String) -> Result<(), Failure> {
    std::fs::symlink_metadata(&from).map_err(local("read", &from))?;
    let (dir, name) = match path.rsplit_once('/') {
        Some((dir, "")) => (dir.to_owned(), file_name(&from)),
        Some((dir, name)) => (dir.to_owned(), name.to_owned()),
        None if path.is_empty() => (String::new(), file_name(&from)),
        None => (String::new(), path),
    };
    let dir = if dir.is_empty() { "/".to_owned() } else { dir };
    let mut reached = reach(global, &vm, NameMatch::Exact, Subresource::Copy).await?;
    let (requests, stream) = mpsc::channel(8);
    let start = pb::copy_in_request::Message::Start(pb::CopyInStart { vm: reached.vm, path: dir });
    let first = requests.send(pb::CopyInRequest { message: Some(start) }).await;
    debug_assert!(first.is_ok(), "the receiver is ours");
    let pack = tokio::task::spawn_blocking(move || {
        let mut tar = tar::Builder::new(Chunks { requests, buffer: Vec::with_capacity(CHUNK) });
        tar.follow_symlinks(false);
        let result = if from.is_dir() {
            tar.append_dir_all(&name, &from)
        } else {
            tar.append_path_with_name(&from, &name)
        };
        result
            .and_then(|()| tar.into_inner())
            .and_then(|mut chunks| chunks.flush())
            .map_err(local("read", &from))
    });
    let sent = reached.node.copy_in(ReceiverStream::new(stream)).await;
    // A guest that refuses ends the stream: its reason explains more than the broken pipe on this side.
    sent?;
    pack.await.map_err(|e| Failure::new("COR-CLI-006", e.to_string()))?
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| "file".to_owned(), |n| n.to_string_lossy().into_owned())
}

/// Writer that sends messages; blocks while the node is slower.
struct Chunks {
    requests: mpsc::Sender<pb::CopyInRequest>,
    buffer: Vec<u8>,
}

impl Write for Chunks {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(data);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let data = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK));
        let message = pb::copy_in_request::Message::Data(data);
        self.requests
            .blocking_send(pb::CopyInRequest { message: Some(message) })
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Copies out of the guest: into an existing directory under the same name, else to the given name.
async fn copy_out(global: &Global, vm: String, path: String, to: PathBuf) -> Result<(), Failure> {
    let mut reached = reach(global, &vm, NameMatch::Exact, Subresource::Copy).await?;
    let mut chunks = reached.node.copy_out(pb::CopyOutRequest { vm: reached.vm, path }).await?.into_inner();
    let (sender, receiver) = mpsc::channel(8);
    let reader = ChunkReader { receiver, chunk: io::Cursor::default() };
    let unpack = tokio::task::spawn_blocking(move || unpack(reader, &to).map_err(local("write", &to)));
    while let Some(chunk) = chunks.message().await? {
        if sender.send(chunk.data).await.is_err() {
            break; // unpacking has failed, and its error is reported below
        }
    }
    drop(sender);
    unpack.await.map_err(|e| Failure::new("COR-CLI-006", e.to_string()))?
}

/// Reader of received messages; blocks while the node is slower.
struct ChunkReader {
    receiver: mpsc::Receiver<Vec<u8>>,
    chunk: io::Cursor<Vec<u8>>,
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.chunk.read(buffer)? {
                0 if !buffer.is_empty() => match self.receiver.blocking_recv() {
                    Some(chunk) => self.chunk = io::Cursor::new(chunk),
                    None => return Ok(0),
                },
                n => return Ok(n),
            }
        }
    }
}

/// Unpacks a tar stream. The guest is hostile: its tar goes into a fresh directory beside the target, which no link in it can
/// leave. Only the finished top-level entry is moved into place.
fn unpack(reader: impl Read, to: &Path) -> io::Result<()> {
    let into_dir = to.is_dir();
    let parent = match (into_dir, to.parent()) {
        (true, _) => to,
        (false, Some(parent)) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let staging = parent.join(format!(".coracle-cp-{:08x}", rand::random::<u32>()));
    std::fs::create_dir(&staging)?;
    let outcome = unpack_into(reader, &staging).and_then(|top| {
        let goal = if into_dir { to.join(&top) } else { to.to_owned() };
        std::fs::rename(staging.join(&top), goal)
    });
    let removed = std::fs::remove_dir_all(&staging);
    outcome.and(removed)
}

/// Unpacks into `dir` and returns the name of the single top-level entry.
fn unpack_into(reader: impl Read, dir: &Path) -> io::Result<PathBuf> {
    let mut archive = tar::Archive::new(reader);
    archive.set_preserve_permissions(true);
    archive.set_overwrite(false);
    for entry in archive.entries()? {
        let mut entry = entry?;
        // `false`: the path leads outside. Links are made, but later entries never follow them.
        if !entry.unpack_in(dir)? {
            let path = entry.path()?.display().to_string();
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the guest sent the path {path:?}"),
            ));
        }
    }
    let mut tops = std::fs::read_dir(dir)?;
    match (tops.next(), tops.next()) {
        (Some(top), None) => Ok(top?.file_name().into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the guest did not send exactly one entry")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cp_operand_is_parsed_as_vm_path_or_local_path() {
        let vm = |name: &str, path: &str| End::Vm { name: name.into(), path: path.into() };
        assert_eq!(parse_end("web:/etc/hosts"), vm("web", "/etc/hosts"));
        assert_eq!(parse_end("web:"), vm("web", ""));
        for here in ["/a:b", "./a:b", "file", ":x"] {
            assert_eq!(parse_end(here), End::Here(here.into()));
        }
    }

    #[test]
    fn tar_entry_outside_the_target_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let goal = dir.path().join("goal");
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        header.as_gnu_mut().unwrap().name[..9].copy_from_slice(b"../escape");
        header.set_cksum();
        tar.append(&header, &b"evil"[..]).unwrap();
        assert!(unpack(&tar.into_inner().unwrap()[..], &goal).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
