//! Child between clone(2) and execve(2). All `unsafe` code of the crate is in this module; callers see plain values and
//! `io::Result`.
#![expect(unsafe_code, reason = "clone, execve and signal settings have no safe wrapper")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::Pid;

/// Stack of a child until it executes its program, bytes. It is on the stack of the thread that waits.
const CHILD_STACK: usize = 48 * 1024;
/// Exit code of a child that could not execute its program.
const NOT_EXECUTED: c_int = 127;

/// Program that a child executes.
pub(crate) struct Child<'c> {
    pub(crate) path: &'c CStr,
    pub(crate) argv: &'c [CString],
    pub(crate) env: &'c [CString],
    /// Standard streams, none of them 0, 1 or 2.
    pub(crate) streams: &'c [OwnedFd],
    /// Steps of the child: only system calls.
    pub(crate) setup: &'c (dyn Fn() -> io::Result<()> + Sync),
    /// Error number of a child that has not executed the program; 0: none.
    pub(crate) error: &'c AtomicI32,
    /// Pipe for the same, as the 4 bytes of an `i32`; `None`: the child shares the memory of `error`.
    pub(crate) reports: Option<OwnedFd>,
}

/// Child, and its lists with a null pointer at the end.
struct Start<'c> {
    child: &'c Child<'c>,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
}

/// Makes a child, and waits until it has executed its program or ended (clone(2), CLONE_VFORK). Until then it shares the agent's
/// memory, or has a copy if it has a pipe for its error.
///
/// # Errors
/// When no child can be made.
pub(crate) fn spawn(child: &Child<'_>) -> io::Result<Pid> {
    let pointers = |texts: &[CString]| {
        texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>()
    };
    let start = Start { child, argv: pointers(child.argv), env: pointers(child.env) };
    let mut stack = [std::mem::MaybeUninit::<u128>::uninit(); CHILD_STACK / size_of::<u128>()];
    let memory = if child.reports.is_none() { libc::CLONE_VM } else { 0 };
    // SAFETY: the stack is aligned and grows down from its end. This thread waits until the child has executed its program or
    // ended, so that `start` and `stack`, which only the child uses meanwhile, outlive it.
    let pid = unsafe {
        let top = stack.as_mut_ptr_range().end.cast::<c_void>();
        let flags = memory | libc::CLONE_VFORK | libc::SIGCHLD;
        libc::clone(run_child, top, flags, (&raw const start).cast_mut().cast())
    };
    if pid > 0 {
        Pid::from_raw(pid).ok_or_else(io::Error::last_os_error)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Child's part of [`spawn`]: returns only if the program was not executed, with the exit code of the child.
extern "C" fn run_child(start: *mut c_void) -> c_int {
    // SAFETY: the thread that waits passes a pointer to a value that outlives this function.
    let start = unsafe { &*start.cast::<Start<'_>>() };
    let error = execute(start).raw_os_error().unwrap_or(libc::EINVAL);
    match &start.child.reports {
        None => start.child.error.store(error, Ordering::Release),
        Some(pipe) => {
            let _who_waits_reads_it = rustix::io::write(pipe, &error.to_ne_bytes());
        }
    }
    NOT_EXECUTED
}

/// Prepares the child and executes the program; returns the reason if it is not executed.
fn execute(Start { child, argv, env }: &Start<'_>) -> io::Error {
    let prepare = || {
        for (to, from) in (0..).zip(child.streams) {
            // SAFETY: replaces a descriptor of the child, whose table of descriptors is its own.
            if unsafe { libc::dup2(from.as_raw_fd(), to) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        unblock_signals()?;
        // The agent ignores it, and a program would inherit that.
        // SAFETY: sets a default in the child, whose table of handlers is its own.
        if unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
        (child.setup)()
    };
    match prepare() {
        Err(error) => error,
        Ok(()) => {
            // SAFETY: the path and both lists are complete, and end with a null byte and a null pointer.
            unsafe { libc::execve(child.path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
            io::Error::last_os_error()
        }
    }
}

/// Unblocks all signals, because the runtime's mask must not leak. For use between fork and exec.
fn unblock_signals() -> io::Result<()> {
    // SAFETY: an all-zero sigset_t is a valid object for sigemptyset to fill; both calls are async-signal-safe.
    let result = unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
