//! Finds programs that tests run: in `$CORACLE_TOOLS`, then in `PATH`.

use std::{
    env,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

/// Directory of the tool cache: `$CORACLE_TOOLS`, or else `~/.cache/coracle/tools`.
#[must_use]
pub fn tools_dir() -> PathBuf {
    match env::var_os("CORACLE_TOOLS") {
        Some(dir) if !dir.is_empty() => dir.into(),
        _ => {
            PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache/coracle/tools")
        }
    }
}

/// Finds the program `name` in `<tools>/bin`, then in the directories of `PATH`, then in those for the administrator.
#[must_use]
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    std::iter::once(tools_dir().join("bin"))
        .chain(env::split_paths(&path).collect::<Vec<_>>())
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// Guest kernel and initramfs built by `cargo xtask setup`.
#[derive(Clone, Debug)]
pub struct GuestKernel {
    /// Kernel: `<tools>/guest/current/vmlinuz`.
    pub kernel: PathBuf,
    /// Initramfs: `<tools>/guest/current/initrd`.
    pub initrd: PathBuf,
}

/// Guest kernel in `<tools>/guest/current`, if setup has built one.
#[must_use]
pub fn guest_kernel() -> Option<GuestKernel> {
    let dir = tools_dir().join("guest/current");
    let found = GuestKernel { kernel: dir.join("vmlinuz"), initrd: dir.join("initrd") };
    (found.kernel.is_file() && found.initrd.is_file()).then_some(found)
}

/// Debian disk image with systemd and cloud-init that boots with BIOS and UEFI, built by `cargo xtask setup`.
#[must_use]
pub fn system_image() -> Option<PathBuf> {
    let image = tools_dir().join("system/current/debian.qcow2");
    image.is_file().then_some(image)
}

/// True on a CI host (`CI=true`), where no test may be skipped.
#[must_use]
pub fn is_ci() -> bool {
    env::var("CI").is_ok_and(|v| v == "true")
}

/// Reports that a test did not run because no package registry has its program. Unlike [`skip`], does not fail in CI: a
/// simulation covers the same behaviour.
pub fn not_to_be_had(what: &str) {
    eprintln!("not run: {what}");
}

/// Skips the calling test: prints `reason`, or panics in CI. Write `let Some(x) = … else { return skip("…") };`.
///
/// # Panics
/// When `CI=true`.
#[expect(clippy::print_stdout, reason = "a skipped test says so in the test's own output")]
pub fn skip(reason: &str) {
    assert!(!is_ci(), "CI must not skip: {reason}");
    println!("skipped: {reason}");
}

/// Paths of the programs `names`, in order. When a program is missing, prints the reason and returns `None`; the test then
/// returns.
///
/// # Panics
/// When a program is missing and `CI=true`.
#[must_use]
pub fn require<const N: usize>(names: [&str; N]) -> Option<[PathBuf; N]> {
    let found: Vec<_> = names.iter().filter_map(|name| tool(name)).collect();
    if found.len() < N {
        let missing: Vec<_> = names.iter().filter(|name| tool(name).is_none()).collect();
        skip(&format!(
            "missing {missing:?} in {} and PATH; `cargo xtask setup` gets them",
            tools_dir().display()
        ));
        return None;
    }
    found.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_is_found_on_the_path() {
        assert!(tool("sh").is_some());
        assert!(tool("no-such-program-at-all").is_none());
        assert!(require(["sh", "cat"]).is_some());
    }
}
