//! System call without a wrapper in a library.

use std::io;
use std::os::fd::RawFd;

/// Starts writing a range of a file to disk, without waiting (sync_file_range(2)).
pub(crate) fn write_out(fd: RawFd, from: u64, bytes: u64) -> io::Result<()> {
    let (from, bytes) = (i64::try_from(from), i64::try_from(bytes));
    let (Ok(from), Ok(bytes)) = (from, bytes) else { return Err(io::ErrorKind::InvalidInput.into()) };
    #[expect(unsafe_code, reason = "no crate of ours wraps it")]
    // SAFETY: the call takes a descriptor and numbers; a descriptor that is not open makes it fail.
    let done = unsafe { libc::sync_file_range(fd, from, bytes, libc::SYNC_FILE_RANGE_WRITE) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
