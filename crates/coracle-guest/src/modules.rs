//! Kernel modules of the initramfs, in the order of its list.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use rustix::io::Errno;

use crate::console::say;

/// Boot modules: one file name of [`DIR`] per line.
const LIST: &str = "/modules.list";
/// Like [`LIST`], for VMs with a vsock.
const VSOCK_LIST: &str = "/modules.vsock.list";
/// Modules that are loaded on demand, one per line: its name, and its files in the order of [`LIST`].
const ON_DEMAND: &str = "/modules.on-demand.list";
/// Prefix of the kernel's name for the module of a kind of network interface (rtnetlink(7), `MODULE_ALIAS_RTNL_LINK`).
const LINK_KIND: &str = "rtnl-link-";
/// Devices of the virtio bus, and the device id of a vsock (virtio 1.2, 5.10 "Socket Device").
const VIRTIO: &str = "/sys/bus/virtio/devices";
const VSOCK: &str = "0x0013";
const DIR: &str = "/modules";

/// Loads all boot modules. A failure is logged, and causes an error later where the module is needed.
pub(crate) fn load() {
    load_list(LIST);
    if has_vsock() {
        load_list(VSOCK_LIST);
    }
}

/// Whether the VM has a vsock.
pub(crate) fn has_vsock() -> bool {
    let devices = std::fs::read_dir(VIRTIO).into_iter().flatten().flatten();
    let kind = |device: &Path| std::fs::read_to_string(device.join("device")).unwrap_or_default();
    devices.into_iter().any(|device| kind(&device.path()).trim() == VSOCK)
}

/// Loads a module on demand. The kernel runs this program as `/sbin/modprobe -q -- NAME` when a container needs a module that
/// is not loaded, as for a bridge. Modules that the initramfs does not list are refused.
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

/// Loads the module in a file of [`DIR`]. `Ok` if it is loaded already.
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
    fn on_demand_modules_are_found_by_kernel_alias() {
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
