//! What a VM prints, kept on disk within a bound.
//!
//! The serial console is a ring of the last bytes ([`ConsoleHandle`]); the output of the workload is a log of entries with
//! time and offset ([`LogWriter`], [`LogReader`]), and that of a container a file in CRI format ([`CriLog`], read by
//! [`CriLogReader`]).

mod console;
mod cri;
mod cri_reader;
mod ring;
mod workload;

pub use console::{ConsoleHandle, ConsoleInput, pump};
pub use cri::CriLog;
pub use cri_reader::{CriLogFollower, CriLogReader, LogQuery};
pub use workload::{LogEntry, LogReader, LogStream, LogWriter};
