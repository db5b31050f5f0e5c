//! Boots a real VM and talks to its agent as the host does: one boot, all the calls.
//!
//! Needs QEMU, mkfs.erofs, mke2fs, a static busybox and the guest image (`cargo xtask guest-image`). If one is missing, the
//! test fails in CI and is skipped elsewhere.

#[path = "../support/client.rs"]
mod client;
#[path = "../support/machine.rs"]
mod machine;

mod containers;
mod reset;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use client::{CHANNEL_PAUSE, Session, exec, process, sh};
use coracle_proto::guest::exec_request::Message as In;
use coracle_proto::guest::guest_client::GuestClient;
use coracle_proto::guest::*;
use coracle_testkit::{elapse, eventually};
use machine::Machine;
use tonic::Code;
use tonic::transport::Channel;

type Client = GuestClient<Channel>;

/// Guaranteed limits of the agent: resident memory, and size of its binary.
const RSS_MAX: u64 = 4 << 20;
const BINARY_MAX: u64 = 2 << 20;
/// Time limit of a boot under emulation on a busy host.
const BOOT: Duration = Duration::from_secs(40);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_serves_a_vm_from_boot_to_shutdown() -> Result<()> {
    let Some(mut machine) = Machine::boot()? else { return Ok(()) };
    let told = scenario(&mut machine).await;
    told.with_context(|| machine.diagnostics())
}

/// State of a guest whose kernel got no CPU time from the host to calibrate its timer.
#[test]
fn guest_without_a_timer_powers_off_at_once() -> Result<()> {
    let Some(mut machine) = Machine::boot_with("nolapic_timer")? else { return Ok(()) };
    machine.wait_exit(BOOT)?;
    ensure!(
        machine.diagnostics().contains("could not calibrate its timer and has none: going off"),
        "{}",
        machine.diagnostics()
    );
    Ok(())
}

async fn scenario(machine: &mut Machine) -> Result<()> {
    let session = Session::open(&machine.socket(), BOOT).await?;
    let hello = machine.started.elapsed();
    let mut c = session.client.clone();
    configure(&mut c).await.context("configure")?;
    check_announcement(machine, [2, 0, 0, 0, 0, 0x2a], [10, 0, 2, 15]).await?;
    eprintln!(
        "cold boot to hello {} ms, to configured {} ms",
        hello.as_millis(),
        machine.started.elapsed().as_millis()
    );
    workload(&mut c).await.context("workload")?;
    identity(&mut c).await.context("identity")?;
    check_exec(&mut c).await.context("exec")?;
    terminal(&mut c).await.context("terminal")?;
    check_copy(&mut c).await.context("copy")?;
    check_port_forward(&mut c).await.context("port-forward")?;
    let metrics = metrics(&mut c).await.context("metrics")?;
    eprintln!("agent RSS {} KiB", metrics.agent_rss_bytes / 1024);
    let session = check_reconnects(machine, session).await.context("reconnects")?;
    let session = garbage(machine, session).await.context("garbage")?;
    end(machine, session).await.context("end")
}

async fn check_unconfigured(c: &mut Client) -> Result<()> {
    let status = c.status(StatusRequest {}).await?.into_inner();
    ensure!(
        !status.configured && status.workload == WorkloadState::NotStarted as i32 && status.uptime_ms > 0,
        "{status:?}"
    );
    let refused = c.start_workload(StartWorkloadRequest { process: Some(process(&["true"])) }).await;
    ensure!(refused.is_err_and(|e| e.code() == Code::FailedPrecondition), "no root yet");
    let refused = c.wait_workload(WaitWorkloadRequest {}).await;
    ensure!(refused.is_err_and(|e| e.code() == Code::FailedPrecondition), "nothing to wait for");
    Ok(())
}

fn request() -> ConfigureRequest {
    ConfigureRequest {
        hostname: "web-0".into(),
        entropy: vec![7; 64],
        clock_unix_ns: 1_800_000_000_000_000_000,
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        network: Some(Network {
            mac: "02:00:00:00:00:2a".into(),
            address: "10.0.2.15/24".into(),
            gateway: "10.0.2.2".into(),
            nameservers: vec!["10.0.2.3".into()],
            search_domains: vec!["default.svc".into()],
            resolver_options: vec![],
            mtu: 1450,
            routes: vec![
                Route { to: "192.168.0.0/16".into(), gateway: "10.0.2.9".into() },
                Route { to: "fd23::/64".into(), gateway: String::new() },
            ],
            ipv6: Some(Ipv6 { address: "fd22::15/64".into(), gateway: "fe80::2".into() }),
        }),
        root: Some(RootMount {
            image_device: "/dev/vda".into(),
            image_fs: "erofs".into(),
            overlay_device: "/dev/vdb".into(),
            root_first: false,
        }),
        takes_over: false,
        mounts: vec![],
        limits: Some(CgroupLimits { memory_max_bytes: Some(100 << 20), ..CgroupLimits::default() }),
    }
}

async fn configure(c: &mut Client) -> Result<()> {
    for _ in 0..2 {
        let since = Instant::now();
        let answer = c.configure(request()).await?.into_inner();
        ensure!(answer.addresses == ["10.0.2.15/24", "fd22::15/64"], "{answer:?}");
        eprintln!("configure took {} ms", since.elapsed().as_millis());
    }
    ensure!(c.status(StatusRequest {}).await?.into_inner().configured);
    Ok(())
}

async fn check_announcement(machine: &Machine, mac: [u8; 6], address: [u8; 4]) -> Result<()> {
    let announced = async || machine.has_announced(mac, address).then_some(());
    eventually("the guest announces its address", announced).await
}

/// A failed Configure leaves a guest that can still be configured.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn diskless_guest_stays_configurable_after_failed_configure() -> Result<()> {
    let Some(mut machine) = Machine::boot()? else { return Ok(()) };
    let told = diskless(&mut machine).await;
    told.with_context(|| machine.diagnostics())
}

async fn diskless(machine: &mut Machine) -> Result<()> {
    let session = Session::open(&machine.socket(), BOOT).await?;
    let mut c = session.client.clone();
    check_unconfigured(&mut c).await.context("unconfigured")?;
    let bad = ConfigureRequest {
        root: Some(RootMount {
            image_device: "/dev/vdz".into(),
            image_fs: "erofs".into(),
            ..RootMount::default()
        }),
        ..request()
    };
    ensure!(c.configure(bad).await.is_err_and(|e| e.code() == Code::NotFound), "a disk that is not there");
    check_unconfigured(&mut c).await.context("still unconfigured")?;
    let root = RootMount { overlay_device: String::new(), ..request().root.unwrap_or_default() };
    let loopback = Network { mac: String::new(), ..request().network.unwrap_or_default() };
    let memory = ConfigureRequest { root: Some(root), network: Some(loopback), ..request() };
    let answer = c.configure(memory.clone()).await?.into_inner();
    ensure!(answer.addresses.is_empty(), "{answer:?}");
    let other = ConfigureRequest { root: request().root, ..memory };
    ensure!(
        c.configure(other).await.is_err_and(|e| e.code() == Code::FailedPrecondition),
        "the root is in use"
    );
    let got = exec(
        &mut c,
        sh("grep ' / ' /proc/mounts | cut -d' ' -f1,3; touch /x && cat /sys/class/net/eth0/flags"),
        vec![],
    )
    .await?;
    ensure!(got.text() == "overlay overlay\n0x1002\n", "the link stays down: {}", got.text());
    let nothing =
        c.start_workload(StartWorkloadRequest { process: Some(process(&["nope"])) }).await?.into_inner();
    ensure!(nothing.pid == 0);
    let exit = c.wait_workload(WaitWorkloadRequest {}).await?.into_inner().exit.context("no exit")?;
    ensure!(exit.code == 127 && exit.error == "nope: not found", "{exit:?}");
    ensure!(
        c.logs(LogsRequest { from_offset: 0 }).await?.into_inner().message().await?.is_none(),
        "it had nothing to say"
    );
    c.shutdown(ShutdownRequest { grace_ms: 60_000 }).await?;
    ensure!(machine.wait_exit(Duration::from_secs(10))?.success(), "no workload to wait for");
    Ok(())
}

async fn workload(c: &mut Client) -> Result<()> {
    let script =
        "echo out-$GREETING; echo err >&2; trap 'echo bye; exit 42' TERM; while :; do sleep 0.1; done";
    let start =
        StartWorkloadRequest { process: Some(Process { env: vec!["GREETING=hello".into()], ..sh(script) }) };
    let pid = c.start_workload(start.clone()).await?.into_inner().pid;
    ensure!(pid > 1 && c.start_workload(start).await?.into_inner().pid == pid, "started once");
    let mut logs = c.logs(LogsRequest { from_offset: 0 }).await?.into_inner();
    let mut seen = Vec::new();
    while seen.len() < b"out-hello\nerr\n".len() {
        let chunk = logs.message().await?.context("end of logs")?;
        ensure!(chunk.time_unix_ns >= request().clock_unix_ns, "the clock was set");
        seen.extend(chunk.data);
    }
    seen.sort_unstable();
    let mut want = b"out-hello\nerr\n".to_vec();
    want.sort_unstable();
    ensure!(seen == want, "{seen:?}");
    let other = ConfigureRequest { hostname: "other".into(), ..request() };
    ensure!(
        c.configure(other).await.is_err_and(|e| e.code() == Code::FailedPrecondition),
        "too late for another name"
    );
    let reset = c.reset(ResetRequest {}).await;
    ensure!(reset.is_err_and(|e| e.code() == Code::FailedPrecondition), "its disk was not prepared");
    ensure!(c.configure(request()).await.is_ok(), "the same is fine");
    Ok(())
}

/// Identity as a process of the container reads it, not as the agent reports it.
async fn identity(c: &mut Client) -> Result<()> {
    let script = "hostname; cat /etc/hostname /etc/machine-id; cat /etc/resolv.conf; grep web-0 /etc/hosts; \
        cat /sys/class/net/eth0/address; ip -4 -o addr show eth0 | awk '{print $4}'; ip route | grep via | cut -d' ' -f1-5; \
        ip -6 route | grep via | cut -d' ' -f1-5 | sort; cat /sys/class/net/eth0/mtu; date +%Y; cat /proc/sys/kernel/random/boot_id | wc -c; ls /run/coracle 2>&1 | wc -l; ls -l /proc/self/fd | grep -c /; \
        cat /proc/1/comm; cat /proc/self/oom_score_adj; umask; touch /written && echo rw; ls /dev | sort | tr '\\n' ' '";
    let got = exec(c, sh(script), vec![]).await?;
    let want = "web-0\nweb-0\n0123456789abcdef0123456789abcdef\nnameserver 10.0.2.3\nsearch default.svc\n10.0.2.15\tweb-0\n\
        02:00:00:00:00:2a\n10.0.2.15/24\ndefault via 10.0.2.2 dev eth0\n192.168.0.0/16 via 10.0.2.9 dev eth0\n\
        default via fe80::2 dev eth0\nfd23::/64 via fe80::2 dev eth0\n1450\n2027\n37\n1\n";
    ensure!(got.text().starts_with(want), "{}\n{}", got.text(), String::from_utf8_lossy(&got.stderr));
    let rest = got.text();
    let rest: Vec<_> = rest.strip_prefix(want).unwrap_or_default().lines().collect();
    ensure!(rest.get(1..5) == Some(&["init", "0", "0022", "rw"]), "{rest:?}");
    ensure!(
        rest.last().is_some_and(|dev| dev.contains("null") && dev.contains("ptmx") && !dev.contains("vda")),
        "{rest:?}"
    );
    // The limits apply to the workload and to commands next to it.
    let limits = "cat /proc/self/cgroup /sys/fs/cgroup/workload/memory.max; wc -l < /sys/fs/cgroup/workload/cgroup.procs";
    let got = exec(c, sh(limits), vec![]).await?.text();
    ensure!(got.starts_with("0::/workload\n104857600\n"), "{got}");
    Ok(())
}

async fn check_exec(c: &mut Client) -> Result<()> {
    let expedited = exec(c, sh("cat /sys/kernel/rcu_expedited"), vec![]).await?.text();
    ensure!(expedited == "1\n", "{expedited}");
    for (why, process, code, signal) in [
        ("exit code", sh("exit 7"), 7, 0),
        ("killed", sh("kill -9 $$"), 137, 9),
        ("not found", process(&["nope"]), 127, 0),
        ("not executable", process(&["/etc/noexec"]), 126, 0),
        ("unknown user", Process { user: "nobody".into(), ..process(&["true"]) }, 126, 0),
        ("missing working directory", Process { cwd: "/nope".into(), ..process(&["true"]) }, 126, 0),
    ] {
        let got = exec(c, process, vec![]).await?;
        ensure!((got.exit.code, got.exit.signal) == (code, signal), "{why}: {got:?}");
    }
    let user = Process { user: "web".into(), cwd: "/tmp".into(), ..sh("id; pwd; echo $HOME; echo e >&2") };
    let got = exec(c, user, vec![]).await?;
    ensure!(got.text() == "uid=1000(web) gid=1000(web) groups=40(logs)\n/tmp\n/home/web\n", "{}", got.text());
    ensure!(got.stderr == b"e\n");

    let cat = Process { stdin: true, ..process(&["cat"]) };
    let input = vec![In::Stdin(b"one ".to_vec()), In::Stdin(b"two".to_vec()), In::CloseStdin(true)];
    ensure!(exec(c, cat.clone(), input).await?.text() == "one two");
    ensure!(
        exec(c, cat, vec![In::Stdin(b"the end of the call closes too".to_vec())])
            .await?
            .text()
            .ends_with("too")
    );
    let got = exec(c, sh("sleep 60"), vec![In::Signal(15)]).await?;
    ensure!((got.exit.code, got.exit.signal) == (143, 15), "{got:?}");

    let since = Instant::now();
    let got = exec(c, process(&["dd", "if=/dev/zero", "bs=64k", "count=256"]), vec![]).await?;
    ensure!(got.stdout.len() == 16 << 20 && got.exit.code == 0, "{} bytes", got.stdout.len());
    eprintln!("exec of 16 MiB took {} ms", since.elapsed().as_millis());

    // A client that does not read: its command waits, and other clients are served.
    let requests = tokio_stream::iter([ExecRequest { message: Some(In::Start(process(&["yes"]))) }]);
    let unread = c.exec(requests).await?.into_inner();
    // A blocked command uses no CPU time: state and ticks are equal in two answers.
    let state = "for p in /proc/[0-9]*; do grep -qs '^yes' $p/cmdline && cut -d' ' -f3,14,15 $p/stat; done";
    let mut last = String::new();
    eventually("the command waits for its reader", async || {
        let now = exec(c, sh(state), vec![]).await.ok()?.text();
        let is_blocked = now.starts_with("S ") && now == last;
        last = now;
        is_blocked.then_some(())
    })
    .await?;
    ensure!(
        c.metrics(MetricsRequest {}).await?.into_inner().agent_rss_bytes < RSS_MAX,
        "memory stays bounded"
    );
    drop(unread);
    eventually("a command ends with its client", async || {
        let count = exec(c, sh("ps | grep -c '[y]es'"), vec![]).await.ok()?.text();
        (count == "0\n").then_some(())
    })
    .await?;
    Ok(())
}

async fn terminal(c: &mut Client) -> Result<()> {
    let tty = Process {
        tty: true,
        stdin: true,
        rows: 30,
        cols: 90,
        ..sh("tty; stty size; read x; stty size; echo got-$x; exit 3")
    };
    let input = vec![In::Resize(Resize { rows: 50, cols: 132 }), In::Stdin(b"line\n".to_vec())];
    let got = exec(c, tty, input).await?;
    let text = got.text();
    ensure!(text.contains("/dev/pts/0") && text.contains("50 132") && text.contains("got-line"), "{text}");
    ensure!(got.exit.code == 3 && got.stderr.is_empty(), "{got:?}");
    let got = exec(
        c,
        Process { tty: true, stdin: true, ..process(&["cat"]) },
        vec![In::Stdin(b"x\n".to_vec()), In::CloseStdin(true)],
    )
    .await?;
    ensure!(got.exit.code == 0, "closing stdin ends a terminal's input: {got:?}");
    let got =
        exec(c, Process { tty: true, stdin: true, ..process(&["sleep", "60"]) }, vec![In::Stdin(vec![3])])
            .await?;
    ensure!(got.exit.signal == 2, "control-C reaches it: {got:?}");
    Ok(())
}

async fn check_copy(c: &mut Client) -> Result<()> {
    let mut builder = tar::Builder::new(Vec::new());
    let big = vec![b'z'; 3 << 20];
    for (name, mode, data) in [("d/big", 0o640, &big[..]), ("d/small", 0o4755, b"hello")] {
        let mut header = tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(mode);
        header.set_uid(1000);
        header.set_gid(40);
        header.set_mtime(1_000_000_000);
        builder.append_data(&mut header, name, data)?;
    }
    let mut link = tar::Header::new_gnu();
    link.set_entry_type(tar::EntryType::Symlink);
    link.set_size(0);
    builder.append_link(&mut link, "d/link", "/etc/passwd")?;
    let bytes = builder.into_inner()?;

    let header = CopyInRequest {
        message: Some(copy_in_request::Message::Header(CopyInHeader {
            path: "/srv/in".into(),
            ..CopyInHeader::default()
        })),
    };
    let chunks: Vec<_> = bytes
        .chunks(64 << 10)
        .map(|d| CopyInRequest { message: Some(copy_in_request::Message::Data(d.to_vec())) })
        .collect();
    let done =
        c.copy_in(tokio_stream::iter(std::iter::once(header.clone()).chain(chunks))).await?.into_inner();
    ensure!((done.entries, done.bytes) == (3, big.len() as u64 + 5), "{done:?}");
    let got = exec(
        c,
        sh("cd /srv/in/d && stat -c '%a %u %g %Y %s' big small && readlink link && cat small"),
        vec![],
    )
    .await?;
    ensure!(
        got.text()
            == format!("640 1000 40 1000000000 {}\n4755 1000 40 1000000000 5\n/etc/passwd\nhello", big.len()),
        "{}",
        got.text()
    );

    let mut out = c
        .copy_out(CopyOutRequest { path: "/srv/in".into(), ..CopyOutRequest::default() })
        .await?
        .into_inner();
    let mut back = Vec::new();
    while let Some(chunk) = out.message().await? {
        back.extend(chunk.data);
    }
    let mut archive = tar::Archive::new(&back[..]);
    let mut names = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        if name == "in/d/big" {
            let mut data = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut data)?;
            ensure!(data == big, "contents survive");
        }
        names.push(name);
    }
    names.sort();
    ensure!(names == ["in", "in/d", "in/d/big", "in/d/link", "in/d/small"], "{names:?}");

    ensure!(
        c.copy_out(CopyOutRequest { path: "/nope".into(), ..CopyOutRequest::default() })
            .await
            .is_err_and(|e| e.code() == Code::NotFound)
    );
    let rubbish = CopyInRequest { message: Some(copy_in_request::Message::Data(vec![9; 4096])) };
    ensure!(
        c.copy_in(tokio_stream::iter([header, rubbish]))
            .await
            .is_err_and(|e| e.code() == Code::InvalidArgument)
    );
    Ok(())
}

async fn check_port_forward(c: &mut Client) -> Result<()> {
    let header = |port| PortForwardRequest {
        message: Some(port_forward_request::Message::Header(PortForwardHeader { port, host: String::new() })),
    };
    let refused = c.port_forward(tokio_stream::iter([header(81)])).await;
    ensure!(
        refused.is_err_and(|e| e.code() == Code::Unavailable && e.message().contains("81")),
        "names the port"
    );

    exec(c, sh("echo page > /srv/index.html; httpd -p 127.0.0.1:80 -h /srv; nc -l -p 7 -e cat >/dev/null 2>&1 </dev/null &"), vec![]).await?;
    for (port, text, want) in [(80, "GET /index.html HTTP/1.0\r\n\r\n", "page\n"), (7, "echo", "echo")] {
        let data = PortForwardRequest { message: Some(port_forward_request::Message::Data(text.into())) };
        let close = PortForwardRequest { message: Some(port_forward_request::Message::CloseWrite(true)) };
        // httpd takes a half-closed client for a closed one; the echo server ends because of it.
        let messages = if port == 7 { vec![header(port), data, close] } else { vec![header(port), data] };
        let requests = tokio_stream::StreamExt::chain(tokio_stream::iter(messages), tokio_stream::pending());
        let mut back = c.port_forward(requests).await?.into_inner();
        let mut got = Vec::new();
        while let Some(chunk) = back.message().await? {
            got.extend(chunk.data);
        }
        ensure!(got.ends_with(want.as_bytes()), "port {port}: {:?}", String::from_utf8_lossy(&got));
    }
    Ok(())
}

async fn metrics(c: &mut Client) -> Result<MetricsResponse> {
    let m = c.metrics(MetricsRequest {}).await?.into_inner();
    ensure!(m.memory_total_bytes > 64 << 20 && m.memory_available_bytes < m.memory_total_bytes, "{m:?}");
    ensure!(m.cpu_user_ns > 0 && m.cpu_system_ns > 0 && m.processes > 2, "{m:?}");
    ensure!(m.overlay_total_bytes > 32 << 20 && m.overlay_total_bytes < 64 << 20, "{m:?}");
    ensure!(
        m.agent_rss_bytes > 0 && m.agent_rss_bytes <= RSS_MAX,
        "agent RSS {} KiB",
        m.agent_rss_bytes / 1024
    );
    Ok(m)
}

/// Closes and reopens sessions, every second time in the middle of a stream.
async fn check_reconnects(machine: &Machine, mut session: Session) -> Result<Session> {
    let mut took = Vec::new();
    for n in 0..10u64 {
        let number = session.number;
        let mut stream = None;
        if n % 2 == 1 {
            let requests = tokio_stream::iter([ExecRequest { message: Some(In::Start(process(&["yes"]))) }]);
            let mut flood = session.client.exec(requests).await?.into_inner();
            for _ in 0..20 {
                flood.message().await?;
            }
            stream = Some(flood);
        }
        session.close();
        elapse(CHANNEL_PAUSE).await; // the agent's end of the port has no event here
        let since = Instant::now();
        session = Session::reopen(&machine.socket()).await?;
        took.push(since.elapsed().as_millis());
        drop(stream);
        ensure!(session.number > number, "a new session has a new number");
        let status = session.client.status(StatusRequest {}).await?.into_inner();
        ensure!(
            status.configured && status.workload == WorkloadState::Running as i32,
            "state outlives sessions: {status:?}"
        );
    }
    eprintln!("reconnects took {took:?} ms");
    eventually("execs end with their session", async || {
        let count = exec(&mut session.client, sh("ps | grep -c '[y]es'"), vec![]).await.ok()?.text();
        (count == "0\n").then_some(())
    })
    .await?;
    Ok(session)
}

/// Sends 5 KB of garbage instead of an HTTP/2 preface, and then reconnects without the pause.
async fn garbage(machine: &Machine, session: Session) -> Result<Session> {
    session.close();
    elapse(CHANNEL_PAUSE).await; // the agent's end of the port has no event here
    let mut rude = std::os::unix::net::UnixStream::connect(machine.socket())?;
    rude.write_all(&[b'!'; 5000])?;
    elapse(2 * CHANNEL_PAUSE).await; // the agent reads it and answers nothing
    drop(rude);
    elapse(CHANNEL_PAUSE).await;
    let session = Session::reopen(&machine.socket()).await?;
    session.close();
    let mut session = Session::reopen(&machine.socket()).await.context("without the pause")?;
    session.client.status(StatusRequest {}).await?;
    Ok(session)
}

async fn end(machine: &mut Machine, session: Session) -> Result<()> {
    let mut c = session.client.clone();
    let mut waiting = c.clone();
    let waiter = async move { waiting.wait_workload(WaitWorkloadRequest {}).await };
    let mut following = c.clone();
    let (follows, followed) = tokio::sync::oneshot::channel();
    let follower = async move {
        let mut logs = following.logs(LogsRequest { from_offset: 14 }).await?.into_inner();
        let _ = follows.send(());
        let mut seen = Vec::new();
        while let Some(chunk) = logs.message().await? {
            seen.extend(chunk.data);
        }
        Ok::<_, tonic::Status>(seen)
    };
    let signal = async {
        let _ = followed.await; // an error of the follower is its own
        c.signal_workload(SignalWorkloadRequest { signal: 15 }).await
    };
    let (exit, logs, signalled) = tokio::join!(waiter, follower, signal);
    signalled?;
    let exit = exit?.into_inner().exit.context("no exit")?;
    ensure!(exit.code == 42 && exit.signal == 0, "{exit:?}");
    let logs = String::from_utf8(logs?)?; // the group was signalled, so the shell may mention its sleep
    ensure!(logs.lines().any(|l| l == "bye"), "the log holds the last word: {logs:?}");
    let gone = c.signal_workload(SignalWorkloadRequest { signal: 15 }).await;
    ensure!(gone.is_err_and(|e| e.code() == Code::FailedPrecondition));

    exec(&mut c, sh("echo kept > /kept; (setsid sleep 1000 &)"), vec![]).await?;
    let since = Instant::now();
    c.shutdown(ShutdownRequest { grace_ms: 1000 }).await?;
    let status = machine.wait_exit(Duration::from_secs(10))?;
    eprintln!("shutdown took {} ms", since.elapsed().as_millis());
    ensure!(status.success(), "{status}");
    let found = std::process::Command::new("/sbin/debugfs")
        .args(["-R", "cat /upper/kept"])
        .arg(machine.overlay())
        .output()?;
    ensure!(found.stdout == b"kept\n", "what was written is on the disk: {found:?}");
    let check =
        std::process::Command::new("/sbin/e2fsck").args(["-n", "-f"]).arg(machine.overlay()).output()?;
    ensure!(check.status.success(), "the disk is clean: {}", String::from_utf8_lossy(&check.stdout));
    Ok(())
}

#[test]
fn guest_agent_binary_stays_below_the_size_limit() -> Result<()> {
    let initrd = machine::guest_image()?.join("initrd");
    let Ok(bytes) = std::fs::read(&initrd) else {
        ensure!(std::env::var("CI").as_deref() != Ok("true"), "{} is not there", initrd.display());
        eprintln!("skipped: {} is not there: run `cargo xtask guest-image`", initrd.display());
        return Ok(());
    };
    // newc: 110 bytes of header, the name, both padded to 4; the file size is the seventh field.
    let at = bytes.windows(5).position(|w| w == b"init\0").context("no /init")?;
    let size = std::str::from_utf8(bytes.get(at - 110 + 54..at - 110 + 62).context("no header")?)?;
    let size = u64::from_str_radix(size, 16)?;
    eprintln!("agent binary {} KiB", size / 1024);
    ensure!(size <= BINARY_MAX, "{size} bytes");
    Ok(())
}
