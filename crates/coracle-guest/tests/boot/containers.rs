//! Containers of a real VM: created, followed, joined, limited, stopped and removed by the calls of the host.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coracle_proto::guest::guest_frame::Message;
use coracle_proto::guest::host_frame::Message as HostMessage;
use coracle_proto::guest::*;
use coracle_testkit::elapse;
use tonic::{Code, Streaming};

use crate::client::{Session, exec, process};
use crate::machine::Machine;
use crate::{BOOT, Client};

/// Time limit for the next frame of a session.
const FRAME: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_share_a_sandbox() -> Result<()> {
    let Some(mut machine) = Machine::boot()? else { return Ok(()) };
    let told = scenario(&mut machine).await;
    told.with_context(|| machine.diagnostics())
}

async fn scenario(machine: &mut Machine) -> Result<()> {
    let session = Session::open(&machine.socket(), BOOT).await?;
    let mut c = session.client.clone();
    check_no_sandbox(&mut c).await.context("before the sandbox")?;
    configure(&mut c).await.context("configure")?;
    let mut frames = Frames::open(&mut c, BTreeMap::new()).await?;
    output_and_exit(&mut c, &mut frames).await.context("output and exit")?;
    termination_message(&mut c, &mut frames).await.context("termination message")?;
    isolation(&mut c, &mut frames).await.context("isolation")?;
    security(&mut c, &mut frames).await.context("security")?;
    exec_and_stop(&mut c, &mut frames).await.context("exec and stop")?;
    out_of_memory(&mut c, &mut frames).await.context("out of memory")?;
    pid_namespaces(&mut c, &mut frames).await.context("pid namespaces")?;
    check_start_failures(&mut c, &mut frames).await.context("cannot run")?;
    check_resumed_session(&mut c).await.context("resumed session")?;
    check_full_buffer(&mut c).await.context("output waits for the host")?;
    removal(&mut c).await.context("removal")?;
    c.shutdown(ShutdownRequest { grace_ms: 2000 }).await?;
    machine.wait_exit(Duration::from_secs(20))?;
    Ok(())
}

/// Frames of one session, kept until the test needs them.
struct Frames {
    stream: Streaming<GuestFrame>,
    output: BTreeMap<String, Vec<u8>>,
    exited: BTreeMap<String, ContainerExited>,
    statistics: Option<Statistics>,
    host: tokio::sync::mpsc::Sender<HostFrame>,
}

impl Frames {
    async fn open(c: &mut Client, from_offsets: BTreeMap<String, u64>) -> Result<Self> {
        let (open, frames) = tokio::sync::mpsc::channel(1);
        let resume = HostMessage::Resume(Resume { from_offsets, acknowledges: true });
        open.send(HostFrame { message: Some(resume) }).await?;
        let stream = c.session(tokio_stream::wrappers::ReceiverStream::new(frames)).await?.into_inner();
        let (output, exited) = Default::default();
        Ok(Self { stream, output, exited, statistics: None, host: open })
    }

    async fn next(&mut self) -> Result<()> {
        let frame = tokio::time::timeout(FRAME, self.stream.message()).await.context("no frame")??;
        match frame.and_then(|frame| frame.message).context("the session ended")? {
            Message::Output(output) => {
                let all = self.output.entry(output.container.clone()).or_default();
                ensure!(output.offset == all.len() as u64, "a gap at {}", output.offset);
                all.extend(output.data);
                let offsets = BTreeMap::from([(output.container, all.len() as u64)]);
                let received = HostMessage::Received(Received { offsets });
                self.host.send(HostFrame { message: Some(received) }).await?;
            }
            Message::Exited(exited) => {
                let length = self.output.get(&exited.container).map_or(0, Vec::len) as u64;
                ensure!(exited.end_offset == length, "{exited:?} after {length} bytes");
                self.exited.insert(exited.container.clone(), exited);
            }
            Message::Statistics(statistics) => self.statistics = Some(statistics),
            Message::Started(_) => {}
        }
        Ok(())
    }

    /// Exit of a container, after all of its output was received.
    async fn exit_of(&mut self, id: &str) -> Result<ContainerExited> {
        loop {
            if let Some(exited) = self.exited.get(id) {
                return Ok(exited.clone());
            }
            self.next().await.with_context(|| format!("exit of {id}"))?;
        }
    }

    async fn text_of(&mut self, id: &str) -> Result<String> {
        let exited = self.exit_of(id).await?;
        let text = String::from_utf8_lossy(&self.output.remove(id).unwrap_or_default()).into_owned();
        ensure!(exited.exit == Some(ExitStatus::default()), "{exited:?}: {text}");
        Ok(text)
    }
}

fn container(id: &str, argv: &[&str]) -> CreateContainerRequest {
    CreateContainerRequest {
        id: id.into(),
        image_device: "/dev/vda".into(),
        image_fs: "erofs".into(),
        process: Some(process(argv)),
        ..CreateContainerRequest::default()
    }
}

async fn run(c: &mut Client, request: CreateContainerRequest) -> Result<u32> {
    let id = request.id.clone();
    c.create_container(request).await?;
    Ok(c.start_container(StartContainerRequest { id }).await?.into_inner().pid)
}

async fn check_no_sandbox(c: &mut Client) -> Result<()> {
    let refused = c.create_container(container("early", &["true"])).await;
    ensure!(refused.is_err_and(|e| e.code() == Code::FailedPrecondition), "no sandbox yet");
    Ok(())
}

const HOSTS: &str = "127.0.0.1\tlocalhost\n10.0.2.15\tpod-0\n";

async fn configure(c: &mut Client) -> Result<()> {
    let request = ConfigureSandboxRequest {
        hostname: "pod-0".into(),
        entropy: vec![7; 64],
        clock_unix_ns: 1_800_000_000_000_000_000,
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        network: Some(Network {
            mac: "02:00:00:00:00:2a".into(),
            address: "10.0.2.15/24".into(),
            gateway: "10.0.2.2".into(),
            nameservers: vec!["10.0.2.3".into()],
            search_domains: vec!["default.svc".into()],
            resolver_options: vec!["ndots:5".into()],
            ..Network::default()
        }),
        overlay_device: "/dev/vdb".into(),
        sysctls: [("net.ipv4.ip_unprivileged_port_start".to_owned(), "0".to_owned())].into(),
        mounts: vec![],
        limits: Some(CgroupLimits { memory_max_bytes: Some(40 << 20), ..CgroupLimits::default() }),
        hosts: HOSTS.into(),
    };
    for _ in 0..2 {
        let answer = c.configure_sandbox(request.clone()).await?.into_inner();
        ensure!(answer.addresses == ["10.0.2.15/24"], "{answer:?}");
    }
    let status = c.status(StatusRequest {}).await?.into_inner();
    ensure!(status.configured && status.features.iter().any(|f| f == "containers"), "{status:?}");
    Ok(())
}

async fn output_and_exit(c: &mut Client, frames: &mut Frames) -> Result<()> {
    // The limits of the sandbox apply to all containers together; a process that exceeds them is killed, and the VM continues.
    let script = "x=$(dd if=/dev/zero bs=1M count=100 | tr '\\0' x); echo no";
    run(c, container("large", &["sh", "-c", script])).await?;
    ensure!(frames.exit_of("large").await?.oom_killed, "{:?}", frames.output.get("large"));
    let script = "cat /etc/resolv.conf; hostname; cat /etc/hosts; echo err >&2; exit 7";
    ensure!(run(c, container("one", &["sh", "-c", script])).await? > 1);
    let exited = frames.exit_of("one").await?;
    let text = String::from_utf8_lossy(&frames.output["one"]).into_owned();
    let exit = exited.exit.clone().unwrap_or_default();
    ensure!((exit.code, exit.signal, exited.oom_killed) == (7, 0, false), "{exited:?}");
    ensure!(exited.time_unix_ns > 1_800_000_000_000_000_000, "{exited:?}");
    for line in ["nameserver 10.0.2.3", "options ndots:5", "pod-0", "err"] {
        ensure!(text.lines().any(|l| l == line), "{line:?} in {text}");
    }
    ensure!(text.contains(HOSTS) && exited.termination_message.is_empty(), "{text} {exited:?}");
    // An equal request returns the same container; another container with its id is refused.
    c.create_container(container("one", &["sh", "-c", script])).await?;
    let refused = c.create_container(container("one", &["true"])).await;
    ensure!(refused.is_err_and(|e| e.code() == Code::FailedPrecondition), "another container");
    ensure!(c.start_container(StartContainerRequest { id: "one".into() }).await?.into_inner().pid == 0);
    Ok(())
}

/// The end of a file that every user may write, even if the root is read-only. A mount replaces the file.
async fn termination_message(c: &mut Client, frames: &mut Frames) -> Result<()> {
    let request = |id: &str, path: &str, script: &str| CreateContainerRequest {
        read_only_root: true,
        termination_message_path: path.into(),
        process: Some(Process { user: "1000".into(), ..process(&["sh", "-c", script]) }),
        ..container(id, &[])
    };
    run(c, request("told", "/dev/termination-log", "printf one > /dev/termination-log; exit 1")).await?;
    let exited = frames.exit_of("told").await?;
    ensure!(exited.termination_message == b"one", "{exited:?}");
    let script = "i=0; while [ $i -lt 1000 ]; do echo line-$i; i=$((i + 1)); done > /var/end";
    run(c, request("long", "/var/end", script)).await?;
    let message = frames.exit_of("long").await?.termination_message;
    ensure!(message.len() == 4096 && message.ends_with(b"line-998\nline-999\n"), "{} bytes", message.len());
    let tmpfs = container_mount::Source::Tmpfs(TmpfsSource { mode: 0o777, ..TmpfsSource::default() });
    let mount = ContainerMount { target: "/var/end".into(), read_only: false, source: Some(tmpfs) };
    let taken = request("taken", "/var/end", "echo lost > /var/end/file");
    run(c, CreateContainerRequest { mounts: vec![mount], ..taken }).await?;
    let exited = frames.exit_of("taken").await?;
    ensure!(exited.termination_message.is_empty(), "{exited:?}");
    ensure!(exited.exit.is_some_and(|exit| exit.code == 0), "{:?}", frames.output.get("taken"));
    for id in ["told", "long", "taken"] {
        c.remove_container(RemoveContainerRequest { id: id.into() }).await?;
    }
    Ok(())
}

/// Each container sees its own processes and files, and the network of the sandbox.
async fn isolation(c: &mut Client, frames: &mut Frames) -> Result<()> {
    let write = "echo $$; touch /srv/mine; ls /proc | grep -c '^[0-9]'; ls /run 2>/dev/null | wc -l; stat -c %a /dev/shm; \
                 cat /proc/1/comm; mount | grep -c 'on / type overlay'";
    run(c, container("two", &["sh", "-c", write])).await?;
    let text = frames.text_of("two").await?;
    let lines: Vec<_> = text.lines().collect();
    ensure!(lines[0] == "1" && lines[3] == "1777" && lines[4] == "sh" && lines[5] == "1", "{text}");
    ensure!(lines[1].parse::<u32>()? <= 3 && lines[2] == "0", "{text}");
    let look = "ls /srv; ip addr show | grep -c 10.0.2.15; cat /proc/self/cgroup; cat /proc/sys/kernel/random/boot_id | wc -c";
    let read_only =
        CreateContainerRequest { read_only_root: true, ..container("three", &["sh", "-c", look]) };
    run(c, read_only).await?;
    let text = frames.text_of("three").await?;
    ensure!(text == "1\n0::/\n37\n", "{text}");
    let write = "touch /srv/x 2>&1; echo $?; touch /tmp/x; echo $?; df -k /tmp | grep -c 1024";
    let mount = ContainerMount {
        target: "/tmp".into(),
        read_only: false,
        source: Some(container_mount::Source::Tmpfs(TmpfsSource {
            size_bytes: 1 << 20,
            ..TmpfsSource::default()
        })),
    };
    let request = container("four", &["sh", "-c", write]);
    run(c, CreateContainerRequest { read_only_root: true, mounts: vec![mount], ..request }).await?;
    let text = frames.text_of("four").await?;
    ensure!(text.ends_with("Read-only file system\n1\n0\n1\n"), "{text}");
    Ok(())
}

async fn security(c: &mut Client, frames: &mut Frames) -> Result<()> {
    let status = "grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; ulimit -n; cat /proc/self/oom_score_adj; \
                  ls /proc/acpi | wc -l; touch /proc/sys/kernel/hostname 2>&1 | grep -c Read-only; id -u";
    let security = Security {
        capabilities: Some(1 << 10),
        no_new_privileges: true,
        masked_paths: vec!["/proc/acpi".into(), "/proc/kcore".into(), "/no/such".into()],
        read_only_paths: vec!["/proc/sys".into()],
        rlimits: vec![Rlimit { resource: 7, soft: 99, hard: 100 }],
        oom_score_adj: 500,
        ..Security::default()
    };
    let request = container("limited", &["sh", "-c", status]);
    run(c, CreateContainerRequest { security: Some(security.clone()), ..request.clone() }).await?;
    let text = frames.text_of("limited").await?;
    let bounded = "CapEff:\t0000000000000400\nCapBnd:\t0000000000000400\nNoNewPrivs:\t1\n99\n500\n0\n";
    ensure!(text.starts_with(bounded) && text.ends_with("0\n"), "{text}");
    let user = Process { user: "web".into(), ..process(&["sh", "-c", status]) };
    let request = container("plain", &[]);
    run(c, CreateContainerRequest { process: Some(user), ..request }).await?;
    let text = frames.text_of("plain").await?;
    ensure!(
        text.starts_with("CapEff:\t0000000000000000\nCapBnd:\t00000000a80425fb") && text.ends_with("1000\n"),
        "{text}"
    );
    // Every call of mkdirat and mkdir fails with EPERM: load the number, compare, return.
    let filter = [
        (0x20_u16, 0_u8, 0_u8, 0_u32),
        (0x15, 1, 0, 83),
        (0x15, 0, 1, 258),
        (0x06, 0, 0, 0x0005_0001),
        (0x06, 0, 0, 0x7fff_0000),
    ];
    let seccomp = filter
        .iter()
        .flat_map(|(code, jt, jf, k)| [&code.to_ne_bytes()[..], &[*jt, *jf], &k.to_ne_bytes()[..]].concat());
    let security = Security { seccomp: seccomp.collect(), ..security };
    let request = container("filtered", &["sh", "-c", "mkdir /tmp/x 2>&1; true"]);
    run(c, CreateContainerRequest { security: Some(security), ..request }).await?;
    let text = frames.text_of("filtered").await?;
    ensure!(text.contains("Operation not permitted"), "{text}");
    Ok(())
}

async fn exec_and_stop(c: &mut Client, frames: &mut Frames) -> Result<()> {
    let loops = "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done";
    run(c, container("server", &["sh", "-c", loops])).await?;
    while !frames.output.contains_key("server") {
        frames.next().await?;
    }
    let joined =
        Process { container: "server".into(), ..process(&["sh", "-c", "cat /proc/1/cmdline; exit 5"]) };
    let told = exec(c, joined, vec![]).await?;
    ensure!(told.text().starts_with("sh\0-c\0trap") && told.exit.code == 5, "{told:?}");
    let slow = Process {
        container: "server".into(),
        timeout_ms: 200,
        ..process(&["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    };
    let told = exec(c, slow, vec![]).await?;
    ensure!(told.exit.signal == 9, "{told:?}");
    let left = Process {
        container: "server".into(),
        ..process(&["sh", "-c", "ps | grep -v grep | grep -c 'sleep 1000'"])
    };
    let told = exec(c, left, vec![]).await?;
    ensure!(told.text() == "0\n", "the whole tree: {told:?}");
    let missing = Process { container: "nope".into(), ..process(&["true"]) };
    ensure!(exec(c, missing, vec![]).await.is_err(), "no such container");
    let ended = Process { container: "one".into(), ..process(&["true"]) };
    ensure!(exec(c, ended, vec![]).await.is_err(), "it has ended");
    let stop = StopContainerRequest { id: "server".into(), grace_ms: 10_000 };
    let exit = c.stop_container(stop.clone()).await?.into_inner().exit.unwrap_or_default();
    ensure!((exit.code, exit.signal) == (3, 0), "{exit:?}");
    ensure!(c.stop_container(stop).await?.into_inner().exit.unwrap_or_default() == exit, "again");
    ensure!(frames.exit_of("server").await?.exit == Some(exit));
    ensure!(frames.output["server"] == b"up\nbye\n", "{:?}", frames.output["server"]);
    // A process that ignores the signal is killed with its children.
    run(c, container("stubborn", &["sh", "-c", "trap '' TERM; sleep 1000 & echo up; wait; wait"])).await?;
    while !frames.output.contains_key("stubborn") {
        frames.next().await?;
    }
    let stop = StopContainerRequest { id: "stubborn".into(), grace_ms: 100 };
    let exit = c.stop_container(stop).await?.into_inner().exit.unwrap_or_default();
    ensure!((exit.code, exit.signal) == (137, 9), "{exit:?}");
    Ok(())
}

async fn out_of_memory(c: &mut Client, frames: &mut Frames) -> Result<()> {
    let limits = CgroupLimits {
        memory_max_bytes: Some(8 << 20),
        pids_max: Some(16),
        cpu_quota_us: Some(50_000),
        cpu_weight: Some(50),
        ..CgroupLimits::default()
    };
    let request =
        container("greedy", &["sh", "-c", "x=$(dd if=/dev/zero bs=1M count=64 | tr '\\0' x); echo no"]);
    run(c, CreateContainerRequest { cgroup: Some(limits), ..request }).await?;
    let exited = frames.exit_of("greedy").await?;
    ensure!(exited.oom_killed, "{exited:?} {:?}", frames.output.get("greedy"));
    run(c, container("idle", &["sleep", "1000"])).await?;
    let update = CgroupLimits { memory_max_bytes: Some(16 << 20), ..CgroupLimits::default() };
    c.update_container(UpdateContainerRequest { id: "idle".into(), cgroup: Some(update) }).await?;
    frames.statistics = None;
    let of_idle = loop {
        let found =
            frames.statistics.take().and_then(|s| s.containers.into_iter().find(|c| c.container == "idle"));
        match found {
            Some(found) => break found,
            None => frames.next().await.context("statistics")?,
        }
    };
    ensure!(
        of_idle.processes == 1 && of_idle.memory_usage_bytes > 0 && of_idle.cpu_usage_ns > 0,
        "{of_idle:?}"
    );
    Ok(())
}

async fn pid_namespaces(c: &mut Client, frames: &mut Frames) -> Result<()> {
    let list = ["sh", "-c", "ls /proc | grep -c '^[0-9]'; cat /proc/1/comm"];
    let target = CreateContainerRequest {
        pid_namespace: PidNamespace::Target.into(),
        target_container: "idle".into(),
        ..container("debug", &list)
    };
    run(c, target).await?;
    ensure!(frames.text_of("debug").await?.ends_with("sleep\n"), "the target's processes");
    let pod = CreateContainerRequest { pid_namespace: PidNamespace::Pod.into(), ..container("wide", &list) };
    run(c, pod).await?;
    let text = frames.text_of("wide").await?;
    ensure!(text.lines().next().unwrap_or_default().parse::<u32>()? > 10, "the sandbox's processes: {text}");
    Ok(())
}

async fn check_start_failures(c: &mut Client, frames: &mut Frames) -> Result<()> {
    run(c, container("absent", &["/no/such"])).await?;
    let exit = frames.exit_of("absent").await?.exit.unwrap_or_default();
    ensure!(exit.code == 127 && exit.error.contains("/no/such"), "{exit:?}");
    let disk = CreateContainerRequest { image_device: "/dev/vdz".into(), ..container("bare", &["true"]) };
    ensure!(c.create_container(disk).await.is_err_and(|e| e.code() == Code::NotFound), "no such image");
    let missing = VolumeSource { name: "nope".into(), sub_path: String::new() };
    let mount = ContainerMount {
        target: "/data".into(),
        read_only: true,
        source: Some(container_mount::Source::Volume(missing)),
    };
    let request = CreateContainerRequest { mounts: vec![mount], ..container("bare", &["true"]) };
    ensure!(c.create_container(request).await.is_err_and(|e| e.code() == Code::NotFound), "no such volume");
    // The failure left nothing: the id is free.
    ensure!(run(c, container("bare", &["true"])).await.is_ok());
    frames.exit_of("bare").await.map(drop)
}

/// A session that continues an earlier one gets the rest of the output, and every exit again.
async fn check_resumed_session(c: &mut Client) -> Result<()> {
    let mut frames = Frames::open(c, [("server".to_owned(), 3)].into()).await?;
    frames.output.insert("server".into(), b"up\n".to_vec());
    ensure!(frames.exit_of("server").await?.end_offset == 7);
    ensure!(frames.output["server"] == b"up\nbye\n");
    Ok(())
}

/// A container that prints more than the guest buffers waits until the host has received it, and nothing is dropped.
async fn check_full_buffer(c: &mut Client) -> Result<()> {
    const BYTES: usize = 1 << 20;
    let script = format!("head -c {BYTES} /dev/zero; echo end");
    run(c, container("chatty", &["sh", "-c", &script])).await?;
    let state = async |c: &mut Client| -> Result<WorkloadState> {
        let all = c.list_containers(ListContainersRequest {}).await?.into_inner().containers;
        Ok(all.iter().find(|s| s.id == "chatty").context("chatty")?.state())
    };
    for host in ["no host", "a host that does not read"] {
        let _open = if host == "no host" { None } else { Some(Frames::open(c, BTreeMap::new()).await?) };
        // Without the wait, the container would print everything within a second.
        elapse(Duration::from_secs(2)).await;
        ensure!(state(c).await? == WorkloadState::Running, "{host}: it did not wait");
    }
    let mut frames = Frames::open(c, BTreeMap::new()).await?;
    let text = frames.text_of("chatty").await?;
    ensure!(text.len() == BYTES + "end\n".len() && text.ends_with("end\n"), "{} bytes", text.len());
    Ok(())
}

async fn removal(c: &mut Client) -> Result<()> {
    let before = c.list_containers(ListContainersRequest {}).await?.into_inner().containers;
    let state = |id: &str| before.iter().find(|s| s.id == id).map(ContainerStatus::state);
    ensure!(state("idle") == Some(WorkloadState::Running) && state("one") == Some(WorkloadState::Exited));
    for status in &before {
        for _ in 0..2 {
            c.remove_container(RemoveContainerRequest { id: status.id.clone() }).await?;
        }
    }
    ensure!(c.list_containers(ListContainersRequest {}).await?.into_inner().containers.is_empty());
    let kill = KillContainerRequest { id: "idle".into(), signal: 9 };
    ensure!(c.kill_container(kill).await.is_err_and(|e| e.code() == Code::NotFound));
    // The id and the disk are free again.
    let id = "one".to_owned();
    c.create_container(container("one", &["sleep", "1000"])).await?;
    ensure!(c.start_container(StartContainerRequest { id }).await?.into_inner().pid > 1);
    Ok(())
}
