//! Cloud disk image for tests: Debian with systemd and cloud-init, which boots by BIOS and by UEFI.
//!
//! ```text
//! mmdebstrap ─▶ root.tar ─▶ ext4 ┐
//! grub-mkimage in it ─▶ FAT ─────┼─▶ partition table ─▶ <tools>/system/<hash>/debian.qcow2
//!                    ─▶ first half, second half of GRUB ┘
//! ```

use std::fs::{self, File};
use std::io::{Read, Write as _};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{apt_sources, hash, link, log_file};
use crate::progress::{logged, step};
use crate::run;

/// Version of the image format: raise it when the image is built in another way.
const FORMAT: &[u8] = b"1";
const SUITE: &str = "bookworm";
const PACKAGES: &str = "systemd-sysv,udev,cloud-init,cloud-guest-utils,linux-image-cloud-amd64,initramfs-tools,\
    grub-pc-bin,grub-efi-amd64-bin,grub-common,iproute2,netplan.io,e2fsprogs,openssh-server";
/// Commands that set up the image; `$1` is its root.
const HOOKS: [&str; 7] = [
    "echo 'LABEL=cloudroot / ext4 rw 0 1' > \"$1/etc/fstab\"",
    "chroot \"$1\" systemctl enable systemd-networkd",
    "printf 'datasource_list: [NoCloud, None]\\nssh_genkeytypes: [ed25519]\\n' > \"$1/etc/cloud/cloud.cfg.d/90_local.cfg\"",
    "sed -i s/MODULES=most/MODULES=list/ \"$1/etc/initramfs-tools/initramfs.conf\"; \
     printf 'virtio_pci\\nvirtio_blk\\next4\\n' > \"$1/etc/initramfs-tools/modules\"; chroot \"$1\" update-initramfs -u",
    "rm -f \"$1\"/etc/ssh/ssh_host_* \"$1/etc/machine-id\"; : > \"$1/etc/machine-id\"",
    "chroot \"$1\" grub-mkimage -O x86_64-efi -o /boot/BOOTX64.EFI -p '(hd0,gpt3)/boot/grub' \
     part_gpt fat ext2 linux normal serial configfile",
    "chroot \"$1\" grub-mkimage -O i386-pc -o /boot/core.img -p '(hd0,gpt3)/boot/grub' \
     biosdisk part_gpt ext2 linux normal serial configfile; cp \"$1/usr/lib/grub/i386-pc/boot.img\" \"$1/boot/\"",
];
/// Directories that are excluded from the packages.
const EXCLUDED: [&str; 4] = ["doc", "man", "locale", "info"];

/// First sectors of the partitions: GRUB's core image, the EFI system partition, the root.
const SECTOR: u64 = 512;
const CORE: u64 = 2048;
const SYSTEM: u64 = 4096;
const ROOT: u64 = 20480;
/// Sizes of the EFI system partition, the root and the whole disk, MiB.
const SYSTEM_MIB: u64 = 8;
const ROOT_MIB: u64 = 1000;
const DISK_MIB: u64 = 1012;

/// Makes the image if it is missing, and points `<tools>/system/current` at its directory.
pub(super) fn ensure(tools: &Path) -> Result<()> {
    let parts: Vec<&[u8]> = HOOKS
        .iter()
        .map(|hook| hook.as_bytes())
        .chain([FORMAT, SUITE.as_bytes(), PACKAGES.as_bytes()])
        .collect();
    let target = tools.join("system").join(hash(&parts));
    if !target.join("debian.qcow2").is_file() {
        let work = tools.join("system").join(format!("partial-{}", std::process::id()));
        let _ = fs::remove_dir_all(&work);
        fs::create_dir_all(&work)?;
        let built = step("building a Debian disk image", Some(Duration::from_secs(180)), |_| {
            build(&work, &log_file(tools, "system-image"))
        });
        if built.is_ok() {
            fs::create_dir_all(&target)?;
            fs::rename(work.join("debian.qcow2"), target.join("debian.qcow2"))?;
        }
        fs::remove_dir_all(&work)?;
        built?;
    }
    link(&target, &tools.join("system/current"))
}

fn build(work: &Path, log: &Path) -> Result<()> {
    let (tar, root) = (work.join("root.tar"), work.join("root"));
    let mut bootstrap = Command::new("mmdebstrap");
    bootstrap.args(["--quiet", "--variant=minbase", "--include", PACKAGES]);
    bootstrap.args(EXCLUDED.map(|dir| format!("--dpkgopt=path-exclude=/usr/share/{dir}/*")));
    for hook in HOOKS {
        bootstrap.args(["--customize-hook", hook]);
    }
    logged(bootstrap.arg(SUITE).arg(&tar).args(apt_sources()), log)?;
    fs::create_dir(&root)?;
    // udev creates the device nodes when the image boots.
    run(Command::new("tar").args(["-C"]).arg(&root).args(["--exclude=./dev/*", "-xf"]).arg(&tar))?;
    fs::remove_file(&tar)?;
    menu(&root)?;
    let disk = work.join("disk.raw");
    partitions(&disk)?;
    boot_loader(&root.join("boot"), &disk)?;
    let ext4 = work.join("root.ext4");
    File::create(&ext4)?.set_len(ROOT_MIB << 20)?;
    run(Command::new("mke2fs").args(["-q", "-t", "ext4", "-L", "cloudroot", "-d"]).arg(&root).arg(&ext4))?;
    copy_into(&ext4, &disk, ROOT * SECTOR)?;
    let system = work.join("system.fat");
    File::create(&system)?.set_len(SYSTEM_MIB << 20)?;
    run(Command::new("mkfs.vfat").arg(&system).stdout(Stdio::null()))?;
    run(Command::new("mmd").arg("-i").arg(&system).args(["::/EFI", "::/EFI/BOOT"]))?;
    run(Command::new("mcopy").arg("-i").arg(&system).arg(root.join("boot/BOOTX64.EFI")).arg("::/EFI/BOOT/"))?;
    copy_into(&system, &disk, SYSTEM * SECTOR)?;
    let compressed = work.join("debian.qcow2");
    run(Command::new("qemu-img").args(["convert", "-c", "-O", "qcow2"]).arg(&disk).arg(compressed))
}

/// Writes GRUB's configuration, which boots the only kernel without a menu.
fn menu(root: &Path) -> Result<()> {
    let boot = root.join("boot");
    let named = |start: &str| -> Result<String> {
        let names = fs::read_dir(&boot)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter(|name| name.starts_with(start))
            .max()
            .with_context(|| format!("the image has no {start}"))
    };
    let (kernel, initrd) = (named("vmlinuz-")?, named("initrd.img-")?);
    fs::create_dir_all(boot.join("grub"))?;
    let text = format!(
        "serial --unit=0\nterminal_output serial\nlinux /boot/{kernel} root=LABEL=cloudroot ro console=ttyS0 quiet\n\
         initrd /boot/{initrd}\nboot\n"
    );
    fs::write(boot.join("grub/grub.cfg"), text).context("write GRUB's menu")
}

fn partitions(disk: &Path) -> Result<()> {
    File::create(disk)?.set_len(DISK_MIB << 20)?;
    let mut table = Command::new("sfdisk").arg("--quiet").arg(disk).stdin(Stdio::piped()).spawn()?;
    let text = format!(
        "label: gpt\n\
         start={CORE}, size=2048, type=21686148-6449-6E6F-744E-656564454649\n\
         start={SYSTEM}, size={}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B\n\
         start={ROOT}, type=0FC63DAF-8483-4772-8E79-3D69D8477DE4\n",
        (SYSTEM_MIB << 20) / SECTOR
    );
    table.stdin.take().context("sfdisk's input")?.write_all(text.as_bytes())?;
    ensure!(table.wait()?.success(), "sfdisk failed");
    Ok(())
}

/// Writes GRUB's boot image to the first sector, the core image behind it, and patches the sector where each continues (GNU
/// GRUB, `boot.S`, `diskboot.S`: the kernel's sector at 0x5c; the last block list of the first sector at 0x1f4).
fn boot_loader(boot: &Path, disk: &Path) -> Result<()> {
    let (first, mut core) = (fs::read(boot.join("boot.img"))?, fs::read(boot.join("core.img"))?);
    let disk = File::options().read(true).write(true).open(disk)?;
    let mut sector = [0; 512];
    disk.read_exact_at(&mut sector, 0)?;
    put(&mut sector, 0, first.get(..440).context("boot.img is short")?)?;
    // Replaces the jump that tests for a floppy disk.
    put(&mut sector, 0x66, &[0x90, 0x90])?;
    put(&mut sector, 0x5c, &CORE.to_le_bytes())?;
    disk.write_all_at(&sector, 0)?;
    put(&mut core, 0x1f4, &(CORE + 1).to_le_bytes())?;
    disk.write_all_at(&core, CORE * SECTOR).context("write GRUB's second half")
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) -> Result<()> {
    bytes.get_mut(at..at + value.len()).context("GRUB's image is short")?.copy_from_slice(value);
    Ok(())
}

/// Copies a file into another at an offset; zeros stay holes.
fn copy_into(from: &Path, to: &Path, mut at: u64) -> Result<()> {
    let (mut from, to) = (File::open(from)?, File::options().write(true).open(to)?);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = from.read(&mut buffer)?;
        let Some(part) = buffer.get(..read).filter(|part| !part.is_empty()) else { return Ok(()) };
        if part.iter().any(|byte| *byte != 0) {
            to.write_all_at(part, at)?;
        }
        at += u64::try_from(read)?;
    }
}
