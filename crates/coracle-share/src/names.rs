//! Operations on names: look up, create, move and remove.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, linkat, mkdirat, mknodat, renameat_with, symlinkat,
};
use rustix::io::Errno;

use super::CACHED;
use super::handles::OpenMode;
use super::nodes::{Change, FileName};
use super::server::{Request, SharedDirServer};
use super::tree::{self, Maker};
use super::wire::{
    Body, CreateIn, EntryOut, LinkIn, MkdirIn, MknodIn, Name, OPEN_KILL_SET_ID, Op, OpenOut, Rename2In,
    RenameIn,
};

/// Maximum length of a symbolic link's target, bytes (PATH_MAX without the terminating zero).
const TARGET_MAX: usize = 4095;

impl SharedDirServer {
    pub(super) fn lookup(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let name = args.name()?;
        args.end()?;
        self.entry(request, name)
    }

    pub(super) fn mkdir(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (MkdirIn { mode, .. }, name) = (args.take()?, args.name()?);
        args.end()?;
        self.make(request, name, mode, FileType::Directory, |dir| mkdirat(dir, name.as_c_str(), Mode::RWXU))
    }

    pub(super) fn mknod(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (MknodIn { mode, .. }, name) = (args.take()?, args.name()?);
        args.end()?;
        let kind = FileType::from_raw_mode(mode);
        match kind {
            FileType::RegularFile | FileType::Fifo | FileType::Socket => {}
            FileType::CharacterDevice | FileType::BlockDevice => return Err(Errno::PERM),
            _ => return Err(Errno::INVAL),
        }
        let private = Mode::RUSR | Mode::WUSR;
        self.make(request, name, mode, kind, |dir| mknodat(dir, name.as_c_str(), kind, private, 0))
    }

    pub(super) fn symlink(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (name, target) = (args.name()?, args.text()?);
        args.end()?;
        match target.count_bytes() {
            0 => return Err(Errno::NOENT),
            1..=TARGET_MAX => {}
            _ => return Err(Errno::NAMETOOLONG),
        }
        self.make(request, name, 0, FileType::Symlink, |dir| symlinkat(target, dir, name.as_c_str()))
    }

    pub(super) fn link(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (LinkIn { node }, name) = (args.take()?, args.name()?);
        args.end()?;
        if !request.repeated {
            let (target, dir) = (self.find(node)?, self.find(request.node)?);
            match tree::kind(&tree::stat(&target)?) {
                FileType::CharacterDevice | FileType::BlockDevice => return Err(Errno::PERM),
                _ => linkat(CWD, tree::proc_path(&target), dir, name.as_c_str(), AtFlags::SYMLINK_FOLLOW)?,
            }
            self.settle(node, target)?;
        }
        self.entry(request, name)
    }

    /// Answers CREATE: makes the file, or without O_EXCL opens an existing one.
    pub(super) fn create(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (asked, name): (CreateIn, _) = (args.take()?, args.name()?);
        args.end()?;
        let flags = OFlags::from_bits_retain(asked.flags);
        let how = OpenMode::of_flags(flags)?;
        self.handles.check_room()?;
        let dir = self.find(request.node)?;
        let maker = Maker { uid: request.uid, gid: request.gid, mode: asked.mode };
        let exclusive = flags.contains(OFlags::EXCL) && !request.repeated;
        let file = match tree::make_file(&dir, name, how.flags()) {
            Ok(made) => {
                tree::adopt(&made, &dir, maker, self.owned)?;
                made
            }
            Err(Errno::EXIST) if !exclusive => {
                let there = tree::child(&dir, name)?;
                let opened = tree::reopen(there, Self::open_flags(how, flags), false)?;
                if how.writes() || asked.open_flags & OPEN_KILL_SET_ID != 0 {
                    self.strip(&opened)?;
                }
                opened
            }
            Err(error) => return Err(error),
        };
        let entry = self.entry_of(request.node, name, &file, Some(request.unique))?;
        let fh = self.handles.add(entry.node, file, how)?;
        let mut body = Body::of(&entry);
        body.push(zerocopy::IntoBytes::as_bytes(&OpenOut { fh, ..OpenOut::default() }));
        Ok(body)
    }

    /// Answers UNLINK and RMDIR.
    pub(super) fn remove(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let name = args.name()?;
        args.end()?;
        if !request.repeated {
            let flags = if request.op == Op::Rmdir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            rustix::fs::unlinkat(self.find(request.node)?, name.as_c_str(), flags)?;
            let gone = Change::Unnamed { parent: request.node, name: FileName::from(name.as_bytes()) };
            self.table().commit(&[gone, Change::Done { unique: request.unique }]);
        }
        Ok(Body::empty())
    }

    /// Answers RENAME and RENAME2.
    pub(super) fn rename(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (new_dir, flags) = if request.op == Op::Rename {
            (args.take::<RenameIn>()?.new_dir, 0)
        } else {
            let Rename2In { new_dir, flags, .. } = args.take()?;
            (new_dir, flags)
        };
        let (from, to) = (args.name()?, args.name()?);
        args.end()?;
        let flags = RenameFlags::from_bits_retain(flags);
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(flags) {
            return Err(Errno::INVAL); // a whiteout is a device
        }
        if !request.repeated {
            let (source, target) = (self.find(request.node)?, self.find(new_dir)?);
            renameat_with(source, from.as_c_str(), target, to.as_c_str(), flags)?;
            let exchange = flags.contains(RenameFlags::EXCHANGE);
            let mut table = self.table();
            let (from, to) = ((request.node, from.as_bytes()), (new_dir, to.as_bytes()));
            let mut changes = table.nodes().rename_changes(from, to, exchange);
            changes.push(Change::Done { unique: request.unique });
            table.commit(&changes);
        }
        Ok(Body::empty())
    }

    /// Makes a file by `call`, sets its owner and mode, and replies with its entry.
    fn make(
        &self,
        request: Request<'_>,
        name: Name<'_>,
        mode: u32,
        kind: FileType,
        call: impl FnOnce(&super::server::FoundNode<'_>) -> Result<(), Errno>,
    ) -> Result<Body, Errno> {
        if !request.repeated {
            let dir = self.find(request.node)?;
            call(&dir)?;
            let made = tree::child(&dir, name)?;
            // The host may have replaced the file meanwhile; the owner of that one must not change.
            if tree::kind(&tree::stat(&made)?) != kind {
                return Err(Errno::STALE);
            }
            tree::adopt(&made, &dir, Maker { uid: request.uid, gid: request.gid, mode }, self.owned)?;
        }
        self.entry(request, name)
    }

    /// Replies with the entry of this name in the request's directory.
    fn entry(&self, request: Request<'_>, name: Name<'_>) -> Result<Body, Errno> {
        let found: OwnedFd = tree::child(self.find(request.node)?, name)?;
        let done = request.op.changes().then_some(request.unique);
        Ok(Body::of(&self.entry_of(request.node, name, found, done)?))
    }

    /// Counts one more look-up of the file, found in directory `parent`, and returns its entry.
    ///
    /// # Errors
    /// ENOMEM when the guest holds too many ids.
    pub(super) fn entry_of(
        &self,
        parent: u64,
        name: Name<'_>,
        found: impl AsFd,
        done: Option<u64>,
    ) -> Result<EntryOut, Errno> {
        let stat = tree::stat(found)?;
        let mut table = self.table();
        let directory = tree::kind(&stat) == FileType::Directory;
        let met = table.nodes().look_up(parent, name.as_bytes(), tree::ident(&stat), directory);
        let (node, mut changes) = met.ok_or(Errno::NOMEM)?;
        changes.extend(done.map(|unique| Change::Done { unique }));
        table.commit(&changes);
        drop(table);
        Ok(EntryOut {
            node,
            entry_valid: CACHED,
            attr_valid: CACHED,
            attr: self.attributes(&stat),
            ..EntryOut::default()
        })
    }
}
