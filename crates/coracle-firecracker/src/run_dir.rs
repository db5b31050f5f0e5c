//! Working directory of a process without a jail: the names that the process opens, and the files behind them.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::Path;

use coracle_hypervisor::{Disk, VmmConfig};
use rustix::fs::Mode;

use crate::calls::{GUEST_SOCKET, slot_path};

/// Control socket.
pub(crate) const API_SOCKET: &str = "api.sock";
/// FIFOs of the guest's serial console, for input and output.
pub(crate) const CONSOLE: [&str; 2] = ["console.in", "console.out"];
/// File behind an empty slot: sparse, with the size of an empty slot.
const EMPTY: &str = "empty";
/// Size by which the guest recognises an empty slot, bytes.
pub(crate) const EMPTY_BYTES: u64 = 1 << 40;

/// Prepares the `run_dir` of a process that is about to start: removes the files of the previous process, and links every slot
/// to its disk. Blocking, idempotent.
pub(crate) fn prepare(vmm_config: &VmmConfig, filled: bool) -> io::Result<()> {
    let run_dir = &vmm_config.run_dir;
    for socket in [API_SOCKET, GUEST_SOCKET] {
        remove(&run_dir.join(socket))?;
    }
    File::create(run_dir.join(EMPTY))?.set_len(EMPTY_BYTES)?;
    for slot in 0..vmm_config.slots.total() {
        fill(run_dir, slot, vmm_config.disk_in(slot).filter(|_| filled))?;
    }
    prepare_console(run_dir)
}

/// Creates the FIFOs of the serial console anew, which the process inherits open. Blocking, idempotent.
pub(crate) fn prepare_console(run_dir: &Path) -> io::Result<()> {
    for name in CONSOLE {
        let fifo = run_dir.join(name);
        remove(&fifo)?;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    }
    Ok(())
}

/// Links a slot to its disk, or to the empty file.
pub(crate) fn fill(run_dir: &Path, slot: usize, disk: Option<&Disk>) -> io::Result<()> {
    let link = run_dir.join(slot_path(slot));
    remove(&link)?;
    symlink(disk.map_or(Path::new(EMPTY), |disk| disk.path.as_path()), link)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use coracle_hypervisor::{Accelerator, Slots};
    use coracle_types::VmId;

    use super::*;

    #[test]
    fn slot_links_to_its_disk_or_to_the_empty_file() {
        let dir = tempfile::tempdir().unwrap();
        let vmm_config = VmmConfig {
            id: VmId::of_name(&"web".parse().unwrap()).into(),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: "/k".into(),
            initrd: "/i".into(),
            disks: vec![Disk::raw(1, "/disks/overlay", false)],
            slots: Slots { read_only: 1, writable: 1 },
            machine_type: Default::default(),
            nic: None,
            display: None,
            state_dir: dir.path().into(),
            run_dir: dir.path().into(),
            accelerator: Accelerator::Kvm,
            driver: String::new(),
            uid: None,
        };
        for filled in [false, true, true] {
            prepare(&vmm_config, filled).unwrap();
            let [empty, disk] = ["slot0", "slot1"].map(|s| fs::read_link(dir.path().join(s)).unwrap());
            assert_eq!(empty, Path::new("empty"));
            assert_eq!(disk, Path::new(if filled { "/disks/overlay" } else { "empty" }));
        }
        assert_eq!(fs::metadata(dir.path().join("slot0")).unwrap().len(), EMPTY_BYTES);
    }
}
