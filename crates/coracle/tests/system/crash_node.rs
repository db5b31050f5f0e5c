//! The node daemon is killed with SIGKILL repeatedly in the middle of operations on real VMs: no guest dies, no second VMM
//! appears, nothing leaks.
//!
//! `CORACLE_CRASHES` is the number of kills, `CORACLE_SEED` the seed.

mod containers;
mod forging;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::support::{CORACLE, coracle_ok, node_tools, until, write_idle_image};
use coracle_hypervisor_testing::instances::{processes_of, vmms_of};
use coracle_proto::host as pb;
use coracle_testkit::{netns, tools};
use hyper_util::rt::TokioIo;
use pb::host_client::HostClient;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// State of a VM that the daemon has acknowledged, with the pid of the VMM while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Known {
    Absent,
    Running(u32),
    Paused(u32),
    Hibernated,
    Off,
    /// The last operation was cut off: both outcomes are correct.
    Open,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn start_node(state: &Path) -> Child {
    start_node_with(state, &[])
}

fn start_node_with(state: &Path, more: &[&str]) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(state.with_extension("log")).unwrap();
    Command::new(CORACLE)
        .args(["node", "--accelerator", "tcg", "--state"])
        .arg(state)
        .arg("--boot")
        .arg(tools::tools_dir().join("guest/current"))
        .args(more)
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

async fn connect(state: &Path) -> HostClient<Channel> {
    until("the node's socket", Duration::from_secs(30), || async {
        let path = state.join("host.sock");
        UnixStream::connect(&path).await.map_err(|e| format!("{e}; {}", end_of_log(state)))?;
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await;
        let mut client = channel.map(HostClient::new).map_err(|e| e.to_string())?;
        // A daemon that was killed between fork and exec of a VMM keeps its socket open a moment longer, in the child.
        client.list_vms(pb::ListVmsRequest {}).await.map_err(|e| e.to_string())?;
        Ok(client)
    })
    .await
}

/// Returns the last lines of the daemon's log.
fn end_of_log(state: &Path) -> String {
    let log = std::fs::read_to_string(state.with_extension("log")).unwrap_or_default();
    let lines: Vec<_> = log.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

pub(crate) async fn import(state: &Path, dir: &Path) {
    write_idle_image(dir);
    coracle_ok(state, &["image", "import", &format!("oci:{}:1", dir.display()), "localhost/idle:1"]).await;
}

/// Performs one operation of a user; returns the state after it was acknowledged.
async fn operate(client: &mut HostClient<Channel>, name: &str, known: &Known, choice: u8) -> Option<Known> {
    let vm = name.to_owned();
    let after = match known {
        Known::Absent => {
            let request = pb::CreateVmRequest {
                name: vm.clone(),
                image: "localhost/idle:1".to_owned(),
                vcpus: 1,
                memory_mib: 128,
                disk_mib: 64,
                idempotent: true,
                ..Default::default()
            };
            client.create_vm(request).await.ok()?;
            Known::Running(
                client
                    .start_vm(pb::StartVmRequest { vm, ..Default::default() })
                    .await
                    .ok()?
                    .into_inner()
                    .vmm_pid,
            )
        }
        Known::Off | Known::Hibernated if choice > 0 => Known::Running(
            client.start_vm(pb::StartVmRequest { vm, ..Default::default() }).await.ok()?.into_inner().vmm_pid,
        ),
        Known::Running(_) if choice == 1 => {
            client.stop_vm(pb::StopVmRequest { vm, grace_ms: Some(0), ..Default::default() }).await.ok()?;
            Known::Off
        }
        Known::Running(_) if choice == 2 => Known::Paused(
            client.pause_vm(pb::PauseVmRequest { vm, ..Default::default() }).await.ok()?.into_inner().vmm_pid,
        ),
        Known::Paused(_) if choice == 1 => Known::Running(
            client
                .resume_vm(pb::ResumeVmRequest { vm, ..Default::default() })
                .await
                .ok()?
                .into_inner()
                .vmm_pid,
        ),
        Known::Running(_) | Known::Paused(_) | Known::Hibernated if choice == 4 => {
            client
                .save_snapshot(pb::SaveSnapshotRequest { vm, name: String::new(), owner: None })
                .await
                .ok()?;
            known.clone()
        }
        Known::Running(_) | Known::Paused(_) if choice > 1 => {
            client.hibernate_vm(pb::HibernateVmRequest { vm, ..Default::default() }).await.ok()?;
            Known::Hibernated
        }
        Known::Running(_) | Known::Paused(_) | Known::Hibernated | Known::Off | Known::Open => {
            client.delete_vm(pb::DeleteVmRequest { vm, force: true, ..Default::default() }).await.ok()?;
            Known::Absent
        }
    };
    Some(after)
}

/// Checks that the daemon's state agrees with what it acknowledged before it was killed.
async fn check(client: &mut HostClient<Channel>, world: &mut BTreeMap<&str, Known>, round: u64) {
    for (name, known) in world.iter_mut() {
        let found = client
            .get_vm(pb::GetVmRequest { vm: (*name).to_owned(), exact: true, ..Default::default() })
            .await;
        match (&known, found) {
            (Known::Absent, found) => assert!(found.is_err(), "kill {round}: {name} was deleted and is back"),
            (Known::Running(pid) | Known::Paused(pid), found) => {
                let vm = found
                    .unwrap_or_else(|e| panic!("kill {round}: {name} ran and is gone: {e}"))
                    .into_inner();
                assert_eq!(
                    vm.vmm_pid, *pid,
                    "kill {round}: the VMM of {name} is another one: {}",
                    vm.message
                );
                let running = matches!(known, Known::Running(_));
                let state = if running { pb::VmState::Running } else { pb::VmState::Paused };
                assert_eq!(vm.state(), state, "kill {round}: {name}: {}", vm.message);
            }
            (Known::Off | Known::Hibernated, found) => {
                let vm = found
                    .unwrap_or_else(|e| panic!("kill {round}: {name} was off and is gone: {e}"))
                    .into_inner();
                assert_eq!(vm.vmm_pid, 0, "kill {round}: {name} was stopped and runs");
                let asleep = vm.state() == pb::VmState::Hibernated;
                assert_eq!(asleep, *known == Known::Hibernated, "kill {round}: {name}: {}", vm.message);
            }
            (Known::Open, Err(_)) => *known = Known::Absent,
            (Known::Open, Ok(_)) => {
                // An acknowledged operation continues; removing the VM ends it.
                client
                    .delete_vm(pb::DeleteVmRequest {
                        vm: (*name).to_owned(),
                        force: true,
                        ..Default::default()
                    })
                    .await
                    .unwrap();
                *known = Known::Absent;
            }
        }
    }
}

fn vmms(state: &Path, run: &Path) -> Vec<String> {
    let found = processes_of(state);
    let line = |p: &coracle_hypervisor::ProcessId| {
        std::fs::read_to_string(format!("/proc/{}/cmdline", p.pid)).unwrap_or_default().replace('\0', " ")
    };
    // A template that is being taken and a pooled clone are not VMs: the next daemon ends them.
    let unassigned: Vec<_> =
        ["pool", "template"].into_iter().flat_map(|kind| vmms_of(state, run, kind)).collect();
    let is_vm = |p: &&coracle_hypervisor::ProcessId| !unassigned.contains(p);
    found.iter().filter(is_vm).map(line).filter(|line| line.contains("qemu-system")).collect()
}

#[test]
fn guests_survive_random_kills_of_the_daemon() {
    netns::run_within(Duration::from_secs(1800), || async {
        if node_tools().is_none() {
            return;
        }
        let kills = number("CORACLE_CRASHES", 5);
        let seed = number("CORACLE_SEED", 7);
        let mut random = StdRng::seed_from_u64(seed);
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let mut node = start_node(&state);
        let mut client = connect(&state).await;
        let run = std::fs::read_link(state.join("host.sock")).unwrap().parent().unwrap().to_owned();
        import(&state, &dir.path().join("layout")).await;
        let mut world: BTreeMap<_, _> = NAMES.map(|name| (name, Known::Absent)).into();
        for round in 0..kills {
            // An operation is in progress at the moment of the kill, at a random point.
            let name = NAMES[random.random_range(0..NAMES.len())];
            let before = world[name].clone();
            let moment = Duration::from_millis(random.random_range(0..4000));
            let outcome =
                timeout(moment, operate(&mut client, name, &before, random.random_range(0..5))).await;
            world.insert(name, outcome.ok().flatten().unwrap_or(Known::Open));
            node.kill().await.unwrap(); // SIGKILL, and waits
            node = start_node(&state);
            client = connect(&state).await;
            check(&mut client, &mut world, round).await;
            let processes = vmms(&state, &run);
            let running =
                world.values().filter(|k| matches!(k, Known::Running(_) | Known::Paused(_))).count();
            assert_eq!(processes.len(), running, "kill {round}: {processes:?} for {world:?}");
        }
        for name in NAMES {
            let _absent = client
                .delete_vm(pb::DeleteVmRequest { vm: name.to_owned(), force: true, ..Default::default() })
                .await;
        }
        assert!(vmms(&state, &run).is_empty());
        assert_eq!(std::fs::read_dir(state.join("vms")).unwrap().count(), 0, "no file is left");
        for snapshot in
            client.list_snapshots(pb::ListSnapshotsRequest {}).await.unwrap().into_inner().snapshots
        {
            client.delete_snapshot(pb::DeleteSnapshotRequest { name: snapshot.name }).await.unwrap();
        }
        assert_eq!(
            std::fs::read_dir(state.join("snapshots")).unwrap().count(),
            0,
            "no half snapshot is left"
        );
        leaves_nothing(node, &state, &run).await;
        println!("{{\"scenario\":\"crash_node\",\"seed\":{seed},\"kills\":{kills},\"ok\":true}}");
    });
}

/// Kills the daemon once more, and checks that `down` removes everything.
async fn leaves_nothing(mut node: Child, state: &Path, run: &Path) {
    node.kill().await.unwrap();
    coracle_ok(state, &["down"]).await;
    let interfaces = coracle_testkit::leaks::interfaces();
    let taps: Vec<_> = interfaces.into_iter().filter(|i| i.starts_with("ct")).collect();
    assert!(taps.is_empty(), "taps are left: {taps:?}");
    assert!(processes_of(state).is_empty() && processes_of(run).is_empty(), "no VMM is left, whosever");
}

/// Upper bound of the time from a start request to its answer, with a pooled clone.
const CLAIM_LIMIT: Duration = Duration::from_millis(120);

#[test]
fn daemon_killed_during_a_claim_leaves_no_pooled_vmm() {
    netns::run_within(Duration::from_secs(1800), || async {
        if node_tools().is_none() {
            return;
        }
        let kills = u32::try_from(number("CORACLE_CRASHES", 5)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let mut node = start_node(&state);
        let mut client = connect(&state).await;
        let run = std::fs::read_link(state.join("host.sock")).unwrap().parent().unwrap().to_owned();
        import(&state, &dir.path().join("layout")).await;
        let mut taken = 0;
        for round in 0..kills {
            wait_until_pooled(&mut client).await;
            // A later moment of the claim in every round.
            let moment = CLAIM_LIMIT * round / kills;
            let begun = timeout(moment, operate(&mut client, "a", &Known::Absent, 0)).await;
            node.kill().await.unwrap();
            node = start_node(&state);
            client = connect(&state).await;
            let mut world = BTreeMap::from([("a", begun.ok().flatten().unwrap_or(Known::Open))]);
            if client
                .get_vm(pb::GetVmRequest { vm: "a".into(), exact: true, ..Default::default() })
                .await
                .is_ok()
            {
                // An interrupted start can be repeated, and yields exactly one VM.
                let vm = client
                    .start_vm(pb::StartVmRequest { vm: "a".into(), ..Default::default() })
                    .await
                    .unwrap()
                    .into_inner();
                taken += u32::from(vm.pooled);
                assert_eq!(vmms(&state, &run).len(), 1, "kill {round}, after {moment:?}");
                coracle_ok(&state, &["exec", "a", "/bin/busybox", "true"]).await;
                world.insert("a", Known::Open);
            }
            check(&mut client, &mut world, round.into()).await;
            assert_eq!(vmms(&state, &run), Vec::<String>::new(), "kill {round}, after {moment:?}");
        }
        leaves_nothing(node, &state, &run).await;
        println!("{{\"scenario\":\"crash_warm_pool\",\"kills\":{kills},\"taken\":{taken},\"ok\":true}}");
    });
}

/// Takes a template unless it exists, and waits for a pooled clone of it.
async fn wait_until_pooled(client: &mut HostClient<Channel>) {
    let warm = pb::WarmTemplateRequest { vcpus: 1, memory_mib: 128, disk_mib: 64, ..Default::default() };
    client.warm_template(warm).await.unwrap();
    let client = client.clone();
    until("a pooled clone", Duration::from_secs(60), move || {
        let mut client = client.clone();
        async move {
            let all = client.list_templates(pb::ListTemplatesRequest {}).await.map_err(|e| e.to_string())?;
            let there = all.into_inner().templates.iter().any(|template| template.pooled);
            there.then_some(()).ok_or_else(|| "no clone is pooled".to_owned())
        }
    })
    .await;
}

/// Returns the mounts of the guest.
async fn mounts(state: &Path, vm: &str) -> String {
    coracle_ok(state, &["exec", vm, "/bin/busybox", "cat", "/proc/mounts"]).await
}

#[test]
fn volume_changes_survive_random_kills_of_the_daemon() {
    netns::run_within(Duration::from_secs(1800), || async {
        if node_tools().is_none() {
            return;
        }
        let kills = number("CORACLE_CRASHES", 5);
        let seed = number("CORACLE_SEED", 7);
        let mut random = StdRng::seed_from_u64(seed);
        let dir = tempfile::tempdir().unwrap();
        let (state, shared) = (dir.path().join("state"), dir.path().join("shared"));
        for dir in [&state, &shared] {
            std::fs::create_dir(dir).unwrap();
        }
        let start = || start_node_with(&state, &["--volume-dir", shared.to_str().unwrap()]);
        let mut node = start();
        let mut client = connect(&state).await;
        import(&state, &dir.path().join("layout")).await;
        let Some(Known::Running(pid)) = operate(&mut client, "a", &Known::Absent, 0).await else {
            panic!("the VM does not start")
        };
        let data = pb::Volume { source: "data".into(), size_mib: 32, ..Default::default() };
        let folder = pb::Volume { source: shared.to_str().unwrap().into(), ..Default::default() };
        // Both names are derived from the sources.
        let wishes = [("data", data), ("shared", folder)];
        let mut attached: BTreeMap<&str, bool> = wishes.iter().map(|(name, _)| (*name, false)).collect();
        for round in 0..kills {
            let (name, wish) = &wishes[random.random_range(0..wishes.len())];
            let (vm, volume) = ("a".to_owned(), (*name).to_owned());
            let toggle = async {
                if attached[name] {
                    client.detach_volume(pb::DetachVolumeRequest { vm, volume }).await
                } else {
                    let volume = Some(wish.clone());
                    client.attach_volume(pb::AttachVolumeRequest { vm, volume }).await
                }
            };
            let outcome = timeout(Duration::from_millis(random.random_range(0..400)), toggle).await;
            let outcome = outcome.map(|done| done.unwrap_or_else(|e| panic!("kill {round}: {name}: {e}")));
            node.kill().await.unwrap();
            node = start();
            client = connect(&state).await;
            let vm = client
                .get_vm(pb::GetVmRequest { vm: "a".into(), exact: true, ..Default::default() })
                .await
                .unwrap()
                .into_inner();
            assert_eq!((vm.vmm_pid, vm.state()), (pid, pb::VmState::Running), "kill {round}: {}", vm.message);
            let has = settled(&mut client, &vm.id).await.iter().any(|v| v.name == *name);
            if outcome.is_ok() {
                assert_eq!(has, !attached[name], "kill {round}: what was acknowledged of {name} holds");
            }
            attached.insert(name, has);
            let seen = mounts(&state, "a").await;
            for (name, has) in &attached {
                let log = std::fs::read_to_string(state.with_extension("log")).unwrap_or_default();
                let last: Vec<_> = log.lines().rev().filter(|line| line.contains("volume")).take(5).collect();
                let mounted = seen.contains(&format!(" /mnt/{name} "));
                assert_eq!(mounted, *has, "kill {round}: {name}: {seen}\n{last:#?}");
            }
        }
        client
            .delete_vm(pb::DeleteVmRequest { vm: "a".into(), force: true, ..Default::default() })
            .await
            .unwrap();
        // The disk is free for another VM.
        operate(&mut client, "b", &Known::Absent, 0).await.unwrap();
        for (_, wish) in wishes {
            let request = pb::AttachVolumeRequest { vm: "b".into(), volume: Some(wish) };
            client.attach_volume(request).await.unwrap();
        }
        client
            .delete_vm(pb::DeleteVmRequest { vm: "b".into(), force: true, ..Default::default() })
            .await
            .unwrap();
        assert_eq!(std::fs::read_dir(state.join("vms")).unwrap().count(), 0, "no file is left");
        node.kill().await.unwrap();
        coracle_ok(&state, &["down"]).await;
        println!("{{\"scenario\":\"crash_node_volumes\",\"seed\":{seed},\"kills\":{kills},\"ok\":true}}");
    });
}

/// Returns the volumes of a VM once its task has settled interrupted changes.
async fn settled(client: &mut HostClient<Channel>, id: &str) -> Vec<pb::Volume> {
    until("no volume is half there", Duration::from_secs(60), || {
        let (mut client, vm) = (client.clone(), id.to_owned());
        async move {
            let look = pb::GetVmRequest { vm: vm.clone(), exact: true, ..Default::default() };
            let seen = client.get_vm(look.clone()).await.map_err(|e| e.to_string())?.into_inner();
            if !seen.agent_connected {
                return Err("the agent does not answer yet".to_owned());
            }
            // The VM's task handles one request after the other: when it answers, the work that it began with the session is
            // done.
            let nothing = pb::DetachVolumeRequest { vm, volume: "none".into() };
            let refused = client.detach_volume(nothing).await.expect_err("the volume does not exist");
            match refused.code() {
                tonic::Code::NotFound => {
                    client.get_vm(look).await.map(|vm| vm.into_inner().volumes).map_err(|e| e.to_string())
                }
                _ => Err(refused.to_string()),
            }
        }
    })
    .await
}
