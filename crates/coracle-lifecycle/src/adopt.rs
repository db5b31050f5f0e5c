//! Adoption of VMs after a restart of the daemon, from record and process table. Pure.

use coracle_types::VmState;

/// Action for a VM that was found on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Adoption {
    /// The creation was never acknowledged: remove every trace of the VM.
    Discard,
    /// A deletion was interrupted: finish it.
    FinishDelete,
    /// No VMM is expected: keep the VM as recorded.
    Keep,
    /// Connect to the running VMM.
    Attach,
    /// A save of the memory was interrupted: continue the guest.
    ResumeGuest,
    /// An acknowledged start was interrupted: end a running VMM, and start again.
    Start,
    /// An acknowledged stop was interrupted: finish it.
    FinishStop,
    /// The VMM ended while the daemon was down.
    Lost,
    /// A VMM runs although the record does not ask for one: end it.
    EndUnrecorded,
}

/// VMM found in the process table, compared with the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundVmm {
    /// No VMM.
    Nothing,
    /// A VMM that the record does not name, so the record says nothing about it.
    Unrecorded,
    /// The VMM that the record names.
    Known,
}

/// Decides the adoption. `saved`: the memory is in a file, and no guest has continued from it.
pub(crate) fn adopt(state: VmState, seen: FoundVmm, saved: bool) -> Adoption {
    use VmState::{
        Created, Creating, Deleting, Failed, Hibernated, Hibernating, Paused, Running, Starting, Stopped,
        Stopping,
    };
    let running = seen != FoundVmm::Nothing;
    match (state, running) {
        (Creating, _) => Adoption::Discard,
        (Deleting, _) => Adoption::FinishDelete,
        (Created | Stopped | Failed | Hibernated, false) => Adoption::Keep,
        (Created | Stopped | Failed | Hibernated, true) => Adoption::EndUnrecorded,
        (Starting, true) if saved || seen == FoundVmm::Unrecorded => Adoption::Start,
        (Starting | Running | Paused, true) => Adoption::Attach,
        (Starting, false) => Adoption::Start,
        (Hibernating, true) => Adoption::ResumeGuest,
        (Running | Paused | Hibernating, false) => Adoption::Lost,
        (Stopping, _) => Adoption::FinishStop,
    }
}

#[cfg(test)]
mod tests {
    use VmState::{
        Created, Creating, Deleting, Failed, Hibernated, Hibernating, Paused, Running, Starting, Stopped,
        Stopping,
    };

    use super::*;

    #[test]
    fn adoption_table() {
        for (why, state, running, want) in [
            ("the caller never heard of it", Creating, false, Adoption::Discard),
            ("nothing was started", Created, false, Adoption::Keep),
            ("it boots, and continues", Starting, true, Adoption::Attach),
            ("cut off before spawn", Starting, false, Adoption::Start),
            ("the usual case", Running, true, Adoption::Attach),
            ("it died while the daemon was down", Running, false, Adoption::Lost),
            ("it is paused, and watched again", Paused, true, Adoption::Attach),
            ("a paused VMM can die, too", Paused, false, Adoption::Lost),
            ("a save that was cut off is undone", Hibernating, true, Adoption::ResumeGuest),
            ("the VMM died while it was saved", Hibernating, false, Adoption::Lost),
            ("its memory is on disk", Hibernated, false, Adoption::Keep),
            ("cut off before its VMM was ended", Hibernated, true, Adoption::EndUnrecorded),
            ("a stop is a promise", Stopping, true, Adoption::FinishStop),
            ("the guest went while we were away", Stopping, false, Adoption::FinishStop),
            ("nothing to do", Stopped, false, Adoption::Keep),
            ("two VMMs must never meet", Stopped, true, Adoption::EndUnrecorded),
            ("a failed VM has no VMM", Failed, true, Adoption::EndUnrecorded),
            ("a delete is a promise", Deleting, true, Adoption::FinishDelete),
        ] {
            let seen = if running { FoundVmm::Known } else { FoundVmm::Nothing };
            assert_eq!(adopt(state, seen, false), want, "{why}");
        }
        assert_eq!(
            adopt(Starting, FoundVmm::Known, true),
            Adoption::Start,
            "cut off while loading: load again"
        );
        assert_eq!(adopt(Starting, FoundVmm::Nothing, true), Adoption::Start, "cut off before loading");
        assert_eq!(
            adopt(Starting, FoundVmm::Unrecorded, false),
            Adoption::Start,
            "cut off between spawn and record"
        );
        assert_eq!(adopt(Running, FoundVmm::Unrecorded, false), Adoption::Attach, "its record may be behind");
    }
}
