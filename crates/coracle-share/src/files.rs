//! Operations on the content of files.

use std::io::IoSlice;

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, copy_file_range, fallocate, fdatasync, fsync, seek};
use rustix::io::{Errno, ReadWriteFlags, pread, pwritev2};

use super::handles::OpenMode;
use super::nodes::Change;
use super::server::{Request, SharedDirServer};
use super::tree;
use super::wire::{
    Body, CopyIn, DATA_MAX, FSYNC_DATA, FallocateIn, FlushIn, FsyncIn, LseekIn, LseekOut, OPEN_KILL_SET_ID,
    OPEN_NO_FLUSH, OpenIn, OpenOut, ReadIn, ReleaseIn, WRITE_CACHE, WRITE_KILL_SET_ID, WriteIn, WriteOut,
};

/// Maximum number of bytes that one COPY_FILE_RANGE copies: the guest asks again for the rest.
const COPY_MAX: u64 = 16 * 1024 * 1024;
/// lseek(2) values for the two searches that only the host can answer.
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

impl SharedDirServer {
    pub(super) fn open_file(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let asked: OpenIn = args.take()?;
        args.end()?;
        let flags = OFlags::from_bits_retain(asked.flags);
        let how = OpenMode::of_flags(flags)?;
        let changes = how.writes() || flags.contains(OFlags::TRUNC);
        if changes {
            self.may_change(request.node)?;
        }
        self.handles.check_room()?;
        let file = tree::reopen(self.find(request.node)?, Self::open_flags(how, flags), false)?;
        if changes || asked.open_flags & OPEN_KILL_SET_ID != 0 && self.may_change(request.node).is_ok() {
            self.strip(&file)?;
            self.settle(request.node, &file)?;
        }
        let fh = self.handles.add(request.node, file, how)?;
        let open_flags = if how.writes() { 0 } else { OPEN_NO_FLUSH };
        Ok(Body::of(&OpenOut { fh, open_flags, pad: 0 }))
    }

    pub(super) fn read(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let ReadIn { fh, offset, size, .. } = args.take()?;
        args.end()?;
        let size = data_len(size)?;
        let handle = self.handle(fh, request.node)?;
        let mut body = Body::empty();
        let buffer = body.room(size);
        let mut filled = 0;
        // Reads until the buffer is full, because the guest takes a short read for the end of the file.
        while filled < size {
            match pread(&handle.file, &mut buffer[filled..], offset.saturating_add(filled as u64)) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(_) if filled > 0 => break,
                Err(error) => return Err(error),
            }
        }
        body.truncate(filled);
        Ok(body)
    }

    pub(super) fn write(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let asked: WriteIn = args.take()?;
        let data = args.0;
        if data.len() != data_len(asked.size)? {
            return Err(Errno::INVAL);
        }
        let handle = self.handle(asked.fh, request.node)?;
        if !handle.how.writes() {
            return Err(Errno::BADF);
        }
        let whole = WriteOut { size: asked.size, pad: 0 };
        if request.repeated {
            return Ok(Body::of(&whole));
        }
        if asked.write_flags & WRITE_KILL_SET_ID != 0 {
            self.strip(&handle.file)?;
        }
        // The host determines the end of the file: another writer may have appended since the guest's last look-up.
        let appends = OFlags::from_bits_retain(asked.flags).contains(OFlags::APPEND)
            && asked.write_flags & WRITE_CACHE == 0;
        let flags = if appends { ReadWriteFlags::APPEND } else { ReadWriteFlags::empty() };
        let mut written = 0;
        while written < data.len() {
            let rest = [IoSlice::new(&data[written..])];
            match pwritev2(&handle.file, &rest, asked.offset.saturating_add(written as u64), flags) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(Errno::INTR) => {}
                Err(_) if written > 0 => break,
                Err(error) => return Err(error),
            }
        }
        if written < data.len() {
            return Ok(Body::of(&WriteOut { size: u32::try_from(written).unwrap_or(u32::MAX), pad: 0 }));
        }
        if appends {
            self.table().commit(&[Change::Done { unique: request.unique }]); // repeating other writes is harmless
        }
        Ok(Body::of(&whole))
    }

    /// Answers FSYNC and FSYNCDIR.
    pub(super) fn fsync(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let FsyncIn { fh, flags, .. } = args.take()?;
        args.end()?;
        let handle = self.handle(fh, request.node)?;
        if flags & FSYNC_DATA == 0 {
            fsync(&handle.file)?
        } else {
            fdatasync(&handle.file)?
        }
        Ok(Body::empty())
    }

    /// Answers FLUSH. Nothing is buffered here that must be written at a close.
    pub(super) fn flush(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let _: FlushIn = args.take()?;
        args.end()?;
        Ok(Body::empty())
    }

    /// Answers RELEASE and RELEASEDIR. Idempotent.
    pub(super) fn release(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let ReleaseIn { fh, .. } = args.take()?;
        args.end()?;
        self.handles.close(fh);
        Ok(Body::empty())
    }

    pub(super) fn fallocate(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let FallocateIn { fh, offset, length, mode, .. } = args.take()?;
        args.end()?;
        let mode = FallocateFlags::from_bits_retain(mode);
        let known = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !known.contains(mode) {
            return Err(Errno::OPNOTSUPP);
        }
        let handle = self.handle(fh, request.node)?;
        if !handle.how.writes() {
            return Err(Errno::BADF);
        }
        fallocate(&handle.file, mode, offset, length)?;
        Ok(Body::empty())
    }

    pub(super) fn lseek(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let LseekIn { fh, offset, whence, .. } = args.take()?;
        args.end()?;
        let to = match whence {
            SEEK_DATA => SeekFrom::Data(offset),
            SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL),
        };
        let handle = self.handle(fh, request.node)?;
        if handle.how == OpenMode::Directory {
            return Err(Errno::INVAL);
        }
        Ok(Body::of(&LseekOut { offset: seek(&handle.file, to)? }))
    }

    pub(super) fn copy_range(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let asked: CopyIn = args.take()?;
        args.end()?;
        if asked.flags != 0 {
            return Err(Errno::INVAL);
        }
        let source = self.handle(asked.fh_in, request.node)?;
        let target = self.handle(asked.fh_out, asked.node_out)?;
        let len = usize::try_from(asked.len.min(COPY_MAX)).unwrap_or(usize::MAX);
        let (mut from, mut to) = (asked.offset_in, asked.offset_out);
        let copied = copy_file_range(&source.file, Some(&mut from), &target.file, Some(&mut to), len)?;
        Ok(Body::of(&WriteOut { size: u32::try_from(copied).unwrap_or(u32::MAX), pad: 0 }))
    }
}

/// Checks the length of data that a message requests or carries.
pub(super) fn data_len(size: u32) -> Result<usize, Errno> {
    usize::try_from(size).ok().filter(|size| *size <= DATA_MAX).ok_or(Errno::INVAL)
}
