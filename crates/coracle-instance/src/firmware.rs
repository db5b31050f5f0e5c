//! Firmware of a disk image VM: BIOS, or UEFI if a BIOS cannot boot the image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::{BootFirmware, HostError};

/// UEFI code and empty UEFI variables, at the paths of distributions.
const UEFI: [(&str, &str); 3] = [
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
];

/// Returns UEFI code and empty variables of this host; `None`: not installed at a path of the distributions.
#[must_use]
pub fn uefi() -> Option<(PathBuf, PathBuf)> {
    let found =
        UEFI.iter().find(|(code, variables)| Path::new(code).is_file() && Path::new(variables).is_file());
    found.map(|(code, variables)| (code.into(), variables.into()))
}

/// Chooses the firmware for an image: the requested one, or one that can boot the image. The firmware is installed.
///
/// # Errors
/// [`HostError::Invalid`] if UEFI is needed and not installed; [`HostError::State`] when the image cannot be read.
pub fn choose(request: Option<BootFirmware>, image: &Path) -> Result<BootFirmware, HostError> {
    let state = |source| HostError::State { operation: format!("read {}", image.display()), source };
    let firmware = match request {
        Some(request) => request,
        None => required_firmware(&Head::read(image).map_err(state)?),
    };
    if firmware == BootFirmware::Uefi && uefi().is_none() {
        let message = "the image starts by UEFI, and this node has no firmware for it: install Debian's ovmf"
            .to_owned();
        return Err(HostError::Invalid { message });
    }
    Ok(firmware)
}

/// Size of a sector, bytes.
const SECTOR: usize = 512;
/// Size of the sectors that hold a GPT: the two before the entries, and 128 entries of 128 bytes.
const HEAD: usize = 34 * SECTOR;
/// Partition type GUIDs, as stored on disk (UEFI 2.10, 5.3.3; GNU GRUB, "BIOS installation").
const EFI_SYSTEM: [u8; 16] =
    [0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b];
const BIOS_BOOT: [u8; 16] = *b"Hah!IdontNeedEFI";
/// Partition type of an EFI system partition in an MBR.
const OLD_EFI_SYSTEM: u8 = 0xef;

/// Boot properties read from the first sectors of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Head {
    /// The first sector contains a boot program.
    program: bool,
    /// The partition table is a GPT.
    gpt: bool,
    /// The disk has a BIOS boot partition, for the second stage of the boot program.
    bios_boot: bool,
    efi_system: bool,
}

impl Head {
    fn read(image: &Path) -> io::Result<Self> {
        let mut bytes = vec![0; HEAD];
        let read = File::open(image)?.read_at(&mut bytes, 0)?;
        bytes.truncate(read);
        Ok(Self::parse(&bytes))
    }

    fn parse(bytes: &[u8]) -> Self {
        let part = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default();
        let marked = part(510, 512) == [0x55, 0xaa];
        let gpt = part(SECTOR, SECTOR + 8) == b"EFI PART";
        let kinds =
            bytes.get(2 * SECTOR..).unwrap_or_default().chunks(128).filter_map(|entry| entry.get(..16));
        let has = |kind: &[u8]| gpt && kinds.clone().any(|found| found == kind);
        let old = part(446, 510).chunks(16).any(|entry| entry.get(4) == Some(&OLD_EFI_SYSTEM));
        Self {
            program: marked && part(0, 440).iter().any(|byte| *byte != 0),
            gpt,
            bios_boot: has(&BIOS_BOOT),
            efi_system: has(&EFI_SYSTEM) || (marked && !gpt && old),
        }
    }
}

/// Returns UEFI only if a BIOS cannot boot the disk, because UEFI takes seconds longer.
fn required_firmware(head: &Head) -> BootFirmware {
    let bios = head.program && (!head.gpt || head.bios_boot || !head.efi_system);
    if head.efi_system && !bios { BootFirmware::Uefi } else { BootFirmware::Bios }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(program: bool, gpt: Option<&[[u8; 16]]>, old: u8) -> Vec<u8> {
        let mut bytes = vec![0; HEAD];
        bytes[0] = u8::from(program);
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        bytes[450] = old;
        if let Some(partitions) = gpt {
            bytes[SECTOR..SECTOR + 8].copy_from_slice(b"EFI PART");
            for (entry, kind) in bytes[2 * SECTOR..].chunks_mut(128).zip(partitions) {
                entry[..16].copy_from_slice(kind);
            }
        }
        bytes
    }

    #[test]
    fn uefi_is_chosen_only_if_bios_cannot_boot() {
        use BootFirmware::{Bios, Uefi};
        const ROOT: [u8; 16] = [9; 16];
        let both: &[_] = &[BIOS_BOOT, EFI_SYSTEM, ROOT];
        let efi: &[_] = &[EFI_SYSTEM, ROOT];
        let root: &[_] = &[ROOT];
        for (what, bytes, want) in [
            ("old table, boot loader", disk(true, None, 0x83), Bios),
            ("old table, system partition, nothing in the first sector", disk(false, None, 0xef), Uefi),
            ("old table, both", disk(true, None, 0xef), Bios),
            ("cloud image for both", disk(true, Some(both), 0xee), Bios),
            ("cloud image for UEFI", disk(false, Some(efi), 0xee), Uefi),
            ("for UEFI, with a message for a BIOS in the first sector", disk(true, Some(efi), 0xee), Uefi),
            ("for a BIOS by name, without room", disk(true, Some(root), 0xee), Bios),
            ("no table at all", vec![0; HEAD], Bios),
            ("tiny", vec![0; 100], Bios),
        ] {
            assert_eq!(required_firmware(&Head::parse(&bytes)), want, "{what}");
        }
    }
}
