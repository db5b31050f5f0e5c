//! Reset: restores a guest to its state before it was configured, so that it can be configured for another VM.

use std::collections::HashSet;
use std::ffi::OsString;

use crate::error::Error;
use crate::{base_mounts, mounts, net};

/// State of the guest when its disk was prepared.
#[derive(Debug)]
pub(crate) struct Before {
    hostname: Vec<u8>,
    upper: HashSet<OsString>,
}

impl Before {
    /// Reads the current state; blocking.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub(crate) fn capture() -> Result<Self, Error> {
        Ok(Self {
            hostname: rustix::system::uname().nodename().to_bytes().to_owned(),
            upper: mounts::upper_entries().map_err(Error::io("list the disk"))?,
        })
    }

    /// Unmounts the root of a workload and removes the identity of the guest; blocking.
    ///
    /// # Errors
    /// When the kernel refuses: the guest must not be used any more then.
    pub(crate) fn restore(&self, root: Option<&mounts::Plan>) -> Result<(), Error> {
        root.map_or(Ok(()), |root| mounts::undo_root(root, &self.upper))
            .map_err(Error::io("take the root apart"))?;
        self.forget()
    }

    /// Like [`Before::restore`], for a sandbox without containers.
    ///
    /// # Errors
    /// As for [`Before::restore`].
    pub(crate) fn restore_sandbox(&self) -> Result<(), Error> {
        mounts::undo_sandbox().map_err(Error::io("take the sandbox apart"))?;
        self.forget()
    }

    fn forget(&self) -> Result<(), Error> {
        net::forget()?;
        rustix::system::sethostname(&self.hostname).map_err(Error::io("set the host name"))?;
        if mounts::has_prepared_root() { Ok(()) } else { base_mounts::prepare() }
    }
}
