//! File operations of programs; each result is checked on the host.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::thread;

use rand::{Rng as _, SeedableRng as _};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags,
    copy_file_range, fallocate, getxattr, listxattr, mknodat, removexattr, renameat_with, seek, setxattr,
    statvfs, utimensat,
};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use crate::errno;
use crate::mount::Mount;

/// 2001-09-09, a time in the past.
pub(crate) const LONG_AGO: Timestamps = {
    let at = Timespec { tv_sec: 1_000_000_000, tv_nsec: 123_456_789 };
    Timestamps { last_access: at, last_modification: at }
};

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap()
}

/// Creates, reads, appends, truncates, moves, links and removes files.
pub(crate) fn files(m: &Mount<'_>) {
    let (g, h) = (|name: &str| m.guest.join(name), |name: &str| m.host.join(name));
    fs::write(g("a"), "hello").unwrap();
    assert_eq!((read(h("a")), read(g("a"))), ("hello".into(), "hello".into()));
    assert_eq!(errno(File::create_new(g("a"))), Errno::EXIST);
    File::options().append(true).open(g("a")).unwrap().write_all(b" world").unwrap();
    assert_eq!(read(h("a")), "hello world");
    let file = File::options().read(true).write(true).open(g("a")).unwrap();
    file.write_all_at(b"J", 0).unwrap();
    file.set_len(5).unwrap();
    assert_eq!((read(h("a")), read(g("a"))), ("Jello".into(), "Jello".into()));
    file.set_len(8).unwrap();
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    assert_eq!(fs::read(h("a")).unwrap(), b"Jello\0\0\0");
    fs::write(g("a"), "short").unwrap(); // O_TRUNC
    assert_eq!(read(h("a")), "short");

    fs::create_dir_all(g("dir/sub")).unwrap();
    fs::rename(g("a"), g("dir/sub/b")).unwrap();
    assert_eq!((h("a").exists(), read(h("dir/sub/b"))), (false, "short".into()));
    fs::write(g("c"), "second").unwrap();
    let refused = renameat_with(CWD, g("c"), CWD, g("dir/sub/b"), RenameFlags::NOREPLACE);
    assert_eq!(refused, Err(Errno::EXIST));
    renameat_with(CWD, g("c"), CWD, g("dir/sub/b"), RenameFlags::EXCHANGE).unwrap();
    assert_eq!((read(g("c")), read(g("dir/sub/b"))), ("short".into(), "second".into()));
    fs::rename(g("c"), g("dir/sub/b")).unwrap(); // replaces
    assert_eq!((read(h("dir/sub/b")), h("c").exists()), ("short".into(), false));
    fs::rename(g("dir"), g("moved")).unwrap();
    assert_eq!(read(g("moved/sub/b")), "short");

    fs::hard_link(g("moved/sub/b"), g("link")).unwrap();
    let [one, other, host] = [g("moved/sub/b"), g("link"), h("link")].map(|path| fs::metadata(path).unwrap());
    assert_eq!((one.ino(), one.nlink(), host.nlink()), (other.ino(), 2, 2));
    fs::write(g("link"), "through the other name").unwrap();
    assert_eq!(read(g("moved/sub/b")), "through the other name");
    fs::remove_file(g("moved/sub/b")).unwrap();
    assert_eq!(
        (read(g("link")), fs::metadata(g("link")).unwrap().nlink()),
        ("through the other name".into(), 1)
    );

    symlink("link", g("symbolic")).unwrap();
    symlink("nowhere", g("dangling")).unwrap();
    assert_eq!(
        (read(g("symbolic")), fs::read_link(h("symbolic")).unwrap()),
        (read(g("link")), "link".into())
    );
    assert_eq!(errno(fs::read(g("dangling"))), Errno::NOENT);

    assert_eq!(errno(fs::remove_dir(g("moved"))), Errno::NOTEMPTY);
    let long = "n".repeat(255);
    fs::write(g(&long), "").unwrap();
    assert_eq!(errno(fs::write(g(&"n".repeat(256)), "")), Errno::NAMETOOLONG);
    let odd = std::ffi::OsStr::from_bytes(b"odd \xff\n%41");
    fs::write(m.guest.join(odd), "any byte").unwrap();
    assert_eq!(read(m.host.join(odd)), "any byte");
    fs::remove_file(g(&long)).unwrap();
    for name in ["link", "symbolic", "dangling"] {
        fs::remove_file(g(name)).unwrap();
    }
    fs::remove_file(m.guest.join(odd)).unwrap();
    fs::remove_dir_all(g("moved")).unwrap();
    assert_eq!(fs::read_dir(&m.host).unwrap().count(), 0);
}

/// Copies a file of `len` bytes and compares digests; then tests holes, preallocation and copies within the kernel.
pub(crate) fn check_big_file(m: &Mount<'_>, len: usize) {
    let mut data = vec![0; len];
    rand::rngs::StdRng::seed_from_u64(7).fill(&mut data[..]);
    let digest = Sha256::digest(&data);
    fs::write(m.guest.join("big"), &data).unwrap();
    assert_eq!(Sha256::digest(fs::read(m.host.join("big")).unwrap()), digest, "on the host");
    assert_eq!(Sha256::digest(fs::read(m.guest.join("big")).unwrap()), digest, "in the guest");

    let (from, to) = (File::open(m.guest.join("big")).unwrap(), File::create(m.guest.join("copy")).unwrap());
    let (mut at, mut put) = (0, 0);
    while copy_file_range(&from, Some(&mut at), &to, Some(&mut put), len).unwrap() > 0 {}
    assert_eq!(Sha256::digest(fs::read(m.host.join("copy")).unwrap()), digest, "copied");

    let holes = File::create(m.guest.join("holes")).unwrap();
    fallocate(&holes, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    assert_eq!(fs::metadata(m.host.join("holes")).unwrap().len(), 1 << 20);
    holes.set_len(0).unwrap();
    holes.set_len(1 << 20).unwrap();
    holes.write_all_at(b"x", 1 << 19).unwrap();
    let reader = File::open(m.guest.join("holes")).unwrap();
    assert_eq!(seek(&reader, rustix::fs::SeekFrom::Data(0)).unwrap(), 1 << 19);
    assert_eq!(seek(&reader, rustix::fs::SeekFrom::Hole(0)).unwrap(), 0);
    assert_eq!((&reader).seek(SeekFrom::End(0)).unwrap(), 1 << 20);
}

/// Runs a program from the directory, and checks that a shared mapping of a file is written back.
#[expect(unsafe_code, reason = "mmap(2)")]
pub(crate) fn check_mapped_file(m: &Mount<'_>) {
    const LEN: usize = 64 * 1024;
    let text: Vec<u8> = (0..LEN).map(|at| b'a' + u8::try_from(at % 26).unwrap()).collect();
    fs::write(m.guest.join("map"), &text).unwrap();
    let file = File::options().read(true).write(true).open(m.guest.join("map")).unwrap();
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: a fresh mapping of LEN bytes of a file that is not truncated; unmapped below, after its last use.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), LEN, rights, libc::MAP_SHARED, fd, 0) };
    assert_ne!(map, libc::MAP_FAILED);
    // SAFETY: as above; nothing else in this process refers to the mapping.
    let bytes = unsafe { std::slice::from_raw_parts_mut(map.cast::<u8>(), LEN) };
    assert_eq!(bytes, text);
    bytes[40_000..40_006].copy_from_slice(b"MAPPED");
    // SAFETY: the mapping made above.
    assert_eq!(unsafe { libc::msync(map, LEN, libc::MS_SYNC) }, 0);
    // SAFETY: the mapping made above; `bytes` is not used again.
    assert_eq!(unsafe { libc::munmap(map, LEN) }, 0);
    assert_eq!(&fs::read(m.host.join("map")).unwrap()[40_000..40_006], b"MAPPED");

    fs::copy("/bin/cat", m.guest.join("cat")).unwrap();
    let ran = Command::new(m.guest.join("cat")).arg(m.guest.join("map")).output().unwrap();
    assert_eq!(ran.stdout, fs::read(m.host.join("map")).unwrap());
}

/// Lists a directory of `count` entries.
pub(crate) fn listing(m: &Mount<'_>, count: usize) {
    fs::create_dir(m.guest.join("many")).unwrap();
    let names: BTreeSet<String> = (0..count).map(|n| format!("entry-{n}-{}", "x".repeat(n % 40))).collect();
    for name in &names {
        fs::write(m.host.join("many").join(name), name).unwrap();
    }
    let list = || -> Vec<String> {
        let entries = fs::read_dir(m.guest.join("many")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let seen = list();
    assert_eq!(
        (seen.len(), seen.into_iter().collect::<BTreeSet<_>>()),
        (count, names.clone()),
        "each one once"
    );
    let sizes = names
        .iter()
        .filter(|name| fs::metadata(m.guest.join("many").join(name)).unwrap().len() != name.len() as u64);
    assert_eq!(sizes.count(), 0);
    for name in &names {
        fs::remove_file(m.guest.join("many").join(name)).unwrap();
    }
    assert_eq!((list().len(), fs::read_dir(m.host.join("many")).unwrap().count()), (0, 0));
    fs::remove_dir(m.guest.join("many")).unwrap();
}

/// Tests modes, times, extended attributes, special files, and the size of the file system.
pub(crate) fn attributes(m: &Mount<'_>) {
    let (file, host) = (m.guest.join("file"), m.host.join("file"));
    fs::write(&file, "x").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    utimensat(CWD, &file, &LONG_AGO, AtFlags::empty()).unwrap();
    for path in [&file, &host] {
        let is = fs::metadata(path).unwrap();
        assert_eq!((is.mode() & 0o7777, is.mtime(), is.mtime_nsec()), (0o640, 1_000_000_000, 123_456_789));
    }
    fs::set_permissions(&file, Permissions::from_mode(0o6755)).unwrap();
    assert_eq!(fs::metadata(&host).unwrap().mode() & 0o7777, 0o755, "a guest makes no set-id programs");

    let mut value = [0; 64];
    setxattr(&file, "user.colour", b"green", XattrFlags::CREATE).unwrap();
    assert_eq!(setxattr(&file, "user.colour", b"red", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(
        getxattr(&host, "user.colour", &mut value).map(|len| value[..len].to_vec()),
        Ok(b"green".to_vec())
    );
    assert_eq!(
        getxattr(&file, "user.colour", &mut value).map(|len| value[..len].to_vec()),
        Ok(b"green".to_vec())
    );
    assert_eq!(getxattr(&file, "user.colour", &mut value[..2]), Err(Errno::RANGE));
    assert_eq!(listxattr(&file, &mut value).map(|len| value[..len].to_vec()), Ok(b"user.colour\0".to_vec()));
    removexattr(&file, "user.colour").unwrap();
    assert_eq!(getxattr(&file, "user.colour", &mut value), Err(Errno::NODATA));
    for name in ["trusted.x", "security.x"] {
        assert_eq!(setxattr(&file, name, b"1", XattrFlags::empty()), Err(Errno::OPNOTSUPP), "{name}");
    }

    mknodat(CWD, m.guest.join("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    let _bound = UnixListener::bind(m.guest.join("socket")).unwrap();
    assert!(fs::symlink_metadata(m.host.join("fifo")).unwrap().file_type().is_fifo());
    assert!(fs::symlink_metadata(m.host.join("socket")).unwrap().file_type().is_socket());
    for kind in [FileType::CharacterDevice, FileType::BlockDevice] {
        let made = mknodat(CWD, m.guest.join("device"), kind, Mode::RWXU, rustix::fs::makedev(1, 3));
        assert_eq!(made, Err(Errno::PERM));
    }
    let [seen, real] = [&m.guest, &m.host].map(|path| statvfs(path).unwrap());
    assert_eq!((seen.f_blocks, seen.f_bsize, seen.f_namemax), (real.f_blocks, real.f_bsize, real.f_namemax));
    for name in ["file", "fifo", "socket"] {
        fs::remove_file(m.guest.join(name)).unwrap();
    }
}

/// Runs several programs in the same directories, which append to the same file.
pub(crate) fn check_concurrent_writers(m: &Mount<'_>) {
    const CROWD: usize = 6;
    const LINES: usize = 40;
    thread::scope(|scope| {
        for who in 0..CROWD {
            scope.spawn(move || {
                let mut log = File::options().append(true).create(true).open(m.guest.join("log")).unwrap();
                for line in 0..LINES {
                    log.write_all(format!("{who}/{line}\n").as_bytes()).unwrap();
                    let (new, old) = (format!("{who}-{line}"), format!("kept-{who}"));
                    fs::write(m.guest.join(&new), &new).unwrap();
                    fs::rename(m.guest.join(&new), m.guest.join(&old)).unwrap();
                    assert_eq!(read(m.guest.join(&old)), new);
                }
            });
        }
    });
    let log = read(m.host.join("log"));
    let lines: BTreeSet<&str> = log.lines().collect();
    assert_eq!(
        (log.lines().count(), lines.len()),
        (CROWD * LINES, CROWD * LINES),
        "each line once and whole"
    );
    assert_eq!(fs::read_dir(&m.host).unwrap().count(), CROWD + 1);
    let mut first = String::new();
    File::open(m.guest.join("log")).unwrap().read_to_string(&mut first).unwrap();
    assert_eq!(first, log);
}
