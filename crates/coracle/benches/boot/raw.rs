//! Bare VM: the same machine type without our devices, from spawn to the first line of user space.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coracle_hypervisor::{Accelerator, VmmConfig};
use coracle_testkit::tools;

/// Boots a bare VM and returns the milliseconds from spawn to the first line that user space prints.
pub(crate) fn boot(dir: &Path, boot: &tools::GuestKernel, show: bool) -> f64 {
    let socket = dir.join("raw.sock");
    let _absent = std::fs::remove_file(&socket);
    let vmm_config = VmmConfig {
        id: coracle_types::InstanceId::new("raw", 1),
        vcpus: 1.try_into().expect("one CPU"),
        memory: 128.try_into().expect("128 MiB"),
        kernel: boot.kernel.clone(),
        initrd: boot.initrd.clone(),
        disks: vec![],
        slots: Default::default(),
        machine_type: Default::default(),
        nic: None,
        display: None,
        state_dir: dir.to_owned(),
        run_dir: dir.to_owned(),
        accelerator: Accelerator::Tcg,
        driver: String::new(),
        uid: None,
    };
    let args = without_our_devices(coracle_qemu::argv_for_this_host(&vmm_config), &socket);
    if show {
        eprintln!("raw argv: {}", args.join(" "));
    }
    let began = Instant::now();
    let mut child = Command::new(qemu())
        .args(&args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("run QEMU");
    let mut console = loop {
        match UnixStream::connect(&socket) {
            Ok(console) => break console,
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut said = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&said).contains("coracle-guest") {
        let n = console.read(&mut buffer).expect("read the console");
        assert!(n > 0, "QEMU ended before user space: {}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&buffer[..n]);
    }
    let elapsed = began.elapsed();
    child.kill().expect("kill QEMU");
    child.wait().expect("reap QEMU");
    elapsed.as_secs_f64() * 1000.0
}

fn qemu() -> PathBuf {
    tools::tool("qemu-system-x86_64").expect("qemu-system-x86_64: cargo xtask setup")
}

/// Removes channel, disks, NIC, entropy device and monitor from the arguments; machine, kernel and console stay.
fn without_our_devices(args: Vec<String>, console: &Path) -> Vec<String> {
    let mut kept = Vec::new();
    let mut args = args.into_iter().peekable();
    while let Some(flag) = args.next() {
        let takes_value = args.peek().is_some_and(|v| !v.starts_with('-'));
        let value = if takes_value { args.next() } else { None };
        match (flag.as_str(), value) {
            ("-device" | "-netdev" | "-blockdev" | "-mon", _) => {}
            ("-chardev", Some(value)) if !value.contains("id=console") => {}
            ("-chardev", Some(_)) => {
                kept.extend([
                    flag,
                    format!("socket,id=console,path={},server=on,wait=on", console.display()),
                ]);
            }
            (_, value) => {
                kept.push(flag);
                kept.extend(value);
            }
        }
    }
    kept
}
