//! Output of VMs, kept on disk with a bounded size.
//!
//! The serial console is a ring of the last bytes ([`ConsoleHandle`]). The output of the workload is a log of entries with time
//! and offset ([`LogWriter`], [`LogReader`]). The output of a container is a file in the CRI format ([`CriLog`], read by
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
