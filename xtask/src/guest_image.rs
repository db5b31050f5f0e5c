//! Kernel and initramfs of guests: Debian's cloud kernel, and the guest agent as `/init` with the few modules that it loads.
//! The same inputs give the same bytes.
//!
//! ```text
//! <tools>/kernel-<version>/          the unpacked Debian package, kept
//! <tools>/guest/<hash>/vmlinuz,vmlinux,initrd,agent   agent: for the cloud-init seeds of disk image VMs
//! <tools>/guest/current ──▶ <hash>
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use coracle_testkit::tools::tools_dir;

use crate::kernel_elf;
use crate::progress::{self, step};

/// Version of the initramfs layout, part of the hash: raise it when the layout changes.
const FORMAT: u32 = 5;
/// Debian package that depends on the newest cloud kernel.
const KERNEL: &str = "linux-image-cloud-amd64";
/// Modules that the agent loads, in this order, after their dependencies. Built-in ones are left out. `virtio_pci` is for q35,
/// `fuse` for host directories.
const MODULES: [&str; 9] = [
    "virtio_mmio",
    "virtio_pci",
    "virtio_console",
    "virtio_rng",
    "virtio_blk",
    "virtio_net",
    "erofs",
    "overlay",
    "fuse",
];
/// Modules for the guest channel of Firecracker and Cloud Hypervisor, which the agent loads only if the VM has such a device.
const VSOCK_MODULES: [&str; 1] = ["vmw_vsock_virtio_transport"];
/// Modules that the kernel loads on demand, for interfaces that a container with network privileges creates.
const ON_DEMAND_MODULES: [&str; 2] = ["bridge", "dummy"];
/// Kernel options that a guest cannot work without, and that no module could replace.
const BUILT_IN: [&str; 5] =
    ["CONFIG_EXT4_FS", "CONFIG_DEVTMPFS", "CONFIG_TMPFS", "CONFIG_BLK_DEV_INITRD", "CONFIG_PACKET"];
const MUSL: &str = "x86_64-unknown-linux-musl";
const GLIBC: &str = "x86_64-unknown-linux-gnu";

/// `cargo xtask guest-image`: prints the directory that [`ensure()`] returns.
pub(crate) fn run() -> Result<()> {
    let folder = ensure(&tools_dir(), &build_agent()?)?;
    writeln!(std::io::stdout(), "{}", folder.display())?;
    Ok(())
}

/// Makes kernel and initramfs with the guest agent at `agent` if they are missing, and points `<tools>/guest/current` at them.
/// Returns their directory. Idempotent.
pub(crate) fn ensure(tools: &Path, agent: &Path) -> Result<PathBuf> {
    let agent = fs::read(agent).with_context(|| format!("read {}", agent.display()))?;
    let kernel = Kernel::ensure(tools)?;
    let modules = kernel.modules(&MODULES)?;
    let mut vsock = kernel.modules(&VSOCK_MODULES)?;
    vsock.retain(|(name, _)| !modules.iter().any(|(other, _)| other == name));
    let on_demand = ON_DEMAND_MODULES.iter().map(|name| Ok((*name, kernel.modules(&[name])?)));
    let on_demand = on_demand.collect::<Result<Vec<_>>>()?;
    let initrd = initramfs(&agent, &[("modules.list", modules), ("modules.vsock.list", vsock)], &on_demand);

    let mut hash = Sha256::new();
    hash.update(format!("{FORMAT}\n{}\n", kernel.version));
    hash.update(&initrd);
    let hash = hex::encode(hash.finalize());
    let name = hash.get(..16).context("short hash")?;
    let guest = tools.join("guest");
    let folder = guest.join(name);
    if !folder.join("initrd").is_file() {
        let partial = guest.join(format!("{name}.partial-{}", std::process::id()));
        let _ = fs::remove_dir_all(&partial);
        fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
        fs::copy(&kernel.image, partial.join("vmlinuz"))
            .with_context(|| format!("copy {}", kernel.image.display()))?;
        let image = fs::read(&kernel.image).with_context(|| format!("read {}", kernel.image.display()))?;
        let elf = kernel_elf::unpack(&image, &partial, output_bytes)?;
        fs::write(partial.join("vmlinux"), elf).with_context(|| format!("write {}", partial.display()))?;
        fs::write(partial.join("agent"), &agent).with_context(|| format!("write {}", partial.display()))?;
        fs::write(partial.join("initrd"), &initrd).with_context(|| format!("write {}", partial.display()))?;
        if fs::rename(&partial, &folder).is_err() {
            let _ = fs::remove_dir_all(&partial); // another process was faster
            ensure!(folder.join("initrd").is_file(), "rename {} to {}", partial.display(), folder.display());
        }
    }
    let link = guest.join(format!("current.{}", std::process::id()));
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(name, &link).with_context(|| format!("link {}", link.display()))?;
    fs::rename(&link, guest.join("current")).context("point `current` at the new image")?;
    Ok(folder)
}

/// Builds the static guest agent and returns its path. Without the musl target, glibc is linked statically: larger, but
/// equivalent.
pub(crate) fn build_agent() -> Result<PathBuf> {
    let mut build = Command::new("cargo");
    build.args(["build", "--locked", "--package", "coracle-guest", "--profile", "guest"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    if has_musl() {
        build.args(["--target", MUSL]);
    } else {
        build.args(["--target", GLIBC]).env("RUSTFLAGS", "-C target-feature=+crt-static");
    }
    let printed = step("building the guest agent", Some(Duration::from_secs(60)), |meter| {
        meter.expect(progress::packages(&["--package", "coracle-guest", "--edges", "normal,build"])?);
        progress::cargo(&mut build, meter)
    })?;
    let messages = printed.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut executable =
        messages.filter_map(|message| Some(PathBuf::from(message.get("executable")?.as_str()?)));
    executable.next_back().context("cargo built no guest agent")
}

fn has_musl() -> bool {
    let installed = || {
        let sysroot = output(Command::new("rustc").args(["--print", "sysroot"])).ok();
        sysroot.is_some_and(|s| Path::new(s.trim()).join("lib/rustlib").join(MUSL).join("lib").is_dir())
    };
    installed() || (output(Command::new("rustup").args(["target", "add", MUSL])).is_ok() && installed())
}

/// File name and contents of a module.
type Module = (String, Vec<u8>);

/// Unpacked kernel package.
struct Kernel {
    version: String,
    image: PathBuf,
    tree: PathBuf,
}

impl Kernel {
    /// Finds the kernel that apt would install, and downloads and unpacks it unless that was done before.
    fn ensure(tools: &Path) -> Result<Self> {
        let (package, version) = match newest() {
            Ok(found) => found,
            // Without package lists (offline, or another distribution) the last cached kernel is used.
            Err(error) => return Self::any_cached(tools).ok_or(error),
        };
        let folder = tools.join(format!("kernel-{}", version.replace(':', "_")));
        if !folder.is_dir() {
            let partial = tools.join(format!("kernel.partial-{}", std::process::id()));
            let _ = fs::remove_dir_all(&partial);
            fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
            output(Command::new("apt-get").args(["download", &package]).current_dir(&partial))
                .with_context(|| format!("download {package} (try `apt-get update`)"))?;
            let deb =
                find(&partial, &|name| name.ends_with(".deb"))?.context("apt-get downloaded no .deb")?;
            output(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(partial.join("tree")))
                .context("unpack the kernel")?;
            fs::remove_file(&deb)?;
            if fs::rename(partial.join("tree"), &folder).is_err() {
                ensure!(folder.is_dir(), "put the kernel at {}", folder.display());
            }
            let _ = fs::remove_dir_all(&partial);
        }
        Self::open(version, folder)
    }

    fn any_cached(tools: &Path) -> Option<Self> {
        let mut cached: Vec<PathBuf> = fs::read_dir(tools).ok()?.flatten().map(|e| e.path()).collect();
        cached.sort();
        cached.into_iter().rev().find_map(|folder| {
            let version = folder.file_name()?.to_str()?.strip_prefix("kernel-")?.to_owned();
            Self::open(version, folder).ok()
        })
    }

    fn open(version: String, tree: PathBuf) -> Result<Self> {
        let boot = tree.join("boot");
        let image = find(&boot, &|name| name.starts_with("vmlinuz-"))?
            .context("the kernel package has no vmlinuz")?;
        let config =
            find(&boot, &|name| name.starts_with("config-"))?.context("the kernel package has no config")?;
        let config = fs::read_to_string(config)?;
        for option in BUILT_IN {
            ensure!(
                config.lines().any(|l| l == format!("{option}=y")),
                "kernel {version} is without {option}=y"
            );
        }
        ensure!(
            !config.lines().any(|l| l == "CONFIG_MODULE_SIG_FORCE=y"),
            "kernel {version} takes signed modules only"
        );
        Ok(Self { version, image, tree })
    }

    /// Returns the wanted modules and their dependencies in load order: name and contents.
    fn modules(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        let mut files = BTreeMap::new();
        for lib in ["lib/modules", "usr/lib/modules"] {
            walk(&self.tree.join(lib), &mut |path| {
                if let Some(name) = module_name(path) {
                    files.insert(name, path.to_owned());
                }
            })?;
        }
        let builtin: BTreeSet<String> = files_named(&self.tree, "modules.builtin")?
            .iter()
            .flat_map(|f| {
                fs::read_to_string(f)
                    .unwrap_or_default()
                    .lines()
                    .filter_map(|l| module_name(Path::new(l)))
                    .collect::<Vec<_>>()
            })
            .collect();
        let mut loaded = Vec::new();
        for name in wanted {
            add_module(name, &files, &builtin, &mut loaded)?;
        }
        Ok(loaded)
    }
}

/// Returns the package and version of the newest cloud kernel in apt's lists.
fn newest() -> Result<(String, String)> {
    let hint = "this needs Debian's apt with package lists (`apt-get update`)";
    let depends = output(Command::new("apt-cache").args(["depends", "--important", KERNEL])).context(hint)?;
    let package = depends
        .lines()
        .find_map(|l| l.trim().strip_prefix("Depends: "))
        .filter(|p| p.starts_with("linux-image-"));
    let package = package.with_context(|| format!("{KERNEL} names no kernel; {hint}"))?.to_owned();
    let show =
        output(Command::new("apt-cache").args(["show", "--no-all-versions", &package])).context(hint)?;
    let version = show
        .lines()
        .find_map(|l| l.strip_prefix("Version: "))
        .with_context(|| format!("{package} has no version; {hint}"))?;
    Ok((package, version.to_owned()))
}

/// Adds a module after its dependencies, depth first.
fn add_module(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    builtin: &BTreeSet<String>,
    loaded: &mut Vec<Module>,
) -> Result<()> {
    let file = format!("{name}.ko");
    if builtin.contains(name) || loaded.iter().any(|(n, _)| *n == file) {
        return Ok(());
    }
    let path = files.get(name).with_context(|| format!("the kernel has no module {name}"))?;
    let bytes = if path.extension() == Some(OsStr::new("xz")) {
        output_bytes(Command::new("xz").arg("-dc").arg(path)).context("unpack a module")?
    } else {
        fs::read(path).with_context(|| format!("read {}", path.display()))?
    };
    for dependency in dependencies(&bytes).with_context(|| format!("read the dependencies of {name}"))? {
        add_module(&dependency, files, builtin, loaded)?;
    }
    loaded.push((file, unsigned(bytes)));
    Ok(())
}

/// Removes the signature of a module. The kernel does not require one but verifies one that is present, which costs 0.4 s per
/// boot under emulation. The modules are as protected as the rest of the initramfs.
fn unsigned(mut module: Vec<u8>) -> Vec<u8> {
    const MAGIC: &[u8] = b"~Module signature appended~\n";
    // Before the magic: 8 bytes of kinds and lengths, then the signature's size, big-endian.
    let Some(end) = module.strip_suffix(MAGIC).map(<[u8]>::len) else { return module };
    let size = end.checked_sub(4).and_then(|at| module.get(at..end)?.try_into().ok()).map(u32::from_be_bytes);
    let start = size.and_then(|size| end.checked_sub(12)?.checked_sub(usize::try_from(size).ok()?));
    if let Some(start) = start {
        module.truncate(start);
    }
    module
}

/// Returns the module name of a path, `/…/virtio-foo.ko.xz` → `virtio_foo`; `None` for other files.
fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".ko").or_else(|| name.strip_suffix(".ko.xz"))?;
    Some(stem.replace('-', "_"))
}

/// Reads the `depends=` entry of a module's `.modinfo` section (ELF64, little-endian).
fn dependencies(elf: &[u8]) -> Option<Vec<String>> {
    let number = |at: usize, size: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(size)?)?;
        Some(bytes.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)))
    };
    let (table, entry, count, names) =
        (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?, number(0x3e, 2)?);
    let section = |n: usize| -> Option<(usize, &[u8])> {
        let at = table.checked_add(n.checked_mul(entry)?)?;
        let (offset, size) = (number(at.checked_add(0x18)?, 8)?, number(at.checked_add(0x20)?, 8)?);
        Some((number(at, 4)?, elf.get(offset..offset.checked_add(size)?).unwrap_or_default()))
    };
    let (_, strings) = section(names)?;
    let info = (0..count)
        .filter_map(section)
        .find(|(name, _)| strings.get(*name..).is_some_and(|s| s.starts_with(b".modinfo\0")))?
        .1;
    let depends = info.split(|b| *b == 0).find_map(|e| e.strip_prefix(b"depends="))?;
    let depends = std::str::from_utf8(depends).ok()?;
    Some(depends.split(',').filter(|d| !d.is_empty()).map(|d| d.replace('-', "_")).collect())
}

/// Builds a cpio archive ("newc"). It is not compressed: reading 1.9 MB less would cost 0.1 to 0.2 s of unpacking under
/// emulation. `lists` are files that name modules, in load order. `on_demand` are modules by name, each after its dependencies.
fn initramfs(agent: &[u8], lists: &[(&str, Vec<Module>)], on_demand: &[(&str, Vec<Module>)]) -> Vec<u8> {
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "run", "tmp", "sysroot", "modules", "sbin"] {
        archive.add(folder, 0o040_755, (0, 0), &[]);
    }
    // Path of the kernel's CONFIG_MODPROBE_PATH.
    archive.add("sbin/modprobe", 0o120_777, (0, 0), b"/init");
    archive.add("dev/console", 0o020_600, (5, 1), &[]);
    archive.add("init", 0o100_755, (0, 0), agent);
    for (list, modules) in lists {
        let mut names = String::new();
        for (name, bytes) in modules {
            archive.add(&format!("modules/{name}"), 0o100_644, (0, 0), bytes);
            names.push_str(name);
            names.push('\n');
        }
        archive.add(list, 0o100_644, (0, 0), names.as_bytes());
    }
    let (mut lines, mut added) = (String::new(), BTreeSet::new());
    for (name, modules) in on_demand {
        lines.push_str(name);
        for (file, bytes) in modules {
            if added.insert(file) {
                archive.add(&format!("modules/{file}"), 0o100_644, (0, 0), bytes);
            }
            lines.push(' ');
            lines.push_str(file);
        }
        lines.push('\n');
    }
    archive.add("modules.on-demand.list", 0o100_644, (0, 0), lines.as_bytes());
    archive.add("TRAILER!!!", 0, (0, 0), &[]);
    archive.bytes
}

#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: usize,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), data: &[u8]) {
        self.entries += 1;
        // magic ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let header = format!(
            "070701{:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{major:08x}{minor:08x}{:08x}{:08x}",
            self.entries,
            0,
            0,
            1,
            0,
            data.len(),
            0,
            0,
            name.len() + 1,
            0
        );
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

fn files_named(top: &Path, wanted: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(top, &mut |path| {
        if path.file_name() == Some(OsStr::new(wanted)) {
            found.push(path.to_owned());
        }
    })?;
    Ok(found)
}

fn walk(folder: &Path, visit: &mut dyn FnMut(&Path)) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        other => other.with_context(|| format!("list {}", folder.display()))?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() { walk(&entry.path(), visit)? } else { visit(&entry.path()) }
    }
    Ok(())
}

fn find(folder: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    Ok(entries.flatten().find(|e| e.file_name().to_str().is_some_and(wanted)).map(|e| e.path()))
}

fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&output_bytes(command)?).into_owned())
}

fn output_bytes(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let out = match command.stdin(Stdio::null()).output() {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            bail!("{program} is not installed ({})", provider(&program))
        }
        other => other.with_context(|| format!("run {program}"))?,
    };
    ensure!(out.status.success(), "{program} failed: {}", String::from_utf8_lossy(&out.stderr).trim());
    Ok(out.stdout)
}

/// Returns the command that installs a program.
fn provider(program: &str) -> &'static str {
    match program {
        "xz" => "apt-get install xz-utils",
        "dpkg-deb" => "apt-get install dpkg",
        "apt-get" | "apt-cache" => "a Debian system has it",
        "rustc" | "rustup" => "see https://rustup.rs",
        _ => "look for it in your distribution",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an ELF64 file with section names, `.modinfo` and nothing else.
    fn module(info: &[u8]) -> Vec<u8> {
        let strings = b"\0.shstrtab\0.modinfo\0";
        let mut elf = vec![0u8; 0x40];
        let (strings_at, info_at) = (elf.len(), elf.len() + strings.len());
        elf.extend(strings);
        elf.extend(info);
        let table = elf.len();
        for (name, at, size) in
            [(0u32, 0usize, 0usize), (1, strings_at, strings.len()), (11, info_at, info.len())]
        {
            let mut header = vec![0u8; 0x40];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&at.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            elf.extend(header);
        }
        elf[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        elf[0x3a..0x3c].copy_from_slice(&0x40u16.to_le_bytes());
        elf[0x3c..0x3e].copy_from_slice(&3u16.to_le_bytes());
        elf[0x3e..0x40].copy_from_slice(&1u16.to_le_bytes());
        elf
    }

    #[test]
    fn dependencies_are_read() {
        let of = |info: &[u8]| dependencies(&module(info));
        assert_eq!(
            of(b"license=GPL\0depends=virtio,virtio-ring\0retpoline=Y\0"),
            Some(vec!["virtio".into(), "virtio_ring".into()])
        );
        assert_eq!(of(b"license=GPL\0depends=\0"), Some(vec![]));
        assert_eq!(of(b"license=GPL\0"), None);
        for cut in 0..200 {
            let elf = module(b"depends=a\0");
            let _ = dependencies(&elf[..cut.min(elf.len())]);
        }
    }

    #[test]
    fn module_signature_is_stripped_exactly() {
        let signed =
            [&b"module"[..], b"signature", &[0; 8], &9u32.to_be_bytes(), b"~Module signature appended~\n"]
                .concat();
        assert_eq!(unsigned(signed.clone()), b"module");
        assert_eq!(unsigned(b"plain".to_vec()), b"plain");
        let lying = [&b"x"[..], &[0; 8], &[0xff; 4], b"~Module signature appended~\n"].concat();
        assert_eq!(unsigned(lying.clone()), lying);
    }

    #[test]
    fn module_name_table() {
        assert_eq!(module_name(Path::new("kernel/drivers/virtio-rng.ko")), Some("virtio_rng".into()));
        assert_eq!(module_name(Path::new("virtio_mmio.ko.xz")), Some("virtio_mmio".into()));
        assert_eq!(module_name(Path::new("modules.order")), None);
    }

    #[test]
    fn initramfs_is_aligned_and_reproducible() {
        let lists = [("modules.list", vec![("a.ko".to_owned(), vec![1, 2, 3])])];
        let on_demand = [("b", vec![("a.ko".to_owned(), vec![1]), ("b.ko".to_owned(), vec![2])])];
        let one = initramfs(b"agent", &lists, &on_demand);
        assert_eq!(one, initramfs(b"agent", &lists, &on_demand));
        assert_eq!(one.len() % 4, 0);
        assert!(one.starts_with(b"070701") && one.windows(10).any(|w| w == b"TRAILER!!!"));
        assert!(one.windows(6).any(|w| w == b"a.ko\n\0"), "the list names the module");
        assert!(one.windows(12).any(|w| w == b"b a.ko b.ko\n"), "and the files of each on demand");
    }
}
