//! `coracle image build`: a VM that is operated by the steps of a file.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_image_build::Frame;
use coracle_testkit::{netns, tools};
use tokio::process::{Child, Command};

use crate::support::{CORACLE, coracle, coracle_ok, node_tools, root, text, until};

const LIMIT: Duration = Duration::from_secs(900);

/// Node daemon without a control plane, in a directory.
struct Node {
    state: std::path::PathBuf,
    daemon: Child,
}

impl Node {
    async fn start(dir: &Path) -> Self {
        let state = dir.join("state");
        let log = std::fs::File::create(dir.join("node.log")).unwrap();
        let daemon = Command::new(CORACLE)
            .arg("--state")
            .arg(&state)
            .args(["node", "--network", "user"])
            .stdin(Stdio::null())
            .stderr(log.try_clone().unwrap())
            .stdout(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let node = Self { state, daemon };
        until("the node answers", Duration::from_secs(60), async || {
            let listed = coracle(&node.state, &["ps"]).await;
            if listed.status.success() { Ok(()) } else { Err(text(&listed.stderr)) }
        })
        .await;
        node
    }

    async fn ok(&self, args: &[&str]) -> String {
        coracle_ok(&self.state, args).await
    }

    /// Returns the error of a build that fails.
    async fn refusal(&self, file: &Path) -> String {
        let output = coracle(&self.state, &["image", "build", file.to_str().unwrap()]).await;
        assert!(!output.status.success(), "{}", text(&output.stdout));
        text(&output.stderr)
    }

    async fn stop(mut self) {
        assert_eq!(self.ok(&["ps", "-a", "-o", "name"]).await, "", "no machine is left");
        self.daemon.start_kill().unwrap();
        self.daemon.wait().await.unwrap();
    }
}

fn write(dir: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn build_steps_run_in_a_vm_and_its_disk_becomes_an_image() {
    netns::run_within(LIMIT, || async {
        if node_tools().is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let node = Node::start(dir).await;
        std::fs::File::create(dir.join("blank.raw")).unwrap().set_len(8 << 20).unwrap();
        // The BIOS finds no boot device and waits. Ctrl+Alt+Del restarts the VM.
        let steps = "from: ./blank.raw\nmemory: 128\ntimeout: 60s\nsteps:\n\
                     - waitForStill: 4s\n- screenshot: none.png\n\
                     - type: <leftCtrlOn><leftAltOn><del><leftAltOff><leftCtrlOff>\n\
                     - waitForPicture: {file: none.png, tolerance: 0.01}\n";
        let file = write(dir, "bios.yaml", steps);
        node.ok(&[
            "image",
            "build",
            file.to_str().unwrap(),
            "--record",
            dir.join("record").to_str().unwrap(),
        ])
        .await;
        assert!(Frame::read_png(&dir.join("none.png")).unwrap().colours() > 1, "the BIOS says something");
        assert_eq!(std::fs::read_dir(dir.join("record")).unwrap().count(), 4, "one for each step");

        // A step that fails reports the screen and leaves no VM.
        let late = write(
            dir,
            "late.yaml",
            "from: ./blank.raw\nmemory: 128\ntimeout: 2s\nsteps: [waitForSerial: 'login: ']\n",
        );
        let refused = node.refusal(&late).await;
        assert!(refused.contains("COR-CLI-014") && refused.contains("not within 2 s"), "{refused}");
        assert!(refused.contains("late-failed.png"), "{refused}");
        let unknown = write(dir, "unknown.yaml", "from: ./blank.raw\nsteps: [type: <entre>]\n");
        assert!(node.refusal(&unknown).await.contains("step 1: unknown key <entre>"));
        let _shot = std::fs::remove_file("late-failed.png");

        // A VM of the user: its display accepts viewers, and its disk becomes an image when the VM is off.
        let run = [
            "run",
            "-d",
            "--name",
            "bare",
            "-m",
            "128",
            "--no-agent",
            "--display",
            "800x600",
            "localhost/blank:latest",
        ];
        node.ok(&run).await;
        let exec = coracle(&node.state, &["exec", "bare", "true"]).await;
        assert!(text(&exec.stderr).contains("not connected"), "{}", text(&exec.stderr));
        let early = coracle(&node.state, &["commit", "bare", "localhost/blank:2"]).await;
        assert!(text(&early.stderr).contains("stop it first"), "{}", text(&early.stderr));
        node.ok(&["stop", "bare", "--timeout", "0s"]).await;
        node.ok(&["commit", "bare", "localhost/blank:2"]).await;
        assert!(node.ok(&["image", "ls"]).await.contains("localhost/blank:2"));
        let screen = coracle(&node.state, &["vnc", "bare"]).await;
        assert!(!screen.status.success(), "a machine that is off shows nothing");
        node.ok(&["rm", "bare"]).await;
        node.ok(&["run", "-d", "--name", "blind", "-m", "128", "--no-agent", "localhost/blank:latest"]).await;
        let screen = coracle(&node.state, &["vnc", "blind"]).await;
        assert!(text(&screen.stderr).contains("VM blind has no screen"), "{}", text(&screen.stderr));
        node.ok(&["rm", "-f", "blind"]).await;
        node.stop().await;
    });
}

/// Bytes before the root file system of the disk image of `cargo xtask setup`.
const ROOT_OFFSET: u64 = 20480 * 512;

/// Changes files in the root file system of a disk, by commands of debugfs.
async fn debugfs(disk: &Path, commands: &str) {
    let file = disk.with_extension("debugfs");
    std::fs::write(&file, commands).unwrap();
    let disk = format!("{}?offset={ROOT_OFFSET}", disk.display());
    let output = Command::new("debugfs").args(["-w", "-f"]).arg(&file).arg(disk).output().await.unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Makes a Debian disk with mmdebstrap in which root may log in and the guest agent is not started.
async fn bare_debian(dir: &Path) -> Option<std::path::PathBuf> {
    let Some(image) = tools::system_image() else {
        tools::skip("no disk image; `cargo xtask setup` makes it");
        return None;
    };
    tools::require(["qemu-img"])?;
    let disk = dir.join("bare.raw");
    let converted =
        Command::new("qemu-img").args(["convert", "-O", "raw"]).arg(image).arg(&disk).status().await;
    assert!(converted.unwrap().success());
    // Password "coracle" (crypt(5), SHA-512, salt "coracle").
    let shadow = write(dir, "shadow", &format!("root:{PASSWORD}:20000:0:99999:7:::\n"));
    let empty = write(dir, "empty", "");
    let commands = format!(
        "rm /etc/shadow\nwrite {} /etc/shadow\nsif /etc/shadow mode 0100600\nwrite {} /etc/cloud/cloud-init.disabled\n",
        shadow.display(),
        empty.display()
    );
    debugfs(&disk, &commands).await;
    Some(disk)
}

const PASSWORD: &str =
    "$6$coracle$pebWppUL1eT6uM6c7pjY5BpMdLObPs4OEcPhnHc9mhS.ED2.42/oCD.9zhF4GnZW9QEiVqT7S.wWdICdH2./B/";

#[test]
#[ignore = "minutes: a scenario of `cargo xtask soak`"]
fn image_build_bootstraps_a_debian_by_its_serial_login() {
    netns::run_within(LIMIT, || async {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        if node_tools().is_none() || bare_debian(dir).await.is_none() {
            return;
        }
        let node = Node::start(dir).await;
        let unit = std::fs::read_to_string(root().join("examples/coracle-agent.service")).unwrap();
        let script = format!(
            "set -e\ncat > /etc/systemd/system/coracle-agent.service <<'UNIT'\n{unit}\nUNIT\n\
             systemctl enable coracle-agent.service\necho provisioned > /root/provisioned\n"
        );
        write(dir, "provision.sh", &script);
        let steps = "from: ./bare.raw\nimage: localhost/base/debian:12\nmemory: 512\nuserData: provision.sh\n\
                     timeout: 5m\nsteps:\n- waitForSerial: 'login: '\n- typeSerial: \"root\\n\"\n\
                     - waitForSerial: 'Password: '\n- typeSerial: \"coracle\\n\"\n- waitForSerial: ':~# '\n\
                     - typeSerial: \"mount -o ro LABEL=CIDATA /mnt && sh /mnt/user-data && echo do''ne\\n\"\n\
                     - waitForSerial: done\n- typeSerial: \"poweroff\\n\"\n- waitForOff\n";
        let file = write(dir, "base.yaml", steps);
        assert_eq!(node.ok(&["image", "build", file.to_str().unwrap()]).await, "localhost/base/debian:12\n");
        // The resulting image runs as a VM like any other.
        node.ok(&["run", "-d", "--name", "web", "-m", "512", "localhost/base/debian:12"]).await;
        assert_eq!(node.ok(&["exec", "web", "cat", "/root/provisioned"]).await, "provisioned\n");
        node.ok(&["rm", "-f", "web"]).await;
        node.stop().await;
    });
}

#[test]
#[ignore = "minutes: a scenario of `cargo xtask soak`"]
fn image_build_operates_a_text_installer() {
    netns::run_within(LIMIT, || async {
        let files = std::env::var("CORACLE_INSTALLER")
            .expect("kernel and initrd of Debian's installer, by `cargo xtask soak`");
        for name in ["linux", "initrd.gz"] {
            assert!(Path::new(&files).join(name).is_file(), "no {name} in {files}");
        }
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        if node_tools().is_none() {
            return;
        }
        let Some(disk) = bare_debian(dir).await else { return };
        let menu = write(
            dir,
            "grub.cfg",
            "linux /boot/installer/linux vga=normal quiet\ninitrd /boot/installer/initrd.gz\nboot\n",
        );
        let commands = format!(
            "mkdir /boot/installer\nwrite {files}/linux /boot/installer/linux\nwrite {files}/initrd.gz /boot/installer/initrd.gz\n\
             rm /boot/grub/grub.cfg\nwrite {} /boot/grub/grub.cfg\n",
            menu.display()
        );
        debugfs(&disk, &commands).await;
        let node = Node::start(dir).await;
        // Language, country, keyboard; the installer has a disk to install to.
        let steps = "from: ./bare.raw\nmemory: 1024\ntimeout: 5m\nvolumes: [target:/dev/target:size=2048]\nsteps:\n\
                     - waitForStill: 15s\n- screenshot: language.png\n- type: <enter>\n\
                     - waitForStill: 6s\n- screenshot: country.png\n- type: <enter>\n\
                     - waitForStill: 6s\n- screenshot: keyboard.png\n";
        let file = write(dir, "installer.yaml", steps);
        node.ok(&["image", "build", file.to_str().unwrap()]).await;
        let shown = ["language", "country", "keyboard"]
            .map(|n| Frame::read_png(&dir.join(format!("{n}.png"))).unwrap());
        let [language, country, keyboard] = &shown;
        for (frame, next) in [(language, country), (country, keyboard)] {
            assert_eq!(frame.size(), (1024, 768));
            assert!(frame.colours() > 3, "a dialog in colour");
            assert!(frame.difference(next, None) > 0.01, "a key leads to the next screen");
        }
        // The same screens are recognised by the screenshots.
        let again = "from: ./bare.raw\nmemory: 1024\ntimeout: 5m\nvolumes: [target:/dev/target:size=2048]\nsteps:\n\
                     - waitForPicture: {file: language.png, tolerance: 0.001}\n- type: <enter>\n\
                     - waitForPicture: {file: country.png, tolerance: 0.001}\n- type: <enter>\n\
                     - waitForPicture: {file: keyboard.png, tolerance: 0.001}\n";
        let file = write(dir, "again.yaml", again);
        node.ok(&["image", "build", file.to_str().unwrap()]).await;
        node.stop().await;
    });
}
