//! Debian package: the program, its systemd unit, manual pages and completions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{ARCHITECTURE, BOOT, PROGRAM, Parts};
use crate::progress::{logged, step};

/// systemd unit. Stopping it stops only the daemon: VMMs are in cgroups of their own and outlive an upgrade.
const UNIT: &str = "[Unit]
Description=Coracle node: VMs from container images
Documentation=man:coracle(1)
After=network-online.target
Wants=network-online.target

[Service]
EnvironmentFile=-/etc/default/coracle
ExecStart=/usr/bin/coracle --state /var/lib/coracle node --boot /usr/share/coracle/boot
Restart=on-failure
RestartSec=2
KillMode=process
Delegate=yes
LimitNOFILE=infinity
TasksMax=infinity

[Install]
WantedBy=multi-user.target
";

/// Environment file of the unit; each flag of `coracle node` has a variable.
const DEFAULTS: &str = "# Flags of `coracle node` as variables; `coracle node --help` lists them.
#CORACLE_NODE_KUBECONFIG=/etc/coracle/kubeconfig
";

/// Shells and the paths of their completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/coracle"),
    ("zsh", "usr/share/zsh/vendor-completions/_coracle"),
    ("fish", "usr/share/fish/vendor_completions.d/coracle.fish"),
];

/// Builds the package and returns its path.
pub(super) fn make(parts: &Parts, program: &Path, work: &Path, out: &Path) -> Result<PathBuf> {
    let root = work.join("debian");
    let install = |path: &str, bytes: &[u8], is_program: bool| -> Result<()> {
        use std::os::unix::fs::PermissionsExt as _;
        let file = root.join(path);
        fs::create_dir_all(file.parent().context("a file has a directory")?)?;
        fs::write(&file, bytes).with_context(|| format!("write {}", file.display()))?;
        let mode = if is_program { 0o755 } else { 0o644 };
        Ok(fs::set_permissions(&file, fs::Permissions::from_mode(mode))?)
    };
    install(PROGRAM, &parts.program, true)?;
    for (name, bytes) in &parts.boot {
        install(&format!("{BOOT}/{name}"), bytes, false)?;
    }
    install("usr/lib/systemd/system/coracle-node.service", UNIT.as_bytes(), false)?;
    install("etc/default/coracle", DEFAULTS.as_bytes(), false)?;
    install("DEBIAN/conffiles", b"/etc/default/coracle\n", false)?;
    install("DEBIAN/control", control(&parts.version).as_bytes(), false)?;
    for (shell, path) in COMPLETIONS {
        install(path, &printed(program, &["completion", shell])?, false)?;
    }
    let pages: Vec<(String, String)> = serde_json::from_slice(&printed(program, &["reference", "--manual"])?)
        .context("read the manual pages")?;
    for (name, page) in &pages {
        install(&format!("usr/share/man/man1/{name}"), page.as_bytes(), false)?;
    }
    let package = out.join(format!("coracle_{}_{}.deb", parts.version, ARCHITECTURE));
    step("making the Debian package", Some(Duration::from_secs(20)), |_| {
        let mut build = Command::new("dpkg-deb");
        build.args(["--root-owner-group", "--build"]).arg(&root).arg(&package);
        logged(&mut build, &work.join("debian.log"))
    })?;
    Ok(package)
}

fn control(version: &str) -> String {
    format!(
        "Package: coracle\nVersion: {version}\nArchitecture: {}\nSection: admin\nPriority: optional\n\
         Maintainer: The Coracle developers <coracle@localhost>\n\
         Depends: libc6, qemu-system-x86, e2fsprogs, ca-certificates\nRecommends: ovmf\n\
         Description: VMs from container images, for Kubernetes and the command line\n\
         \x20Runs container images and disk images as microVMs, declared as objects of a cluster,\n\
         \x20as Pods, or by command.\n",
        ARCHITECTURE
    )
}

/// Returns the stdout of a command of the program.
fn printed(program: &Path, args: &[&str]) -> Result<Vec<u8>> {
    let output =
        Command::new(program).args(args).output().with_context(|| format!("run {}", program.display()))?;
    ensure!(output.status.success(), "coracle {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}
