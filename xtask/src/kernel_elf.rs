//! Extracts the kernel from a bzImage, as the ELF file that Firecracker boots (Linux Documentation/arch/x86/boot.rst).

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Offset of the number of 512-byte sectors before the payload; a value of 0 means 4.
const SETUP_SECTORS: usize = 0x1f1;
/// Offset of the boot protocol's magic, which its version follows.
const MAGIC: usize = 0x202;
/// First protocol version with the location of the payload.
const VERSION_MIN: u16 = 0x0208;
/// Offsets of the payload's position after the sectors, and of its length.
const PAYLOAD: (usize, usize) = (0x248, 0x24c);
/// Size of the unpacked size, which some compressors' payloads have at the end.
const SIZE_BYTES: usize = 4;

/// Compression formats: magic of the payload, program that unpacks it, and whether the unpacked size follows it.
const PACKED: [(&[u8], &str, bool); 4] = [
    (b"\x02\x21\x4c\x18", "lz4", true),
    (b"\xfd7zXZ", "xz", true),
    (b"\x28\xb5\x2f\xfd", "zstd", true),
    (b"\x1f\x8b\x08", "gzip", false),
];

/// Unpacks `image`, through a file in `scratch`.
pub(crate) fn unpack(
    image: &[u8],
    scratch: &Path,
    run: impl Fn(&mut Command) -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let (program, payload) = payload(image)?;
    let packed = scratch.join("payload");
    fs::write(&packed, payload).with_context(|| format!("write {}", packed.display()))?;
    let elf = run(Command::new(program).arg("-dc").arg(&packed)).context("unpack the kernel's payload")?;
    fs::remove_file(&packed)?;
    ensure!(elf.starts_with(b"\x7fELF"), "the kernel's payload is not an ELF file");
    Ok(elf)
}

/// Returns the program that unpacks the kernel, and the packed kernel.
fn payload(image: &[u8]) -> Result<(&'static str, &[u8])> {
    let byte = |at: usize| image.get(at).copied().context("it is too short for a bzImage");
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("it is too short for a bzImage")?;
        Ok(bytes.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)))
    };
    ensure!(image.get(MAGIC..MAGIC + 4) == Some(b"HdrS"), "not a bzImage");
    let version = u16::from_le_bytes([byte(MAGIC + 4)?, byte(MAGIC + 5)?]);
    ensure!(version >= VERSION_MIN, "its boot protocol {version:#x} does not tell where the kernel is");
    let sectors = match byte(SETUP_SECTORS)? {
        0 => 4,
        n => usize::from(n),
    };
    let start = (sectors + 1) * 512 + word(PAYLOAD.0)?;
    let whole = image.get(start..start + word(PAYLOAD.1)?).context("its payload is cut off")?;
    for (magic, program, has_size) in PACKED {
        if whole.starts_with(magic) {
            let end = whole.len() - if has_size { SIZE_BYTES } else { 0 };
            return Ok((program, whole.get(..end).unwrap_or_default()));
        }
    }
    bail!("its payload is packed in a way that is not known: {:02x?}", whole.get(..4).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * 512 + 16];
        image[SETUP_SECTORS] = 1;
        image[MAGIC..MAGIC + 4].copy_from_slice(b"HdrS");
        image[MAGIC + 4..MAGIC + 6].copy_from_slice(&[0x0f, 0x02]);
        image[PAYLOAD.0] = 16;
        image[PAYLOAD.1] = u8::try_from(payload.len()).unwrap();
        image.extend(payload);
        image
    }

    #[test]
    fn payload_is_found_without_the_trailing_size() {
        let lz4 = image(b"\x02\x21\x4c\x18 packed\x01\x02\x03\x04");
        assert_eq!(payload(&lz4).unwrap(), ("lz4", &b"\x02\x21\x4c\x18 packed"[..]));
        let gzip = image(b"\x1f\x8b\x08 packed");
        assert_eq!(payload(&gzip).unwrap(), ("gzip", &b"\x1f\x8b\x08 packed"[..]));
    }

    #[test]
    fn invalid_bzimage_is_refused() {
        for (why, image) in [
            ("empty", vec![]),
            ("an ELF file", b"\x7fELF".repeat(400)),
            ("an unknown packing", image(b"????????")),
            ("cut off", image(b"\x1f\x8b\x08 packed")[..1045].to_vec()),
        ] {
            assert!(payload(&image).is_err(), "{why}");
        }
    }
}
