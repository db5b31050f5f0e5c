//! The node daemon is killed with SIGKILL while containers of a VM are created, started, stopped and removed: acknowledged
//! changes hold, a running container stays the same, and its log has every line exactly once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use coracle_proto::cri::*;
use coracle_proto::host as pb;
use coracle_testkit::{elapse, netns};
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::{connect, import, leaves_nothing, number, start_node_with, vmms};
use crate::support::{node_tools, until};

const IMAGE: &str = "localhost/idle:1";
/// Shell script that prints consecutive numbers, one per line, without end.
const COUNTER: &str = "i=0; while :; do echo line $i; i=$((i+1)); /bin/busybox sleep 0.02; done";

/// Acknowledged state of the container that is created and removed.
#[derive(Clone, Debug)]
enum Known {
    Absent,
    Created(String),
    Running(String),
    Exited(String),
    /// The last operation was cut off.
    Open,
}

/// The node and its CRI socket.
struct World {
    state: PathBuf,
    socket: PathBuf,
    logs: PathBuf,
}

impl World {
    fn start(&self) -> Child {
        start_node_with(&self.state, &["--cri-listen", self.socket.to_str().unwrap()])
    }

    async fn cri(&self) -> RuntimeServiceClient<Channel> {
        until("the CRI socket", Duration::from_secs(30), || async {
            let path = self.socket.clone();
            UnixStream::connect(&path).await.map_err(|e| e.to_string())?;
            let connector = tower::service_fn(move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            let channel = Endpoint::from_static("http://cri").connect_with_connector(connector).await;
            Ok(RuntimeServiceClient::new(channel.map_err(|e| e.to_string())?))
        })
        .await
    }

    fn sandbox(&self) -> PodSandboxConfig {
        let metadata = PodSandboxMetadata {
            name: "pod".into(),
            uid: "1".into(),
            namespace: "default".into(),
            attempt: 0,
        };
        PodSandboxConfig {
            metadata: Some(metadata),
            hostname: "pod".into(),
            log_directory: self.logs.display().to_string(),
            ..PodSandboxConfig::default()
        }
    }

    async fn create(
        &self,
        cri: &mut RuntimeServiceClient<Channel>,
        sandbox: &str,
        (name, attempt): (&str, u32),
        script: &str,
    ) -> Result<String, Status> {
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: name.into(), attempt }),
            image: Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() }),
            command: ["/bin/busybox", "sh", "-c", script].map(str::to_owned).to_vec(),
            log_path: format!("{name}.log"),
            ..ContainerConfig::default()
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.into(),
            config: Some(config),
            sandbox_config: Some(self.sandbox()),
        };
        Ok(cri.create_container(request).await?.into_inner().container_id)
    }

    /// Performs one operation on that container; returns the state after it was acknowledged.
    async fn operate(
        &self,
        cri: &mut RuntimeServiceClient<Channel>,
        sandbox: &str,
        known: &Known,
        round: u32,
    ) -> Result<Known, Status> {
        Ok(match known.clone() {
            Known::Absent | Known::Open => {
                Known::Created(self.create(cri, sandbox, ("job", round), "/bin/busybox sleep 1000").await?)
            }
            Known::Created(id) => {
                cri.start_container(StartContainerRequest { container_id: id.clone() }).await?;
                Known::Running(id)
            }
            Known::Running(id) => {
                cri.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 }).await?;
                Known::Exited(id)
            }
            Known::Exited(id) => {
                cri.remove_container(RemoveContainerRequest { container_id: id }).await?;
                Known::Absent
            }
        })
    }
}

async fn state_of(cri: &mut RuntimeServiceClient<Channel>, id: &str) -> Option<ContainerState> {
    let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
    let status = cri.container_status(request).await.ok()?.into_inner().status?;
    Some(status.state())
}

/// Checks that the daemon's state agrees with what it acknowledged before it was killed.
async fn check(cri: &mut RuntimeServiceClient<Channel>, known: &mut Known, counter: &str, round: u32) {
    let listed = cri.list_containers(ListContainersRequest::default()).await.unwrap().into_inner();
    let listed = listed.decode_containers().unwrap();
    let others: Vec<_> = listed.iter().filter(|one| one.id != counter).collect();
    assert!(others.len() <= 1, "kill {round}: {others:?}");
    assert_eq!(state_of(cri, counter).await, Some(ContainerState::ContainerRunning), "kill {round}");
    match &*known {
        Known::Absent => assert!(others.is_empty(), "kill {round}: it was removed and is back: {others:?}"),
        Known::Created(id) | Known::Running(id) | Known::Exited(id) => {
            let want = match known {
                Known::Created(_) => ContainerState::ContainerCreated,
                Known::Running(_) => ContainerState::ContainerRunning,
                _ => ContainerState::ContainerExited,
            };
            assert_eq!(state_of(cri, id).await, Some(want), "kill {round}: {known:?}");
        }
        Known::Open => {
            for one in others {
                cri.remove_container(RemoveContainerRequest { container_id: one.id.clone() }).await.unwrap();
            }
            *known = Known::Absent;
        }
    }
}

/// Returns the numbers that the counter has printed, from its log (CRI, "Container Log"): a record `P` is continued.
fn counted(log: &Path) -> Vec<u64> {
    let mut text = String::new();
    for record in std::fs::read_to_string(log).unwrap_or_default().lines() {
        let mut fields = record.splitn(4, ' ').skip(2);
        let (Some(flag), Some(rest)) = (fields.next(), fields.next()) else { continue };
        text.push_str(rest);
        text.extend((flag == "F").then_some('\n'));
    }
    text.lines().filter_map(|line| line.strip_prefix("line ")?.parse().ok()).collect()
}

#[test]
fn containers_survive_kills_of_the_daemon() {
    netns::run_within(Duration::from_secs(1800), || async {
        if node_tools().is_none() {
            return;
        }
        let kills = u32::try_from(number("CORACLE_CRASHES", 5)).unwrap();
        let seed = number("CORACLE_SEED", 7);
        let mut random = StdRng::seed_from_u64(seed);
        let dir = tempfile::tempdir().unwrap();
        let [state, logs] = ["state", "logs"].map(|name| dir.path().join(name));
        for dir in [&state, &logs] {
            std::fs::create_dir(dir).unwrap();
        }
        let world = World { state: state.clone(), socket: dir.path().join("cri.sock"), logs: logs.clone() };
        let mut node = world.start();
        connect(&state).await;
        let run = std::fs::read_link(state.join("host.sock")).unwrap().parent().unwrap().to_owned();
        import(&state, &dir.path().join("layout")).await;
        let mut cri = world.cri().await;
        let request = RunPodSandboxRequest { config: Some(world.sandbox()), runtime_handler: String::new() };
        let sandbox = cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        let counter = world.create(&mut cri, &sandbox, ("counter", 0), COUNTER).await.unwrap();
        cri.start_container(StartContainerRequest { container_id: counter.clone() }).await.unwrap();
        let vmm = vmms(&state, &run);
        assert_eq!(vmm.len(), 1);
        let mut known = Known::Absent;
        for round in 1..=kills {
            let moment = Duration::from_millis(random.random_range(0..600));
            let done = timeout(moment, world.operate(&mut cri, &sandbox, &known, round)).await;
            known = done.map_or(Known::Open, |done| done.unwrap_or_else(|e| panic!("kill {round}: {e}")));
            node.kill().await.unwrap();
            // The guest prints while the daemon is down.
            elapse(Duration::from_millis(random.random_range(0..200))).await;
            node = world.start();
            let client = connect(&state).await;
            cri = world.cri().await;
            let agent = || async {
                let vms = client.clone().list_vms(pb::ListVmsRequest {}).await.map_err(|e| e.to_string())?;
                let connected = vms.into_inner().vms.iter().all(|vm| vm.agent_connected);
                connected.then_some(()).ok_or_else(|| "the agent does not answer yet".to_owned())
            };
            until("the session of the VM", Duration::from_secs(60), agent).await;
            check(&mut cri, &mut known, &counter, round).await;
            assert_eq!(vmms(&state, &run), vmm, "kill {round}: the VMM is the same one");
        }
        let stop = StopContainerRequest { container_id: counter.clone(), timeout: 0 };
        cri.stop_container(stop).await.unwrap();
        let numbers = counted(&logs.join("counter.log"));
        let wanted: Vec<_> = (0..numbers.len() as u64).collect();
        assert_eq!(numbers, wanted, "every line once, in order");
        assert!(numbers.len() > 20, "{numbers:?}");
        cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await.unwrap();
        cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
        assert_eq!(std::fs::read_dir(state.join("vms")).unwrap().count(), 0, "no file is left");
        leaves_nothing(node, &state, &run).await;
        println!("{{\"scenario\":\"crash_containers\",\"seed\":{seed},\"kills\":{kills},\"ok\":true}}");
    });
}
