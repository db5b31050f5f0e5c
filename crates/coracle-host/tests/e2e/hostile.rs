//! Guests, disks and VMMs that do not answer: their VMs can be deleted, and other VMs keep working.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::support::{Node, exec, run, vmms};
use coracle_host::{Host, Record, VolumeRequest};
use coracle_testkit::{eventually, netns, tools};
use rustix::process::{Pid, Signal, kill_process};

/// Guaranteed time limit of a forced deletion.
const PROMISE: Duration = Duration::from_secs(10);
/// Time limit of calls that the host answers from memory, and of a command in another VM on a loaded host.
const PROMPT: Duration = Duration::from_secs(5);

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

fn vmm_of(record: &Record) -> u32 {
    record.process.unwrap().pid
}

/// Deletes by force within the guaranteed time, while another VM runs commands.
async fn delete_by_force(host: &Host, vm: &str, other: &str) {
    let began = Instant::now();
    let (deleted, (said, code)) =
        tokio::join!(host.delete(vm, true, None), exec(host, other, &["echo", "here"]));
    deleted.unwrap();
    assert!(began.elapsed() < PROMISE, "{vm} was deleted after {:?}", began.elapsed());
    assert_eq!((said.trim(), code), ("here", 0));
    assert!(host.get(vm).is_err());
}

async fn end(host: &Host) {
    host.delete("other", true, None).await.unwrap();
    host.network().teardown().await.unwrap();
    host.shutdown().await;
}

/// File whose reads and writes are served over FUSE by a process that can be stopped.
struct SlowDisk {
    server: Child,
    file: PathBuf,
}

impl SlowDisk {
    /// Makes an empty disk. `None` if the server is not installed.
    async fn new(dir: &Path) -> Option<Self> {
        tools::require(["qemu-storage-daemon"])?;
        let (backing, file) = (dir.join("backing"), dir.join("slow"));
        std::fs::File::create(&backing).unwrap().set_len(16 << 20).unwrap();
        std::fs::write(&file, "").unwrap();
        let server = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &format!("file,node-name=disk,filename={}", backing.display())])
            .args([
                "--export",
                &format!("fuse,id=e,node-name=disk,mountpoint={},writable=on", file.display()),
            ])
            .spawn()
            .unwrap();
        let disk = Self { server, file };
        let size = || std::fs::metadata(&disk.file).is_ok_and(|file| file.len() == 16 << 20);
        eventually("the disk is served", async || size().then_some(())).await.unwrap();
        Some(disk)
    }

    fn stop(&self) {
        signal(self.server.id(), Signal::STOP);
    }

    fn resume(&self) {
        signal(self.server.id(), Signal::CONT);
    }

    fn request(&self) -> VolumeRequest {
        let source = self.file.to_str().unwrap().to_owned();
        let local_user = Some(rustix::process::geteuid().as_raw());
        VolumeRequest { name: "slow".to_owned(), source, local_user, ..VolumeRequest::default() }
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        self.resume();
        let _ended = self.server.kill().and_then(|()| self.server.wait());
        let _unmounted = Command::new("umount").arg("-l").arg(&self.file).status();
    }
}

/// Makes the guest write to the disk continuously, past its caches.
async fn write_without_end(host: &Host, vm: &str) {
    let line = "(while :; do dd if=/dev/zero of=/dev/slow bs=4096 count=64 oflag=direct; done) \
                > /dev/null 2>&1 & echo";
    assert_eq!(exec(host, vm, &["sh", "-c", line]).await.1, 0);
}

#[test]
fn sigstopped_vmm_is_deleted_by_force() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        run(&host, "other").await;
        for request in ["nothing", "pause", "attach", "hibernate", "copy", "stop"] {
            let record = run(&host, "stopped").await;
            signal(vmm_of(&record), Signal::STOP);
            let waiting = async {
                let source = "data".to_owned();
                let data = VolumeRequest { source, size_mib: Some(16), ..VolumeRequest::default() };
                match request {
                    "pause" => host.pause("stopped", None).await.map(drop),
                    "attach" => host.attach_volume("stopped", data, None).await.map(drop),
                    "hibernate" => host.hibernate("stopped", None).await.map(drop),
                    "copy" => host.save_snapshot("stopped", None).await.map(drop),
                    "stop" => host.stop("stopped", Duration::from_secs(600), None).await.map(drop),
                    _ => return,
                }
                .unwrap_err();
            };
            let delete = async {
                let waits =
                    async || host.get("stopped").is_ok_and(|vm| vm.record.state.has_vmm()).then_some(());
                eventually("the VM is there", waits).await.unwrap();
                delete_by_force(&host, "stopped", "other").await;
            };
            tokio::join!(waiting, delete);
            assert_eq!(vmms(node.dir.path()), 1, "{request}: its VMM has ended");
        }
        end(&host).await;
    });
}

/// The kernel cannot end a VMM that waits for a request which the stopped server of its disk has taken.
#[test]
fn vm_whose_disk_hangs_is_deleted_by_force() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        run(&host, "other").await;
        for request in ["nothing", "pause", "detach"] {
            let dir = tempfile::tempdir().unwrap();
            let Some(disk) = SlowDisk::new(dir.path()).await else {
                return;
            };
            run(&host, "slow").await;
            host.attach_volume("slow", disk.request(), None).await.unwrap();
            write_without_end(&host, "slow").await;
            disk.stop();
            let waiting = async {
                match request {
                    "pause" => drop(host.pause("slow", None).await.unwrap_err()),
                    "detach" => drop(host.detach_volume("slow", "slow", None).await.unwrap_err()),
                    _ => {}
                }
            };
            tokio::join!(waiting, delete_by_force(&host, "slow", "other"));
            disk.resume();
            let alone = async || (vmms(node.dir.path()) == 1).then_some(());
            eventually("the VMM that was left behind ends", alone).await.unwrap();
            let gone = async || {
                (std::fs::read_dir(node.state().join("instances")).unwrap().count() == 1).then_some(())
            };
            eventually("and so does its instance", gone).await.unwrap();
        }
        end(&host).await;
    });
}

#[test]
fn start_on_a_disk_that_hangs_is_cancelled_by_a_deletion() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        run(&host, "other").await;
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SlowDisk::new(dir.path()).await else { return };
        run(&host, "slow").await;
        host.attach_volume("slow", disk.request(), None).await.unwrap();
        host.stop("slow", Duration::ZERO, None).await.unwrap();
        disk.stop();
        let delete = async {
            let starts = async || host.get("slow").is_ok_and(|vm| vm.record.state.has_vmm()).then_some(());
            eventually("it starts", starts).await.unwrap();
            let began = Instant::now();
            assert!(host.list().len() == 2 && began.elapsed() < PROMPT);
            delete_by_force(&host, "slow", "other").await;
        };
        let (started, ()) = tokio::join!(host.start("slow", None), delete);
        started.unwrap_err();
        disk.resume();
        let alone = async || (vmms(node.dir.path()) == 1).then_some(());
        eventually("no VMM is left", alone).await.unwrap();
        end(&host).await;
    });
}
