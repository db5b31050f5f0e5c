//! Groups that need a sandbox of their own: sysctls, networking, and the whole lifecycle of a pod.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_proto::cri::*;
use coracle_testkit::eventually_within;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::pod::{Pod, shell};
use crate::support::{Daemon, IMAGE, Node};

/// Runs all groups in one sandbox.
pub(crate) async fn rows_pass(daemon: &Daemon, node: &Node) {
    let sysctls: BTreeMap<String, String> = [("kernel.shm_rmid_forced", "1"), ("fs.mqueue.msg_max", "100")]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into();
    let dns_config = DnsConfig {
        servers: vec!["10.10.10.10".into()],
        searches: vec!["google.com".into()],
        options: vec!["ndots:8".into()],
    };
    let resources = LinuxContainerResources { memory_limit_in_bytes: 96 << 20, ..Default::default() };
    let linux =
        LinuxPodSandboxConfig { sysctls, resources: Some(resources), ..LinuxPodSandboxConfig::default() };
    let config = PodSandboxConfig {
        dns_config: Some(dns_config),
        hostname: "own-name".into(),
        port_mappings: vec![PortMapping { container_port: 80, host_port: 12000, ..PortMapping::default() }],
        linux: Some(linux),
        ..daemon.config("whole")
    };
    let pod = daemon.pod_of(config).await;
    whole_life_of_a_pod(&pod).await;
    runtime_should_support_safe_and_unsafe_sysctls(&pod).await;
    runtime_should_support_dns_config(&pod).await;
    runtime_should_support_hostname(&pod).await;
    runtime_should_support_port_of_a_container(&pod).await;
    let log = node.dir.path().join("logs/whole/main.log");
    assert!(log.exists(), "logs are the kubelet's");
}

/// Calls RunPodSandbox, CreateContainer, StartContainer, log, ExecSync, stop and removal.
async fn whole_life_of_a_pod(pod: &Pod) {
    let mut kubelet = pod.kubelet.clone();
    let image = Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() });
    let request = ImageStatusRequest { image, verbose: false };
    let image = kubelet.images.image_status(request).await.unwrap().into_inner().image.unwrap();
    let spec = ImageSpec { image: image.id.clone(), ..ImageSpec::default() };
    let config = ContainerConfig { image: Some(spec), ..shell("main", "echo started; exec sleep 1000") };
    let id = pod.run(config).await;
    eventually_within(Duration::from_secs(20), "it prints", async || {
        (pod.log(&pod.status(&id).await) == ["started"]).then_some(())
    })
    .await
    .unwrap();
    assert_eq!(pod.exec(&id, &["echo", "hello"]).await, ("hello\n".to_owned(), 0));
    let status = pod.status(&id).await;
    assert_eq!(status.image_id, image.id);
    pod.stop(&id, 0).await;
    assert_eq!(pod.status(&id).await.exit_code, 137);
    pod.remove(&id).await;
}

async fn runtime_should_support_safe_and_unsafe_sysctls(pod: &Pod) {
    let line = "cat /proc/sys/kernel/shm_rmid_forced /proc/sys/fs/mqueue/msg_max";
    assert_eq!(pod.output(shell("sysctls", line)).await.1, ["1", "100"]);
}

async fn runtime_should_support_dns_config(pod: &Pod) {
    let (_, text) = pod.output(shell("dns", "cat /etc/resolv.conf")).await;
    for line in ["nameserver 10.10.10.10", "search google.com", "options ndots:8"] {
        assert!(text.iter().any(|known| known == line), "{text:?}");
    }
}

async fn runtime_should_support_hostname(pod: &Pod) {
    assert_eq!(
        pod.output(shell("hostname", "hostname; cat /etc/hostname")).await.1,
        ["own-name", "own-name"]
    );
}

async fn runtime_should_support_port_of_a_container(pod: &Pod) {
    let id = pod.run(shell("web", "exec httpd -f -p 80 -h /www")).await;
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.id.clone(), verbose: false };
    let status =
        pod.kubelet.clone().runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap();
    let ip = status.network.unwrap().ip;
    let at_pod = eventually_within(Duration::from_secs(30), "the page", async || page((&ip, 80)).await);
    at_pod.await.unwrap();
    let at_host = eventually_within(Duration::from_secs(30), "the page at the host port", async || {
        page(("127.0.0.1", 12000)).await
    });
    at_host.await.unwrap();
    pod.remove(&id).await;
}

async fn page(at: (&str, u16)) -> Option<()> {
    let fetch = async {
        let mut stream = tokio::net::TcpStream::connect(at).await.ok()?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.ok()?;
        text.ends_with("hello\n").then_some(())
    };
    tokio::time::timeout(Duration::from_secs(5), fetch).await.ok()?
}
