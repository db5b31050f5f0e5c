//! Exits of processes on the wire.

use coracle_proto::guest::ExitStatus;
use coracle_spawn::Exit;

/// Exit of a process, as a message.
pub(crate) fn exit_status(Exit { code, signal, error }: Exit) -> ExitStatus {
    ExitStatus { code, signal, error }
}
