//! Steps in a real VM: QEMU with its BIOS and no disk, which prompts for nothing but responds to keys.

#![allow(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_image_build::{BuildFile, Frame, Machine, Screen, Serial, StepError, run};
use coracle_testkit::{eventually_within, tools};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// QEMU process with both ends of its screen and serial console.
struct Qemu {
    child: Child,
    machine: Machine,
    off: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

async fn connect_when_ready(path: &Path) -> UnixStream {
    let connect = async || UnixStream::connect(path).await.ok();
    eventually_within(Duration::from_secs(20), "QEMU listens", connect).await.unwrap()
}

async fn qemu(dir: &Path) -> Option<Qemu> {
    tools::require(["qemu-system-x86_64"])?;
    let (vnc, serial) = (dir.join("vnc"), dir.join("serial"));
    let child = Command::new("qemu-system-x86_64")
        .args([
            "-M",
            "q35,accel=tcg",
            "-m",
            "64",
            "-nodefaults",
            "-device",
            "VGA",
            "-boot",
            "menu=on,splash-time=20000",
        ])
        .args(["-vnc", &format!("unix:{}", vnc.display())])
        .args(["-chardev", &format!("socket,id=s,path={},server=on,wait=off", serial.display())])
        .args(["-device", "isa-serial,chardev=s"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let screen = Screen::connect(connect_when_ready(&vnc).await).await.unwrap();
    let (mut output, mut input) = connect_when_ready(&serial).await.into_split();
    let (printed, console) = mpsc::channel(8);
    let (typed, mut keys) = mpsc::channel::<Vec<u8>>(8);
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut buffer = [0; 1024];
        while let Ok(read @ 1..) = output.read(&mut buffer).await {
            drop(printed.send(buffer[..read].to_vec()).await);
        }
    });
    tasks.spawn(async move {
        while let Some(text) = keys.recv().await {
            drop(input.write_all(&text).await);
        }
    });
    let (off, is_off) = watch::channel(false);
    let machine = Machine { screen, serial: Serial::new(console, typed), off: is_off };
    Some(Qemu { child, machine, off, tasks })
}

impl Qemu {
    async fn run(&mut self, dir: &Path, steps: &str) -> Result<Vec<usize>, StepError> {
        let text = format!("from: none\ntimeout: 30s\nsteps:\n{steps}");
        let file = BuildFile::parse(&text, dir).unwrap();
        let mut begun = vec![];
        run(&file, &mut self.machine, |number, _| begun.push(number), None).await.map(|()| begun)
    }
}

#[tokio::test]
async fn keys_change_the_screen_and_pictures_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(mut qemu) = qemu(dir).await else { return };
    // The BIOS waits for Esc before it searches for disks, and again in its menu.
    let steps = "- waitForStill: 2s\n- screenshot: before.png\n- type: <esc>\n- waitForStill: 2s\n- screenshot: menu.png";
    assert_eq!(qemu.run(dir, steps).await.unwrap(), [1, 2, 3, 4, 5]);
    let before = Frame::read_png(&dir.join("before.png")).unwrap();
    let menu = Frame::read_png(&dir.join("menu.png")).unwrap();
    assert!(before.colours() > 1, "the BIOS says something");
    assert!(before.difference(&menu, None) > 0.0, "and answers the key");

    // A picture of an earlier screen is recognised, also in part. A step waits until its limit for a picture that is not shown.
    let found = "- waitForPicture: {file: menu.png, tolerance: 0.01}\n\
                 - waitForPicture: {file: menu.png, area: {x: 0, y: 0, width: 64, height: 64}}";
    qemu.run(dir, found).await.unwrap();
    std::fs::write(dir.join("broken.png"), "no picture").unwrap();
    for (steps, want) in [
        ("- waitForPicture: {file: broken.png}", "read "),
        ("- waitForPicture: {file: missing.png}", "No such file"),
        ("- screenshot: no/such/dir.png", "write "),
    ] {
        let error = qemu.run(dir, steps).await.unwrap_err();
        assert!(
            error.to_string().starts_with("step 1 of 1, ") && error.to_string().contains(want),
            "{error}"
        );
    }
    // A VM that goes off ends every wait except the wait for off.
    qemu.child.kill().await.unwrap();
    qemu.off.send_replace(true);
    let error = qemu.run(dir, "- waitForOff\n- waitForSerial: never").await.unwrap_err();
    assert_eq!(error.number, 2, "{error}");
    qemu.tasks.shutdown().await;
}
