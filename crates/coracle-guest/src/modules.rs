//! Kernel modules of the initramfs, in the order of its list.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use rustix::io::Errno;

use crate::console::say;

/// One file name of [`DIR`] a line.
const LIST: &str = "/modules.list";
/// As [`LIST`], for machines with a vsock.
const VSOCK_LIST: &str = "/modules.vsock.list";
/// A line for each module that is loaded when it is needed: its name, and its files in the order of [`LIST`].
const ON_DEMAND: &str = "/modules.on-demand.list";
/// Begins the kernel's name for the module of a kind of network interface (rtnetlink(7), `MODULE_ALIAS_RTNL_LINK`).
const LINK_KIND: &str = "rtnl-link-";
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

/// The program that the kernel runs as `/sbin/modprobe -q -- NAME` when a container asks for a part of it that is not loaded,
/// as for a bridge. Modules that the initramfs does not list are refused.
pub fn modprobe(wanted: &str) -> ExitCode {
    let list = std::fs::read_to_string(ON_DEMAND).unwrap_or_default();
    let Some(files) = files_of(&list, wanted) else { return ExitCode::FAILURE };
    let failed = files.split(' ').any(|name| insert(name).is_err());
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn files_of<'a>(list: &'a str, wanted: &str) -> Option<&'a str> {
    let wanted = wanted.strip_prefix(LINK_KIND).unwrap_or(wanted);
    let mut lines = list.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(name, _)| *name == wanted).map(|(_, files)| files)
}

fn load_list(list: &str) {
    let list = std::fs::read_to_string(list).unwrap_or_default();
    for name in list.lines().map(str::trim).filter(|l| !l.is_empty()) {
        if let Err(e) = insert(name) {
            say!("module {name}: {e}");
        }
    }
}

/// Loads the module of a file of [`DIR`]; `Ok` when it is loaded already.
fn insert(name: &str) -> io::Result<()> {
    match rustix::system::finit_module(File::open(Path::new(DIR).join(name))?, c"", 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_on_demand_are_found_by_the_kernels_names() {
        let list = "bridge llc.ko stp.ko bridge.ko\ndummy dummy.ko\n";
        for (wanted, want) in [
            ("bridge", Some("llc.ko stp.ko bridge.ko")),
            ("rtnl-link-dummy", Some("dummy.ko")),
            ("dummy.ko", None),
            ("net-pf-10", None),
            ("", None),
        ] {
            assert_eq!(files_of(list, wanted), want, "{wanted}");
        }
    }
}
