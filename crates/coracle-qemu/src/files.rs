//! Files that a VMM inherits open: the VMM needs no permission to open them, and sees no path of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use coracle_hypervisor::{Firmware, MachineType, NicBackend, VmmConfig};
use coracle_net::open_tap;

use crate::argv::{Descriptors, StartMode};

/// Sockets in the `run_dir` of a VMM: monitor, guest channel and serial console.
const SOCKETS: [&str; 3] = ["qmp.sock", "guest.sock", "console.sock"];

/// Open files of a VMM, by kind.
#[derive(Debug)]
pub(crate) struct Files {
    /// Files of disks and firmware variables.
    files: BTreeMap<PathBuf, File>,
    sockets: Vec<(&'static str, UnixListener)>,
    tap: Option<OwnedFd>,
}

impl Files {
    /// Opens the files with which this VMM starts; its sockets accept connections from now on. Blocking.
    ///
    /// # Errors
    /// With the path of the file, or the name of the tap, that cannot be opened.
    pub(crate) fn open(vmm_config: &VmmConfig, mode: StartMode) -> io::Result<Self> {
        let mut files = BTreeMap::new();
        for (path, read_only) in files_at_start(vmm_config, mode) {
            let file =
                File::options().read(true).write(!read_only).open(path).map_err(|e| with_path(e, path))?;
            files.insert(path.to_owned(), file);
        }
        let sockets = SOCKETS.into_iter().map(|name| {
            let path = vmm_config.run_dir.join(name);
            // A stale socket of the previous VMM refuses connections.
            let _absent = std::fs::remove_file(&path);
            UnixListener::bind(&path).map(|socket| (name, socket)).map_err(|e| with_path(e, &path))
        });
        let sockets = sockets.collect::<io::Result<_>>()?;
        let tap = match vmm_config.nic.as_ref().map(|nic| &nic.backend) {
            Some(NicBackend::Tap { name }) if mode.has_network() => {
                Some(open_tap(name).map_err(|e| with_path(e, Path::new(name)))?)
            }
            _ => None,
        };
        Ok(Self { files, sockets, tap })
    }

    /// Returns the descriptor numbers, by which a child finds the files.
    pub(crate) fn descriptors(&self) -> Descriptors {
        Descriptors {
            files: self.files.iter().map(|(path, file)| (path.clone(), file.as_raw_fd())).collect(),
            sockets: self.sockets.iter().map(|(name, socket)| (*name, socket.as_raw_fd())).collect(),
            tap: self.tap.as_ref().map(AsRawFd::as_raw_fd),
        }
    }
}

impl Descriptors {
    /// Returns all descriptor numbers.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = RawFd> {
        let files = self.files.iter().map(|(_, number)| *number);
        files.chain(self.sockets.iter().map(|(_, number)| *number)).chain(self.tap)
    }
}

/// Returns the files that a VMM opens at its start, and whether it only reads them. Pure.
fn files_at_start(vmm_config: &VmmConfig, mode: StartMode) -> Vec<(&Path, bool)> {
    let premounted = vmm_config.slots.premounted();
    let starts_with =
        |slot| mode.has_disks() || (slot == premounted && vmm_config.machine_type == MachineType::Microvm);
    let mut used = Vec::new();
    for disk in vmm_config.disks.iter().filter(|disk| starts_with(disk.slot)) {
        used.push((disk.path.as_path(), disk.read_only));
        used.extend(disk.backing.as_deref().map(|backing| (backing, true)));
    }
    if let MachineType::Q35(Firmware::Uefi { variables, .. }) = &vmm_config.machine_type {
        used.push((variables, false));
    }
    used
}

fn with_path(error: io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
