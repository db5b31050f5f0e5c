//! System call that no library wraps.

use std::io;
use std::os::fd::RawFd;

/// Starts writing a range of a file to disk, without waiting (sync_file_range(2)).
pub(crate) fn write_out(fd: RawFd, from: u64, bytes: u64) -> io::Result<()> {
    let (from, bytes) = (i64::try_from(from), i64::try_from(bytes));
    let (Ok(from), Ok(bytes)) = (from, bytes) else { return Err(io::ErrorKind::InvalidInput.into()) };
    #[expect(unsafe_code, reason = "no crate of ours wraps it")]
    // SAFETY: the call takes only a descriptor and numbers. A descriptor that is not open makes the call fail.
    let done = unsafe { libc::sync_file_range(fd, from, bytes, libc::SYNC_FILE_RANGE_WRITE) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
