//! Kernel modules of the initramfs, in the order of its list.

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;

use crate::console::say;

/// One file name of [`DIR`] a line.
const LIST: &str = "/modules.list";
const DIR: &str = "/modules";

/// Loads every listed module; what is missing is said, and shows again where it is needed.
pub(crate) fn load() {
    let list = std::fs::read_to_string(LIST).unwrap_or_default();
    for name in list.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let loaded = File::open(Path::new(DIR).join(name))
            .and_then(|file| Ok(rustix::system::finit_module(file, c"", 0)?));
        match loaded {
            Err(e) if e.raw_os_error() != Some(Errno::EXIST.raw_os_error()) => say!("module {name}: {e}"),
            _ => {}
        }
    }
}
