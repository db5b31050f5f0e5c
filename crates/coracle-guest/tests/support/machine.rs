//! Real VM: QEMU with the guest image, under emulation.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use coracle_hypervisor::KERNEL_PARAMETERS;
use coracle_image::warmup_rootfs;
use coracle_testkit::eventually_blocking;

/// Running VM; killed when dropped.
pub(crate) struct Machine {
    qemu: Child,
    dir: tempfile::TempDir,
    pub(crate) started: Instant,
}

impl Machine {
    /// Boots a VM with a busybox image and an empty overlay disk. `None`, with a printed reason, if that is impossible.
    pub(crate) fn boot() -> Result<Option<Self>> {
        Self::boot_with("")
    }

    /// Like [`Machine::boot`], with additional kernel parameters.
    pub(crate) fn boot_with(words: &str) -> Result<Option<Self>> {
        let guest = guest_image()?;
        if let Some(missing) = missing(&guest) {
            ensure!(std::env::var("CI").as_deref() != Ok("true"), "{missing}");
            eprintln!("skipped: {missing}");
            return Ok(None);
        }
        let dir = tempfile::tempdir()?;
        image(dir.path())?;
        warmup_rootfs(&guest.join("agent"), &dir.path().join("warm-up.erofs"))?;
        let mut command = Command::new("qemu-system-x86_64");
        command.args(arguments(&guest, dir.path(), words)?).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(fs::File::create(dir.path().join("qemu.log"))?);
        let started = Instant::now();
        let qemu = command.spawn()?;
        let mut machine = Self { qemu, dir, started };
        let listening = eventually_blocking(Duration::from_secs(10), "QEMU listens or ends", || {
            let has_ended = machine.qemu.try_wait().is_ok_and(|status| status.is_some());
            (has_ended || machine.socket().exists()).then_some(!has_ended)
        });
        ensure!(listening.with_context(|| machine.diagnostics())?, "{}", machine.diagnostics());
        Ok(Some(machine))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("guest.sock")
    }

    /// Output of the console and of QEMU, for the message of a failure.
    pub(crate) fn diagnostics(&self) -> String {
        let read = |name: &str| {
            fs::read(self.dir.path().join(name))
                .map(|b| String::from_utf8_lossy(&b).into_owned())
                .unwrap_or_default()
        };
        format!("console:\n{}\nqemu:\n{}", read("console.log"), read("qemu.log"))
    }

    /// Waits for QEMU to exit by itself.
    pub(crate) fn wait_exit(&mut self, limit: Duration) -> Result<std::process::ExitStatus> {
        let ended = eventually_blocking(limit, "QEMU ends", || self.qemu.try_wait().transpose());
        Ok(ended.with_context(|| self.diagnostics())??)
    }

    /// Whether the guest has announced an address: an ARP request of it for itself (RFC 5227, section 3).
    pub(crate) fn has_announced(&self, mac: [u8; 6], address: [u8; 4]) -> bool {
        let request = [0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1];
        let announcement = [&request[..], &mac, &address, &[0; 6], &address].concat();
        let packets = fs::read(self.dir.path().join("packets")).unwrap_or_default();
        packets.windows(announcement.len()).any(|bytes| bytes == announcement)
    }

    /// Overlay disk, to inspect after the power-off.
    pub(crate) fn overlay(&self) -> PathBuf {
        self.dir.path().join("overlay.ext4")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

pub(crate) fn guest_image() -> Result<PathBuf> {
    let tools = std::env::var_os("CORACLE_TOOLS").map(PathBuf::from);
    let tools =
        tools.or_else(|| Some(std::env::home_dir()?.join(".cache/coracle/tools"))).context("no home")?;
    Ok(tools.join("guest/current"))
}

fn missing(guest: &Path) -> Option<String> {
    if !guest.join("initrd").is_file() {
        return Some(format!("{} is not there: run `cargo xtask guest-image`", guest.display()));
    }
    let needed = [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("mkfs.erofs", "erofs-utils"),
        ("mke2fs", "e2fsprogs"),
        ("busybox", "busybox-static"),
    ];
    let (program, package) = needed.into_iter().find(|(program, _)| find(program).is_none())?;
    Some(format!("{program} is not installed: apt-get install {package}"))
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .chain(["/usr/sbin", "/sbin"])
        .map(|dir| Path::new(dir).join(program))
        .find(|p| p.is_file())
}

/// Command line of a microVM with the image, an overlay disk and the image of a warm-up.
fn arguments(guest: &Path, dir: &Path, words: &str) -> Result<Vec<String>> {
    let at = |name: &str| dir.join(name).display().to_string();
    let kernel_line = format!(
        "console=ttyS0 quiet reboot=t panic=-1 tsc_early_khz={} tsc=reliable no_timer_check \
         {KERNEL_PARAMETERS} {words}",
        tsc_khz()?
    );
    let line = format!(
        "-nodefaults -no-user-config -display none -no-reboot -accel tcg -cpu max -smp 1 -m 128 \
         -M microvm,acpi=on,x-option-roms=off,rtc=on -serial file:{} \
         -blockdev driver=file,node-name=f0,filename={},read-only=on -blockdev driver=raw,node-name=d0,file=f0,read-only=on \
         -device virtio-blk-device,drive=d0,id=disk0 \
         -blockdev driver=file,node-name=f1,filename={} -blockdev driver=raw,node-name=d1,file=f1 \
         -device virtio-blk-device,drive=d1,id=disk1 \
         -blockdev driver=file,node-name=f2,filename={},read-only=on -blockdev driver=raw,node-name=d2,file=f2,read-only=on \
         -device virtio-blk-device,drive=d2,id=disk2 \
         -netdev user,id=n0 -object filter-dump,id=dump,netdev=n0,file={} -device virtio-net-device,netdev=n0,mac=52:54:00:00:00:01,id=nic0 -device virtio-rng-device \
         -device virtio-serial-device -chardev socket,id=guest,path={},server=on,wait=off \
         -device virtserialport,chardev=guest,name={},id=guest",
        at("console.log"),
        at("image.erofs"),
        at("overlay.ext4"),
        at("warm-up.erofs"),
        at("packets"),
        at("guest.sock"),
        coracle_guest::channel::PORT_NAME,
    );
    let mut arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    for (flag, file) in [("-kernel", "vmlinuz"), ("-initrd", "initrd")] {
        arguments.extend([flag.to_owned(), guest.join(file).display().to_string()]);
    }
    arguments.extend(["-append".to_owned(), kernel_line]);
    Ok(arguments)
}

/// Under emulation with ACPI the guest kernel cannot calibrate its clock, which counts at the rate of the host.
fn tsc_khz() -> Result<u64> {
    let info = fs::read_to_string("/proc/cpuinfo")?;
    let mhz =
        info.lines().find_map(|l| l.strip_prefix("cpu MHz")?.split(':').nth(1)?.trim().parse::<f64>().ok());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a clock rate is positive and small"
    )]
    Ok((mhz.context("no cpu MHz in /proc/cpuinfo")? * 1000.0) as u64)
}

/// Makes a busybox image as EROFS, with some traps in it, and an empty ext4 disk.
fn image(dir: &Path) -> Result<()> {
    let root = dir.join("root");
    for shared_dir in ["bin", "etc", "tmp", "srv", "home/web"] {
        fs::create_dir_all(root.join(shared_dir))?;
    }
    fs::copy(find("busybox").context("busybox")?, root.join("bin/busybox"))?;
    for applet in String::from_utf8(Command::new("busybox").arg("--list").output()?.stdout)?
        .lines()
        .filter(|a| *a != "busybox")
    {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nweb:x:1000:1000::/home/web:/bin/sh\n",
    )?;
    fs::write(root.join("etc/group"), "root:x:0:\nweb:x:1000:\nlogs:x:40:web\n")?;
    fs::write(root.join("etc/noexec"), "data")?;
    symlink("/../../../run/coracle/escaped", root.join("etc/resolv.conf"))?;
    tool(Command::new(find("mkfs.erofs").context("mkfs.erofs")?).arg(dir.join("image.erofs")).arg(&root))?;
    let overlay = fs::File::create(dir.join("overlay.ext4"))?;
    overlay.set_len(64 << 20)?;
    tool(
        Command::new(find("mke2fs").context("mke2fs")?)
            .args(["-q", "-t", "ext4", "-F"])
            .arg(dir.join("overlay.ext4")),
    )
}

fn tool(command: &mut Command) -> Result<()> {
    let out = command.output()?;
    ensure!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    Ok(())
}
