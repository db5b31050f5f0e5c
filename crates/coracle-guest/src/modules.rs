//! Kernel modules of the initramfs, in the order of its list.

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;

use crate::console::say;

/// One file name of [`DIR`] a line.
const LIST: &str = "/modules.list";
/// As [`LIST`], for machines with a vsock.
const VSOCK_LIST: &str = "/modules.vsock.list";
/// Devices of the virtio bus, and what one says that is a vsock (virtio 1.2, 5.10 "Socket Device").
const VIRTIO: &str = "/sys/bus/virtio/devices";
const VSOCK: &str = "0x0013";
const DIR: &str = "/modules";

/// Loads every listed module; what is missing is said, and shows again where it is needed.
pub(crate) fn load() {
    load_list(LIST);
    if has_vsock() {
        load_list(VSOCK_LIST);
    }
}

/// The machine has a vsock.
pub(crate) fn has_vsock() -> bool {
    let devices = std::fs::read_dir(VIRTIO).into_iter().flatten().flatten();
    let kind = |device: &Path| std::fs::read_to_string(device.join("device")).unwrap_or_default();
    devices.into_iter().any(|device| kind(&device.path()).trim() == VSOCK)
}

fn load_list(list: &str) {
    let list = std::fs::read_to_string(list).unwrap_or_default();
    for name in list.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let loaded = File::open(Path::new(DIR).join(name))
            .and_then(|file| Ok(rustix::system::finit_module(file, c"", 0)?));
        match loaded {
            Err(e) if e.raw_os_error() != Some(Errno::EXIST.raw_os_error()) => say!("module {name}: {e}"),
            _ => {}
        }
    }
}
