//! Directory listings.

use rustix::fs::{RawDir, RawDirEntry, SeekFrom, seek};
use rustix::io::Errno;
use zerocopy::IntoBytes as _;

use super::files::data_len;
use super::handles::{Handle, OpenMode};
use super::server::{Request, SharedDirServer};
use super::tree;
use super::wire::{Body, Dirent, EntryOut, Name, Op, OpenIn, OpenOut, ROOT, ReadIn};

/// Number of bytes read from the host at a time.
const BLOCK: usize = 32 * 1024;
/// Alignment of the entries in a reply, bytes.
const ALIGN: usize = 8;

impl SharedDirServer {
    pub(super) fn open_folder(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let _: OpenIn = args.take()?;
        args.end()?;
        self.handles.check_room()?;
        let directory = tree::reopen(self.find(request.node)?, OpenMode::Directory.flags(), true)?;
        let fh = self.handles.add(request.node, directory, OpenMode::Directory)?;
        Ok(Body::of(&OpenOut { fh, ..OpenOut::default() }))
    }

    /// Answers READDIR, and READDIRPLUS, which also looks up each entry. Positions are those of the host's file system, so that
    /// a listing continues after a restart.
    pub(super) fn list(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let ReadIn { fh, offset, size, .. } = args.take()?;
        args.end()?;
        let size = data_len(size)?;
        let handle = self.handle(fh, request.node)?;
        if handle.how != OpenMode::Directory {
            return Err(Errno::NOTDIR);
        }
        let _one_at_a_time = handle.position.lock();
        seek(&handle.file, SeekFrom::Start(offset))?;
        let mut body = Body::empty();
        let mut block = Vec::with_capacity(BLOCK);
        let mut entries = RawDir::new(&handle.file, block.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(Errno::NOENT) => break, // the directory was removed
                Err(error) => return Err(error),
            };
            let plus = request.op == Op::Readdirplus;
            let head = size_of::<Dirent>() + if plus { size_of::<EntryOut>() } else { 0 };
            let whole = (head + entry.file_name().count_bytes()).next_multiple_of(ALIGN);
            if body.len() + whole > size {
                break;
            }
            self.put(&mut body, &handle, &entry, plus);
            body.room(ALIGN - 1);
            body.truncate((body.len() - (ALIGN - 1)).next_multiple_of(ALIGN));
        }
        Ok(body)
    }

    fn put(&self, body: &mut Body, handle: &Handle, entry: &RawDirEntry<'_>, plus: bool) {
        let name = entry.file_name();
        let mut ino = entry.ino();
        if handle.node == ROOT && name == c".." {
            ino = ROOT; // the guest must not see the parent
        }
        if plus {
            // An entry without an id (already removed, or no id is free) is looked up when it is used.
            let found = Name::new(name).and_then(|name| {
                let file = tree::child(&handle.file, name)?;
                self.entry_of(handle.node, name, file, None)
            });
            let told = found.unwrap_or_default();
            if told.node != 0 {
                ino = told.attr.ino;
            }
            body.push(told.as_bytes());
        }
        let name_len = u32::try_from(name.count_bytes()).unwrap_or_default();
        let kind = entry.file_type().as_raw_mode() >> 12;
        body.push(Dirent { ino, offset: entry.next_entry_cookie(), name_len, kind }.as_bytes());
        body.push(name.to_bytes());
    }
}
