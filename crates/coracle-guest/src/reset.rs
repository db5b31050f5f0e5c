//! Reset: a machine that was configured is as it was before, to be configured as another.

use std::collections::HashSet;
use std::ffi::OsString;

use crate::error::Error;
use crate::sys::IfValue;
use crate::{base_mounts, mounts, net};

/// What a machine was when its disk was prepared.
#[derive(Debug)]
pub(crate) struct Before {
    hostname: Vec<u8>,
    hardware: Option<IfValue>,
    upper: HashSet<OsString>,
}

impl Before {
    /// Looks at the machine; blocking.
    ///
    /// # Errors
    /// When its NIC or its disk cannot be read.
    pub(crate) fn look() -> Result<Self, Error> {
        Ok(Self {
            hostname: rustix::system::uname().nodename().to_bytes().to_owned(),
            hardware: net::hardware()?,
            upper: mounts::in_upper().map_err(Error::io("list the disk"))?,
        })
    }

    /// Takes the root of a workload apart, and forgets who the machine was; blocking.
    ///
    /// # Errors
    /// When the kernel refuses: the machine is of no use then.
    pub(crate) fn restore(&self) -> Result<(), Error> {
        mounts::undo_root(&self.upper).map_err(Error::io("take the root apart"))?;
        self.forget()
    }

    /// As [`Before::restore`], of a machine for containers that has none.
    ///
    /// # Errors
    /// As [`Before::restore`].
    pub(crate) fn restore_sandbox(&self) -> Result<(), Error> {
        mounts::undo_sandbox().map_err(Error::io("take the sandbox apart"))?;
        self.forget()
    }

    fn forget(&self) -> Result<(), Error> {
        self.hardware.map_or(Ok(()), net::forget)?;
        rustix::system::sethostname(&self.hostname).map_err(Error::io("set the host name"))?;
        base_mounts::prepare()
    }
}
