//! Container images for the demo and tests.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};

use super::{apt_sources, find, hash, link, log_file};
use crate::progress::{logged, step};

/// Debian release of the web server's root file system.
const WEB_SUITE: &str = "bookworm";

/// Applets of the demo's busybox: those that users try, and those that `kubectl cp` needs.
const DEMO_APPLETS: &str = "[ cat chmod cp date dd df dmesg echo env false find free grep head hostname httpd id ip kill ls mkdir \
    mount mv netstat nslookup ping printf ps pwd rm sed seq sh sleep sort sync tail tar test top touch true umount uname vi wc \
    wget";

/// Makes `localhost/coracle/demo:1`: a static busybox that serves one page.
pub(super) fn demo(tools: &Path) -> Result<()> {
    let busybox = fs::read(find("busybox").context("busybox (Debian's busybox-static)")?)?;
    let page = b"hello from a microVM\n";
    let layer = || {
        let mut layer = LayerTar::new().dir("bin", 0o755).file("bin/busybox", 0o755, &busybox);
        for applet in DEMO_APPLETS.split_whitespace() {
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
    let hash = hash(&[&busybox, page, b"4"]);
    let target = tools.join("demo").join(&hash);
    if !target.join("index.json").is_file() {
        // httpd as PID 1 of a container would ignore SIGTERM, so a shell traps it.
        let command = "trap 'exit 0' TERM; echo \"demo is up on $(hostname)\"; httpd -f -h /www & wait";
        let spec = ImageSpec {
            cmd: ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
            env: vec!["PATH=/bin".to_owned()],
            ..ImageSpec::default()
        };
        write_layout(&target, &[layer()], &spec, "1")?;
    }
    link(&target, &tools.join("demo/current"))
}

/// Makes a typical Debian root file system with nginx, which tests push to a registry and run.
pub(super) fn web(tools: &Path) -> Result<()> {
    let excluded =
        ["doc", "man", "locale", "info"].map(|d| format!("--dpkgopt=path-exclude=/usr/share/{d}/*"));
    let customize = "echo 'served by nginx in a microVM' > \"$1/var/www/html/index.html\"";
    let hash = hash(&[WEB_SUITE.as_bytes(), customize.as_bytes(), b"1"]);
    let target = tools.join("web").join(&hash);
    if !target.join("index.json").is_file() {
        let tar = tools.join("web.tar");
        step("building a Debian root file system with nginx", Some(Duration::from_secs(40)), |_| {
            let mut build = Command::new("mmdebstrap");
            build.args(["--quiet", "--variant=minbase", "--include=nginx-light"]).args(excluded);
            build.args(["--customize-hook", customize, WEB_SUITE]).arg(&tar).args(apt_sources());
            logged(&mut build, &log_file(tools, "web-image"))
        })?;
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
