//! The table of node ids in a file, so that a restarted daemon knows the ids that its guest holds.
//!
//! Each [`Change`] is a line, appended before its reply is sent. The file is rewritten when most of it is history. The table
//! outlives the process but need not outlive the host, because the guest ends with the host. A last line without its newline is
//! ignored, as its reply was never sent.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};

use super::nodes::{Change, FileName, Ident, Nodes};
use coracle_files::write_atomic;

/// First line of the file: type and version of the format.
const HEADER: &str = "coracle-folder 1\n";
/// Size of the history that triggers a rewrite, bytes; at least four times the size of the state.
const HISTORY_MAX: u64 = 1024 * 1024;
/// Characters of a file name that are percent-encoded.
const QUOTED: &AsciiSet = &CONTROLS.add(b' ').add(b'%');

/// [`Nodes`] whose changes are written to the file before the guest sees them.
#[derive(Debug)]
pub(super) struct Table {
    nodes: Nodes,
    path: PathBuf,
    file: Option<File>,
    written: u64,
    kept: u64,
}

impl Table {
    /// Replays the file, or begins a new one. Each process has its own epoch (see [`Nodes::epoch`]).
    ///
    /// # Errors
    /// When the file cannot be read or written, or is of an unknown version.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let mut nodes = Nodes::default();
        match std::fs::read(&path) {
            Ok(bytes) if bytes.is_empty() => {}
            Ok(bytes) => replay(&bytes, &mut nodes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        nodes.prune();
        nodes.apply(&Change::Epoch { count: nodes.epoch().saturating_add(1) });
        let mut table = Self { nodes, path, file: None, written: 0, kept: 0 };
        table.rewrite()?;
        Ok(table)
    }

    pub(super) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Applies the changes to the state and appends them to the file. After a failed write (full disk) the next change tries
    /// again: until then the guest is served, and only a restart would lose ids.
    pub(super) fn commit(&mut self, changes: &[Change]) {
        if changes.is_empty() {
            return;
        }
        changes.iter().for_each(|change| self.nodes.apply(change));
        let written = match self.file {
            Some(_) if self.written > HISTORY_MAX.max(self.kept * 4) => self.rewrite(),
            Some(_) => self.append(changes),
            None => self.rewrite(),
        };
        if let Err(error) = written
            && self.file.take().is_some()
        {
            tracing::warn!(path = %self.path.display(), %error, "write table of a shared directory failed");
        }
    }

    /// Clears the table: the guest's kernel mounted again, or unmounted.
    pub(super) fn clear(&mut self) {
        let epoch = Change::Epoch { count: self.nodes.epoch() };
        self.nodes = Nodes::default();
        self.file = None;
        self.commit(&[epoch]);
    }

    fn append(&mut self, changes: &[Change]) -> io::Result<()> {
        let text: String = changes.iter().map(line).collect();
        self.written += text.len() as u64;
        self.file.as_mut().ok_or(io::ErrorKind::NotFound)?.write_all(text.as_bytes())
    }

    fn rewrite(&mut self) -> io::Result<()> {
        let mut text = String::from(HEADER);
        text.extend(self.nodes.snapshot().iter().map(line));
        self.file = None;
        write_atomic(&self.path, text.as_bytes())?;
        self.file = Some(File::options().append(true).open(&self.path)?);
        (self.written, self.kept) = (0, text.len() as u64);
        Ok(())
    }
}

/// First id and first epoch for a copy of a guest: all that the original guest has are below.
const COPY_FIRST_ID: u64 = 1 << 48;
const COPY_EPOCH: u64 = 1 << 32;

/// Begins the table of a guest that is a copy of another one, or that continues on another directory: ids that its kernel holds
/// become stale, and are never mistaken for other files. Blocking.
///
/// # Errors
/// When the file cannot be written.
pub fn begin_copied_table(path: &Path) -> io::Result<()> {
    let mut text = String::from(HEADER);
    text.extend([Change::Next { id: COPY_FIRST_ID }, Change::Epoch { count: COPY_EPOCH }].iter().map(line));
    write_atomic(path, text.as_bytes())
}

fn replay(bytes: &[u8], nodes: &mut Nodes) -> io::Result<()> {
    let text = String::from_utf8_lossy(bytes);
    let Some(lines) = text.strip_prefix(HEADER) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a table of node ids of version 1"));
    };
    for whole in lines.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        match parse(whole) {
            Some(change) => nodes.apply(&change),
            None => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("no change: {whole:?}"))),
        }
    }
    Ok(())
}

fn line(change: &Change) -> String {
    let quoted = |name: &FileName| percent_encode(name, QUOTED).to_string();
    match change {
        Change::Node { id, ident: Ident { device, inode, born }, directory } => {
            format!("node {id} {device} {inode} {born} {}\n", u8::from(*directory))
        }
        Change::NameAdded { id, parent, name } => format!("named {id} {parent} {}\n", quoted(name)),
        Change::Unnamed { parent, name } => format!("unnamed {parent} {}\n", quoted(name)),
        Change::LookupAdded { id, count } => format!("looked {id} {count}\n"),
        Change::Forgotten { id, count } => format!("forgotten {id} {count}\n"),
        Change::InodeChanged { id, ident: Ident { device, inode, born } } => {
            format!("became {id} {device} {inode} {born}\n")
        }
        Change::Next { id } => format!("next {id}\n"),
        Change::Epoch { count } => format!("epoch {count}\n"),
        Change::Done { unique } => format!("done {unique}\n"),
    }
}

fn parse(line: &str) -> Option<Change> {
    let mut words = line.split(' ');
    let word = words.next()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    let ident = |number: &mut dyn FnMut() -> Option<u64>| {
        Some(Ident { device: number()?, inode: number()?, born: number()? })
    };
    let change = match word {
        "node" => Change::Node { id: number()?, ident: ident(&mut number)?, directory: number()? != 0 },
        "named" => Change::NameAdded { id: number()?, parent: number()?, name: name(words.next()?) },
        "unnamed" => Change::Unnamed { parent: number()?, name: name(words.next()?) },
        "looked" => Change::LookupAdded { id: number()?, count: number()? },
        "forgotten" => Change::Forgotten { id: number()?, count: number()? },
        "became" => Change::InodeChanged { id: number()?, ident: ident(&mut number)? },
        "next" => Change::Next { id: number()? },
        "epoch" => Change::Epoch { count: number()? },
        "done" => Change::Done { unique: number()? },
        _ => return None,
    };
    words.next().is_none().then_some(change)
}

fn name(quoted: &str) -> FileName {
    percent_decode_str(quoted).collect::<Vec<u8>>().into()
}
